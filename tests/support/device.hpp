// Where a kernel's test runs: the emulator, or (VERKV_TEST_ON_DEVICE, tests/gpu/run.sh) a real device. A test is
// written once:
//
//     support::on_devices(6, [](auto& gpu) {
//         const auto rows = gpu.input("rows", std::span<const float>(host_rows));        // a copy, only to be read
//         const auto free = gpu.in_out("counters", std::span<const unsigned>(zeros));    // a copy, to be changed
//         const auto sums = gpu.template output<float>("sums", n);                       // undefined
//         gpu.launch(kernel{rows.data(), sums.data(), n});
//         check(gpu.download(sums));                                    // std::vector<float>
//     });
//
// The number is that of the orders of threads and blocks which the emulator tries; a device has but one. A kernel that
// runs on a device has to be in cuda/kernel_list.hpp.
#pragma once

#if defined(VERKV_TEST_ON_DEVICE)
#include "gpu/hardware_device.hpp"
#else
#include "support/emulated_device.hpp"
#endif
