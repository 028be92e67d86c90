// Zeros, as a launch: what a step counts from.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"

namespace verkv::inline v0::gpu {

/// at[i] = 0 for i < count. Any number of blocks and threads. Writes sizeof(T) bytes an element.
template <class T>
struct clear_kernel {
    static constexpr unsigned most_threads = 1024;

    T* at = nullptr;
    std::size_t count = 0;
    std::uint32_t blocks = 1;
    std::uint32_t threads = 256;

    [[nodiscard]] launch_shape shape() const { return {blocks, 1, threads, 0}; }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        const std::size_t step = std::size_t{b.blocks()} * b.threads();
        for (std::size_t i = std::size_t{b.block_index()} * b.threads() + b.thread(); i < count; i += step) {
            b.store_global(at + i, T{});
        }
    }
};

}  // namespace verkv::inline v0::gpu
