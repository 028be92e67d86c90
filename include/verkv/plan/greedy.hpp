// KVFetch: the paper's planner, by selection instead of a sort.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "verkv/certify/tail.hpp"
#include "verkv/plan/stage.hpp"

namespace verkv::inline v0 {

/// KVFetch [VerKV Algorithm 2]. Tokens of L are ordered by the gain g_i = e(L) - e(L without i) of the certificate e,
/// falling (ties: the lower index first); the shortest prefix is fetched whose rest L' has e(L') < epsilon, with lambda
/// and the reference held fixed. Fetched tokens get r' = lambda = 1. The gain is never formed as a difference of
/// certificates. With S = sqrt(x^2 + 2 V l), x = b l/3, a token that is not the only one to attain b gains beta_i + 2
/// V_i l / (S + sqrt(S^2 - 2 V_i l)), which grows with V_i: the bulk of L is ordered by V_i itself, and only shrunk
/// tokens and the one that attains b have their gain worked out.
///
/// With another tail than Bernstein's, the tokens fetched are the shortest prefix, among those that Bernstein's
/// inequality asks for, whose rest that tail certifies: never more.
template <shrinkage Shrinkage = binary_shrinkage, tail Tail = bernstein_tail>
struct greedy {
    using workspace = detail::plan_workspace;
    Shrinkage rule{};
    Tail inequality{};

    /// Expected O(n): a pass for the summaries, passes over the blocks that can hold a fetched token, and a selection
    /// among those tokens; O(n log n) at worst. Reads 8 bytes a token a pass; allocation-free after w.reserve(n).
    /// Moments in double over block sums of 64 floats, added up from the tokens that remain, never subtracted.
    /// Masses that are not finite: an empty plan with a certificate of NaN. (m/R)^2 (1-r)/r that overflows a float: all
    /// of L.
    /// Throws invalid_argument when spans differ in length, the reference is out of range or the tolerance is.
    void plan(const cpu& exec, masses_view m, tolerance t, workspace& w, verkv::plan& out) const {
        validate(t);
        const float inverse = detail::inverse_reference(m);
        if (!detail::stage(exec, m, inverse, rule, w)) {
            detail::plan_without_moments(m, out);
            return;
        }
        out.clear();
        const bernstein_moments all = detail::staged_moments(w);
        const double log_term = t.log_term();
        out.certificate_before = bernstein_bound(all, log_term);
        out.certificate_after = out.certificate_before;
        w.singles.clear();
        w.candidates.clear();
        w.selection.clear();
        std::size_t fetched = 0;
        if (!(out.certificate_before < t.epsilon)) {
            bernstein_moments rest = candidates(m, inverse, all, t.epsilon, log_term, w);
            w.selection.assign(w.candidates.begin(), w.candidates.end());
            w.selection.insert(w.selection.end(), w.singles.begin(), w.singles.end());
            fetched = cut(rest, t.epsilon, log_term, w);
            out.certificate_after = bernstein_bound(rest, log_term);
        } else {
            w.bound = std::numeric_limits<float>::infinity();
        }
        if constexpr (!std::is_same_v<Tail, bernstein_tail>) {
            fetched = fewer(fetched, m, inverse, t, w, out);
        }
        write(fetched, w, out);
    }

private:
    using summary = typename Tail::summary;

    static void add(summary& to, const masses_view& m, float inverse, token_index token, const workspace& w) {
        const auto before = [](const shrunk_token& s, token_index t) { return s.token < t; };
        const auto s = std::lower_bound(w.shrunk.begin(), w.shrunk.end(), token, before);
        if (s != w.shrunk.end() && s->token == token) {
            to.add(s->mass, s->odds, s->lambda, s->complement);
        } else {
            to.add(static_cast<double>(m.mass[token] * inverse), static_cast<double>(m.odds[token]), 1, 0);
        }
    }

    /// The tokens that are not in the selection: block by block where their terms are small beside the largest one.
    static summary rest_of(const masses_view& m, float inverse, const workspace& w) {
        const auto& blocks = w.shrinkage.blocks;
        float top = 0;
        for (const auto& b : blocks) {
            top = larger(b.largest_term, top);
        }
        summary rest;
        for (std::size_t b = 0; b < blocks.size(); ++b) {
            const detail::plain_block block = detail::block_of(m, b, w);
            if (blocks[b].largest_variance < w.bound && blocks[b].largest_term < top / 32) {
                if (blocks[b].largest_term > 0) {
                    const auto term = static_cast<double>(blocks[b].largest_term);
                    rest.add_block(block.count, blocks[b].variance, static_cast<double>(blocks[b].largest_lift), term,
                                   term);
                }
                continue;
            }
            for (std::size_t i = 0; i < block.count; ++i) {
                const float x = block.mass[i] * inverse;
                if (block.odds[i] > 0 && x > 0 && detail::terms_of(x, block.odds[i]).variance < w.bound) {
                    rest.add(static_cast<double>(x), static_cast<double>(block.odds[i]), 1, 0);
                }
            }
        }
        return rest;
    }

    /// The shortest prefix of the selection's first `fetched`, in order, whose rest the tail certifies.
    std::size_t fewer(std::size_t fetched, const masses_view& m, float inverse, tolerance t, workspace& w,
                      verkv::plan& out) const {
        summary rest = rest_of(m, inverse, w);
        const auto& c = w.selection;
        for (std::size_t i = fetched; i < c.size(); ++i) {
            add(rest, m, inverse, c[i].token, w);
        }
        if (c.empty()) {
            for (const shrunk_token& s : w.shrunk) {
                rest.add(s.mass, s.odds, s.lambda, s.complement);
            }
        }
        std::sort(w.selection.begin(), w.selection.begin() + static_cast<std::ptrdiff_t>(fetched),
                  [](const auto& a, const auto& b) { return a.before(b); });
        const auto with_rest_from = [&](std::size_t first) {
            summary s = rest;
            for (std::size_t i = first; i < fetched; ++i) {
                add(s, m, inverse, c[i].token, w);
            }
            return s;
        };
        out.certificate_before = inequality.bound(with_rest_from(0), t.delta, m.space);
        std::size_t first = 0;
        std::size_t last = fetched;  // certifies: Bernstein's inequality does
        while (first < last) {
            const std::size_t middle = first + (last - first) / 2;
            if (inequality.holds(with_rest_from(middle), t.epsilon, t.delta, m.space)) {
                last = middle;
            } else {
                first = middle + 1;
            }
        }
        out.certificate_after = inequality.bound(with_rest_from(last), t.delta, m.space);
        return last;
    }

    /// The token of L that alone attains b, if there is one, and the largest term of the others.
    struct leader {
        bool unique = false;
        std::size_t token = 0;
        double others = 0;
    };

    static leader find_leader(const masses_view& m, float inverse, double largest, const workspace& w) {
        leader found;
        std::size_t holders = 0;
        const auto visit = [&](double term, std::size_t token) {
            if (term >= largest && holders++ == 0) {
                found.token = token;
            } else {
                found.others = larger(term, found.others);
            }
        };
        for (const shrunk_token& s : w.shrunk) {
            visit(s.lambda * s.mass * larger(1.0, s.odds), s.token);
        }
        for (std::size_t b = 0; b < w.shrinkage.blocks.size(); ++b) {
            const double top = static_cast<double>(w.shrinkage.blocks[b].largest_term);
            if (top < largest) {
                found.others = larger(top, found.others);
                continue;
            }
            const detail::plain_block block = detail::block_of(m, b, w);
            for (std::size_t i = 0; i < block.count; ++i) {
                visit(static_cast<double>(detail::terms_of(block.mass[i] * inverse, block.odds[i]).term),
                      block.first + i);
            }
        }
        found.unique = holders == 1;
        return found;
    }

    /// A value in the order of the gain: 2 V l for a token that gains by its variance alone, else 2 V l of the token
    /// that would gain as much; beyond S, where no variance reaches, the square of the gain.
    static double key_of_gain(double gain, double root) {
        return gain <= root ? gain * (2 * root - gain) : gain * gain;
    }

    /// Fills w.candidates with a set of tokens that contains every one the plan can fetch, and returns the moments of
    /// the other tokens, which certify by themselves.
    static bernstein_moments candidates(masses_view m, float inverse, const bernstein_moments& all, double epsilon,
                                        double log_term, workspace& w) {
        const double x = all.largest * log_term / 3;
        const double root = std::sqrt(x * x + 2 * all.variance * log_term);
        const leader lead = find_leader(m, inverse, all.largest, w);
        const auto gain = [&](double bias, double variance, bool leads) {
            const double y = leads ? lead.others * log_term / 3 : x;
            // S_i^2 = y^2 + 2 (V - V_i) l; what is lost in V - V_i is far below S + S_i.
            const double other = std::sqrt((std::max)(y * y + 2 * (all.variance - variance) * log_term, 0.0));
            return bias + (x - y) + ((x - y) * (x + y) + 2 * variance * log_term) / (root + other);
        };
        for (const shrunk_token& s : w.shrunk) {
            bernstein_moments own;
            detail::add_shrunk(own, s);
            const bool leads = lead.unique && lead.token == s.token;
            w.singles.push_back({key_of_gain(gain(own.bias, own.variance, leads), root), own.bias,
                                 static_cast<float>(own.variance), static_cast<float>(own.largest), s.token});
        }
        const auto is_lead = [&](const shrunk_token& s) { return s.token == lead.token; };
        if (lead.unique && std::none_of(w.shrunk.begin(), w.shrunk.end(), is_lead)) {
            const detail::mass_term own = detail::terms_of(m.mass[lead.token] * inverse, m.odds[lead.token]);
            w.singles.push_back({key_of_gain(gain(0, static_cast<double>(own.variance), true), root), 0, own.variance,
                                 own.term, static_cast<token_index>(lead.token)});
            detail::single_out(m, lead.token, w);
            detail::survey_again(m, inverse, lead.token / detail::mass_block_size, w);
        }

        // A bound on V_i under which the plain tokens certify, together with the others that come as late in the
        // order. Whole blocks give a cheap lower bound on what they add up to, which brings the bound near before
        // single tokens are looked at.
        const auto& blocks = w.shrinkage.blocks;
        float bound = 0;
        const auto certifies = [&](bernstein_moments below) {
            const double key = 2 * static_cast<double>(bound) * log_term;
            for (const auto& s : w.singles) {
                if (s.key < key) {
                    add(below, s);
                }
            }
            return bernstein_bound(below, log_term) < epsilon;
        };
        for (const auto& b : blocks) {
            bound = larger(b.largest_variance, bound);
        }
        for (bool near = false; bound > 0 && !near;) {
            bound *= 0.5f;
            bernstein_moments least;
            for (const auto& b : blocks) {
                least.variance += b.largest_variance < bound ? b.variance : 0;
            }
            near = certifies(least);
        }
        bernstein_moments rest;
        while (true) {
            rest = {};
            for (std::size_t b = 0; b < blocks.size(); ++b) {
                if (blocks[b].largest_variance < bound) {
                    rest.variance += blocks[b].variance;
                    rest.largest = larger(static_cast<double>(blocks[b].largest_term), rest.largest);
                } else {
                    const detail::plain_block block = detail::block_of(m, b, w);
                    detail::below(block.mass, block.odds, inverse, block.count, bound, rest.variance, rest.largest);
                }
            }
            if (bound == 0 || certifies(rest)) {
                break;
            }
            // What may stay has at most this variance; the tokens below a bound add up to more or less in proportion.
            const double y = rest.largest * log_term / 3;
            const double allowed = epsilon > 2 * y ? epsilon * (epsilon - 2 * y) / (2 * log_term) : 0;
            // Where all of it underflowed, the bound has to reach 0: 0.7 would stay at the smallest float for ever.
            bound *=
                rest.variance > 0 ? static_cast<float>((std::clamp)(0.9 * allowed / rest.variance, 0.05, 0.7)) : 0.05f;
        }
        w.bound = bound;
        for (std::size_t b = 0; b < blocks.size(); ++b) {
            if (blocks[b].largest_variance >= bound) {
                const detail::plain_block block = detail::block_of(m, b, w);
                detail::for_each_at_least(
                    block.mass, block.odds, inverse, block.count, bound, [&](std::size_t i, detail::mass_term own) {
                        w.candidates.push_back({2 * static_cast<double>(own.variance) * log_term, 0, own.variance,
                                                own.term, static_cast<token_index>(block.first + i)});
                    });
            }
        }
        return rest;
    }

    static void add(bernstein_moments& to, const detail::plan_candidate& c) {
        to.bias += c.bias;
        to.variance += static_cast<double>(c.variance);
        to.largest = larger(static_cast<double>(c.term), to.largest);
    }

    /// Length of the shortest prefix of the selection, in order, whose rest certifies; it ends up partitioned there,
    /// and `rest` holds the moments of all that is not fetched.
    static std::size_t cut(bernstein_moments& rest, double epsilon, double log_term, workspace& w) {
        auto& c = w.selection;
        std::size_t first = 0;
        std::size_t last = c.size();
        const auto before = [](const auto& a, const auto& b) { return a.before(b); };
        const auto at = [&](std::size_t i) { return c.begin() + static_cast<std::ptrdiff_t>(i); };
        // Selection: everything before `first` is fetched, everything from `last` on stays and is in `rest`.
        while (last - first > 32) {
            const std::size_t middle = first + (last - first) / 2;
            std::nth_element(at(first), at(middle), at(last), before);
            bernstein_moments upper = rest;
            for (std::size_t i = middle; i < last; ++i) {
                add(upper, c[i]);
            }
            if (bernstein_bound(upper, log_term) < epsilon) {
                rest = upper;
                last = middle;
            } else {
                first = middle;
            }
        }
        std::sort(at(first), at(last), before);
        while (last > first) {
            bernstein_moments more = rest;
            add(more, c[last - 1]);
            if (!(bernstein_bound(more, log_term) < epsilon)) {
                break;
            }
            rest = more;
            --last;
        }
        return last;
    }

    /// Entries by token: the `fetched` first of the selection, and the shrunk tokens that are not among them.
    static void write(std::size_t fetched, workspace& w, verkv::plan& out) {
        const auto last = w.selection.begin() + static_cast<std::ptrdiff_t>(fetched);
        const auto boundary =
            std::max_element(w.selection.begin(), last, [](const auto& a, const auto& b) { return a.before(b); });
        const auto inside = [&](const auto& c) { return fetched > 0 && !boundary->before(c); };
        for (const auto& c : w.candidates) {  // by token
            if (inside(c)) {
                out.entries.push_back({c.token, 1, 1});
            }
        }
        // The few that were looked at one by one are merged in from behind.
        w.single_entries.clear();
        for (std::size_t i = 0; i < w.shrunk.size(); ++i) {
            const bool fetch = !w.singles.empty() && inside(w.singles[i]);
            w.single_entries.push_back(fetch ? plan_entry{w.shrunk[i].token, 1, 1} : detail::keep_shrunk(w.shrunk[i]));
            out.shrunk += !fetch;
        }
        if (w.singles.size() > w.shrunk.size() && inside(w.singles.back())) {
            const plan_entry lead{w.singles.back().token, 1, 1};
            const auto at = std::upper_bound(w.single_entries.begin(), w.single_entries.end(), lead, by_token);
            w.single_entries.insert(at, lead);
        }
        std::size_t plain = out.entries.size();
        std::size_t single = w.single_entries.size();
        out.entries.resize(plain + single);
        for (std::size_t to = out.entries.size(); single > 0;) {
            const bool from_single = plain == 0 || by_token(out.entries[plain - 1], w.single_entries[single - 1]);
            out.entries[--to] = from_single ? w.single_entries[--single] : out.entries[--plain];
        }
        out.raised = fetched;
    }

    static bool by_token(const plan_entry& a, const plan_entry& b) { return a.token < b.token; }
};

}  // namespace verkv::inline v0
