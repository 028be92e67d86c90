// What a decode step decides: a final inclusion probability and a shrinkage coefficient for each token.
#pragma once

#include <span>
#include <vector>

#include "verkv/core/views.hpp"

namespace verkv::inline v0 {

/// What an error is a norm of. With Z ~ Bernoulli(r) independent, it is S = sum_L (lambda Z/r - 1) m of masses m, or
/// S = sum_L (lambda Z/r - 1) u of vectors with ||u|| <= m in a Hilbert space, of any dimension.
enum class error_space { scalar, vector };

/// What a target hands to a planner: the mass of each token, and the quantity that errors are measured against.
/// A token with odds 0 is kept for certain (H) and adds no error; every other one is in L.
struct masses_view {
    std::span<const float> mass;  ///< m_i >= 0, [n]; the weight w_i for the denominator target [beyond §3]
    std::span<const float> odds;  ///< (1 - r_i) / r_i, [n]; 0 where r_i = 1
    double reference = 0;         ///< R > 0: D for the denominator target
    error_space space = error_space::scalar;
    double total = 0;  ///< sum of all masses, or a bound above it, where the target knows one; 0: not known
};

/// What a step knows of a KV head's values when it plans for a query head.
struct value_facts {
    std::span<const float> radius;  ///< R_i = ||v_i - c||, [n]; c any fixed centre of the values
    double distance = 0;            ///< of the output from the centre, ||o - c||, as estimated from the resident rows
    double norm = 0;                ///< ||o||, likewise
    double unit = 1;                ///< power of two by which all lengths are to be multiplied: masses then fit a float
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
    double variance = 0;              ///< V/R^2 at r', where the planner can be lowered
    double level = 0;    ///< kappa/R of a water-filling plan, infinity where nothing is raised; 0 of any other
    bool joint = false;  ///< one plan for all query heads of a group: the entries of each are those of the first

    /// Lists every token of L as fetched for certain; the rest is the caller's to set.
    void fetch_all(std::span<const float> odds) {
        entries.clear();
        joint = false;
        for (std::size_t i = 0; i < odds.size(); ++i) {
            if (odds[i] > 0) {
                entries.push_back({static_cast<token_index>(i), 1, 1});
            }
        }
        raised = entries.size();
    }

    void clear() {
        entries.clear();
        certificate_before = certificate_after = 0;
        raised = shrunk = 0;
        variance = level = 0;
        joint = false;
    }
};

}  // namespace verkv::inline v0
