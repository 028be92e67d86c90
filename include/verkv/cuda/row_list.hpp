// Which rows a KV head of a request reads, and where they lie: their number is on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0::gpu {

/// The bit of a row's number that says: it is a row of pinned memory.
inline constexpr row_id pinned_row = 0x80000000u;

/// The two memories that rows lie in, both with rows `stride` elements apart. A row is read over the bus where it has
/// the bit pinned_row, which is what becomes of rows that staging has no room for: so every row that a list can name is
/// there. The other 31 bits number the rows of a memory.
template <class T>
struct row_memory {
    const T* device = nullptr;
    const T* pinned = nullptr;  ///< not looked at where no row has the bit
    std::size_t stride = 0;

    /// First element of a row. Host and device.
    [[nodiscard]] VERKV_HOST_DEVICE const T* at(row_id row) const {
        const T* const memory = (row & pinned_row) != 0 ? pinned : device;
        return memory + std::size_t{row & ~pinned_row} * stride;
    }
};

/// The lists of a launch's tasks; a task is a KV head of a request. Row i < count[task] of a task is
///     pages[task * page_stride + i / page_rows] * page_rows + i % page_rows    a paged block table; row ids: page_rows
///     1 task * task_rows + i                                                    without pages: rows that lie in order
/// Lists are as long as count says: memory behind that is not read. Rows are numbered with 31 bits, see row_memory;
/// count is below 2^31.
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
