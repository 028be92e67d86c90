// What approximate rows leave of a promise: against random and against the worst that rows may do.
#include "verkv/certify/row_error.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"

namespace {

using namespace support;
using verkv::row_error;

constexpr double infinity = std::numeric_limits<double>::infinity();

TEST_CASE("row error: denominators, whatever the logits' errors are") {
    dice d(111);
    real nearest = 0;
    for (int round = 0; round < 20000; ++round) {
        const std::size_t n = 1 + d.below(8);
        const double b = d.chance(0.2) ? 0.0 : d.log_between(1e-4, 3);
        // D is what it has to be for D^ to be off by epsilon or less.
        real exact = 0, approximate = 0;
        const std::size_t style = d.below(4);
        for (std::size_t i = 0; i < n; ++i) {
            const double w = std::exp(2 * d.normal());
            const double off = style == 0      ? b
                               : style == 1    ? -b
                               : style == 2    ? d.between(-b, b)
                               : d.chance(0.5) ? b
                                               : -b;
            exact += static_cast<real>(w);
            approximate += static_cast<real>(w) * std::exp(static_cast<real>(off));
        }
        const double epsilon = d.chance(0.2) ? 0.0 : d.log_between(1e-4, 2);
        const double share = d.chance(0.5) ? (d.chance(0.5) ? 1 : -1) : d.between(-1, 1);
        const real truth = exact / (1 + static_cast<real>(share * epsilon));
        if (!(truth > 0)) {
            continue;
        }
        const real error = std::abs(approximate / truth - 1);
        const real promised = static_cast<real>(verkv::promised_epsilon(epsilon, {b, d.uniform()}));
        REQUIRE(error <= promised * (1 + 1e-12L) + 1e-15L);
        nearest = promised > 0 ? (std::max)(nearest, error / promised) : nearest;
    }
    CHECK(nearest > 1 - 1e-9L);
}

/// ||o~ - o^|| of probabilities, logit errors, values and value errors.
double output_error(const std::vector<double>& p, const std::vector<double>& off,
                    const std::vector<std::vector<double>>& v, const std::vector<std::vector<double>>& moved) {
    double total = 0;
    for (std::size_t i = 0; i < p.size(); ++i) {
        total += p[i] * std::exp(off[i]);
    }
    double square = 0;
    for (std::size_t c = 0; c < v[0].size(); ++c) {
        double sum = 0;
        for (std::size_t i = 0; i < p.size(); ++i) {
            sum += p[i] * std::exp(off[i]) / total * (v[i][c] + moved[i][c]) - p[i] * v[i][c];
        }
        square += sum * sum;
    }
    return std::sqrt(square);
}

TEST_CASE("row error: outputs, random and sought out") {
    dice d(112);
    double nearest = 0;
    for (int round = 0; round < 4000; ++round) {
        const std::size_t n = 1 + d.below(6), width = 1 + d.below(4);
        const double b = d.log_between(1e-3, 4), eta = d.chance(0.5) ? 0.0 : d.log_between(1e-3, 1);
        std::vector<double> p(n), off(n), direction(width);
        std::vector<std::vector<double>> v(n, std::vector<double>(width)), moved = v;
        double total = 0, length = 0;
        for (double& x : direction) {
            x = d.normal();
            length += x * x;
        }
        for (double& x : p) {
            x = std::exp(2 * d.normal());
            total += x;
        }
        for (std::size_t i = 0; i < n; ++i) {
            p[i] /= total;
            off[i] = d.chance(0.5) ? b : -b;
            double moved_length = 0;
            for (std::size_t c = 0; c < width; ++c) {
                v[i][c] = d.normal();
                moved[i][c] = round % 2 ? direction[c] : d.normal();
                moved_length += moved[i][c] * moved[i][c];
            }
            for (double& x : moved[i]) {
                x *= eta / std::sqrt(moved_length);
            }
        }
        double spread = 0;
        for (std::size_t i = 0; i < n; ++i) {
            for (std::size_t j = 0; j < i; ++j) {
                double apart = 0;
                for (std::size_t c = 0; c < width; ++c) {
                    apart += (v[i][c] - v[j][c]) * (v[i][c] - v[j][c]);
                }
                spread = (std::max)(spread, std::sqrt(apart));
            }
        }
        // Climb: each token's error to the end of its range where that makes things worse.
        for (int step = 0; step < 3; ++step) {
            for (std::size_t i = 0; i < n; ++i) {
                const double here = output_error(p, off, v, moved);
                off[i] = -off[i];
                if (output_error(p, off, v, moved) < here) {
                    off[i] = -off[i];
                }
            }
        }
        const double reference = d.log_between(0.1, 10), epsilon = d.uniform();
        const double error = output_error(p, off, v, moved);
        const double promised = verkv::promised_output_epsilon(epsilon, {b, eta}, spread, reference);
        REQUIRE(error <= (promised - epsilon) * reference * (1 + 1e-10) + 1e-12);
        nearest = (std::max)(nearest, error / ((promised - epsilon) * reference));
    }
    CHECK(nearest > 0.9);
    SECTION("two tokens reach it") {
        for (const double b : {0.01, 0.5, 3.0}) {
            const double p = 1 / (1 + std::exp(b));
            const double error = output_error({p, 1 - p}, {b, -b}, {{2}, {-1}}, {{0.25}, {0.25}});
            CHECK(error == Approx(verkv::promised_output_epsilon(0, {b, 0.25}, 3, 1)).epsilon(1e-12));
        }
    }
}

TEST_CASE("row error: nothing is lost where rows are exact, and both ways fit") {
    CHECK(verkv::promised_epsilon(0.05, {}) == 0.05);
    CHECK(verkv::promised_output_epsilon(0.05, {}, 10, 2) == 0.05);
    CHECK(verkv::epsilon_to_certify(0.05, {}) == 0.05);
    CHECK(verkv::promised_epsilon(0.05, {0.02, 0}) == Approx(std::exp(0.02) * 1.05 - 1));
    CHECK(verkv::promised_epsilon(0, {1e-12, 0}) == Approx(1e-12).epsilon(1e-10));
    dice d(113);
    for (int round = 0; round < 200; ++round) {
        const row_error e{d.log_between(1e-6, 0.5), d.log_between(1e-6, 0.1)};
        const double epsilon = d.log_between(1e-6, 1), spread = d.uniform(), reference = d.log_between(0.3, 3);
        CHECK(verkv::epsilon_to_certify(verkv::promised_epsilon(epsilon, e), e) ==
              Approx(epsilon).epsilon(1e-8).margin(1e-14));
        CHECK(verkv::output_epsilon_to_certify(verkv::promised_output_epsilon(epsilon, e, spread, reference), e, spread,
                                               reference) == Approx(epsilon).epsilon(1e-8).margin(1e-14));
    }
}

TEST_CASE("row error: what is refused") {
    CHECK(refused([] { (void)verkv::promised_epsilon(0.1, {-1, 0}); }, {"-1"}));
    CHECK(refused([] { (void)verkv::promised_epsilon(0.1, {0, infinity}); }, {"inf"}));
    CHECK(refused([] { (void)verkv::promised_epsilon(-0.1, {}); }, {"epsilon is -0.1"}));
    CHECK(refused([] { (void)verkv::promised_output_epsilon(0.1, {}, -2, 1); }, {"apart by -2"}));
    CHECK(refused([] { (void)verkv::promised_output_epsilon(0.1, {}, 2, 0); }, {"against 0"}));
    CHECK(refused([] { (void)verkv::epsilon_to_certify(0.1, {0.5, 0}); }, {"0.1", "0.648"}));
    CHECK(refused([] { (void)verkv::output_epsilon_to_certify(0.1, {0, 0.5}, 1, 1); }, {"0.1", "0.5"}));
}

}  // namespace
