// How large one coordinate of a uniform point on a sphere may be.
#pragma once

#include <cmath>
#include <cstddef>
#include <numbers>

#include "verkv/core/version.hpp"

namespace verkv::inline v0::detail {

/// Regularised incomplete beta function I_x(a, b) at x = sin^2(angle) for half-integers a, b with one of them 1/2.
/// Continued fraction by Lentz's method (Numerical Recipes, 3rd ed., §6.4), on the side where it converges quickly:
/// x < (a + 1) / (a + b + 2). All terms in double.
[[nodiscard]] inline double beta_fraction(double a, double b, double x) noexcept {
    const auto away = [](double y) { return std::abs(y) < 1e-300 ? 1e-300 : y; };
    double c = 1;
    double d = 1 / away(1 - (a + b) * x / (a + 1));
    double fraction = d;
    for (int i = 1; i <= 1000; ++i) {
        const double m = i;
        const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
        d = 1 / away(1 + even * d);
        c = away(1 + even / c);
        fraction *= d * c;
        const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
        d = 1 / away(1 + odd * d);
        c = away(1 + odd / c);
        fraction *= d * c;
        if (std::abs(d * c - 1) < 1e-16) {
            break;
        }
    }
    return fraction;
}

/// P(|Z| > cos(angle)), Z one coordinate of a uniform point on the unit sphere of `dimensions` >= 2 dimensions.
/// 1 - Z^2 ~ Beta(a, 1/2) with a = (dimensions - 1) / 2. Precondition: 0 < angle < pi / 2.
[[nodiscard]] inline double sphere_tail(std::size_t dimensions, double angle) noexcept {
    const double a = static_cast<double>(dimensions - 1) / 2;
    // B(a, 1/2) from B(1/2, 1/2) = pi or B(1, 1/2) = 2.
    double beta = dimensions % 2 == 0 ? std::numbers::pi : 2.0;
    for (std::size_t twice = dimensions % 2 == 0 ? 1 : 2; twice + 1 < dimensions; twice += 2) {
        const double s = static_cast<double>(twice) / 2;
        beta *= s / (s + 0.5);
    }
    const double sine = std::sin(angle);
    const double cosine = std::cos(angle);
    const double x = sine * sine;
    const double front = std::exp(2 * a * std::log(sine)) * cosine / beta;
    if (x < (a + 1) / (a + 2.5)) {
        return front * beta_fraction(a, 0.5, x) / a;
    }
    return 1 - front * beta_fraction(0.5, a, cosine * cosine) / 0.5;
}

/// The z with P(|Z| > z) = p, Z one coordinate of a uniform point on the unit sphere of `dimensions` dimensions.
/// On the circle z = cos(pi p / 2), on the sphere of three 1 - p; 1 in one dimension, where |Z| = 1, and for p = 0.
/// Bisection of the angle; the larger end, so that the tail is no more than p up to rounding (1e-12 of z).
/// Preconditions: dimensions >= 1, 0 <= p < 1.
[[nodiscard]] inline double sphere_quantile(std::size_t dimensions, double p) noexcept {
    if (dimensions == 1 || !(p > 0)) {
        return 1;
    }
    double low = 0;
    double high = std::numbers::pi / 2;
    for (int i = 0; i < 100; ++i) {
        const double middle = low + (high - low) / 2;
        if (!(middle > low && middle < high)) {
            break;
        }
        (sphere_tail(dimensions, middle) <= p ? low : high) = middle;
    }
    return std::cos(low);
}

}  // namespace verkv::inline v0::detail
