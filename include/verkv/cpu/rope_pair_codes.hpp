// How the codes of a RoPE-pair sketch lie in memory, and what kernels over them share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "verkv/core/storage.hpp"
#include "verkv/cpu/lanes.hpp"

namespace verkv::inline v0 {

/// Codes of a RoPE-pair sketch as they lie in memory; what a backend's rope_pair_estimate() reads.
/// Group g has its own slot at codes + g * slot_words, cut into blocks of 16 tokens, [block][word][16]: word w of
/// neighbouring tokens is adjacent. Channel c has the bits c * bits ... c * bits + bits - 1 of its token's words,
/// lowest first, over the border of two words where it falls there. Its value is zero + code * step.
struct rope_pair_codes {
    static constexpr std::size_t block_tokens = 16;

    const std::uint32_t* codes = nullptr;
    const half* parameters = nullptr;          ///< [group][zero or step][channel], padded_channels wide
    const std::size_t* first_token = nullptr;  ///< of each group, ascending; a group ends where the next one starts
    const std::uint32_t* channels = nullptr;   ///< which channels of a key are kept, ascending
    std::size_t groups = 0;
    std::size_t tokens = 0;
    std::size_t channel_count = 0;
    std::size_t padded_channels = 0;  ///< channel_count rounded up to 16; zero and step of the rest are 0
    std::size_t words = 0;            ///< of a token: ceil(channel_count * bits / 32)
    std::size_t slot_words = 0;       ///< from one group to the next
    std::size_t group_length = 0;     ///< most tokens of a group
    unsigned bits = 0;                ///< of a code, 1 ... 8
};

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

inline constexpr std::size_t block_vectors = rope_pair_codes::block_tokens / lane_count;

VERKV_ALWAYS_INLINE word_lanes load_words(const std::uint32_t* p) {
    word_lanes words;
    std::memcpy(&words, p, sizeof(words));
    return words;
}

VERKV_ALWAYS_INLINE void store_words(std::uint32_t* p, const word_lanes& words) {
    std::memcpy(p, &words, sizeof(words));
}
inline constexpr std::size_t head_tile = 4;        // query heads whose sums are in registers together
inline constexpr std::size_t channel_tile = 128;   // channels whose factors are on the stack
inline constexpr std::size_t vectors_at_once = 2;  // hides the latency of the sums

/// Factors of one group, a head each: logit = base + sum_c factor[c] * (code of channel c, shifted to where it lies).
struct rope_pair_factors {
    alignas(64) float query[head_tile][channel_tile];
    alignas(64) float factor[head_tile * channel_tile];
    float base[head_tile];
};

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail
}  // namespace verkv::inline v0
