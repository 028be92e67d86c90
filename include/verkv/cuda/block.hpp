// What a kernel sees of the machine: threads in warps and blocks, shared memory, barriers, atomics, global memory.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "verkv/core/host_device.hpp"

namespace verkv::inline v0::gpu {

/// Threads that run in step and can shuffle.
inline constexpr unsigned warp_size = 32;
/// Every lane of a warp, as a mask.
inline constexpr unsigned all_lanes = 0xffffffffu;
/// Most threads that a block can have.
inline constexpr unsigned most_block_threads = 1024;

/// Most rows of blocks that a launch can have: KV heads or query heads of a batch.
inline constexpr unsigned most_blocks_y = 65535;

/// How much of the machine a launch takes: blocks_x * blocks_y blocks of `threads` threads, each with `shared_bytes` of
/// shared memory. threads is a multiple of 32, at most Kernel::most_threads: so no warp lacks a lane. A launch of no
/// blocks does nothing.
struct launch_shape {
    unsigned blocks_x = 1;
    unsigned blocks_y = 1;
    unsigned threads = warp_size;
    std::size_t shared_bytes = 0;
};

/// N elements that move in one instruction; aligned to their size.
template <class T, std::size_t N>
struct alignas(N * sizeof(T)) pack {
    T at[N];
};

/// Bytes of shared memory that a block's arrays take, told in the order in which the kernel allocates them.
///     shared_layout().array<float>(threads).array<unsigned>(bins).bytes()
/// Host and device.
class shared_layout {
public:
    template <class T>
    [[nodiscard]] VERKV_HOST_DEVICE constexpr shared_layout array(std::size_t n) const noexcept {
        shared_layout next;
        next.bytes_ = place<T>(bytes_) + n * sizeof(T);
        return next;
    }

    /// Where an array of T begins that comes after `used` bytes.
    template <class T>
    [[nodiscard]] VERKV_HOST_DEVICE static constexpr std::size_t place(std::size_t used) noexcept {
        static_assert(alignof(T) <= 16, "shared memory is aligned to 16 bytes");
        return (used + alignof(T) - 1) / alignof(T) * alignof(T);
    }

    [[nodiscard]] VERKV_HOST_DEVICE constexpr std::size_t bytes() const noexcept { return bytes_; }

private:
    std::size_t bytes_ = 0;
};

/// Set bits of a mask. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE inline unsigned count_bits(unsigned mask) noexcept {
#if defined(__CUDA_ARCH__)
    return static_cast<unsigned>(__popc(mask));
#else
    return static_cast<unsigned>(std::popcount(mask));
#endif
}

/// Lowest set bit of a mask; 32 where there is none. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE inline unsigned lowest_bit(unsigned mask) noexcept {
#if defined(__CUDA_ARCH__)
    return mask == 0 ? warp_size : static_cast<unsigned>(__ffs(static_cast<int>(mask)) - 1);
#else
    return static_cast<unsigned>(std::countr_zero(mask));
#endif
}

/// The lanes below a lane, as a mask. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE constexpr unsigned lanes_below(unsigned lane) noexcept {
    return (1u << lane) - 1;
}

/// A float as an unsigned number of the same order, so that integer atomics take its maximum: -inf < ... < -0 < 0 <
/// ... < inf. NaNs lie beyond the infinity of their sign. Exact. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE constexpr std::uint32_t ordered_bits(float x) noexcept {
    const auto bits = bits_as<std::uint32_t>(x);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

/// The float of an ordered number. Inverse of ordered_bits(). Host and device.
[[nodiscard]] VERKV_HOST_DEVICE constexpr float from_ordered_bits(std::uint32_t ordered) noexcept {
    return bits_as<float>((ordered & 0x80000000u) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

/// One thread's view of the block it runs in. A kernel's operator()(Block&) is called by every thread of a block, each
/// with a Block of its own, and knows nothing but what is here: hardware_block.cuh is the device, the tests have an
/// emulator that refuses what this comment forbids. T has 32 or 64 bits and is arithmetic where values are shuffled or
/// changed atomically, and trivially copyable elsewhere. `mask` is a set of lanes.
///
/// Who am I (constant during a launch)
///     unsigned thread(), threads();                in the block; threads() is a multiple of 32
///     unsigned lane(), warp(), warps();            lane = thread % 32, warp = thread / 32
///     unsigned block_index(), blocks();            along x
///     unsigned block_index_y(), blocks_y();
///
/// Barriers. Nobody may have returned, and all come to the same place in the program.
///     void sync();                                 all threads of the block; what was written before can be read after
///     void sync_warp(mask = all_lanes);            the same for the lanes of a mask, which holds the caller
///
/// Warp. All lanes of the mask take part, in the same place and with the same mask, which holds the caller; lanes
/// outside do something else. These order no memory accesses: sync_warp() does.
///     T shuffle(T v, unsigned lane, mask);         v of a lane of the mask
///     T shuffle_xor(T v, unsigned bits, mask);     of lane ^ bits, which is in the mask
///     T shuffle_down(T v, unsigned delta, mask);   of lane + delta; one's own v where that is not below 32
///     T shuffle_up(T v, unsigned delta, mask);     of lane - delta; one's own v where that is below 0
///     unsigned ballot(bool, mask);                 bit l: lane l of the mask said true
///     bool any(bool, mask), all(bool, mask);
///
/// Shared memory. Carved from launch_shape::shared_bytes in the order of the calls; every thread makes the same calls
/// with the same n. Contents are undefined until written. shared_layout says how many bytes they take.
///     shared<T> allocate_shared<T>(std::size_t n);
///     view.get(i), view.set(i, v);                 i < n
///     view[i]                                      as a reference; `auto x = view[i]` keeps the reference: use get()
/// Two threads that touch an element, one of them writing, have a sync() between them, or a sync_warp() that both take
/// part in; or all of them use atomics.
///
/// Atomics return the value before. (shared view, i, v) or (pointer to global memory, v).
///     T atomic_add(...)                            float, double, int, unsigned, 64-bit unsigned. Sums of floats
///     depend
///                                                  on the order of threads: not for what decides.
///     T atomic_max(...), atomic_min(...)           int, unsigned, 64-bit unsigned; floats through ordered_bits()
///     T atomic_exchange(...)                       those of atomic_add
///
/// Global memory: never through a plain dereference. Pointers are aligned to what is read: sizeof(T), or `bytes`.
///     T load_global(const T*);                     a plain load
///     T load_readonly(const T*);                   of what no thread of this launch writes; through the read-only
///     cache T load_coherent(const T*);                   of what other blocks of this launch wrote; from the L2 cache
///     void store_global(T*, T);
///     pack<T, bytes / sizeof(T)> load_vector<bytes>(const T*), load_readonly_vector<bytes>(const T*),
///                                load_coherent_vector<bytes>(const T*);               bytes of 4, 8 or 16
///     void store_vector(T*, const pack<T, n>&);    n * sizeof(T) of 4, 8 or 16
///     void fence();                                __threadfence
/// Threads of a block follow the rules of shared memory. A block may read what another one of the same launch wrote
/// when the writer called fence() after it (or a thread did for its block, after a sync()) and then changed an atomic
/// that the reader's block has changed since: the pattern of the last block. It reads by coherent loads.
template <class B>
concept block = requires(B& b, unsigned n, bool p, float f, float* out, const float* in,
                         typename B::template shared<float> view) {
    { b.thread() } -> std::same_as<unsigned>;
    { b.threads() } -> std::same_as<unsigned>;
    { b.lane() } -> std::same_as<unsigned>;
    { b.warp() } -> std::same_as<unsigned>;
    { b.warps() } -> std::same_as<unsigned>;
    { b.block_index() } -> std::same_as<unsigned>;
    { b.blocks() } -> std::same_as<unsigned>;
    { b.block_index_y() } -> std::same_as<unsigned>;
    { b.blocks_y() } -> std::same_as<unsigned>;
    b.sync();
    b.sync_warp();
    b.sync_warp(n);
    { b.shuffle(f, n) } -> std::same_as<float>;
    { b.shuffle_xor(f, n, n) } -> std::same_as<float>;
    { b.shuffle_down(f, n, n) } -> std::same_as<float>;
    { b.shuffle_up(f, n, n) } -> std::same_as<float>;
    { b.ballot(p) } -> std::same_as<unsigned>;
    { b.any(p) } -> std::same_as<bool>;
    { b.all(p) } -> std::same_as<bool>;
    { b.template allocate_shared<float>(std::size_t{}) } -> std::same_as<typename B::template shared<float>>;
    { view.get(n) } -> std::same_as<float>;
    view.set(n, f);
    { view[n] } -> std::convertible_to<float>;
    { b.atomic_add(view, n, f) } -> std::same_as<float>;
    { b.atomic_add(out, f) } -> std::same_as<float>;
    { b.atomic_exchange(out, f) } -> std::same_as<float>;
    { b.atomic_max(&n, n) } -> std::same_as<unsigned>;
    { b.atomic_min(&n, n) } -> std::same_as<unsigned>;
    { b.load_global(in) } -> std::same_as<float>;
    { b.load_readonly(in) } -> std::same_as<float>;
    { b.load_coherent(in) } -> std::same_as<float>;
    { b.template load_vector<16>(in) } -> std::same_as<pack<float, 4>>;
    { b.template load_readonly_vector<16>(in) } -> std::same_as<pack<float, 4>>;
    { b.template load_coherent_vector<16>(in) } -> std::same_as<pack<float, 4>>;
    b.store_global(out, f);
    b.store_vector(out, pack<float, 4>{});
    b.fence();
};

/// A kernel: a function object whose members are its parameters (pointers to global memory, sizes), filled in by the
/// host and copied to every thread.
///
///     static constexpr unsigned most_threads;      a block never has more: the compiler shares out registers for it
///     launch_shape shape() const;                  as the members ask for; host
///     template <block Block> VERKV_HOST_DEVICE void operator()(Block&) const;    not noexcept: the emulator throws
///
/// Optional: static constexpr unsigned least_resident_blocks, blocks that a multiprocessor has room for at once (limits
/// the registers).
template <class K>
concept kernel = std::is_trivially_copyable_v<K> && requires(const K& k) {
    { k.shape() } -> std::same_as<launch_shape>;
    { K::most_threads } -> std::convertible_to<unsigned>;
} && K::most_threads % warp_size == 0 && K::most_threads <= most_block_threads;

}  // namespace verkv::inline v0::gpu
