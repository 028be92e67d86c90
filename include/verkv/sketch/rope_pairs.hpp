// The paper's sketch: a few bits of the RoPE channel pairs that carry the most key energy.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/rope.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/rope_pair_estimate.hpp"
#include "verkv/cpu/rope_pair_quantise.hpp"
#include "verkv/sketch/detail/checks.hpp"

namespace verkv::inline v0 {

/// Shape of a RoPE-pair sketch. The paper keeps a quarter of the pairs at 2 bits [VerKV App. A.1]; half of them cost
/// twice the bytes, and a step reads fewer in all (docs/results.md).
struct rope_pair_options {
    std::size_t key_dim = 0;  ///< channels of a key; even
    rope_pairing pairing = rope_pairing::half;
    unsigned bits = 2;               ///< of a channel's code, 1 ... 8
    double pair_fraction = 0.5;      ///< of the key_dim / 2 pairs; (0, 1], at least one pair is kept
    std::size_t group_length = 128;  ///< tokens that share a zero and a step; at least 1

    /// Pairs kept: max(1, round(pair_fraction * key_dim / 2)), halves away from zero.
    [[nodiscard]] std::size_t pairs() const {
        return (std::max)(std::size_t{1},
                          static_cast<std::size_t>(std::lround(pair_fraction * static_cast<double>(key_dim) / 2)));
    }

    friend bool operator==(const rope_pair_options&, const rope_pair_options&) = default;
};

/// Checks the options of a RoPE-pair sketch.
/// Throws invalid_argument for a key_dim that is 0, odd or above 2^31, bits outside 1 ... 8, a pair_fraction outside
/// (0, 1] or NaN, and a group_length of 0 or above 2^31.
inline void validate(const rope_pair_options& o) {
    detail::check(o.key_dim > 0 && o.key_dim % 2 == 0 && o.key_dim <= std::size_t{1} << 31,
                  "a RoPE-pair sketch of keys of ", o.key_dim, " channels; it takes an even number from 2 to 2^31");
    detail::check(o.pairing == rope_pairing::interleaved || o.pairing == rope_pairing::half, "rope_pairing is ",
                  static_cast<int>(o.pairing), "; it must be interleaved or half");
    detail::check(o.bits >= 1 && o.bits <= 8, "a RoPE-pair sketch of ", o.bits, " bits; it takes 1 to 8");
    detail::check(o.pair_fraction > 0 && o.pair_fraction <= 1, "pair_fraction is ", o.pair_fraction,
                  "; it must lie in (0, 1]");
    detail::check(o.group_length >= 1 && o.group_length <= std::size_t{1} << 31, "group_length is ", o.group_length,
                  "; it must be between 1 and 2^31");
}

/// The keys of one KV head in a few bits: the RoPE pairs of largest mean key energy, each channel uniformly quantised
/// between the minimum and the maximum of a group of tokens. A pair's share of <q, k> depends on the distance of q and
/// k alone, so no query is needed to choose.
///
/// x^ = zero + code step, code = round((x - zero) / step) within 0 ... 2^bits - 1; zero = min and step = (max - min) /
/// (2^bits - 1) of channel and group, as half, within +-65504; codes refer to the stored ones [VerKV App. A.1].
/// - Error: |x - x^| <= max(step (1/2 + 2^-13), e_zero + (2^bits - 1) e_step), e_zero and e_step what half's rounding
///   (or clamping) took from zero and step: at most max(2^-11 |value|, 2^-25) unless clamped. A channel that is
///   constant over a group, or whose step is below 2^-25, has step 0 and code 0.
/// - The last group is quantised over the tokens it has, and again as it fills; until it is full, the kept channels of
///   its tokens stay beside it as floats. So every way to cut the same tokens into append() calls gives the same bits.
/// - erase() leaves a group shorter than group_length; its codes stay.
/// - NaN or infinity in a kept channel makes every estimate of its group NaN, of no other one; in a channel that is not
///   kept it leaves no trace.
/// One object may be read by many threads at once, or changed by one.
class rope_pair_sketch {
public:
    /// Throws as validate(options) does.
    explicit rope_pair_sketch(const rope_pair_options& options) : options_(options) {
        validate(options);
        pairs_ = options.pairs();
        padded_ = (channel_count() + block - 1) / block * block;
        words_ = (channel_count() * options.bits + 31) / 32;
        slot_words_ = blocks(options.group_length) * block * words_;
    }

    /// Chooses the pairs and forgets all tokens.
    /// Pairs of largest mean energy E[x_a^2 + x_b^2] over the keys, ties to the lower pair; a pair whose energy is not
    /// finite comes last, so that one bad row stops nothing. keys [n, key_dim], rotated or not: RoPE keeps a pair's
    /// energy. Reads n key_dim elements, on the caller's thread. Sums in double, token after token. Throws
    /// invalid_argument for keys of another width.
    template <class Backend, class T>
    void fit(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        const std::size_t half_dim = options_.key_dim / 2;
        std::vector<double> square(options_.key_dim);
        for (std::size_t i = 0; i < keys.count; ++i) {
            detail::add_squares(keys[i], options_.key_dim, square.data());
        }
        std::vector<double> energy(half_dim);
        for (std::size_t p = 0; p < half_dim; ++p) {
            const double sum = square[first_of(p)] + square[second_of(p)];
            energy[p] = std::isfinite(sum) ? sum : -1.0;
        }
        std::vector<std::uint32_t> order(half_dim);
        std::iota(order.begin(), order.end(), std::uint32_t{0});
        std::partial_sort(
            order.begin(), order.begin() + static_cast<std::ptrdiff_t>(pairs_), order.end(),
            [&](std::uint32_t a, std::uint32_t b) { return energy[a] != energy[b] ? energy[a] > energy[b] : a < b; });
        std::vector<std::uint32_t> channels;
        channels.reserve(channel_count());
        for (std::size_t p = 0; p < pairs_; ++p) {
            channels.push_back(static_cast<std::uint32_t>(first_of(order[p])));
            channels.push_back(static_cast<std::uint32_t>(second_of(order[p])));
        }
        std::sort(channels.begin(), channels.end());

        channels_ = std::move(channels);
        codes_.clear();
        parameters_.clear();
        first_token_.clear();
        raw_.clear();
        tokens_ = 0;
        open_ = false;
    }

    /// Adds tokens at the end, in any number of calls with the same result.
    /// keys [n, key_dim]. Reads the kept channels; quantises each full group once and the open one once a call, on the
    /// caller's thread: at most group_length - 1 tokens more than it adds. Allocates nothing within what reserve()
    /// asked for. Throws invalid_argument for keys of another width, invalid_state before fit().
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        detail::check<invalid_state>(!channels_.empty(), "append() of ", keys.count,
                                     " tokens to a RoPE-pair sketch before fit() chose its channels");
        if (keys.count == 0) {
            return;
        }
        make_room(keys.count, true);
        for (std::size_t i = 0; i < keys.count;) {
            if (!open_) {
                codes_.resize(groups() * slot_words_);
                parameters_.resize(parameters_.size() + 2 * padded_, half{0u});
                first_token_.push_back(tokens_);
                open_ = true;
            }
            const std::size_t group = groups() - 1;
            const std::size_t held = tokens_ - first_token_[group];
            const std::size_t added = (std::min)(keys.count - i, options_.group_length - held);
            raw_.resize(blocks(held + added) * block * channel_count());
            for (std::size_t t = 0; t < added; ++t) {
                const T* const row = keys[i + t];
                float* const to = raw_at(held + t);
                for (std::size_t c = 0; c < channel_count(); ++c) {
                    to[c * block] = to_float(row[channels_[c]]);
                }
            }
            codes_.resize(group * slot_words_ + blocks(held + added) * block * words_);
            half* const zeros = parameters_.data() + group * 2 * padded_;
            detail::quantise_group(raw_.data(), held + added, channel_count(), options_.bits, zeros, zeros + padded_,
                                   codes_.data() + group * slot_words_, words_);
            tokens_ += added;
            i += added;
            open_ = held + added < options_.group_length;
        }
    }

    /// Makes room for so many tokens in all, so that append() up to there allocates nothing (as long as no group was
    /// shortened by erase()).
    void reserve(std::size_t tokens) {
        if (tokens > tokens_) {
            make_room(tokens - tokens_, false);
        }
    }

    /// Forgets tokens first ... last-1; the estimates of the others keep their bits, under their new indices.
    /// Appending goes on in the last group if that is still open, and is quantised with those that are left of it; else
    /// it starts a new group. truncate(n) is erase(n, size()). Moves what lies behind. Allocates nothing.
    /// Throws invalid_argument unless first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        detail::check_range(first, last, tokens_);
        if (first == last) {
            return;
        }
        const std::size_t old_groups = groups();
        const std::size_t code_words = codes_.size();
        std::size_t kept_groups = 0;
        std::size_t kept_tokens = 0;
        std::size_t kept_words = 0;
        for (std::size_t g = 0; g < old_groups; ++g) {
            const std::size_t begin = first_token_[g];
            const std::size_t end = g + 1 < old_groups ? first_token_[g + 1] : tokens_;
            const std::size_t from = (std::min)((std::max)(first, begin), end) - begin;
            const std::size_t to = (std::min)((std::max)(last, begin), end) - begin;
            const bool open = open_ && g + 1 == old_groups;
            const std::size_t left = end - begin - (to - from);
            if (left == 0) {
                open_ = open_ && !open;
                continue;
            }
            std::uint32_t* const slot = codes_.data() + g * slot_words_;
            for (std::size_t t = to; from < to && t < end - begin; ++t) {
                move_token(slot, t, t - (to - from), open);
            }
            if (g != kept_groups) {
                std::copy_n(slot, (std::min)(slot_words_, code_words - g * slot_words_),
                            codes_.data() + kept_groups * slot_words_);
                std::copy_n(parameters_.begin() + static_cast<std::ptrdiff_t>(g * 2 * padded_), 2 * padded_,
                            parameters_.begin() + static_cast<std::ptrdiff_t>(kept_groups * 2 * padded_));
            }
            first_token_[kept_groups] = kept_tokens;
            kept_words = kept_groups * slot_words_ + (std::min)(slot_words_, code_words - g * slot_words_);
            kept_tokens += left;
            ++kept_groups;
        }
        codes_.resize(kept_words);
        parameters_.resize(kept_groups * 2 * padded_);
        first_token_.resize(kept_groups);
        tokens_ = kept_tokens;
    }

    /// Writes scale * <q, k^> of each token, k^ = 0 in the channels not kept: logits [queries.count, size()].
    /// queries [any count, key_dim]. Reads the codes once for all queries, bytes() bytes, and writes the logits.
    /// Allocates nothing. Float accumulation: on top of the quantisation, an error of at most (channels + 3) 2^-23
    /// scale sum_c |q_c| (|zero_c| + code_c step_c). Same bits for any chunking and any number of threads. Throws
    /// invalid_argument for queries of another width or logits of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits) const {
        detail::check_output(queries, logits, options_.key_dim, tokens_, "logits");
        rope_pair_estimate(exec, codes(), queries, scale, logits);
    }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return tokens_; }

    /// Memory that stands in for the keys: a token's codes, rounded up to 32-bit words, and 4 bytes (zero, step) a
    /// channel of each group. Not counted: the padding of groups whose length is no multiple of 16 or that erase()
    /// shortened, and open_bytes().
    [[nodiscard]] std::size_t bytes() const noexcept {
        return tokens_ * words_ * sizeof(std::uint32_t) + groups() * channel_count() * 2 * sizeof(half);
    }

    /// Memory of the open group's raw values, at most group_length channels floats; it does not grow with the context.
    [[nodiscard]] std::size_t open_bytes() const noexcept { return raw_.capacity() * sizeof(float); }

    /// bytes() a token where all groups are full: key_dim 128, 2 bits, half of the pairs: 18, 3.5 % of a bf16
    /// cache.
    [[nodiscard]] double bytes_per_token() const noexcept {
        return static_cast<double>(words_ * sizeof(std::uint32_t)) +
               static_cast<double>(channel_count() * 2 * sizeof(half)) / static_cast<double>(options_.group_length);
    }

    [[nodiscard]] const rope_pair_options& options() const noexcept { return options_; }

    /// The channels kept, ascending; empty before fit().
    [[nodiscard]] std::span<const std::uint32_t> channels() const noexcept { return channels_; }

    /// The codes as they lie in memory, for a backend's rope_pair_estimate(); valid until the sketch changes.
    [[nodiscard]] rope_pair_codes codes() const noexcept {
        rope_pair_codes s;
        s.codes = codes_.data();
        s.parameters = parameters_.data();
        s.first_token = first_token_.data();
        s.channels = channels_.data();
        s.groups = groups();
        s.tokens = tokens_;
        s.channel_count = channel_count();
        s.padded_channels = padded_;
        s.words = words_;
        s.slot_words = slot_words_;
        s.group_length = options_.group_length;
        s.bits = options_.bits;
        return s;
    }

private:
    static constexpr std::size_t block = rope_pair_codes::block_tokens;

    [[nodiscard]] std::size_t first_of(std::size_t pair) const {
        return options_.pairing == rope_pairing::interleaved ? 2 * pair : pair;
    }
    [[nodiscard]] std::size_t second_of(std::size_t pair) const {
        return options_.pairing == rope_pairing::interleaved ? 2 * pair + 1 : pair + options_.key_dim / 2;
    }
    [[nodiscard]] std::size_t channel_count() const noexcept { return 2 * pairs_; }
    [[nodiscard]] std::size_t groups() const noexcept { return first_token_.size(); }
    [[nodiscard]] static std::size_t blocks(std::size_t tokens) noexcept { return (tokens + block - 1) / block; }
    [[nodiscard]] float* raw_at(std::size_t token) {
        return raw_.data() + token / block * block * channel_count() + token % block;
    }

    /// Room for `more` tokens, so that adding them cannot fail half way.
    void make_room(std::size_t more, bool geometric) {
        const std::size_t length = options_.group_length;
        const std::size_t held = open_ ? tokens_ - first_token_.back() : 0;
        const std::size_t rest = more - (std::min)(more, open_ ? length - held : 0);
        const std::size_t new_groups = groups() + (rest + length - 1) / length;
        detail::make_room(first_token_, new_groups, geometric);
        detail::make_room(parameters_, new_groups * 2 * padded_, geometric);
        const std::size_t last = new_groups > groups() ? rest - (rest - 1) / length * length : held + more;
        detail::make_room(codes_, (new_groups - 1) * slot_words_ + blocks(last) * block * words_, geometric);
        detail::make_room(raw_, blocks((std::min)(length, held + more)) * block * channel_count(), geometric);
    }

    void move_token(std::uint32_t* slot, std::size_t from, std::size_t to, bool open) {
        for (std::size_t p = 0; p < words_; ++p) {
            slot[(to / block * words_ + p) * block + to % block] =
                slot[(from / block * words_ + p) * block + from % block];
        }
        if (open) {
            for (std::size_t c = 0; c < channel_count(); ++c) {
                raw_at(to)[c * block] = raw_at(from)[c * block];
            }
        }
    }

    rope_pair_options options_;
    std::size_t pairs_ = 0;
    std::size_t padded_ = 0;
    std::size_t words_ = 0;
    std::size_t slot_words_ = 0;
    std::vector<std::uint32_t> channels_;
    std::vector<std::uint32_t> codes_;
    std::vector<half> parameters_;
    std::vector<std::size_t> first_token_;
    std::vector<float> raw_;  ///< kept channels of the last group while it is open, [block][channel][16]
    std::size_t tokens_ = 0;
    bool open_ = false;
};

}  // namespace verkv::inline v0
