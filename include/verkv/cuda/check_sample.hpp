// After the fetch: what the sample itself certifies of each query head's denominator.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "verkv/certify/bernstein.hpp"
#include "verkv/certify/sample_check.hpp"
#include "verkv/core/host_device.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/work.hpp"

namespace verkv::inline v0::gpu {

/// Rows of a sample with exact logits: the resident ones, or those that were fetched.
struct sample_rows {
    const std::uint32_t* count = nullptr;  ///< [tasks]
    const token_index* token = nullptr;    ///< [tasks, stride]
    const float* logits = nullptr;         ///< exact, [tasks, group, stride]
    const float* log_weight = nullptr;     ///< ln(1/r'), -infinity: not used; task t, head g at t * task + g * head
    std::size_t stride = 0;
    std::size_t weight_task_stride = 0;
    std::size_t weight_head_stride = 0;  ///< 0: the same for all heads
};

/// What a sample says of one query head. Masses are relative to e^{top}.
struct sample_certificate {
    double denominator;  ///< D^
    double variance;     ///< V^, the difference estimate
    double largest;      ///< b^
    double top;          ///< logit that they are relative to
    double observed;     ///< relative error that is certified; 0 where there was nothing to check
};

/// The check of a step for the denominator target: a block a query head, both parts of the sample.
/// With w = e^{logit - top}, top the largest logit of the sample or of the plan: D^ = sum w/r'; V^ the difference
/// estimate of planned masses and w; b^ = max w/r' max(r', 1-r') over r' < 1; certificate and `holds` as
/// observed_certificate() against epsilon. r' is taken from the log-weight: r' = e^{-a}, 1-r' = -expm1(-a), so that a
/// probability next to 1 keeps its distance from 1: plans that shrink nothing (lambda = 1).
/// mass: planned masses of all tokens relative to e^{shift}, [tasks, group, mass_stride]; top: shift of each head as
/// ordered_bits() (-infinity: 0), total: their sum, the reference; variance and certificate: of the plan, V/R^2 and
/// relative, the head's at head * decision_stride (4: in an array of head_decision); all [tasks, group]. A head whose
/// total is not positive and finite, or whose plan has a certificate that is not finite, is left alone: it holds.
/// Bytes: 16 a row of the sample and query head read, logits twice. Elements in float: relative error (4 |a| + 16)
/// 2^-24; sums in double, in an order that depends on the number of threads alone.
struct check_sample_kernel {
    static constexpr unsigned most_threads = 1024;

    sample_rows resident;
    sample_rows fetched;
    const float* mass;
    std::size_t mass_stride;
    const std::uint32_t* top;
    const double* total;
    const double* variance;
    const double* certificate;
    std::size_t decision_stride;
    double epsilon;
    double log_term;
    sample_certificate* results;  // [tasks, group]
    std::uint32_t* holds;         // [tasks, group]: 1 or 0
    unsigned tasks;
    unsigned group;
    unsigned threads;
    const std::uint32_t* work = nullptr;  // [tasks], see step_work; null: work for all

    [[nodiscard]] launch_shape shape() const {
        return {.blocks_x = group,
                .blocks_y = tasks,
                .threads = threads,
                .shared_bytes =
                    shared_layout().array<double>(threads / warp_size).array<float>(threads / warp_size).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        if (detail::idle(b, work, b.block_index_y())) {
            return;
        }
        auto doubles = b.template allocate_shared<double>(b.warps());
        auto floats = b.template allocate_shared<float>(b.warps());
        const std::size_t head = std::size_t{b.block_index_y()} * group + b.block_index();
        const double reference = b.load_readonly(total + head);
        const double planned = b.load_readonly(variance + head * decision_stride);
        const double after = b.load_readonly(certificate + head * decision_stride);
        if (!(reference > 0 && reference - reference == 0 && after - after == 0)) {
            if (b.thread() == 0) {
                b.store_global(results + head, sample_certificate{0, 0, 0, 0, 0});
                b.store_global(holds + head, 1u);
            }
            return;
        }
        const float ordered = from_ordered_bits(b.load_readonly(top + head));
        const float shift = ordered == -__builtin_huge_valf() ? 0.0f : ordered;
        float most = maximum()(largest_logit(b, resident), largest_logit(b, fetched));
        most = maximum()(shift, block_max(b, floats, most));
        const float unit = std::exp(shift - most);
        partial seen;
        observe(b, resident, most, unit, seen);
        observe(b, fetched, most, unit, seen);
        const double denominator = block_sum(b, doubles, seen.denominator);
        const double observed = block_sum(b, doubles, seen.variance);
        const double estimated = block_sum(b, doubles, seen.planned);
        const float largest = block_max(b, floats, seen.largest);
        if (b.thread() == 0) {
            const double scaled = reference * static_cast<double>(unit);
            const bernstein_moments moments{0, difference_estimate(planned * scaled * scaled, observed, estimated),
                                            static_cast<double>(largest)};
            const double bound = observed_certificate(moments, denominator, denominator / (1 + epsilon), log_term);
            b.store_global(results + head, sample_certificate{denominator, moments.variance, moments.largest,
                                                              static_cast<double>(most), bound});
            b.store_global(holds + head, bound < epsilon ? 1u : 0u);
        }
    }

private:
    struct partial {
        double denominator = 0;
        double variance = 0;
        double planned = 0;
        float largest = 0;
    };

    template <class Block>
    [[nodiscard]] VERKV_HOST_DEVICE float largest_logit(Block& b, const sample_rows& rows) const {
        const unsigned task = b.block_index_y();
        const float* logit = rows.logits + (std::size_t{task} * group + b.block_index()) * rows.stride;
        const std::uint32_t n = b.load_readonly(rows.count + task);
        float most = -__builtin_huge_valf();
        for (std::uint32_t i = b.thread(); i < n; i += b.threads()) {
            most = maximum()(most, b.load_readonly(logit + i));
        }
        return most;
    }

    template <class Block>
    VERKV_HOST_DEVICE void observe(Block& b, const sample_rows& rows, float most, float unit, partial& seen) const {
        const std::size_t task = b.block_index_y();
        const std::size_t head = task * group + b.block_index();
        const float* logit = rows.logits + head * rows.stride;
        const float* weight =
            rows.log_weight + task * rows.weight_task_stride + b.block_index() * rows.weight_head_stride;
        const std::uint32_t n = b.load_readonly(rows.count + task);
        for (std::uint32_t i = b.thread(); i < n; i += b.threads()) {
            const float a = b.load_readonly(weight + i);
            if (a == -__builtin_huge_valf()) {
                continue;
            }
            const float raise = std::exp(a);  // 1/r'
            const float share = std::exp(b.load_readonly(logit + i) - most) * raise;
            seen.denominator += static_cast<double>(share);
            if (a > 0) {
                const token_index token = b.load_readonly(rows.token + task * rows.stride + i);
                const float known = b.load_readonly(mass + head * mass_stride + token) * unit * raise;
                const float rest = -std::expm1(-a);
                const auto odds = static_cast<double>(rest);
                seen.variance += static_cast<double>(share) * static_cast<double>(share) * odds;
                seen.planned += static_cast<double>(known) * static_cast<double>(known) * odds;
                seen.largest = larger(share * larger(rest, std::exp(-a)), seen.largest);
            }
        }
    }
};

}  // namespace verkv::inline v0::gpu
