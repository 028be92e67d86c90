#include "verkv/core/random.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/catch.hpp"

namespace {

using verkv::position_t;
using verkv::uniform;
using verkv::uniform_stream;

/// The uniform that two 32-bit words of Philox make.
double from_words(std::uint32_t low, std::uint32_t high) {
    return std::ldexp(static_cast<double>(((static_cast<std::uint64_t>(high) << 32) | low) >> 11), -53);
}

/// Mean of the uniforms of positions 0 ... n-1, and the share of them below a threshold.
struct moments {
    double mean = 0;
    double square = 0;
    double below_a_tenth = 0;
};

moments moments_of(const uniform_stream& s, position_t n) {
    moments m;
    for (position_t p = 0; p < n; ++p) {
        const double u = uniform(s, p);
        m.mean += u / n;
        m.square += u * u / n;
        m.below_a_tenth += (u < 0.1 ? 1.0 : 0.0) / n;
    }
    return m;
}

}  // namespace

// Known answers that Random123 publishes for philox4x32-10 (its kat_vectors).
TEST_CASE("core: uniforms are Philox4x32-10 words, by its published known answers") {
    SECTION("counter 0, key 0: 6627e8d5 e169c58d bc57ac4c 9b00dbd8") {
        CHECK(uniform({}, 0) == from_words(0x6627e8d5u, 0xe169c58du));
        CHECK(uniform({}, 1) == from_words(0xbc57ac4cu, 0x9b00dbd8u));
    }
    SECTION("counter and key from the digits of pi: d16cfe09 94fdcceb 5001e420 24126ea1") {
        const uniform_stream s{
            .seed = 0x299f31d0a4093822u, .layer = 0x85a308d3u, .kv_head = 0x13198a2eu, .draw = 0x03707344u};
        const auto position = static_cast<position_t>(2 * 0x243f6a88u);
        CHECK(uniform(s, position) == from_words(0xd16cfe09u, 0x94fdccebu));
        CHECK(uniform(s, position + 1) == from_words(0x5001e420u, 0x24126ea1u));
    }
}

TEST_CASE("core: uniforms lie in [0, 1), at the ends of the keys' ranges as well") {
    const auto last = (std::numeric_limits<position_t>::max)();
    const auto all = (std::numeric_limits<std::uint32_t>::max)();
    for (const uniform_stream& s :
         {uniform_stream{}, uniform_stream{(std::numeric_limits<std::uint64_t>::max)(), all, all, all}}) {
        for (const position_t first : {position_t{0}, last - 9999}) {
            for (position_t k = 0; k < 10000; ++k) {
                const double u = uniform(s, first + k);
                REQUIRE(u >= 0);
                REQUIRE(u < 1);
                // A multiple of 2^-53.
                REQUIRE(std::ldexp(u, 53) == std::floor(std::ldexp(u, 53)));
            }
        }
    }
    static_assert((std::numeric_limits<std::uint64_t>::max() >> 11) * 0x1p-53 < 1);
}

TEST_CASE("core: a uniform depends on its keys alone, and on each of them") {
    const uniform_stream s{.seed = 7, .layer = 3, .kv_head = 2, .draw = 1};
    std::vector<double> seen;
    // Neighbours in every key, and keys swapped with each other.
    for (const std::uint64_t seed : {std::uint64_t{7}, std::uint64_t{8}, std::uint64_t{7} << 32, ~std::uint64_t{7}}) {
        for (std::uint32_t layer = 0; layer < 4; ++layer) {
            for (std::uint32_t head = 0; head < 4; ++head) {
                for (std::uint32_t draw = 0; draw < 4; ++draw) {
                    for (position_t p = 0; p < 16; ++p) {
                        seen.push_back(uniform({seed, layer, head, draw}, p));
                    }
                }
            }
        }
    }
    // 4096 draws of 53 bits: any two are equal with probability below 1e-9.
    std::sort(seen.begin(), seen.end());
    CHECK(std::adjacent_find(seen.begin(), seen.end()) == seen.end());
    CHECK(uniform(s, 5) == uniform({7, 3, 2, 1}, 5));
}

// 60 means of n = 20000 uniforms each against their standard errors. Five standard errors: a true generator fails with
// probability below 60 * 3 * 6e-7 = 1e-4; the seeds are fixed.
TEST_CASE("core: uniforms have the moments of uniforms in every stream") {
    constexpr position_t n = 20000;
    const double root = std::sqrt(static_cast<double>(n));
    for (std::uint32_t k = 0; k < 60; ++k) {
        const moments m = moments_of({.seed = k % 5, .layer = k % 4, .kv_head = k % 3, .draw = k}, n);
        CHECK(std::fabs(m.mean - 0.5) < 5 * std::sqrt(1.0 / 12) / root);
        CHECK(std::fabs(m.square - 1.0 / 3) < 5 * std::sqrt(4.0 / 45) / root);
        CHECK(std::fabs(m.below_a_tenth - 0.1) < 5 * std::sqrt(0.09) / root);
    }
}

// Correlation of n = 100000 pairs of uniforms that differ in one key; the standard error is 1/sqrt(n). Five of them:
// below 5 * 6e-7 for a true generator.
TEST_CASE("core: uniforms that differ in one key are uncorrelated") {
    constexpr position_t n = 100000;
    const uniform_stream a{.seed = 11, .layer = 1, .kv_head = 1, .draw = 0};
    struct pair {
        uniform_stream stream;
        position_t shift;
    };
    for (const pair& other :
         {pair{{12, 1, 1, 0}, 0}, pair{{11, 2, 1, 0}, 0}, pair{{11, 1, 2, 0}, 0}, pair{{11, 1, 1, 1}, 0}, pair{a, 1}}) {
        double sum = 0;
        for (position_t p = 0; p < n; ++p) {
            sum += (uniform(a, p) - 0.5) * (uniform(other.stream, p + other.shift) - 0.5);
        }
        CHECK(std::fabs(sum / n * 12) < 5 / std::sqrt(static_cast<double>(n)));
    }
}

TEST_CASE("core: a uniform exactly at the probability is out, and the ends are certain") {
    using verkv::sampled;
    CHECK(sampled(0.5, 0.25));
    CHECK(!sampled(0.5, 0.5));
    CHECK(sampled(std::nextafter(0.5, 1.0), 0.5));
    for (const double u : {0.0, 0.5, 1.0}) {
        CHECK(sampled(1.0, u));
        CHECK(!sampled(0.0, u));
        CHECK(!sampled(-0.5, u));
        CHECK(!sampled(std::numeric_limits<double>::quiet_NaN(), u));
    }
    CHECK(!sampled(0x1p-30, 0x1p-30));
    CHECK(sampled(0x1p-30, 0x1p-31));
}
