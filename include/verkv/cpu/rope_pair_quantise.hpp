// Quantises a group of tokens of the RoPE-pair sketch on the CPU.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "verkv/core/storage.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/rope_pair_codes.hpp"

namespace verkv::inline v0 {
namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

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
        zeros[c] = finite ? from_float<half>(larger(smaller(zero, 65504.0f), -65504.0f) + 0.0f) : half{0x7e00u};
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

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail
}  // namespace verkv::inline v0
