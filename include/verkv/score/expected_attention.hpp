// Attention that queries to come are expected to give a token.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/core/rope.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/detail/norm.hpp"
#include "verkv/score/detail/quadratic_form.hpp"
#include "verkv/score/proportional.hpp"

namespace verkv::inline v0 {

/// Attention that queries of the next positions are expected to give a token, from the mean and the covariance of those
/// of the prompt (Devoto et al. 2025, "Expected attention", arXiv 2510.00636).
/// For a query head: kept queries, un-rotated at their positions, have mean mu and covariance S (divided by their
/// count). R is the mean of the rotations at the n_future positions behind the last token (no rotation itself: it
/// shrinks fast pairs to nearly 0). Queries to come are taken for N(R mu, R S R^T), so that E exp(scale <q, k_i>) is
/// exp(logit_i), logit_i = scale <R mu, k_i> + (scale^2 / 2) k_i^T R S R^T k_i, k_i rotated. a_i = softmax over the
/// tokens behind the sinks. Score: (mean of a_i over the query heads + epsilon) ||v_i||, values' norms optional; not
/// below 0, of any size (see make_expected_attention). The first `sinks` tokens, by index, get max(1, largest score),
/// and queries kept at their positions are not looked at: the first tokens' are outliers.
/// Kept queries may be all or a sample: both estimate the same mean and covariance; fewer than some 2 key_dim of them
/// leave S singular and noisy.
/// As a head scorer: of one query head. As a scorer: of the group, with one softmax a query head.
/// rotation: what the model rotates queries and keys by (core/rope.hpp). Scaled variants need their own frequencies.
/// Time O(m d^2 + d^3 + n d r) a query head for m kept queries, r <= min(d, m - 1) the rank of S: R S R^T = C C^T once,
/// then ||C^T k||^2, not n products with a d x d matrix a token at a time. Reads keys once a query head, values once.
/// Memory: m d doubles, n doubles. Angles, statistics and softmax in double, products with keys in float: relative
/// error of a score about d units roundoff times the size of its logit's terms. Same bits for any number of threads and
/// any strides. A NaN or infinite key or value spoils its own token's score alone; a kept query that is not finite all.
/// Throws invalid_argument for a rotation that does not fit, n_future = 0, an epsilon that is negative or not finite,
/// or tokens to score without a kept query behind the sinks.
struct expected_attention {
    rope rotation;
    std::size_t n_future = 512;  ///< positions to come that are averaged over
    std::size_t sinks = 4;       ///< tokens at the start that always matter
    bool use_covariance = true;  ///< false: logit from the mean alone
    bool use_value_norm = true;  ///< false: attention alone
    float epsilon = 0;           ///< added to the attention before the norm

    template <class Backend, class T>
    void score_head(const Backend& exec, const prompt<T>& p, std::size_t query_head, std::span<float> out) const {
        detail::scoring::check_query_head(p, query_head, out);
        run(exec, p, query_head, 1, out);
    }

    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        run(exec, p, kv_head * p.shape.group(), p.shape.group(), out);
    }

private:
    // What takes a rotated query to R times the un-rotated one: a complex factor for each kept query and pair.
    template <class T>
    std::vector<double> turns(const prompt<T>& p, std::size_t first) const {
        const std::size_t pairs = rotation.pairs();
        std::vector<double> mean(2 * pairs);
        for (std::size_t f = 1; f <= n_future; ++f) {
            const double at = static_cast<double>(p.positions.back()) + static_cast<double>(f);
            for (std::size_t i = 0; i < pairs; ++i) {
                mean[2 * i] += std::cos(at * rotation.frequencies[i]);
                mean[2 * i + 1] += std::sin(at * rotation.frequencies[i]);
            }
        }
        // The magnitude is divided out of the query and comes back with R.
        for (double& x : mean) {
            x /= static_cast<double>(n_future);
        }
        std::vector<double> turn;
        turn.reserve((p.queries.tokens - first) * 2 * pairs);
        for (std::size_t j = first; j < p.queries.tokens; ++j) {
            for (std::size_t i = 0; i < pairs; ++i) {
                const double angle = static_cast<double>(p.query_positions[j]) * rotation.frequencies[i];
                const double c = std::cos(angle);
                const double s = std::sin(angle);
                turn.push_back(mean[2 * i] * c + mean[2 * i + 1] * s);
                turn.push_back(mean[2 * i + 1] * c - mean[2 * i] * s);
            }
        }
        return turn;
    }

    // Factor C of scale^2 R S R^T, and scale R mu as its last column.
    template <class T>
    detail::scoring::tile_matrix statistics(const prompt<T>& p, std::size_t query_head, std::size_t first,
                                            std::span<const double> turn) const {
        using detail::scoring::at;
        const std::size_t d = p.shape.key_dim;
        const std::size_t pairs = rotation.pairs();
        const std::size_t used = p.queries.tokens - first;
        Eigen::MatrixXd moved(at(d), at(used));  // a query a column
        for (std::size_t j = 0; j < used; ++j) {
            const T* q = p.queries.row(first + j, query_head);
            double* to = moved.col(at(j)).data();
            for (std::size_t i = 0; i < pairs; ++i) {
                const double re = turn[2 * (j * pairs + i)];
                const double im = turn[2 * (j * pairs + i) + 1];
                const auto x = static_cast<double>(to_float(q[rotation.first(i)]));
                const auto y = static_cast<double>(to_float(q[rotation.second(i)]));
                to[rotation.first(i)] = re * x - im * y;
                to[rotation.second(i)] = im * x + re * y;
            }
            for (std::size_t c = 2 * pairs; c < d; ++c) {
                to[c] = static_cast<double>(to_float(q[c]));
            }
        }
        const auto scale = static_cast<double>(p.shape.logit_scale());
        const Eigen::VectorXd mean = moved.rowwise().mean();
        Eigen::MatrixXd factor(at(d), 0);
        if (use_covariance) {
            moved.colwise() -= mean;
            Eigen::MatrixXd covariance = Eigen::MatrixXd::Zero(at(d), at(d));
            covariance.selfadjointView<Eigen::Lower>().rankUpdate(moved, 1.0 / static_cast<double>(used));
            if (covariance.allFinite()) {
                factor = detail::scoring::factor_of(covariance);
            }
        }
        detail::scoring::tile_matrix both(at(d), factor.cols() + 1);
        both.leftCols(factor.cols()) = (scale * factor).template cast<float>();
        both.col(factor.cols()) = (scale * mean).template cast<float>();
        return both;
    }

    template <class Backend, class T>
    void run(const Backend& exec, const prompt<T>& p, std::size_t first_head, std::size_t heads,
             std::span<float> out) const {
        validate(rotation, p.shape.key_dim);
        detail::check(n_future > 0, "expected_attention looks at no position to come: n_future is 0");
        detail::check(std::isfinite(epsilon) && epsilon >= 0, "expected_attention has epsilon ", epsilon,
                      "; it must not be negative");
        const std::size_t n = out.size();
        const std::size_t skipped = (std::min)(sinks, n);
        if (skipped == n) {
            std::fill(out.begin(), out.end(), 1.0f);
            return;
        }
        const auto first = static_cast<std::size_t>(
            std::lower_bound(p.query_positions.begin(), p.query_positions.end(), p.positions[skipped]) -
            p.query_positions.begin());
        detail::check(first < p.queries.tokens, "expected_attention needs kept queries behind the ", skipped,
                      " sinks to score ", n - skipped, " tokens; ", p.queries.tokens, " are kept, all before position ",
                      p.positions[skipped]);
        const std::vector<double> turn = turns(p, first);
        const std::size_t kv_head = first_head / p.shape.group();
        const rows<T> keys = p.keys[kv_head].slice(skipped, n - skipped);
        std::vector<double> logit(keys.count);
        std::vector<double> attention(keys.count);
        for (std::size_t h = first_head; h < first_head + heads; ++h) {
            const detail::scoring::tile_matrix factor = statistics(p, h, first, turn);
            const auto rank = static_cast<std::size_t>(factor.cols() - 1);
            const bool known = factor.allFinite();
            detail::scoring::for_each_product(exec, keys, factor, [&](std::size_t i, const float* product) {
                logit[i] = static_cast<double>(product[rank]) + detail::scoring::squared_length(product, rank) / 2;
            });
            double top = -std::numeric_limits<double>::infinity();
            for (const double x : logit) {
                top = std::isfinite(x) && x > top ? x : top;
            }
            double total = 0;
            for (double& x : logit) {
                x = known && std::isfinite(x) ? std::exp(x - top) : std::numeric_limits<double>::quiet_NaN();
                total += std::isfinite(x) ? x : 0.0;
            }
            for (std::size_t i = 0; i < logit.size(); ++i) {
                attention[i] += logit[i] / total;
            }
        }
        float largest = 1;
        for (std::size_t i = 0; i < attention.size(); ++i) {
            double a = attention[i] / static_cast<double>(heads) + static_cast<double>(epsilon);
            if (use_value_norm) {
                a *= detail::scoring::norm_of(p.values[kv_head][skipped + i], p.shape.value_dim);
            }
            out[skipped + i] = static_cast<float>(a);
            largest = std::isfinite(a) ? (std::max)(largest, static_cast<float>(a)) : largest;
        }
        std::fill_n(out.begin(), skipped, largest);
    }
};

/// Expected attention as importance: windowed(sinks, 0, proportional(scorer)). Its scores carry values' norms and can
/// exceed 1: divided by the largest they keep their ratios, and sinks are 1.
[[nodiscard]] inline auto make_expected_attention(expected_attention scorer) {
    const std::size_t sinks = scorer.sinks;
    return windowed(sinks, 0, proportional(std::move(scorer)));
}

}  // namespace verkv::inline v0
