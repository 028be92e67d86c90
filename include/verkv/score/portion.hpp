// A number of tokens, as a count or as a share of the prompt.
#pragma once

#include <algorithm>
#include <cstddef>

#include "verkv/core/error.hpp"

namespace verkv::inline v0 {

/// How many tokens of a prompt a scorer's rule is about: so many, or a fraction of all.
class portion {
public:
    /// A share of the prompt's tokens, rounded down, but 1 of any prompt unless the share is 0.
    /// Throws invalid_argument unless 0 <= share <= 1.
    [[nodiscard]] static portion fraction(double share) {
        detail::check(share >= 0 && share <= 1, "portion of ", share, "; it must lie in [0, 1]");
        return portion(share, true);
    }

    /// So many tokens, or all there are.
    [[nodiscard]] static portion tokens(std::size_t count) { return portion(static_cast<double>(count), false); }

    /// Tokens of a prompt of n.
    [[nodiscard]] std::size_t of(std::size_t n) const {
        const auto all = static_cast<double>(n);
        const double amount = relative_ ? (amount_ > 0 ? (std::max)(1.0, amount_ * all) : 0.0) : amount_;
        return static_cast<std::size_t>((std::min)(amount, all));
    }

private:
    portion(double amount, bool relative) : amount_(amount), relative_(relative) {}

    double amount_;
    bool relative_;
};

}  // namespace verkv::inline v0
