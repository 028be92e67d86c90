// A Gaussian projection matrix from counters.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <vector>

#include "verkv/core/random.hpp"

namespace verkv::inline v0::detail::scoring {

/// Entries N(0, 1 / columns), [rows, columns], of a seed and a KV head: Box and Muller from uniform() on a stream that
/// no sample uses (layer and draw are no index of one). Element e takes uniforms 2 (e / 2) and the one after it, the
/// cosine for even e, the sine for odd. Depends on its arguments alone.
[[nodiscard]] inline std::vector<double> gaussian_projection(std::uint64_t seed, std::size_t kv_head, std::size_t rows,
                                                             std::size_t columns) {
    const uniform_stream stream{seed, 0xffffffffu, static_cast<std::uint32_t>(kv_head), 0xfffffffeu};
    const double deviation = 1 / std::sqrt(static_cast<double>(columns));
    std::vector<double> out(rows * columns);
    for (std::size_t e = 0; e < out.size(); e += 2) {
        const auto pair = static_cast<position_t>(e);
        const double radius = deviation * std::sqrt(-2 * std::log(1 - uniform(stream, pair)));
        const double angle = 2 * std::numbers::pi * uniform(stream, pair + 1);
        out[e] = radius * std::cos(angle);
        if (e + 1 < out.size()) {
            out[e + 1] = radius * std::sin(angle);
        }
    }
    return out;
}

}  // namespace verkv::inline v0::detail::scoring
