// Kernels of the rotated sketch on the CPU: rotate a row; choose a row's codes; score all tokens from their codes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "verkv/core/views.hpp"
#include "verkv/cpu/code_products.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/rope_pair_codes.hpp"

namespace verkv::inline v0 {

/// Codes of a rotated sketch as they lie in memory; what a backend's rotated_estimate() reads.
/// Blocks of 16 tokens, [block][word][16], as those of rope_pair_codes: coordinate c has the bits c * bits ... c * bits
/// + bits - 1 of its token's words. Its value is code - (2^bits - 1) / 2.
struct rotated_codes {
    static constexpr std::size_t block_tokens = rope_pair_codes::block_tokens;
    static constexpr std::size_t largest_key_dim = 1024;

    const float* rotation = nullptr;  ///< transposed: [channel][rotated coordinate], padded_channels wide
    const float* centre = nullptr;    ///< [key_dim]
    const std::uint32_t* codes = nullptr;
    const float* gain = nullptr;    ///< [token]: ||k - c|| / (rho ||x||), x the token's code
    const float* spread = nullptr;  ///< [token]: ||k - c|| sqrt(1 - rho^2) / rho
    std::size_t tokens = 0;
    std::size_t key_dim = 0;
    std::size_t padded_channels = 0;  ///< key_dim rounded up to 16; the rotation's other columns are 0
    std::size_t words = 0;            ///< of a token: ceil(key_dim * bits / 32)
    unsigned bits = 0;                ///< of a code, 1 ... 4
    double quantile = 1;              ///< z: how many spreads of a unit query a bound is wide
};

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

// As wide as a register, so half as many as floats.
using double_lanes = double __attribute__((vector_size(VERKV_LANES_WIDTH * 4)));
using half_lanes = float __attribute__((vector_size(VERKV_LANES_WIDTH * 2)));
inline constexpr std::size_t double_count = lane_count / 2;

/// `Count` vectors of rotated coordinates; rotation and out point to the first.
template <std::size_t Count>
VERKV_ALWAYS_INLINE void rotate_columns(const float* rotation, std::size_t key_dim, std::size_t padded_channels,
                                        const double* x, double* out) {
    double_lanes sums[Count] = {};
    for (std::size_t j = 0; j < key_dim; ++j) {
        const float* const from = rotation + j * padded_channels;
        for (std::size_t v = 0; v < Count; ++v) {
            half_lanes column;
            std::memcpy(&column, from + v * double_count, sizeof(column));
            sums[v] += __builtin_convertvector(column, double_lanes) * x[j];
        }
    }
    std::memcpy(out, sums, sizeof(sums));
}

/// out = P x in double: x [key_dim], out [padded_channels], 0 in the padding.
inline void rotate(const float* rotation, std::size_t key_dim, std::size_t padded_channels, const double* x,
                   double* out) noexcept {
    constexpr std::size_t most = 8;  // enough to hide the latency of the sums
    constexpr std::size_t few = 16 / double_count < most ? 16 / double_count : most;
    std::size_t c = 0;
    for (; c + most * double_count <= padded_channels; c += most * double_count) {
        rotate_columns<most>(rotation + c, key_dim, padded_channels, x, out + c);
    }
    for (; c < padded_channels; c += few * double_count) {
        rotate_columns<few>(rotation + c, key_dim, padded_channels, x, out + c);
    }
}

/// The t whose codes trunc(t |u_c|), cut off at 2^(bits - 1) - 1, point most nearly where u does; 0 where plain signs
/// do. u has padded_channels coordinates, 0 from key_dim on. Searched among 24 values, from so coarse that the largest
/// coordinate falls short of the last code to so fine that all above a third of it have that code.
inline float best_code_scale(const float* u, std::size_t key_dim, std::size_t padded_channels, unsigned bits) noexcept {
    lanes most = {};
    lanes total = {};
    for (std::size_t c = 0; c < padded_channels; c += lane_count) {
        const lanes x = load(u + c);
        const lanes size = select(lanes_cast<int_lanes>(x < 0.0f), -x, x);
        most = larger_of(size, most);
        total += size;
    }
    const float top = largest(most);
    const float width = static_cast<float>(key_dim);
    // Squared cosines, up to ||u||^2. Signs alone: sum |u_c| / sqrt(key_dim).
    const float all = sum(total);
    float best = all * all / width;
    float best_scale = 0;
    if (bits == 1 || !(top > 0)) {
        return best_scale;
    }
    constexpr std::size_t candidates = 24;
    const auto levels = static_cast<float>(1u << (bits - 1));
    const float missing = 0.25f * static_cast<float>(padded_channels - key_dim);  // what the padding adds to ||x||^2
    float scale = 0.6f * levels / top;
    for (std::size_t i = 0; i < candidates; ++i, scale *= 1.073f) {
        lanes dots = {};
        lanes squares = {};
        for (std::size_t c = 0; c < padded_channels; c += lane_count) {
            const lanes x = load(u + c);
            const lanes size = select(lanes_cast<int_lanes>(x < 0.0f), -x, x);
            const lanes ratio = size * scale;
            const lanes inside = select(lanes_cast<int_lanes>(ratio < levels - 1), ratio, broadcast(levels - 1));
            const lanes value = __builtin_convertvector(__builtin_convertvector(inside, int_lanes), lanes) + 0.5f;
            dots += size * value;
            squares += value * value;
        }
        const float dot = sum(dots);
        const float score = dot * dot / (sum(squares) - missing);
        if (score > best) {
            best = score;
            best_scale = scale;
        }
    }
    return best_scale;
}

/// A coordinate's code by a scale, and the value that it stands for, +-1/2, +-3/2, ...
struct signed_code {
    std::uint32_t code;
    double value;
};
inline signed_code code_at_scale(float u, float scale, unsigned bits) noexcept {
    const std::uint32_t levels = 1u << (bits - 1);
    const auto step = static_cast<std::uint32_t>(smaller(std::abs(u) * scale, static_cast<float>(levels - 1)));
    const std::uint32_t code = u < 0 ? levels - 1 - step : levels + step;
    return {code, static_cast<double>(code) - static_cast<double>(levels) + 0.5};
}

inline constexpr std::size_t rotated_heads = 2 * head_tile;  // query heads that one pass over the codes serves
inline constexpr std::size_t rotated_tiles = rotated_codes::largest_key_dim / channel_tile;

/// What the codes of all tokens meet: a few query heads, rotated.
struct rotated_queries {
    /// [tile of heads][tile of channels][head][channel]
    alignas(64) float factor[rotated_heads / head_tile][rotated_tiles][head_tile * channel_tile];
    float base[rotated_heads];      ///< -(2^bits - 1) / 2 times the sum of a rotated query
    float centre[rotated_heads];    ///< scale <c, q>
    float rounding[rotated_heads];  ///< times a token's gain: what rounding may do to its share
    float width[rotated_heads];     ///< times a token's spread: z |scale| ||q||
    float least[rotated_heads];     ///< added to every bound: rounding of <c, q> and of tiny products
};

/// Rotates queries first ... first + heads - 1.
inline void rotate_queries(const rotated_codes& s, rows<float> queries, std::size_t first, std::size_t heads,
                           float scale, rotated_queries& out) noexcept {
    const auto d = static_cast<double>(s.key_dim);
    const double offset = (static_cast<double>(1u << s.bits) - 1) / 2;
    const double factor = std::abs(static_cast<double>(scale));
    double query[rotated_codes::largest_key_dim];
    alignas(64) double rotated[rotated_codes::largest_key_dim];
    for (std::size_t h = 0; h < heads; ++h) {
        const float* const q = queries[first + h];
        double square = 0;
        double centre = 0;
        double centre_size = 0;
        for (std::size_t c = 0; c < s.key_dim; ++c) {
            query[c] = static_cast<double>(q[c]);
            square += query[c] * query[c];
            centre += query[c] * static_cast<double>(s.centre[c]);
            centre_size += std::abs(query[c] * static_cast<double>(s.centre[c]));
        }
        rotate(s.rotation, s.key_dim, s.padded_channels, query, rotated);
        double total = 0;
        double size = 0;
        for (std::size_t c = 0; c < s.padded_channels; ++c) {
            const auto value = static_cast<float>(rotated[c]);
            total += static_cast<double>(value);
            size += std::abs(static_cast<double>(value));
            // Codes that divide a half word stay where they lie in it; the factor takes the shift back.
            const float unshift = by_half_words(s.bits) ? 1.0f / static_cast<float>(1u << (c * s.bits % 16)) : 1.0f;
            out.factor[h / head_tile][c / channel_tile][h % head_tile * channel_tile + c % channel_tile] =
                value * unshift;
        }
        const double norm = std::sqrt(square);
        const double unit = 0x1p-24;
        const double up = 1 + 0x1p-20;
        // Of sum_c x_c Q_c: each term is rounded at most d + 3 times, codes and base together at most 3 offset sum |Q|.
        // Of the factor before it: gain and the last product, and rho, off by at most 2^-24 sqrt(d) <= 2^-24 d rho.
        // Of Q itself: the rotation is off by 2^-24 of each element, a coordinate by 2^-24 of itself; tiny ones vanish.
        const double sums = (d + 4) * unit / (1 - (d + 4) * unit);
        const double rounding =
            offset * (size * (3 * sums + (d + 8) * unit) + d * norm * 2 * unit + d * (d + 16) * 0x1p-132);
        const double share = std::abs(static_cast<double>(scale) * centre);
        out.base[h] = static_cast<float>(-offset * total);
        out.centre[h] = static_cast<float>(static_cast<double>(scale) * centre);
        out.rounding[h] = static_cast<float>(factor * rounding * up + 0x1p-148);
        out.width[h] = static_cast<float>(factor * norm * s.quantile * up + 0x1p-148);
        out.least[h] = static_cast<float>((share * 3 * unit + factor * centre_size * d * 0x1p-52 +
                                           factor * (1 + 2 * offset * size + norm) * 0x1p-145 + 0x1p-145) *
                                          up);
    }
}

/// Tokens first ... last-1 for up to four heads; first is a multiple of 16.
template <unsigned Bits, std::size_t Heads>
void score_rotated(const rotated_codes& s, const rotated_queries& q, std::size_t tile_of_heads, float scale,
                   std::size_t first, std::size_t last, float* logits, std::ptrdiff_t stride, float* bounds,
                   std::ptrdiff_t bound_stride) noexcept {
    constexpr std::size_t block_tokens = rotated_codes::block_tokens;
    const std::size_t head = tile_of_heads * head_tile;
    for (std::size_t token = first; token < last; token += vectors_at_once * lane_count) {
        const std::uint32_t* at[vectors_at_once];
        lanes sums[Heads][vectors_at_once];
        std::size_t start[vectors_at_once];
        for (std::size_t v = 0; v < vectors_at_once; ++v) {
            // Past the end the first vector is computed again, and dropped.
            start[v] = token + v * lane_count < last ? token + v * lane_count : token;
            at[v] = s.codes + start[v] / block_tokens * s.words * block_tokens + start[v] % block_tokens;
            for (std::size_t h = 0; h < Heads; ++h) {
                sums[h][v] = broadcast(q.base[head + h]);
            }
        }
        for (std::size_t tile = 0; tile * channel_tile < s.key_dim; ++tile) {
            const std::size_t channels = (std::min)(channel_tile, s.key_dim - tile * channel_tile);
            const std::uint32_t* of_tile[vectors_at_once];
            for (std::size_t v = 0; v < vectors_at_once; ++v) {
                of_tile[v] = at[v] + tile * (channel_tile / 32) * s.bits * block_tokens;
            }
            add_channels<Bits>(of_tile, channels, s.bits, q.factor[tile_of_heads][tile], sums);
        }
        for (std::size_t v = 0; v < vectors_at_once && token + v * lane_count < last; ++v) {
            const std::size_t n = (std::min)(lane_count, last - start[v]);
            const lanes gain = load(s.gain + start[v]);
            const lanes spread = load(s.spread + start[v]);
            for (std::size_t h = 0; h < Heads; ++h) {
                const lanes estimate = gain * sums[h][v] * scale + q.centre[head + h];
                std::memcpy(logits + static_cast<std::ptrdiff_t>(h) * stride + start[v], &estimate, n * sizeof(float));
                if (bounds) {
                    const lanes bound =
                        (spread * q.width[head + h] + (gain * q.rounding[head + h] + q.least[head + h])) * 1.000001f;
                    const auto finite = lanes_cast<int_lanes>(estimate - estimate == 0.0f);
                    const auto number = lanes_cast<int_lanes>(bound == bound);
                    const lanes known =
                        select(finite & number, bound, broadcast(std::numeric_limits<float>::infinity()));
                    std::memcpy(bounds + static_cast<std::ptrdiff_t>(h) * bound_stride + start[v], &known,
                                n * sizeof(float));
                }
            }
        }
    }
}

using score_rotated_function = void (*)(const rotated_codes&, const rotated_queries&, std::size_t, float, std::size_t,
                                        std::size_t, float*, std::ptrdiff_t, float*, std::ptrdiff_t) noexcept;

template <unsigned Bits>
inline constexpr std::array<score_rotated_function, head_tile> score_rotated_of_heads = {
    score_rotated<Bits, 1>, score_rotated<Bits, 2>, score_rotated<Bits, 3>, score_rotated<Bits, 4>};

inline score_rotated_function score_rotated_of(unsigned bits, std::size_t heads) noexcept {
    switch (bits) {
        case 1:
            return score_rotated_of_heads<1>[heads - 1];
        case 2:
            return score_rotated_of_heads<2>[heads - 1];
        case 4:
            return score_rotated_of_heads<4>[heads - 1];
        default:
            return score_rotated_of_heads<0>[heads - 1];
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Writes the logits that a rotated sketch estimates, and their bounds unless `bounds` is null.
/// See rotated_sketch::estimate(). Preconditions (unchecked): queries are as wide as the keys, logits and bounds
/// [queries.count, s.tokens], rows that do not overlap; gain and spread may be read up to a multiple of 16 tokens.
/// Rotates eight queries at a time on the stack of the caller (about 50 KiB) and reads the codes once for them. No
/// memory is allocated. A token's bits depend on its code, its gain and spread and the query alone. Throws nothing.
inline void rotated_estimate(const cpu& exec, const rotated_codes& s, rows<float> queries, float scale,
                             matrix_view<float> logits, const matrix_view<float>* bounds) noexcept {
    if (s.tokens == 0) {
        return;
    }
    constexpr std::size_t at_once = 2048;  // tokens whose codes stay in the caches while the heads pass over them
    const std::size_t tasks = (s.tokens + at_once - 1) / at_once;
    for (std::size_t head = 0; head < queries.count; head += detail::rotated_heads) {
        const std::size_t heads = (std::min)(detail::rotated_heads, queries.count - head);
        detail::rotated_queries rotated;
        detail::rotate_queries(s, queries, head, heads, scale, rotated);
        for_each_task(exec, tasks, [&](std::size_t task, std::size_t) {
            const std::size_t first = task * at_once;
            const std::size_t last = (std::min)(s.tokens, first + at_once);
            for (std::size_t h = 0; h < heads; h += detail::head_tile) {
                const auto score = detail::score_rotated_of(s.bits, (std::min)(detail::head_tile, heads - h));
                const auto row = static_cast<std::ptrdiff_t>(head + h);
                score(s, rotated, h / detail::head_tile, scale, first, last, logits.data + row * logits.stride,
                      logits.stride, bounds ? bounds->data + row * bounds->stride : nullptr,
                      bounds ? bounds->stride : 0);
            }
        });
    }
}

}  // namespace verkv::inline v0
