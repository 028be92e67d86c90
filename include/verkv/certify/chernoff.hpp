// Chernoff bounds on what the terms of an estimate really are: laws on two points.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "verkv/certify/bernstein.hpp"
#include "verkv/certify/detail/chernoff_search.hpp"
#include "verkv/certify/detail/cumulants.hpp"
#include "verkv/certify/detail/log_bins.hpp"
#include "verkv/certify/estimator.hpp"
#include "verkv/certify/tail.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/cpu/executor.hpp"

namespace verkv::inline v0 {
namespace detail {

/// First guess at theta for a deviation t: that of Bennett's inequality.
[[nodiscard]] inline double bennett_exponent(double t, double variance, double largest) {
    return std::log1p(largest * t / variance) / largest;
}

/// Calls search(upper, lower) on the two sides of a scalar, S >= t and S <= -t. The bias counts against the lower one
/// alone.
template <class Up, class Down, class Search>
[[nodiscard]] auto with_scalar_sides(const bernstein_moments& m, double t, Up&& up, Down&& down, Search&& search) {
    const double start = bennett_exponent(t, m.variance, m.largest);
    exponent upper(up, -m.bias, 0.0, start, true);
    exponent lower(down, m.bias, 0.0, start, true);
    upper.aim(t);
    lower.aim(t);
    return search(upper, lower);
}

/// Calls search(side) on the one side of vectors, ||S|| >= t.
template <class Norm, class Search>
[[nodiscard]] auto with_norm_side(const bernstein_moments& m, double t, Norm&& norm, Search&& search) {
    exponent side(norm, m.bias, std::log(2.0), bennett_exponent(t, m.variance, m.largest), false);
    side.aim(t);
    return search(side);
}

[[nodiscard]] inline bool finite(const bernstein_moments& m) {
    return std::isfinite(m.bias) && std::isfinite(m.variance) && std::isfinite(m.largest);
}

/// Token by token, in bins of the larger of its two deviations; and blocks of tokens.
struct deviation_bins {
    log_bins<1, 4> rising;                         ///< odds >= 1, by the deviation upwards, lambda m odds
    log_bins<1, 4> falling;                        ///< odds < 1, by the deviation downwards, lambda m
    log_bins<1> block_up, block_down, block_norm;  ///< by the largest of each in a block

    constexpr deviation_bins& operator+=(const deviation_bins& other) noexcept {
        rising += other.rising;
        falling += other.falling;
        block_up += other.block_up;
        block_down += other.block_down;
        block_norm += other.block_norm;
        return *this;
    }
};

/// Terms that bound a bin in its own direction: the sum is concave in the variances and grows with the deviation.
template <class Term>
[[nodiscard]] Term along(const log_bin& b) {
    const double largest = static_cast<double>(b.largest);
    return Term(b.tokens(), largest, b.variance / (b.tokens() * largest));
}

/// A term that bounds a bin in the direction in which its tokens deviate less. There a token's term over its variance
/// grows with the variance, and falls as the deviation in the other direction grows.
[[nodiscard]] inline two_point_term against(const log_bin& b) {
    const double largest = static_cast<double>(b.largest);
    const double smallest = static_cast<double>(b.smallest);
    const double ratio = static_cast<double>(b.ratio);
    if (!(largest <= 2 * smallest)) {  // the first and the last bin have no limit
        return {b.tokens(), ratio * largest, b.variance / (b.tokens() * ratio * largest)};
    }
    const double variance = ratio * largest * largest;
    return {b.variance / variance, variance / smallest, smallest};
}

enum class direction { up, down, norm };

/// Terms of bins in one direction, for folded_sum.
template <direction Direction>
struct bin_terms {
    using term = std::conditional_t<Direction == direction::norm, norm_term, two_point_term>;
    static constexpr std::size_t most = 2 * log_bins<1, 4>::size + log_bins<1>::size;

    const deviation_bins* bins;

    template <class Use>
    void for_each(Use&& use) const {
        const auto by_along = [&](const log_bin& b) { use(along<term>(b)); };
        if constexpr (Direction == direction::norm) {
            bins->rising.for_each(by_along);
            bins->falling.for_each(by_along);
            bins->block_norm.for_each(by_along);
        } else {
            const auto by_against = [&](const log_bin& b) { use(against(b)); };
            if constexpr (Direction == direction::up) {
                bins->rising.for_each(by_along);
                bins->falling.for_each(by_against);
                bins->block_up.for_each(by_along);
            } else {
                bins->rising.for_each(by_against);
                bins->falling.for_each(by_along);
                bins->block_down.for_each(by_along);
            }
        }
    }
};

/// Terms one by one: nothing is rounded up but what is below 2^-12 of a unit in the exponent, by less than 1e-8.
template <class Term>
struct term_list {
    std::vector<Term> terms;
    double sum_of_largest = 0;

    [[nodiscard]] double most() const { return sum_of_largest; }

    [[nodiscard]] cumulant operator()(double theta) const {
        cumulant sum;
        double low[3]{};
        for (const Term& t : terms) {
            if (theta * t.reach < 0x1p-12) {
                t.add_to(low);
            } else {
                t.add_to(sum, theta);
            }
        }
        sum.value += theta * theta * (low[0] + theta * (low[1] + theta * low[2]));
        sum.slope += theta * (2 * low[0] + theta * (3 * low[1] + theta * 4 * low[2]));
        sum.curvature += 2 * low[0] + theta * (6 * low[1] + theta * 12 * low[2]);
        return sum;
    }
};

}  // namespace detail

/// Chernoff's inequality on the two-point laws of the terms, in O(bins). With c = lambda m/r, beta = sum m (1-lambda):
///     P(S >= t)  <= exp(-theta (t + beta) + sum psi(theta)),    psi(theta) = ln(1 - r + r exp(theta c)) - theta c r
///     P(S <= -t) <= exp(-theta (t - beta) + sum psi(-theta))
/// for scalars, the two adding up to delta in whatever shares are best; for vectors (Pinelis 1994, Theorem 3.1)
///     P(||S|| >= t) <= 2 exp(-theta (t - beta) + sum ln(1 + r (exp(a) - 1 - a) + (1-r) (exp(a') - 1 - a')))
/// with a = theta c (1-r), a' = theta c r. Tokens are held in logarithmic bins of the larger of their two deviations.
/// In that direction a bin of N tokens with variance V counts as N tokens of variance V/N that all deviate as far as
/// the farthest of them (Hoeffding 1963, Theorem 3: the term is concave in the variance); in the other one each counts
/// by its share of V (there the term is convex). Never looser than bernstein_tail; some 3% looser than token by token
/// on real decisions, 8% at worst, more where a bin's probabilities span decades.
struct chernoff_tail {
    /// The moments of Bernstein's inequality, and bins by deviation, of tokens and of blocks. 17 KiB, trivially
    /// copyable; merging walks the bins in use. Masses relative to R: bins resolve deviations from 2^-28 to 2^4. Others
    /// are counted as larger than they are. add_block() knows less than as many add(): a block of which one token is
    /// far above the others is better added token by token.
    class summary {
    public:
        constexpr void add(double mass, double odds, double lambda, double complement) noexcept {
            moments_.add(mass, odds, lambda, complement);
            const double fall = lambda * mass;
            if (fall == 0) {
                return;
            }
            const double rise = fall * odds;
            const double variance = larger(fall * rise, tiny);
            if (odds < 1) {
                bins_.falling.add(1, variance, fall, odds);
            } else {
                bins_.rising.add(1, variance, rise, 1 / odds);
            }
        }
        constexpr void add_block(std::size_t count, double variance, double largest_lift, double largest_mass,
                                 double largest_term) noexcept {
            moments_ += bernstein_moments{0, variance, largest_term};
            if (count == 0 || largest_term == 0) {
                return;
            }
            constexpr std::uint32_t most = (std::numeric_limits<std::uint32_t>::max)();
            const std::uint32_t n = count < most ? static_cast<std::uint32_t>(count) : most;
            variance = larger(variance, tiny);
            bins_.block_up.add(n, variance, largest_lift, 1);
            bins_.block_down.add(n, variance, largest_mass, 1);
            bins_.block_norm.add(n, variance, largest_term, 1);
        }
        constexpr summary& operator+=(const summary& other) noexcept {
            moments_ += other.moments_;
            bins_ += other.bins_;
            return *this;
        }
        [[nodiscard]] constexpr const bernstein_moments& moments() const noexcept { return moments_; }

    private:
        friend chernoff_tail;

        static constexpr double tiny = (std::numeric_limits<double>::min)();

        bernstein_moments moments_;
        detail::deviation_bins bins_;
    };

private:
    template <class Search>
    static auto search(const summary& s, double t, error_space space, const Search& by) {
        using detail::bin_terms, detail::direction, detail::folded_sum;
        if (space == error_space::vector) {
            const bin_terms<direction::norm> norm{&s.bins_};
            return detail::with_norm_side(s.moments(), t, folded_sum(norm), by);
        }
        const bin_terms<direction::up> up{&s.bins_};
        const bin_terms<direction::down> down{&s.bins_};
        return detail::with_scalar_sides(s.moments(), t, folded_sum(up), folded_sum(down), by);
    }

public:
    /// Smallest error that is proven to be exceeded with probability at most delta, to a relative 1e-3 from above; at
    /// most bernstein_bound(). O(bins) times a few steps; no allocation; in double. NaN where a moment is not finite.
    /// delta in (0, 1), not checked.
    [[nodiscard]] double bound(const summary& s, double delta, error_space space) const noexcept {
        const bernstein_moments& m = s.moments();
        if (!detail::finite(m)) {
            return std::numeric_limits<double>::quiet_NaN();
        }
        const double bernstein = bernstein_bound(m, tolerance{1, delta}.log_term());
        if (!(m.variance > 0) || !(bernstein > m.bias)) {
            return bernstein;
        }
        return search(s, bernstein, space,
                      [&](auto&... sides) { return detail::sides_bound(bernstein, delta, sides...); });
    }

    /// Whether bound() is below epsilon, mostly after one or two values of theta; false where a moment is not finite.
    /// May say no where bound() is within a relative 1e-3 below epsilon; for vectors, whose psi is not quite convex,
    /// within a tenth where few tokens make up the error.
    [[nodiscard]] bool holds(const summary& s, double epsilon, double delta, error_space space) const noexcept {
        const bernstein_moments& m = s.moments();
        if (!detail::finite(m) || !(epsilon > m.bias)) {
            return false;
        }
        if (bernstein_bound(m, tolerance{1, delta}.log_term()) < epsilon) {
            return true;
        }
        if (!(m.variance > 0)) {
            return false;
        }
        return search(s, epsilon, space, [&](auto&... sides) { return detail::sides_hold(delta, sides...); });
    }
};

static_assert(tail<chernoff_tail>);

/// The certificate() of Chernoff's inequality: relative error of estimate_sum() that is exceeded with probability at
/// most delta, when lambda does not depend on the sample. Tokens one by one, not in bins; relative to the sum of all
/// masses. For error_space::vector, mass bounds the norms of vectors.
/// mass, r, lambda [n]. O(n) for each of some ten values of theta; allocates; in double, to a relative 1e-3 from above.
/// Never above certificate(). Throws what certificate() throws.
[[nodiscard]] inline double chernoff_certificate(const cpu& exec, std::span<const float> mass, std::span<const float> r,
                                                 std::span<const float> lambda, tolerance t,
                                                 error_space space = error_space::scalar) {
    const double bernstein = certificate(exec, mass, r, lambda, t);
    const bernstein_moments m = moments(exec, mass, r, lambda);
    if (!detail::finite(m) || !(m.variance > 0)) {
        return bernstein;
    }
    detail::term_list<detail::two_point_term> up, down;
    detail::term_list<detail::two_norms_term> norm;
    double total = 0;
    for (std::size_t i = 0; i < r.size(); ++i) {
        total += static_cast<double>(mass[i]);
        const double p = static_cast<double>(r[i]);
        const double fall = static_cast<double>(lambda[i]) * static_cast<double>(mass[i]);
        const double odds = (1 - p) / p;
        const double rise = fall * odds;
        if (!(rise > 0)) {
            continue;
        }
        if (space == error_space::vector) {
            norm.terms.push_back({p, 1 - p, rise, fall, larger(rise, fall)});
            norm.sum_of_largest += larger(rise, fall);
        } else {
            up.terms.emplace_back(1.0, rise, fall);
            up.sum_of_largest += rise;
            down.terms.emplace_back(1.0, fall, rise);
            down.sum_of_largest += fall;
        }
    }
    const double start = bernstein_bound(m, t.log_term());
    const auto search = [&](auto&... sides) { return detail::sides_bound(start, t.delta, sides...); };
    const double bound = space == error_space::vector ? detail::with_norm_side(m, start, norm, search)
                                                      : detail::with_scalar_sides(m, start, up, down, search);
    return smaller(bound / total, bernstein);
}

}  // namespace verkv::inline v0
