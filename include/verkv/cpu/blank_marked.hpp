// Numbers of tokens that a sketch must not speak of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "verkv/core/version.hpp"

namespace verkv::inline v0::detail {

/// Turns the numbers of marked tokens among first ... last-1 to NaN. Token t is marked by bit t % 32 of word t / 32.
/// Preconditions: first is a multiple of 32; no token from `last` on is marked unless last is a multiple of 32.
inline void blank_marked(const std::uint32_t* marks, std::size_t first, std::size_t last, float* numbers) noexcept {
    for (std::size_t w = first / 32; w * 32 < last; ++w) {
        for (std::uint32_t left = marks[w]; left != 0; left &= left - 1) {
            numbers[w * 32 + static_cast<std::size_t>(__builtin_ctz(left))] = std::numeric_limits<float>::quiet_NaN();
        }
    }
}

}  // namespace verkv::inline v0::detail
