// Compactor, the trained scorers, CompressKV, anchors and spans through compress(), and shares of layers from errors.
#include <algorithm>
#include <cmath>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/sample/inclusion.hpp"
#include "verkv/sample/layer_allocation.hpp"
#include "verkv/score/anchor_coverage.hpp"
#include "verkv/score/compactor.hpp"
#include "verkv/score/compress_kv.hpp"
#include "verkv/score/eviction_error.hpp"
#include "verkv/score/importance.hpp"
#include "verkv/score/kvzap.hpp"
#include "verkv/score/sink_gate.hpp"
#include "verkv/score/span_boundary.hpp"
#include "verkv/sketch/exact.hpp"

using namespace verkv;

namespace {

const geometry shape{4, 2, 8, 6, 0};
constexpr std::size_t n = 120;

struct rig {
    support::text<half> t = support::random_text<half>(shape, n, 3);
    std::vector<half> query_memory = support::generator(4).normals<half>(n * 4 * 8);
    std::vector<rows<half>> keys{t.head_keys(0, n), t.head_keys(1, n)};
    std::vector<rows<half>> values{t.head_values(0, n), t.head_values(1, n)};
    heads_view<half> queries = heads_of(std::span<const half>(query_memory), n, 4, 8);

    // compress() draws with the probabilities that the scorer's importance makes.
    template <class Scorer, class... Inputs>
    void check(const Scorer& scorer, const Inputs&... extra) const {
        layer_cache<half, exact_sketch<half>> cache(support::roomy(shape, n), exact_sketch<half>{});
        const auto id = cache.open(1);
        support::prefill(cache, id, t, 0, n);
        const compression how{budget::tokens(40), {2, 3}};
        cache.compress(id, scorer, how, queries, t.position_span(0, n), extra...);
        const prompt_with<half, Inputs...> p{
            prompt<half>{shape, keys, values, t.position_span(0, n), queries, t.position_span(0, n)}, extra...};
        for (std::size_t h = 0; h < 2; ++h) {
            std::vector<float> importance(n);
            scorer.score(cpu{}, p, h, std::span<float>(importance));
            to_importance(cpu{}, importance);
            std::vector<float> r(n);
            inclusion_probabilities(cpu{}, std::span<const float>(importance), how.kept, how.fixed,
                                    std::span<float>(r));
            double sum = 0;
            for (std::size_t i = 0; i < n; ++i) {
                REQUIRE(cache.probability(id, h, static_cast<token_index>(i)) == r[i]);
                sum += static_cast<double>(r[i]);
            }
            CHECK(sum == Approx(40).epsilon(1e-5));
        }
    }
};

}  // namespace

TEST_CASE("score: compactor, compress_kv, anchors and spans through compress()") {
    const rig r;
    r.check(leverage_score{rope::plain(8), 6});
    r.check(non_causal_attention{32});
    r.check(compactor{{rope::plain(8), 6}, {32}});
    const std::vector<std::size_t> heads{3, 0};
    r.check(compress_kv{heads});
    r.check(anchor_coverage{5});
    r.check(span_boundary{rope::plain(8), 4});
    std::vector<float> entropy(n);
    for (std::size_t i = 0; i < n; ++i) {
        entropy[i] = static_cast<float>(i * 7 % 11);
    }
    r.check(entropy_boundary{}, token_entropy{entropy});
}

TEST_CASE("score: trained scorers through compress()") {
    const rig r;
    constexpr std::size_t dim = 20;
    const auto hidden = support::generator(5).normals<half>(n * dim);
    const hidden_states<half> states{contiguous_rows(std::span<const half>(hidden), dim)};
    const auto numbers = support::generator(6).normals<float>(4 * 16 * dim, 0.3);
    const auto first = [&](std::size_t count) { return std::span<const float>(numbers).first(count); };
    r.check(sink_gate{{dim, 16, 5, first(4 * 16 * dim), first(4 * 16), first(2 * 16 * dim), first(16), first(16),
                       first(2 * 5 * 16), first(4)}},
            states);
    const kvzap_weights weights{dim, 7, first(7 * dim), first(7), first(2 * 7), first(2)};
    r.check(kvzap{weights, kvzap_output::importance, 8}, states);
    r.check(kvzap{weights, kvzap_output::logarithm}, states);
}

TEST_CASE("score: eviction errors of layers share out a budget") {
    // Two layers, one of which attends evenly and one to what is kept.
    const auto weights = support::generator(6).normals<half>(24 * 10);
    const output_projection<half> projection{contiguous_rows(std::span<const half>(weights), 10)};
    std::vector<token_index> kept;
    for (token_index i = 0; i < 12; ++i) {
        kept.push_back(i);
    }
    const std::vector<std::span<const token_index>> both(2, kept);
    std::vector<double> errors;
    for (const float peak : {0.0f, 40.0f}) {
        rig r;
        for (std::size_t i = 0; i < n; ++i) {
            for (std::size_t h = 0; h < 2; ++h) {
                r.t.key(i, h)[0] = from_float<half>(i < 12 ? peak : 0.0f);
            }
            for (std::size_t h = 0; h < 4; ++h) {
                r.query_memory[(i * 4 + h) * 8] = from_float<half>(1);
            }
        }
        const prompt_with<half, output_projection<half>> p{
            prompt<half>{shape, r.keys, r.values, r.t.position_span(0, n), r.queries.slice(n - 8, 8),
                         r.t.position_span(n - 8, 8)},
            projection};
        errors.push_back(eviction_error(cpu{}, p, both));
    }
    CHECK(errors[0] > 0.5);
    CHECK(errors[1] < 0.1);
    const auto rows_of = shared_budgets(errors, n, budget::tokens(50));
    CHECK(rows_of[0] + rows_of[1] == 100);
    CHECK(rows_of[0] > rows_of[1]);
}
