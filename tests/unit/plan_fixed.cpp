#include <cmath>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/check_plan.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/plan/exact_weights.hpp"
#include "verkv/plan/fixed.hpp"

namespace {

using support::decision;
using support::dice;
using support::probabilities;
using support::real;
using support::reference_decision;
using support::refused;
using support::weights;
using verkv::binary_shrinkage;
using verkv::bounded_shrinkage;
using verkv::cpu;
using verkv::fetch_everything;
using verkv::never_fetch;
using verkv::no_shrinkage;
using verkv::plan;
using verkv::plan_entry;
using verkv::tolerance;

static_assert(verkv::planner<never_fetch<>, cpu>);
static_assert(verkv::planner<never_fetch<no_shrinkage>, cpu>);
static_assert(verkv::planner<fetch_everything, cpu>);

template <class Planner>
plan planned(const decision& d, tolerance t) {
    typename Planner::workspace w;
    plan out;
    Planner{}.plan(cpu{}, d.view(), t, w, out);
    return out;
}

template <class Rule>
void check_never(const decision& x, tolerance t) {
    const reference_decision ref(x);
    const plan p = planned<never_fetch<Rule>>(x, t);
    std::vector<real> lambda;
    CHECK(support::shrinkage_fault<Rule>(ref, p, {}, lambda) == "");
    const real certified = support::bound_of(support::moments_of(ref, lambda, ref.sampled), support::log_term_of(t));
    CHECK(p.certificate_before == Approx(static_cast<double>(certified)).epsilon(1e-5));
    CHECK(p.certificate_after == p.certificate_before);
    CHECK(p.raised == 0);
    CHECK(p.shrunk == p.entries.size());
    for (std::size_t i = 0; i < p.entries.size(); ++i) {
        const plan_entry& e = p.entries[i];
        CHECK((i == 0 || p.entries[i - 1].token < e.token));
        CHECK(static_cast<double>(e.probability) == Approx(static_cast<double>(x.r[e.token])).epsilon(1e-6));
        CHECK(e.probability < 1);
        CHECK(e.shrinkage >= e.probability);
        CHECK(e.shrinkage <= 1);
    }
}

}  // namespace

TEST_CASE("plan: never fetching shrinks and certifies") {
    dice d(31);
    for (const std::size_t n : {0u, 1u, 5u, 63u, 64u, 65u, 500u}) {
        for (const weights w : support::all_weights) {
            for (const probabilities p : support::all_probabilities) {
                const decision x = support::random_decision(d, n, w, p);
                for (const double delta : {0.01, 0.1, 0.9}) {
                    INFO("n " << n << ", weights " << static_cast<int>(w) << ", probabilities " << static_cast<int>(p));
                    check_never<binary_shrinkage>(x, {0.05, delta});
                    check_never<bounded_shrinkage>(x, {0.05, delta});
                    check_never<no_shrinkage>(x, {0.05, delta});
                }
            }
        }
    }
}

TEST_CASE("plan: fetching everything lists L and certifies 0") {
    dice d(32);
    for (const std::size_t n : {0u, 1u, 64u, 65u, 500u}) {
        const decision x = support::random_decision(d, n, weights::peaked, probabilities::importance);
        const plan p = planned<fetch_everything>(x, {0.05, 0.1});
        std::vector<plan_entry> all;
        for (std::size_t i = 0; i < n; ++i) {
            if (x.r[i] < 1) {
                all.push_back({static_cast<verkv::token_index>(i), 1, 1});
            }
        }
        CHECK(p.entries == all);
        CHECK(p.raised == all.size());
        CHECK(p.shrunk == 0);
        CHECK(p.certificate_after == 0);
        CHECK(p.certificate_before == planned<never_fetch<no_shrinkage>>(x, {0.05, 0.1}).certificate_before);
    }
}

TEST_CASE("plan: what the ends do with masses that are no finite numbers") {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        decision x({1, 2, 3}, {0.5f, 0.25f, 1});
        x.mass[1] = bad;
        const plan never = planned<never_fetch<>>(x, {0.05, 0.1});
        CHECK(never.entries.empty());
        CHECK(std::isnan(never.certificate_before));
        CHECK(std::isnan(never.certificate_after));
        // Fetching everything needs no masses.
        const plan all = planned<fetch_everything>(x, {0.05, 0.1});
        CHECK(all.entries == std::vector<plan_entry>{{0, 1, 1}, {1, 1, 1}});
        CHECK(std::isnan(all.certificate_before));
        CHECK(all.certificate_after == 0);
    }
}

TEST_CASE("plan: the ends refuse what greedy refuses") {
    const decision x({1, 2, 3}, {0.5f, 0.25f, 1});
    const auto check = [&](auto planner) {
        using planner_type = decltype(planner);
        typename planner_type::workspace w;
        plan out;
        planner.plan(cpu{}, x.view(), tolerance{0.05, 0.1}, w, out);
        const plan before = out;
        verkv::masses_view m = x.view();
        m.reference = 0;
        CHECK(refused([&] { planner.plan(cpu{}, m, tolerance{0.05, 0.1}, w, out); }, {"reference"}));
        m = x.view();
        m.mass = m.mass.first(2);
        CHECK(refused([&] { planner.plan(cpu{}, m, tolerance{0.05, 0.1}, w, out); }, {"2 masses", "3 odds"}));
        CHECK(refused([&] { planner.plan(cpu{}, x.view(), tolerance{-1, 0.1}, w, out); }, {"epsilon"}));
        CHECK(refused([&] { planner.plan(cpu{}, x.view(), tolerance{0.05, 2}, w, out); }, {"delta"}));
        CHECK(out.entries == before.entries);
        CHECK(out.certificate_before == before.certificate_before);
        CHECK(out.certificate_after == before.certificate_after);
    };
    check(never_fetch<>{});
    check(fetch_everything{});
}

TEST_CASE("plan: which tokens get exact weights") {
    CHECK(verkv::exact_for_shortlist{}.size == 128);
    CHECK(verkv::exact_for_resident{}.size == 128);
    CHECK(!verkv::exact_for_shortlist::resident_too);
    CHECK(verkv::exact_for_resident::resident_too);
}
