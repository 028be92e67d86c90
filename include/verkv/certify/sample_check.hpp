// The certificate that a sample makes after the fetch, by itself.
#pragma once

#include "verkv/certify/bernstein.hpp"
#include "verkv/core/host_device.hpp"

namespace verkv::inline v0 {

/// Difference estimate of V: V of all tokens as it was planned, corrected by what the sample says of the plan's error.
/// observed: sum over the sample of x^2 (1-r')/r'^2 with exact masses x; estimated: the same with planned masses;
/// planned: V of all tokens by planned masses. Unbiased as `observed` is, and the steadier the better the sketch; never
/// below half of `observed`. In double. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE constexpr double difference_estimate(double planned, double observed,
                                                                     double estimated) noexcept {
    return larger(planned + (observed - estimated), 0.5 * observed);
}

/// The relative error that a sample certifies: bernstein_bound() / room; 0 where nothing is estimated, infinity where
/// the sample weighs nothing, and says nothing. For the denominator room is D^/(1 + epsilon): t < epsilon D^/(1 +
/// epsilon) implies an error below epsilon D, as D >= D^ - t. In double. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE inline double observed_certificate(const bernstein_moments& m, double denominator,
                                                                   double room, double log_term) noexcept {
    if (!(denominator > 0)) {
        return __builtin_huge_val();
    }
    const double bound = bernstein_bound(m, log_term);
    return bound == 0 ? 0.0 : bound / room;
}

}  // namespace verkv::inline v0
