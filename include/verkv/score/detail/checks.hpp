// What every scorer checks before it writes anything.
#pragma once

#include <cstddef>
#include <span>

#include "verkv/core/prompt.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0::detail::scoring {

template <class T>
void check_out(const prompt<T>& p, std::span<const float> out) {
    validate(p);
    check(out.size() == p.tokens(), "scores of ", p.tokens(), " tokens do not fit a span of ", out.size());
}

template <class T>
void check_query_head(const prompt<T>& p, std::size_t query_head, std::span<const float> out) {
    check_out(p, out);
    check(query_head < p.shape.query_heads, "there is no query head ", query_head, " among ", p.shape.query_heads);
}

template <class T>
void check_kv_head(const prompt<T>& p, std::size_t kv_head, std::span<const float> out) {
    check_out(p, out);
    check(kv_head < p.shape.kv_heads, "there is no KV head ", kv_head, " among ", p.shape.kv_heads);
}

template <class T>
void check_layer(const prompt<T>& p, matrix_view<float> out) {
    validate(p);
    check(out.rows == p.shape.kv_heads && out.columns == p.tokens(), "scores of ", p.shape.kv_heads, " KV heads and ",
          p.tokens(), " tokens do not fit a matrix [", out.rows, ", ", out.columns, "]");
    validate(out, "scores");
}

}  // namespace verkv::inline v0::detail::scoring
