// The span sketch: runs of similar keys by their mean, and finer where a query looks.
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
#include "verkv/cpu/span_estimate.hpp"
#include "verkv/sketch/detail/checks.hpp"
#include "verkv/sketch/detail/orthonormal.hpp"
#include "verkv/sketch/detail/span_basis.hpp"
#include "verkv/sketch/detail/span_store.hpp"

namespace verkv::inline v0 {

/// Shape of a span sketch.
struct span_options {
    std::size_t key_dim = 0;        ///< channels of a key, 1 ... 1024
    std::size_t min_length = 4;     ///< tokens before similarity may end a span, 1 ... mean_length
    std::size_t mean_length = 16;   ///< one in so many neighbours is dissimilar enough to end one, up to max_length
    std::size_t max_length = 64;    ///< tokens after which a span ends in any case, up to 1024
    std::size_t rank = 4;           ///< directions of a span that the host keeps, 0 ... 16
    std::size_t zoomed_spans = 32;  ///< spans that each query sees along these directions, 0 ... 1024

    friend bool operator==(const span_options&, const span_options&) = default;
};

/// Checks the options of a span sketch.
/// Throws invalid_argument for a key_dim outside 1 ... 1024, lengths that do not ascend from 1 to 1024, a rank above 16
/// and more than 1024 zoomed spans.
inline void validate(const span_options& o) {
    detail::check(o.key_dim >= 1 && o.key_dim <= span_codes::largest_key_dim, "a span sketch of keys of ", o.key_dim,
                  " channels; it takes 1 to ", span_codes::largest_key_dim);
    detail::check(
        1 <= o.min_length && o.min_length <= o.mean_length && o.mean_length <= o.max_length && o.max_length <= 1024,
        "spans of at least ", o.min_length, ", on average ", o.mean_length, " and at most ", o.max_length,
        " tokens; these must ascend from 1 to 1024");
    detail::check(o.rank <= span_codes::largest_rank, "a span sketch of rank ", o.rank, "; it takes 0 to ",
                  span_codes::largest_rank);
    detail::check(o.zoomed_spans <= span_codes::most_zoomed, "a span sketch that zooms into ", o.zoomed_spans,
                  " spans; it takes 0 to ", span_codes::most_zoomed);
}

/// The keys of one KV head by spans of consecutive tokens (SeKV, Abaskohi et al. 2026, arXiv 2606.31145): a span has
/// one summary, the mean m of its keys, and a radius, the largest ||k - m||. A query sees the spans that weigh most for
/// it finer: k ~ m + B^T a, B [rank, key_dim] the directions in which the span's keys vary most, a = B (k - m).
///
/// On the device are means (half), radii and where spans start: bytes(). On the host are bases and coefficients (half)
/// and two norms a token: host_bytes(); an estimate moves those of zoomed_spans spans a query. Here both are in memory.
/// The last span is open: its keys are held as they are (open_bytes(), at most max_length of them), and their logits
/// are exact. It is summarised when the next token opens a span of its own, or it has max_length tokens.
/// - Spans: a token opens one where the caller says so (SeKV: where the entropy of the next token rises). Without the
///   caller's word it opens one where the span has min_length tokens and the cosine of its key with the key before it,
///   about the mean that fit() took, is below a threshold. fit() sets that to the quantile 1 / mean_length of the
///   cosines of neighbours. Only tokens before it count: every way to cut the same tokens into append() calls gives the
///   same bits.
/// - Which spans weigh most: those that may, by ln(length) + scale <q, m> + |scale| ||q|| radius, ties to the earlier
///   span. SeKV trains a selector.
/// - Bounds, for certain: |logit - estimate| <= |scale| ||q|| radius. Zoomed, as in low_rank_sketch with e = k - m -
/// B^T
///   a and p = q - B^T B q: |scale| (||p|| ||e|| + ||B q|| ||B e||). Norms are stored, rounded up.
/// - Halves are within +-65504; radius and norms are taken from what is stored. B is found by block power iteration
///   from a pivoted start: nearly the singular vectors.
/// - erase() leaves means, radii, bases and coefficients as they are. What is stored of other tokens keeps its bits,
///   but a query zooms into so many spans, so that others may be seen finer once some are gone.
/// - A key with NaN or infinity has a span of its own: its estimate is NaN and its bound infinite, of no other one.
/// One object may be read by many threads at once, or changed by one.
class span_sketch {
public:
    /// Throws as validate(options) does.
    explicit span_sketch(const span_options& options) : options_(options), closed_(options.key_dim, options.rank) {
        validate(options);
        for (std::size_t n = 0; n <= options.max_length; ++n) {
            log_length_.push_back(static_cast<float>(std::log(static_cast<double>(n))));
        }
    }

    /// Takes the mean and the threshold of similarity, and forgets all tokens.
    /// Mean of the keys whose channels are all finite, in double; cosines of neighbours that are both finite, 0 where
    /// one of them is the mean. keys [n, key_dim], in the order of their positions. 4 n key_dim multiply-adds on the
    /// caller's thread; reads the keys twice. Throws invalid_argument for keys of another width.
    template <class Backend, class T>
    void fit(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        std::vector<float> mean = detail::mean_of_finite(keys);
        std::vector<double> cosine;
        for (std::size_t i = 1; i < keys.count; ++i) {
            if (detail::finite_row(keys[i - 1], options_.key_dim) && detail::finite_row(keys[i], options_.key_dim)) {
                cosine.push_back(similarity(keys[i - 1], keys[i], mean.data()));
            }
        }
        // Strictly below the threshold a span ends.
        const std::size_t below = cosine.size() / options_.mean_length;
        double threshold = below < cosine.size() ? -2 : 2;
        if (below < cosine.size()) {
            std::nth_element(cosine.begin(), cosine.begin() + static_cast<std::ptrdiff_t>(below), cosine.end());
            threshold = cosine[below] - 1e-9;  // so that rounding ends no span
        }
        reserve_scratch();
        mean_ = std::move(mean);
        threshold_ = threshold;
        erase(0, size());
    }

    /// Adds tokens at the end, in any number of calls with the same result; spans end where keys are dissimilar.
    /// keys [n, key_dim]. 2 key_dim multiply-adds a token, and when a span is summarised, for each of its tokens,
    /// length (key_dim / 2 + 24 rank) and 3 rank key_dim: in double, on the caller's thread. Allocates nothing within
    /// what reserve() asked for. Throws invalid_argument for keys of another width, invalid_state before fit().
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys) {
        append_spans(keys, [&](std::size_t i, std::size_t length) {
            if (length < options_.min_length) {
                return false;
            }
            // The key before the first one is in the open span.
            const double cosine =
                i > 0 ? similarity(keys[i - 1], keys[i], mean_.data()) : similarity(last_open(), keys[i], mean_.data());
            return cosine < threshold_;
        });
    }

    /// The same, with spans that start where the caller says: at tokens whose `starts` is not 0, and after max_length
    /// tokens. starts [n]. Throws invalid_argument also for starts of another length.
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys, std::span<const std::uint8_t> starts) {
        detail::check(starts.size() == keys.count, starts.size(), " marks of where a span starts for ", keys.count,
                      " keys");
        append_spans(keys, [&](std::size_t i, std::size_t) { return starts[i] != 0; });
    }

    /// Makes room for so many tokens in all, so that append() up to there allocates nothing (as long as spans have
    /// min_length tokens: those that the caller cuts, or that erase() or a NaN shortened, may have less).
    void reserve(std::size_t tokens) {
        reserve_scratch();
        closed_.make_room(tokens / options_.min_length + 1, tokens, false);
    }

    /// Forgets tokens first ... last-1. What is stored of the others keeps its bits, under their new indices; spans get
    /// shorter, and are dropped when they are empty. Appending goes on in the open span if a token of it is left.
    /// truncate(n) is erase(n, size()). Moves what lies behind. Allocates nothing.
    /// Throws invalid_argument unless first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        detail::check_range(first, last, size());
        const std::size_t closed = closed_.tokens();
        const std::size_t width = options_.key_dim;
        detail::span_store::cut(open_, ((std::max)(first, closed) - closed) * width,
                                ((std::max)(last, closed) - closed) * width);
        closed_.erase((std::min)(first, closed), (std::min)(last, closed));
    }

    /// Writes the estimate of scale * <q, k> of each token: logits [queries.count, size()].
    /// queries [any count, key_dim]; scale of any sign. Reads the means once for four queries, bytes() bytes; for each
    /// query the bases and coefficients of the spans it zooms into; and writes the logits. Allocates nothing; 150 KiB
    /// of the stack at most. Means in float, the rest in double. Same bits for any chunking and any number of threads.
    /// Throws invalid_argument for queries of another width or logits of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits) const {
        detail::check_output(queries, logits, options_.key_dim, size(), "logits");
        span_estimate(exec, codes(), queries, scale, logits, nullptr);
    }

    /// The same logits, and for each a bound on its distance from scale * <q, k>: both [queries.count, size()].
    /// The bounds named above, with (key_dim + 8) 2^-24 ||m|| added to a radius for the float sum over channels, and
    /// 2^-24 of the logit; the rest in double, rounded up. Holds in round-to-nearest with gradual underflow, for finite
    /// keys and queries; where float cannot hold the estimate, the bound is infinite. Otherwise as estimate() without
    /// bounds. Throws invalid_argument also for bounds of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits,
                  matrix_view<float> bounds) const {
        detail::check_output(queries, logits, options_.key_dim, size(), "logits");
        detail::check_output(queries, bounds, options_.key_dim, size(), "bounds");
        span_estimate(exec, codes(), queries, scale, logits, &bounds);
    }

    /// 0: the bounds hold for certain.
    [[nodiscard]] static constexpr double bound_failure() noexcept { return 0; }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return closed_.tokens() + open_length(); }

    /// Spans that have been summarised.
    [[nodiscard]] std::size_t spans() const noexcept { return closed_.spans(); }

    /// Memory on the device that stands in for the keys: mean, radius and first token of each span. Not counted: the
    /// padding to 16 channels, and open_bytes().
    [[nodiscard]] std::size_t bytes() const noexcept { return spans() * closed_.span_bytes(); }

    /// Memory on the host: bases, coefficients and norms.
    [[nodiscard]] std::size_t host_bytes() const noexcept { return closed_.host_bytes(); }

    /// Memory of the open span's keys, at most 4 max_length key_dim; it does not grow with the context.
    [[nodiscard]] std::size_t open_bytes() const noexcept { return open_.capacity() * sizeof(float); }

    /// bytes() a token where spans have mean_length: key_dim 128 and 16: 16.5, 3.2 % of a bf16 cache. What they really
    /// have depends on the keys.
    [[nodiscard]] double bytes_per_token() const noexcept {
        return static_cast<double>(closed_.span_bytes()) / static_cast<double>(options_.mean_length);
    }

    [[nodiscard]] const span_options& options() const noexcept { return options_; }

    /// The cosine of neighbours below which a span ends.
    [[nodiscard]] double threshold() const noexcept { return threshold_; }

    /// The spans as they lie in memory, for a backend's span_estimate(); valid until the sketch changes.
    [[nodiscard]] span_codes codes() const noexcept {
        span_codes s;
        closed_.show(s);
        s.log_length = log_length_.data();
        s.open = open_.data();
        s.open_tokens = open_length();
        s.zoomed = options_.rank > 0 ? options_.zoomed_spans : 0;
        return s;
    }

private:
    [[nodiscard]] std::size_t open_length() const noexcept { return open_.size() / options_.key_dim; }

    /// Cosine of two keys about a mean; 0 where one of them is the mean.
    template <class A, class B>
    [[nodiscard]] double similarity(const A* a, const B* b, const float* mean) const {
        double dot = 0;
        double square_a = 0;
        double square_b = 0;
        for (std::size_t c = 0; c < options_.key_dim; ++c) {
            const double x = static_cast<double>(to_float(a[c])) - static_cast<double>(mean[c]);
            const double y = static_cast<double>(to_float(b[c])) - static_cast<double>(mean[c]);
            dot += x * y;
            square_a += x * x;
            square_b += y * y;
        }
        return square_a > 0 && square_b > 0 ? dot / std::sqrt(square_a) / std::sqrt(square_b) : 0.0;
    }

    void reserve_scratch() {
        detail::make_room(open_, options_.max_length * options_.key_dim, false);
        scratch_.reserve(options_.max_length, options_.key_dim, options_.rank);
    }

    /// Key of the last token, which is in the open span.
    [[nodiscard]] const float* last_open() const noexcept {
        return open_.data() + (open_length() - 1) * options_.key_dim;
    }

    /// Calls add(i) for each key, and close() where the open span, as long as it is then, is to be closed.
    /// starts(i, length): whether key i opens a span while the open one has so many tokens. It is asked where there is
    /// one.
    template <class T, class Starts, class Add, class Close>
    void cut_spans(const rows<T>& keys, Starts& starts, Add&& add, Close&& close) const {
        std::size_t length = open_length();
        bool whole = length == 0 || detail::finite_row(last_open(), options_.key_dim);
        for (std::size_t i = 0; i < keys.count; ++i) {
            const bool finite = detail::finite_row(keys[i], options_.key_dim);
            if (length > 0 && (!finite || !whole || starts(i, length))) {
                close();
                length = 0;
            }
            add(i);
            whole = finite;
            if (++length == options_.max_length) {
                close();
                length = 0;
            }
        }
    }

    template <class T, class Starts>
    void append_spans(const rows<T>& keys, Starts&& starts) {
        detail::check_keys(keys, options_.key_dim);
        detail::check<invalid_state>(!mean_.empty(), "append() of ", keys.count,
                                     " tokens to a span sketch before fit() took its threshold");
        // Counted first, so that adding them cannot fail half way.
        std::size_t more = 0;
        cut_spans(
            keys, starts, [](std::size_t) {}, [&] { ++more; });
        reserve_scratch();
        closed_.make_room(spans() + more, size() + keys.count, true);
        cut_spans(
            keys, starts,
            [&](std::size_t i) {
                const T* const key = keys[i];
                for (std::size_t c = 0; c < options_.key_dim; ++c) {
                    open_.push_back(to_float(key[c]));
                }
            },
            [&] {
                closed_.add(open_.data(), open_length(), scratch_);
                open_.clear();
            });
    }

    span_options options_;
    double threshold_ = -2;
    std::vector<float> mean_;
    std::vector<float> log_length_;
    detail::span_store closed_;
    std::vector<float> open_;  ///< keys of the open span
    detail::span_scratch scratch_;
};

}  // namespace verkv::inline v0
