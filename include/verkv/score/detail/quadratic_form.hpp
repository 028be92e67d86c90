// Quadratic forms x^T M x of many rows x, M positive semidefinite: squared lengths of x times a factor of M.
#pragma once

#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/score/detail/attention_blocks.hpp"

namespace verkv::inline v0::detail::scoring {

// C [d, r] with C C^T = M up to rounding, r <= d the numerical rank; M is symmetric and positive semidefinite but for
// rounding (pivots that are not positive are dropped). M has to be finite; its lower triangle is read.
[[nodiscard]] inline Eigen::MatrixXd factor_of(const Eigen::MatrixXd& m) {
    const Eigen::LDLT<Eigen::MatrixXd> ldlt(m);
    const Eigen::VectorXd d = ldlt.vectorD();  // falling, as pivots are chosen
    const double least = static_cast<double>(m.rows()) * std::numeric_limits<double>::epsilon() *
                         (d.size() > 0 ? (std::max)(d.maxCoeff(), 0.0) : 0.0);
    Eigen::MatrixXd c = ldlt.matrixL();
    c = ldlt.transpositionsP().transpose() * c;
    Eigen::Index rank = 0;
    for (Eigen::Index j = 0; j < d.size(); ++j) {
        if (d(j) > least) {
            c.col(rank++) = c.col(j) * std::sqrt(d(j));
        }
    }
    return c.leftCols(rank);
}

// Calls consume(i, product) for each row: product, [factor.cols()] floats, is row i of rows * factor. Blocks of rows
// run as tasks and are cut at fixed rows: the same bits for any number of threads. Memory: two blocks a worker.
template <class Backend, class T, class Consume>
void for_each_product(const Backend& exec, const rows<T>& x, const tile_matrix& factor, Consume&& consume) {
    const std::size_t blocks = (x.count + block_keys - 1) / block_keys;
    if (blocks == 0) {
        return;
    }
    const std::size_t height = (std::min)(block_keys, x.count);
    std::vector<tile_matrix> block(workers(exec), tile_matrix(at(height), at(x.width)));
    std::vector<tile_matrix> product(workers(exec), tile_matrix(at(height), factor.cols()));
    for_each_task(exec, blocks, [&](std::size_t b, std::size_t worker) {
        const std::size_t first = b * block_keys;
        const std::size_t length = (std::min)(block_keys, x.count - first);
        for (std::size_t i = 0; i < length; ++i) {
            widen(x[first + i], x.width, 1.0f, block[worker].row(at(i)).data());
        }
        product[worker].topRows(at(length)).noalias() = block[worker].topRows(at(length)) * factor;
        for (std::size_t i = 0; i < length; ++i) {
            consume(first + i, product[worker].row(at(i)).data());
        }
    });
}

[[nodiscard]] inline double squared_length(const float* x, std::size_t count) {
    double sum = 0;
    for (std::size_t c = 0; c < count; ++c) {
        sum += static_cast<double>(x[c]) * static_cast<double>(x[c]);
    }
    return sum;
}

}  // namespace verkv::inline v0::detail::scoring
