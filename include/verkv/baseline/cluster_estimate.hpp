// RetroInfer's tripartite estimate: some clusters exactly, some by their means, the rest not at all.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/attend/attend.hpp"
#include "verkv/attend/merge.hpp"
#include "verkv/baseline/detail/choose.hpp"
#include "verkv/baseline/key_clusters.hpp"
#include "verkv/baseline/selection.hpp"

namespace verkv::inline v0 {

/// Tokens that are exact, and clusters that stand for theirs.
struct cluster_selection {
    selection exact;              ///< fixed tokens and those of retrieved clusters, with coefficient 1
    std::vector<row_id> cluster;  ///< ascending: clusters that are estimated
    std::vector<float> log_size;  ///< ln of the number of tokens of each
};

/// RetroInfer (Chen et al. 2025, arXiv 2505.02922). Fixed tokens are exact (steady zone). Clusters are ranked by <q,
/// centroid>: the tokens of the first are read (retrieval zone), the next count size exp(<q, centroid>) times their
/// mean value (estimation zone), the rest nothing.
///     D^ = sum_exact w + sum_estimated size_c e^{scale <q, centroid_c> - m}
/// Nothing is claimed. Centroids are means, so each term of the second sum is at most that of its tokens (Jensen): D^
/// is low, by all of the dropped clusters and some of the estimated ones; how much, the sketch does not know. The
/// public code ranks clusters for a group, by the sum of its heads' softmax over centroids; here each query head ranks
/// for itself. Reads: the tokens of retrieved clusters. Centroids and mean values are in fast memory
/// (key_clusters::bytes()).
struct cluster_estimate {
    token_count retrieved = token_count::share(0.018);  ///< of the clusters
    token_count estimated = token_count::share(0.232);  ///< of the clusters

    struct workspace {
        top_k_workspace top;
        std::vector<token_index> nearest, read;
        std::vector<detail::weighted_token> chosen;
    };

    /// centroid_logit [clusters.size()]: scale <q, centroid> (score_rows()); n tokens, with the windows that the
    /// clusters leave out. O(clusters + selected log selected). Ties go to the lower cluster; a logit that is NaN or
    /// -infinity is neither read nor estimated. Throws invalid_argument for a wrong number of logits; `out` is then as
    /// it was.
    void select(const cpu& exec, const key_clusters& clusters, std::span<const float> centroid_logit, std::size_t n,
                windows fixed, workspace& w, cluster_selection& out) const {
        detail::check(centroid_logit.size() == clusters.size(), centroid_logit.size(), " logits of ", clusters.size(),
                      " centroids");
        out.exact.clear();
        out.cluster.clear();
        out.log_size.clear();
        const std::size_t exact = retrieved.of(clusters.size());
        const std::size_t looked_at = (std::min)(clusters.size(), exact + estimated.of(clusters.size()));
        top_k(exec, centroid_logit, exact, w.top, w.read);
        top_k(exec, centroid_logit, looked_at, w.top, w.nearest);
        w.chosen.clear();
        for (const token_index c : w.read) {
            for (const token_index i : clusters.members(c)) {
                w.chosen.push_back({i, 0.0f});
            }
        }
        detail::write_selection(fixed, n, w.chosen, 0.0f, out.exact);
        std::size_t next = 0;
        for (const token_index c : w.nearest) {
            if (next < w.read.size() && w.read[next] == c) {
                ++next;
            } else {
                out.cluster.push_back(c);
                out.log_size.push_back(std::log(static_cast<float>(clusters.members(c).size())));
            }
        }
    }
};

/// D^ of a selection. weight [n], exact; centroid_weight [clusters]: e^{logit - m} of centroids, with the weights'
/// shift. In double. Throws invalid_argument for a token or a cluster without a weight.
[[nodiscard]] inline double estimate_denominator(const cluster_selection& s, std::span<const float> weight,
                                                 std::span<const float> centroid_weight) {
    double total = estimate_denominator(s.exact, weight);
    for (std::size_t j = 0; j < s.cluster.size(); ++j) {
        detail::check(s.cluster[j] < centroid_weight.size(), "cluster ", s.cluster[j], " of ", centroid_weight.size());
        total += std::exp(static_cast<double>(s.log_size[j])) * static_cast<double>(centroid_weight[s.cluster[j]]);
    }
    return total;
}

/// Attention of one query head by a selection: over its tokens' rows and over its clusters' means, merged.
/// query [1, key_dim], keys [n, key_dim] and values [n, value_dim] not listed, output [value_dim], `other` [value_dim]
/// for the second part. Accuracy as attend() and merge_attention(). Throws as attend() does.
template <storage T>
void attend_clusters(const cpu& exec, rows<float> query, float scale, rows<T> keys, rows<T> values,
                     const key_clusters& clusters, const cluster_selection& s, attend_workspace& workspace,
                     std::span<float> output, float& lse, std::span<float> other) {
    const auto part = [&](auto k, auto v, const std::vector<row_id>& ids, const std::vector<float>& add,
                          std::span<float> into, float& log_sum) {
        k.ids = v.ids = ids.data();
        k.count = v.count = ids.size();
        attend(exec, query, scale, k, v, matrix_of(std::span<const float>(add), 1, add.size()), workspace,
               matrix_of(into, 1, into.size()), std::span<float>(&log_sum, 1));
    };
    part(keys, values, s.exact.token, s.exact.log_weight, output, lse);
    float other_lse = 0;
    part(clusters.centroids(), clusters.mean_values(), s.cluster, s.log_size, other, other_lse);
    merge_attention(output, lse, other, other_lse);
}

}  // namespace verkv::inline v0
