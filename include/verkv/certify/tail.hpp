// Tails: how a certificate turns what it knows of the tokens that are estimated into a bound on the error.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>

#include "verkv/certify/bernstein.hpp"
#include "verkv/core/plan.hpp"
#include "verkv/core/tolerance.hpp"

namespace verkv::inline v0 {

/// A tail inequality: a bound on the error that is exceeded with probability at most delta. Its summary holds what it
/// needs to know of the tokens of L, and merges: parts of a context add up. Nothing in it depends on who was drawn.
///
///     summary.add(mass, odds, lambda, complement)   // one token; odds = (1-r)/r > 0, complement = 1 - lambda
///     summary.add_block(count, variance, largest_lift, largest_mass, largest_term)   // `count` tokens with lambda =
///     1:
///                              // sum of m^2 odds; largest m odds, m and m max(1, odds), or anything above these
///     const bernstein_moments& summary.moments() const;   // beta, V, b
///     double bound(summary, delta, space) const;   // t with P(error > t) <= delta; NaN where that is not known
///     bool holds(summary, epsilon, delta, space) const;   // bound() < epsilon, decided sooner
template <class T>
concept tail = std::default_initializable<typename T::summary> && std::copyable<typename T::summary> &&
    requires(const T& t, typename T::summary s, const typename T::summary& other, double x, std::size_t count,
             error_space space) {
    s.add(x, x, x, x);
    s.add_block(count, x, x, x, x);
    s += other;
    { other.moments() } -> std::convertible_to<const bernstein_moments&>;
    { t.bound(other, x, space) } -> std::same_as<double>;
    { t.holds(other, x, x, space) } -> std::same_as<bool>;
};

/// Bernstein's inequality, the certificate of the paper [VerKV Lemma 1]. Its formula holds for vectors as it stands
/// (Pinelis 1994, Theorem 3.3).
struct bernstein_tail {
    class summary {
    public:
        VERKV_HOST_DEVICE constexpr void add(double mass, double odds, double lambda, double complement) noexcept {
            moments_.add(mass, odds, lambda, complement);
        }
        VERKV_HOST_DEVICE constexpr void add_block(std::size_t, double variance, double, double,
                                                   double largest_term) noexcept {
            moments_ += bernstein_moments{0, variance, largest_term};
        }
        VERKV_HOST_DEVICE constexpr summary& operator+=(const summary& other) noexcept {
            moments_ += other.moments_;
            return *this;
        }
        [[nodiscard]] VERKV_HOST_DEVICE constexpr const bernstein_moments& moments() const noexcept { return moments_; }

    private:
        bernstein_moments moments_;
    };

    /// bernstein_bound() with l = ln(2/delta). delta in (0, 1), not checked.
    [[nodiscard]] double bound(const summary& s, double delta, error_space) const noexcept {
        return bernstein_bound(s.moments(), tolerance{1, delta}.log_term());
    }

    /// Whether bound() is below epsilon; false for NaN.
    [[nodiscard]] bool holds(const summary& s, double epsilon, double delta, error_space space) const noexcept {
        return bound(s, delta, space) < epsilon;
    }
};

static_assert(tail<bernstein_tail>);

}  // namespace verkv::inline v0
