// Kernels of the HashAttention sketch on the CPU: the code of a row; how many bits two codes have in common.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/blank_marked.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/rope_pair_codes.hpp"
#include "verkv/cpu/rotated_estimate.hpp"

namespace verkv::inline v0 {

/// One layer of a network that makes codes, as it lies in memory: y = W x + bias.
struct hash_layer_view {
    const float* weight = nullptr;  ///< transposed: [in][padded]
    const float* bias = nullptr;    ///< [out]
    std::size_t in = 0;
    std::size_t out = 0;
    std::size_t padded = 0;  ///< out rounded up to 16; the weights there are 0
};

/// Codes of a HashAttention sketch as they lie in memory; what a backend's hash_attention_estimate() reads.
struct hash_attention_codes {
    static constexpr std::size_t largest_width = 1024;  ///< of a key and of any layer

    const hash_layer_view* query_layers = nullptr;
    std::size_t layers = 0;
    const std::uint32_t* codes = nullptr;  ///< [token], bit j set where output j is not negative
    const std::uint32_t* marks = nullptr;  ///< bit t % 32 of word t / 32: the token has no code
    std::size_t tokens = 0;
    unsigned bits = 0;  ///< of a code, 1 ... 32
    float intercept = 0;
    float slope = 1;
};

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// Code of a row: bit j is set where output j of the network is not negative. SiLU between layers, all in double.
/// `known` becomes whether all outputs are finite. row [layers[0].in].
inline std::uint32_t hash_code(const hash_layer_view* layers, std::size_t count, const double* row,
                               bool& known) noexcept {
    double x[hash_attention_codes::largest_width];
    alignas(64) double y[hash_attention_codes::largest_width];
    std::copy_n(row, layers[0].in, x);
    for (std::size_t l = 0; l < count; ++l) {
        const hash_layer_view& layer = layers[l];
        rotate(layer.weight, layer.in, layer.padded, x, y);
        for (std::size_t i = 0; i < layer.out; ++i) {
            const double sum = y[i] + static_cast<double>(layer.bias[i]);
            x[i] = l + 1 < count ? sum / (1 + std::exp(-sum)) : sum;
        }
    }
    std::uint32_t code = 0;
    double poison = 0;
    for (std::size_t j = 0; j < layers[count - 1].out; ++j) {
        code |= static_cast<std::uint32_t>(x[j] >= 0) << j;
        poison += 0 * x[j];
    }
    known = poison == 0;
    return code;
}

/// Bits set in each lane.
VERKV_ALWAYS_INLINE word_lanes bit_counts(word_lanes x) {
    x = x - ((x >> 1) & 0x55555555u);
    x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
    x = (x + (x >> 4)) & 0x0f0f0f0fu;
    x = x + (x >> 8);
    return (x + (x >> 16)) & 0x3fu;
}

/// logits[t] = intercept + slope * agreement of tokens first ... last-1 with a query's code.
inline void score_agreement(const hash_attention_codes& s, std::uint32_t query, float intercept, float slope,
                            std::size_t first, std::size_t last, float* logits) noexcept {
    const auto bits = static_cast<float>(s.bits);
    for (std::size_t token = first; token < last; token += lane_count) {
        const std::size_t n = (std::min)(lane_count, last - token);
        word_lanes code = {};
        std::memcpy(&code, s.codes + token, n * sizeof(std::uint32_t));
        const lanes apart = __builtin_convertvector(lanes_cast<int_lanes>(bit_counts(code ^ query)), lanes);
        const lanes logit = slope * (bits - 2.0f * apart) + intercept;
        std::memcpy(logits + token, &logit, n * sizeof(float));
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Writes scale (intercept + slope * agreement) of each token of a HashAttention sketch, agreement the dot product of
/// the codes of query and key as signs. See hash_attention_sketch::estimate(). Preconditions (unchecked): queries are
/// as wide as the network's input, logits [queries.count, s.tokens], rows that do not overlap. About 16 KiB of the
/// stack. No memory is allocated. A token's bits depend on its code and the query alone. Throws nothing.
inline void hash_attention_estimate(const cpu& exec, const hash_attention_codes& s, rows<float> queries, float scale,
                                    matrix_view<float> logits) noexcept {
    if (s.tokens == 0) {
        return;
    }
    constexpr std::size_t at_once = 16384;  // a multiple of 32: a task starts where a word of marks does
    const std::size_t tasks = (s.tokens + at_once - 1) / at_once;
    for (std::size_t q = 0; q < queries.count; ++q) {
        double row[hash_attention_codes::largest_width];
        std::copy_n(queries[q], queries.width, row);
        bool known = false;
        const std::uint32_t code = detail::hash_code(s.query_layers, s.layers, row, known);
        const float slope = scale * s.slope;
        known = known && detail::finite_row(queries[q], queries.width);
        const float intercept = known ? scale * s.intercept : std::numeric_limits<float>::quiet_NaN();
        float* const to = logits.row(q).data();
        for_each_task(exec, tasks, [&](std::size_t task, std::size_t) {
            const std::size_t first = task * at_once;
            const std::size_t last = (std::min)(s.tokens, first + at_once);
            detail::score_agreement(s, code, intercept, slope, first, last, to);
            detail::blank_marked(s.marks, first, last, to);
        });
    }
}

}  // namespace verkv::inline v0
