// What a round of a step has to do for a KV head: decided on the device, read by launches that were made before.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"

namespace verkv::inline v0::gpu {

/// What is to be done for a KV head in a round, as 32 bits in device memory: numbers that ascend with how much it is.
enum step_work : std::uint32_t {
    work_none = 0,        ///< its certificates hold: the launch does nothing for it
    work_lower = 1,       ///< levels were lowered: plan at these
    work_everything = 2,  ///< the last round: all tokens are used
};

namespace detail {

/// Whether a launch has nothing to do for a KV head. work: [KV head], or null: something everywhere.
template <class Block>
[[nodiscard]] VERKV_HOST_DEVICE bool idle(Block& b, const std::uint32_t* work, std::size_t kv) {
    return work != nullptr && b.load_readonly(work + kv) == work_none;
}

}  // namespace detail
}  // namespace verkv::inline v0::gpu
