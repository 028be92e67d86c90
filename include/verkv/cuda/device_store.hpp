// Memory of a layer's cache on a device: resident rows in pages, offloaded rows in pinned memory, staging.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "verkv/core/detail/product.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/fenced_rows.hpp"
#include "verkv/cuda/fetch_list.hpp"
#include "verkv/cuda/memory.hpp"
#include "verkv/cuda/row_list.hpp"

namespace verkv::inline v0::gpu {

/// Sizes of a device_store. A task is a KV head of a request: request * kv_heads + KV head.
struct device_store_config {
    std::size_t requests = 1;  ///< that are open at the same time
    std::size_t kv_heads = 1;
    std::size_t key_dim = 128;
    std::size_t value_dim = 128;
    std::size_t max_tokens = 0;      ///< of a request
    std::size_t page_rows = 16;      ///< rows of a resident page
    std::size_t resident_pages = 0;  ///< of all tasks
    std::size_t host_rows = 0;       ///< of all tasks
    std::size_t staging_rows = 0;    ///< of a task
};

/// Host side of the store: who has which pages and rows. Device memory is not touched here: kernels get its pointers,
/// and the lists that the engine uploads with each step, as engines do with block tables. A resident row is a key
/// followed by its value in device memory, at resident() + row * row_stride(); an offloaded row the same at host() +
/// row
/// * row_stride() in memory that host and device reach. Rows begin at multiples of 16 bytes.
/// Pages and rows that are given up stay untouched until the work is over that was given to the device before: see
/// fenced_rows. Not thread-safe. A call that throws has changed nothing. Beyond its constructor nothing allocates.
template <storage T, memory_resource Device, memory_resource Pinned, timeline Line>
class device_store {
public:
    /// line outlives the store. Throws invalid_argument for sizes of 0 where something has to be, or beyond memory;
    /// what the resources throw.
    device_store(const device_store_config& c, const Device& device, const Pinned& pinned, Line& line)
        : config_((check_config(c), c)),
          tasks_(verkv::detail::product("tasks", c.requests, c.kv_heads)),
          row_stride_((c.key_dim + c.value_dim + granule - 1) / granule * granule),
          most_pages_((c.max_tokens + c.page_rows - 1) / c.page_rows),
          resident_(device, elements("resident rows", verkv::detail::product("pages", c.resident_pages, c.page_rows))),
          staging_(device, elements("staging rows", verkv::detail::product("staging", tasks_, c.staging_rows))),
          map_(device, verkv::detail::product("staging map", tasks_, c.max_tokens + 2 * c.staging_rows + 2,
                                              sizeof(std::uint32_t)) /
                           sizeof(std::uint32_t)),
          host_(pinned, elements("host rows", c.host_rows)),
          pages_(c.resident_pages, line, "resident page"),
          rows_(c.host_rows, line, "host row"),
          page_table_(verkv::detail::product("block tables", tasks_, most_pages_)),
          row_table_(verkv::detail::product("host rows", tasks_, c.max_tokens)),
          residents_(tasks_),
          tokens_(tasks_) {}

    [[nodiscard]] const device_store_config& config() const { return config_; }
    [[nodiscard]] std::size_t tasks() const { return tasks_; }
    /// Elements from one row to the next, in all three memories.
    [[nodiscard]] std::size_t row_stride() const { return row_stride_; }
    /// Entries of a task's block table.
    [[nodiscard]] std::size_t most_pages() const { return most_pages_; }
    [[nodiscard]] T* resident() const { return resident_.data(); }
    [[nodiscard]] T* staging() const { return staging_.data(); }
    [[nodiscard]] T* host() const { return host_.data(); }
    /// The staging map of all tasks, in device memory: shared by the query heads of a task, kept from step to step.
    /// Undefined until reset_staging_kernel has run for the task.
    [[nodiscard]] device_staging staging_map() const {
        device_staging a;
        a.stride = config_.max_tokens;
        a.capacity = static_cast<std::uint32_t>(config_.staging_rows);
        a.slot = map_.data();
        a.token = a.slot + tasks_ * config_.max_tokens;
        a.used = a.token + tasks_ * config_.staging_rows;
        a.hand = a.used + tasks_ * config_.staging_rows;
        a.step = a.hand + tasks_;
        return a;
    }

    [[nodiscard]] std::size_t free_pages() { return pages_.free_rows(); }
    [[nodiscard]] std::size_t free_host_rows() { return rows_.free_rows(); }

    /// Pages of a task's resident rows, in order; for upload. Throws invalid_argument for a task that there is not.
    [[nodiscard]] std::span<const row_id> pages(std::size_t task) const {
        check_task(task);
        return {page_table_.data() + task * most_pages_, pages_for(residents_[task])};
    }
    /// Host rows of a task's tokens, in order; for upload.
    [[nodiscard]] std::span<const row_id> host_rows(std::size_t task) const {
        check_task(task);
        return {row_table_.data() + task * config_.max_tokens, tokens_[task]};
    }
    [[nodiscard]] std::size_t residents(std::size_t task) const { return check_task(task), residents_[task]; }
    [[nodiscard]] std::size_t tokens(std::size_t task) const { return check_task(task), tokens_[task]; }
    /// Row of the i-th resident of a task.
    [[nodiscard]] row_id resident_row(std::size_t task, std::size_t i) const {
        verkv::detail::check(i < residents(task), "resident ", i, " of ", residents_[task], " of task ", task);
        const auto in_page = static_cast<row_id>(i % config_.page_rows);
        return page_table_[task * most_pages_ + i / config_.page_rows] * static_cast<row_id>(config_.page_rows) +
               in_page;
    }

    /// Room in host memory for `count` tokens more of a task.
    /// Throws out_of_capacity where host rows or max_tokens do not suffice.
    void add_tokens(std::size_t task, std::size_t count) {
        check_task(task);
        verkv::detail::check<out_of_capacity>(count <= config_.max_tokens - tokens_[task], "task ", task, " has ",
                                              tokens_[task], " tokens, and is to have ", count, " more; max_tokens is ",
                                              config_.max_tokens);
        rows_.allocate({row_table_.data() + task * config_.max_tokens + tokens_[task], count});
        tokens_[task] += count;
    }

    /// Room for `count` resident rows more of a task; pages are taken as they are needed.
    /// Throws out_of_capacity where pages or max_tokens do not suffice.
    void add_residents(std::size_t task, std::size_t count) {
        check_task(task);
        verkv::detail::check<out_of_capacity>(count <= config_.max_tokens - residents_[task], "task ", task, " has ",
                                              residents_[task], " residents, and is to have ", count,
                                              " more; max_tokens is ", config_.max_tokens);
        const std::size_t held = pages_for(residents_[task]);
        const std::size_t more = pages_for(residents_[task] + count) - held;
        pages_.allocate({page_table_.data() + task * most_pages_ + held, more});
        residents_[task] += count;
    }

    /// New pages for `count` residents in place of those that a task has: a new draw, gathered from the host rows. The
    /// old pages are free when the device is done with them; until then both have to fit.
    /// Throws out_of_capacity where they do not.
    void replace_residents(std::size_t task, std::size_t count) {
        check_task(task);
        verkv::detail::check<out_of_capacity>(count <= config_.max_tokens, count, " residents of task ", task,
                                              "; max_tokens is ", config_.max_tokens);
        pages_.require(pages_for(count));
        pages_.release(pages(task));
        // The old ones are behind a fence, or on top of the stack where the device is done: enough are free.
        residents_[task] = count;
        pages_.allocate({page_table_.data() + task * most_pages_, pages_for(count)});
    }

    /// Gives up the residents from `residents` on and the tokens from `tokens` on.
    /// Throws invalid_argument for more than there are.
    void truncate(std::size_t task, std::size_t residents, std::size_t tokens) {
        check_task(task);
        verkv::detail::check(residents <= residents_[task] && tokens <= tokens_[task], "task ", task, " has ",
                             residents_[task], " residents of ", tokens_[task], " tokens; it cannot be cut to ",
                             residents, " of ", tokens);
        pages_.release(pages(task).subspan(pages_for(residents)));
        rows_.release(host_rows(task).subspan(tokens));
        residents_[task] = residents;
        tokens_[task] = tokens;
    }

private:
    static constexpr std::size_t granule = 16 / sizeof(T);

    static void check_config(const device_store_config& c) {
        verkv::detail::check(c.requests > 0 && c.kv_heads > 0, "a store for ", c.requests, " requests of ", c.kv_heads,
                             " KV heads");
        verkv::detail::check(c.key_dim > 0 && c.value_dim > 0, "rows of ", c.key_dim, " + ", c.value_dim, " channels");
        verkv::detail::check(c.page_rows > 0, "pages of 0 rows");
        verkv::detail::check(c.max_tokens <= most_tokens, c.max_tokens, " tokens of a request; at most ", most_tokens,
                             " can be planned for");
        verkv::detail::check(c.host_rows <= pinned_row, c.host_rows, " host rows are more than 31 bits number");
        verkv::detail::check(c.resident_pages <= pinned_row / c.page_rows, c.resident_pages, " pages of ", c.page_rows,
                             " rows are more than 31 bits number");
        verkv::detail::check(c.staging_rows <= pinned_row / c.requests / c.kv_heads, c.staging_rows,
                             " staging rows for ", c.requests, " requests of ", c.kv_heads,
                             " KV heads are more than 31 bits number");
    }

    void check_task(std::size_t task) const { verkv::detail::check(task < tasks_, "task ", task, " of ", tasks_); }

    [[nodiscard]] std::size_t elements(const char* what, std::size_t rows) const {
        return verkv::detail::product(what, rows, row_stride_, sizeof(T)) / sizeof(T);
    }

    [[nodiscard]] std::size_t pages_for(std::size_t rows) const {
        return (rows + config_.page_rows - 1) / config_.page_rows;
    }

    device_store_config config_;
    std::size_t tasks_;
    std::size_t row_stride_;
    std::size_t most_pages_;
    buffer<T, Device> resident_;
    buffer<T, Device> staging_;
    buffer<std::uint32_t, Device> map_;
    buffer<T, Pinned> host_;
    fenced_rows<Line> pages_;
    fenced_rows<Line> rows_;
    std::vector<row_id> page_table_;  // [tasks, most_pages]
    std::vector<row_id> row_table_;   // [tasks, max_tokens]
    std::vector<std::size_t> residents_;
    std::vector<std::size_t> tokens_;
};

}  // namespace verkv::inline v0::gpu
