// The second half of split attention: partial results of disjoint rows become one.
#pragma once

#include <cmath>
#include <cstddef>

#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"

namespace verkv::inline v0::gpu {

/// Merges the parts of sparse_attention_kernel: a block a query head.
/// o = sum_p e^{lse_p} o_p / sum_p e^{lse_p}, lse = ln sum_p e^{lse_p}: merge_attention() of all parts at once.
/// part_output [tasks, parts, group, value_dim], part_lse [tasks, parts, group]; output [tasks, group, value_dim], lse
/// [tasks, group]. A part with lse = -infinity is empty, its output is not read; where all are, o = 0 and lse =
/// -infinity. Reads each part once: tasks group parts (value_dim + 1) floats. Weights and sums in double, rounded once:
/// an error of 2^-24 relative to sum_p w_p |o_p|, beside what the parts' own lse were rounded by. Parts in order: the
/// same bits for any number of threads. NaN in a part makes its query head NaN; so does a total that is not
/// finite: some key is not a number, and the rows that were read may not show it.
struct merge_parts_kernel {
    static constexpr unsigned most_threads = 1024;

    const float* part_output;
    const float* part_lse;
    float* output;
    float* lse;
    unsigned tasks;
    unsigned group;
    unsigned value_dim;
    unsigned parts;
    unsigned threads;
    const double* total = nullptr;  // sum of planned masses, [tasks, group]; or null

    [[nodiscard]] launch_shape shape() const {
        return {.blocks_x = group,
                .blocks_y = tasks,
                .threads = threads,
                .shared_bytes = shared_layout().array<float>(threads / warp_size).array<double>(parts).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto scratch = b.template allocate_shared<float>(b.warps());
        auto weights = b.template allocate_shared<double>(parts);
        const float empty = -__builtin_huge_valf();
        const std::size_t head = b.block_index();
        const std::size_t first = std::size_t{b.block_index_y()} * parts * group + head;  // of its parts
        const std::size_t to = std::size_t{b.block_index_y()} * group + head;
        float top = empty;
        for (unsigned p = b.thread(); p < parts; p += b.threads()) {
            top = maximum()(top, b.load_readonly(part_lse + first + std::size_t{p} * group));
        }
        top = block_max(b, scratch, top);
        const bool sound =
            total == nullptr || finite(b.load_readonly(total + std::size_t{b.block_index_y()} * group + head));
        const double shift = top == empty ? 0.0 : static_cast<double>(top);
        for (unsigned p = b.thread(); p < parts; p += b.threads()) {
            const float part = b.load_readonly(part_lse + first + std::size_t{p} * group);
            weights.set(p, part == empty ? 0.0 : std::exp(static_cast<double>(part) - shift));
        }
        b.sync();
        double all = 0;
        for (unsigned p = 0; p < parts; ++p) {
            all += weights.get(p);
        }
        all = sound ? all : __builtin_nan("");
        for (unsigned c = b.thread(); c < value_dim; c += b.threads()) {
            double sum = 0;
            for (unsigned p = 0; p < parts; ++p) {
                const double weight = weights.get(p);
                if (weight != 0) {
                    const std::size_t at = (first + std::size_t{p} * group) * value_dim + c;
                    sum += weight * static_cast<double>(b.load_readonly(part_output + at));
                }
            }
            b.store_global(output + to * value_dim + c, all == 0 ? 0.0f : static_cast<float>(sum / all));
        }
        if (b.thread() == 0) {
            b.store_global(lse + to, all == 0 ? empty : static_cast<float>(shift + std::log(all)));
        }
    }

private:
    [[nodiscard]] VERKV_HOST_DEVICE static bool finite(double x) { return x - x == 0; }
};

}  // namespace verkv::inline v0::gpu
