// What an estimator of the field sees of a decision, what it makes of it, and what that takes.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/random.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/sample/budget.hpp"

namespace verkv::inline v0 {

/// A number of tokens beside the fixed ones: so many, or a share of the free ones.
class token_count {
public:
    /// A share of the free tokens, rounded down.
    /// Throws invalid_argument unless 0 <= part <= 1.
    [[nodiscard]] static token_count share(double part) {
        detail::check(part >= 0 && part <= 1, "a share of ", part, " of the tokens; it must lie in [0, 1]");
        return {part, 0};
    }

    /// So many tokens, or all where there are fewer.
    [[nodiscard]] static token_count tokens(std::size_t number) { return {0, number}; }

    /// The number where `free_tokens` are free.
    [[nodiscard]] std::size_t of(std::size_t free_tokens) const {
        const auto part = static_cast<std::size_t>(share_ * static_cast<double>(free_tokens));
        return (std::min)(free_tokens, part + tokens_);
    }

private:
    token_count(double part, std::size_t number) : share_(part), tokens_(number) {}

    double share_;
    std::size_t tokens_;
};

/// One query head at one step, as a baseline sees it; n tokens, token i at position i.
/// Rows of fixed tokens are in fast memory. Every other row that a method looks at is one it reads, and `selection`
/// says which those are: `weight` and `values` stand for rows, and are used only where a row is read.
template <storage T>
struct decision_view {
    std::span<const float> weight;    ///< exact, e^{s_i - m} with any shift m, [n]
    std::span<const float> estimate;  ///< by a sketch, with any shift, [n]: known of every token without its row
    rows<T> values = {};              ///< [n, value_dim]; may be empty for methods that do not look at values
    windows fixed = {};               ///< sink and local tokens: always selected, with coefficient 1
    uniform_stream stream = {};       ///< the same for every query: permanent uniforms; from fresh_stream(): fresh ones
    tolerance promise = {};           ///< for methods that choose their effort by it
};

/// What a method claims about its error: with probability at least 1 - delta it is at most `claimed_error`.
enum class claim { nothing, denominator, output };

/// The tokens that a method attends to, with their coefficients, and what it read to find them.
/// attend() over the listed rows with these log-weights computes the method's output; estimate_denominator() its D^.
struct selection {
    std::vector<token_index> token;      ///< ascending, each once, the fixed ones included
    std::vector<float> log_weight;       ///< ln c_i: token i stands for c_i of its kind
    std::vector<token_index> inspected;  ///< ascending: tokens, selected or not, that were read to decide (a pilot)
    bool inspected_values = false;       ///< whether their values were, beside their keys
    claim claims = claim::nothing;
    double claimed_error = std::numeric_limits<double>::quiet_NaN();  ///< relative; NaN where nothing is claimed
    double left_out = std::numeric_limits<double>::quiet_NaN();  ///< share of the estimated weights that no coefficient
                                                                 ///< stands for; NaN for methods that leave none out
    /// Empties it; memory is kept.
    void clear() {
        token.clear();
        log_weight.clear();
        inspected.clear();
        inspected_values = false;
        claims = claim::nothing;
        claimed_error = left_out = std::numeric_limits<double>::quiet_NaN();
    }
};

/// An estimator of the field. Nothing it knows of rows that it does not report as read.
///
///     struct workspace;   // memory that is reused from decision to decision
///     void select(const Backend&, const decision_view<T>&, workspace&, selection& out) const;
template <class B, class Backend, class T>
concept baseline = requires(const B& b, const Backend& exec, const decision_view<T>& d, typename B::workspace& w,
                            selection& out) {
    b.select(exec, d, w, out);
};

/// D^ = sum c_i w_i over the selected tokens. weight [n], exact. In double: relative error (tokens + 8) 2^-53 + 2^-24
/// max |ln c|, the log-weights being floats. Throws invalid_argument for a token that has no weight.
[[nodiscard]] inline double estimate_denominator(const selection& s, std::span<const float> weight) {
    detail::check(s.token.size() == s.log_weight.size(), s.token.size(), " tokens with ", s.log_weight.size(),
                  " log-weights");
    double total = 0;
    for (std::size_t j = 0; j < s.token.size(); ++j) {
        detail::check(s.token[j] < weight.size(), "selected token ", s.token[j], " of ", weight.size());
        total += std::exp(static_cast<double>(s.log_weight[j])) * static_cast<double>(weight[s.token[j]]);
    }
    return total;
}

/// Keys and values that are read: a row is a key and a value.
struct rows_read {
    std::size_t keys = 0;
    std::size_t values = 0;
    friend bool operator==(const rows_read&, const rows_read&) = default;
};

/// What the query heads of a group read together: each row once.
class read_tally {
public:
    /// For selections among n tokens.
    explicit read_tally(std::size_t n) : read_(n, 0) {}

    /// Adds what a selection read: all of what it selected, and the keys, perhaps values, of what it inspected. O(its
    /// size). Throws invalid_argument for a token beyond n.
    void add(const selection& s) {
        mark(s.token, key | value);
        mark(s.inspected, s.inspected_values ? key | value : key);
    }

    /// Rows that were read of the tokens i with fast(i) false. Fast memory holds the others. O(n).
    template <class Fast>
    [[nodiscard]] rows_read count(Fast&& fast) const {
        rows_read total;
        for (std::size_t i = 0; i < read_.size(); ++i) {
            if (read_[i] != 0 && !fast(i)) {
                total.keys += (read_[i] & key) != 0;
                total.values += (read_[i] & value) != 0;
            }
        }
        return total;
    }

private:
    enum : std::uint8_t { key = 1, value = 2 };

    void mark(const std::vector<token_index>& tokens, int what) {
        for (const token_index i : tokens) {
            detail::check(i < read_.size(), "token ", i, " was read of ", read_.size());
        }
        for (const token_index i : tokens) {
            read_[i] = static_cast<std::uint8_t>(read_[i] | what);
        }
    }

    std::vector<std::uint8_t> read_;
};

/// Rows that one selection read beside those of the fixed windows. O(n). Throws as read_tally.
[[nodiscard]] inline rows_read rows_read_by(const selection& s, std::size_t n, windows fixed) {
    read_tally tally(n);
    tally.add(s);
    return tally.count([&](std::size_t i) { return fixed.fixed(i, n); });
}

}  // namespace verkv::inline v0
