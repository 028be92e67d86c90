// How many rows may stay, and which stay by position.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "verkv/core/error.hpp"

namespace verkv::inline v0 {

/// Expected number of resident rows of a KV head, the fixed ones of `windows` included, a sketch apart.
/// Either a fraction of the prompt or a number of tokens.
class budget {
public:
    /// A share of the prompt's tokens [VerKV Symbols, eta].
    /// Throws invalid_argument unless 0 < kept <= 1.
    [[nodiscard]] static budget fraction(double kept) {
        detail::check(kept > 0 && kept <= 1, "kept fraction is ", kept, "; it must lie in (0, 1]");
        return budget(kept, true);
    }

    /// A number of tokens, whatever the length of the prompt.
    /// Throws invalid_argument for 0.
    [[nodiscard]] static budget tokens(std::size_t count) {
        detail::check(count > 0, "a budget of 0 tokens keeps nothing");
        return budget(static_cast<double>(count), false);
    }

    /// This budget, but never fewer than so many tokens: a fraction of a short prompt would not pay for the fixed ones.
    [[nodiscard]] budget at_least(std::size_t count) const {
        budget b = *this;
        b.least_ = static_cast<double>(count);
        return b;
    }

    /// Expected resident rows of a prompt of n tokens: tokens or fraction * n, within [at_least, n]. Need not be a
    /// whole number.
    [[nodiscard]] double rows(std::size_t n) const {
        const auto all = static_cast<double>(n);
        return (std::min)(all, (std::max)(relative_ ? amount_ * all : amount_, least_));
    }

private:
    budget(double amount, bool relative) : amount_(amount), relative_(relative) {}

    double amount_;
    bool relative_;
    double least_ = 0;
};

/// Tokens that stay by position, whatever their importance [VerKV Conventions, fixed tokens]: the first `sink` and the
/// last `local` of a prompt, by index (tokens are held in order of position). Windows may overlap or exceed the prompt:
/// a token is fixed once. A length of 0 is no token.
struct windows {
    std::size_t sink = 64;
    std::size_t local = 64;

    /// First token of n that is not fixed; the free tokens are free_begin(n) ... free_end(n) - 1.
    [[nodiscard]] std::size_t free_begin(std::size_t n) const { return (std::min)(sink, n); }

    /// One past the last token of n that is not fixed; free_begin(n) where none is free.
    [[nodiscard]] std::size_t free_end(std::size_t n) const {
        return (std::max)(free_begin(n), n - (std::min)(local, n));
    }

    /// Number of fixed tokens of n.
    [[nodiscard]] std::size_t fixed_count(std::size_t n) const { return n - (free_end(n) - free_begin(n)); }

    /// Whether token i of n is fixed.
    [[nodiscard]] bool fixed(std::size_t i, std::size_t n) const { return i < free_begin(n) || i >= free_end(n); }

    friend bool operator==(const windows&, const windows&) = default;
};

}  // namespace verkv::inline v0
