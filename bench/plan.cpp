// Deciding, one query head: the shortlist and the planners, on weights as peaked as real attention's.
#include "common.hpp"
#include "plain_read.hpp"
#include "verkv/certify/chernoff.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/plan/greedy.hpp"
#include "verkv/plan/top_k.hpp"
#include "verkv/plan/water_filling.hpp"

namespace {

/// A call of its own, so that instructions can be counted: valgrind --tool=callgrind --toggle-collect='*decide*'.
template <class Planner>
[[gnu::noinline]] void decide(const Planner& planner, const decision& d, double epsilon,
                              typename Planner::workspace& workspace, verkv::plan& out) {
    planner.plan(verkv::cpu{}, {d.mass, d.odds, d.total, verkv::error_space::scalar, d.total}, {epsilon, 0.1},
                 workspace, out);
}

template <class Planner>
void plan(benchmark::State& state, const Planner& planner, double epsilon) {
    const decision d(static_cast<std::size_t>(state.range(0)));
    typename Planner::workspace workspace;
    workspace.reserve(d.mass.size());
    verkv::plan out;
    out.entries.reserve(d.mass.size());
    for (auto _ : state) {
        decide(planner, d, epsilon, workspace, out);
        benchmark::DoNotOptimize(out.entries.data());
    }
    declare(state, d.mass.size() * 2 * sizeof(float), d.mass.size());
    double rows = 0;
    for (const verkv::plan_entry& e : out.entries) {
        rows += static_cast<double>(e.probability) - 1 / (1 + static_cast<double>(d.odds[e.token]));
    }
    state.counters["listed_%"] = 100.0 * static_cast<double>(out.raised) / static_cast<double>(d.mass.size());
    state.counters["expected_rows_%"] = 100.0 * rows / static_cast<double>(d.mass.size());
}

/// 10^4, 10^5, 10^6 tokens too: what an O(n) plan takes a token must not grow.
void plan_axes(benchmark::internal::Benchmark* b) {
    b->ArgNames({"n", "eps"})->ArgsProduct({{4096, 10000, 32768, 100000, 131072, 1000000}, {10, 50, 100, 300}});
}

void greedy(benchmark::State& state) {
    plan(state, verkv::greedy<>{}, static_cast<double>(state.range(1)) / 1000);
}
BENCHMARK(greedy)->Apply(plan_axes);

void greedy_chernoff(benchmark::State& state) {
    plan(state, verkv::greedy<verkv::binary_shrinkage, verkv::chernoff_tail>{},
         static_cast<double>(state.range(1)) / 1000);
}
BENCHMARK(greedy_chernoff)->Apply(plan_axes);

void water_filling(benchmark::State& state) {
    plan(state, verkv::water_filling<>{}, static_cast<double>(state.range(1)) / 1000);
}
BENCHMARK(water_filling)->Apply(plan_axes);

/// The same 10^4 tokens over and over, with the epsilon at which the same of them are raised each time: per token,
/// decisions of equal difficulty.
void water_filling_tiled(benchmark::State& state) {
    const auto n = static_cast<std::size_t>(state.range(0));
    decision d(10000);
    const std::size_t tiles = n / d.mass.size();
    const verkv::water_filling<> planner;
    verkv::water_filling<>::workspace workspace;
    workspace.reserve(n);
    verkv::plan out;
    out.entries.reserve(n);
    planner.plan(verkv::cpu{}, {d.mass, d.odds, d.total, verkv::error_space::scalar, d.total}, {0.05, 0.1}, workspace,
                 out);
    const auto share = 1 / static_cast<double>(tiles);
    const double epsilon =
        verkv::bernstein_bound({0, out.variance * share, out.level * share}, verkv::tolerance{0.05, 0.1}.log_term());
    const auto mass = d.mass;
    const auto odds = d.odds;
    for (std::size_t t = 1; t < tiles; ++t) {
        d.mass.insert(d.mass.end(), mass.begin(), mass.end());
        d.odds.insert(d.odds.end(), odds.begin(), odds.end());
    }
    d.total *= static_cast<double>(tiles);
    for (auto _ : state) {
        decide(planner, d, epsilon, workspace, out);
        benchmark::DoNotOptimize(out.entries.data());
    }
    declare(state, n * 2 * sizeof(float), n);
    state.counters["listed_%"] = 100.0 * static_cast<double>(out.raised) / static_cast<double>(n);
}
BENCHMARK(water_filling_tiled)->ArgName("n")->Arg(10000)->Arg(100000)->Arg(1000000);

void water_filling_chernoff(benchmark::State& state) {
    plan(state, verkv::water_filling<verkv::chernoff_tail>{}, static_cast<double>(state.range(1)) / 1000);
}
BENCHMARK(water_filling_chernoff)->Apply(plan_axes);

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
