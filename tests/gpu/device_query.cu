// Prints what the first device is, as JSON. Exit code 77 where there is none.
#include <cuda_runtime.h>

#include <cstdio>

int main() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver || (status == cudaSuccess && count == 0)) {
        std::fprintf(stderr, "%s\n", cudaGetErrorName(status));
        return 77;
    }
    cudaDeviceProp device{};
    int driver = 0;
    int runtime = 0;
    if (status != cudaSuccess || cudaGetDeviceProperties(&device, 0) != cudaSuccess ||
        cudaDriverGetVersion(&driver) != cudaSuccess || cudaRuntimeGetVersion(&runtime) != cudaSuccess) {
        std::fprintf(stderr, "%s\n", cudaGetErrorName(cudaGetLastError()));
        return 1;
    }
    std::printf(
        "{\"name\": \"%s\", \"compute_capability\": %d%d, \"multiprocessors\": %d, \"memory_bytes\": %zu, "
        "\"l2_bytes\": %d, \"shared_bytes\": %zu, \"driver\": %d, \"runtime\": %d}\n",
        device.name, device.major, device.minor, device.multiProcessorCount, device.totalGlobalMem, device.l2CacheSize,
        device.sharedMemPerBlockOptin, driver, runtime);
}
