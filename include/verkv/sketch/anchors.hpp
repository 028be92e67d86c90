// The anchor sketch: a few keys as they are, every other one as a multiple of the most similar of them and a few bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/anchor_estimate.hpp"
#include "verkv/sketch/detail/checks.hpp"
#include "verkv/sketch/detail/choose_anchors.hpp"
#include "verkv/sketch/detail/packed_codes.hpp"

namespace verkv::inline v0 {

/// Shape of an anchor sketch.
struct anchor_options {
    std::size_t key_dim = 0;    ///< channels of a key, 1 ... 1024
    std::size_t anchors = 256;  ///< at most so many, 1 ... 1024
    unsigned bits = 2;          ///< of a residual's code in each channel, 0 ... 4; 0: no residual
    std::size_t sample = 4096;  ///< keys among which fit() looks for anchors, at least 1
    std::uint64_t seed = 0;     ///< of the choice of anchors

    friend bool operator==(const anchor_options&, const anchor_options&) = default;
};

/// Checks the options of an anchor sketch.
/// Throws invalid_argument for a key_dim or a number of anchors outside 1 ... 1024, more than 4 bits, and a sample of
/// 0.
inline void validate(const anchor_options& o) {
    detail::check(o.key_dim >= 1 && o.key_dim <= anchor_codes::largest_key_dim, "an anchor sketch of keys of ",
                  o.key_dim, " channels; it takes 1 to ", anchor_codes::largest_key_dim);
    detail::check(o.anchors >= 1 && o.anchors <= anchor_codes::most_anchors, "an anchor sketch of ", o.anchors,
                  " anchors; it takes 1 to ", anchor_codes::most_anchors);
    detail::check(o.bits <= 4, "an anchor sketch of ", o.bits, " bits; it takes 0 to 4");
    detail::check(o.sample >= 1, "an anchor sketch looks for anchors among ", o.sample, " keys; it takes at least one");
}

/// The keys of one KV head by anchors (AnchorKV): k ~ g A_j + s x, A_j the anchor that leaves the shortest residual, g
/// its gain <k, A_j> / ||A_j||^2, x the residual's codes, +-1/2, +-3/2, ... (2^bits of them) in each channel, s a step.
///
/// Anchors are keys that fit() saw, chosen by k-means++ among a bounded sample and kept in float. An anchor itself has
/// gain 1 and no residual: its logit is exact. The codes are those of the vector that points most nearly where the
/// residual does (the search of rotated_sketch), s the multiple that leaves the least. The estimate scores the anchors
/// once a query; a token then costs one gathered logit and its codes.
/// - Bound, for certain: |logit - estimate| <= |scale| ||q|| ||k - k^||. The norm is stored, rounded up.
/// - The gain is a half, within +-65504; the residual is what the stored one leaves. Ties of anchors go to the one that
///   was chosen first.
/// - Every way to cut the same tokens into append() calls gives the same bits. erase() leaves all others as they are,
///   also where the token of an anchor goes.
/// - NaN or infinity in a key makes that token's estimate NaN and its bound infinite, of no other one; fit() leaves
///   such keys out.
/// anchor_tokens() says which keys they were: AnchorKV keeps those rows resident, which is an inclusion probability of
/// 1 here. One object may be read by many threads at once, or changed by one.
class anchor_sketch {
public:
    /// Throws as validate(options) does.
    explicit anchor_sketch(const anchor_options& options) : options_(options) {
        validate(options);
        codes_ = detail::packed_codes((options.key_dim * options.bits + 31) / 32);
    }

    /// Chooses anchors among the keys whose channels are all finite, and forgets all tokens.
    /// Up to `anchors` of them, fewer where none of the sampled keys leaves a residual. keys [n, key_dim]; at most
    /// `sample` of them are read, evenly spread. sample anchors key_dim multiply-adds on the caller's thread. Throws
    /// invalid_argument for keys of another width.
    template <class Backend, class T>
    void fit(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        std::vector<token_index> tokens =
            detail::choose_anchors(keys, options_.anchors, options_.sample, options_.seed);
        // Without any, 0 stands in for one.
        const std::size_t count = (std::max)(tokens.size(), std::size_t{1});
        const std::size_t padded_count = padded(count);
        std::vector<float> anchors(options_.key_dim * padded_count);
        std::vector<double> squares(count);
        double most = 0;
        for (std::size_t a = 0; a < tokens.size(); ++a) {
            for (std::size_t c = 0; c < options_.key_dim; ++c) {
                const float x = to_float(keys[tokens[a]][c]);
                anchors[c * padded_count + a] = x;
                squares[a] += static_cast<double>(x) * static_cast<double>(x);
            }
            most = (std::max)(most, squares[a]);
        }
        anchors_ = std::move(anchors);
        anchor_squares_ = std::move(squares);
        anchor_tokens_ = std::move(tokens);
        largest_norm_ = std::sqrt(most) * (1 + 0x1p-40);
        resize(0);
    }

    /// Adds tokens at the end, in any number of calls with the same result.
    /// keys [n, key_dim]. anchors key_dim multiply-adds a token to find its anchor, and the search of the code: in
    /// double, on the caller's thread. Allocates nothing within what reserve() asked for. Throws invalid_argument for
    /// keys of another width, invalid_state before fit().
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        detail::check<invalid_state>(!anchors_.empty(), "append() of ", keys.count,
                                     " tokens to an anchor sketch before fit() chose its anchors");
        make_room(tokens_ + keys.count, true);
        const std::size_t first = tokens_;
        resize(first + keys.count);
        for (std::size_t i = 0; i < keys.count; ++i) {
            encode(keys[i], first + i);
        }
    }

    /// Makes room for so many tokens in all, so that append() up to there allocates nothing.
    void reserve(std::size_t tokens) { make_room(tokens, false); }

    /// Forgets tokens first ... last-1; estimates and bounds of the others keep their bits, under their new indices.
    /// Moves what lies behind. Allocates nothing. Throws invalid_argument unless first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        detail::check_range(first, last, tokens_);
        if (first == last) {
            return;
        }
        for (std::size_t from = last, to = first; from < tokens_; ++from, ++to) {
            codes_.move(from, to);
            index_[to] = index_[from];
            gain_[to] = gain_[from];
            step_[to] = step_[from];
            error_[to] = error_[from];
        }
        resize(tokens_ - (last - first));
    }

    /// Writes the estimate of scale * <q, k> of each token: logits [queries.count, size()].
    /// queries [any count, key_dim]; scale of any sign. Scores the anchors (anchors key_dim multiply-adds a query),
    /// reads the codes once for four queries, bytes() bytes, and writes the logits. Allocates nothing; about 50 KiB of
    /// the stack. Anchors in double, codes in float. Same bits for any chunking and any number of threads. Throws
    /// invalid_argument for queries of another width or logits of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits) const {
        detail::check_output(queries, logits, options_.key_dim, tokens_, "logits");
        anchor_estimate(exec, codes(), queries, scale, logits, nullptr);
    }

    /// The same logits, and for each a bound on its distance from scale * <q, k>: both [queries.count, size()].
    /// b = |scale| ||q|| ||k - k^|| + rounding: with u = 2^-24 and h = (2^bits - 1) / 2, 3 h (key_dim + 8) u |scale|
    /// ||q||_1 step and 8 u of the anchor's share. The rest is in double, rounded up. Holds in
    /// round-to-nearest with gradual underflow, for finite keys and queries; where float cannot hold the estimate, the
    /// bound is infinite. Otherwise as estimate() without bounds. Throws invalid_argument also for bounds of another
    /// shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits,
                  matrix_view<float> bounds) const {
        detail::check_output(queries, logits, options_.key_dim, tokens_, "logits");
        detail::check_output(queries, bounds, options_.key_dim, tokens_, "bounds");
        anchor_estimate(exec, codes(), queries, scale, logits, &bounds);
    }

    /// 0: the bounds hold for certain.
    [[nodiscard]] static constexpr double bound_failure() noexcept { return 0; }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return tokens_; }

    /// Memory that stands in for the keys: a token's code, rounded up to 32-bit words, and 12 bytes (anchor, gain,
    /// step, error). Not counted: the padding to 16 tokens, and anchor_bytes().
    [[nodiscard]] std::size_t bytes() const noexcept { return tokens_ * token_bytes(); }

    /// Memory of the anchors, 4 key_dim bytes each; it does not grow with the context.
    [[nodiscard]] std::size_t anchor_bytes() const noexcept {
        return anchor_squares_.size() * options_.key_dim * sizeof(float);
    }

    /// bytes() a token: key_dim 128, 0 ... 4 bits: 12, 28, 44, 60, 76; 2.3 % to 15 % of a bf16 cache.
    [[nodiscard]] double bytes_per_token() const noexcept { return static_cast<double>(token_bytes()); }

    [[nodiscard]] const anchor_options& options() const noexcept { return options_; }

    /// Which keys of those that fit() saw are the anchors, in the order chosen; empty before fit(), or where all keys
    /// are 0.
    [[nodiscard]] std::span<const token_index> anchor_tokens() const noexcept { return anchor_tokens_; }

    /// The tokens as they lie in memory, for a backend's anchor_estimate(); valid until the sketch changes.
    [[nodiscard]] anchor_codes codes() const noexcept {
        anchor_codes s;
        s.anchors = anchors_.data();
        s.codes = codes_.data();
        s.index = index_.data();
        s.gain = gain_.data();
        s.step = step_.data();
        s.error = error_.data();
        s.tokens = tokens_;
        s.key_dim = options_.key_dim;
        s.anchor_count = anchor_squares_.size();
        s.padded_anchors = padded(anchor_squares_.size());
        s.words = codes_.words();
        s.largest_norm = largest_norm_;
        s.bits = options_.bits;
        return s;
    }

private:
    /// Anchors, like tokens, are read in whole blocks.
    [[nodiscard]] static std::size_t padded(std::size_t n) { return detail::packed_codes::padded(n); }

    [[nodiscard]] std::size_t token_bytes() const noexcept {
        return codes_.words() * sizeof(std::uint32_t) + sizeof(std::uint16_t) + sizeof(half) + 2 * sizeof(float);
    }

    void make_room(std::size_t tokens, bool geometric) {
        codes_.make_room(tokens, geometric);
        detail::make_room(index_, padded(tokens), geometric);
        detail::make_room(gain_, padded(tokens), geometric);
        detail::make_room(step_, padded(tokens), geometric);
        detail::make_room(error_, padded(tokens), geometric);
    }

    void resize(std::size_t tokens) {
        codes_.resize(tokens);
        index_.resize(padded(tokens));
        gain_.resize(padded(tokens));
        step_.resize(padded(tokens));
        error_.resize(padded(tokens));
        tokens_ = tokens;
    }

    /// Finds the anchor of one token, and writes gain, code, step and error.
    template <class T>
    void encode(const T* key, std::size_t token) {
        codes_.clear(token);
        index_[token] = 0;
        step_[token] = 0;
        if (!detail::finite_row(key, options_.key_dim)) {
            gain_[token] = half{0x7e00u};
            error_[token] = std::numeric_limits<float>::infinity();
            return;
        }
        const std::size_t count = anchor_squares_.size();
        const std::size_t stride = padded(count);
        double rest[anchor_codes::largest_key_dim];
        alignas(64) double product[anchor_codes::most_anchors];
        double key_square = 0;
        for (std::size_t c = 0; c < options_.key_dim; ++c) {
            rest[c] = static_cast<double>(to_float(key[c]));
            key_square += rest[c] * rest[c];
        }
        detail::rotate(anchors_.data(), options_.key_dim, stride, rest, product);
        std::size_t best = 0;
        double most = -1;
        for (std::size_t a = 0; a < count; ++a) {
            const double score = anchor_squares_[a] > 0 ? product[a] * product[a] / anchor_squares_[a] : 0.0;
            if (score > most) {
                most = score;
                best = a;
            }
        }
        const double gain = anchor_squares_[best] > 0 ? product[best] / anchor_squares_[best] : 0.0;
        index_[token] = static_cast<std::uint16_t>(best);
        gain_[token] = from_float<half>(static_cast<float>((std::max)((std::min)(gain, 65504.0), -65504.0)));
        const auto stored = static_cast<double>(to_float(gain_[token]));
        for (std::size_t c = 0; c < options_.key_dim; ++c) {
            rest[c] -= stored * static_cast<double>(anchors_[c * stride + best]);
        }
        const double step = options_.bits > 0 ? encode_residual(rest, token) : 0.0;
        double square = 0;
        for (std::size_t c = 0; c < options_.key_dim; ++c) {
            square += rest[c] * rest[c];
        }
        // What doubles lose on the way: 2^-53 a few times of everything that was taken off.
        const double size = std::sqrt(key_square) + std::abs(stored) * largest_norm_ +
                            8 * step * std::sqrt(static_cast<double>(options_.key_dim));
        error_[token] = detail::float_above(std::sqrt(square) * (1 + 0x1p-40) + size * 0x1p-49);
    }

    /// Writes the code of a residual and takes off what it stands for; returns the step.
    double encode_residual(double* rest, std::size_t token) {
        const std::size_t d = options_.key_dim;
        alignas(64) float direction[anchor_codes::largest_key_dim] = {};
        double most = 0;
        for (std::size_t c = 0; c < d; ++c) {
            most = (std::max)(most, std::abs(rest[c]));
        }
        if (!(most > 0)) {
            return 0;
        }
        for (std::size_t c = 0; c < d; ++c) {
            direction[c] = static_cast<float>(rest[c] / most);
        }
        const float scale = detail::best_code_scale(direction, d, padded(d), options_.bits);
        double dot = 0;
        double square = 0;
        double value[anchor_codes::largest_key_dim];
        for (std::size_t c = 0; c < d; ++c) {
            const detail::signed_code own = detail::code_at_scale(direction[c], scale, options_.bits);
            value[c] = own.value;
            dot += rest[c] * value[c];
            square += value[c] * value[c];
            codes_.put(token, c * options_.bits, options_.bits, own.code);
        }
        step_[token] = static_cast<float>((std::min)(dot / square, 1e37));
        const auto step = static_cast<double>(step_[token]);
        for (std::size_t c = 0; c < d; ++c) {
            rest[c] -= step * value[c];
        }
        return step;
    }

    anchor_options options_;
    std::vector<float> anchors_;          ///< [channel][padded anchor]
    std::vector<double> anchor_squares_;  ///< ||anchor||^2
    std::vector<token_index> anchor_tokens_;
    double largest_norm_ = 0;
    detail::packed_codes codes_;
    std::vector<std::uint16_t> index_;
    std::vector<half> gain_;
    std::vector<float> step_;
    std::vector<float> error_;
    std::size_t tokens_ = 0;
};

}  // namespace verkv::inline v0
