// Planners with Chernoff's inequality in place of Bernstein's: never more rows, and certified token by token.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/check_levels.hpp"
#include "support/reference.hpp"
#include "verkv/certify/chernoff.hpp"
#include "verkv/plan/greedy.hpp"

namespace {

using namespace support;
using verkv::bernstein_tail;
using verkv::chernoff_tail;
using verkv::cpu;
using verkv::error_space;
using verkv::masses_view;
using verkv::plan;
using verkv::plan_entry;
using verkv::tolerance;
using floats = std::vector<float>;

constexpr error_space spaces[] = {error_space::scalar, error_space::vector};

masses_view view_of(const decision& d, error_space space) {
    masses_view m = d.view();
    m.space = space;
    return m;
}

template <class Planner>
plan planned(const decision& d, error_space space, tolerance t) {
    typename Planner::workspace w;
    plan out;
    Planner{}.plan(cpu{}, view_of(d, space), t, w, out);
    return out;
}

/// Chernoff's certificate, token by token, of what a plan makes of (r, lambda).
double certified(const decision& d, const plan& p, error_space space, tolerance t) {
    floats lambda(d.size(), 1.0f);
    for (const plan_entry& e : p.entries) {
        lambda[e.token] = e.shrinkage;
    }
    return verkv::chernoff_certificate(cpu{}, d.mass, probabilities_of(d, p), lambda, t, space);
}

tolerance any_tolerance(dice& d) {
    return {d.log_between(1e-3, 0.7), d.chance(0.5) ? 0.1 : d.log_between(1e-5, 0.9)};
}

template <class Shrinkage, class Tail>
using greedy = verkv::greedy<Shrinkage, Tail>;

/// Masses of fetched tokens in the order of the reference, and how many there are.
template <class Shrinkage>
void check_greedy(std::uint64_t seed) {
    dice d(seed);
    std::size_t fetched = 0, fewer = 0, needed = 0, cut = 0;
    for (int round = 0; round < 150; ++round) {
        const decision x = any_decision(d, 1 + d.below(600));
        const tolerance t = any_tolerance(d);
        const reference_decision ref(x);
        const plan bernstein = planned<greedy<Shrinkage, bernstein_tail>>(x, error_space::scalar, t);
        for (const error_space space : spaces) {
            const plan p = planned<greedy<Shrinkage, chernoff_tail>>(x, space, t);
            INFO("round " << round << ", n " << x.size() << ", epsilon " << t.epsilon << ", delta " << t.delta
                          << ", space " << static_cast<int>(space));
            std::vector<bool> by_bernstein(x.size()), own(x.size());
            for (const plan_entry& e : bernstein.entries) {
                by_bernstein[e.token] = e.probability == 1;
            }
            std::size_t stray = 0, count = 0;
            for (std::size_t j = 0; j < p.entries.size(); ++j) {
                const plan_entry& e = p.entries[j];
                own[e.token] = e.probability == 1;
                count += e.probability == 1;
                stray += e.probability == 1 && !by_bernstein[e.token];
                stray += j > 0 && p.entries[j - 1].token >= e.token;
            }
            CHECK(stray == 0);
            CHECK(p.raised == count);
            CHECK(p.raised <= bernstein.raised);
            // A prefix of Bernstein's in its order: nothing left out gains more than what is fetched.
            std::vector<real> lambda = unshrunk(ref);
            for (const plan_entry& e :
                 planned<greedy<Shrinkage, bernstein_tail>>(x, error_space::scalar, {1e9, t.delta}).entries) {
                lambda[e.token] = static_cast<real>(e.shrinkage);
            }
            const reference_plan best = greedy_of(ref, lambda, t);
            real least = 1e30L, most_left = 0;
            for (std::size_t i = 0; i < x.size(); ++i) {
                if (own[i]) {
                    least = std::min(least, best.gain[i]);
                } else if (by_bernstein[i]) {
                    most_left = std::max(most_left, best.gain[i]);
                }
            }
            CHECK(most_left <= least * (1 + 1e-5L));
            // One token fewer, the last in that order, would not do: of the tail's own sums, token by token.
            if (p.raised > 0) {
                chernoff_tail::summary rest;
                bool back = false;
                for (const std::size_t i : ref.sampled) {
                    const bool last = own[i] && !back && best.gain[i] == least;
                    back = back || last;
                    if (!own[i] || last) {
                        rest.add(static_cast<double>(ref.mass[i]), static_cast<double>(ref.odds[i]),
                                 static_cast<double>(lambda[i]), static_cast<double>(1 - lambda[i]));
                    }
                }
                needed += !chernoff_tail{}.holds(rest, t.epsilon, t.delta, space);
                ++cut;
            }
            const double after = certified(x, p, space, t);
            CHECK(after < t.epsilon * 1.01);
            CHECK(p.certificate_after < t.epsilon);
            CHECK(p.certificate_after >= after * (1 - 2e-3));
            CHECK(p.certificate_before <= bernstein.certificate_before * (1 + 1e-6));
            fetched += p.raised;
            fewer += p.raised < bernstein.raised;
        }
    }
    CAPTURE(needed, cut);
    CHECK(needed > cut * 9 / 10);  // sums of blocks may ask for one more
    CHECK(fetched > 1000);
    CHECK(fewer > 50);
}

}  // namespace

TEST_CASE("tails: water-filling by Chernoff expects no more rows than by Bernstein, and certifies token by token") {
    dice d(31);
    std::size_t raising = 0, fewer = 0, tight = 0;
    double log_ratio = 0;
    std::size_t ratios = 0;
    for (int round = 0; round < 250; ++round) {
        const decision x = any_decision(d, 1 + d.below(1500));
        const tolerance t = any_tolerance(d);
        const plan bernstein = planned<verkv::water_filling<>>(x, error_space::scalar, t);
        for (const error_space space : spaces) {
            const plan p = planned<verkv::water_filling<chernoff_tail>>(x, space, t);
            INFO("round " << round << ", n " << x.size() << ", epsilon " << t.epsilon << ", delta " << t.delta
                          << ", space " << static_cast<int>(space));
            const double own = expected_rows(x, p);
            const double other = expected_rows(x, bernstein);
            CHECK(own <= other * (1 + 1e-6) + 1e-6);
            CHECK(p.level >= bernstein.level * (1 - 1e-6));
            CHECK(entries_fault(x, p) == "");
            const double after = certified(x, p, space, t);
            CHECK(after < t.epsilon * 1.01);
            CHECK(p.certificate_after < t.epsilon);
            CHECK(p.certificate_after >= after * (1 - 2e-3));
            CHECK(p.certificate_before <= bernstein.certificate_before * (1 + 1e-6));
            if (!std::isinf(p.level)) {
                CHECK(wishes_fault(x, p, [&](std::size_t i) {
                          return static_cast<double>(x.mass[i]) / x.reference / p.level;
                      }) == "");
                tight += after > 0.85 * t.epsilon;
                verkv::water_filling<chernoff_tail>::workspace w;
                plan again;
                verkv::water_filling<chernoff_tail>{}.plan_at(cpu{}, std::vector<masses_view>{view_of(x, space)},
                                                              std::vector<double>{p.level}, t, w, {&again, 1});
                CHECK(again.entries == p.entries);
                CHECK(again.certificate_after <= p.certificate_after * 1.02);
            }
            if (other > 0.5) {
                log_ratio += std::log(std::max(own, 0.01) / other);
                ++ratios;
            }
            raising += p.raised > 0;
            fewer += own < other * 0.99;
        }
    }
    CHECK(raising > 150);
    CHECK(fewer > 100);
    CHECK(tight > raising * 3 / 4);
    const double mean_ratio = std::exp(log_ratio / static_cast<double>(ratios));
    CHECK(mean_ratio < 0.97);
}

TEST_CASE("tails: joint plans by Chernoff") {
    dice d(32);
    double log_ratio = 0;
    std::size_t ratios = 0, groups_apart = 0;
    for (int round = 0; round < 30; ++round) {
        const std::size_t heads = 2 + d.below(5);
        std::vector<decision> group{any_decision(d, 10 + d.below(500))};
        while (group.size() < heads) {
            floats mass = group[0].mass;
            for (float& m : mass) {
                m *= static_cast<float>(std::exp(0.7 * d.normal()));
            }
            group.emplace_back(mass, group[0].r);
        }
        const tolerance t = any_tolerance(d);
        for (const error_space space : spaces) {
            std::vector<masses_view> m;
            for (const decision& x : group) {
                m.push_back(view_of(x, space));
            }
            std::vector<plan> plans(heads), bernstein(heads), again(heads);
            verkv::water_filling<chernoff_tail>::workspace w;
            verkv::water_filling<chernoff_tail>{}.plan_group(cpu{}, m, t, w, plans);
            verkv::water_filling<>::workspace v;
            verkv::water_filling<>{}.plan_group(cpu{}, m, t, v, bernstein);
            INFO("round " << round << ", heads " << heads << ", epsilon " << t.epsilon << ", delta " << t.delta
                          << ", space " << static_cast<int>(space));
            std::vector<double> level;
            std::size_t apart = 0;
            for (std::size_t h = 0; h < heads; ++h) {
                const double after = certified(group[h], plans[h], space, t);
                CHECK(after < t.epsilon * 1.01);
                CHECK(plans[h].certificate_after < t.epsilon);
                CHECK(plans[h].certificate_after >= after * (1 - 2e-3));
                apart += plans[h].entries != plans[0].entries;
                CHECK(entries_fault(group[h], plans[h]) == "");
                level.push_back(plans[h].level / 1.15);
            }
            // One r' for all, or where that does not certify, each head by itself.
            for (std::size_t h = 0; h < heads && apart > 0; ++h) {
                CHECK(plans[h].entries == planned<verkv::water_filling<chernoff_tail>>(group[h], space, t).entries);
            }
            groups_apart += apart > 0;
            verkv::water_filling<chernoff_tail>{}.plan_at(cpu{}, m, level, t, w, again);
            const floats a = probabilities_of(group[0], plans[0]);
            const floats b = probabilities_of(group[0], again[0]);
            std::size_t lowered = 0;
            for (std::size_t i = 0; i < a.size(); ++i) {
                lowered += b[i] < a[i] * (1 - 1e-5f);
            }
            CHECK(lowered == 0);
            const double own = expected_rows(group[0], plans[0]);
            const double other = expected_rows(group[0], bernstein[0]);
            CHECK(own <= other * 1.03 + 0.01);
            if (other > 0.5) {
                log_ratio += std::log(std::max(own, 0.01) / other);
                ++ratios;
            }
        }
    }
    const double mean_ratio = std::exp(log_ratio / static_cast<double>(ratios));
    CHECK(mean_ratio < 0.9);
    CHECK(groups_apart <= 3);
}

TEST_CASE("tails: greedy by Chernoff fetches a prefix of what Bernstein fetches") {
    SECTION("without shrinkage") {
        check_greedy<verkv::no_shrinkage>(33);
    }
    SECTION("with binary shrinkage") {
        check_greedy<verkv::binary_shrinkage>(34);
    }
    SECTION("with bounded shrinkage") {
        check_greedy<verkv::bounded_shrinkage>(35);
    }
}

TEST_CASE("tails: masses that are not finite, no token, nothing to sample") {
    for (const error_space space : spaces) {
        decision x(floats(300, 1.0f), floats(300, 0.1f));
        x.mass[7] = std::numeric_limits<float>::quiet_NaN();
        CHECK(std::isnan(planned<verkv::water_filling<chernoff_tail>>(x, space, {0.1, 0.1}).certificate_after));
        CHECK(std::isnan(planned<greedy<verkv::no_shrinkage, chernoff_tail>>(x, space, {0.1, 0.1}).certificate_after));
        for (const decision& none : {decision{}, decision({1, 2}, {1, 1}), decision({0, 0}, {0.5f, 0.5f})}) {
            const plan p = planned<verkv::water_filling<chernoff_tail>>(none, space, {0.1, 0.1});
            const plan q = planned<greedy<verkv::no_shrinkage, chernoff_tail>>(none, space, {0.1, 0.1});
            CHECK((p.certificate_after == 0 && p.entries.empty()));
            CHECK((q.certificate_after == 0 && q.entries.empty()));
        }
    }
}

TEST_CASE("tails: plans by Chernoff take no memory after reserve()") {
    dice d(36);
    verkv::water_filling<chernoff_tail>::workspace w;
    w.reserve(2000, 2);
    greedy<verkv::no_shrinkage, chernoff_tail>::workspace v;
    v.reserve(2000);
    std::vector<plan> out(2);
    plan one;
    for (plan* p : {&out[0], &out[1], &one}) {
        p->entries.reserve(2000);
    }
    for (int round = 0; round < 10; ++round) {
        const decision x = any_decision(d, round == 0 ? 2000 : 1 + d.below(2000));
        const std::vector<masses_view> m{x.view(), x.view()};
        const tolerance t = any_tolerance(d);
        CHECK(allocations_of([&] {
                  verkv::water_filling<chernoff_tail>{}.plan_group(cpu{}, m, t, w, out);
                  greedy<verkv::no_shrinkage, chernoff_tail>{}.plan(cpu{}, m[0], t, v, one);
              }) == 0);
    }
}
