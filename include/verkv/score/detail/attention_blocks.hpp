// Softmax attention of many queries over all keys they may see, a tile at a time.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"

namespace verkv::inline v0::detail::scoring {

inline constexpr std::size_t tile_queries = 64;
inline constexpr std::size_t block_keys = 512;
inline constexpr std::size_t widest_packet = 16;  // floats; a row of exponentials is a whole number of them

using tile_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

[[nodiscard]] inline Eigen::Index at(std::size_t i) {
    return static_cast<Eigen::Index>(i);
}

template <class T>
void widen(const T* from, std::size_t width, float factor, float* to) {
    for (std::size_t c = 0; c < width; ++c) {
        to[c] = to_float(from[c]) * factor;
    }
}

// Number of tokens at or before a position: what a query there may see.
[[nodiscard]] inline std::size_t tokens_until(std::span<const position_t> positions, std::int64_t position) {
    return static_cast<std::size_t>(std::upper_bound(positions.begin(), positions.end(), position,
                                                     [](std::int64_t a, position_t b) { return a < b; }) -
                                    positions.begin());
}

// Calls consume(query, first token, e, count, factor): e[i] * factor, i < count, is the attention that the query gives
// token first + i, a softmax over all tokens at or before its position. Calls for one token block come from one task
// and in order of the queries; different blocks may run at once.
//
// Memory: a tile of 64 queries x n floats, and a block of keys a worker, whatever the number of queries; every key is
// read once a tile. Float; the denominator is summed in double. Blocks are cut at fixed tokens and rows are copied
// into our own aligned memory, so neither threads nor the caller's strides change a bit. A NaN among the logits that a
// query sees makes its factor NaN.
template <class Backend, class T, class Consume>
void attention_blocks(const Backend& exec, const rows<T>& keys, std::span<const position_t> positions,
                      std::span<const T* const> queries, std::span<const position_t> query_positions, float scale,
                      Consume&& consume) {
    const std::size_t n = positions.size();
    const std::size_t blocks = (n + block_keys - 1) / block_keys;
    const std::size_t tile = (std::min)(tile_queries, queries.size());
    if (blocks == 0 || tile == 0) {
        return;
    }
    constexpr float lowest = std::numeric_limits<float>::lowest();
    tile_matrix weights(at(blocks * tile), at(block_keys));
    tile_matrix query_tile(at(tile), at(keys.width));
    std::vector<tile_matrix> key_blocks(workers(exec));
    for (auto& block : key_blocks) {
        block.resize(at((std::min)(block_keys, n)), at(keys.width));
    }
    std::vector<float> peak(blocks * tile);
    std::vector<double> mass(blocks * tile);
    std::vector<std::size_t> visible(tile);

    for (std::size_t start = 0; start < queries.size(); start += tile) {
        const std::size_t count = (std::min)(tile, queries.size() - start);
        std::size_t most_visible = 0;
        for (std::size_t j = 0; j < count; ++j) {
            widen(queries[start + j], keys.width, scale, query_tile.row(at(j)).data());
            visible[j] = tokens_until(positions, query_positions[start + j]);
            most_visible = (std::max)(most_visible, visible[j]);
        }
        const std::size_t seen_blocks = (most_visible + block_keys - 1) / block_keys;
        const auto seen = [&](std::size_t j, std::size_t first) {
            return visible[j] > first ? (std::min)(visible[j] - first, block_keys) : 0;
        };

        for_each_task(exec, seen_blocks, [&](std::size_t b, std::size_t worker) {
            const std::size_t first = b * block_keys;
            const std::size_t length = (std::min)(block_keys, n - first);
            tile_matrix& key_block = key_blocks[worker];
            for (std::size_t i = 0; i < length; ++i) {
                widen(keys[first + i], keys.width, 1.0f, key_block.row(at(i)).data());
            }
            weights.block(at(b * tile), 0, at(count), at(length)).noalias() =
                query_tile.topRows(at(count)) * key_block.topRows(at(length)).transpose();
            for (std::size_t j = 0; j < count; ++j) {
                float* row = weights.row(at(b * tile + j)).data();
                const std::size_t known = seen(j, first);
                float top = lowest;
                double sum = 0;
                if (known > 0) {
                    // A finite floor keeps -infinity - -infinity out of a block of nothing else.
                    top = larger(lowest, Eigen::Map<const Eigen::ArrayXf>(row, at(known)).maxCoeff());
                    // Whole packets only: Eigen's exp of a packet and std::exp of a tail can differ in the last bit.
                    const std::size_t padded = (known + widest_packet - 1) / widest_packet * widest_packet;
                    std::fill(row + known, row + padded, top);
                    Eigen::Map<Eigen::ArrayXf, Eigen::AlignedMax> packets(row, at(padded));
                    packets = (packets - top).exp();
                    std::fill(row + known, row + padded, 0.0f);
                    sum = packets.template cast<double>().sum();
                }
                peak[b * tile + j] = top;
                mass[b * tile + j] = sum;
            }
        });

        // From weights relative to each block's peak to factors relative to the row's: kept in `mass`.
        for (std::size_t j = 0; j < count; ++j) {
            float top = lowest;
            for (std::size_t b = 0; b < seen_blocks; ++b) {
                top = larger(top, peak[b * tile + j]);
            }
            double total = 0;
            for (std::size_t b = 0; b < seen_blocks; ++b) {
                const double shift = std::exp(static_cast<double>(peak[b * tile + j]) - static_cast<double>(top));
                total += mass[b * tile + j] * shift;
                mass[b * tile + j] = shift;
            }
            for (std::size_t b = 0; b < seen_blocks; ++b) {
                mass[b * tile + j] /= total;
            }
        }

        for_each_task(exec, seen_blocks, [&](std::size_t b, std::size_t) {
            const std::size_t first = b * block_keys;
            for (std::size_t j = 0; j < count; ++j) {
                const std::size_t known = seen(j, first);
                if (known > 0) {
                    const float* row = weights.row(at(b * tile + j)).data();
                    consume(start + j, first, row, known, static_cast<float>(mass[b * tile + j]));
                }
            }
        });
    }
}

}  // namespace verkv::inline v0::detail::scoring
