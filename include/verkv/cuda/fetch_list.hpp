// Which rows a step fetches: tokens that some query head's plan uses, neither resident nor staged, and where they go.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/random.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/last_block.hpp"
#include "verkv/cuda/detail/work.hpp"
#include "verkv/cuda/group_plan.hpp"
#include "verkv/cuda/row_list.hpp"

namespace verkv::inline v0::gpu {

/// Neither resident nor staged.
inline constexpr std::uint32_t no_slot = 0xffffffffu;

/// Fetched rows that stay on the device, a ring of `capacity` slots for each KV head; staging_map on the CPU, whose
/// contents it has after the same steps. Slot s of KV head k is row k * capacity + s of the staging memory.
struct device_staging {
    std::uint32_t* slot = nullptr;   ///< of a token, or no_slot; [KV head][stride]
    std::uint32_t* token = nullptr;  ///< in a slot, or no_slot; [KV head][capacity]
    std::uint32_t* used = nullptr;   ///< step in which a slot was last needed; [KV head][capacity], 0 at first
    std::uint32_t* hand = nullptr;   ///< next slot in turn, [KV head], 0 at first
    std::uint32_t* step = nullptr;   ///< steps so far, [KV head], 0 at first
    std::size_t stride = 0;
    std::uint32_t capacity = 0;
};

/// Rows that are used this step beside the resident ones, and those of them that have to be copied to the device.
/// Both ascending by token, each token once.
struct device_fetch {
    token_index* token = nullptr;     ///< [KV head][stride]
    row_id* row = nullptr;            ///< of the staging memory, or of pinned memory; [KV head][stride]
    float* log_weight = nullptr;      ///< [KV head][rows of the plan][stride]; -infinity where a head does not use it
    std::uint32_t* count = nullptr;   ///< [KV head]
    row_id* copy_from = nullptr;      ///< row of host memory, [KV head][stride]
    row_id* copy_to = nullptr;        ///< row of the staging memory, [KV head][stride]
    std::uint32_t* copies = nullptr;  ///< [KV head]
    std::uint32_t* copied = nullptr;  ///< copies are added to it, [KV head]; or null
    std::uint32_t* pinned = nullptr;  ///< rows that there was no room for: read where they lie; [KV head]
    std::size_t stride = 0;
};

/// The tokens that the plans of a group use, from r' and the uniforms that were stored at the draw: r' = 1, or r' > r
/// and U < r' [beyond §1]. Those that are resident get their new log-weight, ln 1/r'; the others are listed, staged
/// where they are not yet, and those to be copied are listed for gather_rows.
///
/// Blocks share the plan's list in pieces; the last block puts what they found together and runs the staging: slots
/// needed by this step keep their rows, the others are given away in turn from the ring's hand on. Where the step needs
/// more rows than there are slots, those that come last have none: they are listed as rows of pinned memory, where
/// attention reads them over the bus, as often as it would have copied them. `pinned` says how many.
/// blocks_y is the number of KV heads; any number of blocks along x and of threads.
/// Preconditions (unchecked): arrays are as large as said; `arrived` is 0, and is so again afterwards.
/// Reads 4 (2 + rows) bytes a listed token, 4 more for one that may be used, 4 a slot of the staging; writes 4 (4 +
/// rows) a row used, and 4 rows a resident row, of whose log-weights it also reads 4.
/// Integers throughout but for ln, which is in double: the same lists in any order of threads and blocks.
struct fetch_list_kernel {
    static constexpr unsigned most_threads = 1024;

    plan_lists plan;
    const float* r = nullptr;                      ///< of the draw, [KV head][stride]
    const float* uniforms = nullptr;               ///< of the draw, [KV head][stride]
    const std::uint32_t* resident_slot = nullptr;  ///< of a token, or no_slot; [KV head][stride]
    const row_id* host_row = nullptr;              ///< of a token, [KV head][stride]
    const float* resident_base = nullptr;          ///< log-weights of the draw, [KV head][resident_stride]; or null
    float* resident_log_weight = nullptr;          ///< of this step, [KV head][rows][resident_stride]; or null
    const std::uint32_t* residents = nullptr;      ///< [KV head]; null without resident_base
    device_staging staging;
    device_fetch fetch;
    const std::uint32_t* work = nullptr;  ///< [KV head], see step_work; null: work for all
    std::uint32_t* counts = nullptr;      ///< [KV head][blocks], scratch
    std::uint32_t* missing = nullptr;     ///< [KV head][fetch.stride], scratch
    std::uint32_t* arrived = nullptr;     ///< [KV head]
    std::size_t stride = 0;
    std::size_t resident_stride = 0;
    std::uint32_t kv_heads = 0;
    std::uint32_t blocks = 1;
    std::uint32_t threads = 256;

    [[nodiscard]] launch_shape shape() const {
        return {blocks, kv_heads, threads,
                shared_layout().array<std::uint32_t>(threads / warp_size + 1).array<std::uint32_t>(blocks + 1).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        const std::size_t kv = b.block_index_y();
        if (detail::idle(b, work, kv)) {
            return;
        }
        auto scratch = b.template allocate_shared<std::uint32_t>(b.warps() + 1);
        auto begins = b.template allocate_shared<std::uint32_t>(b.blocks() + 1);
        const unsigned listed = b.load_global(plan.count + kv);
        copy_base(b, kv);
        const detail::token_range piece = detail::tokens_of(b, listed);
        const unsigned found = block_compact(
            b, scratch, piece.last - piece.first, [&](unsigned i) { return fetches(b, kv, piece.first + i); },
            [&](unsigned i, unsigned place) { write_used(b, kv, piece.first + i, piece.first + place); });
        if (b.thread() == 0) {
            b.store_global(counts + kv * b.blocks() + b.block_index(), found);
        }
        if (!detail::last_block(b, arrived + kv, scratch)) {
            return;
        }
        weigh_residents(b, kv, listed);
        const unsigned total = detail::begins_of_pieces(b, scratch, begins, counts + kv * b.blocks());
        join(b, kv, begins, listed, total);
        stage(b, kv, scratch, total);
    }

private:
    template <class Block>
    [[nodiscard]] VERKV_HOST_DEVICE float probability(Block& b, std::size_t kv, unsigned row, unsigned i) const {
        return b.load_readonly(plan.probability + (kv * plan.rows + row) * plan.stride + i);
    }

    /// ln of the weight's factor lambda/r', lambda = 1.
    [[nodiscard]] VERKV_HOST_DEVICE static float log_weight_of(float p) {
        return p >= 1 ? 0.0f : static_cast<float>(std::log(1.0 / static_cast<double>(p)));
    }

    /// Whether a plan with r' = p uses a token that is not resident.
    [[nodiscard]] VERKV_HOST_DEVICE static bool uses(float p, float drawn, float u) {
        return p >= 1 || (p > drawn && sampled(static_cast<double>(p), static_cast<double>(u)));
    }

    /// Whether the token of a plan's entry i is not resident, and some head uses it.
    template <class Block>
    [[nodiscard]] VERKV_HOST_DEVICE bool fetches(Block& b, std::size_t kv, unsigned i) const {
        float most = 0;
        for (unsigned row = 0; row < plan.rows; ++row) {
            most = larger(probability(b, kv, row, i), most);
        }
        if (!(most > 0)) {
            return false;
        }
        const std::size_t at = kv * stride + b.load_readonly(plan.token + kv * plan.stride + i);
        return b.load_readonly(resident_slot + at) == no_slot &&
               uses(most, b.load_readonly(r + at), b.load_readonly(uniforms + at));
    }

    template <class Block>
    VERKV_HOST_DEVICE void write_used(Block& b, std::size_t kv, unsigned i, unsigned to) const {
        const token_index token = b.load_readonly(plan.token + kv * plan.stride + i);
        const float drawn = b.load_readonly(r + kv * stride + token);
        const float u = b.load_readonly(uniforms + kv * stride + token);
        b.store_global(fetch.token + kv * fetch.stride + to, token);
        for (unsigned row = 0; row < plan.rows; ++row) {
            const float p = probability(b, kv, row, i);
            b.store_global(fetch.log_weight + (kv * plan.rows + row) * fetch.stride + to,
                           uses(p, drawn, u) ? log_weight_of(p) : -__builtin_huge_valf());
        }
    }

    /// Log-weights of the draw, for all rows of the plan.
    template <class Block>
    VERKV_HOST_DEVICE void copy_base(Block& b, std::size_t kv) const {
        if (resident_base == nullptr) {
            return;
        }
        const detail::token_range own = detail::tokens_of(b, b.load_readonly(residents + kv));
        for (unsigned i = own.first + b.thread(); i < own.last; i += b.threads()) {
            const float base = b.load_readonly(resident_base + kv * resident_stride + i);
            for (unsigned row = 0; row < plan.rows; ++row) {
                b.store_global(resident_log_weight + (kv * plan.rows + row) * resident_stride + i, base);
            }
        }
    }

    /// Log-weights of the resident tokens that the plan raises.
    template <class Block>
    VERKV_HOST_DEVICE void weigh_residents(Block& b, std::size_t kv, unsigned listed) const {
        if (resident_base == nullptr) {
            return;
        }
        for (unsigned i = b.thread(); i < listed; i += b.threads()) {
            const token_index token = b.load_readonly(plan.token + kv * plan.stride + i);
            const std::uint32_t slot = b.load_readonly(resident_slot + kv * stride + token);
            for (unsigned row = 0; row < plan.rows && slot != no_slot; ++row) {
                if (const float p = probability(b, kv, row, i); p > 0) {
                    b.store_global(resident_log_weight + (kv * plan.rows + row) * resident_stride + slot,
                                   log_weight_of(p));
                }
            }
        }
    }

    /// Puts the blocks' lists together.
    template <class Block, class Begins>
    VERKV_HOST_DEVICE void join(Block& b, std::size_t kv, Begins begins, unsigned listed, unsigned total) const {
        token_index token = 0;
        detail::move_pieces(
            b, begins, listed, total,
            [&](unsigned from) { token = b.load_coherent(fetch.token + kv * fetch.stride + from); },
            [&](unsigned to) { b.store_global(fetch.token + kv * fetch.stride + to, token); });
        float weight = 0;
        for (unsigned row = 0; row < plan.rows; ++row) {
            float* const weights = fetch.log_weight + (kv * plan.rows + row) * fetch.stride;
            detail::move_pieces(
                b, begins, listed, total, [&](unsigned from) { weight = b.load_coherent(weights + from); },
                [&](unsigned to) { b.store_global(weights + to, weight); });
        }
    }

    /// Gives every listed token a slot; lists those whose rows have to be copied there.
    template <class Block, class Scratch>
    VERKV_HOST_DEVICE void stage(Block& b, std::size_t kv, Scratch scratch, unsigned total) const {
        const std::size_t list = kv * fetch.stride;
        const std::size_t ring = kv * staging.capacity;
        std::uint32_t* const slot = staging.slot + kv * staging.stride;
        const unsigned step = b.load_global(staging.step + kv) + 1;
        const unsigned hand = b.load_global(staging.hand + kv);
        const unsigned lacking = block_compact(
            b, scratch, total,
            [&](unsigned i) {
                const std::uint32_t s = b.load_global(slot + b.load_global(fetch.token + list + i));
                if (s != no_slot) {
                    b.store_global(staging.used + ring + s, step);
                    b.store_global(fetch.row + list + i, static_cast<row_id>(ring + s));
                }
                return s == no_slot;
            },
            [&](unsigned i, unsigned place) { b.store_global(missing + list + place, i); });
        unsigned given = 0;
        for (unsigned first = 0; first < staging.capacity && given < lacking; first += b.threads()) {
            const unsigned k = first + b.thread();
            const unsigned s = k < staging.capacity - hand ? hand + k : k - (staging.capacity - hand);
            const bool unused = k < staging.capacity && b.load_global(staging.used + ring + s) != step;
            const scanned<unsigned> place = block_rank(b, scratch, unused);
            if (unused && given + place.before < lacking) {
                give(b, kv, s, given + place.before, step, slot);
                if (given + place.before + 1 == lacking) {
                    b.store_global(staging.hand + kv, s + 1 == staging.capacity ? 0 : s + 1);
                }
            }
            given += place.total;
        }
        given = smaller(given, lacking);
        for (unsigned j = given + b.thread(); j < lacking; j += b.threads()) {
            const unsigned i = b.load_global(missing + list + j);
            const token_index token = b.load_global(fetch.token + list + i);
            b.store_global(fetch.row + list + i, pinned_row | b.load_readonly(host_row + kv * stride + token));
        }
        b.sync();  // all have read the step
        if (b.thread() == 0) {
            b.store_global(staging.step + kv, step);
            b.store_global(fetch.count + kv, total);
            b.store_global(fetch.copies + kv, given);
            if (fetch.copied != nullptr) {
                b.store_global(fetch.copied + kv, b.load_global(fetch.copied + kv) + given);
            }
            b.store_global(fetch.pinned + kv, lacking - given);
        }
    }

    /// Gives slot s to the j-th token that has none.
    template <class Block>
    VERKV_HOST_DEVICE void give(Block& b, std::size_t kv, unsigned s, unsigned j, unsigned step,
                                std::uint32_t* slot) const {
        const std::size_t list = kv * fetch.stride;
        const std::size_t at = kv * staging.capacity + s;
        const unsigned i = b.load_global(missing + list + j);
        const token_index token = b.load_global(fetch.token + list + i);
        if (const std::uint32_t old = b.load_global(staging.token + at); old != no_slot) {
            b.store_global(slot + old, no_slot);
        }
        b.store_global(staging.token + at, token);
        b.store_global(staging.used + at, step);
        b.store_global(slot + token, s);
        b.store_global(fetch.row + list + i, static_cast<row_id>(at));
        b.store_global(fetch.copy_from + list + j, b.load_readonly(host_row + kv * stride + token));
        b.store_global(fetch.copy_to + list + j, static_cast<row_id>(at));
    }
};

}  // namespace verkv::inline v0::gpu
