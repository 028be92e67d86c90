// What is known of each token and each resident row of a KV head, in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/views.hpp"

namespace verkv::inline v0::gpu {

/// A token that is not resident.
inline constexpr std::uint32_t offloaded = 0xffffffffu;

/// The lists of the tasks of a launch; a task is a KV head of a request. What kv_head holds on the CPU.
struct token_arrays {
    // Per token, [tasks, stride].
    float* probability = nullptr;     ///< r
    float* odds = nullptr;            ///< (1 - r)/r
    float* uniform = nullptr;         ///< U of the draw
    std::uint32_t* slot = nullptr;    ///< index among the resident rows, or offloaded
    row_id* host_row = nullptr;       ///< in pinned memory
    std::uint32_t* tokens = nullptr;  ///< how many there are, [tasks]
    // Per resident row, [tasks, resident_stride].
    token_index* resident_token = nullptr;  ///< ascending
    float* log_weight = nullptr;            ///< ln(1/r)
    std::uint32_t* residents = nullptr;     ///< how many there are, [tasks]
    std::size_t stride = 0;
    std::size_t resident_stride = 0;
};

}  // namespace verkv::inline v0::gpu
