// Toy kernels for the tests of the emulator: a lambda for a body.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>

#include "support/emulator/machine.hpp"

namespace emulator {

/// A kernel whose threads call body(block).
template <class Body>
struct toy {
    static constexpr unsigned most_threads = verkv::gpu::most_block_threads;

    verkv::gpu::launch_shape form;
    Body body;

    [[nodiscard]] verkv::gpu::launch_shape shape() const { return form; }
    template <class Block>
    void operator()(Block& b) const {
        body(b);
    }
};
template <class Body>
toy(verkv::gpu::launch_shape, Body) -> toy<Body>;

/// Orders that a test tries: all grains, one block at a time and several.
inline constexpr unsigned orders = 18;

/// What the fault says that a kernel ends with; empty where there is none.
template <class Kernel>
std::string fault_of(machine& gpu, const Kernel& kernel, schedule order = {}) {
    try {
        gpu.launch(kernel, order);
    } catch (const fault& f) {
        return f.what();
    }
    return {};
}

/// Whether a kernel is refused in every order, each time with all of the parts in the message.
template <class Kernel>
bool caught(machine& gpu, const Kernel& kernel, std::initializer_list<std::string> parts) {
    for (unsigned seed = 0; seed < orders; ++seed) {
        const std::string message = fault_of(gpu, kernel, schedule::numbered(seed));
        for (const std::string& part : parts) {
            if (message.find(part) == std::string::npos) {
                return false;
            }
        }
        if (message.empty()) {
            return false;
        }
    }
    return true;
}

/// What the first fault says in any order; empty where the kernel runs in all of them.
template <class Kernel>
std::string first_fault(machine& gpu, const Kernel& kernel) {
    for (unsigned seed = 0; seed < orders; ++seed) {
        const std::string message = fault_of(gpu, kernel, schedule::numbered(seed));
        if (!message.empty()) {
            return message;
        }
    }
    return {};
}

}  // namespace emulator
