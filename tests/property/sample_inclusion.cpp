// Inclusion probabilities against bisection in long double, over random importance.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "support/catch.hpp"
#include "verkv/sample/inclusion.hpp"

using namespace verkv;

namespace {

using floats = std::vector<float>;

// One of several kinds of importance: twelve decades, ties, zeros, flat, one giant.
floats random_importance(std::mt19937& random, std::size_t n, unsigned kind) {
    std::uniform_real_distribution<double> unit(0.0, 1.0);
    floats tau(n);
    for (float& t : tau) {
        switch (kind) {
            case 0:
                t = static_cast<float>(std::pow(10.0, -12 * unit(random)));
                break;
            case 1:
                t = static_cast<float>(1 + random() % 3) / 4;
                break;
            case 2:
                t = random() % 2 ? 0.0f : static_cast<float>(unit(random));
                break;
            case 3:
                t = 1e-40f * static_cast<float>(1 + random() % 100);
                break;
            default:
                t = static_cast<float>(unit(random));
        }
    }
    if (kind == 4 && n > 0) {
        tau[random() % n] = 1e20f;
    }
    return tau;
}

// r by bisection on c, in long double, from the definition.
std::vector<long double> bisected(const floats& tau, long double rows, windows fixed) {
    const std::size_t n = tau.size();
    std::vector<long double> r(n, 1.0L);
    const std::size_t first = fixed.free_begin(n);
    const std::size_t last = fixed.free_end(n);
    long double sum = 0;
    long double positive = 0;
    for (std::size_t i = first; i < last; ++i) {
        sum += static_cast<long double>(tau[i]);
        positive += tau[i] > 0 ? 1 : 0;
    }
    const long double lowest = positive > 0 ? 1e-6L * sum / positive : 1.0L;
    const auto raised = [&](std::size_t i) { return std::max(static_cast<long double>(tau[i]), lowest); };
    const auto total = [&](long double c) {
        long double s = 0;
        for (std::size_t i = first; i < last; ++i) {
            s += std::min(1.0L, c * raised(i));
        }
        return s;
    };
    const long double rest = rows - static_cast<long double>(fixed.fixed_count(n));
    long double low = -60;  // powers of ten
    long double high = 60;
    for (int k = 0; k < 300; ++k) {
        const long double middle = (low + high) / 2;
        (total(std::pow(10.0L, middle)) > rest ? high : low) = middle;
    }
    for (std::size_t i = first; i < last; ++i) {
        r[i] = std::min(1.0L, std::pow(10.0L, low) * raised(i));
    }
    return r;
}

}  // namespace

TEST_CASE("sample: inclusion probabilities are those of an exact c") {
    std::mt19937 random(20260101);
    for (int trial = 0; trial < 400; ++trial) {
        const std::size_t n = 1 + random() % 300;
        const auto kind = static_cast<unsigned>(random() % 6);
        const windows fixed{random() % 8, random() % 8};
        const floats tau = random_importance(random, n, kind);
        const double free_tokens = static_cast<double>(n - fixed.fixed_count(n));
        const double share = std::pow(10.0, -4 * std::uniform_real_distribution<double>(0, 1)(random));
        const double kept =
            std::min(1.0, (static_cast<double>(fixed.fixed_count(n)) + share * free_tokens) / static_cast<double>(n));
        CAPTURE(trial, n, kind, fixed.sink, fixed.local, kept);
        floats r(n);
        const auto found = inclusion_probabilities(cpu{}, tau, budget::fraction(kept), fixed, r);
        const double rows = budget::fraction(kept).rows(n);

        double sum = 0;
        std::size_t certain = 0;
        for (std::size_t i = 0; i < n; ++i) {
            REQUIRE(r[i] > 0);
            REQUIRE(r[i] <= 1);
            sum += static_cast<double>(r[i]);
            certain += r[i] == 1.0f ? 1 : 0;
        }
        if (free_tokens > 0) {
            REQUIRE(std::abs(sum - rows) <= 0x1p-24 * rows + 1e-12);
        }
        REQUIRE(found.expected_rows == sum);
        REQUIRE(found.certain == certain);

        const auto expected = bisected(tau, static_cast<long double>(rows), fixed);
        for (std::size_t i = 0; i < n; ++i) {
            INFO("token " << i << ": " << r[i] << ", expected " << static_cast<double>(expected[i]));
            REQUIRE(std::abs(static_cast<double>(r[i]) - static_cast<double>(expected[i])) <=
                    1.5e-7 * static_cast<double>(expected[i]));
        }

        // Monotone in tau among the free tokens, ties equal.
        std::size_t out_of_order = 0;
        for (std::size_t i = fixed.free_begin(n); i < fixed.free_end(n); ++i) {
            for (std::size_t j = fixed.free_begin(n); j < i; ++j) {
                const bool ok = tau[i] == tau[j] ? r[i] == r[j] : tau[i] < tau[j] ? r[i] <= r[j] : r[i] >= r[j];
                out_of_order += ok ? 0 : 1;
            }
        }
        REQUIRE(out_of_order == 0);

        // Permuting the free tokens permutes r, to the bit.
        std::vector<std::size_t> order;
        for (std::size_t i = fixed.free_begin(n); i < fixed.free_end(n); ++i) {
            order.push_back(i);
        }
        auto shuffled = order;
        std::shuffle(shuffled.begin(), shuffled.end(), random);
        floats moved = tau;
        for (std::size_t k = 0; k < order.size(); ++k) {
            moved[order[k]] = tau[shuffled[k]];
        }
        floats r_moved(n);
        inclusion_probabilities(cpu{}, moved, budget::fraction(kept), fixed, r_moved);
        for (std::size_t k = 0; k < order.size(); ++k) {
            REQUIRE(r_moved[order[k]] == r[shuffled[k]]);
        }

        // A power of two on every tau changes nothing (no rounding; kind 3 would leave the subnormals' grid).
        if (kind != 3) {
            floats scaled = tau;
            for (float& t : scaled) {
                t *= 0x1p-20f;
            }
            floats r_scaled(n);
            inclusion_probabilities(cpu{}, scaled, budget::fraction(kept), fixed, r_scaled);
            REQUIRE(r_scaled == r);
        }

        // More budget, no smaller r.
        floats r_more(n);
        inclusion_probabilities(cpu{}, tau, budget::fraction(std::min(1.0, kept * 1.3)), fixed, r_more);
        for (std::size_t i = 0; i < n; ++i) {
            REQUIRE(r_more[i] >= r[i]);
        }
    }
}

TEST_CASE("sample: inclusion probabilities of many tokens") {
    std::mt19937 random(5);
    const std::size_t n = 1'000'000;
    for (const unsigned kind : {0u, 1u, 5u}) {
        const floats tau = random_importance(random, n, kind);
        floats r(n);
        const auto found = inclusion_probabilities(cpu{}, tau, budget::fraction(1.0 / 16), windows{}, r);
        CHECK(std::abs(found.expected_rows - 62'500) <= 0x1p-24 * 62'500);
        CHECK(*std::min_element(r.begin(), r.end()) > 0);
    }
}
