// The RoPE-pair sketch of a token that was just generated: its open group is quantised again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/quantise.hpp"

namespace verkv::inline v0::gpu {

/// The sketch of one KV head as it grows, in device memory: the arrays of rope_pair_codes, with room for the groups to
/// come, and what rope_pair_sketch keeps of its open group.
struct growing_rope_pairs {
    std::uint32_t* codes = nullptr;           ///< [group][block of 16 tokens][word][16]
    half* parameters = nullptr;               ///< [group][zero or step][padded_channels]
    std::uint32_t* first_token = nullptr;     ///< [groups + 1]: the last one is the number of tokens
    const std::uint32_t* channels = nullptr;  ///< [channel_count]
    float* raw = nullptr;                     ///< kept channels of the open group's tokens, [block][channel][16]
    std::uint32_t* groups = nullptr;          ///< how many there are
    std::uint32_t* open = nullptr;            ///< tokens of the open group; 0: the next token opens one
};

/// Appends a key to the sketch of each task, a block a KV head: rope_pair_sketch::append() of one token, with the same
/// bits. keys [tasks, key_dim], task t's at keys + t key_task_stride.
/// Preconditions (unchecked): the arrays have room; parameters' padding is 0; nobody reads the sketch meanwhile.
/// Bytes: with m tokens in the open group and C channels, 4 m C read twice from the cache, m words of codes and 4 C
/// written. Every float as the CPU rounds it: products and sums are not fused.
template <storage T>
struct append_codes_kernel {
    static constexpr unsigned most_threads = 1024;

    const T* keys;
    std::size_t key_task_stride;
    const growing_rope_pairs* sketches;  // [tasks]
    unsigned tasks;
    unsigned channel_count;
    unsigned padded_channels;
    unsigned words;       // of a token
    unsigned slot_words;  // from one group to the next
    unsigned group_length;
    unsigned bits;
    unsigned threads;

    [[nodiscard]] launch_shape shape() const {
        return {.blocks_x = tasks,
                .threads = threads,
                .shared_bytes = shared_layout().array<float>(channel_count).array<float>(channel_count).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto zeros = b.template allocate_shared<float>(channel_count);
        auto inverses = b.template allocate_shared<float>(channel_count);
        const growing_rope_pairs s = b.load_global(sketches + b.block_index());
        const T* key = keys + b.block_index() * key_task_stride;
        const std::uint32_t held = b.load_global(s.open);
        const std::uint32_t groups = b.load_global(s.groups) + (held == 0 ? 1 : 0);
        const std::uint32_t group = groups - 1;
        const std::uint32_t first = b.load_global(s.first_token + group);
        for (unsigned c = b.thread(); c < channel_count; c += b.threads()) {
            const float x = to_float(b.load_global(key + b.load_readonly(s.channels + c)));
            b.store_global(s.raw + place(held, c), x);
        }
        b.sync();
        const std::uint32_t tokens = held + 1;
        find_parameters(b, s, zeros, inverses, tokens, group);
        b.sync();
        write_codes(b, s, zeros, inverses, tokens, group);
        if (b.thread() == 0) {
            b.store_global(s.first_token + groups, first + tokens);
            b.store_global(s.groups, groups);
            b.store_global(s.open, tokens == group_length ? 0u : tokens);
        }
    }

private:
    static constexpr unsigned block_tokens = 16;

    [[nodiscard]] VERKV_HOST_DEVICE std::size_t place(std::uint32_t token, unsigned channel) const {
        return (token / block_tokens * channel_count + channel) * std::size_t{block_tokens} + token % block_tokens;
    }

    /// Zero and step of each channel: a warp a channel, lanes over the tokens.
    template <class Block, class Floats>
    VERKV_HOST_DEVICE void find_parameters(Block& b, const growing_rope_pairs& s, Floats zeros, Floats inverses,
                                           std::uint32_t tokens, std::uint32_t group) const {
        half* const to = s.parameters + std::size_t{group} * 2 * padded_channels;
        for (unsigned c = b.warp(); c < channel_count; c += b.warps()) {
            const float start = b.load_global(s.raw + place(0, c));
            float low = start;
            float high = start;
            bool finite = true;
            for (std::uint32_t t = b.lane(); t < tokens; t += warp_size) {
                const float x = b.load_global(s.raw + place(t, c));
                low = smaller(x, low);
                high = larger(x, high);
                finite = finite && x - x == 0;
            }
            low = warp_reduce(b, low, minimum());
            high = warp_reduce(b, high, maximum());
            finite = b.all(finite);
            if (b.lane() == 0) {
                const detail::quantiser q = detail::quantiser::of_range(low, high, finite, bits);
                b.store_global(to + c, q.zero);
                b.store_global(to + padded_channels + c, q.step);
                zeros.set(c, to_float(q.zero));
                inverses.set(c, q.inverse());
            }
        }
    }

    /// All codes of the group: a thread a word. Places behind the last token repeat the first, as on the CPU.
    template <class Block, class Floats>
    VERKV_HOST_DEVICE void write_codes(Block& b, const growing_rope_pairs& s, Floats zeros, Floats inverses,
                                       std::uint32_t tokens, std::uint32_t group) const {
        std::uint32_t* const to = s.codes + std::size_t{group} * slot_words;
        const unsigned padded = (tokens + block_tokens - 1) / block_tokens * block_tokens;
        for (unsigned e = b.thread(); e < padded * words; e += b.threads()) {
            const unsigned word = e / block_tokens % words;
            const unsigned token = e / block_tokens / words * block_tokens + e % block_tokens;
            const unsigned end = smaller((word * 32 + 31) / bits + 1, channel_count);
            std::uint32_t packed = 0;
            for (unsigned c = word * 32 / bits; c < end; ++c) {
                const float x = b.load_global(s.raw + place(token < tokens ? token : 0, c));
                const std::uint32_t code = detail::code_of(x, zeros.get(c), inverses.get(c), bits);
                const unsigned bit = c * bits;
                packed |= bit >= word * 32 ? code << (bit - word * 32) : code >> (word * 32 - bit);
            }
            b.store_global(to + e, packed);
        }
    }
};

}  // namespace verkv::inline v0::gpu
