// The directions in which keys have most of their energy.
#pragma once

#include <Eigen/Core>
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0::detail {

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
        if (finite_row(key, keys.width)) {
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

}  // namespace verkv::inline v0::detail
