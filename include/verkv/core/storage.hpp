// Element types of stored rows. Everything is computed in float (or wider); these are only how rows lie in memory.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "verkv/core/host_device.hpp"

namespace verkv::inline v0 {
namespace detail {

template <class T>
concept signed_number = std::floating_point<T> || std::signed_integral<T>;

}  // namespace detail

/// IEEE binary16 as stored: sixteen bits and no arithmetic. Any engine's own 16-bit type has the same layout.
struct half {
    std::uint16_t bits;

    half() = default;
    VERKV_HOST_DEVICE constexpr explicit half(std::uint16_t b) noexcept : bits(b) {}
    /// Not from a number: from_float<half>(x).
    template <detail::signed_number T>
    half(T) = delete;

    friend bool operator==(half, half) = default;
};

/// bfloat16 as stored: the upper sixteen bits of a float.
struct bfloat16 {
    std::uint16_t bits;

    bfloat16() = default;
    VERKV_HOST_DEVICE constexpr explicit bfloat16(std::uint16_t b) noexcept : bits(b) {}
    /// Not from a number: from_float<bfloat16>(x).
    template <detail::signed_number T>
    bfloat16(T) = delete;

    friend bool operator==(bfloat16, bfloat16) = default;
};

/// Element types that rows can have.
template <class T>
concept storage = std::same_as<T, float> || std::same_as<T, half> || std::same_as<T, bfloat16>;

/// Value of a stored element as a float. Exact; NaN stays NaN. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE constexpr float to_float(float x) noexcept {
    return x;
}

/// Value of a stored element as a float. Exact; NaN stays NaN. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE constexpr float to_float(bfloat16 x) noexcept {
    return bits_as<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

/// Value of a stored element as a float. Exact, subnormals included; NaN stays NaN. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE constexpr float to_float(half x) noexcept {
#if defined(__CUDA_ARCH__)
    if (!__builtin_is_constant_evaluated()) {  // one instruction, the same value
        float converted = 0;
        asm("cvt.f32.f16 %0, %1;" : "=f"(converted) : "h"(x.bits));
        return converted;
    }
#endif
    const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
    const std::uint32_t rest = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
    if (rest >= (0x7c00u << 13)) {
        return bits_as<float>(sign | rest | 0x7f800000u);
    }
    // The exponent bias differs by 112: scaling by 2^112 also normalises subnormal halves.
    const float magnitude = bits_as<float>(rest) * 0x1p112f;
    return bits_as<float>(sign | bits_as<std::uint32_t>(magnitude));
}

/// Nearest stored element, ties to even; overflow gives infinity, NaN stays NaN. Host and device.
template <storage T>
[[nodiscard]] VERKV_HOST_DEVICE constexpr T from_float(float x) noexcept {
    if constexpr (std::same_as<T, float>) {
        return x;
    } else {
        const std::uint32_t word = bits_as<std::uint32_t>(x);
        const std::uint32_t magnitude = word & 0x7fffffffu;
        if constexpr (std::same_as<T, bfloat16>) {
            if (magnitude > 0x7f800000u) {
                return bfloat16{static_cast<std::uint16_t>((word >> 16) | 0x40u)};
            }
            return bfloat16{static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16)};
        } else {
            const std::uint32_t sign = (word >> 16) & 0x8000u;
            if (magnitude > 0x7f800000u) {
                return half{static_cast<std::uint16_t>(sign | 0x7e00u)};
            }
            if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
                return half{static_cast<std::uint16_t>(sign | 0x7c00u)};
            }
            if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal half is a multiple of 2^-24
                const float ulps = bits_as<float>(magnitude) * 0x1p24f;
                const float rounded = (ulps + 0x1p23f) - 0x1p23f;
                return half{static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(rounded))};
            }
            const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
            return half{static_cast<std::uint16_t>(sign | ((rounded - (112u << 23)) >> 13))};
        }
    }
}

/// Unit roundoff of a stored element: half the distance from 1 to the next one.
template <storage T>
inline constexpr double unit_roundoff = std::same_as<T, float>  ? 0x1p-24
                                        : std::same_as<T, half> ? 0x1p-11
                                                                : 0x1p-8;

}  // namespace verkv::inline v0
