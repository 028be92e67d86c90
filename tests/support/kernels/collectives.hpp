// Kernels that call every collective of a block, for parity with plain loops.
#pragma once

#include <cstddef>

#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"

namespace support {

/// What a block works out about its values, a result of each kind for each thread.
template <class T>
struct collectives_kernel {
    static constexpr unsigned most_threads = 1024;

    const T* values;  // [blocks, threads]
    T* sum;           // [blocks, threads], as all that follow
    T* largest;
    T* smallest;
    T* before;
    T* total;
    T* from;
    unsigned* rank;
    unsigned* kept;
    unsigned count;
    unsigned threads;

    [[nodiscard]] verkv::gpu::launch_shape shape() const {
        const auto scratch = verkv::gpu::shared_layout().array<T>(threads / 32).template array<unsigned>(threads / 32);
        return {.blocks_x = count, .threads = threads, .shared_bytes = scratch.bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto scratch = b.template allocate_shared<T>(b.warps());
        auto counts = b.template allocate_shared<unsigned>(b.warps());
        const std::size_t i = std::size_t{b.block_index()} * b.threads() + b.thread();
        const T v = b.load_readonly(values + i);
        b.store_global(sum + i, verkv::gpu::block_sum(b, scratch, v));
        b.store_global(largest + i, verkv::gpu::block_max(b, scratch, v));
        b.store_global(smallest + i, verkv::gpu::block_min(b, scratch, v));
        const auto scan = verkv::gpu::block_exclusive_scan(b, scratch, v);
        b.store_global(before + i, scan.before);
        b.store_global(total + i, scan.total);
        const T once = verkv::gpu::block_broadcast(b, scratch, v, b.threads() * 2 / 3);
        b.store_global(from + i, verkv::gpu::block_broadcast(b, scratch, once, b.threads() - 1));
        const auto place = verkv::gpu::block_rank(b, counts, v > T{0});
        b.store_global(rank + i, place.before);
        b.store_global(kept + i, place.total);
    }
};

/// The indices of the keys that a number divides, in one block.
struct compact_kernel {
    static constexpr unsigned most_threads = 1024;

    const unsigned* keys;
    unsigned* list;
    unsigned* count;
    unsigned n;
    unsigned modulus;
    unsigned threads;

    [[nodiscard]] verkv::gpu::launch_shape shape() const {
        return {.threads = threads, .shared_bytes = verkv::gpu::shared_layout().array<unsigned>(threads / 32).bytes()};
    }
    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto scratch = b.template allocate_shared<unsigned>(b.warps());
        const unsigned kept = verkv::gpu::block_compact(
            b, scratch, n, [&](unsigned i) { return b.load_readonly(keys + i) % modulus == 0; },
            [&](unsigned i, unsigned place) { b.store_global(list + place, i); });
        if (b.thread() == 0) {
            b.store_global(count, kept);
        }
    }
};

}  // namespace support
