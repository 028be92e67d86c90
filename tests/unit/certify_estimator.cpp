#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/certify/bernstein.hpp"
#include "verkv/certify/estimator.hpp"
#include "verkv/certify/shrinkage.hpp"
#include "verkv/certify/target.hpp"

namespace {

using support::decision;
using support::dice;
using support::probabilities;
using support::real;
using support::reference_decision;
using support::refused;
using support::weights;
using verkv::bernstein_moments;
using verkv::cpu;
using verkv::token_index;
using floats = std::vector<float>;

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

std::vector<real> widened(const floats& x) {
    return {x.begin(), x.end()};
}

/// A small decision whose r is neither tiny nor near 1, so that all 2^|L| samples matter.
decision small_decision(dice& d, std::size_t n) {
    floats mass, r;
    for (std::size_t i = 0; i < n; ++i) {
        mass.push_back(static_cast<float>(d.log_between(1e-2, 1)));
        r.push_back(d.chance(0.2) ? 1.0f : static_cast<float>(d.between(0.05, 0.95)));
    }
    return {mass, r};
}

/// Calls f(sample, probability of the sample) for every sample of the decision.
template <class F>
void for_every_sample(const decision& d, F&& f) {
    for (std::size_t bits = 0; bits < (std::size_t{1} << d.size()); ++bits) {
        std::vector<token_index> sample;
        double probability = 1;
        for (std::size_t i = 0; i < d.size(); ++i) {
            const bool in = ((bits >> i) & 1) != 0;
            const auto p = static_cast<double>(d.r[i]);
            probability *= in ? p : 1 - p;
            if (in) {
                sample.push_back(static_cast<token_index>(i));
            }
        }
        if (probability > 0) {
            f(std::span<const token_index>(sample), probability);
        }
    }
}

}  // namespace

TEST_CASE("certify: moments and bound of three tokens by hand") {
    bernstein_moments m;
    m.add(0.5, 3, 1, 0);          // r = 1/4
    m.add(0.25, 1, 0.5, 0.5);     // r = 1/2, shrunk to it
    m.add(0.125, 1.0 / 3, 1, 0);  // r = 3/4: max(1, odds) is 1
    CHECK(m.bias == 0.125);
    CHECK(m.variance == Approx(0.75 + 0.015625 + 0.015625 / 3).epsilon(1e-15));
    CHECK(m.largest == 1.5);
    const double l = std::log(20.0);
    CHECK(verkv::bernstein_bound(m, l) ==
          Approx(0.125 + 0.5 * l + std::sqrt(0.25 * l * l + 2 * m.variance * l)).epsilon(1e-15));
    CHECK(verkv::bernstein_bound({}, l) == 0);

    const floats mass{0.5f, 0.25f, 0.125f, 7.0f}, r{0.25f, 0.5f, 0.75f, 1.0f}, lambda{1, 0.5f, 1, 1};
    const bernstein_moments same = verkv::moments(cpu{}, mass, r, lambda);
    CHECK(same.bias == Approx(m.bias).epsilon(1e-15));
    CHECK(same.variance == Approx(m.variance).epsilon(1e-15));
    CHECK(same.largest == m.largest);
    CHECK(verkv::certificate(cpu{}, mass, r, lambda, {0.05, 0.1}) ==
          Approx(verkv::bernstein_bound(m, l) / 7.875).epsilon(1e-14));
}

TEST_CASE("certify: moments of parts add up to those of the whole") {
    dice d(1);
    const decision x = support::random_decision(d, 200, weights::peaked, probabilities::decades);
    const reference_decision ref(x);
    bernstein_moments whole, first, second;
    for (std::size_t i = 0; i < x.size(); ++i) {
        const auto mass = static_cast<double>(x.mass[i]);
        const auto odds = static_cast<double>(x.odds[i]);
        if (odds > 0) {
            whole.add(mass, odds, 1, 0);
            (i < 77 ? first : second).add(mass, odds, 1, 0);
        }
    }
    first += second;
    CHECK(first.bias == 0);
    CHECK(first.variance == Approx(whole.variance).epsilon(1e-14));
    CHECK(first.largest == whole.largest);
    first += bernstein_moments{};
    CHECK(first.largest == whole.largest);
}

TEST_CASE("certify: the bound grows with each moment and with the demand") {
    const bernstein_moments m{0.1, 0.2, 0.3};
    const double at = verkv::bernstein_bound(m, 3);
    CHECK(verkv::bernstein_bound({0.11, 0.2, 0.3}, 3) > at);
    CHECK(verkv::bernstein_bound({0.1, 0.21, 0.3}, 3) > at);
    CHECK(verkv::bernstein_bound({0.1, 0.2, 0.31}, 3) > at);
    CHECK(verkv::bernstein_bound(m, 3.1) > at);
}

TEST_CASE("certify: moments, error and certificate are the paper's") {
    dice d(2);
    for (int round = 0; round < 60; ++round) {
        for (const weights w : support::all_weights) {
            for (const probabilities p : support::all_probabilities) {
                const decision x = support::random_decision(d, 1 + d.below(200), w, p);
                const reference_decision ref(x);
                floats lambda;
                for (std::size_t i = 0; i < x.size(); ++i) {
                    const double l = d.chance(0.5) ? 1 : d.between(static_cast<double>(x.r[i]), 1);
                    lambda.push_back(std::clamp(static_cast<float>(l), x.r[i], 1.0f));
                }
                const verkv::tolerance t{0.05, d.log_between(1e-6, 0.9)};
                // r itself instead of r from the odds: 1 - r must not lose its digits.
                reference_decision exact = ref;
                for (std::size_t i = 0; i < x.size(); ++i) {
                    exact.mass[i] = static_cast<real>(x.mass[i]);
                    exact.r[i] = static_cast<real>(x.r[i]);
                    exact.rest[i] = 1 - exact.r[i];
                }
                const support::reference_moments expected = support::moments_of(exact, widened(lambda), exact.sampled);
                const bernstein_moments found = verkv::moments(cpu{}, x.mass, x.r, lambda);
                CHECK(found.bias == Approx(static_cast<double>(expected.bias)).epsilon(1e-12));
                CHECK(found.variance == Approx(static_cast<double>(expected.variance)).epsilon(1e-12));
                CHECK(found.largest == Approx(static_cast<double>(expected.largest)).epsilon(1e-12));
                CHECK(
                    verkv::mean_squared_error(cpu{}, x.mass, x.r, lambda) ==
                    Approx(static_cast<double>(support::mean_squared_error_of(exact, widened(lambda)))).epsilon(1e-12));
                real total = 0;
                for (const float m : x.mass) {
                    total += static_cast<real>(m);
                }
                const real bound = support::bound_of(expected, support::log_term_of(t));
                const double certified = bound > 0 ? static_cast<double>(bound / total) : 0;
                CHECK(verkv::certificate(cpu{}, x.mass, x.r, lambda, t) == Approx(certified).epsilon(1e-12));
            }
        }
    }
}

TEST_CASE("certify: over all samples the estimate is unbiased and has the error that is stated") {
    dice d(3);
    for (int round = 0; round < 40; ++round) {
        const decision x = small_decision(d, 1 + d.below(9));
        double total = 0;
        for (const float m : x.mass) {
            total += static_cast<double>(m);
        }
        floats lambda(x.size());
        for (int rule = 0; rule < 4; ++rule) {
            switch (rule) {
                case 0:
                    lambda.assign(x.size(), 1.0f);
                    break;
                case 1:
                    verkv::shrink(cpu{}, verkv::binary_shrinkage{}, x.mass, x.r, lambda);
                    break;
                case 2:
                    verkv::shrink(cpu{}, verkv::bounded_shrinkage{}, x.mass, x.r, lambda);
                    break;
                default:
                    for (std::size_t i = 0; i < x.size(); ++i) {
                        const auto r = static_cast<double>(x.r[i]);
                        lambda[i] = std::max(x.r[i], static_cast<float>(d.between(r, 1)));
                    }
            }
            double mean = 0, error = 0, certain = 0;
            for_every_sample(x, [&](std::span<const token_index> sample, double probability) {
                const double estimate = verkv::estimate_sum(cpu{}, x.mass, x.r, lambda, sample);
                mean += probability * estimate;
                error += probability * (estimate - total) * (estimate - total);
                certain += probability;
                if (rule == 0) {
                    CHECK(verkv::horvitz_thompson(cpu{}, x.mass, x.r, sample) == estimate);
                    CHECK(verkv::estimate_sum(cpu{}, x.mass, x.r, {}, sample) == estimate);
                }
            });
            REQUIRE(certain == Approx(1).epsilon(1e-12));
            double expected = 0;
            for (std::size_t i = 0; i < x.size(); ++i) {
                expected += static_cast<double>(lambda[i]) * static_cast<double>(x.mass[i]);
            }
            CHECK(mean == Approx(expected).epsilon(1e-12));
            CHECK(error == Approx(verkv::mean_squared_error(cpu{}, x.mass, x.r, lambda)).epsilon(1e-9).margin(1e-25));
        }
    }
}

TEST_CASE("certify: over all samples the certificate is exceeded with probability delta at most") {
    dice d(4);
    for (int round = 0; round < 60; ++round) {
        const decision x = small_decision(d, 1 + d.below(9));
        double total = 0;
        for (const float m : x.mass) {
            total += static_cast<double>(m);
        }
        for (const double delta : {0.01, 0.1, 0.5, 0.9}) {
            for (const bool binary : {false, true}) {
                floats lambda(x.size(), 1.0f);
                if (binary) {
                    verkv::shrink(cpu{}, verkv::binary_shrinkage{}, x.mass, x.r, lambda);
                }
                const double certified = verkv::certificate(cpu{}, x.mass, x.r, lambda, {0.1, delta});
                double failed = 0;
                for_every_sample(x, [&](std::span<const token_index> sample, double probability) {
                    const double estimate = verkv::estimate_sum(cpu{}, x.mass, x.r, lambda, sample);
                    // A bound that is attained (one token in L) is not exceeded.
                    failed += std::abs(estimate - total) > certified * total * (1 + 1e-12) ? probability : 0;
                });
                CHECK(failed <= delta);
            }
        }
    }
}

TEST_CASE("certify: nothing to estimate") {
    const floats none;
    CHECK(verkv::estimate_sum(cpu{}, none, none, none, {}) == 0);
    CHECK(verkv::horvitz_thompson(cpu{}, none, none, {}) == 0);
    CHECK(verkv::mean_squared_error(cpu{}, none, none, none) == 0);
    CHECK(verkv::moments(cpu{}, none, none, none) == bernstein_moments{});
    CHECK(verkv::certificate(cpu{}, none, none, none, {}) == 0);

    const floats mass{1, 2, 3}, certain{1, 1, 1}, silent{0, 0, 0}, half(3, 0.5f);
    CHECK(verkv::certificate(cpu{}, mass, certain, certain, {}) == 0);
    CHECK(verkv::mean_squared_error(cpu{}, mass, certain, certain) == 0);
    CHECK(verkv::certificate(cpu{}, silent, half, certain, {}) == 0);
    const std::array<token_index, 3> all{0, 1, 2};
    CHECK(verkv::horvitz_thompson(cpu{}, mass, certain, all) == 6);
    CHECK(verkv::horvitz_thompson(cpu{}, mass, half, all) == 12);
    CHECK(verkv::estimate_sum(cpu{}, mass, half, half, all) == 6);
    CHECK(verkv::estimate_sum(cpu{}, mass, half, half, {}) == 0);
}

TEST_CASE("certify: the target of the denominator hands on what it gets") {
    const floats mass{1, 2}, odds{3, 4};
    const verkv::masses_view m = verkv::denominator{}.masses(mass, odds, 3.5);
    CHECK(m.mass.data() == mass.data());
    CHECK(m.odds.data() == odds.data());
    CHECK(m.mass.size() == 2);
    CHECK(m.reference == 3.5);
}

TEST_CASE("certify: arguments out of range are refused with their numbers") {
    const cpu exec;
    const floats three(3, 0.5f), two(2, 0.5f), ones(3, 1.0f);
    const std::array<token_index, 1> third{2}, fourth{3};
    CHECK(refused([&] { (void)verkv::estimate_sum(exec, three, two, {}, {}); }, {"3 masses", "2 prob"}));
    CHECK(refused([&] { (void)verkv::estimate_sum(exec, three, three, two, {}); }, {"2 shrinkages"}));
    CHECK(refused([&] { (void)verkv::estimate_sum(exec, three, three, {}, fourth); }, {"token 3", "of 3"}));
    CHECK(refused([&] { (void)verkv::mean_squared_error(exec, three, three, two); }, {"2 shrinkages"}));
    CHECK(refused([&] { (void)verkv::moments(exec, three, two, three); }, {"2 prob"}));
    CHECK(refused([&] { (void)verkv::certificate(exec, two, three, three, {}); }, {"2 masses"}));
    CHECK(refused([&] { (void)verkv::certificate(exec, three, three, ones, {0.1, 1.5}); }, {"delta", "1.5"}));
    CHECK(refused([&] { (void)verkv::certificate(exec, three, three, ones, {-1, 0.5}); }, {"epsilon", "-1"}));

    for (const float r : {0.0f, -0.5f, 1.5f, not_a_number, infinity}) {
        const floats bad{0.5f, 0.5f, r};
        CHECK(refused([&] { (void)verkv::estimate_sum(exec, three, bad, {}, third); }, {"token 2", "probability"}));
        CHECK(refused([&] { (void)verkv::mean_squared_error(exec, three, bad, ones); }, {"token 2", "probability"}));
        CHECK(refused([&] { (void)verkv::moments(exec, three, bad, ones); }, {"token 2", "probability"}));
    }
    for (const float lambda : {0.25f, -1.0f, 1.25f, not_a_number}) {
        const floats bad{1, 1, lambda};
        CHECK(refused([&] { (void)verkv::estimate_sum(exec, three, three, bad, third); }, {"token 2", "shrinkage"}));
        CHECK(refused([&] { (void)verkv::mean_squared_error(exec, three, three, bad); }, {"token 2", "shrinkage"}));
        CHECK(refused([&] { (void)verkv::moments(exec, three, three, bad); }, {"token 2", "shrinkage"}));
    }
    for (const float mass : {-1.0f, not_a_number, infinity}) {
        const floats bad{1, 1, mass};
        CHECK(refused([&] { (void)verkv::estimate_sum(exec, bad, three, {}, third); }, {"token 2", "mass"}));
        CHECK(refused([&] { (void)verkv::horvitz_thompson(exec, bad, three, third); }, {"token 2", "mass"}));
        CHECK(refused([&] { (void)verkv::mean_squared_error(exec, bad, three, ones); }, {"token 2", "mass"}));
        CHECK(refused([&] { (void)verkv::moments(exec, bad, three, ones); }, {"token 2", "mass"}));
        CHECK(refused([&] { (void)verkv::certificate(exec, bad, three, ones, {}); }, {"token 2", "mass"}));
    }
}
