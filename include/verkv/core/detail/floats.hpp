// Questions about floats that rounding modes and overflow make easy to get wrong.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

#include "verkv/core/storage.hpp"

namespace verkv::inline v0::detail {

/// Whether no element of a row is NaN or infinite. O(width), without a branch: 0 times a finite number is 0.
template <storage T>
[[nodiscard]] bool finite_row(const T* row, std::size_t width) noexcept {
    float poison = 0;
    for (std::size_t c = 0; c < width; ++c) {
        poison += 0 * to_float(row[c]);
    }
    return poison == 0;
}

/// Smallest float that is at least x; NaN stays NaN.
[[nodiscard]] inline float float_above(double x) {
    const auto nearest = static_cast<float>(x);
    return static_cast<double>(nearest) < x ? std::nextafter(nearest, std::numeric_limits<float>::infinity()) : nearest;
}

}  // namespace verkv::inline v0::detail
