// Which rows of a pool a KV head of a request reads: their number is on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0::gpu {

/// The lists of a launch's tasks; a task is a KV head of a request. Row i < count[task] of a task is
///     pages[task * page_stride + i / page_rows] * page_rows + i % page_rows    a paged block table; row ids: page_rows
///     1 task * task_rows + i                                                    without pages: rows that lie in order
/// Lists are as long as count says: memory behind that is not read. Rows are numbered with 32 bits, count is below
/// 2^31.
struct row_list {
    const std::uint32_t* count = nullptr;  ///< [tasks]
    const std::uint32_t* pages = nullptr;  ///< [tasks, page_stride], or null
    std::size_t page_stride = 0;
    std::uint32_t page_rows = 1;
    std::uint32_t task_rows = 0;

    /// Row ids: [tasks, stride].
    [[nodiscard]] static row_list of_ids(const std::uint32_t* count, const row_id* ids, std::size_t stride) {
        return {count, ids, stride, 1, 0};
    }
    /// A block table, [tasks, stride], of pages of so many rows.
    [[nodiscard]] static row_list of_pages(const std::uint32_t* count, const std::uint32_t* table, std::size_t stride,
                                           std::uint32_t page_rows) {
        return {count, table, stride, page_rows, 0};
    }
    /// All rows in order; those of the next task begin task_rows later.
    [[nodiscard]] static row_list in_order(const std::uint32_t* count, std::uint32_t task_rows) {
        return {count, nullptr, 0, 1, task_rows};
    }

    /// Row i of a task's list. Reads 4 bytes where there are pages. Host and device.
    template <class Block>
    [[nodiscard]] VERKV_HOST_DEVICE row_id row(Block& b, unsigned task, std::uint32_t i) const {
        if (pages == nullptr) {
            return task * task_rows + i;
        }
        const std::uint32_t page = b.load_readonly(pages + task * page_stride + i / page_rows);
        return page * page_rows + i % page_rows;
    }
};

}  // namespace verkv::inline v0::gpu
