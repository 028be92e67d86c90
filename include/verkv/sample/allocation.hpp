// From scores of many heads to a budget for each.
//
// Rows are counted a KV head. `scores` is [head, token]: the heads of a layer, or of all layers one after the other.
// Budgets are numbers of rows, fixed ones included, and sum to the total exactly; no head is left without one. A
// layer's part goes to compress() as budgets_of(counts) in compression::of_heads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/views.hpp"
#include "verkv/sample/budget.hpp"

namespace verkv::inline v0 {

/// Rows of `heads` heads that keep `kept` of n tokens on average: heads * kept.rows(n), to the nearest whole number.
[[nodiscard]] inline std::size_t total_rows(std::size_t heads, std::size_t n, const budget& kept) {
    return static_cast<std::size_t>(std::llround(static_cast<double>(heads) * kept.rows(n)));
}

/// Budgets for compression::of_heads from numbers of rows.
/// Throws invalid_argument for a 0.
[[nodiscard]] inline std::vector<budget> budgets_of(std::span<const std::size_t> rows) {
    std::vector<budget> budgets;
    for (const std::size_t count : rows) {
        budgets.push_back(budget::tokens(count));
    }
    return budgets;
}

namespace detail::allocating {

// The part of a head's tokens that has to compete: all but the fixed ones.
struct contest {
    std::size_t n, first, free;
    std::size_t least;  // free tokens that every head gets, at least one where it has any

    contest(const matrix_view<const float>& scores, const windows& fixed, std::size_t at_least)
        : n(scores.columns),
          first(fixed.free_begin(n)),
          free(n - fixed.fixed_count(n)),
          least((std::min)((std::max)(at_least, std::size_t{1}), free)) {
        validate(scores, "scores");
        check(scores.rows <= 0xffffffffu, "scores of ", scores.rows, " heads; there may be 2^32 - 1");
        for (std::size_t h = 0; h < scores.rows; ++h) {
            for (std::size_t i = first; i < first + free; ++i) {
                check(std::isfinite(scores.row(h)[i]), "score of token ", i, " in head ", h, " is ", scores.row(h)[i],
                      "; scores must be finite");
            }
        }
    }
    [[nodiscard]] std::size_t certain() const { return n - free; }
    [[nodiscard]] std::span<const float> of(const matrix_view<const float>& scores, std::size_t h) const {
        return scores.row(h).subspan(first, free);
    }
    // What of a total is left beside the fixed tokens, enough for every head's least.
    [[nodiscard]] std::size_t rest(std::size_t heads, std::size_t total) const {
        check(total >= heads * (certain() + least), "a total of ", total, " rows for ", heads, " heads; ", certain(),
              " fixed and ", least, " free tokens each take ", heads * (certain() + least));
        return total - heads * certain();
    }
};

// Free tokens of each head among the `rest` that score most, `least` of each head's own first. Expected O(heads n).
inline std::vector<std::size_t> top_counts(const matrix_view<const float>& scores, const contest& c, std::size_t rest) {
    struct entry {
        float score;
        std::uint32_t head;
    };
    std::vector<std::size_t> counts(scores.rows, c.least);
    std::vector<entry> others;
    others.reserve(scores.rows * (c.free - c.least));
    std::vector<float> own(c.free);
    for (std::size_t h = 0; h < scores.rows; ++h) {
        const auto from = c.of(scores, h);
        std::copy(from.begin(), from.end(), own.begin());
        const auto cut = own.begin() + static_cast<std::ptrdiff_t>(c.least);
        std::nth_element(own.begin(), cut, own.end(), std::greater<>());
        for (auto score = cut; score != own.end(); ++score) {
            others.push_back({*score, static_cast<std::uint32_t>(h)});
        }
    }
    const std::size_t left = (std::min)(rest - scores.rows * c.least, others.size());
    const auto cut = others.begin() + static_cast<std::ptrdiff_t>(left);
    std::nth_element(others.begin(), cut, others.end(), [](const entry& a, const entry& b) {
        return a.score != b.score ? a.score > b.score : a.head < b.head;
    });
    for (auto e = others.begin(); e != cut; ++e) {
        ++counts[e->head];
    }
    return counts;
}

// Whole numbers near `amounts` that sum to total: each rounded down, what is left to the largest fractions, ties to the
// lower index. The amounts sum to total up to rounding.
inline std::vector<std::size_t> whole(std::span<const double> amounts, std::size_t total) {
    std::vector<std::size_t> counts;
    std::vector<double> fraction;
    std::size_t sum = 0;
    for (const double a : amounts) {
        counts.push_back(static_cast<std::size_t>(a));
        fraction.push_back(a - std::floor(a));
        sum += counts.back();
    }
    std::vector<std::size_t> order(amounts.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return fraction[a] > fraction[b]; });
    for (std::size_t k = 0; sum < total; ++k) {
        ++counts[order[k % order.size()]];
        ++sum;
    }
    return counts;
}

}  // namespace detail::allocating

/// The same for all: total_rows over the heads, what does not divide to the first ones.
/// O(heads). Throws invalid_argument for a total that leaves a head without a row.
[[nodiscard]] inline std::vector<std::size_t> uniform_budgets(std::size_t heads, std::size_t n, const budget& kept) {
    const std::size_t total = total_rows(heads, n, kept);
    detail::check(n == 0 || total >= heads, "a total of ", total, " rows for ", heads, " heads");
    std::vector<std::size_t> counts(heads);
    for (std::size_t h = 0; h < heads; ++h) {
        counts[h] = total / heads + (h < total % heads ? 1 : 0);
    }
    return counts;
}

/// One cut through the scores of all heads (and layers): how many of each head's tokens are among the total_rows that
/// score most. KVzip's budgets over layers, heads and positions (Kim et al. 2025, arXiv 2505.23416), with the total met
/// exactly.
/// scores: [head, token], finite (checked for tokens that are not fixed); scores of different heads have to be of one
/// scale. fixed: kept in every head by index, whatever their score. least: free tokens that every head gets (its own
/// best), at least 1. Ties at the cut go to the lower head: which of equal tokens stay is the sample's affair.
/// Expected O(heads n) by selection, no sort; memory 8 bytes a score. Throws invalid_argument for a score that is not
/// finite, naming head and token, or a total that does not reach what is fixed and least.
[[nodiscard]] inline std::vector<std::size_t> global_budgets(const matrix_view<const float>& scores, const budget& kept,
                                                             const windows& fixed = {0, 0}, std::size_t least = 1) {
    const detail::allocating::contest c(scores, fixed, least);
    const std::size_t rest = c.rest(scores.rows, total_rows(scores.rows, c.n, kept));
    std::vector<std::size_t> counts = detail::allocating::top_counts(scores, c, rest);
    for (std::size_t& count : counts) {
        count += c.certain();
    }
    return counts;
}

/// Which scores pass a threshold.
enum class passing {
    above,    ///< score > threshold: KVzip. All that tie with the threshold are dropped
    at_least  ///< score >= threshold: Fast KVzip's decoding. All that tie are kept
};

/// The score at which a cut of all heads' tokens would keep `kept`: the total_rows-th largest of the free scores, fixed
/// tokens apart. Keeping what is `above` it keeps at least one row less than the total (KVzip's own count), keeping
/// what is `at_least` it the total or more: all ties.
/// Expected O(heads n), memory 4 bytes a score. Throws as global_budgets(), and for a head without free tokens.
[[nodiscard]] inline float threshold_of(const matrix_view<const float>& scores, const budget& kept,
                                        const windows& fixed = {0, 0}) {
    const detail::allocating::contest c(scores, fixed, 1);
    detail::check(scores.rows > 0 && c.free > 0, "no free tokens to cut: ", scores.rows, " heads of ", c.n, " tokens, ",
                  c.certain(), " of them fixed");
    const std::size_t rest = c.rest(scores.rows, total_rows(scores.rows, c.n, kept));
    std::vector<float> all;
    all.reserve(scores.rows * c.free);
    for (std::size_t h = 0; h < scores.rows; ++h) {
        const auto from = c.of(scores, h);
        all.insert(all.end(), from.begin(), from.end());
    }
    const auto cut = all.begin() + static_cast<std::ptrdiff_t>((std::min)(rest, all.size()) - 1);
    std::nth_element(all.begin(), cut, all.end(), std::greater<>());
    return *cut;
}

/// Budgets by a threshold that is given: how many of a head's tokens pass it, fixed ones beside them, and never fewer
/// than `least` free ones (at least 1). The sum is what it comes to: no total is kept.
/// O(heads n). Throws invalid_argument for a score or a threshold that is not finite.
[[nodiscard]] inline std::vector<std::size_t> threshold_budgets(const matrix_view<const float>& scores, float threshold,
                                                                passing rule, const windows& fixed = {0, 0},
                                                                std::size_t least = 1) {
    const detail::allocating::contest c(scores, fixed, least);
    detail::check(std::isfinite(threshold), "threshold is ", threshold, "; it must be a number");
    std::vector<std::size_t> counts;
    for (std::size_t h = 0; h < scores.rows; ++h) {
        std::size_t passed = 0;
        for (const float score : c.of(scores, h)) {
            passed += score > threshold || (rule == passing::at_least && score == threshold) ? 1 : 0;
        }
        counts.push_back(c.certain() + (std::max)(passed, c.least));
    }
    return counts;
}

/// What the share alpha of AdaKV does.
enum class adaptive_rule {
    floor,   ///< every head keeps its own best alpha of the mean budget, the rest goes by one cut (kvpress)
    mixture  ///< (1 - alpha) of what one cut gives the head, and alpha of the mean budget (the authors' code)
};

/// AdaKV (Feng et al. 2024, arXiv 2407.11550): budgets for the heads of a layer by one cut through their scores, with a
/// share of the mean that no head goes without.
/// With B free rows a head on average and f_h of head h's among the heads * B that score most: mixture gives
/// (1 - alpha) f_h + alpha B, rounded so that the sum stays; floor gives each head its floor(alpha B) best and cuts the
/// rest, so that a head that wins enough by itself gains nothing. Both give every head at least one.
/// scores, fixed, ties and errors as global_budgets(). alpha in [0, 1] (checked): 0 is global_budgets() of the layer, 1
/// uniform but for rounding. Expected O(heads n).
[[nodiscard]] inline std::vector<std::size_t> adaptive_budgets(const matrix_view<const float>& scores,
                                                               const budget& kept, double alpha = 0.2,
                                                               adaptive_rule rule = adaptive_rule::floor,
                                                               const windows& fixed = {0, 0}) {
    detail::check(alpha >= 0 && alpha <= 1, "AdaKV's share alpha is ", alpha, "; it must lie in [0, 1]");
    const std::size_t heads = scores.rows;
    const std::size_t total = total_rows(heads, scores.columns, kept);
    detail::allocating::contest c(scores, fixed, 1);
    const std::size_t rest = c.rest(heads, total);
    const double mean = heads > 0 ? static_cast<double>(rest) / static_cast<double>(heads) : 0.0;
    if (rule == adaptive_rule::floor) {
        c.least = (std::max)(c.least, static_cast<std::size_t>(alpha * std::floor(mean)));
    }
    std::vector<std::size_t> counts = detail::allocating::top_counts(scores, c, rest);
    if (rule == adaptive_rule::mixture) {
        std::vector<double> amounts(heads);
        for (std::size_t h = 0; h < heads; ++h) {
            amounts[h] = (1 - alpha) * static_cast<double>(counts[h]) + alpha * mean;
        }
        counts = detail::allocating::whole(amounts, rest);
    }
    for (std::size_t& count : counts) {
        count += c.certain();
    }
    return counts;
}

}  // namespace verkv::inline v0
