// How many uniform draws the central limit theorem asks for.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "verkv/baseline/detail/normal_quantile.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/tolerance.hpp"

namespace verkv::inline v0 {

/// A sum that is estimated from b uniform draws of its m terms, as far as the number of draws depends on it.
/// The estimate's error is normal, with standard deviation spread / sqrt(b), for b large.
struct sampled_sum {
    double spread = 0;  ///< m sqrt(Tr Sigma), Sigma the covariance of the terms
    double size = 0;    ///< norm of the whole sum, with what is known of it exactly: errors are relative to it
};

/// Draws that keep a sum's relative error within epsilon with probability 1 - delta:
/// b = (Phi^-1(1 - delta/2) spread / (epsilon size))^2 (Desai et al. 2025, arXiv 2510.05688, sum lemma). Not rounded; 0
/// where nothing varies, infinity for a sum of size 0 that does.
/// For vectors it is a bound for delta <= 0.215: of all normal vectors with one Tr Sigma, those on a line are then the
/// likeliest to be that long (Szekely and Bakirov 2003). Asymptotic: finite samples of skewed terms fail more often.
/// Throws invalid_argument for a tolerance out of range.
[[nodiscard]] inline double clt_draws(const sampled_sum& s, tolerance t) {
    validate(t);
    if (s.spread == 0) {
        return 0;
    }
    const double root = detail::normal_two_sided_quantile(t.delta) * s.spread / (t.epsilon * s.size);
    return root * root;
}

/// How errors of numerator and denominator become one of the output N/D. With relative errors e1 and e2 of them:
enum class quotient_rule {
    lemma,  ///< 2 (e1 + e2), for e2 < 1/2: Lemma 4.2 of the paper
    sharp,  ///< (e1 + e2) / (1 - e2): ||N^/D^ - N/D|| <= (||N^ - N|| + ||N/D|| |D^ - D|) / D^, and D^ >= (1 - e2) D
};

/// The numerator's shares of the error and of the failure probability, both in (0, 1); the denominator has the rest.
struct quotient_shares {
    double error = 0.5;
    double failure = 0.5;
};

/// Tolerances of numerator and denominator that together keep one of the output, and the draws that keep both.
struct quotient_budget {
    tolerance numerator;
    tolerance denominator;
    double draws = 0;
};

/// Splits a tolerance of the output between numerator and denominator, b = max of what the two ask for.
/// By the given shares, or so that b is least (Theorem 4.3 of the paper): both then ask for the same b, so with A, B
/// their spread / size and q(delta) = Phi^-1(1 - delta/2), sqrt(b) = (q(d1) A + c q(delta - d1) B) / e, where
/// c = 1, e = epsilon/2 for the lemma and c = 1 + epsilon, e = epsilon for the sharp rule; that is convex in d1, and
/// the root of its derivative is found by bisection to a relative 2^-50 of delta. A part without spread gets nothing.
/// Throws invalid_argument for a tolerance or shares out of range, and for an epsilon of 1 or more with the lemma.
[[nodiscard]] inline quotient_budget split_quotient(const sampled_sum& numerator, const sampled_sum& denominator,
                                                    tolerance t, quotient_rule rule,
                                                    std::optional<quotient_shares> shares = {}) {
    validate(t);
    detail::check(rule == quotient_rule::sharp || t.epsilon < 1, "epsilon is ", t.epsilon,
                  "; the lemma holds below 1, where the denominator's share is below 1/2");
    const double factor = rule == quotient_rule::lemma ? 1 : 1 + t.epsilon;
    const double error = rule == quotient_rule::lemma ? t.epsilon / 2 : t.epsilon;
    quotient_budget found;
    if (shares) {
        detail::check(shares->error > 0 && shares->error < 1 && shares->failure > 0 && shares->failure < 1,
                      "the numerator's shares are ", shares->error, " of the error and ", shares->failure,
                      " of the failures; both must lie in (0, 1)");
        found.numerator = {shares->error * error, shares->failure * t.delta};
        found.denominator = {(1 - shares->error) * error / factor, (1 - shares->failure) * t.delta};
        found.draws = (std::max)(clt_draws(numerator, found.numerator), clt_draws(denominator, found.denominator));
        return found;
    }
    const double a = numerator.spread == 0 ? 0 : numerator.spread / numerator.size;
    const double b = denominator.spread == 0 ? 0 : factor * denominator.spread / denominator.size;
    if (!(a + b < std::numeric_limits<double>::infinity()) || a + b == 0) {
        found.draws = a + b;
        found.numerator = found.denominator = {error / 2, t.delta / 2};
        return found;
    }
    // The derivative's sign: a / phi(q(d1)) falls with d1, b / phi(q(delta - d1)) grows.
    double low = 0;
    double high = t.delta;
    for (int step = 0; step < 50; ++step) {
        const double middle = low + (high - low) / 2;
        const double up = a * detail::normal_density(detail::normal_two_sided_quantile(t.delta - middle));
        const double down = b * detail::normal_density(detail::normal_two_sided_quantile(middle));
        (up > down ? low : high) = middle;
    }
    const double least = t.delta * 0x1p-50;
    const double first = (std::clamp)(low + (high - low) / 2, least, t.delta - least);
    const double qa = a == 0 ? 0 : a * detail::normal_two_sided_quantile(first);
    const double qb = b == 0 ? 0 : b * detail::normal_two_sided_quantile(t.delta - first);
    const double root = (qa + qb) / error;
    found.draws = root * root;
    found.numerator = {qa / root, first};
    found.denominator = {qb / root / factor, t.delta - first};
    return found;
}

}  // namespace verkv::inline v0
