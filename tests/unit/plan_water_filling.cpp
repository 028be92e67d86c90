// Water-filling plans of one head: the largest level, its entries and its certificate.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/check_levels.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"

namespace {

using namespace support;
using verkv::cpu;
using verkv::plan;
using verkv::plan_entry;
using verkv::tolerance;
using planner = verkv::water_filling<>;
using floats = std::vector<float>;

plan planned(const verkv::masses_view& m, tolerance t) {
    planner::workspace w;
    plan out;
    planner{}.plan(cpu{}, m, t, w, out);
    return out;
}

plan planned(const decision& d, tolerance t) {
    return planned(d.view(), t);
}

decision random_size(dice& d, std::size_t least, std::size_t below) {
    const std::size_t n = least + d.below(below);
    return any_decision(d, n, d.chance(0.5) ? 0 : 0.9 * d.uniform());
}

/// Somewhere along the curve of the certificate, or anywhere.
tolerance any_tolerance(dice& d, const decision& x) {
    tolerance t{d.log_between(1e-4, 1), d.chance(0.5) ? 0.1 : d.log_between(1e-6, 0.95)};
    const double before = planned(x, t).certificate_before;
    if (before > 0 && d.chance(0.7)) {
        t.epsilon = before * d.log_between(1e-5, 1.1);
    }
    return t;
}

}  // namespace

TEST_CASE("water-filling: the largest level that certifies, and the entries it raises") {
    dice d(11);
    std::size_t raising = 0, idle = 0;
    for (int round = 0; round < 300; ++round) {
        for (const std::size_t n : {1u, 2u, 3u, 7u, 16u, 63u, 64u, 65u, 300u, 1023u, 1025u, 3000u}) {
            const decision x = random_size(d, n, 1);
            const tolerance t = any_tolerance(d, x);
            const plan p = planned(x, t);
            const std::string fault = level_fault(x, p, t);
            if (!fault.empty()) {
                INFO("round " << round << ", n " << n << ", epsilon " << t.epsilon << ", delta " << t.delta);
                CHECK(fault == "");
            }
            ++(p.raised > 0 ? raising : idle);
        }
    }
    CHECK(raising > 2000);
    CHECK(idle > 250);
}

TEST_CASE("water-filling: kappa by bisection, where the certificate tells it apart") {
    dice d(12);
    for (int round = 0; round < 50; ++round) {
        const decision x = random_decision(d, 400, weights::peaked, probabilities::importance, 0.1, 0);
        const tolerance t{d.log_between(0.01, 0.3), 0.1};
        const plan p = planned(x, t);
        if (std::isinf(p.level)) {
            continue;
        }
        real low = 1e-30L, high = 1e3L;
        for (int i = 0; i < 300; ++i) {
            const real middle = std::sqrt(low * high);
            (bound_of(moments_at_level(x, middle), log_term_of(t)) < static_cast<real>(t.epsilon) ? low : high) =
                middle;
        }
        CHECK(p.level == Approx(static_cast<double>(low)).epsilon(0x1p-9));
    }
}

// Of many tokens the first guess sees every eighth block of 64: here it sees only what weighs little, or only what
// weighs much, or nothing that can be raised.
TEST_CASE("water-filling: a layout that misleads the first guess costs time, not rows") {
    dice d(21);
    for (const std::size_t n : {8192u, 8200u, 20000u}) {
        for (int round = 0; round < 12; ++round) {
            decision x = random_decision(d, n, weights::peaked, probabilities::importance, 0.1, 0);
            const float factor = static_cast<float>(d.log_between(1e-6, 1e6));
            for (std::size_t i = 0; i < n; ++i) {
                if (i / 64 % 8 == 0) {
                    x.mass[i] *= factor;
                    if (round % 4 == 3) {
                        x.r[i] = 1;
                    }
                }
            }
            x = decision(x.mass, x.r);
            const tolerance t = any_tolerance(d, x);
            const std::string fault = level_fault(x, planned(x, t), t);
            if (!fault.empty()) {
                INFO("n " << n << ", round " << round << ", factor " << factor << ", epsilon " << t.epsilon);
                CHECK(fault == "");
            }
        }
    }
}

// In the bins b is kappa between breakpoints: a level that a probe certified by its own b may have no edge that does.
TEST_CASE("water-filling: a single token, at any epsilon") {
    for (double epsilon = 0.01; epsilon < 30; epsilon *= 1.01) {
        for (const float r : {0.5f, 0.25f, 0.1f, 0.01f, 1e-3f}) {
            const decision x({1.0f}, {r});
            const std::string fault = level_fault(x, planned(x, {epsilon, 0.1}), {epsilon, 0.1});
            if (!fault.empty()) {
                INFO("epsilon " << epsilon << ", r " << r);
                CHECK(fault == "");
            }
        }
    }
}

TEST_CASE("water-filling: a larger epsilon or delta never asks for more") {
    dice d(13);
    for (int round = 0; round < 40; ++round) {
        const decision x = random_size(d, 500, 1);
        const bool by_delta = round % 2 == 1;
        plan last;
        for (int i = 0; i < 40; ++i) {
            const double step = std::pow(1.25, i);
            const tolerance t = by_delta ? tolerance{0.1, 1e-5 * std::pow(1.3, i)} : tolerance{1e-4 * step, 0.1};
            const plan next = planned(x, t);
            if (i > 0) {
                CHECK(next.level >= last.level * (1 - 0x1p-9));
                CHECK(expected_rows(x, next) <= expected_rows(x, last) * (1 + 0x1p-9));
                CHECK(next.raised <= last.raised + last.raised / 256);
            }
            last = next;
        }
    }
}

TEST_CASE("water-filling: the order of the tokens does not matter") {
    dice d(14);
    for (int round = 0; round < 60; ++round) {
        const decision x = random_size(d, 10, 2000);
        std::vector<std::size_t> order(x.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        d.shuffle(order);
        const decision y = x.permuted(order);
        const tolerance t = any_tolerance(d, x);
        const plan a = planned(x, t);
        const plan b = planned(y, t);
        CHECK(a.certificate_before == Approx(b.certificate_before).epsilon(1e-5));
        if (std::isinf(a.level) || std::isinf(b.level)) {
            CHECK(a.level == b.level);
            continue;
        }
        CHECK(level_fault(y, b, t) == "");
        CHECK(a.level == Approx(b.level).epsilon(0x1p-9));
        const floats in_order = probabilities_of(x, a);
        const floats shuffled = probabilities_of(y, b);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < order.size(); ++i) {
            wrong += !close(static_cast<real>(in_order[order[i]]), static_cast<real>(shuffled[i]), 0x1p-8L);
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("water-filling: nothing to sample, nothing at all, and no mass") {
    for (const decision& x : {decision{}, decision({1, 2, 3}, {1, 1, 1}), decision({0, 0, 0}, {0.5f, 0.1f, 1}),
                              decision(floats(5000, 0.0f), floats(5000, 1e-3f))}) {
        const plan p = planned(x, {1e-6, 0.1});
        CHECK(p.entries.empty());
        CHECK(p.raised == 0);
        CHECK(p.certificate_before == 0);
        CHECK(p.certificate_after == 0);
        CHECK(p.variance == 0);
        CHECK(std::isinf(p.level));
    }
}

TEST_CASE("water-filling: equal masses are raised alike") {
    for (const std::size_t n : {1u, 5u, 64u, 1000u, 5000u}) {
        for (const double epsilon : {1e-4, 0.01, 0.1, 0.4}) {
            const decision x(floats(n, 0.7f), floats(n, 0.05f));
            const tolerance t{epsilon, 0.1};
            const plan p = planned(x, t);
            CHECK(level_fault(x, p, t) == "");
            CHECK((p.raised == 0 || p.raised == n));
            for (const plan_entry& e : p.entries) {
                CHECK(e.probability == p.entries[0].probability);
            }
        }
    }
}

TEST_CASE("water-filling: masses over twelve decades, and tiny or huge epsilons") {
    dice d(15);
    for (const probabilities r : all_probabilities) {
        for (const weights w : {weights::twelve_decades, weights::peaked, weights::equal}) {
            const decision x = random_decision(d, 3000, w, r, 0.05, 0.01);
            for (const double epsilon : {1e-9, 1e-7, 1e-5, 1e-3, 0.1, 1.0, 1e3, 1e6}) {
                const tolerance t{epsilon, 0.1};
                const std::string fault = level_fault(x, planned(x, t), t);
                if (!fault.empty()) {
                    INFO("weights " << static_cast<int>(w) << ", probabilities " << static_cast<int>(r) << ", epsilon "
                                    << epsilon);
                    CHECK(fault == "");
                }
            }
        }
    }
    // An epsilon below the reach of a float leads to all of L.
    const decision x = random_decision(d, 100, weights::flat, probabilities::constant, 0.1, 0);
    const plan p = planned(x, {1e-300, 0.1});
    CHECK(p.certificate_after < 1e-300);
    CHECK(p.raised ==
          static_cast<std::size_t>(std::count_if(x.odds.begin(), x.odds.end(), [](float o) { return o > 0; })));
    CHECK(std::all_of(p.entries.begin(), p.entries.end(), [](const plan_entry& e) { return e.probability == 1; }));
}

TEST_CASE("water-filling: where squares overflow, all of L is fetched") {
    dice d(17);
    for (const float large : {1e30f, std::numeric_limits<float>::max()}) {
        decision x = random_decision(d, 2000, weights::flat, probabilities::constant, 0, 0);
        x.mass[77] = large;
        const plan p = planned(x.view(), {0.1, 0.1});
        const auto open = std::count_if(x.odds.begin(), x.odds.end(), [](float o) { return o > 0; });
        CHECK(p.entries.size() == static_cast<std::size_t>(open));
        CHECK(p.raised == p.entries.size());
        CHECK(std::all_of(p.entries.begin(), p.entries.end(), [](const plan_entry& e) { return e.probability == 1; }));
        CHECK(p.certificate_after == 0);
        CHECK(std::isinf(p.certificate_before));
    }
}

TEST_CASE("water-filling: a delta whose inverse overflows") {
    dice d(18);
    const decision x = random_decision(d, 500, weights::peaked, probabilities::importance, 0.1, 0);
    const plan p = planned(x, {0.3, 1e-310});
    CHECK(p.certificate_after < 0.3);
    CHECK(p.certificate_after > 0.29);
    CHECK(level_fault(x, p, {0.3, 1e-310}) == "");
}

TEST_CASE("water-filling: masses that are not finite certify nothing") {
    dice d(16);
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        for (const std::size_t at : {0u, 777u, 1999u}) {
            for (const bool known : {false, true}) {
                decision x = random_decision(d, 2000, weights::flat, probabilities::constant, 0, 0);
                x.mass[at] = bad;
                verkv::masses_view m = x.view();
                m.total = known ? x.reference : 0;
                const plan p = planned(m, {0.1, 0.1});
                INFO(bad << " at " << at << ", known " << known);
                CHECK(std::isnan(p.certificate_before));
                CHECK(std::isnan(p.certificate_after));
                CHECK(p.entries.empty());
                CHECK(p.raised == 0);
            }
        }
    }
}

TEST_CASE("water-filling: a total that is known, or a bound above it, changes no plan") {
    dice d(17);
    for (int round = 0; round < 100; ++round) {
        const decision x = random_size(d, 1, 500);
        const tolerance t = any_tolerance(d, x);
        verkv::masses_view m = x.view();
        m.total = x.reference * d.log_between(1, 100);
        const std::string fault = level_fault(x, planned(m, t), t);
        if (!fault.empty()) {
            INFO("round " << round << ", n " << x.size() << ", epsilon " << t.epsilon << ", delta " << t.delta);
            CHECK(fault == "");
        }
    }
}

TEST_CASE("water-filling: refusals") {
    const decision x({1, 2, 3}, {0.5f, 0.25f, 0.1f});
    const auto with = [&](double reference) {
        return [&, reference] { planned({x.mass, x.odds, reference}, {0.1, 0.1}); };
    };
    for (const double bad : {0.0, -1.0, 0x1p-121, 0x1p121, std::nan(""), std::numeric_limits<double>::infinity()}) {
        CHECK(refused(with(bad), {"reference"}));
    }
    CHECK(refused([&] { planned({std::span(x.mass).first(2), x.odds, 6.0}, {0.1, 0.1}); }, {"2", "3"}));
    CHECK(refused([&] { planned(x, {0, 0.1}); }, {"epsilon", "0"}));
    CHECK(refused([&] { planned(x, {0.1, 1}); }, {"delta", "1"}));
    CHECK(refused([&] { planned(x, {std::nan(""), 0.1}); }, {"epsilon"}));
}

TEST_CASE("water-filling: a plan takes no memory after reserve()") {
    dice d(18);
    planner::workspace w;
    plan out;
    w.reserve(4000);
    out.entries.reserve(4000);
    for (int round = 0; round < 30; ++round) {
        const decision x = random_size(d, round == 0 ? 4000 : 1, round == 0 ? 1 : 4000);
        const tolerance t{d.log_between(1e-6, 1), 0.1};
        CHECK(allocations_of([&] { planner{}.plan(cpu{}, x.view(), t, w, out); }) == 0);
        CHECK(level_fault(x, out, t) == "");
    }
}

TEST_CASE("water-filling: probabilities are raised_probability()'s, bit for bit") {
    dice d(19);
    for (int round = 0; round < 200; ++round) {
        const std::size_t n = 1 + d.below(70);
        verkv::detail::raised_tokens picked;
        picked.reserve(n, 1);
        std::vector<plan_entry> expected;
        const auto factor = static_cast<float>(d.log_between(1e-3, 1e3));
        floats wish;
        for (std::size_t i = 0; i < n; ++i) {
            const auto odds = static_cast<float>(d.chance(0.2) ? d.log_between(1e-9, 1e-6) : d.log_between(1e-3, 1e6));
            const double around = d.chance(0.5) ? d.between(0.9999, 1.0001) : d.log_between(0.1, 1e3);
            const auto own = static_cast<float>(around / (1 + static_cast<double>(odds)) / static_cast<double>(factor));
            const std::size_t token = 3 * i;
            picked.add(token, odds);
            wish.push_back(own);
            if (const float r = verkv::detail::raised_probability(own * factor, odds); r > 0) {
                expected.push_back({static_cast<verkv::token_index>(token), r, 1});
            }
        }
        picked.seal(1);
        std::copy(wish.begin(), wish.end(), picked.wish());
        std::vector<plan_entry> found;
        verkv::detail::for_each_raised(picked, picked.wish(), factor, [&](verkv::token_index token, float r) {
            found.push_back({token, r, 1});
        });
        REQUIRE(found == expected);
    }
}
