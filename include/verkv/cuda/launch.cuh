// Launches of kernels on a stream, and CUDA's errors as verkv's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

#include "verkv/core/error.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/hardware_block.cuh"

namespace verkv::inline v0::gpu {

/// A call of the CUDA runtime failed; the message has what was asked for, the error's name and its text.
class cuda_error : public error {
public:
    cuda_error(const std::string& message, cudaError_t code) : error(message), code_(code) {}
    [[nodiscard]] cudaError_t code() const noexcept { return code_; }

private:
    cudaError_t code_;
};

namespace detail {

using verkv::detail::check;

/// Raises cuda_error unless status is cudaSuccess; the parts say what was asked for. Takes the error from the runtime,
/// so that nobody else's next call is blamed for it (an error that has broken the context stays there all the same).
template <class... Parts>
void check_cuda(cudaError_t status, const Parts&... parts) {
    if (status != cudaSuccess) [[unlikely]] {
        (void)cudaGetLastError();
        std::ostringstream text;
        text << "verkv: ";
        (verkv::detail::write(text, parts), ...);
        text << ": " << cudaGetErrorName(status) << ": " << cudaGetErrorString(status);
#if defined(__cpp_exceptions)
        throw cuda_error(text.str(), status);
#else
        std::fprintf(stderr, "%s\n", text.str().c_str());
        std::abort();
#endif
    }
}

/// Blocks that a multiprocessor is to have room for at once; 1 where the kernel does not say.
template <kernel K>
consteval unsigned resident_blocks() {
    if constexpr (requires { K::least_resident_blocks; }) {
        return K::least_resident_blocks;
    } else {
        return 1;
    }
}

/// The device function of a kernel. Hidden: each shared library that includes verkv launches its own.
template <kernel K>
__global__ void __attribute__((visibility("hidden"))) __launch_bounds__(K::most_threads, resident_blocks<K>())
    run_kernel(const __grid_constant__ K k) {
    hardware_block b;
    k(b);
}

}  // namespace detail

/// Shared memory that a block has without asking the driver for more.
inline constexpr std::size_t ordinary_shared_bytes = 48 * 1024;

/// Puts a kernel on a stream of the current device, in blocks of k.shape().
/// The members of k are copied: k may go when this returns, what it points to when the kernel has run. Does not wait
/// for the device, allocates nothing, and can be captured in a graph. No blocks: no launch. Above 48 KiB of shared
/// memory each call also sets the kernel's limit, which takes about a microsecond. Throws invalid_argument for a number
/// of threads that is no multiple of 32 or above K::most_threads, or too many rows of blocks; cuda_error where the
/// runtime refuses the launch. What goes wrong on the device later shows at a later call.
template <kernel K>
void launch(cudaStream_t stream, const K& k) {
    static_assert(sizeof(K) <= 4096, "a kernel's parameters have room for 4096 bytes");
    const launch_shape s = k.shape();
    detail::check(s.threads > 0 && s.threads % warp_size == 0 && s.threads <= K::most_threads, "blocks of ", s.threads,
                  " threads; a multiple of ", warp_size, ", at most ", unsigned{K::most_threads}, ", is needed");
    detail::check(s.blocks_y <= most_blocks_y, s.blocks_y,
                  " rows of blocks (KV heads, or query heads, of a batch); at most ", most_blocks_y,
                  " can be launched");
    if (s.blocks_x == 0 || s.blocks_y == 0) {
        return;
    }
    const auto entry = reinterpret_cast<const void*>(&detail::run_kernel<K>);
    if (s.shared_bytes > ordinary_shared_bytes) {
        detail::check_cuda(
            cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(s.shared_bytes)),
            "a kernel with ", s.shared_bytes, " bytes of shared memory");
    }
    void* parameters[] = {const_cast<K*>(&k)};
    detail::check_cuda(
        cudaLaunchKernel(entry, dim3(s.blocks_x, s.blocks_y), dim3(s.threads), parameters, s.shared_bytes, stream),
        "launch of ", s.blocks_x, " x ", s.blocks_y, " blocks of ", s.threads, " threads with ", s.shared_bytes,
        " bytes of shared memory");
}

}  // namespace verkv::inline v0::gpu
