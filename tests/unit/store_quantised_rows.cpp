// Quantised rows against doubles: what comes back, how far off it is said to be and is, attention over it, and what is
// refused.
#include "verkv/store/quantised_rows.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/allocations.hpp"
#include "support/bounded_estimates.hpp"
#include "support/catch.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/attend/attend_quantised.hpp"
#include "verkv/certify/row_error.hpp"

namespace {

using namespace support;
using verkv::bfloat16;
using verkv::cpu;
using verkv::half;
using verkv::quantised_axis;
using verkv::quantised_rows;
using verkv::quantised_shape;
using verkv::rows;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/// A group and its memory.
struct group {
    group(const quantised_shape& shape, std::size_t tokens)
        : memory(verkv::quantised_floats(shape, tokens), not_a_number),
          view(verkv::quantised_rows_in(memory, shape, tokens)) {}
    std::vector<float> memory;
    quantised_rows view;
};

template <class T>
group quantised(const std::vector<T>& x, const quantised_shape& shape) {
    group g(shape, x.size() / shape.width);
    verkv::quantise_rows(cpu{}, rows_of(x, shape.width), g.view);
    return g;
}

std::vector<float> back(const group& g) {
    std::vector<float> out(g.view.tokens * g.view.shape.width);
    verkv::dequantise_rows(cpu{}, g.view, 0, verkv::matrix_of(std::span(out), g.view.tokens, g.view.shape.width));
    return out;
}

template <class T>
void check_against_doubles(dice& d, hostility kind, const quantised_shape& shape, std::size_t tokens) {
    CAPTURE(static_cast<int>(kind), shape.width, shape.bits, static_cast<int>(shape.axis), tokens, sizeof(T));
    const auto x = hostile_keys<T>(d, kind, tokens, shape.width);
    const group g = quantised(x, shape);
    const auto y = back(g);
    const bool by_channel = shape.axis == quantised_axis::channel;
    const std::size_t parameters = by_channel ? shape.width : tokens;
    double worst = 0, widest = 0;
    for (std::size_t p = 0; p < parameters; ++p) {
        double least = 1e300, largest = -1e300;
        const std::size_t count = by_channel ? tokens : shape.width;
        for (std::size_t k = 0; k < count; ++k) {
            const double value =
                static_cast<double>(verkv::to_float(x[by_channel ? k * shape.width + p : p * shape.width + k]));
            least = (std::min)(least, value);
            largest = (std::max)(largest, value);
        }
        CHECK(static_cast<double>(g.view.zero[p]) == least);
        const double step = (largest - least) / (std::ldexp(1.0, static_cast<int>(shape.bits)) - 1);
        CHECK(static_cast<double>(g.view.step[p]) >= step);
        CHECK(static_cast<double>(g.view.step[p]) <= step * (1 + 0x1p-22) + 0x1p-149);
        const double size = (std::max)(std::abs(least), std::abs(largest));
        for (std::size_t k = 0; k < count; ++k) {
            const std::size_t at = by_channel ? k * shape.width + p : p * shape.width + k;
            const double error = std::abs(static_cast<double>(verkv::to_float(x[at])) - static_cast<double>(y[at]));
            worst = (std::max)(worst, error / (0.5 * step * (1 + 0x1p-20) + size * 0x1p-22 + 0x1p-147));
            widest = (std::max)(widest, error / (step + 1e-300));
        }
    }
    CHECK(worst <= 1);
}

TEST_CASE("quantised rows: half a step off at most, any storage, either axis") {
    dice d(101);
    for (const hostility kind : all_hostilities) {
        for (const std::size_t width : {1u, 2u, 7u, 16u, 33u, 64u, 128u}) {
            for (const unsigned bits : {4u, 8u}) {
                for (const quantised_axis axis : {quantised_axis::channel, quantised_axis::token}) {
                    const quantised_shape shape{width, bits, axis};
                    check_against_doubles<float>(d, kind, shape, 1 + d.below(70));
                    check_against_doubles<half>(d, kind, shape, 1 + d.below(20));
                    check_against_doubles<bfloat16>(d, kind, shape, 1 + d.below(20));
                }
            }
        }
    }
}

TEST_CASE("quantised rows: known codes") {
    // Channel 0 spans 0 ... 15, channel 1 is constant, channel 2 goes down.
    const std::vector<float> x = {0, 3, 30, 15, 3, 0, 4, 3, 16};
    const group g = quantised(x, {3, 4, quantised_axis::channel});
    CHECK(g.view.step[0] == 1);
    CHECK(g.view.step[1] == 0);
    CHECK(g.view.step[2] == 2);
    CHECK(g.view.codes[0] == 0x00);
    CHECK(g.view.codes[1] == 0x0f);
    CHECK(g.view.codes[2] == 0x0f);
    CHECK(g.view.codes[4] == 0x04);
    CHECK(g.view.codes[5] == 0x08);
    CHECK(back(g) == x);
    const group t = quantised(x, {3, 8, quantised_axis::token});
    CHECK(t.view.zero[1] == 0);
    CHECK(t.view.codes[3] == 255);
    CHECK(t.view.codes[4] == 51);
}

TEST_CASE("quantised rows: sinks and outliers do not overflow") {
    const std::vector<float> x = {1e5f, -1.5e38f, -2e5f, 1.5e38f, 5, 1};
    for (const quantised_axis axis : {quantised_axis::channel, quantised_axis::token}) {
        const group g = quantised(x, {2, 8, axis});
        for (const float y : back(g)) {
            CHECK(std::isfinite(y));
        }
        CHECK(std::isfinite(verkv::quantised_value_bound(g.view)));
    }
    const std::vector<float> beyond = {(std::numeric_limits<float>::max)(), -(std::numeric_limits<float>::max)()};
    const group g = quantised(beyond, {1, 8, quantised_axis::channel});
    CHECK(std::isinf(verkv::quantised_value_bound(g.view)));
}

TEST_CASE("quantised rows: bounds on logits and values are never broken, and reached") {
    dice d(102);
    double nearest_logit = 0, nearest_value = 0;
    for (int round = 0; round < 400; ++round) {
        const hostility kind = all_hostilities[d.below(9)];
        const quantised_shape shape{1 + d.below(40), d.chance(0.5) ? 4u : 8u,
                                    d.chance(0.7) ? quantised_axis::channel : quantised_axis::token};
        const std::size_t tokens = 1 + d.below(20);
        const auto x = hostile_keys<float>(d, kind, tokens, shape.width);
        const group g = quantised(x, shape);
        const auto y = back(g);
        const double value_bound = verkv::quantised_value_bound(g.view);
        auto queries = hostile_queries(d, x, 3, shape.width);
        for (std::size_t t = 0; t < tokens; ++t) {  // along the error
            for (std::size_t c = 0; c < shape.width; ++c) {
                queries.push_back(x[t * shape.width + c] > y[t * shape.width + c] ? 1.0f : -1.0f);
            }
        }
        const auto scale = static_cast<float>(d.between(-1, 1));
        const std::size_t heads = queries.size() / shape.width;
        std::vector<float> logits(heads * tokens);
        score_rows(cpu{}, rows_of(queries, shape.width), scale, rows_of(y, shape.width),
                   verkv::matrix_of(std::span(logits), heads, tokens));
        for (std::size_t h = 0; h < heads; ++h) {
            const std::span<const float> query(queries.data() + h * shape.width, shape.width);
            const double bound = verkv::quantised_logit_bound(query, scale, g.view);
            for (std::size_t t = 0; t < tokens; ++t) {
                real logit = 0, size = 0;
                for (std::size_t c = 0; c < shape.width; ++c) {
                    const real term = static_cast<real>(query[c]) * static_cast<real>(x[t * shape.width + c]);
                    logit += term;
                    size += std::abs(term);
                }
                logit *= static_cast<real>(scale);
                const real error = std::abs(logit - static_cast<real>(logits[h * tokens + t]));
                if (!(error <= static_cast<real>(bound) + 1e-17L * size)) {
                    CAPTURE(static_cast<int>(kind), shape.width, shape.bits, static_cast<int>(shape.axis), bound);
                    FAIL_CHECK("a logit is off by " << static_cast<double>(error));
                }
                nearest_logit = (std::max)(nearest_logit, static_cast<double>(error) / bound);
            }
        }
        for (std::size_t t = 0; t < tokens; ++t) {
            real square = 0;
            for (std::size_t c = 0; c < shape.width; ++c) {
                const real off = static_cast<real>(x[t * shape.width + c]) - static_cast<real>(y[t * shape.width + c]);
                square += off * off;
            }
            CHECK(std::sqrt(square) <= static_cast<real>(value_bound));
            nearest_value = (std::max)(nearest_value, static_cast<double>(std::sqrt(square)) / value_bound);
        }
    }
    CHECK(nearest_logit > 0.98);
    CHECK(nearest_value > 0.98);
    const group none({4, 8, quantised_axis::channel}, 0);
    CHECK(verkv::quantised_logit_bound(std::vector<float>(4, 1.0f), 1, none.view) == 0);
    CHECK(verkv::quantised_value_bound(none.view) == 0);
}

TEST_CASE("quantised rows: the bound counts the rounding of what comes back") {
    // Neighbouring floats are 2 apart here, and a step is 2.5: some come back 2 off.
    std::vector<float> x;
    for (int i = 0; i < 320; ++i) {
        x.push_back(0x1p24f + 2 * static_cast<float>(i));
    }
    const group g = quantised(x, {1, 8, quantised_axis::channel});
    const auto y = back(g);
    float worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
        worst = (std::max)(worst, std::abs(x[i] - y[i]));
    }
    CHECK(g.view.step[0] < 2.6f);
    CHECK(worst == 2);
    CHECK(verkv::quantised_value_bound(g.view) >= 2);
    CHECK(verkv::quantised_value_bound(g.view) < 4);
}

TEST_CASE("quantised rows: a row that is not finite spoils itself and nothing else") {
    dice d(103);
    for (const quantised_axis axis : {quantised_axis::channel, quantised_axis::token}) {
        for (const float bad : {not_a_number, infinity, -infinity}) {
            for (const std::size_t token : {0u, 7u, 8u, 19u}) {
                const auto clean = normal_floats(d, 20 * 5);
                auto x = clean;
                x[token * 5 + 3] = bad;
                auto others = clean;
                others.erase(others.begin() + static_cast<std::ptrdiff_t>(token * 5),
                             others.begin() + static_cast<std::ptrdiff_t>(token * 5 + 5));
                const group g = quantised(x, {5, 8, axis}), h = quantised(others, {5, 8, axis});
                const auto y = back(g), expected = back(h);
                for (std::size_t t = 0, from = 0; t < 20; ++t) {
                    CHECK(g.view.is_spoiled(t) == (t == token));
                    for (std::size_t c = 0; c < 5; ++c) {
                        CHECK((t == token ? std::isnan(y[t * 5 + c]) : y[t * 5 + c] == expected[from * 5 + c]));
                    }
                    from += t != token;
                }
                CHECK(verkv::quantised_value_bound(g.view) == verkv::quantised_value_bound(h.view));
            }
        }
    }
    const std::vector<float> all(10, not_a_number);
    const group g = quantised(all, {5, 4, quantised_axis::channel});
    CHECK(g.view.zero[0] == 0);
    CHECK(g.view.step[0] == 0);
    CHECK(std::isnan(back(g)[9]));
}

TEST_CASE("quantised rows: rows may lie apart, and any stretch of them comes back") {
    dice d(104);
    const auto x = normal_floats(d, 30 * 9);
    const std::vector<verkv::row_id> ids = {7, 3, 29, 3, 0};
    std::vector<float> copied;
    for (const verkv::row_id id : ids) {
        copied.insert(copied.end(), x.begin() + static_cast<std::ptrdiff_t>(id * 9 + 2),
                      x.begin() + static_cast<std::ptrdiff_t>(id * 9 + 7));
    }
    for (const unsigned bits : {4u, 8u}) {
        const quantised_shape shape{5, bits, quantised_axis::channel};
        group g(shape, 5);
        verkv::quantise_rows(cpu{}, rows<float>{x.data() + 2, 9, 5, 5, ids.data()}, g.view);
        const auto whole = back(g);
        CHECK(whole == back(quantised(copied, shape)));
        std::vector<float> part(3 * 7, -7.5f);
        verkv::dequantise_rows(cpu{}, g.view, 1, {part.data(), 3, 5, 7});
        for (std::size_t i = 0; i < 3; ++i) {
            for (std::size_t c = 0; c < 7; ++c) {
                CHECK(part[i * 7 + c] == (c < 5 ? whole[(i + 1) * 5 + c] : -7.5f));
            }
        }
    }
}

struct attention {
    std::vector<float> output, lse;
};

attention attention_over(const std::vector<group>& keys, const std::vector<group>& values,
                         const std::vector<float>& queries, float scale, const std::vector<float>& log_weight) {
    std::vector<quantised_rows> k, v;
    std::size_t tokens = 0;
    for (const group& g : keys) {
        k.push_back(g.view);
        tokens += g.view.tokens;
    }
    for (const group& g : values) {
        v.push_back(g.view);
    }
    const std::size_t width = k[0].shape.width, heads = queries.size() / width, value_dim = v[0].shape.width;
    attention a{std::vector<float>(heads * value_dim), std::vector<float>(heads)};
    verkv::quantised_workspace w;
    const verkv::matrix_view<const float> weights{log_weight.data(), tokens > 0 ? log_weight.size() / tokens : 0,
                                                  tokens, static_cast<std::ptrdiff_t>(tokens)};
    verkv::attend_quantised(cpu{}, rows_of(queries, width), scale, k, v, weights, w,
                            verkv::matrix_of(std::span(a.output), heads, value_dim), a.lse);
    // A second time within the same workspace: the same, and nothing is allocated.
    attention again = a;
    CHECK(allocations_of([&] {
              verkv::attend_quantised(cpu{}, rows_of(queries, width), scale, k, v, weights, w,
                                      verkv::matrix_of(std::span(again.output), heads, value_dim), again.lse);
          }) == 0);
    CHECK(std::equal(a.lse.begin(), a.lse.end(), again.lse.begin(),
                     [](float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); }));
    return a;
}

TEST_CASE("quantised rows: attention over groups is attention over what they hold") {
    dice d(105);
    for (const std::size_t heads : {1u, 3u, 4u, 5u, 12u}) {
        for (const unsigned bits : {4u, 8u}) {
            const std::size_t key_dim = 1 + d.below(70), value_dim = 1 + d.below(70);
            std::vector<group> keys, values;
            std::vector<float> k, v;
            for (const std::size_t tokens : {64u, 1u, 0u, 130u, 37u}) {
                const auto x = normal_floats(d, tokens * key_dim), y = normal_floats(d, tokens * value_dim);
                keys.push_back(quantised(x, {key_dim, bits, quantised_axis::channel}));
                values.push_back(quantised(y, {value_dim, bits, quantised_axis::token}));
                const auto held = back(keys.back()), values_held = back(values.back());
                k.insert(k.end(), held.begin(), held.end());
                v.insert(v.end(), values_held.begin(), values_held.end());
            }
            const std::size_t n = k.size() / key_dim;
            const auto queries = normal_floats(d, heads * key_dim);
            for (const std::size_t weighted : {std::size_t{0}, std::size_t{1}, heads}) {
                std::vector<float> log_weight = normal_floats(d, weighted * n);
                for (float& x : log_weight) {
                    x = d.chance(0.2) ? -infinity : x;
                }
                const attention a = attention_over(keys, values, queries, 0.2f, log_weight);
                std::vector<float> output(heads * value_dim), lse(heads);
                verkv::attend_workspace w;
                verkv::attend(
                    cpu{}, rows_of(queries, key_dim), 0.2f, rows_of(k, key_dim), rows_of(v, value_dim),
                    verkv::matrix_view<const float>{log_weight.data(), weighted, n, static_cast<std::ptrdiff_t>(n)}, w,
                    verkv::matrix_of(std::span(output), heads, value_dim), lse);
                for (std::size_t at = 0; at < output.size(); ++at) {
                    CHECK(a.output[at] == Approx(output[at]).epsilon(1e-5).margin(1e-5));
                }
                for (std::size_t h = 0; h < heads; ++h) {
                    CHECK(a.lse[h] == Approx(lse[h]).epsilon(1e-6));
                }
            }
        }
    }
}

TEST_CASE("quantised rows: the error of attention over them is within what is promised") {
    // Everything is used, so that epsilon is 0: denominators within e^b - 1, outputs within tanh(b/2) spread + eta.
    dice d(106);
    for (int round = 0; round < 60; ++round) {
        const unsigned bits = d.chance(0.5) ? 4 : 8;
        const std::size_t key_dim = 1 + d.below(40), value_dim = 1 + d.below(20), n = 2 + d.below(60);
        const auto k = normal_floats(d, n * key_dim, 2), v = normal_floats(d, n * value_dim);
        const auto query = normal_floats(d, key_dim);
        std::vector<group> keys, values;
        keys.push_back(quantised(k, {key_dim, bits, quantised_axis::channel}));
        values.push_back(quantised(v, {value_dim, bits, quantised_axis::token}));
        const attention a = attention_over(keys, values, query, 0.3f, {});
        const verkv::row_error error{verkv::quantised_logit_bound(query, 0.3f, keys[0].view),
                                     verkv::quantised_value_bound(values[0].view)};
        std::vector<double> o(value_dim);
        double total = 0, spread = 0;
        for (std::size_t i = 0; i < n; ++i) {
            double s = 0;
            for (std::size_t c = 0; c < key_dim; ++c) {
                s += static_cast<double>(query[c]) * static_cast<double>(k[i * key_dim + c]);
            }
            const double w = std::exp(static_cast<double>(0.3f) * s);
            total += w;
            for (std::size_t c = 0; c < value_dim; ++c) {
                o[c] += w * static_cast<double>(v[i * value_dim + c]);
            }
            for (std::size_t j = 0; j < i; ++j) {
                double apart = 0;
                for (std::size_t c = 0; c < value_dim; ++c) {
                    const double x =
                        static_cast<double>(v[i * value_dim + c]) - static_cast<double>(v[j * value_dim + c]);
                    apart += x * x;
                }
                spread = (std::max)(spread, std::sqrt(apart));
            }
        }
        double off = 0, norm = 0;
        for (std::size_t c = 0; c < value_dim; ++c) {
            const double x = static_cast<double>(a.output[c]) - o[c] / total;
            off += x * x;
            norm += o[c] / total * (o[c] / total);
        }
        CHECK(std::abs(std::exp(static_cast<double>(a.lse[0])) / total - 1) <=
              verkv::promised_epsilon(0, error) + 1e-5);
        CHECK(std::sqrt(off / norm) <= verkv::promised_output_epsilon(0, error, spread, std::sqrt(norm)) + 1e-5);
    }
}

TEST_CASE("quantised rows: a spoiled row makes the heads that use it NaN, unless it is left out") {
    dice d(107);
    auto k = normal_floats(d, 10 * 4);
    const auto v = normal_floats(d, 10 * 3);
    k[4 * 4] = infinity;
    std::vector<group> keys, values;
    keys.push_back(quantised(k, {4, 8, quantised_axis::channel}));
    values.push_back(quantised(v, {3, 8, quantised_axis::token}));
    std::vector<float> log_weight(20);
    log_weight[4] = -infinity;
    const attention a = attention_over(keys, values, normal_floats(d, 8), 1, log_weight);
    CHECK(std::isfinite(a.output[0]));
    CHECK(std::isnan(a.output[3]));
}

TEST_CASE("quantised rows: sizes") {
    CHECK(verkv::quantised_floats({128, 8, quantised_axis::channel}, 64) == 2306);
    CHECK(verkv::quantised_floats({128, 4, quantised_axis::token}, 64) == 1154);
    CHECK(verkv::quantised_floats({5, 4, quantised_axis::token}, 3) == 6 + 3);
    CHECK(verkv::quantised_floats({5, 4, quantised_axis::token}, 0) == 0);
    CHECK(quantised_shape{5, 4}.row_bytes() == 3);
}

TEST_CASE("quantised rows: what is refused") {
    const quantised_shape shape{6, 8, quantised_axis::channel};
    CHECK(refused([] { (void)verkv::quantised_floats({0, 8}, 4); }, {"0 elements"}));
    CHECK(refused([] { (void)verkv::quantised_floats({65537, 8}, 4); }, {"65537"}));
    CHECK(refused([] { (void)verkv::quantised_floats({6, 2}, 4); }, {"2 bits"}));
    CHECK(refused([] { (void)verkv::quantised_floats({6, 8, static_cast<quantised_axis>(5)}, 4); }, {"5"}));
    CHECK(refused([] { (void)verkv::quantised_floats({6, 8}, std::size_t{1} << 62); }, {"more than memory"}));
    std::vector<float> memory(verkv::quantised_floats(shape, 4));
    CHECK(refused([&] { (void)verkv::quantised_rows_in(memory, shape, 5); }, {"5 quantised rows", "the span has"}));
    const quantised_rows g = verkv::quantised_rows_in(memory, shape, 4);
    std::vector<float> x(4 * 6, 1.0f);
    CHECK(refused([&] { verkv::quantise_rows(cpu{}, rows_of(x, 3), g); }, {"[8, 3]", "4 quantised rows of 6"}));
    CHECK(refused([&] { verkv::quantise_rows(cpu{}, rows<float>{nullptr, 6, 4, 6, nullptr}, g); }, {"null"}));
    CHECK(refused(
        [&] {
            verkv::quantise_rows(cpu{}, rows_of(x, 6), quantised_rows{nullptr, nullptr, nullptr, nullptr, 4, shape});
        },
        {"null pointer", "4 rows"}));
    verkv::quantise_rows(cpu{}, rows_of(x, 6), g);
    CHECK(refused([&] { verkv::dequantise_rows(cpu{}, g, 2, verkv::matrix_of(std::span(x).first(18), 3, 6)); },
                  {"rows 2 to 5", "4 quantised"}));
    CHECK(refused([&] { verkv::dequantise_rows(cpu{}, g, 5, verkv::matrix_view<float>{x.data(), 0, 6, 6}); }, {"5"}));
    CHECK(
        refused([&] { verkv::dequantise_rows(cpu{}, g, 0, verkv::matrix_of(std::span(x), 8, 3)); }, {"of 3 elements"}));
    CHECK(refused([&] { (void)verkv::quantised_logit_bound(std::vector<float>(5), 1, g); }, {"5 channels", "6"}));
    verkv::quantised_workspace w;
    std::vector<float> output(6), lse(1), query(6);
    const auto out = verkv::matrix_of(std::span(output), 1, 6);
    const std::vector<quantised_rows> one = {g}, none;
    const auto attend = [&](const std::vector<quantised_rows>& k, const std::vector<quantised_rows>& v, float scale,
                            std::size_t key_dim, verkv::matrix_view<const float> weights) {
        verkv::attend_quantised(cpu{}, rows_of(query, key_dim).slice(0, 1), scale, k, v, weights, w, out, lse);
    };
    CHECK(refused([&] { attend(one, none, 1, 6, {}); }, {"1 groups", "0 groups"}));
    CHECK(refused([&] { attend(one, one, 1, 3, {}); }, {"3 channels", "keys of 6"}));
    CHECK(refused([&] { attend(one, one, infinity, 6, {}); }, {"scale is inf"}));
    CHECK(refused([&] { attend(one, one, 1, 6, {query.data(), 1, 5, 5}); }, {"[1, 5]", "4 rows"}));
    attend(none, none, 1, 6, {});
    CHECK(lse[0] == -infinity);
    attend(one, one, 1, 6, {});
    CHECK(output[0] == Approx(1));
}

}  // namespace
