// Views on the caller's memory: nothing here owns or copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <type_traits>

#include "verkv/core/detail/product.hpp"
#include "verkv/core/error.hpp"

namespace verkv::inline v0 {

using token_index = std::uint32_t;  ///< index of a token among the tokens that a request holds, 0 ... n-1
using row_id = std::uint32_t;       ///< index of a row in a pool
using position_t = std::int32_t;    ///< position of a token in its text: stored, never derived from an index

namespace detail {

/// Whether two spans share no byte.
template <class A, class B>
[[nodiscard]] bool disjoint(std::span<A> a, std::span<B> b) {
    // std::less orders pointers into different arrays, too.
    const std::less_equal<const void*> up_to;
    return a.empty() || b.empty() || up_to(a.data() + a.size(), b.data()) || up_to(b.data() + b.size(), a.data());
}

/// Whether two spans are one: memory that may be read and written element by element.
template <class A, class B>
[[nodiscard]] bool same(std::span<A> a, std::span<B> b) {
    return static_cast<const void*>(a.data()) == static_cast<const void*>(b.data()) && a.size_bytes() == b.size_bytes();
}

}  // namespace detail

/// Rows of equal width: row i starts at data + (ids ? ids[i] : i) * stride. Offsets are 64 bits wide.
template <class T>
struct rows {
    const T* data = nullptr;
    std::ptrdiff_t stride = 0;    ///< elements from one row to the next
    std::size_t count = 0;        ///< number of rows
    std::size_t width = 0;        ///< elements of a row
    const row_id* ids = nullptr;  ///< which rows, in which order; null for 0 ... count-1

    [[nodiscard]] const T* operator[](std::size_t i) const {
        return data + static_cast<std::ptrdiff_t>(ids ? ids[i] : i) * stride;
    }

    /// Rows first ... first + n - 1 of these.
    [[nodiscard]] rows slice(std::size_t first, std::size_t n) const {
        rows part = *this;
        part.count = n;
        if (ids) {
            part.ids = ids + first;
        } else {
            part.data = data + static_cast<std::ptrdiff_t>(first) * stride;
        }
        return part;
    }
};

/// Rows that lie one after the other.
/// Throws invalid_argument when the span's length is no multiple of width.
template <class T>
[[nodiscard]] rows<std::remove_const_t<T>> contiguous_rows(std::span<T> data, std::size_t width) {
    detail::check(width > 0 && data.size() % width == 0, data.size(), " elements are no whole number of rows of ",
                  width);
    return {data.data(), static_cast<std::ptrdiff_t>(width), data.size() / width, width, nullptr};
}

/// A writable matrix, row-major with a stride.
template <class T>
struct matrix_view {
    T* data = nullptr;
    std::size_t rows = 0;
    std::size_t columns = 0;
    std::ptrdiff_t stride = 0;  ///< elements from one row to the next

    [[nodiscard]] std::span<T> row(std::size_t i) const {
        return {data + static_cast<std::ptrdiff_t>(i) * stride, columns};
    }
};

/// A matrix whose rows lie one after the other.
/// Throws invalid_argument when the span's length is not rows * columns, whatever that product is.
template <class T>
[[nodiscard]] matrix_view<T> matrix_of(std::span<T> data, std::size_t rows, std::size_t columns) {
    const std::size_t elements = detail::product("a matrix", rows, columns);
    detail::check(data.size() == elements && columns <= detail::farthest, "a matrix [", rows, ", ", columns, "] has ",
                  elements, " elements; the span has ", data.size());
    return {data.data(), rows, columns, static_cast<std::ptrdiff_t>(columns)};
}

/// Rows of several heads, [token, head, channel], with the caller's strides (channels are adjacent).
template <class T>
struct heads_view {
    const T* data = nullptr;
    std::size_t tokens = 0;
    std::size_t heads = 0;
    std::size_t width = 0;
    std::ptrdiff_t token_stride = 0;  ///< elements from a token to the next
    std::ptrdiff_t head_stride = 0;   ///< elements from a head to the next

    /// Row of one token and head.
    [[nodiscard]] const T* row(std::size_t token, std::size_t head) const {
        return data + static_cast<std::ptrdiff_t>(token) * token_stride +
               static_cast<std::ptrdiff_t>(head) * head_stride;
    }

    /// All heads' rows of one token: the queries of a decode step, say.
    [[nodiscard]] rows<T> token(std::size_t t) const {
        return {data + static_cast<std::ptrdiff_t>(t) * token_stride, head_stride, heads, width, nullptr};
    }

    /// Tokens first ... first + n - 1 of these.
    [[nodiscard]] heads_view slice(std::size_t first, std::size_t n) const {
        heads_view part = *this;
        part.data = data + static_cast<std::ptrdiff_t>(first) * token_stride;
        part.tokens = n;
        return part;
    }

    /// All tokens' rows of one head.
    [[nodiscard]] rows<T> head(std::size_t h) const {
        return {data + static_cast<std::ptrdiff_t>(h) * head_stride, token_stride, tokens, width, nullptr};
    }
};

/// View of a dense array [token, head, channel].
/// Throws invalid_argument when the span's length is not tokens * heads * width, whatever that product is.
template <class T>
[[nodiscard]] heads_view<std::remove_const_t<T>> heads_of(std::span<T> data, std::size_t tokens, std::size_t heads,
                                                          std::size_t width) {
    const std::size_t elements = detail::product("an array", tokens, heads, width);
    const std::size_t of_token = detail::product("a token", heads, width);
    detail::check(data.size() == elements && width <= detail::farthest, "an array [", tokens, ", ", heads, ", ", width,
                  "] has ", elements, " elements; the span has ", data.size());
    return {
        data.data(), tokens, heads, width, static_cast<std::ptrdiff_t>(of_token), static_cast<std::ptrdiff_t>(width)};
}

/// Checks that no two rows of a view share memory, that the memory is there, and that pointers reach all of it.
/// O(1). Strides that are never used, of an axis with one entry, may be anything.
/// Throws invalid_argument, naming the view by `what`, for a null pointer, negative strides, overlapping rows, or rows
/// further apart than memory can be.
template <class T>
void validate(const heads_view<T>& v, const char* what) {
    if (v.tokens == 0 || v.heads == 0) {
        return;
    }
    detail::check(v.data != nullptr, what, ": null pointer for ", v.tokens, " tokens of ", v.heads, " heads");
    // Whether `inner` rows lie apart, and the other axis steps over all of them: by division, for products may wrap.
    const auto nested = [&](std::size_t inner, std::ptrdiff_t inner_stride, std::ptrdiff_t outer_stride) {
        const auto step = static_cast<std::size_t>(inner_stride);
        const auto over = static_cast<std::size_t>(outer_stride);
        return inner_stride >= 0 && outer_stride >= 0 && step >= v.width && over >= v.width &&
               step <= (over - v.width) / (inner - 1);
    };
    const auto apart = [&](std::ptrdiff_t stride) {
        return stride >= 0 && static_cast<std::size_t>(stride) >= v.width;
    };
    const bool fits = v.tokens == 1  ? v.heads == 1 || apart(v.head_stride)
                      : v.heads == 1 ? apart(v.token_stride)
                                     : nested(v.heads, v.head_stride, v.token_stride) ||
                                           nested(v.tokens, v.token_stride, v.head_stride);
    detail::check(fits, what, ": token stride ", v.token_stride, " and head stride ", v.head_stride, " make rows of ",
                  v.width, " elements overlap (", v.tokens, " tokens, ", v.heads, " heads)");
    const std::size_t of_token = detail::extent(what, v.heads, v.head_stride, v.width);
    (void)detail::product(what, detail::extent(what, v.tokens, v.token_stride, of_token), sizeof(T));
}

/// Checks that the memory of rows is there, that no two of them share any (unless a list says so), and that pointers
/// reach all of it. O(1); the list is not read: ids beyond the memory are not found.
/// Throws invalid_argument, naming the rows by `what`, for a null pointer, a stride below the width, or rows further
/// apart than memory can be. Without elements everything is sound.
template <class T>
void validate(const rows<T>& r, const char* what) {
    if (r.count == 0 || r.width == 0) {
        return;
    }
    detail::check(r.data != nullptr, what, ": null pointer for ", r.count, " rows of ", r.width);
    const bool apart = r.stride >= 0 && static_cast<std::size_t>(r.stride) >= r.width;
    detail::check(apart || r.count == 1 || r.ids != nullptr, what, ": stride ", r.stride, " makes ", r.count,
                  " rows of ", r.width, " elements overlap");
    if (r.ids == nullptr) {
        (void)detail::product(what, detail::extent(what, r.count, r.stride, r.width), sizeof(T));
    }
}

/// Checks that the memory of a matrix is there, that no two of its rows share any, and that pointers reach all of it.
/// O(1). Throws invalid_argument, naming the matrix by `what`, for a null pointer, a stride below the number of
/// columns, or rows further apart than memory can be. Without elements everything is sound.
template <class T>
void validate(const matrix_view<T>& m, const char* what) {
    validate(rows<std::remove_const_t<T>>{m.data, m.stride, m.rows, m.columns, nullptr}, what);
}

}  // namespace verkv::inline v0
