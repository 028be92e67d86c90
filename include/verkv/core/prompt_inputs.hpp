// What a scorer may look at beside a plain prompt: each input is a type, and a scorer's type says which it needs.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>

#include "verkv/core/prompt.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0 {

/// Hidden states of the prompt: what enters the projections of the layer's attention, normalised as the model does.
template <class T>
struct hidden_states {
    rows<T> hidden;  ///< [token, model_dim]
};

/// Weights W_o that take the outputs of all query heads back to the model's width.
template <class T>
struct output_projection {
    rows<T>
        output_weights;  ///< [query_heads * value_dim, model_dim]: a row for each input channel (torch's transposed)

    /// Row of one channel of one query head.
    [[nodiscard]] const T* channel(std::size_t query_head, std::size_t value_dim, std::size_t c) const {
        return output_weights[query_head * value_dim + c];
    }
};

/// A piece of the prompt that a second pass repeats, and which of the pass's queries did.
struct repeat_chunk {
    std::size_t first_token = 0;  ///< of the prompt, by index
    std::size_t tokens = 0;
    std::size_t first_query = 0;  ///< of the pass
    std::size_t queries = 0;      ///< instruction and repeated text
};

/// A second pass over the prompt, as KVzip makes it: the model is told to repeat a chunk of the text and is fed it.
/// Query j of a chunk sees the sinks, the chunk's cached tokens, and keys of the pass: those of its chunk up to its
/// own.
template <class T>
struct repeat_pass {
    std::span<const repeat_chunk> chunks;  ///< in order: every token from `sinks` on in one of them
    heads_view<T> pass_queries;            ///< [query of the pass, query head, key_dim], rotated
    std::span<const rows<T>> pass_keys;    ///< a KV head each: [query of the pass, key_dim], rotated
    std::size_t sinks = 0;                 ///< first tokens of the prompt that every chunk sees, a system prompt say
    std::span<const float> hidden_norms = {};  ///< [query of the pass], positive: ||h_t||; or empty
};

/// Checks that hidden states belong to a prompt: a row for each token.
/// O(1). Throws invalid_argument for another number of rows, a width of 0, or rows that are missing or overlap.
template <class T>
void validate(const hidden_states<T>& h, const prompt<T>& p) {
    detail::check(h.hidden.count == p.tokens() && (h.hidden.width > 0 || p.tokens() == 0), "hidden states are [",
                  h.hidden.count, ", ", h.hidden.width, "]; the prompt has ", p.tokens(), " tokens");
    validate(h.hidden, "hidden states");
}

/// Checks that an output projection belongs to a prompt: a row for each channel of each query head.
/// O(1). Throws invalid_argument for another number of rows, a width of 0, or rows that are missing or overlap.
template <class T>
void validate(const output_projection<T>& o, const prompt<T>& p) {
    detail::check(o.output_weights.count == p.shape.query_heads * p.shape.value_dim && o.output_weights.width > 0,
                  "output projection is [", o.output_weights.count, ", ", o.output_weights.width, "]; ",
                  p.shape.query_heads, " query heads of ", p.shape.value_dim, " channels take ",
                  p.shape.query_heads * p.shape.value_dim, " rows");
    validate(o.output_weights, "output projection");
}

/// Checks that a second pass belongs to a prompt.
/// O(chunks + queries of the pass). Throws invalid_argument where shapes differ, rows are missing, chunks do not cover
/// the tokens behind the sinks one after the other, queries of chunks are none, overlap or do not exist, or a norm is
/// not positive.
template <class T>
void validate(const repeat_pass<T>& r, const prompt<T>& p) {
    const std::size_t queries = r.pass_queries.tokens;
    if (queries > 0) {
        validate(r.pass_queries, "queries of the second pass");
        detail::check(r.pass_queries.heads == p.shape.query_heads && r.pass_queries.width == p.shape.key_dim,
                      "queries of the second pass have ", r.pass_queries.heads, " heads of ", r.pass_queries.width,
                      " channels; the geometry says ", p.shape.query_heads, " of ", p.shape.key_dim);
    }
    detail::check(r.pass_keys.size() == p.shape.kv_heads, "the second pass has keys of ", r.pass_keys.size(),
                  " KV heads; the geometry says ", p.shape.kv_heads);
    for (std::size_t h = 0; h < r.pass_keys.size(); ++h) {
        detail::check(r.pass_keys[h].count == queries && (r.pass_keys[h].width == p.shape.key_dim || queries == 0),
                      "KV head ", h, " of the second pass has keys [", r.pass_keys[h].count, ", ", r.pass_keys[h].width,
                      "] for ", queries, " queries of ", p.shape.key_dim, " channels");
        validate(r.pass_keys[h], "keys of the second pass");
    }
    detail::check(r.sinks <= p.tokens(), r.sinks, " sinks of a prompt of ", p.tokens(), " tokens");
    std::size_t next_token = r.sinks;
    std::size_t next_query = 0;
    for (std::size_t i = 0; i < r.chunks.size(); ++i) {
        const repeat_chunk& c = r.chunks[i];
        detail::check(c.first_token == next_token && c.tokens > 0 && c.tokens <= p.tokens() - next_token, "chunk ", i,
                      " of the second pass has ", c.tokens, " tokens from ", c.first_token, " on; it has to go on at ",
                      next_token, " of ", p.tokens());
        detail::check(c.first_query >= next_query && c.queries > 0 && c.first_query <= queries &&
                          c.queries <= queries - c.first_query,
                      "chunk ", i, " of the second pass has ", c.queries, " queries from ", c.first_query,
                      " on; there are ", queries, ", and ", next_query, " are taken");
        next_token += c.tokens;
        next_query = c.first_query + c.queries;
    }
    detail::check(next_token == p.tokens(), "the second pass repeats ", next_token, " of ", p.tokens(),
                  " tokens, its sinks included");
    detail::check(r.hidden_norms.empty() || r.hidden_norms.size() == queries, r.hidden_norms.size(),
                  " norms of hidden states for ", queries, " queries of the second pass");
    for (std::size_t j = 0; j < r.hidden_norms.size(); ++j) {
        detail::check(std::isfinite(r.hidden_norms[j]) && r.hidden_norms[j] > 0, "norm of the hidden state of query ",
                      j, " of the second pass is ", r.hidden_norms[j], "; it must be positive");
    }
}

/// A prompt, and inputs beside it. What takes a prompt takes this too.
///
///     prompt_with<half, hidden_states<half>> p{plain, {hidden}};
template <class T, class... Inputs>
struct prompt_with : prompt<T>, Inputs... {};

/// A list of inputs.
template <class... Inputs>
struct inputs {};

/// A type that goes with a prompt of T as an input: validate(input, prompt) is there.
template <class Input, class T>
concept prompt_input = requires(const Input& i, const prompt<T>& p) {
    validate(i, p);
};

/// A prompt that has an input.
template <class P, class Input>
concept carries = std::derived_from<P, Input>;

namespace detail {

template <class S, class T>
struct needs_of {
    using type = inputs<>;
};

template <class S, class T>
requires requires {
    typename S::template needs<T>;
}
struct needs_of<S, T> {
    using type = typename S::template needs<T>;
};

template <class P, class List>
struct has_all;

template <class P, class... Inputs>
struct has_all<P, inputs<Inputs...>> : std::bool_constant<(carries<P, Inputs> && ...)> {};

}  // namespace detail

/// What a scorer needs beside a plain prompt of T: its member template `needs`, or nothing.
///
///     template <class T> using needs = inputs<hidden_states<T>, output_projection<T>>;   // in the scorer
template <class Scorer, class T>
using needs_of = typename detail::needs_of<Scorer, T>::type;

/// Whether a prompt has everything that a scorer needs.
template <class P, class Scorer>
concept carries_needs_of = detail::has_all<P, needs_of<Scorer, typename P::element>>::value;

namespace detail {

template <class P, class Input>
constexpr void require_input() {
    using T = typename P::element;
    if constexpr (std::same_as<Input, hidden_states<T>>) {
        static_assert(carries<P, Input>,
                      "this scorer needs hidden states: pass hidden_states<T>{rows} after the query positions");
    } else if constexpr (std::same_as<Input, output_projection<T>>) {
        static_assert(carries<P, Input>,
                      "this scorer needs the output projection: pass output_projection<T>{rows} "
                      "after the query positions");
    } else if constexpr (std::same_as<Input, repeat_pass<T>>) {
        static_assert(carries<P, Input>,
                      "this scorer needs a second pass over the prompt: pass repeat_pass<T>{...} "
                      "after the query positions");
    } else {
        static_assert(carries<P, Input>,
                      "this scorer needs an input of its own (see its member `needs`): pass it "
                      "after the query positions");
    }
}

template <class P, class... Inputs>
constexpr void require_inputs(inputs<Inputs...>) {
    (require_input<P, Inputs>(), ...);
}

}  // namespace detail

/// Refuses to compile where a prompt lacks an input that a scorer needs, and says what to pass.
template <class Scorer, class P>
constexpr void require_needs() {
    detail::require_inputs<P>(needs_of<Scorer, typename P::element>{});
}

}  // namespace verkv::inline v0
