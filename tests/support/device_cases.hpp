// Many cases of a kernel's test, in several orders of threads and blocks.
#pragma once

#include "support/device.hpp"

namespace support {

/// Calls body(device, case) for each case 0 ... cases-1 once: in the emulator each in one of nine orders, on a device
/// in its own.
template <class Body>
void on_cases(unsigned cases, Body body) {
#if defined(VERKV_TEST_ON_DEVICE)
    on_devices(1, [&](auto& gpu) {
        for (unsigned c = 0; c < cases; ++c) {
            body(gpu, c);
        }
    });
#else
    constexpr unsigned orders = 9;
    unsigned order = 0;
    on_devices(orders, [&](auto& gpu) {
        for (unsigned c = order; c < cases; c += orders) {
            body(gpu, c);
        }
        ++order;
    });
#endif
}

}  // namespace support
