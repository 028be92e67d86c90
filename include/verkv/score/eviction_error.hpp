// What a layer's output loses when only some of its tokens are kept.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/prompt_inputs.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/score/detail/attention_blocks.hpp"

namespace verkv::inline v0 {

namespace detail::scoring {

using wide_matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Attention of one kept query, all heads: output over all it sees, and what that of the kept tokens is off by.
template <class T>
void outputs_of(const prompt<T>& p, std::span<const std::span<const token_index>> kept, std::size_t query,
                std::span<float> scratch, double* full, double* lost) {
    const std::size_t group = p.shape.group();
    const std::size_t d = p.shape.key_dim;
    const std::size_t width = p.shape.value_dim;
    const std::size_t seen = tokens_until(p.positions, p.query_positions[query]);
    std::fill_n(full, p.shape.query_heads * width, 0.0);
    std::fill_n(lost, p.shape.query_heads * width, 0.0);
    float* const queries = scratch.data();  // [group, key_dim], and logits [group, seen] behind them
    const matrix_view<float> logits{queries + group * d, group, seen, static_cast<std::ptrdiff_t>(seen)};
    for (std::size_t kv = 0; kv < p.shape.kv_heads && seen > 0; ++kv) {
        for (std::size_t g = 0; g < group; ++g) {
            widen(p.queries.row(query, kv * group + g), d, 1.0f, queries + g * d);
        }
        score_blocks(rows<float>{queries, static_cast<std::ptrdiff_t>(d), group, d, nullptr}, p.shape.logit_scale(),
                     p.keys[kv].slice(0, seen), logits);
        for (std::size_t g = 0; g < group; ++g) {
            const auto logit = logits.row(g);
            // Adds weights times values of the first `count` listed tokens to `to`; returns the sum of the weights.
            const auto accumulate = [&](std::size_t count, auto&& token, double* to) {
                double top = -std::numeric_limits<double>::infinity();
                for (std::size_t i = 0; i < count; ++i) {
                    top = (std::max)(top, static_cast<double>(logit[token(i)]));
                }
                double mass = 0;
                for (std::size_t i = 0; i < count; ++i) {
                    const double w = std::exp(static_cast<double>(logit[token(i)]) - top);
                    const T* const value = p.values[kv][token(i)];
                    for (std::size_t c = 0; c < width; ++c) {
                        to[c] += w * static_cast<double>(to_float(value[c]));
                    }
                    mass += w;
                }
                return mass;
            };
            double* const all = full + (kv * group + g) * width;
            double* const rest = lost + (kv * group + g) * width;
            const auto kept_seen =
                static_cast<std::size_t>(std::lower_bound(kept[kv].begin(), kept[kv].end(), seen) - kept[kv].begin());
            const double mass = accumulate(
                seen, [](std::size_t i) { return i; }, all);
            const double kept_mass = accumulate(
                kept_seen, [&](std::size_t i) { return std::size_t{kept[kv][i]}; }, rest);
            for (std::size_t c = 0; c < width; ++c) {
                all[c] /= mass;
                rest[c] = (kept_seen > 0 ? rest[c] / kept_mass : 0.0) - all[c];
            }
        }
    }
}

}  // namespace detail::scoring

/// Relative Frobenius error of a layer's attention output, behind W_o, when each KV head keeps some tokens alone: what
/// CompressKV (Lin et al. 2025, arXiv 2508.02401) measures of every layer, over some data, to share a budget out.
/// ||sum over heads (o_kept - o) W_o||_F / ||sum over heads o W_o||_F, over the kept queries; o = softmax attention
/// over what a query sees, o_kept over those of them that are kept, renormalised; a query that sees none of the kept
/// gets 0. 0 where everything is kept; may exceed 1, and is infinite where the full output is 0 and the kept is not.
/// kept: [kv_heads], token indices, ascending: the best of a small budget by some scorer, say. The average over data
/// sets goes to sample/'s allocation by error.
/// Needs the output projection and kept queries (the window, or any that stand for later ones).
/// Time O(queries query_heads (n (d + value_dim) + value_dim model_dim)), reads every key and value once a query, W_o
/// once; 2 queries query_heads value_dim doubles, and G n floats and 256 query_heads value_dim doubles a worker. Logits
/// in float, all else in double: as both outputs share their weights, the error is relative, about |logit| (d / lanes +
/// 5) units roundoff. Same bits for any number of threads. NaN where something that a query sees is not finite. Throws
/// invalid_argument where inputs do not fit the prompt, no query was kept, or a list of tokens is missing, does not
/// ascend, or names one that does not exist.
template <class Backend, class P>
requires carries<P, output_projection<typename P::element>>
[[nodiscard]] double eviction_error(const Backend& exec, const P& p,
                                    std::span<const std::span<const token_index>> kept) {
    using T = typename P::element;
    using detail::scoring::at;
    using detail::scoring::wide_matrix;
    const prompt<T>& plain = p;
    validate(plain);
    validate(static_cast<const output_projection<T>&>(p), plain);
    const std::size_t queries = p.queries.tokens;
    detail::check(queries > 0, "eviction_error needs kept queries; there are none for ", p.tokens(), " tokens");
    detail::check(kept.size() == p.shape.kv_heads, "kept tokens of ", kept.size(), " KV heads; there are ",
                  p.shape.kv_heads);
    for (std::size_t h = 0; h < kept.size(); ++h) {
        for (std::size_t i = 0; i < kept[h].size(); ++i) {
            detail::check(kept[h][i] < p.tokens() && (i == 0 || kept[h][i - 1] < kept[h][i]), "kept token ", i,
                          " of KV head ", h, " is ", kept[h][i], "; tokens must ascend and be below ", p.tokens());
        }
    }
    const std::size_t channels = p.shape.query_heads * p.shape.value_dim;
    wide_matrix full(at(queries), at(channels));
    wide_matrix lost(at(queries), at(channels));
    std::vector<std::vector<float>> scratch(workers(exec),
                                            std::vector<float>(p.shape.group() * (p.shape.key_dim + p.tokens())));
    for_each_task(exec, queries, [&](std::size_t j, std::size_t worker) {
        detail::scoring::outputs_of(plain, kept, j, scratch[worker], full.row(at(j)).data(), lost.row(at(j)).data());
    });

    // A block of output channels each, over all input channels in order.
    constexpr std::size_t block = 256;
    const std::size_t model_dim = p.output_weights.width;
    const std::size_t blocks = (model_dim + block - 1) / block;
    std::vector<double> squares(2 * blocks);
    std::vector<wide_matrix> weights(workers(exec), wide_matrix(at(channels), at((std::min)(block, model_dim))));
    std::vector<wide_matrix> product(workers(exec), wide_matrix(at(queries), at((std::min)(block, model_dim))));
    for_each_task(exec, blocks, [&](std::size_t b, std::size_t worker) {
        const std::size_t first = b * block;
        const std::size_t count = (std::min)(block, model_dim - first);
        auto part = weights[worker].leftCols(at(count));
        for (std::size_t c = 0; c < channels; ++c) {
            const T* const row = p.output_weights[c] + first;
            for (std::size_t e = 0; e < count; ++e) {
                part(at(c), at(e)) = static_cast<double>(to_float(row[e]));
            }
        }
        auto out = product[worker].leftCols(at(count));
        out.noalias() = lost * part;
        squares[2 * b] = out.squaredNorm();
        out.noalias() = full * part;
        squares[2 * b + 1] = out.squaredNorm();
    });
    double off = 0;
    double all = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
        off += squares[2 * b];
        all += squares[2 * b + 1];
    }
    return off == 0 ? 0 : std::sqrt(off / all);
}

}  // namespace verkv::inline v0
