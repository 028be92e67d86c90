// Mean attention over all kept queries of the prompt.
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

/// Mean attention that a token got from the queries that could see it, in one look: kvpress' ObservedAttention. It is
/// not H2O, which evicts as it goes and ranks by sums (see accumulated_attention).
/// Score of token i: (1/m_i) sum over kept queries j at or after its position of softmax(scale <q_j, K>)[i], m_i their
/// number; 0 where m_i = 0. With queries kept at all positions m_i = n - i; with a sample of them the mean is over
/// those kept, so which are kept changes how well the mean is known, not what it is a mean of.
/// Age: the sum over queries, as H2O ranks, favours old tokens, which more queries saw. The mean does not, but a late
/// token's is over few queries, its own among them, and the first queries share their attention among few tokens: the
/// two ends of a prompt still score high. windowed() protects them openly.
/// As a head scorer: of one query head. As a scorer: the mean over the group, over_group<reduction::mean>.
/// Time O(m n d) a query head for m kept queries, reads every key once for 64 of them; memory 64 n floats, n doubles.
/// Logits and exponentials in float, denominators and means in double: relative error about |logit| units roundoff. In
/// [0, 1]. Same bits for any number of threads and any strides. A NaN key makes the scores of all tokens that a query
/// sees beside it NaN.
/// Throws invalid_argument for a prompt of tokens without kept queries.
struct mean_attention {
    template <class Backend, class T>
    void score_head(const Backend& exec, const prompt<T>& p, std::size_t query_head, std::span<float> out) const {
        detail::scoring::check_query_head(p, query_head, out);
        const std::size_t n = out.size();
        const std::size_t kept = p.queries.tokens;
        detail::check(kept > 0 || n == 0, "mean_attention needs kept queries to score a prompt of ", n,
                      " tokens; there are none");
        std::vector<const T*> queries(kept);
        for (std::size_t j = 0; j < kept; ++j) {
            queries[j] = p.queries.row(j, query_head);
        }
        std::vector<double> sum(n);
        detail::scoring::attention_blocks(
            exec, p.keys[query_head / p.shape.group()], p.positions, std::span<const T* const>(queries),
            p.query_positions, p.shape.logit_scale(),
            [&](std::size_t, std::size_t first, const float* e, std::size_t count, float factor) {
                double* to = sum.data() + first;
                for (std::size_t i = 0; i < count; ++i) {
                    to[i] += static_cast<double>(e[i] * factor);
                }
            });
        std::size_t before = 0;  // kept queries that came before the token
        for (std::size_t i = 0; i < n; ++i) {
            while (before < kept && p.query_positions[before] < p.positions[i]) {
                ++before;
            }
            out[i] = before < kept ? static_cast<float>(sum[i] / static_cast<double>(kept - before)) : 0.0f;
        }
    }

    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        over_group<reduction::mean>(*this).score(exec, p, kv_head, out);
    }
};

}  // namespace verkv::inline v0
