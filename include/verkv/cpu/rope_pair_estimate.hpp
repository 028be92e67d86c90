// Kernels of the RoPE-pair sketch on the CPU: quantise a group of tokens; score all tokens from their codes.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
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

/// sums[c] += row[c]^2, in double.
template <storage T>
void add_squares(const T* row, std::size_t width, double* sums) noexcept {
    constexpr std::size_t piece = 128;
    for (std::size_t first = 0; first < width; first += piece) {
        const std::size_t n = (std::min)(piece, width - first);
        float converted[piece];
        const float* x = converted;
        if constexpr (std::same_as<T, float>) {
            x = row + first;
        } else {
            std::size_t c = 0;
            for (; c + lane_count <= n; c += lane_count) {
                store(converted + c, load(row + first + c));
            }
            for (; c < n; ++c) {
                converted[c] = to_float(row[first + c]);
            }
        }
        for (std::size_t c = 0; c < n; ++c) {
            sums[first + c] += static_cast<double>(x[c]) * static_cast<double>(x[c]);
        }
    }
}

/// Quantises the tokens of one group. raw is [block][channel][16]; its unused places are overwritten.
/// Step and zero are stored as half, within +-65504; codes refer to the stored ones. A channel that has a NaN or an
/// infinity gets zero = NaN, so that every estimate of the group shows it.
inline void quantise_group(float* raw, std::size_t tokens, std::size_t channels, unsigned bits, half* zeros,
                           half* steps, std::uint32_t* codes, std::size_t words) noexcept {
    constexpr std::size_t block_tokens = rope_pair_codes::block_tokens;
    const std::size_t blocks = (tokens + block_tokens - 1) / block_tokens;
    const auto levels = static_cast<float>((1u << bits) - 1);
    std::fill_n(codes, blocks * words * block_tokens, 0u);
    for (std::size_t c = 0; c < channels; ++c) {
        float* const x = raw + c * block_tokens;
        const std::size_t stride = channels * block_tokens;
        for (std::size_t t = tokens; t < blocks * block_tokens; ++t) {
            x[(t / block_tokens) * stride + t % block_tokens] = x[0];
        }
        lanes low = broadcast(x[0]);
        lanes high = low;
        lanes poison = {};
        for (std::size_t b = 0; b < blocks; ++b) {
            for (std::size_t v = 0; v < block_vectors; ++v) {
                const lanes value = load(x + b * stride + v * lane_count);
                low = select(lanes_cast<int_lanes>(value < low), value, low);
                high = larger_of(high, value);
                poison += value * 0.0f;
            }
        }
        float zero = low[0];
        float top = high[0];
        for (std::size_t i = 1; i < lane_count; ++i) {
            zero = smaller(low[i], zero);
            top = larger(high[i], top);
        }
        const bool finite = sum(poison) == 0;
        constexpr double half_max = 65504;
        const double range = finite ? static_cast<double>(top) - static_cast<double>(zero) + 0.0 : 0;
        const double step = smaller(range / static_cast<double>(levels), half_max);
        // "+ 0": a zero of either sign is +0, for which one is the smallest depends on the order.
        zeros[c] = finite ? from_float<half>(larger(smaller(zero, 65504.0f), -65504.0f) + 0.0f) : half{0x7e00};
        steps[c] = from_float<half>(static_cast<float>(step));

        const float stored_zero = to_float(zeros[c]);
        const float stored_step = to_float(steps[c]);
        if (!(stored_step > 0)) {
            continue;  // all codes 0
        }
        const float inverse = 1.0f / stored_step;
        const std::size_t bit = c * bits;
        const auto shift = static_cast<std::uint32_t>(bit % 32);
        const bool straddles = shift + bits > 32;
        for (std::size_t b = 0; b < blocks; ++b) {
            for (std::size_t v = 0; v < block_vectors; ++v) {
                const lanes ratio = (load(x + b * stride + v * lane_count) - stored_zero) * inverse + 0.5f;
                const lanes above = select(lanes_cast<int_lanes>(ratio > 0.0f), ratio, lanes{});
                const lanes inside = select(lanes_cast<int_lanes>(above < levels), above, broadcast(levels));
                const word_lanes code = lanes_cast<word_lanes>(__builtin_convertvector(inside, int_lanes));
                std::uint32_t* const at = codes + (b * words + bit / 32) * block_tokens + v * lane_count;
                store_words(at, load_words(at) | (code << shift));
                if (straddles) {
                    store_words(at + block_tokens, code >> (32 - shift));
                }
            }
        }
    }
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

#if VERKV_LANES_DOTS

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

#endif

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
    }
#endif
    return score_group<Bits, Heads>;
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
