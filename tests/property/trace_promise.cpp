// The (epsilon, delta) promise on real decisions: those of the packaged trace, over 10^4 draws of its sample.
#include <cmath>
#include <vector>

#include "support/catch.hpp"
#include "support/trace_decisions.hpp"
#include "verkv/verkv.hpp"

using support::draws;
using support::estimate;
using support::trace_decision;

// 27 decisions x 2 promises, each held to its own 6 sigma of a binomial of its delta: false alarms below 1e-7 if the
// bound were tight. Means: 27 x 3 plans at 6 standard errors, below 2e-7.
TEST_CASE("promise: real decisions keep it over ten thousand draws, and break it without a fetch") {
    constexpr double epsilon = 0.05;
    std::size_t broken_without = 0;
    std::size_t fetching = 0;
    for (std::uint32_t h = 0; h < 3; ++h) {
        const support::real_head head = support::head_of_trace(h);
        std::vector<estimate> estimates;
        std::vector<double> deltas;
        verkv::greedy<>::workspace memory;
        for (const double delta : {0.1, 0.5}) {
            for (const trace_decision& d : head.decisions) {
                verkv::plan p;
                verkv::greedy<>{}.plan(verkv::cpu{}, d.masses(), {epsilon, delta}, memory, p);
                CHECK(p.certificate_after < epsilon);
                fetching += p.raised > 0;
                estimates.emplace_back(d, head.r, p);
                deltas.push_back(delta);
            }
        }
        const std::size_t promised = estimates.size();
        for (const trace_decision& d : head.decisions) {
            verkv::plan p;
            verkv::never_fetch<verkv::no_shrinkage>{}.plan(verkv::cpu{}, d.masses(), {epsilon, 0.1}, memory, p);
            estimates.emplace_back(d, head.r, p);
            deltas.push_back(0.1);
        }
        const auto outcomes = support::redraw(estimates, head.r.size(), epsilon, h);
        for (std::size_t i = 0; i < outcomes.size(); ++i) {
            CAPTURE(h, i, deltas[i]);
            const double most = draws * deltas[i] + 6 * std::sqrt(draws * deltas[i] * (1 - deltas[i]));
            const bool kept = static_cast<double>(outcomes[i].failures) <= most;
            if (i < promised) {
                CHECK(kept);
            } else {
                broken_without += !kept;
            }
            const double deviation = std::abs(outcomes[i].sum / draws - estimates[i].expected());
            CHECK(deviation <= 6 * std::sqrt(estimates[i].variance() / draws) + 1e-6);
        }
    }
    // The same draws can tell: of 27 decisions, many break the promise when nothing is fetched.
    CHECK(broken_without >= 12);
    CHECK(fetching >= 36);
}
