// Logits of a RoPE-pair sketch by products of bytes, where the target has an instruction for them.
#pragma once

#include "verkv/cpu/lanes.hpp"

#if VERKV_LANES_DOTS

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "verkv/cpu/rope_pair_codes.hpp"

namespace verkv::inline v0 {
namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// What score_group_by_bytes() reads of one group: q_c step_c as 128 high + low in a power of two, and each head's
/// base.
struct rope_pair_bytes {
    alignas(64) std::int8_t high[head_tile][channel_tile];
    alignas(64) std::int8_t low[head_tile][channel_tile];
    float unit[head_tile];
};

/// Which channel of a run of whole words byte b belongs to when codes are unpacked, a quad of bytes at a time, by
/// shifting the words right by 0, Bits, 2 Bits, ...
template <unsigned Bits>
[[nodiscard]] constexpr int channel_of_byte(std::size_t b) noexcept {
    constexpr std::size_t quads = 8 / Bits;  // of a word
    const std::size_t word = b / (4 * quads);
    return static_cast<int>(word * 4 * quads + b % 4 * quads + b / 4 % quads);
}

using byte_run = std::int8_t __attribute__((vector_size(32)));

template <unsigned Bits, std::size_t... Byte>
VERKV_ALWAYS_INLINE void arrange_bytes(const std::int8_t* from, std::int8_t* to, std::index_sequence<Byte...>) {
    byte_run x;
    std::memcpy(&x, from, sizeof(x));
    x = __builtin_shufflevector(x, x, channel_of_byte<Bits>(Byte)...);
    std::memcpy(to, &x, sizeof(x));
}

/// Rounds the factors of one head to 14 bits of the largest. Where one is infinite, the unit is NaN; where one is NaN,
/// so is the base.
template <unsigned Bits>
void set_bytes(const float* factor, std::size_t padded, std::size_t head, rope_pair_bytes& out) noexcept {
    lanes top{};
    for (std::size_t c = 0; c < padded; c += lane_count) {
        const lanes f = load(factor + c);
        top = larger_of(f < 0.0f ? -f : f, top);
    }
    // 2^e <= top < 2^(e + 1); the unit is 2^(e - 12).
    const std::uint32_t exponent = std::bit_cast<std::uint32_t>(largest(top)) >> 23;
    const std::uint32_t scaled = (std::max)(exponent, 13u) - 12;
    out.unit[head] = exponent < 255 ? std::bit_cast<float>(scaled << 23) : std::numeric_limits<float>::quiet_NaN();
    const float inverse = std::bit_cast<float>((254 - scaled) << 23);
    std::int8_t high[channel_tile], low[channel_tile];
    constexpr float rounder = 12582912.0f;  // 1.5 2^23: integers in the low bits
    using bytes = std::int8_t __attribute__((vector_size(lane_count)));
    for (std::size_t c = 0; c < padded; c += lane_count) {
        const int_lanes whole =
            lanes_cast<int_lanes>(load(factor + c) * inverse + rounder) - std::bit_cast<std::int32_t>(rounder);
        const int_lanes upper = (whole + 64) >> 7;
        const bytes h = __builtin_convertvector(upper, bytes);
        const bytes l = __builtin_convertvector(whole - (upper << 7), bytes);
        std::memcpy(high + c, &h, sizeof(h));
        std::memcpy(low + c, &l, sizeof(l));
    }
    constexpr std::size_t run = sizeof(byte_run);
    if (padded % run != 0) {
        std::fill_n(high + padded, run - padded % run, std::int8_t{0});
        std::fill_n(low + padded, run - padded % run, std::int8_t{0});
    }
    for (std::size_t c = 0; c < padded; c += run) {
        arrange_bytes<Bits>(high + c, out.high[head] + c, std::make_index_sequence<run>{});
        arrange_bytes<Bits>(low + c, out.low[head] + c, std::make_index_sequence<run>{});
    }
}

/// Calls use(0), use(1), ..., use(N - 1), the numbers as constants: what they index stays in registers.
template <std::size_t N, class Use>
VERKV_ALWAYS_INLINE void unrolled(Use&& use) {
    [&]<std::size_t... I>(std::index_sequence<I...>) __attribute__((always_inline)) {
        (use(std::integral_constant<std::size_t, I>{}), ...);
    }
    (std::make_index_sequence<N>{});
}

/// As score_group(), in integers but for the last step: base + unit sum_c (128 high_c + low_c) code_c.
template <unsigned Bits, std::size_t Heads>
void score_group_by_bytes(const rope_pair_codes& s, const std::uint32_t* codes, std::size_t tokens,
                          std::size_t channels, const rope_pair_factors& factors, bool more, float* logits,
                          std::ptrdiff_t stride) noexcept {
    constexpr std::size_t block_tokens = rope_pair_codes::block_tokens;
    constexpr std::size_t quads = 8 / Bits;
    constexpr std::uint32_t mask = ((1u << Bits) - 1) * 0x01010101u;
    rope_pair_bytes bytes;
    for (std::size_t h = 0; h < Heads; ++h) {
        set_bytes<Bits>(factors.factor + h * channel_tile, (channels + 15) / 16 * 16, h, bytes);
    }
    const std::size_t words = (channels * Bits + 31) / 32;
    const std::size_t vectors = (tokens + lane_count - 1) / lane_count;
    for (std::size_t first = 0; first < vectors; first += vectors_at_once) {
        const std::uint32_t* at[vectors_at_once];
        int_lanes high[vectors_at_once][Heads];
        int_lanes low[vectors_at_once][Heads];
        unrolled<vectors_at_once>([&](auto v) __attribute__((always_inline)) {
            // Past the end the last vector is computed again, and dropped.
            const std::size_t vector = (std::min)(first + v, vectors - 1);
            at[v] = codes + vector / block_vectors * s.words * block_tokens + vector % block_vectors * lane_count;
            unrolled<Heads>([&](auto h) __attribute__((always_inline)) { high[v][h] = low[v][h] = int_lanes{}; });
        });
        const std::int8_t* upper = bytes.high[0];
        const std::int8_t* lower = bytes.low[0];
        for (std::size_t word = 0; word < words; ++word, upper += 4 * quads, lower += 4 * quads) {
            word_lanes code[vectors_at_once];
            unrolled<vectors_at_once>([&](auto v) __attribute__((always_inline)) {
                code[v] = load_words(at[v] + word * block_tokens);
            });
            unrolled<quads>([&](auto quad) __attribute__((always_inline)) {
                unrolled<Heads>([&](auto h) __attribute__((always_inline)) {
                    std::int32_t up, down;
                    std::memcpy(&up, upper + h * channel_tile + 4 * quad, sizeof(up));
                    std::memcpy(&down, lower + h * channel_tile + 4 * quad, sizeof(down));
                    unrolled<vectors_at_once>([&](auto v) __attribute__((always_inline)) {
                        const word_lanes part = (code[v] >> static_cast<std::uint32_t>(quad * Bits)) & mask;
                        high[v][h] = add_byte_dots(high[v][h], part, up);
                        low[v][h] = add_byte_dots(low[v][h], part, down);
                    });
                });
            });
        }
        unrolled<vectors_at_once>([&](auto v) __attribute__((always_inline)) {
            const std::size_t token = (first + v) * lane_count;
            if (token >= tokens) {
                return;
            }
            const std::size_t left = tokens - token;
            unrolled<Heads>([&](auto h) __attribute__((always_inline)) {
                float* const to = logits + static_cast<std::ptrdiff_t>(h) * stride + token;
                const int_lanes whole = (high[v][h] << 7) + low[v][h];
                lanes logit = __builtin_convertvector(whole, lanes) * bytes.unit[h] + factors.base[h];
                if (more) [[unlikely]] {
                    logit += load_first(to, (std::min)(lane_count, left));
                }
                if (left >= lane_count) {
                    store(to, logit);
                } else {
                    std::memcpy(to, &logit, left * sizeof(float));
                }
            });
        });
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail
}  // namespace verkv::inline v0

#endif
