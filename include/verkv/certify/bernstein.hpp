// The certificate of the paper: Bernstein's inequality on the three moments of an estimate's error.
#pragma once

#include <cmath>

#include "verkv/core/host_device.hpp"

namespace verkv::inline v0 {

/// What Bernstein's inequality needs to know of the tokens that are estimated, L. Mergeable: parts of a context add up.
/// With odds o = (1 - r)/r the paper's terms need no difference of near-equal numbers:
///     beta += m (1 - lambda),  V += lambda^2 m^2 o,  b = max(b, lambda m max(1, o))      [VerKV Lemma 1]
struct bernstein_moments {
    double bias = 0;      ///< beta(L)
    double variance = 0;  ///< V(L)
    double largest = 0;   ///< b(L)

    /// Adds a token of mass m, odds (1 - r)/r and shrinkage lambda; complement is 1 - lambda, which the caller may know
    /// more exactly than by subtraction.
    VERKV_HOST_DEVICE constexpr void add(double mass, double odds, double lambda, double complement) noexcept {
        bias += mass * complement;
        variance += lambda * mass * (lambda * mass) * odds;
        largest = larger(lambda * mass * larger(1.0, odds), largest);
    }

    VERKV_HOST_DEVICE constexpr bernstein_moments& operator+=(const bernstein_moments& other) noexcept {
        bias += other.bias;
        variance += other.variance;
        largest = larger(other.largest, largest);
        return *this;
    }

    friend bool operator==(const bernstein_moments&, const bernstein_moments&) = default;
};

/// Bound on the absolute error that holds with probability at least 1 - delta, l = ln(2/delta):
/// beta + b l/3 + sqrt((b l/3)^2 + 2 V l) [VerKV Lemma 1]. Divided by D it is the certificate. Grows with each moment.
/// In double; no cancellation, relative error a few 2^-53. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE inline double bernstein_bound(const bernstein_moments& m, double log_term) noexcept {
    const double x = m.largest * log_term / 3;
    return m.bias + x + std::sqrt(x * x + 2 * m.variance * log_term);
}

}  // namespace verkv::inline v0
