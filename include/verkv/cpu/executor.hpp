// The CPU backend's policy, and how work is spread over threads.
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <type_traits>

#include "verkv/core/version.hpp"

namespace verkv::inline v0 {

/// Runs independent tasks. An engine that has threads of its own implements this over them; thread_pool is ours.
class executor {
public:
    executor() = default;
    executor(const executor&) = delete;
    executor& operator=(const executor&) = delete;
    virtual ~executor() = default;

    /// How many tasks may run at once: every `worker` passed to a task is below this number.
    [[nodiscard]] virtual std::size_t workers() const noexcept = 0;

    /// Calls task(context, index, worker) for each index in 0 ... tasks-1 and returns when all are done. Two calls that
    /// run at once have different `worker`s. Tasks do not throw.
    virtual void run(std::size_t tasks, void (*task)(void* context, std::size_t index, std::size_t worker),
                     void* context) = 0;
};

/// Backend policy: the CPU, vectorised, on the caller's thread or spread over an executor.
/// Results are the same bits for any executor and any number of its threads.
struct cpu {
    executor* threads = nullptr;  ///< null: everything on the caller's thread
};

/// Tasks of a cpu policy that may run at once.
[[nodiscard]] inline std::size_t workers(const cpu& exec) noexcept {
    return exec.threads ? exec.threads->workers() : 1;
}

/// The policy for work inside a task: the same backend on the task's own thread. run() is never called from a task, so
/// that an executor need not nest.
template <std::derived_from<cpu> Backend>
[[nodiscard]] Backend sequential(Backend exec) {
    exec.threads = nullptr;
    return exec;
}

/// Calls f(index, worker) for each index in 0 ... count-1; in order on the caller's thread where there is no executor.
/// f must not throw and must not depend on the order. Allocates nothing.
template <class F>
void for_each_task(const cpu& exec, std::size_t count, F&& f) {
    if (!exec.threads || count < 2) {
        for (std::size_t i = 0; i < count; ++i) {
            f(i, std::size_t{0});
        }
        return;
    }
    using function = std::remove_reference_t<F>;
    exec.threads->run(
        count,
        [](void* context, std::size_t index, std::size_t worker) { (*static_cast<function*>(context))(index, worker); },
        const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

}  // namespace verkv::inline v0
