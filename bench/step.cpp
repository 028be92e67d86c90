// A whole verified decode step of a layer, against dense attention over the same float16 rows and a plain read of them,
// in turns within each iteration. Times and rows are means of its KV heads.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <ctime>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "common/synthetic.hpp"
#include "plain_read.hpp"
#include "verkv/verkv.hpp"

namespace {

using verkv::half;

/// Arguments: tokens, channels of a key and of a value, query heads of the group, epsilon in thousandths, KV heads, the
/// sketch's share of the channel pairs in per cent, its bits.
template <class Planner>
struct problem {
    problem(const benchmark::State& state, const verkv::step_policies& policies) {
        const auto n = static_cast<std::size_t>(state.range(0));
        const auto width = static_cast<std::size_t>(state.range(1));
        const auto group = static_cast<std::size_t>(state.range(2));
        promise.epsilon = static_cast<double>(state.range(3)) / 1000;
        const auto kv_heads = static_cast<std::size_t>(state.range(4));
        auto options = example::peaked_attention();
        options.shape = {group * kv_heads, kv_heads, width, width, 0};
        options.prefill_tokens = n;
        options.decode_tokens = 32;
        options.query_stride = n / 256;
        options.last_queries = 0;
        options.shared = 0.4;
        trace = example::synthetic_trace<half>(options);
        cache = std::make_unique<layer>(
            verkv::cache_config{.shape = trace.shape,
                                .max_tokens = trace.tokens,
                                .host_rows = trace.tokens * kv_heads,
                                .resident_rows = trace.tokens * kv_heads,
                                .staging_rows = trace.tokens / 4 * kv_heads},
            verkv::rope_pair_sketch({.key_dim = width,
                                     .bits = static_cast<unsigned>(state.range(6)),
                                     .pair_fraction = static_cast<double>(state.range(5)) / 100}),
            verkv::cpu{}, Planner{}, verkv::exact_for_shortlist{}, verkv::denominator{}, policies);
        request = cache->open(1);
        std::vector<verkv::position_t> positions(trace.tokens);
        std::iota(positions.begin(), positions.end(), verkv::position_t{0});
        const auto keep = trace.prompt_query_rows(n / 256);
        const auto prompt = example::prompt_of(trace, keep);
        auto keys = trace.keys();
        auto values = trace.values();
        keys.tokens = values.tokens = n;
        cache->prefill(request, keys, values, std::span(positions).first(n));
        cache->compress(request, verkv::largest_attention{.stride = n / 256}, {}, prompt.view().queries,
                        prompt.query_positions);
        // Dense attention reads rows laid out as the cache lays out resident ones: keys, then values.
        rows.resize(kv_heads * n * 2 * width);
        for (std::size_t kv = 0; kv < kv_heads; ++kv) {
            const auto to = rows.begin() + static_cast<std::ptrdiff_t>(kv * n * 2 * width);
            for (std::size_t i = 0; i < n; ++i) {
                std::copy_n(keys.row(i, kv), width, to + static_cast<std::ptrdiff_t>(i * width));
                std::copy_n(values.row(i, kv), width, to + static_cast<std::ptrdiff_t>((n + i) * width));
            }
        }
    }

    void attend_densely(std::size_t kv, std::span<const float> queries, verkv::attend_workspace& workspace,
                        std::span<float> output, std::span<float> lse) const {
        const std::size_t n = trace.prefill_tokens;
        const std::size_t width = trace.shape.key_dim;  // value_dim, too
        const std::size_t group = trace.shape.query_heads / trace.shape.kv_heads;
        const auto stride = static_cast<std::ptrdiff_t>(width);
        const half* const keys = rows.data() + kv * n * 2 * width;
        verkv::dense_attention(verkv::cpu{},
                               verkv::contiguous_rows(queries.subspan(kv * group * width, group * width), width),
                               trace.shape.logit_scale(), verkv::rows<half>{keys, stride, n, width, nullptr},
                               verkv::rows<half>{keys + n * width, stride, n, width, nullptr}, workspace,
                               verkv::matrix_of(output.subspan(kv * group * width, group * width), group, width),
                               lse.subspan(kv * group, group));
    }

    using layer = verkv::layer_cache<half, verkv::rope_pair_sketch, Planner>;
    example::trace<half> trace;
    std::unique_ptr<layer> cache;
    verkv::request_id request;
    std::vector<half> rows;
    verkv::tolerance promise;
};

/// Of the processor, not of the clock on the wall: what else the machine does lengthens long runs more than short ones.
double seconds_of(auto&& f) {
    const std::clock_t start = std::clock();
    f();
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

struct head_times {
    double sketch = 0, decide = 0, fetch = 0, attend = 0;
};

double median(std::vector<double>& x) {
    const auto middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
    std::nth_element(x.begin(), middle, x.end());
    return *middle;
}

template <class Planner>
void step(benchmark::State& state, const verkv::step_policies& policies) {
    problem<Planner> p(state, policies);
    const auto& shape = p.trace.shape;
    const std::size_t n = p.trace.prefill_tokens;
    std::vector<float> output(shape.query_heads * shape.value_dim);
    std::vector<float> dense_output(output.size());
    std::vector<float> lse(shape.query_heads);
    std::vector<float> queries(shape.query_heads * shape.key_dim);
    verkv::attend_workspace workspace;
    std::vector<double> whole, dense, read, sketch, decide, fetch, attend;
    double fetched = 0;
    double rounds = 0;
    std::size_t turn = 0;
    for (auto _ : state) {
        const std::size_t row = p.trace.decode_row(turn++ % p.trace.decode_steps());
        const verkv::rows<half> q = p.trace.queries().token(row);
        const verkv::decode_item<half> item{p.request, q, output, lse};
        p.cache->release_staging(p.request);  // every fetched row is copied: the worst case
        const double seconds = seconds_of([&] {
            const auto& report = p.cache->decode(item, p.promise);
            head_times all;
            for (std::size_t kv = 0; kv < shape.kv_heads; ++kv) {
                const auto& head = report.kv_head(0, kv);
                all.sketch += head.sketch_seconds;
                all.decide += head.decide_seconds;
                all.fetch += head.fetch_seconds;
                all.attend += head.attend_seconds;
                fetched += static_cast<double>(head.rows_fetched);
                rounds += static_cast<double>(head.rounds);
            }
            sketch.push_back(all.sketch);
            decide.push_back(all.decide);
            fetch.push_back(all.fetch);
            attend.push_back(all.attend);
        });
        whole.push_back(seconds);
        state.SetIterationTime(seconds);
        for (std::size_t h = 0; h < shape.query_heads; ++h) {
            for (std::size_t c = 0; c < shape.key_dim; ++c) {
                queries[h * shape.key_dim + c] = verkv::to_float(q[h][c]);
            }
        }
        dense.push_back(seconds_of([&] {
            for (std::size_t kv = 0; kv < shape.kv_heads; ++kv) {
                p.attend_densely(kv, queries, workspace, dense_output, lse);
            }
        }));
        read.push_back(seconds_of([&] { benchmark::DoNotOptimize(plain_read(p.rows)); }));
    }
    const double steps = static_cast<double>(whole.size()) * static_cast<double>(shape.kv_heads);
    const auto ms_of = [&](std::vector<double>& x) { return 1e3 * median(x) / static_cast<double>(shape.kv_heads); };
    const double dense_ms = ms_of(dense);
    const double step_ms = ms_of(whole);
    state.counters["rows_%"] = 100 * fetched / static_cast<double>(n) / steps;
    state.counters["rounds"] = rounds / steps;
    state.counters["sketch_ms"] = ms_of(sketch);
    state.counters["decide_ms"] = ms_of(decide);
    state.counters["fetch_ms"] = ms_of(fetch);
    state.counters["attend_ms"] = ms_of(attend);
    state.counters["step_ms"] = step_ms;
    state.counters["dense_ms"] = dense_ms;
    state.counters["step/dense"] = step_ms / dense_ms;
    state.counters["dense/read"] = dense_ms / ms_of(read);
}

void axes(benchmark::internal::Benchmark* b) {
    b->ArgNames({"n", "d", "G", "eps", "KV", "pairs", "bits"})->UseManualTime()->Unit(benchmark::kMillisecond);
    for (const std::int64_t n : {4096, 32768, 131072}) {
        for (const std::int64_t d : {64, 128}) {
            for (const std::int64_t group : {1, 4}) {
                b->Args({n, d, group, 50, 1, 50, 2});
            }
        }
    }
    b->Args({32768, 128, 4, 100, 1, 50, 2});
    // As many KV heads as a model has: rows come from memory, not from the last-level cache.
    b->Args({32768, 128, 4, 50, 8, 50, 2});
    b->Args({32768, 128, 4, 100, 8, 50, 2});
    for (const std::int64_t group : {1, 4}) {  // the paper's sketch, and a finer one
        b->Args({32768, 128, group, 50, 1, 25, 2});
        b->Args({32768, 128, group, 50, 1, 50, 4});
    }
    b->Args({32768, 128, 4, 100, 1, 25, 2});
    b->Args({32768, 128, 4, 50, 8, 25, 2});
}

constexpr verkv::step_policies unchecked{.check = {.rounds = 0}};

void greedy(benchmark::State& state) {
    step<verkv::greedy<>>(state, unchecked);
}
void water_filling(benchmark::State& state) {
    step<verkv::water_filling<>>(state, unchecked);
}
void water_filling_checked(benchmark::State& state) {
    step<verkv::water_filling<>>(state, {});
}
BENCHMARK(greedy)->Apply(axes);
BENCHMARK(water_filling)->Apply(axes);
BENCHMARK(water_filling_checked)->Apply(axes);

}  // namespace
