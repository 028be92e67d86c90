// The sketch that keeps the keys themselves: what a perfect sketch would give.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/detail/product.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/sketch/detail/checks.hpp"

namespace verkv::inline v0 {

/// A copy of the keys of one KV head, and exact logits from it: the "perfect sketch" of [VerKV Table "Figures"].
/// For experiments and tests; it costs as much memory as the keys. T is the element type of the keys.
/// A NaN in a key shows in that token's logit, in no other one.
/// One object may be read by many threads at once, or changed by one.
template <storage T>
class exact_sketch {
public:
    /// The estimate is the logit itself: no shortlist is needed.
    static constexpr bool exact = true;

    /// Takes the width of the keys and forgets all tokens. Throws invalid_argument for keys of width 0.
    template <class Backend>
    void fit(const Backend&, rows<T> keys) {
        detail::check(keys.width > 0, "an exact sketch of keys of 0 channels; they must have at least one");
        key_dim_ = keys.width;
        keys_.clear();
    }

    /// Adds tokens at the end, in any number of calls with the same result. keys [n, key_dim]; copies their elements.
    /// Allocates nothing within what reserve() asked for.
    /// Throws invalid_argument for keys of another width than fit() saw, or more bytes of them than a size counts;
    /// invalid_state before fit().
    template <class Backend>
    void append(const Backend&, rows<T> keys) {
        detail::check<invalid_state>(key_dim_ > 0, "append() of ", keys.count,
                                     " tokens to an exact sketch before fit()");
        detail::check_keys(keys, key_dim_);
        const std::size_t needed = keys_.size() + elements(keys.count);
        if (needed > keys_.capacity()) {
            keys_.reserve(needed > 2 * keys_.capacity() ? needed : 2 * keys_.capacity());
        }
        for (std::size_t i = 0; i < keys.count; ++i) {
            keys_.insert(keys_.end(), keys[i], keys[i] + key_dim_);
        }
    }

    /// Makes room for so many tokens in all. Call after fit().
    /// Throws invalid_argument for more bytes than a size counts.
    void reserve(std::size_t tokens) { keys_.reserve(elements(tokens)); }

    /// Forgets tokens first ... last-1; the logits of the others keep their bits, under their new indices.
    /// Throws invalid_argument unless first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        detail::check_range(first, last, size());
        keys_.erase(keys_.begin() + static_cast<std::ptrdiff_t>(first * key_dim_),
                    keys_.begin() + static_cast<std::ptrdiff_t>(last * key_dim_));
    }

    /// Writes scale * <q, k> of each token by score_rows(): logits [queries.count, size()].
    /// queries [any count, key_dim]. Reads the keys once for all queries. Allocates nothing. Accumulation and error
    /// bound: those of the backend's score_rows(). Throws invalid_argument for queries of another width or logits of
    /// another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits) const {
        detail::check(key_dim_ == 0 || queries.width == key_dim_, "queries have ", queries.width,
                      " channels; the sketch is of keys of ", key_dim_);
        detail::check(logits.rows == queries.count && logits.columns == size(), "logits are [", logits.rows, ", ",
                      logits.columns, "] for ", queries.count, " queries and a sketch of ", size(), " tokens");
        detail::check(logits.rows < 2 || logits.stride >= static_cast<std::ptrdiff_t>(logits.columns),
                      "rows of logits, ", logits.columns, " long, overlap with stride ", logits.stride);
        if (queries.count == 0 || keys_.empty()) {
            return;
        }
        detail::check(queries.data != nullptr && logits.data != nullptr, "estimate() got a null pointer for ",
                      queries.count, " queries or their logits");
        score_rows(exec, queries, scale, contiguous_rows(std::span<const T>(keys_), key_dim_), logits);
    }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return key_dim_ == 0 ? 0 : keys_.size() / key_dim_; }

    /// Memory of the keys.
    [[nodiscard]] std::size_t bytes() const noexcept { return keys_.size() * sizeof(T); }

    /// bytes() a token.
    [[nodiscard]] double bytes_per_token() const noexcept { return static_cast<double>(key_dim_ * sizeof(T)); }

private:
    [[nodiscard]] std::size_t elements(std::size_t tokens) const {
        return detail::product("exact sketch", tokens, key_dim_, sizeof(T)) / sizeof(T);
    }

    std::vector<T> keys_;
    std::size_t key_dim_ = 0;
};

}  // namespace verkv::inline v0
