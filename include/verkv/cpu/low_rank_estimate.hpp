// Kernels of the low-rank sketch on the CPU: split queries along a basis; score all tokens from their coefficients.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/rope_pair_codes.hpp"
#include "verkv/cpu/rotated_estimate.hpp"

namespace verkv::inline v0 {

/// How the coefficients of a low-rank sketch are stored.
enum class coefficient_format {
    float32,
    float16,  ///< within +-65504
    int8,     ///< -127 ... 127 times a step of the token
};

/// Coefficients of a low-rank sketch as they lie in memory; what a backend's low_rank_estimate() reads.
/// Blocks of 16 tokens, [block][coefficient][16], or [block][word][16] of four 8-bit codes a word, code = value / step
/// + 128, lowest bits first. One of the three pointers to coefficients is set: that of the format.
struct low_rank_codes {
    static constexpr std::size_t block_tokens = rope_pair_codes::block_tokens;
    static constexpr std::size_t largest_key_dim = rotated_codes::largest_key_dim;

    const float* basis = nullptr;       ///< [rank][channel], padded_channels wide
    const float* transposed = nullptr;  ///< [channel][rank], padded_rank wide
    const float* mean = nullptr;        ///< [key_dim]
    const float* singles = nullptr;
    const half* halves = nullptr;
    const std::uint32_t* words = nullptr;
    const float* step = nullptr;     ///< [token]; 8 bits only
    const float* outside = nullptr;  ///< [token]: ||e||, e what mean and coefficients leave of the key
    const float* inside = nullptr;   ///< [token]: ||basis e||, and what rounding may do to the sum over coefficients
    std::size_t tokens = 0;
    std::size_t key_dim = 0;
    std::size_t rank = 0;
    std::size_t padded_channels = 0;  ///< key_dim rounded up to 16; the basis is 0 in the rest
    std::size_t padded_rank = 0;      ///< rank rounded up to 16
    coefficient_format format = coefficient_format::int8;

    /// Elements of a token: coefficients, or words of four codes.
    [[nodiscard]] std::size_t elements() const noexcept {
        return format == coefficient_format::int8 ? (rank + 3) / 4 : rank;
    }
};

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// What the coefficients of all tokens meet: a few query heads along the basis and beside it.
struct low_rank_queries {
    /// [tile of heads][tile of coefficients][head][coefficient]
    alignas(64) float factor[rotated_heads / head_tile][rotated_tiles][head_tile * channel_tile];
    float base[rotated_heads];     ///< -128 times the sum of the factors; 8 bits only
    float centre[rotated_heads];   ///< scale <q, mean>
    float outside[rotated_heads];  ///< times a token's: |scale| ||q - basis^T basis q||
    float inside[rotated_heads];   ///< times a token's: |scale| ||basis q||
    float least[rotated_heads];    ///< added to every bound: rounding of <q, mean> and of tiny products
};

/// Splits queries first ... first + heads - 1.
inline void split_queries(const low_rank_codes& s, rows<float> queries, std::size_t first, std::size_t heads,
                          float scale, low_rank_queries& out) noexcept {
    const auto d = static_cast<double>(s.key_dim);
    const auto r = static_cast<double>(s.rank);
    const auto factor = static_cast<double>(scale);
    double query[low_rank_codes::largest_key_dim];
    alignas(64) double along[low_rank_codes::largest_key_dim];
    alignas(64) double back[low_rank_codes::largest_key_dim];
    for (std::size_t h = 0; h < heads; ++h) {
        const float* const q = queries[first + h];
        double square = 0;
        double centre = 0;
        double centre_size = 0;
        for (std::size_t c = 0; c < s.key_dim; ++c) {
            query[c] = static_cast<double>(q[c]);
            square += query[c] * query[c];
            centre += query[c] * static_cast<double>(s.mean[c]);
            centre_size += std::abs(query[c] * static_cast<double>(s.mean[c]));
        }
        rotate(s.transposed, s.key_dim, s.padded_rank, query, along);
        rotate(s.basis, s.rank, s.padded_channels, along, back);
        double beside = 0;
        for (std::size_t c = 0; c < s.key_dim; ++c) {
            beside += (query[c] - back[c]) * (query[c] - back[c]);
        }
        double inner = 0;
        double total = 0;
        // The padding, too: half words are read whole.
        for (std::size_t c = 0; c < s.padded_rank; ++c) {
            inner += along[c] * along[c];
            const auto value = static_cast<float>(factor * along[c]);
            total += static_cast<double>(value);
            // Two codes lie in a half word, the upper one 256 times as large; the factor takes that back.
            const float unshift = s.format == coefficient_format::int8 && c % 2 == 1 ? 0x1p-8f : 1.0f;
            out.factor[h / head_tile][c / channel_tile][h % head_tile * channel_tile + c % channel_tile] =
                value * unshift;
        }
        const double norm = std::sqrt(square);
        const double size = std::abs(factor);
        const double up = 1 + 0x1p-20;
        out.base[h] = static_cast<float>(-128 * total);
        out.centre[h] = static_cast<float>(factor * centre);
        // In doubles the split is off by less than (d + r) 2^-50 ||q||.
        out.outside[h] = static_cast<float>(size * (std::sqrt(beside) + (d + r) * 0x1p-48 * norm) * up + 0x1p-148);
        // A token's share has at least 2^-24 of its coefficients' norm, so that 2^-28 d ||q|| times it covers what
        // doubles lose of <basis q, coefficients>, and 2^-110 times it products that floats lose near 0.
        out.inside[h] = static_cast<float>(size * (std::sqrt(inner) + d * 0x1p-27 * norm) * up + 0x1p-110);
        out.least[h] = static_cast<float>(
            (std::abs(factor * centre) * 0x1p-22 + size * centre_size * d * 0x1p-51 + 0x1p-136) * up);
    }
}

/// Adds coefficients that are stored as they are to the sums of all heads.
template <std::size_t Heads, storage T>
VERKV_ALWAYS_INLINE void add_coefficients(const T* const (&at)[vectors_at_once], std::size_t count, const float* factor,
                                          lanes (&sums)[Heads][vectors_at_once]) {
    for (std::size_t c = 0; c < count; ++c) {
        lanes value[vectors_at_once];
        for (std::size_t v = 0; v < vectors_at_once; ++v) {
            value[v] = load(at[v] + c * low_rank_codes::block_tokens);
        }
        for (std::size_t h = 0; h < Heads; ++h) {
            const lanes f = broadcast(factor[h * channel_tile + c]);
            for (std::size_t v = 0; v < vectors_at_once; ++v) {
                sums[h][v] += f * value[v];
            }
        }
    }
}

/// Bounds as they are written: infinite where the estimate is no finite number, or the bound none.
VERKV_ALWAYS_INLINE lanes known_bound(const lanes& estimate, const lanes& bound) {
    const auto finite = lanes_cast<int_lanes>(estimate - estimate == 0.0f);
    const auto number = lanes_cast<int_lanes>(bound == bound);
    return select(finite & number, bound, broadcast(std::numeric_limits<float>::infinity()));
}

/// Tokens first ... last-1 for up to four heads; first is a multiple of 16.
template <class Element, std::size_t Heads>
void score_low_rank(const low_rank_codes& s, const Element* elements, const low_rank_queries& q,
                    std::size_t tile_of_heads, std::size_t first, std::size_t last, float* logits,
                    std::ptrdiff_t stride, float* bounds, std::ptrdiff_t bound_stride) noexcept {
    constexpr std::size_t block_tokens = low_rank_codes::block_tokens;
    constexpr bool codes = std::is_same_v<Element, std::uint32_t>;
    const std::size_t head = tile_of_heads * head_tile;
    const std::size_t of_token = s.elements();
    for (std::size_t token = first; token < last; token += vectors_at_once * lane_count) {
        const Element* at[vectors_at_once];
        lanes sums[Heads][vectors_at_once];
        std::size_t start[vectors_at_once];
        for (std::size_t v = 0; v < vectors_at_once; ++v) {
            // Past the end the first vector is computed again, and dropped.
            start[v] = token + v * lane_count < last ? token + v * lane_count : token;
            at[v] = elements + start[v] / block_tokens * of_token * block_tokens + start[v] % block_tokens;
            for (std::size_t h = 0; h < Heads; ++h) {
                sums[h][v] = codes ? broadcast(q.base[head + h]) : lanes{};
            }
        }
        for (std::size_t tile = 0; tile * channel_tile < s.rank; ++tile) {
            const std::size_t count = (std::min)(channel_tile, s.rank - tile * channel_tile);
            const Element* of_tile[vectors_at_once];
            for (std::size_t v = 0; v < vectors_at_once; ++v) {
                of_tile[v] = at[v] + tile * (codes ? channel_tile / 4 : channel_tile) * block_tokens;
            }
            if constexpr (codes) {
                add_channels<8>(of_tile, count, 8, q.factor[tile_of_heads][tile], sums);
            } else {
                add_coefficients<Heads>(of_tile, count, q.factor[tile_of_heads][tile], sums);
            }
        }
        for (std::size_t v = 0; v < vectors_at_once && token + v * lane_count < last; ++v) {
            const std::size_t n = (std::min)(lane_count, last - start[v]);
            const lanes step = codes ? load(s.step + start[v]) : broadcast(1.0f);
            const lanes outside = load(s.outside + start[v]);
            const lanes inside = load(s.inside + start[v]);
            for (std::size_t h = 0; h < Heads; ++h) {
                const lanes estimate = step * sums[h][v] + q.centre[head + h];
                std::memcpy(logits + static_cast<std::ptrdiff_t>(h) * stride + start[v], &estimate, n * sizeof(float));
                if (bounds) {
                    const lanes bound = known_bound(
                        estimate, (outside * q.outside[head + h] + (inside * q.inside[head + h] + q.least[head + h])) *
                                      1.000001f);
                    std::memcpy(bounds + static_cast<std::ptrdiff_t>(h) * bound_stride + start[v], &bound,
                                n * sizeof(float));
                }
            }
        }
    }
}

template <class Element>
using score_low_rank_function = void (*)(const low_rank_codes&, const Element*, const low_rank_queries&, std::size_t,
                                         std::size_t, std::size_t, float*, std::ptrdiff_t, float*,
                                         std::ptrdiff_t) noexcept;

template <class Element>
inline constexpr std::array<score_low_rank_function<Element>, head_tile> score_low_rank_of_heads = {
    score_low_rank<Element, 1>, score_low_rank<Element, 2>, score_low_rank<Element, 3>, score_low_rank<Element, 4>};

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Writes the logits that a low-rank sketch estimates, and their bounds unless `bounds` is null.
/// See low_rank_sketch::estimate(). Preconditions (unchecked): queries are as wide as the keys, logits and bounds
/// [queries.count, s.tokens], rows that do not overlap; step, outside and inside may be read up to a multiple of 16
/// tokens. Splits eight queries at a time on the stack of the caller (about 60 KiB) and reads the coefficients once for
/// them. No memory is allocated. A token's bits depend on its coefficients, its norms and the query alone. Throws
/// nothing.
inline void low_rank_estimate(const cpu& exec, const low_rank_codes& s, rows<float> queries, float scale,
                              matrix_view<float> logits, const matrix_view<float>* bounds) noexcept {
    if (s.tokens == 0) {
        return;
    }
    constexpr std::size_t at_once = 2048;  // tokens whose coefficients stay in the caches while the heads pass
    const std::size_t tasks = (s.tokens + at_once - 1) / at_once;
    for (std::size_t head = 0; head < queries.count; head += detail::rotated_heads) {
        const std::size_t heads = (std::min)(detail::rotated_heads, queries.count - head);
        detail::low_rank_queries split;
        detail::split_queries(s, queries, head, heads, scale, split);
        for_each_task(exec, tasks, [&](std::size_t task, std::size_t) {
            const std::size_t first = task * at_once;
            const std::size_t last = (std::min)(s.tokens, first + at_once);
            for (std::size_t h = 0; h < heads; h += detail::head_tile) {
                const std::size_t tile = (std::min)(detail::head_tile, heads - h);
                const auto row = static_cast<std::ptrdiff_t>(head + h);
                const auto score = [&](const auto* elements) {
                    using element = std::remove_cvref_t<decltype(*elements)>;
                    detail::score_low_rank_of_heads<element>[tile - 1](
                        s, elements, split, h / detail::head_tile, first, last, logits.data + row * logits.stride,
                        logits.stride, bounds ? bounds->data + row * bounds->stride : nullptr,
                        bounds ? bounds->stride : 0);
                };
                switch (s.format) {
                    case coefficient_format::float32:
                        score(s.singles);
                        break;
                    case coefficient_format::float16:
                        score(s.halves);
                        break;
                    case coefficient_format::int8:
                        score(s.words);
                        break;
                }
            }
        });
    }
}

}  // namespace verkv::inline v0
