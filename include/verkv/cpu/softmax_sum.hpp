// The second half of attention, on the CPU: a running softmax over logits that are known, and the values they weigh.
#pragma once

#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/detail/product.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"

namespace verkv::inline v0 {
namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// Adds log-weights to logits. -infinity leaves a row out, whatever its logit is.
inline void add_log_weights(std::span<float> logit, const float* add) {
    constexpr float out = -std::numeric_limits<float>::infinity();
    for (std::size_t i = 0; i < logit.size(); ++i) {
        logit[i] = add[i] == out ? out : logit[i] + add[i];
    }
}

/// sums[h] = sum_i weight[h][i] * value[i] over Vectors vectors of channels, held in registers.
/// Skip: rows of weight 0 add nothing whatever their value; without it, 0 times a NaN is a NaN.
template <bool Skip, std::size_t Heads, std::size_t Vectors, class T>
VERKV_ALWAYS_INLINE void weighted_sums(const float* const (&w)[Heads], const rows<T>& values, std::size_t first_channel,
                                       std::size_t channels, lanes (&sums)[Heads][Vectors]) {
    for (std::size_t h = 0; h < Heads; ++h) {
        for (std::size_t v = 0; v < Vectors; ++v) {
            sums[h][v] = lanes{};
        }
    }
    for (std::size_t i = 0; i < values.count; ++i) {
        const T* row = values[i] + first_channel;
        lanes value[Vectors];
        for (std::size_t v = 0; v < Vectors; ++v) {
            value[v] = channels == Vectors * lane_count ? load(row + v * lane_count) : load_first(row, channels);
        }
        for (std::size_t h = 0; h < Heads; ++h) {
            for (std::size_t v = 0; v < Vectors; ++v) {
                sums[h][v] += (Skip && w[h][i] == 0 ? lanes{} : value[v]) * w[h][i];
            }
        }
    }
}

/// total[h][c] += sum_i weight[h][i] * value[i][c] for Heads heads and Vectors vectors of channels.
template <std::size_t Heads, std::size_t Vectors, class T>
VERKV_ALWAYS_INLINE void weigh_tile(const matrix_view<float>& weights, std::size_t first_head, const rows<T>& values,
                                    std::size_t first_channel, std::size_t channels, const matrix_view<double>& total) {
    lanes sums[Heads][Vectors];
    const float* w[Heads];
    for (std::size_t h = 0; h < Heads; ++h) {
        w[h] = weights.row(first_head + h).data();
    }
    weighted_sums<false>(w, values, first_channel, channels, sums);
    lanes zero{};  // as long as every sum is finite
    for (std::size_t h = 0; h < Heads; ++h) {
        for (std::size_t v = 0; v < Vectors; ++v) {
            zero += sums[h][v] - sums[h][v];
        }
    }
    if (!(sum(zero) == 0)) [[unlikely]] {
        weighted_sums<true>(w, values, first_channel, channels, sums);
    }
    for (std::size_t h = 0; h < Heads; ++h) {
        double* out = total.row(first_head + h).data() + first_channel;
        float part[Vectors * lane_count];
        for (std::size_t v = 0; v < Vectors; ++v) {
            store(part + v * lane_count, sums[h][v]);
        }
        for (std::size_t c = 0; c < channels; ++c) {
            out[c] += static_cast<double>(part[c]);
        }
    }
}

template <std::size_t Heads, class T>
void weigh_heads(const matrix_view<float>& weights, std::size_t first_head, const rows<T>& values,
                 const matrix_view<double>& total) {
    constexpr std::size_t pair = 2 * lane_count;
    std::size_t c = 0;
    for (; c + pair <= values.width; c += pair) {
        weigh_tile<Heads, 2>(weights, first_head, values, c, pair, total);
    }
    for (; c < values.width; c += lane_count) {
        weigh_tile<Heads, 1>(weights, first_head, values, c, smaller(lane_count, values.width - c), total);
    }
}

/// Replaces x by exp(x - shift) and returns the sum: lanes over blocks of 1024, blocks in double.
VERKV_ALWAYS_INLINE double exponentiate(std::span<float> x, float shift) {
    constexpr std::size_t block = 1024;
    double total = 0;
    for (std::size_t first = 0; first < x.size(); first += block) {
        const std::size_t last = smaller(first + block, x.size());
        lanes sums = lanes{};
        std::size_t i = first;
        for (; i + lane_count <= last; i += lane_count) {
            const lanes w = exp(load(x.data() + i) - shift);
            store(x.data() + i, w);
            sums += w;
        }
        total += static_cast<double>(sum(sums));
        if (i < last) {
            float w[lane_count];
            store(w, exp(load_first(x.data() + i, last - i) - shift));
            for (std::size_t j = 0; i < last; ++i, ++j) {
                x[i] = w[j];
                total += static_cast<double>(w[j]);
            }
        }
    }
    return total;
}

/// Largest element; NaN is passed over; -infinity for none.
VERKV_ALWAYS_INLINE float largest_of(std::span<const float> x) {
    // Four at a time: each waits for the one before it.
    constexpr float none = -std::numeric_limits<float>::infinity();
    lanes tops[4] = {broadcast(none), broadcast(none), broadcast(none), broadcast(none)};
    std::size_t i = 0;
    for (; i + 4 * lane_count <= x.size(); i += 4 * lane_count) {
        for (std::size_t k = 0; k < 4; ++k) {
            tops[k] = larger_of(load(x.data() + i + k * lane_count), tops[k]);
        }
    }
    for (; i + lane_count <= x.size(); i += lane_count) {
        tops[0] = larger_of(load(x.data() + i), tops[0]);
    }
    float top = largest(larger_of(larger_of(tops[0], tops[1]), larger_of(tops[2], tops[3])));
    for (; i < x.size(); ++i) {
        top = larger(x[i], top);
    }
    return top;
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Running softmax-weighted sum for the query heads of a group: o = sum_i e^{l_i} v_i / sum_i e^{l_i}, in as many
/// pieces as the caller likes. Logits arrive with their additive log-weights included, -infinity for "not used".
/// Weights are floats relative to the largest logit so far; sums over a block of 64 rows are floats, sums of blocks
/// doubles: relative error of a channel at most (64 + few) u sum|w v| / |sum w v|, u = 2^-24, whatever n. Blocks start
/// at each add(): the same pieces give the same bits. NaN in a logit or a used value makes that head NaN and no other;
/// a row of weight 0 (left out, or below e^-87 of the largest) adds nothing whatever its value.
class softmax_sum {
public:
    /// Allocates for up to this many heads and channels; reset() within them does not allocate.
    /// Throws invalid_argument for more of them than memory can hold.
    void reserve(std::size_t heads, std::size_t value_dim) {
        const std::size_t channels = detail::product("softmax sum", heads, value_dim);
        if (top_.size() < heads) {
            top_.resize(heads);
            denominator_.resize(heads);
        }
        if (numerator_.size() < channels) {
            numerator_.resize(channels);
        }
    }

    /// Starts anew: nothing added.
    void reset(std::size_t heads, std::size_t value_dim) {
        reserve(heads, value_dim);
        heads_ = heads;
        value_dim_ = value_dim;
        for (std::size_t h = 0; h < heads; ++h) {
            top_[h] = -std::numeric_limits<float>::infinity();
            denominator_[h] = 0;
        }
        for (std::size_t c = 0; c < heads * value_dim; ++c) {
            numerator_[c] = 0;
        }
    }

    /// Adds rows. logits [heads, n] are overwritten with weights; values [n, value_dim] of any storage.
    /// O(heads n value_dim); reads each value from memory once.
    /// Throws invalid_argument for other shapes than reset() was told of, null pointers, and rows that overlap.
    template <storage T>
    void add(const cpu&, matrix_view<float> logits, rows<T> values) {
        detail::check(logits.rows == heads_ && logits.columns == values.count && values.width == value_dim_, "logits [",
                      logits.rows, ", ", logits.columns, "] and values [", values.count, ", ", values.width, "] for ",
                      heads_, " heads of ", value_dim_, " channels");
        validate(logits, "logits");
        validate(values, "values");
        constexpr std::size_t block = 64;
        for (std::size_t first = 0; first < values.count; first += block) {
            const std::size_t n = smaller(block, values.count - first);
            add_block({logits.data + first, logits.rows, n, logits.stride}, values.slice(first, n));
        }
    }

    /// Writes o [heads, value_dim] and lse [heads]. Nothing added: o = 0, lse = -infinity.
    /// Throws invalid_argument for other shapes, a null pointer, and rows that overlap.
    void finish(matrix_view<float> output, std::span<float> lse) const {
        detail::check(output.rows == heads_ && output.columns == value_dim_ && lse.size() == heads_, "output [",
                      output.rows, ", ", output.columns, "] and lse [", lse.size(), "] for ", heads_, " heads of ",
                      value_dim_, " channels");
        validate(output, "output");
        for (std::size_t h = 0; h < heads_; ++h) {
            const bool empty = denominator_[h] == 0;
            const double inverse = empty ? 0 : 1 / denominator_[h];
            for (std::size_t c = 0; c < value_dim_; ++c) {
                output.row(h)[c] = static_cast<float>(numerator_[h * value_dim_ + c] * inverse);
            }
            lse[h] = static_cast<float>(log_sum(h));
        }
    }

    /// ln of the sum of e^{l_i}, in double; -infinity where nothing was added.
    /// Throws invalid_argument for a head that reset() was not told of.
    [[nodiscard]] double log_sum(std::size_t head) const {
        detail::check(head < heads_, "head ", head, " of ", heads_);
        return denominator_[head] == 0 ? -std::numeric_limits<double>::infinity()
                                       : static_cast<double>(top_[head]) + std::log(denominator_[head]);
    }

private:
    template <storage T>
    void add_block(const matrix_view<float>& logits, const rows<T>& values) {
        for (std::size_t h = 0; h < heads_; ++h) {
            const std::span<float> row = logits.row(h);
            const float top = detail::largest_of(row);
            if (top > top_[h]) {
                // exp(-infinity) is 0: the first block finds empty sums.
                const double factor = std::exp(static_cast<double>(top_[h]) - static_cast<double>(top));
                denominator_[h] *= factor;
                for (std::size_t c = 0; c < value_dim_; ++c) {
                    numerator_[h * value_dim_ + c] *= factor;
                }
                top_[h] = top;
            }
            // A shift of -infinity would turn "not used" into NaN.
            const float shift = top_[h] == -std::numeric_limits<float>::infinity() ? 0.0f : top_[h];
            denominator_[h] += detail::exponentiate(row, shift);
        }
        const matrix_view<double> total{numerator_.data(), heads_, value_dim_, static_cast<std::ptrdiff_t>(value_dim_)};
        std::size_t h = 0;
        for (; h + 4 <= heads_; h += 4) {
            detail::weigh_heads<4>(logits, h, values, total);
        }
        switch (heads_ - h) {
            case 3:
                detail::weigh_heads<3>(logits, h, values, total);
                break;
            case 2:
                detail::weigh_heads<2>(logits, h, values, total);
                break;
            case 1:
                detail::weigh_heads<1>(logits, h, values, total);
                break;
            default:
                break;
        }
    }

    std::size_t heads_ = 0;
    std::size_t value_dim_ = 0;
    std::vector<float> top_;
    std::vector<double> denominator_;
    std::vector<double> numerator_;
};

}  // namespace verkv::inline v0
