// Chernoff bounds on random and on real decisions: against token-by-token bounds, Bernstein's, and redraws. Fixed
// seeds.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "common/trace.hpp"
#include "support/catch.hpp"
#include "support/reference.hpp"
#include "verkv/verkv.hpp"

namespace {

using support::decision;
using support::dice;
using support::probabilities;
using support::weights;
using verkv::bernstein_tail;
using verkv::chernoff_tail;
using verkv::cpu;
using verkv::error_space;
using floats = std::vector<float>;

constexpr error_space both_spaces[] = {error_space::scalar, error_space::vector};

/// Tokens of L, relative to the sum of all masses.
template <class Tail>
typename Tail::summary summary_of(const floats& mass, const floats& r, const floats& lambda) {
    double total = 0;
    for (const float m : mass) {
        total += static_cast<double>(m);
    }
    typename Tail::summary s;
    for (std::size_t i = 0; i < r.size(); ++i) {
        if (r[i] < 1) {
            const double p = static_cast<double>(r[i]);
            const double l = static_cast<double>(lambda[i]);
            s.add(static_cast<double>(mass[i]) / total, (1 - p) / p, l, 1 - l);
        }
    }
    return s;
}

/// lambda by a rule that is drawn: none, binary, bounded, or anything in [r, 1].
floats some_shrinkage(dice& d, const decision& x) {
    floats lambda(x.size(), 1.0f);
    switch (d.below(4)) {
        case 0:
            break;
        case 1:
            verkv::shrink(cpu{}, verkv::binary_shrinkage{}, x.mass, x.r, lambda);
            break;
        case 2:
            verkv::shrink(cpu{}, verkv::bounded_shrinkage{}, x.mass, x.r, lambda);
            break;
        default:
            for (std::size_t i = 0; i < x.size(); ++i) {
                const double r = static_cast<double>(x.r[i]);
                lambda[i] = std::clamp(static_cast<float>(d.between(r, 1)), x.r[i], 1.0f);
            }
    }
    return lambda;
}

template <class F>
void for_decisions(std::uint64_t seed, int rounds, F&& f) {
    dice d(seed);
    for (int round = 0; round < rounds; ++round) {
        for (const std::size_t n : {1u, 2u, 5u, 20u, 100u, 1000u}) {
            for (const weights w : support::all_weights) {
                for (const probabilities p : support::all_probabilities) {
                    const decision x = support::random_decision(d, n, w, p);
                    if (*std::max_element(x.mass.begin(), x.mass.end()) == 0) {
                        continue;
                    }
                    const double delta = d.log_between(1e-8, 0.9);
                    INFO("n " << n << ", weights " << static_cast<int>(w) << ", probabilities " << static_cast<int>(p)
                              << ", delta " << delta);
                    f(d, x, some_shrinkage(d, x), delta);
                }
            }
        }
    }
}

/// The error of an estimate of vectors u_i = mass_i * direction_i, and of a scalar in one dimension, over many draws.
class redraws {
public:
    redraws(const floats& mass, const floats& r, const floats& lambda, std::size_t width,
            std::vector<double> directions)
        : r_(r), width_(width), vectors_(std::move(directions)), certain_(width, 0.0), values_(r.size()) {
        double total = 0;
        for (const float m : mass) {
            total += static_cast<double>(m);
        }
        for (std::size_t i = 0; i < r.size(); ++i) {
            const double m = static_cast<double>(mass[i]) / total;
            values_[i] = static_cast<double>(lambda[i]) / static_cast<double>(r[i]);
            for (std::size_t c = 0; c < width; ++c) {
                vectors_[i * width + c] *= m;
                certain_[c] -= vectors_[i * width + c];
            }
        }
    }

    [[nodiscard]] std::size_t failures(dice& d, std::size_t draws, double bound) const {
        std::size_t count = 0;
        std::vector<double> sum(width_);
        for (std::size_t draw = 0; draw < draws; ++draw) {
            sum = certain_;
            for (std::size_t i = 0; i < r_.size(); ++i) {
                if (r_[i] >= 1 || d.uniform() < static_cast<double>(r_[i])) {
                    for (std::size_t c = 0; c < width_; ++c) {
                        sum[c] += values_[i] * vectors_[i * width_ + c];
                    }
                }
            }
            const double square = std::inner_product(sum.begin(), sum.end(), sum.begin(), 0.0);
            count += std::sqrt(square) > bound;
        }
        return count;
    }

private:
    floats r_;
    std::size_t width_;
    std::vector<double> vectors_;
    std::vector<double> certain_;
    std::vector<double> values_;
};

enum class arrangement { parallel, two_clusters, outlier, random };

std::vector<double> unit_vectors(dice& d, arrangement a, std::size_t n, std::size_t width) {
    std::vector<double> out(n * width, 0.0);
    for (std::size_t i = 0; i < n; ++i) {
        double* u = out.data() + i * width;
        switch (a) {
            case arrangement::parallel:
                u[0] = 1;
                break;
            case arrangement::two_clusters:
                u[0] = i % 2 == 0 ? 1 : -1;
                break;
            case arrangement::outlier:
                u[i == 0 ? width - 1 : 0] = i == 0 ? -1 : 1;
                break;
            case arrangement::random: {
                double square = 0;
                for (std::size_t c = 0; c < width; ++c) {
                    u[c] = d.normal();
                    square += u[c] * u[c];
                }
                for (std::size_t c = 0; c < width; ++c) {
                    u[c] /= std::sqrt(square);
                }
            }
        }
    }
    return out;
}

constexpr std::size_t draws = 10'000;

/// Six standard deviations of a binomial above its mean, were the failure probability delta.
double most_failures(double delta) {
    return draws * delta + 6 * std::sqrt(draws * delta * (1 - delta));
}

}  // namespace

TEST_CASE("chernoff: never looser than Bernstein, nor tighter than token by token") {
    double farthest = 1, sum = 0;
    std::size_t count = 0, tighter = 0;
    for_decisions(91, 8, [&](dice&, const decision& x, const floats& lambda, double delta) {
        const auto s = summary_of<chernoff_tail>(x.mass, x.r, lambda);
        const auto b = summary_of<bernstein_tail>(x.mass, x.r, lambda);
        if (!(b.moments().largest > 0)) {
            return;
        }
        REQUIRE(s.moments().variance == Approx(b.moments().variance).epsilon(1e-13));
        for (const error_space space : both_spaces) {
            CAPTURE(static_cast<int>(space));
            const double binned = chernoff_tail{}.bound(s, delta, space);
            const double exact = verkv::chernoff_certificate(cpu{}, x.mass, x.r, lambda, {0.05, delta}, space);
            const double bernstein = bernstein_tail{}.bound(b, delta, space);
            CHECK(binned <= bernstein * (1 + 1e-12));
            CHECK(exact <= bernstein * (1 + 1e-12));
            // For vectors the exponent is not quite convex, and either search may miss the least of several minima.
            CHECK(binned >= exact * (space == error_space::scalar ? 1 - 1e-3 : 0.9));
            if (exact > 0) {
                farthest = std::max(farthest, binned / exact);
                sum += binned / exact;
                ++count;
                tighter += binned < 0.8 * bernstein;
            }
        }
    });
    CAPTURE(farthest, sum / static_cast<double>(count), tighter, count);
    // Made of probabilities over nine decades; real decisions are below.
    CHECK(farthest < 2);
    CHECK(sum / static_cast<double>(count) < 1.03);
    CHECK(tighter > count / 3);
}

TEST_CASE("chernoff: a decision agrees with the bound") {
    for_decisions(92, 6, [&](dice& d, const decision& x, const floats& lambda, double delta) {
        const auto s = summary_of<chernoff_tail>(x.mass, x.r, lambda);
        for (const error_space space : both_spaces) {
            const double bound = chernoff_tail{}.bound(s, delta, space);
            if (!(bound > 0)) {
                continue;
            }
            CAPTURE(static_cast<int>(space), bound, s.moments().bias);
            const auto holds = [&](double epsilon) { return chernoff_tail{}.holds(s, epsilon, delta, space); };
            const double slack = space == error_space::scalar ? 2e-3 : 0.1;
            CHECK(holds(bound * (1 + slack)));
            CHECK(holds(bound * d.log_between(1 + slack, 100)));
            CHECK_FALSE(holds(bound * (1 - slack)));
            CHECK_FALSE(holds(bound * (1 - slack) * d.uniform()));
        }
    });
}

TEST_CASE("chernoff: the bound falls with delta, and grows with a token's mass and with a token more") {
    for_decisions(93, 3, [&](dice& d, const decision& x, const floats& lambda, double delta) {
        const std::size_t i = d.below(x.size());
        for (const error_space space : both_spaces) {
            // Few tokens make vectors miss a minimum.
            const double slack = space == error_space::scalar ? 1e-3 : 0.1;
            CAPTURE(static_cast<int>(space));
            auto s = summary_of<chernoff_tail>(x.mass, x.r, lambda);
            const double bound = chernoff_tail{}.bound(s, delta, space);
            CHECK(chernoff_tail{}.bound(s, delta * d.uniform(), space) >= bound * (1 - slack));
            // A token more. Its bias makes room on the upper side, so that a scalar's bound need not grow with it.
            const double odds = d.log_between(1e-3, 1e3);
            s.add(static_cast<double>(x.mass[i]) / x.reference, odds, 1, 0);
            CHECK(chernoff_tail{}.bound(s, delta, space) >= bound * (1 - slack));
        }
    });
}

// 600 decisions, each held to six standard deviations of a binomial of delta: below 1e-6 false alarms in all were the
// bound tight.
TEST_CASE("chernoff: redrawn scalars exceed the bound no more often than delta") {
    dice d(94);
    double closest = 0;
    for (int round = 0; round < 20; ++round) {
        for (const weights w : support::all_weights) {
            for (const probabilities p : support::all_probabilities) {
                const decision x = support::random_decision(d, 5 + d.below(40), w, p);
                const floats lambda = some_shrinkage(d, x);
                const double delta = d.log_between(0.01, 0.6);
                const double bound =
                    chernoff_tail{}.bound(summary_of<chernoff_tail>(x.mass, x.r, lambda), delta, error_space::scalar);
                const redraws r(x.mass, x.r, lambda, 1, std::vector<double>(x.size(), 1.0));
                const auto failed = static_cast<double>(r.failures(d, draws / 10, bound * (1 + 1e-12)));
                CAPTURE(delta, bound, failed);
                CHECK(failed * 10 <= draws * delta + 6 * std::sqrt(10 * draws * delta * (1 - delta)) + 10);
                closest = std::max(closest, failed * 10 / draws / delta);
            }
        }
    }
    // The draws can tell: some come near to what is allowed.
    CHECK(closest > 0.5);
}

// 6 decisions of 400 tokens at 10^4 draws, and half their bounds: a bound too small by that is seen.
TEST_CASE("chernoff: ten thousand draws of many tokens keep the bound, and break half of it") {
    dice d(95);
    for (int round = 0; round < 6; ++round) {
        const decision x = support::random_decision(d, 400, weights::peaked, probabilities::importance);
        floats lambda(x.size(), 1.0f);
        if (round % 2 == 1) {
            verkv::shrink(cpu{}, verkv::binary_shrinkage{}, x.mass, x.r, lambda);
        }
        for (const double delta : {0.1, 0.02}) {
            const double bound =
                chernoff_tail{}.bound(summary_of<chernoff_tail>(x.mass, x.r, lambda), delta, error_space::scalar);
            const redraws r(x.mass, x.r, lambda, 1, std::vector<double>(x.size(), 1.0));
            CHECK(static_cast<double>(r.failures(d, draws, bound)) <= most_failures(delta));
            CHECK(static_cast<double>(r.failures(d, draws, bound / 2)) > most_failures(delta));
        }
    }
}

// 32 arrangements, six standard deviations each: below 1e-7 false alarms in all were the bound tight.
TEST_CASE("chernoff: redrawn vectors exceed the bound no more often than delta") {
    dice d(96);
    double closest = 0;
    for (const std::size_t width : {1u, 2u, 64u, 256u}) {
        for (const arrangement a :
             {arrangement::parallel, arrangement::two_clusters, arrangement::outlier, arrangement::random}) {
            for (const bool shrunk : {false, true}) {
                decision x = support::random_decision(d, 30, weights::peaked, probabilities::importance);
                if (a == arrangement::outlier) {
                    x.mass[0] = 20 * *std::max_element(x.mass.begin(), x.mass.end());
                    x.r[0] = 0.05f;
                }
                floats lambda(x.size(), 1.0f);
                if (shrunk) {
                    verkv::shrink(cpu{}, verkv::bounded_shrinkage{}, x.mass, x.r, lambda);
                }
                const auto s = summary_of<chernoff_tail>(x.mass, x.r, lambda);
                const redraws r(x.mass, x.r, lambda, width, unit_vectors(d, a, x.size(), width));
                const double delta = 0.1;
                const double bound = chernoff_tail{}.bound(s, delta, error_space::vector);
                const auto failed = static_cast<double>(r.failures(d, draws, bound * (1 + 1e-12)));
                CAPTURE(width, static_cast<int>(a), shrunk, bound);
                CHECK(failed <= most_failures(delta));
                closest = std::max(closest, failed / (draws * delta));
            }
        }
    }
    CHECK(closest > 0.02);
}

TEST_CASE("chernoff: on real decisions bins cost a few per cent, and Bernstein's inequality far more") {
    const auto trace = example::load_trace_as<verkv::half>(std::string(VERKV_EXAMPLE_DATA_DIR) + "/smollm2-8k-layer15");
    std::vector<std::size_t> kept(trace.first_decode_row());
    std::iota(kept.begin(), kept.end(), std::size_t{0});
    const auto prompt = example::prompt_of(trace, kept);
    double sum = 0, farthest = 0, against_bernstein = 0;
    std::size_t count = 0;
    for (std::size_t kv_head = 0; kv_head < 3; ++kv_head) {
        floats importance(trace.prefill_tokens);
        verkv::largest_attention{}.score(cpu{}, prompt.view(), kv_head, std::span<float>(importance));
        verkv::to_importance(cpu{}, std::span<float>(importance));
        floats r(importance.size());
        verkv::inclusion_probabilities(cpu{}, importance, verkv::budget::fraction(1.0 / 16), {64, 64}, r);
        for (const std::size_t step : trace.spread_steps(3)) {
            const verkv::half* q = trace.queries().row(trace.decode_row(step), kv_head * trace.shape.group());
            std::vector<double> logit(r.size(), 0.0);
            for (std::size_t i = 0; i < r.size(); ++i) {
                const verkv::half* k = trace.keys().row(i, kv_head);
                for (std::size_t c = 0; c < trace.shape.key_dim; ++c) {
                    logit[i] += static_cast<double>(verkv::to_float(q[c])) * static_cast<double>(verkv::to_float(k[c]));
                }
                logit[i] *= static_cast<double>(trace.shape.logit_scale());
            }
            const double top = *std::max_element(logit.begin(), logit.end());
            floats mass;
            for (const double x : logit) {
                mass.push_back(static_cast<float>(std::exp(x - top)));
            }
            for (const bool shrunk : {false, true}) {
                floats lambda(r.size(), 1.0f);
                if (shrunk) {
                    verkv::shrink(cpu{}, verkv::binary_shrinkage{}, mass, r, lambda);
                }
                const auto s = summary_of<chernoff_tail>(mass, r, lambda);
                for (const error_space space : both_spaces) {
                    for (const double delta : {0.1, 1e-3}) {
                        const double binned = chernoff_tail{}.bound(s, delta, space);
                        const double exact = verkv::chernoff_certificate(cpu{}, mass, r, lambda, {0.05, delta}, space);
                        CHECK(binned >= exact * (1 - 1e-3));
                        farthest = std::max(farthest, binned / exact);
                        sum += binned / exact;
                        against_bernstein += binned / verkv::bernstein_bound(s.moments(), std::log(2 / delta));
                        ++count;
                    }
                }
            }
        }
    }
    CAPTURE(farthest, sum / static_cast<double>(count), against_bernstein / static_cast<double>(count));
    CHECK(farthest < 1.1);
    CHECK(sum < 1.04 * static_cast<double>(count));
    CHECK(against_bernstein < 0.65 * static_cast<double>(count));
}
