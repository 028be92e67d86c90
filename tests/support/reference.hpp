// Decisions for tests, and the formulas of the paper as they are printed, in long double: full sorts, plain sums.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "verkv/core/plan.hpp"
#include "verkv/core/tolerance.hpp"

namespace support {

using real = long double;

/// The same numbers with every standard library: mt19937_64 is fixed by the standard, its distributions are not.
class dice {
public:
    explicit dice(std::uint64_t seed) : engine_(seed) {}

    double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
    double between(double low, double high) { return low + (high - low) * uniform(); }
    double log_between(double low, double high) { return std::exp(between(std::log(low), std::log(high))); }
    std::size_t below(std::size_t n) { return static_cast<std::size_t>(engine_() % n); }
    bool chance(double p) { return uniform() < p; }
    double normal() {
        const double radius = std::sqrt(-2 * std::log(1 - uniform()));
        return radius * std::cos(6.283185307179586 * uniform());
    }
    template <class T>
    void shuffle(std::vector<T>& x) {
        for (std::size_t i = x.size(); i > 1; --i) {
            std::swap(x[i - 1], x[below(i)]);
        }
    }

private:
    std::mt19937_64 engine_;
};

/// Masses and probabilities of one decision of a planner; the reference is the sum of the masses.
struct decision {
    std::vector<float> mass;
    std::vector<float> r;
    std::vector<float> odds;
    double reference = 1;

    decision() = default;
    decision(std::vector<float> masses, std::vector<float> probabilities)
        : mass(std::move(masses)), r(std::move(probabilities)) {
        double sum = 0;
        for (std::size_t i = 0; i < r.size(); ++i) {
            const auto p = static_cast<double>(r[i]);
            odds.push_back(static_cast<float>((1 - p) / p));
            sum += static_cast<double>(mass[i]);
        }
        reference = sum > 0 ? sum : 1;
    }

    [[nodiscard]] std::size_t size() const { return mass.size(); }
    [[nodiscard]] verkv::masses_view view() const { return {mass, odds, reference}; }

    /// The same tokens in another order.
    [[nodiscard]] decision permuted(const std::vector<std::size_t>& order) const {
        std::vector<float> m, p;
        for (const std::size_t i : order) {
            m.push_back(mass[i]);
            p.push_back(r[i]);
        }
        decision out(m, p);
        out.reference = reference;
        return out;
    }
};

enum class weights { peaked, flat, heavy_tailed, twelve_decades, equal, few_values };
enum class probabilities { importance, constant, decades, near_one, few_values };

inline constexpr weights all_weights[] = {weights::peaked,         weights::flat,  weights::heavy_tailed,
                                          weights::twelve_decades, weights::equal, weights::few_values};
inline constexpr probabilities all_probabilities[] = {probabilities::importance, probabilities::constant,
                                                      probabilities::decades, probabilities::near_one,
                                                      probabilities::few_values};

/// A random decision. `certain` is the share of tokens with r = 1, `silent` that of tokens without mass.
inline decision random_decision(dice& d, std::size_t n, weights w, probabilities p, double certain = 0.1,
                                double silent = 0.02) {
    std::vector<float> mass(n), r(n);
    for (std::size_t i = 0; i < n; ++i) {
        double m = 1;
        switch (w) {
            case weights::peaked:
                m = std::exp(3 * d.normal());
                break;
            case weights::flat:
                m = d.between(0.9, 1.1);
                break;
            case weights::heavy_tailed:
                m = std::pow(1 - d.uniform(), -0.7);
                break;
            case weights::twelve_decades:
                m = std::pow(10.0, -12 * d.uniform());
                break;
            case weights::equal:
                m = 0.3;
                break;
            case weights::few_values:
                m = std::ldexp(1.0, -static_cast<int>(d.below(4)));
                break;
        }
        double q = 1.0 / 16;
        switch (p) {
            case probabilities::importance:
                q = std::min(1.0, 0.2 * std::pow(m, 0.7) * std::exp(d.normal()));
                break;
            case probabilities::constant:
                break;
            case probabilities::decades:
                q = d.log_between(1e-9, 1.0);
                break;
            case probabilities::near_one:
                q = 1 - d.log_between(1e-7, 0.5);
                break;
            case probabilities::few_values:
                q = std::ldexp(1.0, -static_cast<int>(d.below(5)));
                break;
        }
        mass[i] = d.chance(silent) ? 0.0f : static_cast<float>(m);
        r[i] = d.chance(certain) ? 1.0f : std::clamp(static_cast<float>(q), 1e-9f, 1.0f);
    }
    return {std::move(mass), std::move(r)};
}

/// A decision in long double, masses relative to the reference. r and 1 - r come from the odds, as a planner has them.
struct reference_decision {
    std::vector<real> mass, odds, r, rest;
    std::vector<std::size_t> sampled;  ///< L, ascending

    explicit reference_decision(const decision& d) {
        for (std::size_t i = 0; i < d.size(); ++i) {
            const real o = static_cast<real>(d.odds[i]);
            mass.push_back(static_cast<real>(d.mass[i]) / static_cast<real>(d.reference));
            odds.push_back(o);
            r.push_back(1 / (1 + o));
            rest.push_back(o / (1 + o));
            if (d.odds[i] > 0) {
                sampled.push_back(i);
            }
        }
    }
    [[nodiscard]] std::size_t size() const { return mass.size(); }
    [[nodiscard]] real lift(std::size_t i) const { return mass[i] * rest[i] / r[i]; }
};

struct reference_moments {
    real bias = 0, variance = 0, largest = 0;
};

inline reference_moments terms_of(const reference_decision& d, const std::vector<real>& lambda, std::size_t i) {
    const real l = lambda[i];
    const real m = d.mass[i];
    return {m * (1 - l), l * l * m * m * d.rest[i] / d.r[i], l * m / d.r[i] * std::max(d.r[i], d.rest[i])};
}

/// Moments of some tokens of L.
inline reference_moments moments_of(const reference_decision& d, const std::vector<real>& lambda,
                                    const std::vector<std::size_t>& tokens) {
    reference_moments sum;
    for (const std::size_t i : tokens) {
        const reference_moments t = terms_of(d, lambda, i);
        sum.bias += t.bias;
        sum.variance += t.variance;
        sum.largest = std::max(sum.largest, t.largest);
    }
    return sum;
}

inline real bound_of(const reference_moments& m, real log_term) {
    const real x = m.largest * log_term / 3;
    return m.bias + x + std::sqrt(x * x + 2 * m.variance * log_term);
}

inline real log_term_of(const verkv::tolerance& t) {
    return std::log(2 / static_cast<real>(t.delta));
}

/// MSE(lambda) of Theorem 1.
inline real mean_squared_error_of(const reference_decision& d, const std::vector<real>& lambda) {
    const reference_moments m = moments_of(d, lambda, d.sampled);
    return m.bias * m.bias + m.variance;
}

/// L by falling lift; ties: the lower index first.
inline std::vector<std::size_t> by_lift(const reference_decision& d) {
    std::vector<std::size_t> order = d.sampled;
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return d.lift(a) > d.lift(b); });
    return order;
}

inline std::vector<real> unshrunk(const reference_decision& d) {
    return std::vector<real>(d.size(), 1);
}

/// Binary shrinkage by the full sort.
inline std::vector<real> binary_shrinkage_of(const reference_decision& d) {
    std::vector<real> lambda = unshrunk(d);
    real beta = 0;
    for (const std::size_t i : by_lift(d)) {
        if (!(d.lift(i) > 2 * beta)) {
            break;
        }
        lambda[i] = d.r[i];
        beta += d.mass[i] * d.rest[i];
    }
    return lambda;
}

/// Bounded shrinkage by bisection of beta = sum m (1 - lambda(beta)).
inline std::vector<real> bounded_shrinkage_of(const reference_decision& d) {
    const auto at = [&](real beta, std::size_t i) {
        const real t = d.lift(i);
        return t > beta ? std::max(beta / t, d.r[i]) : real{1};
    };
    real low = 0;
    real high = 0;
    for (const std::size_t i : d.sampled) {
        high += d.mass[i];
    }
    for (int step = 0; step < 220; ++step) {
        const real middle = low + (high - low) / 2;
        real sum = 0;
        for (const std::size_t i : d.sampled) {
            sum += d.mass[i] * (1 - at(middle, i));
        }
        (sum > middle ? low : high) = middle;
    }
    std::vector<real> lambda = unshrunk(d);
    for (const std::size_t i : d.sampled) {
        lambda[i] = at(high, i);
    }
    return lambda;
}

/// KVFetch by a full sort of the gains.
struct reference_plan {
    std::vector<std::size_t> order;  ///< L by falling gain; ties: the lower index first
    std::vector<real> gain;          ///< [n]; e(L) - e(L without i) without cancellation
    std::vector<real> naive_gain;    ///< [n]; the difference of two certificates as printed
    std::vector<real> curve;         ///< certificate after the first k of the order, k = 0 ... |L|
    std::size_t fetched = 0;         ///< k*
};

inline reference_plan greedy_of(const reference_decision& d, const std::vector<real>& lambda,
                                const verkv::tolerance& t) {
    const real log_term = log_term_of(t);
    const reference_moments all = moments_of(d, lambda, d.sampled);
    reference_plan p;
    p.gain.assign(d.size(), 0);
    p.naive_gain.assign(d.size(), 0);
    real second = 0;
    std::size_t holders = 0;
    for (const std::size_t i : d.sampled) {
        const real b = terms_of(d, lambda, i).largest;
        holders += b == all.largest;
        second = b < all.largest ? std::max(second, b) : second;
    }
    const real e = bound_of(all, log_term);
    const real x = all.largest * log_term / 3;
    for (const std::size_t i : d.sampled) {
        const reference_moments own = terms_of(d, lambda, i);
        const bool leads = own.largest == all.largest && holders == 1;
        const reference_moments others{all.bias - own.bias, std::max<real>(all.variance - own.variance, 0),
                                       leads ? second : all.largest};
        p.naive_gain[i] = e - bound_of(others, log_term);
        const real y = others.largest * log_term / 3;
        const real below =
            std::sqrt(x * x + 2 * all.variance * log_term) + std::sqrt(y * y + 2 * others.variance * log_term);
        p.gain[i] =
            own.bias + (x - y) + (below > 0 ? ((x - y) * (x + y) + 2 * own.variance * log_term) / below : real{0});
    }
    p.order = d.sampled;
    std::stable_sort(p.order.begin(), p.order.end(),
                     [&](std::size_t a, std::size_t b) { return p.gain[a] > p.gain[b]; });
    p.curve.assign(p.order.size() + 1, 0);
    reference_moments rest;
    for (std::size_t k = p.order.size(); k-- > 0;) {
        const reference_moments own = terms_of(d, lambda, p.order[k]);
        rest.bias += own.bias;
        rest.variance += own.variance;
        rest.largest = std::max(rest.largest, own.largest);
        p.curve[k] = bound_of(rest, log_term);
    }
    while (!(p.curve[p.fetched] < static_cast<real>(t.epsilon))) {
        ++p.fetched;
    }
    return p;
}

}  // namespace support
