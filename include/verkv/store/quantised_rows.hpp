// Rows in 8 or 4 bits an element: keys by channel over a group of tokens, values by token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/detail/product.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"

namespace verkv::inline v0 {

/// Which elements of a group share a zero and a step.
enum class quantised_axis {
    channel,  ///< those of a channel, over the tokens: for keys, whose channels differ in size
    token,    ///< those of a token, over its channels: for values
};

/// Shape of quantised rows.
struct quantised_shape {
    std::size_t width = 0;  ///< elements of a row, 1 ... 65536
    unsigned bits = 8;      ///< of an element's code, 4 or 8
    quantised_axis axis = quantised_axis::channel;

    /// Bytes of a row's codes: with 4 bits two elements a byte, the first one in the lower half.
    [[nodiscard]] std::size_t row_bytes() const noexcept { return (width * bits + 7) / 8; }

    /// Zeros, and as many steps, of a group of so many tokens.
    [[nodiscard]] std::size_t parameters(std::size_t tokens) const noexcept {
        return axis == quantised_axis::channel ? width : tokens;
    }

    /// Largest code.
    [[nodiscard]] unsigned levels() const noexcept { return (1u << bits) - 1; }

    friend bool operator==(const quantised_shape&, const quantised_shape&) = default;
};

/// Checks a shape. Throws invalid_argument for a width outside 1 ... 65536, other bits than 4 or 8, an unknown axis.
inline void validate(const quantised_shape& s) {
    detail::check(s.width >= 1 && s.width <= 65536, "quantised rows of ", s.width, " elements; they have 1 to 65536");
    detail::check(s.bits == 4 || s.bits == 8, "quantised rows of ", s.bits, " bits; they have 4 or 8");
    detail::check(s.axis == quantised_axis::channel || s.axis == quantised_axis::token, "quantised_axis is ",
                  static_cast<int>(s.axis), "; it must be channel or token");
}

/// A group of rows as codes, in the caller's memory: KIVI's form (Liu et al. 2024, arXiv 2402.02750).
/// x^ = zero + code step. Zero and step are floats, wide on purpose: a half overflows on the keys and values of sinks.
/// The copies that a view makes refer to the same memory.
struct quantised_rows {
    std::uint8_t* codes = nullptr;    ///< [token][row_bytes]
    float* zero = nullptr;            ///< [channel] or [token]
    float* step = nullptr;            ///< the same
    std::uint8_t* spoiled = nullptr;  ///< a bit for each token, lowest first: a row that is not finite
    std::size_t tokens = 0;
    quantised_shape shape;

    [[nodiscard]] bool is_spoiled(std::size_t token) const noexcept {
        return (spoiled[token / 8] >> (token % 8) & 1u) != 0;
    }
};

/// Floats of memory that a group of so many tokens takes: parameters, codes and a bit a token, rounded up.
/// 128 channels, 64 tokens: keys of 8 bits 2306, 144.1 bytes a token (of 256 in bf16); values of 4 bits 1154, 72.1.
/// Throws as validate(shape) does, and invalid_argument for more than memory can hold.
[[nodiscard]] inline std::size_t quantised_floats(const quantised_shape& shape, std::size_t tokens) {
    validate(shape);
    const std::size_t codes = detail::product("quantised rows", tokens, shape.row_bytes());
    detail::check(tokens <= detail::farthest / 16 && codes <= detail::farthest / 2, "quantised rows: ", tokens,
                  " rows of ", shape.width, " elements are more than memory can hold");
    return 2 * shape.parameters(tokens) + (codes + (tokens + 7) / 8 + sizeof(float) - 1) / sizeof(float);
}

/// A group of rows in memory of quantised_floats(shape, tokens) floats, whatever is in it.
/// Throws as quantised_floats() does, and invalid_argument for another length or a null pointer.
[[nodiscard]] inline quantised_rows quantised_rows_in(std::span<float> memory, const quantised_shape& shape,
                                                      std::size_t tokens) {
    const std::size_t floats = quantised_floats(shape, tokens);
    detail::check(memory.size() == floats && (floats == 0 || memory.data() != nullptr), tokens, " quantised rows of ",
                  shape.width, " elements take ", floats, " floats; the span has ", memory.size());
    quantised_rows out;
    const std::size_t parameters = shape.parameters(tokens);
    out.zero = memory.data();
    out.step = memory.data() + parameters;
    out.codes = reinterpret_cast<std::uint8_t*>(memory.data() + 2 * parameters);
    out.spoiled = out.codes + tokens * shape.row_bytes();
    out.tokens = tokens;
    out.shape = shape;
    return out;
}

namespace detail {

inline void check_quantised(const quantised_rows& r) {
    verkv::validate(r.shape);
    check(r.tokens == 0 || (r.codes != nullptr && r.zero != nullptr && r.step != nullptr && r.spoiled != nullptr),
          "quantised rows: null pointer for ", r.tokens, " rows of ", r.shape.width);
}

/// Zero and step from the least and the largest of some values, least > largest where there is none.
inline void set_quantiser(float least, float largest, unsigned levels, float& zero, float& step) {
    const bool any = least <= largest;
    zero = any ? least : 0.0f;
    step = any ? float_above((static_cast<double>(largest) - static_cast<double>(least)) / levels) : 0.0f;
}

/// Code of a value: the nearest one.
[[nodiscard]] inline unsigned quantised_code(float x, float zero, float step, unsigned levels) {
    if (!(step > 0)) {
        return 0;
    }
    const double ratio = (static_cast<double>(x) - static_cast<double>(zero)) / static_cast<double>(step);
    return static_cast<unsigned>((std::max)((std::min)(ratio + 0.5, static_cast<double>(levels)), 0.0));
}

/// How far what dequantise_rows() writes may be from what quantise_rows() was given: half a step, and the rounding of
/// zero + code step in float.
[[nodiscard]] inline double quantised_error(float zero, float step, unsigned levels) {
    const double range = static_cast<double>(levels) * static_cast<double>(step);
    const double largest = (std::max)(std::abs(static_cast<double>(zero)), std::abs(static_cast<double>(zero) + range));
    if ((std::max)(largest, range) > static_cast<double>((std::numeric_limits<float>::max)())) {
        return std::numeric_limits<double>::infinity();  // the last code may come back as infinity
    }
    return static_cast<double>(step) * (0.5 + 0x1p-30) + (range + largest) * 0x1.001p-24 + 0x1p-148;
}

}  // namespace detail

/// Quantises a group of rows. from [to.tokens, width], any storage.
/// zero is the least element that shares it, step the range over 2^bits - 1, rounded up, so that no code is clamped: |x
/// - x^| <= step / 2, and 2^-23 of the largest element for the rounding in dequantise_rows(). A row with NaN or
/// infinity is marked as spoiled and shares in no zero or step: it comes back as NaN, others as if it were not there.
/// Where elements that share a step are further apart than the largest float, large ones may come back as infinity, and
/// the bounds below are infinite.
/// Reads the rows twice; on the caller's thread. Deterministic, ties to the larger code. Throws invalid_argument for
/// other shapes and null pointers; then nothing is written.
template <storage T>
void quantise_rows(const cpu&, rows<T> from, const quantised_rows& to) {
    detail::check_quantised(to);
    const quantised_shape& shape = to.shape;
    detail::check(from.count == to.tokens && from.width == shape.width, "rows [", from.count, ", ", from.width,
                  "] for ", to.tokens, " quantised rows of ", shape.width, " elements");
    validate(from, "rows");
    constexpr float infinity = std::numeric_limits<float>::infinity();
    std::fill_n(to.spoiled, (to.tokens + 7) / 8, std::uint8_t{0});
    for (std::size_t t = 0; t < to.tokens; ++t) {
        if (!detail::finite_row(from[t], shape.width)) {
            to.spoiled[t / 8] = static_cast<std::uint8_t>(to.spoiled[t / 8] | 1u << (t % 8));
        }
    }
    // Least and largest of each group first, in the places of zero and step.
    const bool by_channel = shape.axis == quantised_axis::channel;
    const std::size_t parameters = shape.parameters(to.tokens);
    std::fill_n(to.zero, parameters, infinity);
    std::fill_n(to.step, parameters, -infinity);
    for (std::size_t t = 0; t < to.tokens; ++t) {
        for (std::size_t c = 0; c < shape.width && !to.is_spoiled(t); ++c) {
            const float x = to_float(from[t][c]);
            const std::size_t p = by_channel ? c : t;
            to.zero[p] = smaller(x, to.zero[p]);
            to.step[p] = larger(x, to.step[p]);
        }
    }
    for (std::size_t p = 0; p < parameters; ++p) {
        detail::set_quantiser(to.zero[p], to.step[p], shape.levels(), to.zero[p], to.step[p]);
    }
    std::fill_n(to.codes, to.tokens * shape.row_bytes(), std::uint8_t{0});
    for (std::size_t t = 0; t < to.tokens; ++t) {
        std::uint8_t* const codes = to.codes + t * shape.row_bytes();
        for (std::size_t c = 0; c < shape.width && !to.is_spoiled(t); ++c) {
            const std::size_t p = by_channel ? c : t;
            const unsigned code = detail::quantised_code(to_float(from[t][c]), to.zero[p], to.step[p], shape.levels());
            if (shape.bits == 8) {
                codes[c] = static_cast<std::uint8_t>(code);
            } else {
                codes[c / 2] = static_cast<std::uint8_t>(codes[c / 2] | code << (c % 2 * 4));
            }
        }
    }
}

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// Codes of lane_count elements from element c of a row on, as floats. c is a multiple of lane_count; with 4 bits two
/// lanes share a byte.
template <unsigned Bits>
VERKV_ALWAYS_INLINE lanes load_codes(const std::uint8_t* codes, std::size_t c) {
    if constexpr (Bits == 8) {
        byte_lanes bytes;
        std::memcpy(&bytes, codes + c, sizeof(bytes));
        return __builtin_convertvector(__builtin_convertvector(bytes, int_lanes), lanes);
    } else {
        std::uint8_t whole[lane_count];
        for (std::size_t i = 0; i < lane_count; ++i) {
            whole[i] = static_cast<std::uint8_t>(codes[c / 2 + i / 2] >> (i % 2 * 4) & 0xfu);
        }
        byte_lanes bytes;
        std::memcpy(&bytes, whole, sizeof(bytes));
        return __builtin_convertvector(__builtin_convertvector(bytes, int_lanes), lanes);
    }
}

/// One row; zero and step advance from channel to channel, or stand for the row.
template <unsigned Bits, bool ByChannel>
void dequantise_row(const std::uint8_t* codes, const float* zero, const float* step, std::size_t width,
                    float* out) noexcept {
    std::size_t c = 0;
    for (; c + lane_count <= width; c += lane_count) {
        const lanes z = ByChannel ? load(zero + c) : broadcast(*zero);
        const lanes s = ByChannel ? load(step + c) : broadcast(*step);
        store(out + c, z + load_codes<Bits>(codes, c) * s);
    }
    for (; c < width; ++c) {
        const unsigned code = Bits == 8 ? codes[c] : codes[c / 2] >> (c % 2 * 4) & 0xfu;
        out[c] = zero[ByChannel ? c : 0] + static_cast<float>(code) * step[ByChannel ? c : 0];
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Writes rows first ... first + out.rows - 1 as floats: out [any count, width].
/// zero + code step, in float; NaN throughout a spoiled row. Reads a row's codes once. Allocates nothing. Throws
/// invalid_argument for rows that the group does not have, another width, null pointers, and rows that overlap.
inline void dequantise_rows(const cpu&, const quantised_rows& from, std::size_t first, matrix_view<float> out) {
    detail::check_quantised(from);
    detail::check(first <= from.tokens && out.rows <= from.tokens - first && out.columns == from.shape.width, "rows ",
                  first, " to ", first + out.rows, " of ", out.columns, " elements, of ", from.tokens,
                  " quantised rows of ", from.shape.width);
    validate(out, "rows");
    const bool by_channel = from.shape.axis == quantised_axis::channel;
    for (std::size_t i = 0; i < out.rows; ++i) {
        const std::size_t t = first + i;
        const std::span<float> row = out.row(i);
        if (from.is_spoiled(t)) {
            std::fill(row.begin(), row.end(), std::numeric_limits<float>::quiet_NaN());
            continue;
        }
        const std::uint8_t* const codes = from.codes + t * from.shape.row_bytes();
        const std::size_t width = from.shape.width;
        if (from.shape.bits == 8 && by_channel) {
            detail::dequantise_row<8, true>(codes, from.zero, from.step, width, row.data());
        } else if (from.shape.bits == 8) {
            detail::dequantise_row<8, false>(codes, from.zero + t, from.step + t, width, row.data());
        } else if (by_channel) {
            detail::dequantise_row<4, true>(codes, from.zero, from.step, width, row.data());
        } else {
            detail::dequantise_row<4, false>(codes, from.zero + t, from.step + t, width, row.data());
        }
    }
}

/// A bound on how far the logit of any row of the group may be from that of the row it was made of, for certain.
/// |scale| sum_c |q_c| step_c / 2, and what rounding does to the row, (width + 8) 2^-24 |scale| sum_c |q_c| max |k^_c|
/// to score_rows(). query [width]. Spoiled rows are not counted. O(width), by token O(tokens + width). In double,
/// rounded up. Throws invalid_argument for a query of another width, and null pointers.
[[nodiscard]] inline double quantised_logit_bound(std::span<const float> query, float scale,
                                                  const quantised_rows& keys) {
    detail::check_quantised(keys);
    const quantised_shape& shape = keys.shape;
    detail::check(query.size() == shape.width, "a query of ", query.size(), " channels meets quantised rows of ",
                  shape.width);
    const double rounding = static_cast<double>(shape.width + 8) * 0x1p-24;
    const auto off = [&](std::size_t p) {
        const auto zero = static_cast<double>(keys.zero[p]);
        const double top = zero + static_cast<double>(shape.levels()) * static_cast<double>(keys.step[p]);
        return detail::quantised_error(keys.zero[p], keys.step[p], shape.levels()) +
               rounding * (std::max)(std::abs(zero), std::abs(top)) * (1 + 0x1p-20);
    };
    double sum = 0;
    double most = 0;
    const bool by_channel = shape.axis == quantised_axis::channel;
    for (std::size_t c = 0; c < shape.width; ++c) {
        sum += std::abs(static_cast<double>(query[c])) * (by_channel ? off(c) : 1.0);
    }
    for (std::size_t t = 0; t < keys.tokens && !by_channel; ++t) {
        most = (std::max)(most, off(t));
    }
    const double bound = by_channel ? sum : sum * most;
    return keys.tokens == 0 ? 0.0 : (std::abs(static_cast<double>(scale)) * bound + 0x1p-126) * (1 + 0x1p-30);
}

/// A bound on how far any row of the group may be from the one it was made of, ||v - v^||, for certain: the square root
/// of the summed squares of step / 2, rounding included. Spoiled rows are not counted. In double, rounded up. Throws
/// invalid_argument for null pointers.
[[nodiscard]] inline double quantised_value_bound(const quantised_rows& values) {
    detail::check_quantised(values);
    const bool by_channel = values.shape.axis == quantised_axis::channel;
    double sum = 0;
    double most = 0;
    for (std::size_t p = 0; p < values.shape.parameters(values.tokens) && values.tokens > 0; ++p) {
        const double error = detail::quantised_error(values.zero[p], values.step[p], values.shape.levels());
        sum += error * error;
        most = (std::max)(most, error);
    }
    const double bound = by_channel ? std::sqrt(sum) : most * std::sqrt(static_cast<double>(values.shape.width));
    return bound * (1 + 0x1p-30);
}

}  // namespace verkv::inline v0
