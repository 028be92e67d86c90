// Global memory: the buffers that a kernel may touch, with a shadow of those that it may write.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/emulator/fault.hpp"
#include "support/emulator/shadow.hpp"

namespace emulator {

/// A stretch of global memory.
struct buffer {
    std::string name;
    std::uintptr_t first = 0;
    std::size_t bytes = 0;
    std::size_t element = 1;  ///< bytes that a shadow cell stands for
    bool writable = false;
    std::vector<shadow_cell> cells;     ///< one an element; none of memory that is only read
    std::vector<std::uint32_t> launch;  ///< that a cell tells of
};

/// All buffers. Memory is either somebody else's, watched, or made here: aligned as cudaMalloc does, undefined until
/// written, and far enough from the next buffer that an index slightly out of range is not in it.
class global_memory {
public:
    template <class T>
    void watch(std::string name, std::span<T> data) {
        static_assert(std::is_trivially_copyable_v<T>);
        buffer b;
        b.name = std::move(name);
        b.first = reinterpret_cast<std::uintptr_t>(data.data());
        b.bytes = data.size_bytes();
        b.element = sizeof(T);
        b.writable = !std::is_const_v<T>;
        if (b.writable) {
            b.cells.resize(data.size());
            b.launch.resize(data.size());
            for (shadow_cell& cell : b.cells) {
                cell.written = true;
            }
        }
        insert(std::move(b));
    }

    /// New memory, undefined; with values, it is that of a copy. T const: kernels may only read it, and it takes no
    /// shadow.
    template <class T>
    [[nodiscard]] std::span<T> allocate(std::string name, std::size_t n, const std::remove_const_t<T>* values) {
        using element = std::remove_const_t<T>;
        const std::size_t bytes = n * sizeof(T);
        owned_.emplace_back(static_cast<std::byte*>(::operator new (bytes + 2 * gap, std::align_val_t{256})));
        element* first = reinterpret_cast<element*>(owned_.back().get() + gap);
        std::memset(owned_.back().get(), 0xcd, bytes + 2 * gap);
        if (n > 0 && values != nullptr) {
            std::memcpy(static_cast<void*>(first), values, bytes);
        }
        watch(std::move(name), std::span<T>(first, n));
        if (n > 0 && values == nullptr) {
            for (shadow_cell& cell : find(reinterpret_cast<std::uintptr_t>(first))->cells) {
                cell.written = false;
            }
        }
        return {first, n};
    }

    /// Forgets a buffer.
    void forget(const void* first) {
        std::erase_if(buffers_, [&](const buffer& b) { return b.first == reinterpret_cast<std::uintptr_t>(first); });
        last_ = 0;
    }

    /// Forgets all buffers, and gives back the memory that was made here.
    void clear() {
        buffers_.clear();
        owned_.clear();
        last_ = 0;
    }

    /// The buffer that holds an address, or null.
    [[nodiscard]] buffer* find(std::uintptr_t p) {
        if (last_ < buffers_.size() && p - buffers_[last_].first < buffers_[last_].bytes) {
            return &buffers_[last_];
        }
        const auto after = std::upper_bound(buffers_.begin(), buffers_.end(), p,
                                            [](std::uintptr_t at, const buffer& b) { return at < b.first; });
        if (after == buffers_.begin() || p - (after - 1)->first >= (after - 1)->bytes) {
            return nullptr;
        }
        last_ = static_cast<std::size_t>(after - buffers_.begin()) - 1;
        return &buffers_[last_];
    }

    /// The buffer that ends last before an address, for messages; null where there is none.
    [[nodiscard]] const buffer* before(std::uintptr_t p) const {
        const buffer* found = nullptr;
        for (const buffer& b : buffers_) {
            if (b.first <= p) {
                found = &b;
            }
        }
        return found;
    }

private:
    static constexpr std::size_t gap = 4096;
    struct release {
        void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{256}); }
    };

    void insert(buffer b) {
        if (b.bytes == 0) {
            return;
        }
        const auto at = std::upper_bound(buffers_.begin(), buffers_.end(), b.first,
                                         [](std::uintptr_t p, const buffer& other) { return p < other.first; });
        const bool overlaps = (at != buffers_.end() && at->first - b.first < b.bytes) ||
                              (at != buffers_.begin() && b.first - (at - 1)->first < (at - 1)->bytes);
        if (overlaps) {
            throw fault(joined("emulator: buffer ", b.name, " overlaps another one"));
        }
        buffers_.insert(at, std::move(b));
        last_ = 0;
    }

    std::vector<buffer> buffers_;  // by address
    std::vector<std::unique_ptr<std::byte, release>> owned_;
    std::size_t last_ = 0;
};

}  // namespace emulator
