// Before the fetch: levels are lowered by what resident rows say of the sketch's errors.
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
#include "verkv/cuda/weigh.hpp"

namespace verkv::inline v0::gpu {

/// By how much the sketch's errors make V larger than the plan thinks, from the rows whose exact logits are known
/// anyway; and a level that is lower by it, on the grid of the check. A block a query head.
/// With w = e^{logit - shift} exact, m planned and o the odds of resident rows:
///     inflation = sum w^2 (1 + o)/m / sum m (1 + o) (D/D^)^2 over rows of o > 0, D^ = sum w (1 + o) over all
///     level = level of the plan * ratio^-floor(ln min(inflation, 16)/ln ratio)
/// as the CPU's step does. Where a head of a KV head asks for less than the plan has, work becomes work_lower; a KV
/// head of which nothing is raised, or some head is not finite, keeps its plan.
/// Preconditions (unchecked): work is 0. Reads 16 bytes a resident row and query head. Elements in float, sums in
/// double in an order that depends on the number of threads alone.
struct calibrate_levels_kernel {
    static constexpr unsigned most_threads = 1024;

    sample_rows resident;                     ///< with exact logits
    const float* mass = nullptr;              ///< [KV head][G][stride]
    const float* odds = nullptr;              ///< [KV head][stride]
    const std::uint32_t* top = nullptr;       ///< [KV head][G]
    const double* total = nullptr;            ///< [KV head][G]
    const head_decision* decision = nullptr;  ///< [KV head][G]
    const std::uint32_t* raised = nullptr;    ///< tokens of the plan, [KV head]
    double* level = nullptr;                  ///< kappa/R, [KV head][G]
    double* steps_down = nullptr;             ///< of lower_levels, 0 afterwards; [KV head][G]
    double* before = nullptr;                 ///< of lower_levels, 0 afterwards; [KV head][G]
    std::uint32_t* work = nullptr;            ///< [KV head]
    std::size_t stride = 0;
    double ratio = 1.15;  ///< between levels of the grid
    std::uint32_t kv_heads = 0;
    std::uint32_t heads = 0;  ///< G
    std::uint32_t threads = 256;

    [[nodiscard]] launch_shape shape() const {
        return {heads, kv_heads, threads, shared_layout().array<double>(threads / warp_size).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto scratch = b.template allocate_shared<double>(b.warps());
        const std::size_t kv = b.block_index_y();
        const std::size_t head = kv * heads + b.block_index();
        const float shift = shift_of(b.load_readonly(top + head));
        const unsigned n = b.load_readonly(resident.count + kv);
        double spread = 0;
        double planned = 0;
        double denominator = 0;
        for (unsigned i = b.thread(); i < n; i += b.threads()) {
            const token_index token = b.load_readonly(resident.token + kv * resident.stride + i);
            const float known = std::exp(b.load_readonly(resident.logits + head * resident.stride + i) - shift);
            const float o = b.load_readonly(odds + kv * stride + token);
            const float share = known * (1 + o);
            denominator += static_cast<double>(share);
            if (o > 0) {
                const float estimate = larger(b.load_readonly(mass + head * stride + token), 1e-30f);
                planned += static_cast<double>(estimate * (1 + o));
                spread += static_cast<double>(share) * static_cast<double>(known / estimate);
            }
        }
        spread = block_sum(b, scratch, spread);
        planned = block_sum(b, scratch, planned);
        denominator = block_sum(b, scratch, denominator);
        if (b.thread() != 0) {
            return;
        }
        const double share = b.load_readonly(total + head) / denominator;
        const double inflation = planned > 0 ? spread / planned * share * share : 1.0;
        const double steps = verkv::detail::steps_of_inflation(inflation, ratio);
        double reached = b.load_readonly(&decision[head].level);
        if (steps >= 1 && b.load_readonly(raised + kv) > 0 && detail::all_certified(b, decision + kv * heads, heads)) {
            reached *= std::pow(ratio, -steps);
            b.atomic_max(work + kv, std::uint32_t{work_lower});
        }
        b.store_global(level + head, reached);
        b.store_global(steps_down + head, 0.0);
        b.store_global(before + head, 0.0);
    }
};

}  // namespace verkv::inline v0::gpu
