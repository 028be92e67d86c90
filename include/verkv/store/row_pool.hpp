// Rows of memory, handed out and taken back: resident cells, host rows and staging are each a pool of these.
#pragma once

#include <cstdint>
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
/// Not thread-safe. All calls either succeed or change nothing.
template <class T>
class row_pool {
public:
    /// Owns its memory: rows * width elements, uninitialised. name is used in messages.
    /// Throws invalid_argument for a width of 0, more rows than a row_id can number, or more bytes than a size counts.
    row_pool(std::size_t rows, std::size_t width, const char* name) : width_(width), name_(name) {
        check_shape(rows, width);
        owned_ = std::make_unique_for_overwrite<T[]>(detail::product(name, rows, width, sizeof(T)) / sizeof(T));
        data_ = owned_.get();
        fill_stack(rows);
    }

    /// Uses the caller's memory (pinned, mapped, ...), which outlives the pool.
    /// Throws invalid_argument when it is no whole number of rows.
    row_pool(std::span<T> memory, std::size_t width, const char* name) : width_(width), name_(name) {
        detail::check(width > 0 && memory.size() % width == 0, name, " pool: ", memory.size(),
                      " elements are no whole number of rows of ", width);
        check_shape(memory.size() / width, width);
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

    /// First element of a row, taken or not; 64-bit offsets.
    /// Throws invalid_argument for a row that the pool does not have.
    [[nodiscard]] T* row(row_id id) { return data_ + offset(id); }
    [[nodiscard]] const T* row(row_id id) const { return data_ + offset(id); }

    /// Channels first ... first + width - 1 of the rows listed. Precondition (not checked): the pool has those rows.
    /// Throws invalid_argument for channels that a row does not have.
    [[nodiscard]] rows<T> view(std::span<const row_id> ids, std::size_t first, std::size_t width) const {
        detail::check(first <= width_ && width <= width_ - first, name_, " pool: channels from ", first, " on, ", width,
                      " of them, in rows of ", width_);
        return {data_ + first, static_cast<std::ptrdiff_t>(width_), ids.size(), width, ids.data()};
    }

private:
    [[nodiscard]] std::size_t offset(row_id id) const {
        detail::check(id < capacity(), name_, " pool: row ", id, " of ", capacity());
        return static_cast<std::size_t>(id) * width_;
    }

    void check_shape(std::size_t rows, std::size_t width) const {
        detail::check(width > 0, name_, " pool: rows of width 0");
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
    const char* name_;
    std::unique_ptr<T[]> owned_;
    T* data_ = nullptr;
    std::vector<row_id> free_;
    std::vector<std::uint8_t> taken_;
};

}  // namespace verkv::inline v0
