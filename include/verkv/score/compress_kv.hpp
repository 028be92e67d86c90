// Window attention of the few heads that retrieve.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/snapkv.hpp"

namespace verkv::inline v0 {

/// CompressKV (Lin et al. 2025, arXiv 2508.02401): SnapKV's window attention, of a layer's semantic retrieval heads
/// alone.
/// Score of token i < n - window: mean over the chosen query heads of pool_w(snapkv{window})[i], the same for every KV
/// head of the layer. The last `window` tokens get 1. In [0, 1]: the paper's sum over the window's queries is this
/// times their number, which ranks tokens alike.
/// heads: query heads of the layer, from retrieval_head_scores::best() say; the paper takes 4. The memory stays the
/// caller's. score_layer() finds the scores once for all KV heads, score() for each again, with the same bits.
/// Costs, errors and NaN as snapkv, for each chosen head; their mean in double.
/// Throws invalid_argument for no head, one that does not exist or comes twice, an even pool_width, and as snapkv.
struct compress_kv {
    std::span<const std::size_t> heads;  ///< query heads that look
    std::size_t window = 8;
    std::size_t pool_width = 5;

    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        const std::vector<float> scores = of_layer(exec, p);
        std::copy(scores.begin(), scores.end(), out.begin());
    }

    template <class Backend, class T>
    void score_layer(const Backend& exec, const prompt<T>& p, matrix_view<float> out) const {
        detail::scoring::check_layer(p, out);
        const std::vector<float> scores = of_layer(exec, p);
        for (std::size_t h = 0; h < out.rows; ++h) {
            std::copy(scores.begin(), scores.end(), out.row(h).begin());
        }
    }

private:
    template <class Backend, class T>
    std::vector<float> of_layer(const Backend& exec, const prompt<T>& p) const {
        detail::check(!heads.empty(), "compress_kv needs at least one query head to look at");
        for (std::size_t i = 0; i < heads.size(); ++i) {
            detail::check(heads[i] < p.shape.query_heads, "there is no query head ", heads[i], " among ",
                          p.shape.query_heads);
            detail::check(std::count(heads.begin(), heads.end(), heads[i]) == 1, "query head ", heads[i],
                          " comes twice");
        }
        const std::size_t n = p.tokens();
        std::vector<float> scores(n);
        std::vector<double> sum(n);
        const auto looking = smoothed(pool_width, pooling::average, snapkv{window, 0.0f});
        for (const std::size_t head : heads) {
            looking.score_head(exec, p, head, std::span<float>(scores));
            std::transform(scores.begin(), scores.end(), sum.begin(), sum.begin(),
                           [](float x, double s) { return s + static_cast<double>(x); });
        }
        // What pooling took into the window from outside is written over.
        const std::size_t scored = n - (std::min)(n, window);
        for (std::size_t i = 0; i < n; ++i) {
            scores[i] = i < scored ? static_cast<float>(sum[i] / static_cast<double>(heads.size())) : 1.0f;
        }
        return scores;
    }
};

}  // namespace verkv::inline v0
