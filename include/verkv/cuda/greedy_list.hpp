// The paper's planner on the device, third part: the list of the tokens that are fetched.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/last_block.hpp"
#include "verkv/cuda/greedy_survey.hpp"
#include "verkv/cuda/group_plan.hpp"

namespace verkv::inline v0::gpu {

/// Lists the tokens that the greedy plans of a group fetch, ascending, with r' = 1 or 0 for each head: lists.rows is G.
/// Tokens that tie with the last one fetched are listed, too, fetched or not.
/// blocks_y is the number of KV heads. Preconditions (unchecked): `arrived` is 0, and is so again.
struct greedy_list_kernel {
    static constexpr unsigned most_threads = 1024;

    detail::greedy_masses m;
    const greedy_state* state = nullptr;  ///< [KV head][G]
    plan_lists lists;
    head_decision* decision = nullptr;  ///< [KV head][G]
    std::uint32_t* counts = nullptr;    ///< [KV head][blocks], scratch
    std::uint32_t* arrived = nullptr;   ///< [KV head]
    std::uint32_t blocks = 1;
    std::uint32_t threads = 256;

    [[nodiscard]] launch_shape shape() const {
        return {blocks, m.kv_heads, threads,
                shared_layout().array<std::uint32_t>(threads / warp_size + 1).array<std::uint32_t>(blocks + 1).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        const std::size_t kv = b.block_index_y();
        auto scratch = b.template allocate_shared<std::uint32_t>(b.warps() + 1);
        auto begins = b.template allocate_shared<std::uint32_t>(b.blocks() + 1);
        const unsigned n = b.load_readonly(m.tokens + kv);
        const detail::token_range own = detail::tokens_of(b, n);
        token_index* const token = lists.token + kv * lists.stride;
        const unsigned found = block_compact(
            b, scratch, own.last - own.first,
            [&](unsigned i) {
                bool listed = false;
                for (unsigned h = 0; h < m.heads; ++h) {
                    listed = listed || standing(b, kv * m.heads + h, own.first + i) != stays;
                }
                return listed;
            },
            [&](unsigned i, unsigned place) { b.store_global(token + own.first + place, own.first + i); });
        if (b.thread() == 0) {
            b.store_global(counts + kv * b.blocks() + b.block_index(), found);
        }
        if (!detail::last_block(b, arrived + kv, scratch)) {
            return;
        }
        const unsigned total = detail::begins_of_pieces(b, scratch, begins, counts + kv * b.blocks());
        token_index moved = 0;
        detail::move_pieces(
            b, begins, n, total, [&](unsigned from) { moved = b.load_coherent(token + from); },
            [&](unsigned to) { b.store_global(token + to, moved); });
        for (unsigned h = 0; h < m.heads; ++h) {
            write(b, kv, h, scratch, token, total);
        }
        if (b.thread() == 0) {
            b.store_global(lists.count + kv, total);
        }
    }

private:
    enum side { stays, ties, fetched };

    template <class Block>
    [[nodiscard]] VERKV_HOST_DEVICE side standing(Block& b, std::size_t row, unsigned i) const {
        const greedy_state s = b.load_global(state + row);
        if (s.outcome == greedy_nothing || s.outcome == greedy_not_a_number) {
            return stays;
        }
        const auto t = m.load(b, row, m.inverse(b, row), i);
        if (!(t.odds > 0)) {
            return stays;
        }
        const std::uint32_t key = detail::greedy_key(s, i, t.variance);
        return s.outcome == greedy_everything || key > s.prefix ? fetched : key == s.prefix ? ties : stays;
    }

    template <class Block, class Scratch>
    VERKV_HOST_DEVICE void write(Block& b, std::size_t kv, unsigned h, Scratch scratch, const token_index* token,
                                 unsigned total) const {
        const std::size_t row = kv * m.heads + h;
        const greedy_state s = b.load_global(state + row);
        unsigned before = 0;
        for (unsigned first = 0; first < total; first += b.threads()) {
            const unsigned i = first + b.thread();
            const side own = i < total ? standing(b, row, b.load_global(token + i)) : stays;
            const scanned<unsigned> rank = block_rank(b, scratch, own == ties);
            if (i < total) {
                const bool fetch = own == fetched || (own == ties && before + rank.before + s.staying < s.ties);
                b.store_global(lists.probability + (kv * lists.rows + h) * lists.stride + i, fetch ? 1.0f : 0.0f);
            }
            before += rank.total;
        }
        if (b.thread() == 0) {
            b.store_global(decision + row, head_decision{s.before, s.after, s.variance, 0});
        }
    }
};

}  // namespace verkv::inline v0::gpu
