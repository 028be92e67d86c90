// Water-filling for the query heads of a group by one block: certificates of all heads from the tokens it may raise.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "verkv/certify/bernstein.hpp"
#include "verkv/core/host_device.hpp"
#include "verkv/core/odds.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/block_moments.hpp"
#include "verkv/cuda/find_levels.hpp"

namespace verkv::inline v0::gpu::detail {

/// Tokens that a group may raise, field by field, and the moments of all others.
struct raisable {
    const float* odds;  ///< [count]
    const float* mass;  ///< m/R, [head][stride]
    std::size_t stride;
    unsigned count;
};

/// Searches levels and multipliers as water_filling does on the CPU, with a fixed number of looks at the tokens. All
/// threads of the block call everything, in the same order; one thread a head keeps that head's state.
/// A look is 4 (G + 1) bytes a token and two or three barriers.
template <class Block, unsigned Heads>
class group_search {
public:
    static constexpr unsigned level_rounds = 16;  ///< at most, of a head's level: to 2^-10
    static constexpr unsigned share_rounds = 5;   ///< in which heads with room to spare ask for less
    static constexpr unsigned back_rounds = 14;   ///< at most, towards the heads' own levels
    static constexpr unsigned factor_rounds = 8;  ///< at most, of one factor for all, to 2^-10
    static constexpr double margin = 1 - 0x1p-16;

    VERKV_HOST_DEVICE explicit group_search(Block& b)
        : moments_(b),
          rest_variance_(b.template allocate_shared<double>(Heads)),
          variance_(b.template allocate_shared<double>(Heads)),
          certificate_(b.template allocate_shared<double>(Heads)),
          sums_(b.template allocate_shared<double>(b.warps())),
          rest_term_(b.template allocate_shared<float>(Heads)),
          kappa_(b.template allocate_shared<float>(Heads)),
          own_(b.template allocate_shared<float>(Heads)),
          trial_(b.template allocate_shared<float>(Heads)) {}

    [[nodiscard]] static VERKV_HOST_DEVICE shared_layout layout(shared_layout used, unsigned threads) {
        used = block_moments<Block, Heads>::layout(used, threads);
        used = used.template array<double>(3 * Heads + threads / warp_size);
        return used.template array<float>(std::size_t{4} * Heads);
    }

    /// For what has to be put together before begin().
    [[nodiscard]] VERKV_HOST_DEVICE block_moments<Block, Heads>& moments() { return moments_; }

    /// Begins with the levels that find_levels found, and the moments of the tokens that are not to be raised; rest(h)
    /// is asked for in thread h.
    template <class Rest>
    VERKV_HOST_DEVICE void begin(Block& b, const head_level* level, unsigned heads, double epsilon, double log_term,
                                 Rest rest) {
        heads_ = heads;
        epsilon_ = epsilon;
        log_term_ = log_term;
        certified_ = __builtin_huge_valf();
        failing_ = certified_;
        at_certified_ = at_failing_ = 0;
        if (b.thread() < Heads) {
            const unsigned h = b.thread();
            bernstein_moments others;
            if (h < heads) {
                const head_level own = b.load_global(level + h);
                others = rest(h);
                certified_ = level_of(own);
                failing_ = own.low > 0 && own.low < __builtin_huge_valf() ? own.high : certified_;
                at_certified_ = own.at_low;
            }
            rest_variance_.set(h, others.variance);
            rest_term_.set(h, static_cast<float>(others.largest));
            kappa_.set(h, certified_);
        }
        b.sync();
    }

    /// A level that a head plans with: infinity where it needs nothing, or nothing can be certified.
    [[nodiscard]] static VERKV_HOST_DEVICE float level_of(const head_level& own) {
        if (own.low != own.low) {
            return __builtin_huge_valf();
        }
        return own.low > 0 ? own.low : 0x1p-126f;
    }

    /// Raises each head's level as far as its own certificate lets it: within its bin, and beyond where b is so far
    /// below kappa that the next edge certifies after all.
    VERKV_HOST_DEVICE void find_own(Block& b, const raisable& r) {
        constexpr float precision = 0x1p-10f;
        unsigned lines = 0;      // of this thread's head
        bool bracketed = false;  // failing_ was looked at
        for (unsigned round = 0; round < level_rounds; ++round) {
            const bool searches = failing_ - certified_ > precision * certified_;
            const float middle = !searches ? certified_ : bracketed ? between(lines, precision) : failing_;
            if (b.thread() < Heads) {
                kappa_.set(b.thread(), middle);
                own_.set(b.thread(), searches ? 1.0f : 0.0f);
            }
            b.sync();
            bool any = false;
            for (unsigned h = 0; h < Heads; ++h) {
                any = any || own_.get(h) != 0;
            }
            if (!any) {
                break;
            }
            look_own(b, r);
            if (searches && b.thread() < heads_) {
                const double there = certificate_.get(b.thread());
                const bool good = there < epsilon_ * margin;
                (good ? certified_ : failing_) = middle;
                (good ? at_certified_ : at_failing_) = there;
                failing_ = good && !bracketed ? middle * (1 + 1.0f / breakpoint_window::per_octave) : failing_;
                lines += bracketed ? 1 : 0;
                bracketed = bracketed || !good;
            }
        }
        b.sync();
        if (b.thread() < Heads) {
            kappa_.set(b.thread(), certified_);
            own_.set(b.thread(), 1 / certified_);
            trial_.set(b.thread(), 1 / certified_);
        }
        b.sync();
        look_own(b, r);
    }

    /// In place of a search: the levels given, of the heads together or each by itself. After begin().
    VERKV_HOST_DEVICE void use_given(Block& b, const raisable& r, const double* given, bool joint) {
        largest_ = false;
        factor_ = 1;
        if (b.thread() < heads_) {
            const auto kappa = static_cast<float>(b.load_readonly(given + b.thread()));
            kappa_.set(b.thread(), kappa);
            own_.set(b.thread(), 1 / kappa);
            trial_.set(b.thread(), 1 / kappa);
        }
        b.sync();
        if (joint) {
            look(b, r);
        } else {
            look_own(b, r);
        }
    }

    /// One r' for all heads: r' = wish/factor(), wish the root of sum (a_h m_h)^2, or the largest a_h m_h where that
    /// comes to fewer rows.
    VERKV_HOST_DEVICE void find_joint(Block& b, const raisable& r) {
        largest_ = true;
        factor_ = 1;
        const double union_rows = rows(b, r);
        largest_ = false;
        for (unsigned round = 0; round < share_rounds; ++round) {
            look(b, r);
            if (b.thread() < heads_) {
                const double share = certificate_.get(b.thread()) / epsilon_;
                const float a = trial_.get(b.thread()) * static_cast<float>(smaller(larger(share, 0.25), 4.0));
                trial_.set(b.thread(), smaller(a, own_.get(b.thread())));
            }
            b.sync();
        }
        look(b, r);
        float growth = 1.05f;
        for (unsigned round = 0; round < back_rounds && !(worst() < margin); ++round) {
            if (b.thread() < heads_) {
                const float a = trial_.get(b.thread()) * growth;
                trial_.set(b.thread(),
                           round + 1 < back_rounds ? smaller(a, own_.get(b.thread())) : own_.get(b.thread()));
            }
            growth *= round >= 7 ? growth : 1.0f;  // as the CPU at first, then in longer and longer steps
            b.sync();
            look(b, r);
        }
        raise_factor(b, r, 1.05f);
        if (rows(b, r) > union_rows) {
            if (b.thread() < heads_) {
                trial_.set(b.thread(), own_.get(b.thread()));
            }
            largest_ = true;
            factor_ = 1;
            b.sync();
            look(b, r);
            raise_factor(b, r, 1.1f);
        }
        look(b, r);
    }

    /// r' that all heads give a token, or 0; after find_joint().
    [[nodiscard]] VERKV_HOST_DEVICE float joint_probability(Block& b, const raisable& r, unsigned i) const {
        float x[Heads];
        const float odds = load(b, r, i, x);
        return verkv::detail::raised_probability(wish(x) * (1 / factor_), odds);
    }
    /// r' that one head gives a token, or 0; after find_own().
    [[nodiscard]] VERKV_HOST_DEVICE float own_probability(Block& b, const raisable& r, unsigned i, unsigned h) const {
        const float x = b.load_global(r.mass + h * r.stride + i);
        return verkv::detail::raised_probability(x * own_.get(h), b.load_global(r.odds + i));
    }

    /// Of the last look.
    [[nodiscard]] VERKV_HOST_DEVICE double certificate(unsigned h) const { return certificate_.get(h); }
    [[nodiscard]] VERKV_HOST_DEVICE double variance(unsigned h) const { return variance_.get(h); }
    /// Of the plan: kappa/R of a head by itself, or what stands in its place in a joint plan.
    [[nodiscard]] VERKV_HOST_DEVICE float own_level(unsigned h) const { return kappa_.get(h); }
    [[nodiscard]] VERKV_HOST_DEVICE float joint_level(unsigned h) const { return factor_ / trial_.get(h); }

private:
    /// A level between this head's certified and failing ones: where a straight line between the two certificates is
    /// epsilon; in the end, half way.
    [[nodiscard]] VERKV_HOST_DEVICE float between(unsigned lines, float precision) const {
        const float width = failing_ - certified_;
        const float edge = 0.5f * precision * certified_;
        const auto crossing = width * static_cast<float>((epsilon_ - at_certified_) / (at_failing_ - at_certified_));
        return certified_ + (lines < 4 ? smaller(larger(crossing - 0.5f * edge, edge), width - edge) : 0.5f * width);
    }

    VERKV_HOST_DEVICE float load(Block& b, const raisable& r, unsigned i, float (&x)[Heads]) const {
        for (unsigned h = 0; h < Heads; ++h) {
            x[h] = h < heads_ ? b.load_global(r.mass + h * r.stride + i) : 0.0f;
        }
        return b.load_global(r.odds + i);
    }

    /// What the heads ask for, no more than 2^100.
    [[nodiscard]] VERKV_HOST_DEVICE float wish(const float (&x)[Heads]) const {
        float all = 0;
        for (unsigned h = 0; h < Heads; ++h) {
            if (h < heads_) {
                const float a = x[h] * trial_.get(h);
                all = largest_ ? larger(a, all) : all + a * a;
            }
        }
        return smaller(largest_ ? all : std::sqrt(all), 0x1p100f);
    }

    /// Adds what threads have found to the rest, and makes the heads' certificates of it.
    VERKV_HOST_DEVICE void finish(Block& b, const double (&variance)[Heads], const float (&term)[Heads]) {
        moments_.combine(b, variance, term, [&](unsigned h, bernstein_moments all) {
            all.variance += rest_variance_.get(h);
            all.largest = larger(static_cast<double>(rest_term_.get(h)), all.largest);
            variance_.set(h, all.variance);
            certificate_.set(h, bernstein_bound(all, log_term_));
        });
        b.sync();
    }

    /// Certificates of the heads, each at its own level kappa_: odds' = min(o, kappa/x - 1).
    VERKV_HOST_DEVICE void look_own(Block& b, const raisable& r) {
        double variance[Heads] = {};
        float term[Heads] = {};
        for (unsigned i = b.thread(); i < r.count; i += b.threads()) {
            float x[Heads];
            const float odds = load(b, r, i, x);
            for (unsigned h = 0; h < Heads; ++h) {
                const float lift = larger(smaller(x[h] * odds, kappa_.get(h) - x[h]), 0.0f);
                variance[h] += static_cast<double>(x[h]) * static_cast<double>(lift);
                term[h] = larger(lift > 0 ? larger(x[h], lift) : 0.0f, term[h]);
            }
        }
        finish(b, variance, term);
    }

    /// Certificates of the heads when all have r' = max(r, min(1, wish/factor_)).
    VERKV_HOST_DEVICE void look(Block& b, const raisable& r) {
        double variance[Heads] = {};
        float term[Heads] = {};
        for (unsigned i = b.thread(); i < r.count; i += b.threads()) {
            float x[Heads];
            const float odds = load(b, r, i, x);
            const float asked = wish(x);
            const float left = larger(smaller((factor_ - asked) / asked, odds), 0.0f);
            for (unsigned h = 0; h < Heads; ++h) {
                const float lift = x[h] * left;
                variance[h] += static_cast<double>(x[h]) * static_cast<double>(lift);
                term[h] = larger(left > 0 ? larger(x[h], lift) : 0.0f, term[h]);
            }
        }
        finish(b, variance, term);
    }

    /// The largest certificate of a head that has to hold, relative to epsilon.
    [[nodiscard]] VERKV_HOST_DEVICE double worst() const {
        double all = 0;
        for (unsigned h = 0; h < heads_; ++h) {
            all = larger(certificate_.get(h), all);
        }
        return all / epsilon_;
    }

    /// Rows that are expected to be fetched.
    VERKV_HOST_DEVICE double rows(Block& b, const raisable& r) {
        double sum = 0;
        for (unsigned i = b.thread(); i < r.count; i += b.threads()) {
            float x[Heads];
            const float odds = load(b, r, i, x);
            sum += static_cast<double>(larger(smaller(wish(x) / factor_, 1.0f) - 1 / (1 + odds), 0.0f));
        }
        return block_sum(b, sums_, sum);
    }

    /// Raises factor_ from 1, where the last look was, while all certificates hold; lowers it by some roundings where
    /// they do not.
    VERKV_HOST_DEVICE void raise_factor(Block& b, const raisable& r, float step) {
        constexpr float precision = 0x1p-10f;
        double at_certified = worst();
        for (unsigned round = 0; round < 8 && !(at_certified < margin); ++round) {
            factor_ *= 1 - 0x1p-12f;
            look(b, r);
            at_certified = worst();
        }
        float certified = factor_;
        float failing = certified;
        double at_failing = 0;
        for (unsigned round = 0; round < 8; ++round) {
            failing = factor_ = certified * step;
            look(b, r);
            at_failing = worst();
            if (!(at_failing < margin)) {
                break;
            }
            certified = failing;
            at_certified = at_failing;
        }
        for (unsigned round = 0; round < factor_rounds && failing - certified > precision * certified; ++round) {
            const float width = failing - certified;
            const float edge = 0.25f * precision * certified;
            const auto crossing = width * static_cast<float>((1 - at_certified) / (at_failing - at_certified));
            factor_ = certified + (round < 3 ? smaller(larger(crossing - edge, edge), width - edge) : 0.5f * width);
            look(b, r);
            const double there = worst();
            const bool good = there < margin;
            (good ? certified : failing) = factor_;
            (good ? at_certified : at_failing) = there;
        }
        factor_ = certified;
    }

    block_moments<Block, Heads> moments_;
    typename Block::template shared<double> rest_variance_, variance_, certificate_, sums_;
    typename Block::template shared<float> rest_term_, kappa_, own_, trial_;
    unsigned heads_ = 0;
    double epsilon_ = 0;
    double log_term_ = 0;
    float factor_ = 1;  // the same in all threads, as is largest_
    bool largest_ = false;
    // Of the head of this thread.
    float certified_ = 0, failing_ = 0;
    double at_certified_ = 0, at_failing_ = 0;
};

}  // namespace verkv::inline v0::gpu::detail
