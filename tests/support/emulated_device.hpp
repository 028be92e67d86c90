// The emulator, as support/device.hpp has it.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "support/device_span.hpp"
#include "support/emulator/machine.hpp"

namespace support {

class emulated_device {
public:
    emulated_device(emulator::machine& machine, emulator::schedule order) : machine_(machine), order_(order) {
        machine_.clear();
    }

    template <class T>
    [[nodiscard]] device_span<const T> input(const std::string& name, std::span<const T> data) {
        const auto made = machine_.copy_input(name, data);
        return {made.data(), made.size()};
    }
    template <class T>
    [[nodiscard]] device_span<T> in_out(const std::string& name, std::span<const T> data) {
        const auto made = machine_.copy_in_out(name, data);
        return {made.data(), made.size()};
    }
    template <class T>
    [[nodiscard]] device_span<T> output(const std::string& name, std::size_t n) {
        const auto made = machine_.output<T>(name, n);
        return {made.data(), made.size()};
    }
    template <class T>
    [[nodiscard]] std::vector<std::remove_const_t<T>> download(device_span<T> s) const {
        return {s.first, s.first + s.count};
    }
    template <class Kernel>
    void launch(const Kernel& kernel) {
        machine_.launch(kernel, order_);
    }

private:
    emulator::machine& machine_;
    emulator::schedule order_;
};

/// Calls body(device) once for each order, each time with a device that has nothing in its memory.
template <class Body>
void on_devices(unsigned orders, Body body) {
    static emulator::machine machine;  // keeps its fibers
    for (unsigned seed = 0; seed < orders; ++seed) {
        emulated_device device(machine, emulator::schedule::numbered(seed));
        body(device);
    }
}

}  // namespace support
