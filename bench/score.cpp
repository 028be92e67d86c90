// Prefill: the scorers, one KV head of four query heads, 128 channels, 64 kept queries.
#include <numeric>

#include "common.hpp"
#include "verkv/sample/allocation.hpp"
#include "verkv/score/accumulated_attention.hpp"
#include "verkv/score/expected_attention.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/kvzip.hpp"
#include "verkv/score/largest_attention.hpp"
#include "verkv/score/mean_attention.hpp"
#include "verkv/score/snapkv.hpp"
#include "verkv/score/streaming_llm.hpp"
#include "verkv/score/tova.hpp"

namespace {

template <class Scorer>
void score(benchmark::State& state, const Scorer& scorer) {
    using verkv::half;
    const auto n = static_cast<std::size_t>(state.range(0));
    constexpr std::size_t width = 128, group = 4, kept = 64;
    const auto keys = random_rows<half>(n * width);
    const auto queries = random_rows<half>(kept * group * width);
    std::vector<verkv::position_t> positions(n);
    std::iota(positions.begin(), positions.end(), 0);
    const verkv::rows<half> rows = verkv::contiguous_rows(std::span<const half>(keys), width);
    const verkv::prompt<half> prompt{{group, 1, width, width, 0},
                                     {&rows, 1},
                                     {&rows, 1},
                                     positions,
                                     verkv::heads_of(std::span<const half>(queries), kept, group, width),
                                     std::span<const verkv::position_t>(positions).last(kept)};
    std::vector<float> out(n);
    for (auto _ : state) {
        scorer.score(verkv::cpu{}, prompt, 0, std::span<float>(out));
        benchmark::ClobberMemory();
    }
    declare(state, keys.size() * sizeof(half), n);
}

void largest_attention(benchmark::State& state) {
    score(state, verkv::largest_attention{.stride = 1});
}
void snapkv(benchmark::State& state) {
    score(state, verkv::make_snapkv());
}
void key_norm(benchmark::State& state) {
    score(state, verkv::key_norm{});
}
void streaming_llm(benchmark::State& state) {
    score(state, verkv::streaming_llm{});
}
void tova(benchmark::State& state) {
    score(state, verkv::tova{});
}
void mean_attention(benchmark::State& state) {
    score(state, verkv::mean_attention{});
}
void h2o(benchmark::State& state) {
    score(state, verkv::make_h2o());
}
void expected_attention(benchmark::State& state) {
    score(state, verkv::expected_attention{verkv::rope::plain(128)});
}

// A second pass that repeats chunks of 1,024 tokens, with its own 1,024 keys each.
void kvzip(benchmark::State& state) {
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
    const verkv::prompt_with<half, verkv::repeat_pass<half>> prompt{
        verkv::prompt<half>{{group, 1, width, width, 0}, {&rows, 1}, {&rows, 1}, positions, {}, {}},
        {chunks, verkv::heads_of(std::span<const half>(queries), n, group, width), {&rows, 1}, 0, {}}};
    std::vector<float> out(n);
    for (auto _ : state) {
        verkv::kvzip{}.score(verkv::cpu{}, prompt, 0, std::span<float>(out));
        benchmark::ClobberMemory();
    }
    declare(state, 2 * keys.size() * sizeof(half), n);
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
BENCHMARK(largest_attention)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(snapkv)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(tova)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(mean_attention)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(h2o)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(expected_attention)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(kvzip)->ArgName("n")->Arg(4096)->Unit(benchmark::kMillisecond);
BENCHMARK(global_budgets)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(key_norm)->Apply(token_axes);
BENCHMARK(streaming_llm)->Apply(token_axes);

}  // namespace
