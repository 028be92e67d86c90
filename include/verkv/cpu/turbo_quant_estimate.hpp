// Kernels of the TurboQuant sketch on the CPU: score all tokens from the bits of their levels and of their residuals.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/rope_pair_codes.hpp"
#include "verkv/cpu/rotated_estimate.hpp"

namespace verkv::inline v0 {

/// Codes of a TurboQuant sketch as they lie in memory; what a backend's turbo_quant_estimate() reads.
/// Blocks of 16 tokens, [block][word][16]. Coordinate c has the bits c * bits ... c * bits + bits - 1 of its token's
/// first `level_words` words, lowest first, over the border of two words where it falls there; where there is a
/// projection, bit c of the words behind them is set where coordinate c of the projected residual is negative.
struct turbo_quant_codes {
    static constexpr std::size_t block_tokens = rope_pair_codes::block_tokens;
    static constexpr std::size_t largest_key_dim = 1024;

    const float* rotation = nullptr;    ///< transposed: [channel][rotated coordinate], padded_channels wide
    const float* projection = nullptr;  ///< transposed: [rotated coordinate][projected one]; null: none
    const float* levels = nullptr;      ///< [16]: of each code, again and again
    const std::uint32_t* codes = nullptr;
    const float* norm = nullptr;      ///< [token]: ||k||
    const float* residual = nullptr;  ///< [token]: ||k|| ||r|| sqrt(pi / 2) / key_dim; null without a projection
    std::size_t tokens = 0;
    std::size_t key_dim = 0;
    std::size_t padded_channels = 0;  ///< key_dim rounded up to 16
    std::size_t level_words = 0;      ///< ceil(key_dim * bits / 32)
    std::size_t words = 0;            ///< of a token: level_words, and ceil(key_dim / 32) for the projection
    unsigned bits = 0;                ///< of a level, 0 ... 4; 0: no levels, the residual is the key
};

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// A few query heads, rotated and projected.
struct turbo_quant_queries {
    alignas(64) float rotated[head_tile][turbo_quant_codes::largest_key_dim];
    alignas(64) float projected[head_tile][turbo_quant_codes::largest_key_dim];
};

/// sums += table[code] * query over all coordinates. The bits above a code are those of others: the table repeats.
template <unsigned Bits, std::size_t Heads>
VERKV_ALWAYS_INLINE void add_levels(const std::uint32_t* const (&at)[vectors_at_once], std::size_t key_dim,
                                    const float* table, const float (*query)[turbo_quant_codes::largest_key_dim],
                                    lanes (&sums)[Heads][vectors_at_once]) {
    constexpr std::size_t block_tokens = turbo_quant_codes::block_tokens;
    for (std::size_t c = 0, bit = 0; c < key_dim; ++c, bit += Bits) {
        const auto shift = static_cast<std::uint32_t>(bit % 32);
        lanes value[vectors_at_once];
        for (std::size_t v = 0; v < vectors_at_once; ++v) {
            const std::uint32_t* const from = at[v] + bit / 32 * block_tokens;
            word_lanes word = load_words(from) >> shift;
            if (32 % Bits != 0 && shift + Bits > 32) {
                word |= load_words(from + block_tokens) << (32 - shift);
            }
            value[v] = lookup(table, word);
        }
        for (std::size_t h = 0; h < Heads; ++h) {
            const lanes q = broadcast(query[h][c]);
            for (std::size_t v = 0; v < vectors_at_once; ++v) {
                sums[h][v] += q * value[v];
            }
        }
    }
}

inline constexpr float signs_of_bits[16] = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};

/// Logits of tokens first ... last-1, first a multiple of 16, for up to four heads.
template <unsigned Bits, std::size_t Heads>
void score_turbo_quant(const turbo_quant_codes& s, const turbo_quant_queries& q, float scale, std::size_t first,
                       std::size_t last, float* logits, std::ptrdiff_t stride) noexcept {
    constexpr std::size_t block_tokens = turbo_quant_codes::block_tokens;
    for (std::size_t token = first; token < last; token += vectors_at_once * lane_count) {
        const std::uint32_t* at[vectors_at_once];
        std::size_t start[vectors_at_once];
        for (std::size_t v = 0; v < vectors_at_once; ++v) {
            // Past the end the first vector is computed again, and dropped.
            start[v] = token + v * lane_count < last ? token + v * lane_count : token;
            at[v] = s.codes + start[v] / block_tokens * s.words * block_tokens + start[v] % block_tokens;
        }
        lanes sums[Heads][vectors_at_once] = {};
        if constexpr (Bits > 0) {
            add_levels<Bits>(at, s.key_dim, s.levels, q.rotated, sums);
            for (std::size_t v = 0; v < vectors_at_once; ++v) {
                const lanes norm = load(s.norm + start[v]);
                for (std::size_t h = 0; h < Heads; ++h) {
                    sums[h][v] *= norm;
                }
            }
        }
        if (s.projection) {
            lanes rest[Heads][vectors_at_once] = {};
            for (std::size_t v = 0; v < vectors_at_once; ++v) {
                at[v] += s.level_words * block_tokens;
            }
            add_levels<1>(at, s.key_dim, static_cast<const float*>(signs_of_bits), q.projected, rest);
            for (std::size_t v = 0; v < vectors_at_once; ++v) {
                const lanes residual = load(s.residual + start[v]);
                for (std::size_t h = 0; h < Heads; ++h) {
                    sums[h][v] += residual * rest[h][v];
                }
            }
        }
        for (std::size_t v = 0; v < vectors_at_once && token + v * lane_count < last; ++v) {
            const std::size_t n = (std::min)(lane_count, last - start[v]);
            for (std::size_t h = 0; h < Heads; ++h) {
                const lanes estimate = sums[h][v] * scale;
                std::memcpy(logits + static_cast<std::ptrdiff_t>(h) * stride + start[v], &estimate, n * sizeof(float));
            }
        }
    }
}

using score_turbo_quant_function = void (*)(const turbo_quant_codes&, const turbo_quant_queries&, float, std::size_t,
                                            std::size_t, float*, std::ptrdiff_t) noexcept;

template <unsigned Bits>
inline constexpr std::array<score_turbo_quant_function, head_tile> score_turbo_quant_of_heads = {
    score_turbo_quant<Bits, 1>, score_turbo_quant<Bits, 2>, score_turbo_quant<Bits, 3>, score_turbo_quant<Bits, 4>};

inline score_turbo_quant_function score_turbo_quant_of(unsigned bits, std::size_t heads) noexcept {
    switch (bits) {
        case 0:
            return score_turbo_quant_of_heads<0>[heads - 1];
        case 1:
            return score_turbo_quant_of_heads<1>[heads - 1];
        case 2:
            return score_turbo_quant_of_heads<2>[heads - 1];
        case 3:
            return score_turbo_quant_of_heads<3>[heads - 1];
        default:
            return score_turbo_quant_of_heads<4>[heads - 1];
    }
}

/// Rotates and projects queries first ... first + heads - 1, in double.
inline void turn_queries(const turbo_quant_codes& s, rows<float> queries, std::size_t first, std::size_t heads,
                         turbo_quant_queries& out) noexcept {
    double query[turbo_quant_codes::largest_key_dim];
    alignas(64) double rotated[turbo_quant_codes::largest_key_dim];
    for (std::size_t h = 0; h < heads; ++h) {
        std::copy_n(queries[first + h], s.key_dim, query);
        rotate(s.rotation, s.key_dim, s.padded_channels, query, rotated);
        for (std::size_t c = 0; c < s.key_dim; ++c) {
            out.rotated[h][c] = static_cast<float>(rotated[c]);
        }
        if (s.projection) {
            std::copy_n(rotated, s.key_dim, query);
            rotate(s.projection, s.key_dim, s.padded_channels, query, rotated);
            for (std::size_t c = 0; c < s.key_dim; ++c) {
                out.projected[h][c] = static_cast<float>(rotated[c]);
            }
        }
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Writes the logits that a TurboQuant sketch estimates. See turbo_quant_sketch::estimate().
/// Preconditions (unchecked): queries are as wide as the keys, logits [queries.count, s.tokens], rows that do not
/// overlap; norm and residual may be read up to a multiple of 16 tokens. Rotates four queries at a time on the stack of
/// the caller (about 50 KiB) and reads the codes once for them. No memory is allocated. A token's bits depend on its
/// code and the query alone. Throws nothing.
inline void turbo_quant_estimate(const cpu& exec, const turbo_quant_codes& s, rows<float> queries, float scale,
                                 matrix_view<float> logits) noexcept {
    if (s.tokens == 0) {
        return;
    }
    constexpr std::size_t at_once = 2048;  // a multiple of 16: a task starts where a block does
    const std::size_t tasks = (s.tokens + at_once - 1) / at_once;
    for (std::size_t head = 0; head < queries.count; head += detail::head_tile) {
        const std::size_t heads = (std::min)(detail::head_tile, queries.count - head);
        detail::turbo_quant_queries turned;
        detail::turn_queries(s, queries, head, heads, turned);
        const auto score = detail::score_turbo_quant_of(s.bits, heads);
        for_each_task(exec, tasks, [&](std::size_t task, std::size_t) {
            const std::size_t first = task * at_once;
            score(s, turned, scale, first, (std::min)(s.tokens, first + at_once),
                  logits.data + static_cast<std::ptrdiff_t>(head) * logits.stride, logits.stride);
        });
    }
}

}  // namespace verkv::inline v0
