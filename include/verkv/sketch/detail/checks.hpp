// What sketches check at their boundary, and how they make room.
#pragma once

#include <algorithm>
#include <cstddef>

#include "verkv/core/error.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0::detail {

/// Checks keys that a sketch is to take in. Throws invalid_argument for keys of another width and a null pointer.
template <class T>
void check_keys(rows<T> keys, std::size_t key_dim) {
    check(keys.width == key_dim, "keys have ", keys.width, " channels; the sketch is of keys of ", key_dim);
    check(keys.count == 0 || keys.data != nullptr, "null pointer for ", keys.count, " keys");
}

/// Checks that tokens can be erased. Throws invalid_argument unless first <= last <= tokens.
inline void check_range(std::size_t first, std::size_t last, std::size_t tokens) {
    check(first <= last && last <= tokens, "erase tokens ", first, " to ", last, " of a sketch of ", tokens);
}

/// Checks queries, and what is to be written for them, [queries.count, tokens].
/// Throws invalid_argument, naming the output by `what`, for queries of another width, an output of another shape, rows
/// of it that overlap, and null pointers.
template <class Out>
void check_output(rows<float> queries, matrix_view<Out> out, std::size_t key_dim, std::size_t tokens,
                  const char* what) {
    check(queries.width == key_dim, "queries have ", queries.width, " channels; the sketch is of keys of ", key_dim);
    check(out.rows == queries.count && out.columns == tokens, what, " are [", out.rows, ", ", out.columns, "] for ",
          queries.count, " queries and a sketch of ", tokens, " tokens");
    check(out.rows <= 1 || out.stride >= static_cast<std::ptrdiff_t>(out.columns), "rows of ", what, ", ", out.columns,
          " long, overlap with stride ", out.stride);
    check(queries.count == 0 || (queries.data != nullptr && (tokens == 0 || out.data != nullptr)),
          "estimate() got a null pointer for ", queries.count, " queries or their ", what);
}

/// Capacity for so many elements; twice the present one at least where it is to grow geometrically.
template <class V>
void make_room(V& v, std::size_t size, bool geometric) {
    if (size > v.capacity()) {
        v.reserve(geometric ? (std::max)(size, 2 * v.capacity()) : size);
    }
}

}  // namespace verkv::inline v0::detail
