// Uniform quantisation of a channel, float by float as the CPU's quantise_group() does it with vectors.
#pragma once

#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/storage.hpp"

namespace verkv::inline v0::gpu::detail {

/// a b, rounded: never fused with what comes after it on a device.
[[nodiscard]] VERKV_HOST_DEVICE inline float rounded_product(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

/// Zero and step of a channel as they are stored.
struct quantiser {
    half zero;
    half step;

    /// Of values between low and high; finite: none is infinite or NaN.
    [[nodiscard]] VERKV_HOST_DEVICE static quantiser of_range(float low, float high, bool finite, unsigned bits) {
        constexpr double half_max = 65504;
        const double range = finite ? static_cast<double>(high) - static_cast<double>(low) + 0.0 : 0;
        const double step = smaller(range / static_cast<double>((1u << bits) - 1), half_max);
        // "+ 0": a zero of either sign is +0, for which one is the smallest depends on the order.
        return {finite ? from_float<half>(larger(smaller(low, 65504.0f), -65504.0f) + 0.0f) : half{0x7e00u},
                from_float<half>(static_cast<float>(step))};
    }

    /// 1/step, or 0 where all codes are 0.
    [[nodiscard]] VERKV_HOST_DEVICE float inverse() const {
        const float stored = to_float(step);
        return stored > 0 ? 1.0f / stored : 0.0f;
    }
};

/// round((x - zero)/step) within 0 ... 2^bits - 1.
[[nodiscard]] VERKV_HOST_DEVICE inline std::uint32_t code_of(float x, float zero, float inverse, unsigned bits) {
    if (inverse == 0) {
        return 0;
    }
    const auto levels = static_cast<float>((1u << bits) - 1);
    const float ratio = rounded_product(x - zero, inverse) + 0.5f;
    const float above = ratio > 0.0f ? ratio : 0.0f;
    return static_cast<std::uint32_t>(above < levels ? above : levels);
}

}  // namespace verkv::inline v0::gpu::detail
