// The central limit theorem's budgets: quantiles against tabulated ones, splits against a search of all of them.
#include <cmath>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/baseline/clt_budget.hpp"

namespace {

using verkv::quotient_rule;
using verkv::sampled_sum;
using verkv::tolerance;

}  // namespace

TEST_CASE("clt: normal quantiles to 1e-13") {
    // 20 digits, by a root search with 40; the same as scipy.stats.norm.isf 1.17 but for its last digits.
    const struct {
        double p, z;
    } known[] = {{0.499, 0.0025066308995717662317}, {0.4, 0.25334710313579974132}, {0.25, 0.6744897501960817432},
                 {0.1, 1.2815515655446004353},      {0.05, 1.644853626951472688},  {0.025, 1.9599639845400542118},
                 {0.01, 2.3263478740408410931},     {1e-3, 3.0902323061678135354}, {1e-6, 4.7534243088228989573},
                 {1e-12, 7.0344838253011319326},    {1e-30, 11.46402468844361572}, {1e-100, 21.273453560965324294},
                 {1e-300, 37.047096299361199237}};
    for (const auto& k : known) {
        CAPTURE(k.p);
        CHECK(std::abs(verkv::detail::normal_upper_quantile(k.p) - k.z) <= 1e-13 * std::max(1.0, k.z));
        if (k.p > 1e-3) {
            CHECK(std::abs(verkv::detail::normal_upper_quantile(1 - k.p) + k.z) <= 1e-12 * std::max(1.0, k.z));
        }
        CHECK(verkv::detail::normal_two_sided_quantile(2 * k.p) == verkv::detail::normal_upper_quantile(k.p));
    }
    CHECK(verkv::detail::normal_upper_quantile(0.5) == 0);
    double before = std::numeric_limits<double>::infinity();
    for (double p = 1e-9; p < 1; p = p < 0.9 ? p * 1.07 : 1 - (1 - p) * 0.93) {
        const double z = verkv::detail::normal_upper_quantile(p);
        CHECK(z < before);
        CHECK(verkv::detail::normal_tail(z) == Approx(p).epsilon(1e-12));
        before = z;
        if (1 - p < 1e-9) {
            break;
        }
    }
}

TEST_CASE("clt: draws of one sum") {
    // (1.959963984540054 * 3 / (0.1 * 2))^2
    CHECK(verkv::clt_draws({3, 2}, {0.1, 0.05}) == Approx(864.3282346562).epsilon(1e-9));
    CHECK(verkv::clt_draws({0, 2}, {0.1, 0.05}) == 0);
    CHECK(verkv::clt_draws({0, 0}, {0.1, 0.05}) == 0);
    CHECK(std::isinf(verkv::clt_draws({1, 0}, {0.1, 0.05})));
    CHECK(std::isnan(verkv::clt_draws({std::nan(""), 1}, {0.1, 0.05})));
    CHECK(support::refused([] { (void)verkv::clt_draws({1, 1}, {0, 0.1}); }, {"epsilon is 0"}));
}

TEST_CASE("clt: the split of an output's tolerance is the cheapest there is, and keeps it") {
    support::dice d(11);
    for (int round = 0; round < 60; ++round) {
        const sampled_sum numerator{d.log_between(1e-3, 1e3), d.log_between(1e-2, 1e2)};
        const sampled_sum denominator{d.log_between(1e-3, 1e3), d.log_between(1e-2, 1e2)};
        const tolerance t{d.log_between(1e-3, 0.9), d.log_between(1e-4, 0.5)};
        for (const auto rule : {quotient_rule::lemma, quotient_rule::sharp}) {
            const auto best = verkv::split_quotient(numerator, denominator, t, rule);
            CAPTURE(round, t.epsilon, t.delta, static_cast<int>(rule));
            const double e1 = best.numerator.epsilon, e2 = best.denominator.epsilon;
            CHECK((rule == quotient_rule::lemma ? 2 * (e1 + e2) : (e1 + e2) / (1 - e2)) ==
                  Approx(t.epsilon).epsilon(1e-9));
            CHECK(e2 < 0.5);
            CHECK(best.numerator.delta + best.denominator.delta == Approx(t.delta).epsilon(1e-12));
            CHECK(verkv::clt_draws(numerator, best.numerator) == Approx(best.draws).epsilon(1e-9));
            CHECK(verkv::clt_draws(denominator, best.denominator) == Approx(best.draws).epsilon(1e-9));
            double least = std::numeric_limits<double>::infinity();
            for (int i = 1; i < 60; ++i) {
                for (int j = 1; j < 60; ++j) {
                    least = std::min(least, verkv::split_quotient(numerator, denominator, t, rule,
                                                                  verkv::quotient_shares{i / 60.0, j / 60.0})
                                                .draws);
                }
            }
            CHECK(best.draws <= least * (1 + 1e-9));
            CHECK(best.draws >= 0.85 * least);  // the grid comes close
        }
        CHECK(verkv::split_quotient(numerator, denominator, t, quotient_rule::sharp).draws <
              verkv::split_quotient(numerator, denominator, t, quotient_rule::lemma).draws);
    }
}

TEST_CASE("clt: splits of sums that do not vary, or are nothing") {
    const tolerance t{0.1, 0.1};
    const sampled_sum none{0, 5}, some{2, 5};
    CHECK(verkv::split_quotient(none, none, t, quotient_rule::lemma).draws == 0);
    // All of epsilon/2, and of delta but a trace, goes to the one that varies.
    for (const bool swapped : {false, true}) {
        const auto b = swapped ? verkv::split_quotient(some, none, t, quotient_rule::lemma)
                               : verkv::split_quotient(none, some, t, quotient_rule::lemma);
        CHECK(b.draws == Approx(verkv::clt_draws(some, {0.05, 0.1})).epsilon(1e-9));
    }
    CHECK(std::isinf(verkv::split_quotient({1, 0}, some, t, quotient_rule::sharp).draws));
    CHECK(std::isnan(verkv::split_quotient({std::nan(""), 1}, some, t, quotient_rule::sharp).draws));
    CHECK(support::refused(
        [&] {
            (void)verkv::split_quotient(some, some, {1.5, 0.1}, quotient_rule::lemma);
        },
        {"epsilon is 1.5"}));
    (void)verkv::split_quotient(some, some, {1.5, 0.1}, quotient_rule::sharp);
    CHECK(support::refused(
        [&] {
            (void)verkv::split_quotient(some, some, t, quotient_rule::lemma, verkv::quotient_shares{1.0, 0.25});
        },
        {"shares are 1", "0.25"}));
}
