// Every storage of rows with every storage of queries, and with each sketch, planner and rule of exact weights.
#include <cmath>
#include <tuple>
#include <type_traits>
#include <vector>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/models.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/sketch/exact.hpp"
#include "verkv/sketch/rope_pairs.hpp"

namespace {

using namespace support;

const verkv::geometry shape{6, 2, 20, 7, 0};
constexpr std::size_t n = 260;

template <class Sketch>
Sketch sketch_for() {
    if constexpr (std::is_same_v<Sketch, verkv::rope_pair_sketch>) {
        verkv::rope_pair_options options;
        options.key_dim = shape.key_dim;
        options.bits = 4;
        options.pair_fraction = 1;
        return verkv::rope_pair_sketch(options);
    } else {
        return Sketch{};
    }
}

/// A request of n - 5 prompt tokens and 5 more, decoded with a tiny epsilon and a large one.
template <class T, class Q, class Sketch, class Planner, class Exact>
void combination() {
    const auto t = random_text<T>(shape, n, 1);
    const auto queries = generator(2).normals<Q>(shape.query_heads * shape.key_dim);
    std::vector<float> widened;
    for (const Q q : queries) {
        widened.push_back(verkv::to_float(q));
    }
    verkv::thread_pool pool(2);
    verkv::layer_cache<T, Sketch, Planner, Exact> cache(roomy(shape, n), sketch_for<Sketch>(), {&pool});
    const auto id = cache.open(4);
    prefill(cache, id, t, 0, n - 5);
    cache.compress(id, verkv::key_norm{}, {verkv::budget::fraction(0.25), {2, 3}});
    append(cache, id, t, n - 5, 5);
    const auto exact = dense_in_double(t, n, widened);
    const step_answer tight = decode(cache, id, queries, {1e-9, 0.1});
    if constexpr (!std::is_same_v<Planner, verkv::never_fetch<>>) {
        CHECK(distance(tight, exact) <= 1);
    }
    const verkv::step_report* report = nullptr;
    const step_answer loose = decode(cache, id, queries, {0.3, 0.3}, &report);
    for (std::size_t h = 0; h < shape.query_heads; ++h) {
        CHECK(loose.lse[h] == Approx(exact[h].lse).margin(2));
        CHECK(report->query_head(0, h).certificate_after <= report->query_head(0, h).certificate_before);
    }
    CHECK(report->per_kv_head.size() == 2);
}

template <class T, class Q, class Sketch>
void planners() {
    combination<T, Q, Sketch, verkv::greedy<>, verkv::exact_for_shortlist>();
    combination<T, Q, Sketch, verkv::greedy<verkv::bounded_shrinkage>, verkv::exact_for_resident>();
    combination<T, Q, Sketch, verkv::greedy<verkv::no_shrinkage>, verkv::exact_for_shortlist>();
    combination<T, Q, Sketch, verkv::never_fetch<>, verkv::exact_for_resident>();
    combination<T, Q, Sketch, verkv::fetch_everything, verkv::exact_for_shortlist>();
}

}  // namespace

TEMPLATE_TEST_CASE("cache: rows and queries of every storage, exact sketch", "", float, verkv::half, verkv::bfloat16) {
    planners<TestType, float, verkv::exact_sketch<TestType>>();
    planners<TestType, verkv::half, verkv::exact_sketch<TestType>>();
    planners<TestType, verkv::bfloat16, verkv::exact_sketch<TestType>>();
}

TEMPLATE_TEST_CASE("cache: rows and queries of every storage, RoPE pairs", "", float, verkv::half, verkv::bfloat16) {
    planners<TestType, TestType, verkv::rope_pair_sketch>();
}

TEMPLATE_TEST_CASE("cache: rows and queries of every storage, a user's sketch", "", float, verkv::half,
                   verkv::bfloat16) {
    planners<TestType, TestType, someone::off_sketch>();
}

// Each model is what its concept asks for; and a foreign one, and ours with a foreign backend.
static_assert(verkv::scorer<someone::recency, verkv::cpu, verkv::half>);
static_assert(verkv::head_scorer<someone::first_channel, verkv::cpu, verkv::half>);
static_assert(verkv::sketch<someone::off_sketch, verkv::cpu, verkv::half>);
static_assert(!verkv::erasable_sketch<someone::off_sketch>);
static_assert(verkv::erasable_sketch<verkv::exact_sketch<float>>);
static_assert(verkv::erasable_sketch<verkv::rope_pair_sketch>);
static_assert(verkv::target<someone::strict_denominator, verkv::cpu>);
static_assert(verkv::planner<someone::raise_all, verkv::cpu>);
static_assert(verkv::planner<someone::recorded<verkv::greedy<>>, verkv::cpu>);
static_assert(verkv::planner<verkv::greedy<>, someone::counting_backend>);
static_assert(verkv::sketch<verkv::exact_sketch<float>, someone::counting_backend, float>);
static_assert(verkv::scorer<verkv::key_norm, someone::counting_backend, float>);
