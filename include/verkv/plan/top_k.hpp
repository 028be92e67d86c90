// The k largest of n: the shortlist.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/softmax_sum.hpp"

namespace verkv::inline v0 {

namespace detail {

/// A float that k of the values reach, and few more: the lower edge of an eighth of an octave. -infinity where fewer
/// than k are above it. One pass; NaN counts as the smallest.
class rough_quantile {
public:
    [[nodiscard]] float operator()(std::span<const float> values, std::size_t k) {
        count_.fill(0);
        for (const float x : values) {
            ++count_[key_of(x)];
        }
        std::size_t found = 0;
        for (std::uint32_t key = keys; key-- > 0;) {
            found += count_[key];
            if (found >= k) {
                return edge_of(key);
            }
        }
        return -std::numeric_limits<float>::infinity();
    }

private:
    // The upper bits of floats, negative ones turned round: keys are ordered as the floats are.
    static constexpr unsigned shift = 20;
    static constexpr std::uint32_t keys = 1u << (32 - shift);
    static constexpr std::uint32_t sign = 0x80000000u;

    static std::uint32_t key_of(float x) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(x == x ? x : -std::numeric_limits<float>::infinity());
        return ((bits & sign) != 0 ? ~bits : bits | sign) >> shift;
    }

    static float edge_of(std::uint32_t key) {
        const std::uint32_t bits = key << shift;
        const auto edge = std::bit_cast<float>((bits & sign) != 0 ? bits & ~sign : ~bits);
        return edge == edge ? edge : -std::numeric_limits<float>::infinity();  // below -infinity lie none
    }

    std::array<std::uint32_t, keys> count_;
};

inline namespace VERKV_LANES_NAMESPACE {

/// Calls use(i) for every score of first ... last - 1 that is at least `bound` and above -infinity, by index.
template <class Use>
VERKV_ALWAYS_INLINE void for_scores_from(std::span<const float> score, std::size_t first, std::size_t last, float bound,
                                         Use&& use) {
    const lanes outside = broadcast(-std::numeric_limits<float>::infinity());
    for (; first < last; first += lane_count) {
        const std::size_t count = smaller(lane_count, last - first);
        const lanes s = count == lane_count ? load(score.data() + first) : load_first(score.data() + first, count);
        const int_lanes in = s >= bound;
        const int_lanes above = s > outside;
        for (std::uint32_t bits = bits_of(in & above) & ((1u << count) - 1); bits != 0; bits &= bits - 1) {
            use(first + static_cast<std::size_t>(std::countr_zero(bits)));
        }
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace detail

/// Memory of top_k().
struct top_k_workspace {
    std::vector<float> tops;    // of blocks
    std::vector<float> scores;  // of the candidates
    std::vector<float> order;   // the same, partitioned
    std::vector<token_index> candidates;
    detail::rough_quantile quantile;

    /// Makes top_k() over up to n scores allocation-free.
    void reserve(std::size_t n) {
        for (auto* v : {&tops, &order, &scores}) {
            v->reserve(n + 1);
        }
        candidates.reserve(n);
    }
};

/// Indices of the k largest scores, ascending; ties go to the lower index. Scores of -infinity or NaN are never chosen,
/// so fewer than k may come back. score [n]; out is overwritten. O(n) expected: k of the block maxima, and few other
/// scores, pass a bound that is found from a histogram of them. Reads the scores at most twice; allocation-free after
/// reserve() if out has room for k.
inline void top_k(const cpu&, std::span<const float> score, std::size_t k, top_k_workspace& w,
                  std::vector<token_index>& out) {
    constexpr float outside = -std::numeric_limits<float>::infinity();
    out.clear();
    if (k == 0) {
        return;
    }
    const std::size_t n = score.size();
    // Some two blocks for each that is asked for, of whole vectors where there are enough scores.
    const std::size_t wanted = smaller<std::size_t>(64, n / (2 * smaller(k, n + 1)) + 1);
    const std::size_t block = wanted > detail::lane_count ? wanted - wanted % detail::lane_count : wanted;
    w.tops.clear();
    for (std::size_t first = 0; first < n; first += block) {
        w.tops.push_back(detail::largest_of(score.subspan(first, smaller(block, n - first))));
    }
    const float bound = w.tops.size() > k ? w.quantile(w.tops, k) : outside;
    w.candidates.clear();
    w.scores.clear();
    for (std::size_t b = 0; b < w.tops.size(); ++b) {
        if (!(w.tops[b] >= bound)) {
            continue;
        }
        detail::for_scores_from(score, b * block, smaller((b + 1) * block, n), bound, [&](std::size_t i) {
            w.candidates.push_back(static_cast<token_index>(i));
            w.scores.push_back(score[i]);
        });
    }
    if (w.candidates.size() <= k) {
        out.assign(w.candidates.begin(), w.candidates.end());
        return;
    }
    w.order.assign(w.scores.begin(), w.scores.end());
    const auto kth = w.order.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(w.order.begin(), kth, w.order.end(), [](float a, float b) { return a > b; });
    const float last = *kth;
    auto ties = k - static_cast<std::size_t>(
                        std::count_if(w.scores.begin(), w.scores.end(), [&](float s) { return s > last; }));
    for (std::size_t i = 0; i < w.candidates.size(); ++i) {
        if (w.scores[i] > last || (w.scores[i] == last && ties > 0)) {
            ties -= w.scores[i] == last ? 1 : 0;
            out.push_back(w.candidates[i]);
        }
    }
}

}  // namespace verkv::inline v0
