// Planners that fetch nothing, or everything: the two ends that every other one lies between.
#pragma once

#include "verkv/plan/stage.hpp"

namespace verkv::inline v0 {

/// Fetches nothing: the sample as it is, shrunk by a rule; the certificate tells what that is worth.
/// r' = r; lambda from the rule [VerKV Algorithm 2 without steps 3 to 6].
template <shrinkage Shrinkage = binary_shrinkage>
struct never_fetch {
    using workspace = detail::plan_workspace;
    Shrinkage rule{};

    /// O(n). Masses that are not finite: a certificate of NaN; (m/R)^2 (1-r)/r that overflows a float: of infinity.
    /// Throws invalid_argument when spans differ in length or the reference is out of range.
    void plan(const cpu& exec, masses_view m, tolerance t, workspace& w, verkv::plan& out) const {
        validate(t);
        const float inverse = detail::inverse_reference(m);
        if (!detail::stage(exec, m, inverse, rule, w)) {
            out.clear();
            out.certificate_before = out.certificate_after = detail::certificate_without_moments(m);
            return;
        }
        out.clear();
        out.certificate_before = out.certificate_after = bernstein_bound(detail::staged_moments(w), t.log_term());
        for (const shrunk_token& s : w.shrunk) {
            out.entries.push_back(detail::keep_shrunk(s));
        }
        out.shrunk = out.entries.size();
    }
};

/// Fetches every token of L: dense attention through the same code. r' = lambda = 1 everywhere; the certificate is 0.
struct fetch_everything {
    using workspace = detail::plan_workspace;

    /// O(n). Throws as never_fetch.
    void plan(const cpu& exec, masses_view m, tolerance t, workspace& w, verkv::plan& out) const {
        validate(t);
        const float inverse = detail::inverse_reference(m);
        out.clear();
        const bool finite = detail::stage(exec, m, inverse, no_shrinkage{}, w);
        out.certificate_before = finite ? bernstein_bound(detail::staged_moments(w), t.log_term())
                                        : std::numeric_limits<double>::quiet_NaN();
        out.fetch_all(m.odds);
    }
};

}  // namespace verkv::inline v0
