// Counts what is allocated: operator new of the whole program is replaced in allocations.cpp.
#pragma once

#include <cstddef>
#include <utility>

namespace support {

/// Calls of any operator new so far, by all threads.
std::size_t allocations() noexcept;

/// Calls of operator new while f runs.
template <class F>
std::size_t allocations_of(F&& f) {
    const std::size_t before = allocations();
    std::forward<F>(f)();
    return allocations() - before;
}

}  // namespace support
