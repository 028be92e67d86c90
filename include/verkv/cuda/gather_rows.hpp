// Rows of pinned host memory, read by the device where they lie and written to the staging memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/detail/work.hpp"

namespace verkv::inline v0::gpu {

/// to[copy_to[j]] = from[copy_from[j]] for j < copies, of each KV head: what fetch_list asks for.
///
/// A warp copies a row, its lanes 16 neighbouring bytes each: a row of 512 bytes is one request of a warp. Each lane
/// has up to `at_once` loads under way before it writes. Zero-copy: no engine, no host decision; bytes cross the bus
/// once. blocks_y is the number of KV heads; any number of blocks along x and of threads. To fill a bus of 64 GB/s at 2
/// microseconds a load, 8192 lanes have to be at work.
/// Preconditions (unchecked): rows exist; no row is written twice. Rows that begin at multiples of 16 bytes move by
/// wide loads, if their width is a multiple of 16 bytes. Reads width * sizeof(T) + 8 bytes a row, writes width *
/// sizeof(T). Copies bits.
template <storage T>
struct gather_rows_kernel {
    static constexpr unsigned most_threads = 1024;
    static constexpr unsigned at_once = 4;

    const T* from = nullptr;                ///< pinned rows, as the device addresses them
    T* to = nullptr;                        ///< staging memory
    const row_id* copy_from = nullptr;      ///< [KV head][list_stride]
    const row_id* copy_to = nullptr;        ///< [KV head][list_stride]
    const std::uint32_t* copies = nullptr;  ///< [KV head]
    const std::uint32_t* work = nullptr;    ///< [KV head], see step_work; null: work for all
    std::size_t from_stride = 0;            ///< elements from one row to the next
    std::size_t to_stride = 0;
    std::size_t list_stride = 0;
    std::uint32_t kv_heads = 0;
    std::uint32_t width = 0;  ///< elements of a row, key and value
    std::uint32_t blocks = 1;
    std::uint32_t threads = 256;

    [[nodiscard]] launch_shape shape() const { return {blocks, kv_heads, threads, 0}; }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        if (detail::idle(b, work, b.block_index_y())) {
            return;
        }
        const std::size_t list = std::size_t{b.block_index_y()} * list_stride;
        const unsigned n = b.load_global(copies + b.block_index_y());
        const bool wide = width % per_load == 0 && from_stride % per_load == 0 && to_stride % per_load == 0 &&
                          reinterpret_cast<std::uintptr_t>(from) % 16 == 0 &&
                          reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
        for (unsigned j = b.block_index() * b.warps() + b.warp(); j < n; j += b.blocks() * b.warps()) {
            const T* const source = from + std::size_t{b.load_readonly(copy_from + list + j)} * from_stride;
            T* const target = to + std::size_t{b.load_readonly(copy_to + list + j)} * to_stride;
            if (wide) {
                copy_wide(b, source, target);
            } else {
                for (unsigned c = b.lane(); c < width; c += warp_size) {
                    b.store_global(target + c, b.load_readonly(source + c));
                }
            }
        }
    }

private:
    static constexpr unsigned per_load = 16 / sizeof(T);

    template <class Block>
    VERKV_HOST_DEVICE void copy_wide(Block& b, const T* source, T* target) const {
        constexpr unsigned step = warp_size * per_load;
        for (unsigned first = b.lane() * per_load; first < width; first += at_once * step) {
            pack<T, per_load> part[at_once];
            for (unsigned k = 0; k < at_once; ++k) {
                if (first + k * step < width) {
                    part[k] = b.template load_vector<16>(source + first + k * step);
                }
            }
            for (unsigned k = 0; k < at_once; ++k) {
                if (first + k * step < width) {
                    b.store_vector(target + first + k * step, part[k]);
                }
            }
        }
    }
};

}  // namespace verkv::inline v0::gpu
