// What a decode step decides: a final inclusion probability and a shrinkage coefficient for each token.
#pragma once

#include <span>
#include <vector>

#include "verkv/core/views.hpp"

namespace verkv::inline v0 {

/// What a target hands to a planner: the mass of each token, and the quantity that errors are measured against.
/// A token with odds 0 is kept for certain (H) and adds no error; every other one is in L.
struct masses_view {
    std::span<const float> mass;  ///< m_i >= 0, [n]; the weight w_i for the denominator target [beyond §3]
    std::span<const float> odds;  ///< (1 - r_i) / r_i, [n]; 0 where r_i = 1
    double reference = 0;         ///< R > 0: D for the denominator target
};

/// A token whose (r', lambda) is not (r, 1) [beyond §1].
struct plan_entry {
    token_index token;
    float probability;  ///< r' in [r, 1]; the token is used when its uniform is below it
    float shrinkage;    ///< lambda in [r', 1]

    friend bool operator==(const plan_entry&, const plan_entry&) = default;
};

/// A plan for one query head at one step: (r', lambda) of every token; those not listed have (r, 1).
struct plan {
    std::vector<plan_entry> entries;  ///< ascending by token, each token once
    double certificate_before = 0;    ///< relative error certified if nothing is fetched
    double certificate_after = 0;     ///< relative error certified by this plan
    std::size_t raised = 0;           ///< entries with r' > r
    std::size_t shrunk = 0;           ///< entries with lambda < 1

    void clear() {
        entries.clear();
        certificate_before = certificate_after = 0;
        raised = shrunk = 0;
    }
};

}  // namespace verkv::inline v0
