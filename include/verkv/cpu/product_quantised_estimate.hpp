// Kernels of the product-quantised sketch on the CPU: the nearest centroid; logits from tables of inner products.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "verkv/core/host_device.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/rotated_estimate.hpp"

namespace verkv::inline v0 {

/// Codes of a product-quantised sketch as they lie in memory; what a backend's product_quantised_estimate() reads.
struct product_quantised_codes {
    static constexpr std::size_t largest_key_dim = 1024;
    static constexpr std::size_t most_subspaces = 64;
    static constexpr std::size_t most_centroids = 256;

    const float* centroids = nullptr;     ///< [subspace][channel of it][centroid], padded_centroids wide
    const float* reach = nullptr;         ///< [key_dim]: largest size of a channel over the centroids
    const std::uint8_t* codes = nullptr;  ///< [token][subspace]
    const float* residual = nullptr;      ///< [token]: ||k - k^||, rounded up; NaN where the key is not finite
    std::size_t tokens = 0;
    std::size_t key_dim = 0;
    std::size_t subspaces = 0;         ///< of key_dim / subspaces channels each
    std::size_t padded_centroids = 0;  ///< their number rounded up to 16; copies of the last one fill up
};

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// The centroid nearest to x, ties to the lowest: squared distances in float, channel after channel.
/// centroids [width][padded].
inline std::size_t nearest_centroid(const float* centroids, std::size_t width, std::size_t padded,
                                    const float* x) noexcept {
    lanes best = broadcast(std::numeric_limits<float>::infinity());
    int_lanes at = {};
    for (std::size_t first = 0; first < padded; first += lane_count) {
        lanes distance = {};
        for (std::size_t c = 0; c < width; ++c) {
            const lanes off = load(centroids + c * padded + first) - x[c];
            distance += off * off;
        }
        const auto closer = lanes_cast<int_lanes>(distance < best);
        best = select(closer, distance, best);
        at = closer ? int_lanes{} + static_cast<std::int32_t>(first) : at;
    }
    std::size_t nearest = 0;
    float least = std::numeric_limits<float>::infinity();
    for (std::size_t i = 0; i < lane_count; ++i) {
        const auto index = static_cast<std::size_t>(at[i]) + i;
        if (best[i] < least || (best[i] == least && index < nearest)) {
            least = best[i];
            nearest = index;
        }
    }
    return nearest;
}

/// What the codes of all tokens meet: one query.
struct product_quantised_query {
    alignas(64) float table[product_quantised_codes::most_subspaces][product_quantised_codes::most_centroids];
    float width = 0;     ///< times a token's residual: |scale| ||q||
    float rounding = 0;  ///< added to every bound
};

/// scale <q, centroid> over each subspace, in double, rounded to float.
inline void look_up_query(const product_quantised_codes& s, const float* query, float scale,
                          product_quantised_query& out) noexcept {
    const std::size_t width = s.key_dim / s.subspaces;
    const auto factor = static_cast<double>(scale);
    double piece[product_quantised_codes::largest_key_dim];
    alignas(64) double products[product_quantised_codes::most_centroids];
    double square = 0;
    double size = 0;
    for (std::size_t c = 0; c < s.key_dim; ++c) {
        piece[c] = static_cast<double>(query[c]);
        square += piece[c] * piece[c];
        size += std::abs(piece[c]) * static_cast<double>(s.reach[c]);
    }
    for (std::size_t j = 0; j < s.subspaces; ++j) {
        rotate(s.centroids + j * width * s.padded_centroids, width, s.padded_centroids, piece + j * width, products);
        for (std::size_t i = 0; i < s.padded_centroids; ++i) {
            out.table[j][i] = static_cast<float>(factor * products[i]);
        }
    }
    // Of sum_j table_j: each term is rounded once in the table and subspaces - 1 times in the sum, terms at most size
    // together; before that in double, key_dim times at most. Terms below the normal floats lose 2^-150 each.
    const auto terms = static_cast<double>(s.subspaces);
    const double sums = terms * 0x1p-24 / (1 - terms * 0x1p-24);
    const double products_off = static_cast<double>(s.key_dim + 4) * 0x1p-52;
    const double up = 1 + 0x1p-20;
    const double rounding = std::abs(factor) * size * (sums + products_off) * (1 + sums) * up + (terms + 2) * 0x1p-149;
    const double length = std::abs(factor) * std::sqrt(square) * up;
    out.width = static_cast<float>(length > 0 ? larger(length, 0x1p-126) : length);
    out.rounding = static_cast<float>(rounding * up);
}

/// Tokens first ... last-1 of one query.
inline void score_product_quantised(const product_quantised_codes& s, const product_quantised_query& query,
                                    std::size_t first, std::size_t last, float* logits, float* bounds) noexcept {
    for (std::size_t t = first; t < last; ++t) {
        const std::uint8_t* const code = s.codes + t * s.subspaces;
        float sum = query.table[0][code[0]];
        for (std::size_t j = 1; j < s.subspaces; ++j) {
            sum += query.table[j][code[j]];
        }
        const float residual = s.residual[t];
        const float estimate = residual == residual ? sum : residual;
        logits[t] = estimate;
        if (bounds) {
            const float bound = (residual * query.width + query.rounding) * 1.000001f;
            const bool known = estimate - estimate == 0 && bound == bound;
            bounds[t] = known ? bound : std::numeric_limits<float>::infinity();
        }
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Writes the logits that a product-quantised sketch estimates, and their bounds unless `bounds` is null.
/// See product_quantised_sketch::estimate(). Preconditions (unchecked): queries are as wide as the keys, logits and
/// bounds [queries.count, s.tokens], rows that do not overlap. Makes a query's tables on the caller's stack (about 75
/// KiB), then reads all codes for it. No memory is allocated. A token's bits depend on its code, its residual and the
/// query alone. Throws nothing.
inline void product_quantised_estimate(const cpu& exec, const product_quantised_codes& s, rows<float> queries,
                                       float scale, matrix_view<float> logits,
                                       const matrix_view<float>* bounds) noexcept {
    if (s.tokens == 0) {
        return;
    }
    constexpr std::size_t at_once = 2048;
    for (std::size_t q = 0; q < queries.count; ++q) {
        detail::product_quantised_query query;
        detail::look_up_query(s, queries[q], scale, query);
        float* const to = logits.row(q).data();
        float* const bound = bounds ? bounds->row(q).data() : nullptr;
        for_each_task(exec, (s.tokens + at_once - 1) / at_once, [&](std::size_t task, std::size_t) {
            const std::size_t first = task * at_once;
            detail::score_product_quantised(s, query, first, (std::min)(s.tokens, first + at_once), to, bound);
        });
    }
}

}  // namespace verkv::inline v0
