// Shrinkage and certificates as building blocks on spans, one query head.
#include "common.hpp"
#include "verkv/certify/estimator.hpp"
#include "verkv/certify/shrinkage.hpp"

namespace {

template <class Rule>
void shrink(benchmark::State& state) {
    const decision d(static_cast<std::size_t>(state.range(0)));
    std::vector<float> lambda(d.mass.size());
    for (auto _ : state) {
        verkv::shrink(verkv::cpu{}, Rule{}, d.mass, d.r, lambda);
        benchmark::ClobberMemory();
    }
    declare(state, d.mass.size() * 3 * sizeof(float), d.mass.size());
}
BENCHMARK(shrink<verkv::binary_shrinkage>)->Apply(token_axes);
BENCHMARK(shrink<verkv::bounded_shrinkage>)->Apply(token_axes);

void certificate(benchmark::State& state) {
    const decision d(static_cast<std::size_t>(state.range(0)));
    const std::vector<float> lambda(d.mass.size(), 1.0f);
    for (auto _ : state) {
        benchmark::DoNotOptimize(verkv::certificate(verkv::cpu{}, d.mass, d.r, lambda, {}));
    }
    declare(state, d.mass.size() * 3 * sizeof(float), d.mass.size());
}
BENCHMARK(certificate)->Apply(token_axes);

}  // namespace
