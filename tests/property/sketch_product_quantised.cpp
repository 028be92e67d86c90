// A product-quantised sketch's bound is certain: hostile keys, and the queries that err most, never break it.
#include "verkv/sketch/product_quantised.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "support/catch.hpp"
#include "support/sketch_rig.hpp"

namespace {

using support::dice;
using support::real;
using support::rows_of;
using verkv::bfloat16;
using verkv::cpu;
using verkv::half;
using verkv::product_quantised_options;
using verkv::product_quantised_sketch;

constexpr std::size_t kinds = 8;

/// Keys as sketches do not like them: far from 0, with outliers, tiny, huge, all equal, of every size, two values.
template <class T>
std::vector<T> hostile_keys(dice& d, std::size_t kind, std::size_t n, std::size_t width) {
    std::vector<double> channel(width);
    for (double& x : channel) {
        x = d.normal();
    }
    const double offset = d.log_between(10, 1e4);
    std::vector<T> keys;
    for (std::size_t i = 0; i < n * width; ++i) {
        const double x = d.normal();
        const double values[kinds] = {x,
                                      offset * channel[i % width] + d.log_between(1e-6, 1) * x,
                                      x * (d.chance(0.02) ? 3e4 : 1),
                                      x * (d.chance(0.5) ? 1e-8 : 1e-38),
                                      x * d.log_between(1e3, 1e12),
                                      channel[i % width],
                                      x * d.log_between(1e-12, 1e4),
                                      x > 0 ? channel[i % width] : -channel[i % width]};
        const float limit = std::is_same_v<T, half> ? 65504.0f : 1e30f;
        keys.push_back(verkv::from_float<T>(std::clamp(static_cast<float>(values[kind]), -limit, limit)));
    }
    return keys;
}

/// The query along, or against, what a token's code leaves out of its key: the bound is reached there.
template <class T>
void add_worst(dice& d, const product_quantised_sketch& s, const std::vector<T>& keys, std::size_t token,
               std::vector<float>& queries) {
    const auto codes = s.codes();
    const std::size_t piece = codes.key_dim / codes.subspaces;
    const double sign = d.chance(0.5) ? 1 : -1;
    std::vector<double> rest(codes.key_dim);
    double square = 0;
    for (std::size_t c = 0; c < codes.key_dim; ++c) {
        const std::size_t code = codes.codes[token * codes.subspaces + c / piece];
        rest[c] = static_cast<double>(verkv::to_float(keys[token * codes.key_dim + c])) -
                  static_cast<double>(codes.centroids[c * codes.padded_centroids + code]);
        square += rest[c] * rest[c];
    }
    for (const double x : rest) {
        queries.push_back(static_cast<float>(square > 0 ? sign * x / std::sqrt(square) : 1.0));
    }
}

struct breaks {
    std::size_t broken = 0, cases = 0;
    real nearest = 0;  ///< largest error / bound
};

template <class T>
void check_kind(dice& d, std::size_t kind, std::size_t width, std::size_t subspaces, unsigned bits, breaks& out) {
    const std::size_t n = 1 + d.below(40);
    const auto keys = hostile_keys<T>(d, kind, n, width);
    product_quantised_options o;
    o.key_dim = width;
    o.subspaces = subspaces;
    o.bits = bits;
    o.training = 1 + d.below(n);
    o.iterations = d.below(4);
    o.seed = d.below(1000);
    product_quantised_sketch s(o);
    // Learned on some of the keys only: the others are unlike them, or not.
    s.fit(cpu{}, rows_of(keys, width).slice(0, 1 + d.below(n)));
    s.append(cpu{}, rows_of(keys, width));
    std::vector<float> queries;
    for (int i = 0; i < 3; ++i) {
        for (std::size_t c = 0; c < width; ++c) {
            const double sizes[] = {1, 1e-25, d.log_between(1e-6, 1e6)};
            queries.push_back(static_cast<float>(sizes[i] * d.normal()));
        }
        add_worst(d, s, keys, d.below(n), queries);
    }
    const std::size_t heads = queries.size() / width;
    const float scales[] = {1, -1, 0, 0.088f, static_cast<float>(d.between(-2, 2)), 1e-30f};
    const float scale = scales[d.below(6)];
    std::vector<float> logits(heads * n), bounds(heads * n);
    s.estimate(cpu{}, rows_of(queries, width), scale, verkv::matrix_of(std::span<float>(logits), heads, n),
               verkv::matrix_of(std::span<float>(bounds), heads, n));
    std::size_t broken = 0;
    for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t i = 0; i < n; ++i) {
            real logit = 0, sums = 0;
            for (std::size_t c = 0; c < width; ++c) {
                const real term = static_cast<real>(verkv::to_float(keys[i * width + c])) *
                                  static_cast<real>(queries[h * width + c]) * static_cast<real>(scale);
                logit += term;
                sums += std::abs(term);
            }
            const real error = std::abs(logit - static_cast<real>(logits[h * n + i]));
            const real bound = static_cast<real>(bounds[h * n + i]);
            broken += !(error <= bound + 1e-17L * sums);
            out.nearest = std::max(out.nearest, bound > 0 ? error / bound : real{0});
            ++out.cases;
        }
    }
    out.broken += broken;
    if (broken > 0) {
        CAPTURE(kind, width, subspaces, bits, n, scale, sizeof(T));
        FAIL_CHECK(broken << " bounds broken");
    }
}

TEST_CASE("product_quantised: the bound is never broken, and queries reach it") {
    dice d(121);
    struct shape {
        std::size_t width, subspaces;
    };
    breaks all;
    for (int round = 0; round < 3; ++round) {
        for (std::size_t kind = 0; kind < kinds; ++kind) {
            for (const shape w : {shape{1, 1}, shape{6, 6}, shape{7, 1}, shape{64, 4}, shape{80, 16}, shape{128, 64}}) {
                for (const unsigned bits : {1u, 3u, 6u, 8u}) {
                    check_kind<float>(d, kind, w.width, w.subspaces, bits, all);
                    check_kind<half>(d, kind, w.width, w.subspaces, bits, all);
                    check_kind<bfloat16>(d, kind, w.width, w.subspaces, bits, all);
                }
            }
        }
    }
    CHECK(all.cases > 100000);
    CHECK(all.broken == 0);
    CHECK(all.nearest > 0.99L);
}

TEST_CASE("product_quantised: rounding alone stays within the bound of keys that are centroids") {
    // No residual: what is left of the bound is rounding.
    dice d(122);
    breaks all;
    for (int round = 0; round < 300; ++round) {
        const std::size_t subspaces = 1 + d.below(64);
        product_quantised_options o;
        o.key_dim = subspaces * (1 + d.below(3));
        o.subspaces = subspaces;
        o.bits = 3;
        const std::size_t n = 8;
        std::vector<float> keys;
        for (std::size_t i = 0; i < n * o.key_dim; ++i) {
            keys.push_back(static_cast<float>(d.normal() * d.log_between(1e-3, 1e3)));
        }
        const auto s = support::sketch_of(product_quantised_sketch(o), keys);
        std::vector<float> query;
        for (std::size_t c = 0; c < o.key_dim; ++c) {
            query.push_back(static_cast<float>(d.normal() * d.log_between(1e-3, 1e3)));
        }
        std::vector<float> logits(n), bounds(n);
        s.estimate(cpu{}, rows_of(query, o.key_dim), 0.3f, verkv::matrix_of(std::span<float>(logits), 1, n),
                   verkv::matrix_of(std::span<float>(bounds), 1, n));
        for (std::size_t i = 0; i < n; ++i) {
            REQUIRE(s.codes().residual[i] == 0);
            real logit = 0;
            for (std::size_t c = 0; c < o.key_dim; ++c) {
                logit +=
                    static_cast<real>(keys[i * o.key_dim + c]) * static_cast<real>(query[c]) * static_cast<real>(0.3f);
            }
            const real error = std::abs(logit - static_cast<real>(logits[i]));
            CHECK(error <= static_cast<real>(bounds[i]));
            all.nearest = std::max(all.nearest, error / static_cast<real>(bounds[i]));
        }
    }
    CHECK(all.nearest > 0.02L);
}

}  // namespace
