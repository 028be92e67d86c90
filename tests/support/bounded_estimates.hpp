// What tests of sketches with certain bounds share: estimates with a check of what is written, hostile keys, and a
// count of bounds that are broken.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "support/catch.hpp"
#include "support/float_rows.hpp"
#include "support/reference.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"

namespace support {

struct estimates {
    std::vector<float> logits, bounds;

    friend bool operator==(const estimates& a, const estimates& b) {
        return same_bits(a.logits, b.logits) && same_bits(a.bounds, b.bounds);
    }
};

/// Logits and bounds, and that logits are the same without bounds and nothing is written beside them.
template <class Sketch>
estimates estimates_of(const Sketch& s, const std::vector<float>& queries, float scale = 1,
                       const verkv::cpu& exec = {}) {
    const std::size_t width = s.options().key_dim;
    const std::size_t heads = queries.size() / width;
    const std::size_t stride = s.size() + 3;
    std::vector<float> logits(heads * stride, -7.5f), bounds = logits, alone = logits;
    const auto out = [&](std::vector<float>& x) {
        return verkv::matrix_view<float>{x.data(), heads, s.size(), static_cast<std::ptrdiff_t>(stride)};
    };
    s.estimate(exec, rows_of(queries, width), scale, out(logits), out(bounds));
    s.estimate(exec, rows_of(queries, width), scale, out(alone));
    CHECK(same_bits(logits, alone));
    estimates e;
    for (std::size_t at = 0; at < heads * stride; ++at) {
        if (at % stride < s.size()) {
            e.logits.push_back(logits[at]);
            e.bounds.push_back(bounds[at]);
        } else {
            REQUIRE((logits[at] == -7.5f && bounds[at] == -7.5f));
        }
    }
    return e;
}

enum class hostility { normal, offset, outlier, tiny, huge, constant, mixed, extreme, alike };
inline constexpr hostility all_hostilities[] = {hostility::normal, hostility::offset,  hostility::outlier,
                                                hostility::tiny,   hostility::huge,    hostility::constant,
                                                hostility::mixed,  hostility::extreme, hostility::alike};

/// Keys as sketches do not like them.
template <class T>
std::vector<T> hostile_keys(dice& d, hostility kind, std::size_t n, std::size_t width) {
    std::vector<double> channel(width);
    for (double& x : channel) {
        x = d.normal();
    }
    const double offset = d.log_between(10, 1e4);
    std::vector<T> keys;
    for (std::size_t i = 0; i < n * width; ++i) {
        double x = d.normal();
        switch (kind) {
            case hostility::normal:
                break;
            case hostility::offset:
                x = offset * channel[i % width] + d.log_between(1e-6, 1) * x;
                break;
            case hostility::outlier:
                x *= d.chance(0.02) ? 3e4 : 1;
                break;
            case hostility::tiny:
                x *= d.chance(0.5) ? 1e-8 : d.chance(0.5) ? 1e-30 : 1e-42;
                break;
            case hostility::huge:
                x *= d.log_between(1e3, 1e12);
                break;
            case hostility::constant:
                x = channel[i % width];
                break;
            case hostility::mixed:
                x *= d.log_between(1e-12, 1e4);
                break;
            case hostility::extreme:
                x = x > 0 ? channel[i % width] : -channel[i % width];
                break;
            case hostility::alike:
                x = channel[i % width] * std::sin(static_cast<double>(i / width)) + 1e-3 * x;
                break;
        }
        const float limit = std::is_same_v<T, verkv::half> ? 65504.0f : 1e30f;
        keys.push_back(verkv::from_float<T>(std::clamp(static_cast<float>(x), -limit, limit)));
    }
    return keys;
}

/// Queries, some of them along or against a key, some of few channels or of tiny ones.
template <class T>
std::vector<float> hostile_queries(dice& d, const std::vector<T>& keys, std::size_t heads, std::size_t width) {
    std::vector<float> queries;
    for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t token = d.below(keys.size() / width);
        const std::size_t style = d.below(7);
        for (std::size_t c = 0; c < width; ++c) {
            const float key = verkv::to_float(keys[token * width + c]);
            const auto x = static_cast<float>(d.normal());
            const float values[] = {x,
                                    key > 0 ? 1.0f : -1.0f,
                                    std::clamp(key, -1e4f, 1e4f),
                                    d.chance(0.1) ? x : 0.0f,
                                    x * 1e-25f,
                                    x * 1e-38f,
                                    x * static_cast<float>(d.log_between(1e-6, 1e6))};
            queries.push_back(values[style]);
        }
    }
    return queries;
}

/// scale <q, k>; `sums` becomes the sum of its terms' sizes.
template <class T>
real exact_logit(const T* key, const float* query, std::size_t width, float scale, real& sums) {
    real logit = 0;
    sums = 0;
    for (std::size_t c = 0; c < width; ++c) {
        const real term = static_cast<real>(verkv::to_float(key[c])) * static_cast<real>(query[c]);
        logit += term;
        sums += std::abs(term);
    }
    sums *= std::abs(static_cast<real>(scale));
    return logit * static_cast<real>(scale);
}

struct broken_bounds {
    std::size_t broken = 0;
    std::size_t cases = 0;
    std::size_t finite = 0;  ///< bounds that are
    real nearest = 0;        ///< largest error / bound
};

/// Holds every bound against the logit in long double.
template <class Sketch, class T>
void count_broken(const Sketch& s, const std::vector<T>& keys, const std::vector<float>& queries, float scale,
                  broken_bounds& out) {
    const std::size_t width = s.options().key_dim;
    const auto e = estimates_of(s, queries, scale);
    for (std::size_t h = 0; h < queries.size() / width; ++h) {
        for (std::size_t i = 0; i < s.size(); ++i) {
            real sums = 0;
            const real logit = exact_logit(keys.data() + i * width, queries.data() + h * width, width, scale, sums);
            const real error = std::abs(logit - static_cast<real>(e.logits[h * s.size() + i]));
            const real bound = static_cast<real>(e.bounds[h * s.size() + i]);
            out.broken += std::isinf(bound) ? 0 : !(error <= bound + 1e-17L * sums);
            out.finite += !std::isinf(bound);
            out.nearest = std::max(out.nearest, bound > 0 && std::isfinite(bound) ? error / bound : real{0});
            ++out.cases;
        }
    }
}

}  // namespace support
