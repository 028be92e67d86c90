// Sums of codes of a few bits times factors, for the query heads of a group at once, on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/rope_pair_codes.hpp"

namespace verkv::inline v0 {
namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// Adds codes, already where their factor expects them, to the sums of all heads.
template <std::size_t Heads>
VERKV_ALWAYS_INLINE void add_codes(const word_lanes (&code)[vectors_at_once], const float* factor,
                                   lanes (&sums)[Heads][vectors_at_once]) {
    lanes value[vectors_at_once];
    for (std::size_t v = 0; v < vectors_at_once; ++v) {
        value[v] = __builtin_convertvector(lanes_cast<int_lanes>(code[v]), lanes);
    }
    for (std::size_t h = 0; h < Heads; ++h) {
        const lanes f = broadcast(factor[h * channel_tile]);
        for (std::size_t v = 0; v < vectors_at_once; ++v) {
            sums[h][v] += f * value[v];
        }
    }
}

/// Adds the channels in the lower half of the words: bits divide 16, so none goes over the border.
template <unsigned Bits, std::size_t Heads, std::size_t... Channel>
VERKV_ALWAYS_INLINE void add_half_word(const word_lanes (&word)[vectors_at_once], const float* factor,
                                       lanes (&sums)[Heads][vectors_at_once], std::index_sequence<Channel...>) {
    const auto add = [&](std::size_t channel, std::uint32_t mask) __attribute__((always_inline)) {
        word_lanes code[vectors_at_once];
        for (std::size_t v = 0; v < vectors_at_once; ++v) {
            code[v] = word[v] & mask;
        }
        add_codes<Heads>(code, factor + channel, sums);
    };
    (add(Channel, ((1u << Bits) - 1) << (Channel * Bits)), ...);
}

/// Whether the codes of so many bits are read half a word at a time, masked where they lie.
[[nodiscard]] constexpr bool by_half_words(unsigned bits) noexcept {
    return 16 % bits == 0;
}

/// Adds all channels. Bits = 0: of any number of bits, given at run time.
template <unsigned Bits, std::size_t Heads>
VERKV_ALWAYS_INLINE void add_channels(const std::uint32_t* const (&at)[vectors_at_once], std::size_t channels,
                                      unsigned bits, const float* factor, lanes (&sums)[Heads][vectors_at_once]) {
    constexpr std::size_t block_tokens = rope_pair_codes::block_tokens;
    word_lanes word[vectors_at_once];
    if constexpr (Bits > 0) {
        constexpr std::size_t unit = 16 / Bits;
        std::uint32_t half_words = 0;
        for (std::size_t c = 0; c < channels; c += unit, ++half_words) {
            for (std::size_t v = 0; v < vectors_at_once; ++v) {
                word[v] = load_words(at[v] + half_words / 2 * block_tokens) >> (half_words % 2 * 16);
            }
            add_half_word<Bits, Heads>(word, factor + c, sums, std::make_index_sequence<unit>{});
        }
    } else {
        for (std::size_t c = 0, bit = 0; c < channels; ++c, bit += bits) {
            const auto shift = static_cast<std::uint32_t>(bit % 32);
            for (std::size_t v = 0; v < vectors_at_once; ++v) {
                const std::uint32_t* const from = at[v] + bit / 32 * block_tokens;
                word[v] = load_words(from) >> shift;
                if (shift + bits > 32) {
                    word[v] |= load_words(from + block_tokens) << (32 - shift);
                }
                word[v] &= (1u << bits) - 1;
            }
            add_codes<Heads>(word, factor + c, sums);
        }
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail
}  // namespace verkv::inline v0
