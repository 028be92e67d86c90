// How far the levels of a plan are lowered by what the rows that were read say: steps of the check's grid.
#pragma once

#include <cmath>
#include <cstddef>

#include "verkv/core/host_device.hpp"

namespace verkv::inline v0::detail {

/// Steps for a head whose sample does not certify epsilon, before round `round` (from 1 on) [beyond §5b]:
/// floor(1.5 ln(observed/epsilon)/ln ratio), at least 1 + round/4 and at most 60; from round 7 on at least twice those
/// of the last time, `last_steps`, where these left the certificate what it was, `last_observed`.
/// In double. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE inline double steps_to_lower(double observed, double epsilon, double ratio,
                                                             std::size_t round, double last_steps,
                                                             double last_observed) noexcept {
    constexpr std::size_t patient_rounds = 6;
    constexpr double most = 60;
    const std::size_t fours = round / 4;  // the longer it takes, the farther
    const double least = 1.0 + static_cast<double>(fours);
    // The certificate falls with the level or with its square root: between the two.
    double steps = std::floor(1.5 * std::log(observed / epsilon) / std::log(ratio));
    steps = steps > least ? smaller(steps, most) : least;
    // Where rounds change nothing, what is missing is tokens that the sketch has far too low: the same steps again
    // would find them after the last round.
    if (round > patient_rounds && observed > 0.999 * last_observed) {
        steps = larger(steps, smaller(2 * last_steps, most));
    }
    return steps;
}

/// Steps for a plan whose V is `inflation` times what it thinks: floor(ln min(inflation, 16)/ln ratio). A few rows
/// decide on it: it is not followed far. NaN stays NaN. In double. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE inline double steps_of_inflation(double inflation, double ratio) noexcept {
    return std::floor(std::log(inflation > 16 ? 16.0 : inflation) / std::log(ratio));
}

}  // namespace verkv::inline v0::detail
