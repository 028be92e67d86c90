// Attention of the last queries of the prompt.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/detail/attention_blocks.hpp"
#include "verkv/score/detail/checks.hpp"

namespace verkv::inline v0 {

/// Mean attention that the last kept queries give a token: SnapKV (Li et al. 2024) for one query head, before pooling.
/// Score of token i < n - window: (1/W) sum over the last W kept queries of softmax(scale <q, K>)[i], W = min(window,
/// kept queries), each query seeing the tokens at or before its position, the window's own keys in the denominator.
/// The last min(window, n) tokens, by index, get window_score: 1 protects them, 0 leaves that to an adaptor outside a
/// smoothing, which would else spread the 1 to its neighbours (see make_snapkv). The mean is over W also where a query
/// is older than the token (possible when the kept queries are not the last ones of the prompt).
/// A prompt of at most `window` tokens is all window and needs no query.
/// Time O(W n d), reads every key once for 64 queries; memory 64 n floats and n doubles. Logits and exponentials in
/// float, denominator and mean in double: relative error about |logit| units roundoff. In [0, 1]. Same bits for any
/// number of threads and any strides.
/// A NaN key that a query sees makes all scores it sees NaN, which to_importance() refuses.
/// Throws invalid_argument for window = 0, or a longer prompt without kept queries.
struct snapkv {
    std::size_t window = 64;  ///< queries that look, and tokens at the end that get window_score
    float window_score = 1;

    template <class Backend, class T>
    void score_head(const Backend& exec, const prompt<T>& p, std::size_t query_head, std::span<float> out) const {
        detail::scoring::check_query_head(p, query_head, out);
        detail::check(window > 0, "snapkv needs a window of at least one query");
        const std::size_t n = out.size();
        const std::size_t scored = n - (std::min)(n, window);
        if (scored > 0) {
            const std::size_t kept = p.queries.tokens;
            detail::check(kept > 0, "snapkv needs kept queries to score a prompt of ", n, " tokens; there are none");
            const std::size_t used = (std::min)(window, kept);
            std::vector<const T*> queries(used);
            for (std::size_t j = 0; j < used; ++j) {
                queries[j] = p.queries.row(kept - used + j, query_head);
            }
            std::vector<double> sum(n);
            detail::scoring::attention_blocks(
                exec, p.keys[query_head / p.shape.group()], p.positions, std::span<const T* const>(queries),
                p.query_positions.last(used), p.shape.logit_scale(),
                [&](std::size_t, std::size_t first, const float* e, std::size_t count, float factor) {
                    double* to = sum.data() + first;
                    for (std::size_t i = 0; i < count; ++i) {
                        to[i] += static_cast<double>(e[i] * factor);
                    }
                });
            for (std::size_t i = 0; i < scored; ++i) {
                out[i] = static_cast<float>(sum[i] / static_cast<double>(used));
            }
        }
        std::fill(out.begin() + static_cast<std::ptrdiff_t>(scored), out.end(), window_score);
    }
};

/// SnapKV as it is commonly run: mean over the group of average-pooled window attention, importance 1 on the window.
/// = windowed(0, window, over_group<mean>(smoothed(pool_width, average, snapkv{window, 0}))).
/// pool_width: odd; the common value is 5, and 1 does not pool. Pooling does not reach into the window: its tokens
/// count as 0 beside the last scored ones.
/// Costs and errors as snapkv, for each query head of the group.
[[nodiscard]] inline auto make_snapkv(std::size_t window = 64, std::size_t pool_width = 5) {
    return windowed(0, window,
                    over_group<reduction::mean>(smoothed(pool_width, pooling::average, snapkv{window, 0.0f})));
}

}  // namespace verkv::inline v0
