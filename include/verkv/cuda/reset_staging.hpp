// An empty staging map: of a request that begins.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/fetch_list.hpp"

namespace verkv::inline v0::gpu {

/// Forgets what is staged for KV heads first ... first + kv_heads - 1 of a staging map, and gives undefined memory its
/// first values: no token has a slot, no slot a token, hand and step are 0. A row of blocks a KV head.
/// Writes 4 (stride + 2 capacity + 2) bytes a KV head. No step may be under way on another stream.
struct reset_staging_kernel {
    static constexpr unsigned most_threads = 1024;

    device_staging staging;
    std::uint32_t first = 0;
    std::uint32_t kv_heads = 0;
    std::uint32_t blocks = 1;
    std::uint32_t threads = 256;

    [[nodiscard]] launch_shape shape() const { return {blocks, kv_heads, threads, 0}; }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        const std::size_t kv = std::size_t{first} + b.block_index_y();
        const std::size_t step = std::size_t{b.blocks()} * b.threads();
        const std::size_t from = std::size_t{b.block_index()} * b.threads() + b.thread();
        for (std::size_t i = from; i < staging.stride; i += step) {
            b.store_global(staging.slot + kv * staging.stride + i, no_slot);
        }
        for (std::size_t s = from; s < staging.capacity; s += step) {
            b.store_global(staging.token + kv * staging.capacity + s, no_slot);
            b.store_global(staging.used + kv * staging.capacity + s, 0u);
        }
        if (from == 0) {
            b.store_global(staging.hand + kv, 0u);
            b.store_global(staging.step + kv, 0u);
        }
    }
};

}  // namespace verkv::inline v0::gpu
