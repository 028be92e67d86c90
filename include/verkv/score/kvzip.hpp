// Importance from a second pass that repeats the prompt.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "verkv/core/prompt_inputs.hpp"
#include "verkv/score/detail/attention_blocks.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/detail/quadratic_form.hpp"

namespace verkv::inline v0 {

namespace detail::scoring {

// Columns' factors of KVzip+: ||W_o v_i|| of each query head of a group and each token, [group, tokens].
// W_o v is not formed: ||W^T v||^2 = v^T (W W^T) v, and W W^T = C C^T is value_dim wide whatever the model's width.
template <class Backend, class T>
[[nodiscard]] std::vector<float> output_norms(const Backend& exec, const prompt<T>& p,
                                              const output_projection<T>& projection, std::size_t kv_head) {
    const std::size_t n = p.tokens();
    const std::size_t group = p.shape.group();
    const std::size_t width = p.shape.value_dim;
    std::vector<float> norms(group * n);
    for (std::size_t g = 0; g < group; ++g) {
        Eigen::MatrixXd weights(at(projection.output_weights.width), at(width));  // a channel a column
        for (std::size_t c = 0; c < width; ++c) {
            const T* row = projection.channel(kv_head * group + g, width, c);
            for (std::size_t m = 0; m < projection.output_weights.width; ++m) {
                weights(at(m), at(c)) = static_cast<double>(to_float(row[m]));
            }
        }
        Eigen::MatrixXd gram = Eigen::MatrixXd::Zero(at(width), at(width));
        gram.selfadjointView<Eigen::Lower>().rankUpdate(weights.transpose());
        const bool known = gram.allFinite();
        const tile_matrix factor =
            known ? tile_matrix(factor_of(gram).cast<float>()) : tile_matrix(tile_matrix::Zero(at(width), 0));
        float* to = norms.data() + g * n;
        for_each_product(exec, p.values[kv_head], factor, [&](std::size_t i, const float* product) {
            const double square = squared_length(product, static_cast<std::size_t>(factor.cols()));
            to[i] = known ? static_cast<float>(std::sqrt(square)) : std::numeric_limits<float>::quiet_NaN();
        });
    }
    return norms;
}

// Attention of the second pass, its maximum over the group's queries of a token's chunk. norms: [group, tokens] factors
// of columns, or empty for 1; rows are divided by the pass's hidden norms where norms are given.
template <class Backend, class T>
void repeated_attention(const Backend& exec, const prompt<T>& p, const repeat_pass<T>& pass, std::size_t kv_head,
                        std::span<const float> norms, std::span<float> out) {
    const std::size_t group = p.shape.group();
    const std::size_t width = p.shape.key_dim;
    const std::size_t n = p.tokens();
    std::vector<T> memory;
    std::vector<position_t> places;
    std::vector<const T*> queries;
    std::vector<position_t> query_places;
    for (const repeat_chunk& chunk : pass.chunks) {
        // Sinks, the chunk and the pass's own keys as one text, a query at the place of its own key.
        const std::size_t seen = pass.sinks + chunk.tokens;
        memory.clear();
        const auto gather = [&](const rows<T>& keys, std::size_t first, std::size_t count) {
            for (std::size_t i = first; i < first + count; ++i) {
                memory.insert(memory.end(), keys[i], keys[i] + width);
            }
        };
        gather(p.keys[kv_head], 0, pass.sinks);
        gather(p.keys[kv_head], chunk.first_token, chunk.tokens);
        gather(pass.pass_keys[kv_head], chunk.first_query, chunk.queries);
        places.resize(seen + chunk.queries);
        std::iota(places.begin(), places.end(), position_t{0});
        queries.clear();
        query_places.clear();
        for (std::size_t t = 0; t < chunk.queries; ++t) {
            for (std::size_t g = 0; g < group; ++g) {
                queries.push_back(pass.pass_queries.row(chunk.first_query + t, kv_head * group + g));
                query_places.push_back(places[seen + t]);
            }
        }
        attention_blocks(exec, contiguous_rows(std::span<const T>(memory), width), std::span<const position_t>(places),
                         std::span<const T* const>(queries), std::span<const position_t>(query_places),
                         p.shape.logit_scale(),
                         [&](std::size_t j, std::size_t first, const float* e, std::size_t count, float factor) {
                             const std::size_t begin = (std::max)(first, pass.sinks);
                             const std::size_t end = (std::min)(first + count, seen);
                             if (begin >= end) {
                                 return;
                             }
                             float* to = out.data() + chunk.first_token + (begin - pass.sinks);
                             const float* from = e + (begin - first);
                             const float* column = nullptr;
                             if (!norms.empty()) {
                                 factor /= pass.hidden_norms[chunk.first_query + j / group];
                                 column = norms.data() + (j % group) * n + chunk.first_token + (begin - pass.sinks);
                             }
                             for (std::size_t i = 0; i < end - begin; ++i) {
                                 const float a = column ? from[i] * factor * column[i] : from[i] * factor;
                                 to[i] = a > to[i] || a != a ? a : to[i];
                             }
                         });
    }
}

}  // namespace detail::scoring

/// Largest attention that a repetition of the text gives a token: KVzip (Kim et al. 2025, arXiv 2505.23416).
/// Score of token i: max over the query heads g of the group and the queries t of i's chunk of softmax(scale <q_t,g,
/// .>) at i, the softmax over the sinks' keys, the chunk's cached keys and the pass's own keys of the chunk up to t.
/// The first `sinks` tokens of the pass get 1. In [0, 1] without another softmax, so scores of heads and layers
/// compare: one threshold over all of them is the published rule (global_budgets, threshold_budgets). needs a
/// repeat_pass: who runs the model feeds, for each chunk of about 2,000 tokens, an instruction to repeat it and the
/// chunk, and hands over the queries and keys of that pass (docs/scorers.md). Chunks that see more keys give lower
/// attention: sizes should be alike.
/// Time O(T G (S + C + T) d) a chunk of C tokens and T queries, S sinks; reads the chunk's keys once for 64 query rows;
/// memory 64 (S + C + T) floats and the chunk's keys once more. Logits and exponentials in float, denominators in
/// double: relative error about |logit| units roundoff. Same bits for any number of threads and any strides. A NaN key
/// makes the scores of its chunk NaN (of all chunks, if it is a sink's), which to_importance() refuses.
/// Throws invalid_argument for a pass that does not fit the prompt (validate(), O(chunks + queries) a call).
struct kvzip {
    template <class T>
    using needs = inputs<repeat_pass<T>>;

    template <class Backend, class P>
    requires carries_needs_of<P, kvzip>
    void score(const Backend& exec, const P& p, std::size_t kv_head, std::span<float> out) const {
        using T = typename P::element;
        detail::scoring::check_kv_head(p, kv_head, out);
        const repeat_pass<T>& pass = p;
        const prompt<T>& text = p;
        validate(pass, text);
        std::fill(out.begin(), out.end(), 0.0f);
        detail::scoring::repeated_attention(exec, text, pass, kv_head, {}, out);
        std::fill_n(out.begin(), pass.sinks, 1.0f);
    }
};

/// KVzip+ (as KVzap trains on it, 2026, arXiv 2601.07891): kvzip, with each attention weighed by what it writes.
/// Score of token i: max over g and t of softmax(...)_i ||W_o,g v_i|| / ||h_t||, W_o,g the rows of the output
/// projection that belong to query head g, h_t the hidden state of query t (kvpress takes what enters the attention,
/// behind the layer's norm; pass.hidden_norms say). Sinks get max(1, largest score). Not in [0, 1]: proportional()
/// keeps ratios. needs a repeat_pass with hidden_norms and the output_projection. Beside kvzip's: time O(G (D d_v^2 + n
/// d_v^2)), D the model's width, by a Cholesky factor of W_o,g W_o,g^T in double and products with values in float;
/// memory G n floats. A NaN value spoils its own token. Throws what kvzip throws, and invalid_argument for a pass
/// without norms or a projection that does not fit.
struct kvzip_plus {
    template <class T>
    using needs = inputs<repeat_pass<T>, output_projection<T>>;

    template <class Backend, class P>
    requires carries_needs_of<P, kvzip_plus>
    void score(const Backend& exec, const P& p, std::size_t kv_head, std::span<float> out) const {
        using T = typename P::element;
        detail::scoring::check_kv_head(p, kv_head, out);
        const repeat_pass<T>& pass = p;
        const output_projection<T>& projection = p;
        const prompt<T>& text = p;
        validate(pass, text);
        validate(projection, text);
        detail::check(pass.hidden_norms.size() == pass.pass_queries.tokens, "kvzip_plus needs the norms of ",
                      pass.pass_queries.tokens, " hidden states of the second pass; ", pass.hidden_norms.size(),
                      " were given");
        const std::vector<float> norms = detail::scoring::output_norms(exec, text, projection, kv_head);
        std::fill(out.begin(), out.end(), 0.0f);
        detail::scoring::repeated_attention(exec, text, pass, kv_head, norms, out);
        float largest = 1;
        for (std::size_t i = pass.sinks; i < out.size(); ++i) {
            largest = std::isfinite(out[i]) ? (std::max)(largest, out[i]) : largest;
        }
        std::fill_n(out.begin(), pass.sinks, largest);
    }
};

}  // namespace verkv::inline v0
