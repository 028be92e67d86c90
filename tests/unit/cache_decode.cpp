// What a decode step answers, whatever plans it: dense attention at one end, staged rows, sketches that are far off.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/models.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/given.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/sketch/exact.hpp"
#include "verkv/sketch/rope_pairs.hpp"

namespace {

using namespace support;

const verkv::compression eighth{verkv::budget::fraction(1.0 / 8), {4, 8}};

template <class Cache, class T>
verkv::request_id compressed(Cache& cache, const text<T>& t, std::size_t prompt, const verkv::compression& how = eighth,
                             std::uint64_t seed = 1) {
    const auto id = cache.open(seed);
    prefill(cache, id, t, 0, prompt);
    cache.compress(id, verkv::key_norm{}, how);
    if (t.tokens > prompt) {
        append(cache, id, t, prompt, t.tokens - prompt);
    }
    return id;
}

}  // namespace

TEST_CASE("cache: fetching everything is dense attention") {
    for (const std::size_t group : {1u, 3u, 4u, 5u, 7u, 12u, 32u}) {
        const verkv::geometry shape{2 * group, 2, 80, 24, 0};
        const auto t = random_text<float>(shape, 300, group);
        verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::fetch_everything> cache(roomy(shape, 300), {});
        const auto id = compressed(cache, t, 290);
        const auto queries = random_queries<float>(shape, group);
        const verkv::step_report* report = nullptr;
        const step_answer a = decode(cache, id, queries, {}, &report);
        CHECK(distance(a, dense_in_double(t, 300, queries)) <= 1);
        for (std::size_t h = 0; h < 2; ++h) {
            const auto& r = report->kv_head(0, h);
            CHECK(r.tokens == 300);
            CHECK(r.rows_fetched + r.rows_resident == 300);
            CHECK(r.rows_resident < 100);
        }
        CHECK(report->query_head(0, 0).certificate_after == 0);
        CHECK(report->query_head(0, 0).certificate_before > 0);
        CHECK(static_cast<float>(report->query_head(0, 0).denominator_lse) == a.lse[0]);
    }
}

TEST_CASE("cache: a small epsilon leads to dense attention too") {
    const verkv::geometry shape{3, 1, 16, 8, 0};
    const auto t = random_text<float>(shape, 200, 5);
    verkv::layer_cache<float, verkv::exact_sketch<float>> cache(roomy(shape, 200), {});
    const auto id = compressed(cache, t, 200);
    const auto queries = random_queries<float>(shape, 5);
    CHECK(distance(decode(cache, id, queries, {1e-9, 0.1}), dense_in_double(t, 200, queries)) <= 1);
}

TEST_CASE("cache: prompts without anything to sample") {
    const verkv::geometry shape{2, 1, 8, 8, 0};
    verkv::rope_pair_options options;
    options.key_dim = 8;
    for (const std::size_t n : {0u, 1u, 2u, 11u, 12u, 13u, 128u, 129u}) {
        CAPTURE(n);
        const auto t = random_text<float>(shape, n + 3, n);
        const auto queries = random_queries<float>(shape, n);
        const auto run = [&](auto& cache, const verkv::compression& how) {
            const auto id = cache.open();
            prefill(cache, id, t, 0, n);
            cache.compress(id, verkv::key_norm{}, how);
            const verkv::step_report* report = nullptr;
            CHECK(distance(decode(cache, id, queries, {}, &report), dense_in_double(t, n, queries)) <= 1);
            CHECK(report->kv_head(0, 0).rows_resident == n);
            CHECK(report->kv_head(0, 0).rows_fetched == 0);
            CHECK(report->kv_head(0, 0).shortlist_keys_read == 0);
            CHECK(report->query_head(0, 1).certificate_after == 0);
            append(cache, id, t, n, 3);
            CHECK(distance(decode(cache, id, queries), dense_in_double(t, n + 3, queries)) <= 1);
        };
        verkv::layer_cache<float, verkv::exact_sketch<float>> exact(roomy(shape, n + 3, 3), {});
        verkv::layer_cache<float, verkv::rope_pair_sketch> sketched(roomy(shape, n + 3, 3),
                                                                    verkv::rope_pair_sketch(options));
        // Everything kept; and the default windows, where they cover the prompt.
        run(exact, {verkv::budget::fraction(1), {0, 0}});
        run(sketched, {verkv::budget::fraction(1), {0, 0}});
        run(exact, {verkv::budget::tokens(1000), {1, 1}});
        if (n <= 128) {
            run(exact, {verkv::budget::fraction(1.0 / 16), {}});
            run(sketched, {verkv::budget::fraction(1.0 / 16), {}});
        }
    }
}

TEST_CASE("cache: one token in L; all scores and all keys equal") {
    const verkv::geometry shape{1, 1, 4, 2, 0};
    text<float> t(shape, 40);
    for (std::size_t i = 0; i < 40; ++i) {
        t.value(i, 0)[0] = static_cast<float>(i);
    }
    verkv::layer_cache<float, verkv::exact_sketch<float>> cache(roomy(shape, 40), {});
    const auto id = cache.open();
    prefill(cache, id, t, 0, 40);
    const std::vector<float> queries(4, 1.0f);
    std::vector<float> r(40, 1.0f);
    r[7] = 1e-6f;
    std::vector<verkv::token_index> all_but_one;
    for (verkv::token_index i = 0; i < 40; ++i) {
        if (i != 7) {
            all_but_one.push_back(i);
        }
    }
    adopt(cache, id, r, all_but_one);
    // Shrinking it away costs its weight: one fortieth and some.
    const verkv::step_report* report = nullptr;
    const step_answer a = decode(cache, id, queries, {0.05, 0.1}, &report);
    CHECK(report->kv_head(0, 0).rows_fetched + report->query_head(0, 0).rows_shrunk == 1);
    CHECK(std::exp(a.lse[0]) == Approx(40).epsilon(0.05));
    decode(cache, id, queries, {0.01, 0.1}, &report);
    CHECK(report->kv_head(0, 0).rows_fetched == 1);
    // All scores equal.
    const std::vector<float> scores(40, 0.5f);
    cache.compress(id, verkv::given_scores(std::span<const float>(scores)), {verkv::budget::tokens(10), {0, 0}});
    for (verkv::token_index i = 0; i < 40; ++i) {
        CHECK(cache.probability(id, 0, i) == 0.25f);
    }
    const step_answer b = decode(cache, id, queries, {0.3, 0.1}, &report);
    CHECK(report->query_head(0, 0).certificate_after < 0.3);
    CHECK(report->kv_head(0, 0).rows_fetched > 0);
    CHECK(std::exp(b.lse[0]) == Approx(40).epsilon(0.3));
}

TEST_CASE("cache: a fetch larger than the staging rows goes in waves") {
    const verkv::geometry shape{3, 1, 16, 8, 0};
    constexpr std::size_t n = 500;
    const auto t = random_text<float>(shape, n, 6);
    const auto queries = random_queries<float>(shape, 6);
    std::vector<step_answer> answers;
    std::vector<verkv::kv_head_report> reports;
    for (const std::size_t staging : {64u, 100u, 600u}) {
        auto config = roomy(shape, n);
        config.staging_rows = staging;
        verkv::layer_cache<float, verkv::exact_sketch<float>> cache(config, {});
        const auto id = compressed(cache, t, n);
        const verkv::step_report* report = nullptr;
        const step_answer a = decode(cache, id, queries, {0.01, 0.1}, &report);
        reports.push_back(report->kv_head(0, 0));
        REQUIRE(reports.back().rows_fetched > 200);
        CHECK(reports.back().rows_copied == reports.back().rows_fetched);
        CHECK(reports.back().rows_fetched == reports.front().rows_fetched);
        CHECK(reports.back().bytes_moved == reports.back().rows_copied * 24 * sizeof(float));
        CHECK(cache.staged_rows(id, 0) == std::min(staging, reports.back().rows_fetched));
        const step_answer again = decode(cache, id, queries, {0.01, 0.1}, &report);
        CHECK(again == a);
        CHECK(report->kv_head(0, 0).rows_copied == (staging == 600 ? 0 : report->kv_head(0, 0).rows_fetched));
        answers.push_back(a);
    }
    for (const step_answer& a : answers) {
        for (std::size_t i = 0; i < a.output.size(); ++i) {
            CHECK(a.output[i] == Approx(answers[0].output[i]).epsilon(1e-5).margin(1e-6));
        }
        for (std::size_t h = 0; h < 3; ++h) {
            CHECK(a.lse[h] == Approx(answers[0].lse[h]).epsilon(1e-6));
        }
    }
}

TEST_CASE("cache: rows staged once are read once, until they are needed no more or forgotten") {
    const verkv::geometry shape{2, 1, 16, 8, 0};
    constexpr std::size_t n = 300;
    const auto t = random_text<float>(shape, n, 7);
    verkv::layer_cache<float, verkv::exact_sketch<float>> cache(roomy(shape, n), {});
    const auto id = compressed(cache, t, n);
    const auto queries = random_queries<float>(shape, 7);
    const auto others = random_queries<float>(shape, 8);
    const verkv::tolerance promise{0.4, 0.1};
    const verkv::step_report* report = nullptr;
    const auto copied = [&] { return report->kv_head(0, 0).rows_copied; };
    const step_answer a = decode(cache, id, queries, promise, &report);
    const std::size_t fetched = report->kv_head(0, 0).rows_fetched;
    REQUIRE(fetched > 10);
    REQUIRE(fetched < 200);
    CHECK(copied() == fetched);
    CHECK(decode(cache, id, queries, promise, &report) == a);
    CHECK(copied() == 0);
    CHECK(report->kv_head(0, 0).rows_fetched == fetched);
    CHECK(report->kv_head(0, 0).bytes_moved == 0);
    // Another query shares some rows; nothing it needs is copied twice.
    decode(cache, id, others, promise, &report);
    CHECK(copied() < report->kv_head(0, 0).rows_fetched);
    decode(cache, id, others, promise, &report);
    CHECK(copied() == 0);
    cache.release_staging(id);
    CHECK(cache.staged_rows(id, 0) == 0);
    CHECK(decode(cache, id, queries, promise, &report) == a);
    CHECK(copied() == fetched);

    // Staged rows follow removals: what is left of them is neither copied again nor mixed up.
    verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::fetch_everything> dense(roomy(shape, n), {});
    const auto all = compressed(dense, t, 200);
    dense.truncate(all, 150);
    decode(dense, all, queries, promise, &report);
    const std::size_t staged = dense.staged_rows(all, 0);
    CHECK(staged == report->kv_head(0, 0).rows_fetched);
    dense.remove(all, 20, 60);
    dense.truncate(all, 140);
    text<float> left(shape, 100);
    for (std::size_t i = 0; i < 100; ++i) {
        const std::size_t from = i < 20 ? i : i + 40;
        std::copy_n(t.keys.begin() + static_cast<std::ptrdiff_t>(16 * from), 16, left.key(i, 0));
        std::copy_n(t.values.begin() + static_cast<std::ptrdiff_t>(8 * from), 8, left.value(i, 0));
    }
    const step_answer b = decode(dense, all, queries, promise, &report);
    CHECK(distance(b, dense_in_double(left, 100, queries)) <= 1);
    CHECK(copied() == 0);
    // Others come to the indices that were cut off.
    auto tail = random_text<float>(shape, 30, 9);
    for (std::size_t i = 0; i < 30; ++i) {
        tail.positions[i] = static_cast<verkv::position_t>(140 + i);
    }
    prefill(dense, all, tail, 0, 30);
    std::vector<float> r(130, 0.5f);
    adopt(dense, all, r, {});
    text<float> whole(shape, 130);
    std::copy(left.keys.begin(), left.keys.end(), whole.keys.begin());
    std::copy(left.values.begin(), left.values.end(), whole.values.begin());
    std::copy(tail.keys.begin(), tail.keys.end(), whole.keys.begin() + 1600);
    std::copy(tail.values.begin(), tail.values.end(), whole.values.begin() + 800);
    CHECK(distance(decode(dense, all, queries), dense_in_double(whole, 130, queries)) <= 1);
}

TEST_CASE("cache: the shortlist is read exactly, staged and resident tokens apart") {
    const verkv::geometry shape{2, 1, 16, 8, 0};
    constexpr std::size_t n = 400;
    const auto t = random_text<float>(shape, n, 10);
    const auto queries = random_queries<float>(shape, 10);
    verkv::rope_pair_options options;
    options.key_dim = 16;
    const verkv::step_report* report = nullptr;
    for (const std::size_t size : {0u, 1u, 50u, 1000u}) {
        verkv::layer_cache<float, verkv::rope_pair_sketch, verkv::greedy<>, verkv::exact_for_shortlist> cache(
            roomy(shape, n), verkv::rope_pair_sketch(options), {}, {}, {size});
        const auto id = compressed(cache, t, n);
        decode(cache, id, queries, {0.2, 0.1}, &report);
        const auto first = report->kv_head(0, 0);
        // The shortlist holds tokens of L, resident or not; with 1000, all of L.
        CHECK(first.shortlist_keys_read <= std::min(size * shape.query_heads, n - first.rows_resident));
        if (size == 1000) {
            CHECK(first.shortlist_keys_read == n - first.rows_resident);
        }
        CHECK(first.bytes_moved ==
              first.shortlist_keys_read * 16 * sizeof(float) + first.rows_copied * 24 * sizeof(float));
        decode(cache, id, queries, {0.2, 0.1}, &report);
        const auto second = report->kv_head(0, 0);
        CHECK(second.rows_fetched == first.rows_fetched);
        CHECK(second.shortlist_keys_read <= first.shortlist_keys_read);
        if (size == 1000) {
            CHECK(second.shortlist_keys_read == n - first.rows_resident - first.rows_fetched);
        }
    }
    // With a shortlist of all of L any sketch leads to the plan that the exact one makes.
    verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::greedy<>> exact(roomy(shape, n), {});
    verkv::layer_cache<float, verkv::rope_pair_sketch, verkv::greedy<>, verkv::exact_for_shortlist> sketched(
        roomy(shape, n), verkv::rope_pair_sketch(options), {}, {}, {n});
    const auto id = compressed(exact, t, n);
    const auto other = compressed(sketched, t, n);
    const auto a = decode(exact, id, queries, {0.2, 0.1}, &report);
    const auto fetched = report->kv_head(0, 0).rows_fetched;
    const auto b = decode(sketched, other, queries, {0.2, 0.1}, &report);
    CHECK(report->kv_head(0, 0).rows_fetched == fetched);
    for (std::size_t i = 0; i < a.output.size(); ++i) {
        CHECK(b.output[i] == Approx(a.output[i]).epsilon(1e-5).margin(1e-6));
    }
}

namespace {

/// Plans of a step with a sketch that is off, for a sample.
template <class Exact>
std::vector<verkv::plan> plans_with(const std::vector<verkv::token_index>& sample, float error = 0.5f) {
    const verkv::geometry shape{2, 1, 8, 4, 0};
    constexpr std::size_t n = 120;
    const auto t = random_text<float>(shape, n, 14);
    std::vector<float> r(n, 0.3f);
    r[0] = r[1] = 1;
    std::vector<verkv::plan> plans;
    using planner = someone::recorded<verkv::greedy<>>;
    verkv::layer_cache<float, someone::off_sketch, planner, Exact> cache(roomy(shape, n), someone::off_sketch(error),
                                                                         {}, planner{{}, &plans}, {10});
    const auto id = cache.open();
    prefill(cache, id, t, 0, n);
    adopt(cache, id, r, sample);
    decode(cache, id, random_queries<float>(shape, 14), {0.4, 0.1});
    return plans;
}

bool same_plans(const std::vector<verkv::plan>& a, const std::vector<verkv::plan>& b) {
    return a.size() == 2 && b.size() == 2 && a[0].entries == b[0].entries && a[1].entries == b[1].entries &&
           a[0].certificate_before == b[0].certificate_before && a[1].certificate_after == b[1].certificate_after;
}

}  // namespace

TEST_CASE("cache: the sample does not leak into the plan, but by the paper's rule") {
    const std::vector<verkv::token_index> few{0, 1, 50};
    std::vector<verkv::token_index> many{0, 1};
    for (verkv::token_index i = 3; i < 120; i += 3) {
        many.push_back(i);
    }
    const auto plans = plans_with<verkv::exact_for_shortlist>(few);
    REQUIRE(plans.size() == 2);
    REQUIRE(plans[0].raised > 0);
    CHECK(same_plans(plans, plans_with<verkv::exact_for_shortlist>(many)));
    CHECK_FALSE(same_plans(plans_with<verkv::exact_for_resident>(few), plans_with<verkv::exact_for_resident>(many)));
    // With every token in the sample, the paper's rule weighs all of them exactly: the sketch does not matter.
    std::vector<verkv::token_index> all(120);
    std::iota(all.begin(), all.end(), verkv::token_index{0});
    CHECK(same_plans(plans_with<verkv::exact_for_resident>(all), plans_with<verkv::exact_for_resident>(all, 0)));
    CHECK_FALSE(
        same_plans(plans_with<verkv::exact_for_shortlist>(all), plans_with<verkv::exact_for_shortlist>(all, 0)));
}

namespace {

/// Logits that are right but for one token's.
class wrong_at {
public:
    wrong_at(std::size_t token, float error) : token_(token), error_(error) {}

    template <class Backend>
    void fit(const Backend& exec, verkv::rows<float> keys) {
        keys_.fit(exec, keys);
    }
    template <class Backend>
    void append(const Backend& exec, verkv::rows<float> keys) {
        keys_.append(exec, keys);
    }
    template <class Backend>
    void estimate(const Backend& exec, verkv::rows<float> queries, float scale,
                  verkv::matrix_view<float> logits) const {
        keys_.estimate(exec, queries, scale, logits);
        for (std::size_t g = 0; g < logits.rows; ++g) {
            logits.row(g)[token_] += error_;
        }
    }
    [[nodiscard]] std::size_t size() const { return keys_.size(); }
    [[nodiscard]] std::size_t bytes() const { return keys_.bytes(); }

private:
    verkv::exact_sketch<float> keys_;
    std::size_t token_;
    float error_;
};

}  // namespace

TEST_CASE("cache: a sketch that has one token far too high or too low") {
    // The shortlist holds all tokens: the step has to come out as with the right logits.
    const verkv::geometry shape{2, 1, 4, 3, 1};
    constexpr std::size_t n = 60;
    const auto t = random_text<float>(shape, n, 11, 1);
    const auto queries = random_queries<float>(shape, 11);
    const std::vector<float> r(n, 0.3f);
    const verkv::tolerance promise{0.1, 0.1};
    std::vector<step_answer> answers;
    std::vector<verkv::step_report> reports;
    for (const float error : {0.0f, 30.0f, 80.0f, 85.0f, 88.0f, 100.0f, 60000.0f, 3e38f, -30.0f, -100.0f, -3e38f}) {
        CAPTURE(error);
        verkv::layer_cache<float, wrong_at> cache(roomy(shape, n), wrong_at(20, error));
        const auto id = cache.open();
        prefill(cache, id, t, 0, n);
        adopt(cache, id, r, {3, 4, 50});
        const verkv::step_report* report = nullptr;
        const auto a = decode(cache, id, queries, promise, &report);
        reports.push_back(*report);
        answers.push_back(a);
        CHECK(report->kv_head(0, 0).rows_fetched == reports.front().kv_head(0, 0).rows_fetched);
        for (std::size_t g = 0; g < 2; ++g) {
            CHECK(report->query_head(0, g).certificate_after ==
                  Approx(reports.front().query_head(0, g).certificate_after).epsilon(1e-4));
            CHECK(a.lse[g] == Approx(answers.front().lse[g]).epsilon(1e-5));
        }
    }
}

TEST_CASE("cache: one token far above all others, known to the sketch or not") {
    // Its logit is 60000 above: the answer is its value, whoever finds it.
    const verkv::geometry shape{1, 1, 2, 1, 1};
    constexpr std::size_t n = 100;
    text<float> t(shape, n);
    for (std::size_t i = 0; i < n; ++i) {
        t.key(i, 0)[0] = i == 33 ? 60000.0f : 0.0f;
        t.key(i, 0)[1] = 1;
        *t.value(i, 0) = static_cast<float>(i);
    }
    for (const float sign : {1.0f, -1.0f}) {
        verkv::layer_cache<float, verkv::exact_sketch<float>> cache(roomy(shape, n), {});
        verkv::layer_cache<float, wrong_at> misled(roomy(shape, n), wrong_at(33, -60000));
        const auto id = cache.open();
        const auto other = misled.open();
        prefill(cache, id, t, 0, n);
        prefill(misled, other, t, 0, n);
        adopt(cache, id, std::vector<float>(n, 0.2f), {});
        adopt(misled, other, std::vector<float>(n, 0.2f), {});
        const std::vector<float> query{sign, 0};
        for (const step_answer& a :
             {decode(cache, id, query, {0.05, 0.1}), decode(misled, other, query, {0.05, 0.1})}) {
            if (sign > 0) {
                CHECK(a.output[0] == 33);
                CHECK(a.lse[0] == 60000);
            } else {
                CHECK(a.lse[0] == Approx(std::log(99.0)).epsilon(0.05));
            }
        }
    }
}

TEST_CASE("cache: a query that is not a number concerns its head alone") {
    const verkv::geometry shape{4, 2, 8, 8, 0};
    constexpr std::size_t n = 150;
    const auto t = random_text<float>(shape, n, 12);
    auto queries = random_queries<float>(shape, 12);
    verkv::rope_pair_options options;
    options.key_dim = 8;
    verkv::layer_cache<float, verkv::rope_pair_sketch> cache(roomy(shape, n), verkv::rope_pair_sketch(options));
    const auto id = compressed(cache, t, n);
    const verkv::step_report* report = nullptr;
    const step_answer clean = decode(cache, id, queries, {0.1}, &report);
    const auto fetched = report->kv_head(0, 1).rows_fetched;
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        queries[8 + 3] = bad;
        const step_answer a = decode(cache, id, queries, {0.1}, &report);
        CHECK(std::isnan(a.output[8]));
        CHECK(std::isnan(a.lse[1]));
        CHECK(report->kv_head(0, 1).rows_fetched == fetched);
        for (const std::size_t h : {2u, 3u}) {
            CHECK(bits_of(std::span<const float>(a.output).subspan(8 * h, 8)) ==
                  bits_of(std::span<const float>(clean.output).subspan(8 * h, 8)));
        }
        // Its sibling's shortlist has one head less to look at; its answer stays an answer.
        CHECK(std::isfinite(a.output[0]));
        CHECK(std::isfinite(report->query_head(0, 0).certificate_after));
    }
}

TEST_CASE("cache: values that are not numbers in rows that only a sibling reads") {
    const verkv::geometry shape{2, 1, 2, 1, 1};
    text<float> t(shape, 10);
    for (std::size_t i = 0; i < 10; ++i) {
        t.key(i, 0)[0] = i == 5 ? 4.0f : 0.0f;
        *t.value(i, 0) = static_cast<float>(i);
    }
    *t.value(5, 0) = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> r(10, 1.0f);
    r[5] = 0.9999f;
    verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::greedy<>> cache(roomy(shape, 10), {});
    const auto id = cache.open();
    prefill(cache, id, t, 0, 10);
    adopt(cache, id, r, {0, 1, 2, 3, 4, 6, 7, 8, 9});
    const verkv::step_report* report = nullptr;
    // Head 0 has most of its weight on token 5, head 1 almost none, and does not fetch it.
    const step_answer a = decode(cache, id, std::vector<float>{1, 0, -1, 0}, {0.01, 0.1}, &report);
    REQUIRE(report->query_head(0, 0).rows_planned == 1);
    REQUIRE(report->query_head(0, 1).rows_planned == 0);
    CHECK(std::isnan(a.output[0]));
    CHECK(a.output[1] == Approx(40.0 / 9).epsilon(1e-5));
}

TEST_CASE("cache: a user's parts, one of each") {
    const verkv::geometry shape{4, 2, 12, 6, 0};
    constexpr std::size_t n = 250;
    const auto t = random_text<float>(shape, n, 13);
    const auto queries = random_queries<float>(shape, 13);
    const auto exact = dense_in_double(t, n, queries);
    const verkv::step_report* report = nullptr;
    SECTION("scorers") {
        verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::greedy<>> cache(roomy(shape, n), {});
        const auto id = cache.open();
        prefill(cache, id, t, 0, n);
        cache.compress(id, someone::recency{}, eighth);
        CHECK(cache.probability(id, 1, 200) > cache.probability(id, 1, 100));
        CHECK(distance(decode(cache, id, queries, {1e-9, 0.1}), exact) <= 1);
        cache.compress(id, verkv::over_group<verkv::reduction::mean>(someone::first_channel{}), eighth);
        CHECK(distance(decode(cache, id, queries, {1e-9, 0.1}), exact) <= 1);
    }
    SECTION("a sketch, without erase") {
        verkv::layer_cache<float, someone::off_sketch> cache(roomy(shape, n), someone::off_sketch(0.2f));
        const auto id = compressed(cache, t, n);
        CHECK(distance(decode(cache, id, queries, {1e-9, 0.1}), exact) <= 1);
        const step_answer a = decode(cache, id, queries, {0.1, 0.1}, &report);
        for (std::size_t h = 0; h < 4; ++h) {
            CHECK(a.lse[h] == Approx(exact[h].lse).margin(0.3));
        }
        cache.remove(id, 10, 50);
        CHECK(cache.sketch_of(id, 1).size() == n - 40);
        decode(cache, id, queries, {0.1, 0.1});
    }
    SECTION("a target") {
        verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::greedy<>> cache(roomy(shape, n), {});
        verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::greedy<>, verkv::exact_for_shortlist,
                           someone::strict_denominator>
            strict(roomy(shape, n), {});
        const auto id = compressed(cache, t, n);
        const auto other = compressed(strict, t, n);
        // Twice as strict at twice the epsilon is the same plan.
        const step_answer a = decode(cache, id, queries, {0.1, 0.1});
        const step_answer b = decode(strict, other, queries, {0.2, 0.1}, &report);
        CHECK(a == b);
        CHECK(report->query_head(0, 0).certificate_after < 0.2);
    }
    SECTION("a planner, and a recorder around another") {
        std::vector<verkv::plan> plans;
        using planner = someone::recorded<verkv::greedy<verkv::bounded_shrinkage>>;
        verkv::layer_cache<float, verkv::exact_sketch<float>, planner> cache(roomy(shape, n), {}, {},
                                                                             planner{{}, &plans});
        const auto id = compressed(cache, t, n);
        decode(cache, id, queries, {0.1, 0.1}, &report);
        REQUIRE(plans.size() == 4);
        CHECK(plans[3].certificate_after == report->query_head(0, 3).certificate_after);
    }
    SECTION("a backend with a verb of its own, and an executor") {
        std::size_t weighed = 0;
        someone::counting_backend backend;
        backend.weighed = &weighed;
        verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::greedy<>, verkv::exact_for_shortlist,
                           verkv::denominator, someone::counting_backend>
            cache(roomy(shape, n), {}, backend);
        const auto id = compressed(cache, t, n);
        const step_answer a = decode(cache, id, queries, {0.1, 0.1});
        CHECK(weighed == 4);
        verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::greedy<>> plain(roomy(shape, n), {});
        const auto other = compressed(plain, t, n);
        CHECK(decode(plain, other, queries, {0.1, 0.1}) == a);
        someone::backward_executor backwards(3);
        verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::greedy<>> spread(roomy(shape, n), {},
                                                                                      {&backwards});
        const auto third = compressed(spread, t, n);
        CHECK(decode(spread, third, queries, {0.1, 0.1}) == a);
        CHECK(backwards.done > 0);
        CHECK_FALSE(backwards.nested);
    }
}
