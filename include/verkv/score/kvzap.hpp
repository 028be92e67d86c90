// A trained linear map or two-layer perceptron on hidden states.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <span>
#include <vector>

#include "verkv/core/geometry.hpp"
#include "verkv/core/prompt_inputs.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/detail/hidden_tiles.hpp"

namespace verkv::inline v0 {

/// Which function goes by the name of GELU.
enum class gelu {
    exact,  ///< x Phi(x) = x/2 (1 + erf(x / sqrt 2)): torch's default, and what KVzap was trained with
    tanh    ///< x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
};

/// What kvzap writes.
enum class kvzap_output {
    importance,  ///< min(1, exp(s)), 1 on the last `local` tokens
    logarithm    ///< the model's own s, for thresholds; no token is protected
};

/// Weights of one layer's model, the caller's memory; matrices one row after the other, a row for each output.
struct kvzap_weights {
    std::size_t model_dim = 0;                   ///< channels of a hidden state
    std::size_t hidden_dim = 0;                  ///< units of the hidden layer; 0: the model is linear
    std::span<const float> hidden_weights = {};  ///< [hidden_dim, model_dim]; empty where linear
    std::span<const float> hidden_bias = {};     ///< [hidden_dim]; empty where linear
    std::span<const float> output_weights = {};  ///< [kv_heads, hidden_dim], or [kv_heads, model_dim] where linear
    std::span<const float> output_bias = {};     ///< [kv_heads]
    gelu activation = gelu::exact;               ///< of the hidden layer
};

/// Checks that a model belongs to a layer.
/// O(1). Throws invalid_argument for a model_dim of 0, a span of another length, or no such activation.
inline void validate(const kvzap_weights& w, const geometry& g) {
    using detail::scoring::check_weights;
    detail::check(w.model_dim > 0, "KVzap weights have model_dim 0; it must be positive");
    detail::check(w.activation == gelu::exact || w.activation == gelu::tanh, "KVzap's activation is ",
                  static_cast<int>(w.activation), "; it must be exact or tanh");
    check_weights("hidden_weights of KVzap", w.hidden_weights, w.hidden_dim, w.model_dim);
    check_weights("hidden_bias of KVzap", w.hidden_bias, w.hidden_dim);
    check_weights("output_weights of KVzap", w.output_weights, g.kv_heads,
                  w.hidden_dim > 0 ? w.hidden_dim : w.model_dim);
    check_weights("output_bias of KVzap", w.output_bias, g.kv_heads);
}

/// KVzap (NVIDIA 2026, arXiv 2601.07891): KVzip+'s scores, learned as a function of the hidden state alone.
/// s = W_2 gelu(W_1 h + b_1) + b_2, or W h + b: a number for each KV head, the logarithm of a token's importance. What
/// is written is exp(s), at most 1, and 1 on the last `local` tokens by index; or s as it is. Thresholds on s hold for
/// all layers and heads alike (the authors' README has -4), so do those on exp(s).
/// Needs hidden states, no query. Tokens do not see each other. score_layer() finds the hidden layer once for all KV
/// heads, score() for each again.
/// Time O(n hidden_dim (model_dim + kv_heads)), or O(n model_dim kv_heads), reads hidden states once and the weights
/// once for 64 tokens; 64 (model_dim + hidden_dim + kv_heads) floats a worker. Products in float as score_rows(), GELU
/// and exp in double: absolute error of s about (model_dim / lanes + 5) units roundoff of sum |w| |gelu'| |W h|.
/// Same bits for any number of threads and any strides, by score() and by score_layer(). NaN in a hidden state stays in
/// its token.
/// Throws invalid_argument where the weights do not fit the prompt.
struct kvzap {
    template <class T>
    using needs = inputs<hidden_states<T>>;

    kvzap_weights weights;
    kvzap_output output = kvzap_output::importance;
    std::size_t local = 128;

    template <class Backend, class P>
    requires carries<P, hidden_states<typename P::element>>
    void score(const Backend& exec, const P& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        run(exec, p, kv_head, matrix_view<float>{out.data(), 1, out.size(), static_cast<std::ptrdiff_t>(out.size())});
    }

    template <class Backend, class P>
    requires carries<P, hidden_states<typename P::element>>
    void score_layer(const Backend& exec, const P& p, matrix_view<float> out) const {
        detail::scoring::check_layer(p, out);
        run(exec, p, 0, out);
    }

private:
    // Rows of out: KV heads from first_head on.
    template <class Backend, class P>
    void run(const Backend& exec, const P& p, std::size_t first_head, const matrix_view<float>& out) const {
        validate(weights, p.shape);
        validate(static_cast<const hidden_states<typename P::element>&>(p), p);
        detail::check(p.tokens() == 0 || p.hidden.width == weights.model_dim, "hidden states of ", p.hidden.width,
                      " channels meet KVzap weights for ", weights.model_dim);
        const std::size_t units = weights.hidden_dim;
        const std::size_t width = units > 0 ? units : weights.model_dim;
        const std::size_t tile = (std::min)(detail::scoring::tile_tokens, p.tokens());
        std::vector<std::vector<float>> inner(workers(exec), std::vector<float>(tile * units));
        std::vector<std::vector<float>> outer(workers(exec), std::vector<float>(tile * out.rows));
        const auto last_weights = weights.output_weights.subspan(first_head * width, out.rows * width);
        const auto last_bias = weights.output_bias.subspan(first_head, out.rows);
        detail::scoring::hidden_tiles(
            exec, p.hidden, [&](std::size_t first, const rows<float>& hidden, std::size_t worker) {
                rows<float> x = hidden;
                if (units > 0) {
                    const auto y = detail::scoring::first_rows(inner[worker], x.count, units);
                    detail::scoring::linear(x, weights.hidden_weights, weights.hidden_bias, y);
                    for (std::size_t e = 0; e < x.count * units; ++e) {
                        y.data[e] = activated(y.data[e]);
                    }
                    x = {y.data, y.stride, y.rows, y.columns, nullptr};
                }
                const auto s = detail::scoring::first_rows(outer[worker], x.count, out.rows);
                detail::scoring::linear(x, last_weights, last_bias, s);
                for (std::size_t t = 0; t < x.count; ++t) {
                    for (std::size_t h = 0; h < out.rows; ++h) {
                        out.row(h)[first + t] = written(s.row(t)[h]);
                    }
                }
            });
        for (std::size_t h = 0; h < out.rows && output == kvzap_output::importance; ++h) {
            const auto row = out.row(h);
            std::fill_n(row.rbegin(), (std::min)(local, row.size()), 1.0f);
        }
    }

    [[nodiscard]] float activated(float y) const {
        const double x = static_cast<double>(y);
        // Upper tails, which 1 + erf and 1 + tanh would lose on the left.
        const double share =
            weights.activation == gelu::exact
                ? std::erfc(-x / std::numbers::sqrt2) / 2
                : 1 / (1 + std::exp(-2 * std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
        return static_cast<float>(x * share);
    }

    [[nodiscard]] float written(float s) const {
        if (output == kvzap_output::logarithm) {
            return s;
        }
        return s > 0 ? 1.0f : static_cast<float>(std::exp(static_cast<double>(s)));
    }
};

}  // namespace verkv::inline v0
