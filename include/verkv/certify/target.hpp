// Targets: what a certificate speaks about.
#pragma once

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
/// w_i rho_i with rho_i >= ||v_i - o|| bound it in any dimension: with the bound t on the sum, ||o^ - o|| <= t/D^.
/// Measured against ||o|| itself: t <= epsilon/(1 + epsilon) D^ ||o^|| implies ||o^ - o|| <= epsilon ||o||; or against
/// a scale of the caller's: ||o^ - o|| <= epsilon value_scale. A plan goes by D and ||o|| as they are estimated before
/// the fetch; what the sample says after it, see sample_check.
struct output {
    radius_rule radius = radius_rule::estimated;
    double value_scale = 0;  ///< > 0: errors are measured against it; 0: against ||o||

    /// Turns the weights into masses, in place. O(n), 8 bytes a token read; in float.
    [[nodiscard]] masses_view masses(const cpu&, std::span<float> weight, std::span<const float> odds, double total,
                                     const value_facts& v, tolerance t) const {
        const double mass = radius == radius_rule::certain
                                ? detail::weigh_by_sum(weight, v.radius,
                                                       detail::weighted_sum(weight, v.radius) / (total > 0 ? total : 1))
                                : detail::weigh_by_distance(weight, v.radius, v.distance);
        // An output of 0 leaves no room at all: everything is fetched.
        return {weight, odds, larger(total * limit(t, v.norm), 0x1p-100), error_space::vector, mass};
    }

    /// Whether masses and reference guess nothing: a plan then needs no check.
    [[nodiscard]] bool certain() const { return radius == radius_rule::certain && value_scale > 0; }

    /// What t/D^ may be for the promise to hold: epsilon times this is the largest error allowed.
    [[nodiscard]] double limit(tolerance t, double norm) const {
        return value_scale > 0 ? value_scale : norm / (1 + t.epsilon);
    }
};

}  // namespace verkv::inline v0
