// Greedy plans against a full sort in long double. The seeds are fixed: these tests are no matter of chance.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "support/catch.hpp"
#include "support/check_plan.hpp"
#include "support/reference.hpp"

namespace {

using support::decision;
using support::dice;
using support::greedy_fault;
using support::probabilities;
using support::real;
using support::reference_decision;
using support::weights;
using verkv::binary_shrinkage;
using verkv::bounded_shrinkage;
using verkv::cpu;
using verkv::greedy;
using verkv::no_shrinkage;
using verkv::plan;
using verkv::plan_entry;
using verkv::tolerance;
using floats = std::vector<float>;

template <class Rule = binary_shrinkage>
plan planned(const decision& d, tolerance t) {
    typename greedy<Rule>::workspace w;
    plan out;
    greedy<Rule>{}.plan(cpu{}, d.view(), t, w, out);
    return out;
}

/// Masses of the fetched tokens, and of those that stay shrunk, in order.
std::vector<floats> masses_by_part(const decision& d, const plan& p) {
    std::vector<floats> out(2);
    for (const plan_entry& e : p.entries) {
        out[e.probability == 1 ? 0 : 1].push_back(d.mass[e.token]);
    }
    for (floats& part : out) {
        std::sort(part.begin(), part.end());
    }
    return out;
}

template <class Rule>
void check_random_decisions(std::uint64_t seed, int rounds) {
    dice d(seed);
    for (int round = 0; round < rounds; ++round) {
        for (const std::size_t n : {13u, 31u, 32u, 33u, 63u, 64u, 65u, 127u, 128u, 129u, 300u, 1000u, 5000u}) {
            if (n == 5000 && round % 4 != 0) {
                continue;
            }
            for (const weights w : support::all_weights) {
                for (const probabilities p : support::all_probabilities) {
                    const decision x = support::random_decision(d, n, w, p, d.chance(0.5) ? 0 : d.uniform());
                    tolerance t{d.log_between(1e-3, 1), d.chance(0.5) ? 0.1 : d.log_between(1e-6, 0.9)};
                    if (d.chance(0.5)) {  // somewhere along the curve
                        const double before = planned<Rule>(x, t).certificate_before;
                        t.epsilon = before > 0 ? before * d.log_between(1e-4, 1) : t.epsilon;
                    }
                    const std::string fault = greedy_fault<Rule>(x, t);
                    if (!fault.empty()) {
                        INFO("round " << round << ", n " << n << ", weights " << static_cast<int>(w)
                                      << ", probabilities " << static_cast<int>(p) << ", epsilon " << t.epsilon
                                      << ", delta " << t.delta);
                        CHECK(fault == "");
                    }
                }
            }
        }
    }
    CHECK(rounds > 0);
}

}  // namespace

TEST_CASE("plan: greedy with binary shrinkage is the full sort's plan") {
    check_random_decisions<binary_shrinkage>(51, 12);
}

TEST_CASE("plan: greedy with bounded shrinkage is the full sort's plan") {
    check_random_decisions<bounded_shrinkage>(52, 8);
}

TEST_CASE("plan: greedy without shrinkage is the full sort's plan") {
    check_random_decisions<no_shrinkage>(53, 12);
}

TEST_CASE("plan: floats against long double at a hundred thousand tokens over twelve decades") {
    // Stated: certificates to 1e-5 relative, k* to 1 + k*/10^5.
    dice d(54);
    for (const probabilities p : support::all_probabilities) {
        const decision x = support::random_decision(d, 100000, weights::twelve_decades, p, 0.01, 0);
        const reference_decision ref(x);
        const std::vector<real> lambda = support::binary_shrinkage_of(ref);
        const double before = planned(x, {0.1, 0.1}).certificate_before;
        for (const double epsilon : {0.3, 0.1, 0.05, 0.01, 1e-3, 1e-5, before / 2, before / 100}) {
            INFO("probabilities " << static_cast<int>(p) << ", epsilon " << epsilon);
            const tolerance t{epsilon, 0.1};
            const plan out = planned(x, t);
            const support::reference_plan best = support::greedy_of(ref, lambda, t);
            CHECK(out.certificate_before == Approx(static_cast<double>(best.curve[0])).epsilon(1e-5));
            CHECK(out.certificate_after == Approx(static_cast<double>(best.curve[out.raised])).epsilon(1e-5));
            CHECK(out.certificate_after < epsilon);
            CHECK(std::abs(static_cast<double>(out.raised) - static_cast<double>(best.fetched)) <=
                  1 + 1e-5 * static_cast<double>(best.fetched));
            CHECK(greedy_fault<binary_shrinkage>(x, t) == "");
            CHECK(greedy_fault<no_shrinkage>(x, t) == "");
        }
        CHECK(greedy_fault<bounded_shrinkage>(x, {0.05, 0.1}) == "");
    }
}

TEST_CASE("plan: as epsilon falls, more is fetched, what was fetched stays, and the certificate falls") {
    dice d(55);
    const auto check = [&]<class Rule>(Rule) {
        for (const weights w : support::all_weights) {
            for (const probabilities p : support::all_probabilities) {
                const decision x = support::random_decision(d, 600, w, p);
                plan last = planned<Rule>(x, {1e9, 0.1});
                std::vector<bool> taken(x.size(), false);
                for (double epsilon = last.certificate_before; epsilon > last.certificate_before * 1e-4;
                     epsilon *= 0.8) {
                    const plan next = planned<Rule>(x, {epsilon, 0.1});
                    std::size_t kept = 0;
                    for (const plan_entry& e : next.entries) {
                        kept += e.probability == 1 && taken[e.token];
                        taken[e.token] = taken[e.token] || e.probability == 1;
                    }
                    CHECK(next.raised >= last.raised);
                    CHECK(kept == last.raised);
                    CHECK(next.certificate_after <= last.certificate_after * (1 + 1e-6));
                    CHECK(next.certificate_before == last.certificate_before);
                    last = next;
                }
            }
        }
    };
    check(binary_shrinkage{});
    check(bounded_shrinkage{});
    check(no_shrinkage{});
}

TEST_CASE("plan: the order of the tokens does not matter where there are no ties") {
    dice d(56);
    for (int round = 0; round < 20; ++round) {
        for (const weights w : {weights::peaked, weights::heavy_tailed, weights::twelve_decades}) {
            for (const probabilities p : {probabilities::importance, probabilities::decades}) {
                const decision x = support::random_decision(d, 100 + d.below(1000), w, p, 0.1, 0);
                std::vector<std::size_t> order(x.size());
                std::iota(order.begin(), order.end(), std::size_t{0});
                d.shuffle(order);
                const decision y = x.permuted(order);
                const tolerance t{d.log_between(1e-3, 1), 0.1};
                const auto check = [&]<class Rule>(Rule) {
                    const plan a = planned<Rule>(x, t);
                    const plan b = planned<Rule>(y, t);
                    CHECK(masses_by_part(x, a) == masses_by_part(y, b));
                    CHECK(a.certificate_before == Approx(b.certificate_before).epsilon(1e-6));
                    CHECK(a.certificate_after == Approx(b.certificate_after).epsilon(1e-6));
                };
                check(binary_shrinkage{});
                check(bounded_shrinkage{});
                check(no_shrinkage{});
            }
        }
    }
}

TEST_CASE("plan: inputs that are hard for a selection") {
    const std::size_t n = 100000;
    const auto each = [&](const std::function<double(std::size_t)>& mass) {
        floats m(n);
        for (std::size_t i = 0; i < n; ++i) {
            m[i] = static_cast<float>(mass(i));
        }
        const decision x(std::move(m), floats(n, 1.0f / 16));
        const double before = planned<no_shrinkage>(x, {1, 0.1}).certificate_before;
        for (const double share : {0.9, 0.5, 0.1, 0.001}) {
            INFO("share " << share);
            CHECK(greedy_fault<no_shrinkage>(x, {before * share, 0.1}) == "");
            CHECK(greedy_fault<binary_shrinkage>(x, {before * share, 0.1}) == "");
        }
        CHECK(greedy_fault<bounded_shrinkage>(x, {before * 0.5, 0.1}) == "");
    };
    const auto at = [&](std::size_t i) { return static_cast<double>(i); };
    SECTION("rising") {
        each([&](std::size_t i) { return 1 + at(i); });
    }
    SECTION("falling") {
        each([&](std::size_t i) { return at(n - i); });
    }
    SECTION("equal") {
        each([](std::size_t) { return 0.1; });
    }
    SECTION("two values") {
        each([](std::size_t i) { return i % 3 == 0 ? 3.0 : 1.0; });
    }
    SECTION("one large in every block") {
        each([](std::size_t i) { return i % 64 == 17 ? 1.0 : 1e-6; });
    }
    SECTION("organ pipe") {
        each([&](std::size_t i) { return 1 + at(i < n / 2 ? i : n - 1 - i); });
    }
    SECTION("median of three killer") {
        // Musser 1997: a quicksort by the median of three takes n/4 rounds.
        const std::size_t half = n / 2;
        each([&](std::size_t i) {
            if (i < half) {
                return at(i % 2 == 0 ? i + 1 : half + i + (half % 2));
            }
            return at(2 * (i - half) + 2);
        });
    }
    SECTION("saw") {
        each([](std::size_t i) { return 1.0 + static_cast<double>(i % 1000); });
    }
    SECTION("geometric") {
        each([&](std::size_t i) { return std::pow(1e-12, at(i) / at(n)); });
    }
}
