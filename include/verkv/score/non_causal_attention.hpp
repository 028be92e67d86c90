// Attention inside chunks of the prompt, in both directions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/detail/chunk_attention.hpp"
#include "verkv/score/detail/norm.hpp"

namespace verkv::inline v0 {

/// Attention that a token gets from all queries of its chunk, before and after it: the other half of Compactor (Chari
/// and Van Durme 2025, arXiv 2507.08143).
/// Score of token i: pool_w( ||v_i|| (1/G) sum over the group's heads and the chunk's queries of softmax(scale <q, K of
/// the chunk>)[i] ). Chunks are `chunk` tokens by index, the last one shorter: its softmax and sums run over the tokens
/// it has. Any non-negative number.
/// Queries: a kept query counts in the chunk of the token at or before its position. With a query kept for every token
/// this is the method as published. With a sample, a chunk's sums are scaled by its tokens / its kept queries, so that
/// they stand for all of them; keep queries evenly (every 16th, say). A chunk without a kept query counts as attended
/// evenly: column sum 1. Then only ||v_i|| tells its tokens apart.
/// scale: factor on <q, k>; 0 stands for the prompt's own, 1/sqrt(key_dim) by default. The authors' code and kvpress
/// leave the factor out (scale 1), which makes attention far more peaked.
/// Time O(kept queries G chunk d), reads every key and value once; memory (chunk + 64) d + 64 chunk floats a worker.
/// Logits and exponentials in float, denominators, sums and norms in double: relative error about |logit| units
/// roundoff. Same bits for any number of threads and any strides. A key or value that is not finite makes its own score
/// NaN, and pooling that of its neighbours; a query that is not finite makes its chunk NaN.
/// Throws invalid_argument for a chunk of 0 or of 2^31 and more, an even pool_width, a scale that is negative or not
/// finite, or where no query at or behind the first token was kept.
struct non_causal_attention {
    std::size_t chunk = 256;     ///< tokens that attend to each other
    std::size_t pool_width = 3;  ///< average pooling over neighbours, odd; 1 does not pool
    float scale = 0;             ///< factor on <q, k>; 0: the prompt's

    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        detail::check(chunk > 0 && chunk <= 0x7fffffff, "non_causal_attention has chunks of ", chunk,
                      " tokens; it takes 1 to ", 0x7fffffff);
        detail::scoring::check_width(pool_width);
        detail::check(std::isfinite(scale) && scale >= 0, "non_causal_attention has scale ", scale,
                      "; it must be positive, or 0 for the prompt's");
        const std::size_t n = out.size();
        if (n == 0) {
            return;
        }
        const auto kept = detail::scoring::queries_of(p, 0, n);
        detail::check(kept.first < kept.last, "non_causal_attention needs kept queries at the prompt's ", n,
                      " tokens; there are none");
        const std::size_t longest = (std::min)(chunk, n);
        const float factor = scale != 0 ? scale : p.shape.logit_scale();
        std::vector<detail::scoring::chunk_attention<T>> work(
            workers(exec), detail::scoring::chunk_attention<T>(longest, p.shape.key_dim));
        std::vector<float> raw(n);
        for_each_task(exec, (n + chunk - 1) / chunk, [&](std::size_t b, std::size_t worker) {
            const std::size_t first = b * chunk;
            const std::size_t length = (std::min)(chunk, n - first);
            work[worker].columns(p, kv_head, first, length, factor, raw.data() + first);
            for (std::size_t i = first; i < first + length; ++i) {
                raw[i] = static_cast<float>(static_cast<double>(raw[i]) *
                                            detail::scoring::norm_of(p.values[kv_head][i], p.shape.value_dim));
            }
        });
        detail::scoring::pool(pooling::average, pool_width, raw, out);
    }
};

}  // namespace verkv::inline v0
