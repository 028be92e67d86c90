// Compares a greedy plan with the reference's.
#pragma once

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "support/reference.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/plan/greedy.hpp"

namespace support {

/// How far floats may lead the plan away from long double.
/// order: relative distance of two gains below which their order is a matter of rounding (a gain is worked out from a
/// mass, an odds and 1/R as floats: 4 roundings in V; a swap of such neighbours is accepted, nothing else).
/// value: relative error of certificates and of lambda.
struct plan_accuracy {
    real order = 1e-6L;
    real value = 1e-5L;
};

inline bool close(real a, real b, real relative) {
    return std::abs(a - b) <= relative * std::max(std::abs(a), std::abs(b));
}

template <class... Parts>
std::string text_of(const Parts&... parts) {
    std::ostringstream out;
    out.precision(12);
    ((out << parts << ' '), ...);
    return out.str();
}

template <class Rule>
std::vector<real> lambda_by(const reference_decision& d) {
    if constexpr (std::is_same_v<Rule, verkv::binary_shrinkage>) {
        return binary_shrinkage_of(d);
    } else if constexpr (std::is_same_v<Rule, verkv::bounded_shrinkage>) {
        return bounded_shrinkage_of(d);
    } else {
        return unshrunk(d);
    }
}

/// Compares the shrinkage of a plan that fetches nothing with the reference's. On return lambda is the reference's; or
/// the plan's, where the two differ but have the same mean squared error to 1e-6 (a token at t = 2 beta); else the
/// fault is returned.
template <class Rule>
std::string shrinkage_fault(const reference_decision& ref, const verkv::plan& never, const plan_accuracy& accuracy,
                            std::vector<real>& lambda) {
    lambda = lambda_by<Rule>(ref);
    std::vector<real> own = unshrunk(ref);
    for (const verkv::plan_entry& e : never.entries) {
        own[e.token] = e.shrinkage == e.probability ? ref.r[e.token] : static_cast<real>(e.shrinkage);
    }
    bool same = true;
    for (std::size_t i = 0; i < ref.size(); ++i) {
        same = same && close(own[i], lambda[i], accuracy.value);
    }
    if (same) {
        return "";
    }
    const real expected = mean_squared_error_of(ref, lambda);
    const real found = mean_squared_error_of(ref, own);
    lambda = own;
    return close(found, expected, 1e-6L) ? "" : text_of("mean squared error", found, "reference", expected);
}

/// What is wrong with a greedy plan; empty for nothing.
template <class Rule>
std::string greedy_fault(const decision& d, const verkv::tolerance& t, const plan_accuracy& accuracy = {}) {
    using verkv::plan;
    const verkv::cpu exec;
    const reference_decision ref(d);
    typename verkv::greedy<Rule>::workspace w;
    plan never, out;
    verkv::never_fetch<Rule>{}.plan(exec, d.view(), t, w, never);
    verkv::greedy<Rule>{}.plan(exec, d.view(), t, w, out);

    std::vector<real> lambda;
    if (const std::string fault = shrinkage_fault<Rule>(ref, never, accuracy, lambda); !fault.empty()) {
        return "shrinkage: " + fault;
    }
    const reference_plan best = greedy_of(ref, lambda, t);
    const real epsilon = static_cast<real>(t.epsilon);
    for (const std::size_t i : ref.sampled) {
        if (!(std::abs(best.gain[i] - best.naive_gain[i]) <= 1e-17L * best.curve[0] + 1e-12L * best.gain[i])) {
            return text_of("reference: gain of token", i, best.gain[i], "but the certificates differ by",
                           best.naive_gain[i]);
        }
    }

    // Certificates.
    if (!close(static_cast<real>(out.certificate_before), best.curve[0], accuracy.value) ||
        out.certificate_before != never.certificate_before || never.certificate_after != never.certificate_before) {
        return text_of("certificate_before", out.certificate_before, "reference", best.curve[0]);
    }
    // The list: ascending, (1, 1) for what is fetched, (r, lambda) for what stays shrunk, and nothing else.
    std::vector<std::size_t> fetched;
    std::vector<bool> taken(d.size(), false);
    std::size_t at = 0, shrunk = 0;
    for (std::size_t j = 0; j < out.entries.size(); ++j) {
        const verkv::plan_entry& e = out.entries[j];
        if (e.token >= d.size() || !(d.odds[e.token] > 0) || (j > 0 && out.entries[j - 1].token >= e.token)) {
            return "entries are not ascending tokens of L";
        }
        if (e.probability == 1 && e.shrinkage == 1) {
            fetched.push_back(e.token);
            taken[e.token] = true;
            continue;
        }
        while (at < never.entries.size() && never.entries[at].token < e.token) {
            ++at;
        }
        if (at == never.entries.size() || never.entries[at] != e) {
            return text_of("token", e.token, "is neither fetched nor one that stays shrunk");
        }
        if (!close(static_cast<real>(e.probability), ref.r[e.token], 1e-6L) || !(e.shrinkage >= e.probability)) {
            return text_of("token", e.token, "has another probability than r");
        }
        ++shrunk;
    }
    std::size_t left = 0;
    for (const verkv::plan_entry& e : never.entries) {
        left += !taken[e.token];
    }
    if (shrunk != left || out.shrunk != shrunk || out.raised != fetched.size()) {
        return text_of("counts", shrunk, left, out.shrunk, out.raised, fetched.size());
    }

    // The certificate of what remains, and that one token fewer would not do.
    std::vector<std::size_t> remaining;
    for (const std::size_t i : ref.sampled) {
        if (!taken[i]) {
            remaining.push_back(i);
        }
    }
    const real after = bound_of(moments_of(ref, lambda, remaining), log_term_of(t));
    if (!close(static_cast<real>(out.certificate_after), after, accuracy.value) ||
        !(out.certificate_after < t.epsilon)) {
        return text_of("certificate_after", out.certificate_after, "reference", after, "epsilon", t.epsilon);
    }
    const std::size_t k = fetched.size();
    if (k > 0 && !(best.curve[k - 1] >= epsilon * (1 - accuracy.value))) {
        return text_of("fetched", k, "of", best.fetched, "one fewer has", best.curve[k - 1]);
    }
    if (k < best.fetched && !(best.curve[k] < epsilon * (1 + accuracy.value))) {
        return text_of("fetched", k, "of", best.fetched, "that leaves", best.curve[k]);
    }
    // The set: the first k of the reference's order, up to gains that floats cannot tell apart.
    if (k > 0) {
        const real cut = best.gain[best.order[k - 1]];
        for (std::size_t j = 0; j < best.order.size(); ++j) {
            const std::size_t i = best.order[j];
            if (taken[i] != (j < k) && !close(best.gain[i], cut, accuracy.order)) {
                return text_of("token", i, "of gain", best.gain[i], j < k ? "is missing" : "is too much", "cut at",
                               cut);
            }
        }
    }
    // Equal tokens: the lower index goes first.
    for (std::size_t j = 1; j < best.order.size(); ++j) {
        const std::size_t a = best.order[j - 1];
        const std::size_t b = best.order[j];
        if (d.mass[a] == d.mass[b] && d.odds[a] == d.odds[b] && lambda[a] == lambda[b] && taken[b] && !taken[a]) {
            return text_of("token", b, "is fetched before its equal", a);
        }
    }
    return "";
}

}  // namespace support
