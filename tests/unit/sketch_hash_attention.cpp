// The HashAttention sketch against a slow one in doubles; its calibration; what it refuses.
#include "verkv/sketch/hash_attention.hpp"

#include <cmath>
#include <cstdint>
#include <vector>

#include "support/catch.hpp"
#include "support/sketch_rig.hpp"
#include "verkv/core/concepts.hpp"

namespace {

using support::dice;
using support::normal_floats;
using support::refused;
using verkv::bfloat16;
using verkv::cpu;
using verkv::half;
using verkv::hash_attention_options;
using verkv::hash_attention_sketch;
using verkv::hash_mlp;

static_assert(verkv::sketch<hash_attention_sketch, cpu, float>);
static_assert(verkv::sketch<hash_attention_sketch, cpu, half>);
static_assert(verkv::sketch<hash_attention_sketch, cpu, bfloat16>);
static_assert(verkv::erasable_sketch<hash_attention_sketch>);
static_assert(!verkv::bounded_sketch<hash_attention_sketch, cpu, float>);

/// A network of random weights.
hash_mlp random_mlp(dice& d, const std::vector<std::size_t>& widths) {
    hash_mlp mlp;
    for (std::size_t l = 0; l + 1 < widths.size(); ++l) {
        mlp.layers.push_back(
            {widths[l], widths[l + 1],
             normal_floats(d, widths[l] * widths[l + 1], 2 / std::sqrt(static_cast<double>(widths[l]))),
             normal_floats(d, widths[l + 1], 0.1)});
    }
    return mlp;
}

hash_attention_options random_options(dice& d, std::size_t width, std::size_t bits) {
    return {width, random_mlp(d, {width, 24, 17, bits}), random_mlp(d, {width, 9, bits})};
}

/// Outputs of a network, straight from the weights.
std::vector<double> outputs(const hash_mlp& mlp, std::vector<double> x) {
    for (std::size_t l = 0; l < mlp.layers.size(); ++l) {
        const auto& layer = mlp.layers[l];
        std::vector<double> y(layer.out);
        for (std::size_t i = 0; i < layer.out; ++i) {
            y[i] = static_cast<double>(layer.bias[i]);
            for (std::size_t j = 0; j < layer.in; ++j) {
                y[i] += static_cast<double>(layer.weight[i * layer.in + j]) * x[j];
            }
            if (l + 1 < mlp.layers.size()) {
                y[i] /= 1 + std::exp(-y[i]);
            }
        }
        x = y;
    }
    return x;
}

template <class T>
std::vector<double> row_of(const std::vector<T>& rows, std::size_t i, std::size_t width) {
    std::vector<double> x(width);
    for (std::size_t c = 0; c < width; ++c) {
        x[c] = static_cast<double>(verkv::to_float(rows[i * width + c]));
    }
    return x;
}

template <class T>
void check_against_doubles(dice& d, const hash_attention_options& o, std::size_t n, std::size_t heads) {
    const std::size_t width = o.key_dim;
    CAPTURE(width, n, heads, sizeof(T));
    const auto keys = support::stored<T>(normal_floats(d, n * width, 2));
    const auto queries = normal_floats(d, heads * width);
    const auto s = support::sketch_of(hash_attention_sketch(o), keys);
    const auto ranks = support::logits_of(s, queries);
    hash_attention_sketch mapped = s;
    mapped.set_map({0.75f, -1.5f});
    const auto logits = support::logits_of(mapped, queries, 0.5f);
    for (std::size_t h = 0; h < heads; ++h) {
        const auto of_query = outputs(o.query_mlp, row_of(queries, h, width));
        for (std::size_t i = 0; i < n; ++i) {
            const auto of_key = outputs(o.key_mlp, row_of(keys, i, width));
            int agreement = 0;
            for (std::size_t j = 0; j < of_key.size(); ++j) {
                agreement += (of_key[j] >= 0) == (of_query[j] >= 0) ? 1 : -1;
            }
            REQUIRE(ranks[h * n + i] == static_cast<float>(agreement));
            REQUIRE(logits[h * n + i] == 0.5f * (0.75f - 1.5f * static_cast<float>(agreement)));
        }
    }
}

TEST_CASE("hash_attention: ranks are those of a slow sketch in doubles") {
    dice d(81);
    for (const std::size_t width : {1u, 5u, 16u, 64u, 65u}) {
        for (const std::size_t bits : {1u, 2u, 7u, 31u, 32u}) {
            const auto o = random_options(d, width, bits);
            check_against_doubles<float>(d, o, 1 + d.below(70), 1 + d.below(9));
            check_against_doubles<half>(d, o, 1 + d.below(70), 4);
            check_against_doubles<bfloat16>(d, o, 1 + d.below(70), 5);
        }
    }
    // The paper's shape, and networks of one layer.
    check_against_doubles<float>(d, {128, random_mlp(d, {128, 128, 128, 32}), random_mlp(d, {128, 128, 128, 32})}, 40,
                                 3);
    check_against_doubles<float>(d, {20, random_mlp(d, {20, 32}), random_mlp(d, {20, 32})}, 40, 3);
}

TEST_CASE("hash_attention: an output of 0 counts as +1") {
    // Outputs: x0, x1.
    const hash_mlp mlp{{{2, 2, {1, 0, 0, 1}, {0, 0}}}};
    const auto s = support::sketch_of(hash_attention_sketch({2, mlp, mlp}), std::vector<float>{0, -0.0f, -1, 1});
    CHECK(support::logits_of(s, {1, 1}) == std::vector<float>{2, 0});
    CHECK(support::logits_of(s, {0, -1}) == std::vector<float>{0, -2});
}

TEST_CASE("hash_attention: codes that differ, or agree, in all bits") {
    for (const std::size_t bits : {1u, 16u, 31u, 32u}) {
        const hash_mlp mlp{{{1, bits, std::vector<float>(bits, 1.0f), std::vector<float>(bits)}}};
        const auto s = support::sketch_of(hash_attention_sketch({1, mlp, mlp}), std::vector<float>{1, -1});
        const auto all = static_cast<float>(bits);
        CHECK(support::logits_of(s, {-2}) == std::vector<float>{-all, all});
    }
}

TEST_CASE("hash_attention: what every sketch keeps") {
    dice d(82);
    for (const std::size_t bits : {3u, 32u}) {
        support::check_same_bits(hash_attention_sketch(random_options(d, 20, bits)), d, 40000);
        support::check_erasing(hash_attention_sketch(random_options(d, 20, bits)), d);
        support::check_poison(hash_attention_sketch(random_options(d, 5, bits)), d);
        support::check_memory(hash_attention_sketch(random_options(d, 40, bits)), d);
        support::check_refusals(hash_attention_sketch(random_options(d, 6, bits)));
    }
    // Finite keys whose outputs are not.
    hash_mlp steep{{{1, 1, {3e38f}, {0}},
                    {1, 1, {3e38f}, {0}},
                    {1, 1, {3e38f}, {0}},
                    {1, 1, {3e38f}, {0}},
                    {1, 1, {3e38f}, {0}},
                    {1, 1, {3e38f}, {0}},
                    {1, 1, {3e38f}, {0}},
                    {1, 1, {3e38f}, {0}},
                    {1, 1, {3e38f}, {0}}}};
    const auto logits = support::logits_of(
        support::sketch_of(hash_attention_sketch({1, steep, {{{1, 1, {1}, {0}}}}}), std::vector<float>{3e38f, -1}),
        {1});
    CHECK(std::isnan(logits[0]));
    CHECK(logits[1] == 1);
}

TEST_CASE("hash_attention: calibration is the least-squares line within each query") {
    dice d(83);
    const std::size_t width = 12, n = 60, heads = 7;
    hash_attention_sketch s(random_options(d, width, 16));
    auto keys = normal_floats(d, n * width);
    const auto queries = normal_floats(d, heads * width, 2);
    s.append(cpu{}, support::rows_of(keys, width).slice(0, 3));
    CHECK(s.map() == verkv::logit_map{});
    s.calibrate(cpu{}, support::rows_of(keys, width), support::rows_of(queries, width));
    CHECK(s.size() == 3);
    const verkv::logit_map fitted = s.map();

    // Normal equations of one slope and an intercept for each query, over ranks of an uncalibrated sketch.
    hash_attention_sketch ranks(s.options());
    ranks.append(cpu{}, support::rows_of(keys, width));
    const auto x = support::logits_of(ranks, queries);
    double xx = 0, xy = 0, x_all = 0, y_all = 0;
    for (std::size_t h = 0; h < heads; ++h) {
        double sx = 0, sy = 0, sxx = 0, sxy = 0;
        for (std::size_t i = 0; i < n; ++i) {
            double y = 0;
            for (std::size_t c = 0; c < width; ++c) {
                y += static_cast<double>(keys[i * width + c]) * static_cast<double>(queries[h * width + c]);
            }
            const auto rank = static_cast<double>(x[h * n + i]);
            sx += rank;
            sy += y;
            sxx += rank * rank;
            sxy += rank * y;
        }
        xx += sxx - sx * sx / n;
        xy += sxy - sx * sy / n;
        x_all += sx;
        y_all += sy;
    }
    CHECK(static_cast<double>(fitted.slope) == Approx(xy / xx).epsilon(1e-5));
    CHECK(static_cast<double>(fitted.intercept) == Approx((y_all - xy / xx * x_all) / (n * heads)).margin(1e-5));

    // Keys and queries that are not finite are left out.
    keys.insert(keys.end(), width, std::nanf(""));
    auto more = queries;
    more.insert(more.end(), width, std::nanf(""));
    s.calibrate(cpu{}, support::rows_of(keys, width), support::rows_of(more, width));
    CHECK(s.map() == fitted);
    // Ranks that never differ have no slope.
    const std::vector<float> same(2 * width, 1.0f);
    s.calibrate(cpu{}, support::rows_of(same, width), support::rows_of(same, width));
    CHECK(s.map() == verkv::logit_map{static_cast<float>(width), 0});
    // fit() keeps it.
    s.fit(cpu{}, support::rows_of(keys, width));
    CHECK(s.map().slope == 0);
    CHECK(s.size() == 0);
}

TEST_CASE("hash_attention: sizes") {
    dice d(84);
    const hash_attention_sketch s(random_options(d, 8, 32));
    CHECK(s.bytes_per_token() == 4.125);
    const hash_attention_sketch copy = s;
    CHECK(copy.codes().query_layers == s.codes().query_layers);
}

TEST_CASE("hash_attention: what is refused") {
    dice d(85);
    const auto refuse = [&](auto change, std::initializer_list<std::string> parts) {
        auto o = random_options(d, 6, 8);
        change(o);
        return refused([&] { hash_attention_sketch s(o); }, parts);
    };
    CHECK(refuse([](auto& o) { o.key_dim = 0; }, {"0 channels", "1 to 1024"}));
    CHECK(refuse([](auto& o) { o.key_dim = 1025; }, {"1025"}));
    CHECK(refuse([](auto& o) { o.key_dim = 7; }, {"key_mlp", "layer 0", "6 inputs", "7 come in"}));
    CHECK(refuse([](auto& o) { o.query_mlp.layers.clear(); }, {"query_mlp has no layers"}));
    CHECK(refuse([](auto& o) { o.key_mlp.layers[1].in = 3; }, {"layer 1", "3 inputs", "24 come in"}));
    CHECK(refuse([](auto& o) { o.key_mlp.layers[1].out = 0; }, {"layer 1", "0 outputs"}));
    CHECK(refuse([](auto& o) { o.query_mlp.layers[1].out = 2000; }, {"query_mlp", "2000 outputs"}));
    CHECK(refuse([](auto& o) { o.key_mlp.layers[1].weight.pop_back(); }, {"layer 1", "407 weights", "408"}));
    CHECK(refuse([](auto& o) { o.key_mlp.layers[1].bias.pop_back(); }, {"16 biases", "17"}));
    CHECK(refuse([](auto& o) { o.key_mlp.layers[2].weight[3] = std::nanf(""); }, {"layer 2", "not finite"}));
    CHECK(refuse([](auto& o) { o.key_mlp.layers[0].bias[3] = 1.0f / 0.0f; }, {"layer 0", "not finite"}));
    CHECK(refuse([](auto& o) { o.key_mlp.layers.pop_back(); }, {"8", "17"}));
    auto wide = random_options(d, 6, 33);
    CHECK(refused([&] { hash_attention_sketch s(wide); }, {"33 outputs", "1 to 32"}));
    hash_attention_sketch s(random_options(d, 6, 8));
    CHECK(refused([&] { s.set_map({1, std::nanf("")}); }, {"slope nan"}));
    CHECK(refused([&] { s.set_map({1.0f / 0.0f, 1}); }, {"intercept inf"}));
    const std::vector<float> rows(12, 1.0f);
    CHECK(refused([&] { s.calibrate(cpu{}, support::rows_of(rows, 6), support::rows_of(rows, 3)); }, {"3 channels"}));
    CHECK(refused([&] { s.calibrate(cpu{}, support::rows_of(rows, 4), support::rows_of(rows, 6)); }, {"4 channels"}));
    CHECK(refused([&] { s.calibrate(cpu{}, support::rows_of(std::vector<float>{}, 6), support::rows_of(rows, 6)); },
                  {"2 queries", "0 keys"}));
    CHECK(s.map() == verkv::logit_map{});
}

}  // namespace
