// Compactor: leverage of keys and attention in both directions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/detail/prompt_part.hpp"
#include "verkv/score/leverage.hpp"
#include "verkv/score/non_causal_attention.hpp"

namespace verkv::inline v0 {

namespace detail::scoring {

/// z-scores in place: (x - mean) / max(deviation, 1e-6), the deviation with n - 1. Scores that are not finite are left
/// out of both and as they are. In double, in the order of the scores.
inline void standardise(std::span<float> scores) {
    double sum = 0;
    std::size_t count = 0;
    for (const float x : scores) {
        if (std::isfinite(x)) {
            sum += static_cast<double>(x);
            ++count;
        }
    }
    const double mean = count > 0 ? sum / static_cast<double>(count) : 0;
    double square = 0;
    for (const float x : scores) {
        if (std::isfinite(x)) {
            square += (static_cast<double>(x) - mean) * (static_cast<double>(x) - mean);
        }
    }
    const double deviation = count > 1 ? std::sqrt(square / static_cast<double>(count - 1)) : 0;
    const double factor = 1 / (std::max)(deviation, 1e-6);
    for (float& x : scores) {
        x = static_cast<float>((static_cast<double>(x) - mean) * factor);
    }
}

}  // namespace detail::scoring

/// Compactor (Chari and Van Durme 2025, arXiv 2507.08143): keys that stand out, and keys that are attended to.
/// Score = blending z(leverage_score) + z(non_causal_attention), both over the tokens between the protected ones, as if
/// there were no others: means, projections and chunks start behind the sinks. z: minus the mean, over the deviation
/// of this KV head's tokens. The protected tokens get the highest of these scores plus 1; sample/ keeps its own windows
/// by index. A prompt of protected tokens alone gets 1 everywhere and needs no query.
/// blending: 0.35 is the paper's; kvpress takes the compression ratio. Not in [0, 1]: to_importance() takes a softmax.
/// kvpress standardises over the batch and all heads at once and leaves logits unscaled; here a head's scores depend on
/// nothing but the head.
/// Costs, errors and NaN as its parts. z-scores in double, 2 roundings to float of each part.
/// Throws invalid_argument where one of its parts does, and for a blending that is not finite.
struct compactor {
    leverage_score leverage = {};
    non_causal_attention attention = {};
    float blending = 0.35f;  ///< weight of the leverage
    std::size_t sink = 8;    ///< first tokens, protected
    std::size_t local = 4;   ///< last tokens, protected

    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        detail::check(std::isfinite(blending), "compactor has blending ", blending, "; it must be a number");
        const std::size_t n = out.size();
        const std::size_t first = (std::min)(sink, n);
        const std::size_t last = n - (std::min)(local, n - first);
        if (first == last) {
            std::fill(out.begin(), out.end(), 1.0f);
            return;
        }
        const detail::scoring::prompt_part<T> part(p, first, last);
        std::vector<float> outlying(last - first);
        std::vector<float> attended(last - first);
        leverage.score(exec, part.view(), kv_head, outlying);
        attention.score(exec, part.view(), kv_head, attended);
        detail::scoring::standardise(outlying);
        detail::scoring::standardise(attended);
        float top = 0;
        bool any = false;
        for (std::size_t i = 0; i < outlying.size(); ++i) {
            const float x = blending * outlying[i] + attended[i];
            out[first + i] = x;
            if (std::isfinite(x)) {
                top = any ? (std::max)(top, x) : x;
                any = true;
            }
        }
        std::fill_n(out.begin(), first, top + 1);
        std::fill(out.begin() + static_cast<std::ptrdiff_t>(last), out.end(), top + 1);
    }
};

}  // namespace verkv::inline v0
