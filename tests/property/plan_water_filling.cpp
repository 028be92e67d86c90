// Water-filling against optimisers that do not know its formula, floats against long double, and the promise on real
// decisions. The seeds are fixed: what is no statistic is no matter of chance.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "support/catch.hpp"
#include "support/check_levels.hpp"
#include "support/reference.hpp"

namespace {

using namespace support;
using verkv::cpu;
using verkv::plan;
using verkv::tolerance;
using planner = verkv::water_filling<>;
using doubles = std::vector<double>;

plan planned(const decision& d, tolerance t) {
    planner::workspace w;
    plan out;
    planner{}.plan(cpu{}, d.view(), t, w, out);
    return out;
}

/// min sum 1/a over a in [1, most], sum weight a <= room: r' = 1/a makes V linear. Convex.
struct small_problem {
    doubles weight;   // m^2
    doubles most;     // 1/r
    double room = 0;  // V + sum m^2

    [[nodiscard]] double used(const doubles& a) const {
        return std::inner_product(a.begin(), a.end(), weight.begin(), 0.0);
    }
    static double rows(const doubles& a) {
        return std::accumulate(a.begin(), a.end(), 0.0, [](double s, double x) { return s + 1 / x; });
    }
};

/// A random feasible point, then exchanges of room between pairs by golden section, until nothing is gained: the
/// problem is convex, and a point that no pair improves is its minimum.
double best_rows(const small_problem& p, dice& d) {
    const std::size_t n = p.weight.size();
    doubles a(n, 1.0);
    std::vector<std::size_t> order(n);
    std::iota(order.begin(), order.end(), std::size_t{0});
    d.shuffle(order);
    const auto spare = [&] { return p.room - p.used(a); };
    for (const std::size_t i : order) {
        a[i] += d.uniform() * std::min(p.most[i] - a[i], std::max(spare(), 0.0) / p.weight[i]);
    }
    for (const std::size_t i : order) {
        a[i] += std::min(p.most[i] - a[i], std::max(spare(), 0.0) / p.weight[i]);
    }
    for (int sweep = 0; sweep < 400; ++sweep) {
        const double before = small_problem::rows(a);
        for (std::size_t i = 0; i < n; ++i) {
            for (std::size_t j = 0; j < n; ++j) {
                if (i == j) {
                    continue;
                }
                // x of room goes from j to i.
                double low = 0;
                double high = std::min((p.most[i] - a[i]) * p.weight[i], (a[j] - 1) * p.weight[j]);
                const auto at = [&](double x) { return 1 / (a[i] + x / p.weight[i]) + 1 / (a[j] - x / p.weight[j]); };
                for (int step = 0; step < 60; ++step) {
                    const double left = low + 0.382 * (high - low);
                    const double right = low + 0.618 * (high - low);
                    const bool falls = at(left) > at(right);
                    (falls ? low : high) = falls ? left : right;
                }
                const double x = (low + high) / 2;
                if (x > 0 && at(x) < at(0)) {
                    a[i] += x / p.weight[i];
                    a[j] -= x / p.weight[j];
                }
            }
        }
        if (!(small_problem::rows(a) < before * (1 - 1e-9))) {
            break;
        }
    }
    return small_problem::rows(a);
}

/// The smallest sum of 1/a over a in [1, 1/r] with sum_i m_hi^2 (a_i - 1) <= room_h for both heads: the largest value
/// of the dual, whose inner minimum is found token by token by golden section. Every value of it is a lower bound.
double two_head_bound(const std::vector<doubles>& squares, const doubles& most, const doubles& room) {
    const auto dual = [&](double mu, double nu) {
        double value = -mu * room[0] - nu * room[1];
        for (std::size_t i = 0; i < most.size(); ++i) {
            const double price = mu * squares[0][i] + nu * squares[1][i];
            const auto at = [&](double a) { return 1 / a + price * (a - 1); };
            double low = 0, high = std::log(most[i]);
            for (int step = 0; step < 24; ++step) {
                const double left = low + 0.382 * (high - low);
                const double right = low + 0.618 * (high - low);
                const bool falls = at(std::exp(left)) > at(std::exp(right));
                (falls ? low : high) = falls ? left : right;
            }
            value += at(std::exp((low + high) / 2));
        }
        return value;
    };
    // Concave in the prices: coordinates in turn, and both together, by steps that shrink.
    doubles log_price(2);
    for (std::size_t h = 0; h < 2; ++h) {
        log_price[h] = -std::log(std::max(room[h], 1e-12));
    }
    const auto value = [&](const doubles& x) { return dual(std::exp(x[0]), std::exp(x[1])); };
    double best = value(log_price);
    for (double step = 4; step > 1e-4;) {
        doubles next = log_price;
        for (const auto& [x, y] : {std::pair{1.0, 0.0},
                                   {-1.0, 0.0},
                                   {0.0, 1.0},
                                   {0.0, -1.0},
                                   {1.0, 1.0},
                                   {-1.0, -1.0},
                                   {1.0, -1.0},
                                   {-1.0, 1.0}}) {
            const doubles to{log_price[0] + step * x, log_price[1] + step * y};
            if (const double v = value(to); v > best) {
                best = v;
                next = to;
            }
        }
        if (next == log_price) {
            step /= 2;
        }
        log_price = next;
    }
    return best;
}

double total_rows(const decision& d, const plan& p) {
    double sum = 0;
    for (const float r : probabilities_of(d, p)) {
        sum += static_cast<double>(r);
    }
    return sum;
}

}  // namespace

TEST_CASE("water-filling: no plan of as small a variance expects fewer rows") {
    dice d(41);
    std::size_t raising = 0, partly = 0;
    for (int round = 0; round < 400; ++round) {
        const decision x = any_decision(d, 1 + d.below(6), 0, 0);
        const double before = planned(x, {1e9, 0.1}).certificate_before;
        if (!(before > 0)) {
            continue;
        }
        const tolerance t{before * d.log_between(0.02, 0.99), 0.1};
        const plan p = planned(x, t);
        small_problem problem;
        problem.room = static_cast<double>(moments_of_plan(x, p).variance);
        for (std::size_t i = 0; i < x.size(); ++i) {
            const double m = static_cast<double>(x.mass[i]) / x.reference;
            problem.weight.push_back(m * m);
            problem.most.push_back(1 + static_cast<double>(x.odds[i]));
            problem.room += m * m;
        }
        const double own = total_rows(x, p);
        double best = 1e9;
        for (int start = 0; start < 3; ++start) {
            best = std::min(best, best_rows(problem, d));
        }
        INFO("round " << round << ", n " << x.size() << ", epsilon " << t.epsilon);
        CHECK(own <= best * (1 + 1e-3));
        CHECK(best <= own * (1 + 1e-3));  // the optimiser does reach it
        raising += p.raised > 0;
        partly += std::any_of(p.entries.begin(), p.entries.end(), [](const auto& e) { return e.probability < 1; });
    }
    CHECK(raising > 300);
    CHECK(partly > 150);
}

// Given each head's b, its certificate is a limit on its variance: two linear constraints. Of many tokens without ties,
// as b jumps.
TEST_CASE("water-filling: a joint plan of two heads is near the optimum of its two constraints") {
    dice d(42);
    double worst = 0;
    std::size_t raising = 0;
    for (int round = 0; round < 60; ++round) {
        const std::size_t n = 100 + d.below(200);
        const weights kind = all_weights[d.below(4)];
        const decision first = random_decision(d, n, kind, all_probabilities[d.below(5)], 0, 0);
        std::vector<float> mass = first.mass;
        const double spread = d.between(0, 2);
        for (float& m : mass) {
            m *= static_cast<float>(std::exp(spread * d.normal()));
        }
        const std::vector<decision> group{first, decision(mass, first.r)};
        const tolerance t{planned(first, {1e9, 0.1}).certificate_before * d.log_between(0.05, 0.9), 0.1};
        planner::workspace w;
        std::vector<plan> plans(2);
        planner{}.plan_group(cpu{}, std::vector<verkv::masses_view>{group[0].view(), group[1].view()}, t, w, plans);
        const double l = t.log_term();
        std::vector<doubles> squares(2);
        doubles most, room;
        for (std::size_t h = 0; h < 2; ++h) {
            for (const float m : group[h].mass) {
                const double x = static_cast<double>(m) / group[h].reference;
                squares[h].push_back(x * x);
            }
            const double b = static_cast<double>(moments_of_plan(group[h], plans[h]).largest);
            room.push_back(t.epsilon * (t.epsilon - 2 * b * l / 3) / (2 * l));
        }
        for (const float o : first.odds) {
            most.push_back(1 + static_cast<double>(o));
        }
        const double least = std::accumulate(first.odds.begin(), first.odds.end(), 0.0,
                                             [](double s, float o) { return s + 1 / (1 + static_cast<double>(o)); });
        const double own = total_rows(first, plans[0]);
        const double bound = std::max(two_head_bound(squares, most, room), least);
        INFO("round " << round << ", n " << first.size() << ", rows " << own << ", at least " << bound);
        CHECK(own >= bound * (1 - 1e-3));
        CHECK(own <= bound * 1.03 + 1e-3);
        worst = std::max(worst, own / bound);
        raising += plans[0].raised > 0;
    }
    CAPTURE(worst);
    CHECK(raising > 40);
}

TEST_CASE("water-filling: floats against long double at a million tokens over twelve decades") {
    dice d(43);
    for (const probabilities p : {probabilities::importance, probabilities::decades}) {
        const decision x = random_decision(d, 1'000'000, weights::twelve_decades, p, 0.01, 0);
        for (const double epsilon : {0.1, 1e-3, 1e-5}) {
            const tolerance t{epsilon, 0.1};
            const plan out = planned(x, t);
            INFO("probabilities " << static_cast<int>(p) << ", epsilon " << epsilon);
            // Moments to 1e-4 (1e-3 is what is asked for), kappa to 2^-9.
            CHECK(level_fault(x, out, t) == "");
        }
    }
}
