// The Poisson draw on the device: which tokens stay resident, and what the estimator has to know of them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/random.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/token_arrays.hpp"

namespace verkv::inline v0::gpu {

/// Draws the residents of each KV head from r: token i is in with probability r_i, independently [VerKV Algorithm 1].
/// A block a task. In: lists.probability (r, in [0, 1]), lists.tokens, positions [tasks, stride], streams [tasks]. Out:
/// uniform, odds, slot of each token; resident_token and log_weight of each resident, ascending, and residents.
/// U is uniform() of the task's stream, in 53 bits: the sample is poisson_draw()'s, bit for bit; the stored U is
/// rounded to a float, odds and ln(1/r) are in double, rounded once.
/// Where more tokens are drawn than resident_stride, the first of them are listed, residents has the true number and
/// the slots of the others are `offloaded`: the draw has to be made again with more room.
/// Bytes: 8 read and 12 written a token, 8 written a resident; a Philox block a token. Two barriers each time that a
/// block's threads have taken a token each.
struct poisson_draw_kernel {
    static constexpr unsigned most_threads = 1024;

    token_arrays lists;
    const position_t* positions;  // [tasks, position_stride]; position_stride 0: the same for all tasks
    std::size_t position_stride;
    const uniform_stream* streams;
    unsigned tasks;
    unsigned threads;

    [[nodiscard]] launch_shape shape() const {
        return {.blocks_x = tasks,
                .threads = threads,
                .shared_bytes = shared_layout().array<unsigned>(threads / warp_size).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto scratch = b.template allocate_shared<unsigned>(b.warps());
        const unsigned task = b.block_index();
        const std::uint32_t n = b.load_readonly(lists.tokens + task);
        const uniform_stream stream = b.load_global(streams + task);
        const std::size_t token = task * lists.stride;
        const std::size_t resident = task * lists.resident_stride;
        const std::uint32_t drawn = block_compact(
            b, scratch, n,
            [&](std::uint32_t i) {
                const auto r = static_cast<double>(b.load_readonly(lists.probability + token + i));
                const double u = uniform(stream, b.load_readonly(positions + task * position_stride + i));
                b.store_global(lists.uniform + token + i, static_cast<float>(u));
                b.store_global(lists.odds + token + i, static_cast<float>((1 - r) / r));
                const bool in = sampled(r, u);
                if (!in) {
                    b.store_global(lists.slot + token + i, offloaded);
                }
                return in;
            },
            [&](std::uint32_t i, std::uint32_t place) {
                const bool fits = place < lists.resident_stride;
                b.store_global(lists.slot + token + i, fits ? place : offloaded);
                if (fits) {
                    const float odds = b.load_global(lists.odds + token + i);
                    b.store_global(lists.resident_token + resident + place, i);
                    b.store_global(lists.log_weight + resident + place,
                                   static_cast<float>(std::log1p(static_cast<double>(odds))));
                }
            });
        if (b.thread() == 0) {
            b.store_global(lists.residents + task, drawn);
        }
    }
};

}  // namespace verkv::inline v0::gpu
