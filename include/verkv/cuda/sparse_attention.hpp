// Decode attention over a list of rows with log-weights, split over the list.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/row_scores.hpp"
#include "verkv/cuda/detail/row_sums.hpp"
#include "verkv/cuda/detail/unroll.hpp"
#include "verkv/cuda/row_list.hpp"

namespace verkv::inline v0::gpu {

/// Attention of the query heads of a group over listed rows, in parts: a block takes a stretch of the list for a KV
/// head; merge_parts_kernel puts the parts together.
/// o_g = sum_i e^{s_gi + a_gi} v_i / sum_i e^{s_gi + a_gi}, s_gi = scale <q_g, k_i>, a the log-weight, as attend()
/// [VerKV Definition 2]. All rows in order and no log-weight: dense attention.
/// KeyDim, ValueDim: 64, 128 or 256 with rows aligned to 16 bytes (base and stride); 0: any width, any alignment,
/// slower. Heads: of query heads that share a row's load, 1, 2, 4 or 8; larger groups read the rows once for each so
/// many.
///
/// queries [tasks, group, key_dim]; key of row r at keys + r key_stride, value at values + r value_stride, or at
/// pinned_keys and pinned_values with the same strides where r has the bit pinned_row; log_weight
/// (task, g, i) at log_weight + task weight_task_stride + g weight_head_stride + i, or null: all 0. part_output [tasks,
/// all_parts, group, value_dim] and part_lse [tasks, all_parts, group], of which this launch writes parts first_part
/// ... first_part + parts - 1: so the lists of two pools merge together. An empty part's lse is -infinity; its output
/// is left as it is, or 0. -infinity as a log-weight: the row is not used by that head, whatever is in it. A row that
/// no head uses is not read. NaN in a logit or a used value makes that head NaN and no other; a row of weight 0 (left
/// out, or below e^-87 of the largest of its part) adds nothing whatever its value. Bytes: each used row once for a
/// group of at most Heads, 4 for its id, 4 group for log-weights, parts' results. Float accumulation. With u = 2^-24, m
/// rows a warp (the part's rows over the warps, rounded up to 32): a logit errs by (key_dim + 8) u scale sum_c |q_c
/// k_c|, a sum of weights or weighted values by (m + warps + 8) u sum |w v|. Order of all sums depends on count, parts
/// and threads alone: the same bits in any run. Nothing is checked: pointers, strides and rows have to be right.
template <storage T, unsigned KeyDim = 0, unsigned ValueDim = 0, unsigned Heads = 4, unsigned MostThreads = 256>
struct sparse_attention_kernel {
    static_assert(Heads == 1 || Heads == 2 || Heads == 4 || Heads == 8);
    static constexpr unsigned most_threads = MostThreads;

    const float* queries;
    const T* keys;
    const T* values;
    std::size_t key_stride;
    std::size_t value_stride;
    row_list list;
    const float* log_weight;
    std::size_t weight_task_stride;
    std::size_t weight_head_stride;
    float* part_output;
    float* part_lse;
    float scale;
    unsigned tasks;
    unsigned group;
    unsigned key_dim;
    unsigned value_dim;
    unsigned parts;
    unsigned first_part;
    unsigned all_parts;
    unsigned threads;
    const T* pinned_keys = nullptr;
    const T* pinned_values = nullptr;

    [[nodiscard]] launch_shape shape() const {
        const std::size_t warps = threads / warp_size;
        const std::size_t sums = slots(threads / warp_size) + (warps > slots(threads / warp_size) ? 1 : 0);
        return {.blocks_x = parts,
                .blocks_y = tasks,
                .threads = threads,
                .shared_bytes = shared_layout()
                                    .array<query_element>(query_elements())
                                    .template array<weight_pack>(warps * warp_size * quads)
                                    .template array<float>(warps * warp_size * Heads)
                                    .template array<float>(2 * warps * Heads)
                                    .template array<float>(2 * Heads)
                                    .template array<float>(sums * Heads * values_width())
                                    .bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        const unsigned task = b.block_index_y();
        const std::uint32_t n = b.load_readonly(list.count + task);
        const std::uint32_t tiles = (n + warp_size - 1) / warp_size;
        const std::uint32_t of_part = (tiles + parts - 1) / parts;
        const std::uint32_t first = smaller(b.block_index() * of_part, tiles);
        const std::uint32_t last = smaller(first + of_part, tiles);
        const std::size_t to = (std::size_t{task} * all_parts + first_part + b.block_index()) * group;
        if (first == last) {
            for (unsigned g = b.thread(); g < group; g += b.threads()) {
                b.store_global(part_lse + to + g, not_used());
            }
            return;
        }
        auto query = b.template allocate_shared<query_element>(query_elements());
        auto weights = b.template allocate_shared<weight_pack>(b.threads() * quads);
        auto logits = b.template allocate_shared<float>(b.threads() * Heads);
        auto of_warps = b.template allocate_shared<float>(2 * b.warps() * Heads);
        auto of_block = b.template allocate_shared<float>(2 * Heads);
        const unsigned many = slots(b.warps());
        auto sums = b.template allocate_shared<float>((many + (b.warps() > many ? 1u : 0u)) * Heads * values_width());
        for (unsigned head = 0; head < group; head += Heads) {
            const unsigned here = smaller(Heads, group - head);
            scores::load_queries(b, query, queries + (std::size_t{task} * group + head) * keys_width(), here,
                                 keys_width());
            b.sync();
            detail::row_sums<T, ValueDim, Heads> sum(b, sums, values_width());
            float top[Heads];
            float denominator[Heads];
            VERKV_UNROLL
            for (unsigned h = 0; h < Heads; ++h) {
                top[h] = not_used();
                denominator[h] = 0;
            }
            for (std::uint32_t tile = first + b.warp(); tile < last; tile += b.warps()) {
                const std::uint32_t i = tile * warp_size + b.lane();
                float log[Heads];
                bool used = false;
                VERKV_UNROLL
                for (unsigned h = 0; h < Heads; ++h) {
                    log[h] = i < n && h < here ? log_weight_of(b, task, head + h, i) : not_used();
                    used = used || log[h] != not_used();
                }
                const unsigned mask = b.ballot(used);
                if (mask == 0) {
                    continue;
                }
                const row_id row = used ? list.row(b, task, i) : 0;
                scores::score(b, query, logits, row_memory<T>{keys, pinned_keys, key_stride}, row, mask, keys_width());
                b.sync_warp();
                float factor[Heads];
                weight_pack weight[quads];
                VERKV_UNROLL
                for (unsigned h = 0; h < Heads; ++h) {
                    const float dot = logits.get((b.warp() * Heads + h) * warp_size + b.lane());
                    const float logit = log[h] == not_used() ? not_used() : dot * scale + log[h];
                    const float of_tile = warp_max(b, logit);
                    const float next = top[h] < of_tile ? of_tile : top[h];
                    const float shift = next == not_used() ? 0.0f : next;
                    factor[h] = top[h] == next ? 1.0f : std::exp(top[h] - shift);
                    top[h] = next;
                    const float w = logit - shift < least_exponent ? 0.0f : std::exp(logit - shift);
                    denominator[h] = denominator[h] * factor[h] + w;
                    weight[h / pack_heads].at[h % pack_heads] = w;
                }
                VERKV_UNROLL
                for (unsigned q = 0; q < quads; ++q) {
                    weights.set(b.thread() * quads + q, weight[q]);
                }
                b.sync_warp();
                sum.rescale(b, sums, factor, values_width());
                sum.add(b, sums, weights, row_memory<T>{values, pinned_values, value_stride}, row, mask,
                        values_width());
            }
            finish(b, of_warps, of_block, sums, sum, top, denominator, to + head, here);
        }
    }

private:
    static constexpr unsigned pack_heads = Heads < 4 ? Heads : 4;
    static constexpr unsigned quads = Heads / pack_heads;
    static constexpr float least_exponent = -87.3f;  // what is smaller counts for nothing, as on the CPU
    using weight_pack = pack<float, pack_heads>;
    using scores = detail::row_scores<T, KeyDim, Heads>;
    using query_element = typename scores::query_element;

    [[nodiscard]] VERKV_HOST_DEVICE static constexpr float not_used() { return -__builtin_huge_valf(); }
    [[nodiscard]] VERKV_HOST_DEVICE unsigned keys_width() const { return KeyDim > 0 ? KeyDim : key_dim; }
    [[nodiscard]] VERKV_HOST_DEVICE unsigned values_width() const { return ValueDim > 0 ? ValueDim : value_dim; }
    [[nodiscard]] VERKV_HOST_DEVICE std::size_t query_elements() const { return scores::query_elements(keys_width()); }

    /// Warps whose sums lie in shared memory at once.
    [[nodiscard]] VERKV_HOST_DEVICE static unsigned slots(unsigned warps) {
        return ValueDim == 0 ? warps : smaller(warps, 8u);
    }

    template <class Block>
    [[nodiscard]] VERKV_HOST_DEVICE float log_weight_of(Block& b, unsigned task, unsigned g, std::uint32_t i) const {
        return log_weight == nullptr
                   ? 0.0f
                   : b.load_readonly(log_weight + task * weight_task_stride + g * weight_head_stride + i);
    }

    template <class Block>
    [[nodiscard]] VERKV_HOST_DEVICE static float warp_max(Block& b, float v) {
        for (unsigned bits = 1; bits < warp_size; bits *= 2) {
            v = maximum()(v, b.shuffle_xor(v, bits));
        }
        return v;
    }

    /// Brings the warps' sums to one shift, adds them up and writes the part of `here` heads.
    template <class Block, class Floats, class Sum>
    VERKV_HOST_DEVICE void finish(Block& b, Floats of_warps, Floats of_block, Floats sums, Sum& sum,
                                  const float (&top)[Heads], const float (&denominator)[Heads], std::size_t to,
                                  unsigned here) const {
        VERKV_UNROLL
        for (unsigned h = 0; h < Heads; ++h) {
            const float all = warp_reduce(b, denominator[h], plus());
            if (b.lane() == 0) {
                of_warps.set(b.warp() * Heads + h, top[h]);
                of_warps.set((b.warps() + b.warp()) * Heads + h, all);
            }
        }
        b.sync();
        float factor[Heads];
        VERKV_UNROLL
        for (unsigned h = 0; h < Heads; ++h) {
            float most = not_used();
            for (unsigned w = 0; w < b.warps(); ++w) {
                most = maximum()(most, of_warps.get(w * Heads + h));
            }
            const float shift = most == not_used() ? 0.0f : most;
            factor[h] = std::exp(top[h] - shift);
            if (b.thread() == h) {
                float total = 0;
                for (unsigned w = 0; w < b.warps(); ++w) {
                    const float part = of_warps.get((b.warps() + w) * Heads + h);
                    total += part * std::exp(of_warps.get(w * Heads + h) - shift);
                }
                of_block.set(h, total);
                if (h < here) {
                    const double log = static_cast<double>(shift) + std::log(static_cast<double>(total));
                    b.store_global(part_lse + to + h, total == 0 ? not_used() : static_cast<float>(log));
                }
            }
        }
        sum.rescale(b, sums, factor, values_width());
        const unsigned many = slots(b.warps());
        const unsigned width = Heads * values_width();
        for (unsigned first = 0; first < b.warps(); first += many) {
            const unsigned round = smaller(many, b.warps() - first);
            if (b.warp() - first < round) {
                sum.store(b, sums, b.warp() - first);
            }
            b.sync();
            for (unsigned e = b.thread(); e < here * values_width(); e += b.threads()) {
                float total = first == 0 ? 0.0f : sums.get(many * width + e);
                for (unsigned s = 0; s < round; ++s) {
                    total += sums.get(s * width + e);
                }
                if (first + round < b.warps()) {
                    sums.set(many * width + e, total);
                } else {
                    const float all = of_block.get(e / values_width());
                    b.store_global(part_output + to * values_width() + e, all == 0 ? 0.0f : total / all);
                }
            }
            b.sync();
        }
    }
};

}  // namespace verkv::inline v0::gpu
