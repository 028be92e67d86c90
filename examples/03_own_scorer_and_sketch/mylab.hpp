// A scorer, a sketch and a planner that verkv has never heard of: what a user writes, in a namespace of their own.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numbers>
#include <numeric>
#include <span>
#include <vector>

#include "verkv/verkv.hpp"

namespace mylab {

/// Scorer: a token matters the more the longer its value is, and the less the older it is. Looks at no query.
struct value_norm {
    double half_life = 4096;  ///< positions after which a token matters half as much

    template <class Backend, class T>
    void score(const Backend&, const verkv::prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        const verkv::rows<T>& values = p.values[kv_head];
        float top = 0;
        for (std::size_t i = 0; i < out.size(); ++i) {
            double square = 0;
            for (std::size_t c = 0; c < values.width; ++c) {
                const auto x = static_cast<double>(verkv::to_float(values[i][c]));
                square += x * x;
            }
            const double age = static_cast<double>(p.positions.back()) - static_cast<double>(p.positions[i]);
            out[i] = static_cast<float>(std::sqrt(square) * std::exp2(-age / half_life));
            top = std::max(top, out[i]);
        }
        for (float& x : out) {
            x /= top > 0 ? top : 1;  // within [0, 1]; other scores would go through a softmax
        }
    }
};

/// Sketch: the signs of 64 random projections of each key and its norm, both about the mean key: 10 bytes a token.
/// The query is not rounded (QJL: Zandieh et al. 2024), S normal:
///     <q, k> = <q, mean> + sqrt(pi/2) |k - mean| E <S q, sign(S (k - mean))> / 64
class sign_bits {
public:
    explicit sign_bits(std::size_t key_dim) : mean_(key_dim) {
        std::vector<float> s(64 * key_dim);
        for (std::size_t i = 0; i < s.size(); ++i) {  // normal numbers from verkv's uniforms: repeatable
            const verkv::uniform_stream stream{.seed = 1};
            const auto at = static_cast<verkv::position_t>(2 * i);
            s[i] = static_cast<float>(std::sqrt(-2 * std::log(1 - verkv::uniform(stream, at))) *
                                      std::cos(2 * std::numbers::pi * verkv::uniform(stream, at + 1)));
        }
        projections_ = std::make_shared<const std::vector<float>>(std::move(s));
    }

    /// All keys, once: whatever depends on all of them is chosen here, so that append() can come in any pieces.
    template <class Backend, class T>
    void fit(const Backend&, verkv::rows<T> keys) {
        std::vector<double> sum(mean_.size());
        for (std::size_t i = 0; i < keys.count; ++i) {
            for (std::size_t c = 0; c < sum.size(); ++c) {
                sum[c] += static_cast<double>(verkv::to_float(keys[i][c]));
            }
        }
        for (std::size_t c = 0; c < sum.size(); ++c) {
            mean_[c] = static_cast<float>(sum[c] / std::max(1.0, static_cast<double>(keys.count)));
        }
        signs_.clear();
        norms_.clear();
    }

    template <class Backend, class T>
    void append(const Backend&, verkv::rows<T> keys) {
        std::vector<float> key(mean_.size());
        for (std::size_t i = 0; i < keys.count; ++i) {
            for (std::size_t c = 0; c < key.size(); ++c) {
                key[c] = verkv::to_float(keys[i][c]) - mean_[c];
            }
            std::uint64_t signs = 0;
            for (std::size_t bit = 0; bit < 64; ++bit) {
                signs |= std::uint64_t{project(bit, key.data()) > 0} << bit;
            }
            signs_.push_back(signs);
            norms_.push_back(verkv::from_float<verkv::half>(std::sqrt(dot(key, key.data()))));
        }
    }

    /// Runs in every step, on many threads at once: const, deterministic, and it allocates nothing.
    template <class Backend>
    void estimate(const Backend&, verkv::rows<float> queries, float scale, verkv::matrix_view<float> logits) const {
        const float factor = scale * std::sqrt(std::numbers::pi_v<float> / 2) / 64;
        for (std::size_t g = 0; g < queries.count; ++g) {
            std::array<std::array<float, 256>, 8>
                sums{};  // sum of eight +-<S_bit, q>, for each byte that signs can have
            for (std::size_t bit = 0; bit < 64; ++bit) {
                const float x = factor * project(bit, queries[g]);
                for (std::size_t value = 0; value < 256; ++value) {
                    sums[bit / 8][value] += (value >> bit % 8 & 1) != 0 ? x : -x;
                }
            }
            const float offset = scale * dot(mean_, queries[g]);
            for (std::size_t i = 0; i < size(); ++i) {
                float sum = 0;
                for (std::size_t byte = 0; byte < 8; ++byte) {
                    sum += sums[byte][signs_[i] >> (8 * byte) & 255];
                }
                logits.row(g)[i] = offset + verkv::to_float(norms_[i]) * sum;
            }
        }
    }

    [[nodiscard]] std::size_t size() const { return signs_.size(); }
    [[nodiscard]] std::size_t bytes() const { return size() * (sizeof(std::uint64_t) + sizeof(verkv::half)); }

private:
    static float dot(const std::vector<float>& a, const float* b) {
        return std::inner_product(a.begin(), a.end(), b, 0.0f);
    }
    [[nodiscard]] float project(std::size_t bit, const float* x) const {
        const float* s = projections_->data() + bit * mean_.size();
        return std::inner_product(s, s + mean_.size(), x, 0.0f);
    }

    std::shared_ptr<const std::vector<float>> projections_;  // shared by the copies that a cache makes for its heads
    std::vector<float> mean_;
    std::vector<std::uint64_t> signs_;
    std::vector<verkv::half> norms_;
};

/// Planner: fetches the `count` heaviest tokens of L in every step, whatever that promises. An even load, and a
/// certificate that says what it was worth.
struct fetch_heaviest {
    std::size_t count = 128;

    struct workspace {
        std::vector<float> mass, odds;
        std::vector<verkv::token_index> heaviest;
        verkv::top_k_workspace top;

        void reserve(std::size_t n) {  // called once; plan() then allocates nothing
            mass.reserve(n);
            odds.reserve(n);
            heaviest.reserve(n);
            top.reserve(n);
        }
    };

    template <class Backend>
    void plan(const Backend& exec, verkv::masses_view m, verkv::tolerance t, workspace& w, verkv::plan& out) const {
        constexpr float never = -std::numeric_limits<float>::infinity();
        out.clear();
        w.odds.assign(m.odds.begin(), m.odds.end());
        w.mass.assign(m.mass.begin(), m.mass.end());
        const auto certificate = [&] {
            verkv::bernstein_moments left;
            for (std::size_t i = 0; i < w.odds.size(); ++i) {
                if (w.odds[i] > 0) {
                    left.add(static_cast<double>(m.mass[i]) / m.reference, static_cast<double>(w.odds[i]), 1, 0);
                } else {
                    w.mass[i] = never;  // kept for certain: nothing to fetch
                }
            }
            return verkv::bernstein_bound(left, t.log_term());
        };
        out.certificate_before = certificate();
        verkv::top_k(exec, w.mass, count, w.top, w.heaviest);
        for (const verkv::token_index i : w.heaviest) {  // ascending, as a plan has to be
            out.entries.push_back({.token = i, .probability = 1, .shrinkage = 1});
            w.odds[i] = 0;
        }
        out.raised = out.entries.size();
        out.certificate_after = certificate();
    }
};

static_assert(verkv::scorer<value_norm, verkv::cpu, verkv::half>);
static_assert(verkv::sketch<sign_bits, verkv::cpu, verkv::half>);
static_assert(verkv::planner<fetch_heaviest, verkv::cpu>);

}  // namespace mylab
