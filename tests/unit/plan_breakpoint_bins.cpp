// Sums in bins against sums over tokens.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/plan/breakpoint_bins.hpp"

namespace {

using support::dice;
using support::refused;
using verkv::bernstein_bound;
using verkv::bernstein_moments;
using verkv::breakpoint_bins;

struct token {
    float mass;
    float odds;
};

/// Masses and odds over decades; some odds so small that m/r is m to a float.
std::vector<token> random_tokens(dice& d, std::size_t n, double least_mass, double least_odds, double most_odds) {
    std::vector<token> x;
    for (std::size_t i = 0; i < n; ++i) {
        x.push_back({static_cast<float>(d.log_between(least_mass, 1)),
                     static_cast<float>(d.log_between(least_odds, most_odds))});
    }
    return x;
}

breakpoint_bins binned(const std::vector<token>& x, float low, float high) {
    breakpoint_bins bins(low, high);
    for (const token& t : x) {
        bins.add(t.mass, t.odds);
    }
    return bins;
}

/// Moments at kappa by the formula, token by token, and what rounding may do to them.
struct direct {
    long double variance = 0;
    long double rounding = 0;
    double largest = 0;
};

direct moments_at(const std::vector<token>& x, float kappa, double flat_variance = 0, double flat_term = 0) {
    direct out;
    out.variance = static_cast<long double>(flat_variance);
    long double entered = 0;
    bool between = false;
    double term = flat_term;
    for (const token& t : x) {
        const auto m = static_cast<long double>(t.mass);
        const auto o = static_cast<long double>(t.odds);
        if (t.mass > kappa) {
            continue;
        }
        entered += m;
        if (t.mass * (1 + t.odds) > kappa) {
            out.variance += m * (static_cast<long double>(kappa) - m);
            between = true;
        } else {
            out.variance += m * m * o;
            term = std::max(term, static_cast<double>(m * std::max(o, 1.0L)));
        }
    }
    out.largest = between ? static_cast<double>(kappa) : term;
    // 2^-52 kappa sum m as stated, a few times over: four sums.
    out.rounding = 8 * 0x1p-52L * static_cast<long double>(kappa) * entered + 1e-13L * out.variance;
    return out;
}

std::vector<bernstein_moments> scanned(const breakpoint_bins& bins) {
    std::vector<bernstein_moments> out;
    bins.scan([&](float, const bernstein_moments& m) {
        out.push_back(m);
        return true;
    });
    return out;
}

bool close(double a, double b, double relative) {
    return std::abs(a - b) <= relative * std::max(std::abs(a), std::abs(b));
}

}  // namespace

TEST_CASE("breakpoint bins: the moments at every edge are those of the tokens") {
    dice d(1);
    std::size_t edges = 0, between = 0, settled = 0;
    const double odds_ranges[][2] = {{1e-9, 1e-6}, {1e-3, 1e3}, {0.1, 100}, {1e6, 1e30}, {1e-9, 1e30}};
    for (int round = 0; round < 8; ++round) {
        for (const auto& odds : odds_ranges) {
            for (const double least_mass : {0.5, 1e-3, 1e-9}) {
                const auto x = random_tokens(d, 1 + d.below(400), least_mass, odds[0], odds[1]);
                const auto low = static_cast<float>(d.log_between(1e-11, 1e-2));
                const auto high = static_cast<float>(static_cast<double>(low) * d.log_between(1, 1e14));
                const breakpoint_bins bins = binned(x, low, high);
                std::size_t k = 0;
                std::size_t wrong = 0;
                bins.scan([&](float kappa, const bernstein_moments& m) {
                    const direct expected = moments_at(x, kappa);
                    wrong += !(std::abs(static_cast<long double>(m.variance) - expected.variance) <= expected.rounding);
                    wrong += m.largest != expected.largest || m.bias != 0 || kappa != bins.edge(k);
                    ++(m.largest == static_cast<double>(kappa) ? between : settled);
                    ++k;
                    return true;
                });
                CHECK(wrong == 0);
                CHECK(k == bins.edges());
                edges += k;
            }
        }
    }
    CHECK(edges > 10000);
    CHECK(between > 1000);
    CHECK(settled > 1000);
}

TEST_CASE("breakpoint bins: a breakpoint on an edge counts there, one just above it at the next") {
    const float one = 1;
    const float above = std::nextafter(one, 2.0f);
    for (const float mass : {one, above}) {
        // m/r = 2 m.
        const auto bins = binned({{mass, 1.0f}}, 0.5f, 4.0f);
        const auto m = scanned(bins);
        REQUIRE(m.size() == 25);
        const std::size_t at_one = 8, at_two = 16;
        CHECK(bins.edge(at_one) == 1);
        CHECK(bins.edge(at_two) == 2);
        CHECK(m[at_one].variance == 0);
        CHECK(m[at_one].largest == (mass == one ? 1 : 0));
        CHECK(m[at_one - 1].largest == 0);
        CHECK(m[at_one + 1].variance == Approx(0.125).epsilon(1e-5));
        CHECK(m[at_two].largest == (mass == one ? 1 : 2));
        CHECK(m[at_two].variance == Approx(1).epsilon(1e-5));
        CHECK(m.back().variance == Approx(1).epsilon(1e-5));
        CHECK(m.back().largest == Approx(1).epsilon(1e-5));
    }
}

TEST_CASE("breakpoint bins: parts add up to the whole, however it is cut") {
    dice d(2);
    for (int round = 0; round < 20; ++round) {
        const auto x = random_tokens(d, 500, 1e-6, 1e-8, 1e8);
        const float low = 1e-6f, high = 10;
        const auto whole = scanned(binned(x, low, high));
        const std::size_t count = 1 + d.below(7);
        std::vector<std::vector<token>> parts(count);
        for (const token& t : x) {
            parts[d.below(count)].push_back(t);
        }
        breakpoint_bins sum(low, high);
        for (const auto& part : parts) {
            sum += binned(part, low, high);
        }
        const auto merged = scanned(sum);
        REQUIRE(merged.size() == whole.size());
        std::size_t wrong = 0;
        for (std::size_t k = 0; k < whole.size(); ++k) {
            const double size = static_cast<double>(moments_at(x, sum.edge(k)).rounding) + 1e-12 * whole[k].variance;
            wrong += !(std::abs(merged[k].variance - whole[k].variance) <= size);
            wrong += merged[k].largest != whole[k].largest;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("breakpoint bins: flat tokens are part of every edge's moments") {
    dice d(3);
    const auto x = random_tokens(d, 200, 1e-2, 0.1, 10);
    breakpoint_bins bins = binned(x, 1e-3f, 30.0f);
    bins.add_flat(0.25, 3e-4);
    bins.add_flat(0.5, 7e-4);
    bins.add_flat(0.125, 1e-4);
    std::size_t wrong = 0;
    bins.scan([&](float kappa, const bernstein_moments& m) {
        const direct expected = moments_at(x, kappa, 0.875, 7e-4);
        wrong += !(std::abs(static_cast<long double>(m.variance) - expected.variance) <= expected.rounding);
        wrong += m.largest != expected.largest;
        return true;
    });
    CHECK(wrong == 0);
    CHECK(scanned(bins).front().largest == 7e-4);
    breakpoint_bins other(1e-3f, 30.0f);
    other.add_flat(1, 9e-4);
    other += bins;
    CHECK(scanned(other).front().variance == Approx(1.875));
    CHECK(scanned(other).front().largest == 9e-4);
}

TEST_CASE("breakpoint bins: the largest edge that certifies") {
    dice d(4);
    std::size_t none = 0, some = 0, last = 0;
    for (int round = 0; round < 300; ++round) {
        const auto x = random_tokens(d, 1 + d.below(100), 1e-4, 0.01, 1e4);
        breakpoint_bins bins = binned(x, 1e-4f, 10.0f);
        if (round % 3 == 0) {
            bins.add_flat(d.log_between(1e-9, 1), 1e-5);
        }
        const double epsilon = d.log_between(1e-3, 1e3);
        const double log_term = d.between(0.1, 10);
        float best = 0;
        bins.scan([&](float kappa, const bernstein_moments& m) {
            best = bernstein_bound(m, log_term) < epsilon ? kappa : best;
            return true;
        });
        CHECK(bins.largest_certified(epsilon, log_term) == best);
        none += best == 0;
        last += best == bins.edge(bins.edges() - 1);
        some += best > 0 && best < bins.edge(bins.edges() - 1);
    }
    CHECK(none > 10);
    CHECK(some > 50);
    CHECK(last > 10);
}

TEST_CASE("breakpoint bins: a scan ends where it is told to") {
    const breakpoint_bins bins(1.0f, 4.0f);
    std::size_t visits = 0;
    bins.scan([&](float, const bernstein_moments&) { return ++visits < 5; });
    CHECK(visits == 5);
}

TEST_CASE("breakpoint bins: the window is rounded outwards to eighths of an octave") {
    const breakpoint_bins whole(1.0f, 4.0f);
    CHECK(whole.edges() == 17);
    CHECK(whole.edge(0) == 1);
    CHECK(whole.edge(1) == 1.125f);
    CHECK(whole.edge(8) == 2);
    CHECK(whole.edge(16) == 4);
    const breakpoint_bins point(1.0f, 1.0f);
    CHECK(point.edges() == 1);
    CHECK(point.edge(0) == 1);
    const breakpoint_bins inside(1.01f, 1.02f);
    CHECK(inside.edges() == 2);
    CHECK(inside.edge(0) == 1);
    CHECK(inside.edge(1) == 1.125f);
    dice d(5);
    for (int round = 0; round < 1000; ++round) {
        const auto low = static_cast<float>(d.log_between(1e-30, 1e20));
        const auto high = static_cast<float>(static_cast<double>(low) * d.log_between(1, 1e11));
        const breakpoint_bins bins(low, high);
        const std::size_t n = bins.edges();
        CHECK((bins.edge(0) <= low && bins.edge(n - 1) >= high));
        CHECK((n < 2 || (bins.edge(1) > low && bins.edge(n - 2) < high)));
        for (std::size_t k = 1; k < n; ++k) {
            const float ratio = bins.edge(k) / bins.edge(k - 1);
            CHECK((ratio > 1.06f && ratio < 1.126f));
        }
    }
}

TEST_CASE("breakpoint bins: a window of more than forty octaves loses its lower end") {
    const breakpoint_bins bins(0x1p-100f, 0x1p100f);
    CHECK(bins.edges() == breakpoint_bins::most_edges);
    CHECK(bins.edge(bins.edges() - 1) == 0x1p100f);
    CHECK(bins.edge(0) == 0x1.2p60f);
    const breakpoint_bins widest(0x1p-126f, 0x1p120f);
    CHECK(widest.edges() == breakpoint_bins::most_edges);
    CHECK(widest.edge(widest.edges() - 1) == 0x1p120f);
    const breakpoint_bins full(0x1.2p60f, 0x1p100f);
    CHECK(full.edges() == breakpoint_bins::most_edges);
    CHECK(full.edge(0) == 0x1.2p60f);
    // What lies below counts at the first edge.
    breakpoint_bins low(0x1p-100f, 1.0f);
    low.add(0x1p-90f, 1.0f);
    CHECK(close(scanned(low).front().variance, 0x1p-180, 1e-12));
    CHECK(scanned(low).front().largest == 0x1p-90);
}

TEST_CASE("breakpoint bins: extreme tokens") {
    breakpoint_bins bins(1e-3f, 1e3f);
    bins.add(0.0f, 5.0f);
    CHECK(scanned(bins).back() == bernstein_moments{});
    bins.add(1.0f, 0x1p126f);  // m/r is beyond every window
    bins.add(0x1p100f, 0x1p100f);
    const auto m = scanned(bins);
    CHECK(m.front() == bernstein_moments{});
    const double kappa = static_cast<double>(bins.edge(bins.edges() - 1));
    CHECK(m.back().largest == kappa);
    CHECK(close(m.back().variance, kappa - 1, 1e-12));
}

TEST_CASE("breakpoint bins: refusals") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float inf = std::numeric_limits<float>::infinity();
    for (const auto& [low, high] : std::vector<std::pair<float, float>>{{0.0f, 1.0f},
                                                                        {-1.0f, 1.0f},
                                                                        {2.0f, 1.0f},
                                                                        {0x1p-127f, 1.0f},
                                                                        {1.0f, 0x1.1p120f},
                                                                        {1.0f, inf},
                                                                        {nan, 1.0f},
                                                                        {1.0f, nan},
                                                                        {nan, nan}}) {
        INFO(low << " to " << high);
        CHECK(refused([&, l = low, h = high] { breakpoint_bins(l, h); }, {"window"}));
    }
    CHECK(refused([] { breakpoint_bins(3.0f, 2.0f); }, {"3", "2"}));
    breakpoint_bins bins(1.0f, 4.0f);
    bins.add(1.5f, 0.5f);
    const auto before = scanned(bins);
    for (const breakpoint_bins& other : {breakpoint_bins(1.0f, 8.0f), breakpoint_bins(0.5f, 4.0f),
                                         breakpoint_bins(2.0f, 8.0f), breakpoint_bins(1.0f, 3.5f)}) {
        CHECK(refused([&] { bins += other; }, {"1", "4", "do not add up"}));
    }
    CHECK(scanned(bins) == before);
    bins += breakpoint_bins(1.0f, 3.9f);  // the same after rounding
    CHECK(scanned(bins) == before);
}
