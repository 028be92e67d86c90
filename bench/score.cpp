// Prefill: the scorers, one KV head of four query heads, 128 channels, 64 kept queries, one at every 16th token from
// the last. Those that a trace has all inputs for are named and made by examples/common/registry.hpp.
#include <numeric>
#include <string>

#include "common.hpp"
#include "common/registry.hpp"
#include "verkv/core/prompt_inputs.hpp"
#include "verkv/sample/allocation.hpp"
#include "verkv/score/compactor.hpp"
#include "verkv/score/compress_kv.hpp"
#include "verkv/score/eviction_error.hpp"
#include "verkv/score/kvzap.hpp"
#include "verkv/score/kvzip.hpp"
#include "verkv/score/sink_gate.hpp"
#include "verkv/score/span_boundary.hpp"

namespace {

template <class Scorer>
void score(benchmark::State& state, const Scorer& scorer) {
    using verkv::half;
    const auto n = static_cast<std::size_t>(state.range(0));
    constexpr std::size_t width = 128, group = 4, kept = 64, step = 16;
    const auto keys = random_rows<half>(n * width);
    const auto queries = random_rows<half>(kept * group * width);
    std::vector<verkv::position_t> positions(n);
    std::iota(positions.begin(), positions.end(), 0);
    std::vector<verkv::position_t> query_positions;
    for (std::size_t j = kept; j-- > 0;) {
        query_positions.push_back(static_cast<verkv::position_t>(n - 1 - j * step));
    }
    const verkv::rows<half> rows = verkv::contiguous_rows(std::span<const half>(keys), width);
    const verkv::prompt<half> prompt{{group, 1, width, width, 0},
                                     {&rows, 1},
                                     {&rows, 1},
                                     positions,
                                     verkv::heads_of(std::span<const half>(queries), kept, group, width),
                                     query_positions};
    std::vector<float> out(n);
    for (auto _ : state) {
        scorer.score(verkv::cpu{}, prompt, 0, std::span<float>(out));
        benchmark::ClobberMemory();
    }
    declare(state, keys.size() * sizeof(half), n);
}

// A second pass that repeats chunks of 1,024 tokens, with its own 1,024 keys each.
template <class Scorer>
void repeated(benchmark::State& state, const Scorer& scorer) {
    using verkv::half;
    const auto n = static_cast<std::size_t>(state.range(0));
    constexpr std::size_t width = 128, group = 4, chunk = 1024;
    const auto keys = random_rows<half>(n * width);
    const auto queries = random_rows<half>(n * group * width);
    std::vector<verkv::position_t> positions(n);
    std::iota(positions.begin(), positions.end(), 0);
    std::vector<verkv::repeat_chunk> chunks;
    for (std::size_t first = 0; first < n; first += chunk) {
        chunks.push_back({first, chunk, first, chunk});
    }
    const verkv::rows<half> rows = verkv::contiguous_rows(std::span<const half>(keys), width);
    const std::vector<float> norms(n, 1.0f);
    const auto projection = random_rows<half>(group * width * group * width);
    const verkv::prompt_with<half, verkv::repeat_pass<half>, verkv::output_projection<half>> prompt{
        verkv::prompt<half>{{group, 1, width, width, 0}, {&rows, 1}, {&rows, 1}, positions, {}, {}},
        {chunks, verkv::heads_of(std::span<const half>(queries), n, group, width), {&rows, 1}, 0, norms},
        {verkv::contiguous_rows(std::span<const half>(projection), group * width)}};
    std::vector<float> out(n);
    for (auto _ : state) {
        scorer.score(verkv::cpu{}, prompt, 0, std::span<float>(out));
        benchmark::ClobberMemory();
    }
    declare(state, 2 * keys.size() * sizeof(half), n);
}
void kvzip(benchmark::State& state) {
    repeated(state, verkv::kvzip{});
}
void kvzip_plus(benchmark::State& state) {
    repeated(state, verkv::kvzip_plus{});
}

// One cut through the scores of eight heads.
void global_budgets(benchmark::State& state) {
    const auto n = static_cast<std::size_t>(state.range(0));
    constexpr std::size_t heads = 8;
    std::vector<float> scores(heads * n);
    normals normal;
    for (float& x : scores) {
        x = std::exp(3 * normal());
    }
    const auto table = verkv::matrix_of(std::span<const float>(scores), heads, n);
    for (auto _ : state) {
        benchmark::DoNotOptimize(verkv::global_budgets(table, verkv::budget::fraction(1.0 / 16), {64, 64}));
    }
    declare(state, scores.size() * sizeof(float), n);
}
BENCHMARK(kvzip)->ArgName("n")->Arg(4096)->Unit(benchmark::kMillisecond);
BENCHMARK(kvzip_plus)->ArgName("n")->Arg(4096)->Unit(benchmark::kMillisecond);
BENCHMARK(global_budgets)->Apply(token_axes)->Unit(benchmark::kMillisecond);

[[maybe_unused]] const bool named = [] {
    const example::scorer_options options{.rotation = [] { return verkv::rope::plain(128); }};
    const auto add = [&](const auto& part) {
        benchmark::RegisterBenchmark(std::string(part.name).c_str(),
                                     [part, options](benchmark::State& state) { score(state, part.make(options)); })
            ->Apply(token_axes)
            ->Unit(benchmark::kMillisecond);
    };
    std::apply([&](const auto&... part) { (add(part), ...); }, example::scorers);
    return true;
}();

// Where queries all over the prompt cost more: one kept at every 16th token of it.
template <class Scorer>
void score_spread(benchmark::State& state, const Scorer& scorer) {
    using verkv::half;
    const auto n = static_cast<std::size_t>(state.range(0));
    constexpr std::size_t width = 128, group = 4, step = 16;
    const auto keys = random_rows<half>(n * width);
    const auto queries = random_rows<half>(n / step * group * width);
    std::vector<verkv::position_t> positions(n);
    std::iota(positions.begin(), positions.end(), 0);
    std::vector<verkv::position_t> query_positions;
    for (std::size_t i = 0; i < n; i += step) {
        query_positions.push_back(static_cast<verkv::position_t>(i));
    }
    const verkv::rows<half> rows = verkv::contiguous_rows(std::span<const half>(keys), width);
    const verkv::prompt<half> prompt{{group, 1, width, width, 0},
                                     {&rows, 1},
                                     {&rows, 1},
                                     positions,
                                     verkv::heads_of(std::span<const half>(queries), n / step, group, width),
                                     query_positions};
    std::vector<float> out(n);
    for (auto _ : state) {
        scorer.score(verkv::cpu{}, prompt, 0, std::span<float>(out));
        benchmark::ClobberMemory();
    }
    declare(state, keys.size() * sizeof(half), n);
}

void non_causal_attention_spread(benchmark::State& state) {
    score_spread(state, verkv::non_causal_attention{});
}
void compactor_spread(benchmark::State& state) {
    score_spread(state, verkv::compactor{{verkv::rope::plain(128)}, {}});
}
void compress_kv(benchmark::State& state) {
    const std::vector<std::size_t> heads{0, 1, 2, 3};
    score_spread(state, verkv::compress_kv{heads});
}

// An entropy a token, and no key is read.
void entropy_boundary(benchmark::State& state) {
    const auto n = static_cast<std::size_t>(state.range(0));
    std::vector<float> entropy = random_rows<float>(n);
    std::transform(entropy.begin(), entropy.end(), entropy.begin(), [](float x) { return std::abs(x); });
    const std::vector<verkv::half> keys(n);
    std::vector<verkv::position_t> positions(n);
    std::iota(positions.begin(), positions.end(), 0);
    const verkv::rows<verkv::half> rows = verkv::contiguous_rows(std::span<const verkv::half>(keys), 1);
    const verkv::prompt_with<verkv::half, verkv::token_entropy> prompt{
        {{1, 1, 1, 1, 0}, {&rows, 1}, {&rows, 1}, positions, {}, {}}, {entropy}};
    std::vector<float> out(n);
    for (auto _ : state) {
        verkv::entropy_boundary{}.score(verkv::cpu{}, prompt, 0, std::span<float>(out));
        benchmark::ClobberMemory();
    }
    declare(state, entropy.size() * sizeof(float), n);
}
BENCHMARK(non_causal_attention_spread)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(compactor_spread)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(compress_kv)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(entropy_boundary)->Apply(token_axes);

// A prompt of one KV head with 1,024 channels of hidden states.
struct hidden_prompt {
    static constexpr std::size_t model_dim = 1024, group = 4;

    explicit hidden_prompt(std::size_t n) : hidden(random_rows<verkv::half>(n * model_dim)), positions(n) {
        std::iota(positions.begin(), positions.end(), 0);
        key = verkv::contiguous_rows(std::span<const verkv::half>(hidden).first(n), 1);
        view.shape = {group, 1, 1, 1, 0};
        view.keys = view.values = {&key, 1};
        view.positions = positions;
        view.hidden = verkv::contiguous_rows(std::span<const verkv::half>(hidden), model_dim);
    }
    hidden_prompt(const hidden_prompt&) = delete;
    hidden_prompt& operator=(const hidden_prompt&) = delete;

    template <class Scorer>
    void run(benchmark::State& state, const Scorer& scorer) const {
        std::vector<float> out(positions.size());
        for (auto _ : state) {
            scorer.score(verkv::cpu{}, view, 0, std::span<float>(out));
            benchmark::ClobberMemory();
        }
        declare(state, hidden.size() * sizeof(verkv::half), positions.size());
    }

    std::vector<verkv::half> hidden;
    std::vector<verkv::position_t> positions;
    verkv::rows<verkv::half> key;
    verkv::prompt_with<verkv::half, verkv::hidden_states<verkv::half>> view;
};

void sink_gate(benchmark::State& state) {
    constexpr std::size_t dim = 16, sinks = 16, group = hidden_prompt::group, model_dim = hidden_prompt::model_dim;
    const auto matrix = random_rows<float>(group * dim * model_dim);
    const auto row = [&](std::size_t n) { return std::span<const float>(matrix).first(n); };
    const verkv::sink_gate_weights weights{model_dim,
                                           dim,
                                           sinks,
                                           row(group * dim * model_dim),
                                           row(group * dim),
                                           row(dim * model_dim),
                                           row(dim),
                                           row(dim),
                                           row(sinks * dim),
                                           row(group)};
    const hidden_prompt prompt(static_cast<std::size_t>(state.range(0)));
    prompt.run(state, verkv::sink_gate{weights});
}
void kvzap(benchmark::State& state) {
    constexpr std::size_t units = 512, model_dim = hidden_prompt::model_dim;
    const auto matrix = random_rows<float>(units * model_dim);
    const auto row = [&](std::size_t n) { return std::span<const float>(matrix).first(n); };
    const verkv::kvzap_weights weights{model_dim, units, row(units * model_dim), row(units), row(units), row(1)};
    const hidden_prompt prompt(static_cast<std::size_t>(state.range(0)));
    prompt.run(state, verkv::kvzap{weights});
}
BENCHMARK(sink_gate)->ArgName("n")->Arg(4096)->Arg(32768)->Unit(benchmark::kMillisecond);
BENCHMARK(kvzap)->ArgName("n")->Arg(4096)->Arg(32768)->Unit(benchmark::kMillisecond);

// Eight query heads over two KV heads, 16 kept queries, a thirty-second of the tokens kept.
void eviction_error(benchmark::State& state) {
    using verkv::half;
    const auto n = static_cast<std::size_t>(state.range(0));
    constexpr std::size_t width = 128, heads = 8, kept_queries = 16, model_dim = 1024;
    const auto keys = random_rows<half>(n * width);
    const auto queries = random_rows<half>(kept_queries * heads * width);
    const auto projection = random_rows<half>(heads * width * model_dim);
    std::vector<verkv::position_t> positions(n);
    std::iota(positions.begin(), positions.end(), 0);
    const std::vector<verkv::rows<half>> rows(2, verkv::contiguous_rows(std::span<const half>(keys), width));
    std::vector<verkv::token_index> kept;
    for (std::size_t i = 0; i < n; i += 32) {
        kept.push_back(static_cast<verkv::token_index>(i));
    }
    const std::vector<std::span<const verkv::token_index>> of_heads(2, kept);
    const verkv::prompt_with<half, verkv::output_projection<half>> prompt{
        {{heads, 2, width, width, 0},
         rows,
         rows,
         positions,
         verkv::heads_of(std::span<const half>(queries), kept_queries, heads, width),
         std::span<const verkv::position_t>(positions).last(kept_queries)},
        {verkv::contiguous_rows(std::span<const half>(projection), model_dim)}};
    for (auto _ : state) {
        benchmark::DoNotOptimize(verkv::eviction_error(verkv::cpu{}, prompt, of_heads));
    }
    declare(state, 2 * 2 * kept_queries * keys.size() * sizeof(half), n);
}
BENCHMARK(eviction_error)->ArgName("n")->Arg(4096)->Arg(32768)->Unit(benchmark::kMillisecond);

}  // namespace
