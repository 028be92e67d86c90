// Kernels of the span sketch on the CPU: logits of span means; finer ones for the spans that weigh most.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/rotated_estimate.hpp"

namespace verkv::inline v0 {

/// Spans of a sketch as they lie in memory; what a backend's span_estimate() reads. Closed spans come first, then the
/// tokens of the open one, as they are.
struct span_codes {
    static constexpr std::size_t largest_key_dim = rotated_codes::largest_key_dim;
    static constexpr std::size_t largest_rank = 16;
    static constexpr std::size_t most_zoomed = 1024;

    // On the device.
    const half* means = nullptr;               ///< [span][channel], padded_channels wide
    const float* radius = nullptr;             ///< [span]: largest ||k - mean||, and what rounding may do
    const token_index* first_token = nullptr;  ///< [span], ascending; a span ends where the next one starts
    const float* log_length = nullptr;         ///< ln of 0 ... max_length
    const float* open = nullptr;               ///< [token of the open span][channel], key_dim wide
    // On the host.
    const half* basis = nullptr;         ///< [span][direction][channel], padded_channels wide
    const half* coefficients = nullptr;  ///< [token of a closed span][direction]
    const float* outside = nullptr;      ///< [token of a closed span]: ||e||, e what mean and coefficients leave
    const float* inside = nullptr;       ///< [token of a closed span]: ||basis e||
    std::size_t spans = 0;               ///< closed ones
    std::size_t closed_tokens = 0;
    std::size_t open_tokens = 0;
    std::size_t key_dim = 0;
    std::size_t padded_channels = 0;  ///< key_dim rounded up to 16; means and basis are 0 in the rest
    std::size_t rank = 0;             ///< directions of a span, 0 ... 16
    std::size_t zoomed = 0;           ///< spans that a query sees finer, 0 ... 1024
};

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

inline constexpr std::size_t span_heads = 4;  // query heads that meet a mean together

/// A query head in doubles.
struct span_query {
    alignas(64) double value[span_codes::largest_key_dim];  ///< 0 in the padding
    double norm;
    double scale;
};

struct span_queries {
    span_query head[span_heads];
};

inline void widen_query(const float* q, std::size_t key_dim, std::size_t padded, float scale,
                        span_query& out) noexcept {
    double square = 0;
    for (std::size_t c = 0; c < padded; ++c) {
        out.value[c] = c < key_dim ? static_cast<double>(q[c]) : 0.0;
        square += out.value[c] * out.value[c];
    }
    out.norm = std::sqrt(square);
    out.scale = static_cast<double>(scale);
}

/// Writes estimate and bound: rounded up, infinite where the estimate is no finite number.
VERKV_ALWAYS_INLINE void write_bounded(double estimate, double bound, float* logit, float* to) noexcept {
    *logit = static_cast<float>(estimate);
    if (to) {
        const auto rounded = static_cast<float>((bound + std::abs(estimate) * 0x1p-24 + 0x1p-148) * (1 + 0x1p-22));
        const bool known = std::isfinite(*logit) && rounded == rounded;
        *to = known ? rounded : std::numeric_limits<float>::infinity();
    }
}

/// <q, mean> in floats for some heads; each mean is converted once.
template <std::size_t Heads>
void score_mean(const half* mean, std::size_t key_dim, const float* const* queries, float* out) noexcept {
    lanes sums[Heads] = {};
    for (std::size_t c = 0; c < key_dim; c += lane_count) {
        const lanes m = load(mean + c);
        const std::size_t left = key_dim - c;
        for (std::size_t h = 0; h < Heads; ++h) {
            sums[h] += m * (left >= lane_count ? load(queries[h] + c) : load_first(queries[h] + c, left));
        }
    }
    for (std::size_t h = 0; h < Heads; ++h) {
        out[h] = sum(sums[h]);
    }
}

using score_mean_function = void (*)(const half*, std::size_t, const float* const*, float*) noexcept;
inline constexpr std::array<score_mean_function, span_heads> score_mean_of_heads = {score_mean<1>, score_mean<2>,
                                                                                    score_mean<3>, score_mean<4>};

/// Spans first ... last-1 for heads `head` on: the logit of the mean for each of its tokens.
inline void score_means(const span_codes& s, rows<float> queries, std::size_t head, std::size_t heads,
                        const span_queries& q, matrix_view<float> logits, const matrix_view<float>* bounds,
                        std::size_t first, std::size_t last) noexcept {
    const float* query[span_heads] = {};
    for (std::size_t h = 0; h < heads; ++h) {
        query[h] = queries[head + h];
    }
    // Products below the smallest normal float lose at most 2^-150 each.
    const double lost = static_cast<double>(s.key_dim) * 0x1p-148;
    for (std::size_t span = first; span < last; ++span) {
        float product[span_heads];
        score_mean_of_heads[heads - 1](s.means + span * s.padded_channels, s.key_dim, query, product);
        const std::size_t token = s.first_token[span];
        const std::size_t end = span + 1 < s.spans ? s.first_token[span + 1] : s.closed_tokens;
        for (std::size_t h = 0; h < heads; ++h) {
            const double bound =
                std::abs(q.head[h].scale) * (q.head[h].norm * static_cast<double>(s.radius[span]) + lost);
            float* const to = logits.row(head + h).data();
            float* const b = bounds ? bounds->row(head + h).data() : nullptr;
            write_bounded(q.head[h].scale * static_cast<double>(product[h]), bound, to + token,
                          b ? b + token : nullptr);
            std::fill(to + token + 1, to + end, to[token]);
            if (b) {
                std::fill(b + token + 1, b + end, b[token]);
            }
        }
    }
}

/// The tokens of the open span, in doubles.
inline void score_open(const span_codes& s, const span_query& q, float* logits, float* bounds) noexcept {
    for (std::size_t t = 0; t < s.open_tokens; ++t) {
        const float* const key = s.open + t * s.key_dim;
        double sum = 0;
        double size = 0;
        for (std::size_t c = 0; c < s.key_dim; ++c) {
            const double term = static_cast<double>(key[c]) * q.value[c];
            sum += term;
            size += std::abs(term);
        }
        const double lost = std::abs(q.scale) * size * static_cast<double>(s.key_dim) * 0x1p-52;
        // An infinite key shows as NaN, as in the other sketches.
        write_bounded(q.scale * sum + (sum - sum), lost, logits + t, bounds ? bounds + t : nullptr);
    }
}

struct weighed_span {
    float weight;
    std::uint32_t span;

    /// Whether a comes before b: more weight, or as much and the lower index.
    friend bool operator<(const weighed_span& a, const weighed_span& b) noexcept {
        return a.weight > b.weight || (a.weight == b.weight && a.span < b.span);
    }
};

/// The s.zoomed spans that may weigh most, by ln(length) + logit of the mean + its bound, in any order; spans whose
/// logit is not finite are left out. Returns how many there are.
inline std::size_t heaviest_spans(const span_codes& s, const span_query& q, const float* logits,
                                  weighed_span* out) noexcept {
    const double width = std::abs(q.scale) * q.norm;
    std::size_t count = 0;
    for (std::size_t span = 0; span < s.spans && s.zoomed > 0; ++span) {
        const std::size_t token = s.first_token[span];
        const std::size_t end = span + 1 < s.spans ? s.first_token[span + 1] : s.closed_tokens;
        const double most = static_cast<double>(logits[token]) + width * static_cast<double>(s.radius[span]);
        const weighed_span own{static_cast<float>(most) + s.log_length[end - token], static_cast<std::uint32_t>(span)};
        if (!std::isfinite(logits[token]) || own.weight != own.weight) {
            continue;
        }
        if (count < s.zoomed) {
            out[count++] = own;
            std::push_heap(out, out + count);
        } else if (own < out[0]) {  // the front is the last of those kept
            std::pop_heap(out, out + count);
            out[count - 1] = own;
            std::push_heap(out, out + count);
        }
    }
    return count;
}

/// sum_c a_c x_c in doubles; padded is a multiple of 16.
VERKV_ALWAYS_INLINE double wide_dot(const float* a, const double* x, std::size_t padded) noexcept {
    double_lanes sums[2] = {};
    for (std::size_t c = 0; c < padded; c += 2 * double_count) {
        for (std::size_t v = 0; v < 2; ++v) {
            half_lanes left;
            double_lanes right;
            std::memcpy(&left, a + c + v * double_count, sizeof(left));
            std::memcpy(&right, x + c + v * double_count, sizeof(right));
            sums[v] += __builtin_convertvector(left, double_lanes) * right;
        }
    }
    double total = 0;
    for (std::size_t i = 0; i < double_count; ++i) {
        total += sums[0][i] + sums[1][i];
    }
    return total;
}

inline void widen_row(const half* row, std::size_t padded, float* out) noexcept {
    for (std::size_t c = 0; c < padded; c += lane_count) {
        store(out + c, load(row + c));
    }
}

/// The tokens of one span for one query, from mean, basis and coefficients.
inline void zoom_span(const span_codes& s, const span_query& q, std::size_t span, float* logits,
                      float* bounds) noexcept {
    alignas(64) float row[span_codes::largest_key_dim];
    alignas(64) float basis[span_codes::largest_rank * span_codes::largest_key_dim];
    double along[span_codes::largest_rank];
    alignas(64) double back[span_codes::largest_key_dim];
    widen_row(s.means + span * s.padded_channels, s.padded_channels, row);
    const double centre = wide_dot(row, q.value, s.padded_channels);
    double mean_square = 0;
    for (std::size_t c = 0; c < s.key_dim; ++c) {
        mean_square += static_cast<double>(row[c]) * static_cast<double>(row[c]);
    }
    double inner = 0;
    for (std::size_t r = 0; r < s.rank; ++r) {
        float* const direction = basis + r * s.padded_channels;
        widen_row(s.basis + (span * s.rank + r) * s.padded_channels, s.padded_channels, direction);
        along[r] = wide_dot(direction, q.value, s.padded_channels);
        inner += along[r] * along[r];
    }
    rotate(basis, s.rank, s.padded_channels, along, back);
    double beside = 0;
    for (std::size_t c = 0; c < s.key_dim; ++c) {
        beside += (q.value[c] - back[c]) * (q.value[c] - back[c]);
    }
    const double size = std::abs(q.scale);
    const auto slack = static_cast<double>(s.key_dim + s.rank) * 0x1p-49;  // of doubles, relative
    const double outer = size * (std::sqrt(beside) + slack * q.norm);
    inner = size * std::sqrt(inner) * (1 + slack);
    const std::size_t first = s.first_token[span];
    const std::size_t end = span + 1 < s.spans ? s.first_token[span + 1] : s.closed_tokens;
    for (std::size_t t = first; t < end; ++t) {
        double sum = centre;
        double square = mean_square;
        for (std::size_t r = 0; r < s.rank; ++r) {
            const auto a = static_cast<double>(to_float(s.coefficients[t * s.rank + r]));
            sum += along[r] * a;
            square += a * a;
        }
        const double bound = outer * static_cast<double>(s.outside[t]) + inner * static_cast<double>(s.inside[t]) +
                             size * q.norm * slack * std::sqrt(2 * square);
        write_bounded(q.scale * sum, bound, logits + t, bounds ? bounds + t : nullptr);
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Writes the logits that a span sketch estimates, and their bounds unless `bounds` is null.
/// See span_sketch::estimate(). Preconditions (unchecked): queries are as wide as the keys, logits and bounds
/// [queries.count, closed and open tokens], rows that do not overlap; coefficients are finite. Reads the means once for
/// four queries, and the bases of the spans that each of them zooms into. Takes about 65 KiB of the caller's stack, and
/// 80 KiB of a task's. No memory is allocated. Throws nothing.
inline void span_estimate(const cpu& exec, const span_codes& s, rows<float> queries, float scale,
                          matrix_view<float> logits, const matrix_view<float>* bounds) noexcept {
    constexpr std::size_t at_once = 64;  // spans of a task: their means stay in the first-level cache
    const std::size_t tasks = (s.spans + at_once - 1) / at_once;
    for (std::size_t head = 0; head < queries.count; head += detail::span_heads) {
        const std::size_t heads = (std::min)(detail::span_heads, queries.count - head);
        detail::span_queries q;
        for (std::size_t h = 0; h < heads; ++h) {
            detail::widen_query(queries[head + h], s.key_dim, s.padded_channels, scale, q.head[h]);
        }
        for_each_task(exec, tasks, [&](std::size_t task, std::size_t) {
            detail::score_means(s, queries, head, heads, q, logits, bounds, task * at_once,
                                (std::min)(s.spans, (task + 1) * at_once));
        });
        for (std::size_t h = 0; h < heads; ++h) {
            float* const to = logits.row(head + h).data();
            float* const b = bounds ? bounds->row(head + h).data() : nullptr;
            detail::weighed_span zoomed[span_codes::most_zoomed];
            const std::size_t count = detail::heaviest_spans(s, q.head[h], to, zoomed);
            for_each_task(exec, count, [&](std::size_t task, std::size_t) {
                detail::zoom_span(s, q.head[h], zoomed[task].span, to, b);
            });
            detail::score_open(s, q.head[h], to + s.closed_tokens, b ? b + s.closed_tokens : nullptr);
        }
    }
}

}  // namespace verkv::inline v0
