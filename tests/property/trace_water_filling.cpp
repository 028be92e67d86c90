// The (epsilon, delta) promise of water-filling on real decisions, over 10^4 draws of the sample.
#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/trace_decisions.hpp"

namespace {

using namespace support;
using verkv::group_plan;
using verkv::plan;
using verkv::tolerance;

constexpr double epsilon = 0.05;

/// Plans of a step's query heads, one for each.
template <class Tail>
std::vector<plan> planned(std::span<const trace_decision> group, group_plan how, verkv::error_space space,
                          double delta) {
    static typename verkv::water_filling<Tail>::workspace w;
    std::vector<verkv::masses_view> m;
    for (const trace_decision& d : group) {
        m.push_back(d.masses());
        m.back().space = space;
    }
    std::vector<plan> plans(group.size());
    verkv::water_filling<Tail>{how, {}}.plan_group(verkv::cpu{}, m, {epsilon, delta}, w, plans);
    return plans;
}

double rows_of(const std::vector<float>& r, const plan& p) {
    double sum = 0;
    for (const verkv::plan_entry& e : p.entries) {
        sum += static_cast<double>(e.probability) - static_cast<double>(r[e.token]);
    }
    return sum;
}

/// Rows that a group is expected to fetch when its heads share their uniforms.
double union_rows(const std::vector<float>& r, const std::vector<plan>& plans) {
    std::vector<float> raised = r;
    for (const plan& p : plans) {
        for (const verkv::plan_entry& e : p.entries) {
            raised[e.token] = std::max(raised[e.token], e.probability);
        }
    }
    double sum = 0;
    for (std::size_t i = 0; i < r.size(); ++i) {
        sum += static_cast<double>(raised[i]) - static_cast<double>(r[i]);
    }
    return sum;
}

}  // namespace

// 27 decisions x 2 ways to plan x 2 tails x 2 promises, each held to 6 sigma of a binomial of its delta: false alarms
// below 3e-7 if the bounds were tight. Means: 27 x 9 at 6 standard errors, below 5e-7.
TEST_CASE("promise: water-filling keeps it on real decisions, alone and jointly, by either tail") {
    std::size_t broken_without = 0, raising = 0, partly = 0;
    double separate_rows = 0, joint_rows = 0, chernoff_rows = 0, greedy_rows = 0, alone_rows = 0;
    double worst = 0;
    for (std::uint32_t h = 0; h < 3; ++h) {
        const real_head head = head_of_trace(h);
        const std::size_t group = packaged().shape.group();
        std::vector<estimate> estimates;
        std::vector<double> deltas;
        for (std::size_t first = 0; first < head.decisions.size(); first += group) {
            const std::span<const trace_decision> step(head.decisions.data() + first, group);
            for (const double delta : {0.1, 0.5}) {
                const auto add = [&](const std::vector<plan>& plans) {
                    for (std::size_t g = 0; g < group; ++g) {
                        CHECK(plans[g].certificate_after < epsilon);
                        raising += plans[g].raised > 0;
                        partly += std::any_of(plans[g].entries.begin(), plans[g].entries.end(),
                                              [](const auto& e) { return e.probability < 1; });
                        estimates.emplace_back(step[g], head.r, plans[g]);
                        deltas.push_back(delta);
                    }
                };
                using verkv::bernstein_tail, verkv::chernoff_tail, verkv::error_space;
                const auto own = planned<bernstein_tail>(step, group_plan::per_head, error_space::scalar, delta);
                const auto joint = planned<bernstein_tail>(step, group_plan::joint, error_space::scalar, delta);
                const auto sharp = planned<chernoff_tail>(step, group_plan::per_head, error_space::scalar, delta);
                const auto both = planned<chernoff_tail>(step, group_plan::joint, error_space::scalar, delta);
                for (const auto* plans : {&own, &joint, &sharp, &both}) {
                    add(*plans);
                }
                separate_rows += union_rows(head.r, own);
                joint_rows += union_rows(head.r, joint);
                chernoff_rows += union_rows(head.r, both);
                verkv::greedy<verkv::no_shrinkage>::workspace memory;
                for (std::size_t g = 0; g < group; ++g) {
                    plan p;
                    verkv::greedy<verkv::no_shrinkage>{}.plan(verkv::cpu{}, step[g].masses(), {epsilon, delta}, memory,
                                                              p);
                    greedy_rows += rows_of(head.r, p);
                    alone_rows += rows_of(head.r, own[g]);
                }
            }
        }
        const std::size_t promised = estimates.size();
        for (const trace_decision& d : head.decisions) {
            estimates.emplace_back(d, head.r, plan{});
            deltas.push_back(0.1);
        }
        const auto outcomes = redraw(estimates, head.r.size(), epsilon, h);
        for (std::size_t i = 0; i < outcomes.size(); ++i) {
            CAPTURE(h, i, deltas[i]);
            const double most = draws * deltas[i] + 6 * std::sqrt(draws * deltas[i] * (1 - deltas[i]));
            const auto failures = static_cast<double>(outcomes[i].failures);
            if (i < promised) {
                CHECK(failures <= most);
                worst = std::max(worst, failures / draws / deltas[i]);
            } else {
                broken_without += failures > most;
            }
            const double deviation = std::abs(outcomes[i].sum / draws - estimates[i].expected());
            CHECK(deviation <= 6 * std::sqrt(estimates[i].variance() / draws) + 1e-6);
        }
    }
    CAPTURE(raising, partly, broken_without, worst, separate_rows, joint_rows, chernoff_rows, greedy_rows, alone_rows);
    // The same draws can tell: many decisions break the promise when nothing is fetched.
    CHECK(broken_without >= 12);
    CHECK(raising >= 108);
    CHECK(partly >= 108);
    CHECK(worst > 0.02);
    CHECK(joint_rows <= separate_rows * (1 + 1e-4));
    CHECK(chernoff_rows < joint_rows);
    CHECK(alone_rows < greedy_rows);
}
