// What baselines have in common: their checks, draws of tokens, and how a selection is put together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "verkv/baseline/selection.hpp"
#include "verkv/plan/top_k.hpp"

namespace verkv::inline v0::detail {

/// Checks what every baseline looks at. Throws invalid_argument.
template <class T>
void check_estimates(const decision_view<T>& d) {
    check(d.estimate.size() <= (std::numeric_limits<position_t>::max)(), d.estimate.size(),
          " tokens are more than positions can count");
}

/// Checks that there is an exact weight for each estimate. Throws invalid_argument.
template <class T>
void check_weights(const decision_view<T>& d) {
    check_estimates(d);
    check(d.weight.size() == d.estimate.size(), d.weight.size(), " exact weights and ", d.estimate.size(),
          " estimates");
}

/// Numbers in [0, 1), one after the other, of a stream.
class uniform_sequence {
public:
    explicit uniform_sequence(const uniform_stream& s) : stream_(s) {}

    double next() { return uniform(stream_, next_++); }

    /// A whole number in 0 ... count-1, each with a probability that is off by 2^-53 at most. count > 0.
    std::size_t below(std::size_t count) {
        return (std::min)(count - 1, static_cast<std::size_t>(next() * static_cast<double>(count)));
    }

private:
    uniform_stream stream_;
    position_t next_ = 0;
};

/// Puts `count` of the items from `first` on, drawn without replacement, at `first`: the start of a shuffle (Fisher and
/// Yates, Durstenfeld 1964). first + count <= items.size(). O(count).
inline void draw_to_front(std::span<token_index> items, std::size_t first, std::size_t count, uniform_sequence& u) {
    for (std::size_t j = first; j < first + count; ++j) {
        std::swap(items[j], items[j + u.below(items.size() - j)]);
    }
}

/// The `count` free tokens with the largest estimates, ascending; ties go to the lower index, and what is -infinity or
/// NaN is never chosen. O(n) expected.
template <class T>
void choose_heavy(const cpu& exec, const decision_view<T>& d, std::size_t count, top_k_workspace& w,
                  std::vector<token_index>& heavy) {
    const std::size_t n = d.estimate.size();
    const std::size_t first = d.fixed.free_begin(n);
    top_k(exec, d.estimate.subspan(first, d.fixed.free_end(n) - first), count, w, heavy);
    for (token_index& i : heavy) {
        i += static_cast<token_index>(first);
    }
}

/// A free token with its coefficient's logarithm.
struct weighted_token {
    token_index token;
    float log_weight;
};

/// The fixed tokens and the given free ones, each of which occurs once; `fixed_log_weight` is that of the fixed ones.
/// Sorts `chosen`.
inline void write_selection(windows fixed, std::size_t n, std::vector<weighted_token>& chosen, float fixed_log_weight,
                            selection& out) {
    std::sort(chosen.begin(), chosen.end(), [](const auto& a, const auto& b) { return a.token < b.token; });
    const auto add_fixed = [&](std::size_t first, std::size_t last) {
        for (std::size_t i = first; i < last; ++i) {
            out.token.push_back(static_cast<token_index>(i));
            out.log_weight.push_back(fixed_log_weight);
        }
    };
    add_fixed(0, fixed.free_begin(n));
    for (const weighted_token& c : chosen) {
        out.token.push_back(c.token);
        out.log_weight.push_back(c.log_weight);
    }
    add_fixed(fixed.free_end(n), n);
}

/// Every token with coefficient 1: dense attention.
inline void select_everything(std::size_t n, selection& out) {
    out.token.resize(n);
    std::iota(out.token.begin(), out.token.end(), token_index{0});
    out.log_weight.assign(n, 0.0f);
}

/// Share of the estimated weights that belongs to tokens that are not selected: summed as it is, not as a difference.
/// Estimates that are NaN or not positive count 0. 0 where all is selected.
inline double share_left_out(std::span<const float> estimate, const selection& s) {
    double inside = 0;
    double outside = 0;
    std::size_t next = 0;
    for (std::size_t i = 0; i < estimate.size(); ++i) {
        const bool selected = next < s.token.size() && s.token[next] == i;
        next += selected;
        (selected ? inside : outside) += estimate[i] > 0 ? static_cast<double>(estimate[i]) : 0.0;
    }
    return outside == 0 ? 0 : outside / (inside + outside);
}

}  // namespace verkv::inline v0::detail
