// Exact logits of listed rows for all query heads of a group: resident rows, or a shortlist in pinned host memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/detail/work.hpp"
#include "verkv/cuda/rope_pair_logits.hpp"
#include "verkv/cuda/row_list.hpp"

namespace verkv::inline v0::gpu {

/// logit[h][i] = scale * <q_h, k_i> of the rows listed; what score_rows() computes on the CPU. With `logits`, those of
/// tokens that are certain (of all listed, without `odds`) take the place of what is known of these tokens, and count
/// for the heads' largest logits.
///
/// So many lanes share a row that each reads 16 bytes of it at a time (a quarter, half, or all of a warp). A row is
/// read once for up to Heads query heads; more go round after round.
/// blocks_y is the number of KV heads; any number of blocks along x and of threads.
/// Preconditions (unchecked): listed rows and tokens exist; no token is listed twice. Rows that begin at multiples of
/// 16 bytes are read by wide loads, if key_dim is a multiple of 16 / sizeof(T).
/// Reads key_dim * sizeof(T) + 4 bytes a row, 8 more with `logits`; writes 4 G, or 8 G.
/// Float accumulation in at most 32 partial sums, these as a tree: relative error (key_dim / 8 + 8) 2^-24 of scale
/// sum_c |q_c k_c| or less. The bits depend on the row and the queries alone, not on the launch.
template <storage T, unsigned Heads>
struct row_logits_kernel {
    static_assert(Heads >= 1 && Heads <= 8);
    static constexpr unsigned most_threads = 1024;

    const T* rows = nullptr;              ///< keys of all rows of a pool
    row_list list;                        ///< rows listed
    const token_index* tokens = nullptr;  ///< [KV head][list_stride]; null without `logits`
    const float* queries = nullptr;       ///< [KV head][G][key_dim]
    const float* odds = nullptr;          ///< [KV head][stride]; null: all listed count
    float* listed = nullptr;              ///< [KV head][G][list_stride], or null
    float* logits = nullptr;              ///< [KV head][G][stride], or null
    std::uint32_t* top = nullptr;         ///< [KV head][G], ordered_bits(), raised; null without `logits`
    const T* pinned_rows = nullptr;       ///< keys of rows with the bit pinned_row
    std::size_t row_stride = 0;           ///< elements from one row to the next
    const std::uint32_t* work = nullptr;  ///< [KV head], see step_work; null: work for all
    std::size_t list_stride = 0;
    std::size_t stride = 0;
    std::uint32_t kv_heads = 0;
    std::uint32_t heads = 0;  ///< G
    std::uint32_t key_dim = 0;
    float scale = 1;
    std::uint32_t blocks = 1;
    std::uint32_t threads = 128;

    [[nodiscard]] launch_shape shape() const {
        return {blocks, kv_heads, threads,
                shared_layout().array<float>(std::size_t{heads} * key_dim).array<float>(threads / warp_size).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        const std::size_t kv = b.block_index_y();
        if (detail::idle(b, work, kv)) {
            return;
        }
        auto query = b.template allocate_shared<float>(std::size_t{heads} * key_dim);
        auto scratch = b.template allocate_shared<float>(b.warps());
        for (std::size_t i = b.thread(); i < std::size_t{heads} * key_dim; i += b.threads()) {
            query.set(i, b.load_readonly(queries + kv * heads * key_dim + i) * scale);
        }
        b.sync();
        const unsigned n = b.load_global(list.count + kv);
        const unsigned lanes = lanes_of_row();
        const unsigned rows_of_warp = warp_size / lanes;
        const unsigned step = b.blocks() * b.warps() * rows_of_warp;
        const unsigned first = (b.block_index() * b.warps() + b.warp()) * rows_of_warp;
        for (unsigned head = 0; head < heads; head += Heads) {
            float tops[Heads];
            for (unsigned h = 0; h < Heads; ++h) {
                tops[h] = -__builtin_huge_valf();
            }
            for (unsigned at = first; at < n; at += step) {
                const unsigned i = at + b.lane() / lanes;
                float sums[Heads] = {};
                if (i < n) {
                    add_products(b, query, list.row(b, static_cast<unsigned>(kv), i), b.lane() % lanes, lanes, head,
                                 sums);
                }
                for (unsigned h = 0; h < Heads; ++h) {
                    for (unsigned d = lanes / 2; d > 0; d /= 2) {
                        sums[h] += b.shuffle_xor(sums[h], d);
                    }
                }
                if (i < n && b.lane() % lanes == 0) {
                    write(b, kv, i, head, sums, tops);
                }
            }
            if (logits != nullptr) {
                detail::raise_tops(b, scratch, tops, smaller(Heads, heads - head), top + kv * heads + head);
            }
        }
    }

private:
    static constexpr unsigned per_load = 16 / sizeof(T);

    /// Lanes that share a row: a power of two.
    [[nodiscard]] VERKV_HOST_DEVICE unsigned lanes_of_row() const {
        unsigned lanes = 4;
        while (lanes < warp_size && lanes * per_load < key_dim) {
            lanes *= 2;
        }
        return lanes;
    }

    template <class Block, class Query>
    VERKV_HOST_DEVICE void add_products(Block& b, Query query, row_id id, unsigned lane, unsigned lanes, unsigned head,
                                        float (&sums)[Heads]) const {
        const T* const row = row_memory<T>{rows, pinned_rows, row_stride}.at(id);
        const bool wide = key_dim % per_load == 0 && row_stride % per_load == 0 &&
                          reinterpret_cast<std::uintptr_t>(rows) % 16 == 0 &&
                          reinterpret_cast<std::uintptr_t>(pinned_rows) % 16 == 0;
        for (unsigned c = lane * per_load; c < key_dim; c += lanes * per_load) {
            float key[per_load] = {};
            if (wide) {
                const pack<T, per_load> loaded = b.template load_readonly_vector<16>(row + c);
                for (unsigned j = 0; j < per_load; ++j) {
                    key[j] = to_float(loaded.at[j]);
                }
            } else {
                for (unsigned j = 0; j < per_load; ++j) {
                    if (c + j < key_dim) {
                        key[j] = to_float(b.load_readonly(row + c + j));
                    }
                }
            }
            for (unsigned h = 0; h < Heads; ++h) {
                if (head + h < heads) {
                    for (unsigned j = 0; j < per_load; ++j) {
                        if (c + j < key_dim) {
                            sums[h] += query.get(std::size_t{head + h} * key_dim + c + j) * key[j];
                        }
                    }
                }
            }
        }
    }

    template <class Block>
    VERKV_HOST_DEVICE void write(Block& b, std::size_t kv, unsigned i, unsigned head, const float (&sums)[Heads],
                                 float (&tops)[Heads]) const {
        bool known = logits != nullptr;
        std::size_t token = 0;
        if (known) {
            token = b.load_readonly(tokens + kv * list_stride + i);
            known = odds == nullptr || b.load_readonly(odds + kv * stride + token) == 0;
        }
        for (unsigned h = 0; h < Heads; ++h) {
            if (head + h >= heads) {
                break;
            }
            if (listed != nullptr) {
                b.store_global(listed + (kv * heads + head + h) * list_stride + i, sums[h]);
            }
            if (known) {
                b.store_global(logits + (kv * heads + head + h) * stride + token, sums[h]);
                tops[h] = larger(sums[h], tops[h]);
            }
        }
    }
};

}  // namespace verkv::inline v0::gpu
