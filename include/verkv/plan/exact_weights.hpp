// Which tokens a plan weighs exactly, and which by their sketch.
#pragma once

#include <cstddef>

#include "verkv/core/version.hpp"

namespace verkv::inline v0 {

/// Exact weights for the tokens kept for certain and for a shortlist that is ranked by the sketch over all of L,
/// resident or not; every other token has its sketch weight, resident or not. The choice never looks at the sample: no
/// leak of Z [beyond §5a]. The default.
struct exact_for_shortlist {
    std::size_t size = 128;  ///< tokens of the shortlist for each query head of a group
    static constexpr bool resident_too = false;
};

/// The paper's rule [VerKV App. A.1]: exact weights for every resident token and for a shortlist of the others. What is
/// exact then depends on the sample, and with an approximate sketch the promise breaks; kept for comparison.
struct exact_for_resident {
    std::size_t size = 128;  ///< tokens of the shortlist for each query head of a group
    static constexpr bool resident_too = true;
};

}  // namespace verkv::inline v0
