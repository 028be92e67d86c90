// The RoPE-pair sketch on small inputs with known answers, and what it refuses.
#include "verkv/sketch/rope_pairs.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/float_rows.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"

namespace {

using support::rows_of;
using support::same_bits;
using verkv::bfloat16;
using verkv::cpu;
using verkv::half;
using verkv::rope_pair_options;
using verkv::rope_pair_sketch;
using verkv::rope_pairing;
using verkv::rows;

static_assert(verkv::sketch<rope_pair_sketch, cpu, float>);
static_assert(verkv::sketch<rope_pair_sketch, cpu, half>);
static_assert(verkv::sketch<rope_pair_sketch, cpu, bfloat16>);
static_assert(verkv::erasable_sketch<rope_pair_sketch>);

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

rope_pair_options options(std::size_t key_dim, unsigned bits = 2, std::size_t group_length = 4,
                          double pair_fraction = 1, rope_pairing pairing = rope_pairing::half) {
    rope_pair_options o;
    o.key_dim = key_dim;
    o.pairing = pairing;
    o.bits = bits;
    o.pair_fraction = pair_fraction;
    o.group_length = group_length;
    return o;
}

/// Keys [n, 2] with the values in channel 0 and `other` in channel 1.
std::vector<float> in_channel_0(const std::vector<float>& values, float other = 0) {
    std::vector<float> keys;
    for (const float x : values) {
        keys.push_back(x);
        keys.push_back(other);
    }
    return keys;
}

std::vector<float> estimate(const rope_pair_sketch& s, const std::vector<float>& queries, float scale = 1,
                            const cpu& exec = {}) {
    const std::size_t width = s.options().key_dim;
    std::vector<float> logits(queries.size() / width * s.size(), -1234.5f);
    s.estimate(exec, rows_of(queries, width), scale,
               {logits.data(), queries.size() / width, s.size(), static_cast<std::ptrdiff_t>(s.size())});
    return logits;
}

std::vector<float> normal_floats(std::size_t n, unsigned seed, float deviation = 1) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> x(n);
    for (auto& value : x) {
        value = normal(engine);
    }
    return x;
}

template <class F>
std::string message_of(F&& f) {
    try {
        f();
    } catch (const verkv::error& e) {
        return e.what();
    }
    return {};
}

TEST_CASE(
    "sketch: groups that do not divide the context are quantised over their own tokens, however they arrive") {  // case
                                                                                                                 // O9
    const cpu exec;
    const std::vector<float> x = {0, 3, 1, 2, 10, 16, 12, 14, 5, 6.5f};
    const std::vector<float> keys = in_channel_0(x);
    const std::vector<float> query = {1, 0};
    rope_pair_sketch s(options(2));
    s.fit(exec, rows_of(keys, 2));

    SECTION("at once") {
        s.append(exec, rows_of(keys, 2));
        const auto logits = estimate(s, query);
        for (std::size_t i = 0; i < x.size(); ++i) {
            CHECK(logits[i] == Approx(x[i]).epsilon(2e-3).margin(1e-6));
        }
    }
    SECTION("in pieces") {
        s.append(exec, rows_of(keys, 2));
        const auto whole = estimate(s, query);
        const std::vector<std::vector<std::size_t>> cuts = {
            {4, 4, 2}, {3, 3, 3, 1}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {0, 9, 0, 1}};
        for (const auto& cut : cuts) {
            s.fit(exec, rows_of(keys, 2));
            std::size_t first = 0;
            for (const std::size_t n : cut) {
                s.append(exec, rows_of(keys, 2).slice(first, n));
                first += n;
            }
            CHECK(same_bits(estimate(s, query), whole));
        }
    }
    SECTION("two requests in turns") {
        const std::vector<float> y = {1, 3, 5, 7, -3, 0, -1, -2, 9, 9};
        const std::vector<float> other_keys = in_channel_0(y);
        rope_pair_sketch other(options(2));
        other.fit(exec, rows_of(other_keys, 2));
        for (std::size_t first = 0; first < 10; first += 3) {
            const std::size_t n = first + 3 <= 10 ? 3 : 10 - first;
            s.append(exec, rows_of(keys, 2).slice(first, n));
            other.append(exec, rows_of(other_keys, 2).slice(first, n));
        }
        const auto of_x = estimate(s, query);
        const auto of_y = estimate(other, query);
        for (std::size_t i = 0; i < 10; ++i) {
            CHECK(of_x[i] == Approx(x[i]).epsilon(2e-3).margin(1e-6));
            CHECK(of_y[i] == Approx(y[i]).epsilon(2e-3).margin(1e-6));
        }
    }
    SECTION("an open group is quantised over the tokens it has so far") {
        s.append(exec, rows_of(keys, 2).slice(0, 6));  // 10, 16 alone: step 2, as with 12 and 14
        CHECK(estimate(s, query)[5] == Approx(16).epsilon(2e-3));
        s.fit(exec, rows_of(keys, 2));
        const std::vector<float> two = in_channel_0({5, 6.3f});
        s.append(exec, rows_of(two, 2));
        CHECK(estimate(s, query)[1] == Approx(6.3f).epsilon(2e-3));
    }
}

TEST_CASE("sketch: zero range, zero vectors, an underflowing step") {  // case O10
    const cpu exec;
    SECTION("a constant channel beside another") {
        const std::vector<float> keys = {.75f, -1, .75f, 0, .75f, 1, .75f, 2};
        rope_pair_sketch s(options(2));
        s.fit(exec, rows_of(keys, 2));
        s.append(exec, rows_of(keys, 2));
        const std::vector<float> expected = {0.5f, 1.5f, 2.5f, 3.5f};
        const auto logits = estimate(s, {2, 1});
        const auto nothing = estimate(s, {0, 0});
        for (std::size_t i = 0; i < 4; ++i) {
            CHECK(logits[i] == Approx(expected[i]).margin(2e-3));
            CHECK(nothing[i] == 0.0f);
        }
    }
    SECTION("all keys zero") {
        const std::vector<float> keys(4 * 8, 0.0f);
        rope_pair_sketch s(options(8, 2, 4, 0.5));
        s.fit(exec, rows_of(keys, 8));
        s.append(exec, rows_of(keys, 8));
        REQUIRE(s.channels().size() == 4);
        CHECK(std::vector<std::uint32_t>(s.channels().begin(), s.channels().end()) ==
              std::vector<std::uint32_t>{0, 1, 4, 5});
        for (const float logit : estimate(s, {1, 2, 3, 4, 5, 6, 7, 8})) {
            CHECK(logit == 0.0f);
        }
    }
    SECTION("a step below the smallest half") {
        const std::vector<float> x = {0, 1e-8f, 2e-8f, 3e-8f};
        const std::vector<float> keys = in_channel_0(x);
        rope_pair_sketch s(options(2));
        s.fit(exec, rows_of(keys, 2));
        s.append(exec, rows_of(keys, 2));
        const auto logits = estimate(s, {1e6f, 0});
        for (std::size_t i = 0; i < 4; ++i) {
            REQUIRE(std::isfinite(logits[i]));
            CHECK(std::abs(logits[i] - 1e6f * x[i]) <= 0.0301f);
        }
        for (std::size_t i = 0; i < 4; ++i) {
            CHECK(s.codes().codes[i] == 0u);
        }
    }
    SECTION("a group of one token") {
        const std::vector<float> keys = in_channel_0({5});
        rope_pair_sketch s(options(2));
        s.fit(exec, rows_of(keys, 2));
        s.append(exec, rows_of(keys, 2));
        CHECK(estimate(s, {3, 7})[0] == Approx(15).margin(2e-3));
    }
}

TEST_CASE("sketch: estimates of the survivors keep their bits when ranges are removed") {
    const cpu exec;
    const auto keys = normal_floats(10 * 8, 3);
    const auto query = normal_floats(8, 4);
    rope_pair_sketch s(options(8));
    s.fit(exec, rows_of(keys, 8));
    s.append(exec, rows_of(keys, 8));
    const auto before = estimate(s, query);
    s.erase(2, 4);  // positions 2 and 3
    s.erase(4, 5);  // position 4 after the shift: token 6
    const auto after = estimate(s, query);
    REQUIRE(s.size() == 7);
    const std::vector<std::size_t> tokens = {0, 1, 4, 5, 7, 8, 9};
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        CHECK(after[i] == before[tokens[i]]);
    }
}

TEST_CASE("sketch: appending after an erase goes on in the open group, else starts a new one") {
    const cpu exec;
    const std::vector<float> x = {0, 3, 1, 2, 10, 13};
    const std::vector<float> keys = in_channel_0(x);
    rope_pair_sketch s(options(2));
    s.fit(exec, rows_of(keys, 2));
    s.append(exec, rows_of(keys, 2));

    SECTION("the open group lost a token") {
        s.erase(4, 5);
        const std::vector<float> more = in_channel_0({16.3f, 19.6f, 22.9f, -5});
        s.append(exec, rows_of(more, 2));
        const auto logits = estimate(s, {1, 0});
        // 13, 16.3, 19.6, 22.9 are a group with step 3.3; -5 is alone in the next.
        const std::vector<float> expected = {0, 3, 1, 2, 13, 16.3f, 19.6f, 22.9f, -5};
        REQUIRE(logits.size() == expected.size());
        for (std::size_t i = 0; i < expected.size(); ++i) {
            CHECK(logits[i] == Approx(expected[i]).margin(6e-3));
        }
    }
    SECTION("the open group is gone") {
        s.erase(4, 6);
        const std::vector<float> more = in_channel_0({100, 400});
        s.append(exec, rows_of(more, 2));
        const auto logits = estimate(s, {1, 0});
        REQUIRE(logits.size() == 6);
        CHECK(logits[1] == 3);
        CHECK(logits[4] == 100);
        CHECK(logits[5] == 400);
    }
    SECTION("a full group was shortened: its raw values are forgotten, so it stays as it is") {
        s.erase(2, 6);
        const std::vector<float> more = in_channel_0({100, 400});
        s.append(exec, rows_of(more, 2));
        const auto logits = estimate(s, {1, 0});
        REQUIRE(logits.size() == 4);
        CHECK(logits[0] == 0);
        CHECK(logits[1] == 3);
        CHECK(logits[2] == 100);
        CHECK(logits[3] == 400);
    }
    SECTION("everything is gone") {
        s.erase(0, 6);
        CHECK(s.size() == 0);
        CHECK(s.bytes() == 0);
        s.append(exec, rows_of(keys, 2));
        CHECK(estimate(s, {1, 0})[1] == 3);
    }
}

TEST_CASE("sketch: the pairs of largest mean energy are kept") {
    const cpu exec;
    // Energies of channels 0 ... 7, the same in both rows: 1 4 9 1 0 16 1 9.
    const std::vector<float> keys = {1, -2, 3, 1, 0, 4, -1, 3, -1, 2, -3, -1, 0, -4, 1, -3};
    const auto kept = [&](rope_pairing pairing, double fraction) {
        rope_pair_sketch s(options(8, 2, 4, fraction, pairing));
        s.fit(exec, rows_of(keys, 8));
        return std::vector<std::uint32_t>(s.channels().begin(), s.channels().end());
    };
    // interleaved pairs: 5, 10, 16, 10; halves: (0,4) 1, (1,5) 20, (2,6) 10, (3,7) 10.
    CHECK(kept(rope_pairing::interleaved, 0.25) == std::vector<std::uint32_t>{4, 5});
    CHECK(kept(rope_pairing::interleaved, 0.5) == std::vector<std::uint32_t>{2, 3, 4, 5});
    CHECK(kept(rope_pairing::interleaved, 0.75) == std::vector<std::uint32_t>{2, 3, 4, 5, 6, 7});
    CHECK(kept(rope_pairing::half, 0.25) == std::vector<std::uint32_t>{1, 5});
    CHECK(kept(rope_pairing::half, 0.5) == std::vector<std::uint32_t>{1, 2, 5, 6});
    CHECK(kept(rope_pairing::half, 1) == std::vector<std::uint32_t>{0, 1, 2, 3, 4, 5, 6, 7});

    SECTION("a pair whose energy is not finite comes last") {
        for (const float bad : {not_a_number, infinity}) {
            auto bad_keys = keys;
            bad_keys[5] = bad;
            rope_pair_sketch s(options(8, 2, 4, 0.75, rope_pairing::half));
            s.fit(exec, rows_of(bad_keys, 8));
            CHECK(std::vector<std::uint32_t>(s.channels().begin(), s.channels().end()) ==
                  std::vector<std::uint32_t>{0, 2, 3, 4, 6, 7});
        }
    }
    SECTION("counts of pairs") {
        CHECK(options(128, 2, 128, 0.25).pairs() == 16);
        CHECK(options(64, 2, 128, 0.25).pairs() == 8);
        CHECK(options(80, 2, 128, 0.25).pairs() == 10);
        CHECK(options(256, 2, 128, 0.25).pairs() == 32);
        CHECK(options(2, 2, 128, 0.01).pairs() == 1);
        CHECK(options(256, 2, 128, 1).pairs() == 128);
    }
}

TEST_CASE("sketch: a NaN or infinite element shows in its own group and nowhere else") {
    const cpu exec;
    const auto clean = normal_floats(22 * 4, 5);
    const auto query = normal_floats(4, 6);
    rope_pair_sketch reference(options(4));
    reference.fit(exec, rows_of(clean, 4));
    reference.append(exec, rows_of(clean, 4));
    const auto expected = estimate(reference, query);
    for (const float bad : {not_a_number, infinity, -infinity}) {
        for (const std::size_t token : {0u, 9u, 15u, 20u, 21u}) {
            auto keys = clean;
            keys[token * 4 + 2] = bad;
            rope_pair_sketch s(options(4));
            s.fit(exec, rows_of(keys, 4));
            s.append(exec, rows_of(keys, 4));
            const auto logits = estimate(s, query);
            for (std::size_t i = 0; i < logits.size(); ++i) {
                if (i / 4 == token / 4) {
                    CHECK(std::isnan(logits[i]));
                } else {
                    CHECK(logits[i] == expected[i]);
                }
            }
        }
    }
}

TEST_CASE("sketch: outliers beyond half, huge queries, large logits") {
    const cpu exec;
    SECTION("zero and step are clamped, codes stay in range") {
        const std::vector<float> keys = in_channel_0({-1e6f, 0, 1e6f, 3e38f, 1, 2, 3, 4});
        rope_pair_sketch s(options(2));
        s.fit(exec, rows_of(keys, 2));
        s.append(exec, rows_of(keys, 2));
        const auto logits = estimate(s, {1, 0});
        CHECK(logits[0] == -65504.0f);
        CHECK(logits[1] == 0.0f);
        CHECK(logits[2] == 2 * 65504.0f);
        CHECK(logits[3] == 2 * 65504.0f);
        for (std::size_t i = 4; i < 8; ++i) {
            CHECK(logits[i] == static_cast<float>(i - 3));
        }
        const auto other = estimate(s, {0, 1});
        for (const float x : other) {
            CHECK(x == 0.0f);
        }
    }
    SECTION("the widest range of floats") {
        const std::vector<float> keys = in_channel_0({-3.4e38f, 3.4e38f});
        rope_pair_sketch s(options(2));
        s.fit(exec, rows_of(keys, 2));
        s.append(exec, rows_of(keys, 2));
        const auto logits = estimate(s, {1, 0});
        CHECK(logits[0] == -65504.0f);
        CHECK(logits[1] == 2 * 65504.0f);
    }
    SECTION("logits of 60,000 and queries of a million") {
        const std::vector<float> keys = in_channel_0({-0.06f, 0.06f});
        rope_pair_sketch s(options(2));
        s.fit(exec, rows_of(keys, 2));
        s.append(exec, rows_of(keys, 2));
        const auto logits = estimate(s, {1e6f, -1e6f});
        CHECK(logits[0] == Approx(-60000).epsilon(1e-3));
        CHECK(logits[1] == Approx(60000).epsilon(2e-3));
    }
    SECTION("a query of NaN or infinity is no undefined behaviour") {
        const std::vector<float> keys = in_channel_0({1, 2, 3});
        rope_pair_sketch s(options(2));
        s.fit(exec, rows_of(keys, 2));
        s.append(exec, rows_of(keys, 2));
        CHECK(std::isnan(estimate(s, {not_a_number, 0})[0]));
        CHECK(!std::isfinite(estimate(s, {infinity, 0})[1]));
    }
}

TEST_CASE("sketch: a query head's estimate has the same bits alone, in a group of 32, and on threads") {
    const cpu exec;
    verkv::thread_pool pool(3);
    for (const std::size_t key_dim : {64u, 80u, 128u, 256u}) {
        const std::size_t n = 5000;
        const auto keys = normal_floats(n * key_dim, 7);
        const auto queries = normal_floats(32 * key_dim, 8);
        rope_pair_sketch s(options(key_dim, 2, 128, 0.25));
        s.fit(exec, rows_of(keys, key_dim));
        s.append(exec, rows_of(keys, key_dim));
        const auto all = estimate(s, queries, 0.125f);
        CHECK(same_bits(estimate(s, queries, 0.125f, cpu{&pool}), all));
        for (const std::size_t heads : {1u, 3u, 4u, 5u, 7u, 12u}) {
            for (std::size_t head = 0; head + heads <= 32; head += heads) {
                const std::vector<float> part(queries.begin() + static_cast<std::ptrdiff_t>(head * key_dim),
                                              queries.begin() + static_cast<std::ptrdiff_t>((head + heads) * key_dim));
                const std::vector<float> expected(all.begin() + static_cast<std::ptrdiff_t>(head * n),
                                                  all.begin() + static_cast<std::ptrdiff_t>((head + heads) * n));
                REQUIRE(same_bits(estimate(s, part, 0.125f), expected));
            }
        }
    }
}

TEST_CASE("sketch: logits with a stride, and nothing written beside them") {
    const cpu exec;
    for (const std::size_t n : {1u, 5u, 15u, 16u, 17u, 31u, 33u, 130u}) {
        const auto keys = normal_floats(n * 4, 9);
        const auto queries = normal_floats(5 * 4, 10);
        rope_pair_sketch s(options(4, 3, 32));
        s.fit(exec, rows_of(keys, 4));
        s.append(exec, rows_of(keys, 4));
        const auto expected = estimate(s, queries);
        const std::size_t stride = n + 3;
        std::vector<float> wide(5 * stride + 1, 777.0f);
        s.estimate(exec, rows_of(queries, 4), 1.0f, {wide.data() + 1, 5, n, static_cast<std::ptrdiff_t>(stride)});
        CHECK(wide[0] == 777.0f);
        for (std::size_t h = 0; h < 5; ++h) {
            for (std::size_t i = 0; i < stride; ++i) {
                REQUIRE(wide[1 + h * stride + i] == (i < n ? expected[h * n + i] : 777.0f));
            }
        }
    }
}

TEST_CASE("sketch: bytes a token") {
    const cpu exec;
    rope_pair_options o;
    o.key_dim = 128;
    CHECK(rope_pair_sketch(o).bytes_per_token() == 18.0);
    o.pair_fraction = 0.25;  // the paper's
    rope_pair_sketch s(o);
    CHECK(s.bytes_per_token() == 9.0);
    CHECK(s.bytes_per_token() / 512 == Approx(0.0176).epsilon(2e-3));
    const std::vector<half> keys(1024 * 128, half{0x3c00u});
    s.fit(exec, rows_of(keys, 128));
    s.append(exec, rows_of(keys, 128));
    CHECK(s.bytes() == 1024 * 9);
    s.append(exec, rows_of(keys, 128).slice(0, 1));
    CHECK(s.bytes() == 1024 * 9 + 8 + 32 * 4);
    CHECK(s.open_bytes() == 128 * 32 * sizeof(float));
    CHECK(s.size() == 1025);
    CHECK(rope_pair_sketch(options(64, 2, 128, 0.25)).bytes_per_token() == 4.5);
    CHECK(rope_pair_sketch(options(128, 3, 128, 0.25)).bytes_per_token() == 13.0);
    CHECK(rope_pair_sketch(options(128, 8, 32, 1)).bytes_per_token() == 128 + 16);
}

TEST_CASE("sketch: reserve, copies, a fit that forgets") {
    const cpu exec;
    const auto keys = normal_floats(100 * 4, 11);
    const auto query = normal_floats(4, 12);
    rope_pair_sketch s(options(4, 2, 16));
    s.reserve(100);
    s.fit(exec, rows_of(keys, 4));
    const auto before = s.codes();
    const std::size_t open_bytes = s.open_bytes();
    for (std::size_t i = 0; i < 100; ++i) {
        s.append(exec, rows_of(keys, 4).slice(i, 1));
    }
    CHECK(s.codes().codes == before.codes);
    CHECK(s.codes().parameters == before.parameters);
    CHECK(s.codes().first_token == before.first_token);
    CHECK(s.open_bytes() == open_bytes);
    const rope_pair_sketch copy = s;
    const auto expected = estimate(s, query);
    s.fit(exec, rows_of(keys, 4));
    CHECK(s.size() == 0);
    CHECK(s.bytes() == 0);
    CHECK(same_bits(estimate(copy, query), expected));
    s.append(exec, rows_of(keys, 4));
    CHECK(same_bits(estimate(s, query), expected));
}

TEST_CASE("sketch: no tokens, no queries") {
    const cpu exec;
    rope_pair_sketch s(options(4));
    const std::vector<float> none;
    s.estimate(exec, rows<float>{nullptr, 4, 0, 4, nullptr}, 1.0f, {});
    s.fit(exec, rows_of(none, 4));
    CHECK(s.channels().size() == 4);
    s.append(exec, rows_of(none, 4));
    CHECK(s.size() == 0);
    const std::vector<float> query = {1, 2, 3, 4};
    CHECK(estimate(s, query).empty());
    s.erase(0, 0);
    const std::vector<float> keys = {1, 2, 3, 4};
    s.append(exec, rows_of(keys, 4));
    CHECK(estimate(s, query)[0] == Approx(30).epsilon(1e-3));
}

TEST_CASE("sketch: clear refusals that change nothing") {
    const cpu exec;
    CHECK(message_of([] { rope_pair_sketch s(options(7)); }).find("7 channels") != std::string::npos);
    CHECK(message_of([] { rope_pair_sketch s(options(0)); }).find("0 channels") != std::string::npos);
    CHECK(message_of([] { rope_pair_sketch s(options((std::size_t{1} << 31) + 2)); }).find("2147483650 channels") !=
          std::string::npos);
    CHECK_NOTHROW(verkv::validate(options(std::size_t{1} << 31)));
    CHECK(message_of([] { rope_pair_sketch s(options(8, 0)); }).find("0 bits") != std::string::npos);
    CHECK(message_of([] { rope_pair_sketch s(options(8, 9)); }).find("9 bits") != std::string::npos);
    CHECK(message_of([] { rope_pair_sketch s(options(8, 2, 0)); }).find("group_length is 0") != std::string::npos);
    for (const double fraction : {0.0, -0.5, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
        CHECK_THROWS_AS(rope_pair_sketch(options(8, 2, 4, fraction)), verkv::invalid_argument);
    }
    const auto keys = normal_floats(10 * 8, 13);
    const auto query = normal_floats(8, 14);
    rope_pair_sketch s(options(8));
    CHECK_THROWS_AS(s.append(exec, rows_of(keys, 8)), verkv::invalid_state);
    s.fit(exec, rows_of(keys, 8));
    s.append(exec, rows_of(keys, 8));
    const auto before = estimate(s, query);
    CHECK(message_of([&] { s.append(exec, rows_of(keys, 4)); }).find("4 channels") != std::string::npos);
    CHECK_THROWS_AS(s.fit(exec, rows_of(keys, 4)), verkv::invalid_argument);
    CHECK_THROWS_AS(s.append(exec, rows<float>{nullptr, 8, 3, 8, nullptr}), verkv::invalid_argument);
    CHECK_THROWS_AS(s.erase(5, 4), verkv::invalid_argument);
    CHECK(message_of([&] { s.erase(5, 11); }).find("5 to 11") != std::string::npos);
    std::vector<float> logits(20);
    CHECK_THROWS_AS(s.estimate(exec, rows_of(query, 4), 1.0f, {logits.data(), 2, 10, 10}), verkv::invalid_argument);
    CHECK_THROWS_AS(s.estimate(exec, rows_of(query, 8), 1.0f, {logits.data(), 1, 9, 9}), verkv::invalid_argument);
    CHECK_THROWS_AS(s.estimate(exec, rows_of(query, 8), 1.0f, {logits.data(), 2, 10, 10}), verkv::invalid_argument);
    CHECK_THROWS_AS(s.estimate(exec, rows_of(query, 8), 1.0f, {nullptr, 1, 10, 10}), verkv::invalid_argument);
    const auto two = normal_floats(16, 15);
    CHECK_THROWS_AS(s.estimate(exec, rows_of(two, 8), 1.0f, {logits.data(), 2, 10, 9}), verkv::invalid_argument);
    CHECK(s.size() == 10);
    CHECK(same_bits(estimate(s, query), before));
}

}  // namespace
