// From importance to inclusion probabilities of a given sum.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/host_device.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/sample/budget.hpp"

namespace verkv::inline v0 {

/// Odds against a token: (1 - r) / r, 0 exactly at r = 1 [VerKV Theorem 1].
/// Precondition: 0 < r <= 1, not checked. 1 - r is exact in double; two roundings in all. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE constexpr double inclusion_odds(float r) noexcept {
    const auto p = static_cast<double>(r);
    return (1.0 - p) / p;
}

/// Odds against each token: odds_i = float((1 - r_i) / r_i), 0 exactly where r_i = 1 and positive elsewhere.
/// r, odds: [n]; 2^-126 <= r_i <= 1 (checked; smaller ones would give infinite odds). They may be the same memory.
/// Time O(n), 8n bytes moved. Error: half a unit in the last place of a float.
/// Throws invalid_argument for spans of different length or that overlap in part, or an r out of range, naming its
/// index; odds are then as they were.
template <class Backend>
void inclusion_odds(const Backend& exec, std::span<const float> r, std::span<float> odds) {
    detail::check(r.size() == odds.size(), r.size(), " probabilities do not fit odds of ", odds.size(), " tokens");
    detail::check(detail::same(r, odds) || detail::disjoint(r, odds), "the memory of ", r.size(),
                  " probabilities and that of their odds overlap in part");
    for (std::size_t i = 0; i < r.size(); ++i) {
        detail::check(r[i] >= 0x1p-126f && r[i] <= 1, "inclusion probability of token ", i, " is ", r[i],
                      "; it must lie in [2^-126, 1]");
    }
    constexpr std::size_t block = std::size_t{1} << 16;
    for_each_task(exec, (r.size() + block - 1) / block, [&](std::size_t b, std::size_t) {
        const std::size_t last = (std::min)(r.size(), (b + 1) * block);
        for (std::size_t i = b * block; i < last; ++i) {
            odds[i] = static_cast<float>(inclusion_odds(r[i]));
        }
    });
}

/// What inclusion_probabilities() found.
struct inclusion_summary {
    double scale = 0;  ///< c of r_i = min(1, c tau_i): the least one, where all are capped; 0 without free tokens
    double expected_rows = 0;  ///< sum of r as stored
    std::size_t certain = 0;   ///< tokens with r = 1, the fixed ones included
};

/// Importance below this share of the mean positive importance (of the free tokens) is raised to it.
inline constexpr double importance_floor = 1e-6;

/// Inclusion probabilities that sum to the budget [VerKV Algorithm 1; VerKV Conventions].
/// r_i = 1 on fixed tokens; r_i = min(1, c tau_i) on the free ones, with c such that their sum is
/// max(0, budget - fixed). tau_i is first raised to importance_floor times the mean of the positive tau of the free
/// tokens (all tau = 0: all are equal), so that every r_i > 0: a token that can never be sampled could not be
/// estimated. A budget of n or more, or windows that cover the prompt, give 1 everywhere. Only ratios of tau count.
/// importance: [n], finite and not negative (checked). r: [n]; it may be the same memory. The stored floats are what
/// every later formula uses.
/// c is exact: the capped tokens are found by sorting, O(n log n), not by bisection; sums run from the smallest up in
/// double. Sum of r = budget to a relative 2^-24; r is exactly 1 where capped. Memory: 2n doubles.
/// r_i depends on tau_i and on the multiset of the others alone: permuting the free tokens permutes r to the bit, and
/// equal importance gets equal r. Same bits for any number of threads.
/// Throws invalid_argument for spans of different length or that overlap in part, a bad importance (naming its index),
/// or when the rest of the budget does not exceed what the floor costs, importance_floor rows for each free token; r is
/// then as it was.
template <class Backend>
inclusion_summary inclusion_probabilities(const Backend&, std::span<const float> importance, budget kept, windows fixed,
                                          std::span<float> r) {
    const std::size_t n = importance.size();
    detail::check(r.size() == n, "inclusion probabilities of ", n, " tokens do not fit a span of ", r.size());
    detail::check(detail::same(importance, r) || detail::disjoint(importance, r), "the memory of ", n,
                  " importances and that of their probabilities overlap in part");
    for (std::size_t i = 0; i < n; ++i) {
        detail::check(std::isfinite(importance[i]) && importance[i] >= 0, "importance of token ", i, " is ",
                      importance[i], "; it must be a number that is not negative");
    }
    const std::size_t first = fixed.free_begin(n);
    const std::size_t last = fixed.free_end(n);
    const std::size_t free_tokens = last - first;
    const double rows = kept.rows(n);
    const double rest = (std::max)(0.0, rows - static_cast<double>(n - free_tokens));
    const bool everything = rows >= static_cast<double>(n);
    const double floor_cost = importance_floor * static_cast<double>(free_tokens);
    detail::check(free_tokens == 0 || everything || rest > floor_cost, "a budget of ", rows, " rows leaves ", rest,
                  " beside ", n - free_tokens, " fixed tokens; the ", free_tokens, " free tokens need more than ",
                  floor_cost);

    inclusion_summary summary;
    if (free_tokens > 0) {
        std::vector<double> tau(importance.begin() + static_cast<std::ptrdiff_t>(first),
                                importance.begin() + static_cast<std::ptrdiff_t>(last));
        std::sort(tau.begin(), tau.end());
        const auto positive = std::upper_bound(tau.begin(), tau.end(), 0.0);
        double lowest = 1;
        if (positive != tau.end()) {
            double sum = 0;
            for (auto t = positive; t != tau.end(); ++t) {
                sum += *t;
            }
            lowest = importance_floor * (sum / static_cast<double>(tau.end() - positive));
        }
        for (double& t : tau) {
            t = (std::max)(t, lowest);
        }
        const double least = tau.front();
        std::size_t uncapped = 0;  // the `uncapped` smallest have r < 1
        if (!everything) {
            std::vector<double> below(free_tokens);  // sum of the smaller ones
            for (std::size_t k = 1; k < free_tokens; ++k) {
                below[k] = below[k - 1] + tau[k - 1];
            }
            // The largest token left is capped when c tau >= 1 with c = left / (below + tau): written without the
            // difference of near-equal numbers. The walk ends before `left` does, for below > 0.
            double left = rest;
            uncapped = free_tokens;
            while (uncapped > 0 && (left - 1) * tau[uncapped - 1] >= below[uncapped - 1]) {
                --uncapped;
                left -= 1;
            }
            if (uncapped > 0) {
                summary.scale = left / (below[uncapped - 1] + tau[uncapped - 1]);
            }
        }
        if (uncapped == 0) {
            summary.scale = 1 / least;
        }
        // c tau of a capped token is 1 up to roundings in double: 1 exactly as a float.
        for (std::size_t i = first; i < last; ++i) {
            const double t = (std::max)(static_cast<double>(importance[i]), lowest);
            r[i] = static_cast<float>((std::min)(1.0, summary.scale * t));
        }
    }
    std::fill_n(r.begin(), first, 1.0f);
    std::fill(r.begin() + static_cast<std::ptrdiff_t>(last), r.end(), 1.0f);
    for (const float x : r) {
        summary.expected_rows += static_cast<double>(x);
        summary.certain += x == 1.0f ? 1 : 0;
    }
    return summary;
}

}  // namespace verkv::inline v0
