// A uniformly random orthogonal matrix.
#pragma once

#include <Eigen/QR>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "verkv/sketch/detail/normal.hpp"

namespace verkv::inline v0::detail {

/// A Haar-random orthogonal matrix P of a seed, transposed and in floats: row j holds column j of P, `padded` wide and
/// 0 from `size` on. QR of a Gaussian matrix, with the signs that make R's diagonal positive: only then is Q uniform
/// (Mezzadri 2007, arXiv math-ph/0609050). Normals of a stream that no sample uses.
/// The double factorisation is orthogonal to about size 2^-52; rounding to floats moves each element by 2^-24 of
/// itself. Depends on seed and size alone, up to the last bits that a target's arithmetic decides. About 4/3 size^3
/// multiply-adds, twice.
[[nodiscard]] inline std::vector<float> haar_rotation(std::uint64_t seed, std::size_t size, std::size_t padded) {
    using matrix = Eigen::MatrixXd;
    const auto at = [](std::size_t i) { return static_cast<Eigen::Index>(i); };
    const uniform_stream stream = stream_of(seed, sketch_stream::rotation);
    matrix gaussian(at(size), at(size));
    for (std::size_t j = 0; j < size; ++j) {
        for (std::size_t i = 0; i < size; ++i) {
            gaussian(at(i), at(j)) = standard_normal(stream, j * size + i);
        }
    }
    const Eigen::HouseholderQR<matrix> factored(gaussian);
    const matrix q = factored.householderQ();
    std::vector<float> out(size * padded);
    for (std::size_t j = 0; j < size; ++j) {
        const double sign = factored.matrixQR()(at(j), at(j)) < 0 ? -1.0 : 1.0;
        for (std::size_t i = 0; i < size; ++i) {
            out[j * padded + i] = static_cast<float>(sign * q(at(i), at(j)));
        }
    }
    return out;
}

}  // namespace verkv::inline v0::detail
