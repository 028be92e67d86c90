// Statistics over redraws, with counted seeds. The uniforms are the library's own, so a fault of theirs shows, too.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "support/catch.hpp"
#include "support/reference.hpp"
#include "verkv/certify/estimator.hpp"
#include "verkv/certify/shrinkage.hpp"
#include "verkv/core/random.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/plan/greedy.hpp"

namespace {

using support::decision;
using support::dice;
using support::probabilities;
using support::weights;
using verkv::cpu;
using verkv::plan;
using verkv::plan_entry;
using verkv::token_index;
using verkv::tolerance;
using floats = std::vector<float>;

constexpr std::uint32_t redraws = 10000;

double uniform_of(std::uint32_t decision_number, std::uint32_t draw, std::size_t token) {
    return verkv::uniform({.seed = 20240607, .layer = decision_number, .kv_head = 0, .draw = draw},
                          static_cast<verkv::position_t>(token));
}

/// P(X >= x) of a binomial X.
double binomial_tail(std::size_t x, std::size_t n, double p) {
    const auto of = [](std::size_t i) { return static_cast<double>(i); };
    double total = 0;
    for (std::size_t k = x; k <= n; ++k) {
        total += std::exp(std::lgamma(of(n) + 1) - std::lgamma(of(k) + 1) - std::lgamma(of(n - k) + 1) +
                          of(k) * std::log(p) + of(n - k) * std::log1p(-p));
    }
    return total;
}

/// A plan as arrays: what each token adds to the estimate when its uniform is below r'.
struct drawn_plan {
    std::vector<float> r;
    std::vector<double> weight;
    double target;  // epsilon D
    double delta;
    bool fetches;  // the promise is the planner's, not luck
    std::size_t failures = 0;
};

drawn_plan drawn(const decision& d, const plan& p, tolerance t) {
    drawn_plan out{d.r, {}, t.epsilon * d.reference, t.delta, p.raised > 0, 0};
    std::vector<float> lambda(d.size(), 1.0f);
    for (const plan_entry& e : p.entries) {
        out.r[e.token] = e.probability;
        lambda[e.token] = e.shrinkage;
    }
    for (std::size_t i = 0; i < d.size(); ++i) {
        out.weight.push_back(static_cast<double>(d.mass[i]) * static_cast<double>(lambda[i]) /
                             static_cast<double>(out.r[i]));
    }
    return out;
}

template <class Planner>
drawn_plan planned(const decision& d, tolerance t) {
    typename Planner::workspace w;
    plan out;
    Planner{}.plan(cpu{}, d.view(), t, w, out);
    return drawn(d, out, t);
}

std::vector<decision> some_decisions() {
    dice d(71);
    std::vector<decision> out;
    for (const weights w : {weights::peaked, weights::flat, weights::heavy_tailed, weights::equal}) {
        out.push_back(support::random_decision(d, 200, w, probabilities::importance, 0.05, 0));
        out.push_back(support::random_decision(d, 200, w, probabilities::constant, 0.05, 0));
    }
    // Few tokens, where an error of Bernstein's constants is nearest to showing.
    out.emplace_back(floats{1, 1, 8}, floats{0.5f, 0.5f, 1});
    out.emplace_back(floats{1, 0.5f, 0.25f, 0.125f, 8}, floats{0.2f, 0.2f, 0.2f, 0.2f, 1});
    return out;
}

/// Redraws every plan of a decision with the same uniforms and counts where the error exceeds epsilon.
void redraw(const decision& d, std::uint32_t number, std::vector<drawn_plan>& plans) {
    std::vector<double> u(d.size());
    for (std::uint32_t draw = 0; draw < redraws; ++draw) {
        for (std::size_t i = 0; i < d.size(); ++i) {
            u[i] = uniform_of(number, draw, i);
        }
        for (drawn_plan& p : plans) {
            double estimate = 0;
            for (std::size_t i = 0; i < d.size(); ++i) {
                estimate += verkv::sampled(static_cast<double>(p.r[i]), u[i]) ? p.weight[i] : 0;
            }
            p.failures += std::abs(estimate - d.reference) > p.target;
        }
    }
}

}  // namespace

TEST_CASE("plan: the promise over ten thousand redraws") {
    // One-sided binomial test of each plan at 1e-7: with some 300 plans, under 3e-5 that a sound library fails.
    const tolerance tolerances[] = {{0.02, 0.1}, {0.05, 0.1}, {0.1, 0.1},  {0.3, 0.1},
                                    {0.1, 0.01}, {0.1, 0.5},  {0.05, 0.3}, {0.3, 0.9}};
    std::size_t fetching = 0, unplanned_failures = 0;
    std::uint32_t number = 0;
    for (const decision& d : some_decisions()) {
        std::vector<drawn_plan> plans;
        for (const tolerance& t : tolerances) {
            plans.push_back(planned<verkv::greedy<verkv::binary_shrinkage>>(d, t));
            plans.push_back(planned<verkv::greedy<verkv::bounded_shrinkage>>(d, t));
            plans.push_back(planned<verkv::greedy<verkv::no_shrinkage>>(d, t));
        }
        const std::size_t promised = plans.size();
        for (const tolerance& t : tolerances) {
            plans.push_back(planned<verkv::never_fetch<>>(d, t));
        }
        redraw(d, number, plans);
        for (std::size_t i = 0; i < plans.size(); ++i) {
            const drawn_plan& p = plans[i];
            const bool broken = binomial_tail(p.failures, redraws, p.delta) < 1e-7;
            if (i < promised) {
                fetching += p.fetches;
                INFO("decision " << number << ", plan " << i << ", delta " << p.delta << ", failures " << p.failures);
                CHECK(!broken);
            } else {
                unplanned_failures += broken;
            }
        }
        ++number;
    }
    // The test would notice: most of these plans fetch, and without that the promise is broken.
    CHECK(fetching > 100);
    CHECK(unplanned_failures > 30);
}

TEST_CASE("plan: the stated certificate over ten thousand redraws of what is never fetched") {
    // As above with epsilon = the certificate itself, where the bound is as near as it gets.
    std::uint32_t number = 100;
    for (const decision& d : some_decisions()) {
        std::vector<drawn_plan> plans;
        for (const double delta : {0.01, 0.1, 0.5, 0.9}) {
            const auto each = [&]<class Rule>(Rule) {
                typename verkv::never_fetch<Rule>::workspace w;
                plan p;
                verkv::never_fetch<Rule>{}.plan(cpu{}, d.view(), {0.1, delta}, w, p);
                plans.push_back(drawn(d, p, {p.certificate_after * (1 + 1e-6), delta}));
            };
            each(verkv::binary_shrinkage{});
            each(verkv::bounded_shrinkage{});
            each(verkv::no_shrinkage{});
        }
        redraw(d, number, plans);
        for (const drawn_plan& p : plans) {
            INFO("decision " << number << ", delta " << p.delta << ", failures " << p.failures);
            CHECK(!(binomial_tail(p.failures, redraws, p.delta) < 1e-7));
        }
        ++number;
    }
}

TEST_CASE("certify: redraws average to the mean and to the error that are stated") {
    // Mean: the variance is known. Squared error: its spread is taken from the draws. 5.5 and 6 deviations, 80 tests
    // in all: under 1e-5 that a sound library fails (with room for the skew of squared errors).
    std::uint32_t number = 200;
    for (const decision& d : some_decisions()) {
        for (int rule = 0; rule < 4; ++rule) {
            floats lambda(d.size(), 1.0f);
            if (rule == 1) {
                verkv::shrink(cpu{}, verkv::binary_shrinkage{}, d.mass, d.r, lambda);
            } else if (rule == 2) {
                verkv::shrink(cpu{}, verkv::bounded_shrinkage{}, d.mass, d.r, lambda);
            } else if (rule == 3) {
                lambda = d.r;
            }
            double expected = 0, bias = 0;
            for (std::size_t i = 0; i < d.size(); ++i) {
                expected += static_cast<double>(d.mass[i]) * static_cast<double>(lambda[i]);
                bias += static_cast<double>(d.mass[i]) * (1 - static_cast<double>(lambda[i]));
            }
            const double stated = verkv::mean_squared_error(cpu{}, d.mass, d.r, lambda);
            const double deviation = std::sqrt(std::max(0.0, stated - bias * bias));
            double mean = 0, error = 0, fourth = 0;
            std::vector<token_index> sample;
            for (std::uint32_t draw = 0; draw < redraws; ++draw) {
                sample.clear();
                for (std::size_t i = 0; i < d.size(); ++i) {
                    if (verkv::sampled(static_cast<double>(d.r[i]), uniform_of(number, draw, i))) {
                        sample.push_back(static_cast<token_index>(i));
                    }
                }
                const double estimate = rule == 0 ? verkv::horvitz_thompson(cpu{}, d.mass, d.r, sample)
                                                  : verkv::estimate_sum(cpu{}, d.mass, d.r, lambda, sample);
                const double squared = (estimate - d.reference) * (estimate - d.reference);
                mean += estimate / redraws;
                error += squared / redraws;
                fourth += squared * squared / redraws;
            }
            INFO("decision " << number << ", rule " << rule);
            CHECK(std::abs(mean - expected) <= 5.5 * deviation / std::sqrt(double{redraws}));
            const double spread = std::sqrt(std::max(0.0, fourth - error * error) / redraws);
            CHECK(std::abs(error - stated) <= 6 * spread + 1e-9 * stated);
        }
        ++number;
    }
}
