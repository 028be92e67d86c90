// The rotated sketch against a slow one in doubles; its rotation and its quantile; what it refuses.
#include "verkv/sketch/rotated.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <numeric>
#include <vector>

#include "support/allocations.hpp"
#include "support/bounded_estimates.hpp"
#include "support/catch.hpp"
#include "support/float_rows.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"

namespace {

using support::dice;
using support::estimates_of;
using support::normal_floats;
using support::refused;
using support::rows_of;
using verkv::bfloat16;
using verkv::cpu;
using verkv::half;
using verkv::rotated_options;
using verkv::rotated_sketch;
using verkv::rows;

static_assert(verkv::bounded_sketch<rotated_sketch, cpu, float>);
static_assert(verkv::bounded_sketch<rotated_sketch, cpu, half>);
static_assert(verkv::bounded_sketch<rotated_sketch, cpu, bfloat16>);
static_assert(verkv::erasable_sketch<rotated_sketch>);

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

template <class T>
rotated_sketch sketch_of(const rotated_options& o, const std::vector<T>& keys) {
    rotated_sketch s(o);
    s.fit(cpu{}, rows_of(keys, o.key_dim));
    s.append(cpu{}, rows_of(keys, o.key_dim));
    return s;
}

/// A token's code, read bit by bit.
std::vector<double> code_of(const rotated_sketch& s, std::size_t token) {
    const verkv::rotated_codes c = s.codes();
    std::vector<double> x;
    for (std::size_t bit = 0; bit < c.key_dim * c.bits; bit += c.bits) {
        unsigned code = 0;
        for (std::size_t b = 0; b < c.bits; ++b) {
            const std::uint32_t word = c.codes[(token / 16 * c.words + (bit + b) / 32) * 16 + token % 16];
            code |= (word >> ((bit + b) % 32) & 1u) << b;
        }
        x.push_back(code - (std::ldexp(1.0, static_cast<int>(c.bits)) - 1) / 2);
    }
    return x;
}

/// P x in doubles.
std::vector<double> rotated(const rotated_sketch& s, const std::vector<double>& x) {
    std::vector<double> y(x.size());
    for (std::size_t j = 0; j < x.size(); ++j) {
        for (std::size_t i = 0; i < x.size(); ++i) {
            y[i] += static_cast<double>(s.rotation()[j * s.padded_channels() + i]) * x[j];
        }
    }
    return y;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

TEST_CASE("rotated: the quantile of a coordinate on a sphere") {
    using verkv::detail::sphere_quantile;
    for (const double p : {0.9, 0.5, 0.1, 1e-3, 1e-6, 1e-9, 1e-15}) {
        CAPTURE(p);
        CHECK(sphere_quantile(1, p) == 1);
        CHECK(sphere_quantile(2, p) == Approx(std::cos(std::numbers::pi * p / 2)).epsilon(1e-12));
        CHECK(sphere_quantile(3, p) == Approx(1 - p).epsilon(1e-12));
        // Four dimensions: 1 - (2 / pi) (asin z + z sqrt(1 - z^2)); five: 1 - (3 z - z^3) / 2.
        const double four = sphere_quantile(4, p);
        const double five = sphere_quantile(5, p);
        const double angle = std::acos(four);
        CHECK(2 / std::numbers::pi * (angle - std::sin(angle) * std::cos(angle)) ==
              Approx(p).epsilon(1e-6).margin(1e-15));
        CHECK((1 - five) * (1 - five) * (2 + five) / 2 == Approx(p).epsilon(1e-6));
        double last = 2;
        for (const std::size_t dimensions : {2u, 3u, 4u, 5u, 10u, 63u, 64u, 127u, 255u, 1023u}) {
            const double z = sphere_quantile(dimensions, p);
            CHECK((z > 0 && z <= last));
            last = z;
            CHECK(sphere_quantile(dimensions, 0) == 1);
        }
    }
    SECTION("by integration of (1 - z^2)^((m - 3) / 2)") {
        for (const std::size_t dimensions : {6u, 7u, 63u, 64u, 127u, 128u, 255u, 1023u}) {
            for (const double p : {0.9, 0.3, 0.1, 1e-3, 1e-9}) {
                const double z = sphere_quantile(dimensions, p);
                const auto integral = [&](double from, double to) {
                    constexpr int steps = 20000;  // Simpson
                    double sum = 0;
                    for (int i = 0; i <= steps; ++i) {
                        const double x = from + (to - from) * i / steps;
                        const double weight = i == 0 || i == steps ? 1 : i % 2 ? 4 : 2;
                        sum += weight *
                               std::pow((std::max)((1 - x) * (1 + x), 0.0), (static_cast<double>(dimensions) - 3) / 2);
                    }
                    return sum * (to - from) / steps / 3;
                };
                CAPTURE(dimensions, p);
                CHECK(integral(z, 1) / integral(0, 1) == Approx(p).epsilon(1e-5));
            }
        }
    }
    SECTION("far out it tends to the normal's") {
        CHECK(sphere_quantile(1000000, 0.05) * 1000 == Approx(1.959964).epsilon(1e-5));
    }
}

TEST_CASE("rotated: the rotation is orthogonal, uniform, and the seed's") {
    for (const std::size_t width : {2u, 3u, 64u, 65u, 128u}) {
        const rotated_sketch s(rotated_options{width, 1, 1e-3, 5});
        double worst = 0;
        for (std::size_t a = 0; a < width; ++a) {
            for (std::size_t b = 0; b <= a; ++b) {
                double sum = a == b ? -1 : 0;
                for (std::size_t i = 0; i < s.padded_channels(); ++i) {
                    sum += static_cast<double>(s.rotation()[a * s.padded_channels() + i]) *
                           static_cast<double>(s.rotation()[b * s.padded_channels() + i]);
                }
                worst = (std::max)(worst, std::abs(sum));
            }
        }
        CHECK(worst < 0x1p-23);
        const rotated_sketch again(rotated_options{width, 4, 1e-3, 5});
        CHECK(std::equal(s.rotation().begin(), s.rotation().end(), again.rotation().begin()));
        const rotated_sketch other(rotated_options{width, 1, 1e-3, 6});
        CHECK(!std::equal(s.rotation().begin(), s.rotation().end(), other.rotation().begin()));
        const rotated_sketch copy = s;
        CHECK(copy.rotation().data() == s.rotation().data());
    }
    SECTION("elements of both signs, of variance 1 / d; trace of mean 0 and variance 1") {
        // Over 2000 seeds each mean of standardised elements lies within 6 / sqrt(2000): false alarm 2e-9 an element.
        // Signs as a factorisation leaves them shift the diagonal by about 0.8.
        constexpr std::size_t width = 5;
        constexpr int seeds = 2000;
        std::vector<double> mean(width * width), square(width * width);
        double trace_mean = 0, trace_square = 0;
        for (int seed = 0; seed < seeds; ++seed) {
            const rotated_sketch s(rotated_options{width, 1, 1e-3, 1000 + static_cast<std::uint64_t>(seed)});
            double trace = 0;
            for (std::size_t j = 0; j < width; ++j) {
                for (std::size_t i = 0; i < width; ++i) {
                    const auto x = static_cast<double>(s.rotation()[j * s.padded_channels() + i]) * std::sqrt(5.0);
                    mean[j * width + i] += x / seeds;
                    square[j * width + i] += x * x / seeds;
                    trace += i == j ? x / std::sqrt(5.0) : 0;
                }
            }
            trace_mean += trace / seeds;
            trace_square += trace * trace / seeds;
        }
        for (std::size_t i = 0; i < width * width; ++i) {
            CHECK(std::abs(mean[i]) < 6 / std::sqrt(2000.0));
            CHECK(std::abs(square[i] - 1) < 6 * std::sqrt(8.0 / 7 / 2000));  // Var of d x^2 is 2 (d - 1) / (d + 2)
        }
        CHECK(std::abs(trace_mean) < 6 / std::sqrt(2000.0));
        CHECK(std::abs(trace_square - 1) < 6 * std::sqrt(2.0 / 2000));
    }
}

template <class T>
void check_against_doubles(dice& d, std::size_t width, unsigned bits, std::size_t n, std::size_t heads) {
    CAPTURE(width, bits, n, heads, sizeof(T));
    std::vector<T> keys;
    for (std::size_t i = 0; i < n * width; ++i) {
        keys.push_back(verkv::from_float<T>(static_cast<float>(3 * std::sin(static_cast<double>(i % width)) +
                                                               std::exp(0.3 * d.normal()) * d.normal())));
    }
    const auto queries = normal_floats(d, heads * width);
    const auto scale = static_cast<float>(d.between(-0.3, 0.3));
    const rotated_sketch s = sketch_of(rotated_options{width, bits, 1e-3, d.below(1000)}, keys);
    REQUIRE(s.size() == n);
    const auto e = estimates_of(s, queries, scale);

    std::vector<double> centre(width);
    for (std::size_t i = 0; i < n * width; ++i) {
        centre[i % width] += static_cast<double>(verkv::to_float(keys[i])) / static_cast<double>(n);
    }
    bool centred = true;
    for (std::size_t c = 0; c < width; ++c) {
        centred = centred && std::abs(static_cast<double>(s.centre()[c]) - centre[c]) < 1e-6;
        centre[c] = static_cast<double>(s.centre()[c]);
    }
    CHECK(centred);

    const double failing = 1e-3 / static_cast<double>(std::bit_ceil(n));
    const double z = verkv::detail::sphere_quantile(width - 1, failing);
    CHECK(s.quantile() == z);
    const double offset = (std::ldexp(1.0, static_cast<int>(bits)) - 1) / 2;
    double worst = 0, loose = 0, least_rho = 1;
    bool enough = true, gains = true, spreads = true;
    std::vector<std::vector<double>> turned;
    std::vector<double> centre_share;
    for (std::size_t h = 0; h < heads; ++h) {
        const std::vector<double> q(queries.begin() + static_cast<std::ptrdiff_t>(h * width),
                                    queries.begin() + static_cast<std::ptrdiff_t>((h + 1) * width));
        turned.push_back(rotated(s, q));
        centre_share.push_back(dot(q, centre));
    }
    for (std::size_t i = 0; i < n; ++i) {
        std::vector<double> o(width);
        for (std::size_t c = 0; c < width; ++c) {
            o[c] = static_cast<double>(verkv::to_float(keys[i * width + c])) - centre[c];
        }
        const std::vector<double> x = code_of(s, i);
        const double norm = std::sqrt(dot(o, o));
        const double length = std::sqrt(dot(x, x));
        const double rho = norm > 0 ? dot(x, rotated(s, o)) / norm / length : 1;
        least_rho = (std::min)(least_rho, rho);
        const double gain = norm / (length * rho);
        gains = gains && std::abs(static_cast<double>(s.codes().gain[i]) - gain) <= 1e-7 * gain;
        // (spread rho / ||k - c||)^2 = 1 - rho^2, and a little for what rounding does to rho.
        const double share = norm > 0 ? static_cast<double>(s.codes().spread[i]) * rho / norm : 0;
        const double excess = share * share - (std::max)(1 - rho * rho, 0.0);
        spreads = spreads && excess >= 0 && excess <= 0x1p-21 * std::sqrt(static_cast<double>(width));
        for (std::size_t h = 0; h < heads; ++h) {
            const double product = dot(x, turned[h]);
            const auto factor = static_cast<double>(scale);
            const double expected = factor * (centre_share[h] + gain * product);
            const double q_norm = std::sqrt(dot(turned[h], turned[h]));
            const double bound = std::abs(factor) * q_norm * static_cast<double>(s.codes().spread[i]) * z;
            const double rounding = static_cast<double>(width + 6) * 0x1p-24 * std::abs(factor) *
                                        (gain * offset * q_norm * 4 * std::sqrt(static_cast<double>(width))) +
                                    0x1p-22 * std::abs(factor * centre_share[h]) + bound * 0x1p-19 + 1e-30;
            worst = (std::max)(worst, std::abs(static_cast<double>(e.logits[h * n + i]) - expected) / rounding);
            // What estimates_of() says it adds for rounding.
            double size = 0;
            for (const double x_c : turned[h]) {
                size += std::abs(x_c);
            }
            const double stated =
                0x1p-24 * std::abs(factor) *
                (gain * offset * static_cast<double>(width) * (4 * size + 2 * q_norm) + 3 * std::abs(centre_share[h]));
            enough = enough && static_cast<double>(e.bounds[h * n + i]) >= bound + stated;
            loose = (std::max)(loose, (static_cast<double>(e.bounds[h * n + i]) - bound) / rounding);
        }
    }
    CHECK(worst <= 1);
    CHECK(enough);
    CHECK(loose <= 2);
    CHECK(gains);
    CHECK(spreads);
    CHECK(least_rho * std::sqrt(static_cast<double>(width)) >= 1 - 1e-6);
}

TEST_CASE("rotated: estimates and bounds are those of a slow sketch in doubles") {
    dice d(41);
    for (const std::size_t width : {64u, 80u, 128u, 256u, 65u, 2u, 3u, 33u}) {
        for (const unsigned bits : {1u, 2u, 3u, 4u}) {
            for (const std::size_t heads : {1u, 3u, 4u, 5u, 7u, 12u, 32u}) {
                check_against_doubles<float>(d, width, bits, 1 + d.below(50), heads);
            }
            check_against_doubles<half>(d, width, bits, 1 + d.below(90), 4);
            check_against_doubles<bfloat16>(d, width, bits, 1 + d.below(90), 2);
        }
    }
    check_against_doubles<float>(d, 1024, 3, 20, 9);
    check_against_doubles<float>(d, 1000, 2, 20, 3);
}

TEST_CASE("rotated: how well codes point where the keys do") {
    // Mean of rho over 500 normal keys of 128 channels; its standard error is below 1e-3.
    const double expected[] = {0.799, 0.940, 0.982, 0.995};
    dice d(42);
    const auto keys = normal_floats(d, 500 * 128);
    for (unsigned bits = 1; bits <= 4; ++bits) {
        const rotated_sketch s = sketch_of(rotated_options{128, bits, 1e-3, 3}, keys);
        double mean = 0;
        for (std::size_t i = 0; i < 500; ++i) {
            const double ratio = static_cast<double>(s.codes().spread[i]) / static_cast<double>(s.codes().gain[i]);
            const std::vector<double> x = code_of(s, i);
            mean += std::sqrt(1 - ratio * ratio / dot(x, x)) / 500;  // spread / gain = ||x|| sqrt(1 - rho^2)
        }
        CAPTURE(bits, mean);
        CHECK(std::abs(mean - expected[bits - 1]) < (bits < 3 ? 0.01 : 0.002));
    }
}

TEST_CASE("rotated: tokens give the same bits however they arrive, on one thread or many") {
    dice d(43);
    for (int round = 0; round < 40; ++round) {
        const rotated_options o{2 + d.below(70), 1 + static_cast<unsigned>(d.below(4)), 1e-2, d.below(9)};
        const std::size_t n = 1 + d.below(70);
        const auto keys = normal_floats(d, n * o.key_dim);
        const auto queries = normal_floats(d, 3 * o.key_dim);
        const auto whole = estimates_of(sketch_of(o, keys), queries);
        rotated_sketch s(o);
        s.fit(cpu{}, rows_of(keys, o.key_dim));
        for (std::size_t first = 0; first < n;) {
            const std::size_t count = (std::min)(n - first, d.below(20));
            s.append(cpu{}, rows_of(keys, o.key_dim).slice(first, count));
            first += count;
        }
        REQUIRE(estimates_of(s, queries) == whole);
    }
    const auto keys = normal_floats(d, 5000 * 40);
    const auto queries = normal_floats(d, 11 * 40);
    const rotated_sketch s = sketch_of(rotated_options{40, 3}, keys);
    verkv::thread_pool pool(3);
    CHECK(estimates_of(s, queries, 0.1f, cpu{&pool}) == estimates_of(s, queries, 0.1f));
}

TEST_CASE("rotated: a query's bits do not depend on those beside it") {
    dice d(44);
    for (const unsigned bits : {1u, 2u, 3u, 4u}) {
        const auto keys = normal_floats(d, 37 * 65);
        const auto queries = normal_floats(d, 13 * 65);
        const rotated_sketch s = sketch_of(rotated_options{65, bits}, keys);
        const auto all = estimates_of(s, queries);
        for (std::size_t h = 0; h < 13; ++h) {
            const std::vector<float> one(queries.begin() + static_cast<std::ptrdiff_t>(h * 65),
                                         queries.begin() + static_cast<std::ptrdiff_t>((h + 1) * 65));
            const auto alone = estimates_of(s, one);
            CHECK(std::equal(alone.logits.begin(), alone.logits.end(),
                             all.logits.begin() + static_cast<std::ptrdiff_t>(h * 37)));
            CHECK(std::equal(alone.bounds.begin(), alone.bounds.end(),
                             all.bounds.begin() + static_cast<std::ptrdiff_t>(h * 37)));
        }
    }
}

TEST_CASE("rotated: erasing leaves the others' bits, and appending goes on behind them") {
    dice d(45);
    const rotated_options o{20, 3, 0, 1};  // failure 0: bounds do not depend on how many there are
    const auto keys = normal_floats(d, 50 * 20);
    const auto queries = normal_floats(d, 20);
    const auto before = estimates_of(sketch_of(o, keys), queries);
    for (int round = 0; round < 60; ++round) {
        rotated_sketch s = sketch_of(o, keys);
        std::vector<std::size_t> left(50);
        std::iota(left.begin(), left.end(), std::size_t{0});
        while (!left.empty()) {
            const std::size_t first = d.below(left.size() + 1);
            const std::size_t last = first + d.below(left.size() + 1 - first);
            s.erase(first, last);
            left.erase(left.begin() + static_cast<std::ptrdiff_t>(first),
                       left.begin() + static_cast<std::ptrdiff_t>(last));
            if (d.chance(0.3)) {
                const std::size_t again = d.below(50);
                s.append(cpu{}, rows_of(keys, 20).slice(again, 1));
                left.push_back(again);
            }
            const auto after = estimates_of(s, queries);
            REQUIRE(after.logits.size() == left.size());
            for (std::size_t i = 0; i < left.size(); ++i) {
                REQUIRE(after.logits[i] == before.logits[left[i]]);
                REQUIRE(after.bounds[i] == before.bounds[left[i]]);
            }
        }
        CHECK(s.bytes() == 0);
    }
}

TEST_CASE("rotated: the quantile follows the number of tokens, rounded up to a power of two") {
    dice d(46);
    const auto keys = normal_floats(d, 40 * 10);
    rotated_sketch s(rotated_options{10, 1, 0.01});
    s.fit(cpu{}, rows_of(keys, 10));
    CHECK(s.quantile() == 1);
    const auto expected = [](double tokens) { return verkv::detail::sphere_quantile(9, 0.01 / tokens); };
    s.append(cpu{}, rows_of(keys, 10).slice(0, 1));
    CHECK(s.quantile() == expected(1));
    s.append(cpu{}, rows_of(keys, 10).slice(0, 4));
    CHECK(s.quantile() == expected(8));
    s.append(cpu{}, rows_of(keys, 10).slice(0, 4));
    CHECK(s.quantile() == expected(16));
    s.append(cpu{}, rows_of(keys, 10));
    CHECK(s.quantile() == expected(64));
    s.erase(0, 33);
    CHECK(s.quantile() == expected(16));
    CHECK(s.bound_failure() == 0.01);
}

TEST_CASE("rotated: a NaN or infinite element spoils its own token and nothing else") {
    dice d(47);
    const auto clean = normal_floats(d, 22 * 5);
    const auto query = normal_floats(d, 5);
    for (const float bad : {not_a_number, infinity, -infinity}) {
        for (const std::size_t token : {0u, 9u, 21u}) {
            auto keys = clean;
            keys[token * 5 + 2] = bad;
            auto others = clean;
            others.erase(others.begin() + static_cast<std::ptrdiff_t>(token * 5),
                         others.begin() + static_cast<std::ptrdiff_t>(token * 5 + 5));
            rotated_sketch s(rotated_options{5, 2});
            s.fit(cpu{}, rows_of(keys, 5));
            s.append(cpu{}, rows_of(keys, 5));
            rotated_sketch t(rotated_options{5, 2});
            t.fit(cpu{}, rows_of(others, 5));
            t.append(cpu{}, rows_of(clean, 5));
            const auto e = estimates_of(s, query);
            const auto expected = estimates_of(t, query);
            for (std::size_t i = 0; i < 22; ++i) {
                if (i == token) {
                    CHECK(std::isnan(e.logits[i]));
                    CHECK(e.bounds[i] == infinity);
                } else {
                    CHECK(e.logits[i] == expected.logits[i]);
                    CHECK(e.bounds[i] == expected.bounds[i]);
                }
            }
        }
    }
    const rotated_sketch s = sketch_of(rotated_options{5, 2}, clean);
    for (const float bad : {not_a_number, infinity}) {
        for (const float bound : estimates_of(s, {bad, 1, 1, 1, 1}).bounds) {
            CHECK(bound == infinity);
        }
    }
}

TEST_CASE("rotated: a key at the centre is estimated by the centre") {
    const std::vector<float> keys = {1, 2, 3, 1, 2, 3};
    const rotated_sketch s = sketch_of(rotated_options{3, 1}, keys);
    const auto e = estimates_of(s, {1, 1, 2}, -2);
    CHECK(e.logits == std::vector<float>{-18, -18});
    CHECK((e.bounds[0] >= 0 && e.bounds[0] < 1e-5f));
    rotated_sketch empty(rotated_options{3, 1});
    empty.fit(cpu{}, rows<float>{nullptr, 3, 0, 3, nullptr});
    CHECK(std::vector<float>(empty.centre().begin(), empty.centre().end()) == std::vector<float>{0, 0, 0});
    CHECK(estimates_of(empty, {1, 1, 2}).logits.empty());
    const auto none = estimates_of(s, {1, 1, 2}, 0);
    CHECK(none.logits == std::vector<float>{0, 0});
    CHECK((none.bounds[0] >= 0 && none.bounds[0] < 1e-40f));
}

TEST_CASE("rotated: sizes, and memory within what was reserved") {
    dice d(48);
    const auto keys = normal_floats(d, 50 * 22);
    const auto queries = normal_floats(d, 9 * 22);
    rotated_sketch s(rotated_options{22, 3});
    s.fit(cpu{}, rows_of(keys, 22));
    s.reserve(50);
    std::vector<float> logits(9 * 50), bounds(9 * 50);
    CHECK(support::allocations_of([&] {
              for (std::size_t i = 0; i < 50; ++i) {
                  s.append(cpu{}, rows_of(keys, 22).slice(i, 1));
              }
              s.estimate(cpu{}, rows_of(queries, 22), 1, {logits.data(), 9, 50, 50}, {bounds.data(), 9, 50, 50});
              s.erase(3, 20);
          }) == 0);
    CHECK(s.size() == 33);
    CHECK(s.bytes() == 33 * (3 * 4 + 8));
    CHECK(s.bytes_per_token() == 20);
    const double expected[] = {24, 40, 56, 72};
    for (unsigned bits = 1; bits <= 4; ++bits) {
        CHECK(rotated_sketch(rotated_options{128, bits}).bytes_per_token() == expected[bits - 1]);
    }
}

TEST_CASE("rotated: what is refused") {
    const std::vector<float> keys(4 * 6);
    CHECK(refused([] { rotated_sketch(rotated_options{1}); }, {"1 channels", "2 to 1024"}));
    CHECK(refused([] { rotated_sketch(rotated_options{1025}); }, {"1025"}));
    CHECK(refused([] { rotated_sketch(rotated_options{8, 0}); }, {"0 bits"}));
    CHECK(refused([] { rotated_sketch(rotated_options{8, 5}); }, {"5 bits"}));
    CHECK(refused([] { rotated_sketch(rotated_options{8, 2, 1}); }, {"failure is 1"}));
    CHECK(refused([] { rotated_sketch(rotated_options{8, 2, -0.5}); }, {"failure is -0.5"}));
    CHECK(refused([] { rotated_sketch(rotated_options{8, 2, std::nan("")}); }, {"failure is nan"}));
    rotated_sketch s(rotated_options{6, 2});
    CHECK(refused<verkv::invalid_state>([&] { s.append(cpu{}, rows_of(keys, 6)); }, {"4 tokens", "before fit()"}));
    s.fit(cpu{}, rows_of(keys, 6));
    s.append(cpu{}, rows_of(keys, 6));
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

}  // namespace
