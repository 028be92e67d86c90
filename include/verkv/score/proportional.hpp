// Scores of any size as importance, with their ratios kept.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "verkv/core/concepts.hpp"
#include "verkv/score/detail/checks.hpp"

namespace verkv::inline v0 {

/// Scores over their largest: see proportional().
template <class Inner>
struct proportional_scorer {
    template <class T>
    using needs = needs_of<Inner, T>;

    Inner inner;

    template <class Backend, class P>
    requires scorer<Inner, Backend, P>
    void score(const Backend& exec, const P& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        std::vector<float> raw(out.size());
        inner.score(exec, p, kv_head, std::span<float>(raw));
        divide(raw, largest_of(raw), out);
    }

    template <class Backend, class P>
    requires head_scorer<Inner, Backend, P>
    void score_head(const Backend& exec, const P& p, std::size_t query_head, std::span<float> out) const {
        detail::scoring::check_query_head(p, query_head, out);
        std::vector<float> raw(out.size());
        inner.score_head(exec, p, query_head, std::span<float>(raw));
        divide(raw, largest_of(raw), out);
    }

    template <class Backend, class P>
    requires layer_scorer<Inner, Backend, P>
    void score_layer(const Backend& exec, const P& p, matrix_view<float> out) const {
        detail::scoring::check_layer(p, out);
        std::vector<float> raw(out.rows * out.columns);
        const matrix_view<float> scores = matrix_of(std::span<float>(raw), out.rows, out.columns);
        inner.score_layer(exec, p, scores);
        std::vector<float> largest(out.rows);
        for (std::size_t h = 0; h < out.rows; ++h) {
            largest[h] = largest_of(scores.row(h));
        }
        for (std::size_t h = 0; h < out.rows; ++h) {
            divide(scores.row(h), largest[h], out.row(h));
        }
    }

private:
    static float largest_of(std::span<const float> scores) {
        float largest = 0;
        for (std::size_t i = 0; i < scores.size(); ++i) {
            detail::check(std::isfinite(scores[i]) && scores[i] >= 0, "score of token ", i, " is ", scores[i],
                          "; proportional() takes finite scores that are not negative");
            largest = scores[i] > largest ? scores[i] : largest;
        }
        return largest;
    }

    static void divide(std::span<const float> scores, float largest, std::span<float> out) {
        for (std::size_t i = 0; i < out.size(); ++i) {
            out[i] = largest > 0 ? scores[i] / largest : scores[i];
        }
    }
};

/// Divides the scores of a head by their largest, so that they lie in [0, 1] and to_importance() leaves them as they
/// are: only ratios count for a sample, and a softmax of scores that happen to exceed 1 would lose them. Scores of
/// different heads can no longer be compared: a budget over heads (sample/allocation.hpp) takes the scores without
/// this. All 0: they stay 0. Time O(n), one rounding. Throws invalid_argument for a score that is negative or not
/// finite, naming its index (what out holds then is not specified).
template <class Inner>
[[nodiscard]] proportional_scorer<Inner> proportional(Inner inner) {
    return {std::move(inner)};
}

}  // namespace verkv::inline v0
