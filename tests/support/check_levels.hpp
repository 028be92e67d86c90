// Water-filling as it is defined, in long double: moments at a level, and what is wrong with a plan.
#pragma once

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "support/check_plan.hpp"
#include "support/reference.hpp"
#include "verkv/plan/water_filling.hpp"

namespace support {

/// A random decision of any kind. Its draws come one after the other, whatever the compiler.
inline decision any_decision(dice& d, std::size_t n, double certain = 0.1, double silent = 0.01) {
    const weights w = all_weights[d.below(std::size(all_weights))];
    const probabilities p = all_probabilities[d.below(std::size(all_probabilities))];
    return random_decision(d, n, w, p, certain, silent);
}

/// Moments of all of L when token i has r'; from odds' = (1-r')/r'.
template <class Odds>
reference_moments moments_by_odds(const decision& d, Odds&& odds) {
    reference_moments sum;
    for (std::size_t i = 0; i < d.size(); ++i) {
        const real m = static_cast<real>(d.mass[i]) / static_cast<real>(d.reference);
        const real o = odds(i);
        if (o > 0 && m > 0) {
            sum.variance += m * m * o;
            sum.largest = std::max(sum.largest, m * std::max<real>(o, 1));
        }
    }
    return sum;
}

/// r' = max(r, min(1, m/kappa)), as odds.
inline reference_moments moments_at_level(const decision& d, real kappa) {
    return moments_by_odds(d, [&](std::size_t i) {
        const real m = static_cast<real>(d.mass[i]) / static_cast<real>(d.reference);
        const real o = static_cast<real>(d.odds[i]);
        return m > 0 ? std::clamp<real>(kappa / m - 1, 0, o) : o;
    });
}

/// r' of every token under a plan.
inline std::vector<float> probabilities_of(const decision& d, const verkv::plan& p) {
    std::vector<float> r = d.r;
    for (const verkv::plan_entry& e : p.entries) {
        r[e.token] = e.probability;
    }
    return r;
}

/// Moments of a plan as its entries say.
inline reference_moments moments_of_plan(const decision& d, const verkv::plan& p) {
    std::vector<real> odds(d.odds.begin(), d.odds.end());
    for (const verkv::plan_entry& e : p.entries) {
        const real r = static_cast<real>(e.probability);
        odds[e.token] = std::min(odds[e.token], (1 - r) / r);
    }
    return moments_by_odds(d, [&](std::size_t i) { return odds[i]; });
}

/// Rows that a plan is expected to fetch: sum of r' - r.
inline double expected_rows(const decision& d, const verkv::plan& p) {
    double sum = 0;
    for (const verkv::plan_entry& e : p.entries) {
        sum += std::max(static_cast<double>(e.probability) - 1 / (1 + static_cast<double>(d.odds[e.token])), 0.0);
    }
    return sum;
}

/// Whether entries are ascending tokens of L with r' in [r, 1] and lambda = 1, and counted right.
inline std::string entries_fault(const decision& d, const verkv::plan& p) {
    for (std::size_t j = 0; j < p.entries.size(); ++j) {
        const verkv::plan_entry& e = p.entries[j];
        if (e.token >= d.size() || !(d.odds[e.token] > 0) || (j > 0 && p.entries[j - 1].token >= e.token)) {
            return "entries are not ascending tokens of L";
        }
        const double r = 1 / (1 + static_cast<double>(d.odds[e.token]));
        if (!(static_cast<double>(e.probability) >= r * (1 - 1e-6)) || e.probability > 1 || e.shrinkage != 1) {
            return text_of("token", e.token, "r'", e.probability, "lambda", e.shrinkage);
        }
    }
    return p.raised == p.entries.size() && p.shrunk == 0 ? "" : text_of("counts", p.raised, p.shrunk);
}

/// Whether a plan has exactly the entries with wish(i) > r, at r' = min(1, wish(i)); floats may decide those within
/// a relative 1e-5 of r either way.
template <class Wish>
std::string wishes_fault(const decision& d, const verkv::plan& p, Wish&& wish) {
    std::vector<const verkv::plan_entry*> of(d.size(), nullptr);
    for (const verkv::plan_entry& e : p.entries) {
        of[e.token] = &e;
    }
    for (std::size_t i = 0; i < d.size(); ++i) {
        const double r = 1 / (1 + static_cast<double>(d.odds[i]));
        const double w = wish(i);
        if (!(d.odds[i] > 0)) {
            continue;
        }
        if (of[i] == nullptr ? w > r * (1 + 1e-5) : w < r * (1 - 1e-5)) {
            return text_of("token", i, "wish", w, "r", r, of[i] == nullptr ? "is missing" : "is too much");
        }
        if (of[i] != nullptr &&
            !close(static_cast<real>(of[i]->probability), static_cast<real>(std::max(std::min(w, 1.0), r)), 1e-5L)) {
            return text_of("token", i, "has r'", of[i]->probability, "wish", w, "r", r);
        }
    }
    return entries_fault(d, p);
}

/// What is wrong with a plan of one head by Bernstein's inequality; empty for nothing. kappa is the largest to a
/// relative 2^-9; certificates are right to `value`.
inline std::string level_fault(const decision& d, const verkv::plan& p, const verkv::tolerance& t, real value = 1e-4L) {
    const real l = log_term_of(t);
    const real epsilon = static_cast<real>(t.epsilon);
    const auto at = [&](real kappa) { return bound_of(moments_at_level(d, kappa), l); };
    const real never = at(1e4000L);
    if (!close(static_cast<real>(p.certificate_before), never, value)) {
        return text_of("certificate_before", p.certificate_before, "reference", never);
    }
    if (std::isinf(p.level)) {
        if (!(p.certificate_before < t.epsilon) || !p.entries.empty() || p.certificate_after != p.certificate_before) {
            return text_of("nothing is raised at", p.certificate_before, p.certificate_after);
        }
        return entries_fault(d, p);
    }
    const real kappa = static_cast<real>(p.level);
    if (!(kappa > 0) || p.certificate_before < t.epsilon) {
        return text_of("level", p.level, "certificate_before", p.certificate_before);
    }
    // b jumps where kappa passes a mass, and floats may have it on either side.
    const real low = at(kappa * (1 - 0x1p-19L));
    const real high = at(kappa * (1 + 0x1p-19L));
    const auto within = [&](real x) { return x >= low * (1 - value) && x <= high * (1 + value); };
    if (!(p.certificate_after < t.epsilon) || !(low < epsilon * (1 + 1e-5L)) ||
        !within(static_cast<real>(p.certificate_after))) {
        return text_of("certificate_after", p.certificate_after, "reference", low, high, "epsilon", t.epsilon);
    }
    // kappa - m of a token whose r is near 1 is the difference of near-equal floats.
    real rounding = 0;
    for (const float m : d.mass) {
        const real x = static_cast<real>(m) / static_cast<real>(d.reference);
        rounding += x * std::min(x, kappa) * 0x1p-22L;
    }
    const real variance = moments_at_level(d, kappa).variance;
    if (!(std::abs(static_cast<real>(p.variance) - variance) <= value * variance + rounding)) {
        return text_of("variance", p.variance, "reference", variance);
    }
    const real entries = bound_of(moments_of_plan(d, p), l);
    if (!(entries < epsilon * (1 + 1e-5L)) || !within(entries)) {
        return text_of("the entries certify", entries, "epsilon", t.epsilon);
    }
    // A level that is larger by 2^-9 does not certify, unless floats cannot tell.
    if (!(at(kappa * (1 + 0x1p-9L)) >= epsilon * (1 - 1e-5L))) {
        return text_of("level", p.level, "a larger one certifies", at(kappa * (1 + 0x1p-9L)));
    }
    return wishes_fault(d, p, [&](std::size_t i) {
        return static_cast<double>(static_cast<real>(d.mass[i]) / static_cast<real>(d.reference) / kappa);
    });
}

}  // namespace support
