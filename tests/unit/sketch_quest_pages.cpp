// The page sketch on small inputs with known answers and against a slow one in doubles, and what it refuses; the
// per-channel code.
#include "verkv/sketch/quest_pages.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "support/allocations.hpp"
#include "support/bounded_estimates.hpp"
#include "support/catch.hpp"
#include "support/float_rows.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/sketch/exact.hpp"
#include "verkv/sketch/per_channel.hpp"

namespace {

using support::dice;
using support::estimates_of;
using support::normal_floats;
using support::refused;
using support::rows_of;
using verkv::bfloat16;
using verkv::cpu;
using verkv::half;
using verkv::quest_page_options;
using verkv::quest_page_sketch;
using verkv::rows;

static_assert(verkv::bounded_sketch<quest_page_sketch, cpu, float>);
static_assert(verkv::bounded_sketch<quest_page_sketch, cpu, half>);
static_assert(verkv::bounded_sketch<quest_page_sketch, cpu, bfloat16>);
static_assert(verkv::erasable_sketch<quest_page_sketch>);
static_assert(verkv::sketch<verkv::exact_sketch<float>, cpu, float>);
static_assert(!verkv::bounded_sketch<verkv::exact_sketch<float>, cpu, float>);
static_assert(!verkv::bounded_sketch<verkv::rope_pair_sketch, cpu, float>);

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

quest_page_sketch sketch_of(const std::vector<float>& keys, std::size_t width, std::size_t page_length) {
    quest_page_sketch s(quest_page_options{width, page_length});
    s.fit(cpu{}, rows_of(keys, width));
    s.append(cpu{}, rows_of(keys, width));
    return s;
}

/// Largest multiple of a half's spacing (times unit) at most x, in doubles.
double half_floor(double x, double unit) {
    if (x == 0) {
        return 0;
    }
    int exponent;
    std::frexp(x / unit, &exponent);
    const double quantum = std::ldexp(unit, (std::max)(exponent - 11, -24));
    return std::floor(x / quantum) * quantum;
}

TEST_CASE("pages: the middle and half the distance of what a page's extremes allow") {
    // Channel 0: 1 ... 3, channel 1: -2 ... 4; then 5 and 0 alone.
    const std::vector<float> keys = {1, 4, 3, -2, 2, 0, 5, 0};
    const quest_page_sketch s = sketch_of(keys, 2, 3);
    const auto e = estimates_of(s, {1, -1, 2, 1}, 0.5f);
    // <(1, -1), .>: middles 2, 1: 1; half widths 1, 3: 4. <(2, 1), .>: 5 and 2 + 3.
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK(e.logits[i] == 0.5f);
        CHECK(e.bounds[i] == Approx(2).epsilon(1e-5));
        CHECK(e.logits[4 + i] == 2.5f);
        CHECK(e.bounds[4 + i] == Approx(2.5).epsilon(1e-5));
    }
    CHECK(e.logits[3] == 2.5f);
    CHECK(e.logits[7] == 5);
    CHECK(e.bounds[3] >= 0);
    CHECK(e.bounds[3] < 1e-5f);

    SECTION("a negative scale turns the estimates round and leaves the bounds") {
        const auto turned = estimates_of(s, {1, -1, 2, 1}, -0.5f);
        CHECK(turned.bounds == e.bounds);
        for (std::size_t i = 0; i < e.logits.size(); ++i) {
            CHECK(turned.logits[i] == -e.logits[i]);
        }
    }
    SECTION("scale 0: all logits are 0") {
        const auto none = estimates_of(s, {1, -1, 2, 1}, 0);
        for (std::size_t i = 0; i < none.logits.size(); ++i) {
            CHECK(none.logits[i] == 0);
            CHECK((none.bounds[i] >= 0 && none.bounds[i] < 1e-40f));
        }
    }
    CHECK(s.bound_failure() == 0);
}

TEST_CASE("pages: extremes are rounded outward, to the neighbouring half at most") {
    using verkv::detail::half_above;
    using verkv::detail::half_below;
    for (std::uint32_t bits = 0; bits < 0x7bffu; ++bits) {
        const auto low = static_cast<double>(verkv::to_float(half{static_cast<std::uint16_t>(bits)}));
        const auto high = static_cast<double>(verkv::to_float(half{static_cast<std::uint16_t>(bits + 1)}));
        const bool exact = verkv::to_float(half_below(low)) == static_cast<float>(low) &&
                           verkv::to_float(half_above(low)) == static_cast<float>(low) &&
                           verkv::to_float(half_below(-low)) == -static_cast<float>(low);
        bool between = true;
        for (const double share : {0x1p-10, 0.5, 1 - 0x1p-10}) {
            const double x = low + share * (high - low);
            between = between && static_cast<double>(verkv::to_float(half_below(x))) == low &&
                      static_cast<double>(verkv::to_float(half_above(x))) == high &&
                      static_cast<double>(verkv::to_float(half_below(-x))) == -high &&
                      static_cast<double>(verkv::to_float(half_above(-x))) == -low;
        }
        if (!exact || !between) {
            CAPTURE(bits);
            FAIL("half " << low << " exact " << exact << ", between " << between);
        }
    }
    for (const double x : {1e-60, 0x1p-149, 0x1p-26}) {
        CHECK(half_below(x).bits == 0);
        CHECK(half_above(x).bits == 1);
        CHECK(half_below(-x).bits == 0x8001);
        CHECK((half_above(-x).bits & 0x7fff) == 0);
    }
}

template <class T>
void check_against_doubles(dice& d, std::size_t width, std::size_t page_length, std::size_t n, std::size_t heads) {
    CAPTURE(width, page_length, n, heads, sizeof(T));
    std::vector<T> keys;
    const double large = d.chance(0.3) ? 1e7 : 1.0;  // beyond a half's range
    for (std::size_t i = 0; i < n * width; ++i) {
        keys.push_back(verkv::from_float<T>(static_cast<float>(
            (std::is_same_v<T, half> ? 1.0 : large) * (std::sin(static_cast<double>(i % width)) + d.normal()))));
    }
    const std::vector<float> queries = normal_floats(d, heads * width);
    const auto scale = static_cast<float>(d.between(-0.3, 0.3));
    quest_page_sketch s(quest_page_options{width, page_length});
    s.fit(cpu{}, rows_of(keys, width));
    s.append(cpu{}, rows_of(keys, width));
    const auto e = estimates_of(s, queries, scale);
    double worst = 0, tight = 0;
    bool enough = true;
    for (std::size_t first = 0; first < n; first += page_length) {
        const std::size_t last = (std::min)(n, first + page_length);
        std::vector<double> low(width, 1e300), high(width, -1e300);
        double most = 0;
        for (std::size_t i = first; i < last; ++i) {
            for (std::size_t c = 0; c < width; ++c) {
                const auto x = static_cast<double>(verkv::to_float(keys[i * width + c]));
                low[c] = (std::min)(low[c], x);
                high[c] = (std::max)(high[c], x);
                most = (std::max)(most, std::abs(x));
            }
        }
        double unit = 1;
        while (most / unit > 65504) {
            unit *= 2;
        }
        for (std::size_t h = 0; h < heads; ++h) {
            double upper = 0, lower = 0, size = 0;
            for (std::size_t c = 0; c < width; ++c) {
                const double a = half_floor(low[c], unit), b = -half_floor(-high[c], unit);
                const double q = static_cast<double>(scale) * static_cast<double>(queries[h * width + c]);
                upper += (std::max)(q * a, q * b);
                lower += (std::min)(q * a, q * b);
                size += std::abs(q) * (std::max)(std::abs(a), std::abs(b));
            }
            const double rounding = static_cast<double>(width + 6) * 0x1p-24 * size;
            for (std::size_t i = first; i < last; ++i) {
                const auto estimated = static_cast<double>(e.logits[h * n + i]);
                const auto bound = static_cast<double>(e.bounds[h * n + i]);
                worst = (std::max)(worst, std::abs(estimated - (upper + lower) / 2) / (rounding + 1e-40));
                enough = enough && bound >= (upper - lower) / 2;
                tight = (std::max)(tight, (bound - (upper - lower) / 2) / (rounding + 1e-40));
            }
        }
    }
    CHECK(worst <= 1);
    CHECK(enough);
    CHECK(tight <= 2.3);  // the sums twice, the logit and the bound itself once
}

TEST_CASE("pages: estimates and bounds are those of a slow sketch in doubles") {
    dice d(31);
    for (const std::size_t width : {64u, 80u, 128u, 256u, 65u, 2u, 1u, 1000u}) {
        for (const std::size_t heads : {1u, 3u, 4u, 5u, 7u, 12u, 32u}) {
            const std::size_t page_length = 1 + d.below(20);
            const std::size_t n = 1 + d.below(90);
            check_against_doubles<float>(d, width, page_length, n, heads);
            check_against_doubles<half>(d, width, page_length, n, heads);
            check_against_doubles<bfloat16>(d, width, 16, n, heads);
        }
    }
}

TEST_CASE("pages: tokens give the same bits however they arrive, also where a page outgrows a half") {
    dice d(32);
    for (int round = 0; round < 60; ++round) {
        const std::size_t width = 1 + d.below(70);
        const std::size_t page_length = 1 + d.below(9);
        const std::size_t n = 1 + d.below(60);
        auto keys = normal_floats(d, n * width);
        for (float& x : keys) {
            x *= d.chance(0.02) ? 3e6f : d.chance(0.1) ? 1e-7f : 1.0f;
        }
        const auto queries = normal_floats(d, 3 * width);
        const auto whole = estimates_of(sketch_of(keys, width, page_length), queries);
        quest_page_sketch s(quest_page_options{width, page_length});
        s.fit(cpu{}, rows_of(keys, width));
        for (std::size_t first = 0; first < n;) {
            const std::size_t count = (std::min)(n - first, d.below(1 + 2 * page_length));
            s.append(cpu{}, rows_of(keys, width).slice(first, count));
            first += count;
        }
        REQUIRE(estimates_of(s, queries) == whole);
    }
}

TEST_CASE("pages: many threads give the bits of one") {
    dice d(33);
    const auto keys = normal_floats(d, 3000 * 128);
    const auto queries = normal_floats(d, 5 * 128);
    const quest_page_sketch s = sketch_of(keys, 128, 7);
    verkv::thread_pool pool(3);
    CHECK(estimates_of(s, queries, 0.1f, cpu{&pool}) == estimates_of(s, queries, 0.1f));
}

TEST_CASE("pages: erasing leaves the others' bits, and appending goes on in an open page only") {
    dice d(34);
    const auto keys = normal_floats(d, 22 * 3);
    const auto query = normal_floats(d, 3);
    quest_page_sketch s = sketch_of(keys, 3, 4);
    const auto before = estimates_of(s, query);

    SECTION("random ranges") {
        for (int round = 0; round < 100; ++round) {
            quest_page_sketch t = sketch_of(keys, 3, 4);
            std::vector<std::size_t> left(22);
            std::iota(left.begin(), left.end(), std::size_t{0});
            while (!left.empty()) {
                const std::size_t first = d.below(left.size() + 1);
                const std::size_t last = first + d.below(left.size() + 1 - first);
                t.erase(first, last);
                left.erase(left.begin() + static_cast<std::ptrdiff_t>(first),
                           left.begin() + static_cast<std::ptrdiff_t>(last));
                REQUIRE(t.size() == left.size());
                const auto after = estimates_of(t, query);
                for (std::size_t i = 0; i < left.size(); ++i) {
                    REQUIRE(after.logits[i] == before.logits[left[i]]);
                    REQUIRE(after.bounds[i] == before.bounds[left[i]]);
                }
            }
            CHECK(t.bytes() == 0);
        }
    }
    SECTION("the open page keeps the extremes of what it lost") {
        const std::vector<float> x = {0, 10, 4, 5};
        quest_page_sketch t = sketch_of(x, 1, 8);
        t.erase(1, 2);
        const std::vector<float> more = {-2};
        t.append(cpu{}, rows_of(more, 1));
        const auto e = estimates_of(t, {1});
        REQUIRE(e.logits.size() == 4);
        CHECK(e.logits[3] == 4);
        CHECK(e.bounds[3] == Approx(6).epsilon(1e-5));
        CHECK(e.logits[0] == 4);
    }
    SECTION("a shortened page that was full stays short; a page that lost everything is gone") {
        const std::vector<float> x = {0, 10, 4, 6};
        quest_page_sketch t = sketch_of(x, 1, 2);
        t.erase(3, 4);
        const std::vector<float> more = {100, 200};
        t.append(cpu{}, rows_of(more, 1));
        CHECK(estimates_of(t, {1}).logits == std::vector<float>{5, 5, 5, 150, 150});
        t.erase(3, 5);
        t.append(cpu{}, rows_of(more, 1).slice(1, 1));
        t.erase(3, 4);
        t.append(cpu{}, rows_of(more, 1));
        CHECK(estimates_of(t, {1}).logits == std::vector<float>{5, 5, 5, 150, 150});
    }
    SECTION("an open page takes page_length tokens after an erase") {
        const std::vector<float> x = {0, 8};
        quest_page_sketch t = sketch_of(x, 1, 3);
        t.erase(0, 1);
        const std::vector<float> more = {2, 4, 50};
        t.append(cpu{}, rows_of(more, 1));
        CHECK(estimates_of(t, {1}).logits == std::vector<float>{4, 4, 4, 50});
    }
}

TEST_CASE("pages: a NaN or infinite element spoils its own page and nothing else") {
    dice d(35);
    const auto clean = normal_floats(d, 22 * 5);
    const auto query = normal_floats(d, 5);
    const auto expected = estimates_of(sketch_of(clean, 5, 4), query);
    for (const float bad : {not_a_number, infinity, -infinity}) {
        for (const std::size_t token : {0u, 9u, 15u, 20u, 21u}) {
            for (const bool one_by_one : {false, true}) {
                auto keys = clean;
                keys[token * 5 + 2] = bad;
                quest_page_sketch s(quest_page_options{5, 4});
                s.fit(cpu{}, rows_of(keys, 5));
                for (std::size_t i = 0; i < 22; i += one_by_one ? 1 : 22) {
                    s.append(cpu{}, rows_of(keys, 5).slice(i, one_by_one ? 1 : 22));
                }
                const auto e = estimates_of(s, query);
                for (std::size_t i = 0; i < 22; ++i) {
                    if (i / 4 == token / 4) {
                        CHECK(std::isnan(e.logits[i]));
                        CHECK(e.bounds[i] == infinity);
                    } else {
                        CHECK(e.logits[i] == expected.logits[i]);
                        CHECK(e.bounds[i] == expected.bounds[i]);
                    }
                }
            }
        }
    }
    SECTION("an infinite query makes every bound infinite") {
        const auto e = estimates_of(sketch_of(clean, 5, 4), {infinity, 1, 1, 1, 1});
        for (const float bound : e.bounds) {
            CHECK(bound == infinity);
        }
    }
}

TEST_CASE("pages: sizes, and memory within what was reserved") {
    dice d(36);
    const auto keys = normal_floats(d, 50 * 6);
    const auto queries = normal_floats(d, 5 * 6);
    quest_page_sketch s(quest_page_options{6, 16});
    s.fit(cpu{}, rows_of(keys, 6));
    CHECK(s.size() == 0);
    CHECK(s.bytes() == 0);
    s.reserve(50);
    std::vector<float> logits(5 * 50), bounds(5 * 50);
    CHECK(support::allocations_of([&] {
              for (std::size_t i = 0; i < 50; ++i) {
                  s.append(cpu{}, rows_of(keys, 6).slice(i, 1));
              }
              s.estimate(cpu{}, rows_of(queries, 6), 1, {logits.data(), 5, 50, 50}, {bounds.data(), 5, 50, 50});
              s.erase(3, 20);
          }) == 0);
    CHECK(s.size() == 33);
    CHECK(s.bytes() == 4 * (6 * 4 + 4));  // 3, 12, 16, 2
    CHECK(s.bytes_per_token() == 28.0 / 16);
    CHECK(s.open_bytes() == 2 * 6 * sizeof(float));
    CHECK(quest_page_sketch(quest_page_options{128}).bytes_per_token() == 32.25);
    s.fit(cpu{}, rows_of(keys, 6));
    CHECK(s.size() == 0);
    s.append(cpu{}, rows_of(keys, 6));
    CHECK(estimates_of(s, queries) == estimates_of(sketch_of(keys, 6, 16), queries));
}

TEST_CASE("pages: what is refused") {
    const std::vector<float> keys(4 * 6);
    CHECK(refused([] { quest_page_sketch(quest_page_options{0}); }, {"0 channels"}));
    CHECK(refused([] { quest_page_sketch(quest_page_options{65537}); }, {"65537"}));
    CHECK(refused([] { quest_page_sketch(quest_page_options{8, 0}); }, {"page_length is 0"}));
    quest_page_sketch s = sketch_of(keys, 6, 16);
    CHECK(refused([&] { s.fit(cpu{}, rows_of(keys, 3)); }, {"3 channels", "6"}));
    CHECK(refused([&] { s.append(cpu{}, rows_of(keys, 3)); }, {"3 channels", "6"}));
    CHECK(refused([&] { s.append(cpu{}, rows<float>{nullptr, 6, 2, 6, nullptr}); }, {"null", "2 keys"}));
    CHECK(refused([&] { s.erase(2, 1); }, {"2", "1", "4"}));
    CHECK(refused([&] { s.erase(2, 5); }, {"2", "5", "4"}));
    std::vector<float> out(100);
    const auto queries = rows_of(keys, 6).slice(0, 2);
    const verkv::matrix_view<float> good{out.data(), 2, 4, 4}, wide{out.data(), 2, 5, 5}, over{out.data(), 2, 4, 3},
        none{nullptr, 2, 4, 4};
    CHECK(refused([&] { s.estimate(cpu{}, rows_of(keys, 3).slice(0, 2), 1, good, good); }, {"3 channels"}));
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, wide, good); }, {"logits are [2, 5]"}));
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, good, wide); }, {"bounds are [2, 5]"}));
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, good, over); }, {"bounds", "stride 3"}));
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, none); }, {"null", "logits"}));
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, good, none); }, {"null", "bounds"}));
    CHECK(s.size() == 4);
}

TEST_CASE("per channel: all channels are kept, in the bits asked for") {
    for (const std::size_t width : {2u, 64u, 80u, 128u, 1000u}) {
        dice d(37);
        const auto keys = normal_floats(d, 9 * width);
        verkv::rope_pair_sketch s = verkv::per_channel_sketch(width);
        CHECK(s.options().bits == 2);
        CHECK(s.options().group_length == 128);
        s.fit(cpu{}, rows_of(keys, width));
        REQUIRE(s.channels().size() == width);
        for (std::size_t c = 0; c < width; ++c) {
            REQUIRE(s.channels()[c] == c);
        }
    }
    CHECK(verkv::per_channel_sketch(128).bytes_per_token() == 36);
    CHECK(verkv::per_channel_sketch(64, 3, 32).options().bits == 3);
    CHECK(verkv::per_channel_sketch(64, 3, 32).options().group_length == 32);
    CHECK(refused([] { (void)verkv::per_channel_sketch(65); }, {"65"}));
    CHECK(refused([] { (void)verkv::per_channel_sketch(64, 9); }, {"9 bits"}));
}

}  // namespace
