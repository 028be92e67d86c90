// What prefill leaves behind for a scorer to look at.
#pragma once

#include <span>

#include "verkv/core/geometry.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0 {

/// A prompt as a scorer sees it: the keys and values of all KV heads, and the queries that the caller kept.
template <class T>
struct prompt {
    using element = T;

    geometry shape;
    std::span<const rows<T>> keys;                ///< a KV head each: [token, key_dim], rotated
    std::span<const rows<T>> values;              ///< a KV head each: [token, value_dim]
    std::span<const position_t> positions;        ///< of the tokens, ascending
    heads_view<T> queries;                        ///< [kept query, query head, key_dim], rotated; may be empty
    std::span<const position_t> query_positions;  ///< of the kept queries, ascending

    /// Number of tokens.
    [[nodiscard]] std::size_t tokens() const { return positions.size(); }
};

/// Checks that the parts of a prompt belong together.
/// Throws invalid_argument where counts or widths differ, positions do not ascend, or rows are missing.
template <class T>
void validate(const prompt<T>& p) {
    validate(p.shape);
    detail::check(p.keys.size() == p.shape.kv_heads && p.values.size() == p.shape.kv_heads, "prompt has keys of ",
                  p.keys.size(), " and values of ", p.values.size(), " KV heads; the geometry says ", p.shape.kv_heads);
    for (std::size_t h = 0; h < p.shape.kv_heads; ++h) {
        detail::check(p.keys[h].count == p.tokens() && p.values[h].count == p.tokens(), "KV head ", h, " has ",
                      p.keys[h].count, " keys and ", p.values[h].count, " values; there are ", p.tokens(),
                      " positions");
        detail::check(p.keys[h].width == p.shape.key_dim && p.values[h].width == p.shape.value_dim, "KV head ", h,
                      " has keys of ", p.keys[h].width, " and values of ", p.values[h].width,
                      " channels; the geometry says ", p.shape.key_dim, " and ", p.shape.value_dim);
        detail::check(p.tokens() == 0 || (p.keys[h].data != nullptr && p.values[h].data != nullptr), "KV head ", h,
                      ": null pointer for the rows of ", p.tokens(), " tokens");
    }
    for (std::size_t i = 1; i < p.positions.size(); ++i) {
        detail::check(p.positions[i - 1] < p.positions[i], "token ", i, " has position ", p.positions[i],
                      ", not above ", p.positions[i - 1]);
    }
    detail::check(p.queries.tokens == p.query_positions.size(), p.queries.tokens, " kept queries have ",
                  p.query_positions.size(), " positions");
    if (p.queries.tokens > 0) {
        validate(p.queries, "queries");
        detail::check(p.queries.heads == p.shape.query_heads && p.queries.width == p.shape.key_dim,
                      "kept queries have ", p.queries.heads, " heads of ", p.queries.width,
                      " channels; the geometry says ", p.shape.query_heads, " of ", p.shape.key_dim);
    }
    for (std::size_t i = 1; i < p.query_positions.size(); ++i) {
        detail::check(p.query_positions[i - 1] < p.query_positions[i], "kept query ", i, " has position ",
                      p.query_positions[i], ", not above ", p.query_positions[i - 1]);
    }
}

}  // namespace verkv::inline v0
