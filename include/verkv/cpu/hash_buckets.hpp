// Keys hashed by random hyperplanes: how their buckets lie in memory, and the buckets of a row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/rotated_estimate.hpp"

namespace verkv::inline v0 {

/// Buckets of keys in several tables, as they lie in memory.
/// A table has `planes` hyperplanes; bit p of a key's bucket is set where <w_p, key> >= 0. Blocks of 64 tokens,
/// [block][table][64].
struct hash_buckets {
    static constexpr std::size_t block_tokens = 64;
    static constexpr std::size_t largest_key_dim = 1024;
    static constexpr std::size_t most_planes = 16;    ///< of a table
    static constexpr std::size_t most_groups = 1024;  ///< tables ceil(planes / 4)
    static constexpr std::size_t group_planes = 4;

    const float* normals = nullptr;          ///< transposed: [channel][table * planes + plane], padded_planes wide
    const std::uint16_t* buckets = nullptr;  ///< [block][table][64]
    const std::uint32_t* marks = nullptr;    ///< bit t % 32 of word t / 32: the key was not finite
    std::size_t tokens = 0;
    std::size_t key_dim = 0;
    std::size_t tables = 0;
    std::size_t planes = 0;         ///< of a table
    std::size_t padded_planes = 0;  ///< tables * planes rounded up to 16; the normals there are 0

    /// Groups of four planes that a table has; the last one may have fewer.
    [[nodiscard]] std::size_t groups() const noexcept { return (planes + group_planes - 1) / group_planes; }
};

namespace detail {
inline namespace VERKV_LANES_NAMESPACE {

/// <w, row> of all planes of all tables, in double. out [padded_planes], at least most_groups * group_planes long.
inline void project(const hash_buckets& s, const double* row, double* out) noexcept {
    rotate(s.normals, s.key_dim, s.padded_planes, row, out);
}

/// Buckets of a row in all tables, `stride` elements apart.
inline void hash_row(const hash_buckets& s, const double* row, std::uint16_t* out, std::size_t stride) noexcept {
    alignas(64) double projected[hash_buckets::most_groups * hash_buckets::group_planes];
    project(s, row, projected);
    for (std::size_t l = 0; l < s.tables; ++l) {
        unsigned bucket = 0;
        for (std::size_t p = 0; p < s.planes; ++p) {
            bucket |= static_cast<unsigned>(projected[l * s.planes + p] >= 0) << p;
        }
        out[l * stride] = static_cast<std::uint16_t>(bucket);
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail
}  // namespace verkv::inline v0
