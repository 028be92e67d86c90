// Tables of random hyperplanes, and the buckets that keys fall in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/hash_buckets.hpp"
#include "verkv/sketch/detail/checks.hpp"
#include "verkv/sketch/detail/normal.hpp"
#include "verkv/sketch/detail/token_marks.hpp"

namespace verkv::inline v0::detail {

/// Checks the shape of hash tables.
/// Throws invalid_argument, naming them by `what`, for a key_dim outside 1 ... 1024, planes outside 1 ... 16, no
/// tables, and more than 1024 groups of four planes, tables ceil(planes / 4).
inline void validate_tables(std::size_t key_dim, std::size_t planes, std::size_t tables, const char* what) {
    check(key_dim >= 1 && key_dim <= hash_buckets::largest_key_dim, what, " of keys of ", key_dim,
          " channels; it takes 1 to ", hash_buckets::largest_key_dim);
    check(planes >= 1 && planes <= hash_buckets::most_planes, what, " of ", planes, " planes a table; it takes 1 to ",
          hash_buckets::most_planes);
    const std::size_t most =
        hash_buckets::most_groups / ((planes + hash_buckets::group_planes - 1) / hash_buckets::group_planes);
    check(tables >= 1 && tables <= most, what, " of ", tables, " tables of ", planes, " planes; it takes 1 to ", most);
}

/// Keys of one KV head by their buckets: bit p of a key's bucket in table l is set where <w_lp, k - centre> >= 0, w_lp
/// standard normal vectors of the seed, the products in double. A key that is not finite is marked, in bucket 0.
/// Copies share the planes.
class hash_tables {
public:
    hash_tables(std::size_t key_dim, std::size_t planes, std::size_t tables, std::uint64_t seed)
        : key_dim_(key_dim), planes_(planes), tables_(tables), padded_((planes * tables + 15) / 16 * 16) {
        normals_ = std::make_shared<const std::vector<float>>(
            gaussian_matrix(stream_of(seed, sketch_stream::planes), planes * tables, key_dim, padded_));
    }

    /// Adds tokens; an empty centre stands for 0. Allocates nothing within what make_room() asked for.
    template <class T>
    void append(rows<T> keys, std::span<const float> centre) {
        make_room(size() + keys.count, true);
        const std::size_t first = size();
        buckets_.resize(padded_tokens(first + keys.count) * tables_);
        for (std::size_t i = 0; i < keys.count; ++i) {
            double row[hash_buckets::largest_key_dim];
            for (std::size_t c = 0; c < key_dim_; ++c) {
                const double away = centre.empty() ? 0.0 : static_cast<double>(centre[c]);
                row[c] = static_cast<double>(to_float(keys[i][c])) - away;
            }
            const bool finite = finite_row(keys[i], key_dim_);
            if (finite) {
                hash_row(view(), row, bucket_of(first + i, 0), block);
            } else {
                for (std::size_t l = 0; l < tables_; ++l) {
                    *bucket_of(first + i, l) = 0;
                }
            }
            marks_.push_back(!finite);
        }
    }

    void make_room(std::size_t tokens, bool geometric) {
        detail::make_room(buckets_, padded_tokens(tokens) * tables_, geometric);
        marks_.make_room(tokens, geometric);
    }

    /// Forgets tokens first ... last-1. Precondition: first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        for (std::size_t from = last, to = first; first < last && from < size(); ++from, ++to) {
            for (std::size_t l = 0; l < tables_; ++l) {
                *bucket_of(to, l) = *bucket_of(from, l);
            }
        }
        marks_.erase(first, last);
        buckets_.resize(padded_tokens(size()) * tables_);
    }

    [[nodiscard]] std::size_t size() const noexcept { return marks_.size(); }

    /// Two bytes a token and table, and a bit a token.
    [[nodiscard]] std::size_t bytes() const noexcept {
        return size() * tables_ * sizeof(std::uint16_t) + marks_.bytes();
    }
    [[nodiscard]] double bytes_per_token() const noexcept {
        return static_cast<double>(tables_ * sizeof(std::uint16_t)) + 0.125;
    }

    [[nodiscard]] hash_buckets view() const noexcept {
        hash_buckets s;
        s.normals = normals_->data();
        s.buckets = buckets_.data();
        s.marks = marks_.words();
        s.tokens = size();
        s.key_dim = key_dim_;
        s.tables = tables_;
        s.planes = planes_;
        s.padded_planes = padded_;
        return s;
    }

private:
    static constexpr std::size_t block = hash_buckets::block_tokens;

    [[nodiscard]] static std::size_t padded_tokens(std::size_t tokens) { return (tokens + block - 1) / block * block; }

    [[nodiscard]] std::uint16_t* bucket_of(std::size_t token, std::size_t table) {
        return buckets_.data() + (token / block * tables_ + table) * block + token % block;
    }

    std::size_t key_dim_;
    std::size_t planes_;
    std::size_t tables_;
    std::size_t padded_;
    std::shared_ptr<const std::vector<float>> normals_;
    std::vector<std::uint16_t> buckets_;
    token_marks marks_;
};

}  // namespace verkv::inline v0::detail
