// Memory of a device, emulated or not.
#pragma once

#include <cstddef>

namespace support {

/// Elements in a device's memory: for kernels, not to be read by the host.
template <class T>
struct device_span {
    T* first = nullptr;
    std::size_t count = 0;

    [[nodiscard]] T* data() const { return first; }
    [[nodiscard]] std::size_t size() const { return count; }
};

}  // namespace support
