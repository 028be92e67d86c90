// Sketches with certain bounds in a cache that carries them: the promise is kept without a check, through appended and
// removed tokens.
#include <cmath>
#include <span>
#include <vector>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "verkv/score/given.hpp"
#include "verkv/sketch/anchors.hpp"
#include "verkv/sketch/low_rank.hpp"
#include "verkv/sketch/spans.hpp"

namespace {

using namespace support;
using verkv::half;

const verkv::geometry shape{6, 2, 16, 8, 0.1f};
constexpr std::size_t tokens = 220;

// 400 draws of one sample, 6 heads: each share of failures within 5 sigma of delta, false alarms below 2e-6 if the
// bound were tight.
template <class Sketch>
void check_in_cache(const Sketch& prototype) {
    constexpr std::size_t draws = 400;
    const verkv::tolerance promise{0.3, 0.2};
    auto t = random_text<half>(shape, tokens, 5, 2);
    const auto queries = random_queries<half>(shape, 5);
    verkv::step_policies policies;
    policies.bounds = verkv::bound_policy::carry;
    policies.check.rounds = 0;
    verkv::layer_cache<half, Sketch> cache(roomy(shape, tokens), prototype, {}, {}, {}, {}, policies);
    const auto id = cache.open(1);
    prefill(cache, id, t, 0, 200);
    const std::vector<float> equal(shape.kv_heads * tokens, 1.0f);
    const auto compress = [&](std::size_t n) {
        cache.compress(id, verkv::given_scores(std::span<const float>(equal).first(shape.kv_heads * n)),
                       {verkv::budget::fraction(0.25), {4, 8}});
    };
    const auto failures = [&](const text<half>& held, std::size_t n, std::size_t times) {
        const auto exact = dense_in_double(held, n, queries);
        std::vector<std::size_t> failed(shape.query_heads, 0);
        std::size_t fetched = 0;
        for (std::size_t draw = 0; draw < times; ++draw) {
            compress(n);
            const verkv::step_report* report = nullptr;
            const auto answer = decode(cache, id, queries, promise, &report);
            for (std::size_t h = 0; h < shape.query_heads; ++h) {
                const double error = std::abs(std::exp(static_cast<double>(answer.lse[h]) - exact[h].lse) - 1);
                failed[h] += !(error <= promise.epsilon);
            }
            fetched += report->kv_head(0, 0).rows_fetched;
        }
        CHECK(fetched > 0);
        const auto count = static_cast<double>(times);
        for (const std::size_t f : failed) {
            CHECK(static_cast<double>(f) <=
                  count * promise.delta + 5 * std::sqrt(count * promise.delta * (1 - promise.delta)));
        }
    };
    compress(200);
    append(cache, id, t, 200, 20);
    failures(t, tokens, draws);
    // Without tokens 50 ... 89.
    CHECK(cache.remove(id, 50, 90) == 40);
    text<half> rest(shape, tokens - 40);
    for (std::size_t i = 0; i < tokens - 40; ++i) {
        for (std::size_t h = 0; h < shape.kv_heads; ++h) {
            std::copy_n(t.key(i < 50 ? i : i + 40, h), shape.key_dim, rest.key(i, h));
            std::copy_n(t.value(i < 50 ? i : i + 40, h), shape.value_dim, rest.value(i, h));
        }
    }
    CHECK(cache.sketch_of(id, 0).size() == tokens - 40);
    failures(rest, tokens - 40, 100);
}

TEST_CASE("sketches in a cache: bounds of a basis, of anchors and of spans keep the promise") {
    check_in_cache(verkv::low_rank_sketch({.key_dim = 16, .rank = 10}));
    check_in_cache(verkv::anchor_sketch({.key_dim = 16, .anchors = 20, .bits = 4}));
    check_in_cache(verkv::span_sketch(
        {.key_dim = 16, .min_length = 1, .mean_length = 2, .max_length = 4, .rank = 3, .zoomed_spans = 1024}));
}

}  // namespace
