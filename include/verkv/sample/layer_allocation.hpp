// Budgets for the layers of a model, which a layer's heads then share.
//
// Rows are counted a KV head of a layer. Budgets sum to total_rows(layers, n, kept) exactly, and no layer is left
// without one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/sample/allocation.hpp"
#include "verkv/sample/budget.hpp"

namespace verkv::inline v0 {

/// PyramidKV (Cai et al. 2024, arXiv 2406.02069): budgets that fall linearly from the first layer to the last.
/// With B free rows a layer on average, beside the fixed ones (its window): last = B / beta, first = 2 B - last, those
/// between on a line; where first would exceed the n - fixed tokens there are, it is cut to them and last is 2 B -
/// first. A last layer of less than one row gets one. Rounded so that the sum stays: each down, what is left to the
/// largest fractions.
/// Departures of others: kvpress takes the window out of B and falls back to equal budgets where last is below the
/// window; the authors' code rounds the step between layers down, so its sum is off.
/// layers: any number; 1 gets B. beta >= 1 (checked; larger is steeper). O(layers log layers).
/// Throws invalid_argument for a beta below 1 or not finite, or a total that does not reach one free row a layer.
[[nodiscard]] inline std::vector<std::size_t> pyramid_budgets(std::size_t layers, std::size_t n, const budget& kept,
                                                              const windows& fixed = {0, 0}, double beta = 20) {
    detail::check(beta >= 1 && std::isfinite(beta), "pyramid has beta ", beta, "; it must be at least 1");
    const std::size_t certain = fixed.fixed_count(n);
    const std::size_t least = (std::min)(n - certain, std::size_t{1});
    const std::size_t total = total_rows(layers, n, kept);
    detail::check(total >= layers * (certain + least), "a total of ", total, " rows for ", layers, " layers; ", certain,
                  " fixed tokens and a free one each take ", layers * (certain + least));
    const std::size_t rest = total - layers * certain;
    const double mean = layers > 0 ? static_cast<double>(rest) / static_cast<double>(layers) : 0.0;
    double last = (std::max)(mean / beta, static_cast<double>(least));
    double first = 2 * mean - last;
    if (first > static_cast<double>(n - certain)) {
        first = static_cast<double>(n - certain);
        last = 2 * mean - first;
    }
    std::vector<double> amounts;
    for (std::size_t l = 0; l < layers; ++l) {
        const double at = layers > 1 ? static_cast<double>(l) / static_cast<double>(layers - 1) : 0.5;
        amounts.push_back(first * (1 - at) + last * at);
    }
    std::vector<std::size_t> counts = detail::allocating::whole(amounts, rest);
    for (std::size_t& count : counts) {
        count += certain;
    }
    return counts;
}

/// Budgets by shares: the rule of CompressKV (Lin et al. 2025, arXiv 2508.02401), whose shares are the errors that each
/// layer's output makes under a small budget, measured beforehand.
/// budget_l = least + shares_l (total - layers * least), to the nearest whole number, within [least, most], most =
/// times_mean times the mean budget and no more than n. What rounding and the limits leave over is given out one by
/// one, to the layer of largest share first and round about, past those at their limit; what is too much is taken from
/// the layer of smallest share first. shares: a layer each, finite and not negative, not all 0 (checked); they are
/// divided by their sum. Ties go to the lower layer. O(total + layers log layers). Throws invalid_argument for bad
/// shares, a least of 0 or times_mean below 1, or a total below layers * least.
[[nodiscard]] inline std::vector<std::size_t> shared_budgets(std::span<const double> shares, std::size_t n,
                                                             const budget& kept, std::size_t least = 32,
                                                             double times_mean = 3) {
    const std::size_t layers = shares.size();
    double sum = 0;
    for (std::size_t l = 0; l < layers; ++l) {
        detail::check(std::isfinite(shares[l]) && shares[l] >= 0, "share of layer ", l, " is ", shares[l],
                      "; it must be a number that is not negative");
        sum += shares[l];
    }
    detail::check(layers == 0 || (sum > 0 && std::isfinite(sum)), "shares of ", layers, " layers sum to ", sum);
    detail::check(least > 0, "a least budget of 0 rows keeps nothing of a layer");
    detail::check(times_mean >= 1, "no layer may exceed ", times_mean, " times the mean; it must be at least 1");
    const std::size_t total = total_rows(layers, n, kept);
    detail::check(total >= layers * least, "a total of ", total, " rows for ", layers, " layers; ", least,
                  " each take ", layers * least);
    const double mean = layers > 0 ? static_cast<double>(total) / static_cast<double>(layers) : 0.0;
    const auto most = static_cast<std::size_t>(
        (std::min)(static_cast<double>(n), (std::max)(std::floor(times_mean * mean), std::ceil(mean))));
    std::vector<std::size_t> counts;
    std::size_t given = 0;
    for (const double share : shares) {
        const double extra = std::nearbyint(share / sum * static_cast<double>(total - layers * least));
        counts.push_back((std::min)(most, least + static_cast<std::size_t>(extra)));
        given += counts.back();
    }
    std::vector<std::size_t> order(layers);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return shares[a] > shares[b]; });
    while (given < total) {
        for (std::size_t k = 0; k < layers && given < total; ++k) {
            if (counts[order[k]] < most) {
                ++counts[order[k]];
                ++given;
            }
        }
    }
    while (given > total) {
        for (std::size_t k = layers; k-- > 0 && given > total;) {
            if (counts[order[k]] > least) {
                --counts[order[k]];
                --given;
            }
        }
    }
    return counts;
}

}  // namespace verkv::inline v0
