// Random rows, and attention over rows in double with the error that float kernels may have.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/lanes.hpp"

namespace support {

/// Numbers that are the same on every platform.
class generator {
public:
    explicit generator(std::uint64_t seed) : random_(seed) {}

    double uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
    std::size_t below(std::size_t n) { return static_cast<std::size_t>(random_() % n); }

    /// Mean 0, variance 1: a sum of uniforms.
    double normal() {
        double sum = -6;
        for (int i = 0; i < 12; ++i) {
            sum += uniform();
        }
        return sum;
    }

    template <class T>
    std::vector<T> normals(std::size_t count, double deviation = 1) {
        std::vector<T> x(count);
        for (T& element : x) {
            element = verkv::from_float<T>(static_cast<float>(deviation * normal()));
        }
        return x;
    }

private:
    std::mt19937_64 random_;
};

template <class T>
double value_of(T x) {
    return static_cast<double>(verkv::to_float(x));
}

/// Attention of one query in double.
struct reference_attention {
    std::vector<double> output;
    double lse = -std::numeric_limits<double>::infinity();
    std::vector<double> output_error;  ///< what a channel may be off when computed in float
    double lse_error = 0;
};

/// log_weight(i) is added to the logit of row i; -infinity leaves the row out, whatever it holds.
/// The bounds follow score_rows() and softmax_sum: a logit is off by (d / lanes + 5) u sum |q_c k_c| scale, and by a
/// unit roundoff where the log-weight and the shift are added; exp adds 4 u; sums of a block 64 + few.
template <class T, class LogWeight>
reference_attention attend_in_double(const float* query, double scale, const verkv::rows<T>& keys,
                                     const verkv::rows<T>& values, LogWeight&& log_weight) {
    constexpr double u = 0x1p-24;
    std::vector<double> logit(keys.count);
    double top = -std::numeric_limits<double>::infinity();
    double product_size = 0;
    double logit_size = 0;
    for (std::size_t i = 0; i < keys.count; ++i) {
        const double add = static_cast<double>(log_weight(i));
        if (std::isinf(add)) {
            logit[i] = add;
            continue;
        }
        double sum = 0;
        double size = 0;
        for (std::size_t c = 0; c < keys.width; ++c) {
            const double x = static_cast<double>(query[c]) * value_of(keys[i][c]);
            sum += x;
            size += std::abs(x);
        }
        logit[i] = scale * sum + add;
        top = std::max(top, logit[i]);
        product_size = std::max(product_size, scale * size);
        logit_size = std::max(logit_size, std::abs(scale * sum) + std::abs(add));
    }
    reference_attention a;
    a.output.assign(values.width, 0.0);
    a.output_error.assign(values.width, 0.0);
    double total = 0;
    for (std::size_t i = 0; i < keys.count; ++i) {
        const double w = std::isinf(logit[i]) && logit[i] < 0 ? 0 : std::exp(logit[i] - top);
        if (w == 0) {
            continue;
        }
        total += w;
        for (std::size_t c = 0; c < values.width; ++c) {
            const double v = value_of(values[i][c]);
            a.output[c] += w * v;
            a.output_error[c] += w * std::abs(v);
        }
    }
    if (total == 0) {
        return a;
    }
    const double terms = static_cast<double>(keys.width) / static_cast<double>(verkv::detail::lane_count) + 5;
    const double weight_error = (terms * product_size + 4 * logit_size + 4) * u;
    for (std::size_t c = 0; c < values.width; ++c) {
        a.output[c] /= total;
        a.output_error[c] = (2 * weight_error + 72 * u) * a.output_error[c] / total;
    }
    a.lse = top + std::log(total);
    a.lse_error = weight_error + 72 * u + u * std::abs(a.lse);
    return a;
}

template <class T>
reference_attention attend_in_double(const float* query, double scale, const verkv::rows<T>& keys,
                                     const verkv::rows<T>& values) {
    return attend_in_double(query, scale, keys, values, [](std::size_t) { return 0.0f; });
}

/// Bits of floats, so that NaN compares too.
inline std::vector<std::uint32_t> bits_of(std::span<const float> x) {
    std::vector<std::uint32_t> bits(x.size());
    std::transform(x.begin(), x.end(), bits.begin(), [](float f) { return std::bit_cast<std::uint32_t>(f); });
    return bits;
}

/// Rows in a memory of their own: dense, with a stride, or listed out of order among rows of NaN.
enum class rows_layout { dense, strided, listed };

template <class T>
class own_rows {
public:
    own_rows(std::vector<T> elements, std::size_t count, std::size_t width, rows_layout layout, std::uint64_t seed = 1)
        : count_(count), width_(width), layout_(layout) {
        stride_ = layout == rows_layout::dense ? width : width + 3;
        const std::size_t pool = layout == rows_layout::listed ? 2 * count + 1 : count;
        memory_.assign(pool * stride_, verkv::from_float<T>(std::numeric_limits<float>::quiet_NaN()));
        ids_.resize(pool);
        for (std::size_t i = 0; i < pool; ++i) {
            ids_[i] = static_cast<verkv::row_id>(i);
        }
        if (layout == rows_layout::listed) {
            generator g(seed);
            for (std::size_t i = pool; i > 1; --i) {
                std::swap(ids_[i - 1], ids_[g.below(i)]);
            }
        }
        for (std::size_t i = 0; i < count; ++i) {
            std::copy_n(elements.begin() + static_cast<std::ptrdiff_t>(i * width), width, row(i));
        }
    }

    T* row(std::size_t i) { return memory_.data() + ids_[i] * stride_; }

    [[nodiscard]] verkv::rows<T> view() const {
        return {memory_.data(), static_cast<std::ptrdiff_t>(stride_), count_, width_,
                layout_ == rows_layout::listed ? ids_.data() : nullptr};
    }

private:
    std::size_t count_;
    std::size_t width_;
    rows_layout layout_;
    std::size_t stride_ = 0;
    std::vector<T> memory_;
    std::vector<verkv::row_id> ids_;
};

}  // namespace support
