// Logits of listed rows for all query heads of a group, on the CPU.
#pragma once

#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"

namespace verkv::inline v0 {
namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// scale * <q, k> for Heads query rows and Rows key rows: each key vector is converted once and meets all Heads queries
/// in registers. Sums run over channels in lane_count interleaved partial sums, the same for every Heads and Rows.
template <std::size_t Heads, std::size_t Rows, class T>
VERKV_ALWAYS_INLINE void score_tile(const rows<float>& queries, std::size_t first_head, float scale,
                                    const rows<T>& keys, std::size_t first_row, const matrix_view<float>& logits) {
    const float* q[Heads];
    const T* k[Rows];
    lanes sums[Heads][Rows];
    for (std::size_t h = 0; h < Heads; ++h) {
        q[h] = queries[first_head + h];
        for (std::size_t r = 0; r < Rows; ++r) {
            sums[h][r] = lanes{};
        }
    }
    for (std::size_t r = 0; r < Rows; ++r) {
        k[r] = keys[first_row + r];
    }
    const std::size_t width = keys.width;
    const std::size_t whole = width - width % lane_count;
    for (std::size_t c = 0; c < whole; c += lane_count) {
        lanes key[Rows];
        for (std::size_t r = 0; r < Rows; ++r) {
            key[r] = load(k[r] + c);
        }
        for (std::size_t h = 0; h < Heads; ++h) {
            const lanes query = load(q[h] + c);
            for (std::size_t r = 0; r < Rows; ++r) {
                sums[h][r] += query * key[r];
            }
        }
    }
    if (whole < width) {
        for (std::size_t h = 0; h < Heads; ++h) {
            const lanes query = load_first(q[h] + whole, width - whole);
            for (std::size_t r = 0; r < Rows; ++r) {
                sums[h][r] += query * load_first(k[r] + whole, width - whole);
            }
        }
    }
    for (std::size_t h = 0; h < Heads; ++h) {
        float* out = logits.row(first_head + h).data() + first_row;
        if constexpr (Rows == 4) {
            sum_four(sums[h][0], sums[h][1], sums[h][2], sums[h][3], out);
        } else {
            for (std::size_t r = 0; r < Rows; ++r) {
                out[r] = sum(sums[h][r]);
            }
        }
        for (std::size_t r = 0; r < Rows; ++r) {
            out[r] *= scale;
        }
    }
}

template <std::size_t Heads, class T>
void score_heads(const rows<float>& queries, std::size_t first_head, float scale, const rows<T>& keys,
                 const matrix_view<float>& logits) {
    constexpr std::size_t tile = 4;
    // Rows from a list lie anywhere: ask for those that come next.
    constexpr std::size_t ahead = 16;
    const auto prefetch = [&](std::size_t row) {
        const char* at = reinterpret_cast<const char*>(keys[row]);
        for (std::size_t byte = 0; byte < keys.width * sizeof(T); byte += 64) {
            __builtin_prefetch(at + byte);
        }
    };
    std::size_t i = 0;
    for (; i + tile <= keys.count; i += tile) {
        for (std::size_t row = i + ahead; keys.ids && row < smaller(i + ahead + tile, keys.count); ++row) {
            prefetch(row);
        }
        score_tile<Heads, tile>(queries, first_head, scale, keys, i, logits);
    }
    for (; i < keys.count; ++i) {
        score_tile<Heads, 1>(queries, first_head, scale, keys, i, logits);
    }
}

/// score_rows() without its checks.
template <class T>
void score_blocks(const rows<float>& queries, float scale, const rows<T>& keys, const matrix_view<float>& logits) {
    // A block of keys stays in the cache while the heads take it four at a time.
    constexpr std::size_t block = 64;
    for (std::size_t first = 0; first < keys.count; first += block) {
        const std::size_t n = first + block <= keys.count ? block : keys.count - first;
        const rows<T> part = keys.slice(first, n);
        const matrix_view<float> out{logits.data + first, logits.rows, n, logits.stride};
        std::size_t h = 0;
        for (; h + 4 <= queries.count; h += 4) {
            score_heads<4>(queries, h, scale, part, out);
        }
        switch (queries.count - h) {
            case 3:
                score_heads<3>(queries, h, scale, part, out);
                break;
            case 2:
                score_heads<2>(queries, h, scale, part, out);
                break;
            case 1:
                score_heads<1>(queries, h, scale, part, out);
                break;
            default:
                break;
        }
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Logits of key rows for the query heads of a group: logits[g][i] = scale * <q_g, k_i>.
/// queries [G, d], keys [n, d] (listed or strided), logits [G, n]. Precondition (not checked): listed rows exist.
/// O(G n d); reads each key from memory once for the whole group.
/// Products and sums in float over lane_count interleaved partial sums: error at most (d / lane_count + 5) u sum|q_c
/// k_c|, u = 2^-24. A row's result does not depend on the rows around it.
/// Throws invalid_argument when shapes disagree, for null pointers, and for rows that overlap.
template <storage T>
void score_rows(const cpu&, rows<float> queries, float scale, rows<T> keys, matrix_view<float> logits) {
    detail::check(queries.width == keys.width, "queries of ", queries.width, " channels meet keys of ", keys.width);
    detail::check(logits.rows == queries.count && logits.columns == keys.count, "logits [", logits.rows, ", ",
                  logits.columns, "] for ", queries.count, " queries and ", keys.count, " keys");
    validate(queries, "queries");
    validate(keys, "keys");
    validate(logits, "logits");
    detail::score_blocks(queries, scale, keys, logits);
}

}  // namespace verkv::inline v0
