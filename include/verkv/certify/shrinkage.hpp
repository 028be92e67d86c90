// Shrinkage: which tokens enter the estimate with less than their full inverse probability.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <span>
#include <vector>

#include "verkv/certify/estimator.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/plan.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/mass_blocks.hpp"

namespace verkv::inline v0 {

/// A token with lambda < 1. mass is relative to the reference R.
struct shrunk_token {
    token_index token;
    double mass;
    double odds;
    double lambda;
    double complement;  ///< 1 - lambda, without cancellation
};

/// Memory that shrinkage and planners reuse from step to step.
struct shrinkage_workspace {
    struct candidate {
        float lift;  ///< t = m (1-r)/r
        token_index token;
    };
    std::vector<detail::mass_block> blocks;
    std::vector<candidate> candidates;
    std::vector<double> breakpoints;

    /// Makes shrinkage of up to n tokens allocation-free.
    void reserve(std::size_t n) {
        blocks.reserve(n / detail::mass_block_size + 1);
        candidates.reserve(n);
        breakpoints.reserve(n + 1);
    }
};

namespace detail {

/// Tokens of L with low <= t < high, appended in the order of their index.
inline void collect_lifts(masses_view m, float inverse, float low, float high, shrinkage_workspace& w) {
    for (std::size_t b = 0; b < w.blocks.size(); ++b) {
        if (!(w.blocks[b].largest_lift >= low)) {
            continue;
        }
        const std::size_t first = b * mass_block_size;
        for_each_lift(m.mass.data() + first, m.odds.data() + first, inverse,
                      smaller(mass_block_size, m.mass.size() - first), low, high, [&](std::size_t i, float lift) {
                          w.candidates.push_back({lift, static_cast<token_index>(first + i)});
                      });
    }
}

inline float largest_lift(const shrinkage_workspace& w) {
    float top = 0;
    for (const mass_block& b : w.blocks) {
        top = larger(b.largest_lift, top);
    }
    return top;
}

}  // namespace detail

/// No shrinkage: lambda = 1 everywhere, the unbiased estimate.
struct no_shrinkage {
    void select(const cpu&, masses_view, float, shrinkage_workspace&, std::vector<shrunk_token>& out) const {
        out.clear();
    }
};

/// The paper's shrinkage [VerKV App. A.2]: lambda is r or 1. Tokens of L are visited by falling t = m (1-r)/r (ties:
/// the lower index first); while t > 2 beta, strictly, lambda = r and beta grows by m (1-r). Of all prefixes of that
/// order it has the least mean squared error.
struct binary_shrinkage {
    /// Writes the shrunk tokens in the order they were visited; `inverse` is 1/R, w.blocks holds the survey of m.
    /// O(n / 64) plus the tokens near the top of the order; beta in double. Allocation-free after w.reserve(n).
    void select(const cpu&, masses_view m, float inverse, shrinkage_workspace& w,
                std::vector<shrunk_token>& out) const {
        out.clear();
        double beta = 0;
        float high = std::numeric_limits<float>::infinity();
        float low = detail::largest_lift(w) / 32;
        while (high > 0) {
            w.candidates.clear();
            detail::collect_lifts(m, inverse, low, high, w);
            // A heap: few candidates are visited before the rule stops.
            const auto later = [](const auto& a, const auto& b) {
                return a.lift != b.lift ? a.lift < b.lift : a.token > b.token;
            };
            std::make_heap(w.candidates.begin(), w.candidates.end(), later);
            for (auto last = w.candidates.end(); last != w.candidates.begin(); --last) {
                const token_index token = w.candidates.front().token;
                const double mass = static_cast<double>(m.mass[token] * inverse);
                const double odds = static_cast<double>(m.odds[token]);
                if (!(mass * odds > 2 * beta)) {  // not the lift: its rounding would decide ties
                    return;
                }
                out.push_back({token, mass, odds, 1 / (1 + odds), odds / (1 + odds)});
                beta += mass * (odds / (1 + odds));
                std::pop_heap(w.candidates.begin(), last, later);
            }
            // Tokens below 2 beta stay as they are: look no further down than that, nor than an eighth at a time.
            high = low;
            const auto floor = static_cast<float>(2 * beta);
            if (floor >= high) {
                return;
            }
            low = larger(floor, high / 8);
        }
    }
};

/// The best shrinkage of all [VerKV Theorem 1]: lambda = clip(beta / t, r, 1), t = m (1-r)/r, where beta = sum m
/// (1-lambda) is the root of a piecewise linear equation, found exactly among its breakpoints t. (The clip to r never
/// binds at the root: beta is at least what any one token can add to it, m (1-r) = r t.)
struct bounded_shrinkage {
    /// As binary_shrinkage::select(), in the order of the index; O(n/64 + C log C), C tokens with t above the root.
    void select(const cpu&, masses_view m, float inverse, shrinkage_workspace& w,
                std::vector<shrunk_token>& out) const {
        out.clear();
        w.candidates.clear();
        float high = std::numeric_limits<float>::infinity();
        float low = detail::largest_lift(w) / 8;
        if (!(low > 0)) {
            // t below 8 * the smallest subnormal: every bias such tokens could save is zero in float.
            return;
        }
        // The root is the one beta with gap(beta) = 0; gap falls, and only tokens with t > beta enter it.
        while (true) {
            detail::collect_lifts(m, inverse, low, high, w);
            if (gap(m, inverse, w, static_cast<double>(low)) >= 0 || !(low / 8 > 0)) {
                break;
            }
            high = low;
            low /= 8;
        }
        const double beta = root(m, inverse, w);
        std::sort(w.candidates.begin(), w.candidates.end(),
                  [](const auto& a, const auto& b) { return a.token < b.token; });
        for (const auto& c : w.candidates) {
            const double mass = static_cast<double>(m.mass[c.token] * inverse);
            const double odds = static_cast<double>(m.odds[c.token]);
            const double t = mass * odds;
            if (t > beta) {
                out.push_back({c.token, mass, odds, (std::max)(beta / t, 1 / (1 + odds)), (t - beta) / t});
            }
        }
    }

private:
    /// sum_{t > beta} (m - beta r/(1-r)) - beta: of the sign of beta's distance to the root.
    static double gap(masses_view m, float inverse, const shrinkage_workspace& w, double beta) {
        double total = 0;
        for (const auto& c : w.candidates) {
            const double mass = static_cast<double>(m.mass[c.token] * inverse);
            const double odds = static_cast<double>(m.odds[c.token]);
            if (mass * odds > beta) {
                total += mass - beta / odds;
            }
        }
        return total - beta;
    }

    static double root(masses_view m, float inverse, shrinkage_workspace& w) {
        w.breakpoints.clear();
        w.breakpoints.push_back(0);
        for (const auto& c : w.candidates) {
            const double mass = static_cast<double>(m.mass[c.token] * inverse);
            const double odds = static_cast<double>(m.odds[c.token]);
            w.breakpoints.push_back(mass * odds);
        }
        std::sort(w.breakpoints.begin(), w.breakpoints.end());
        // The last breakpoint at which the gap is not negative starts the segment of the root. Each is evaluated
        // afresh: running sums would cancel.
        std::size_t first = 0;
        std::size_t last = w.breakpoints.size();
        while (last - first > 1) {
            const std::size_t middle = first + (last - first) / 2;
            (gap(m, inverse, w, w.breakpoints[middle]) >= 0 ? first : last) = middle;
        }
        const double start = w.breakpoints[first];
        double sum = 0;
        double slope = 1;
        for (const auto& c : w.candidates) {
            const double mass = static_cast<double>(m.mass[c.token] * inverse);
            const double odds = static_cast<double>(m.odds[c.token]);
            if (mass * odds > start) {
                sum += mass;
                slope += 1 / odds;
            }
        }
        return (std::max)(sum / slope, start);
    }
};

/// A rule that picks lambda without looking at the sample.
template <class S>
concept shrinkage = requires(const S& s, const cpu& exec, masses_view m, shrinkage_workspace& w,
                             std::vector<shrunk_token>& out) {
    s.select(exec, m, 1.0f, w, out);
};

/// lambda of every token by a shrinkage rule: the building block behind planners, on plain spans.
/// mass, r, lambda [n]; tokens with r = 1 get lambda = 1.
/// O(n) plus what the rule's select() takes; allocates.
/// Deterministic; ties as the rule says.
/// Throws invalid_argument for lengths that differ, r outside [2^-126, 1], masses negative or not finite, and for a
/// lambda that shares memory with the others.
template <shrinkage S>
void shrink(const cpu& exec, const S& rule, std::span<const float> mass, std::span<const float> r,
            std::span<float> lambda) {
    detail::check(mass.size() == r.size() && lambda.size() == r.size(), mass.size(), " masses, ", r.size(),
                  " probabilities and ", lambda.size(), " shrinkages");
    detail::check(detail::disjoint(lambda, mass) && detail::disjoint(lambda, r), "the ", lambda.size(),
                  " shrinkages share memory with the masses or probabilities they are made of");
    std::vector<float> odds(r.size());
    float top = 0;
    for (std::size_t i = 0; i < r.size(); ++i) {
        detail::check_mass(mass[i], i);
        detail::check_probability(r[i], i);
        detail::check(r[i] >= 0x1p-126f, "token ", i, " has inclusion probability ", r[i], ", below 2^-126");
        const double p = static_cast<double>(r[i]);
        odds[i] = static_cast<float>((1 - p) / p);
        top = larger(mass[i], top);
    }
    std::fill(lambda.begin(), lambda.end(), 1.0f);
    if (!(top > 0)) {
        return;
    }
    // Scale-free: the rules compare masses with one another only.
    const float inverse = smaller(1 / top, 1e38f);
    const masses_view m{mass, odds, static_cast<double>(top)};
    shrinkage_workspace w;
    detail::survey(m, inverse, w.blocks);
    std::vector<shrunk_token> chosen;
    rule.select(exec, m, inverse, w, chosen);
    for (const shrunk_token& s : chosen) {
        // r from rounded odds is r to 2 units in the last place: lambda = r has to come back as it.
        const float l = static_cast<float>(s.lambda);
        lambda[s.token] = l <= r[s.token] * (1 + 0x1p-22f) ? r[s.token] : smaller(l, 1.0f);
    }
}

}  // namespace verkv::inline v0
