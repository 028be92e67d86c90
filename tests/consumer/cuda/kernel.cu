// A kernel of the user's, launched; without a device the runtime says so, as a verkv error.
#include <cstdio>
#include <cstring>

#include "verkv/cuda.cuh"

double second_uniform();

namespace {

struct count_kernel {
    static constexpr unsigned most_threads = 64;
    unsigned* count;
    [[nodiscard]] verkv::gpu::launch_shape shape() const { return {.blocks_x = 2, .threads = 64}; }
    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        b.atomic_add(count, 1);
    }
};

}  // namespace

int main() {
    unsigned* count = nullptr;
    const cudaError_t status = cudaMalloc(&count, sizeof(unsigned));
    if (status != cudaSuccess) {
        try {
            verkv::gpu::launch(nullptr, count_kernel{count});
        } catch (const verkv::error& e) {
            std::printf("%s\n", e.what());
            return std::strstr(e.what(), "cudaError") != nullptr && second_uniform() < 1 ? 0 : 1;
        }
        return 1;
    }
    unsigned result = 0;
    (void)cudaMemset(count, 0, sizeof(unsigned));
    verkv::gpu::launch(nullptr, count_kernel{count});
    (void)cudaMemcpy(&result, count, sizeof(unsigned), cudaMemcpyDeviceToHost);
    return result == 128 ? 0 : 1;
}
