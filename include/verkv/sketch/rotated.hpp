// The rotated sketch: keys about their mean, turned by a random rotation, a few bits a coordinate.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/rotated_estimate.hpp"
#include "verkv/sketch/detail/checks.hpp"
#include "verkv/sketch/detail/haar_rotation.hpp"
#include "verkv/sketch/detail/packed_codes.hpp"
#include "verkv/sketch/detail/sphere_quantile.hpp"

namespace verkv::inline v0 {

/// Shape of a rotated sketch.
struct rotated_options {
    std::size_t key_dim = 0;  ///< channels of a key, 2 ... 1024
    unsigned bits = 2;        ///< of a coordinate's code, 1 ... 4
    double failure = 1e-3;    ///< probability that any bound of one query is broken, [0, 1); 0: bounds that always hold
    std::uint64_t seed = 0;   ///< of the rotation; drawn without a look at keys or queries

    friend bool operator==(const rotated_options&, const rotated_options&) = default;
};

/// Checks the options of a rotated sketch.
/// Throws invalid_argument for a key_dim outside 2 ... 1024, bits outside 1 ... 4 and a failure outside [0, 1) or NaN.
inline void validate(const rotated_options& o) {
    detail::check(o.key_dim >= 2 && o.key_dim <= rotated_codes::largest_key_dim, "a rotated sketch of keys of ",
                  o.key_dim, " channels; it takes 2 to ", rotated_codes::largest_key_dim);
    detail::check(o.bits >= 1 && o.bits <= 4, "a rotated sketch of ", o.bits, " bits; it takes 1 to 4");
    detail::check(o.failure >= 0 && o.failure < 1, "failure is ", o.failure, "; it must lie in [0, 1)");
}

/// The keys of one KV head in a few bits a coordinate, with an unbiased estimate whose error has a known law: RaBitQ
/// (Gao and Long 2024, arXiv 2405.12497) and its form of several bits (arXiv 2409.09913).
///
/// Key k, centre c (mean of the finite keys that fit() saw), o = (k - c) / ||k - c||, P a uniformly random rotation.
/// The code x is the one of the vectors with coordinates +-1/2, +-3/2, ... (2^bits of them) that a search along P o
/// found nearest in angle; rho = <x, P o> / ||x|| >= 1 / sqrt(key_dim), with 1 to 4 bits about 0.80, 0.94, 0.98, 0.995.
/// Then <k, q> ~ <c, q> + ||k - c|| <x, P q> / (||x|| rho).
/// - Error: ||k - c|| ||q|| sqrt(1 - rho^2) / rho sqrt(1 - C^2) Z, C = <o, q> / ||q||. Given the code, P q is as likely
///   on one side of P o as on any other, so Z is one coordinate of a uniform point on the sphere of key_dim - 1
///   dimensions, (Z + 1) / 2 ~ Beta((key_dim - 2) / 2, (key_dim - 2) / 2). Mean 0 over the seeds: unbiased.
/// - Bound: with sqrt(1 - C^2) <= 1 and z the quantile, P(|Z| > z) = failure / m; m is size() rounded up to a power of
///   two, so that the union of all tokens of one query breaks with probability failure at most, and z is computed anew
///   only as the context doubles. estimate() with bounds adds what rounding can do.
/// - The probability is over the seed, for keys and queries that do not depend on it. It is one query's: of Q queries
///   that meet the same seed, any is broken with probability Q failure at most.
/// - Every way to cut the same tokens into append() calls gives the same bits. erase() leaves all others as they are.
/// - NaN or infinity in a key makes that token's estimate NaN and its bound infinite, of no other one; fit() leaves
///   such keys out of the mean.
/// Copies share the rotation: a prototype is made once and copied for each KV head.
/// One object may be read by many threads at once, or changed by one.
class rotated_sketch {
public:
    /// Draws the rotation: time as key_dim^3, a few milliseconds at 128. Throws as validate(options) does.
    explicit rotated_sketch(const rotated_options& options) : options_(options) {
        validate(options);
        padded_ = (options.key_dim + block - 1) / block * block;
        codes_ = detail::packed_codes((options.key_dim * options.bits + 31) / 32);
        rotation_ =
            std::make_shared<const std::vector<float>>(detail::haar_rotation(options.seed, options.key_dim, padded_));
    }

    /// Takes the centre and forgets all tokens.
    /// The mean of the keys whose channels are all finite; 0 without any. keys [n, key_dim]. Sums in double, token
    /// after token, rounded to float. Reads n key_dim elements twice, on the caller's thread. Throws invalid_argument
    /// for keys of another width.
    template <class Backend, class T>
    void fit(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        std::vector<double> total(options_.key_dim);
        std::size_t finite = 0;
        for (std::size_t i = 0; i < keys.count; ++i) {
            const T* const row = keys[i];
            if (detail::finite_row(row, options_.key_dim)) {
                for (std::size_t c = 0; c < options_.key_dim; ++c) {
                    total[c] += static_cast<double>(to_float(row[c]));
                }
                ++finite;
            }
        }
        std::vector<float> centre(options_.key_dim);
        for (std::size_t c = 0; c < options_.key_dim && finite > 0; ++c) {
            centre[c] = static_cast<float>(total[c] / static_cast<double>(finite));
        }
        centre_ = std::move(centre);
        resize(0);
    }

    /// Adds tokens at the end, in any number of calls with the same result.
    /// keys [n, key_dim]. key_dim^2 multiply-adds a token for the rotation, and the search of the code: in double, on
    /// the caller's thread. Allocates nothing within what reserve() asked for. Throws invalid_argument for keys of
    /// another width, invalid_state before fit().
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        detail::check<invalid_state>(!centre_.empty(), "append() of ", keys.count,
                                     " tokens to a rotated sketch before fit() took its centre");
        make_room(tokens_ + keys.count, true);
        const std::size_t first = tokens_;
        resize(first + keys.count);
        for (std::size_t i = 0; i < keys.count; ++i) {
            encode(keys[i], first + i);
        }
    }

    /// Makes room for so many tokens in all, so that append() up to there allocates nothing.
    void reserve(std::size_t tokens) { make_room(tokens, false); }

    /// Forgets tokens first ... last-1; the estimates of the others keep their bits, under their new indices, and so do
    /// their bounds unless size() falls below half of what it was rounded up to. Moves what lies behind. Allocates
    /// nothing. Throws invalid_argument unless first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        detail::check_range(first, last, tokens_);
        if (first == last) {
            return;
        }
        for (std::size_t from = last, to = first; from < tokens_; ++from, ++to) {
            codes_.move(from, to);
            gain_[to] = gain_[from];
            spread_[to] = spread_[from];
        }
        resize(tokens_ - (last - first));
    }

    /// Writes the estimate of scale * <q, k> of each token: logits [queries.count, size()].
    /// queries [any count, key_dim]; scale of any sign. Rotates each query (key_dim^2 multiply-adds) and reads the
    /// codes once for eight of them, bytes() bytes, and writes the logits. Allocates nothing; about 50 KiB of the
    /// stack. Same bits for any chunking and any number of threads. Throws invalid_argument for queries of another
    /// width or logits of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits) const {
        detail::check_output(queries, logits, options_.key_dim, tokens_, "logits");
        rotated_estimate(exec, codes(), queries, scale, logits, nullptr);
    }

    /// The same logits, and for each a bound on its distance from scale * <q, k>: both [queries.count, size()].
    /// b = |scale| ||k - c|| ||q|| sqrt(1 - rho^2) / rho z + rounding. rounding covers, with u = 2^-24, d = key_dim, a
    /// = (2^bits - 1) / 2 and Q = P q: the float sum over coordinates, 3 (d + 4) u a ||Q||_1; the rotation in floats, 2
    /// d u a ||q||, and what it does to rho, d u a ||Q||_1; each times |scale| ||k - c|| / (rho ||x||); and 3 u of
    /// |scale <c, q>|. The rest is in double, rounded up. Holds in round-to-nearest with gradual underflow, for finite
    /// keys and queries; where float cannot hold the estimate, the bound is infinite. Otherwise as estimate() without
    /// bounds. Throws invalid_argument also for bounds of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits,
                  matrix_view<float> bounds) const {
        detail::check_output(queries, logits, options_.key_dim, tokens_, "logits");
        detail::check_output(queries, bounds, options_.key_dim, tokens_, "bounds");
        rotated_estimate(exec, codes(), queries, scale, logits, &bounds);
    }

    /// Probability that any bound of one query is broken, over the seed: the option's.
    [[nodiscard]] double bound_failure() const noexcept { return options_.failure; }

    /// z: P(|Z| > z) = failure / m, m = size() rounded up to a power of two; 1 where size() is 0.
    [[nodiscard]] double quantile() const noexcept { return quantile_; }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return tokens_; }

    /// Memory that stands in for the keys: a token's code, rounded up to 32-bit words, and two floats. Not counted: the
    /// padding to 16 tokens; the centre and the rotation (4 key_dim^2 bytes, shared by all copies), which do not grow
    /// with the context.
    [[nodiscard]] std::size_t bytes() const noexcept {
        return tokens_ * (codes_.words() * sizeof(std::uint32_t) + 2 * sizeof(float));
    }

    /// bytes() a token: key_dim 128, 1 ... 4 bits: 24, 40, 56, 72; 4.7 % to 14 % of a bf16 cache.
    [[nodiscard]] double bytes_per_token() const noexcept {
        return static_cast<double>(codes_.words() * sizeof(std::uint32_t) + 2 * sizeof(float));
    }

    [[nodiscard]] const rotated_options& options() const noexcept { return options_; }

    /// c, [key_dim]; empty before fit().
    [[nodiscard]] std::span<const float> centre() const noexcept { return centre_; }

    /// The transpose of P, [key_dim] rows of rotated coordinates, padded_channels() wide.
    [[nodiscard]] std::span<const float> rotation() const noexcept { return *rotation_; }
    [[nodiscard]] std::size_t padded_channels() const noexcept { return padded_; }

    /// The codes as they lie in memory, for a backend's rotated_estimate(); valid until the sketch changes.
    [[nodiscard]] rotated_codes codes() const noexcept {
        rotated_codes s;
        s.rotation = rotation_->data();
        s.centre = centre_.data();
        s.codes = codes_.data();
        s.gain = gain_.data();
        s.spread = spread_.data();
        s.tokens = tokens_;
        s.key_dim = options_.key_dim;
        s.padded_channels = padded_;
        s.words = codes_.words();
        s.bits = options_.bits;
        s.quantile = quantile_;
        return s;
    }

private:
    static constexpr std::size_t block = rotated_codes::block_tokens;

    void make_room(std::size_t tokens, bool geometric) {
        codes_.make_room(tokens, geometric);
        detail::make_room(gain_, detail::packed_codes::padded(tokens), geometric);
        detail::make_room(spread_, detail::packed_codes::padded(tokens), geometric);
    }

    void resize(std::size_t tokens) {
        codes_.resize(tokens);
        gain_.resize(detail::packed_codes::padded(tokens));
        spread_.resize(detail::packed_codes::padded(tokens));
        tokens_ = tokens;
        const std::size_t counted = tokens > 0 ? std::bit_ceil(tokens) : 0;
        if (counted != counted_) {
            counted_ = counted;
            quantile_ = counted > 0 ? detail::sphere_quantile(options_.key_dim - 1,
                                                              options_.failure / static_cast<double>(counted))
                                    : 1.0;
        }
    }

    /// Writes the code, gain and spread of one token.
    template <class T>
    void encode(const T* key, std::size_t token) {
        codes_.clear(token);
        gain_[token] = 0;
        spread_[token] = 0;
        if (!detail::finite_row(key, options_.key_dim)) {
            gain_[token] = std::numeric_limits<float>::quiet_NaN();
            spread_[token] = std::numeric_limits<float>::infinity();
            return;
        }
        double offset[rotated_codes::largest_key_dim];
        double square = 0;
        for (std::size_t c = 0; c < options_.key_dim; ++c) {
            offset[c] = static_cast<double>(to_float(key[c])) - static_cast<double>(centre_[c]);
            square += offset[c] * offset[c];
        }
        const double norm = std::sqrt(square);
        if (!(norm > 0)) {
            return;
        }
        for (std::size_t c = 0; c < options_.key_dim; ++c) {
            offset[c] /= norm;
        }
        alignas(64) double rotated[rotated_codes::largest_key_dim];
        alignas(64) float direction[rotated_codes::largest_key_dim] = {};
        detail::rotate(rotation_->data(), options_.key_dim, padded_, offset, rotated);
        for (std::size_t c = 0; c < padded_; ++c) {
            direction[c] = static_cast<float>(rotated[c]);
        }
        const float scale = detail::best_code_scale(direction, options_.key_dim, padded_, options_.bits);
        double dot = 0;
        double length = 0;
        for (std::size_t c = 0; c < options_.key_dim; ++c) {
            const detail::signed_code own = detail::code_at_scale(direction[c], scale, options_.bits);
            dot += std::abs(rotated[c]) * std::abs(own.value);
            length += own.value * own.value;
            codes_.put(token, c * options_.bits, options_.bits, own.code);
        }
        length = std::sqrt(length);
        const double rho = dot / length;
        // rho is off by what rounding did to P, 2^-24 sqrt(d): near 1 that matters to the square root.
        const double slack = std::sqrt(static_cast<double>(options_.key_dim)) * 0x1p-22;
        gain_[token] = static_cast<float>(norm / dot);
        spread_[token] = static_cast<float>(norm * std::sqrt(larger(1 - rho * rho, 0.0) + slack) / rho * (1 + 0x1p-22));
    }

    rotated_options options_;
    std::size_t padded_ = 0;
    std::shared_ptr<const std::vector<float>> rotation_;
    std::vector<float> centre_;
    detail::packed_codes codes_;
    std::vector<float> gain_;
    std::vector<float> spread_;
    std::size_t tokens_ = 0;
    std::size_t counted_ = 0;
    double quantile_ = 1;
};

}  // namespace verkv::inline v0
