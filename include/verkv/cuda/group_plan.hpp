// The water-filling plan of a group of query heads: which tokens it may raise, and their r'.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/block_moments.hpp"
#include "verkv/cuda/detail/group_search.hpp"
#include "verkv/cuda/detail/last_block.hpp"
#include "verkv/cuda/detail/work.hpp"
#include "verkv/cuda/find_levels.hpp"

namespace verkv::inline v0::gpu {

/// What was decided for a query head; the numbers of verkv::plan.
struct head_decision {
    double certificate_before;
    double certificate_after;  ///< NaN where masses are not finite
    double variance;           ///< V/R^2 at r'
    double level;              ///< kappa/R; infinity where the head raises nothing
};

namespace detail {

/// Whether all heads of a group have a certificate that is a number. Of what other launches wrote.
template <class Block>
[[nodiscard]] VERKV_HOST_DEVICE bool all_certified(Block& b, const head_decision* decision, unsigned heads) {
    bool all = true;
    for (unsigned h = 0; h < heads; ++h) {
        const double after = b.load_readonly(&decision[h].certificate_after);
        all = all && after - after == 0;
    }
    return all;
}

}  // namespace detail

/// Lists of what a plan may fetch, in device memory: what planning kernels write and fetch_list reads.
struct plan_lists {
    token_index* token = nullptr;    ///< [KV head][stride], ascending
    float* probability = nullptr;    ///< r' or 0, [KV head][rows][stride]: a row for all heads, or one for each
    std::uint32_t* count = nullptr;  ///< [KV head]
    std::size_t stride = 0;
    std::uint32_t rows = 1;
};

/// r' = max(r, min(1, wish)) for the query heads of a group, from the levels of find_levels: water_filling on the CPU.
///
/// Blocks share the tokens of a KV head in pieces and list those that the levels can raise: sum_h (a_h m_h)^2 > r^2,
/// a_h = R/kappa_h. All others are summed up. The last block puts the lists together, in ascending order, raises each
/// head's level within its bin (to 2^-10), and lowers the multipliers a_h of a joint plan while all certificates hold,
/// in a fixed number of rounds; see group_search. Of a group that raises nothing, lists are empty.
///
/// With `given` there is no search: r' = max(r, min(1, sqrt(sum_h (m_h/kappa_h)^2))) at the levels given (each head by
/// itself, where lists.rows is G), as water_filling::plan_at(); all of L at 1 where work says work_everything.
///
/// blocks_y is the number of KV heads; any number of blocks along x and of threads.
/// Preconditions (unchecked): arrays are as large as said; `arrived` is 0, and is so again afterwards. Checked at
/// launch: stride <= most_tokens, G <= Heads. Reads 4 (G + 1) bytes a token; writes 4 (G + 3) for each one listed, and
/// reads 4 (G + 1) of these some 20 times. Products of floats, summed in double: certificates, of r' as it is written,
/// have a relative error below 2^-20, and are asked to be below epsilon (1 - 2^-16). The same bits in every run, for
/// the same `blocks` and `threads`. A head whose masses are not finite takes no part, and has a certificate of NaN.
/// Where squares overflow, all tokens of L that weigh anything are raised to 1.
template <unsigned Heads>
struct group_plan_kernel {
    static_assert(Heads >= 1 && Heads <= 8);
    static constexpr unsigned most_threads = 512;

    const float* mass = nullptr;            ///< [KV head][G][stride]
    const float* odds = nullptr;            ///< [KV head][stride]
    const std::uint32_t* tokens = nullptr;  ///< [KV head]
    const double* reference = nullptr;      ///< R, [KV head][G]
    const head_level* level = nullptr;      ///< [KV head][G]
    plan_lists lists;                       ///< rows is 1 for a joint plan, else G
    head_decision* decision = nullptr;      ///< [KV head][G]
    float* listed_odds = nullptr;           ///< [KV head][lists.stride], scratch
    float* listed_mass = nullptr;           ///< m/R, [KV head][G][lists.stride], scratch
    std::uint32_t* counts = nullptr;        ///< [KV head][blocks], scratch
    double* variance = nullptr;             ///< [KV head][blocks][Heads], scratch
    float* term = nullptr;                  ///< [KV head][blocks][Heads], scratch
    std::uint32_t* arrived = nullptr;       ///< [KV head]
    const double* given = nullptr;          ///< kappa/R to plan at, [KV head][G]; null: they are searched for
    const std::uint32_t* work = nullptr;    ///< [KV head], see step_work; null: work for all
    std::size_t stride = 0;
    std::uint32_t kv_heads = 0;
    std::uint32_t heads = 0;  ///< G
    double epsilon = 0.05;
    double log_term = 0;
    std::uint32_t blocks = 1;
    std::uint32_t threads = 256;

    [[nodiscard]] launch_shape shape() const {
        detail::check_plan_shape(stride, heads, Heads);
        shared_layout shared;
        shared = shared.array<std::uint32_t>(threads / warp_size + 1);
        shared = shared.array<std::uint32_t>(blocks + 1);
        shared = detail::group_search<no_block, Heads>::layout(shared, threads);
        return {blocks, kv_heads, threads, shared.bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        const std::size_t kv = b.block_index_y();
        if (detail::idle(b, work, kv)) {
            return;
        }
        const bool everything = work != nullptr && b.load_readonly(work + kv) == work_everything;
        auto scratch = b.template allocate_shared<std::uint32_t>(b.warps() + 1);
        auto begins = b.template allocate_shared<std::uint32_t>(b.blocks() + 1);
        detail::group_search<Block, Heads> search(b);
        list_tokens(b, kv, everything, scratch, search);
        if (!detail::last_block(b, arrived + kv, scratch)) {
            return;
        }
        detail::raisable r = {listed_odds + kv * lists.stride, listed_mass + kv * heads * lists.stride, lists.stride,
                              0};
        r.count = join(b, kv, scratch, begins);
        search.begin(b, level + kv * heads, heads, epsilon, log_term, [&](unsigned h) { return rest(b, kv, h); });
        const bool joint = lists.rows == 1 && heads > 1;
        if (given != nullptr) {
            search.use_given(b, r, given + kv * heads, joint);
        } else {
            search.find_own(b, r);
            if (joint && r.count > 0) {
                search.find_joint(b, r);
            }
        }
        for (unsigned i = b.thread(); i < r.count; i += b.threads()) {
            for (unsigned h = 0; h < lists.rows; ++h) {
                const float p = everything ? 1.0f
                                : joint    ? search.joint_probability(b, r, i)
                                           : search.own_probability(b, r, i, h);
                b.store_global(lists.probability + (kv * lists.rows + h) * lists.stride + i, p);
            }
        }
        if (b.thread() < heads) {
            const unsigned h = b.thread();
            const head_level own = b.load_global(level + kv * heads + h);
            const float reached = joint && r.count > 0 ? search.joint_level(h) : search.own_level(h);
            const bool sound = own.low == own.low;
            const bool estimates = sound && !everything;
            b.store_global(decision + kv * heads + h,
                           head_decision{own.before,
                                         estimates ? search.certificate(h)
                                         : sound   ? 0.0
                                                   : own.before,
                                         everything ? 0.0 : search.variance(h), static_cast<double>(reached)});
        }
        if (b.thread() == 0) {
            b.store_global(lists.count + kv, r.count);
        }
    }

private:
    struct no_block {
        template <class T>
        using shared = T;
    };

    /// Lists the tokens of a block's piece that may be raised, at the head of the piece; adds up the others.
    template <class Block, class Scratch, class Search>
    VERKV_HOST_DEVICE void list_tokens(Block& b, std::size_t kv, bool everything, Scratch scratch,
                                       Search& search) const {
        float inverse[Heads] = {};
        float multiplier[Heads] = {};
        for (unsigned h = 0; h < Heads; ++h) {
            if (h < heads) {
                const head_level own = b.load_global(level + kv * heads + h);
                inverse[h] =
                    own.low == own.low ? static_cast<float>(1 / b.load_readonly(reference + kv * heads + h)) : 0.0f;
                multiplier[h] = 1 / (given != nullptr ? static_cast<float>(b.load_readonly(given + kv * heads + h))
                                                      : Search::level_of(own));
            }
        }
        const detail::token_range piece = detail::tokens_of(b, b.load_readonly(tokens + kv));
        double spread[Heads] = {};
        float top[Heads] = {};
        float x[Heads] = {};
        float o = 0;
        const auto keep = [&](unsigned i) {
            o = b.load_readonly(odds + kv * stride + piece.first + i);
            if (!(o > 0)) {
                return false;
            }
            float wish = 0;
            for (unsigned h = 0; h < Heads; ++h) {
                x[h] = inverse[h] > 0 ? b.load_readonly(mass + (kv * heads + h) * stride + piece.first + i) * inverse[h]
                                      : 0.0f;
                const float a = x[h] * multiplier[h];
                wish += a * a;
            }
            if (everything || wish * ((1 + o) * (1 + o)) > 1) {
                return true;
            }
            for (unsigned h = 0; h < Heads; ++h) {
                const float up = x[h] * o;
                spread[h] += static_cast<double>(x[h]) * static_cast<double>(up);
                top[h] = larger(larger(x[h], up), top[h]);
            }
            return false;
        };
        const std::size_t first = kv * lists.stride + piece.first;
        const unsigned count =
            block_compact(b, scratch, piece.last - piece.first, keep, [&](unsigned i, unsigned place) {
                b.store_global(lists.token + first + place, piece.first + i);
                b.store_global(listed_odds + first + place, o);
                for (unsigned h = 0; h < Heads; ++h) {
                    if (h < heads) {
                        b.store_global(listed_mass + (kv * heads + h) * lists.stride + piece.first + place, x[h]);
                    }
                }
            });
        const std::size_t block = kv * b.blocks() + b.block_index();
        search.moments().combine(b, spread, top, [&](unsigned h, const bernstein_moments& m) {
            b.store_global(variance + block * Heads + h, m.variance);
            b.store_global(term + block * Heads + h, static_cast<float>(m.largest));
        });
        if (b.thread() == 0) {
            b.store_global(counts + block, count);
        }
    }

    /// Moves the pieces' lists together; returns how many tokens there are.
    template <class Block, class Scratch>
    VERKV_HOST_DEVICE unsigned join(Block& b, std::size_t kv, Scratch scratch, Scratch begins) const {
        const unsigned total = detail::begins_of_pieces(b, scratch, begins, counts + kv * b.blocks());
        token_index token = 0;
        float o = 0;
        float x[Heads];
        detail::move_pieces(
            b, begins, b.load_readonly(tokens + kv), total,
            [&](unsigned from) {
                const std::size_t at = kv * lists.stride + from;
                token = b.load_coherent(lists.token + at);
                o = b.load_coherent(listed_odds + at);
                for (unsigned h = 0; h < Heads; ++h) {
                    x[h] = h < heads ? b.load_coherent(listed_mass + (kv * heads + h) * lists.stride + from) : 0.0f;
                }
            },
            [&](unsigned to) {
                const std::size_t at = kv * lists.stride + to;
                b.store_global(lists.token + at, token);
                b.store_global(listed_odds + at, o);
                for (unsigned h = 0; h < Heads; ++h) {
                    if (h < heads) {
                        b.store_global(listed_mass + (kv * heads + h) * lists.stride + to, x[h]);
                    }
                }
            });
        return total;
    }

    /// Moments of the tokens that are not listed, blocks in their order.
    template <class Block>
    VERKV_HOST_DEVICE bernstein_moments rest(Block& b, std::size_t kv, unsigned h) const {
        bernstein_moments all;
        for (unsigned k = 0; k < b.blocks(); ++k) {
            const std::size_t at = (kv * b.blocks() + k) * Heads + h;
            all.variance += b.load_coherent(variance + at);
            all.largest = larger(static_cast<double>(b.load_coherent(term + at)), all.largest);
        }
        return all;
    }
};

}  // namespace verkv::inline v0::gpu
