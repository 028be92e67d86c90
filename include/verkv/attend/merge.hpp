// Union of two attention results over disjoint rows.
#pragma once

#include <cmath>
#include <limits>
#include <span>

#include "verkv/core/error.hpp"

namespace verkv::inline v0 {

/// Merges the attention over a second set of rows into that over a first: (o, lse) becomes the result over both.
/// o = (e^{lse} o + e^{lse'} o') / (e^{lse} + e^{lse'}), lse = ln(e^{lse} + e^{lse'}), natural logarithms.
/// output, other_output [value_dim].
/// An empty part is (0, -infinity): merging with it changes no bit of the other; two of them give another.
/// In double, rounded once. Throws invalid_argument when the lengths differ.
inline void merge_attention(std::span<float> output, float& lse, std::span<const float> other_output, float other_lse) {
    detail::check(output.size() == other_output.size(), "merging outputs of ", output.size(), " and ",
                  other_output.size(), " channels");
    constexpr float empty = -std::numeric_limits<float>::infinity();
    if (other_lse == empty) {
        return;
    }
    if (lse == empty) {
        for (std::size_t c = 0; c < output.size(); ++c) {
            output[c] = other_output[c];
        }
        lse = other_lse;
        return;
    }
    // The share of the other part is a logistic function of the difference: no overflow on either side.
    const double difference = static_cast<double>(other_lse) - static_cast<double>(lse);
    const double ratio = std::exp(-std::fabs(difference));
    const double other = difference > 0 ? 1 / (1 + ratio) : ratio / (1 + ratio);
    for (std::size_t c = 0; c < output.size(); ++c) {
        output[c] = static_cast<float>((1 - other) * static_cast<double>(output[c]) +
                                       other * static_cast<double>(other_output[c]));
    }
    lse = static_cast<float>((difference > 0 ? static_cast<double>(other_lse) : static_cast<double>(lse)) +
                             std::log1p(ratio));
}

}  // namespace verkv::inline v0
