// A whole verified decode step of one KV head, against dense attention over the same float16 rows and a plain read of
// them, in turns within each iteration.
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

/// Arguments: tokens, channels of a key and of a value, query heads of the group, epsilon in thousandths.
template <class Planner>
struct problem {
    problem(const benchmark::State& state, const verkv::step_policies& policies) {
        const auto n = static_cast<std::size_t>(state.range(0));
        const auto width = static_cast<std::size_t>(state.range(1));
        const auto group = static_cast<std::size_t>(state.range(2));
        promise.epsilon = static_cast<double>(state.range(3)) / 1000;
        auto options = example::peaked_attention();
        options.shape = {group, 1, width, width, 0};
        options.prefill_tokens = n;
        options.decode_tokens = 32;
        options.query_stride = n / 256;
        options.last_queries = 0;
        options.shared = 0.4;
        trace = example::synthetic_trace<half>(options);
        cache = std::make_unique<layer>(verkv::cache_config{.shape = trace.shape,
                                                            .max_tokens = trace.tokens,
                                                            .host_rows = trace.tokens,
                                                            .resident_rows = trace.tokens,
                                                            .staging_rows = trace.tokens / 4},
                                        verkv::rope_pair_sketch({.key_dim = width}), verkv::cpu{}, Planner{},
                                        verkv::exact_for_shortlist{}, verkv::denominator{}, policies);
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
        rows.resize(n * 2 * width);
        for (std::size_t i = 0; i < n; ++i) {
            std::copy_n(keys.row(i, 0), width, rows.begin() + static_cast<std::ptrdiff_t>(i * width));
            std::copy_n(values.row(i, 0), width, rows.begin() + static_cast<std::ptrdiff_t>((n + i) * width));
        }
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
            const auto& head = report.kv_head(0, 0);
            sketch.push_back(head.sketch_seconds);
            decide.push_back(head.decide_seconds);
            fetch.push_back(head.fetch_seconds);
            attend.push_back(head.attend_seconds);
            fetched += static_cast<double>(head.rows_fetched);
            rounds += static_cast<double>(head.rounds);
        });
        whole.push_back(seconds);
        state.SetIterationTime(seconds);
        for (std::size_t h = 0; h < shape.query_heads; ++h) {
            for (std::size_t c = 0; c < shape.key_dim; ++c) {
                queries[h * shape.key_dim + c] = verkv::to_float(q[h][c]);
            }
        }
        const auto stride = static_cast<std::ptrdiff_t>(shape.key_dim);  // value_dim, too
        dense.push_back(seconds_of([&] {
            verkv::dense_attention(
                verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(queries), shape.key_dim),
                shape.logit_scale(), verkv::rows<half>{p.rows.data(), stride, n, shape.key_dim, nullptr},
                verkv::rows<half>{p.rows.data() + n * shape.key_dim, stride, n, shape.value_dim, nullptr}, workspace,
                {dense_output.data(), shape.query_heads, shape.value_dim, static_cast<std::ptrdiff_t>(shape.value_dim)},
                lse);
        }));
        read.push_back(seconds_of([&] { benchmark::DoNotOptimize(plain_read(p.rows)); }));
    }
    const double dense_ms = 1e3 * median(dense);
    state.counters["rows_%"] = 100 * fetched / static_cast<double>(n) / static_cast<double>(whole.size());
    state.counters["rounds"] = rounds / static_cast<double>(whole.size());
    state.counters["sketch_ms"] = 1e3 * median(sketch);
    state.counters["decide_ms"] = 1e3 * median(decide);
    state.counters["fetch_ms"] = 1e3 * median(fetch);
    state.counters["attend_ms"] = 1e3 * median(attend);
    state.counters["step_ms"] = 1e3 * median(whole);
    state.counters["dense_ms"] = dense_ms;
    state.counters["step/dense"] = 1e3 * median(whole) / dense_ms;
    state.counters["dense/read"] = dense_ms / (1e3 * median(read));
}

void axes(benchmark::internal::Benchmark* b) {
    b->ArgNames({"n", "d", "G", "eps"})->UseManualTime()->Unit(benchmark::kMillisecond);
    for (const std::int64_t n : {4096, 32768, 131072}) {
        for (const std::int64_t d : {64, 128}) {
            for (const std::int64_t group : {1, 4}) {
                b->Args({n, d, group, 50});
            }
        }
    }
    b->Args({32768, 128, 4, 100});
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
