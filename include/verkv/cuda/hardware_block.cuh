// A block of threads as the device has it. Everything is inlined to the instructions of the same name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"

#if !defined(__CUDACC__)
#error "verkv: hardware_block.cuh needs nvcc"
#endif

// The kernels are host and device code, so the compiler also makes a host version of this class, which nobody calls.
#if defined(__CUDA_ARCH__)
#define VERKV_ON_DEVICE(...) __VA_ARGS__
#else
#define VERKV_ON_DEVICE(...) std::abort()
#endif

namespace verkv::inline v0::gpu {

/// One thread of a block on the device; a model of `block`, where the meaning of everything is told.
/// Checks nothing: what `block` forbids is undefined here. Holds one number, which the compiler folds away.
class hardware_block {
public:
    template <class T>
    class shared {
    public:
        __host__ __device__ __forceinline__ explicit shared(T* first) noexcept : first_(first) {}
        __host__ __device__ __forceinline__ T& operator[](std::size_t i) const noexcept { return first_[i]; }
        [[nodiscard]] __host__ __device__ __forceinline__ T get(std::size_t i) const noexcept { return first_[i]; }
        __host__ __device__ __forceinline__ void set(std::size_t i, const T& v) const noexcept { first_[i] = v; }

    private:
        T* first_;
    };

    // Who am I.
    __host__ __device__ __forceinline__ unsigned thread() const { VERKV_ON_DEVICE(return threadIdx.x); }
    __host__ __device__ __forceinline__ unsigned threads() const { VERKV_ON_DEVICE(return blockDim.x); }
    __host__ __device__ __forceinline__ unsigned lane() const { return thread() % warp_size; }
    __host__ __device__ __forceinline__ unsigned warp() const { return thread() / warp_size; }
    __host__ __device__ __forceinline__ unsigned warps() const { return threads() / warp_size; }
    __host__ __device__ __forceinline__ unsigned block_index() const { VERKV_ON_DEVICE(return blockIdx.x); }
    __host__ __device__ __forceinline__ unsigned blocks() const { VERKV_ON_DEVICE(return gridDim.x); }
    __host__ __device__ __forceinline__ unsigned block_index_y() const { VERKV_ON_DEVICE(return blockIdx.y); }
    __host__ __device__ __forceinline__ unsigned blocks_y() const { VERKV_ON_DEVICE(return gridDim.y); }

    // Barriers.
    __host__ __device__ __forceinline__ void sync() const { VERKV_ON_DEVICE(__syncthreads()); }
    __host__ __device__ __forceinline__ void sync_warp([[maybe_unused]] unsigned mask = all_lanes) const {
        VERKV_ON_DEVICE(__syncwarp(mask));
    }

    // Warp.
    template <class T>
    __host__ __device__ __forceinline__ T shuffle([[maybe_unused]] T v, [[maybe_unused]] unsigned lane,
                                                  [[maybe_unused]] unsigned mask = all_lanes) const {
        VERKV_ON_DEVICE(return __shfl_sync(mask, v, static_cast<int>(lane)));
    }
    template <class T>
    __host__ __device__ __forceinline__ T shuffle_xor([[maybe_unused]] T v, [[maybe_unused]] unsigned bits,
                                                      [[maybe_unused]] unsigned mask = all_lanes) const {
        VERKV_ON_DEVICE(return __shfl_xor_sync(mask, v, static_cast<int>(bits)));
    }
    template <class T>
    __host__ __device__ __forceinline__ T shuffle_down([[maybe_unused]] T v, [[maybe_unused]] unsigned delta,
                                                       [[maybe_unused]] unsigned mask = all_lanes) const {
        VERKV_ON_DEVICE(return __shfl_down_sync(mask, v, delta));
    }
    template <class T>
    __host__ __device__ __forceinline__ T shuffle_up([[maybe_unused]] T v, [[maybe_unused]] unsigned delta,
                                                     [[maybe_unused]] unsigned mask = all_lanes) const {
        VERKV_ON_DEVICE(return __shfl_up_sync(mask, v, delta));
    }
    __host__ __device__ __forceinline__ unsigned ballot([[maybe_unused]] bool p,
                                                        [[maybe_unused]] unsigned mask = all_lanes) const {
        VERKV_ON_DEVICE(return __ballot_sync(mask, p));
    }
    __host__ __device__ __forceinline__ bool any([[maybe_unused]] bool p,
                                                 [[maybe_unused]] unsigned mask = all_lanes) const {
        VERKV_ON_DEVICE(return __any_sync(mask, p) != 0);
    }
    __host__ __device__ __forceinline__ bool all([[maybe_unused]] bool p,
                                                 [[maybe_unused]] unsigned mask = all_lanes) const {
        VERKV_ON_DEVICE(return __all_sync(mask, p) != 0);
    }

    // Shared memory.
    template <class T>
    __host__ __device__ __forceinline__ shared<T> allocate_shared([[maybe_unused]] std::size_t n) {
        static_assert(std::is_trivially_copyable_v<T>, "shared memory holds plain data");
#if defined(__CUDA_ARCH__)
        extern __shared__ uint4 verkv_shared_memory[];
        const std::size_t at = shared_layout::place<T>(used_);
        used_ = at + n * sizeof(T);
        return shared<T>(reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(verkv_shared_memory) + at));
#else
        std::abort();
#endif
    }

    // Atomics.
    template <class T>
    __host__ __device__ __forceinline__ T atomic_add(T* p, std::type_identity_t<T> v) const {
        VERKV_ON_DEVICE(return static_cast<T>(atomicAdd(word(p), word_of(v))));
    }
    template <class T>
    __host__ __device__ __forceinline__ T atomic_max(T* p, std::type_identity_t<T> v) const {
        static_assert(std::is_integral_v<T>, "the maximum of floats goes through ordered_bits()");
        VERKV_ON_DEVICE(return static_cast<T>(atomicMax(word(p), word_of(v))));
    }
    template <class T>
    __host__ __device__ __forceinline__ T atomic_min(T* p, std::type_identity_t<T> v) const {
        static_assert(std::is_integral_v<T>, "the minimum of floats goes through ordered_bits()");
        VERKV_ON_DEVICE(return static_cast<T>(atomicMin(word(p), word_of(v))));
    }
    template <class T>
    __host__ __device__ __forceinline__ T atomic_exchange(T* p, std::type_identity_t<T> v) const {
        if constexpr (std::is_same_v<T, double>) {
            VERKV_ON_DEVICE(return __longlong_as_double(static_cast<long long>(atomicExch(
                reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(__double_as_longlong(v))))));
        } else {
            VERKV_ON_DEVICE(return static_cast<T>(atomicExch(word(p), word_of(v))));
        }
    }
    template <class T>
    __host__ __device__ __forceinline__ T atomic_add(shared<T> s, std::size_t i, std::type_identity_t<T> v) const {
        return atomic_add(&s[i], v);
    }
    template <class T>
    __host__ __device__ __forceinline__ T atomic_max(shared<T> s, std::size_t i, std::type_identity_t<T> v) const {
        return atomic_max(&s[i], v);
    }
    template <class T>
    __host__ __device__ __forceinline__ T atomic_min(shared<T> s, std::size_t i, std::type_identity_t<T> v) const {
        return atomic_min(&s[i], v);
    }
    template <class T>
    __host__ __device__ __forceinline__ T atomic_exchange(shared<T> s, std::size_t i, std::type_identity_t<T> v) const {
        return atomic_exchange(&s[i], v);
    }

    // Global memory. Elements that the instructions do not know by name move as words of their size.
    template <class T>
    __host__ __device__ __forceinline__ T load_global(const T* p) const {
        return *p;
    }
    template <class T>
    __host__ __device__ __forceinline__ T load_readonly([[maybe_unused]] const T* p) const {
        VERKV_ON_DEVICE(return bits_as<T>(__ldg(reinterpret_cast<const bits_of<sizeof(T)>*>(p))));
    }
    template <class T>
    __host__ __device__ __forceinline__ T load_coherent([[maybe_unused]] const T* p) const {
        VERKV_ON_DEVICE(return bits_as<T>(__ldcg(reinterpret_cast<const bits_of<sizeof(T)>*>(p))));
    }
    template <class T>
    __host__ __device__ __forceinline__ void store_global(T* p, std::type_identity_t<T> v) const {
        *p = v;
    }
    template <std::size_t Bytes, class T>
    __host__ __device__ __forceinline__ pack<T, Bytes / sizeof(T)> load_vector(const T* p) const {
        return bits_as<pack<T, Bytes / sizeof(T)>>(*reinterpret_cast<const bits_of<Bytes>*>(p));
    }
    template <std::size_t Bytes, class T>
    __host__ __device__ __forceinline__ pack<T, Bytes / sizeof(T)> load_readonly_vector(
        [[maybe_unused]] const T* p) const {
        using vector = pack<T, Bytes / sizeof(T)>;
        VERKV_ON_DEVICE(return bits_as<vector>(__ldg(reinterpret_cast<const bits_of<Bytes>*>(p))));
    }
    template <std::size_t Bytes, class T>
    __host__ __device__ __forceinline__ pack<T, Bytes / sizeof(T)> load_coherent_vector(
        [[maybe_unused]] const T* p) const {
        using vector = pack<T, Bytes / sizeof(T)>;
        VERKV_ON_DEVICE(return bits_as<vector>(__ldcg(reinterpret_cast<const bits_of<Bytes>*>(p))));
    }
    template <class T, std::size_t N>
    __host__ __device__ __forceinline__ void store_vector(T* p, const pack<T, N>& v) const {
        *reinterpret_cast<bits_of<N * sizeof(T)>*>(p) = bits_as<bits_of<N * sizeof(T)>>(v);
    }
    __host__ __device__ __forceinline__ void fence() const {
        VERKV_ON_DEVICE(__threadfence());
    }

private:
    template <std::size_t Bytes>
    static auto bits_of_size() {
        if constexpr (Bytes == 1) {
            return (unsigned char){};
        } else if constexpr (Bytes == 2) {
            return (unsigned short){};
        } else if constexpr (Bytes == 4) {
            return unsigned{};
        } else if constexpr (Bytes == 8) {
            return uint2{};
        } else {
            static_assert(Bytes == 16, "the device moves 1, 2, 4, 8 or 16 bytes at a time");
            return uint4{};
        }
    }
    template <std::size_t Bytes>
    using bits_of = decltype(bits_of_size<Bytes>());

    /// The 64-bit integers of the standard library, under the name that the device's functions know.
    template <class T>
    __host__ __device__ __forceinline__ static auto word_of(T v) {
        if constexpr (std::is_integral_v<T> && sizeof(T) == 8) {
            return static_cast<unsigned long long>(v);
        } else {
            return v;
        }
    }
    template <class T>
    __host__ __device__ __forceinline__ static auto word(T* p) {
        static_assert(!std::is_integral_v<T> || sizeof(T) < 8 || std::is_unsigned_v<T>,
                      "unsigned where it has 64 bits");
        return reinterpret_cast<decltype(word_of(T{}))*>(p);
    }

    std::size_t used_ = 0;
};

static_assert(block<hardware_block>);

}  // namespace verkv::inline v0::gpu

#undef VERKV_ON_DEVICE
