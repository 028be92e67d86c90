// A small kernel, as an example of how they are written, and what the tests of the launcher run.
#pragma once

#include <cstddef>

#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"

namespace support {

/// The sum of each row of a matrix: a block a row. Sums in float, in an order that depends on `threads` alone.
struct sum_rows_kernel {
    static constexpr unsigned most_threads = 1024;

    const float* matrix;  // [rows, columns]
    float* sums;          // [rows]
    unsigned rows;
    unsigned columns;
    unsigned threads;

    [[nodiscard]] verkv::gpu::launch_shape shape() const {
        return {.blocks_x = rows,
                .threads = threads,
                .shared_bytes = verkv::gpu::shared_layout().array<float>(threads / 32).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto of_warp = b.template allocate_shared<float>(b.warps());
        const float* row = matrix + std::size_t{b.block_index()} * columns;
        float sum = 0;
        for (unsigned c = b.thread(); c < columns; c += b.threads()) {
            sum += b.load_readonly(row + c);
        }
        for (unsigned d = 16; d > 0; d /= 2) {
            sum += b.shuffle_xor(sum, d);
        }
        if (b.lane() == 0) {
            of_warp[b.warp()] = sum;
        }
        b.sync();
        if (b.thread() == 0) {
            float all = 0;
            for (unsigned w = 0; w < b.warps(); ++w) {
                all += of_warp.get(w);
            }
            b.store_global(sums + b.block_index(), all);
        }
    }
};

}  // namespace support
