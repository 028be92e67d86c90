// The low-rank sketch: keys about their mean, along the few directions in which they vary most.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/low_rank_estimate.hpp"
#include "verkv/sketch/detail/checks.hpp"
#include "verkv/sketch/detail/coefficients.hpp"
#include "verkv/sketch/detail/orthonormal.hpp"
#include "verkv/sketch/detail/subspace.hpp"

namespace verkv::inline v0 {

/// Shape of a low-rank sketch.
struct low_rank_options {
    std::size_t key_dim = 0;  ///< channels of a key, 1 ... 1024
    std::size_t rank = 32;    ///< directions kept, 1 ... key_dim
    coefficient_format coefficients = coefficient_format::int8;

    friend bool operator==(const low_rank_options&, const low_rank_options&) = default;
};

/// Checks the options of a low-rank sketch.
/// Throws invalid_argument for a key_dim outside 1 ... 1024, a rank outside 1 ... key_dim and an unknown format.
inline void validate(const low_rank_options& o) {
    detail::check(o.key_dim >= 1 && o.key_dim <= low_rank_codes::largest_key_dim, "a low-rank sketch of keys of ",
                  o.key_dim, " channels; it takes 1 to ", low_rank_codes::largest_key_dim);
    detail::check(o.rank >= 1 && o.rank <= o.key_dim, "a low-rank sketch of rank ", o.rank, " of keys of ", o.key_dim,
                  " channels; the rank must be between 1 and that");
    detail::check(o.coefficients == coefficient_format::float32 || o.coefficients == coefficient_format::float16 ||
                      o.coefficients == coefficient_format::int8,
                  "coefficient_format is ", static_cast<int>(o.coefficients), "; it must be float32, float16 or int8");
}

/// The keys of one KV head by their coefficients along `rank` directions: the principal ones of the keys that fit()
/// saw, or those of a basis that the caller gives. k ~ m + B^T a, m the mean, B [rank, key_dim] the basis, a = B (k -
/// m) as stored; the estimate is scale (<q, m> + <B q, a>).
///
/// The principal directions are those of the keys about 0, not about the mean: queries have much along the mean, so
/// that what a key differs there by counts (docs/sketches.md has figures). Taking off the mean only makes
/// coefficients small. Loki (Singhania et al. 2024, arXiv 2406.02542) keeps principal components like these, of keys
/// before or after RoPE, with a basis found offline. InfiniGen (Lee et al. 2024, arXiv 2406.19707) takes the directions
/// from queries. Hand either basis to the second constructor. ShadowKV (Sun et al. 2024, arXiv 2410.21465) factorises
/// keys before RoPE, all heads together, and rotates what it rebuilds; here keys are as they are cached, rotated.
/// - Bound, for certain: with e = k - m - B^T a and p = q - B^T B q, <q, k> - <q, m> - <B q, a> = <q, e> = <p, e> + <B
///   q, B e>, whatever B is. So |logit - estimate| <= |scale| (||p|| ||e|| + ||B q|| ||B e||). ||e|| and ||B e|| are
///   stored, rounded up. e is nearly orthogonal to the basis: the second term is what storing a has cost, and the first
///   counts only the part of the query beside the basis.
/// - Coefficients: float; half, within +-65504; or 8 bits, -127 ... 127 times a step of the token, the largest
///   coefficient over 127.
/// - Every way to cut the same tokens into append() calls gives the same bits. erase() leaves all others as they are.
/// - NaN or infinity in a key makes that token's estimate NaN and its bound infinite, of no other one; fit() leaves
///   such keys out.
/// One object may be read by many threads at once, or changed by one.
class low_rank_sketch {
public:
    /// The basis will be fit()'s. Throws as validate(options) does.
    explicit low_rank_sketch(const low_rank_options& options)
        : options_(options), coefficients_(options.coefficients, options.rank) {
        validate(options);
        padded_channels_ = padded(options.key_dim);
        padded_rank_ = padded(options.rank);
    }

    /// The basis spans what the rows of `basis` [rank, key_dim] span; fit() takes the mean alone. Copies share it, so
    /// a cache uses it for all KV heads that get a copy.
    /// The rows are made orthonormal in their order, in double, and rounded to float. Throws invalid_argument for
    /// another shape, a null pointer, an element that is not finite, and a row in the span of the others.
    low_rank_sketch(const low_rank_options& options, rows<float> basis) : low_rank_sketch(options) {
        detail::check(basis.count == options.rank && basis.width == options.key_dim, "a basis [", basis.count, ", ",
                      basis.width, "] for a low-rank sketch of rank ", options.rank, " of keys of ", options.key_dim,
                      " channels");
        verkv::validate(basis, "basis");
        std::vector<double> spanning(options.rank * options.key_dim);
        for (std::size_t r = 0; r < options.rank; ++r) {
            detail::check(detail::finite_row(basis[r], options.key_dim), "row ", r, " of a basis is not finite");
            std::copy_n(basis[r], options.key_dim, spanning.data() + r * options.key_dim);
        }
        const std::size_t independent = detail::orthonormalise(spanning, options.rank, options.key_dim);
        detail::check(independent == options.rank, "the ", options.rank, " rows of a basis span ", independent,
                      " directions");
        basis_ = stored(spanning);
        given_ = true;
    }

    /// Takes mean and basis from the keys, and forgets all tokens.
    /// Mean and Gram matrix sum k k^T of the keys whose channels are all finite (0 without any), in double; the basis
    /// is the matrix's eigenvectors of the `rank` largest eigenvalues, ties as Eigen leaves them. keys [n, key_dim]. n
    /// key_dim^2 / 2 + about 9 key_dim^3 multiply-adds on the caller's thread (n key_dim where the basis is given);
    /// reads the keys twice. Throws invalid_argument for keys of another width.
    template <class Backend, class T>
    void fit(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        std::vector<float> mean = detail::mean_of_finite(keys);
        if (!given_) {
            basis_ = stored(detail::principal_directions(detail::gram_of_finite(keys), options_.rank));
        }
        mean_ = std::move(mean);
        resize(0);
    }

    /// Adds tokens at the end, in any number of calls with the same result.
    /// keys [n, key_dim]. 3 rank key_dim multiply-adds a token, in double, on the caller's thread. Allocates nothing
    /// within what reserve() asked for. Throws invalid_argument for keys of another width, invalid_state before fit().
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        detail::check<invalid_state>(!mean_.empty(), "append() of ", keys.count,
                                     " tokens to a low-rank sketch before fit() took its mean");
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
            coefficients_.move(from, to);
            outside_[to] = outside_[from];
            inside_[to] = inside_[from];
        }
        resize(tokens_ - (last - first));
    }

    /// Writes the estimate of scale * <q, k> of each token: logits [queries.count, size()].
    /// queries [any count, key_dim]; scale of any sign. Splits each query (2 rank key_dim multiply-adds) and reads the
    /// coefficients once for eight of them, bytes() bytes, and writes the logits. Allocates nothing; about 60 KiB of
    /// the stack. Float accumulation over coefficients. Same bits for any chunking and any number of threads. Throws
    /// invalid_argument for queries of another width or logits of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits) const {
        detail::check_output(queries, logits, options_.key_dim, tokens_, "logits");
        low_rank_estimate(exec, codes(), queries, scale, logits, nullptr);
    }

    /// The same logits, and for each a bound on its distance from scale * <q, k>: both [queries.count, size()].
    /// b = |scale| (||p|| ||e|| + ||B q|| (||B e|| + rounding)) + 2^-22 |scale <q, m>|; rounding is (rank + 8) 2^-24
    /// times ||a||, or with 8 bits times 384 sqrt(rank) step, for the float sum over coefficients. The rest is in
    /// double, rounded up. Holds in round-to-nearest with gradual underflow, for finite keys and queries; where float
    /// cannot hold the estimate, the bound is infinite. Otherwise as estimate() without bounds. Throws invalid_argument
    /// also for bounds of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits,
                  matrix_view<float> bounds) const {
        detail::check_output(queries, logits, options_.key_dim, tokens_, "logits");
        detail::check_output(queries, bounds, options_.key_dim, tokens_, "bounds");
        low_rank_estimate(exec, codes(), queries, scale, logits, &bounds);
    }

    /// 0: the bounds hold for certain.
    [[nodiscard]] static constexpr double bound_failure() noexcept { return 0; }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return tokens_; }

    /// Memory that stands in for the keys: coefficients (8 bits: rounded up to 32-bit words, and a step) and two norms
    /// a token. Not counted: the padding to 16 tokens, and basis_bytes().
    [[nodiscard]] std::size_t bytes() const noexcept { return tokens_ * token_bytes(); }

    /// Memory of basis and mean, 4 (rank + 1) key_dim bytes; it does not grow with the context.
    [[nodiscard]] std::size_t basis_bytes() const noexcept {
        return (options_.rank + 1) * options_.key_dim * sizeof(float);
    }

    /// bytes() a token: key_dim 128, rank 32, 8 bits: 44, 8.6 % of a bf16 cache.
    [[nodiscard]] double bytes_per_token() const noexcept { return static_cast<double>(token_bytes()); }

    [[nodiscard]] const low_rank_options& options() const noexcept { return options_; }

    /// m, [key_dim]; empty before fit().
    [[nodiscard]] std::span<const float> mean() const noexcept { return mean_; }

    /// B, [rank] rows of channels, padded_channels() wide; empty before fit() unless it was given.
    [[nodiscard]] std::span<const float> basis() const noexcept {
        return basis_ ? std::span<const float>(basis_->rows) : std::span<const float>();
    }
    [[nodiscard]] std::size_t padded_channels() const noexcept { return padded_channels_; }

    /// The coefficients as they lie in memory, for a backend's low_rank_estimate(); valid until the sketch changes.
    [[nodiscard]] low_rank_codes codes() const noexcept {
        low_rank_codes s;
        s.basis = basis_ ? basis_->rows.data() : nullptr;
        s.transposed = basis_ ? basis_->columns.data() : nullptr;
        s.mean = mean_.data();
        coefficients_.show(s);
        s.outside = outside_.data();
        s.inside = inside_.data();
        s.tokens = tokens_;
        s.key_dim = options_.key_dim;
        s.rank = options_.rank;
        s.padded_channels = padded_channels_;
        s.padded_rank = padded_rank_;
        s.format = options_.coefficients;
        return s;
    }

private:
    static constexpr std::size_t block = low_rank_codes::block_tokens;

    struct directions {
        std::vector<float> rows;     ///< [rank][padded channel]
        std::vector<float> columns;  ///< [channel][padded rank]
    };

    [[nodiscard]] static std::size_t padded(std::size_t n) { return (n + block - 1) / block * block; }

    [[nodiscard]] std::size_t token_bytes() const noexcept { return coefficients_.token_bytes() + 2 * sizeof(float); }

    [[nodiscard]] std::shared_ptr<const directions> stored(const std::vector<double>& basis) const {
        directions out;
        out.rows.resize(options_.rank * padded_channels_);
        out.columns.resize(options_.key_dim * padded_rank_);
        for (std::size_t r = 0; r < options_.rank; ++r) {
            for (std::size_t c = 0; c < options_.key_dim; ++c) {
                const auto x = static_cast<float>(basis[r * options_.key_dim + c]);
                out.rows[r * padded_channels_ + c] = x;
                out.columns[c * padded_rank_ + r] = x;
            }
        }
        return std::make_shared<const directions>(std::move(out));
    }

    void make_room(std::size_t tokens, bool geometric) {
        coefficients_.make_room(padded(tokens), geometric);
        detail::make_room(outside_, padded(tokens), geometric);
        detail::make_room(inside_, padded(tokens), geometric);
    }

    void resize(std::size_t tokens) {
        coefficients_.resize(padded(tokens));
        outside_.resize(padded(tokens));
        inside_.resize(padded(tokens));
        tokens_ = tokens;
    }

    /// Writes coefficients and norms of one token.
    template <class T>
    void encode(const T* key, std::size_t token) {
        const std::size_t d = options_.key_dim;
        double offset[low_rank_codes::largest_key_dim];
        offset[0] = 0;  // GCC 12 at -O3 sees no other write
        alignas(64) double along[low_rank_codes::largest_key_dim] = {};
        alignas(64) double back[low_rank_codes::largest_key_dim];
        const bool finite = detail::finite_row(key, d);
        double key_square = 0;
        double mean_square = 0;
        for (std::size_t c = 0; c < d; ++c) {
            const auto x = finite ? static_cast<double>(to_float(key[c])) : 0.0;
            const auto m = static_cast<double>(mean_[c]);
            offset[c] = x - m;
            key_square += x * x;
            mean_square += m * m;
        }
        detail::rotate(basis_->columns.data(), d, padded_rank_, offset, along);
        const double step = coefficients_.store(token, along, finite);

        detail::rotate(basis_->rows.data(), options_.rank, padded_channels_, along, back);
        double square = 0;
        for (std::size_t c = 0; c < d; ++c) {
            offset[c] -= back[c];
            square += offset[c] * offset[c];
        }
        double coefficient_square = 0;
        for (std::size_t r = 0; r < options_.rank; ++r) {
            coefficient_square += along[r] * along[r];
        }
        detail::rotate(basis_->columns.data(), d, padded_rank_, offset, along);
        double inner_square = 0;
        for (std::size_t r = 0; r < options_.rank; ++r) {
            inner_square += along[r] * along[r];
        }
        const auto rank = static_cast<double>(options_.rank);
        const double norm = std::sqrt(coefficient_square);
        // What doubles lose on the way, and 2^-40 for the norms themselves.
        const double lost =
            (rank + 8) * 0x1p-50 * (std::sqrt(key_square) + std::sqrt(mean_square) + std::sqrt(rank) * norm);
        const double summed = step > 0 ? 384 * std::sqrt(rank) * step : norm;
        constexpr double up = 1 + 0x1p-40;
        outside_[token] =
            finite ? detail::float_above(std::sqrt(square) * up + lost) : std::numeric_limits<float>::infinity();
        inside_[token] =
            detail::float_above((std::sqrt(inner_square) + (rank + 8) * 0x1p-24 * summed) * up +
                                2 * std::sqrt(rank) * (lost + static_cast<double>(d) * 0x1p-50 * std::sqrt(square)));
    }

    low_rank_options options_;
    std::size_t padded_channels_ = 0;
    std::size_t padded_rank_ = 0;
    std::shared_ptr<const directions> basis_;
    bool given_ = false;
    std::vector<float> mean_;
    detail::coefficient_store coefficients_;
    std::vector<float> outside_;
    std::vector<float> inside_;
    std::size_t tokens_ = 0;
};

}  // namespace verkv::inline v0
