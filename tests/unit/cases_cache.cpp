// Small inputs with their right answers, as a whole step of the cache.
#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/models.hpp"
#include "support/refusal.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/sketch/exact.hpp"
#include "verkv/sketch/rope_pairs.hpp"

namespace {

using namespace support;

template <class T>
constexpr double allowed = std::is_same_v<T, float> ? 1e-5 : 1e-2;

template <class T>
T stored(double x) {
    return verkv::from_float<T>(static_cast<float>(x));
}

std::vector<verkv::token_index> raised_tokens(const verkv::plan& p) {
    std::vector<verkv::token_index> tokens;
    for (const verkv::plan_entry& e : p.entries) {
        if (e.probability == 1) {
            tokens.push_back(e.token);
        }
    }
    return tokens;
}

std::vector<verkv::token_index> shrunk_tokens(const verkv::plan& p) {
    std::vector<verkv::token_index> tokens;
    for (const verkv::plan_entry& e : p.entries) {
        if (e.shrinkage < 1) {
            tokens.push_back(e.token);
        }
    }
    return tokens;
}

using tokens = std::vector<verkv::token_index>;

}  // namespace

TEST_CASE("cases: O3, a budget below one token fetches all there is") {
    const verkv::geometry shape{1, 1, 1, 1, 1};
    text<float> t(shape, 6);
    for (std::size_t i = 0; i < 6; ++i) {
        *t.value(i, 0) = static_cast<float>(i + 1);
    }
    const std::vector<float> tau{0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f};
    std::vector<float> r(6);
    verkv::inclusion_probabilities(verkv::cpu{}, tau, verkv::budget::fraction(1.0 / 32), {0, 0}, r);
    verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::greedy<>> cache(roomy(shape, 6), {});
    const auto id = cache.open();
    prefill(cache, id, t, 0, 6);
    adopt(cache, id, r, {});
    const verkv::step_report* report = nullptr;
    const step_answer a = decode(cache, id, std::vector<float>{1}, {0.05, 0.1}, &report);
    CHECK(report->query_head(0, 0).certificate_before == Approx(1.372868373).epsilon(1e-5));
    CHECK(report->query_head(0, 0).certificate_after == 0);
    CHECK(report->kv_head(0, 0).rows_fetched == 6);
    CHECK(std::exp(a.lse[0]) == Approx(6).epsilon(1e-5));
    CHECK(a.output[0] == Approx(3.5).epsilon(1e-5));
    // With everything but one token allowed to be fetched, that one would cost 0.4993028974.
    const step_answer b = decode(cache, id, std::vector<float>{1}, {0.4994, 0.1}, &report);
    CHECK(report->kv_head(0, 0).rows_fetched == 5);
    CHECK(report->query_head(0, 0).certificate_after == Approx(0.4993028974).epsilon(1e-5));
    CHECK(std::exp(b.lse[0]) == Approx(5).epsilon(1e-5));
}

TEMPLATE_TEST_CASE("cases: O8, the union is fetched once and each head uses its own list", "", float, verkv::half,
                   verkv::bfloat16) {
    const verkv::geometry shape{3, 1, 3, 2, 1};
    const double weights[3][10] = {
        {4, 2, 1, 1, 8, 1, 1, 2, 1, 4}, {2, 2, 8, 1, 1, 1, 1, 4, 1, 1}, {1, 1, 1, 2, 4, 1, 1, 1, 1, 8}};
    text<TestType> t(shape, 10);
    for (std::size_t i = 0; i < 10; ++i) {
        for (std::size_t c = 0; c < 3; ++c) {
            t.key(i, 0)[c] = stored<TestType>(std::log(weights[c][i]));
        }
        t.value(i, 0)[0] = stored<TestType>(static_cast<double>(i));
        t.value(i, 0)[1] = stored<TestType>(1);
    }
    const std::vector<float> queries{1, 0, 0, 0, 1, 0, 0, 0, 1};
    std::vector<float> r(10, 0.5f);
    r[0] = r[1] = 1;
    std::vector<verkv::plan> plans;
    using planner = someone::recorded<verkv::greedy<>>;
    verkv::layer_cache<TestType, verkv::exact_sketch<TestType>, planner> cache(roomy(shape, 10), {}, {},
                                                                               planner{{}, &plans});
    const auto id = cache.open();
    prefill(cache, id, t, 0, 10);
    adopt(cache, id, r, {0, 1, 3, 7});
    step_answer first;
    for (int repeat = 0; repeat < 3; ++repeat) {
        plans.clear();
        const verkv::step_report* report = nullptr;
        const step_answer a = decode(cache, id, queries, {0.35, 0.1}, &report);
        const double before[3] = {0.9667401539, 1.072862107, 1.150881136};
        const double after[3] = {0.2624901, 0.3216770, 0.3124882};
        const tokens lists[3] = {{4, 7, 9}, {2, 7}, {3, 4, 9}};
        const tokens shrunk[3] = {{4}, {2}, {9}};
        const double denominators[3] = {22, 18, 18};
        const double outputs[3] = {4.090909091, 2.888888889, 6.055555556};
        const std::uint32_t not_resident[3] = {2, 1, 2};
        for (std::size_t g = 0; g < 3; ++g) {
            CAPTURE(g);
            CHECK(report->query_head(0, g).certificate_before == Approx(before[g]).epsilon(allowed<TestType>));
            CHECK(report->query_head(0, g).certificate_after == Approx(after[g]).epsilon(allowed<TestType>));
            CHECK(report->query_head(0, g).rows_planned == not_resident[g]);
            CHECK(raised_tokens(plans[g]) == lists[g]);
            CHECK(std::exp(report->query_head(0, g).denominator_lse) ==
                  Approx(denominators[g]).epsilon(allowed<TestType>));
            CHECK(std::exp(a.lse[g]) == Approx(denominators[g]).epsilon(allowed<TestType>));
            CHECK(a.output[2 * g] == Approx(outputs[g]).epsilon(allowed<TestType>));
            CHECK(a.output[2 * g + 1] == Approx(1).epsilon(allowed<TestType>));
        }
        CHECK(report->kv_head(0, 0).rows_resident == 4);
        CHECK(report->kv_head(0, 0).rows_fetched == 3);
        CHECK(report->kv_head(0, 0).rows_copied == (repeat == 1 ? 0u : 3u));
        CHECK(report->kv_head(0, 0).bytes_moved == (repeat == 1 ? 0u : 3 * 5 * sizeof(TestType)));
        CHECK(cache.staged_rows(id, 0) == 3);
        if (repeat == 0) {
            first = a;
        } else {
            CHECK(a == first);
        }
        if (repeat == 1) {
            cache.release_staging(id);
            CHECK(cache.staged_rows(id, 0) == 0);
        }
        // What is shrunk before the fetch is in the list of each head here.
        plans.clear();
        decode(cache, id, queries, {2, 0.1});
        for (std::size_t g = 0; g < 3; ++g) {
            CHECK(shrunk_tokens(plans[g]) == shrunk[g]);
            CHECK(raised_tokens(plans[g]).empty());
        }
    }
}

TEMPLATE_TEST_CASE("cases: O10, a query of zeros", "", float, verkv::half, verkv::bfloat16) {
    const verkv::geometry shape{1, 1, 2, 1, 1};
    text<TestType> t(shape, 4);
    for (std::size_t i = 0; i < 4; ++i) {
        t.key(i, 0)[0] = stored<TestType>(0.75);
        t.key(i, 0)[1] = stored<TestType>(static_cast<double>(i) - 1);
        *t.value(i, 0) = stored<TestType>(static_cast<double>(i * i));
    }
    verkv::rope_pair_options options;
    options.key_dim = 2;
    options.pair_fraction = 1;
    options.group_length = 4;
    verkv::layer_cache<TestType, verkv::rope_pair_sketch> cache(roomy(shape, 4), verkv::rope_pair_sketch(options));
    const auto id = cache.open();
    prefill(cache, id, t, 0, 4);
    adopt(cache, id, std::vector<float>(4, 0.5f), {1});
    const std::vector<float> zeros{0, 0};
    std::vector<float> logits(4, 9);
    cache.sketch_of(id, 0).estimate(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(zeros), 2), 1.0f,
                                    {logits.data(), 1, 4, 4});
    CHECK(logits == std::vector<float>(4, 0.0f));
    const verkv::step_report* report = nullptr;
    const step_answer a = decode(cache, id, zeros, {0.05, 0.1}, &report);
    CHECK(report->kv_head(0, 0).rows_fetched == 3);
    CHECK(a.output[0] == Approx(3.5).margin(2e-3));
    CHECK(std::exp(a.lse[0]) == Approx(4).margin(2e-3));
}

TEMPLATE_TEST_CASE("cases: O11, the shift is taken over all tokens, resident or not", "", float, verkv::half) {
    const verkv::geometry shape{1, 1, 1, 1, 1};
    text<TestType> t(shape, 3);
    const double logits[3] = {-1000, 1000, 999};
    for (std::size_t i = 0; i < 3; ++i) {
        *t.key(i, 0) = stored<TestType>(logits[i]);
        *t.value(i, 0) = stored<TestType>(static_cast<double>(10 * (i + 1)));
    }
    verkv::layer_cache<TestType, verkv::exact_sketch<TestType>, verkv::greedy<>> cache(roomy(shape, 3), {});
    const auto id = cache.open();
    prefill(cache, id, t, 0, 3);
    adopt(cache, id, {1, 0.5f, 0.5f}, {0});
    const verkv::step_report* report = nullptr;
    const step_answer a = decode(cache, id, std::vector<float>{1}, {0.05, 0.1}, &report);
    CHECK(report->query_head(0, 0).certificate_before == Approx(1.899778032).epsilon(allowed<TestType>));
    CHECK(report->query_head(0, 0).certificate_after == 0);
    CHECK(report->kv_head(0, 0).rows_fetched == 2);
    CHECK(a.output[0] == Approx(22.68941421).epsilon(allowed<TestType>));
    // Token 1 is the first to be fetched; what token 2 alone leaves is 0.9795...
    decode(cache, id, std::vector<float>{1}, {0.98, 0.1}, &report);
    CHECK(report->kv_head(0, 0).rows_fetched == 1);
    CHECK(report->query_head(0, 0).certificate_after == Approx(0.9795323968).epsilon(allowed<TestType>));
}

namespace {

template <class Sketch>
void positions_after_removal_and_shift(const Sketch& sketch) {
    const verkv::geometry shape{1, 1, 4, 1, 1};
    text<float> t(shape, 10);
    std::vector<float> r(10);
    for (std::size_t i = 0; i < 10; ++i) {
        *t.value(i, 0) = static_cast<float>(100 + i);
        r[i] = 0.05f * static_cast<float>(i + 1);
    }
    verkv::layer_cache<float, Sketch, verkv::fetch_everything> cache(roomy(shape, 10), sketch);
    const auto id = cache.open();
    prefill(cache, id, t, 0, 10);
    adopt(cache, id, r, {0, 2, 4, 6, 8});
    CHECK(cache.free_host_rows() == 0);
    CHECK(cache.free_resident_rows() == 5);
    CHECK(cache.remove(id, 2, 4) == 2);
    cache.shift(id, 4, 1000, -2);
    CHECK(cache.remove(id, 4, 5) == 1);
    cache.shift(id, 5, 1000, -1);

    CHECK(cache.free_host_rows() == 3);
    CHECK(cache.free_resident_rows() == 7);
    const std::vector<std::size_t> token{0, 1, 4, 5, 7, 8, 9};
    const std::vector<int> delta{0, 0, -2, -2, -3, -3, -3};
    const std::vector<bool> resident{true, false, true, false, false, true, false};
    const auto positions = cache.positions(id);
    REQUIRE(positions.size() == 7);
    for (std::size_t i = 0; i < 7; ++i) {
        CAPTURE(i);
        const auto index = static_cast<verkv::token_index>(i);
        CHECK(positions[i] == static_cast<int>(i));
        CHECK(cache.host_row(id, 0, index)[4] == 100 + static_cast<float>(token[i]));
        CHECK(cache.probability(id, 0, index) == r[token[i]]);
        CHECK(static_cast<int>(positions[i]) - static_cast<int>(token[i]) == delta[i]);
        CHECK(cache.resident(id, 0, index) == resident[i]);
    }
    const step_answer a = decode(cache, id, std::vector<float>(4, 0.0f));
    CHECK(a.output[0] == Approx(104.8571429).epsilon(1e-6));
    CHECK(std::exp(a.lse[0]) == Approx(7).epsilon(1e-6));
}

template <class Sketch>
void estimates_after_removal_and_shift(const Sketch& sketch) {
    const verkv::geometry shape{1, 1, 4, 1, 1};
    const auto t = random_text<float>(shape, 10, 4);
    verkv::layer_cache<float, Sketch> cache(roomy(shape, 10), sketch);
    const auto id = cache.open();
    prefill(cache, id, t, 0, 10);
    adopt(cache, id, std::vector<float>(10, 0.5f), {});
    const auto query = generator(1).normals<float>(4);
    const auto estimates = [&] {
        std::vector<float> logits(cache.sketch_of(id, 0).size());
        cache.sketch_of(id, 0).estimate(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(query), 4), 1.0f,
                                        {logits.data(), 1, logits.size(), static_cast<std::ptrdiff_t>(logits.size())});
        return logits;
    };
    const auto before = estimates();
    cache.remove(id, 2, 4);
    cache.shift(id, 4, 1000, -2);
    cache.remove(id, 4, 5);
    cache.shift(id, 5, 1000, -1);
    const std::vector<float> expected{before[0], before[1], before[4], before[5], before[7], before[8], before[9]};
    CHECK(estimates() == expected);
}

}  // namespace

TEST_CASE("cases: O12, positions after removal and shift") {
    verkv::rope_pair_options options;
    options.key_dim = 4;
    options.pair_fraction = 0.5;
    options.group_length = 4;
    positions_after_removal_and_shift(verkv::exact_sketch<float>{});
    positions_after_removal_and_shift(verkv::rope_pair_sketch(options));
    positions_after_removal_and_shift(someone::off_sketch{});
    estimates_after_removal_and_shift(verkv::exact_sketch<float>{});
    estimates_after_removal_and_shift(verkv::rope_pair_sketch(options));
    estimates_after_removal_and_shift(someone::off_sketch(0.5f));
}

TEST_CASE("cases: O13, free rows in host memory") {
    const verkv::geometry shape{1, 1, 1, 1, 1};
    text<float> t(shape, 10);
    for (std::size_t i = 0; i < 10; ++i) {
        *t.value(i, 0) = static_cast<float>(10 + i);
    }
    auto config = roomy(shape, 10);
    config.host_rows = 4;
    verkv::layer_cache<float, verkv::exact_sketch<float>> cache(config, {});
    const auto id = cache.open();
    const auto row_at = [&](int position) -> const float* {
        const auto p = cache.positions(id);
        const auto at = std::find(p.begin(), p.end(), position);
        return at == p.end() ? nullptr : cache.host_row(id, 0, static_cast<verkv::token_index>(at - p.begin())).data();
    };
    // 1
    append(cache, id, t, 0, 3);
    CHECK(std::set<const float*>{row_at(0), row_at(1), row_at(2)}.size() == 3);
    CHECK(cache.free_host_rows() == 1);
    // 2
    CHECK(cache.remove(id, 1, 2) == 1);
    CHECK(cache.free_host_rows() == 2);
    // 3
    CHECK(cache.remove(id, 1, 2) == 0);
    CHECK(cache.free_host_rows() == 2);
    // 4
    append(cache, id, t, 3, 2);
    CHECK(std::set<const float*>{row_at(0), row_at(2), row_at(3), row_at(4)}.size() == 4);
    CHECK(cache.free_host_rows() == 0);
    // 5
    CHECK(refused<verkv::out_of_capacity>([&] { append(cache, id, t, 5, 1); }, {"1", "0 of 4"}));
    CHECK(cache.free_host_rows() == 0);
    // 6
    CHECK(cache.remove(id, 0, 1) == 1);
    CHECK(refused<verkv::out_of_capacity>([&] { append(cache, id, t, 6, 2); }, {"2", "1 of 4"}));
    CHECK(cache.free_host_rows() == 1);
    CHECK(row_at(6) == nullptr);
    CHECK(cache.positions(id).size() == 3);
    // 7
    for (const int p : {2, 3, 4}) {
        CHECK(row_at(p)[1] == static_cast<float>(10 + p));
    }
    // 8
    cache.release(id);
    CHECK(cache.free_host_rows() == 4);
    CHECK(refused([&] { cache.release(id); }, {"not open"}));
    CHECK(cache.free_host_rows() == 4);
}

TEST_CASE("cases: O14, ties, and the same bits a hundred times") {
    const verkv::geometry shape{2, 2, 1, 1, 1};
    text<float> t(shape, 7);
    for (std::size_t h = 0; h < 2; ++h) {
        *t.key(0, h) = static_cast<float>(std::log(20.0));
        for (std::size_t i = 0; i < 7; ++i) {
            *t.value(i, h) = static_cast<float>(i);
        }
    }
    std::vector<float> r(7, 0.5f);
    r[0] = 1;
    std::vector<step_answer> answers;
    for (const std::size_t threads : {1u, 8u}) {
        verkv::thread_pool pool(threads);
        constexpr std::size_t requests = 4;
        std::vector<verkv::plan> plans;
        using planner = someone::recorded<verkv::greedy<>>;
        verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::greedy<>> cache(roomy(shape, 7, requests), {},
                                                                                     {&pool});
        verkv::layer_cache<float, verkv::exact_sketch<float>, planner> watched(roomy(shape, 7), {}, {},
                                                                               planner{{}, &plans});
        std::vector<verkv::request_id> ids;
        for (std::size_t i = 0; i < requests; ++i) {
            ids.push_back(cache.open());
            prefill(cache, ids.back(), t, 0, 7);
            adopt(cache, ids.back(), r, {0});
        }
        const auto watched_id = watched.open();
        prefill(watched, watched_id, t, 0, 7);
        adopt(watched, watched_id, r, {0});
        const std::vector<float> queries{1, 1};
        for (int repeat = 0; repeat < 100; ++repeat) {
            std::vector<step_answer> step(requests);
            std::vector<verkv::decode_item<float>> batch;
            for (std::size_t i = 0; i < requests; ++i) {
                batch.push_back(item_of(shape, ids[i], std::span<const float>(queries), step[i]));
            }
            const verkv::step_report& report = cache.decode(std::span<const verkv::decode_item<float>>(batch), {0.2});
            for (std::size_t i = 0; i < requests; ++i) {
                REQUIRE(report.kv_head(i, 1).rows_fetched == 4);
                REQUIRE(report.query_head(i, 1).rows_shrunk == 0);
                REQUIRE(report.query_head(i, 1).certificate_before == Approx(0.2767412870).epsilon(1e-5));
                REQUIRE(report.query_head(i, 1).certificate_after == Approx(0.1769756).epsilon(1e-5));
                answers.push_back(step[i]);
            }
            plans.clear();
            answers.push_back(decode(watched, watched_id, queries, {0.2}));
            REQUIRE(raised_tokens(plans[1]) == tokens{1, 2, 3, 4});
        }
        plans.clear();
        decode(watched, watched_id, queries, {0.3});
        CHECK(shrunk_tokens(plans[0]) == tokens{1});
        CHECK(raised_tokens(plans[0]).empty());
    }
    CHECK(std::exp(answers.front().lse[0]) == Approx(24).epsilon(1e-5));
    CHECK(answers.front().output[0] == Approx(10.0 / 24).epsilon(1e-5));
    CHECK(std::all_of(answers.begin(), answers.end(), [&](const auto& a) { return a == answers.front(); }));
}
