// Attention of a group's query heads over listed rows.
#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "verkv/core/detail/product.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/cpu/softmax_sum.hpp"

namespace verkv::inline v0 {

/// Memory that attend() reuses from call to call.
struct attend_workspace {
    std::vector<float> logits;
    softmax_sum sum;

    /// Makes attend() allocation-free up to these numbers.
    /// Throws invalid_argument for more than memory can hold.
    void reserve(std::size_t heads, std::size_t value_dim) {
        const std::size_t scored = detail::product("logits", heads, block);
        if (logits.size() < scored) {
            logits.resize(scored);
        }
        sum.reserve(heads, value_dim);
    }

    static constexpr std::size_t block = 64;  ///< rows scored and weighed while they are in the cache
};

/// Attention of the query heads of a group over rows with additive log-weights, in one pass.
/// o_g = sum_i e^{s_gi + a_gi} v_i / sum_i e^{s_gi + a_gi}, s_gi = scale <q_g, k_i>, a = log_weight; lse_g = ln of the
/// denominator. With a = ln(lambda/r) it is the estimator of [VerKV Definition 2]; without any it is dense attention.
/// queries [G, key_dim], keys [n, key_dim], values [n, value_dim], log_weight [G, n], [1, n] for all heads alike, or
/// empty (all 0; -infinity leaves a row out), output [G, value_dim], lse [G]. The log-weight is added to the scaled
/// logit. n = 0, or every row left out: o = 0, lse = -infinity. O(G n (key_dim + value_dim)); reads each row once for
/// the whole group. Accuracy as score_rows() and softmax_sum state. Deterministic. Precondition (not checked): listed
/// rows exist. Throws invalid_argument when shapes disagree, for null pointers, for rows that overlap, and for a scale
/// that is no finite number.
template <storage T>
void attend(const cpu& exec, rows<float> queries, float scale, rows<T> keys, rows<T> values,
            matrix_view<const float> log_weight, attend_workspace& workspace, matrix_view<float> output,
            std::span<float> lse) {
    const std::size_t heads = queries.count;
    detail::check(queries.width == keys.width, "queries of ", queries.width, " channels meet keys of ", keys.width);
    detail::check(keys.count == values.count, keys.count, " keys come with ", values.count, " values");
    detail::check(log_weight.rows == 0 ||
                      (log_weight.columns == keys.count && (log_weight.rows == 1 || log_weight.rows == heads)),
                  "log-weights [", log_weight.rows, ", ", log_weight.columns, "] for ", heads, " heads and ",
                  keys.count, " rows");
    detail::check(output.rows == heads && output.columns == values.width && lse.size() == heads, "output [",
                  output.rows, ", ", output.columns, "] and lse [", lse.size(), "] for ", heads, " heads of ",
                  values.width, " channels");
    detail::check(std::isfinite(scale), "scale is ", scale, "; it must be a finite number");
    validate(queries, "queries");
    validate(keys, "keys");
    validate(values, "values");
    validate(log_weight, "log-weights");
    validate(output, "output");
    workspace.reserve(heads, values.width);
    workspace.sum.reset(heads, values.width);
    constexpr std::size_t block = attend_workspace::block;
    for (std::size_t first = 0; first < keys.count; first += block) {
        const std::size_t n = smaller(block, keys.count - first);
        const matrix_view<float> logits{workspace.logits.data(), heads, n, static_cast<std::ptrdiff_t>(block)};
        detail::score_blocks(queries, scale, keys.slice(first, n), logits);
        for (std::size_t h = 0; h < heads && log_weight.rows > 0; ++h) {
            detail::add_log_weights(logits.row(h), log_weight.row(log_weight.rows == 1 ? 0 : h).data() + first);
        }
        workspace.sum.add(exec, logits, values.slice(first, n));
    }
    workspace.sum.finish(output, lse);
}

/// Dense attention: attend() over all rows with weight one. The reference that certificates are held against.
/// Shapes, cost, accuracy and errors as attend().
template <storage T>
void dense_attention(const cpu& exec, rows<float> queries, float scale, rows<T> keys, rows<T> values,
                     attend_workspace& workspace, matrix_view<float> output, std::span<float> lse) {
    attend(exec, queries, scale, keys, values, matrix_view<const float>{}, workspace, output, lse);
}

}  // namespace verkv::inline v0
