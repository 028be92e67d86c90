// A real device, as support/device.hpp has it. For the host's compiler: kernels come from cuda/kernels.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "support/device_span.hpp"

namespace support {

/// Puts a kernel on the default stream. Defined for the kernels of cuda/kernel_list.hpp.
template <class Kernel>
void launch_on_device(const Kernel& kernel);

class hardware_device {
public:
    hardware_device() = default;
    hardware_device(const hardware_device&) = delete;
    hardware_device& operator=(const hardware_device&) = delete;
    ~hardware_device() {
        for (void* p : owned_) {
            (void)cudaFree(p);
        }
    }

    template <class T>
    [[nodiscard]] device_span<const T> input(const std::string& name, std::span<const T> data) {
        const auto made = in_out(name, data);
        return {made.first, made.count};
    }
    template <class T>
    [[nodiscard]] device_span<T> in_out(const std::string& name, std::span<const T> data) {
        const auto made = allocate<T>(name, data.size());
        check(cudaMemcpy(made.first, data.data(), data.size_bytes(), cudaMemcpyHostToDevice), name);
        return made;
    }
    template <class T>
    [[nodiscard]] device_span<T> output(const std::string& name, std::size_t n) {
        return allocate<T>(name, n);
    }
    template <class T>
    [[nodiscard]] std::vector<std::remove_const_t<T>> download(device_span<T> s) const {
        std::vector<std::remove_const_t<T>> host(s.count);
        check(cudaMemcpy(host.data(), s.first, s.count * sizeof(T), cudaMemcpyDeviceToHost), "download");
        return host;
    }
    /// Returns when the kernel has run.
    template <class Kernel>
    void launch(const Kernel& kernel) {
        launch_on_device(kernel);
        check(cudaDeviceSynchronize(), "a kernel");
    }

private:
    template <class T>
    [[nodiscard]] device_span<T> allocate(const std::string& name, std::size_t n) {
        void* p = nullptr;
        check(cudaMalloc(&p, n > 0 ? n * sizeof(T) : 1), name);
        owned_.push_back(p);
        return {static_cast<T*>(p), n};
    }
    static void check(cudaError_t status, const std::string& what) {
        if (status != cudaSuccess) {
            throw std::runtime_error(what + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
        }
    }

    std::vector<void*> owned_;
};

/// Calls body(device) once: a device has its own order.
template <class Body>
void on_devices(unsigned, Body body) {
    hardware_device device;
    body(device);
}

}  // namespace support
