// The product-quantised sketch: keys cut into pieces, each piece the index of its nearest centroid.
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
#include "verkv/core/host_device.hpp"
#include "verkv/core/random.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/product_quantised_estimate.hpp"
#include "verkv/sketch/detail/checks.hpp"
#include "verkv/sketch/detail/k_means.hpp"
#include "verkv/sketch/detail/normal.hpp"

namespace verkv::inline v0 {

/// Shape of a product-quantised sketch, and how its codebook is learned.
struct product_quantised_options {
    std::size_t key_dim = 0;           ///< channels of a key, 1 ... 1024; a multiple of subspaces
    std::size_t subspaces = 16;        ///< pieces of a key, of neighbouring channels, 1 ... 64
    unsigned bits = 8;                 ///< of a piece's code, 1 ... 8: 2^bits centroids
    std::size_t training = 2048;       ///< keys that fit() learns from at most, at least 1
    std::size_t iterations = 10;       ///< of k-means at most
    std::uint64_t seed = 0;            ///< of the choice of keys and of the first centroids
    std::vector<float> codebook = {};  ///< [subspace][2^bits][key_dim / subspaces]: fit() takes it and learns nothing

    friend bool operator==(const product_quantised_options&, const product_quantised_options&) = default;
};

/// Checks the options of a product-quantised sketch.
/// Throws invalid_argument for a key_dim outside 1 ... 1024, subspaces outside 1 ... 64 or that do not divide it, bits
/// outside 1 ... 8, a training of 0 or above 2^20, iterations above 1000, and a codebook of another length than 0 or
/// 2^bits key_dim, or with a number that is not finite.
inline void validate(const product_quantised_options& o) {
    using codes = product_quantised_codes;
    detail::check(o.key_dim >= 1 && o.key_dim <= codes::largest_key_dim, "a product-quantised sketch of keys of ",
                  o.key_dim, " channels; it takes 1 to ", codes::largest_key_dim);
    detail::check(o.subspaces >= 1 && o.subspaces <= codes::most_subspaces && o.key_dim % o.subspaces == 0, "keys of ",
                  o.key_dim, " channels in ", o.subspaces, " subspaces; it takes 1 to ", codes::most_subspaces,
                  " of equal width");
    detail::check(o.bits >= 1 && o.bits <= 8, "a product-quantised sketch of ", o.bits, " bits; it takes 1 to 8");
    detail::check(o.training >= 1 && o.training <= std::size_t{1} << 20, "training is ", o.training,
                  " keys; it takes 1 to 2^20");
    detail::check(o.iterations <= 1000, "k-means of ", o.iterations, " iterations; it takes 1000 at most");
    const std::size_t numbers = (std::size_t{1} << o.bits) * o.key_dim;
    detail::check(o.codebook.empty() || o.codebook.size() == numbers, "a codebook of ", o.codebook.size(), " numbers; ",
                  std::size_t{1} << o.bits, " centroids of ", o.key_dim, " channels have ", numbers);
    detail::check(detail::finite_row(o.codebook.data(), o.codebook.size()),
                  "the codebook has a number that is not finite");
}

/// The keys of one KV head as pieces from a codebook each: product quantisation (Jégou, Douze and Schmid 2011), as
/// PQCache has it (Zhang et al. 2024, arXiv 2407.12820).
///
/// A key's piece j, channels j w ... j w + w - 1 with w = key_dim / subspaces, becomes the nearest of 2^bits centroids:
/// k^. Estimate scale <q, k^>, a sum of `subspaces` entries of tables that are made once for a query.
/// - fit() learns the centroids by k-means (k_means()), on at most `training` finite keys: one drawn from each of as
///   many equal stretches, so that time grows with the training and not with the keys. The same keys, options and seed
///   give the same centroids. Keys that come later are coded with them, whatever they are like.
/// - Bound: |<q, k> - <q, k^>| <= ||q|| ||k - k^|| for certain (Cauchy and Schwarz); ||k - k^|| is kept for each token,
///   rounded up. It does not trust the centroids: keys unlike the training have wide bounds, not wrong ones.
/// - Keys are taken as they are cached, rotated or not; every channel counts alike.
/// - Every way to cut the same tokens into append() calls gives the same bits. erase() leaves all others as they are.
/// - NaN or infinity in a key makes that token's estimate NaN and its bound infinite, of no other one; fit() leaves
///   such keys out. So does a key whose ||k - k^|| overflows a float.
/// One object may be read by many threads at once, or changed by one.
class product_quantised_sketch {
public:
    /// Throws as validate(options) does.
    explicit product_quantised_sketch(product_quantised_options options) : options_(std::move(options)) {
        validate(options_);
    }

    /// Learns the centroids, or takes the options' codebook, and forgets all tokens.
    /// keys [n, key_dim]. At most training key_dim 2^bits (iterations + 1) multiply-adds, on the caller's thread: a
    /// quarter of a second or less for 128 channels and the defaults. Without a finite key all centroids are 0. Throws
    /// invalid_argument for keys of another width.
    template <class Backend, class T>
    void fit(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        std::vector<float> centroids(options_.subspaces * piece() * padded());
        std::vector<float> reach(options_.key_dim);
        if (!options_.codebook.empty()) {
            place_codebook(centroids);
        } else {
            learn(training_keys(keys), centroids);
        }
        for (std::size_t c = 0; c < options_.key_dim; ++c) {
            for (std::size_t i = 0; i < padded(); ++i) {
                reach[c] = larger(std::abs(centroids[c * padded() + i]), reach[c]);
            }
        }
        centroids_ = std::move(centroids);
        reach_ = std::move(reach);
        codes_.clear();
        residual_.clear();
    }

    /// Adds tokens at the end, in any number of calls with the same result.
    /// keys [n, key_dim]. key_dim 2^bits multiply-adds a token to find the nearest centroids, in float, on the caller's
    /// thread; the distance to them in double. Allocates nothing within what reserve() asked for. Throws
    /// invalid_argument for keys of another width, invalid_state before fit().
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        detail::check<invalid_state>(!centroids_.empty(), "append() of ", keys.count,
                                     " tokens to a product-quantised sketch before fit() learned its centroids");
        make_room(size() + keys.count, true);
        for (std::size_t i = 0; i < keys.count; ++i) {
            encode(keys[i]);
        }
    }

    /// Makes room for so many tokens in all, so that append() up to there allocates nothing.
    void reserve(std::size_t tokens) { make_room(tokens, false); }

    /// Forgets tokens first ... last-1; estimates and bounds of the others keep their bits, under their new indices.
    /// Moves what lies behind. Allocates nothing. Throws invalid_argument unless first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        detail::check_range(first, last, size());
        const auto at = [](std::size_t i) { return static_cast<std::ptrdiff_t>(i); };
        codes_.erase(codes_.begin() + at(first * options_.subspaces), codes_.begin() + at(last * options_.subspaces));
        residual_.erase(residual_.begin() + at(first), residual_.begin() + at(last));
    }

    /// Writes the estimate of scale * <q, k> of each token: logits [queries.count, size()].
    /// queries [any count, key_dim]; scale of any sign. Makes tables for each query, key_dim 2^bits multiply-adds in
    /// double, then reads the codes for it, bytes() bytes: once for each query. Allocates nothing; about 75 KiB of the
    /// stack. Float sums of `subspaces` terms. Same bits for any chunking and any number of threads. Throws
    /// invalid_argument for queries of another width or logits of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits) const {
        detail::check_output(queries, logits, options_.key_dim, size(), "logits");
        product_quantised_estimate(exec, codes(), queries, scale, logits, nullptr);
    }

    /// The same logits, and for each a bound on its distance from scale * <q, k>: both [queries.count, size()].
    /// b = |scale| ||q|| ||k - k^|| + |scale| sum_c |q_c| max |centroid_c| (g + (key_dim + 4) 2^-52) (1 + g), g = m
    /// 2^-24 / (1 - m 2^-24), m = subspaces: a table's entries are rounded to float once and added in float. The rest
    /// is in double, rounded up; (m + 2) 2^-149 covers entries below the normal floats. Holds in round-to-nearest with
    /// gradual underflow, for finite keys and queries; where float cannot hold the estimate, the bound is infinite.
    /// Otherwise as estimate() without bounds. Throws invalid_argument also for bounds of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits,
                  matrix_view<float> bounds) const {
        detail::check_output(queries, logits, options_.key_dim, size(), "logits");
        detail::check_output(queries, bounds, options_.key_dim, size(), "bounds");
        product_quantised_estimate(exec, codes(), queries, scale, logits, &bounds);
    }

    /// 0: the bounds hold for certain.
    [[nodiscard]] static constexpr double bound_failure() noexcept { return 0; }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return residual_.size(); }

    /// Memory that stands in for the keys: a byte for each piece of a token, whatever the bits, and one float. Not
    /// counted: the centroids, 4 2^bits key_dim bytes, which do not grow with the context.
    [[nodiscard]] std::size_t bytes() const noexcept {
        return codes_.size() * sizeof(std::uint8_t) + residual_.size() * sizeof(float);
    }

    /// bytes() a token: 20 with 16 pieces; 7.8 % of a bf16 cache with key_dim 128.
    [[nodiscard]] double bytes_per_token() const noexcept {
        return static_cast<double>(options_.subspaces + sizeof(float));
    }

    [[nodiscard]] const product_quantised_options& options() const noexcept { return options_; }

    /// The codes as they lie in memory, for a backend's product_quantised_estimate(); valid until the sketch changes.
    [[nodiscard]] product_quantised_codes codes() const noexcept {
        product_quantised_codes s;
        s.centroids = centroids_.data();
        s.reach = reach_.data();
        s.codes = codes_.data();
        s.residual = residual_.data();
        s.tokens = size();
        s.key_dim = options_.key_dim;
        s.subspaces = options_.subspaces;
        s.padded_centroids = padded();
        return s;
    }

private:
    [[nodiscard]] std::size_t piece() const noexcept { return options_.key_dim / options_.subspaces; }
    [[nodiscard]] std::size_t centroid_count() const noexcept { return std::size_t{1} << options_.bits; }
    [[nodiscard]] std::size_t padded() const noexcept { return (centroid_count() + 15) / 16 * 16; }

    void make_room(std::size_t tokens, bool geometric) {
        detail::make_room(codes_, tokens * options_.subspaces, geometric);
        detail::make_room(residual_, tokens, geometric);
    }

    /// Copies the options' codebook to where nearest_centroid() wants it; the last centroid fills up.
    void place_codebook(std::vector<float>& centroids) const {
        for (std::size_t j = 0; j < options_.subspaces; ++j) {
            for (std::size_t i = 0; i < padded(); ++i) {
                const std::size_t from = j * centroid_count() + (std::min)(i, centroid_count() - 1);
                for (std::size_t c = 0; c < piece(); ++c) {
                    centroids[(j * piece() + c) * padded() + i] = options_.codebook[from * piece() + c];
                }
            }
        }
    }

    /// A finite key of each stretch, [key][channel]: the one drawn, or the next one behind it in its stretch.
    template <class T>
    [[nodiscard]] std::vector<float> training_keys(rows<T> keys) const {
        const std::size_t wanted = (std::min)(options_.training, keys.count);
        const uniform_stream stream = detail::stream_of(options_.seed, detail::sketch_stream::training);
        std::vector<float> chosen;
        chosen.reserve(wanted * options_.key_dim);
        for (std::size_t s = 0; s < wanted; ++s) {
            const std::size_t begin = s * keys.count / wanted;
            const std::size_t end = (s + 1) * keys.count / wanted;
            const auto length = static_cast<double>(end - begin);
            std::size_t i = begin + static_cast<std::size_t>(uniform(stream, static_cast<position_t>(s)) * length);
            while (i < end && !detail::finite_row(keys[i], keys.width)) {
                ++i;
            }
            for (std::size_t c = 0; i < end && c < keys.width; ++c) {
                chosen.push_back(to_float(keys[i][c]));
            }
        }
        return chosen;
    }

    void learn(const std::vector<float>& chosen, std::vector<float>& centroids) const {
        const std::size_t n = chosen.size() / options_.key_dim;
        for (std::size_t j = 0; n > 0 && j < options_.subspaces; ++j) {
            std::vector<float> pieces(n * piece());
            for (std::size_t i = 0; i < n; ++i) {
                std::copy_n(chosen.data() + i * options_.key_dim + j * piece(), piece(), pieces.data() + i * piece());
            }
            uniform_stream stream = detail::stream_of(options_.seed, detail::sketch_stream::training);
            stream.kv_head = static_cast<std::uint32_t>(j);
            const auto learned = detail::k_means(pieces, piece(), centroid_count(), options_.iterations, stream);
            std::copy(learned.begin(), learned.end(),
                      centroids.begin() + static_cast<std::ptrdiff_t>(j * piece() * padded()));
        }
    }

    /// Adds one token.
    template <class T>
    void encode(const T* key) {
        float row[product_quantised_codes::largest_key_dim];
        for (std::size_t c = 0; c < options_.key_dim; ++c) {
            row[c] = to_float(key[c]);
        }
        if (!detail::finite_row(key, options_.key_dim)) {
            codes_.resize(codes_.size() + options_.subspaces);
            residual_.push_back(std::numeric_limits<float>::quiet_NaN());
            return;
        }
        double square = 0;
        for (std::size_t j = 0; j < options_.subspaces; ++j) {
            const float* const of_piece = centroids_.data() + j * piece() * padded();
            const std::size_t nearest = detail::nearest_centroid(of_piece, piece(), padded(), row + j * piece());
            codes_.push_back(static_cast<std::uint8_t>(nearest));
            for (std::size_t c = 0; c < piece(); ++c) {
                const double off =
                    static_cast<double>(row[j * piece() + c]) - static_cast<double>(of_piece[c * padded() + nearest]);
                square += off * off;
            }
        }
        // Rounded up, and never to 0: a product with a huge query must not lose it.
        const double distance = std::sqrt(square) * (1 + 0x1p-22);
        const auto rounded = static_cast<float>(distance > 0 ? larger(distance, 0x1p-126) : 0.0);
        residual_.push_back(std::isfinite(rounded) ? rounded : std::numeric_limits<float>::quiet_NaN());
    }

    product_quantised_options options_;
    std::vector<float> centroids_;
    std::vector<float> reach_;
    std::vector<std::uint8_t> codes_;
    std::vector<float> residual_;
};

}  // namespace verkv::inline v0
