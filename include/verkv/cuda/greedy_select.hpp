// The paper's planner on the device, second part: the smallest key that is fetched, by radix select with sums of what
// remains.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/certify/bernstein.hpp"
#include "verkv/core/host_device.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/last_block.hpp"
#include "verkv/cuda/greedy_survey.hpp"

namespace verkv::inline v0::gpu {

/// Narrows the smallest key that is fetched, by 11, 10 and 10 bits: sums of variances and largest terms of the tokens
/// by the digit of their keys, and the digit at which what lies below no longer certifies. blocks_y is KV heads * G.
/// Sums are integers in units of 2^-40 of the next eighth of an octave above the key: no order changes a bit.
/// Preconditions (unchecked): sums, terms, counts and `arrived` are 0, and are so again; n < 2^22. Certificates are
/// asked to be below epsilon (1 - 2^-16).
struct greedy_select_kernel {
    static constexpr unsigned most_threads = 1024;
    static constexpr unsigned bins = 2048;
    static constexpr double margin = 1 - 0x1p-16;

    detail::greedy_masses m;
    greedy_state* state = nullptr;     ///< [KV head][G]
    std::uint64_t* sums = nullptr;     ///< [KV head][G][bins], scratch
    std::uint32_t* terms = nullptr;    ///< bits of the largest term, [KV head][G][bins], scratch
    std::uint32_t* counts = nullptr;   ///< [KV head][G][bins], scratch
    std::uint32_t* arrived = nullptr;  ///< [KV head][G]
    std::uint32_t digit = 0;           ///< 0, 1, 2
    double epsilon = 0.05;
    double log_term = 0;
    std::uint32_t blocks = 1;
    std::uint32_t threads = 256;

    [[nodiscard]] launch_shape shape() const {
        return {blocks, m.kv_heads * m.heads, threads,
                shared_layout()
                    .array<std::uint64_t>(bins)
                    .array<std::uint32_t>(bins)
                    .array<std::uint32_t>(bins)
                    .array<std::uint32_t>(1)
                    .bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        const std::size_t row = b.block_index_y();
        auto sum = b.template allocate_shared<std::uint64_t>(bins);
        auto term = b.template allocate_shared<std::uint32_t>(bins);
        auto count = b.template allocate_shared<std::uint32_t>(bins);
        auto flag = b.template allocate_shared<std::uint32_t>(1);
        const greedy_state s = b.load_global(state + row);
        if (s.outcome == greedy_prefix) {
            for (unsigned k = b.thread(); k < bins; k += b.threads()) {
                sum.set(k, 0);
                term.set(k, 0);
                count.set(k, 0);
            }
            b.sync();
            bin_tokens(b, row, s, sum, term, count);
            b.sync();
            for (unsigned k = b.thread(); k < bins; k += b.threads()) {
                if (count.get(k) != 0) {
                    b.atomic_add(sums + row * bins + k, sum.get(k));
                    b.atomic_max(terms + row * bins + k, term.get(k));
                    b.atomic_add(counts + row * bins + k, count.get(k));
                }
            }
        }
        if (!detail::last_block(b, arrived + row, flag) || s.outcome != greedy_prefix) {
            return;
        }
        if (b.warp() == 0) {
            narrow(b, row, s);
        }
        b.sync();
        for (unsigned k = b.thread(); k < bins; k += b.threads()) {
            b.store_global(sums + row * bins + k, std::uint64_t{0});
            b.store_global(terms + row * bins + k, 0u);
            b.store_global(counts + row * bins + k, 0u);
        }
    }

private:
    static constexpr double unit = 0x1p40;

    [[nodiscard]] VERKV_HOST_DEVICE unsigned shift() const { return digit == 0 ? 20 : digit == 1 ? 10 : 0; }

    /// What sums of keys that begin with these bits are relative to.
    [[nodiscard]] VERKV_HOST_DEVICE static double scale_of(std::uint32_t key) {
        return static_cast<double>(bits_as<float>(((key >> 20) + 1) << 20));
    }

    template <class Block, class Sum, class Word>
    VERKV_HOST_DEVICE void bin_tokens(Block& b, std::size_t row, const greedy_state& s, Sum sum, Word term,
                                      Word count) const {
        const float inverse = m.inverse(b, row);
        const detail::token_range own = detail::tokens_of(b, b.load_readonly(m.tokens + row / m.heads));
        for (unsigned i = own.first + b.thread(); i < own.last; i += b.threads()) {
            const auto t = m.load(b, row, inverse, i);
            const std::uint32_t key = detail::greedy_key(s, i, t.variance);
            const unsigned known = digit == 0 ? 31 : digit == 1 ? 20 : 10;
            if (!(t.odds > 0) || key >> known != s.prefix >> known) {
                continue;
            }
            const unsigned k = (key >> shift()) & (digit == 0 ? bins - 1 : 1023);
            // A leader's own variance is below what its key stands for.
            const double part = static_cast<double>(t.variance) / scale_of(key);
            b.atomic_add(sum, k,
                         static_cast<std::uint64_t>(part * unit + 0.5));  // NOLINT(bugprone-incorrect-roundings)
            b.atomic_max(term, k, bits_as<std::uint32_t>(t.term));
            b.atomic_add(count, k, 1u);
        }
    }

    struct below {
        double variance;
        double term;
    };

    template <class Block>
    [[nodiscard]] VERKV_HOST_DEVICE below bin(Block& b, std::size_t row, const greedy_state& s, unsigned k) const {
        const double scale = scale_of(digit == 0 ? k << 20 : s.prefix) / unit;
        return {static_cast<double>(b.load_coherent(sums + row * bins + k)) * scale,
                static_cast<double>(bits_as<float>(b.load_coherent(terms + row * bins + k)))};
    }

    [[nodiscard]] VERKV_HOST_DEVICE bool certifies(const below& rest) const {
        return bernstein_bound({0, rest.variance, rest.term}, log_term) < epsilon * margin;
    }

    /// The bin at which the tokens below and in it no longer certify, by a warp: a lane has a run of bins.
    template <class Block>
    VERKV_HOST_DEVICE void narrow(Block& b, std::size_t row, greedy_state s) const {
        constexpr unsigned run = bins / warp_size;
        below own = {0, 0};
        for (unsigned k = 0; k < run; ++k) {
            const below more = bin(b, row, s, b.lane() * run + k);
            own = {own.variance + more.variance, larger(more.term, own.term)};
        }
        below rest = {s.variance + warp_exclusive_scan(b, own.variance).before, own.term};
        for (unsigned d = 1; d < warp_size; d *= 2) {
            rest.term = larger(b.shuffle_up(rest.term, d), rest.term);
        }
        const double above = rest.term;
        rest.term = b.shuffle_up(rest.term, 1);
        rest.term = larger(b.lane() == 0 ? 0.0 : rest.term, s.term);
        const bool fails = !certifies({rest.variance + own.variance, larger(above, s.term)});
        const unsigned failing = b.ballot(fails);
        // By the sums of other runs than a lane adds up itself, the last one may be a rounding short of failing.
        const unsigned lane = failing != 0 ? lowest_bit(failing) : warp_size - 1;
        if (b.lane() != lane) {
            return;
        }
        unsigned k = lane * run;
        unsigned last = k;
        below before_last = rest;
        for (; k < (lane + 1) * run; ++k) {
            if (b.load_coherent(counts + row * bins + k) == 0) {
                continue;
            }
            const below more = bin(b, row, s, k);
            last = k;
            before_last = rest;
            rest = {rest.variance + more.variance, larger(more.term, rest.term)};
            if (!certifies(rest)) {
                break;
            }
        }
        s.variance = before_last.variance;
        s.term = before_last.term;
        s.prefix |= last << shift();
        if (digit == 2) {
            cut_ties(b, row, s, last);
        }
        b.store_global(state + row, s);
    }

    /// Of tokens with the same key the lower index is fetched first: as many of the others stay as certify.
    template <class Block>
    VERKV_HOST_DEVICE void cut_ties(Block& b, std::size_t row, greedy_state& s, unsigned k) const {
        s.ties = b.load_coherent(counts + row * bins + k);
        const below all = bin(b, row, s, k);
        const double each = all.variance / static_cast<double>(larger(s.ties, 1u));
        const auto with = [&](unsigned n) {
            return below{s.variance + each * static_cast<double>(n), n > 0 ? larger(all.term, s.term) : s.term};
        };
        unsigned staying = 0;
        unsigned failing = larger(s.ties, 1u);
        while (failing - staying > 1) {
            const unsigned middle = staying + (failing - staying) / 2;
            (certifies(with(middle)) ? staying : failing) = middle;
        }
        s.staying = staying;
        const below rest = with(staying);
        s.variance = rest.variance;
        s.term = rest.term;
        s.after = bernstein_bound({0, rest.variance, rest.term}, log_term);
    }
};

}  // namespace verkv::inline v0::gpu
