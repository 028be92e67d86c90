// Logarithms of exponential moments, of a token or of a bin of tokens, with two derivatives.
#pragma once

#include <cmath>

#include "verkv/core/host_device.hpp"

namespace verkv::inline v0::detail {

/// A function of theta at one point.
struct cumulant {
    double value = 0;
    double slope = 0;
    double curvature = 0;
};

/// count * ln E exp(theta X), X the law of mean zero on two points whose upper one is b and whose variance is s: of
/// all laws with X <= b and this variance it has the largest (Bennett 1962; Hoeffding 1963, Theorem 3). With
/// q = s/(b^2 + s) the mass of the upper point and L = b + s/b the distance,
///     ln E exp(theta X) = ln(1 + q (exp(theta L) - 1)) - theta L q.
/// b = m lambda odds, s = (m lambda)^2 odds is the law of a token itself.
struct two_point_term {
    double count;
    double largest;   ///< b
    double distance;  ///< L
    double upper;     ///< q
    double lower;     ///< 1 - q
    double reach;     ///< max(b, s/b)

    two_point_term() = default;
    /// Of `n` laws on b and -other; s = b * other.
    two_point_term(double n, double b, double other)
        : count(n),
          largest(b),
          distance(b + other),
          upper(other / distance),
          lower(b / distance),
          reach(larger(b, other)) {}

    /// No term cancels: relative error a few 2^-53 / min(1, theta L); theta L may be anything.
    void add_to(cumulant& sum, double theta) const {
        const double x = theta * distance;
        if (upper < 0.5 && x < 600) {
            const double e = std::expm1(x);
            const double g = 1 + upper * e;
            const double scale = count * largest * upper / g;
            sum.value += count * (std::log1p(upper * e) - x * upper);
            sum.slope += scale * e;
            sum.curvature += scale * distance * ((1 + e) / g);
        } else {
            // The same, with exp(theta L) taken out of everything.
            const double e = -std::expm1(-x);
            const double g = upper + lower * (1 - e);
            const double scale = count * largest * upper / g;
            sum.value += count * (theta * largest + (upper < 0.5 ? std::log(g) : std::log1p(-lower * e)));
            sum.slope += scale * e;
            sum.curvature += scale * distance * ((1 - e) / g);
        }
    }

    /// Coefficients of theta^2, theta^3, theta^4 of a polynomial that is no smaller while theta * reach <= 1/16, by
    /// exp(y) <= 1 + y + y^2/2 + y^3/6 + y^4 exp(1/16)/24.
    void add_to(double (&coefficient)[3]) const {
        const double other = distance * upper;
        const double variance = count * largest * other;
        coefficient[0] += variance / 2;
        coefficient[1] += variance * (largest - other) / 6;
        coefficient[2] += variance * (largest * largest - largest * other + other * other) * 0.04436;
    }
};

/// count * ln(1 + s (exp(theta b) - 1 - theta b)/b^2): bounds a vector of mean zero, norm at most b and mean square s
/// in the inequality of Pinelis (1994, Theorem 3.1).
struct norm_term {
    double count;
    double largest;  ///< b
    double share;    ///< s/b^2, at most 1
    double reach;

    norm_term() = default;
    /// Of `n` norms of at most b with mean square b * other.
    norm_term(double n, double b, double other) : count(n), largest(b), share(other / b), reach(b) {}

    void add_to(cumulant& sum, double theta) const {
        const double a = theta * largest;
        double value = 0, slope = 0, second = 0;  // of g, relative to g
        if (a < 600) {
            const double e = std::expm1(a);
            const double g = 1 + share * (e - a);
            value = std::log1p(share * (e - a));
            slope = share * e / g;
            second = share * (1 + e) / g;
        } else {
            const double e = std::exp(-a);
            const double g = share * (1 - (1 + a) * e) + e;
            value = a + std::log(g);
            slope = share * (1 - e) / g;
            second = share / g;
        }
        sum.value += count * value;
        sum.slope += count * largest * slope;
        sum.curvature += count * largest * largest * (second - slope * slope);
    }

    void add_to(double (&coefficient)[3]) const {
        const double variance = count * share * largest * largest;
        coefficient[0] += variance / 2;
        coefficient[1] += variance * largest / 6;
        coefficient[2] += variance * largest * largest * 0.04436;
    }
};

/// ln(1 + r (exp(a) - 1 - a) + (1-r) (exp(a') - 1 - a')), a = theta b, a' = theta c: the term of a vector that has norm
/// b with probability r and c otherwise, in the inequality of Pinelis.
struct two_norms_term {
    double r = 0;
    double rest = 0;  ///< 1 - r
    double b = 0;     ///< norm with probability r
    double c = 0;     ///< norm with probability 1 - r
    double reach = 0;

    void add_to(cumulant& sum, double theta) const {
        // All of it times exp(-shift), where it could overflow.
        const double shift = theta * reach < 600 ? 0 : theta * reach;
        const double scale = std::exp(-shift);
        const double above_b = excess(theta * b, shift, scale);
        const double above_c = excess(theta * c, shift, scale);
        const double e = r * above_b + rest * above_c;
        const double g = scale + e;
        const double slope =
            (r * b * minus_one(theta * b, shift, scale) + rest * c * minus_one(theta * c, shift, scale)) / g;
        const double second =
            (r * b * b * std::exp(theta * b - shift) + rest * c * c * std::exp(theta * c - shift)) / g;
        sum.value += shift > 0 ? shift + std::log(g) : std::log1p(e);
        sum.slope += slope;
        sum.curvature += second - slope * slope;
    }

    void add_to(double (&coefficient)[3]) const {
        const double square = r * b * b + rest * c * c;
        coefficient[0] += square / 2;
        coefficient[1] += (r * b * b * b + rest * c * c * c) / 6;
        coefficient[2] += (r * b * b * b * b + rest * c * c * c * c) * 0.04436;
    }

private:
    /// (exp(x) - 1) exp(-shift).
    static double minus_one(double x, double shift, double scale) {
        return x < 1 ? std::expm1(x) * scale : std::exp(x - shift) - scale;
    }
    /// (exp(x) - 1 - x) exp(-shift).
    static double excess(double x, double shift, double scale) {
        if (x < 1.0 / 64) {
            return x * x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x / 700)))) * scale;
        }
        return x < 1 ? (std::expm1(x) - x) * scale : std::exp(x - shift) - (1 + x) * scale;
    }
};

}  // namespace verkv::inline v0::detail
