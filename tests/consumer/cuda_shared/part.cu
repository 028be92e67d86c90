// One of two shared libraries with kernels of verkv in them, for other architectures. Without a device a launch says
// so.
#include "verkv/cuda.cuh"

#if defined(LEFT)
#define PART left_launch
#else
#define PART right_launch
#endif

__attribute__((visibility("default"))) bool PART(unsigned* at);

/// Clears a word by a launch; true where the runtime refused it, as a verkv error.
bool PART(unsigned* at) {
    try {
        verkv::gpu::launch(nullptr, verkv::gpu::clear_kernel<std::uint32_t>{at, 1, 1, 32});
    } catch (const verkv::gpu::cuda_error&) {
        return true;
    }
    return false;
}
