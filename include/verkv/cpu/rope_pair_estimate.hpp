// Scores all tokens of a RoPE-pair sketch from their codes, on the CPU.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/code_products.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/rope_pair_byte_dots.hpp"
#include "verkv/cpu/rope_pair_codes.hpp"

namespace verkv::inline v0 {
namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// Logits of one group for up to four heads. `more`: the channels of an earlier tile are in the logits already.
template <unsigned Bits, std::size_t Heads>
void score_group(const rope_pair_codes& s, const std::uint32_t* codes, std::size_t tokens, std::size_t channels,
                 const rope_pair_factors& factors, bool more, float* logits, std::ptrdiff_t stride) noexcept {
    constexpr std::size_t block_tokens = rope_pair_codes::block_tokens;
    const std::size_t vectors = (tokens + lane_count - 1) / lane_count;
    for (std::size_t first = 0; first < vectors; first += vectors_at_once) {
        const std::uint32_t* at[vectors_at_once];
        lanes sums[Heads][vectors_at_once];
        for (std::size_t v = 0; v < vectors_at_once; ++v) {
            // Past the end the last vector is computed again, and dropped.
            const std::size_t vector = (std::min)(first + v, vectors - 1);
            at[v] = codes + vector / block_vectors * s.words * block_tokens + vector % block_vectors * lane_count;
            for (std::size_t h = 0; h < Heads; ++h) {
                sums[h][v] = broadcast(factors.base[h]);
                if (more) [[unlikely]] {
                    const float* from = logits + static_cast<std::ptrdiff_t>(h) * stride + vector * lane_count;
                    sums[h][v] += load_first(from, (std::min)(lane_count, tokens - vector * lane_count));
                }
            }
        }
        add_channels<Bits>(at, channels, s.bits, factors.factor, sums);
        for (std::size_t v = 0; v < vectors_at_once && first + v < vectors; ++v) {
            const std::size_t token = (first + v) * lane_count;
            for (std::size_t h = 0; h < Heads; ++h) {
                float* const to = logits + static_cast<std::ptrdiff_t>(h) * stride + token;
                if (tokens - token >= lane_count) {
                    store(to, sums[h][v]);
                } else {
                    std::memcpy(to, &sums[h][v], (tokens - token) * sizeof(float));
                }
            }
        }
    }
}

using score_group_function = void (*)(const rope_pair_codes&, const std::uint32_t*, std::size_t, std::size_t,
                                      const rope_pair_factors&, bool, float*, std::ptrdiff_t) noexcept;

/// Whether codes are multiplied as bytes: where there is an instruction for it, and codes do not straddle bytes.
[[nodiscard]] constexpr bool by_bytes(unsigned bits) noexcept {
    return has_byte_dots && by_half_words(bits);
}

template <unsigned Bits, std::size_t Heads>
constexpr score_group_function score_group_at() noexcept {
#if VERKV_LANES_DOTS
    if constexpr (Bits > 0) {
        return score_group_by_bytes<Bits, Heads>;
    } else
#endif
    {
        return score_group<Bits, Heads>;
    }
}

template <unsigned Bits>
inline constexpr std::array<score_group_function, head_tile> score_group_of_heads = {
    score_group_at<Bits, 1>(), score_group_at<Bits, 2>(), score_group_at<Bits, 3>(), score_group_at<Bits, 4>()};

inline score_group_function score_group_of(unsigned bits, std::size_t heads) noexcept {
    switch (bits) {
        case 1:
            return score_group_of_heads<1>[heads - 1];
        case 2:
            return score_group_of_heads<2>[heads - 1];
        case 4:
            return score_group_of_heads<4>[heads - 1];
        case 8:
            return score_group_of_heads<8>[heads - 1];
        default:
            return score_group_of_heads<0>[heads - 1];
    }
}

/// Groups first_group ... last_group-1 for all query heads.
inline void score_groups(const rope_pair_codes& s, rows<float> queries, float scale, matrix_view<float> logits,
                         std::size_t first_group, std::size_t last_group) noexcept {
    // Codes that divide a half word stay where they lie in it, unless they are taken as bytes; the factor takes the
    // shift back. Exact: powers of two.
    alignas(64) float unshift[rope_pair_codes::block_tokens];
    for (std::size_t c = 0; c < rope_pair_codes::block_tokens; ++c) {
        unshift[c] =
            by_half_words(s.bits) && !by_bytes(s.bits) ? 1.0f / static_cast<float>(1u << (c * s.bits % 16)) : 1.0f;
    }
    rope_pair_factors factors;
    for (std::size_t head = 0; head < queries.count; head += head_tile) {
        const std::size_t heads = (std::min)(head_tile, queries.count - head);
        const score_group_function score = score_group_of(s.bits, heads);
        for (std::size_t tile = 0; tile < s.channel_count; tile += channel_tile) {
            const std::size_t channels = (std::min)(channel_tile, s.channel_count - tile);
            const std::size_t padded = (std::min)(channel_tile, s.padded_channels - tile);
            for (std::size_t h = 0; h < heads; ++h) {
                const float* const q = queries[head + h];
                for (std::size_t c = 0; c < channels; ++c) {
                    factors.query[h][c] = q[s.channels[tile + c]] * scale;
                }
                std::fill(factors.query[h] + channels, factors.query[h] + padded, 0.0f);
            }
            for (std::size_t g = first_group; g < last_group; ++g) {
                const half* const zeros = s.parameters + g * 2 * s.padded_channels + tile;
                const half* const steps = zeros + s.padded_channels;
                for (std::size_t h = 0; h < heads; ++h) {
                    lanes base = {};
                    for (std::size_t c = 0; c < padded; c += lane_count) {
                        const lanes q = load(factors.query[h] + c);
                        base += q * load(zeros + c);
                        store(factors.factor + h * channel_tile + c,
                              q * load(steps + c) * load(unshift + c % rope_pair_codes::block_tokens));
                    }
                    factors.base[h] = sum(base);
                }
                const std::size_t token = s.first_token[g];
                const std::size_t end = g + 1 < s.groups ? s.first_token[g + 1] : s.tokens;
                score(s, s.codes + g * s.slot_words + tile * s.bits / 32 * rope_pair_codes::block_tokens, end - token,
                      channels, factors, tile > 0,
                      logits.data + static_cast<std::ptrdiff_t>(head) * logits.stride + token, logits.stride);
            }
        }
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Writes scale * <q, k^> of every token of a RoPE-pair sketch, k^ the key as its codes say, 0 in channels not kept.
/// [VerKV App. A.1]. logits [queries.count, s.tokens]. Preconditions (unchecked): queries are as wide as the keys that
/// the codes were made of, logits has that shape and its rows do not overlap.
/// Reads the codes once for all queries, and writes the logits: no memory is allocated.
/// Float accumulation, channel after channel: error at most (channels + 3) 2^-23 scale sum_c |q_c| (|zero_c| + code
/// step_c). Where the target multiplies bytes (AVX512-VNNI, AVX-VNNI) and codes have 1, 2, 4 or 8 bits, the factors q_c
/// step_c are rounded to 14 bits of the largest of the group first, which adds at most 2^-13 max_c |scale q_c step_c|
/// sum_c code_c: some thousandth of what the codes themselves leave out. A token's bits depend on its group's codes and
/// parameters alone, not on its place, the other queries or the number of threads. Throws nothing.
inline void rope_pair_estimate(const cpu& exec, const rope_pair_codes& s, rows<float> queries, float scale,
                               matrix_view<float> logits) noexcept {
    if (queries.count == 0 || s.groups == 0) {
        return;
    }
    // So many groups that their codes stay in the first-level cache while the heads pass over them.
    const std::size_t at_once = (std::max)(std::size_t{1}, std::size_t{2048} / s.group_length);
    const std::size_t tasks = (s.groups + at_once - 1) / at_once;
    for_each_task(exec, tasks, [&](std::size_t task, std::size_t) {
        const std::size_t first = task * at_once;
        detail::score_groups(s, queries, scale, logits, first, (std::min)(s.groups, first + at_once));
    });
}

}  // namespace verkv::inline v0
