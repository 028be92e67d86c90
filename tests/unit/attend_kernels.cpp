// exp, lane sums and loads; logits of rows against double.
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/attention_reference.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/cpu/weights.hpp"

namespace {

using namespace support;
namespace lane = verkv::detail;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

float exp_of(float x) {
    float out[lane::lane_count];
    lane::store(out, lane::exp(lane::broadcast(x)));
    return out[lane::lane_count - 1];
}

}  // namespace

TEST_CASE("attend: exp of lanes is right to 2 units in the last place") {
    double worst = 0;
    const auto visit = [&](float x) {
        const double y = static_cast<double>(exp_of(x));
        const double exact = std::exp(static_cast<double>(x));
        const auto rounded = static_cast<float>(exact);
        const double ulp = static_cast<double>(std::nextafter(rounded, infinity) - rounded);
        worst = std::max(worst, std::abs(y - exact) / ulp);
    };
    // Every 1013th float of both signs, from the smallest normal number up to the ends of the range.
    for (std::uint32_t bits = 0x00800000; bits < std::bit_cast<std::uint32_t>(88.69f); bits += 1013) {
        visit(std::bit_cast<float>(bits));
        if (std::bit_cast<float>(bits) < 87.29f) {
            visit(-std::bit_cast<float>(bits));
        }
    }
    for (int k = -125; k <= 127; ++k) {
        const double middle = (k + 0.5) * std::log(2.0);
        if (middle > -87.29 && middle < 88.69) {
            visit(static_cast<float>(middle));
            visit(std::nextafter(static_cast<float>(middle), infinity));
            visit(std::nextafter(static_cast<float>(middle), -infinity));
        }
    }
    CAPTURE(worst);
    CHECK(worst <= 2);
    CHECK(worst > 0.4);
}

TEST_CASE("attend: exp of lanes at its ends") {
    CHECK(exp_of(0.0f) == 1.0f);
    CHECK(exp_of(-0.0f) == 1.0f);
    CHECK(exp_of(-87.3f) > 0.0f);
    CHECK(exp_of(88.69f) == Approx(std::exp(88.69)).epsilon(1e-5));
    CHECK(exp_of(88.4f) == Approx(std::exp(88.4)).epsilon(1e-5));
    for (const float x : {-87.31f, -88.0f, -100.0f, -1e6f, -120000.0f, -3e38f, -infinity}) {
        CHECK(std::bit_cast<std::uint32_t>(exp_of(x)) == 0);
    }
    for (const float x : {88.8f, 89.0f, 120000.0f, 3e38f, infinity}) {
        CHECK(exp_of(x) == infinity);
    }
    CHECK(std::isnan(exp_of(not_a_number)));
    CHECK(std::isnan(exp_of(-not_a_number)));
}

TEST_CASE("attend: lane sums, maxima and partial loads") {
    generator g(3);
    for (int repeat = 0; repeat < 200; ++repeat) {
        lane::lanes x[4];
        float single[4];
        for (int j = 0; j < 4; ++j) {
            const auto elements = g.normals<float>(lane::lane_count, 100);
            x[j] = lane::load(elements.data());
            single[j] = lane::sum(x[j]);
            CHECK(lane::largest(x[j]) == *std::max_element(elements.begin(), elements.end()));
            double exact = 0;
            double size = 0;
            for (const float e : elements) {
                exact += static_cast<double>(e);
                size += std::abs(static_cast<double>(e));
            }
            CHECK(std::abs(static_cast<double>(single[j]) - exact) <= 5 * 0x1p-24 * size);
        }
        float together[4];
        lane::sum_four(x[0], x[1], x[2], x[3], together);
        CHECK(bits_of(together) == bits_of(single));
    }
    const std::vector<float> tail{1, 2, 3};
    float out[lane::lane_count];
    lane::store(out, lane::load_first(tail.data(), tail.size()));
    for (std::size_t i = 0; i < lane::lane_count; ++i) {
        CHECK(out[i] == (i < 3 ? static_cast<float>(i + 1) : 0.0f));
    }
    // A NaN is passed over by maxima.
    std::vector<float> some(3 * lane::lane_count + 1, not_a_number);
    CHECK(lane::largest_of(some) == -infinity);
    some[lane::lane_count + 1] = -5;
    some.back() = -4;
    CHECK(lane::largest_of(some) == -4);
    CHECK(lane::largest_of({}) == -infinity);
}

TEST_CASE("attend: lanes of halves and bfloat16s are what to_float says") {
    for (std::uint32_t first = 0; first < 0x10000; first += lane::lane_count) {
        verkv::half h[lane::lane_count];
        verkv::bfloat16 b[lane::lane_count];
        for (std::size_t i = 0; i < lane::lane_count; ++i) {
            h[i].bits = b[i].bits = static_cast<std::uint16_t>(first + i);
        }
        float out[lane::lane_count];
        bool same = true;
        const auto compare = [&](auto element, float x) {
            const float expected = verkv::to_float(element);
            same = same &&
                   (std::isnan(expected) ? std::isnan(x)
                                         : std::bit_cast<std::uint32_t>(expected) == std::bit_cast<std::uint32_t>(x));
        };
        lane::store(out, lane::load(h));
        for (std::size_t i = 0; i < lane::lane_count; ++i) {
            compare(h[i], out[i]);
        }
        lane::store(out, lane::load(b));
        for (std::size_t i = 0; i < lane::lane_count; ++i) {
            compare(b[i], out[i]);
        }
        CAPTURE(first);
        REQUIRE(same);
    }
}

namespace {

template <class T>
void score_against_double(std::size_t heads, std::size_t width, std::size_t count, rows_layout layout) {
    CAPTURE(heads, width, count, static_cast<int>(layout));
    generator g(heads * 1000 + width * 10 + count);
    const auto queries = g.normals<float>(heads * width);
    own_rows<T> keys(g.normals<T>(count * width), count, width, layout, count + width);
    const float scale = 0.37f;
    constexpr float untouched = 12345;
    const std::size_t stride = count + 2;
    std::vector<float> logits(heads * stride, untouched);
    verkv::score_rows(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(queries), width), scale, keys.view(),
                      {logits.data(), heads, count, static_cast<std::ptrdiff_t>(stride)});
    const double terms = static_cast<double>(width) / static_cast<double>(lane::lane_count) + 5;
    double worst = 0;
    for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t i = 0; i < count; ++i) {
            double exact = 0;
            double size = 0;
            for (std::size_t c = 0; c < width; ++c) {
                const double x = static_cast<double>(queries[h * width + c]) * value_of(keys.row(i)[c]);
                exact += x;
                size += std::abs(x);
            }
            const double bound = static_cast<double>(scale) * terms * 0x1p-24 * size;
            const double error =
                std::abs(static_cast<double>(logits[h * stride + i]) - static_cast<double>(scale) * exact);
            worst = std::max(worst, bound > 0 ? error / bound : error);
        }
        REQUIRE(logits[h * stride + count] == untouched);
        REQUIRE(logits[h * stride + count + 1] == untouched);
    }
    REQUIRE(worst <= 1);
}

}  // namespace

TEMPLATE_TEST_CASE("attend: score_rows against double", "", float, verkv::half, verkv::bfloat16) {
    for (const std::size_t heads : {1u, 2u, 3u, 4u, 5u, 7u, 12u, 32u}) {
        for (const std::size_t width : {1u, 3u, 17u, 64u, 80u, 128u, 256u}) {
            for (const std::size_t count : {0u, 1u, 3u, 63u, 64u, 65u}) {
                score_against_double<TestType>(heads, width, count, rows_layout::listed);
            }
        }
    }
    for (const std::size_t count : {1u, 65u, 1000u}) {
        for (const std::size_t width : {17u, 80u}) {
            score_against_double<TestType>(5, width, count, rows_layout::dense);
            score_against_double<TestType>(5, width, count, rows_layout::strided);
            score_against_double<TestType>(5, width, count, rows_layout::listed);
        }
    }
}

TEMPLATE_TEST_CASE("attend: a logit has the same bits whatever rows and heads are around it", "", float, verkv::half,
                   verkv::bfloat16) {
    for (const std::size_t width : {3u, 17u, 64u, 80u, 128u}) {
        constexpr std::size_t heads = 7;
        constexpr std::size_t count = 70;
        generator g(width);
        const auto queries = g.normals<float>(heads * width);
        const auto elements = g.normals<TestType>(count * width);
        const auto all_queries = verkv::contiguous_rows(std::span<const float>(queries), width);
        own_rows<TestType> keys(elements, count, width, rows_layout::dense);
        own_rows<TestType> listed(elements, count, width, rows_layout::listed, 5);
        std::vector<float> together(heads * count);
        std::vector<float> other(heads * count);
        verkv::score_rows(verkv::cpu{}, all_queries, 0.1f, keys.view(), {together.data(), heads, count, count});
        verkv::score_rows(verkv::cpu{}, all_queries, 0.1f, listed.view(), {other.data(), heads, count, count});
        CHECK(bits_of(together) == bits_of(other));
        for (std::size_t h = 0; h < heads; ++h) {
            for (std::size_t i = 0; i < count; ++i) {
                verkv::score_rows(verkv::cpu{}, all_queries.slice(h, 1), 0.1f, keys.view().slice(i, 1),
                                  {&other[h * count + i], 1, 1, 1});
            }
        }
        CHECK(bits_of(together) == bits_of(other));
    }
}

TEST_CASE("attend: a NaN stays in its row and in its head") {
    constexpr std::size_t heads = 5;
    constexpr std::size_t width = 20;
    constexpr std::size_t count = 70;
    generator g(1);
    auto queries = g.normals<float>(heads * width);
    auto elements = g.normals<float>(count * width);
    std::vector<float> clean(heads * count);
    const auto score = [&](std::vector<float>& logits) {
        verkv::score_rows(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(queries), width), 1,
                          verkv::contiguous_rows(std::span<const float>(elements), width),
                          {logits.data(), heads, count, count});
    };
    score(clean);
    queries[2 * width + 19] = not_a_number;
    elements[65 * width + 3] = not_a_number;
    std::vector<float> logits(heads * count);
    score(logits);
    for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t i = 0; i < count; ++i) {
            const float x = logits[h * count + i];
            REQUIRE((h == 2 || i == 65 ? std::isnan(x) : x == clean[h * count + i]));
        }
    }
}

TEST_CASE("attend: score_rows refuses shapes that disagree and rows that are not there") {
    const std::vector<float> memory(64, 1.0f);
    std::vector<float> logits(64, -7.0f);
    const auto rows_of = [&](std::size_t count, std::size_t width) {
        return verkv::rows<float>{memory.data(), static_cast<std::ptrdiff_t>(width), count, width, nullptr};
    };
    const auto call = [](verkv::rows<float> queries, verkv::rows<float> keys, verkv::matrix_view<float> out) {
        return [=] { verkv::score_rows(verkv::cpu{}, queries, 1.0f, keys, out); };
    };
    float* const to = logits.data();
    CHECK(refused(call(rows_of(2, 4), rows_of(3, 5), {to, 2, 3, 3}), {"queries of 4", "keys of 5"}));
    CHECK(refused(call(rows_of(2, 4), rows_of(3, 4), {to, 1, 3, 3}), {"[1, 3]", "2 queries", "3 keys"}));
    CHECK(refused(call(rows_of(2, 4), rows_of(3, 4), {to, 2, 2, 3}), {"[2, 2]", "2 queries", "3 keys"}));
    CHECK(refused(call(rows_of(2, 4), rows_of(3, 4), {to, 2, 3, 2}), {"logits", "stride 2"}));
    CHECK(refused(call(rows_of(2, 4), rows_of(3, 4), {nullptr, 2, 3, 3}), {"logits", "null"}));
    CHECK(refused(call({nullptr, 4, 2, 4, nullptr}, rows_of(3, 4), {to, 2, 3, 3}), {"queries", "null"}));
    CHECK(refused(call(rows_of(2, 4), {nullptr, 4, 3, 4, nullptr}, {to, 2, 3, 3}), {"keys", "null"}));
    CHECK(refused(call(rows_of(2, 4), {memory.data(), 3, 3, 4, nullptr}, {to, 2, 3, 3}), {"keys", "stride 3"}));
    CHECK(logits == std::vector<float>(64, -7.0f));
    CHECK(message_of(call(rows_of(2, 4), {nullptr, 4, 0, 4, nullptr}, {nullptr, 2, 0, 0})).empty());
}

TEST_CASE("attend: weigh turns logits into weights relative to the largest") {
    for (const std::size_t n : {1u, 7u, 16u, 63u, 1000u, 5000u}) {
        generator g(n);
        for (const double spread : {0.0, 1.0, 20.0, 60000.0}) {
            const auto logits = g.normals<float>(n, spread);
            auto weights = logits;
            const verkv::weighed all = verkv::weigh(verkv::cpu{}, weights);
            const float shift = all.shift;
            REQUIRE(shift == *std::max_element(logits.begin(), logits.end()));
            double exact_total = 0;
            for (std::size_t i = 0; i < n; ++i) {
                const float difference = logits[i] - shift;
                const double exact = std::exp(static_cast<double>(difference));
                exact_total += exact;
                if (difference < -87.3f) {
                    REQUIRE(weights[i] == 0);
                } else {
                    REQUIRE(std::abs(static_cast<double>(weights[i]) - exact) <= 0x1p-22 * exact);
                }
            }
            const double total = lane::sum_of(weights);
            const double tolerance = (1024.0 / lane::lane_count + 16) * 0x1p-24 * exact_total;
            REQUIRE(std::abs(total - exact_total) <= tolerance);
            REQUIRE(std::abs(all.total - exact_total) <= tolerance);
        }
    }
    std::vector<float> none;
    CHECK(verkv::weigh(verkv::cpu{}, none).shift == 0);
    std::vector<float> out(20, -infinity);
    CHECK(verkv::weigh(verkv::cpu{}, out).shift == 0);
    CHECK(out == std::vector<float>(20, 0.0f));
    std::vector<float> bad(20, 1.0f);
    bad[17] = not_a_number;
    CHECK(std::isnan(verkv::weigh(verkv::cpu{}, bad).total));
    CHECK(std::isnan(bad[17]));
    CHECK(bad[16] == 1);
    CHECK(std::isnan(lane::sum_of(bad)));
}

TEST_CASE("attend: the share that ranks the shortlist") {
    for (const std::size_t n : {1u, 5u, 16u, 33u, 100u}) {
        generator g(n);
        constexpr std::size_t heads = 3;
        std::vector<float> weight(heads * n);
        for (float& w : weight) {
            w = static_cast<float>(g.uniform());
        }
        std::vector<float> odds(n);
        for (float& o : odds) {
            o = g.uniform() < 0.3 ? 0.0f : static_cast<float>(g.uniform() * 5);
        }
        const std::vector<float> factor{0.5f, 2.0f, not_a_number};
        std::vector<float> share(n);
        lane::largest_share({weight.data(), heads, n, static_cast<std::ptrdiff_t>(n)}, factor, odds, share);
        for (std::size_t i = 0; i < n; ++i) {
            REQUIRE(share[i] == (odds[i] > 0 ? std::max(0.5f * weight[i], 2.0f * weight[n + i]) : -infinity));
        }
    }
}
