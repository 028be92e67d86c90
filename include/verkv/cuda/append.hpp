// A token that was just generated: its row goes to its resident page and to pinned memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/token_arrays.hpp"

namespace verkv::inline v0::gpu {

/// Appends a token to each task: a block a KV head. keys [tasks, key_dim] and values [tasks, value_dim], task t's at
/// keys
/// + t key_task_stride; it goes to row resident_row[t] of the resident memory and host_row[t] of the pinned memory,
/// both a key followed by its value, row_stride elements apart (device_store says which). In the lists it is resident
/// for certain: r = 1, odds 0, log-weight 0, U = 0. Preconditions (unchecked): lists have room for a token and a
/// resident more; nobody reads the rows or lists meanwhile. Bytes: a row read, a row written to device memory and one
/// over the bus; 32 in the lists. Copies bits.
template <storage T>
struct append_kernel {
    static constexpr unsigned most_threads = 1024;

    const T* keys;
    const T* values;
    std::size_t key_task_stride;
    std::size_t value_task_stride;
    const row_id* resident_row;  // [tasks]
    const row_id* host_row;      // [tasks]
    T* resident;
    T* host;
    std::size_t row_stride;
    token_arrays lists;
    unsigned tasks;
    unsigned key_dim;
    unsigned value_dim;
    unsigned threads;

    [[nodiscard]] launch_shape shape() const { return {.blocks_x = tasks, .threads = threads}; }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        const unsigned task = b.block_index();
        const T* key = keys + task * key_task_stride;
        const T* value = values + task * value_task_stride;
        const row_id in_host = b.load_readonly(host_row + task);
        T* to = resident + b.load_readonly(resident_row + task) * row_stride;
        T* to_host = host + in_host * row_stride;
        for (unsigned c = b.thread(); c < key_dim + value_dim; c += b.threads()) {
            const T x = c < key_dim ? b.load_global(key + c) : b.load_global(value + (c - key_dim));
            b.store_global(to + c, x);
            b.store_global(to_host + c, x);
        }
        if (b.thread() == 0) {
            const std::uint32_t n = b.load_global(lists.tokens + task);
            const std::uint32_t residents = b.load_global(lists.residents + task);
            const std::size_t token = task * lists.stride + n;
            const std::size_t slot = task * lists.resident_stride + residents;
            b.store_global(lists.probability + token, 1.0f);
            b.store_global(lists.odds + token, 0.0f);
            b.store_global(lists.uniform + token, 0.0f);
            b.store_global(lists.slot + token, residents);
            b.store_global(lists.host_row + token, in_host);
            b.store_global(lists.resident_token + slot, n);
            b.store_global(lists.log_weight + slot, 0.0f);
            b.store_global(lists.tokens + task, n + 1);
            b.store_global(lists.residents + task, residents + 1);
        }
    }
};

}  // namespace verkv::inline v0::gpu
