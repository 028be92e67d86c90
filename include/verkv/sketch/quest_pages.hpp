// Quest's sketch: the smallest and the largest value of each channel over a page of tokens.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/quest_page_estimate.hpp"
#include "verkv/sketch/detail/checks.hpp"

namespace verkv::inline v0 {

/// Shape of a page sketch; the page length is the paper's.
struct quest_page_options {
    std::size_t key_dim = 0;       ///< channels of a key, 1 ... 65536
    std::size_t page_length = 16;  ///< consecutive tokens that share their extremes; at least 1

    friend bool operator==(const quest_page_options&, const quest_page_options&) = default;
};

/// Checks the options of a page sketch.
/// Throws invalid_argument for a key_dim outside 1 ... 65536 and a page_length of 0 or above 2^31.
inline void validate(const quest_page_options& o) {
    detail::check(o.key_dim >= 1 && o.key_dim <= 65536, "a page sketch of keys of ", o.key_dim,
                  " channels; it takes 1 to 65536");
    detail::check(o.page_length >= 1 && o.page_length <= std::size_t{1} << 31, "page_length is ", o.page_length,
                  "; it must be between 1 and 2^31");
}

namespace detail {

/// Largest half that is at most x, |x| <= 65504.
[[nodiscard]] inline half half_below(double x) {
    // Between two halves next to 0 every value rounds outward alike; one of them that float holds stands for all.
    const double tiny = 0x1p-30;
    const auto value = static_cast<float>(x > 0 && x < tiny ? tiny : x < 0 && x > -tiny ? -tiny : x);
    const half nearest = from_float<half>(value);
    if (to_float(nearest) <= value) {
        return nearest;
    }
    const unsigned bits = nearest.bits;
    if ((bits & 0x7fffu) == 0) {
        return half{0x8001u};
    }
    return half{static_cast<std::uint16_t>(bits & 0x8000u ? bits + 1 : bits - 1)};
}

/// Smallest half that is at least x, |x| <= 65504.
[[nodiscard]] inline half half_above(double x) {
    return half{static_cast<std::uint16_t>(half_below(-x).bits ^ 0x8000u)};
}

}  // namespace detail

/// The keys of one KV head by pages of consecutive tokens: for each channel the smallest and the largest value (Quest,
/// Tang et al. 2024, arXiv 2406.10774). It bounds every logit for certain:
/// sum_c min(q_c low_c, q_c high_c) <= <q, k> <= sum_c max(q_c low_c, q_c high_c) for each token of the page.
///
/// The estimate is the middle, sum_c q_c (low_c + high_c) / 2; the bound half the distance, sum_c |q_c| (high_c -
/// low_c) / 2. All tokens of a page have the same estimate.
/// - low and high are halves, rounded outward: exact for keys of half, and for those of bfloat16 as far as a half's
///   range goes. A page with a value above 65504 has them in multiples of the power of two that fits.
/// - The last page holds over the tokens it has. Every way to cut the same tokens into append() calls gives the same
///   bits.
/// - erase() leaves a page's extremes as they are, also those of the last page that goes on filling: they bound the
///   tokens that are left, though no longer tightly. Pages get shorter, and are dropped when they are empty.
/// - NaN or infinity in a key makes every estimate of its page NaN and every bound infinite, of no other page.
/// One object may be read by many threads at once, or changed by one.
class quest_page_sketch {
public:
    /// Throws as validate(options) does.
    explicit quest_page_sketch(const quest_page_options& options) : options_(options) {
        validate(options);
        padded_ = (options.key_dim + block - 1) / block * block;
    }

    /// Forgets all tokens; the keys teach it nothing. Throws invalid_argument for keys of another width.
    template <class Backend, class T>
    void fit(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        erase(0, tokens_);
        open_ = false;
    }

    /// Adds tokens at the end, in any number of calls with the same result.
    /// keys [n, key_dim]. Reads n key_dim elements on the caller's thread and writes the extremes of the pages they
    /// fall in. Allocates nothing within what reserve() asked for. Throws invalid_argument for keys of another width.
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        if (keys.count == 0) {
            return;
        }
        make_room(keys.count, true);
        for (std::size_t i = 0; i < keys.count;) {
            const bool fresh = !open_;
            if (fresh) {
                extremes_.resize(extremes_.size() + 2 * padded_, half{0u});
                unit_.push_back(1.0f);
                first_token_.push_back(tokens_);
                open_extremes_.resize(2 * options_.key_dim);
                open_length_ = 0;
                open_ = true;
            }
            const std::size_t added = (std::min)(keys.count - i, options_.page_length - open_length_);
            for (std::size_t t = 0; t < added; ++t) {
                detail::widen_page(keys[i + t], options_.key_dim, fresh && t == 0, open_extremes_.data(),
                                   open_extremes_.data() + options_.key_dim);
            }
            store_page(pages() - 1);
            tokens_ += added;
            open_length_ += added;
            i += added;
            open_ = open_length_ < options_.page_length;
        }
    }

    /// Makes room for so many tokens in all, so that append() up to there allocates nothing (as long as no page was
    /// shortened by erase()).
    void reserve(std::size_t tokens) {
        if (tokens > tokens_) {
            make_room(tokens - tokens_, false);
        }
    }

    /// Forgets tokens first ... last-1; estimates and bounds of the others keep their bits, under their new indices.
    /// Appending goes on in the last page if that is still open and has a token left, up to page_length tokens; else it
    /// starts a new page. Moves what lies behind. Allocates nothing.
    /// Throws invalid_argument unless first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        detail::check_range(first, last, tokens_);
        if (first == last) {
            return;
        }
        const std::size_t old_pages = pages();
        std::size_t kept_pages = 0;
        std::size_t kept_tokens = 0;
        for (std::size_t p = 0; p < old_pages; ++p) {
            const std::size_t begin = first_token_[p];
            const std::size_t end = p + 1 < old_pages ? first_token_[p + 1] : tokens_;
            const std::size_t from = (std::min)((std::max)(first, begin), end);
            const std::size_t to = (std::min)((std::max)(last, begin), end);
            const std::size_t left = end - begin - (to - from);
            if (open_ && p + 1 == old_pages) {
                open_length_ = left;
                open_ = left > 0;
            }
            if (left == 0) {
                continue;
            }
            if (p != kept_pages) {
                std::copy_n(extremes_.begin() + static_cast<std::ptrdiff_t>(p * 2 * padded_), 2 * padded_,
                            extremes_.begin() + static_cast<std::ptrdiff_t>(kept_pages * 2 * padded_));
                unit_[kept_pages] = unit_[p];
            }
            first_token_[kept_pages] = kept_tokens;
            kept_tokens += left;
            ++kept_pages;
        }
        extremes_.resize(kept_pages * 2 * padded_);
        unit_.resize(kept_pages);
        first_token_.resize(kept_pages);
        tokens_ = kept_tokens;
    }

    /// Writes the middle of the logits that each token's page allows: logits [queries.count, size()].
    /// queries [any count, key_dim]; scale of any sign. Reads the extremes once for all queries, bytes() bytes, and
    /// writes the logits. Allocates nothing. Same bits for any chunking and any number of threads. Throws
    /// invalid_argument for queries of another width or logits of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits) const {
        detail::check_output(queries, logits, options_.key_dim, tokens_, "logits");
        quest_page_estimate(exec, pages_view(), queries, scale, logits, nullptr);
    }

    /// The same logits, and for each a bound on its distance from scale * <q, k>: both [queries.count, size()].
    /// b = (W + g S) / (1 - g) + 2^-24 |estimate| with W = |scale| sum_c |q_c| (high_c - low_c) / 2, S = |scale| sum_c
    /// |q_c| max(|low_c|, |high_c|) and g = n 2^-24 / (1 - n 2^-24), n = key_dim + 4: the sums are in float, and no
    /// term is rounded more often (Higham 2002, Lemma 3.1). The rest is in double, rounded up; 2^-148 |scale| key_dim
    /// covers products below the normal floats. Holds in round-to-nearest with gradual underflow, for finite keys and
    /// queries; where float cannot hold the estimate, the bound is infinite. Otherwise as estimate() without bounds.
    /// Throws invalid_argument also for bounds of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits,
                  matrix_view<float> bounds) const {
        detail::check_output(queries, logits, options_.key_dim, tokens_, "logits");
        detail::check_output(queries, bounds, options_.key_dim, tokens_, "bounds");
        quest_page_estimate(exec, pages_view(), queries, scale, logits, &bounds);
    }

    /// 0: the bounds hold for certain.
    [[nodiscard]] static constexpr double bound_failure() noexcept { return 0; }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return tokens_; }

    /// Memory that stands in for the keys: 4 key_dim + 4 bytes a page (extremes, unit). Not counted: their padding to
    /// 16 channels, and open_bytes().
    [[nodiscard]] std::size_t bytes() const noexcept {
        return pages() * (2 * options_.key_dim * sizeof(half) + sizeof(float));
    }

    /// Memory of the open page's extremes before rounding, 2 key_dim floats; it does not grow with the context.
    [[nodiscard]] std::size_t open_bytes() const noexcept { return open_extremes_.capacity() * sizeof(float); }

    /// bytes() a token where all pages are full: key_dim 128 and pages of 16: 32.25, 6.3 % of a bf16 cache.
    [[nodiscard]] double bytes_per_token() const noexcept {
        return static_cast<double>(2 * options_.key_dim * sizeof(half) + sizeof(float)) /
               static_cast<double>(options_.page_length);
    }

    [[nodiscard]] const quest_page_options& options() const noexcept { return options_; }

    /// The extremes as they lie in memory, for a backend's quest_page_estimate(); valid until the sketch changes.
    [[nodiscard]] quest_pages pages_view() const noexcept {
        return {extremes_.data(), unit_.data(), first_token_.data(), pages(), tokens_, options_.key_dim, padded_};
    }

private:
    static constexpr std::size_t block = 16;

    [[nodiscard]] std::size_t pages() const noexcept { return first_token_.size(); }

    /// Room for `more` tokens, so that adding them cannot fail half way.
    void make_room(std::size_t more, bool geometric) {
        const std::size_t length = options_.page_length;
        const std::size_t rest = more - (std::min)(more, open_ ? length - open_length_ : 0);
        const std::size_t new_pages = pages() + (rest + length - 1) / length;
        detail::make_room(first_token_, new_pages, geometric);
        detail::make_room(unit_, new_pages, geometric);
        detail::make_room(extremes_, new_pages * 2 * padded_, geometric);
        detail::make_room(open_extremes_, 2 * options_.key_dim, false);
    }

    /// Rounds the open page's extremes outward.
    void store_page(std::size_t page) {
        const float* const low = open_extremes_.data();
        const float* const high = low + options_.key_dim;
        float most = 0;
        for (std::size_t c = 0; c < options_.key_dim; ++c) {
            most = larger(larger(-low[c], high[c]), most);  // the old one where the new one is NaN
        }
        constexpr float half_max = 65504;
        int exponent = 0;
        while (std::ldexp(most, -exponent) > half_max) {
            ++exponent;
        }
        const double inverse = std::ldexp(1.0, -exponent);
        unit_[page] = std::ldexp(1.0f, exponent);
        half* const lowest = extremes_.data() + page * 2 * padded_;
        half* const highest = lowest + padded_;
        for (std::size_t c = 0; c < options_.key_dim; ++c) {
            const bool finite = low[c] == low[c];
            lowest[c] = finite ? detail::half_below(static_cast<double>(low[c]) * inverse) : half{0x7e00u};
            highest[c] = finite ? detail::half_above(static_cast<double>(high[c]) * inverse) : half{0x7e00u};
        }
    }

    quest_page_options options_;
    std::size_t padded_ = 0;
    std::vector<half> extremes_;
    std::vector<float> unit_;
    std::vector<std::size_t> first_token_;
    std::vector<float>
        open_extremes_;  ///< of the last page while it is open, not rounded: [lowest or highest][channel]
    std::size_t open_length_ = 0;
    std::size_t tokens_ = 0;
    bool open_ = false;
};

}  // namespace verkv::inline v0
