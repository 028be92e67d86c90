// Masses of an output target, and what a sample says of a certificate, on the CPU.
#pragma once

#include <cmath>
#include <span>

#include "verkv/certify/bernstein.hpp"
#include "verkv/cpu/raised_tokens.hpp"
#include "verkv/cpu/softmax_sum.hpp"

namespace verkv::inline v0::detail {
inline namespace VERKV_LANES_NAMESPACE {

/// Times a power of two that a float may be too short for: in two steps.
class scale_of_two {
public:
    explicit scale_of_two(double unit) {
        const int e = std::ilogb(unit);
        first_ = static_cast<float>(std::exp2(e / 2));
        second_ = static_cast<float>(std::exp2(e - e / 2));
    }
    VERKV_ALWAYS_INLINE lanes operator()(const lanes& x) const { return x * first_ * second_; }

private:
    float first_, second_;
};

VERKV_ALWAYS_INLINE void store_some(float* p, const lanes& x, std::size_t count) {
    if (count >= lane_count) {
        store(p, x);
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        p[i] = x[i];
    }
}

/// The length s beside an output's error, as a share of its limit, where nothing is proven: enough to keep D^ within 2
/// epsilon, and less than all that a theorem takes.
inline constexpr double denominator_share = 0.5;

/// Sum of w_i R_i u, u a power of two.
inline double weighted_sum(std::span<const float> weight, std::span<const float> radius, double unit) {
    const scale_of_two u(unit);
    return blockwise_sum(
        weight.size(), [&](std::size_t i, std::size_t left) __attribute__((always_inline)) {
            return load_some(weight.data() + i, left) * u(load_some(radius.data() + i, left));
        });
}

/// w_i *= sqrt((R_i u)^2 + distance^2); returns their sum.
inline double weigh_by_distance(std::span<float> weight, std::span<const float> radius, double unit, double distance) {
    const scale_of_two u(unit);
    const auto square = static_cast<float>(distance * distance);
    return blockwise_sum(
        weight.size(), [&](std::size_t i, std::size_t left) __attribute__((always_inline)) {
            const lanes r = u(load_some(radius.data() + i, left));
            const lanes m = load_some(weight.data() + i, left) * square_root(r * r + square);
            store_some(weight.data() + i, m, left);
            return left >= lane_count ? m : load_first(weight.data() + i, left);
        });
}

/// w_i *= sqrt((R_i u + more)^2 + beside^2); returns their sum.
inline double weigh_by_sum(std::span<float> weight, std::span<const float> radius, double unit, double more,
                           double beside) {
    const scale_of_two u(unit);
    const auto add = static_cast<float>(more);
    const auto square = static_cast<float>(beside * beside);
    return blockwise_sum(
        weight.size(), [&](std::size_t i, std::size_t left) __attribute__((always_inline)) {
            const lanes r = u(load_some(radius.data() + i, left)) + add;
            const lanes m = load_some(weight.data() + i, left) * square_root(r * r + square);
            store_some(weight.data() + i, m, left);
            return left >= lane_count ? m : load_first(weight.data() + i, left);
        });
}

/// What a sample that was drawn with probabilities r' says of all tokens: estimates of D and V, and its own b.
struct observed_moments {
    double denominator = 0;
    bernstein_moments moments;
    double planned = 0;  ///< V as estimated from the same tokens by their planned masses
};

/// Adds rows whose weights are w = e^{logit - shift}: D^ += w/r', and with x = w rho V^ += x^2 (1-r')/r'^2, b = max x
/// max(1, (1-r')/r') over r' < 1. A row of probability 0 was not used. Distances rho, or none for 1; planned masses in
/// the unit of the weights. The logits are overwritten with the weights.
inline void observe(std::span<float> logit, float shift, std::span<const float> probability,
                    std::span<const float> distance, std::span<const float> planned, observed_moments& to) {
    exponentiate(logit, shift);
    lanes top{};
    double denominator = 0;
    double expected = 0;
    to.moments.variance += blockwise_sum(
        logit.size(), [&](std::size_t i, std::size_t left) __attribute__((always_inline)) {
            const lanes p = load_some(probability.data() + i, left);
            const int_lanes used = p > 0.0f;
            const lanes share = used ? load_some(logit.data() + i, left) / (used ? p : broadcast(1.0f)) : lanes{};
            denominator += static_cast<double>(sum(share));
            const lanes scaled = distance.empty() ? share : share * load_some(distance.data() + i, left);
            const lanes rest = used ? 1.0f - p : lanes{};
            const lanes known = load_some(planned.data() + i, left) / (used ? p : broadcast(1.0f));
            expected += static_cast<double>(sum(known * known * rest));
            // x max(1, odds) = x/r' max(r', 1 - r')
            top = larger_of(rest > 0.0f ? scaled * larger_of(rest, p) : lanes{}, top);
            return scaled * scaled * rest;
        });
    to.denominator += denominator;
    to.planned += expected;
    to.moments.largest = larger(static_cast<double>(largest(top)), to.moments.largest);
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace verkv::inline v0::detail
