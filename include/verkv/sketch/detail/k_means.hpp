// k-means in few channels: the codebook of one subspace.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "verkv/core/random.hpp"
#include "verkv/cpu/product_quantised_estimate.hpp"

namespace verkv::inline v0::detail {

/// Centroids of n points, [width][padded] as nearest_centroid() takes them; copies of the last one fill up.
/// Seeded by k-means++ (Arthur and Vassilvitskii 2007): each next one is a point drawn with probability proportional
/// to its squared distance from those there are, by uniform number i of the stream; where all distances are 0, the
/// last one again. Then at most `iterations` of Lloyd's, until no point changes its centroid; one that loses all its
/// points stays where it is. Ties to the lower index. points [n][width], finite. Distances in float, means and the sums
/// of squared distances in double. Time n width k (iterations + 1). Preconditions: n >= 1, k >= 1.
[[nodiscard]] inline std::vector<float> k_means(const std::vector<float>& points, std::size_t width, std::size_t k,
                                                std::size_t iterations, const uniform_stream& stream) {
    const std::size_t n = points.size() / width;
    const std::size_t padded = (k + 15) / 16 * 16;
    std::vector<float> centroids(width * padded);
    const auto place = [&](std::size_t i, auto&& value_of) {
        for (std::size_t c = 0; c < width; ++c) {
            const float value = value_of(c);
            for (std::size_t at = i; at < (i + 1 == k ? padded : i + 1); ++at) {
                centroids[c * padded + at] = value;
            }
        }
    };
    std::vector<double> distance(n, 0x1p1000);
    std::size_t chosen = 0;
    for (std::size_t i = 0; i < k; ++i) {
        double total = 0;
        if (i > 0) {
            const float* const last = points.data() + chosen * width;
            for (std::size_t p = 0; p < n; ++p) {
                double square = 0;
                for (std::size_t c = 0; c < width; ++c) {
                    const double off = static_cast<double>(points[p * width + c]) - static_cast<double>(last[c]);
                    square += off * off;
                }
                distance[p] = (std::min)(distance[p], square);
                total += distance[p];
            }
        }
        const double u = uniform(stream, static_cast<position_t>(i));
        if (i == 0) {
            chosen = (std::min)(n - 1, static_cast<std::size_t>(u * static_cast<double>(n)));
        } else if (total > 0) {
            double left = u * total;
            for (std::size_t p = 0; p < n; ++p) {
                if (distance[p] > 0) {
                    chosen = p;
                    left -= distance[p];
                    if (left < 0) {
                        break;
                    }
                }
            }
        }
        place(i, [&](std::size_t c) { return points[chosen * width + c]; });
    }
    std::vector<std::size_t> nearest(n, k);
    std::vector<double> sums(k * width);
    std::vector<std::size_t> members(k);
    for (std::size_t iteration = 0; iteration < iterations; ++iteration) {
        std::fill(sums.begin(), sums.end(), 0.0);
        std::fill(members.begin(), members.end(), std::size_t{0});
        bool changed = false;
        for (std::size_t p = 0; p < n; ++p) {
            const float* const x = points.data() + p * width;
            const std::size_t own = nearest_centroid(centroids.data(), width, padded, x);
            changed = changed || own != nearest[p];
            nearest[p] = own;
            ++members[own];
            for (std::size_t c = 0; c < width; ++c) {
                sums[own * width + c] += static_cast<double>(x[c]);
            }
        }
        if (!changed) {
            break;
        }
        for (std::size_t i = 0; i < k; ++i) {
            if (members[i] > 0) {
                const auto count = static_cast<double>(members[i]);
                place(i, [&](std::size_t c) { return static_cast<float>(sums[i * width + c] / count); });
            }
        }
    }
    return centroids;
}

}  // namespace verkv::inline v0::detail
