// Attention of the prompt's last query.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/score/detail/attention_blocks.hpp"
#include "verkv/score/detail/checks.hpp"

namespace verkv::inline v0 {

/// Attention that the last kept query gives a token, one set of scores for the whole layer: TOVA (Oren et al. 2024,
/// "Transformers are multi-state RNNs", arXiv 2401.06104).
/// Score of token i: mean over all query heads h of the layer of softmax(scale <q_h, K>)[i], each head over its own KV
/// head's keys at or before the query; the same for every KV head. Tokens behind the last kept query get 0: keep the
/// prompt's last query. protect_last: the last token, by index, gets 1 (kvpress protects it, the paper does not).
/// As a layer scorer all heads are read once: time O(query_heads n d), reads every key of the layer once; score() does
/// the same work for each KV head. Memory: query_heads / kv_heads rows of n floats (at most 64), n doubles.
/// Logits and exponentials in float, denominator and mean in double: relative error about |logit| units roundoff. In
/// [0, 1]. Same bits for any number of threads and any strides. A NaN key that the query sees makes all scores NaN,
/// which to_importance() refuses.
/// Throws invalid_argument for a prompt of tokens without kept queries.
struct tova {
    bool protect_last = false;  ///< score 1 for the last token

    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        run(exec, p, out);
    }

    template <class Backend, class T>
    void score_layer(const Backend& exec, const prompt<T>& p, matrix_view<float> out) const {
        detail::scoring::check_layer(p, out);
        run(exec, p, out.row(0));
        for (std::size_t h = 1; h < out.rows; ++h) {
            std::copy(out.row(0).begin(), out.row(0).end(), out.row(h).begin());
        }
    }

private:
    template <class Backend, class T>
    void run(const Backend& exec, const prompt<T>& p, std::span<float> out) const {
        const std::size_t n = out.size();
        if (n == 0) {
            return;
        }
        const std::size_t kept = p.queries.tokens;
        detail::check(kept > 0, "tova needs the last query to score a prompt of ", n, " tokens; there are none");
        const std::size_t group = p.shape.group();
        const std::vector<position_t> at(group, p.query_positions.back());
        std::vector<const T*> queries(group);
        std::vector<double> sum(n);
        for (std::size_t h = 0; h < p.shape.kv_heads; ++h) {
            for (std::size_t g = 0; g < group; ++g) {
                queries[g] = p.queries.row(kept - 1, h * group + g);
            }
            detail::scoring::attention_blocks(
                exec, p.keys[h], p.positions, std::span<const T* const>(queries), std::span<const position_t>(at),
                p.shape.logit_scale(),
                [&](std::size_t, std::size_t first, const float* e, std::size_t count, float factor) {
                    double* to = sum.data() + first;
                    for (std::size_t i = 0; i < count; ++i) {
                        to[i] += static_cast<double>(e[i] * factor);
                    }
                });
        }
        for (std::size_t i = 0; i < n; ++i) {
            out[i] = static_cast<float>(sum[i] / static_cast<double>(p.shape.query_heads));
        }
        if (protect_last) {
            out.back() = 1;
        }
    }
};

}  // namespace verkv::inline v0
