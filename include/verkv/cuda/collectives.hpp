// What the threads of a warp or block work out together: reductions, scans, compaction, broadcast.
#pragma once

#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"

// All of these are called by all threads of a block (of a warp: warp_...), in the same place of the program. Those of a
// block take a shared array as `scratch`, with an element for each warp where nothing else is said; it is free for
// anything else when they return, for they end with a barrier. The operands are combined in an order that depends on
// the number of threads alone: the same bits in any run, in every thread.

namespace verkv::inline v0::gpu {

/// Sum of two values.
struct plus {
    template <class T>
    [[nodiscard]] VERKV_HOST_DEVICE constexpr T operator()(T a, T b) const noexcept {
        return a + b;
    }
};

/// The larger of two values; the other one where one is NaN.
struct maximum {
    template <class T>
    [[nodiscard]] VERKV_HOST_DEVICE constexpr T operator()(T a, T b) const noexcept {
        return a < b || a != a ? b : a;
    }
};

/// The smaller of two values; the other one where one is NaN.
struct minimum {
    template <class T>
    [[nodiscard]] VERKV_HOST_DEVICE constexpr T operator()(T a, T b) const noexcept {
        return b < a || a != a ? b : a;
    }
};

/// op over the first n lanes of a warp, 1 <= n <= 32, in every lane; values of lanes from n on count for nothing.
/// A binary tree over lanes: lane l takes l + 16, then l + 8, ...; op is associative, and is given the lower lanes
/// first. Six shuffles.
template <class Block, class T, class Op>
[[nodiscard]] VERKV_HOST_DEVICE T warp_reduce(Block& b, T v, Op op, unsigned n = warp_size) {
    for (unsigned d = 1; d < warp_size; d *= 2) {
        const T higher = b.shuffle_down(v, d);
        if (b.lane() + d < n) {
            v = op(v, higher);
        }
    }
    return b.shuffle(v, 0);
}

/// op over all threads of a block, in every thread. Trees over lanes, then over warps. Two barriers.
template <class Block, class Shared, class T, class Op>
[[nodiscard]] VERKV_HOST_DEVICE T block_reduce(Block& b, Shared scratch, T v, Op op) {
    v = warp_reduce(b, v, op);
    if (b.lane() == 0) {
        scratch.set(b.warp(), v);
    }
    b.sync();
    v = scratch.get(b.lane() < b.warps() ? b.lane() : 0);
    v = warp_reduce(b, v, op, b.warps());
    b.sync();
    return v;
}

/// The sum over all threads of a block, in every thread. In T, pairwise: with t threads the relative error of a sum of
/// positive floats is at most ceil(log2 t) roundings.
template <class Block, class Shared, class T>
[[nodiscard]] VERKV_HOST_DEVICE T block_sum(Block& b, Shared scratch, T v) {
    return block_reduce(b, scratch, v, plus());
}

/// The largest value of a block's threads, in every thread. NaN where all are; else NaNs count for nothing.
template <class Block, class Shared, class T>
[[nodiscard]] VERKV_HOST_DEVICE T block_max(Block& b, Shared scratch, T v) {
    return block_reduce(b, scratch, v, maximum());
}

/// The smallest value of a block's threads, in every thread. NaN where all are; else NaNs count for nothing.
template <class Block, class Shared, class T>
[[nodiscard]] VERKV_HOST_DEVICE T block_min(Block& b, Shared scratch, T v) {
    return block_reduce(b, scratch, v, minimum());
}

/// A thread's place in a row of numbers: what comes before it, and what there is in all.
template <class T>
struct scanned {
    T before;
    T total;
};

/// Sums over the lanes below a lane, and over the first n lanes. Six shuffles and one for each of the two results.
template <class Block, class T>
[[nodiscard]] VERKV_HOST_DEVICE scanned<T> warp_exclusive_scan(Block& b, T v, unsigned n = warp_size) {
    for (unsigned d = 1; d < warp_size; d *= 2) {
        const T lower = b.shuffle_up(v, d);
        if (b.lane() >= d) {
            v = lower + v;
        }
    }
    const T before = b.shuffle_up(v, 1);
    return {b.lane() == 0 ? T{} : before, b.shuffle(v, n - 1)};
}

/// Sums over the threads below a thread, and over all. Exact for integers; floats as block_sum(), though not the same
/// bits. Two barriers.
template <class Block, class Shared, class T>
[[nodiscard]] VERKV_HOST_DEVICE scanned<T> block_exclusive_scan(Block& b, Shared scratch, T v) {
    const scanned<T> in_warp = warp_exclusive_scan(b, v);
    if (b.lane() == 0) {
        scratch.set(b.warp(), in_warp.total);
    }
    b.sync();
    const T of_warp = b.lane() < b.warps() ? scratch.get(b.lane()) : T{};
    const scanned<T> warps = warp_exclusive_scan(b, of_warp);
    const T before = b.shuffle(warps.before, b.warp());
    b.sync();
    return {before + in_warp.before, warps.total};
}

/// How many threads below a thread keep something, and how many do in all. As block_exclusive_scan() of zeros and
/// ones, with a ballot in place of the first scan. scratch: unsigned.
template <class Block, class Shared>
[[nodiscard]] VERKV_HOST_DEVICE scanned<unsigned> block_rank(Block& b, Shared scratch, bool keep) {
    const unsigned kept = b.ballot(keep);
    if (b.lane() == 0) {
        scratch.set(b.warp(), count_bits(kept));
    }
    b.sync();
    const unsigned of_warp = b.lane() < b.warps() ? scratch.get(b.lane()) : 0u;
    const scanned<unsigned> warps = warp_exclusive_scan(b, of_warp);
    const unsigned before = b.shuffle(warps.before, b.warp());
    b.sync();
    return {before + count_bits(kept & lanes_below(b.lane())), warps.total};
}

/// Stream compaction by one block: emit(i, place) for each i < n with keep(i), places 0, 1, ... in the order of i.
/// keep is called once for each i, and emit by the same thread. Returns how many were kept. scratch: unsigned. Two
/// barriers for each b.threads() items.
template <class Block, class Shared, class Keep, class Emit>
VERKV_HOST_DEVICE unsigned block_compact(Block& b, Shared scratch, unsigned n, Keep keep, Emit emit) {
    unsigned before = 0;
    // The counter stays below n, so that it does not wrap for an n near 2^32.
    for (unsigned first = 0; first < n;) {
        const unsigned i = first + b.thread();
        const bool kept = b.thread() < n - first && keep(i);
        const scanned<unsigned> rank = block_rank(b, scratch, kept);
        if (kept) {
            emit(i, before + rank.before);
        }
        before += rank.total;
        if (n - first <= b.threads()) {
            break;
        }
        first += b.threads();
    }
    return before;
}

/// The value of one thread of a block, in every thread. scratch: one element. Two barriers.
template <class Block, class Shared, class T>
[[nodiscard]] VERKV_HOST_DEVICE T block_broadcast(Block& b, Shared scratch, T v, unsigned from) {
    if (b.thread() == from) {
        scratch.set(0, v);
    }
    b.sync();
    v = scratch.get(0);
    b.sync();
    return v;
}

}  // namespace verkv::inline v0::gpu
