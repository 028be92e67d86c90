// What is kept of one span: its mean, the few directions in which its keys vary most, and norms of what they leave.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/sketch/detail/orthonormal.hpp"

namespace verkv::inline v0::detail {

/// Memory that summarise_span() works in.
struct span_scratch {
    std::vector<double> offset;      ///< [token][channel]: keys about their mean
    std::vector<double> products;    ///< [token][token]
    std::vector<double> left;        ///< [token]
    std::vector<double> mix, next;   ///< [direction][token]
    std::vector<double> directions;  ///< [direction][channel]

    void reserve(std::size_t length, std::size_t width, std::size_t rank) {
        offset.resize(length * width);
        products.resize(rank > 0 ? length * length : 0);
        left.resize(length);
        mix.resize(rank * length);
        next.resize(rank * length);
        directions.resize(rank * width);
    }
};

/// Writes `rank` orthonormal rows to scratch.directions, or 0 where the `count` rows of scratch.offset span less, that
/// leave nearly the least of those: their right singular vectors, as far as the iteration goes.
/// By way of the products of the rows, scaled by the largest element so that nothing overflows: starts from a pivoted
/// Cholesky factor of them, ties to the lower row, and takes 24 steps of block power iteration. No factorisation that
/// might not converge, and no allocation. count^2 (width / 2 + 24 rank) multiply-adds.
inline void span_directions(span_scratch& scratch, std::size_t count, std::size_t width, std::size_t rank) {
    std::fill(scratch.directions.begin(), scratch.directions.end(), 0.0);
    const std::span<double> mix = std::span(scratch.mix).first(rank * count);
    const std::span<double> next = std::span(scratch.next).first(rank * count);
    const double* const x = scratch.offset.data();
    double* const products = scratch.products.data();
    double most = 0;
    for (std::size_t at = 0; at < count * width; ++at) {
        most = (std::max)(most, std::abs(x[at]));
    }
    if (!(most > 0) || rank == 0) {
        return;
    }
    for (std::size_t s = 0; s < count; ++s) {
        for (std::size_t t = 0; t <= s; ++t) {
            double sum = 0;
            for (std::size_t c = 0; c < width; ++c) {
                sum += x[s * width + c] / most * (x[t * width + c] / most);
            }
            products[s * count + t] = products[t * count + s] = sum;
        }
        scratch.left[s] = products[s * count + s];
    }
    const auto end = scratch.left.begin() + static_cast<std::ptrdiff_t>(count);
    const double negligible = *std::max_element(scratch.left.begin(), end) * 0x1p-40;
    for (std::size_t r = 0; r < rank; ++r) {
        const auto pivot = static_cast<std::size_t>(std::max_element(scratch.left.begin(), end) - scratch.left.begin());
        const double square = scratch.left[pivot];
        for (std::size_t t = 0; t < count; ++t) {
            double entry = products[t * count + pivot];
            for (std::size_t s = 0; s < r; ++s) {
                entry -= mix[s * count + t] * mix[s * count + pivot];
            }
            mix[r * count + t] = square > negligible ? entry / std::sqrt(square) : 0.0;
        }
        for (std::size_t t = 0; t < count; ++t) {
            scratch.left[t] = (std::max)(scratch.left[t] - mix[r * count + t] * mix[r * count + t], 0.0);
        }
        scratch.left[pivot] = 0;
    }
    for (int step = 0; step < 24; ++step) {
        (void)orthonormalise(mix, rank, count);
        std::fill(next.begin(), next.end(), 0.0);
        for (std::size_t r = 0; r < rank; ++r) {
            for (std::size_t t = 0; t < count; ++t) {
                const double share = mix[r * count + t];
                for (std::size_t s = 0; s < count; ++s) {
                    next[r * count + s] += share * products[t * count + s];
                }
            }
        }
        std::copy(next.begin(), next.end(), mix.begin());
    }
    (void)orthonormalise(mix, rank, count);
    for (std::size_t r = 0; r < rank; ++r) {
        for (std::size_t t = 0; t < count; ++t) {
            const double share = mix[r * count + t];
            for (std::size_t c = 0; c < width; ++c) {
                scratch.directions[r * width + c] += share * (x[t * width + c] / most);
            }
        }
    }
    (void)orthonormalise(scratch.directions, rank, width);
}

/// Where a span's summary goes; rows of mean and basis are `padded` wide, and 0 from `width` on.
struct span_summary {
    half* mean;          ///< [padded]
    half* basis;         ///< [rank][padded]
    half* coefficients;  ///< [count][rank]
    float* outside;      ///< [count]
    float* inside;       ///< [count]
};

/// Summarises `count` keys of `width` floats, and returns the radius. A key that is not finite comes alone: its mean is
/// NaN. In double; what is stored is what norms and radius are taken from.
inline float summarise_span(const float* keys, std::size_t count, std::size_t width, std::size_t padded,
                            std::size_t rank, span_scratch& scratch, const span_summary& out) {
    const bool finite = finite_row(keys, count * width);
    double* const offset = scratch.offset.data();
    double mean_square = 0;
    for (std::size_t c = 0; c < width; ++c) {
        double total = 0;
        for (std::size_t t = 0; t < count; ++t) {
            total += static_cast<double>(keys[t * width + c]);
        }
        const double mean = total / static_cast<double>(count);
        out.mean[c] = finite ? from_float<half>(static_cast<float>((std::max)((std::min)(mean, 65504.0), -65504.0)))
                             : half{0x7e00u};
        const auto stored = static_cast<double>(to_float(out.mean[c]));
        mean_square += stored * stored;
        for (std::size_t t = 0; t < count; ++t) {
            offset[t * width + c] = finite ? static_cast<double>(keys[t * width + c]) - stored : 0.0;
        }
    }
    double* const basis = scratch.directions.data();
    span_directions(scratch, count, width, rank);
    for (std::size_t r = 0; r < rank; ++r) {
        for (std::size_t c = 0; c < width; ++c) {
            half& to = out.basis[r * padded + c];
            to = from_float<half>(static_cast<float>(basis[r * width + c]));
            basis[r * width + c] = static_cast<double>(to_float(to));
        }
    }
    const double mean_norm = std::sqrt(mean_square);
    const auto dot = [&](const double* x, const double* y) {
        double sum = 0;
        for (std::size_t c = 0; c < width; ++c) {
            sum += x[c] * y[c];
        }
        return sum;
    };
    constexpr double up = 1 + 0x1p-40;
    double radius = 0;
    for (std::size_t t = 0; t < count; ++t) {
        double* const x = offset + t * width;
        const double length = std::sqrt(dot(x, x));
        radius = (std::max)(radius, length);
        // A coefficient is taken of what the ones before it leave: the rounded directions are not quite orthogonal.
        for (std::size_t r = 0; r < rank; ++r) {
            const double* const own = basis + r * width;
            const double along = (std::max)((std::min)(dot(x, own), 65504.0), -65504.0);
            half& to = out.coefficients[t * rank + r];
            to = from_float<half>(static_cast<float>(along));
            for (std::size_t c = 0; c < width; ++c) {
                x[c] -= static_cast<double>(to_float(to)) * own[c];
            }
        }
        double inner = 0;
        for (std::size_t r = 0; r < rank; ++r) {
            const double along = dot(x, basis + r * width);
            inner += along * along;
        }
        // What doubles lose on the way.
        const auto terms = static_cast<double>(rank + 4);
        const double lost = (length + mean_norm) * terms * 0x1p-50;
        const double outside = std::sqrt(dot(x, x));
        out.outside[t] = finite ? float_above(outside * up + lost) : std::numeric_limits<float>::infinity();
        out.inside[t] = finite ? float_above(std::sqrt(inner) * up + 2 * std::sqrt(terms) * lost +
                                             outside * static_cast<double>(width) * terms * 0x1p-50)
                               : std::numeric_limits<float>::infinity();
    }
    return finite ? float_above(radius * up + mean_norm * static_cast<double>(width + 8) * 0x1p-24)
                  : std::numeric_limits<float>::infinity();
}

}  // namespace verkv::inline v0::detail
