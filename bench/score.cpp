// Prefill: the scorers, one KV head of four query heads, 128 channels, 64 kept queries.
#include <numeric>

#include "common.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/largest_attention.hpp"
#include "verkv/score/snapkv.hpp"
#include "verkv/score/streaming_llm.hpp"

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
BENCHMARK(largest_attention)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(snapkv)->Apply(token_axes)->Unit(benchmark::kMillisecond);
BENCHMARK(key_norm)->Apply(token_axes);
BENCHMARK(streaming_llm)->Apply(token_axes);

}  // namespace
