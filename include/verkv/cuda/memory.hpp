// Where a store's memory comes from, and when what lies in it may be used again.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#include "verkv/core/version.hpp"

namespace verkv::inline v0::gpu {

/// Gives and takes back memory, aligned to 256 bytes: of the device, pinned on the host, an engine's own. allocate(n)
/// throws where there is none; n > 0. Copies of a resource are the same resource.
template <class R>
concept memory_resource = std::copyable<R> && requires(R& r, void* p, std::size_t bytes) {
    { r.allocate(bytes) } -> std::same_as<void*>;
    r.deallocate(p, bytes);
};

/// Says when work that was given to the device is over. mark() returns a number for all work so far, on every stream
/// that touches the store; numbers do not decrease. completed() is the largest number all of whose work is over, 0 at
/// first. Neither waits for the device.
template <class L>
concept timeline = requires(L& line) {
    { line.mark() } -> std::same_as<std::uint64_t>;
    { line.completed() } -> std::same_as<std::uint64_t>;
};

/// Ordinary memory: where the device is a CPU, and for tests.
struct host_memory {
    [[nodiscard]] void* allocate(std::size_t bytes) const { return ::operator new (bytes, std::align_val_t{256}); }
    void deallocate(void* p, std::size_t bytes) const noexcept { ::operator delete (p, bytes, std::align_val_t{256}); }
};

/// Work is over when the call that asked for it returns.
struct host_timeline {
    [[nodiscard]] static std::uint64_t mark() noexcept { return 0; }
    [[nodiscard]] static std::uint64_t completed() noexcept { return 0; }
};

/// n elements of T from a resource, uninitialised; given back at the end.
template <class T, memory_resource R>
class buffer {
public:
    buffer(R resource, std::size_t n)
        : resource_(std::move(resource)),
          data_(n == 0 ? nullptr : static_cast<T*>(resource_.allocate(n * sizeof(T)))),
          size_(n) {}
    buffer(const buffer&) = delete;
    buffer& operator=(const buffer&) = delete;
    buffer(buffer&& other) noexcept
        : resource_(other.resource_),
          data_(std::exchange(other.data_, nullptr)),
          size_(std::exchange(other.size_, 0)) {}
    ~buffer() {
        if (data_ != nullptr) {
            resource_.deallocate(data_, size_ * sizeof(T));
        }
    }

    [[nodiscard]] T* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

private:
    R resource_;
    T* data_;
    std::size_t size_;
};

}  // namespace verkv::inline v0::gpu
