// A trained gate on hidden states: attention of a token's key against learned sinks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/geometry.hpp"
#include "verkv/core/prompt_inputs.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/detail/hidden_tiles.hpp"

namespace verkv::inline v0 {

/// Weights of one layer's gate, the caller's memory; matrices one row after the other, a row for each output.
struct sink_gate_weights {
    std::size_t model_dim = 0;                     ///< channels of a hidden state
    std::size_t gate_dim = 16;                     ///< channels of the gate's queries and keys
    std::size_t sinks = 16;                        ///< learned keys of a KV head
    std::span<const float> query_projection = {};  ///< [query_heads * gate_dim, model_dim]
    std::span<const float> query_bias = {};        ///< [query_heads * gate_dim]
    std::span<const float> key_projection = {};    ///< [kv_heads * gate_dim, model_dim]
    std::span<const float> query_norm = {};        ///< [gate_dim]
    std::span<const float> key_norm = {};          ///< [gate_dim]
    std::span<const float> sink_keys = {};         ///< [kv_heads, sinks, gate_dim]
    std::span<const float> bias = {};              ///< [query_heads]
    float norm_epsilon = 1e-6f;                    ///< added to the mean square of a norm
};

/// Checks that a gate belongs to a layer.
/// O(1). Throws invalid_argument for a width of 0, a span of another length, or an epsilon that is not positive.
inline void validate(const sink_gate_weights& w, const geometry& g) {
    detail::check(w.model_dim > 0 && w.gate_dim > 0, "a gate has model_dim ", w.model_dim, " and gate_dim ", w.gate_dim,
                  "; both must be positive");
    detail::check(std::isfinite(w.norm_epsilon) && w.norm_epsilon > 0, "a gate has norm_epsilon ", w.norm_epsilon,
                  "; it must be positive");
    using detail::scoring::check_weights;
    check_weights("query_projection of a gate", w.query_projection, g.query_heads, w.gate_dim, w.model_dim);
    check_weights("query_bias of a gate", w.query_bias, g.query_heads, w.gate_dim);
    check_weights("key_projection of a gate", w.key_projection, g.kv_heads, w.gate_dim, w.model_dim);
    check_weights("query_norm of a gate", w.query_norm, w.gate_dim);
    check_weights("key_norm of a gate", w.key_norm, w.gate_dim);
    check_weights("sink_keys of a gate", w.sink_keys, g.kv_heads, w.sinks, w.gate_dim);
    check_weights("bias of a gate", w.bias, g.query_heads);
}

/// Fast KVzip's gate, "low-rank sink attention" (Kim et al. 2026, arXiv 2601.17668): trained to say, from a token's
/// hidden state h alone, what KVzip's second pass would.
/// k = norm(W_k h), q_g = norm(W_q,g h + c_g), norm(x) = x w / sqrt(mean x^2 + epsilon), of width m = gate_dim;
/// score = mean over g of 1 / (1 + sum over sinks s of exp((<q_g, s> - <q_g, k>) / sqrt(m) - b_g)): the softmax weight
/// of the token's key among the sinks, in (0, 1). The bias b is added once, as the published inference code does (its
/// training script added it twice).
/// The first `sink` tokens and the last ones, by index, get 1: the last `local`, or of a prompt of less than
/// short_prompt tokens the last floor(short_local n), at least one unless short_local is 0.
/// Needs hidden states, no query. For a score that is the same whatever follows, score chunks as they come: tokens do
/// not see each other.
/// Time O(n (G + 1) m model_dim), reads hidden states once; 64 (model_dim + (G + 1) m) floats a worker. Projections in
/// float as score_rows(), all else in double: error of a score about |logit| (model_dim / lanes + 5) units roundoff.
/// Same bits for any number of threads and any strides. NaN in a hidden state stays in its token.
/// Throws invalid_argument where the weights do not fit the prompt, or a short_local outside [0, 1].
struct sink_gate {
    template <class T>
    using needs = inputs<hidden_states<T>>;

    sink_gate_weights weights;
    std::size_t sink = 4;
    std::size_t local = 4096;
    std::size_t short_prompt = 32000;
    double short_local = 0.02;

    /// Tokens at the end of a prompt of n that get 1.
    [[nodiscard]] std::size_t local_of(std::size_t n) const {
        if (n >= short_prompt) {
            return (std::min)(local, n);
        }
        const auto share = static_cast<std::size_t>(short_local * static_cast<double>(n));
        return (std::min)(n, (std::max)(share, std::size_t{short_local > 0 ? 1u : 0u}));
    }

    template <class Backend, class P>
    requires carries<P, hidden_states<typename P::element>>
    void score(const Backend& exec, const P& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        validate(weights, p.shape);
        validate(static_cast<const hidden_states<typename P::element>&>(p), p);
        detail::check(short_local >= 0 && short_local <= 1, "sink_gate has short_local ", short_local,
                      "; it must lie in [0, 1]");
        detail::check(p.tokens() == 0 || p.hidden.width == weights.model_dim, "hidden states of ", p.hidden.width,
                      " channels meet a gate for ", weights.model_dim);
        const std::size_t width = weights.gate_dim;
        const std::size_t group = p.shape.group();
        const std::size_t tile = (std::min)(detail::scoring::tile_tokens, p.tokens());
        const auto part = [](std::span<const float> all, std::size_t piece, std::size_t size) {
            return all.subspan(piece * size, size);
        };
        const auto query_weights = part(weights.query_projection, kv_head, group * width * weights.model_dim);
        const auto query_bias = part(weights.query_bias, kv_head, group * width);
        const auto key_weights = part(weights.key_projection, kv_head, width * weights.model_dim);
        std::vector<std::vector<float>> queries(workers(exec), std::vector<float>(tile * group * width));
        std::vector<std::vector<float>> keys(workers(exec), std::vector<float>(tile * width));
        detail::scoring::hidden_tiles(
            exec, p.hidden, [&](std::size_t first, const rows<float>& hidden, std::size_t worker) {
                const auto q = detail::scoring::first_rows(queries[worker], hidden.count, group * width);
                const auto k = detail::scoring::first_rows(keys[worker], hidden.count, width);
                detail::scoring::linear(hidden, query_weights, query_bias, q);
                detail::scoring::linear(hidden, key_weights, {}, k);
                for (std::size_t t = 0; t < hidden.count; ++t) {
                    double sum = 0;
                    for (std::size_t g = 0; g < group; ++g) {
                        sum += gate(kv_head, kv_head * group + g, q.row(t).data() + g * width, k.row(t).data());
                    }
                    out[first + t] = static_cast<float>(sum / static_cast<double>(group));
                }
            });
        std::fill_n(out.begin(), (std::min)(sink, out.size()), 1.0f);
        std::fill_n(out.rbegin(), local_of(out.size()), 1.0f);
    }

private:
    // sqrt(mean x^2 + epsilon)
    [[nodiscard]] double length_of(const float* x) const {
        double square = 0;
        for (std::size_t c = 0; c < weights.gate_dim; ++c) {
            square += static_cast<double>(x[c]) * static_cast<double>(x[c]);
        }
        return std::sqrt(square / static_cast<double>(weights.gate_dim) + static_cast<double>(weights.norm_epsilon));
    }

    [[nodiscard]] double gate(std::size_t kv_head, std::size_t query_head, const float* q, const float* k) const {
        const std::size_t width = weights.gate_dim;
        const double scale = 1 / (length_of(q) * std::sqrt(static_cast<double>(width)));
        double logit = 0;
        for (std::size_t c = 0; c < width; ++c) {
            logit += static_cast<double>(q[c]) * static_cast<double>(weights.query_norm[c]) *
                     static_cast<double>(k[c]) * static_cast<double>(weights.key_norm[c]);
        }
        logit = logit * scale / length_of(k) + static_cast<double>(weights.bias[query_head]);
        double others = 0;
        for (std::size_t s = 0; s < weights.sinks; ++s) {
            const float* sink_key = weights.sink_keys.data() + (kv_head * weights.sinks + s) * width;
            double base = 0;
            for (std::size_t c = 0; c < width; ++c) {
                base += static_cast<double>(q[c]) * static_cast<double>(weights.query_norm[c]) *
                        static_cast<double>(sink_key[c]);
            }
            others += std::exp(base * scale - logit);
        }
        return 1 / (1 + others);
    }
};

}  // namespace verkv::inline v0
