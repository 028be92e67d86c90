// Logits to weights for a whole decision, and the shortlist score, on the CPU.
#pragma once

#include <cmath>
#include <cstring>
#include <span>

#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/softmax_sum.hpp"

namespace verkv::inline v0 {
namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// Sum of floats: four vectors of lanes over blocks of 1024, blocks in double. Relative error of positive terms at most
/// (256/lanes + 8) u.
inline double sum_of(std::span<const float> x) {
    constexpr std::size_t block = 1024;
    double total = 0;
    for (std::size_t first = 0; first < x.size(); first += block) {
        const std::size_t last = smaller(first + block, x.size());
        lanes sums[4] = {};
        std::size_t i = first;
        for (; i + 4 * lane_count <= last; i += 4 * lane_count) {
            for (std::size_t k = 0; k < 4; ++k) {
                sums[k] += load(x.data() + i + k * lane_count);
            }
        }
        for (; i + lane_count <= last; i += lane_count) {
            sums[0] += load(x.data() + i);
        }
        if (i < last) {
            sums[1] += load_first(x.data() + i, last - i);
        }
        total += static_cast<double>(sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
    }
    return total;
}

/// Replaces x by log(x), positive normal numbers: error at most 2 units in the last place; log(1) is 0.
inline void logarithms(std::span<float> x) {
    std::size_t i = 0;
    for (; i + lane_count <= x.size(); i += lane_count) {
        store(x.data() + i, log(load(x.data() + i)));
    }
    if (i < x.size()) {
        const lanes rest = log(load_first(x.data() + i, x.size() - i));
        std::memcpy(x.data() + i, &rest, (x.size() - i) * sizeof(float));
    }
}

/// score[i] = max_g weight[g][i] * factor[g] where odds[i] > 0, -infinity elsewhere.
inline void largest_share(const matrix_view<float>& weight, std::span<const float> factor, std::span<const float> odds,
                          std::span<float> score) {
    const std::size_t n = score.size();
    const lanes outside = broadcast(-std::numeric_limits<float>::infinity());
    for (std::size_t i = 0; i < n; i += lane_count) {
        const std::size_t count = smaller(lane_count, n - i);
        const bool whole = count == lane_count;
        lanes top = outside;
        const float* w = weight.data + i;
        for (std::size_t g = 0; g < weight.rows; ++g, w += weight.stride) {
            top = larger_of((whole ? load(w) : load_first(w, count)) * factor[g], top);
        }
        const lanes o = whole ? load(odds.data() + i) : load_first(odds.data() + i, count);
        top = select(lanes_cast<int_lanes>(o > 0.0f), top, outside);
        if (whole) {
            store(score.data() + i, top);
        } else {
            float part[lane_count];
            store(part, top);
            for (std::size_t j = 0; j < count; ++j) {
                score[i + j] = part[j];
            }
        }
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Weights of a decision: their sum, and the shift m they are relative to.
struct weighed {
    float shift = 0;
    double total = 0;
};

/// Turns logits into weights relative to the largest: x_i becomes e^{x_i - m}, m = max x.
/// No logits, or all of them -infinity: they become 0 and m is 0. NaN stays NaN, in the sum too.
/// O(n), in float: error of a weight at most 2 units in the last place beyond that of x_i - m; the sum's relative error
/// at most (1024 / lane_count + 6) 2^-24.
inline weighed weigh(const cpu&, std::span<float> logits) {
    const float top = detail::largest_of(logits);
    const float shift = top == -std::numeric_limits<float>::infinity() ? 0.0f : top;
    return {shift, detail::exponentiate(logits, shift)};
}

}  // namespace verkv::inline v0
