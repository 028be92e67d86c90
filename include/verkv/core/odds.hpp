// From the odds that a token is not in the sample back to its probability.
#pragma once

#include "verkv/core/host_device.hpp"

namespace verkv::inline v0::detail {

/// Probability r = 1/(1 + o) as a float that is below 1 for o > 0. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE inline float probability_of(double odds) noexcept {
    constexpr float below_one = 1.0f - 0x1p-24f;
    return odds > 0 ? smaller(static_cast<float>(1 / (1 + odds)), below_one) : 1.0f;
}

/// r' of a token of these odds that a water-filling plan asks `wanted` for; 0 where that is not above r.
/// Where the certificate has m at kappa, and so r' = 1, a product by 1/kappa must not fall short of it.
/// Host and device.
[[nodiscard]] VERKV_HOST_DEVICE inline float raised_probability(float wanted, float odds) noexcept {
    if (!(wanted + wanted * odds > 1)) {
        return 0;
    }
    return larger(wanted > 1 - 0x1p-20f ? 1.0f : wanted, probability_of(static_cast<double>(odds)));
}

}  // namespace verkv::inline v0::detail
