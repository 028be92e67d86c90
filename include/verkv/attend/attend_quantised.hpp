// Attention of a group's query heads over quantised rows.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/attend/attend.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/store/quantised_rows.hpp"

namespace verkv::inline v0 {

/// Memory that attend_quantised() reuses from call to call.
struct quantised_workspace {
    attend_workspace attention;
    std::vector<float> rows;  ///< a block of rows as floats

    /// Makes attend_quantised() allocation-free up to these numbers.
    /// Throws invalid_argument for more than memory can hold.
    void reserve(std::size_t heads, std::size_t key_dim, std::size_t value_dim) {
        attention.reserve(heads, value_dim);
        const std::size_t floats =
            detail::product("quantised rows", attend_workspace::block, larger(key_dim, value_dim));
        if (rows.size() < floats) {
            rows.resize(floats);
        }
    }
};

/// Attention as attend(), over groups of quantised rows, one after the other.
/// keys and values are groups of as many tokens each; log_weight [G, n] over all of them, [1, n] for all heads alike,
/// or empty. output [G, value_dim], lse [G]. Rows are widened 64 at a time, keys then values, and met by all heads:
/// each code is read once. Accumulation is attend()'s on the widened rows; certify/row_error.hpp says what quantisation
/// does to a certificate. Where exact rows are used as well (fetched ones, say), attend() over those and
/// merge_attention() join them. A spoiled row makes the heads that use it NaN; -infinity leaves it out. Deterministic.
/// Throws invalid_argument when shapes disagree, for null pointers, for rows that overlap, and for a scale that is no
/// finite number.
inline void attend_quantised(const cpu& exec, rows<float> queries, float scale, std::span<const quantised_rows> keys,
                             std::span<const quantised_rows> values, matrix_view<const float> log_weight,
                             quantised_workspace& workspace, matrix_view<float> output, std::span<float> lse) {
    const std::size_t heads = queries.count;
    detail::check(keys.size() == values.size(), keys.size(), " groups of keys come with ", values.size(),
                  " groups of values");
    std::size_t tokens = 0;
    for (std::size_t g = 0; g < keys.size(); ++g) {
        detail::check_quantised(keys[g]);
        detail::check_quantised(values[g]);
        detail::check(keys[g].tokens == values[g].tokens, "group ", g, ": ", keys[g].tokens, " keys come with ",
                      values[g].tokens, " values");
        detail::check(keys[g].shape.width == queries.width, "queries of ", queries.width, " channels meet keys of ",
                      keys[g].shape.width);
        detail::check(values[g].shape.width == output.columns, "values of ", values[g].shape.width,
                      " channels for an output of ", output.columns);
        tokens += keys[g].tokens;
    }
    detail::check(
        log_weight.rows == 0 || (log_weight.columns == tokens && (log_weight.rows == 1 || log_weight.rows == heads)),
        "log-weights [", log_weight.rows, ", ", log_weight.columns, "] for ", heads, " heads and ", tokens, " rows");
    detail::check(output.rows == heads && lse.size() == heads, "output [", output.rows, ", ", output.columns,
                  "] and lse [", lse.size(), "] for ", heads, " heads");
    detail::check(std::isfinite(scale), "scale is ", scale, "; it must be a finite number");
    validate(queries, "queries");
    validate(log_weight, "log-weights");
    validate(output, "output");
    workspace.reserve(heads, queries.width, output.columns);
    softmax_sum& sum = workspace.attention.sum;
    sum.reset(heads, output.columns);
    constexpr std::size_t block = attend_workspace::block;
    std::size_t before = 0;
    for (std::size_t g = 0; g < keys.size(); ++g) {
        for (std::size_t first = 0; first < keys[g].tokens; first += block) {
            const std::size_t n = smaller(block, keys[g].tokens - first);
            const auto widened = [&](const quantised_rows& group) {
                const auto stride = static_cast<std::ptrdiff_t>(group.shape.width);
                dequantise_rows(exec, group, first, {workspace.rows.data(), n, group.shape.width, stride});
                return rows<float>{workspace.rows.data(), stride, n, group.shape.width, nullptr};
            };
            const matrix_view<float> logits{workspace.attention.logits.data(), heads, n,
                                            static_cast<std::ptrdiff_t>(block)};
            detail::score_blocks(queries, scale, widened(keys[g]), logits);
            for (std::size_t h = 0; h < heads && log_weight.rows > 0; ++h) {
                detail::add_log_weights(logits.row(h),
                                        log_weight.row(log_weight.rows == 1 ? 0 : h).data() + before + first);
            }
            sum.add(exec, logits, widened(values[g]));
        }
        before += keys[g].tokens;
    }
    sum.finish(output, lse);
}

}  // namespace verkv::inline v0
