// What the user asks for: a relative error and how often it may be exceeded.
#pragma once

#include <cmath>

#include "verkv/core/error.hpp"

namespace verkv::inline v0 {

/// The promise a step keeps: P(relative error > epsilon) <= delta for a query fixed before the draw [VerKV Theorem 2].
struct tolerance {
    double epsilon = 0.05;  ///< relative error, > 0
    double delta = 0.1;     ///< failure probability, in (0, 1)

    /// l = ln(2/delta), the factor that Bernstein's inequality takes [VerKV Symbols]. Finite for every delta > 0: the
    /// ratio itself may overflow.
    [[nodiscard]] double log_term() const { return std::log(2.0) - std::log(delta); }
};

/// Checks a tolerance.
/// Throws invalid_argument when epsilon is not a positive finite number or delta is outside (0, 1).
inline void validate(const tolerance& t) {
    detail::check(t.epsilon > 0 && std::isfinite(t.epsilon), "epsilon is ", t.epsilon,
                  "; it must be a positive number");
    detail::check(t.delta > 0 && t.delta < 1, "delta is ", t.delta, "; it must lie strictly between 0 and 1");
}

}  // namespace verkv::inline v0
