// TurboQuant's sketch: keys turned by a random rotation, each coordinate rounded to the codebook of its known law.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <numbers>
#include <span>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/turbo_quant_estimate.hpp"
#include "verkv/sketch/detail/checks.hpp"
#include "verkv/sketch/detail/haar_rotation.hpp"
#include "verkv/sketch/detail/lloyd_max.hpp"
#include "verkv/sketch/detail/normal.hpp"
#include "verkv/sketch/detail/packed_codes.hpp"

namespace verkv::inline v0 {

/// What a TurboQuant sketch spends its bits on.
enum class turbo_quant_form {
    mean_squared_error,  ///< all of them on levels: the smallest error of the key, estimates biased towards 0
    inner_product,       ///< one on the sign of a projected residual: unbiased estimates of larger variance
};

/// Shape of a TurboQuant sketch.
struct turbo_quant_options {
    std::size_t key_dim = 0;  ///< channels of a key, 2 ... 1024
    unsigned bits = 2;        ///< of a coordinate, 1 ... 4, the projection's included
    turbo_quant_form form = turbo_quant_form::mean_squared_error;
    std::uint64_t seed = 0;  ///< of the rotation and the projection; drawn without a look at keys or queries

    friend bool operator==(const turbo_quant_options&, const turbo_quant_options&) = default;
};

/// Checks the options of a TurboQuant sketch.
/// Throws invalid_argument for a key_dim outside 2 ... 1024, bits outside 1 ... 4 and a form that is none of the two.
inline void validate(const turbo_quant_options& o) {
    detail::check(o.key_dim >= 2 && o.key_dim <= turbo_quant_codes::largest_key_dim, "a TurboQuant sketch of keys of ",
                  o.key_dim, " channels; it takes 2 to ", turbo_quant_codes::largest_key_dim);
    detail::check(o.bits >= 1 && o.bits <= 4, "a TurboQuant sketch of ", o.bits, " bits; it takes 1 to 4");
    detail::check(o.form == turbo_quant_form::mean_squared_error || o.form == turbo_quant_form::inner_product,
                  "turbo_quant_form is ", static_cast<int>(o.form), "; it must be mean_squared_error or inner_product");
}

/// The keys of one KV head in a few bits a coordinate, without a look at the data: TurboQuant (Zandieh et al. 2025,
/// arXiv 2504.19874).
///
/// o = k / ||k||, P a uniformly random rotation, y = P o: each y_c has the law of a coordinate on the unit sphere. y^
/// is y with each coordinate rounded to the nearest level of that law's Lloyd-Max codebook (lloyd_max_sphere()).
/// - mean_squared_error: <k, q> ~ ||k|| <y^, P q>. Over the seeds its mean is (1 - D) <k, q>, D = distortion() = E ||y
/// -
///   y^||^2: a level is the mean of its cell, so E <y^, y> = 1 - D, and by symmetry y^ has no mean beside y. With many
///   channels D is 0.363, 0.117, 0.0345, 0.0095 for 1 ... 4 bits.
/// - inner_product: bits - 1 of them for levels (none of 1 bit: y^ = 0), and with r = y - y^ and S a Gaussian matrix
///   [key_dim, key_dim] the signs of S r: <k, q> ~ ||k|| (<y^, P q> + ||r|| sqrt(pi/2) / key_dim <S P q, sign(S r)>),
///   sign(0) = +1 (QJL, Zandieh et al. 2024, arXiv 2406.03482). Over S its mean is <k, q>, for each P. Its variance
///   over S is ||k||^2 ||r||^2 (pi/2 ||q||^2 - <r / ||r||, P q>^2) / key_dim.
/// - Keys are not centred, as in the paper: what they have in common costs precision. rotated_sketch takes it away.
/// - Every way to cut the same tokens into append() calls gives the same bits. erase() leaves all others as they are.
/// - NaN or infinity in a key makes that token's estimate NaN, of no other one. A key of zeros has the estimate 0.
/// Copies share rotation and projection: a prototype is made once and copied for each KV head.
/// One object may be read by many threads at once, or changed by one.
class turbo_quant_sketch {
public:
    /// Draws rotation and projection and makes the codebook: time as key_dim^3, a few milliseconds at 128.
    /// Throws as validate(options) does.
    explicit turbo_quant_sketch(const turbo_quant_options& options) : options_(options) {
        validate(options);
        const bool projects = options.form == turbo_quant_form::inner_product;
        level_bits_ = projects ? options.bits - 1 : options.bits;
        padded_ = (options.key_dim + block - 1) / block * block;
        level_words_ = (options.key_dim * level_bits_ + 31) / 32;
        codes_ = detail::packed_codes(level_words_ + (projects ? (options.key_dim + 31) / 32 : 0));
        auto shared = std::make_shared<matrices>();
        shared->rotation = detail::haar_rotation(options.seed, options.key_dim, padded_);
        if (projects) {
            shared->projection =
                detail::gaussian_matrix(detail::stream_of(options.seed, detail::sketch_stream::projection),
                                        options.key_dim, options.key_dim, padded_);
        }
        if (level_bits_ > 0) {
            const auto book = detail::lloyd_max_sphere(options.key_dim, std::size_t{1} << (level_bits_ - 1));
            shared->levels.assign(book.levels.begin(), book.levels.end());
            shared->distortion = book.distortion;
            for (std::size_t i = 0; i < 16; ++i) {
                const std::size_t code = i % (2 * book.levels.size());
                const float size = shared->levels[code % book.levels.size()];
                shared->table[i] = code < book.levels.size() ? size : -size;
            }
        }
        shared_ = std::move(shared);
    }

    /// Forgets all tokens; the keys teach it nothing. Throws invalid_argument for keys of another width.
    template <class Backend, class T>
    void fit(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        resize(0);
    }

    /// Adds tokens at the end, in any number of calls with the same result.
    /// keys [n, key_dim]. key_dim^2 multiply-adds a token for the rotation and as many for the projection: in double,
    /// on the caller's thread. Allocates nothing within what reserve() asked for. Throws invalid_argument for keys of
    /// another width.
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        make_room(tokens_ + keys.count, true);
        const std::size_t first = tokens_;
        resize(first + keys.count);
        for (std::size_t i = 0; i < keys.count; ++i) {
            encode(keys[i], first + i);
        }
    }

    /// Makes room for so many tokens in all, so that append() up to there allocates nothing.
    void reserve(std::size_t tokens) { make_room(tokens, false); }

    /// Forgets tokens first ... last-1; the estimates of the others keep their bits, under their new indices. Moves
    /// what lies behind. Allocates nothing. Throws invalid_argument unless first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        detail::check_range(first, last, tokens_);
        if (first == last) {
            return;
        }
        for (std::size_t from = last, to = first; from < tokens_; ++from, ++to) {
            codes_.move(from, to);
            norm_[to] = norm_[from];
            if (!residual_.empty()) {
                residual_[to] = residual_[from];
            }
        }
        resize(tokens_ - (last - first));
    }

    /// Writes the estimate of scale * <q, k> of each token: logits [queries.count, size()].
    /// queries [any count, key_dim]; scale of any sign. Rotates each query, and projects it, in double; reads the codes
    /// once for four of them, bytes() bytes, and writes the logits. Allocates nothing; about 50 KiB of the stack. Float
    /// accumulation over coordinates: an error of at most (key_dim + 4) 2^-24 |scale| ||k|| (sum_c |y^_c (P q)_c| +
    /// ||r|| sqrt(pi/2) / key_dim sum_c |(S P q)_c|) on top of the quantisation. Same bits for any chunking and any
    /// number of threads. Throws invalid_argument for queries of another width or logits of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits) const {
        detail::check_output(queries, logits, options_.key_dim, tokens_, "logits");
        turbo_quant_estimate(exec, codes(), queries, scale, logits);
    }

    /// D: E ||y - y^||^2 over rotations, of the levels there are; 1 without any.
    [[nodiscard]] double distortion() const noexcept { return shared_->distortion; }

    /// Relative bias of the estimates over the seeds, E estimate / <k, q> - 1: -distortion() for mean_squared_error, 0
    /// for inner_product.
    [[nodiscard]] double bias() const noexcept {
        return options_.form == turbo_quant_form::inner_product ? 0.0 : -shared_->distortion;
    }

    /// Sizes of the levels, ascending: each comes with both signs.
    [[nodiscard]] std::span<const float> levels() const noexcept { return shared_->levels; }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return tokens_; }

    /// Memory that stands in for the keys: a token's code, levels and signs rounded up to 32 bits each, and one float,
    /// or two with a projection. Not counted: the padding to 16 tokens; rotation and projection (4 key_dim^2 bytes
    /// each, shared by all copies), which do not grow with the context.
    [[nodiscard]] std::size_t bytes() const noexcept { return tokens_ * token_bytes(); }

    /// bytes() a token: key_dim 128, 1 ... 4 bits: 20, 36, 52, 68, and 4 more with a projection.
    [[nodiscard]] double bytes_per_token() const noexcept { return static_cast<double>(token_bytes()); }

    [[nodiscard]] const turbo_quant_options& options() const noexcept { return options_; }

    /// The codes as they lie in memory, for a backend's turbo_quant_estimate(); valid until the sketch changes.
    [[nodiscard]] turbo_quant_codes codes() const noexcept {
        turbo_quant_codes s;
        s.rotation = shared_->rotation.data();
        s.levels = shared_->table;
        s.codes = codes_.data();
        s.norm = norm_.data();
        if (projects()) {
            s.projection = shared_->projection.data();
            s.residual = residual_.data();
        }
        s.tokens = tokens_;
        s.key_dim = options_.key_dim;
        s.padded_channels = padded_;
        s.level_words = level_words_;
        s.words = codes_.words();
        s.bits = level_bits_;
        return s;
    }

private:
    static constexpr std::size_t block = turbo_quant_codes::block_tokens;

    struct matrices {
        std::vector<float> rotation;
        std::vector<float> projection;
        std::vector<float> levels;
        float table[16] = {};
        double distortion = 1;
    };

    [[nodiscard]] bool projects() const noexcept { return options_.form == turbo_quant_form::inner_product; }

    [[nodiscard]] std::size_t token_bytes() const noexcept {
        return codes_.words() * sizeof(std::uint32_t) + (projects() ? 2 : 1) * sizeof(float);
    }

    void make_room(std::size_t tokens, bool geometric) {
        codes_.make_room(tokens, geometric);
        detail::make_room(norm_, detail::packed_codes::padded(tokens), geometric);
        detail::make_room(residual_, projects() ? detail::packed_codes::padded(tokens) : 0, geometric);
    }

    void resize(std::size_t tokens) {
        codes_.resize(tokens);
        norm_.resize(detail::packed_codes::padded(tokens));
        residual_.resize(projects() ? detail::packed_codes::padded(tokens) : 0);
        tokens_ = tokens;
    }

    /// Writes the code of one token.
    template <class T>
    void encode(const T* key, std::size_t token) {
        const std::size_t d = options_.key_dim;
        codes_.clear(token);
        norm_[token] = 0;
        if (projects()) {
            residual_[token] = 0;
        }
        if (!detail::finite_row(key, d)) {
            norm_[token] = std::numeric_limits<float>::quiet_NaN();
            if (projects()) {
                residual_[token] = std::numeric_limits<float>::quiet_NaN();
            }
            return;
        }
        double direction[turbo_quant_codes::largest_key_dim];
        alignas(64) double rotated[turbo_quant_codes::largest_key_dim];
        double square = 0;
        for (std::size_t c = 0; c < d; ++c) {
            direction[c] = static_cast<double>(to_float(key[c]));
            square += direction[c] * direction[c];
        }
        const double norm = std::sqrt(square);
        if (!(norm > 0)) {
            return;
        }
        for (std::size_t c = 0; c < d; ++c) {
            direction[c] /= norm;
        }
        detail::rotate(shared_->rotation.data(), d, padded_, direction, rotated);
        norm_[token] = static_cast<float>(norm);
        double rest = 0;
        for (std::size_t c = 0; c < d; ++c) {
            const double error = level_bits_ > 0 ? round_coordinate(rotated[c], token, c) : rotated[c];
            direction[c] = error;
            rest += error * error;
        }
        if (!projects()) {
            return;
        }
        detail::rotate(shared_->projection.data(), d, padded_, direction, rotated);
        for (std::size_t c = 0; c < d; ++c) {
            codes_.put(token, 32 * level_words_ + c, 1, rotated[c] < 0 ? 1u : 0u);
        }
        residual_[token] = static_cast<float>(norm * std::sqrt(rest * std::numbers::pi / 2) / static_cast<double>(d));
    }

    /// Writes the bits of the level nearest to y (of two, the larger), and returns what is left of y.
    double round_coordinate(double y, std::size_t token, std::size_t c) {
        const std::vector<float>& levels = shared_->levels;
        const double size = std::abs(y);
        std::size_t index = 0;
        while (index + 1 < levels.size() &&
               size >= (static_cast<double>(levels[index]) + static_cast<double>(levels[index + 1])) / 2) {
            ++index;
        }
        const auto code = static_cast<std::uint32_t>(y < 0 ? levels.size() + index : index);
        codes_.put(token, c * level_bits_, level_bits_, code);
        const auto level = static_cast<double>(levels[index]);
        return y < 0 ? y + level : y - level;
    }

    turbo_quant_options options_;
    unsigned level_bits_ = 0;
    std::size_t padded_ = 0;
    std::size_t level_words_ = 0;
    std::shared_ptr<const matrices> shared_;
    detail::packed_codes codes_;
    std::vector<float> norm_;
    std::vector<float> residual_;
    std::size_t tokens_ = 0;
};

}  // namespace verkv::inline v0
