// The mean of keys, and rows made orthonormal.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0::detail {

/// Mean of the keys whose channels are all finite, summed in double; 0 without any.
template <class T>
[[nodiscard]] std::vector<float> mean_of_finite(const rows<T>& keys) {
    std::vector<double> total(keys.width);
    std::size_t finite = 0;
    for (std::size_t i = 0; i < keys.count; ++i) {
        const T* const key = keys[i];
        if (finite_row(key, keys.width)) {
            for (std::size_t c = 0; c < keys.width; ++c) {
                total[c] += static_cast<double>(to_float(key[c]));
            }
            ++finite;
        }
    }
    std::vector<float> mean(keys.width);
    for (std::size_t c = 0; c < keys.width && finite > 0; ++c) {
        mean[c] = static_cast<float>(total[c] / static_cast<double>(finite));
    }
    return mean;
}

/// Makes `count` rows of `width` doubles orthonormal, in place and in their order (Gram and Schmidt, twice). A row that
/// is in the span of those before it, up to 2^-40 of its length, becomes 0. Returns how many did not.
inline std::size_t orthonormalise(std::span<double> rows, std::size_t count, std::size_t width) {
    const auto norm = [&](const double* x) {
        double most = 0;
        for (std::size_t c = 0; c < width; ++c) {
            most = (std::max)(most, std::abs(x[c]));
        }
        double square = 0;
        for (std::size_t c = 0; c < width && most > 0; ++c) {
            square += x[c] / most * (x[c] / most);
        }
        return most * std::sqrt(square);
    };
    std::size_t independent = 0;
    for (std::size_t r = 0; r < count; ++r) {
        double* const row = rows.data() + r * width;
        double left = norm(row);
        for (int pass = 0; pass < 3; ++pass) {
            // Of unit length before each pass, so that the second one mends what rounding left of a short row.
            for (std::size_t c = 0; c < width; ++c) {
                row[c] = left > 0 ? row[c] / left : 0.0;
            }
            if (pass == 2 || !(left > 0)) {
                break;
            }
            for (std::size_t s = 0; s < r; ++s) {
                const double* const earlier = rows.data() + s * width;
                const double along = std::inner_product(row, row + width, earlier, 0.0);
                for (std::size_t c = 0; c < width; ++c) {
                    row[c] -= along * earlier[c];
                }
            }
            left = norm(row);
            left = left > 0x1p-40 ? left : 0.0;
        }
        independent += left > 0;
    }
    return independent;
}

}  // namespace verkv::inline v0::detail
