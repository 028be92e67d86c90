// A free stack whose rows are not handed out while the device may still read or write them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/memory.hpp"

namespace verkv::inline v0::gpu {

/// Numbers 0 ... capacity-1 of rows or pages, handed out and taken back. Free ones are a stack, so that a fresh one
/// hands out neighbours. What is released lies behind a fence: a mark of the timeline, made at the release; it may be
/// handed out when all work that was given to the device before is over. Fences are looked at when the stack is too
/// short. Not thread-safe. A call that throws has changed nothing. Allocates only when it is built.
template <timeline Line>
class fenced_rows {
public:
    /// line outlives this. name is used in messages. Throws invalid_argument for more rows than a row_id numbers.
    fenced_rows(std::size_t rows, Line& line, const char* name) : line_(&line), name_(name) {
        verkv::detail::check(rows < (std::numeric_limits<row_id>::max)(), name, " pool: ", rows,
                             " are more than a row_id numbers");
        taken_.assign(rows, 0);
        free_.resize(rows);
        for (std::size_t i = 0; i < rows; ++i) {
            free_[i] = static_cast<row_id>(rows - 1 - i);
        }
        fenced_.resize(rows);
    }

    [[nodiscard]] std::size_t capacity() const { return taken_.size(); }
    /// Rows that can be had now: those whose fence is over count.
    [[nodiscard]] std::size_t free_rows() {
        reclaim();
        return free_.size();
    }
    /// Rows that were released, and wait for the device.
    [[nodiscard]] std::size_t fenced() {
        reclaim();
        return waiting_;
    }

    /// Throws out_of_capacity unless `count` rows are free; rows behind a fence are not. O(rows that become free).
    void require(std::size_t count) {
        if (count > free_.size()) {
            reclaim();
        }
        verkv::detail::check<out_of_capacity>(count <= free_.size(), name_, " pool: ", count, " are needed, ",
                                              free_.size(), " of ", capacity(), " are free, ", waiting_,
                                              " wait for the device");
    }

    /// Takes out.size() rows. Throws as require().
    void allocate(std::span<row_id> out) {
        require(out.size());
        for (row_id& id : out) {
            id = free_.back();
            free_.pop_back();
            taken_[id] = 1;
        }
    }

    /// Gives rows back, behind a fence. O(1) each and one mark.
    /// Throws invalid_argument when one of them is not taken, or is listed twice.
    void release(std::span<const row_id> ids) {
        if (ids.empty()) {
            return;
        }
        for (std::size_t i = 0; i < ids.size(); ++i) {
            if (!(ids[i] < taken_.size() && taken_[ids[i]])) {
                for (std::size_t j = 0; j < i; ++j) {
                    taken_[ids[j]] = 1;
                }
                verkv::detail::raise<invalid_argument>(name_, " pool: ", ids[i], " is released but not taken");
            }
            taken_[ids[i]] = 0;
        }
        const std::uint64_t mark = line_->mark();
        for (std::size_t i = ids.size(); i > 0; --i) {
            const std::size_t end = first_ + waiting_;
            fenced_[end < fenced_.size() ? end : end - fenced_.size()] = {ids[i - 1], mark};
            ++waiting_;
        }
    }

private:
    struct fenced_row {
        row_id id = 0;
        std::uint64_t mark = 0;
    };

    /// Frees what lies behind fences that are over. Marks ascend along the ring.
    void reclaim() {
        if (waiting_ == 0) {
            return;
        }
        const std::uint64_t completed = line_->completed();
        while (waiting_ > 0 && fenced_[first_].mark <= completed) {
            free_.push_back(fenced_[first_].id);
            first_ = first_ + 1 == fenced_.size() ? 0 : first_ + 1;
            --waiting_;
        }
    }

    Line* line_;
    const char* name_;
    std::vector<row_id> free_;
    std::vector<fenced_row> fenced_;  // a ring
    std::size_t first_ = 0;
    std::size_t waiting_ = 0;
    std::vector<std::uint8_t> taken_;
};

}  // namespace verkv::inline v0::gpu
