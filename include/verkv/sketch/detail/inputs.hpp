// What sketches with certain bounds share: checks of what they are handed, and numbers that are never rounded down.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0::detail {

/// Throws invalid_argument unless keys are there and key_dim wide.
template <class T>
void check_sketched_keys(const rows<T>& keys, std::size_t key_dim) {
    check(keys.width == key_dim, "keys have ", keys.width, " channels; the sketch is of keys of ", key_dim);
    check(keys.count == 0 || keys.data != nullptr, "null pointer for ", keys.count, " keys");
}

/// Throws invalid_argument unless queries are key_dim wide, `out` has a row for each and a column for each token, and
/// the memory is there. `what` names `out`.
inline void check_estimates(const rows<float>& queries, std::size_t key_dim, const matrix_view<float>& out,
                            std::size_t tokens, const char* what) {
    check(queries.width == key_dim, "queries have ", queries.width, " channels; the sketch is of keys of ", key_dim);
    check(out.rows == queries.count && out.columns == tokens, what, " are [", out.rows, ", ", out.columns, "] for ",
          queries.count, " queries and a sketch of ", tokens, " tokens");
    check(out.rows < 2 || out.stride >= static_cast<std::ptrdiff_t>(out.columns), "rows of ", what, ", ", out.columns,
          " long, overlap with stride ", out.stride);
    check(queries.count == 0 || (queries.data != nullptr && (tokens == 0 || out.data != nullptr)),
          "estimate() got a null pointer for ", queries.count, " queries or their ", what);
}

/// Throws invalid_argument unless first <= last <= tokens.
inline void check_erased(std::size_t first, std::size_t last, std::size_t tokens) {
    check(first <= last && last <= tokens, "erase tokens ", first, " to ", last, " of a sketch of ", tokens);
}

/// Whether no element is NaN or infinite.
template <class T>
[[nodiscard]] bool all_finite(const T* row, std::size_t width) {
    float poison = 0;
    for (std::size_t c = 0; c < width; ++c) {
        poison += 0 * to_float(row[c]);
    }
    return poison == 0;
}

/// Room for so many elements; geometric: at least twice what there was, so that appending one by one stays linear.
template <class V>
void make_room_in(V& v, std::size_t size, bool geometric) {
    if (size > v.capacity()) {
        v.reserve(geometric && size < 2 * v.capacity() ? 2 * v.capacity() : size);
    }
}

/// Smallest float that is at least x; NaN stays NaN.
[[nodiscard]] inline float float_above(double x) {
    const auto nearest = static_cast<float>(x);
    return static_cast<double>(nearest) < x ? std::nextafter(nearest, std::numeric_limits<float>::infinity()) : nearest;
}

}  // namespace verkv::inline v0::detail
