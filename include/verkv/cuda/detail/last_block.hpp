// What several blocks have found, put together by the last of them.
#pragma once

#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"

namespace verkv::inline v0::gpu::detail {

/// True in all threads of the last block of a row (of the same block_index_y()) to come here; it sees what the others
/// wrote before, by load_coherent(). Called by all threads of all blocks; arrived: 0 before the launch, and after it.
/// flag: one element; free for anything else afterwards. Blocks that do not come last may return.
template <class Block, class Shared>
[[nodiscard]] VERKV_HOST_DEVICE bool last_block(Block& b, std::uint32_t* arrived, Shared flag) {
    b.sync();
    if (b.thread() == 0) {
        b.fence();
        const bool last = b.atomic_add(arrived, 1u) + 1 == b.blocks();
        if (last) {
            b.atomic_exchange(arrived, 0u);
            b.fence();
        }
        flag.set(0, last ? 1u : 0u);
    }
    b.sync();
    const bool last = flag.get(0) != 0;
    b.sync();
    return last;
}

/// Tokens of a block that has as many as any, when n are shared out.
template <class Block>
[[nodiscard]] VERKV_HOST_DEVICE unsigned length_of_piece(Block& b, unsigned n) {
    return n / b.blocks() + (n % b.blocks() != 0 ? 1 : 0);
}

/// The tokens of a block, when n tokens are shared out in ascending pieces of equal length.
struct token_range {
    unsigned first;
    unsigned last;
};
template <class Block>
[[nodiscard]] VERKV_HOST_DEVICE token_range tokens_of(Block& b, unsigned n) {
    const unsigned piece = length_of_piece(b, n);
    const unsigned first = smaller(n, piece * b.block_index());
    return {first, first + smaller(piece, n - first)};
}

/// Where the list of each block begins when they are put together: begins[k], k = 0 ... blocks(), from the blocks'
/// counts. Returns begins[blocks()]. By the last block; begins: blocks() + 1 elements, scratch: one a warp.
template <class Block, class Shared>
VERKV_HOST_DEVICE unsigned begins_of_pieces(Block& b, Shared scratch, Shared begins, const std::uint32_t* counts) {
    unsigned total = 0;
    for (unsigned first = 0; first < b.blocks(); first += b.threads()) {
        const unsigned k = first + b.thread();
        const unsigned own = k < b.blocks() ? b.load_coherent(counts + k) : 0u;
        const scanned<unsigned> sum = block_exclusive_scan(b, scratch, own);
        if (k < b.blocks()) {
            begins.set(k, total + sum.before);
        }
        total += sum.total;
    }
    if (b.thread() == 0) {
        begins.set(b.blocks(), total);
    }
    b.sync();
    return total;
}

/// Moves the lists at the heads of the blocks' pieces together, in their order: load(from) reads an element into the
/// thread's hands, store(to) writes it, to <= from. Each thread calls them in pairs. By the last block, after
/// begins_of_pieces(); ends with a barrier.
template <class Block, class Shared, class Load, class Store>
VERKV_HOST_DEVICE void move_pieces(Block& b, Shared begins, unsigned n, unsigned total, Load load, Store store) {
    const unsigned piece = length_of_piece(b, n);
    for (unsigned first = 0; first < total; first += b.threads()) {
        const unsigned i = first + b.thread();
        if (i < total) {
            unsigned low = 0;  // the last block whose list begins at or before i
            unsigned high = b.blocks();
            while (high - low > 1) {
                const unsigned middle = low + (high - low) / 2;
                (begins.get(middle) <= i ? low : high) = middle;
            }
            load(low * piece + (i - begins.get(low)));
        }
        b.sync();  // what is written now lies below everything that is still to be read
        if (i < total) {
            store(i);
        }
    }
    b.sync();
}

}  // namespace verkv::inline v0::gpu::detail
