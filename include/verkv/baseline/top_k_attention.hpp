// Attention to the heaviest tokens alone, without a certificate.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/baseline/detail/choose.hpp"
#include "verkv/baseline/selection.hpp"

namespace verkv::inline v0 {

/// The fixed tokens and nothing else: the window of StreamingLLM (Xiao et al. 2024, arXiv 2309.17453), with positions
/// as they are. Reads nothing, claims nothing; left_out says what that costs by the estimates.
struct streaming_attention {
    struct workspace {
        std::vector<detail::weighted_token> chosen;
    };

    /// O(n). Throws invalid_argument for more tokens than positions.
    template <storage T>
    void select(const cpu&, const decision_view<T>& d, workspace& w, selection& out) const {
        detail::check_estimates(d);
        out.clear();
        w.chosen.clear();
        detail::write_selection(d.fixed, d.estimate.size(), w.chosen, 0.0f, out);
        out.left_out = detail::share_left_out(d.estimate, out);
    }
};

/// The fixed tokens and the K heaviest of the others by their estimates, each with coefficient 1: what the field calls
/// oracle top-k where the estimates are exact, and Quest's rule, HashAttention's and others' with theirs. D^ is low by
/// what is left out; nothing is claimed, and left_out is as good as the estimates.
/// Reads: the selected rows.
struct top_k_attention {
    token_count count = token_count::share(0.05);  ///< K

    struct workspace {
        top_k_workspace top;
        std::vector<token_index> heavy;
        std::vector<detail::weighted_token> chosen;
    };

    /// O(n) expected. Ties go to the lower index; an estimate of -infinity or NaN is never chosen.
    /// Throws invalid_argument for more tokens than positions.
    template <storage T>
    void select(const cpu& exec, const decision_view<T>& d, workspace& w, selection& out) const {
        detail::check_estimates(d);
        out.clear();
        const std::size_t n = d.estimate.size();
        detail::choose_heavy(exec, d, count.of(n - d.fixed.fixed_count(n)), w.top, w.heavy);
        w.chosen.clear();
        for (const token_index i : w.heavy) {
            w.chosen.push_back({i, 0.0f});
        }
        detail::write_selection(d.fixed, n, w.chosen, 0.0f, out);
        out.left_out = detail::share_left_out(d.estimate, out);
    }
};

/// The fixed tokens and as few others, the heaviest first, as bring the selected share of the estimated weights to a
/// mass p: top-p attention (Twilight, Lin et al. 2025, arXiv 2502.02770). Coefficients are 1. Nothing is claimed: with
/// exact weights D^ is low by 1 - p at most, for certain, but the output's error is not bounded by it alone.
/// Reads: the selected rows.
struct top_p_attention {
    double mass = 0.95;  ///< p in [0, 1]; 1: every token with a positive estimate

    struct workspace {
        std::vector<token_index> order;
        std::vector<detail::weighted_token> chosen;
    };

    /// O(n) expected, without sorting: halves are partitioned off (nth_element), and the half with the boundary again.
    /// Sums in double. Ties go to the lower index; an estimate that is NaN, 0 or less is never chosen and counts 0.
    /// Throws invalid_argument for a mass out of range or more tokens than positions; `out` is then as it was.
    template <storage T>
    void select(const cpu&, const decision_view<T>& d, workspace& w, selection& out) const {
        detail::check_estimates(d);
        detail::check(mass >= 0 && mass <= 1, "a mass of ", mass, "; it must lie in [0, 1]");
        out.clear();
        const std::size_t n = d.estimate.size();
        w.order.clear();
        double total = 0;
        double missing = 0;  // of the mass, still to be selected
        for (std::size_t i = 0; i < n; ++i) {
            if (d.estimate[i] > 0) {
                const auto weight = static_cast<double>(d.estimate[i]);
                total += weight;
                if (d.fixed.fixed(i, n)) {
                    missing -= weight;
                } else {
                    w.order.push_back(static_cast<token_index>(i));
                }
            }
        }
        missing += mass * total;
        const std::size_t selected = mass == 1 ? w.order.size() : boundary(d.estimate, missing, w.order);
        w.chosen.clear();
        for (std::size_t j = 0; j < selected; ++j) {
            w.chosen.push_back({w.order[j], 0.0f});
        }
        detail::write_selection(d.fixed, n, w.chosen, 0.0f, out);
        out.left_out = detail::share_left_out(d.estimate, out);
    }

private:
    /// Partitions `order` so that its first tokens are the heaviest, as few as weigh `missing` together; their number.
    static std::size_t boundary(std::span<const float> estimate, double missing, std::vector<token_index>& order) {
        const auto heavier = [&](token_index a, token_index b) {
            return estimate[a] != estimate[b] ? estimate[a] > estimate[b] : a < b;
        };
        std::size_t low = 0;  // all before it are needed
        std::size_t high = order.size();
        while (low < high && missing > 0) {
            const std::size_t middle = low + (high - low) / 2;
            const auto at = [&](std::size_t j) { return order.begin() + static_cast<std::ptrdiff_t>(j); };
            std::nth_element(at(low), at(middle), at(high), heavier);
            double heavier_ones = 0;
            for (std::size_t j = low; j < middle; ++j) {
                heavier_ones += static_cast<double>(estimate[order[j]]);
            }
            const auto lightest = static_cast<double>(estimate[order[middle]]);
            if (heavier_ones + lightest < missing) {
                missing -= heavier_ones + lightest;
                low = middle + 1;
            } else if (heavier_ones < missing) {
                return middle + 1;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

static_assert(baseline<streaming_attention, cpu, float>);
static_assert(baseline<top_k_attention, cpu, float>);
static_assert(baseline<top_p_attention, cpu, float>);

}  // namespace verkv::inline v0
