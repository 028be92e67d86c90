// The emulated device: global memory and launches.
#pragma once

#include <cxxabi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "support/emulator/emulated_block.hpp"

namespace emulator {

/// A device without hardware. Kernels get ordinary pointers, into buffers that are made known to it first:
///
///     emulator::machine gpu;
///     gpu.input("rows", std::span<const float>(rows));      // read only, yours
///     std::span<float> sums = gpu.output<float>("sums", n); // made here, undefined until a kernel writes it
///     gpu.launch(kernel, emulator::schedule::numbered(seed));
///
/// launch() throws a fault where a thread does what verkv::gpu::block forbids. One thread at a time may use a machine.
class machine {
public:
    /// Shared memory that a block of any launch may ask for: 163 KiB, what sm_80 has. (sm_90 and sm_100 have 227 KiB.)
    std::size_t most_shared_bytes = 163 * 1024;

    /// Accesses to memory in one launch before it is taken to wait for ever.
    std::uint64_t most_accesses = std::uint64_t{1} << 30;

    machine() = default;
    machine(const machine&) = delete;
    machine& operator=(const machine&) = delete;
    ~machine() { stop(); }

    /// Memory of the caller's, which kernels may read.
    template <class T>
    void input(std::string name, std::span<const T> data) {
        memory_.watch(std::move(name), data);
    }
    /// Memory of the caller's, defined, which kernels may read and write.
    template <class T>
    void in_out(std::string name, std::span<T> data) {
        static_assert(!std::is_const_v<T>);
        memory_.watch(std::move(name), data);
    }
    /// Memory as cudaMalloc gives it: undefined.
    template <class T>
    [[nodiscard]] std::span<T> output(std::string name, std::size_t n) {
        return memory_.allocate<T>(std::move(name), n, nullptr);
    }
    /// A copy, aligned as cudaMalloc does, which kernels may read.
    template <class T>
    [[nodiscard]] std::span<const T> copy_input(std::string name, std::span<const T> data) {
        return memory_.allocate<const T>(std::move(name), data.size(), data.data());
    }
    /// A copy, aligned as cudaMalloc does, which kernels may read and write.
    template <class T>
    [[nodiscard]] std::span<T> copy_in_out(std::string name, std::span<const T> data) {
        return memory_.allocate<T>(std::move(name), data.size(), data.data());
    }
    /// Forgets a buffer, by its first element.
    void forget(const void* first) { memory_.forget(first); }

    /// Forgets all buffers; those that were made here are gone.
    void clear() { memory_.clear(); }

    /// Runs a kernel to its end.
    template <verkv::gpu::kernel Kernel>
    void launch(const Kernel& kernel, schedule order = {}) {
        launch_state launch;
        launch.kernel = name_of_type(typeid(Kernel));
        launch.shape = kernel.shape();
        check(launch, Kernel::most_threads);
        launch.most_accesses = most_accesses;
        launch.order = order;
        launch.memory = &memory_;
        launch.number = ++launches_;
        launch.random = dice(order.seed);
        const std::size_t blocks = std::size_t{launch.shape.blocks_x} * launch.shape.blocks_y;
        launch.blocks.resize(blocks);
        const auto body = [&kernel](block_run& run, std::uint32_t thread) {
            emulated_block block(run, thread);
            kernel(block);
        };
        try {
            run(launch, body);
        } catch (...) {
            stop();
            throw;
        }
    }

private:
    template <class Body>
    void run(launch_state& launch, const Body& body) {
        std::vector<std::uint32_t> order(launch.blocks.size());
        std::iota(order.begin(), order.end(), 0u);
        if (launch.order.seed != 0) {
            for (std::size_t k = order.size(); k > 1; --k) {
                std::swap(order[k - 1], order[launch.random.roll(static_cast<std::uint32_t>(k))]);
            }
        }
        const std::size_t at_once = (std::min)(std::size_t{launch.order.resident_blocks}, order.size());
        while (runs_.size() < at_once) {
            runs_.push_back(std::make_unique<block_run>());
        }
        std::size_t next = 0;
        std::vector<block_run*> live;
        for (; next < at_once; ++next) {
            runs_[next]->begin(launch, order[next], body);
            live.push_back(runs_[next].get());
        }
        while (!live.empty()) {
            const std::size_t k = live.size() == 1 ? 0 : launch.random.roll(static_cast<std::uint32_t>(live.size()));
            live[k]->step();
            if (!live[k]->ended()) {
                continue;
            }
            if (next < order.size()) {
                live[k]->begin(launch, order[next], body);
                ++next;
            } else {
                live.erase(live.begin() + static_cast<std::ptrdiff_t>(k));
            }
        }
    }

    void check(const launch_state& launch, unsigned most_threads) const {
        const verkv::gpu::launch_shape& s = launch.shape;
        if (s.threads == 0 || s.threads % 32 != 0 || s.threads > most_threads) {
            throw fault(joined("emulator: ", launch.kernel, ": blocks of ", s.threads,
                               " threads; a multiple of 32, at most ", most_threads, ", is needed"));
        }
        if (s.shared_bytes > most_shared_bytes) {
            throw fault(joined("emulator: ", launch.kernel, ": ", s.shared_bytes, " bytes of shared memory; there are ",
                               most_shared_bytes));
        }
        if (s.blocks_y > 65535 || s.blocks_x > 0x7fffffffu) {
            throw fault(joined("emulator: ", launch.kernel, ": ", s.blocks_x, " x ", s.blocks_y,
                               " blocks; at most 2^31 - 1 x 65535"));
        }
    }

    void stop() {
        for (const auto& run : runs_) {
            run->stop();
        }
    }

    static std::string name_of_type(const std::type_info& type) {
        const std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(type.name(), nullptr, nullptr, nullptr),
                                                          std::free);
        return name ? name.get() : type.name();
    }

    global_memory memory_;
    std::vector<std::unique_ptr<block_run>> runs_;
    std::uint32_t launches_ = 0;
};

}  // namespace emulator
