// Small inputs with their right answers, part by part: attention, log-weights, head mapping, rows that nobody owns.
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/models.hpp"
#include "support/refusal.hpp"
#include "verkv/attend/attend.hpp"
#include "verkv/attend/merge.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/sketch/exact.hpp"

namespace {

using namespace support;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

template <class T>
constexpr double allowed = std::is_same_v<T, float> ? 1e-5 : 1e-2;

template <class T>
T stored(double x) {
    return verkv::from_float<T>(static_cast<float>(x));
}

struct part {
    std::vector<float> output;
    float lse;
};

part merged(part a, const part& b) {
    verkv::merge_attention(a.output, a.lse, b.output, b.lse);
    return a;
}

bool same(const part& a, const part& b) {
    return bits_of(a.output) == bits_of(b.output) &&
           std::bit_cast<std::uint32_t>(a.lse) == std::bit_cast<std::uint32_t>(b.lse);
}

}  // namespace

TEST_CASE("cases: O1, union of empty parts") {
    const part a{{0, 0}, -infinity};
    const part b = a;
    const part c{{1, 3}, 0.6931471806f};
    const part e{{5, -1}, 1.791759469f};
    CHECK(same(merged(a, b), {{0, 0}, -infinity}));
    CHECK(same(merged(a, c), c));
    CHECK(same(merged(c, a), c));
    CHECK(same(merged(merged(a, b), c), c));
    for (const part& d : {merged(c, e), merged(e, c)}) {
        CHECK(d.output[0] == Approx(4).margin(1e-6));
        CHECK(d.output[1] == Approx(0).margin(1e-6));
        CHECK(d.lse == Approx(2.079441542).margin(1e-6));
    }
    // (e) nothing resident, nothing fetched: a request without tokens.
    const verkv::geometry shape{2, 1, 3, 2, 1};
    verkv::layer_cache<float, verkv::exact_sketch<float>> cache(roomy(shape, 4), {});
    const auto id = cache.open();
    const verkv::step_report* report = nullptr;
    const step_answer nothing = decode(cache, id, std::vector<float>(6, 1.0f), {}, &report);
    CHECK(nothing.output == std::vector<float>(4, 0.0f));
    CHECK(nothing.lse == std::vector<float>(2, -infinity));
    CHECK(report->query_head(0, 1).certificate_after == 0);
}

TEMPLATE_TEST_CASE("cases: O2, a log-weight is added to the scaled logit", "", float, verkv::half, verkv::bfloat16) {
    const verkv::geometry shape{1, 1, 16, 2, 0.25f};
    text<TestType> t(shape, 3);
    *t.key(2, 0) = stored<TestType>(0.6931471806);
    const double values[3][2] = {{1, 0}, {0, 1}, {1, 1}};
    for (std::size_t i = 0; i < 3; ++i) {
        for (std::size_t c = 0; c < 2; ++c) {
            t.value(i, 0)[c] = stored<TestType>(values[i][c]);
        }
    }
    std::vector<float> query(16, 0.0f);
    query[0] = 4;
    const auto check = [](const std::vector<float>& output, float lse) {
        CHECK(output[0] == Approx(0.4285714286).epsilon(allowed<TestType>));
        CHECK(output[1] == Approx(0.8571428571).epsilon(allowed<TestType>));
        CHECK(lse == Approx(1.945910149).epsilon(allowed<TestType>));
        CHECK(std::exp(lse) == Approx(7).epsilon(2 * allowed<TestType>));
    };
    SECTION("attend") {
        const std::vector<float> add{0, 1.386294361f, 0};
        std::vector<float> output(2);
        std::vector<float> lse(1);
        verkv::attend_workspace workspace;
        verkv::attend(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(query), 16), 0.25f, t.head_keys(0, 3),
                      t.head_values(0, 3), {add.data(), 1, 3, 3}, workspace, {output.data(), 1, 2, 2}, lse);
        check(output, lse[0]);
    }
    SECTION("a step: r = 1, 0.25, 0.5, all in the sample, lambda of the last one 0.5") {
        verkv::layer_cache<TestType, verkv::exact_sketch<TestType>, someone::injected> cache(
            roomy(shape, 3), {}, {}, someone::injected{{{2, 0.5f, 0.5f}}});
        const auto id = cache.open();
        prefill(cache, id, t, 0, 3);
        adopt(cache, id, {1, 0.25f, 0.5f}, {0, 1, 2});
        const step_answer a = decode(cache, id, query);
        check(a.output, a.lse[0]);
    }
}

namespace {

/// Five tokens with k = (ln(i + 1), 0), v = (i, 10 i), in every KV head.
template <class T>
text<T> five_tokens(const verkv::geometry& shape) {
    text<T> t(shape, 5);
    for (std::size_t i = 0; i < 5; ++i) {
        for (std::size_t h = 0; h < shape.kv_heads; ++h) {
            t.key(i, h)[0] = stored<T>(std::log(static_cast<double>(i + 1)));
            t.value(i, h)[0] = stored<T>(static_cast<double>(i));
            t.value(i, h)[1] = stored<T>(10.0 * static_cast<double>(i));
        }
    }
    return t;
}

template <class T>
void check_five_tokens(std::span<const float> output, float lse) {
    CHECK(output[0] == Approx(2.666666667).epsilon(allowed<T>));
    CHECK(output[1] == Approx(26.66666667).epsilon(allowed<T>));
    CHECK(lse == Approx(2.708050201).epsilon(allowed<T>));
}

}  // namespace

TEMPLATE_TEST_CASE("cases: O6, NaN in slots that nobody owns", "", float, verkv::half, verkv::bfloat16) {
    const verkv::geometry shape{1, 1, 2, 2, 1};
    const auto t = five_tokens<TestType>(shape);
    const std::vector<float> query{1, 0};
    SECTION("attend over two pages of four") {
        std::vector<std::uint32_t> bits;
        for (const float fill : {not_a_number, infinity}) {
            std::vector<TestType> keys(16, verkv::from_float<TestType>(fill));
            std::vector<TestType> values(16, verkv::from_float<TestType>(fill));
            const std::vector<verkv::row_id> slots{6, 1, 3, 0, 5};
            for (std::size_t i = 0; i < 5; ++i) {
                std::copy_n(t.keys.begin() + static_cast<std::ptrdiff_t>(2 * i), 2, keys.begin() + 2 * slots[i]);
                std::copy_n(t.values.begin() + static_cast<std::ptrdiff_t>(2 * i), 2, values.begin() + 2 * slots[i]);
            }
            std::vector<float> output(2);
            std::vector<float> lse(1);
            verkv::attend_workspace workspace;
            verkv::dense_attention<TestType>(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(query), 2),
                                             1.0f, {keys.data(), 2, 5, 2, slots.data()},
                                             {values.data(), 2, 5, 2, slots.data()}, workspace,
                                             {output.data(), 1, 2, 2}, lse);
            check_five_tokens<TestType>(output, lse[0]);
            output.push_back(lse[0]);
            if (bits.empty()) {
                bits = bits_of(output);
            }
            CHECK(bits_of(output) == bits);
        }
    }
    SECTION("a step whose free rows, resident, host and staged, were left behind full of it") {
        std::vector<step_answer> answers;
        for (const float fill : {0.0f, not_a_number, infinity}) {
            verkv::layer_cache<TestType, verkv::exact_sketch<TestType>, verkv::fetch_everything> cache(roomy(shape, 8),
                                                                                                       {});
            text<TestType> bad(shape, 8);
            for (std::size_t i = 0; i < 16; ++i) {
                bad.values[i] = verkv::from_float<TestType>(fill);
            }
            const auto before = cache.open();
            prefill(cache, before, bad, 0, 8);
            adopt(cache, before, std::vector<float>(8, 0.5f), {});
            decode(cache, before, query);  // stages all eight
            CHECK(cache.staged_rows(before, 0) == 8);
            cache.release(before);
            std::fill(bad.keys.begin(), bad.keys.end(), verkv::from_float<TestType>(fill));
            const auto again = cache.open();
            append(cache, again, bad, 0, 8);
            cache.release(again);

            const auto id = cache.open();
            prefill(cache, id, t, 0, 5);
            adopt(cache, id, {1, 0.5f, 1, 0.5f, 1}, {0, 2, 4});
            const step_answer a = decode(cache, id, query);
            check_five_tokens<TestType>(a.output, a.lse[0]);
            answers.push_back(a);
        }
        CHECK(answers[0] == answers[1]);
        CHECK(answers[0] == answers[2]);
    }
}

TEMPLATE_TEST_CASE("cases: O6, NaN in one KV head", "", float, verkv::half, verkv::bfloat16) {
    const verkv::geometry shape{2, 2, 2, 2, 1};
    const std::vector<float> query{1, 0, 1, 0};
    const verkv::step_report* report = nullptr;
    // All in H; then with a NaN token that is resident by chance, and one that is not.
    struct draw {
        std::vector<float> r;
        std::vector<verkv::token_index> sample;
        std::size_t fetched;
    };
    for (const draw& d : {draw{{1, 1, 1, 1, 1}, {0, 1, 2, 3, 4}, 0}, draw{{1, 0.5f, 0.5f, 0.5f, 0.5f}, {0, 3}, 3},
                          draw{{1, 0.5f, 0.5f, 0.5f, 0.5f}, {0, 2}, 3}}) {
        auto t = five_tokens<TestType>(shape);
        verkv::layer_cache<TestType, verkv::exact_sketch<TestType>> clean(roomy(shape, 5), {});
        const auto first = clean.open();
        prefill(clean, first, t, 0, 5);
        adopt(clean, first, d.r, d.sample);
        const verkv::tolerance promise{0.05, 0.1};
        const step_answer expected = decode(clean, first, query, promise);

        t.key(3, 1)[0] = stored<TestType>(static_cast<double>(not_a_number));
        verkv::layer_cache<TestType, verkv::exact_sketch<TestType>> cache(roomy(shape, 5), {});
        const auto id = cache.open();
        prefill(cache, id, t, 0, 5);
        adopt(cache, id, d.r, d.sample);
        const step_answer a = decode(cache, id, query, promise, &report);
        check_five_tokens<TestType>(std::span<const float>(a.output).first(2), a.lse[0]);
        CHECK(bits_of(std::span<const float>(a.output).first(2)) ==
              bits_of(std::span<const float>(expected.output).first(2)));
        CHECK(a.lse[0] == expected.lse[0]);
        CHECK(report->kv_head(0, 0).rows_fetched == d.fetched);
        CHECK(std::isnan(a.output[2]));
        CHECK(std::isnan(a.output[3]));
        CHECK(std::isnan(a.lse[1]));
        CHECK(std::isnan(report->query_head(0, 1).certificate_after));
        CHECK(report->kv_head(0, 1).rows_fetched == 0);
    }
}

TEST_CASE("cases: O7, query heads per KV head") {
    const auto outputs = [](std::size_t query_heads, std::size_t kv_heads) {
        const verkv::geometry shape{query_heads, kv_heads, 2, 1, 1};
        text<float> t(shape, 3);
        for (std::size_t i = 0; i < 3; ++i) {
            double unit = 1;
            for (std::size_t h = 0; h < kv_heads; ++h, unit *= 10) {
                *t.value(i, h) = static_cast<float>(static_cast<double>(i + 1) * unit);
            }
        }
        verkv::layer_cache<float, verkv::exact_sketch<float>> cache(roomy(shape, 3), {});
        const auto id = cache.open();
        append(cache, id, t, 0, 3);
        return decode(cache, id, std::vector<float>(query_heads * 2, 1.0f)).output;
    };
    const auto expected = [](std::size_t group, std::vector<float> of_head) {
        std::vector<float> all;
        for (const float x : of_head) {
            all.insert(all.end(), group, x);
        }
        return all;
    };
    const auto near = [](const std::vector<float>& a, const std::vector<float>& b) {
        REQUIRE(a.size() == b.size());
        for (std::size_t i = 0; i < a.size(); ++i) {
            CHECK(a[i] == Approx(b[i]).epsilon(1e-5));
        }
    };
    near(outputs(6, 2), expected(3, {2, 20}));
    near(outputs(10, 2), expected(5, {2, 20}));
    near(outputs(7, 1), expected(7, {2}));
    near(outputs(12, 4), expected(3, {2, 20, 200, 2000}));
    near(outputs(16, 1), expected(16, {2}));
    near(outputs(32, 1), expected(32, {2}));
    CHECK(refused([&] { outputs(5, 2); }, {"5", "2"}));
    CHECK(refused([&] { outputs(33, 2); }, {"33", "2"}));
}

TEST_CASE("cases: O11, logits below any sentinel") {
    const verkv::geometry shape{1, 1, 1, 1, 1};
    text<float> t(shape, 3);
    for (std::size_t i = 0; i < 3; ++i) {
        *t.key(i, 0) = -200000.0f + static_cast<float>(i);
        *t.value(i, 0) = static_cast<float>(10 * (i + 1));
    }
    verkv::layer_cache<float, verkv::exact_sketch<float>> cache(roomy(shape, 3), {});
    const auto id = cache.open();
    append(cache, id, t, 0, 3);
    const step_answer a = decode(cache, id, std::vector<float>{1});
    CHECK(a.output[0] == Approx(25.75210383).epsilon(1e-5));
    CHECK(a.lse[0] == Approx(-199997.5924).margin(0.02).epsilon(0));
}
