// The anchor sketch against a slow one in doubles that reads its codes bit by bit; which keys it chooses; what it
// refuses.
#include "verkv/sketch/anchors.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "support/allocations.hpp"
#include "support/bounded_estimates.hpp"
#include "support/catch.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"

namespace {

using namespace support;
using verkv::anchor_options;
using verkv::anchor_sketch;
using verkv::bfloat16;
using verkv::cpu;
using verkv::half;
using verkv::rows;

static_assert(verkv::bounded_sketch<anchor_sketch, cpu, float>);
static_assert(verkv::bounded_sketch<anchor_sketch, cpu, half>);
static_assert(verkv::bounded_sketch<anchor_sketch, cpu, bfloat16>);
static_assert(verkv::erasable_sketch<anchor_sketch>);

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

template <class T>
anchor_sketch sketch_of(const anchor_options& o, const std::vector<T>& keys) {
    anchor_sketch s(o);
    s.fit(cpu{}, rows_of(keys, o.key_dim));
    s.append(cpu{}, rows_of(keys, o.key_dim));
    return s;
}

/// A token's residual codes, read bit by bit.
std::vector<double> code_of(const anchor_sketch& s, std::size_t token) {
    const verkv::anchor_codes c = s.codes();
    std::vector<double> x(c.key_dim);
    for (std::size_t channel = 0; channel < c.key_dim && c.bits > 0; ++channel) {
        unsigned code = 0;
        for (std::size_t b = 0; b < c.bits; ++b) {
            const std::size_t bit = channel * c.bits + b;
            const std::uint32_t word = c.codes[(token / 16 * c.words + bit / 32) * 16 + token % 16];
            code |= (word >> (bit % 32) & 1u) << b;
        }
        x[channel] = code - (std::ldexp(1.0, static_cast<int>(c.bits)) - 1) / 2;
    }
    return x;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

template <class T>
std::vector<double> row_of(const std::vector<T>& keys, std::size_t width, std::size_t i) {
    std::vector<double> x;
    for (std::size_t c = 0; c < width; ++c) {
        x.push_back(static_cast<double>(verkv::to_float(keys[i * width + c])));
    }
    return x;
}

template <class T>
void check_against_doubles(dice& d, const anchor_options& o, std::size_t n, std::size_t heads) {
    CAPTURE(o.key_dim, o.anchors, o.bits, n, heads, sizeof(T));
    const std::size_t width = o.key_dim;
    std::vector<T> keys;
    for (std::size_t i = 0; i < n * width; ++i) {
        keys.push_back(verkv::from_float<T>(
            static_cast<float>(std::sin(static_cast<double>(i % width)) + std::exp(0.3 * d.normal()) * d.normal())));
    }
    const auto queries = normal_floats(d, heads * width);
    const auto scale = static_cast<float>(d.between(-0.3, 0.3));
    const anchor_sketch s = sketch_of(o, keys);
    REQUIRE(s.size() == n);
    const auto e = estimates_of(s, queries, scale);
    const verkv::anchor_codes codes = s.codes();
    REQUIRE(codes.anchor_count == s.anchor_tokens().size());
    REQUIRE(codes.anchor_count <= o.anchors);
    std::vector<std::vector<double>> anchors;
    for (std::size_t a = 0; a < codes.anchor_count; ++a) {
        anchors.push_back(row_of(keys, width, s.anchor_tokens()[a]));
        for (std::size_t c = 0; c < width; ++c) {
            REQUIRE(static_cast<double>(codes.anchors[c * codes.padded_anchors + a]) == anchors[a][c]);
        }
    }
    bool nearest = true, gains = true, steps = true, signs = true;
    double worst = 0, least = 1, most = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::vector<double> k = row_of(keys, width, i);
        const std::vector<double>& own = anchors[codes.index[i]];
        // No other anchor leaves a shorter residual.
        const auto left = [&](const std::vector<double>& a) { return dot(k, k) - dot(k, a) * dot(k, a) / dot(a, a); };
        for (const auto& a : anchors) {
            nearest = nearest && left(own) <= left(a) + 1e-12 * dot(k, k);
        }
        const auto gain = static_cast<double>(verkv::to_float(codes.gain[i]));
        gains = gains && std::abs(gain - dot(k, own) / dot(own, own)) <= 0x1p-11 * std::abs(gain) + 0x1p-24;
        std::vector<double> rest(width);
        for (std::size_t c = 0; c < width; ++c) {
            rest[c] = k[c] - gain * own[c];
        }
        // The step is the least-squares one, and better than or equal to signs alone.
        const std::vector<double> x = code_of(s, i);
        const auto step = static_cast<double>(codes.step[i]);
        if (o.bits > 0 && dot(rest, rest) > 0) {
            steps = steps && std::abs(step - dot(rest, x) / dot(x, x)) <= 1e-6 * step + 1e-30;
            double sum = 0;
            for (const double r : rest) {
                sum += std::abs(r);
            }
            signs =
                signs && dot(rest, x) * dot(rest, x) / dot(x, x) >= sum * sum / static_cast<double>(width) * (1 - 1e-5);
        }
        for (std::size_t c = 0; c < width; ++c) {
            rest[c] -= step * x[c];
        }
        const double error = std::sqrt(dot(rest, rest));
        for (std::size_t h = 0; h < heads; ++h) {
            const std::vector<double> q = row_of(queries, width, h);
            const auto factor = static_cast<double>(scale);
            const double expected = factor * (dot(q, k) - dot(q, rest));
            double size = 0;
            for (std::size_t c = 0; c < width; ++c) {
                size += std::abs(factor * q[c]);
            }
            const double offset = (std::ldexp(1.0, static_cast<int>(o.bits)) - 1) / 2;
            const double rounding = 0x1p-24 * (3 * offset * static_cast<double>(width + 8) * size * step +
                                               8 * std::abs(factor * gain * dot(q, own))) +
                                    1e-30;
            const double bound = std::abs(factor) * std::sqrt(dot(q, q)) * error;
            worst = (std::max)(worst, std::abs(static_cast<double>(e.logits[h * n + i]) - expected) / rounding);
            const double excess = static_cast<double>(e.bounds[h * n + i]) - bound;
            least = (std::min)(least, excess);
            most = (std::max)(most, excess / (1.1 * rounding + 3e-6 * bound + 1e-10));
        }
    }
    CHECK(nearest);
    CHECK(gains);
    CHECK(steps);
    CHECK(signs);
    CHECK(worst <= 1);
    CHECK(least >= 0);
    CHECK(most <= 1);
}

TEST_CASE("anchors: estimates and bounds are those of a slow sketch in doubles") {
    dice d(81);
    for (const std::size_t width : {64u, 80u, 128u, 256u, 65u, 1u, 2u, 3u, 33u}) {
        for (const unsigned bits : {0u, 1u, 2u, 3u, 4u}) {
            const anchor_options o{width, 1 + d.below(20), bits, 1 + d.below(60), d.below(100)};
            check_against_doubles<float>(d, o, 1 + d.below(90), 1 + d.below(9));
            check_against_doubles<half>(d, o, 1 + d.below(90), 4);
            check_against_doubles<bfloat16>(d, o, 1 + d.below(90), 3);
        }
    }
    check_against_doubles<float>(d, anchor_options{1024, 5, 3}, 20, 9);
    check_against_doubles<float>(d, anchor_options{16, 1024, 2}, 1500, 2);
}

TEST_CASE("anchors: a key that is an anchor has its own logit") {
    dice d(82);
    const auto keys = normal_floats(d, 100 * 24);
    const auto query = normal_floats(d, 24);
    const anchor_sketch s = sketch_of(anchor_options{24, 10, 1}, keys);
    REQUIRE(s.anchor_tokens().size() == 10);
    const auto e = estimates_of(s, query);
    for (const verkv::token_index i : s.anchor_tokens()) {
        double logit = 0;
        for (std::size_t c = 0; c < 24; ++c) {
            logit += static_cast<double>(keys[i * 24 + c]) * static_cast<double>(query[c]);
        }
        CHECK(static_cast<double>(e.logits[i]) == Approx(logit).epsilon(1e-6));
        CHECK(e.bounds[i] < 1e-5f * (1 + std::abs(e.logits[i])));
    }
}

TEST_CASE("anchors: one for each direction, whatever the lengths, before a second one for any") {
    dice d(83);
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
        std::vector<float> keys;
        std::vector<std::size_t> direction;
        for (std::size_t i = 0; i < 200; ++i) {
            direction.push_back(d.below(7));
            std::vector<float> k(7, 0.0f);
            for (float& x : k) {
                x = static_cast<float>(1e-4 * d.normal());
            }
            k[direction.back()] = static_cast<float>((d.chance(0.5) ? 1 : -1) * d.log_between(0.5, 20));
            keys.insert(keys.end(), k.begin(), k.end());
        }
        const anchor_sketch s = sketch_of(anchor_options{7, 7, 0, 4096, seed}, keys);
        std::set<std::size_t> covered;
        for (const verkv::token_index i : s.anchor_tokens()) {
            covered.insert(direction[i]);
        }
        CHECK(covered.size() == 7);
    }
}

TEST_CASE("anchors: they follow the seed, are different keys, and are drawn by what is left of a key") {
    dice d(84);
    const auto keys = normal_floats(d, 300 * 12);
    const auto tokens = [&](const anchor_options& o) {
        anchor_sketch s(o);
        s.fit(cpu{}, rows_of(keys, 12));
        return std::vector<verkv::token_index>(s.anchor_tokens().begin(), s.anchor_tokens().end());
    };
    const auto some = tokens({12, 40, 2, 4096, 1});
    CHECK(some.size() == 40);
    CHECK(std::set<verkv::token_index>(some.begin(), some.end()).size() == 40);
    CHECK(tokens({12, 40, 2, 4096, 1}) == some);
    CHECK(tokens({12, 40, 2, 4096, 2}) != some);
    // A sample of 100 of 300 keys: every third.
    for (const verkv::token_index i : tokens({12, 40, 2, 100, 1})) {
        CHECK(i % 3 == 0);
    }
    SECTION("the first one by its squared length") {
        // Squares 1, 2, 3, 4: over 2000 seeds each share lies within 5 standard errors; false alarm 6e-7 each.
        const std::vector<float> four = {1, 0, 0, std::sqrt(2.0f), std::sqrt(3.0f), 0, 0, 2};
        int count[4] = {};
        for (std::uint64_t seed = 0; seed < 2000; ++seed) {
            anchor_sketch s(anchor_options{2, 1, 0, 4, seed});
            s.fit(cpu{}, rows_of(four, 2));
            ++count[s.anchor_tokens()[0]];
        }
        for (int i = 0; i < 4; ++i) {
            const double p = 0.1 * (i + 1);
            CHECK(std::abs(count[i] - 2000 * p) <= 5 * std::sqrt(2000 * p * (1 - p)));
        }
    }
    SECTION("no more than there are directions") {
        const std::vector<float> two = {1, 0, 2, 0, -3, 0, 0, 5, 0, 5};
        anchor_sketch s(anchor_options{2, 4, 0, 16, 3});
        s.fit(cpu{}, rows_of(two, 2));
        CHECK(s.anchor_tokens().size() == 2);
        CHECK(s.anchor_bytes() == 2 * 2 * 4);
    }
    SECTION("none where all keys are 0, and none before fit()") {
        const std::vector<float> zeros(6);
        anchor_sketch s = sketch_of(anchor_options{2, 4, 2, 16, 3}, zeros);
        CHECK(s.anchor_tokens().empty());
        const std::vector<float> one = {3, -4};
        s.append(cpu{}, rows_of(one, 2));
        const auto e = estimates_of(s, {1, 1});
        CHECK(e.logits[0] == 0);
        CHECK(std::abs(e.logits[3] + 1) <= e.bounds[3]);
        CHECK(anchor_sketch(anchor_options{2}).anchor_tokens().empty());
        CHECK(anchor_sketch(anchor_options{2}).anchor_bytes() == 0);
    }
}

TEST_CASE("anchors: tokens give the same bits however they arrive, on one thread or many") {
    dice d(85);
    for (int round = 0; round < 40; ++round) {
        const std::size_t width = 1 + d.below(70);
        const anchor_options o{width, 1 + d.below(9), static_cast<unsigned>(d.below(5))};
        const std::size_t n = 1 + d.below(70);
        const auto keys = normal_floats(d, n * width);
        const auto queries = normal_floats(d, 3 * width);
        const auto whole = estimates_of(sketch_of(o, keys), queries);
        anchor_sketch s(o);
        s.fit(cpu{}, rows_of(keys, width));
        for (std::size_t first = 0; first < n;) {
            const std::size_t count = (std::min)(n - first, d.below(20));
            s.append(cpu{}, rows_of(keys, width).slice(first, count));
            first += count;
        }
        REQUIRE(estimates_of(s, queries) == whole);
    }
    const auto keys = normal_floats(d, 5000 * 20);
    const auto queries = normal_floats(d, 11 * 20);
    for (const unsigned bits : {0u, 3u}) {
        const anchor_sketch s = sketch_of(anchor_options{20, 7, bits}, keys);
        verkv::thread_pool pool(3);
        const auto all = estimates_of(s, queries, 0.1f);
        CHECK(estimates_of(s, queries, 0.1f, cpu{&pool}) == all);
        for (std::size_t h = 0; h < 11; ++h) {
            const std::vector<float> one(queries.begin() + static_cast<std::ptrdiff_t>(h * 20),
                                         queries.begin() + static_cast<std::ptrdiff_t>((h + 1) * 20));
            const auto alone = estimates_of(s, one, 0.1f);
            CHECK(std::equal(alone.logits.begin(), alone.logits.end(),
                             all.logits.begin() + static_cast<std::ptrdiff_t>(h * 5000)));
        }
    }
}

TEST_CASE("anchors: keys may lie apart, in any order") {
    dice d(86);
    const auto keys = normal_floats(d, 30 * 9);
    const std::vector<verkv::row_id> ids = {7, 3, 29, 3, 0};
    std::vector<float> copied;
    for (const verkv::row_id id : ids) {
        copied.insert(copied.end(), keys.begin() + static_cast<std::ptrdiff_t>(id * 9 + 2),
                      keys.begin() + static_cast<std::ptrdiff_t>(id * 9 + 7));
    }
    const rows<float> listed{keys.data() + 2, 9, 5, 5, ids.data()};
    anchor_sketch s(anchor_options{5, 2});
    s.fit(cpu{}, listed);
    s.append(cpu{}, listed);
    const auto query = normal_floats(d, 5);
    CHECK(estimates_of(s, query) == estimates_of(sketch_of(anchor_options{5, 2}, copied), query));
}

TEST_CASE("anchors: erasing leaves the others' bits, and appending goes on behind them") {
    dice d(87);
    const anchor_options o{20, 6, 3};
    const auto keys = normal_floats(d, 50 * 20);
    const auto queries = normal_floats(d, 20);
    const auto before = estimates_of(sketch_of(o, keys), queries);
    for (int round = 0; round < 40; ++round) {
        anchor_sketch s = sketch_of(o, keys);
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

TEST_CASE("anchors: a NaN or infinite element spoils its own token and nothing else") {
    dice d(88);
    const auto clean = normal_floats(d, 22 * 5);
    const auto query = normal_floats(d, 5);
    for (const unsigned bits : {0u, 2u, 3u}) {
        for (const float bad : {not_a_number, infinity, -infinity}) {
            for (const std::size_t token : {0u, 9u, 21u}) {
                auto keys = clean;
                keys[token * 5 + 2] = bad;
                auto others = clean;
                others.erase(others.begin() + static_cast<std::ptrdiff_t>(token * 5),
                             others.begin() + static_cast<std::ptrdiff_t>(token * 5 + 5));
                const anchor_options o{5, 4, bits};
                const anchor_sketch s = sketch_of(o, keys);
                anchor_sketch t(o);
                t.fit(cpu{}, rows_of(others, 5));
                t.append(cpu{}, rows_of(clean, 5));
                const auto e = estimates_of(s, query), expected = estimates_of(t, query);
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
    }
    const anchor_sketch s = sketch_of(anchor_options{5, 4}, clean);
    for (const float bad : {not_a_number, infinity}) {
        for (const float bound : estimates_of(s, {bad, 1, 1, 1, 1}).bounds) {
            CHECK(bound == infinity);
        }
    }
}

TEST_CASE("anchors: sizes, and memory within what was reserved") {
    dice d(89);
    const auto keys = normal_floats(d, 50 * 6);
    const auto queries = normal_floats(d, 5 * 6);
    anchor_sketch s(anchor_options{6, 5, 3});
    s.fit(cpu{}, rows_of(keys, 6));
    CHECK((s.size() == 0 && s.bytes() == 0));
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
    CHECK(s.bytes() == 33 * (4 + 12));
    CHECK(s.anchor_bytes() == 5 * 6 * 4);
    CHECK(s.bound_failure() == 0);
    const double expected[] = {12, 28, 44, 60, 76};
    for (unsigned bits = 0; bits <= 4; ++bits) {
        CHECK(anchor_sketch(anchor_options{128, 256, bits}).bytes_per_token() == expected[bits]);
    }
    s.fit(cpu{}, rows_of(keys, 6));
    CHECK(s.size() == 0);
    s.append(cpu{}, rows_of(keys, 6));
    CHECK(estimates_of(s, queries) == estimates_of(sketch_of(s.options(), keys), queries));
}

TEST_CASE("anchors: what is refused") {
    const std::vector<float> keys(4 * 6, 1.0f);
    CHECK(refused([] { anchor_sketch(anchor_options{0}); }, {"0 channels"}));
    CHECK(refused([] { anchor_sketch(anchor_options{1025}); }, {"1025"}));
    CHECK(refused([] { anchor_sketch(anchor_options{8, 0}); }, {"0 anchors"}));
    CHECK(refused([] { anchor_sketch(anchor_options{8, 1025}); }, {"1025 anchors"}));
    CHECK(refused([] { anchor_sketch(anchor_options{8, 2, 5}); }, {"5 bits"}));
    CHECK(refused([] { anchor_sketch(anchor_options{8, 2, 2, 0}); }, {"among 0 keys"}));
    anchor_sketch fresh(anchor_options{6});
    CHECK(refused<verkv::invalid_state>([&] { fresh.append(cpu{}, rows_of(keys, 6)); }, {"4 tokens", "before fit()"}));
    anchor_sketch s = sketch_of(anchor_options{6}, keys);
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
    CHECK(s.size() == 4);
}

}  // namespace
