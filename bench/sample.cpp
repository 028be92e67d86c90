// Prefill: inclusion probabilities and the Poisson draw, one KV head.
#include <numeric>

#include "common.hpp"
#include "verkv/sample/inclusion.hpp"
#include "verkv/sample/poisson.hpp"

namespace {

void inclusion(benchmark::State& state) {
    const decision d(static_cast<std::size_t>(state.range(0)));
    std::vector<float> r(d.mass.size());
    for (auto _ : state) {
        verkv::inclusion_probabilities(verkv::cpu{}, d.mass, verkv::budget::fraction(1.0 / 16), {}, r);
        benchmark::ClobberMemory();
    }
    declare(state, d.mass.size() * 2 * sizeof(float), d.mass.size());
}
BENCHMARK(inclusion)->Apply(token_axes);

void draw(benchmark::State& state) {
    const decision d(static_cast<std::size_t>(state.range(0)));
    std::vector<verkv::position_t> positions(d.r.size());
    std::iota(positions.begin(), positions.end(), 0);
    std::vector<verkv::token_index> sample;
    for (auto _ : state) {
        verkv::poisson_draw(verkv::cpu{}, d.r, positions, {}, sample);
        benchmark::DoNotOptimize(sample.data());
    }
    declare(state, d.r.size() * 2 * sizeof(float), d.r.size());
}
BENCHMARK(draw)->Apply(token_axes);

/// The uniforms that a plan looks at: of every twentieth token, say.
template <class Look>
void look(benchmark::State& state, Look&& uniform_of) {
    const auto n = static_cast<std::size_t>(state.range(0));
    for (auto _ : state) {
        std::size_t used = 0;
        for (std::size_t i = 0; i < n; i += 20) {
            used += uniform_of(i) < 0.1;
        }
        benchmark::DoNotOptimize(used);
    }
    state.SetItemsProcessed(static_cast<std::int64_t>(state.iterations()) * static_cast<std::int64_t>(n / 20));
}

void uniforms_stored(benchmark::State& state) {
    std::vector<float> stored(static_cast<std::size_t>(state.range(0)));
    for (std::size_t i = 0; i < stored.size(); ++i) {
        stored[i] = static_cast<float>(verkv::uniform({.seed = 1}, static_cast<verkv::position_t>(i)));
    }
    look(state, [&](std::size_t i) { return static_cast<double>(stored[i]); });
}
BENCHMARK(uniforms_stored)->Arg(131072);

void uniforms_recomputed(benchmark::State& state) {
    look(state, [](std::size_t i) { return verkv::uniform({.seed = 1}, static_cast<verkv::position_t>(i)); });
}
BENCHMARK(uniforms_recomputed)->Arg(131072);

}  // namespace
