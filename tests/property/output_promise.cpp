// The promise of an output target: ||o^ - o|| <= t/D^ and |D^ - D| <= t/s, with weights that are exact and radii that
// are certain.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "support/catch.hpp"
#include "support/check_levels.hpp"
#include "support/reference.hpp"
#include "verkv/certify/chernoff.hpp"
#include "verkv/certify/target.hpp"
#include "verkv/core/random.hpp"

namespace {

using namespace support;
using verkv::cpu;
using verkv::plan;
using verkv::tolerance;
using doubles = std::vector<double>;

enum class values { normal, equal, two_clusters, one_outlier, outlier_of_little_weight, heavy };
constexpr values all_values[] = {
    values::normal, values::equal, values::two_clusters, values::one_outlier, values::outlier_of_little_weight,
    values::heavy};

/// Weights, probabilities and values of a KV head, with the exact output.
struct scene {
    std::size_t n;
    std::size_t width;
    decision weights;
    std::vector<doubles> value;
    std::vector<float> radius;  // ||v - c||, c the mean of the values
    doubles centre;
    doubles output;
    double total;  // D

    scene(dice& d, std::size_t tokens, std::size_t dims, values kind, probabilities p)
        : n(tokens),
          width(dims),
          weights(random_decision(d, tokens, d.chance(0.5) ? support::weights::peaked : support::weights::heavy_tailed,
                                  p, 0.05, 0)),
          value(tokens, doubles(dims)),
          centre(dims),
          output(dims),
          total(weights.reference) {
        doubles away(width);
        for (double& x : away) {
            x = 3 * d.normal();
        }
        const std::size_t heaviest =
            static_cast<std::size_t>(std::max_element(weights.mass.begin(), weights.mass.end()) - weights.mass.begin());
        const std::size_t lightest =
            static_cast<std::size_t>(std::min_element(weights.mass.begin(), weights.mass.end()) - weights.mass.begin());
        for (std::size_t i = 0; i < n; ++i) {
            const double scale = kind == values::heavy ? std::pow(1 - d.uniform(), -0.7) : 1;
            for (std::size_t c = 0; c < width; ++c) {
                double& x = value[i][c];
                switch (kind) {
                    case values::normal:
                    case values::heavy:
                        x = scale * d.normal() + 0.5;
                        break;
                    case values::equal:
                        x = away[c];
                        break;
                    case values::two_clusters:
                        x = i % 2 == 0 ? away[c] : -away[c];
                        break;
                    case values::one_outlier:
                        x = i == heaviest ? 20 * away[c] : 1;
                        break;
                    case values::outlier_of_little_weight:
                        x = i == lightest ? 200 * away[c] : 0.1 * d.normal();
                        break;
                }
                centre[c] += x / static_cast<double>(n);
                output[c] += static_cast<double>(weights.mass[i]) * x / total;
            }
        }
        for (std::size_t i = 0; i < n; ++i) {
            radius.push_back(static_cast<float>(distance(value[i], centre) * (1 + 0x1p-22)));
        }
    }

    static double distance(const doubles& a, const doubles& b) {
        double sum = 0;
        for (std::size_t c = 0; c < a.size(); ++c) {
            sum += (a[c] - b[c]) * (a[c] - b[c]);
        }
        return std::sqrt(sum);
    }

    /// Masses of an output target as a decision: weight sqrt(rho^2 + s^2), relative to its reference.
    [[nodiscard]] decision masses(const verkv::output& target, tolerance t, double centre_to_output, double norm,
                                  verkv::masses_view* seen = nullptr) const {
        decision out = weights;
        const verkv::masses_view m =
            target.masses(cpu{}, out.mass, out.odds, total, {radius, centre_to_output, norm}, t);
        out.reference = m.reference;
        if (seen != nullptr) {
            *seen = m;
        }
        return out;
    }
};

struct redrawn {
    std::size_t beyond_scale = 0;        // ||o^ - o|| > epsilon scale
    std::size_t beyond_certificate = 0;  // ||o^ - o|| D^ > t, or |D^ - D| scale > t
    double mean_error = 0;
};

constexpr std::uint32_t draws = 10'000;

/// Draws a plan's tokens over and over. t: the bound on the sum's error; largest: epsilon times the scale.
redrawn redraw(const scene& s, const std::vector<float>& r, std::uint32_t number, double t, double largest,
               double scale) {
    redrawn out;
    // Only tokens whose number is not certain: sum of w v and of w over the others is known.
    doubles certain(s.width);
    double certain_sum = 0;
    std::vector<std::size_t> open;
    for (std::size_t i = 0; i < s.n; ++i) {
        if (r[i] < 1) {
            open.push_back(i);
            continue;
        }
        certain_sum += static_cast<double>(s.weights.mass[i]);
        for (std::size_t c = 0; c < s.width; ++c) {
            certain[c] += static_cast<double>(s.weights.mass[i]) * (s.value[i][c] - s.output[c]);
        }
    }
    doubles sum(s.width);
    for (std::uint32_t draw = 0; draw < draws; ++draw) {
        sum = certain;
        double d = certain_sum;
        for (const std::size_t i : open) {
            const double u = verkv::uniform({.seed = 99, .layer = number, .kv_head = 1, .draw = draw},
                                            static_cast<verkv::position_t>(i));
            if (verkv::sampled(static_cast<double>(r[i]), u)) {
                const double w = static_cast<double>(s.weights.mass[i]) / static_cast<double>(r[i]);
                d += w;
                for (std::size_t c = 0; c < s.width; ++c) {
                    sum[c] += w * (s.value[i][c] - s.output[c]);
                }
            }
        }
        double norm = 0;  // of (o^ - o) D^
        for (const double x : sum) {
            norm += x * x;
        }
        norm = std::sqrt(norm);
        const double error = d > 0 ? norm / d : std::numeric_limits<double>::infinity();
        out.beyond_scale += !(error <= largest * (1 + 1e-6));
        // Rounding, where all values are equal.
        out.beyond_certificate +=
            !(norm <= t * (1 + 1e-6) + 1e-11 * d && std::abs(d - s.total) * scale <= t * (1 + 1e-6));
        out.mean_error += std::min(error, 1e9) / draws;
    }
    return out;
}

template <class Tail>
plan planned(const verkv::masses_view& m, tolerance t) {
    typename verkv::water_filling<Tail>::workspace w;
    plan out;
    verkv::water_filling<Tail>{}.plan(cpu{}, m, t, w, out);
    return out;
}

/// 6 sigma above the expectation.
double most_failures(double delta) {
    return draws * delta + 6 * std::sqrt(draws * delta * (1 - delta));
}

}  // namespace

TEST_CASE("output: radii that are certain bound the distance from the output, and never look at the draw") {
    dice d(51);
    for (int round = 0; round < 200; ++round) {
        const auto kind = all_values[d.below(6)];
        const std::size_t tokens = 1 + d.below(200);
        const scene s(d, tokens, 1 + d.below(40), kind, probabilities::importance);
        const tolerance t{0.1, 0.1};
        for (const double scale : {0.0, 2.5}) {
            verkv::masses_view seen;
            const double norm = std::sqrt(std::inner_product(s.output.begin(), s.output.end(), s.output.begin(), 0.0));
            // The distance that is handed over is not used: it stems from the sample.
            const decision m = s.masses({verkv::radius_rule::certain, scale}, t, d.uniform() * 1e6, norm, &seen);
            double sum = 0;
            std::size_t below = 0;
            for (std::size_t i = 0; i < s.n; ++i) {
                const double rho = static_cast<double>(m.mass[i]) / static_cast<double>(s.weights.mass[i]);
                below += !(rho >= scene::distance(s.value[i], s.output) * (1 - 1e-5) - 1e-12);
                sum += static_cast<double>(m.mass[i]);
            }
            CHECK(below == 0);
            CHECK(seen.total == Approx(sum).epsilon(1e-5));
            CHECK(seen.space == verkv::error_space::vector);
            const double limit = (scale > 0 ? scale : norm) / (1 + t.epsilon);
            CHECK(seen.reference == Approx(s.total * limit).epsilon(1e-9));
        }
        // An estimated radius, and half the limit beside it: sqrt(R^2 + distance^2 + s^2).
        const double away = d.uniform() * 3;
        const decision m = s.masses({verkv::radius_rule::estimated, 1}, t, away, 1);
        for (std::size_t i = 0; i < s.n; ++i) {
            const double rho = std::hypot(static_cast<double>(s.radius[i]), away, 0.5 / (1 + t.epsilon));
            CHECK(static_cast<double>(m.mass[i]) ==
                  Approx(static_cast<double>(s.weights.mass[i]) * rho).epsilon(1e-5).margin(1e-30));
        }
    }
}

// 6 kinds of values x 4 widths x 2 tails x 2 deltas, two limits each at 6 sigma of a binomial of delta: false alarms
// below 2e-7 if the bound were tight.
TEST_CASE("output: the error is within t/D^ but for a share delta of the draws, in any dimension") {
    dice d(52);
    std::uint32_t number = 0;
    std::size_t fetching = 0, cases = 0, broken_without = 0, nothing_to_do = 0;
    double with = 0, without = 0;
    for (const values kind : all_values) {
        for (const std::size_t width : {1u, 2u, 64u, 256u}) {
            const scene s(d, 48, width, kind, width == 2 ? probabilities::decades : probabilities::importance);
            double spread = 0;  // root mean square distance from the output, by weight
            for (std::size_t i = 0; i < s.n; ++i) {
                const double x = scene::distance(s.value[i], s.output);
                spread += static_cast<double>(s.weights.mass[i]) / s.total * x * x;
            }
            const double scale = std::max(std::sqrt(spread), 1e-3);
            const verkv::output target{verkv::radius_rule::certain, scale};
            const double epsilon = 0.25;
            ++number;
            const double largest = epsilon * scale;
            const redrawn bare =
                redraw(s, s.weights.r, number, std::numeric_limits<double>::infinity(), largest, scale);
            for (const double delta : {0.1, 0.4}) {
                const tolerance t{epsilon, delta};
                verkv::masses_view seen;
                const decision m = s.masses(target, t, 0, 0, &seen);
                seen.mass = m.mass;
                seen.odds = m.odds;
                for (const bool sharp : {false, true}) {
                    const plan p =
                        sharp ? planned<verkv::chernoff_tail>(seen, t) : planned<verkv::bernstein_tail>(seen, t);
                    INFO("values " << static_cast<int>(kind) << ", width " << width << ", delta " << delta
                                   << ", chernoff " << sharp);
                    CHECK(p.certificate_after < epsilon);
                    const double bound = p.certificate_after * seen.reference;
                    const redrawn x = redraw(s, probabilities_of(m, p), number, bound, largest, scale);
                    // ||o^ - o|| D^ <= t = certificate D scale / (1 + epsilon), and so ||o^ - o|| <= epsilon scale.
                    CHECK(static_cast<double>(x.beyond_certificate) <= most_failures(delta));
                    CHECK(static_cast<double>(x.beyond_scale) <= most_failures(delta));
                    with += static_cast<double>(x.beyond_scale) / draws;
                    without += static_cast<double>(bare.beyond_scale) / draws;
                    broken_without += p.raised > 0 && static_cast<double>(bare.beyond_scale) > most_failures(delta);
                    fetching += p.raised > 0;
                    nothing_to_do += p.raised == 0;
                    CAPTURE(p.raised, x.mean_error, bare.mean_error);
                    CHECK((p.raised == 0 || kind == values::equal || x.mean_error < 1.01 * bare.mean_error));
                    if (kind == values::equal) {
                        // Only a sample of nothing is off.
                        CHECK(x.beyond_scale <= bare.beyond_scale);
                    }
                    ++cases;
                }
            }
        }
    }
    CAPTURE(cases, fetching, broken_without, nothing_to_do, with, without);
    CHECK(fetching > cases / 2);
    CHECK(nothing_to_do > 0);
    CHECK(broken_without > fetching / 4);
    CHECK(with < without / 4);
}
