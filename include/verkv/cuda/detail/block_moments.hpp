// Bernstein's moments of all tokens that a block looks at, for some heads at once.
#pragma once

#include "verkv/certify/bernstein.hpp"
#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"

namespace verkv::inline v0::gpu::detail {

/// Shared memory in which a block puts together moments of N heads: sums of variances, and largest terms.
template <class Block, unsigned N>
class block_moments {
public:
    static constexpr unsigned heads = N;

    VERKV_HOST_DEVICE explicit block_moments(Block& b)
        : variance_(b.template allocate_shared<double>(std::size_t{b.warps()} * N)),
          term_(b.template allocate_shared<float>(std::size_t{b.warps()} * N)) {}

    [[nodiscard]] static VERKV_HOST_DEVICE shared_layout layout(shared_layout used, unsigned threads) {
        const std::size_t n = std::size_t{threads / warp_size} * N;
        used = used.template array<double>(n);
        return used.template array<float>(n);
    }

    /// Puts together what each thread has found, and gives it to use(h, moments) in thread h, h < N. All threads of the
    /// block take part. Trees over lanes, warps in their order: the same bits for the same number of threads. One
    /// barrier, before use(): another one has to follow before the next call.
    template <class Use>
    VERKV_HOST_DEVICE void combine(Block& b, const double (&variance)[N], const float (&term)[N], Use use) {
        for (unsigned h = 0; h < N; ++h) {
            const double v = warp_reduce(b, variance[h], plus());
            const float t = warp_reduce(b, term[h], maximum());
            if (b.lane() == 0) {
                variance_.set(b.warp() * N + h, v);
                term_.set(b.warp() * N + h, t);
            }
        }
        b.sync();
        if (b.thread() < N) {
            bernstein_moments all;
            for (unsigned w = 0; w < b.warps(); ++w) {
                all.variance += variance_.get(w * N + b.thread());
                all.largest = larger(static_cast<double>(term_.get(w * N + b.thread())), all.largest);
            }
            use(b.thread(), all);
        }
    }

private:
    typename Block::template shared<double> variance_;
    typename Block::template shared<float> term_;
};

/// Moments as they lie in global memory: what a block has found of a head.
struct stored_moments {
    double* variance;
    float* term;
};

}  // namespace verkv::inline v0::gpu::detail
