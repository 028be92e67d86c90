// How high the level of a water-filling plan can be for each query head, to an eighth of an octave.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "verkv/certify/bernstein.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/host_device.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/block_moments.hpp"
#include "verkv/cuda/detail/last_block.hpp"
#include "verkv/plan/breakpoint_window.hpp"

namespace verkv::inline v0::gpu {

/// Most tokens of a KV head: 2^22. Bins add up parts of at most 2^40 units each in signed 64 bits.
inline constexpr std::size_t most_tokens = std::size_t{1} << 22;

namespace detail {

/// What a planning kernel can be launched with. Throws invalid_argument.
inline void check_plan_shape(std::size_t stride, std::uint32_t heads, unsigned most_heads) {
    verkv::detail::check(stride <= most_tokens, "room for ", stride, " tokens of a KV head; planning counts at most ",
                         most_tokens);
    verkv::detail::check(heads > 0 && heads <= most_heads, "groups of ", heads,
                         " query heads; the kernel was compiled for 1 to ", most_heads);
}

}  // namespace detail

/// Where the level kappa/R of a query head by itself lies.
struct head_level {
    float low;   ///< certifies; infinity: nothing has to be raised; 0: all of L has to be; NaN: masses are not finite
    float high;  ///< the next edge: does not certify, if no more is known of b than that it is at most kappa
    double at_low;  ///< certificate at low
    double before;  ///< certificate of the sample as it was drawn
};

/// The largest level kappa/R of each query head that certifies, among the edges of logarithmic bins: what
/// breakpoint_bins does on the CPU, over all tokens and the whole range of levels_to_search().
///
/// blocks_y is the number of KV heads; along x, blocks share the tokens in pieces. A block bins its tokens in shared
/// memory, for all heads of the group, and adds its bins to those in global memory. Sums in bins are integers, in units
/// of 2^-40 edge (of squares, 2^-40 edge^2): no order of threads or blocks changes a bit of them. Tokens below the
/// window, that no level of it raises, are summed in double, by threads, then blocks, in their order. The last block
/// scans the edges, a warp a head.
/// Preconditions (unchecked): arrays are as large as said; sums, counts, terms and `arrived` are 0, and are so again
/// afterwards. Checked at launch: stride <= most_tokens, G <= Heads.
/// Reads 4 (G + 1) bytes a token. Error of V at an edge: n 2^-40 kappa^2 from the bins, beside 2^-23 of V for terms
/// that are products of floats; certificates are asked to be below epsilon (1 - 2^-14), so that it does not matter.
template <unsigned Heads>
struct find_levels_kernel {
    static_assert(Heads >= 1 && Heads <= 8);
    static constexpr unsigned most_threads = 512;
    static constexpr double margin = 1 - 0x1p-14;

    const float* mass = nullptr;            ///< [KV head][G][stride]
    const float* odds = nullptr;            ///< [KV head][stride]
    const std::uint32_t* tokens = nullptr;  ///< [KV head]
    const double* reference = nullptr;      ///< R, [KV head][G]
    const double* total = nullptr;          ///< sum of masses or a bound above it, [KV head][G]
    head_level* level = nullptr;            ///< [KV head][G]
    std::uint64_t* sums = nullptr;          ///< [KV head][G][edges][3], scratch
    std::uint32_t* counts = nullptr;        ///< [KV head][G][edges][2], scratch
    double* variance = nullptr;             ///< [KV head][blocks][2 Heads], scratch
    float* term = nullptr;                  ///< [KV head][blocks][2 Heads], scratch
    std::uint32_t* arrived = nullptr;       ///< [KV head]
    std::size_t stride = 0;
    std::uint32_t kv_heads = 0;
    std::uint32_t heads = 0;  ///< G
    std::uint32_t edges = 0;  ///< that there is room for; see edges_of()
    double epsilon = 0.05;
    double log_term = 0;
    std::uint32_t blocks = 1;
    std::uint32_t threads = 256;

    /// Edges that a window can have when the sum of m/R is at most `mass`: 1 for the denominator target.
    [[nodiscard]] static std::uint32_t edges_of(tolerance t, double mass = 1) {
        const auto [low, high] = levels_to_search(t.epsilon, t.log_term(), mass);
        // One more than now: the sum of floats may be above `mass` by a rounding.
        return breakpoint_window::of(low, high, 320).count + 1;
    }

    [[nodiscard]] launch_shape shape() const {
        detail::check_plan_shape(stride, heads, Heads);
        const std::size_t bins = std::size_t{heads} * edges;
        shared_layout shared;
        shared = shared.array<std::uint64_t>(bins * sums_of_bin);
        shared = shared.array<std::uint32_t>(bins * counts_of_bin);
        shared = detail::block_moments<no_block, 2 * Heads>::layout(shared, threads);
        shared = shared.array<std::uint32_t>(1);
        return {blocks, kv_heads, threads, shared.bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        const std::size_t kv = b.block_index_y();
        const unsigned bins = heads * edges;
        auto sum = b.template allocate_shared<std::uint64_t>(std::size_t{bins} * sums_of_bin);
        auto count = b.template allocate_shared<std::uint32_t>(std::size_t{bins} * counts_of_bin);
        detail::block_moments<Block, 2 * Heads> moments(b);
        auto flag = b.template allocate_shared<std::uint32_t>(1);
        for (unsigned i = b.thread(); i < bins * sums_of_bin; i += b.threads()) {
            sum.set(i, 0);
        }
        for (unsigned i = b.thread(); i < bins * counts_of_bin; i += b.threads()) {
            count.set(i, 0);
        }
        b.sync();
        double spread[2 * Heads] = {};  // of tokens below the window, then of those above it
        float top[2 * Heads] = {};
        bin_tokens(b, kv, sum, count, spread, top);
        moments.combine(b, spread, top, [&](unsigned h, const bernstein_moments& m) {
            const std::size_t at = (kv * b.blocks() + b.block_index()) * (2 * Heads) + h;
            b.store_global(variance + at, m.variance);
            b.store_global(term + at, static_cast<float>(m.largest));
        });
        add_bins(b, kv, sum, count);
        if (detail::last_block(b, arrived + kv, flag)) {
            for (unsigned h = b.warp(); h < heads; h += b.warps()) {
                scan(b, kv, h);
            }
        }
    }

private:
    struct no_block {
        template <class T>
        using shared = T;
    };
    static constexpr unsigned sums_of_bin = 3;    // of m between breakpoints, of m^2, of m^2 o by m/r
    static constexpr unsigned counts_of_bin = 2;  // tokens with m in it less those with m/r; bits of the largest term
    static constexpr double unit = 0x1p40;

    [[nodiscard]] VERKV_HOST_DEVICE static std::uint64_t fixed(double x) {
        // Half a unit of 2^-40 either way is nothing; what counts is that every part rounds the same way.
        // NOLINTNEXTLINE(bugprone-incorrect-roundings)
        return static_cast<std::uint64_t>(static_cast<std::int64_t>(x * unit + 0.5));
    }
    [[nodiscard]] VERKV_HOST_DEVICE static double from_fixed(std::uint64_t x) {
        return static_cast<double>(static_cast<std::int64_t>(x)) / unit;
    }

    template <class Block>
    [[nodiscard]] VERKV_HOST_DEVICE breakpoint_window window_of(Block& b, std::size_t row) const {
        const double sum = b.load_readonly(total + row) / b.load_readonly(reference + row);
        if (!(sum < 0x1p120)) {  // not finite: nothing can be certified
            return breakpoint_window::of(1, 1, edges);
        }
        const auto [low, high] = levels_to_search(epsilon, log_term, sum);
        return breakpoint_window::of(low, high, edges);
    }

    template <class Block, class Sum, class Count>
    VERKV_HOST_DEVICE void bin_tokens(Block& b, std::size_t kv, Sum sum, Count count, double (&spread)[2 * Heads],
                                      float (&top)[2 * Heads]) const {
        breakpoint_window window[Heads];
        float inverse[Heads] = {};
        for (unsigned h = 0; h < Heads; ++h) {
            if (h < heads) {
                window[h] = window_of(b, kv * heads + h);
                inverse[h] = static_cast<float>(1 / b.load_readonly(reference + kv * heads + h));
            }
        }
        const detail::token_range own = detail::tokens_of(b, b.load_readonly(tokens + kv));
        for (unsigned i = own.first + b.thread(); i < own.last; i += b.threads()) {
            const float o = b.load_readonly(odds + kv * stride + i);
            if (!(o > 0)) {
                continue;
            }
            for (unsigned h = 0; h < Heads; ++h) {
                if (h < heads) {
                    const float x = b.load_readonly(mass + (kv * heads + h) * stride + i) * inverse[h];
                    const float up = x * o;
                    const bool above = x + up > window[h].edge(0);
                    const unsigned leaves = above ? window[h].slot_of(x * (1 + o)) : 0;
                    if (above) {
                        add(b, sum, count, h, window[h], x, up, leaves);
                    }
                    const double square = static_cast<double>(x) * static_cast<double>(up);
                    const float largest = larger(x, up);
                    const bool beyond = above && leaves == window[h].count;
                    spread[h] += above ? 0.0 : square;
                    top[h] = larger(above ? 0.0f : largest, top[h]);
                    spread[Heads + h] += beyond ? square : 0.0;
                    top[Heads + h] = larger(beyond ? largest : 0.0f, top[Heads + h]);
                }
            }
        }
    }

    /// A token of mass x, m (1-r)/r = up and m/r in bin `leaves`.
    template <class Block, class Sum, class Count>
    VERKV_HOST_DEVICE void add(Block& b, Sum sum, Count count, unsigned h, const breakpoint_window& window, float x,
                               float up, unsigned leaves) const {
        const unsigned enters = window.slot_of(x);
        const auto m = static_cast<double>(x);
        if (enters < window.count) {
            const unsigned at = h * edges + enters;
            const double part = m / static_cast<double>(window.edge(enters));
            b.atomic_add(sum, at * sums_of_bin, fixed(part));
            b.atomic_add(sum, at * sums_of_bin + 1, fixed(part * part));
            b.atomic_add(count, at * counts_of_bin, 1u);
        }
        if (leaves < window.count) {
            const unsigned at = h * edges + leaves;
            const double inverse = 1 / static_cast<double>(window.edge(leaves));
            const double part = m * inverse;
            b.atomic_add(sum, at * sums_of_bin, ~fixed(part) + 1);
            b.atomic_add(sum, at * sums_of_bin + 1, ~fixed(part * part) + 1);
            b.atomic_add(sum, at * sums_of_bin + 2, fixed(part * (static_cast<double>(up) * inverse)));
            b.atomic_add(count, at * counts_of_bin, ~0u);
            b.atomic_max(count, at * counts_of_bin + 1, bits_as<std::uint32_t>(larger(x, up)));
        }
    }

    template <class Block, class Sum, class Count>
    VERKV_HOST_DEVICE void add_bins(Block& b, std::size_t kv, Sum sum, Count count) const {
        const std::size_t first = kv * heads * edges;
        for (unsigned i = b.thread(); i < heads * edges * sums_of_bin; i += b.threads()) {
            if (const std::uint64_t x = sum.get(i); x != 0) {
                b.atomic_add(sums + first * sums_of_bin + i, x);
            }
        }
        for (unsigned i = b.thread(); i < heads * edges; i += b.threads()) {
            if (const std::uint32_t x = count.get(i * counts_of_bin); x != 0) {
                b.atomic_add(counts + (first + i) * counts_of_bin, x);
            }
            if (const std::uint32_t x = count.get(i * counts_of_bin + 1); x != 0) {
                b.atomic_max(counts + (first + i) * counts_of_bin + 1, x);
            }
        }
    }

    /// What blocks have found below or above the window of a head, by a warp.
    template <class Block>
    VERKV_HOST_DEVICE bernstein_moments outside(Block& b, std::size_t kv, unsigned which) const {
        bernstein_moments all;
        for (unsigned first = 0; first < b.blocks(); first += warp_size) {
            const unsigned k = first + b.lane();
            const std::size_t at = (kv * b.blocks() + k) * (2 * Heads) + which;
            const bool there = k < b.blocks();
            all.variance += warp_reduce(b, there ? b.load_coherent(variance + at) : 0.0, plus());
            const float t = warp_reduce(b, there ? b.load_coherent(term + at) : 0.0f, maximum());
            all.largest = larger(static_cast<double>(t), all.largest);
        }
        return all;
    }

    template <class Block, class T>
    VERKV_HOST_DEVICE static T running_largest(Block& b, T v) {
        for (unsigned d = 1; d < warp_size; d *= 2) {
            v = larger(b.shuffle_up(v, d), v);
        }
        return v;
    }

    /// Finds a head's level, by a warp: a lane an edge, in running sums over the edges below.
    template <class Block>
    VERKV_HOST_DEVICE void scan(Block& b, std::size_t kv, unsigned h) const {
        const std::size_t row = kv * heads + h;
        const breakpoint_window window = window_of(b, row);
        const bernstein_moments above = outside(b, kv, Heads + h);
        bernstein_moments at = outside(b, kv, h);
        int between = 0;
        double between_mass = 0;
        double between_square = 0;
        double highest = 0;
        head_level found = {0, 0, 0, 0};
        for (unsigned first = 0; first < window.count; first += warp_size) {
            const unsigned k = first + b.lane();
            const bool there = k < window.count;
            const std::size_t bin = row * edges + (there ? k : 0);
            const double edge = there ? static_cast<double>(window.edge(k)) : 0.0;
            const double m = take(b, sums + bin * sums_of_bin, there) * edge;
            const double square = take(b, sums + bin * sums_of_bin + 1, there) * (edge * edge);
            const double spread = take(b, sums + bin * sums_of_bin + 2, there) * (edge * edge);
            const int change = there ? static_cast<int>(b.load_coherent(counts + bin * counts_of_bin)) : 0;
            const float own_term = there ? bits_as<float>(b.load_coherent(counts + bin * counts_of_bin + 1)) : 0.0f;
            if (there) {
                b.store_global(counts + bin * counts_of_bin, 0u);
                b.store_global(counts + bin * counts_of_bin + 1, 0u);
            }
            const auto tokens_before = warp_exclusive_scan(b, change);
            const auto mass_before = warp_exclusive_scan(b, m);
            const auto square_before = warp_exclusive_scan(b, square);
            const auto spread_before = warp_exclusive_scan(b, spread);
            const float largest = running_largest(b, own_term);
            const bool some = between + tokens_before.before + change > 0;
            const double kappa_mass = edge * (between_mass + mass_before.before + m);
            const double squares = between_square + square_before.before + square;
            bernstein_moments here;
            here.variance =
                at.variance + spread_before.before + spread + (some ? larger(kappa_mass - squares, 0.0) : 0.0);
            here.largest = some ? edge : larger(larger(static_cast<double>(largest), highest), at.largest);
            const double certificate = there ? bernstein_bound(here, log_term) : __builtin_huge_val();
            const unsigned good = b.ballot(there && certificate < epsilon * margin);
            if (good != 0) {
                const unsigned best = highest_bit(good);
                found.low = window.edge(first + best);
                found.at_low = b.shuffle(certificate, best);
                found.high = window.edge(first + best + 1);
            }
            between += tokens_before.total;
            between_mass += mass_before.total;
            between_square += square_before.total;
            at.variance += spread_before.total;
            highest = larger(static_cast<double>(b.shuffle(largest, warp_size - 1)), highest);
        }
        at.variance += above.variance;
        at.largest = larger(larger(highest, above.largest), at.largest);
        found.before = bernstein_bound(at, log_term);
        const double sum = b.load_readonly(total + row);
        const bool sound = sum - sum == 0 && b.load_readonly(reference + row) > 0;
        if (!sound) {
            found.before = __builtin_nan("");
            found.low = found.high = __builtin_nanf("");
        } else if (found.before < epsilon) {
            found.low = found.high = __builtin_huge_valf();
        } else if (!(found.before < __builtin_huge_val())) {
            found.before = __builtin_huge_val();  // squares overflow
            found.low = found.high = 0;
        }
        if (b.lane() == 0) {
            b.store_global(level + row, found);
        }
    }

    [[nodiscard]] VERKV_HOST_DEVICE static unsigned highest_bit(unsigned mask) {
        unsigned bit = 0;
        for (unsigned step = warp_size / 2; step > 0; step /= 2) {
            bit += (mask >> (bit + step)) != 0 ? step : 0;
        }
        return bit;
    }

    /// A sum that blocks have made, which is 0 afterwards.
    template <class Block>
    VERKV_HOST_DEVICE static double take(Block& b, std::uint64_t* at, bool there) {
        if (!there) {
            return 0;
        }
        const std::uint64_t x = b.load_coherent(at);
        b.store_global(at, std::uint64_t{0});
        return from_fixed(x);
    }
};

}  // namespace verkv::inline v0::gpu
