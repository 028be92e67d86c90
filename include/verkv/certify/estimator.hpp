// The estimator, and the error it has.
#pragma once

#include <cmath>
#include <span>

#include "verkv/certify/bernstein.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"

namespace verkv::inline v0 {
namespace detail {

inline void check_probability(float r, std::size_t i) {
    check(r > 0 && r <= 1, "token ", i, " has inclusion probability ", r, "; it must lie in (0, 1]");
}

inline void check_shrinkage(float lambda, float r, std::size_t i) {
    check(lambda >= r && lambda <= 1, "token ", i, " has shrinkage ", lambda, "; it must lie in [r, 1] with r = ", r);
}

inline void check_mass(float mass, std::size_t i) {
    check(mass >= 0 && std::isfinite(mass), "token ", i, " has mass ", mass, "; it must be finite and not negative");
}

}  // namespace detail

/// Estimated sum of masses from a sample: sum over the sampled tokens of lambda_i m_i / r_i [VerKV Definition 2].
/// mass, r, lambda [n] (lambda empty: 1, the unbiased Horvitz-Thompson estimator); sample: indices of the tokens drawn,
/// those with r = 1 included, in any order. Preconditions (not checked): none is listed twice, none that was drawn is
/// missing. Masses, r and lambda are looked at where the sample lists them.
/// O(|sample|), sums in double: relative error |sample| 2^-53.
/// Throws invalid_argument for lengths that differ, an index out of range, a mass that is negative or not finite, r
/// outside (0, 1], lambda outside [r, 1].
[[nodiscard]] inline double estimate_sum(const cpu&, std::span<const float> mass, std::span<const float> r,
                                         std::span<const float> lambda, std::span<const token_index> sample) {
    detail::check(mass.size() == r.size() && (lambda.empty() || lambda.size() == r.size()), mass.size(), " masses, ",
                  r.size(), " probabilities and ", lambda.size(), " shrinkages");
    double total = 0;
    for (const token_index i : sample) {
        detail::check(i < mass.size(), "sampled token ", i, " of ", mass.size());
        detail::check_mass(mass[i], i);
        detail::check_probability(r[i], i);
        const float l = lambda.empty() ? 1.0f : lambda[i];
        detail::check_shrinkage(l, r[i], i);
        total += static_cast<double>(l) * static_cast<double>(mass[i]) / static_cast<double>(r[i]);
    }
    return total;
}

/// The unbiased estimate: estimate_sum() with lambda = 1 (Horvitz and Thompson 1952).
/// Shapes, cost, accuracy and errors as estimate_sum().
[[nodiscard]] inline double horvitz_thompson(const cpu& exec, std::span<const float> mass, std::span<const float> r,
                                             std::span<const token_index> sample) {
    return estimate_sum(exec, mass, r, {}, sample);
}

/// Mean squared error of estimate_sum(): (sum_L m(1-lambda))^2 + sum_L lambda^2 m^2 (1-r)/r [VerKV Theorem 1].
/// mass, r, lambda [n]. O(n), in double: relative error n 2^-53.
/// Throws invalid_argument for lengths that differ or values out of range.
[[nodiscard]] inline double mean_squared_error(const cpu&, std::span<const float> mass, std::span<const float> r,
                                               std::span<const float> lambda) {
    detail::check(mass.size() == r.size() && lambda.size() == r.size(), mass.size(), " masses, ", r.size(),
                  " probabilities and ", lambda.size(), " shrinkages");
    double bias = 0;
    double variance = 0;
    for (std::size_t i = 0; i < r.size(); ++i) {
        detail::check_mass(mass[i], i);
        detail::check_probability(r[i], i);
        detail::check_shrinkage(lambda[i], r[i], i);
        const double m = static_cast<double>(mass[i]);
        const double l = static_cast<double>(lambda[i]);
        const double p = static_cast<double>(r[i]);
        bias += m * (1 - l);
        variance += l * m * (l * m) * ((1 - p) / p);
    }
    return bias * bias + variance;
}

/// Moments of the tokens with r < 1, for bernstein_bound(). Shapes, cost, accuracy and errors as mean_squared_error().
[[nodiscard]] inline bernstein_moments moments(const cpu&, std::span<const float> mass, std::span<const float> r,
                                               std::span<const float> lambda) {
    detail::check(mass.size() == r.size() && lambda.size() == r.size(), mass.size(), " masses, ", r.size(),
                  " probabilities and ", lambda.size(), " shrinkages");
    bernstein_moments total;
    for (std::size_t i = 0; i < r.size(); ++i) {
        detail::check_mass(mass[i], i);
        detail::check_probability(r[i], i);
        detail::check_shrinkage(lambda[i], r[i], i);
        if (r[i] < 1) {
            const double p = static_cast<double>(r[i]);
            const double l = static_cast<double>(lambda[i]);
            total.add(static_cast<double>(mass[i]), (1 - p) / p, l, 1 - l);
        }
    }
    return total;
}

/// The certificate: relative error of estimate_sum() that is exceeded with probability at most delta, when lambda does
/// not depend on the sample [VerKV Lemma 1]. D is the sum of all masses. Shapes, cost and errors as
/// mean_squared_error(); invalid_argument, too, when D is not positive and some mass in L is.
[[nodiscard]] inline double certificate(const cpu& exec, std::span<const float> mass, std::span<const float> r,
                                        std::span<const float> lambda, tolerance t) {
    validate(t);
    const bernstein_moments m = moments(exec, mass, r, lambda);
    double total = 0;
    for (const float x : mass) {
        total += static_cast<double>(x);
    }
    const double bound = bernstein_bound(m, t.log_term());
    return bound == 0 ? 0 : bound / total;
}

}  // namespace verkv::inline v0
