// Rows of memory, handed out and taken back: resident cells, host rows and staging are each a pool of these.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "verkv/core/detail/product.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0 {

/// A fixed number of rows, each a token's key followed by its value for one KV head. Free rows are a stack, so that a
/// fresh pool hands out neighbours. Memory is touched when rows are written, not before.
///
/// Where rows are read one by one, a row lies in one piece, and one copy moves it. Where a step reads all keys and then
/// all values, rows are split: the first `split` channels of all rows, then the other channels of all rows. Neighbours
/// are then read without gaps, at several times the speed: memory that is read in pieces of 256 bytes defeats the
/// processor's prefetching.
/// Not thread-safe. All calls either succeed or change nothing.
template <class T>
class row_pool {
public:
    /// Owns its memory: rows * width elements, uninitialised. name is used in messages; split: 0 for rows in one piece.
    /// Throws invalid_argument for a width of 0, a split of width or more, more rows than a row_id can number, or more
    /// bytes than a size counts.
    row_pool(std::size_t rows, std::size_t width, const char* name, std::size_t split = 0)
        : width_(width), split_(split), name_(name) {
        check_shape(rows);
        owned_ = std::make_unique_for_overwrite<T[]>(detail::product(name, rows, width, sizeof(T)) / sizeof(T));
        data_ = owned_.get();
        fill_stack(rows);
    }

    /// Uses the caller's memory (pinned, mapped, ...), which outlives the pool.
    /// Throws invalid_argument when it is no whole number of rows, and for a split of width or more.
    row_pool(std::span<T> memory, std::size_t width, const char* name, std::size_t split = 0)
        : width_(width), split_(split), name_(name) {
        detail::check(width > 0 && memory.size() % width == 0, name, " pool: ", memory.size(),
                      " elements are no whole number of rows of ", width);
        check_shape(memory.size() / width);
        data_ = memory.data();
        fill_stack(memory.size() / width);
    }

    [[nodiscard]] std::size_t capacity() const { return taken_.size(); }
    [[nodiscard]] std::size_t free_rows() const { return free_.size(); }
    [[nodiscard]] std::size_t width() const { return width_; }

    /// Throws out_of_capacity unless `count` rows are free.
    void require(std::size_t count) const {
        detail::check<out_of_capacity>(count <= free_.size(), name_, " pool: ", count, " rows are needed, ",
                                       free_.size(), " of ", capacity(), " are free");
    }

    /// Takes out.size() rows; O(1) each, no allocation.
    /// Throws out_of_capacity when there are not that many.
    void allocate(std::span<row_id> out) {
        require(out.size());
        for (row_id& id : out) {
            id = free_.back();
            free_.pop_back();
            taken_[id] = 1;
        }
    }

    /// Gives rows back; O(1) each, no allocation.
    /// Throws invalid_argument when one of them is not taken, or is listed twice.
    void release(std::span<const row_id> ids) {
        for (std::size_t i = 0; i < ids.size(); ++i) {
            if (!(ids[i] < taken_.size() && taken_[ids[i]])) {
                for (std::size_t j = 0; j < i; ++j) {
                    taken_[ids[j]] = 1;
                }
                detail::raise<invalid_argument>(name_, " pool: row ", ids[i], " is released but not taken");
            }
            taken_[ids[i]] = 0;
        }
        free_.insert(free_.end(), ids.rbegin(), ids.rend());
    }

    /// First element of a row in one piece, taken or not; 64-bit offsets.
    /// Throws invalid_argument for a row that the pool does not have, and where rows are split.
    [[nodiscard]] T* row(row_id id) {
        check_whole(id);
        return data_ + static_cast<std::size_t>(id) * width_;
    }
    [[nodiscard]] const T* row(row_id id) const {
        check_whole(id);
        return data_ + static_cast<std::size_t>(id) * width_;
    }

    /// Copies a row of width() elements in.
    /// Throws invalid_argument for a row that the pool does not have.
    void write(row_id id, const T* from) {
        check_row(id);
        const auto at = static_cast<std::size_t>(id);
        std::memcpy(static_cast<void*>(data_ + at * split_), from, split_ * sizeof(T));
        std::memcpy(static_cast<void*>(data_ + capacity() * split_ + at * (width_ - split_)), from + split_,
                    (width_ - split_) * sizeof(T));
    }

    /// Channels first ... first + width - 1 of the rows listed. Precondition (not checked): the pool has those rows.
    /// Throws invalid_argument for channels that a row does not have, or that lie on both sides of a split.
    [[nodiscard]] rows<T> view(std::span<const row_id> ids, std::size_t first, std::size_t width) const {
        detail::check(first <= width_ && width <= width_ - first, name_, " pool: channels from ", first, " on, ", width,
                      " of them, in rows of ", width_);
        detail::check(first >= split_ || width <= split_ - first, name_, " pool: channels from ", first, " on, ", width,
                      " of them, in rows that are split at ", split_);
        if (first < split_) {
            return {data_ + first, static_cast<std::ptrdiff_t>(split_), ids.size(), width, ids.data()};
        }
        return {data_ + capacity() * split_ + (first - split_), static_cast<std::ptrdiff_t>(width_ - split_),
                ids.size(), width, ids.data()};
    }

private:
    void check_row(row_id id) const { detail::check(id < capacity(), name_, " pool: row ", id, " of ", capacity()); }

    void check_whole(row_id id) const {
        check_row(id);
        detail::check(split_ == 0, name_, " pool: row ", id, " is not in one piece, but split at ", split_);
    }

    void check_shape(std::size_t rows) const {
        detail::check(width_ > 0, name_, " pool: rows of width 0");
        detail::check(split_ < width_, name_, " pool: rows of width ", width_, " are split at ", split_);
        detail::check(rows < (std::numeric_limits<row_id>::max)(), name_, " pool: ", rows,
                      " rows are more than a row_id numbers");
    }

    void fill_stack(std::size_t rows) {
        taken_.assign(rows, 0);
        free_.resize(rows);
        for (std::size_t i = 0; i < rows; ++i) {
            free_[i] = static_cast<row_id>(rows - 1 - i);
        }
    }

    std::size_t width_;
    std::size_t split_;
    const char* name_;
    std::unique_ptr<T[]> owned_;
    T* data_ = nullptr;
    std::vector<row_id> free_;
    std::vector<std::uint8_t> taken_;
};

}  // namespace verkv::inline v0
