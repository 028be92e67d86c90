// Deciding, one query head: the shortlist and the planners, on weights as peaked as real attention's.
#include "common.hpp"
#include "plain_read.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/plan/greedy.hpp"
#include "verkv/plan/top_k.hpp"

namespace {

template <class Planner>
void plan(benchmark::State& state, const Planner& planner, double epsilon) {
    const decision d(static_cast<std::size_t>(state.range(0)));
    typename Planner::workspace workspace;
    workspace.reserve(d.mass.size());
    verkv::plan out;
    for (auto _ : state) {
        planner.plan(verkv::cpu{}, {d.mass, d.odds, d.total}, {epsilon, 0.1}, workspace, out);
        benchmark::DoNotOptimize(out.entries.data());
    }
    declare(state, d.mass.size() * 2 * sizeof(float), d.mass.size());
    state.counters["fetched_%"] = 100.0 * static_cast<double>(out.raised) / static_cast<double>(d.mass.size());
}

void greedy(benchmark::State& state) {
    plan(state, verkv::greedy<>{}, static_cast<double>(state.range(1)) / 1000);
}
BENCHMARK(greedy)->ArgNames({"n", "eps"})->ArgsProduct({{4096, 32768, 131072}, {10, 50, 100, 300}});

void greedy_bounded(benchmark::State& state) {
    plan(state, verkv::greedy<verkv::bounded_shrinkage>{}, 0.1);
}
BENCHMARK(greedy_bounded)->Apply(token_axes);

void never_fetch(benchmark::State& state) {
    plan(state, verkv::never_fetch<>{}, 0.1);
}
BENCHMARK(never_fetch)->Apply(token_axes);

void fetch_everything(benchmark::State& state) {
    plan(state, verkv::fetch_everything{}, 0.1);
}
BENCHMARK(fetch_everything)->Apply(token_axes);

void top_k(benchmark::State& state) {
    const decision d(static_cast<std::size_t>(state.range(0)));
    verkv::top_k_workspace workspace;
    workspace.reserve(d.mass.size());
    std::vector<verkv::token_index> out;
    for (auto _ : state) {
        verkv::top_k(verkv::cpu{}, d.mass, 128, workspace, out);
        benchmark::DoNotOptimize(out.data());
    }
    declare(state, d.mass.size() * sizeof(float), d.mass.size());
}
BENCHMARK(top_k)->Apply(token_axes);

/// The floor: masses and odds read once.
void plain_read(benchmark::State& state) {
    const decision d(static_cast<std::size_t>(state.range(0)));
    for (auto _ : state) {
        benchmark::DoNotOptimize(::plain_read(d.mass) + ::plain_read(d.odds));
    }
    declare(state, d.mass.size() * 2 * sizeof(float), d.mass.size());
}
BENCHMARK(plain_read)->Apply(token_axes);

}  // namespace
