// Decisions for tests of baselines: weights of a chosen skew, estimates, values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "support/reference.hpp"
#include "verkv/baseline/selection.hpp"

namespace support {

/// The memory behind a decision_view.
struct baseline_scene {
    std::vector<float> weight;
    std::vector<float> estimate;
    std::vector<float> value;  // [n, width]
    std::size_t width = 0;
    verkv::windows fixed;

    /// Weights e^(skew normal), and estimates that are off by a factor of e^(noise normal).
    baseline_scene(std::uint64_t seed, std::size_t n, double skew, double noise, std::size_t value_dim,
                   verkv::windows windows)
        : width(value_dim), fixed(windows) {
        dice d(seed);
        for (std::size_t i = 0; i < n; ++i) {
            const double s = skew * d.normal();
            weight.push_back(static_cast<float>(std::exp(s)));
            estimate.push_back(static_cast<float>(std::exp(s + noise * d.normal())));
        }
        for (std::size_t i = 0; i < n * width; ++i) {
            value.push_back(static_cast<float>(d.normal() + 0.5));
        }
    }

    [[nodiscard]] std::size_t size() const { return weight.size(); }

    /// The decision of one draw. `exact`: ranked by the weights themselves.
    [[nodiscard]] verkv::decision_view<float> view(std::uint64_t draw, verkv::tolerance promise = {},
                                                   bool exact = false) const {
        verkv::decision_view<float> v;
        v.weight = weight;
        v.estimate = exact ? weight : estimate;
        if (width > 0) {
            v.values = verkv::contiguous_rows(std::span<const float>(value), width);
        }
        v.fixed = fixed;
        v.stream.seed = draw;
        v.promise = promise;
        return v;
    }

    [[nodiscard]] double denominator() const {
        return std::accumulate(weight.begin(), weight.end(), 0.0,
                               [](double sum, float w) { return sum + static_cast<double>(w); });
    }

    [[nodiscard]] double coefficient(const verkv::selection& s, std::size_t token) const {
        const auto at = std::lower_bound(s.token.begin(), s.token.end(), token);
        return at == s.token.end() || *at != token
                   ? 0
                   : std::exp(static_cast<double>(s.log_weight[static_cast<std::size_t>(at - s.token.begin())]));
    }
};

template <class Baseline>
verkv::selection select(const Baseline& method, const verkv::decision_view<float>& view) {
    typename Baseline::workspace memory;
    verkv::selection out;
    method.select(verkv::cpu{}, view, memory, out);
    return out;
}

/// What holds of every selection: tokens ascend, each once, with a log-weight, the fixed ones among them.
inline bool well_formed(const verkv::selection& s, std::size_t n, verkv::windows fixed) {
    const auto ascends = [n](const std::vector<verkv::token_index>& tokens) {
        return std::adjacent_find(tokens.begin(), tokens.end(), std::greater_equal<>()) == tokens.end() &&
               (tokens.empty() || tokens.back() < n);
    };
    std::size_t fixed_ones = 0;
    for (const verkv::token_index i : s.token) {
        fixed_ones += fixed.fixed(i, n);
    }
    return s.token.size() == s.log_weight.size() && ascends(s.token) && ascends(s.inspected) &&
           fixed_ones == fixed.fixed_count(n);
}

}  // namespace support
