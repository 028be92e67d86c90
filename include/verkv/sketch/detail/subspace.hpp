// Mean and Gram matrix of keys, and orthonormal rows: those of the largest variance, and those that span given ones.
#pragma once

#include <Eigen/Core>
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/sketch/detail/inputs.hpp"

namespace verkv::inline v0::detail {

/// Mean of the keys whose channels are all finite, summed in double; 0 without any.
template <class T>
[[nodiscard]] std::vector<float> mean_of_finite(const rows<T>& keys) {
    std::vector<double> total(keys.width);
    std::size_t finite = 0;
    for (std::size_t i = 0; i < keys.count; ++i) {
        const T* const key = keys[i];
        if (all_finite(key, keys.width)) {
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

/// Sum of the outer products k k^T of the finite keys, in double; the lower half of [width, width].
template <class T>
[[nodiscard]] Eigen::MatrixXd gram_of_finite(const rows<T>& keys) {
    const auto at = [](std::size_t i) { return static_cast<Eigen::Index>(i); };
    constexpr std::size_t piece = 64;  // keys that are added together
    Eigen::MatrixXd sum = Eigen::MatrixXd::Zero(at(keys.width), at(keys.width));
    Eigen::MatrixXd part(at(keys.width), at(piece));
    std::size_t held = 0;
    for (std::size_t i = 0; i < keys.count; ++i) {
        const T* const key = keys[i];
        if (all_finite(key, keys.width)) {
            for (std::size_t c = 0; c < keys.width; ++c) {
                part(at(c), at(held)) = static_cast<double>(to_float(key[c]));
            }
            ++held;
        }
        if (held == piece || (held > 0 && i + 1 == keys.count)) {
            sum.selfadjointView<Eigen::Lower>().rankUpdate(part.leftCols(at(held)));
            held = 0;
        }
    }
    return sum;
}

/// Eigenvectors of the `rank` largest eigenvalues of a symmetric matrix [d, d] (its lower half is read), one after the
/// other, largest first. O(d^3). Where the iteration does not end, as with NaN, the unit vectors of the largest
/// diagonal elements stand in: any basis is a valid one.
[[nodiscard]] inline std::vector<double> principal_directions(const Eigen::MatrixXd& symmetric, std::size_t rank) {
    const auto d = static_cast<std::size_t>(symmetric.rows());
    const auto at = [](std::size_t i) { return static_cast<Eigen::Index>(i); };
    std::vector<double> out(rank * d);
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(symmetric);
    if (solver.info() == Eigen::Success && solver.eigenvectors().allFinite()) {
        for (std::size_t r = 0; r < rank; ++r) {
            for (std::size_t c = 0; c < d; ++c) {
                out[r * d + c] = solver.eigenvectors()(at(c), at(d - 1 - r));  // eigenvalues ascend
            }
        }
        return out;
    }
    std::vector<std::size_t> order(d);
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto size = [&](std::size_t c) {
        const double x = symmetric(at(c), at(c));
        return std::isfinite(x) ? x : -1.0;
    };
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return size(a) > size(b); });
    for (std::size_t r = 0; r < rank; ++r) {
        out[r * d + order[r]] = 1;
    }
    return out;
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
