// After a check that does not hold: how far the levels of the next round's plan are lowered.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "verkv/certify/level_steps.hpp"
#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/check_sample.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/work.hpp"
#include "verkv/cuda/group_plan.hpp"

namespace verkv::inline v0::gpu {

/// Lowers the levels of the query heads whose sample does not certify what the plan promised, by as many steps of the
/// grid as it says are missing, and says of each KV head what the round has to do: the rule of the CPU's step [beyond
/// §5b]. A block a query head.
///     steps = steps_to_lower(), as the CPU has it
///     level = max(min(level, top) ratio^-steps, 2^-100); top: 1.5 epsilon/l, and m/r of the heaviest token where the
///     plan raised nothing
/// In the last round, and where some head of the group is not finite, everything is used instead.
/// Preconditions (unchecked): work is 0; steps and before are 0 before round 1. Reads 4 (2 G) bytes a token where a
/// plan that raised nothing fails; else next to nothing. In double, in thread 0: the same bits in every run.
struct lower_levels_kernel {
    static constexpr unsigned most_threads = 1024;

    const std::uint32_t* holds = nullptr;          ///< [KV head][G], of the check
    const sample_certificate* observed = nullptr;  ///< [KV head][G], of the check
    const head_decision* decision = nullptr;       ///< [KV head][G], of the plan that was checked
    const float* mass = nullptr;                   ///< [KV head][G][stride]
    const float* odds = nullptr;                   ///< [KV head][stride]
    const std::uint32_t* tokens = nullptr;         ///< [KV head]
    const double* reference = nullptr;             ///< R, [KV head][G]
    double* level = nullptr;                       ///< kappa/R, [KV head][G]
    double* steps = nullptr;                       ///< of the last round that lowered a head, [KV head][G]
    double* before = nullptr;                      ///< certificate observed then, [KV head][G]
    std::uint32_t* work = nullptr;                 ///< of this round, [KV head]
    std::uint32_t* rounds = nullptr;               ///< that a KV head needed so far, [KV head]; 0 before round 1
    std::size_t stride = 0;
    double epsilon = 0.05;
    double log_term = 0;
    double ratio = 1.15;  ///< between levels of the grid
    std::uint32_t kv_heads = 0;
    std::uint32_t heads = 0;  ///< G
    std::uint32_t round = 1;  ///< the one that begins
    std::uint32_t last = 0;   ///< 1: no other follows it
    std::uint32_t threads = 256;

    [[nodiscard]] launch_shape shape() const {
        return {heads, kv_heads, threads, shared_layout().array<float>(threads / warp_size).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto scratch = b.template allocate_shared<float>(b.warps());
        const std::size_t kv = b.block_index_y();
        const std::size_t head = kv * heads + b.block_index();
        if (b.load_readonly(holds + head) != 0) {
            return;
        }
        const bool everything = last != 0 || !detail::all_certified(b, decision + kv * heads, heads);
        const double from = b.load_global(level + head);
        double top = 1.5 * epsilon / log_term;
        if (!everything && !(from < __builtin_huge_val())) {
            const double highest = static_cast<double>(heaviest(b, kv, head, scratch));
            top = smaller(highest / b.load_readonly(reference + head), top);
        }
        b.sync();  // all have read the level
        if (b.thread() != 0) {
            return;
        }
        b.atomic_max(rounds + kv, round);
        b.atomic_max(work + kv, std::uint32_t{everything ? work_everything : work_lower});
        if (everything) {
            return;
        }
        const double seen = b.load_readonly(&observed[head].observed);
        const double down = verkv::detail::steps_to_lower(seen, epsilon, ratio, round, b.load_global(steps + head),
                                                          b.load_global(before + head));
        b.store_global(steps + head, down);
        b.store_global(before + head, seen);
        b.store_global(level + head, larger(smaller(from, top) * std::pow(ratio, -down), 0x1p-100));
    }

private:
    /// The largest m/r of the tokens that may be raised.
    template <class Block, class Scratch>
    [[nodiscard]] VERKV_HOST_DEVICE float heaviest(Block& b, std::size_t kv, std::size_t head, Scratch scratch) const {
        const unsigned n = b.load_readonly(tokens + kv);
        float most = 0;
        for (unsigned i = b.thread(); i < n; i += b.threads()) {
            const float o = b.load_readonly(odds + kv * stride + i);
            most = larger(o > 0 ? b.load_readonly(mass + head * stride + i) * (1 + o) : 0.0f, most);
        }
        return block_max(b, scratch, most);
    }
};

}  // namespace verkv::inline v0::gpu
