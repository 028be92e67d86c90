// Kernel of the SOCKET sketch on the CPU: how likely a query's soft hash falls in each token's buckets.
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
#include "verkv/cpu/hash_buckets.hpp"
#include "verkv/cpu/lanes.hpp"

namespace verkv::inline v0 {

/// What a backend's socket_estimate() reads.
struct socket_codes {
    hash_buckets keys;
    double sharpness = 1;  ///< 1 / (sqrt(key_dim) temperature)
    float intercept = 0;
    float slope = 1;
};

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// Factors of a query: entry b of group g of table l is prod_p (1 + c_p tanh u_p) over the group's planes, c_p the sign
/// that bit p of b says. Bits above the group's planes count for nothing.
struct soft_hash {
    alignas(64) float factor[hash_buckets::most_groups][16];
};

/// Makes the factors; false where the query is not finite.
inline bool hash_softly(const socket_codes& s, const float* query, soft_hash& out) noexcept {
    double row[hash_buckets::largest_key_dim];
    alignas(64) double projected[hash_buckets::most_groups * hash_buckets::group_planes];
    std::copy_n(query, s.keys.key_dim, row);
    project(s.keys, row, projected);
    const std::size_t groups = s.keys.groups();
    for (std::size_t l = 0; l < s.keys.tables; ++l) {
        for (std::size_t g = 0; g < groups; ++g) {
            double product[16] = {1};
            std::size_t entries = 1;
            const std::size_t end = (std::min)(s.keys.planes, (g + 1) * hash_buckets::group_planes);
            for (std::size_t p = g * hash_buckets::group_planes; p < end; ++p, entries *= 2) {
                const double u = s.sharpness * std::tanh(projected[l * s.keys.planes + p]);
                // Twice the logistic function, for both signs: no difference of near-equal numbers.
                const double with = 2 / (1 + std::exp(-2 * u));
                const double against = 2 / (1 + std::exp(2 * u));
                for (std::size_t b = 0; b < entries; ++b) {
                    product[entries + b] = product[b] * with;
                    product[b] *= against;
                }
            }
            for (std::size_t b = 0; b < 16; ++b) {
                out.factor[l * groups + g][b] = static_cast<float>(product[b % entries]);
            }
        }
    }
    return finite_row(query, s.keys.key_dim);
}

/// Ranks of the tokens of a block.
template <std::size_t Groups>
void score_buckets(const socket_codes& s, const soft_hash& query, std::size_t block, float intercept, float slope,
                   float* logits) noexcept {
    constexpr std::size_t block_tokens = hash_buckets::block_tokens;
    const std::uint16_t* const buckets = s.keys.buckets + block * s.keys.tables * block_tokens;
    const float share = 1.0f / static_cast<float>(s.keys.tables);
    const std::size_t tokens = (std::min)(block_tokens, s.keys.tokens - block * block_tokens);
    for (std::size_t t = 0; t < tokens; t += lane_count) {
        lanes mass = {};
        for (std::size_t l = 0; l < s.keys.tables; ++l) {
            const word_lanes bucket = load_widened(buckets + l * block_tokens + t);
            lanes product = lookup(query.factor[l * Groups], bucket);
            for (std::size_t g = 1; g < Groups; ++g) {
                product *= lookup(query.factor[l * Groups + g], bucket >> static_cast<std::uint32_t>(4 * g));
            }
            mass += product;
        }
        constexpr float least = (std::numeric_limits<float>::min)();
        const lanes logit = slope * log(larger_of(mass * share, broadcast(least))) + intercept;
        std::memcpy(logits + t, &logit, (std::min)(lane_count, tokens - t) * sizeof(float));
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Writes scale (intercept + slope ln mass) of each token of a SOCKET sketch. See socket_sketch::estimate().
/// Preconditions (unchecked): queries are as wide as the keys, logits [queries.count, tokens], rows that do not
/// overlap. Hashes a query on the caller's stack (about 110 KiB), then reads all buckets for it. No memory is
/// allocated. A token's bits depend on its buckets and the query alone. Throws nothing.
inline void socket_estimate(const cpu& exec, const socket_codes& s, rows<float> queries, float scale,
                            matrix_view<float> logits) noexcept {
    if (s.keys.tokens == 0) {
        return;
    }
    constexpr std::size_t block_tokens = hash_buckets::block_tokens;
    constexpr std::size_t at_once = 32;  // blocks
    const std::size_t blocks = (s.keys.tokens + block_tokens - 1) / block_tokens;
    for (std::size_t q = 0; q < queries.count; ++q) {
        detail::soft_hash query;
        const bool finite = detail::hash_softly(s, queries[q], query);
        const float intercept = finite ? scale * s.intercept : std::numeric_limits<float>::quiet_NaN();
        const float slope = scale * s.slope;
        const std::size_t groups = s.keys.groups();
        const auto score = groups == 1   ? detail::score_buckets<1>
                           : groups == 2 ? detail::score_buckets<2>
                           : groups == 3 ? detail::score_buckets<3>
                                         : detail::score_buckets<4>;
        float* const to = logits.row(q).data();
        for_each_task(exec, (blocks + at_once - 1) / at_once, [&](std::size_t task, std::size_t) {
            const std::size_t first = task * at_once;
            const std::size_t last = (std::min)(blocks, first + at_once);
            for (std::size_t b = first; b < last; ++b) {
                score(s, query, b, intercept, slope, to + b * block_tokens);
            }
            detail::blank_marked(s.keys.marks, first * block_tokens, (std::min)(s.keys.tokens, last * block_tokens),
                                 to);
        });
    }
}

}  // namespace verkv::inline v0
