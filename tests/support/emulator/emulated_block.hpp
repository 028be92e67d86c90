// One thread's view of an emulated block: the model of verkv::gpu::block that refuses what a device would let pass.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "support/emulator/block_run.hpp"
#include "verkv/cuda/block.hpp"

namespace emulator {

/// See verkv::gpu::block. Everything that is forbidden there throws a fault.
class emulated_block {
public:
    template <class T>
    class shared;

    emulated_block(block_run& run, std::uint32_t thread) : run_(&run), thread_(thread) {}

    // Who am I.
    [[nodiscard]] unsigned thread() const { return thread_; }
    [[nodiscard]] unsigned threads() const { return shape().threads; }
    [[nodiscard]] unsigned lane() const { return thread_ % 32; }
    [[nodiscard]] unsigned warp() const { return thread_ / 32; }
    [[nodiscard]] unsigned warps() const { return shape().threads / 32; }
    [[nodiscard]] unsigned block_index() const { return run_->index() % shape().blocks_x; }
    [[nodiscard]] unsigned block_index_y() const { return run_->index() / shape().blocks_x; }
    [[nodiscard]] unsigned blocks() const { return shape().blocks_x; }
    [[nodiscard]] unsigned blocks_y() const { return shape().blocks_y; }

    // Barriers.
    void sync(place at = place::here()) { run_->sync(thread_, at); }
    void sync_warp(unsigned mask = verkv::gpu::all_lanes, place at = place::here()) {
        run_->meet(thread_, doing::sync_warp, mask, at, 0, lane());
    }

    // Warp.
    template <class T>
    T shuffle(T v, unsigned from, unsigned mask = verkv::gpu::all_lanes, place at = place::here()) {
        static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
        std::uint64_t word = 0;
        std::memcpy(&word, &v, sizeof(T));
        word = run_->meet(thread_, doing::shuffle, mask, at, word, from);
        std::memcpy(&v, &word, sizeof(T));
        return v;
    }
    template <class T>
    T shuffle_xor(T v, unsigned bits, unsigned mask = verkv::gpu::all_lanes, place at = place::here()) {
        return shuffle(v, lane() ^ bits, mask, at);
    }
    template <class T>
    T shuffle_down(T v, unsigned delta, unsigned mask = verkv::gpu::all_lanes, place at = place::here()) {
        return shuffle(v, delta < 32 - lane() ? lane() + delta : lane(), mask, at);
    }
    template <class T>
    T shuffle_up(T v, unsigned delta, unsigned mask = verkv::gpu::all_lanes, place at = place::here()) {
        return shuffle(v, delta <= lane() ? lane() - delta : lane(), mask, at);
    }
    unsigned ballot(bool p, unsigned mask = verkv::gpu::all_lanes, place at = place::here()) {
        return static_cast<unsigned>(run_->meet(thread_, doing::ballot, mask, at, p, lane()));
    }
    bool any(bool p, unsigned mask = verkv::gpu::all_lanes, place at = place::here()) {
        return run_->meet(thread_, doing::any, mask, at, p, lane()) != 0;
    }
    bool all(bool p, unsigned mask = verkv::gpu::all_lanes, place at = place::here()) {
        return run_->meet(thread_, doing::all, mask, at, p, lane()) != 0;
    }

    // Shared memory.
    template <class T>
    shared<T> allocate_shared(std::size_t n, place at = place::here()) {
        static_assert(std::is_trivially_copyable_v<T>);
        const std::size_t first = verkv::gpu::shared_layout::place<T>(run_->shared_used(thread_));
        const std::uint32_t k = run_->allocate(thread_, n, sizeof(T), first, typeid(T), at);
        return shared<T>(this, k, reinterpret_cast<T*>(run_->shared_bytes() + first), n);
    }

    // Atomics.
    template <class T>
    T atomic_add(T* p, std::type_identity_t<T> v) {
        return change(p, [v](T old) { return static_cast<T>(old + v); });
    }
    template <class T>
    T atomic_max(T* p, std::type_identity_t<T> v) {
        static_assert(std::is_integral_v<T>, "the maximum of floats goes through ordered_bits()");
        return change(p, [v](T old) { return old < v ? v : old; });
    }
    template <class T>
    T atomic_min(T* p, std::type_identity_t<T> v) {
        static_assert(std::is_integral_v<T>, "the minimum of floats goes through ordered_bits()");
        return change(p, [v](T old) { return v < old ? v : old; });
    }
    template <class T>
    T atomic_exchange(T* p, std::type_identity_t<T> v) {
        return change(p, [v](T) { return v; });
    }
    template <class T>
    T atomic_add(shared<T> s, std::size_t i, std::type_identity_t<T> v) {
        return s.change(i, [v](T old) { return static_cast<T>(old + v); });
    }
    template <class T>
    T atomic_max(shared<T> s, std::size_t i, std::type_identity_t<T> v) {
        static_assert(std::is_integral_v<T>, "the maximum of floats goes through ordered_bits()");
        return s.change(i, [v](T old) { return old < v ? v : old; });
    }
    template <class T>
    T atomic_min(shared<T> s, std::size_t i, std::type_identity_t<T> v) {
        static_assert(std::is_integral_v<T>, "the minimum of floats goes through ordered_bits()");
        return s.change(i, [v](T old) { return v < old ? v : old; });
    }
    template <class T>
    T atomic_exchange(shared<T> s, std::size_t i, std::type_identity_t<T> v) {
        return s.change(i, [v](T) { return v; });
    }

    // Global memory.
    template <class T>
    T load_global(const T* p) {
        access(p, sizeof(T), alignof(T), act::read);
        return take(p);
    }
    template <class T>
    T load_readonly(const T* p) {
        access(p, sizeof(T), sizeof(T), act::read, path::read_only);
        return take(p);
    }
    template <class T>
    T load_coherent(const T* p) {
        access(p, sizeof(T), sizeof(T), act::read, path::coherent);
        return take(p);
    }
    template <class T>
    void store_global(T* p, std::type_identity_t<T> v) {
        access(p, sizeof(T), alignof(T), act::write);
        std::memcpy(static_cast<void*>(p), &v, sizeof(T));
    }
    template <std::size_t Bytes, class T>
    verkv::gpu::pack<T, Bytes / sizeof(T)> load_vector(const T* p) {
        return take_vector<Bytes>(p, path::plain);
    }
    template <std::size_t Bytes, class T>
    verkv::gpu::pack<T, Bytes / sizeof(T)> load_readonly_vector(const T* p) {
        return take_vector<Bytes>(p, path::read_only);
    }
    template <std::size_t Bytes, class T>
    verkv::gpu::pack<T, Bytes / sizeof(T)> load_coherent_vector(const T* p) {
        return take_vector<Bytes>(p, path::coherent);
    }
    template <class T, std::size_t N>
    void store_vector(T* p, const verkv::gpu::pack<T, N>& v) {
        static_assert(sizeof(v) == 4 || sizeof(v) == 8 || sizeof(v) == 16);
        access(p, sizeof(v), sizeof(v), act::write);
        std::memcpy(static_cast<void*>(p), &v, sizeof(v));
    }
    void fence() { run_->fence(thread_); }

private:
    [[nodiscard]] const verkv::gpu::launch_shape& shape() const { return run_->launch().shape; }

    template <class T>
    static T take(const T* p) {
        std::remove_const_t<T> v;
        std::memcpy(static_cast<void*>(&v), p, sizeof(T));
        return v;
    }

    template <std::size_t Bytes, class T>
    verkv::gpu::pack<T, Bytes / sizeof(T)> take_vector(const T* p, path by) {
        static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
        access(p, Bytes, Bytes, act::read, by);
        verkv::gpu::pack<T, Bytes / sizeof(T)> v;
        std::memcpy(static_cast<void*>(&v), p, Bytes);
        return v;
    }

    template <class T, class Op>
    T change(T* p, Op op) {
        static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
        access(p, sizeof(T), sizeof(T), act::atomic);
        run_->global_atomic();
        const T old = *p;
        *p = op(old);
        return old;
    }

    /// Checks and records an access to global memory.
    void access(const void* pointer, std::size_t bytes, std::size_t alignment, act a, path by = path::plain) {
        run_->access(thread_);
        const auto p = reinterpret_cast<std::uintptr_t>(pointer);
        constexpr const char* verb[] = {"read", "write", "atomic"};
        const char* how = verb[static_cast<int>(a)];
        global_memory& memory = *run_->launch().memory;
        buffer* b = memory.find(p);
        if (b == nullptr || b->bytes - (p - b->first) < bytes) [[unlikely]] {
            const buffer* near = b != nullptr ? b : memory.before(p);
            if (near == nullptr) {
                run_->fail(thread_, "global memory out of bounds: ", how, " of ", bytes, " bytes before any buffer");
            }
            run_->fail(thread_, "global memory out of bounds: ", how, " of ", bytes, " bytes at byte ", p - near->first,
                       " of ", near->name, ", which has ", near->bytes);
        }
        const std::size_t at = p - b->first;
        if (p % alignment != 0) [[unlikely]] {
            run_->fail(thread_, "misaligned ", how, " of ", bytes, " bytes at byte ", at, " of ", b->name, ", address ",
                       p, ", which has to be a multiple of ", alignment);
        }
        if (!b->writable) {
            if (a != act::read) [[unlikely]] {
                run_->fail(thread_, how, " at byte ", at, " of ", b->name, ", which is read only");
            }
            return;
        }
        for (std::size_t k = at / b->element; k * b->element < at + bytes; ++k) {
            shadow_cell& cell = b->cells[k];
            if (b->launch[k] != run_->launch().number) {
                b->launch[k] = run_->launch().number;
                cell.forget_accesses();
            }
            if (a != act::write && !cell.written) [[unlikely]] {
                run_->fail(thread_, "uninitialised global memory: ", how, " of ", b->name, "[", k, "]");
            }
            run_->touch(thread_, cell, a, [&] { return joined("global ", b->name, "[", k, "]"); });
            const char* stale = cell.stale(a, by, run_->thread(thread_).sees);
            if (stale != nullptr) [[unlikely]] {
                run_->fail(thread_, "stale cache: ", how, " of global ", b->name, "[", k, "], which ", stale);
            }
        }
    }

    block_run* run_;
    std::uint32_t thread_;
};

/// An array in shared memory; every access is checked and recorded.
template <class T>
class emulated_block::shared {
public:
    /// Stands in for T&.
    class reference {
    public:
        reference(const shared& view, std::size_t i) : view_(view), i_(i) {}
        reference(const reference&) = default;
        ~reference() = default;
        operator T() const { return view_.get(i_); }  // NOLINT: as T& does
        const reference& operator=(const T& v) const {
            view_.set(i_, v);
            return *this;
        }
        const reference& operator=(const reference& other) const {  // NOLINT: as T& does
            return *this = static_cast<T>(other);
        }
        const reference& operator+=(const T& v) const { return *this = static_cast<T>(view_.get(i_) + v); }
        const reference& operator-=(const T& v) const { return *this = static_cast<T>(view_.get(i_) - v); }
        const reference& operator*=(const T& v) const { return *this = static_cast<T>(view_.get(i_) * v); }
        const reference& operator/=(const T& v) const { return *this = static_cast<T>(view_.get(i_) / v); }
        const reference& operator|=(const T& v) const { return *this = static_cast<T>(view_.get(i_) | v); }
        const reference& operator&=(const T& v) const { return *this = static_cast<T>(view_.get(i_) & v); }
        const reference& operator++() const { return *this += T{1}; }

    private:
        shared view_;
        std::size_t i_;
    };

    shared(emulated_block* block, std::uint32_t array, T* first, std::size_t n)
        : block_(block), array_(array), first_(first), n_(n) {}

    reference operator[](std::size_t i) const { return {*this, i}; }
    [[nodiscard]] T get(std::size_t i) const {
        record(i, act::read);
        return first_[i];
    }
    void set(std::size_t i, const T& v) const {
        record(i, act::write);
        first_[i] = v;
    }

private:
    friend class emulated_block;

    template <class Op>
    T change(std::size_t i, Op op) const {
        static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
        record(i, act::atomic);
        const T old = first_[i];
        first_[i] = op(old);
        return old;
    }

    void record(std::size_t i, act a) const {
        block_run& run = *block_->run_;
        const std::uint32_t t = block_->thread_;
        run.access(t);
        const auto name = [&] { return joined("the shared array of ", run.array(array_).at, "[", i, "]"); };
        constexpr const char* verb[] = {"read", "write", "atomic"};
        if (i >= n_) [[unlikely]] {
            run.fail(t, "shared memory out of bounds: ", verb[static_cast<int>(a)], " of ", name(), ", which has ", n_,
                     " elements");
        }
        shadow_cell& cell = run.array(array_).cells[i];
        if (a != act::write && !cell.written) [[unlikely]] {
            run.fail(t, "uninitialised shared memory: ", verb[static_cast<int>(a)], " of ", name());
        }
        run.touch(t, cell, a, name);
    }

    emulated_block* block_;
    std::uint32_t array_;
    T* first_;
    std::size_t n_;
};

static_assert(verkv::gpu::block<emulated_block>);

}  // namespace emulator
