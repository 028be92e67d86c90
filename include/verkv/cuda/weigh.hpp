// Logits to weights and their sum, D, for all query heads of all KV heads.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/last_block.hpp"

namespace verkv::inline v0::gpu {

/// The logit that weights are relative to, from the largest one's ordered_bits(): 0 where no logit was finite or none
/// was given. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE inline float shift_of(std::uint32_t top) noexcept {
    const float shift = from_ordered_bits(top);
    return top > ordered_bits(-__builtin_huge_valf()) ? shift : 0.0f;
}

/// w = e^{logit - shift} in the logits' place, and D = sum of w, for each query head. What weigh() does on the CPU.
///
/// blocks_y is KV heads * G, a row of logits each; along x, blocks share a row in pieces. The last block of a row adds
/// up what the others found, in their order.
/// Preconditions (unchecked): arrays are as large as said; `arrived` is 0.
/// Reads and writes 4 bytes a token and query head. Weights in float: 2 units in the last place of e^{logit - shift};
/// sums in double. The bits of a weight depend on the logit and the shift alone; those of D on `blocks` and `threads`.
/// NaN stays NaN, in D too.
struct weigh_kernel {
    static constexpr unsigned most_threads = 1024;

    float* logits = nullptr;                ///< [KV head][G][stride]; weights afterwards
    const std::uint32_t* tokens = nullptr;  ///< [KV head]
    const std::uint32_t* top = nullptr;     ///< [KV head][G]
    double* partial = nullptr;              ///< [KV head][G][blocks], scratch
    double* total = nullptr;                ///< [KV head][G]
    std::uint32_t* arrived = nullptr;       ///< [KV head][G]
    std::size_t stride = 0;
    std::uint32_t kv_heads = 0;
    std::uint32_t heads = 0;  ///< G
    std::uint32_t blocks = 1;
    std::uint32_t threads = 256;

    [[nodiscard]] launch_shape shape() const {
        return {blocks, kv_heads * heads, threads,
                shared_layout().array<double>(threads / warp_size).array<std::uint32_t>(1).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto scratch = b.template allocate_shared<double>(b.warps());
        auto flag = b.template allocate_shared<std::uint32_t>(1);
        const std::size_t row = b.block_index_y();
        const float shift = shift_of(b.load_readonly(top + row));
        const detail::token_range own = detail::tokens_of(b, b.load_readonly(tokens + row / heads));
        double sum = 0;
        for (unsigned i = own.first + b.thread(); i < own.last; i += b.threads()) {
            float* const at = logits + row * stride + i;
            const float w = std::exp(b.load_global(at) - shift);
            b.store_global(at, w);
            sum += static_cast<double>(w);
        }
        sum = block_sum(b, scratch, sum);
        if (b.thread() == 0) {
            b.store_global(partial + row * b.blocks() + b.block_index(), sum);
        }
        if (!detail::last_block(b, arrived + row, flag) || b.warp() != 0) {
            return;
        }
        double all = 0;
        for (unsigned first = 0; first < b.blocks(); first += warp_size) {
            const unsigned k = first + b.lane();
            all += warp_reduce(b, k < b.blocks() ? b.load_coherent(partial + row * b.blocks() + k) : 0.0, plus());
        }
        if (b.lane() == 0) {
            b.store_global(total + row, all);
        }
    }
};

}  // namespace verkv::inline v0::gpu
