// Water-filling: the cheapest plan, in expected rows, for a variance.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "verkv/certify/tail.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/raised_tokens.hpp"
#include "verkv/plan/breakpoint_bins.hpp"
#include "verkv/plan/stage.hpp"

namespace verkv::inline v0 {

/// Whether the query heads of a KV head plan together.
enum class group_plan {
    per_head,  ///< each its own r'
    joint,     ///< one r' for all of them [beyond §6]
};

/// r' = max(r, min(1, m/kappa)), lambda = 1, with the largest kappa whose certificate is below epsilon [beyond §1, §2].
/// Of all plans whose variance is as small it expects to fetch the fewest rows (r' in proportion to m: Lagrange).
///
/// A look at every eighth block of tokens guesses kappa. One pass picks the tokens that any kappa from somewhat below
/// the guess on can raise and adds up the others; breakpoints are binned (breakpoint_bins), the largest edge that
/// certifies is taken, and kappa is raised inside the bin on the picked tokens alone, to a relative 2^-10, by their
/// exact moments. Where the guess was too high, the pass is repeated from a quarter of it. A tail other than
/// Bernstein's goes on from there.
///
/// joint: r' = max(r, min(1, sqrt(sum_h (a_h m_h)^2))): what Lagrange's condition gives when each head h has a variance
/// of its own to keep; the a_h are lowered from 1/kappa_h while all certificates hold. Expects no more rows than the
/// union of the heads' own plans. Chosen without the sample, it serves all heads: each may use every row of it.
template <tail Tail = bernstein_tail>
struct water_filling {
    group_plan group = group_plan::joint;
    Tail rule{};

    /// Memory that is reused from step to step.
    struct workspace {
        /// Where a head's level lies; tokens that no level from `floor` on raises need not be picked.
        struct level_window {
            float low, high, floor;
        };
        detail::raised_tokens picked;
        std::vector<float> inverse, multiplier, reach, own, trial;
        std::vector<level_window> levels;
        std::vector<typename Tail::summary> rest;
        std::vector<bernstein_moments> moments;
        std::vector<double> certificate;
        /// Whose masses the picked tokens of a group belong to; none after a head that planned alone.
        struct source {
            const float* mass;
            const float* odds;
            std::size_t count;
            double reference, total;
            friend bool operator==(const source&, const source&) = default;
        };
        std::vector<source> picked_for;

        /// Makes plans of up to n tokens for a group of heads allocation-free.
        void reserve(std::size_t n, std::size_t heads = 1) {
            picked.reserve(n, heads);
            for (auto* v : {&inverse, &multiplier, &reach, &own, &trial}) {
                v->reserve(heads);
            }
            levels.reserve(heads);
            rest.reserve(heads);
            moments.reserve(heads);
            certificate.reserve(heads);
            picked_for.reserve(heads);
        }
    };

    /// The plan of one query head. O(n): the masses are read once and an eighth, 8 bytes a token, then only the picked
    /// tokens; allocation-free after w.reserve(n). Moments in float over runs of 1024 tokens, those in double.
    /// Masses that are not finite: an empty plan with a certificate of NaN. Squares of m/R that overflow: all of L.
    /// Throws invalid_argument when spans differ in length, the reference is out of range or the tolerance is.
    void plan(const cpu&, masses_view m, tolerance t, workspace& w, verkv::plan& out) const {
        validate(t);
        if (!solve({&m, 1}, t, w, {&out, 1})) {
            detail::plan_without_moments(m, out);
            return;
        }
        write_own(static_cast<float>(out.level), w, out);
    }

    /// The plans of the query heads of a group; `out` has one for each. As plan(), O(n heads): a joint plan reads the
    /// masses of all heads once, and an eighth, 4 (heads + 1) bytes a token. Throws as plan(), and for masses that
    /// differ in length.
    void plan_group(const cpu& exec, std::span<const masses_view> m, tolerance t, workspace& w,
                    std::span<verkv::plan> out) const {
        check_group(m, out.size());
        validate(t);
        bool together = group == group_plan::joint && m.size() > 1 && solve(m, t, w, out);
        if (together && std::any_of(out.begin(), out.end(),
                                    [](const verkv::plan& p) { return p.level < static_cast<double>(unlimited); })) {
            plan_jointly(m, t, w, out);
            // A tail that decides differently for the same tokens in other blocks: each head by itself holds.
            together = std::all_of(out.begin(), out.end(),
                                   [&](const verkv::plan& p) { return p.certificate_after < t.epsilon; });
        }
        for (std::size_t h = 0; h < m.size() && !together; ++h) {
            plan(exec, m[h], t, w, out[h]);
        }
    }

    /// The plans at given levels kappa_h/R (of a joint plan, 1/a_h): what a check from the sample asks for when it
    /// lowers them. Masses that a call with this workspace has seen must be as they were then: tokens picked by it are
    /// used again. O(n heads). `out` keeps its certificate_before. Throws as plan_group(), and for a level that is not
    /// positive.
    void plan_at(const cpu&, std::span<const masses_view> m, std::span<const double> level, tolerance t, workspace& w,
                 std::span<verkv::plan> out) const {
        validate(t);
        check_group(m, out.size());
        detail::check(level.size() == m.size(), level.size(), " levels for ", m.size(), " query heads");
        for (std::size_t h = 0; h < m.size(); ++h) {
            detail::check(level[h] > 0, "the level of query head ", h, " is ", level[h], "; it must be positive");
        }
        if (group == group_plan::joint && m.size() > 1) {
            w.trial.clear();
            bool have = w.picked_for.size() == m.size();
            for (std::size_t h = 0; h < m.size(); ++h) {
                w.trial.push_back(static_cast<float>(1 / level[h]));
                have = have && w.trial[h] <= w.multiplier[h] && w.picked_for[h] == source_of(m[h]);
            }
            if (!have) {
                // Levels are lowered step by step: tokens are picked for some steps to come.
                set_inverses(m, w);
                w.multiplier.clear();
                for (const float a : w.trial) {
                    w.multiplier.push_back(2 * a);
                }
                pick(m, w);
            }
            detail::set_wishes(w.picked, w.trial, detail::combine::root_sum_square);
            write_joint(m, 1, t, w, out);
            return;
        }
        w.picked_for.clear();
        w.rest.resize(1);
        for (std::size_t h = 0; h < m.size(); ++h) {
            const auto kappa = static_cast<float>(level[h]);
            detail::pick_raised(m[h], detail::inverse_reference(m[h]), kappa / one_by_one, w.picked, w.rest[0]);
            out[h].level = level[h];
            certify_own(m[h], 0, kappa, t, w, out[h]);
            write_own(kappa, w, out[h]);
        }
    }

private:
    using summary = typename Tail::summary;
    static constexpr bool plain = std::is_same_v<Tail, bernstein_tail>;
    static constexpr float unlimited = std::numeric_limits<float>::infinity();
    /// How far below the level tokens are picked. A tail that resolves the size of terms gets those near it one by one:
    /// in blocks they count as larger than they are.
    static constexpr float one_by_one = plain ? 1.0f : 64.0f;

    static void check_group(std::span<const masses_view> m, std::size_t plans) {
        detail::check(plans == m.size(), plans, " plans for ", m.size(), " query heads");
        for (const masses_view& head : m) {
            detail::check(head.mass.size() == m[0].mass.size(), "a group of query heads has ", m[0].mass.size(),
                          " masses and ", head.mass.size());
        }
    }

    static typename workspace::source source_of(const masses_view& m) {
        return {m.mass.data(), m.odds.data(), m.mass.size(), m.reference, m.total};
    }

    static void set_inverses(std::span<const masses_view> m, workspace& w) {
        w.inverse.clear();
        for (const masses_view& head : m) {
            w.inverse.push_back(detail::inverse_reference(head));
        }
    }

    /// `rest` and the picked tokens, whose odds' are odds(i).
    template <class Odds>
    static summary with_picked(summary rest, const workspace& w, std::size_t head, Odds&& odds) {
        for (std::size_t i = 0; i < w.picked.count(); ++i) {
            const double o = odds(i);
            if (o > 0) {
                rest.add(static_cast<double>(w.picked.mass(head)[i]), o, 1, 0);
            }
        }
        return rest;
    }

    static summary with_moments(summary rest, const bernstein_moments& m) {
        rest.add_block(1, m.variance, m.largest, m.largest, m.largest);
        return rest;
    }

    /// All of L at level kappa, as a head would have it by itself.
    static summary own_summary(const workspace& w, std::size_t head, float kappa) {
        if constexpr (plain) {
            return with_moments(w.rest[head], detail::moments_at(w.picked, head, kappa));
        } else {
            const auto k = static_cast<double>(kappa);
            return with_picked(w.rest[head], w, head, [&](std::size_t i) {
                return (std::min)(static_cast<double>(w.picked.odds()[i]),
                                  k / static_cast<double>(w.picked.mass(head)[i]) - 1);
            });
        }
    }

    static bernstein_moments own_moments(const workspace& w, std::size_t head, float kappa) {
        bernstein_moments all = w.rest[head].moments();
        return all += detail::moments_at(w.picked, head, kappa);
    }

    /// Moments of all of L for the heads of a group when the picked tokens have r' = max(r, min(1, wish/factor)).
    static void set_group_moments(workspace& w, float factor) {
        for (std::size_t h = 0; h < w.rest.size(); ++h) {
            w.moments[h] = w.rest[h].moments();
        }
        detail::add_group_moments(w.picked, factor, w.moments);
    }

    /// The same for one head, as the tail wants it.
    static summary group_summary(const workspace& w, std::size_t head, float factor) {
        const auto f = static_cast<double>(factor);
        return with_picked(w.rest[head], w, head, [&](std::size_t i) {
            return (std::min)(static_cast<double>(w.picked.odds()[i]), f / static_cast<double>(w.picked.wish()[i]) - 1);
        });
    }

    /// Whether the certificates of all heads are below epsilon at a factor.
    bool group_holds(std::span<const masses_view> m, float factor, tolerance t, workspace& w) const {
        set_group_moments(w, factor);
        for (std::size_t h = 0; h < m.size(); ++h) {
            bool holds = bernstein_bound(w.moments[h], t.log_term()) < t.epsilon;
            if constexpr (!plain) {
                holds = holds || rule.holds(group_summary(w, h, factor), t.epsilon, t.delta, m[h].space);
            }
            if (!holds) {
                return false;
            }
        }
        return true;
    }

    /// The heads' certificates at a factor, into w.certificate; below epsilon where group_holds() says so.
    void certify_group(std::span<const masses_view> m, float factor, tolerance t, workspace& w) const {
        set_group_moments(w, factor);
        for (std::size_t h = 0; h < m.size(); ++h) {
            w.certificate[h] = bernstein_bound(w.moments[h], t.log_term());
            if constexpr (!plain) {
                if (!(w.certificate[h] < t.epsilon)) {
                    w.certificate[h] = rule.bound(group_summary(w, h, factor), t.delta, m[h].space);
                }
            }
        }
    }

    /// Finds the level of each head by itself; leaves the tokens picked for all of them in w, certificates and levels
    /// in `out`. False where masses are not finite.
    bool solve(std::span<const masses_view> m, tolerance t, workspace& w, std::span<verkv::plan> out) const {
        const double log_term = t.log_term();
        set_inverses(m, w);
        w.multiplier.clear();
        w.levels.clear();
        for (std::size_t h = 0; h < m.size(); ++h) {
            out[h].clear();
            out[h].level = static_cast<double>(unlimited);
            const double mass =
                m[h].total > 0 ? m[h].total / m[h].reference : detail::mass_of_candidates(m[h], w.inverse[h]);
            if (!std::isfinite(mass)) {
                return false;
            }
            const auto [low, high] = levels_to_search(t.epsilon, log_term, mass);
            const float guess = guess_floor(m[h], w.inverse[h], t, low, high);
            w.levels.push_back({low, high, breakpoint_bins::edge_below(guess)});
            w.multiplier.push_back(1 / w.levels[h].floor);
        }
        // Tokens that no level above a head's floor raises are added up, not picked. A floor too high costs a pass
        // more.
        for (bool picked = false; !picked;) {
            pick(m, w);
            picked = true;
            for (std::size_t h = 0; h < m.size(); ++h) {
                const bernstein_moments sample = own_moments(w, h, unlimited);
                if (!std::isfinite(sample.variance) || !std::isfinite(sample.largest)) {
                    return false;
                }
                out[h].variance = sample.variance;
                out[h].certificate_before = out[h].certificate_after = certificate_of_sample(m[h], h, sample, t, w);
                auto& [low, high, floor] = w.levels[h];
                if (!(out[h].certificate_before < t.epsilon) && floor > low &&
                    !(bernstein_bound(own_moments(w, h, floor), log_term) < t.epsilon)) {
                    floor = breakpoint_bins::edge_below(larger(low, floor * 0.25f));
                    w.multiplier[h] = 1 / floor;
                    picked = false;
                }
            }
        }
        for (std::size_t h = 0; h < m.size(); ++h) {
            if (!(out[h].certificate_before < t.epsilon)) {
                settle(m[h], h, find_level(m, h, t, w), t, w, out[h]);
            }
        }
        return true;
    }

    /// The certificate of the sample as it was drawn.
    double certificate_of_sample(const masses_view& m, std::size_t head, const bernstein_moments& sample, tolerance t,
                                 const workspace& w) const {
        if constexpr (plain) {
            return bernstein_bound(sample, t.log_term());
        } else {
            return rule.bound(own_summary(w, head, unlimited), t.delta, m.space);
        }
    }

    /// A level somewhat below the largest that certifies, as every eighth block of tokens has it. In [low, high].
    static float guess_floor(const masses_view& m, float inverse, tolerance t, float low, float high) {
        const float step = std::pow(high / low, 1.0f / (detail::probe_levels - 1));
        float level[detail::probe_levels] = {low};
        for (std::size_t k = 1; k < detail::probe_levels; ++k) {
            level[k] = level[k - 1] * step;
        }
        const detail::probed seen = detail::probe(m, inverse, level);
        double previous = 0;
        for (std::size_t k = 0; k < detail::probe_levels; ++k) {
            const double certificate = bernstein_bound(
                {0, seen.variance[k], smaller(static_cast<double>(level[k]), seen.largest)}, t.log_term());
            if (!(certificate < t.epsilon)) {
                if (k == 0) {
                    return low;
                }
                const double part = std::log(t.epsilon / previous) / std::log(certificate / previous);
                const float guess = smaller(level[k - 1] * std::pow(step, static_cast<float>(part)), high);
                // The higher it is, the fewer tokens decide: a look at some tells less, and picking more costs little.
                const float share = guess / high;
                return larger((0.8f - 0.55f * share * share) * guess, low);
            }
            previous = certificate;
        }
        return high;
    }

    /// The largest kappa above the first edge that certifies, in whose bin the picked tokens are looked at again.
    float find_level(std::span<const masses_view> m, std::size_t head, tolerance t, workspace& w) const {
        const double log_term = t.log_term();
        const auto certificate = [&](float kappa) { return bernstein_bound(own_moments(w, head, kappa), log_term); };
        breakpoint_bins bins(w.levels[head].floor, w.levels[head].high);
        detail::add_to_bins(w.picked, head, w.rest[head].moments(), bins);
        float kappa = bins.largest_certified(t.epsilon, log_term);
        if (!(kappa > 0) && certificate(bins.edge(0)) < t.epsilon) {
            kappa = bins.edge(0);  // by its own b; in the bins b = kappa
        }
        kappa = raise_smoothly(kappa, t.epsilon, certificate);
        if constexpr (!plain) {
            kappa = raise(kappa, 1.5f, 0x1p-8f, [&](float k) {
                return rule.holds(own_summary(w, head, k), t.epsilon, t.delta, m[head].space);
            });
        }
        if (!(kappa > 0)) {
            // epsilon is so small that no level in the reach of a float certifies: all of L is fetched.
            kappa = 0x1p-126f;
            w.levels[head].floor = 0;
            w.multiplier[head] = 1 / kappa;
            pick(m, w);
        }
        return kappa;
    }

    /// Certifies the plan at kappa. What a tail's holds() accepts, its bound() may have above epsilon by a rounding.
    void settle(const masses_view& m, std::size_t head, float kappa, tolerance t, const workspace& w,
                verkv::plan& out) const {
        certify_own(m, head, kappa, t, w, out);
        while (out.certificate_after >= t.epsilon && kappa > 0x1p-126f) {
            kappa *= 1 - 0x1p-10f;
            certify_own(m, head, kappa, t, w, out);
        }
        out.level = static_cast<double>(kappa);
    }

    void certify_own(const masses_view& m, std::size_t head, float kappa, tolerance t, const workspace& w,
                     verkv::plan& out) const {
        const summary all = own_summary(w, head, kappa);
        out.certificate_after = rule.bound(all, t.delta, m.space);
        out.variance = all.moments().variance;
    }

    /// The largest x from `certified` on for which certifies(x), to a relative precision; grows by `step` at first.
    template <class Certifies>
    static float raise(float certified, float step, float precision, Certifies&& certifies) {
        if (!(certified > 0)) {
            return certified;
        }
        float failing = certified * step;
        while (failing < 0x1p110f && certifies(failing)) {
            certified = failing;
            failing *= step;
        }
        while (failing - certified > precision * certified) {
            const float middle = 0.5f * (certified + failing);
            (certifies(middle) ? certified : failing) = middle;
        }
        return certified;
    }

    /// The same, to a relative 2^-10, for a certificate that grows smoothly within a bin: a straight line between two
    /// levels shows where it is epsilon. Where it does not, halves.
    template <class Certificate>
    static float raise_smoothly(float certified, double epsilon, Certificate&& certificate) {
        constexpr float precision = 0x1p-10f;
        constexpr float step = 1 + 1.0f / breakpoint_bins::per_octave;
        if (!(certified > 0)) {
            return certified;
        }
        double low = certificate(certified);
        float failing = certified * step;
        double high = certificate(failing);
        while (failing < 0x1p110f && high < epsilon) {
            certified = failing;
            low = high;
            failing *= step;
            high = certificate(failing);
        }
        for (int round = 0; failing - certified > precision * certified; ++round) {
            const float width = failing - certified;
            const float margin = 0.5f * precision * certified;
            const float crossing = width * static_cast<float>((epsilon - low) / (high - low));
            const float middle =
                certified + (round < 4 ? (std::clamp)(crossing - 0.5f * margin, margin, width - margin) : 0.5f * width);
            const double there = certificate(middle);
            (there < epsilon ? certified : failing) = middle;
            (there < epsilon ? low : high) = there;
        }
        return certified;
    }

    /// Entries of the picked tokens that the wishes for r' raise.
    static void write_entries(const float* wish, float factor, const workspace& w, verkv::plan& out) {
        out.entries.resize(w.picked.count());
        std::size_t count = 0;
        detail::for_each_raised(w.picked, wish, factor, [&](token_index token, float raised) {
            out.entries[count++] = {token, raised, 1};
        });
        out.entries.resize(count);
        out.raised = count;
    }

    /// Entries of the picked tokens that kappa raises.
    static void write_own(float kappa, const workspace& w, verkv::plan& out) {
        out.entries.clear();
        out.raised = 0;
        out.joint = false;
        if (kappa < unlimited) {
            write_entries(w.picked.mass(0), 1 / kappa, w, out);
        }
    }

    /// Picks what the multipliers raise. Wishes are set_wishes()'s to set.
    void pick(std::span<const masses_view> m, workspace& w) const {
        w.rest.resize(m.size());
        w.picked_for.clear();
        if (m.size() == 1) {
            detail::pick_raised(m[0], w.inverse[0], w.levels[0].floor, w.picked, w.rest[0]);
            return;
        }
        w.moments.resize(m.size());
        w.certificate.resize(m.size());
        w.reach.assign(w.multiplier.begin(), w.multiplier.end());
        for (float& a : w.reach) {
            a *= one_by_one;
        }
        detail::pick_raised<summary>(m, w.inverse, w.reach, detail::combine::root_sum_square, w.picked, w.rest);
        for (const masses_view& head : m) {
            w.picked_for.push_back(source_of(head));
        }
    }

    /// One plan for all heads, from where each would be by itself.
    void plan_jointly(std::span<const masses_view> m, tolerance t, workspace& w, std::span<verkv::plan> out) const {
        using detail::combine;
        w.own.clear();
        for (const verkv::plan& own : out) {
            w.own.push_back(static_cast<float>(1 / own.level));
        }
        const auto all_hold = [&](float factor) { return group_holds(m, factor, t, w); };
        detail::set_wishes(w.picked, w.own, combine::largest);
        const double union_rows = detail::expected_rows(w.picked, 1);
        w.trial.assign(w.own.begin(), w.own.end());
        // A head with room to spare asks for less, down to nothing; none asks for more than when it was alone.
        for (int round = 0; round < 5; ++round) {
            detail::set_wishes(w.picked, w.trial, combine::root_sum_square);
            set_group_moments(w, 1);
            for (std::size_t h = 0; h < m.size(); ++h) {
                const double share = bernstein_bound(w.moments[h], t.log_term()) / t.epsilon;
                w.trial[h] = smaller(w.trial[h] * static_cast<float>((std::clamp)(share, 0.25, 4.0)), w.own[h]);
            }
        }
        detail::set_wishes(w.picked, w.trial, combine::root_sum_square);
        // Where that was too little: back towards the heads' own levels, no further, as what they raise is picked.
        for (int round = 0; round < 120 && !all_hold(1); ++round) {
            for (std::size_t h = 0; h < m.size(); ++h) {
                w.trial[h] = smaller(w.trial[h] * 1.05f, w.own[h]);
            }
            detail::set_wishes(w.picked, w.trial, combine::root_sum_square);
        }
        // The heads' own levels hold but for a rounding.
        const auto holding = [&] {
            float factor = 1;
            for (int round = 0; round < 32 && !all_hold(factor); ++round) {
                factor *= 1 - 0x1p-16f;
            }
            return factor;
        };
        float factor = raise(holding(), 1.05f, 0x1p-8f, all_hold);
        if (detail::expected_rows(w.picked, factor) > union_rows) {
            w.trial.assign(w.own.begin(), w.own.end());
            detail::set_wishes(w.picked, w.trial, combine::largest);
            factor = raise(holding(), 1.1f, 0x1p-8f, all_hold);
        }
        write_joint(m, factor, t, w, out);
    }

    /// The same entries for every head, from the wishes of the picked tokens.
    void write_joint(std::span<const masses_view> m, float factor, tolerance t, workspace& w,
                     std::span<verkv::plan> out) const {
        write_entries(w.picked.wish(), 1 / factor, w, out[0]);
        certify_group(m, factor, t, w);
        for (std::size_t h = 0; h < m.size(); ++h) {
            if (h > 0) {
                out[h].entries.assign(out[0].entries.begin(), out[0].entries.end());
            }
            out[h].joint = true;
            out[h].raised = out[0].raised;
            out[h].shrunk = 0;
            out[h].level = static_cast<double>(factor / w.trial[h]);
            out[h].certificate_after = w.certificate[h];
            out[h].variance = w.moments[h].variance;
        }
    }
};

}  // namespace verkv::inline v0
