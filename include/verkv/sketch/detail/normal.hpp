// Standard normal numbers by their index, and matrices of them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <vector>

#include "verkv/core/random.hpp"

namespace verkv::inline v0::detail {

/// What a sketch draws from a stream: no two of one seed share their numbers, and no sample uses
/// them.
enum class sketch_stream : std::uint32_t {
    rotation = 0xffffffffu,
    projection = 0xfffffffeu,
    planes = 0xfffffffdu,
    training = 0xfffffffcu
};

/// The stream of uniforms that a sketch's matrix is drawn from.
[[nodiscard]] inline uniform_stream stream_of(std::uint64_t seed, sketch_stream purpose) noexcept {
    return {seed, static_cast<std::uint32_t>(purpose), 0xffffffffu, 0xffffffffu};
}

/// Standard normal number `index` of a stream, by Box and Muller from the uniforms 2 index and 2 index + 1.
/// Precondition: index < 2^30.
[[nodiscard]] inline double standard_normal(const uniform_stream& stream, std::size_t index) noexcept {
    const auto pair = static_cast<position_t>(2 * index);
    const double radius = std::sqrt(-2 * std::log(1 - uniform(stream, pair)));
    return radius * std::cos(2 * std::numbers::pi * uniform(stream, pair + 1));
}

/// A Gaussian matrix [rows, columns], transposed and in floats as rotate() takes it: row j holds column j, `padded`
/// wide and 0 from `rows` on. A row's numbers do not depend on how many rows there are.
[[nodiscard]] inline std::vector<float> gaussian_matrix(const uniform_stream& stream, std::size_t rows,
                                                        std::size_t columns, std::size_t padded) {
    std::vector<float> out(columns * padded);
    for (std::size_t i = 0; i < rows; ++i) {
        for (std::size_t j = 0; j < columns; ++j) {
            out[j * padded + i] = static_cast<float>(standard_normal(stream, i * columns + j));
        }
    }
    return out;
}

}  // namespace verkv::inline v0::detail
