// Priority sampling: the K largest of w/u, and a threshold that makes their sum unbiased.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "verkv/baseline/detail/choose.hpp"
#include "verkv/baseline/selection.hpp"

namespace verkv::inline v0 {

/// Priority sampling (Duffield, Lund and Thorup 2007, J. ACM 54(6)), which SoftmaxLift brings to attention. Each free
/// token has a uniform u in (0, 1] and a priority w^/u. Of the free tokens the K largest are selected; with the
/// (K+1)-th priority t each counts max(w^, t)/w^ times. Fixed tokens are exact.
///
/// Whatever the estimates w^ > 0 are, as long as they do not depend on u, each token's coefficient is 1 on average, so
/// D^ and N^ are unbiased. With exact weights the relative standard deviation of D^ is at most 1/sqrt(K - 1) (Szegedy
/// 2005), so by Chebyshev's inequality its error is at most 1/sqrt(delta (K - 1)) but for a share delta of the draws:
/// that is what is claimed, and it is a theorem of finite samples. A token whose estimate is 0 is never selected: where
/// its weight is not 0, D^ is low.
///
/// Permanent uniforms (one stream for all queries, what an index over keys with one more coordinate needs) make errors
/// of different queries depend on each other; a stream from fresh_stream() for each decision does not.
///
/// Reads: the selected rows. Ranking reads nothing here; where weights are exact, it stands for an exact search among
/// keys that are not counted.
struct priority_sampling {
    token_count count = token_count::share(0.05);  ///< K

    /// Memory that is reused from decision to decision.
    struct workspace {
        struct candidate {
            double priority;
            token_index token;
        };
        std::vector<candidate> candidates;
        std::vector<detail::weighted_token> chosen;
    };

    /// O(n) expected, a Philox block for each two free tokens. Priorities in double. Ties go to the lower index. No
    /// more than K free tokens with a positive estimate: all of them, each with coefficient 1. An estimate that is NaN,
    /// 0 or less is passed over; an infinite one is selected first and makes t infinite only as the (K+1)-th:
    /// coefficients are then not finite. The same inputs give the same bits. Claims for the denominator where weights
    /// are exact (d.estimate is d.weight); elsewhere nothing. Throws invalid_argument for a tolerance out of range or
    /// more tokens than positions; `out` is then as it was.
    template <storage T>
    void select(const cpu&, const decision_view<T>& d, workspace& w, selection& out) const {
        detail::check_estimates(d);
        validate(d.promise);
        out.clear();
        const std::size_t n = d.estimate.size();
        const std::size_t first = d.fixed.free_begin(n);
        const std::size_t last = d.fixed.free_end(n);
        const std::size_t most = count.of(last - first);
        w.candidates.clear();
        for (std::size_t i = first; i < last; ++i) {
            if (d.estimate[i] > 0) {
                const double u = 1 - uniform(d.stream, static_cast<position_t>(i));  // (0, 1]
                w.candidates.push_back({static_cast<double>(d.estimate[i]) / u, static_cast<token_index>(i)});
            }
        }
        double threshold = 0;
        if (w.candidates.size() > most) {
            const auto cut = w.candidates.begin() + static_cast<std::ptrdiff_t>(most);
            std::nth_element(w.candidates.begin(), cut, w.candidates.end(), [](const auto& a, const auto& b) {
                return a.priority != b.priority ? a.priority > b.priority : a.token < b.token;
            });
            threshold = cut->priority;
            w.candidates.erase(cut, w.candidates.end());
        }
        w.chosen.clear();
        for (const auto& c : w.candidates) {
            const auto estimate = static_cast<double>(d.estimate[c.token]);
            const float log_weight = estimate >= threshold ? 0.0f : static_cast<float>(std::log(threshold / estimate));
            w.chosen.push_back({c.token, log_weight});
        }
        const bool exact = d.weight.data() == d.estimate.data() && d.weight.size() == n;
        if (threshold == 0 && exact) {
            out.claims = claim::denominator;
            out.claimed_error = 0;
        } else if (exact && most > 1) {
            out.claims = claim::denominator;
            out.claimed_error = 1 / std::sqrt(d.promise.delta * static_cast<double>(most - 1));
        }
        detail::write_selection(d.fixed, n, w.chosen, 0.0f, out);
    }
};

static_assert(baseline<priority_sampling, cpu, float>);

}  // namespace verkv::inline v0
