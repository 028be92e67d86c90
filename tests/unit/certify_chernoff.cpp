#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/certify/chernoff.hpp"

namespace {

using support::decision;
using support::dice;
using support::probabilities;
using support::real;
using support::refused;
using support::weights;
using verkv::bernstein_tail;
using verkv::chernoff_tail;
using verkv::cpu;
using verkv::error_space;
using verkv::detail::cumulant;
using floats = std::vector<float>;

constexpr error_space both_spaces[] = {error_space::scalar, error_space::vector};
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

/// A token as it enters a summary.
struct token {
    double mass, odds, lambda = 1, complement = 0;
};

template <class Tail = chernoff_tail>
typename Tail::summary summary_of(const std::vector<token>& tokens) {
    typename Tail::summary s;
    for (const token& t : tokens) {
        s.add(t.mass, t.odds, t.lambda, t.complement);
    }
    return s;
}

std::vector<token> random_tokens(dice& d, std::size_t n, double low_r = 1e-3) {
    std::vector<token> out;
    for (std::size_t i = 0; i < n; ++i) {
        const double r = d.chance(0.3) ? 1 - d.log_between(1e-4, 0.5) : d.log_between(low_r, 0.9);
        const double lambda = d.chance(0.3) ? d.between(r, 1) : 1;
        out.push_back({std::exp(2 * d.normal()) / static_cast<double>(n), (1 - r) / r, lambda, 1 - lambda});
    }
    return out;
}

/// ln E exp(theta X) and its derivatives as they are printed; X = c (Z - r), c of either sign.
struct psi {
    real value, slope, curvature;

    psi(real r, real c, real theta) {
        const real x = theta * c;
        value = x > 1000 ? x + std::log(r) - x * r : std::log1p(r * std::expm1(x)) - x * r;
        const real p = r / (r + (1 - r) * std::exp(-x));
        slope = c * (p - r);
        curvature = c * c * p * ((1 - r) / (r * std::exp(x) + (1 - r)));
    }
};

bool near(double found, real expected, real tolerance) {
    return std::abs(static_cast<real>(found) - expected) <= tolerance * std::abs(expected) + 1e-200L;
}

/// e^x - 1 - x
real excess(real x) {
    return x < 1e-2L ? x * x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7)))))
                     : std::expm1(x) - x;
}

/// Probability of an error above `bound` over all outcomes. Tokens point along directions[i] in the plane; a scalar has
/// them all along the first axis.
double tail_probability(const std::vector<token>& tokens, const std::vector<std::array<double, 2>>& directions,
                        double bound) {
    double failed = 0;
    for (std::size_t bits = 0; bits < (std::size_t{1} << tokens.size()); ++bits) {
        double probability = 1, x = 0, y = 0;
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            const double r = 1 / (1 + tokens[i].odds);
            const bool in = ((bits >> i) & 1) != 0;
            probability *= in ? r : 1 - r;
            const double s = ((in ? tokens[i].lambda / r : 0) - 1) * tokens[i].mass;
            x += s * directions[i][0];
            y += s * directions[i][1];
        }
        failed += std::hypot(x, y) > bound * (1 + 1e-12) ? probability : 0;
    }
    return failed;
}

}  // namespace

TEST_CASE("chernoff: the term of a token against its formula in long double") {
    dice d(81);
    for (int round = 0; round < 20'000; ++round) {
        const double odds = d.log_between(1e-7, 1e7);
        const double mass = d.log_between(1e-6, 1);
        const double x = d.log_between(1e-3, 1e4);  // theta c
        const real r = 1 / (1 + static_cast<real>(odds));
        const real c = static_cast<real>(mass) / r;
        const double theta = static_cast<double>(static_cast<real>(x) / c);
        CAPTURE(odds, mass, x);
        const double rise = mass * odds;
        for (const bool up : {true, false}) {
            const verkv::detail::two_point_term term(1, up ? rise : mass, up ? mass : rise);
            cumulant sum;
            term.add_to(sum, theta);
            const psi expected(r, up ? c : -c, static_cast<real>(theta));
            // The formula in long double cancels where theta c is small or r near 0 or 1.
            const real lost = 1e-18L / std::min<real>(1, x) / std::min(r, 1 - r);
            REQUIRE(near(sum.value, expected.value, 1e-11L + 10 * lost));
            REQUIRE(near(sum.slope, expected.slope, 1e-11L + 10 * lost));
            // What is left of the variance once one of the two points has all but all the mass.
            const real margin = 1e-14L * c * c * r * (1 - r);
            REQUIRE(std::abs(static_cast<real>(sum.curvature) - expected.curvature) <=
                    (1e-11L + 10 * lost) * expected.curvature + margin);
        }
    }
}

TEST_CASE("chernoff: the terms of norms against their formulas in long double") {
    dice d(82);
    for (int round = 0; round < 20'000; ++round) {
        const real theta = 1;
        const double b = d.log_between(1e-3, 2000);
        const double share = d.log_between(1e-8, 1);
        CAPTURE(b, share);
        const auto matches = [&](const cumulant& found, real e, real slope, real second) {
            // e and its derivatives, all over exp(b).
            const real g = std::exp(static_cast<real>(-b)) + e;
            const real whole =
                b < 600 ? std::log1p(e * std::exp(static_cast<real>(b))) : static_cast<real>(b) + std::log(g);
            REQUIRE(near(found.value, whole, 1e-11L));
            REQUIRE(near(found.slope, slope / g, 1e-11L));
            const real curvature = second / g - slope / g * (slope / g);
            REQUIRE(std::abs(static_cast<real>(found.curvature) - curvature) <= 1e-11L * second / g);
        };
        const real scale = std::exp(static_cast<real>(-b));
        const auto part = [&](real weight, real norm, auto&& use) {
            use(weight * excess(theta * norm) * scale, weight * norm * std::expm1(theta * norm) * scale,
                weight * norm * norm * std::exp(theta * norm) * scale);
        };
        cumulant sum;
        verkv::detail::norm_term(1, b, share * b).add_to(sum, 1);
        part(static_cast<real>(share), static_cast<real>(b),
             [&](real e, real slope, real second) { matches(sum, e, slope, second); });

        const double odds = d.log_between(1, 1e6);
        const double r = 1 / (1 + odds);
        for (const bool rare : {true, false}) {
            cumulant two;
            const double with = rare ? b : b / odds, without = rare ? b / odds : b;
            const double p = rare ? r : 1 - r;
            verkv::detail::two_norms_term{p, 1 - p, with, without, b}.add_to(two, 1);
            part(p, with, [&](real e1, real slope1, real second1) {
                part(1 - static_cast<real>(p), without, [&](real e2, real slope2, real second2) {
                    matches(two, e1 + e2, slope1 + slope2, second1 + second2);
                });
            });
        }
    }
}

TEST_CASE("chernoff: the polynomial of a small term is above it, and near") {
    dice d(83);
    for (int round = 0; round < 5'000; ++round) {
        const double mass = d.log_between(1e-6, 1);
        const double odds = d.log_between(1e-5, 1e5);
        const double r = 1 / (1 + odds);
        const double rise = mass * odds;
        const auto check = [&](const auto& term) {
            const double theta = d.log_between(1e-3, 1) / 16 / term.reach;
            double low[3]{};
            cumulant exact;
            term.add_to(low);
            term.add_to(exact, theta);
            const double polynomial = theta * theta * (low[0] + theta * (low[1] + theta * low[2]));
            REQUIRE(polynomial >= exact.value * (1 - 1e-9));
            REQUIRE(polynomial <= exact.value * 1.002);
        };
        check(verkv::detail::two_point_term(3, rise, mass));
        check(verkv::detail::two_point_term(3, mass, rise));
        check(verkv::detail::norm_term(3, std::max(rise, mass), std::min(rise, mass)));
        check(verkv::detail::two_norms_term{r, 1 - r, rise, mass, std::max(rise, mass)});
    }
}

// The lemmas that bins rest on.
TEST_CASE(
    "chernoff: the two-point term grows with the deviation and is concave in the variance; its mirror image is "
    "convex and falls") {
    dice d(84);
    const auto along = [](double b, double s, double theta) {
        cumulant sum;
        verkv::detail::two_point_term(1, b, s / b).add_to(sum, theta);
        return sum.value;
    };
    const auto against = [&](double b, double s, double theta) { return along(s / b, s, theta); };
    const auto norm = [](double b, double s, double theta) {
        cumulant sum;
        verkv::detail::norm_term(1, b, s / b).add_to(sum, theta);
        return sum.value;
    };
    for (int round = 0; round < 20'000; ++round) {
        const double theta = d.log_between(1e-2, 30);
        const double b = d.log_between(0.1, 3), larger = b * d.between(1, 2);
        const double s = d.log_between(1e-5, 1) * b * b, more = s * d.between(1, 3);
        const double middle = s + (more - s) * d.uniform();
        const double share = (middle - s) / (more - s);
        const double slack = 1 + 1e-10;
        REQUIRE(along(b, s, theta) <= along(larger, s, theta) * slack);
        REQUIRE(norm(b, s, theta) <= norm(larger, s, theta) * slack);
        REQUIRE(against(b, s, theta) * slack >= against(larger, s, theta));
        const auto chord = [&](auto&& f) { return (1 - share) * f(b, s, theta) + share * f(b, more, theta); };
        REQUIRE(along(b, middle, theta) * slack >= chord(along));
        REQUIRE(norm(b, middle, theta) * slack >= chord(norm));
        REQUIRE(against(b, middle, theta) <= chord(against) * slack);
        REQUIRE(against(b, s, theta) / s <= against(b, more, theta) / more * slack);
        // And no law on [-s/b, b] of that variance has more than Bennett's bound.
        REQUIRE(along(b, s, theta) <= s / (b * b) * static_cast<double>(excess(static_cast<real>(theta * b))) * slack);
    }
}

TEST_CASE("chernoff: nothing to estimate, and tokens without mass") {
    const chernoff_tail t;
    chernoff_tail::summary s;
    for (const error_space space : both_spaces) {
        CHECK(t.bound(s, 0.1, space) == 0);
        CHECK(t.holds(s, 1e-300, 0.1, space));
        CHECK_FALSE(t.holds(s, 0, 0.1, space));
    }
    s.add(0, 3, 1, 0);
    s.add_block(0, 0, 0, 0, 0);
    s.add_block(64, 0, 0, 0, 0);
    CHECK(t.bound(s, 0.1, error_space::scalar) == 0);
    // Bias alone.
    s.add(0.5, 3, 0, 1);
    CHECK(t.bound(s, 0.1, error_space::scalar) == 0.5);
    CHECK(t.holds(s, 0.5001, 0.1, error_space::scalar));
    CHECK_FALSE(t.holds(s, 0.5, 0.1, error_space::scalar));
}

TEST_CASE("chernoff: one fair coin") {
    // S is +-1: what is not exceeded is 1. P(S >= t) <= exp(-theta t) cosh(theta), so that at t near 1 each side is
    // 1/2.
    const chernoff_tail t;
    const auto s = summary_of({{1, 1}});
    for (const double delta : {0.9, 0.5, 0.1, 1e-3}) {
        const double bound = t.bound(s, delta, error_space::scalar);
        // For small delta no theta proves less than 1: the infimum at t = 1 is 1/2 a side.
        const double entropy = [&] {
            double low = 0, high = 1;  // 2 exp(-(1+x)/2 ln(1+x) - (1-x)/2 ln(1-x)) = delta
            for (int i = 0; i < 60; ++i) {
                const double x = (low + high) / 2;
                const double k = (1 + x) / 2 * std::log1p(x) + (1 - x) / 2 * std::log1p(-x);
                (2 * std::exp(-k) > delta ? low : high) = x;
            }
            return high;
        }();
        CAPTURE(delta, entropy);
        CHECK(bound >= entropy * (1 - 1e-6));
        CHECK(bound <= entropy * 1.003);
    }
}

TEST_CASE("chernoff: parts merge to the whole, in any order") {
    dice d(85);
    for (int round = 0; round < 100; ++round) {
        std::vector<token> tokens = random_tokens(d, 1 + d.below(300), 1e-6);
        const auto whole = summary_of(tokens);
        d.shuffle(tokens);
        std::vector<chernoff_tail::summary> parts(1 + d.below(6));
        for (const token& t : tokens) {
            parts[d.below(parts.size())].add(t.mass, t.odds, t.lambda, t.complement);
        }
        chernoff_tail::summary merged;
        for (const auto& p : parts) {
            merged += p;
        }
        merged += chernoff_tail::summary{};
        CHECK(merged.moments().bias == Approx(whole.moments().bias).epsilon(1e-13));
        CHECK(merged.moments().variance == Approx(whole.moments().variance).epsilon(1e-13));
        CHECK(merged.moments().largest == whole.moments().largest);
        for (const error_space space : both_spaces) {
            CHECK(chernoff_tail{}.bound(merged, 0.1, space) ==
                  Approx(chernoff_tail{}.bound(whole, 0.1, space)).epsilon(1e-6));
        }
    }
}

TEST_CASE("chernoff: a block stands for at least its tokens") {
    dice d(86);
    for (int round = 0; round < 200; ++round) {
        chernoff_tail::summary one_by_one, blocks;
        bernstein_tail::summary moments;
        for (std::size_t b = 0; b < 5; ++b) {
            double variance = 0, lift = 0, mass = 0, term = 0;
            for (std::size_t i = 0; i < 64; ++i) {
                const double m = std::exp(d.normal()) / 320, odds = d.log_between(0.1, 100);
                one_by_one.add(m, odds, 1, 0);
                variance += m * m * odds;
                lift = std::max(lift, m * odds);
                mass = std::max(mass, m);
                term = std::max(term, m * std::max(1.0, odds));
            }
            blocks.add_block(64, variance, lift, mass, term);
            moments.add_block(64, variance, lift, mass, term);
        }
        CHECK(moments.moments() == blocks.moments());
        for (const error_space space : both_spaces) {
            const double bound = chernoff_tail{}.bound(blocks, 0.1, space);
            CHECK(bound >= chernoff_tail{}.bound(one_by_one, 0.1, space) * (1 - 1e-3));
            CHECK(bound <= bernstein_tail{}.bound(moments, 0.1, space));
            // Worth having: Bernstein's inequality takes the largest deviation of all for every token.
            CHECK(bound <= 0.95 * bernstein_tail{}.bound(moments, 0.1, space));
        }
    }
}

TEST_CASE("chernoff: numbers that are not finite certify nothing") {
    const chernoff_tail t;
    for (const double bad : {not_a_number, infinity, -infinity}) {
        for (int argument = 0; argument < 3; ++argument) {
            auto s = summary_of({{0.1, 2}, {0.2, 0.5}});
            s.add(argument == 0 ? bad : 0.1, argument == 1 ? bad : 3, argument == 2 ? bad : 1, 0);
            for (const error_space space : both_spaces) {
                CAPTURE(bad, argument);
                CHECK_FALSE(t.bound(s, 0.1, space) < 1e300);
                CHECK_FALSE(t.holds(s, 1e300, 0.1, space));
            }
        }
    }
    auto s = summary_of({{0.1, 2}});
    CHECK_FALSE(t.holds(s, not_a_number, 0.1, error_space::scalar));
    s.add_block(3, not_a_number, 1, 1, 1);
    CHECK(std::isnan(t.bound(s, 0.1, error_space::scalar)));
    CHECK_FALSE(t.holds(s, 1e300, 0.1, error_space::scalar));
}

TEST_CASE("chernoff: masses far outside the range of the bins are still bounded") {
    dice d(87);
    for (const double scale : {1e-200, 1e-40, 1e-12, 1e6, 1e30, 1e60}) {
        for (int round = 0; round < 20; ++round) {
            std::vector<token> tokens = random_tokens(d, 1 + d.below(40));
            for (token& t : tokens) {
                t.mass *= scale;
            }
            const auto s = summary_of(tokens);
            const auto b = summary_of<bernstein_tail>(tokens);
            for (const error_space space : both_spaces) {
                const double bound = chernoff_tail{}.bound(s, 0.1, space);
                const double bernstein = bernstein_tail{}.bound(b, 0.1, space);
                CAPTURE(scale, bound, bernstein);
                CHECK(bound <= bernstein);
                CHECK(bound >= s.moments().bias);
                CHECK(bound >= 0.2 * std::sqrt(s.moments().variance));
                CHECK(chernoff_tail{}.holds(s, bernstein * (1 + 1e-12), 0.1, space));
            }
        }
    }
}

TEST_CASE("chernoff: over all outcomes the bound is exceeded with probability delta at most") {
    dice d(88);
    double closest = 0;
    for (int round = 0; round < 60; ++round) {
        const std::vector<token> tokens = random_tokens(d, 1 + d.below(12), 0.02);
        const auto s = summary_of(tokens);
        std::vector<std::array<double, 2>> along(tokens.size(), {1, 0}), around, two;
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            const double angle = 6.283185307179586 * d.uniform();
            around.push_back({std::cos(angle), std::sin(angle)});
            two.push_back(d.chance(0.5) ? std::array<double, 2>{1, 0} : std::array<double, 2>{-0.6, 0.8});
        }
        for (const double delta : {0.9, 0.5, 0.1, 1e-2, 1e-4}) {
            const double scalar = chernoff_tail{}.bound(s, delta, error_space::scalar);
            const double failed = tail_probability(tokens, along, scalar);
            CAPTURE(delta, tokens.size());
            CHECK(failed <= delta);
            closest = std::max(closest, failed / delta);
            const double vector = chernoff_tail{}.bound(s, delta, error_space::vector);
            for (const auto& directions : {along, around, two}) {
                CHECK(tail_probability(tokens, directions, vector) <= delta);
            }
        }
    }
    // The promise is not kept by a margin that hides mistakes.
    CHECK(closest > 0.3);
}

TEST_CASE("chernoff: shrinkage costs its bias on one side alone") {
    // A bias of half the deviation on every token: the upper side has that much more room.
    std::vector<token> plain(200, token{0.005, 15, 1, 0}), shrunk(200, token{0.005, 15, 0.95, 0.05});
    const auto s = summary_of(shrunk);
    const double bound = chernoff_tail{}.bound(s, 0.1, error_space::scalar);
    const double centred = chernoff_tail{}.bound(summary_of(plain), 0.1, error_space::scalar);
    CHECK(s.moments().bias == Approx(0.05));
    CHECK(bound < 0.05 + 0.95 * centred - 0.01);
    CHECK(bound > 0.95 * centred - 0.05);
    // For vectors it costs what it costs.
    const double vector = chernoff_tail{}.bound(s, 0.1, error_space::vector);
    const double vector_centred = chernoff_tail{}.bound(summary_of(plain), 0.1, error_space::vector);
    CHECK(vector == Approx(0.05 + 0.95 * vector_centred).epsilon(5e-3));
}

TEST_CASE("chernoff: bounds and decisions allocate nothing") {
    dice d(89);
    const auto tokens = random_tokens(d, 500);
    double sum = 0;
    const auto count = support::allocations_of([&] {
        auto s = summary_of(std::vector<token>{});
        for (const token& t : tokens) {
            s.add(t.mass, t.odds, t.lambda, t.complement);
        }
        chernoff_tail::summary twice = s;
        twice += s;
        for (const error_space space : both_spaces) {
            sum += chernoff_tail{}.bound(twice, 0.1, space);
            sum += chernoff_tail{}.holds(twice, 0.3, 0.1, space);
        }
    });
    CHECK(count == 0);
    CHECK(sum > 0);
    static_assert(std::is_trivially_copyable_v<chernoff_tail::summary>);
}

TEST_CASE("chernoff: certificates of spans, and what they refuse") {
    const cpu exec;
    const floats none, three(3, 0.5f), two(2, 0.5f), ones(3, 1.0f), silent(3, 0.0f);
    CHECK(verkv::chernoff_certificate(exec, none, none, none, {}) == 0);
    CHECK(verkv::chernoff_certificate(exec, three, ones, ones, {}) == 0);
    CHECK(verkv::chernoff_certificate(exec, silent, three, ones, {}) == 0);
    CHECK(verkv::chernoff_certificate(exec, three, three, ones, {}) > 0);
    CHECK(refused([&] { (void)verkv::chernoff_certificate(exec, two, three, three, {}); }, {"2 masses"}));
    CHECK(refused([&] { (void)verkv::chernoff_certificate(exec, three, three, ones, {0.1, 1.5}); }, {"delta", "1.5"}));
    const floats bad{0.5f, 0.5f, 1.5f}, shrunk{1, 1, 0.25f}, negative{1, 1, -1};
    CHECK(refused([&] { (void)verkv::chernoff_certificate(exec, three, bad, ones, {}); }, {"token 2", "probability"}));
    CHECK(
        refused([&] { (void)verkv::chernoff_certificate(exec, three, three, shrunk, {}); }, {"token 2", "shrinkage"}));
    CHECK(refused([&] { (void)verkv::chernoff_certificate(exec, negative, three, ones, {}); }, {"token 2", "mass"}));
}
