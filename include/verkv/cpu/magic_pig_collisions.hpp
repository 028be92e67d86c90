// Kernel of the MagicPIG tables on the CPU: in how many tables each token shares a query's bucket.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/hash_buckets.hpp"
#include "verkv/cpu/lanes.hpp"

namespace verkv::inline v0 {

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

// As wide as a register.
using bucket_lanes = std::uint16_t __attribute__((vector_size(VERKV_LANES_WIDTH * 4)));

/// Collisions of the tokens of a block, all 64 of them. query: a bucket for each table.
inline void count_block(const hash_buckets& s, const std::uint16_t* query, std::size_t block,
                        std::uint16_t* counts) noexcept {
    constexpr std::size_t block_tokens = hash_buckets::block_tokens;
    constexpr std::size_t vectors = block_tokens * sizeof(std::uint16_t) / sizeof(bucket_lanes);
    bucket_lanes sums[vectors] = {};
    const std::uint16_t* from = s.buckets + block * s.tables * block_tokens;
    for (std::size_t l = 0; l < s.tables; ++l, from += block_tokens) {
        for (std::size_t v = 0; v < vectors; ++v) {
            bucket_lanes bucket;
            std::memcpy(&bucket, from + v * (block_tokens / vectors), sizeof(bucket));
            sums[v] -= lanes_cast<bucket_lanes>(bucket == query[l]);  // all ones where they are equal
        }
    }
    std::memcpy(counts, sums, sizeof(sums));
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Counts in how many tables each token of MagicPIG tables shares a query's bucket. See magic_pig_tables::collisions().
/// Preconditions (unchecked): queries are as wide as the keys, counts [queries.count, s.tokens], rows that do not
/// overlap. Hashes a query on the caller's stack (about 45 KiB), then reads all buckets for it. No memory is allocated.
/// Throws nothing.
inline void magic_pig_collisions(const cpu& exec, const hash_buckets& s, rows<float> queries,
                                 matrix_view<std::uint16_t> counts) noexcept {
    if (s.tokens == 0) {
        return;
    }
    constexpr std::size_t block_tokens = hash_buckets::block_tokens;
    constexpr std::size_t at_once = 32;  // blocks
    const std::size_t blocks = (s.tokens + block_tokens - 1) / block_tokens;
    const auto all = static_cast<std::uint16_t>(s.tables);
    for (std::size_t q = 0; q < queries.count; ++q) {
        double row[hash_buckets::largest_key_dim];
        std::copy_n(queries[q], s.key_dim, row);
        std::uint16_t* const to = counts.row(q).data();
        if (!detail::finite_row(queries[q], s.key_dim)) {
            std::fill_n(to, s.tokens, all);
            continue;
        }
        std::uint16_t query[hash_buckets::most_groups];
        detail::hash_row(s, row, query, 1);
        for_each_task(exec, (blocks + at_once - 1) / at_once, [&](std::size_t task, std::size_t) {
            const std::size_t end = (std::min)(blocks, (task + 1) * at_once);
            for (std::size_t b = task * at_once; b < end; ++b) {
                std::uint16_t of_block[block_tokens];
                detail::count_block(s, query, b, of_block);
                const std::size_t first = b * block_tokens;
                const std::size_t n = (std::min)(block_tokens, s.tokens - first);
                for (std::size_t t = 0; t < n; ++t) {
                    const bool marked = s.marks[(first + t) / 32] >> (first + t) % 32 & 1u;
                    to[first + t] = marked ? all : of_block[t];
                }
            }
        });
    }
}

}  // namespace verkv::inline v0
