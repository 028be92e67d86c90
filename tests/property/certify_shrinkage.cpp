// Shrinkage at sizes where it has to select, against bisection and a full sort in long double. Fixed seeds.
#include <algorithm>
#include <cmath>
#include <vector>

#include "support/catch.hpp"
#include "support/check_plan.hpp"
#include "support/reference.hpp"
#include "verkv/certify/estimator.hpp"
#include "verkv/certify/shrinkage.hpp"

namespace {

using support::decision;
using support::dice;
using support::probabilities;
using support::real;
using support::reference_decision;
using support::weights;
using verkv::cpu;
using floats = std::vector<float>;

/// lambda in long double, r where the float says r.
template <class Rule>
std::vector<real> shrunk_by(const reference_decision& ref, const decision& d) {
    floats lambda(d.size());
    verkv::shrink(cpu{}, Rule{}, d.mass, d.r, lambda);
    std::vector<real> out;
    for (std::size_t i = 0; i < d.size(); ++i) {
        out.push_back(lambda[i] == d.r[i] && d.r[i] < 1 ? ref.r[i] : static_cast<real>(lambda[i]));
    }
    return out;
}

template <class F>
void for_decisions(std::uint64_t seed, F&& f) {
    dice d(seed);
    for (const std::size_t n : {20u, 63u, 64u, 65u, 128u, 500u, 1000u, 5000u}) {
        for (int round = 0; round < (n < 1000 ? 6 : 2); ++round) {
            for (const weights w : support::all_weights) {
                for (const probabilities p : support::all_probabilities) {
                    const decision x = support::random_decision(d, n, w, p);
                    INFO("n " << n << ", weights " << static_cast<int>(w) << ", probabilities " << static_cast<int>(p));
                    f(x, reference_decision(x));
                }
            }
        }
    }
}

}  // namespace

TEST_CASE("certify: bounded shrinkage against bisection") {
    for_decisions(61, [](const decision& x, const reference_decision& ref) {
        const std::vector<real> lambda = shrunk_by<verkv::bounded_shrinkage>(ref, x);
        const std::vector<real> best = support::bounded_shrinkage_of(ref);
        const real error = support::mean_squared_error_of(ref, lambda);
        CHECK(error <= support::mean_squared_error_of(ref, best) * (1 + 1e-9L));
        CHECK(support::mean_squared_error_of(ref, best) <= error * (1 + 1e-12L));
        real farthest = 0;
        for (const std::size_t i : ref.sampled) {
            farthest = std::max(farthest, std::abs(lambda[i] - best[i]) / best[i]);
        }
        CHECK(farthest <= 1e-6L);
        // Nowhere in the box does the error fall: the condition that makes a minimum of a convex function.
        const support::reference_moments m = support::moments_of(ref, best, ref.sampled);
        for (const std::size_t i : ref.sampled) {
            const real slope = best[i] * ref.lift(i) - m.bias;  // of the error in lambda_i, over 2 m_i
            const real noise = 1e-15L * (m.bias + ref.lift(i));
            CHECK((best[i] == ref.r[i] || slope <= noise));
            CHECK((best[i] == 1 || slope >= -noise));
        }
    });
}

TEST_CASE("certify: binary shrinkage against a full sort") {
    for_decisions(62, [](const decision& x, const reference_decision& ref) {
        const std::vector<real> lambda = shrunk_by<verkv::binary_shrinkage>(ref, x);
        const std::vector<real> best = support::binary_shrinkage_of(ref);
        CHECK(support::close(support::mean_squared_error_of(ref, lambda), support::mean_squared_error_of(ref, best),
                             1e-6L));
        // The error falls all the way to the stop, and not one step further.
        real beta = 0, error = support::mean_squared_error_of(ref, support::unshrunk(ref));
        const real stop = support::mean_squared_error_of(ref, best);
        for (const std::size_t i : support::by_lift(ref)) {
            const real a = ref.mass[i] * ref.rest[i];
            error += a * (2 * beta - ref.lift(i));
            beta += a;
            CHECK(stop <= error * (1 + 1e-9L) + 1e-15L * stop);
        }
    });
}

TEST_CASE("certify: bounded is no worse than binary, and binary no worse than none") {
    for_decisions(63, [](const decision& x, const reference_decision& ref) {
        const real none = support::mean_squared_error_of(ref, shrunk_by<verkv::no_shrinkage>(ref, x));
        const real binary = support::mean_squared_error_of(ref, shrunk_by<verkv::binary_shrinkage>(ref, x));
        const real bounded = support::mean_squared_error_of(ref, shrunk_by<verkv::bounded_shrinkage>(ref, x));
        CHECK(binary <= none * (1 + 1e-7L));
        CHECK(bounded <= binary * (1 + 1e-9L));
    });
}
