// Products of sizes that do not wrap.
#pragma once

#include <concepts>
#include <cstddef>
#include <limits>
#include <string>

#include "verkv/core/error.hpp"

namespace verkv::inline v0::detail {

/// The most elements, or bytes, that two pointers into one array can be apart.
inline constexpr std::size_t farthest = static_cast<std::size_t>((std::numeric_limits<std::ptrdiff_t>::max)());

/// Product of the factors, at most `farthest`; 0 where one of them is.
/// Throws invalid_argument, with `what` and the factors, where it is more.
template <std::same_as<std::size_t>... Factors>
[[nodiscard]] std::size_t product(const char* what, Factors... factors) {
    for (const std::size_t factor : {factors...}) {
        if (factor == 0) {
            return 0;
        }
    }
    std::size_t result = 1;
    bool fits = true;
    for (const std::size_t factor : {factors...}) {
        fits = fits && factor <= farthest / result;
        result = fits ? result * factor : 1;
    }
    if (!fits) [[unlikely]] {
        std::string text;
        for (const std::size_t factor : {factors...}) {
            text += (text.empty() ? "" : " * ") + std::to_string(factor);
        }
        raise<invalid_argument>(what, ": ", text, " is more than memory can hold");
    }
    return result;
}

/// Elements from the start of the first of `count` pieces to the end of the last, each `length` long and `stride` from
/// one to the next; stride >= 0 where count > 1 (not checked). 0 for no pieces.
/// Throws as product() does.
[[nodiscard]] inline std::size_t extent(const char* what, std::size_t count, std::ptrdiff_t stride,
                                        std::size_t length) {
    if (count == 0) {
        return 0;
    }
    const std::size_t before = product(what, count - 1, static_cast<std::size_t>(stride));
    check(length <= farthest - before, what, ": ", count, " pieces of ", length, " elements with stride ", stride,
          " are more than memory can hold");
    return before + length;
}

}  // namespace verkv::inline v0::detail
