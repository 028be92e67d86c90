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
/// over_window = reduction::sum leaves the 1/W out, as the authors' code does: the same ranking, but scores beyond 1,
/// of which to_importance() takes a softmax; reduction::maximum takes the largest of the W instead of the mean.
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
    reduction over_window = reduction::mean;  ///< how the window's queries become one score

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
                    if (over_window == reduction::maximum) {
                        for (std::size_t i = 0; i < count; ++i) {
                            const auto a = static_cast<double>(e[i] * factor);
                            to[i] = a > to[i] || a != a ? a : to[i];
                        }
                        return;
                    }
                    for (std::size_t i = 0; i < count; ++i) {
                        to[i] += static_cast<double>(e[i] * factor);
                    }
                });
            const double queries_in = over_window == reduction::mean ? static_cast<double>(used) : 1.0;
            for (std::size_t i = 0; i < scored; ++i) {
                out[i] = static_cast<float>(sum[i] / queries_in);
            }
        }
        std::fill(out.begin() + static_cast<std::ptrdiff_t>(scored), out.end(), window_score);
    }
};

/// SnapKV with its window: importance 1 on the window, the rest pooled over neighbours and reduced over the group.
/// = windowed(0, window, over_group<Group>(smoothed(pool_width, pool, snapkv{window, 0}))).
/// Both group rules: reduction::mean, the default, is how it is commonly run with grouped queries (kvpress: the mean of
/// the query heads' pooled scores, one set of tokens a KV head). reduction::maximum stands for the original, which has
/// a set of tokens for each *query* head: a token counts as much as it does for the head that wants it most, so a cut
/// keeps what leads in any head.
/// Pooling: average (kernel 5) as kvpress and the authors' default, or maximum (AdaKV runs it with kernel 7). Average
/// pooling commutes with the mean over the group, maximum pooling does not: it is done for each query head, before.
/// pool_width: odd; 1 does not pool. Pooling does not reach into the window: its tokens count as 0 beside the last
/// scored ones.
/// Costs and errors as snapkv, for each query head of the group.
template <reduction Group = reduction::mean>
[[nodiscard]] auto make_snapkv(std::size_t window = 64, std::size_t pool_width = 5, pooling pool = pooling::average) {
    return windowed(0, window, over_group<Group>(smoothed(pool_width, pool, snapkv{window, 0.0f})));
}

}  // namespace verkv::inline v0
