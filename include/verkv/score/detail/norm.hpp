// Length of a row.
#pragma once

#include <cmath>
#include <cstddef>

#include "verkv/core/storage.hpp"

namespace verkv::inline v0::detail::scoring {

// ||x||_2, squares summed in double over 8 partial sums: no overflow for any finite row.
template <class T>
[[nodiscard]] double norm_of(const T* x, std::size_t width) {
    constexpr std::size_t lanes = 8;
    double lane[lanes] = {};
    std::size_t c = 0;
    for (; c + lanes <= width; c += lanes) {
        for (std::size_t l = 0; l < lanes; ++l) {
            const double e = static_cast<double>(to_float(x[c + l]));
            lane[l] += e * e;
        }
    }
    double sum = 0;
    for (; c < width; ++c) {
        const double e = static_cast<double>(to_float(x[c]));
        sum += e * e;
    }
    for (const double e : lane) {
        sum += e;
    }
    return std::sqrt(sum);
}

}  // namespace verkv::inline v0::detail::scoring
