// Kernels of the anchor sketch on the CPU: score the anchors once a query, then all tokens from their anchor and codes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/code_products.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/low_rank_estimate.hpp"
#include "verkv/cpu/rope_pair_codes.hpp"
#include "verkv/cpu/rotated_estimate.hpp"

namespace verkv::inline v0 {

/// Tokens of an anchor sketch as they lie in memory; what a backend's anchor_estimate() reads.
/// Residual codes in blocks of 16 tokens, [block][word][16], as those of rotated_codes: channel c has the bits c * bits
/// ... c * bits + bits - 1 of its token's words, and the value code - (2^bits - 1) / 2 times the token's step.
struct anchor_codes {
    static constexpr std::size_t block_tokens = rope_pair_codes::block_tokens;
    static constexpr std::size_t largest_key_dim = rotated_codes::largest_key_dim;
    static constexpr std::size_t most_anchors = 1024;

    const float* anchors = nullptr;  ///< transposed: [channel][anchor], padded_anchors wide
    const std::uint32_t* codes = nullptr;
    const std::uint16_t* index = nullptr;  ///< [token]: its anchor
    const half* gain = nullptr;            ///< [token]: times its anchor
    const float* step = nullptr;           ///< [token]
    const float* error = nullptr;          ///< [token]: ||k - k^||
    std::size_t tokens = 0;
    std::size_t key_dim = 0;
    std::size_t anchor_count = 0;
    std::size_t padded_anchors = 0;  ///< anchor_count rounded up to 16; the rest are 0
    std::size_t words = 0;           ///< of a token: ceil(key_dim * bits / 32)
    double largest_norm = 0;         ///< of the anchors, rounded up
    unsigned bits = 0;               ///< of a code, 0 ... 4
};

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

inline constexpr std::size_t anchor_heads = 4;  // query heads whose anchor logits are on the stack together

/// What all tokens meet: a few query heads, and their logits with the anchors.
struct anchor_queries {
    /// [tile of channels][head][channel]
    alignas(64) float factor[rotated_tiles][head_tile * channel_tile];
    float anchor[anchor_heads][anchor_codes::most_anchors];  ///< scale <q, anchor>
    float base[anchor_heads];                                ///< -(2^bits - 1) / 2 times the sum of the factors
    float width[anchor_heads];                               ///< times a token's error: |scale| ||q||
    float rounding[anchor_heads];                            ///< times a token's step: what rounding may do to its sum
    float lost[anchor_heads];                                ///< times a token's gain: rounding of an anchor's logit
};
static_assert(anchor_heads <= head_tile);

/// Scores the anchors for queries first ... first + heads - 1.
inline void score_anchors(const anchor_codes& s, rows<float> queries, std::size_t first, std::size_t heads, float scale,
                          anchor_queries& out) noexcept {
    const auto d = static_cast<double>(s.key_dim);
    const auto factor = static_cast<double>(scale);
    const double offset = (static_cast<double>(1u << s.bits) - 1) / 2;
    double query[anchor_codes::largest_key_dim];
    alignas(64) double products[anchor_codes::most_anchors];
    for (std::size_t h = 0; h < heads; ++h) {
        const float* const q = queries[first + h];
        double square = 0;
        double total = 0;
        double size = 0;
        for (std::size_t c = 0; c < s.key_dim; ++c) {
            query[c] = static_cast<double>(q[c]);
            square += query[c] * query[c];
        }
        for (std::size_t c = 0; c < (s.key_dim + 15) / 16 * 16; ++c) {
            // The padding, too: half words are read whole.
            const float value = c < s.key_dim ? static_cast<float>(factor * query[c]) : 0.0f;
            total += static_cast<double>(value);
            size += std::abs(static_cast<double>(value));
            // Codes that divide a half word stay where they lie in it; the factor takes the shift back.
            const bool shifted = s.bits > 0 && by_half_words(s.bits);
            const float unshift = shifted ? 1.0f / static_cast<float>(1u << (c * s.bits % 16)) : 1.0f;
            out.factor[c / channel_tile][h * channel_tile + c % channel_tile] = value * unshift;
        }
        rotate(s.anchors, s.key_dim, s.padded_anchors, query, products);
        for (std::size_t a = 0; a < s.anchor_count; ++a) {
            out.anchor[h][a] = static_cast<float>(factor * products[a]);
        }
        const double norm = std::sqrt(square);
        const double unit = 0x1p-24;
        const double up = 1 + 0x1p-20;
        const double magnitude = std::abs(factor);
        out.base[h] = static_cast<float>(-offset * total);
        out.width[h] = static_cast<float>(magnitude * norm * up + 0x1p-148);
        // Codes and base together are at most 3 offset sum |factor|; each term is rounded at most d + 5 times, the
        // final sum included. 2^-110: products near 0, of codes that are shifted by up to 2^15.
        out.rounding[h] = static_cast<float>(3 * offset * size * (d + 8) * unit * up + 0x1p-110);
        out.lost[h] = static_cast<float>(magnitude * norm * s.largest_norm * (d + 2) * 0x1p-50 * up + 0x1p-147);
    }
}

/// Tokens first ... last-1 for up to four heads; first is a multiple of 16.
template <unsigned Bits, std::size_t Heads>
void score_anchored(const anchor_codes& s, const anchor_queries& q, std::size_t first, std::size_t last, float* logits,
                    std::ptrdiff_t stride, float* bounds, std::ptrdiff_t bound_stride) noexcept {
    constexpr std::size_t block_tokens = anchor_codes::block_tokens;
    for (std::size_t token = first; token < last; token += vectors_at_once * lane_count) {
        const std::uint32_t* at[vectors_at_once];
        lanes sums[Heads][vectors_at_once];
        std::size_t start[vectors_at_once];
        for (std::size_t v = 0; v < vectors_at_once; ++v) {
            // Past the end the first vector is computed again, and dropped.
            start[v] = token + v * lane_count < last ? token + v * lane_count : token;
            at[v] = s.codes + start[v] / block_tokens * s.words * block_tokens + start[v] % block_tokens;
            for (std::size_t h = 0; h < Heads; ++h) {
                sums[h][v] = broadcast(q.base[h]);
            }
        }
        for (std::size_t tile = 0; s.bits > 0 && tile * channel_tile < s.key_dim; ++tile) {
            const std::size_t channels = (std::min)(channel_tile, s.key_dim - tile * channel_tile);
            const std::uint32_t* of_tile[vectors_at_once];
            for (std::size_t v = 0; v < vectors_at_once; ++v) {
                of_tile[v] = at[v] + tile * (channel_tile / 32) * s.bits * block_tokens;
            }
            add_channels<Bits>(of_tile, channels, s.bits, q.factor[tile], sums);
        }
        for (std::size_t v = 0; v < vectors_at_once && token + v * lane_count < last; ++v) {
            const std::size_t n = (std::min)(lane_count, last - start[v]);
            const lanes step = load(s.step + start[v]);
            const lanes gain = load(s.gain + start[v]);
            const lanes gain_size = select(lanes_cast<int_lanes>(gain < 0.0f), -gain, gain);
            const lanes error = load(s.error + start[v]);
            for (std::size_t h = 0; h < Heads; ++h) {
                float of_anchor[lane_count];
                for (std::size_t i = 0; i < lane_count; ++i) {
                    of_anchor[i] = q.anchor[h][s.index[start[v] + i]];
                }
                const lanes share = gain * load(static_cast<const float*>(of_anchor));
                const lanes estimate = share + step * sums[h][v];
                std::memcpy(logits + static_cast<std::ptrdiff_t>(h) * stride + start[v], &estimate, n * sizeof(float));
                if (bounds) {
                    const lanes share_size = select(lanes_cast<int_lanes>(share < 0.0f), -share, share);
                    const lanes rounding = step * q.rounding[h] + gain_size * q.lost[h] + share_size * 0x1p-21f;
                    const lanes bound =
                        known_bound(estimate, (error * q.width[h] + (rounding + 0x1p-136f)) * 1.000001f);
                    std::memcpy(bounds + static_cast<std::ptrdiff_t>(h) * bound_stride + start[v], &bound,
                                n * sizeof(float));
                }
            }
        }
    }
}

using score_anchored_function = void (*)(const anchor_codes&, const anchor_queries&, std::size_t, std::size_t, float*,
                                         std::ptrdiff_t, float*, std::ptrdiff_t) noexcept;

template <unsigned Bits>
inline constexpr std::array<score_anchored_function, anchor_heads> score_anchored_of_heads = {
    score_anchored<Bits, 1>, score_anchored<Bits, 2>, score_anchored<Bits, 3>, score_anchored<Bits, 4>};

inline score_anchored_function score_anchored_of(unsigned bits, std::size_t heads) noexcept {
    switch (bits) {
        case 1:
            return score_anchored_of_heads<1>[heads - 1];
        case 2:
            return score_anchored_of_heads<2>[heads - 1];
        case 4:
            return score_anchored_of_heads<4>[heads - 1];
        default:
            return score_anchored_of_heads<0>[heads - 1];
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Writes the logits that an anchor sketch estimates, and their bounds unless `bounds` is null.
/// See anchor_sketch::estimate(). Preconditions (unchecked): queries are as wide as the keys, logits and bounds
/// [queries.count, s.tokens], rows that do not overlap; index, gain, step and error may be read up to a multiple of 16
/// tokens. Scores the anchors for four queries at a time on the stack of the caller (about 50 KiB) and reads the codes
/// once for them. No memory is allocated. A token's bits depend on its anchor, codes and norms and the query alone.
/// Throws nothing.
inline void anchor_estimate(const cpu& exec, const anchor_codes& s, rows<float> queries, float scale,
                            matrix_view<float> logits, const matrix_view<float>* bounds) noexcept {
    if (s.tokens == 0) {
        return;
    }
    constexpr std::size_t at_once = 2048;  // tokens of a task
    const std::size_t tasks = (s.tokens + at_once - 1) / at_once;
    for (std::size_t head = 0; head < queries.count; head += detail::anchor_heads) {
        const std::size_t heads = (std::min)(detail::anchor_heads, queries.count - head);
        detail::anchor_queries scored;
        detail::score_anchors(s, queries, head, heads, scale, scored);
        const auto score = detail::score_anchored_of(s.bits, heads);
        const auto row = static_cast<std::ptrdiff_t>(head);
        for_each_task(exec, tasks, [&](std::size_t task, std::size_t) {
            const std::size_t first = task * at_once;
            score(s, scored, first, (std::min)(s.tokens, first + at_once), logits.data + row * logits.stride,
                  logits.stride, bounds ? bounds->data + row * bounds->stride : nullptr, bounds ? bounds->stride : 0);
        });
    }
}

}  // namespace verkv::inline v0
