// Logits of all tokens from the packed codes of a RoPE-pair sketch, for all query heads of a group in one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "verkv/core/host_device.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"

namespace verkv::inline v0::gpu {

/// The RoPE-pair sketch of one KV head in device memory: the arrays of rope_pair_codes as they are, but for
/// first_token, which has 32 bits and one element more, the number of tokens.
/// Two neighbouring blocks of 16 tokens are what a warp reads at a time: 64 adjacent bytes of each.
struct device_rope_pairs {
    const std::uint32_t* codes = nullptr;        ///< [group][block of 16 tokens][word][16]
    const half* parameters = nullptr;            ///< [group][zero or step][padded_channels]
    const std::uint32_t* first_token = nullptr;  ///< [groups + 1]
    const std::uint32_t* channels = nullptr;     ///< [channel_count]
    std::uint32_t groups = 0;
    std::uint32_t slot_words = 0;
};

/// first_token of device_rope_pairs, from rope_pair_codes. O(groups).
template <class Codes>
[[nodiscard]] std::vector<std::uint32_t> device_first_tokens(const Codes& codes) {
    std::vector<std::uint32_t> first;
    first.reserve(codes.groups + 1);
    for (std::size_t g = 0; g < codes.groups; ++g) {
        first.push_back(static_cast<std::uint32_t>(codes.first_token[g]));
    }
    first.push_back(static_cast<std::uint32_t>(codes.tokens));
    return first;
}

namespace detail {

/// Adds the largest logits of a block's threads to those of the heads, in global memory. NaN counts for nothing.
/// scratch: an element a warp. Integers: the same whatever the order.
template <class Block, class Shared, unsigned Heads>
VERKV_HOST_DEVICE void raise_tops(Block& b, Shared scratch, const float (&own)[Heads], unsigned heads,
                                  std::uint32_t* top) {
    for (unsigned h = 0; h < Heads; ++h) {
        if (h < heads) {
            const float all = block_max(b, scratch, own[h]);
            if (b.thread() == 0) {
                b.atomic_max(top + h, ordered_bits(all));
            }
        }
    }
}

}  // namespace detail

/// logit[h][i] = scale * <q_h, k^_i>, k^ as the codes say, 0 in channels that are not kept [VerKV App. A.1]; and the
/// largest of each head, as ordered_bits(). What rope_pair_estimate() computes on the CPU.
///
/// A block's threads are cut into teams of a group's length; a team turns the group's steps into factors of its own,
/// and each of its threads scores a token: codes are read once for all heads, where Heads covers the group.
/// Bits: 1, 2, 4 or 8. Heads: query heads whose sums a thread has in registers, 1 to 8; more go round after round.
/// Shapes: see the members. blocks_y is the number of KV heads; any number of blocks along x and of threads.
/// Preconditions (unchecked): a sketch's words hold ceil(channel_count * Bits / 32); arrays are as large as said.
/// Reads words * 4 bytes a token, 4 * padded_channels a group, with `odds` 4 bytes a token more; writes 4 G a token.
/// Float accumulation, channel after channel: error at most (channels + 3) 2^-23 scale sum_c |q_c| (|zero_c| + code_c
/// step_c). A token's bits depend on its group and on the queries alone, not on the launch. NaN in a group's
/// parameters makes its logits NaN; NaNs do not count for the largest.
template <unsigned Bits, unsigned Heads>
struct rope_pair_logits_kernel {
    static_assert(Bits == 1 || Bits == 2 || Bits == 4 || Bits == 8, "codes that straddle words are the CPU's");
    static_assert(Heads >= 1 && Heads <= 8);
    static constexpr unsigned most_threads = 1024;

    const device_rope_pairs* sketch = nullptr;  ///< [KV head]
    const float* queries = nullptr;             ///< [KV head][G][key_dim]
    const float* odds = nullptr;   ///< [KV head][stride]; tokens of odds 0 are left to others; null: none is
    float* logits = nullptr;       ///< [KV head][G][stride]
    std::uint32_t* top = nullptr;  ///< [KV head][G], ordered_bits(); 0 before the first kernel that raises it
    std::size_t stride = 0;        ///< tokens that there is room for
    std::uint32_t kv_heads = 0;
    std::uint32_t heads = 0;  ///< G
    std::uint32_t key_dim = 0;
    std::uint32_t channel_count = 0;
    std::uint32_t padded_channels = 0;
    std::uint32_t group_length = 0;
    float scale = 1;
    std::uint32_t blocks = 1;
    std::uint32_t threads = 128;

    [[nodiscard]] launch_shape shape() const {
        const std::size_t all_factors = std::size_t{rounds()} * columns() * vecs;
        shared_layout shared;
        shared = shared.array<vec>(all_factors);
        shared = shared.array<vec>(teams() * all_factors);
        shared = shared.array<float>(std::size_t{teams()} * rounds() * Heads);
        shared = shared.array<float>(threads / warp_size);
        return {blocks, kv_heads, threads, shared.bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        const unsigned kv = b.block_index_y();
        const std::size_t all_factors = std::size_t{rounds()} * columns() * vecs;
        auto query = b.template allocate_shared<vec>(all_factors);
        auto factor = b.template allocate_shared<vec>(teams() * all_factors);
        auto base = b.template allocate_shared<float>(std::size_t{teams()} * rounds() * Heads);
        auto scratch = b.template allocate_shared<float>(b.warps());
        const device_rope_pairs s = b.load_global(sketch + kv);
        for (std::size_t i = b.thread(); i < all_factors; i += b.threads()) {
            query.set(i, scaled_query(b, s, kv, i));
        }
        b.sync();

        const unsigned team = b.thread() / team_threads();
        const unsigned member = b.thread() % team_threads();
        for (unsigned round = 0; round < rounds(); ++round) {
            const unsigned head = round * Heads;
            float tops[Heads];
            for (unsigned h = 0; h < Heads; ++h) {
                tops[h] = -__builtin_huge_valf();
            }
            for (unsigned first = b.block_index() * teams(); first < s.groups; first += b.blocks() * teams()) {
                const unsigned group = first + team;
                const bool works = team < teams() && group < s.groups;
                if (works) {
                    make_factors(b, s, group, round, team, member, query, factor, base);
                }
                b.sync();
                if (works) {
                    score(b, s, kv, group, round, team, member, factor, base, tops);
                }
                b.sync();
            }
            detail::raise_tops(b, scratch, tops, smaller(Heads, heads - head), top + std::size_t{kv} * heads + head);
        }
    }

private:
    static constexpr unsigned vec_width = Heads > 2 ? 4 : Heads;
    static constexpr unsigned vecs = (Heads + vec_width - 1) / vec_width;
    static constexpr unsigned per_word = 32 / Bits;
    using vec = pack<float, vec_width>;  ///< a channel's factors of neighbouring heads

    [[nodiscard]] VERKV_HOST_DEVICE unsigned words() const { return (channel_count + per_word - 1) / per_word; }
    [[nodiscard]] VERKV_HOST_DEVICE unsigned columns() const { return words() * per_word; }
    [[nodiscard]] VERKV_HOST_DEVICE unsigned rounds() const { return (heads + Heads - 1) / Heads; }
    [[nodiscard]] VERKV_HOST_DEVICE unsigned team_threads() const {
        return smaller(threads, (group_length + warp_size - 1) / warp_size * warp_size);
    }
    [[nodiscard]] VERKV_HOST_DEVICE unsigned teams() const { return threads / team_threads(); }

    /// Element i of [round][channel][vec]: a query's channel times the scale; 0 where there is none.
    template <class Block>
    VERKV_HOST_DEVICE vec scaled_query(Block& b, const device_rope_pairs& s, unsigned kv, std::size_t i) const {
        const unsigned head =
            static_cast<unsigned>(i / (columns() * vecs)) * Heads + static_cast<unsigned>(i % vecs) * vec_width;
        const auto c = static_cast<unsigned>(i / vecs % columns());
        vec q{};
        if (c < channel_count) {
            const unsigned channel = b.load_readonly(s.channels + c);
            for (unsigned h = 0; h < vec_width; ++h) {
                if (head + h < heads) {
                    q.at[h] =
                        b.load_readonly(queries + (std::size_t{kv} * heads + head + h) * key_dim + channel) * scale;
                }
            }
        }
        return q;
    }

    /// A group's factors and bases for the heads of a round, by its team.
    template <class Block, class Query, class Factor, class Base>
    VERKV_HOST_DEVICE void make_factors(Block& b, const device_rope_pairs& s, unsigned group, unsigned round,
                                        unsigned team, unsigned member, Query query, Factor factor, Base base) const {
        const half* const zeros = s.parameters + std::size_t{group} * 2 * padded_channels;
        const half* const steps = zeros + padded_channels;
        const std::size_t from = std::size_t{round} * columns() * vecs;
        const std::size_t to = std::size_t{team} * rounds() * columns() * vecs + from;
        for (unsigned i = member; i < columns() * vecs; i += team_threads()) {
            const unsigned c = i / vecs;
            vec f = query.get(from + i);
            // Codes are masked where they lie in their word; the factor takes the shift back. Exact: powers of two.
            const float unshift = bits_as<float>((127 - c % per_word * Bits) << 23);
            const float step = c < channel_count ? to_float(b.load_readonly(steps + c)) * unshift : 0.0f;
            for (unsigned h = 0; h < vec_width; ++h) {
                f.at[h] *= step;
            }
            factor.set(to + i, f);
        }
        // A warp of the team adds up the zeros for some heads.
        for (unsigned v = member / warp_size; v < vecs; v += team_threads() / warp_size) {
            vec sums{};
            for (unsigned c = b.lane(); c < channel_count; c += warp_size) {
                const vec q = query.get(from + std::size_t{c} * vecs + v);
                const float zero = to_float(b.load_readonly(zeros + c));
                for (unsigned h = 0; h < vec_width; ++h) {
                    sums.at[h] += q.at[h] * zero;
                }
            }
            for (unsigned h = 0; h < vec_width; ++h) {
                const float sum = warp_reduce(b, sums.at[h], plus());
                if (b.lane() == 0 && v * vec_width + h < Heads) {
                    base.set((std::size_t{team} * rounds() + round) * Heads + v * vec_width + h, sum);
                }
            }
        }
    }

    /// A group's tokens for the heads of a round, by its team.
    template <class Block, class Factor, class Base>
    VERKV_HOST_DEVICE void score(Block& b, const device_rope_pairs& s, unsigned kv, unsigned group, unsigned round,
                                 unsigned team, unsigned member, Factor factor, Base base, float (&tops)[Heads]) const {
        constexpr unsigned block_tokens = 16;
        constexpr std::uint32_t mask = (1u << Bits) - 1;
        const unsigned begin = b.load_readonly(s.first_token + group);
        const unsigned count = b.load_readonly(s.first_token + group + 1) - begin;
        const std::size_t own = std::size_t{team} * rounds() + round;
        for (unsigned t = member; t < count; t += team_threads()) {
            if (odds != nullptr && b.load_readonly(odds + std::size_t{kv} * stride + begin + t) == 0) {
                continue;
            }
            const std::uint32_t* const at = s.codes + std::size_t{group} * s.slot_words +
                                            (t / block_tokens * words()) * block_tokens + t % block_tokens;
            float sums[Heads];
            for (unsigned h = 0; h < Heads; ++h) {
                sums[h] = base.get(own * Heads + h);
            }
            for (unsigned w = 0; w < words(); ++w) {
                const std::uint32_t word = b.load_readonly(at + std::size_t{w} * block_tokens);
                for (unsigned c = 0; c < per_word; ++c) {
                    const auto code = static_cast<float>(word & (mask << (c * Bits)));
                    for (unsigned v = 0; v < vecs; ++v) {
                        const vec f = factor.get((own * columns() + w * per_word + c) * vecs + v);
                        for (unsigned h = 0; h < vec_width; ++h) {
                            if (v * vec_width + h < Heads) {
                                sums[v * vec_width + h] += f.at[h] * code;
                            }
                        }
                    }
                }
            }
            for (unsigned h = 0; h < Heads; ++h) {
                const unsigned head = round * Heads + h;
                if (head < heads) {
                    b.store_global(logits + (std::size_t{kv} * heads + head) * stride + begin + t, sums[h]);
                    tops[h] = larger(sums[h], tops[h]);
                }
            }
        }
    }
};

}  // namespace verkv::inline v0::gpu
