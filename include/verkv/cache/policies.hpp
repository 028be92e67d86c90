// How a step goes about a plan: checks, uniforms, bounds.
#pragma once

#include <cstddef>

#include "verkv/core/error.hpp"

namespace verkv::inline v0 {

/// Check from the sample [beyond §5b]. After the fetch the sample has exact logits and known r': from them D^, V^, b^
/// and, for an output target, o^. While the certificate that they make is not below epsilon, the levels of the heads
/// that fail are lowered, the rows this adds are fetched, and the sample is looked at again; after the last round
/// everything that is left is fetched. Levels lie on the grid kappa_0 step^-k, fixed before the draw.
///
/// Takes a planner that can be lowered (plan_at()), and a target that is the denominator or looks at values; others are
/// not checked. It is left out where a plan is proven as it stands: weights that are exact, or bounded with the bounds
/// carried, and a target that guesses nothing.
struct sample_check {
    static constexpr std::size_t most_rounds = 15;

    std::size_t rounds = most_rounds;  ///< fetches that may follow the first, the last of them of everything; 0: none
    double step = 1.15;                ///< between levels of the grid, > 1
};

/// Which uniforms a plan's own draws use.
enum class uniform_policy {
    /// One U a token of a KV head, that of its draw: resident when U < r, used when U < r'. Successive steps and the
    /// heads of a group want the same rows: less is copied; their errors are alike, too.
    permanent,
    /// Beyond the resident sample, fresh ones for each step: errors of steps share the resident sample alone.
    fresh,
};

/// What becomes of the bound that a sketch states on its error.
enum class bound_policy {
    ignore,  ///< masses by the estimate
    carry,   ///< masses by the upper bound, the reference by the lower: no sketch within its bounds breaks the promise
};

/// How a cache steps.
struct step_policies {
    sample_check check = {};
    uniform_policy uniforms = uniform_policy::permanent;
    bound_policy bounds = bound_policy::ignore;
};

/// Checks policies.
/// Throws invalid_argument for more than most_rounds rounds, or a step that is not above 1.
inline void validate(const step_policies& p) {
    detail::check(p.check.rounds <= sample_check::most_rounds, "a check of ", p.check.rounds, " rounds; at most ",
                  sample_check::most_rounds, " are possible");
    detail::check(p.check.step > 1 && p.check.step <= 1e6, "levels of a check are ", p.check.step,
                  " apart; that must be above 1");
    detail::check(p.uniforms == uniform_policy::permanent || p.uniforms == uniform_policy::fresh, "uniform_policy is ",
                  static_cast<int>(p.uniforms));
    detail::check(p.bounds == bound_policy::ignore || p.bounds == bound_policy::carry, "bound_policy is ",
                  static_cast<int>(p.bounds));
}

}  // namespace verkv::inline v0
