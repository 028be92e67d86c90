// Kernels of the page sketch on the CPU: the extremes of a page's channels; bounds on its logits from them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"

namespace verkv::inline v0 {

/// Extremes of a page sketch as they lie in memory; what a backend's quest_page_estimate() reads.
struct quest_pages {
    const half* extremes = nullptr;            ///< [page][lowest or highest][channel], padded_channels wide
    const float* unit = nullptr;               ///< of each page: its extremes are in multiples of this power of two
    const std::size_t* first_token = nullptr;  ///< of each page, ascending; a page ends where the next one starts
    std::size_t pages = 0;
    std::size_t tokens = 0;
    std::size_t key_dim = 0;
    std::size_t padded_channels = 0;  ///< key_dim rounded up to 16; extremes of the rest are 0
};

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

VERKV_ALWAYS_INLINE lanes magnitude(const lanes& x) {
    return lanes_cast<lanes>(lanes_cast<word_lanes>(x) & 0x7fffffffu);
}

/// Lets extremes take in a key, or start with it. A value that is not finite turns its channel's to NaN, for good.
template <storage T>
void widen_page(const T* key, std::size_t key_dim, bool first, float* lowest, float* highest) noexcept {
    for (std::size_t c = 0; c < key_dim; c += lane_count) {
        const std::size_t n = (std::min)(lane_count, key_dim - c);
        const lanes raw = n == lane_count ? load(key + c) : load_first(key + c, n);
        const lanes x = raw + 0.0f * raw;  // NaN where it is not finite
        const lanes low = n == lane_count ? load(lowest + c) : load_first(lowest + c, n);
        const lanes high = n == lane_count ? load(highest + c) : load_first(highest + c, n);
        // Nothing compares with an extreme that is NaN: it stays.
        const auto bad = lanes_cast<int_lanes>(x != x);
        const lanes least = first ? x : select(lanes_cast<int_lanes>(x < low) | bad, x, low);
        const lanes most = first ? x : select(lanes_cast<int_lanes>(x > high) | bad, x, high);
        std::memcpy(lowest + c, &least, n * sizeof(float));
        std::memcpy(highest + c, &most, n * sizeof(float));
    }
}

/// sum_c q_c mid_c, sum_c |q_c| width_c and sum_c |q_c| (|mid_c| + width_c) of one page for some heads, in floats.
template <std::size_t Heads>
void sum_page(const half* lowest, const half* highest, std::size_t key_dim, const float* const* queries, float* middle,
              float* width, float* size) noexcept {
    lanes middles[Heads] = {};
    lanes widths[Heads] = {};
    lanes sizes[Heads] = {};
    for (std::size_t c = 0; c < key_dim; c += lane_count) {
        const lanes low = load(lowest + c);
        const lanes high = load(highest + c);
        const lanes mid = (low + high) * 0.5f;
        const lanes half_width = (high - low) * 0.5f;
        const lanes most = magnitude(mid) + half_width;
        for (std::size_t h = 0; h < Heads; ++h) {
            const std::size_t left = key_dim - c;
            const lanes q = left >= lane_count ? load(queries[h] + c) : load_first(queries[h] + c, left);
            const lanes q_size = magnitude(q);
            middles[h] += q * mid;
            widths[h] += q_size * half_width;
            sizes[h] += q_size * most;
        }
    }
    for (std::size_t h = 0; h < Heads; ++h) {
        middle[h] = sum(middles[h]);
        width[h] = sum(widths[h]);
        size[h] = sum(sizes[h]);
    }
}

inline constexpr std::size_t page_heads = 4;  // query heads whose sums are in registers together

using sum_page_function = void (*)(const half*, const half*, std::size_t, const float* const*, float*, float*,
                                   float*) noexcept;

inline constexpr std::array<sum_page_function, page_heads> sum_page_of_heads = {sum_page<1>, sum_page<2>, sum_page<3>,
                                                                                sum_page<4>};

/// Pages first ... last-1 for all query heads.
inline void score_pages(const quest_pages& s, rows<float> queries, float scale, matrix_view<float> logits,
                        const matrix_view<float>* bounds, std::size_t first, std::size_t last) noexcept {
    // Each term of a sum is rounded at most key_dim + 3 times: as a middle or width, as a product, in the additions.
    const double roundings = static_cast<double>(s.key_dim + 4) * 0x1p-24;
    const double rounding = roundings / (1 - roundings);
    const auto factor = static_cast<double>(scale);
    for (std::size_t head = 0; head < queries.count; head += page_heads) {
        const std::size_t heads = (std::min)(page_heads, queries.count - head);
        const float* query[page_heads] = {};
        for (std::size_t h = 0; h < heads; ++h) {
            query[h] = queries[head + h];
        }
        for (std::size_t p = first; p < last; ++p) {
            const half* const lowest = s.extremes + p * 2 * s.padded_channels;
            float middle[page_heads];
            float width[page_heads];
            float size[page_heads];
            sum_page_of_heads[heads - 1](lowest, lowest + s.padded_channels, s.key_dim, query, middle, width, size);
            const std::size_t token = s.first_token[p];
            const std::size_t end = p + 1 < s.pages ? s.first_token[p + 1] : s.tokens;
            const double unit = factor * static_cast<double>(s.unit[p]);
            for (std::size_t h = 0; h < heads; ++h) {
                const double centre = unit * static_cast<double>(middle[h]);
                const auto estimate = static_cast<float>(centre);
                float* const to = logits.row(head + h).data();
                std::fill(to + token, to + end, estimate);
                if (bounds) {
                    // Products below the smallest normal float lose at most 2^-150 each; then the logit itself.
                    const double sums =
                        (static_cast<double>(width[h]) + rounding * static_cast<double>(size[h])) / (1 - roundings);
                    const double lost = static_cast<double>(s.key_dim) * 0x1p-148;
                    const double bound = std::abs(unit) * (sums + lost) + std::abs(centre) * 0x1p-24 + 0x1p-148;
                    const auto rounded = static_cast<float>(bound * (1 + 0x1p-22));
                    const bool known = std::isfinite(estimate) && rounded == rounded;
                    float* const b = bounds->row(head + h).data();
                    std::fill(b + token, b + end, known ? rounded : std::numeric_limits<float>::infinity());
                }
            }
        }
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Writes the middle of the logits that each page allows, and half their distance to `bounds` unless that is null.
/// See quest_page_sketch::estimate(). Preconditions (unchecked): queries are as wide as the keys, logits and bounds
/// [queries.count, s.tokens], rows that do not overlap. Reads the extremes once for all queries. No memory is
/// allocated. Float sums over channels, the rest in double; a page's bits depend on its extremes and the query alone.
/// Throws nothing.
inline void quest_page_estimate(const cpu& exec, const quest_pages& s, rows<float> queries, float scale,
                                matrix_view<float> logits, const matrix_view<float>* bounds) noexcept {
    if (queries.count == 0 || s.pages == 0) {
        return;
    }
    // So many pages that their extremes stay in the first-level cache while the heads pass over them.
    const std::size_t at_once = (std::max)(std::size_t{1}, std::size_t{8192} / s.padded_channels);
    const std::size_t tasks = (s.pages + at_once - 1) / at_once;
    for_each_task(exec, tasks, [&](std::size_t task, std::size_t) {
        const std::size_t first = task * at_once;
        detail::score_pages(s, queries, scale, logits, bounds, first, (std::min)(s.pages, first + at_once));
    });
}

}  // namespace verkv::inline v0
