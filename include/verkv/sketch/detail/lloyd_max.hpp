// The codebook of least squared error for one coordinate of a uniform point on a sphere.
#pragma once

#include <cmath>
#include <cstddef>
#include <numbers>
#include <vector>

#include "verkv/sketch/detail/sphere_quantile.hpp"

namespace verkv::inline v0::detail {

/// A codebook that is symmetric about 0.
struct sphere_codebook {
    std::vector<double> levels;  ///< the positive half, ascending
    double distortion = 1;       ///< E ||y - y^||^2 of a uniform point y on the unit sphere, each coordinate rounded
};

/// Lloyd-Max codebook (Max 1960; Lloyd 1982) of a coordinate Z of a uniform point on the unit sphere of `dimensions`:
/// 2 `half` levels, each the mean of Z over its cell, cells that meet half way. Z sqrt(dimensions) tends to a normal.
/// Density of Z: (1 - z^2)^((dimensions - 3) / 2) / B((dimensions - 1) / 2, 1/2). A cell's mass is a difference of
/// sphere_tail(), its first moment one of (1 - z^2)^((dimensions - 1) / 2) / (dimensions - 1) / B: cells are wide,
/// little cancels. Lloyd's iteration from evenly spaced levels, in double, until no level moves by 1e-12 of itself, at
/// most 20000 times: some milliseconds. The distortion is 1 - dimensions E (Z^)^2, because a level is its cell's mean.
/// Preconditions: dimensions >= 2, half >= 1.
[[nodiscard]] inline sphere_codebook lloyd_max_sphere(std::size_t dimensions, std::size_t half) {
    const auto d = static_cast<double>(dimensions);
    // ln B((d - 1) / 2, 1/2).
    const double log_beta = std::lgamma((d - 1) / 2) + std::lgamma(0.5) - std::lgamma(d / 2);
    const auto tail = [&](double z) {  // P(|Z| > z)
        return z <= 0 ? 1.0 : z >= 1 ? 0.0 : sphere_tail(dimensions, std::acos(z));
    };
    const auto moment = [&](double z) {  // E |Z| over |Z| > z
        return z >= 1 ? 0.0 : 2 * std::exp((d - 1) / 2 * std::log1p(-z * z) - log_beta) / (d - 1);
    };
    sphere_codebook book;
    const double widest = 3 / std::sqrt(d) < 1 ? 3 / std::sqrt(d) : 1.0;
    for (std::size_t i = 0; i < half; ++i) {
        book.levels.push_back(widest * (static_cast<double>(i) + 0.5) / static_cast<double>(half));
    }
    double mean_square = 0;
    for (int iteration = 0; iteration < 20000; ++iteration) {
        double moved = 0;
        double mass_below = tail(0);
        double moment_below = moment(0);
        mean_square = 0;
        std::vector<double> next(half);
        for (std::size_t i = 0; i < half; ++i) {
            const double edge = i + 1 < half ? (book.levels[i] + book.levels[i + 1]) / 2 : 1.0;
            const double mass = tail(edge);
            const double above = moment(edge);
            next[i] = (moment_below - above) / (mass_below - mass);
            mean_square += (mass_below - mass) * next[i] * next[i];
            mass_below = mass;
            moment_below = above;
            const double change = std::abs(next[i] / book.levels[i] - 1);
            moved = change > moved ? change : moved;
        }
        book.levels = next;
        if (moved < 1e-12) {
            break;
        }
    }
    book.distortion = 1 - d * mean_square;
    return book;
}

}  // namespace verkv::inline v0::detail
