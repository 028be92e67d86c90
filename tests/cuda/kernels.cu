// Every kernel for the device, and what tests call to launch them.
#include <array>

#include "cuda/kernel_list.hpp"
#include "gpu/hardware_device.hpp"
#include "verkv/cuda.cuh"

namespace support {

template <class Kernel>
void launch_on_device(const Kernel& kernel) {
    verkv::gpu::launch(nullptr, kernel);
}

namespace {

template <class... Kernels>
auto launchers(kernel_list<Kernels...>) {
    return std::array{reinterpret_cast<void (*)()>(&launch_on_device<Kernels>)...};
}

}  // namespace

// Not const, and everybody's: so the functions are there for other files.
extern std::array<void (*)(), decltype(launchers(every_kernel()))().size()> kernel_launchers;
std::array<void (*)(), decltype(launchers(every_kernel()))().size()> kernel_launchers = launchers(every_kernel());

}  // namespace support
