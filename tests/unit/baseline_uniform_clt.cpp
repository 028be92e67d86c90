// vAttention's sample, as its theorem and as its public code have it: budgets recomputed from the pilot that was drawn.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/allocations.hpp"
#include "support/attention_reference.hpp"
#include "support/baseline_scene.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/baseline/uniform_clt.hpp"
#include "verkv/baseline/uniform_clt_public.hpp"

namespace {

using support::baseline_scene;
using support::select;
using verkv::selection;
using verkv::token_count;
using verkv::token_index;
using verkv::uniform_clt;
using verkv::uniform_clt_public;
using tokens = std::vector<token_index>;
using doubles = std::vector<double>;

/// The heaviest free tokens by the estimates, by a full sort; ascending.
tokens heavy_of(const baseline_scene& s, std::size_t k) {
    tokens order;
    for (std::size_t i = 0; i < s.size(); ++i) {
        if (!s.fixed.fixed(i, s.size())) {
            order.push_back(static_cast<token_index>(i));
        }
    }
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return s.estimate[a] > s.estimate[b]; });
    order.resize(std::min(k, order.size()));
    std::sort(order.begin(), order.end());
    return order;
}

bool contains(const tokens& list, std::size_t i) {
    return std::binary_search(list.begin(), list.end(), i);
}

/// Sums of w and of w v over the listed tokens: element 0, and the rest.
doubles sums_over(const baseline_scene& s, const tokens& list) {
    doubles sum(s.width + 1);
    for (const token_index i : list) {
        const auto w = static_cast<double>(s.weight[i]);
        sum[0] += w;
        for (std::size_t c = 0; c < s.width; ++c) {
            sum[c + 1] += w * static_cast<double>(s.value[i * s.width + c]);
        }
    }
    return sum;
}

tokens fixed_and(const baseline_scene& s, const tokens& heavy) {
    tokens list = heavy;
    for (std::size_t i = 0; i < s.size(); ++i) {
        if (s.fixed.fixed(i, s.size())) {
            list.push_back(static_cast<token_index>(i));
        }
    }
    return list;
}

/// Spread and size of D and of N as a pilot of distinct tokens says; m tokens are sampled from, `population` of them.
struct pilot_sums {
    verkv::sampled_sum denominator, numerator;

    pilot_sums(const baseline_scene& s, const tokens& exact, const tokens& pilot, double m, double population) {
        const doubles mean = sums_over(s, pilot);
        const doubles known = sums_over(s, exact);
        const auto p = static_cast<double>(pilot.size());
        double variance = 0, trace = 0, norm = 0;
        for (std::size_t c = 0; c <= s.width; ++c) {
            for (const token_index i : pilot) {
                const double x = sums_over(s, {i})[c] - mean[c] / p;
                (c == 0 ? variance : trace) += x * x / (p - 1);
            }
            const double whole = known[c] + m * mean[c] / p;
            norm += c == 0 ? 0 : whole * whole;
        }
        denominator = {population * std::sqrt(variance), known[0] + m * mean[0] / p};
        numerator = {population * std::sqrt(trace), std::sqrt(norm)};
    }
};

}  // namespace

TEST_CASE("uniform_clt: the sample is as large as the theorem says for the pilot that was drawn") {
    std::size_t sampled = 0, at_least_pilot = 0, everything = 0;
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        const baseline_scene s(seed, 600, 0.3 + 0.02 * static_cast<double>(seed), 0.3, 5, {10, 20});
        const verkv::tolerance promise{seed % 2 == 0 ? 0.1 : 0.25, 0.1};
        for (const bool output : {false, true}) {
            for (const bool keep : {false, true}) {
                for (const auto rule : {verkv::quotient_rule::lemma, verkv::quotient_rule::sharp}) {
                    uniform_clt method;
                    method.heavy = token_count::share(0.05);
                    method.pilot = 0.1;
                    method.quotient = rule;
                    method.target =
                        output ? uniform_clt::target_of_draws::output : uniform_clt::target_of_draws::denominator;
                    method.pilot_use = keep ? uniform_clt::pilot_rows::keep : uniform_clt::pilot_rows::discard;
                    const selection out = select(method, s.view(seed, promise));
                    REQUIRE(support::well_formed(out, 600, s.fixed));
                    CAPTURE(seed, output, keep);
                    CHECK(out.claims == (output ? verkv::claim::output : verkv::claim::denominator));
                    const tokens heavy = heavy_of(s, 28);
                    const double m = 570 - 28;
                    if (out.token.size() == 600) {
                        ++everything;
                        CHECK(out.claimed_error == 0);
                        CHECK(out.inspected.empty());
                        CHECK(out.log_weight == std::vector<float>(600, 0.0f));
                        continue;
                    }
                    REQUIRE(out.inspected.size() == 54);
                    const double population = keep ? m - 54 : m;
                    const pilot_sums known(s, fixed_and(s, heavy), out.inspected, m, population);
                    const double wanted =
                        output ? verkv::split_quotient(known.numerator, known.denominator, promise, rule).draws
                               : verkv::clt_draws(known.denominator, promise);
                    const double b = std::max(54.0, std::ceil(wanted));
                    REQUIRE(wanted < population);
                    at_least_pilot += wanted < 54;
                    ++sampled;
                    CHECK(out.claimed_error == promise.epsilon);
                    CHECK(out.inspected_values == (output || keep));
                    std::size_t drawn = 0;
                    for (std::size_t j = 0; j < out.token.size(); ++j) {
                        const token_index i = out.token[j];
                        const bool exact =
                            s.fixed.fixed(i, 600) || contains(heavy, i) || (keep && contains(out.inspected, i));
                        drawn += !exact;
                        CHECK(out.log_weight[j] == (exact ? 0.0f
                                                          : static_cast<float>(std::log(
                                                                population / static_cast<double>(drawn > 0 ? b : 1)))));
                    }
                    CHECK(static_cast<double>(drawn) == b);
                    CHECK(out.token.size() == 30 + 28 + (keep ? 54 : 0) + drawn);
                }
            }
        }
    }
    CHECK(sampled > 100);
    CHECK(at_least_pilot > 5);
    CHECK(everything > 20);
}

TEST_CASE("uniform_clt: with replacement a token counts as often as it was drawn") {
    const baseline_scene s(3, 400, 0.5, 0.2, 0, {5, 5});
    uniform_clt method;
    method.draws = uniform_clt::replacement::with;
    std::size_t repeated = 0;
    for (const auto use : {uniform_clt::pilot_rows::discard, uniform_clt::pilot_rows::keep}) {
        method.pilot_use = use;
        for (std::uint64_t draw = 0; draw < 50; ++draw) {
            const selection out = select(method, s.view(draw, {0.1, 0.1}));
            const tokens heavy = heavy_of(s, 7);
            const bool keep = use == uniform_clt::pilot_rows::keep;
            const double population = 383.0 - (keep ? static_cast<double>(out.inspected.size()) : 0);
            double counted = 0, least = 1e9;
            for (const token_index i : out.token) {
                if (!s.fixed.fixed(i, 400) && !contains(heavy, i) && !(keep && contains(out.inspected, i))) {
                    counted += s.coefficient(out, i);
                    least = std::min(least, s.coefficient(out, i));
                }
            }
            CHECK(counted == Approx(population).epsilon(1e-5));  // b draws of population/b each
            for (const token_index i : out.token) {
                if (!s.fixed.fixed(i, 400) && !contains(heavy, i) && !(keep && contains(out.inspected, i))) {
                    const double times = s.coefficient(out, i) / least;
                    CHECK(std::abs(times - std::round(times)) < 1e-5);
                    repeated += times > 1.5;
                }
            }
        }
    }
    CHECK(repeated > 100);
}

TEST_CASE("uniform_clt: small, strange and wrong inputs") {
    for (const std::size_t n : {0u, 1u, 2u, 3u, 5u}) {
        const baseline_scene s(n, n, 1, 0, 0, {1, 1});
        for (const bool keep : {false, true}) {
            uniform_clt method;
            method.pilot_use = keep ? uniform_clt::pilot_rows::keep : uniform_clt::pilot_rows::discard;
            const selection out = select(method, s.view(1));
            CHECK(support::well_formed(out, n, s.fixed));
            CHECK((out.token.size() == n || n == 5));
        }
        CHECK(support::well_formed(select(uniform_clt_public{}, s.view(1)), n, s.fixed));
    }
    // Equal weights do not vary: as many draws as the pilot has, and D^ is exact.
    baseline_scene equal(1, 1000, 0, 0, 0, {10, 10});
    const selection flat = select(uniform_clt{}, equal.view(1));
    CHECK(flat.token.size() == 20 + 19 + 19);
    CHECK(verkv::estimate_denominator(flat, equal.weight) == Approx(1000).epsilon(1e-6));
    // A weight that is not finite, once it is seen, costs all rows and the claim.
    for (const float odd : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        baseline_scene s(2, 100, 1, 0, 0, {5, 5});
        s.weight[2] = odd;
        const selection out = select(uniform_clt{}, s.view(1));
        if (std::isnan(odd)) {
            CHECK(out.token.size() == 100);
            CHECK(out.claims == verkv::claim::nothing);
        }
        (void)select(uniform_clt_public{}, s.view(1));
    }
    // No weight at all: nothing varies.
    baseline_scene none(1, 200, 1, 0, 3, {5, 5});
    std::fill(none.weight.begin(), none.weight.end(), 0.0f);
    uniform_clt of_output;
    of_output.target = uniform_clt::target_of_draws::output;
    CHECK(support::well_formed(select(of_output, none.view(1)), 200, none.fixed));
    CHECK(support::well_formed(select(uniform_clt_public{}, none.view(1)), 200, none.fixed));

    const baseline_scene s(4, 60, 1, 0.1, 0, {5, 5});
    CHECK(support::refused([&] { (void)select(uniform_clt{.pilot = 0}, s.view(1)); }, {"a pilot of 0"}));
    CHECK(support::refused([&] { (void)select(uniform_clt_public{.pilot = 2}, s.view(1)); }, {"a pilot of 2"}));
    CHECK(support::refused([&] { (void)select(uniform_clt{}, s.view(1, {0.1, 1.5})); }, {"delta is 1.5"}));
    CHECK(support::refused([&] { (void)select(of_output, s.view(1)); }, {"0 values for 60"}));
    const baseline_scene valued(4, 60, 1, 0.1, 2, {5, 5});
    CHECK(support::refused([&] { (void)select(of_output, valued.view(1, {1.5, 0.1})); }, {"epsilon is 1.5"}));
    auto short_of = s.view(1);
    short_of.weight = short_of.weight.first(59);
    CHECK(support::refused([&] { (void)select(uniform_clt{}, short_of); }, {"59 exact", "60 est"}));
    selection kept;
    kept.token = {1, 2, 3};
    uniform_clt::workspace memory;
    CHECK_THROWS(uniform_clt{}.select(verkv::cpu{}, short_of, memory, kept));
    CHECK(kept.token == tokens{1, 2, 3});
}

TEST_CASE(
    "uniform_clt: the same stream gives the same bits, another one another sample, and nothing is allocated again") {
    const baseline_scene s(6, 4000, 0.7, 0.3, 4, {8, 8});
    const auto view = s.view(5, {0.3, 0.1});
    const auto again = [&](const auto& method) {
        typename std::remove_cvref_t<decltype(method)>::workspace w;
        selection out;
        method.select(verkv::cpu{}, view, w, out);
        const selection first = out;
        method.select(verkv::cpu{}, s.view(6, {0.3, 0.1}), w, out);
        CHECK(out.token != first.token);
        const std::size_t calls = support::allocations_of([&] { method.select(verkv::cpu{}, view, w, out); });
        CHECK(out.token == first.token);
        CHECK(support::bits_of(out.log_weight) == support::bits_of(first.log_weight));
        CHECK(out.inspected == first.inspected);
        return calls;
    };
    CHECK(again(uniform_clt_public{}) == 0);
    for (const bool keep : {false, true}) {
        uniform_clt method;
        method.pilot_use = keep ? uniform_clt::pilot_rows::keep : uniform_clt::pilot_rows::discard;
        CHECK(again(method) == 0);
        method.target = uniform_clt::target_of_draws::output;
        CHECK(again(method) == 0);
        method.draws = uniform_clt::replacement::with;
        CHECK(again(method) == 0);
    }
}

TEST_CASE("uniform_clt_public: budget, probabilities and weights as that code has them") {
    std::size_t sampled = 0;
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
        const baseline_scene s(seed, 500, 0.02 * static_cast<double>(seed), 0.3, 0, {10, 15});
        const verkv::tolerance promise{0.1, seed % 2 == 0 ? 0.1 : 0.3};
        uniform_clt_public method;
        method.heavy = token_count::tokens(12);
        method.pilot = 0.1;
        method.repeated =
            seed % 3 == 0 ? uniform_clt_public::duplicates::merge : uniform_clt_public::duplicates::collapse;
        const auto view = s.view(seed, promise);
        const selection out = select(method, view);
        REQUIRE(support::well_formed(out, 500, s.fixed));
        // The draws again, from the stream.
        const verkv::uniform_stream stream = verkv::fresh_stream(view.stream, 1);
        verkv::position_t next = 0;
        const auto draw = [&] {
            return 10 + static_cast<std::size_t>(std::floor(verkv::uniform(stream, next++) * 475));
        };
        tokens pilot;
        for (int j = 0; j < 47; ++j) {
            pilot.push_back(static_cast<token_index>(draw()));
        }
        double mean = 0, square = 0, total = sums_over(s, fixed_and(s, heavy_of(s, 12)))[0];
        for (const token_index i : pilot) {
            const auto w = static_cast<double>(s.weight[i]);
            mean += w / 47;
            square += w * w;
        }
        const double deviation = std::sqrt((square - 47 * mean * mean) / 46);
        std::sort(pilot.begin(), pilot.end());
        pilot.erase(std::unique(pilot.begin(), pilot.end()), pilot.end());
        for (const token_index i : pilot) {
            total += static_cast<double>(s.weight[i]) / (47.0 / 475 + 1e-6);
        }
        CHECK(out.inspected == pilot);
        const double z = seed % 2 == 0 ? 1.2815515655446004 : 0.5244005127080407;  // one-sided
        const double wanted = std::pow(z * deviation * 475 / (0.1 * total), 2);
        const double b = std::clamp(std::floor(wanted), 47.0, 475.0);
        sampled += b > 47 && b < 475;
        std::vector<int> times(500);
        for (int j = 0; j < static_cast<int>(b); ++j) {
            ++times[draw()];
        }
        for (std::size_t i = 0; i < 500; ++i) {
            const bool exact = s.fixed.fixed(i, 500) || contains(heavy_of(s, 12), i);
            const double p = b / 475;
            const double entry = exact ? 1
                                 : method.repeated == uniform_clt_public::duplicates::collapse
                                     ? (times[i] > 0 ? p : 0)
                                     : std::min(1.0, times[i] * p);
            CHECK(s.coefficient(out, i) == Approx(entry > 0 ? 1 / (entry + 1e-6) : 0).epsilon(1e-6));
        }
        CHECK(out.claims == verkv::claim::denominator);
        CHECK(out.claimed_error == promise.epsilon);
    }
    CHECK(sampled > 12);
}
