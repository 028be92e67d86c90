// A prompt of random rows with memory of its own, in several layouts, and attention over it in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/core/storage.hpp"

enum class layout { dense, strided, listed };

// Values are uniform on multiples of 2^-6 in [-amplitude, amplitude], the same for every layout of one seed.
template <class T>
class random_prompt {
public:
    random_prompt(verkv::geometry shape, std::vector<verkv::position_t> positions,
                  std::vector<verkv::position_t> query_positions, unsigned seed, layout rows_lie = layout::dense,
                  int amplitude = 2)
        : shape_(shape), positions_(std::move(positions)), query_positions_(std::move(query_positions)) {
        std::mt19937 random(seed);
        const auto value = [&] {
            const int steps = 64 * amplitude;
            return static_cast<float>(static_cast<int>(random() % static_cast<unsigned>(2 * steps + 1)) - steps) / 64;
        };
        const std::size_t n = positions_.size();
        const std::size_t d = shape.key_dim;
        const std::size_t stride = rows_lie == layout::dense ? d : d + 5;
        const std::size_t pool = rows_lie == layout::listed ? 2 * n + 3 : n;
        const T nan = verkv::from_float<T>(std::nanf(""));
        ids_.resize(pool);
        std::iota(ids_.begin(), ids_.end(), verkv::row_id{0});
        if (rows_lie == layout::listed) {
            std::mt19937 order(seed + 1);
            std::shuffle(ids_.begin(), ids_.end(), order);
        }
        keys_.assign(shape.kv_heads, std::vector<T>(pool * stride, nan));
        values_.assign(n * shape.value_dim, verkv::from_float<T>(0));
        for (auto& keys : keys_) {
            for (std::size_t i = 0; i < n; ++i) {
                for (std::size_t c = 0; c < d; ++c) {
                    keys[ids_[i] * stride + c] = verkv::from_float<T>(value());
                }
            }
            key_rows_.push_back({keys.data(), static_cast<std::ptrdiff_t>(stride), n, d,
                                 rows_lie == layout::listed ? ids_.data() : nullptr});
            value_rows_.push_back(
                {values_.data(), static_cast<std::ptrdiff_t>(shape.value_dim), n, shape.value_dim, nullptr});
        }
        const std::size_t head_stride = stride;
        const std::size_t token_stride = shape.query_heads * head_stride + (rows_lie == layout::dense ? 0 : 3);
        queries_.assign(query_positions_.size() * token_stride, nan);
        for (std::size_t j = 0; j < query_positions_.size(); ++j) {
            for (std::size_t h = 0; h < shape.query_heads; ++h) {
                for (std::size_t c = 0; c < d; ++c) {
                    queries_[j * token_stride + h * head_stride + c] = verkv::from_float<T>(value());
                }
            }
        }
        query_view_ = {queries_.data(),
                       query_positions_.size(),
                       shape.query_heads,
                       d,
                       static_cast<std::ptrdiff_t>(token_stride),
                       static_cast<std::ptrdiff_t>(head_stride)};
    }
    random_prompt(const random_prompt&) = delete;
    random_prompt& operator=(const random_prompt&) = delete;

    [[nodiscard]] verkv::prompt<T> view() const {
        return {shape_, key_rows_, value_rows_, positions_, query_view_, query_positions_};
    }

    T* key(std::size_t kv_head, std::size_t token) { return const_cast<T*>(key_rows_[kv_head][token]); }

private:
    verkv::geometry shape_;
    std::vector<verkv::position_t> positions_;
    std::vector<verkv::position_t> query_positions_;
    std::vector<verkv::row_id> ids_;
    std::vector<std::vector<T>> keys_;
    std::vector<T> values_;
    std::vector<T> queries_;
    std::vector<verkv::rows<T>> key_rows_;
    std::vector<verkv::rows<T>> value_rows_;
    verkv::heads_view<T> query_view_;
};

[[nodiscard]] inline std::vector<verkv::position_t> positions_from(int first, int last, int step = 1) {
    std::vector<verkv::position_t> out;
    for (int p = first; p < last; p += step) {
        out.push_back(p);
    }
    return out;
}

// Softmax attention of kept query j of a head, in double; raises *spread to the largest sum of |q_c k_c| * scale.
template <class T>
[[nodiscard]] std::vector<double> attention_in_double(const verkv::prompt<T>& p, std::size_t head, std::size_t j,
                                                      double* spread = nullptr) {
    const auto& keys = p.keys[head / p.shape.group()];
    const T* q = p.queries.row(j, head);
    const double scale = static_cast<double>(p.shape.logit_scale());
    std::vector<double> a(p.tokens(), 0.0);
    double top = -1e300;
    for (std::size_t i = 0; i < p.tokens() && p.positions[i] <= p.query_positions[j]; ++i) {
        double absolute = 0;
        for (std::size_t c = 0; c < keys.width; ++c) {
            const double x =
                static_cast<double>(verkv::to_float(q[c])) * static_cast<double>(verkv::to_float(keys[i][c]));
            a[i] += x * scale;
            absolute += std::abs(x) * scale;
        }
        top = std::max(top, a[i]);
        if (spread) {
            *spread = std::max(*spread, absolute);
        }
    }
    double sum = 0;
    for (std::size_t i = 0; i < p.tokens() && p.positions[i] <= p.query_positions[j]; ++i) {
        sum += a[i] = std::exp(a[i] - top);
    }
    for (double& x : a) {
        x /= sum;
    }
    return a;
}
