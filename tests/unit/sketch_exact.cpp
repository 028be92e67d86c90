// The exact sketch.
#include "verkv/sketch/exact.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "support/catch.hpp"
#include "verkv/core/concepts.hpp"

namespace {

using verkv::bfloat16;
using verkv::cpu;
using verkv::exact_sketch;
using verkv::half;
using verkv::row_id;
using verkv::rows;

static_assert(verkv::sketch<exact_sketch<float>, cpu, float>);
static_assert(verkv::sketch<exact_sketch<half>, cpu, half>);
static_assert(verkv::sketch<exact_sketch<bfloat16>, cpu, bfloat16>);
static_assert(verkv::erasable_sketch<exact_sketch<float>>);

template <class T>
std::vector<float> estimate(const exact_sketch<T>& s, const std::vector<float>& queries, std::size_t width,
                            float scale) {
    const std::size_t heads = queries.size() / width;
    std::vector<float> logits(heads * s.size(), -1.0f);
    s.estimate(cpu{}, verkv::contiguous_rows(std::span<const float>(queries), width), scale,
               {logits.data(), heads, s.size(), static_cast<std::ptrdiff_t>(s.size())});
    return logits;
}

template <class T>
void check_against_doubles(std::size_t width, std::size_t heads) {
    std::mt19937 engine(1);
    std::normal_distribution<float> normal;
    const std::size_t n = 37;
    const std::size_t stride = width + 3;
    std::vector<T> pool(2 * n * stride, verkv::from_float<T>(std::numeric_limits<float>::quiet_NaN()));
    std::vector<row_id> ids;
    for (std::size_t i = 0; i < n; ++i) {
        ids.push_back(static_cast<row_id>((i * 29 + 1) % (2 * n)));
        for (std::size_t c = 0; c < width; ++c) {
            pool[ids.back() * stride + c] = verkv::from_float<T>(normal(engine));
        }
    }
    std::vector<float> queries(heads * width);
    for (auto& x : queries) {
        x = normal(engine);
    }
    const rows<T> keys{pool.data(), static_cast<std::ptrdiff_t>(stride), n, width, ids.data()};
    exact_sketch<T> s;
    s.fit(cpu{}, keys);
    s.append(cpu{}, keys.slice(0, 10));
    s.append(cpu{}, keys.slice(10, 0));
    s.append(cpu{}, keys.slice(10, 27));
    REQUIRE(s.size() == n);
    CHECK(s.bytes() == n * width * sizeof(T));
    const auto logits = estimate(s, queries, width, 0.5f);
    for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t i = 0; i < n; ++i) {
            double expected = 0;
            double magnitude = 0;
            for (std::size_t c = 0; c < width; ++c) {
                const double term = 0.5 * static_cast<double>(queries[h * width + c]) *
                                    static_cast<double>(verkv::to_float(keys[i][c]));
                expected += term;
                magnitude += std::abs(term);
            }
            REQUIRE(std::abs(static_cast<double>(logits[h * n + i]) - expected) <=
                    static_cast<double>(width + 5) * 0x1p-24 * magnitude);
        }
    }
}

TEST_CASE("sketch: the exact sketch gives scale <q, k>") {
    for (const std::size_t width : {1u, 2u, 7u, 64u, 80u, 128u}) {
        for (const std::size_t heads : {1u, 3u, 7u}) {
            check_against_doubles<float>(width, heads);
            check_against_doubles<half>(width, heads);
            check_against_doubles<bfloat16>(width, heads);
        }
    }
}

TEST_CASE("sketch: the exact sketch forgets tokens and leaves the others") {
    const cpu exec;
    std::vector<float> keys;
    for (int i = 0; i < 10; ++i) {
        keys.push_back(static_cast<float>(i));
        keys.push_back(i == 6 ? std::numeric_limits<float>::quiet_NaN() : 1.0f);
    }
    const auto all = verkv::contiguous_rows(std::span<const float>(keys), 2);
    exact_sketch<float> s;
    s.fit(exec, all);
    s.append(exec, all);
    const auto before = estimate(s, {2, 1}, 2, 1.0f);
    CHECK(std::isnan(before[6]));
    s.erase(2, 4);
    s.erase(4, 5);
    const auto after = estimate(s, {2, 1}, 2, 1.0f);
    const std::vector<std::size_t> tokens = {0, 1, 4, 5, 7, 8, 9};
    REQUIRE(after.size() == tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        CHECK(after[i] == before[tokens[i]]);
    }
    s.append(exec, all.slice(0, 1));
    CHECK(s.size() == 8);
    CHECK(estimate(s, {2, 1}, 2, 1.0f)[7] == 1.0f);
    s.fit(exec, all);
    CHECK(s.size() == 0);
    CHECK(estimate(s, {2, 1}, 2, 1.0f).empty());
}

TEST_CASE("sketch: what the exact sketch refuses") {
    const cpu exec;
    const std::vector<float> keys(12, 1.0f);
    const auto of_4 = verkv::contiguous_rows(std::span<const float>(keys), 4);
    const auto of_3 = verkv::contiguous_rows(std::span<const float>(keys), 3);
    exact_sketch<float> s;
    CHECK_THROWS_AS(s.append(exec, of_4), verkv::invalid_state);
    CHECK_THROWS_AS(s.fit(exec, rows<float>{}), verkv::invalid_argument);
    s.fit(exec, of_4);
    s.append(exec, of_4);
    CHECK_THROWS_AS(s.append(exec, of_3), verkv::invalid_argument);
    // 2^62 keys of 4 floats are 0 bytes modulo 2^64.
    const std::size_t many = std::size_t{1} << 62;
    CHECK_THROWS_AS(s.reserve(many), verkv::invalid_argument);
    CHECK_THROWS_AS(s.append(exec, rows<float>{keys.data(), 0, many, 4, nullptr}), verkv::invalid_argument);
    CHECK_THROWS_AS(s.erase(1, 4), verkv::invalid_argument);
    CHECK_THROWS_AS(s.erase(2, 1), verkv::invalid_argument);
    std::vector<float> logits(12);
    CHECK_THROWS_AS(s.estimate(exec, of_3, 1.0f, {logits.data(), 4, 3, 3}), verkv::invalid_argument);
    CHECK_THROWS_AS(s.estimate(exec, of_4, 1.0f, {logits.data(), 3, 4, 4}), verkv::invalid_argument);
    CHECK_THROWS_AS(s.estimate(exec, of_4, 1.0f, {logits.data(), 3, 3, 2}), verkv::invalid_argument);
    CHECK(s.size() == 3);
}

}  // namespace
