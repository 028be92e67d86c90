#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/check_plan.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/plan/greedy.hpp"

namespace {

using support::decision;
using support::dice;
using support::greedy_fault;
using support::probabilities;
using support::real;
using support::reference_decision;
using support::refused;
using support::weights;
using verkv::binary_shrinkage;
using verkv::bounded_shrinkage;
using verkv::cpu;
using verkv::greedy;
using verkv::no_shrinkage;
using verkv::plan;
using verkv::plan_entry;
using verkv::token_index;
using verkv::tolerance;
using floats = std::vector<float>;
using tokens = std::vector<token_index>;

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

static_assert(verkv::planner<greedy<>, cpu>);
static_assert(verkv::planner<greedy<bounded_shrinkage>, cpu>);
static_assert(verkv::planner<greedy<no_shrinkage>, cpu>);

template <class Rule = binary_shrinkage>
plan planned(const decision& d, tolerance t, const cpu& exec = {}) {
    typename greedy<Rule>::workspace w;
    plan out;
    greedy<Rule>{}.plan(exec, d.view(), t, w, out);
    return out;
}

tokens fetched(const plan& p) {
    tokens out;
    for (const plan_entry& e : p.entries) {
        if (e.probability == 1) {
            out.push_back(e.token);
        }
    }
    return out;
}

/// The tokens that the plan leaves with lambda < 1.
tokens shrunk(const plan& p) {
    tokens out;
    for (const plan_entry& e : p.entries) {
        if (e.shrinkage < 1) {
            out.push_back(e.token);
        }
    }
    return out;
}

tokens shrunk_at_first(const decision& d) {
    return shrunk(planned(d, {1e6, 0.1}));
}

/// The certificate with the first k tokens fetched must be curve[k]: an epsilon just above it stops there.
void check_curve(const decision& d, const std::vector<double>& curve) {
    for (std::size_t k = 0; k < curve.size(); ++k) {
        INFO("k " << k);
        const plan p = planned(d, {curve[k] * (1 + 1e-5) + 1e-9, 0.1});
        CHECK(p.raised == k);
        CHECK(p.certificate_before == Approx(curve[0]).epsilon(1e-5));
        CHECK(p.certificate_after == Approx(curve[k]).epsilon(1e-5));
    }
}

/// Decisions of at most 12 tokens, of every kind, with an epsilon somewhere along the curve.
template <class F>
void for_small_decisions(std::uint64_t seed, int rounds, F&& f) {
    dice d(seed);
    for (int round = 0; round < rounds; ++round) {
        for (const weights w : support::all_weights) {
            for (const probabilities p : support::all_probabilities) {
                const decision x = support::random_decision(d, d.below(13), w, p);
                tolerance t{d.log_between(1e-3, 1), d.chance(0.5) ? 0.1 : d.log_between(1e-6, 0.9)};
                const double before = planned(x, t).certificate_before;
                if (before > 0 && d.chance(0.7)) {
                    t.epsilon = before * d.log_between(0.01, 1.1);
                }
                INFO("round " << round << ", weights " << static_cast<int>(w) << ", probabilities "
                              << static_cast<int>(p) << ", n " << x.size() << ", epsilon " << t.epsilon);
                f(x, t, d);
            }
        }
    }
}

}  // namespace

TEST_CASE("plan: a budget below one token") {
    const decision d(floats(6, 1.0f),
                     {0.0089285714f, 0.0178571429f, 0.0267857143f, 0.0357142857f, 0.0446428571f, 0.0535714286f});
    const plan p = planned(d, {0.05, 0.1});
    CHECK(p.certificate_before == Approx(1.372868373).epsilon(1e-5));
    CHECK(fetched(p) == tokens{0, 1, 2, 3, 4, 5});
    CHECK(p.raised == 6);
    CHECK(p.shrunk == 0);
    CHECK(p.certificate_after == 0);
    CHECK(shrunk_at_first(d) == tokens{0, 1, 2, 3, 4, 5});
    // One token left.
    const plan five = planned(d, {0.4993028974 * (1 + 1e-5), 0.1});
    CHECK(five.raised == 5);
    CHECK(five.certificate_after == Approx(0.4993028974).epsilon(1e-5));
}

TEST_CASE("plan: three heads of a group, each by itself") {
    floats r(10, 0.5f);
    r[0] = r[1] = 1;
    const decision a({4, 2, 1, 1, 8, 1, 1, 2, 1, 4}, r);
    const decision b({2, 2, 8, 1, 1, 1, 1, 4, 1, 1}, r);
    const decision c({1, 1, 1, 2, 4, 1, 1, 1, 1, 8}, r);
    const tolerance t{0.35, 0.1};
    const plan pa = planned(a, t);
    const plan pb = planned(b, t);
    const plan pc = planned(c, t);
    CHECK(pa.certificate_before == Approx(0.9667401539).epsilon(1e-5));
    CHECK(pb.certificate_before == Approx(1.072862107).epsilon(1e-5));
    CHECK(pc.certificate_before == Approx(1.150881136).epsilon(1e-5));
    CHECK(pa.certificate_after == Approx(0.2624901).epsilon(1e-5));
    CHECK(pb.certificate_after == Approx(0.3216770).epsilon(1e-5));
    CHECK(pc.certificate_after == Approx(0.3124882).epsilon(1e-5));
    CHECK(fetched(pa) == tokens{4, 7, 9});
    CHECK(fetched(pb) == tokens{2, 7});
    CHECK(fetched(pc) == tokens{3, 4, 9});
    CHECK(shrunk_at_first(a) == tokens{4});
    CHECK(shrunk_at_first(b) == tokens{2});
    CHECK(shrunk_at_first(c) == tokens{9});
    // One token fewer, and which they are: the order within the list.
    const plan pa2 = planned(a, {0.3842854 * (1 + 1e-5), 0.1});
    const plan pb1 = planned(b, {0.7341020 * (1 + 1e-5), 0.1});
    const plan pc2 = planned(c, {0.4574827 * (1 + 1e-5), 0.1});
    CHECK(fetched(pa2) == tokens{4, 9});
    CHECK(fetched(pb1) == tokens{2});
    CHECK(fetched(pc2) == tokens{4, 9});
    CHECK(pa2.certificate_after == Approx(0.3842854).epsilon(1e-5));
    CHECK(pb1.certificate_after == Approx(0.7341020).epsilon(1e-5));
    CHECK(pc2.certificate_after == Approx(0.4574827).epsilon(1e-5));
    CHECK(fetched(planned(a, {0.9, 0.1})) == tokens{4});
    CHECK(fetched(planned(c, {1.1, 0.1})) == tokens{9});
}

TEST_CASE("plan: a token that weighs nothing beside the largest") {
    const decision d({0, 1, 0.3678794412f}, {1, 0.5f, 0.5f});
    const plan p = planned(d, {0.05, 0.1});
    CHECK(fetched(p) == tokens{1, 2});
    CHECK(p.certificate_before == Approx(1.899778032).epsilon(1e-5));
    CHECK(p.certificate_after == 0);
    CHECK(shrunk_at_first(d) == tokens{1});
    check_curve(d, {1.899778032, 0.9795323968, 0});
    CHECK(fetched(planned(d, {1, 0.1})) == tokens{1});
}

TEST_CASE("plan: ties go to the lower index, whatever the repetition and the threads") {
    floats mass(7, 1.0f), r(7, 0.5f);
    mass[0] = 20;
    r[0] = 1;
    const decision d(mass, r);
    const tolerance t{0.2, 0.1};
    const plan p = planned(d, t);
    CHECK(fetched(p) == tokens{1, 2, 3, 4});
    CHECK(p.raised == 4);
    CHECK(p.shrunk == 0);
    CHECK(p.certificate_before == Approx(0.2767412870).epsilon(1e-5));
    CHECK(p.certificate_after == Approx(0.1769756).epsilon(1e-5));
    const plan none = planned(d, {0.3, 0.1});
    REQUIRE(none.entries.size() == 1);
    CHECK(none.entries[0] == plan_entry{1, 0.5f, 0.5f});
    CHECK(none.shrunk == 1);
    CHECK(none.raised == 0);
    check_curve(d, {0.2767413, 0.2523943, 0.2305722, 0.2059312, 0.1769756, 0.1400838, 0});
    for (std::size_t k = 1; k <= 6; ++k) {
        const double curve[] = {0.2767413, 0.2523943, 0.2305722, 0.2059312, 0.1769756, 0.1400838, 1e-9};
        tokens first;
        for (std::size_t i = 1; i <= k; ++i) {
            first.push_back(static_cast<token_index>(i));
        }
        CHECK(fetched(planned(d, {curve[k] * (1 + 1e-5), 0.1})) == first);
    }

    const support::reference_plan reference =
        support::greedy_of(reference_decision(d), support::binary_shrinkage_of(reference_decision(d)), t);
    CHECK(static_cast<double>(reference.naive_gain[1]) == Approx(0.0243469626).epsilon(1e-8));
    CHECK(static_cast<double>(reference.gain[2]) == Approx(0.0212569971).epsilon(1e-8));

    verkv::thread_pool one(1), eight(8);
    for (int i = 0; i < 100; ++i) {
        for (const cpu exec : {cpu{}, cpu{&one}, cpu{&eight}}) {
            const plan again = planned(d, t, exec);
            CHECK(again.entries == p.entries);
            CHECK(again.certificate_before == p.certificate_before);
            CHECK(again.certificate_after == p.certificate_after);
        }
    }
}

TEST_CASE("plan: of small decisions, the first prefix of the full sort that certifies") {
    for_small_decisions(21, 40, [](const decision& x, const tolerance& t, dice&) {
        CHECK(greedy_fault<binary_shrinkage>(x, t) == "");
        CHECK(greedy_fault<bounded_shrinkage>(x, t) == "");
        CHECK(greedy_fault<no_shrinkage>(x, t) == "");
    });
}

TEST_CASE("plan: over all fetch sets, more fetched is never certified worse") {
    for_small_decisions(22, 2, [](const decision& x, const tolerance& t, dice&) {
        const reference_decision ref(x);
        const std::vector<real> lambda = support::binary_shrinkage_of(ref);
        const real log_term = support::log_term_of(t);
        const std::size_t n = ref.sampled.size();
        const auto left_by = [&](std::size_t set) {
            std::vector<std::size_t> left;
            for (std::size_t j = 0; j < n; ++j) {
                if (((set >> j) & 1) == 0) {
                    left.push_back(ref.sampled[j]);
                }
            }
            return support::bound_of(support::moments_of(ref, lambda, left), log_term);
        };
        const plan p = planned(x, t);
        std::size_t own = 0;
        for (const token_index i : fetched(p)) {
            for (std::size_t j = 0; j < n; ++j) {
                own |= ref.sampled[j] == i ? std::size_t{1} << j : 0;
            }
        }
        for (std::size_t set = 0; set < (std::size_t{1} << n); ++set) {
            const real certified = left_by(set);
            for (std::size_t j = 0; j < n; ++j) {
                CHECK(left_by(set | (std::size_t{1} << j)) <= certified * (1 + 1e-15L));
            }
            if ((set & own) == own) {
                CHECK(certified < static_cast<real>(t.epsilon) * (1 + 1e-6L));
            }
        }
    });
}

TEST_CASE("plan: the promise holds for every small decision, all samples counted") {
    for_small_decisions(23, 3, [](const decision& x, const tolerance& t, dice&) {
        const plan p = planned(x, t);
        std::vector<double> r(x.r.begin(), x.r.end());
        std::vector<double> lambda(x.size(), 1);
        for (const plan_entry& e : p.entries) {
            r[e.token] = static_cast<double>(e.probability);
            lambda[e.token] = static_cast<double>(e.shrinkage);
        }
        double failed = 0;
        for (std::size_t bits = 0; bits < (std::size_t{1} << x.size()); ++bits) {
            double probability = 1, error = 0;
            for (std::size_t i = 0; i < x.size(); ++i) {
                const bool in = ((bits >> i) & 1) != 0;
                probability *= in ? r[i] : 1 - r[i];
                error += static_cast<double>(x.mass[i]) * ((in ? lambda[i] / r[i] : 0) - 1);
            }
            failed += std::abs(error) > t.epsilon * x.reference ? probability : 0;
        }
        CHECK(failed <= t.delta);
    });
}

TEST_CASE("plan: sizes about a block, ties and tokens kept for certain") {
    dice d(24);
    for (const std::size_t n : {1u, 2u, 31u, 32u, 33u, 63u, 64u, 65u, 127u, 128u, 129u, 200u}) {
        for (const weights w : {weights::peaked, weights::equal, weights::few_values}) {
            for (const probabilities p : {probabilities::importance, probabilities::constant}) {
                for (const double certain : {0.0, 0.5, 0.99}) {
                    const decision x = support::random_decision(d, n, w, p, certain);
                    for (const double epsilon : {0.01, 0.1, 1.0}) {
                        INFO("n " << n << ", weights " << static_cast<int>(w) << ", certain " << certain);
                        CHECK(greedy_fault<binary_shrinkage>(x, {epsilon, 0.1}) == "");
                        CHECK(greedy_fault<no_shrinkage>(x, {epsilon, 0.1}) == "");
                    }
                }
            }
        }
    }
}

TEST_CASE("plan: one token of L, anywhere, is fetched or not") {
    for (const std::size_t n : {1u, 64u, 65u, 200u}) {
        for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
            floats mass(n, 1.0f), r(n, 1.0f);
            r[at] = 0.25f;
            const decision d(mass, r);
            // lambda = r: beta = m (1-r), V = m^2 r (1-r), b = m max(r, 1-r).
            const double m = 1 / static_cast<double>(n);
            const double x = 0.75 * m * std::log(20.0) / 3;
            const double certified = 0.75 * m + x + std::sqrt(x * x + 2 * 0.1875 * m * m * std::log(20.0));
            const plan kept = planned(d, {certified * 1.001, 0.1});
            CHECK(kept.certificate_before == Approx(certified).epsilon(1e-6));
            CHECK(kept.entries == std::vector<plan_entry>{{static_cast<token_index>(at), 0.25f, 0.25f}});
            const plan read = planned(d, {certified * 0.999, 0.1});
            CHECK(read.entries == std::vector<plan_entry>{{static_cast<token_index>(at), 1, 1}});
            CHECK(read.certificate_before == kept.certificate_before);
            CHECK(read.certificate_after == 0);
        }
    }
}

TEST_CASE("plan: strictly below epsilon") {
    const decision d({1, 1}, {0.5f, 1});
    const plan p = planned(d, {0.1, 0.1});
    const plan at = planned(d, {p.certificate_before, 0.1});
    CHECK(at.raised == 1);
    const plan above = planned(d, {std::nextafter(p.certificate_before, 9.0), 0.1});
    CHECK(above.raised == 0);
    CHECK(above.certificate_after == above.certificate_before);
}

TEST_CASE("plan: no token, none in L, none that weighs anything") {
    for (const decision& d : {decision{}, decision({1, 2, 3}, {1, 1, 1}), decision(floats(70, 0.0f), floats(70, 0.5f)),
                              decision({0, 5}, {0.5f, 1})}) {
        const auto check = [&](const plan& p) {
            CHECK(p.entries.empty());
            CHECK(p.certificate_before == 0);
            CHECK(p.certificate_after == 0);
            CHECK(p.raised == 0);
            CHECK(p.shrunk == 0);
        };
        check(planned<binary_shrinkage>(d, {0.001, 0.1}));
        check(planned<bounded_shrinkage>(d, {0.001, 0.1}));
        check(planned<no_shrinkage>(d, {0.001, 0.1}));
    }
}

TEST_CASE("plan: a shrunk token that gains little comes after plain ones that gain more") {
    // Token 0: m = 1e-4, r = 1e-6 (t = 100), shrunk; its gain is about m. The plain tokens that follow gain more than
    // that apiece, so that some of them are fetched and it is not.
    floats mass(200, 1.0f), r(200, 1.0f);
    mass[0] = 1e-4f;
    r[0] = 1e-6f;
    for (std::size_t i = 1; i < 100; ++i) {
        mass[i] = 0.5f;
        r[i] = 0.25f;
    }
    for (std::size_t i = 100; i < 104; ++i) {
        mass[i] = 4;
        r[i] = 0.1f;
    }
    const decision d(mass, r);
    std::size_t kept_while_others_go = 0;
    const double before = planned(d, {1e-3, 0.1}).certificate_before;
    for (double epsilon = before; epsilon > 1e-5; epsilon *= 0.9) {
        INFO("epsilon " << epsilon);
        CHECK(greedy_fault<binary_shrinkage>(d, {epsilon, 0.1}) == "");
        CHECK(greedy_fault<bounded_shrinkage>(d, {epsilon, 0.1}) == "");
        const tokens list = fetched(planned(d, {epsilon, 0.1}));
        kept_while_others_go += list.size() > 10 && list.front() != 0;
    }
    CHECK(kept_while_others_go > 5);
}

TEST_CASE("plan: the one token that attains b gains by that, too") {
    // Token 0 has little variance (r near 1) but the largest term; without it b falls, so it goes before tokens of more
    // variance.
    floats mass(40, 0.02f), r(40, 0.5f);
    mass[0] = 1;
    r[0] = 0.9999f;
    const decision d(mass, r);
    const plan p = planned<no_shrinkage>(d, {0.5, 0.1});
    REQUIRE(p.raised > 0);
    CHECK(fetched(p).front() == 0);
    CHECK(fetched(planned<no_shrinkage>(d, {p.certificate_before * 0.999, 0.1})) == tokens{0});
    CHECK(greedy_fault<no_shrinkage>(d, {0.5, 0.1}) == "");
    // Two of them: fetching one leaves b as it was, so the others go first.
    mass[39] = 1;
    r[39] = 0.9999f;
    const decision twice(mass, r);
    const double before = planned<no_shrinkage>(twice, {0.5, 0.1}).certificate_before;
    CHECK(fetched(planned<no_shrinkage>(twice, {before * 0.9999, 0.1})) == tokens{1});
    CHECK(greedy_fault<no_shrinkage>(twice, {before * 0.9, 0.1}) == "");
}

TEST_CASE("plan: masses that are no finite numbers certify nothing and end; overflow fetches everything") {
    dice d(25);
    const decision sound = support::random_decision(d, 131, weights::peaked, probabilities::importance, 0.2, 0);
    const auto check = [&](const decision& x) {
        const auto each = [&](const plan& p) {
            CHECK(p.entries.empty());
            CHECK(std::isnan(p.certificate_before));
            CHECK(std::isnan(p.certificate_after));
            CHECK(p.raised == 0);
            CHECK(p.shrunk == 0);
        };
        each(planned<binary_shrinkage>(x, {0.05, 0.1}));
        each(planned<bounded_shrinkage>(x, {0.05, 0.1}));
        each(planned<no_shrinkage>(x, {0.05, 0.1}));
    };
    for (const std::size_t at : {0u, 1u, 63u, 64u, 127u, 128u, 130u}) {
        for (const float bad : {not_a_number, infinity, -not_a_number}) {
            decision x = sound;
            x.mass[at] = bad;
            check(x);
        }
        // Odds are the caller's, too.
        decision x = sound;
        x.odds[at] = not_a_number;
        check(x);
        x.odds[at] = infinity;
        check(x);
    }
    decision x = sound;
    std::fill(x.mass.begin(), x.mass.end(), not_a_number);
    check(x);
    std::fill(x.mass.begin(), x.mass.end(), infinity);
    check(x);
    // Finite masses whose squares are not: all of L is fetched.
    const auto check_all = [&](const decision& y) {
        const auto open = std::count_if(y.odds.begin(), y.odds.end(), [](float o) { return o > 0; });
        for (const plan& p : {planned<binary_shrinkage>(y, {0.05, 0.1}), planned<no_shrinkage>(y, {0.05, 0.1})}) {
            CHECK(p.raised == static_cast<std::size_t>(open));
            CHECK(p.entries.size() == p.raised);
            CHECK(p.certificate_after == 0);
            CHECK(std::isinf(p.certificate_before));
        }
    };
    x = sound;
    x.reference = 1;
    x.mass[70] = 1e20f;
    x.odds[70] = 1;
    check_all(x);
    x.mass[70] = 1;
    x.odds[70] = 3e38f;
    x.mass[71] = 2;
    x.odds[71] = 3e38f;
    check_all(x);
    // After that, the same workspace plans as before.
    greedy<>::workspace w;
    plan out, again;
    greedy<>{}.plan(cpu{}, sound.view(), {0.05, 0.1}, w, out);
    greedy<>{}.plan(cpu{}, x.view(), {0.05, 0.1}, w, again);
    greedy<>{}.plan(cpu{}, sound.view(), {0.05, 0.1}, w, again);
    CHECK(again.entries == out.entries);
    CHECK(again.certificate_after == out.certificate_after);
}

TEST_CASE("plan: extreme but finite numbers end, and certify") {
    for (const float scale : {1e-38f, 1e-20f, 1.0f, 1e20f}) {
        for (const double reference : {0x1p-120, 1e-20, 1.0, 1e20, 0x1p120}) {
            decision d({scale, scale / 3, scale / 7, 0.0f, scale}, {1e-30f, 0.5f, 1 - 0x1p-24f, 0.5f, 1.0f});
            d.reference = reference;
            for (const double epsilon : {1e-300, 1e-30, 0.05, 1e30, 1e300}) {
                for (const double delta : {1e-300, 0.1, 0.999999}) {
                    const auto each = [&](const plan& p) {
                        CHECK((std::isnan(p.certificate_after) || p.certificate_after < epsilon));
                        CHECK(p.entries.size() <= 4);
                    };
                    each(planned<binary_shrinkage>(d, {epsilon, delta}));
                    each(planned<bounded_shrinkage>(d, {epsilon, delta}));
                    each(planned<no_shrinkage>(d, {epsilon, delta}));
                }
            }
        }
    }
}

TEST_CASE("plan: tokens whose variance is no float beside the others' count all the same") {
    // (m/R)^2 underflows below 1e-22. An epsilon under that has all of L fetched, and the certificate says so.
    floats mass(150, 1e-24f), r(150, 0.5f);
    mass[0] = 1;
    r[0] = 1;
    for (std::size_t large : {0u, 1u, 4u}) {
        for (std::size_t i = 1; i <= large; ++i) {
            mass[i] = 1e-3f * static_cast<float>(i);
        }
        const decision d(mass, r);
        for (const double epsilon : {1e-22, 1e-25, 1e-30, 1e-44, 1e-100, 1e-300}) {
            INFO("large " << large << ", epsilon " << epsilon);
            const auto check = [&](const plan& p) {
                double left = 0;
                std::vector<bool> taken(d.size(), false);
                for (const token_index i : fetched(p)) {
                    taken[i] = true;
                }
                for (std::size_t i = 1; i < d.size(); ++i) {
                    left = taken[i] ? left : std::max(left, static_cast<double>(mass[i]) / d.reference);
                }
                CHECK(p.certificate_after < epsilon);
                CHECK(p.certificate_after >= 0.5 * left);
            };
            check(planned<binary_shrinkage>(d, {epsilon, 0.1}));
            check(planned<bounded_shrinkage>(d, {epsilon, 0.1}));
            check(planned<no_shrinkage>(d, {epsilon, 0.1}));
        }
    }
}

TEST_CASE("plan: a call that is refused leaves the plan as it was") {
    dice r(26);
    const decision d = support::random_decision(r, 100, weights::peaked, probabilities::importance);
    greedy<>::workspace w;
    plan out;
    greedy<>{}.plan(cpu{}, d.view(), {0.05, 0.1}, w, out);
    REQUIRE(!out.entries.empty());
    const plan before = out;
    const auto bad = [&](verkv::masses_view m, tolerance t, std::initializer_list<std::string> parts) {
        return refused([&] { greedy<>{}.plan(cpu{}, m, t, w, out); }, parts) && out.entries == before.entries &&
               out.certificate_before == before.certificate_before &&
               out.certificate_after == before.certificate_after && out.raised == before.raised &&
               out.shrunk == before.shrunk;
    };
    for (const double reference : {0.0, -1.0, 0x1p-121, 0x1p121, std::nan(""), HUGE_VAL}) {
        verkv::masses_view m = d.view();
        m.reference = reference;
        CHECK(bad(m, {0.05, 0.1}, {"reference"}));
    }
    verkv::masses_view shorter = d.view();
    shorter.odds = shorter.odds.first(99);
    CHECK(bad(shorter, {0.05, 0.1}, {"100 masses", "99 odds"}));
    CHECK(bad(d.view(), {0, 0.1}, {"epsilon"}));
    CHECK(bad(d.view(), {-0.5, 0.1}, {"epsilon", "-0.5"}));
    CHECK(bad(d.view(), {std::nan(""), 0.1}, {"epsilon", "nan"}));
    CHECK(bad(d.view(), {0.05, 0}, {"delta"}));
    CHECK(bad(d.view(), {0.05, 1}, {"delta"}));
    CHECK(bad(d.view(), {0.05, std::nan("")}, {"delta", "nan"}));
}

TEST_CASE("plan: allocates nothing after reserve") {
    dice r(27);
    const std::size_t n = 3000;
    std::vector<decision> decisions;
    for (const weights w : support::all_weights) {
        for (const probabilities p : support::all_probabilities) {
            decisions.push_back(support::random_decision(r, n, w, p));
        }
    }
    // Everything is a candidate of bounded shrinkage, and everything is shrunk.
    decisions.emplace_back(floats(n, 1.0f), floats(n, 0.5f));
    decisions.emplace_back(floats(n, 1.0f), floats(n, 1e-9f));
    decisions.push_back(support::random_decision(r, n - 1, weights::peaked, probabilities::constant));
    std::size_t with_both = 0;
    const auto check = [&](auto planner) {
        using planner_type = decltype(planner);
        typename planner_type::workspace w;
        plan out;
        const std::size_t counted = support::allocations_of([&] {
            w.reserve(n);
            out.entries.reserve(n);
        });
        CHECK(counted > 0);
        CHECK(support::allocations_of([&] {
                  for (const decision& d : decisions) {
                      for (const double epsilon : {1e-3, 0.05, 0.3, 1.0, 30.0}) {
                          planner.plan(cpu{}, d.view(), tolerance{epsilon, 0.1}, w, out);
                          with_both += out.raised > 0 && out.shrunk > 0;
                      }
                  }
              }) == 0);
    };
    check(greedy<binary_shrinkage>{});
    check(greedy<bounded_shrinkage>{});
    check(greedy<no_shrinkage>{});
    check(verkv::never_fetch<binary_shrinkage>{});
    check(verkv::never_fetch<bounded_shrinkage>{});
    check(verkv::fetch_everything{});
    CHECK(with_both > 10);
}
