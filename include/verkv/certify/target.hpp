// Targets: what a certificate speaks about.
#pragma once

#include <cmath>
#include <span>

#include "verkv/core/error.hpp"
#include "verkv/core/plan.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/cpu/value_masses.hpp"

namespace verkv::inline v0 {

/// The softmax denominator: mass w_i, measured against D [VerKV Lemma 1].
struct denominator {
    [[nodiscard]] masses_view masses(std::span<const float> weight, std::span<const float> odds, double total) const {
        return {weight, odds, total, error_space::scalar, total};
    }
};

/// How an output target bounds ||v_i - o||, of which only R_i is known.
enum class radius_rule {
    estimated,  ///< sqrt(R_i^2 + ||o - c||^2): right where v_i - c and o - c are orthogonal; a check has to follow
    certain,    ///< R_i + sum_j p_j R_j >= ||v_i - o||, p the softmax of the weights: never too small, looks at no draw
};

/// The attention output: ||o^ - o|| [beyond §3]. o^ - o = (1/D^) sum_L (lambda Z/r - 1) w_i (v_i - o), so masses
/// w_i rho_i with rho_i >= ||v_i - o|| bound it in any dimension: with the bound t on the sum, ||o^ - o|| <= t/D^. So
/// that D^ cannot be far below D unnoticed, vectors have one more coordinate, a length s: masses are w_i sqrt(rho_i^2 +
/// s^2), and t bounds s |D^ - D| as well.
/// Measured against a scale of the caller's, s = value_scale: t <= epsilon/(1 + epsilon) D s implies ||o^ - o|| <=
/// epsilon s. Or against ||o|| itself, s some half of it: t <= epsilon/(1 + epsilon) D^ ||o^|| implies ||o^ - o|| <=
/// epsilon ||o||. A plan goes by D and ||o|| as they are estimated before the fetch; what the sample says after it, see
/// sample_check.
struct output {
    radius_rule radius = radius_rule::estimated;
    double value_scale = 0;  ///< > 0: errors are measured against it; 0: against ||o||

    /// Turns the weights into masses, in place. O(n), 8 bytes a token read; in float.
    [[nodiscard]] masses_view masses(const cpu&, std::span<float> weight, std::span<const float> odds, double total,
                                     const value_facts& v, tolerance t) const {
        const double scale = certain() ? value_scale : detail::denominator_share * limit(t, v.norm);
        const double mass =
            radius == radius_rule::certain
                ? detail::weigh_by_sum(weight, v.radius, v.unit,
                                       detail::weighted_sum(weight, v.radius, v.unit) / (total > 0 ? total : 1),
                                       scale * v.unit)
                : detail::weigh_by_distance(weight, v.radius, v.unit, std::hypot(v.distance, scale) * v.unit);
        return {weight, odds, total * (limit(t, v.norm) * v.unit), error_space::vector, mass};
    }

    /// Whether masses and reference guess nothing: a plan then needs no check.
    [[nodiscard]] bool certain() const { return radius == radius_rule::certain && value_scale > 0; }

    /// What t/D^ may be for the promise to hold: epsilon times this is the largest error allowed.
    [[nodiscard]] double limit(tolerance t, double norm) const {
        return (value_scale > 0 ? value_scale : norm) / (1 + t.epsilon);
    }
};

/// Checks a target. Throws invalid_argument for a value_scale that is negative, not finite or beyond a float, and for a
/// rule that there is not.
inline void validate(const output& target) {
    detail::check(target.radius == radius_rule::estimated || target.radius == radius_rule::certain, "radius_rule is ",
                  static_cast<int>(target.radius));
    detail::check(target.value_scale == 0 || (target.value_scale >= 0x1p-120 && target.value_scale <= 0x1p120),
                  "value_scale is ", target.value_scale, "; it must be 0 or lie in [2^-120, 2^120]");
}

}  // namespace verkv::inline v0
