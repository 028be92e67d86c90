// From a rank to a logit: the straight line that fits best within each query.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0 {

/// How a sketch that only ranks tokens reads its rank as a logit: <q, k> ~ intercept + slope * rank.
/// The default leaves the rank as it is. It orders tokens, which is all that a top-k needs, but it is no logit:
/// weights, certificates and planners have no meaning until the line is fitted (fit_logit_map()) or set by hand.
struct logit_map {
    float intercept = 0;  ///< in units of <q, k>; a softmax does not see it
    float slope = 1;      ///< <q, k> a unit of rank

    friend bool operator==(const logit_map&, const logit_map&) = default;
};

/// Checks a map. Throws invalid_argument unless both numbers are finite.
inline void validate(const logit_map& m) {
    detail::check(std::isfinite(m.intercept) && std::isfinite(m.slope), "a logit map of intercept ", m.intercept,
                  " and slope ", m.slope, "; both must be finite");
}

/// The line that turns a sketch's ranks into inner products with the least squared error, as it counts for a softmax.
/// slope = sum_q cov_q / sum_q var_q, with var_q the variance of the ranks of query q over the keys and cov_q their
/// covariance with <q, k>: a shift of a query's logits cancels in its softmax, so differences between queries must not
/// bend the slope. intercept = mean of <q, k> - slope mean of the ranks, over all pairs. Slope 0 where no rank differs.
/// keys [n, key_dim], queries [m, key_dim], those of a prompt, say: a few hundred of each are plenty. `probe` is a copy
/// of the sketch; what it holds does not matter. Pairs whose rank or product is not finite are left out. n m key_dim
/// multiply-adds in double and 4 n m bytes for the ranks, on the caller's thread; sums in double. Throws
/// invalid_argument for keys or queries of another width than the sketch's, and where no pair is finite.
template <class Backend, class Sketch, class T>
[[nodiscard]] logit_map fit_logit_map(const Backend& exec, Sketch probe, rows<T> keys, rows<float> queries) {
    probe.set_map(logit_map{});
    probe.fit(exec, keys);
    probe.append(exec, keys);
    std::vector<float> ranks(queries.count * keys.count);
    probe.estimate(
        exec, queries, 1.0f,
        matrix_view<float>{ranks.data(), queries.count, keys.count, static_cast<std::ptrdiff_t>(keys.count)});
    double pairs = 0;
    double rank_sum = 0;
    double product_sum = 0;
    double variance = 0;
    double covariance = 0;
    std::vector<double> products(keys.count);
    for (std::size_t q = 0; q < queries.count; ++q) {
        const float* const rank = ranks.data() + q * keys.count;
        double count = 0;
        double rank_mean = 0;
        double product_mean = 0;
        for (std::size_t i = 0; i < keys.count; ++i) {
            double product = 0;
            for (std::size_t c = 0; c < keys.width; ++c) {
                product += static_cast<double>(queries[q][c]) * static_cast<double>(to_float(keys[i][c]));
            }
            products[i] = product + 0 * static_cast<double>(rank[i]);
            if (std::isfinite(products[i])) {
                count += 1;
                rank_mean += static_cast<double>(rank[i]);
                product_mean += product;
            }
        }
        pairs += count;
        rank_sum += rank_mean;
        product_sum += product_mean;
        rank_mean /= count > 0 ? count : 1;
        product_mean /= count > 0 ? count : 1;
        for (std::size_t i = 0; i < keys.count; ++i) {
            if (std::isfinite(products[i])) {
                const double off = static_cast<double>(rank[i]) - rank_mean;
                variance += off * off;
                covariance += off * (products[i] - product_mean);
            }
        }
    }
    detail::check(pairs > 0, "a logit map of ", queries.count, " queries and ", keys.count,
                  " keys: no pair of them has a finite rank and product");
    const double slope = variance > 0 ? covariance / variance : 0;
    return {static_cast<float>((product_sum - slope * rank_sum) / pairs), static_cast<float>(slope)};
}

}  // namespace verkv::inline v0
