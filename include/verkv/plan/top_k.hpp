// The k largest of n: the shortlist.
#pragma once

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/softmax_sum.hpp"

namespace verkv::inline v0 {

/// Memory of top_k().
struct top_k_workspace {
    std::vector<float> tops;   // of blocks
    std::vector<float> order;  // the same, partitioned
    std::vector<token_index> candidates;

    /// Makes top_k() over up to n scores allocation-free.
    void reserve(std::size_t n) {
        tops.reserve(n + 1);
        order.reserve(n + 1);
        candidates.reserve(n);
    }
};

/// Indices of the k largest scores, ascending; ties go to the lower index. Scores of -infinity or NaN are never chosen,
/// so fewer than k may come back. score [n]; out is overwritten. O(n) expected: the k-th largest of block maxima is a
/// bound that few scores pass. Reads the scores at most twice; allocation-free after reserve() if out has room for k.
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
    float bound = outside;
    w.tops.clear();
    for (std::size_t first = 0; first < n; first += block) {
        w.tops.push_back(detail::largest_of(score.subspan(first, smaller(block, n - first))));
    }
    if (w.tops.size() > k) {
        w.order.assign(w.tops.begin(), w.tops.end());
        const auto kth = w.order.begin() + static_cast<std::ptrdiff_t>(k - 1);
        std::nth_element(w.order.begin(), kth, w.order.end(), [](float a, float b) { return a > b; });
        bound = *kth;
    }
    w.candidates.clear();
    for (std::size_t b = 0; b < w.tops.size(); ++b) {
        if (!(w.tops[b] >= bound)) {
            continue;
        }
        const std::size_t last = smaller((b + 1) * block, n);
        for (std::size_t first = b * block; first < last; first += detail::lane_count) {
            const std::size_t count = smaller(detail::lane_count, last - first);
            if (!(detail::largest_of(score.subspan(first, count)) >= bound)) {
                continue;
            }
            for (std::size_t i = first; i < first + count; ++i) {
                if (score[i] >= bound && score[i] > outside) {
                    w.candidates.push_back(static_cast<token_index>(i));
                }
            }
        }
    }
    if (w.candidates.size() > k) {
        std::nth_element(
            w.candidates.begin(), w.candidates.begin() + static_cast<std::ptrdiff_t>(k), w.candidates.end(),
            [&](token_index a, token_index b) { return score[a] != score[b] ? score[a] > score[b] : a < b; });
        w.candidates.resize(k);
        std::sort(w.candidates.begin(), w.candidates.end());
    }
    out.assign(w.candidates.begin(), w.candidates.end());
}

}  // namespace verkv::inline v0
