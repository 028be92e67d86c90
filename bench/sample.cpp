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

}  // namespace
