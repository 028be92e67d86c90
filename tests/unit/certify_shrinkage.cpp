#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/check_plan.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/certify/estimator.hpp"
#include "verkv/certify/shrinkage.hpp"

namespace {

using support::decision;
using support::dice;
using support::probabilities;
using support::real;
using support::reference_decision;
using support::refused;
using support::weights;
using verkv::binary_shrinkage;
using verkv::bounded_shrinkage;
using verkv::cpu;
using verkv::no_shrinkage;
using floats = std::vector<float>;

template <class Rule>
floats shrunk_by(const floats& mass, const floats& r) {
    floats lambda(r.size(), -1.0f);
    verkv::shrink(cpu{}, Rule{}, mass, r, lambda);
    return lambda;
}

/// lambda in long double, r where the float says r.
std::vector<real> widened(const reference_decision& ref, const decision& d, const floats& lambda) {
    std::vector<real> out;
    for (std::size_t i = 0; i < lambda.size(); ++i) {
        out.push_back(lambda[i] == d.r[i] && d.r[i] < 1 ? ref.r[i] : static_cast<real>(lambda[i]));
    }
    return out;
}

/// Least mean squared error over the box r <= lambda <= 1, by minimising over one coordinate at a time. The error is
/// convex, so this converges; it knows nothing of fixed points or breakpoints.
std::vector<real> minimised(const reference_decision& d) {
    std::vector<real> lambda = support::unshrunk(d);
    for (int sweep = 0; sweep < 3000; ++sweep) {
        real change = 0;
        for (const std::size_t i : d.sampled) {
            if (d.mass[i] == 0) {
                continue;
            }
            real others = 0;
            for (const std::size_t j : d.sampled) {
                others += j == i ? 0 : d.mass[j] * (1 - lambda[j]);
            }
            const real best = (others + d.mass[i]) / (d.mass[i] / d.r[i]);
            const real next = std::clamp(best, d.r[i], real{1});
            change = std::max(change, std::abs(next - lambda[i]));
            lambda[i] = next;
        }
        if (change < 1e-18L) {
            break;
        }
    }
    return lambda;
}

/// Whether no t is so near 2 beta, or the t after it, that rounding could move the stop; t = 2 beta itself is such a
/// case where masses are no round numbers.
bool decisive(const reference_decision& d) {
    real beta = 0;
    real before = std::numeric_limits<real>::infinity();
    for (const std::size_t i : support::by_lift(d)) {
        const real t = d.lift(i);
        if (std::abs(t - 2 * beta) <= 1e-5L * t) {
            return false;
        }
        if (t < 2 * beta) {
            return t < before * (1 - 1e-5L);
        }
        beta += d.mass[i] * d.rest[i];
        before = t;
    }
    return true;
}

/// Decisions of at most 12 tokens of L, of every kind.
template <class F>
void for_small_decisions(std::uint64_t seed, int rounds, F&& f) {
    dice d(seed);
    for (int round = 0; round < rounds; ++round) {
        for (const weights w : support::all_weights) {
            for (const probabilities p : support::all_probabilities) {
                const decision x = support::random_decision(d, d.below(13), w, p);
                INFO("round " << round << ", weights " << static_cast<int>(w) << ", probabilities "
                              << static_cast<int>(p) << ", n " << x.size());
                f(x);
            }
        }
    }
}

}  // namespace

TEST_CASE("certify: binary shrinkage stops strictly at t = 2 beta, ties to the lower index") {
    // Equal tokens of r = 1/2: the first one brings beta to half of every other's t.
    const floats lambda = shrunk_by<binary_shrinkage>(floats(6, 1.0f), floats(6, 0.5f));
    CHECK(lambda == floats{0.5f, 1, 1, 1, 1, 1});
    // The same tokens after one that is kept for certain and one without mass.
    CHECK(shrunk_by<binary_shrinkage>({20, 0, 1, 1, 1}, {1, 0.5f, 0.5f, 0.5f, 0.5f}) == floats{1, 1, 0.5f, 1, 1});
    // Three tokens of r = 1/4: t = 3, then beta = 0.75 (t = 3 > 1.5), then 1.5 (t = 3 = 2 beta).
    CHECK(shrunk_by<binary_shrinkage>(floats(3, 1.0f), floats(3, 0.25f)) == floats{0.25f, 0.25f, 1});
}

TEST_CASE("certify: shrinkage of a budget below one token") {
    const floats r{0.0089285714f, 0.0178571429f, 0.0267857143f, 0.0357142857f, 0.0446428571f, 0.0535714286f};
    const floats mass(6, 1.0f);
    const floats lambda = shrunk_by<binary_shrinkage>(mass, r);
    CHECK(lambda == r);
    CHECK(verkv::certificate(cpu{}, mass, r, lambda, {0.05, 0.1}) == Approx(1.372868373).epsilon(1e-5));
}

TEST_CASE("certify: binary shrinkage is the best prefix, and the one that the full sort finds") {
    int decided = 0;
    for_small_decisions(11, 60, [&](const decision& x) {
        const reference_decision ref(x);
        const std::vector<real> lambda = widened(ref, x, shrunk_by<binary_shrinkage>(x.mass, x.r));
        const std::vector<real> expected = support::binary_shrinkage_of(ref);
        const real error = support::mean_squared_error_of(ref, lambda);
        // A token whose t is 2 beta to within the rounding of a float may fall on either side; the error does not care.
        CHECK(support::close(error, support::mean_squared_error_of(ref, expected), 1e-6L));
        std::vector<real> prefix = support::unshrunk(ref);
        real least = support::mean_squared_error_of(ref, prefix);
        for (const std::size_t i : support::by_lift(ref)) {
            prefix[i] = ref.r[i];
            least = std::min(least, support::mean_squared_error_of(ref, prefix));
        }
        CHECK(error <= least * (1 + 1e-6L));
        CHECK(support::mean_squared_error_of(ref, expected) <= least * (1 + 1e-15L));
        for (std::size_t i = 0; i < x.size(); ++i) {
            CHECK((lambda[i] == 1 || lambda[i] == ref.r[i]));
            if (decisive(ref)) {
                CHECK(lambda[i] == expected[i]);
            }
        }
        decided += decisive(ref);
    });
    CHECK(decided > 1000);
}

TEST_CASE("certify: bounded shrinkage is below every choice of r or 1, and no step from it helps") {
    for_small_decisions(12, 8, [](const decision& x) {
        const reference_decision ref(x);
        const std::vector<real> lambda = widened(ref, x, shrunk_by<bounded_shrinkage>(x.mass, x.r));
        const real error = support::mean_squared_error_of(ref, lambda);
        const std::size_t sampled = ref.sampled.size();
        for (std::size_t bits = 0; bits < (std::size_t{1} << sampled); ++bits) {
            std::vector<real> other = support::unshrunk(ref);
            for (std::size_t j = 0; j < sampled; ++j) {
                const std::size_t i = ref.sampled[j];
                other[i] = ((bits >> j) & 1) != 0 ? ref.r[i] : real{1};
            }
            if (!(error <= support::mean_squared_error_of(ref, other) * (1 + 1e-9L))) {
                CHECK(error == support::mean_squared_error_of(ref, other));
            }
        }
        for (const std::size_t i : ref.sampled) {
            for (const real step : {-1e-3L, 1e-3L}) {
                std::vector<real> other = lambda;
                other[i] = std::clamp(other[i] * (1 + step), ref.r[i], real{1});
                CHECK(error <= support::mean_squared_error_of(ref, other) * (1 + 1e-9L));
            }
        }
    });
}

TEST_CASE("certify: bounded shrinkage is what a numeric minimiser finds") {
    for_small_decisions(13, 6, [](const decision& x) {
        const reference_decision ref(x);
        const std::vector<real> lambda = widened(ref, x, shrunk_by<bounded_shrinkage>(x.mass, x.r));
        const std::vector<real> best = minimised(ref);
        CHECK(support::mean_squared_error_of(ref, lambda) <= support::mean_squared_error_of(ref, best) * (1 + 1e-9L));
        // Odds as floats move beta by 2^-24 relative, twice: t and 1 - r.
        const std::vector<real> exact = support::bounded_shrinkage_of(ref);
        for (const std::size_t i : ref.sampled) {
            if (ref.mass[i] > 0) {
                CHECK(support::close(lambda[i], exact[i], 1e-6L));
            }
        }
    });
}

TEST_CASE("certify: the three rules by their error") {
    for_small_decisions(14, 60, [](const decision& x) {
        const double none = verkv::mean_squared_error(cpu{}, x.mass, x.r, shrunk_by<no_shrinkage>(x.mass, x.r));
        const double binary = verkv::mean_squared_error(cpu{}, x.mass, x.r, shrunk_by<binary_shrinkage>(x.mass, x.r));
        const double bounded = verkv::mean_squared_error(cpu{}, x.mass, x.r, shrunk_by<bounded_shrinkage>(x.mass, x.r));
        CHECK(binary <= none * (1 + 1e-7));
        CHECK(bounded <= binary * (1 + 1e-9));
    });
}

TEST_CASE("certify: shrinkage keeps to its box and leaves certain and silent tokens alone") {
    const auto check = [](const floats& lambda, const decision& x) {
        for (std::size_t i = 0; i < x.size(); ++i) {
            CHECK(lambda[i] >= x.r[i]);
            CHECK(lambda[i] <= 1);
            if (x.r[i] == 1 || x.mass[i] == 0) {
                CHECK(lambda[i] == 1);
            }
        }
    };
    dice d(15);
    for (const std::size_t n : {1u, 2u, 31u, 63u, 64u, 65u, 127u, 128u, 129u, 700u}) {
        for (const weights w : support::all_weights) {
            for (const probabilities p : support::all_probabilities) {
                const decision x = support::random_decision(d, n, w, p, 0.3, 0.1);
                check(shrunk_by<no_shrinkage>(x.mass, x.r), x);
                check(shrunk_by<binary_shrinkage>(x.mass, x.r), x);
                check(shrunk_by<bounded_shrinkage>(x.mass, x.r), x);
            }
        }
    }
}

TEST_CASE("certify: shrinkage compares masses with one another only") {
    dice d(16);
    const decision x = support::random_decision(d, 300, weights::peaked, probabilities::importance);
    const floats binary = shrunk_by<binary_shrinkage>(x.mass, x.r);
    const floats bounded = shrunk_by<bounded_shrinkage>(x.mass, x.r);
    REQUIRE(std::count(binary.begin(), binary.end(), 1.0f) < 300);
    for (const float factor : {0x1p-100f, 0x1p-3f, 0x1p90f}) {
        floats mass = x.mass;
        for (float& m : mass) {
            m *= factor;
        }
        CHECK(shrunk_by<binary_shrinkage>(mass, x.r) == binary);
        CHECK(shrunk_by<bounded_shrinkage>(mass, x.r) == bounded);
    }
}

TEST_CASE("certify: shrinkage of nothing, of one token, and of extreme numbers") {
    CHECK(shrunk_by<binary_shrinkage>({}, {}).empty());
    CHECK(shrunk_by<bounded_shrinkage>({}, {}).empty());
    CHECK(shrunk_by<binary_shrinkage>(floats(5, 0.0f), floats(5, 0.5f)) == floats(5, 1.0f));
    CHECK(shrunk_by<bounded_shrinkage>(floats(5, 0.0f), floats(5, 0.5f)) == floats(5, 1.0f));
    CHECK(shrunk_by<binary_shrinkage>({1, 2}, {1, 1}) == floats{1, 1});
    CHECK(shrunk_by<bounded_shrinkage>({1, 2}, {1, 1}) == floats{1, 1});
    // One token: lambda = r has the error m^2 (1-r), less than m^2 (1-r)/r; r is the best of the box, too.
    for (const float r : {0x1p-126f, 1e-9f, 0.3f, 0.7f, 1.0f / 3, 1 - 0x1p-24f}) {
        for (const float m : {1e-45f, 1e-38f, 1.0f, 3e38f}) {
            CHECK(shrunk_by<binary_shrinkage>({m}, {r}) == floats{r});
            CHECK(shrunk_by<bounded_shrinkage>({m}, {r}) == floats{r});
        }
    }
    // A mass so far below another that its lift is no float beside it.
    CHECK(shrunk_by<binary_shrinkage>({1, 1e-44f}, {0.5f, 0.9f}) == floats{0.5f, 1});
    CHECK(shrunk_by<bounded_shrinkage>({1, 1e-44f}, {0.5f, 0.9f}) == floats{0.5f, 1});
}

TEST_CASE("certify: shrink refuses what is out of range and leaves lambda as it was") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    floats lambda(3, 0.125f);
    const auto bad = [&](const floats& mass, const floats& r, std::initializer_list<std::string> parts) {
        const auto call = [&](auto rule) {
            return refused([&] { verkv::shrink(cpu{}, rule, mass, r, lambda); }, parts) && lambda == floats(3, 0.125f);
        };
        return call(no_shrinkage{}) && call(binary_shrinkage{}) && call(bounded_shrinkage{});
    };
    CHECK(bad({1, 2}, {0.5f, 0.5f, 0.5f}, {"2 masses"}));
    CHECK(bad({1, 2, 3}, {0.5f, 0.5f}, {"2 prob"}));
    CHECK(bad({1, 2}, {0.5f, 0.5f}, {"3 shrinkages"}));
    CHECK(bad({1, 2, nan}, {0.5f, 0.5f, 0.5f}, {"token 2", "mass", "nan"}));
    CHECK(bad({1, -2, 3}, {0.5f, 0.5f, 0.5f}, {"token 1", "mass", "-2"}));
    CHECK(bad({1, 2, std::numeric_limits<float>::infinity()}, {0.5f, 0.5f, 0.5f}, {"token 2", "mass", "inf"}));
    CHECK(bad({1, 2, 3}, {0.5f, 0, 0.5f}, {"token 1", "probability"}));
    CHECK(bad({1, 2, 3}, {0.5f, 0.5f, nan}, {"token 2", "probability", "nan"}));
    CHECK(bad({1, 2, 3}, {0.5f, 0.5f, 1.5f}, {"token 2", "probability", "1.5"}));
    // Results on top of what they are made of.
    floats memory{0.5f, 0.25f, 1, 0.5f, 0.25f};
    const floats before = memory;
    const std::span<float> all(memory);
    const floats mass{1, 2, 3};
    for (std::size_t at = 0; at <= 2; ++at) {
        CHECK(refused([&] { verkv::shrink(cpu{}, binary_shrinkage{}, mass, all.first(3), all.subspan(at, 3)); },
                      {"3 shrinkages share memory"}));
        CHECK(refused(
            [&] { verkv::shrink(cpu{}, bounded_shrinkage{}, all.first(3), floats(3, 0.5f), all.subspan(at, 3)); },
            {"3 shrinkages share memory"}));
    }
    CHECK(memory == before);
    verkv::shrink(cpu{}, binary_shrinkage{}, std::span<const float>(mass).first(2), all.first(2), all.subspan(2, 2));
    CHECK(memory == floats{0.5f, 0.25f, 1, 0.25f, 0.25f});
    // Odds that a float cannot hold.
    CHECK(bad({1, 2, 3}, {1e-44f, 0.5f, 0.5f}, {"token 0", "probability"}));
}

TEST_CASE("certify: a rule of the user's own") {
    struct halves {
        void select(const cpu&, verkv::masses_view m, float inverse, verkv::shrinkage_workspace&,
                    std::vector<verkv::shrunk_token>& out) const {
            out.clear();
            for (std::size_t i = 0; i < m.odds.size(); ++i) {
                if (m.odds[i] > 0) {
                    out.push_back({static_cast<verkv::token_index>(i), static_cast<double>(m.mass[i] * inverse),
                                   static_cast<double>(m.odds[i]), 0.5, 0.5});
                }
            }
        }
    };
    static_assert(verkv::shrinkage<halves>);
    static_assert(verkv::shrinkage<no_shrinkage> && verkv::shrinkage<binary_shrinkage> &&
                  verkv::shrinkage<bounded_shrinkage>);
    // In the box, too, where r is above what the rule says.
    CHECK(shrunk_by<halves>({1, 2, 3}, {0.25f, 1, 0.75f}) == floats{0.5f, 1, 0.75f});
}
