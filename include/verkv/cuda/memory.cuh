// Memory of the CUDA runtime, and when its work is over.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>

#include "verkv/cuda/launch.cuh"
#include "verkv/cuda/memory.hpp"

namespace verkv::inline v0::gpu {

/// Memory of the current device. Throws cuda_error where there is none left. Waits for the device: not for a step.
struct device_memory {
    [[nodiscard]] void* allocate(std::size_t bytes) const {
        void* p = nullptr;
        detail::check_cuda(cudaMalloc(&p, bytes), "device memory of ", bytes, " bytes");
        return p;
    }
    void deallocate(void* p, std::size_t) const noexcept { (void)cudaFree(p); }
};

/// Memory of the host that all devices reach under the same address. Throws cuda_error where there is none left.
struct pinned_memory {
    [[nodiscard]] void* allocate(std::size_t bytes) const {
        void* p = nullptr;
        detail::check_cuda(cudaHostAlloc(&p, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "pinned memory of ",
                           bytes, " bytes");
        return p;
    }
    void deallocate(void* p, std::size_t) const noexcept { (void)cudaFreeHost(p); }
};

/// The work of one stream. Where several streams touch a store, they have to be joined to this one before mark().
/// An event a mark; those that are over are used again. Not while the stream is captured.
class stream_timeline {
public:
    explicit stream_timeline(cudaStream_t stream) : stream_(stream) {}
    stream_timeline(const stream_timeline&) = delete;
    stream_timeline& operator=(const stream_timeline&) = delete;
    ~stream_timeline() {
        for (const mark_event& m : pending_) {
            (void)cudaEventDestroy(m.event);
        }
        for (const cudaEvent_t event : spare_) {
            (void)cudaEventDestroy(event);
        }
    }

    /// Throws cuda_error where the runtime refuses an event.
    [[nodiscard]] std::uint64_t mark() {
        cudaEvent_t event = nullptr;
        if (spare_.empty()) {
            detail::check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
        } else {
            event = spare_.back();
            spare_.pop_back();
        }
        pending_.push_back({event, marked_ + 1});
        detail::check_cuda(cudaEventRecord(event, stream_), "a mark on a stream");
        return ++marked_;
    }

    /// Throws cuda_error where work on the stream has failed.
    [[nodiscard]] std::uint64_t completed() {
        while (!pending_.empty()) {
            const cudaError_t state = cudaEventQuery(pending_.front().event);
            if (state == cudaErrorNotReady) {
                break;
            }
            detail::check_cuda(state, "work before mark ", pending_.front().number);
            completed_ = pending_.front().number;
            spare_.push_back(pending_.front().event);
            pending_.pop_front();
        }
        return completed_;
    }

private:
    struct mark_event {
        cudaEvent_t event;
        std::uint64_t number;
    };

    cudaStream_t stream_;
    std::deque<mark_event> pending_;
    std::deque<cudaEvent_t> spare_;
    std::uint64_t marked_ = 0;
    std::uint64_t completed_ = 0;
};

static_assert(memory_resource<device_memory> && memory_resource<pinned_memory> && timeline<stream_timeline>);

}  // namespace verkv::inline v0::gpu
