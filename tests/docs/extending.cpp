// A cache at work with the parts of docs/extending.md (mylab.hpp is made of its blocks). Exits with 1 + the number of
// the first thing that is wrong.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "mylab.hpp"

namespace {

using verkv::half;

constexpr std::size_t tokens = 300, width = 32;
const verkv::geometry shape{4, 2, width, width, 0};

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "docs/extending.md: %s\n", what);
        std::exit(1);
    }
}

std::vector<half> random_rows(std::size_t elements, unsigned seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    std::vector<half> rows(elements);
    for (half& x : rows) {
        x = verkv::from_float<half>(normal(engine));
    }
    return rows;
}

/// Prefill, compress by the scorer, decode: the outputs are numbers, and the step says what it certified.
template <class Scorer, class Sketch, class Planner, class Target>
void work(const char* what, const Scorer& scorer, const Sketch& sketch, const Planner& planner, const Target& target,
          const verkv::step_policies& policies) {
    const auto keys = random_rows(tokens * 2 * width, 1), values = random_rows(tokens * 2 * width, 2),
               queries = random_rows(tokens * 4 * width, 3), states = random_rows(tokens * 8, 4);
    std::vector<verkv::position_t> positions(tokens);
    std::iota(positions.begin(), positions.end(), 0);
    const auto view = [](const std::vector<half>& x, std::size_t heads) {
        return verkv::heads_of(std::span(x), tokens, heads, width);
    };
    verkv::layer_cache<half, Sketch, Planner, verkv::exact_for_shortlist, Target> cache(
        {.shape = shape, .max_tokens = tokens, .host_rows = 2 * tokens, .resident_rows = 2 * tokens}, sketch,
        verkv::cpu{}, planner, verkv::exact_for_shortlist{.size = 8}, target, policies);
    const auto id = cache.open(1);
    cache.prefill(id, view(keys, 2), view(values, 2), positions);
    const verkv::compression how{verkv::budget::fraction(0.25), {4, 8}};
    if constexpr (verkv::scorer<Scorer, verkv::cpu, half>) {
        cache.compress(id, scorer, how, view(queries, 4), positions);
    } else {
        cache.compress(id, scorer, how, view(queries, 4), positions,
                       verkv::hidden_states<half>{verkv::contiguous_rows(std::span(states), 8)});
    }
    std::vector<float> output(4 * width);
    const verkv::step_report& report = cache.decode({id, view(queries, 4).token(tokens - 1), output}, {0.3, 0.1});
    for (const float x : output) {
        require(std::isfinite(x), what);
    }
    require(report.query_head(0, 3).certificate_after >= 0, what);
}

}  // namespace

int main() {
    const verkv::step_policies unchecked{.check = {.rounds = 0}};
    const verkv::step_policies carried{.check = {.rounds = 0}, .bounds = verkv::bound_policy::carry};
    work("scorer, sketch, planner with a level", verkv::windowed(0, 64, verkv::floored(1e-3f, mylab::mean_query{})),
         mylab::leading_channels(24), mylab::one_level{}, verkv::denominator{}, {});
    work("scorer of hidden states, bounds, tail", mylab::hidden_length{}, mylab::bounded_channels(28),
         verkv::water_filling<mylab::bennett_tail>{}, mylab::sampled_part{}, carried);
    work("planner", mylab::mean_query{}, mylab::leading_channels(width), mylab::raise_all{}, mylab::sampled_part{},
         unchecked);
    work("shrinkage rule", mylab::mean_query{}, mylab::leading_channels(width),
         verkv::greedy<mylab::truncated_weights, mylab::bennett_tail>{}, verkv::denominator{}, unchecked);
    work("target of values", mylab::mean_query{}, mylab::leading_channels(width), verkv::water_filling<>{},
         mylab::against_values{}, {});

    const auto rows = random_rows(tokens * width, 5);
    const std::vector<float> weight(tokens, 1.0f / tokens);
    verkv::decision_view<half> d;
    d.weight = d.estimate = weight;
    d.values = verkv::contiguous_rows(std::span(rows), width);
    d.fixed = {4, 8};
    mylab::every_nth::workspace memory;
    verkv::selection selected;
    mylab::every_nth{}.select(verkv::cpu{}, d, memory, selected);
    require(std::abs(verkv::estimate_denominator(selected, weight) - 1) < 1e-5, "baseline");

    std::atomic<std::size_t> bytes = 0;
    mylab::metered backend;
    backend.bytes = &bytes;
    const std::vector<float> query(width, 1.0f);
    std::vector<float> logits(tokens);
    score_rows(backend, verkv::contiguous_rows(std::span(query), width), 1.0f, d.values,
               verkv::matrix_of(std::span(logits), 1, tokens));
    require(bytes == tokens * width * sizeof(half), "backend");

    const std::vector<std::int8_t> codes{1, -2, 3, 4};
    const std::vector<float> step{0.5f, 2.0f};
    require(verkv::to_float(mylab::widened(codes, step)[1]) == -1, "rows in a narrower format");
    return 0;
}
