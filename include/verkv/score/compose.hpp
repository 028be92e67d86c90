// Scorers made of scorers: over the group, smoothed, windowed, floored.
//
// Every adaptor but over_group takes a scorer, a head scorer or a layer scorer (or what is several) and is of the same
// kind, and hands the prompt on as it came, so
//
//     windowed(0, 64, over_group<reduction::mean>(smoothed(5, pooling::average, snapkv{64, 0})))
//
// reads from the inside out. Where a call throws, out is as it was.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "verkv/core/concepts.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/importance.hpp"

namespace verkv::inline v0 {

/// How the scores of the query heads that share a KV head become one.
enum class reduction {
    maximum,  ///< the largest; NaN in any head stays NaN
    mean,     ///< their sum over the number of heads
    sum       ///< their sum; can leave [0, 1], and to_importance() then takes a softmax
};

/// How neighbouring scores are pooled.
enum class pooling {
    average,  ///< sum of the width neighbours over width; beyond the ends counts as 0
    maximum   ///< largest of the neighbours that exist
};

/// A scorer made of a head scorer: see over_group().
template <reduction Reduction, class Head>
struct group_scorer {
    template <class T>
    using needs = needs_of<Head, T>;

    Head head;

    template <class Backend, class P>
    requires head_scorer<Head, Backend, P>
    void score(const Backend& exec, const P& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        const std::size_t group = p.shape.group();
        std::vector<float> total(out.size());
        head.score_head(exec, p, kv_head * group, std::span<float>(total));
        std::vector<float> one(group > 1 ? out.size() : 0);
        for (std::size_t g = 1; g < group; ++g) {
            head.score_head(exec, p, kv_head * group + g, std::span<float>(one));
            for (std::size_t i = 0; i < one.size(); ++i) {
                if constexpr (Reduction == reduction::maximum) {
                    total[i] = one[i] > total[i] || one[i] != one[i] ? one[i] : total[i];
                } else {
                    total[i] += one[i];
                }
            }
        }
        if constexpr (Reduction == reduction::mean) {
            for (float& x : total) {
                x /= static_cast<float>(group);
            }
        }
        std::copy(total.begin(), total.end(), out.begin());
    }
};

/// Scorer of a KV head: a head scorer reduced over the query heads of its group.
/// out[i] = max, mean or sum over g of head(kv_head * G + g)[i], G = query_heads / kv_heads, any integer.
/// Time: G calls of the head scorer; 2n floats of memory. Summed in float, in the order of the heads: relative error
/// of a sum of non-negative scores at most G units roundoff. Same bits whenever the head scorer's are.
/// Throws what the head scorer throws.
template <reduction Reduction, class Head>
[[nodiscard]] group_scorer<Reduction, Head> over_group(Head head) {
    return {std::move(head)};
}

namespace detail::scoring {

inline void check_width(std::size_t width) {
    check(width % 2 == 1, "pooling width is ", width, "; it must be odd, so that every token has a centre");
}

inline void pool(pooling kind, std::size_t width, std::span<const float> in, std::span<float> out) {
    const std::size_t n = in.size();
    const std::size_t half_width = width / 2;
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t first = i - (std::min)(i, half_width);
        const std::size_t last = i + (std::min)(n - 1 - i, half_width);
        if (kind == pooling::average) {
            double sum = 0;
            for (std::size_t j = first; j <= last; ++j) {
                sum += static_cast<double>(in[j]);
            }
            out[i] = static_cast<float>(sum / static_cast<double>(width));
        } else {
            float top = in[first];
            for (std::size_t j = first; j <= last; ++j) {
                top = in[j] > top || in[j] != in[j] ? in[j] : top;
            }
            out[i] = top;
        }
    }
}

}  // namespace detail::scoring

/// Scores pooled over neighbouring tokens: see smoothed().
template <class Inner>
struct smoothed_scorer {
    template <class T>
    using needs = needs_of<Inner, T>;

    std::size_t width;
    pooling kind;
    Inner inner;

    template <class Backend, class P>
    requires scorer<Inner, Backend, P>
    void score(const Backend& exec, const P& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        detail::scoring::check_width(width);
        std::vector<float> raw(out.size());
        inner.score(exec, p, kv_head, std::span<float>(raw));
        detail::scoring::pool(kind, width, raw, out);
    }

    template <class Backend, class P>
    requires head_scorer<Inner, Backend, P>
    void score_head(const Backend& exec, const P& p, std::size_t query_head, std::span<float> out) const {
        detail::scoring::check_query_head(p, query_head, out);
        detail::scoring::check_width(width);
        std::vector<float> raw(out.size());
        inner.score_head(exec, p, query_head, std::span<float>(raw));
        detail::scoring::pool(kind, width, raw, out);
    }

    template <class Backend, class P>
    requires layer_scorer<Inner, Backend, P>
    void score_layer(const Backend& exec, const P& p, matrix_view<float> out) const {
        detail::scoring::check_layer(p, out);
        detail::scoring::check_width(width);
        std::vector<float> raw(out.rows * out.columns);
        const matrix_view<float> scores = matrix_of(std::span<float>(raw), out.rows, out.columns);
        inner.score_layer(exec, p, scores);
        for (std::size_t h = 0; h < out.rows; ++h) {
            detail::scoring::pool(kind, width, scores.row(h), out.row(h));
        }
    }
};

/// Pools scores over `width` neighbouring tokens: stride 1, half padding.
/// average: out[i] = (1/width) sum of in[j], |j - i| <= width/2, tokens beyond the ends counting as 0: the sum is
/// divided by width at the ends too, as torch's avg_pool1d does by default and so SnapKV's code. maximum: over those
/// that exist.
/// width: odd (checked when scoring); 1 changes nothing. Neighbours are by index in the prompt.
/// Time O(n width), n floats of memory. Averages are summed in double, one rounding. Average pooling commutes with a
/// group mean, maximum pooling does not. NaN spreads to its neighbours.
template <class Inner>
[[nodiscard]] smoothed_scorer<Inner> smoothed(std::size_t width, pooling kind, Inner inner) {
    return {width, kind, std::move(inner)};
}

/// Importance with 1 at both ends: see windowed().
template <class Inner>
struct windowed_scorer {
    template <class T>
    using needs = needs_of<Inner, T>;

    std::size_t sink;
    std::size_t local;
    Inner inner;

    template <class Backend, class P>
    requires scorer<Inner, Backend, P>
    void score(const Backend& exec, const P& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        std::vector<float> raw(out.size());
        inner.score(exec, p, kv_head, std::span<float>(raw));
        to_importance(exec, std::span<float>(raw));
        finish(raw, out);
    }

    template <class Backend, class P>
    requires head_scorer<Inner, Backend, P>
    void score_head(const Backend& exec, const P& p, std::size_t query_head, std::span<float> out) const {
        detail::scoring::check_query_head(p, query_head, out);
        std::vector<float> raw(out.size());
        inner.score_head(exec, p, query_head, std::span<float>(raw));
        to_importance(exec, std::span<float>(raw));
        finish(raw, out);
    }

    template <class Backend, class P>
    requires layer_scorer<Inner, Backend, P>
    void score_layer(const Backend& exec, const P& p, matrix_view<float> out) const {
        detail::scoring::check_layer(p, out);
        std::vector<float> raw(out.rows * out.columns);
        const matrix_view<float> scores = matrix_of(std::span<float>(raw), out.rows, out.columns);
        inner.score_layer(exec, p, scores);
        for (std::size_t h = 0; h < out.rows; ++h) {
            to_importance(exec, scores.row(h));
        }
        for (std::size_t h = 0; h < out.rows; ++h) {
            finish(scores.row(h), out.row(h));
        }
    }

private:
    void finish(std::span<const float> raw, std::span<float> out) const {
        const std::size_t n = out.size();
        std::copy(raw.begin(), raw.end(), out.begin());
        std::fill_n(out.begin(), (std::min)(sink, n), 1.0f);
        std::fill_n(out.rbegin(), (std::min)(local, n), 1.0f);
    }
};

/// Importance 1 on the first `sink` and the last `local` tokens [VerKV Symbols, tau].
/// The inner scores become importance first (to_importance), so that 1 is the largest there is. A length of 0 means no
/// token, windows may overlap and be longer than the prompt. By index in the prompt.
/// This is for tau as a thing to look at and for scorers that protect a window of their own; sample/ keeps its fixed
/// tokens by index whatever their score.
/// Time O(n), n floats of memory. Throws invalid_argument for scores that are not finite.
template <class Inner>
[[nodiscard]] windowed_scorer<Inner> windowed(std::size_t sink, std::size_t local, Inner inner) {
    return {sink, local, std::move(inner)};
}

/// Scores with a lower bound: see floored().
template <class Inner>
struct floored_scorer {
    template <class T>
    using needs = needs_of<Inner, T>;

    float floor;
    Inner inner;

    template <class Backend, class P>
    requires scorer<Inner, Backend, P>
    void score(const Backend& exec, const P& p, std::size_t kv_head, std::span<float> out) const {
        check_floor();
        inner.score(exec, p, kv_head, out);
        raise_low(out);
    }

    template <class Backend, class P>
    requires head_scorer<Inner, Backend, P>
    void score_head(const Backend& exec, const P& p, std::size_t query_head, std::span<float> out) const {
        check_floor();
        inner.score_head(exec, p, query_head, out);
        raise_low(out);
    }

    template <class Backend, class P>
    requires layer_scorer<Inner, Backend, P>
    void score_layer(const Backend& exec, const P& p, matrix_view<float> out) const {
        check_floor();
        inner.score_layer(exec, p, out);
        for (std::size_t h = 0; h < out.rows; ++h) {
            raise_low(out.row(h));
        }
    }

private:
    void check_floor() const { detail::check(std::isfinite(floor), "floor is ", floor, "; it must be a number"); }

    void raise_low(std::span<float> out) const {
        for (float& x : out) {
            x = x < floor ? floor : x;
        }
    }
};

/// No score below `floor`: out[i] = max(floor, in[i]); NaN stays NaN.
/// floor: finite (checked when scoring), in the units of the inner scores. Time O(n).
template <class Inner>
[[nodiscard]] floored_scorer<Inner> floored(float floor, Inner inner) {
    return {floor, std::move(inner)};
}

}  // namespace verkv::inline v0
