// Which heads look back at what they say: found once for a model, over runs with a needle in the text.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/score/detail/attention_blocks.hpp"

namespace verkv::inline v0 {

using token_id = std::int32_t;  ///< of a tokenizer's vocabulary

/// Recall of ROUGE-1 (Lin 2004) on token ids: how much of the reference's tokens the generated ones repeat.
/// sum over ids of min(times in reference, times in generated) / tokens of the reference, in [0, 1]. Multiply by 100
/// for the scale in which papers print it. Order does not count.
/// Time O(n log n), copies both. Throws invalid_argument for an empty reference.
[[nodiscard]] inline double rouge1_recall(std::span<const token_id> reference, std::span<const token_id> generated) {
    detail::check(!reference.empty(), "rouge1_recall has a reference of 0 tokens; it needs at least 1");
    std::vector<token_id> a(reference.begin(), reference.end());
    std::vector<token_id> b(generated.begin(), generated.end());
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    std::size_t common = 0;
    for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
        if (a[i] == b[j]) {
            ++common;
            ++i;
            ++j;
        } else {
            ++(a[i] < b[j] ? i : j);
        }
    }
    return static_cast<double>(common) / static_cast<double>(a.size());
}

/// Attention that every query head of one kept query gives tokens first ... last-1 together.
/// out[h] = sum of softmax(scale <q_h, K>)[i] over the span, the softmax over all tokens at or before the query's
/// position; [query_heads], in [0, 1].
/// Time O(query_heads n d), reads every key G times. Float attention, sums in double: relative error about |logit|
/// units roundoff. Same bits for any number of threads. NaN in a key that the query sees makes its heads NaN.
/// Throws invalid_argument for a query or a span that does not exist, or an out of another length.
template <class Backend, class T>
void span_attention(const Backend& exec, const prompt<T>& p, std::size_t query, std::size_t first, std::size_t last,
                    std::span<float> out) {
    validate(p);
    detail::check(query < p.queries.tokens, "there is no kept query ", query, " among ", p.queries.tokens);
    detail::check(first <= last && last <= p.tokens(), "there is no span of tokens ", first, " to ", last, " among ",
                  p.tokens());
    detail::check(out.size() == p.shape.query_heads, "attention of ", p.shape.query_heads,
                  " query heads does not fit a span of ", out.size());
    constexpr std::size_t block = detail::scoring::block_keys;
    std::vector<double> sums((p.tokens() + block - 1) / block);
    for (std::size_t h = 0; h < out.size(); ++h) {
        const T* const row = p.queries.row(query, h);
        std::fill(sums.begin(), sums.end(), 0.0);
        detail::scoring::attention_blocks(
            exec, p.keys[h / p.shape.group()], p.positions, std::span<const T* const>(&row, 1),
            p.query_positions.subspan(query, 1), p.shape.logit_scale(),
            [&](std::size_t, std::size_t start, const float* e, std::size_t count, float factor) {
                double sum = 0;
                for (std::size_t i = (std::max)(start, first); i < (std::min)(start + count, last); ++i) {
                    sum += static_cast<double>(e[i - start]);
                }
                sums[start / block] = sum * static_cast<double>(factor);
            });
        out[h] = static_cast<float>(std::accumulate(sums.begin(), sums.end(), 0.0));
    }
}

/// Finds semantic retrieval heads (CompressKV; Lin et al. 2025, arXiv 2508.02401).
/// A run: a needle is put in a long text, the model is asked for it and decodes (the authors: up to 50 tokens). Of each
/// generated token that is one of the needle's, every head is credited with the attention that the token's query
/// gave to the *whole* needle (not just to the token copied, as for plain retrieval heads). Runs whose answer misses
/// the needle (ROUGE-1 recall of at most 0.5) do not count. A head's score is its credit a run.
///
///     retrieval_head_scores found(layers, query_heads);
///     for each run:
///         found.begin(needle);
///         for each decoded token, for each layer:
///             if (found.counts(token)) found.add(layer, mass);     // [query_heads], from span_attention() say
///         found.finish(rouge1_recall(needle, generated));
///     auto heads = found.best(layer, 4);                           // for compress_kv
///
/// Sums in double, in the order of the calls. One object may be read by many threads, or changed by one.
class retrieval_head_scores {
public:
    /// Throws invalid_argument for no layer or no head.
    retrieval_head_scores(std::size_t layers, std::size_t query_heads) : layers_(layers), heads_(query_heads) {
        detail::check(layers > 0 && query_heads > 0, "retrieval_head_scores of ", layers, " layers and ", query_heads,
                      " query heads; both must be positive");
        total_.resize(detail::product("scores of heads", layers, query_heads));
        run_.resize(total_.size());
    }

    /// Starts a run. needle: its token ids, in any order.
    /// Throws invalid_argument for an empty needle, invalid_state where a run has not been finished.
    void begin(std::span<const token_id> needle) {
        detail::check<invalid_state>(needle_.empty(), "begin() of run ", runs_ + 1, " before finish() of the last one");
        detail::check(!needle.empty(), "a needle of 0 tokens");
        std::vector<token_id> sorted(needle.begin(), needle.end());
        std::sort(sorted.begin(), sorted.end());
        needle_ = std::move(sorted);
        std::fill(run_.begin(), run_.end(), 0.0);
    }

    /// Whether a generated token is one of the needle's: only then is its attention asked for. False between runs.
    [[nodiscard]] bool counts(token_id token) const {
        return std::binary_search(needle_.begin(), needle_.end(), token);
    }

    /// Credits the heads of a layer. mass: [query_heads], the attention each gave to the needle as the token was made.
    /// Throws invalid_argument for a layer that does not exist, another number of heads, or a mass that is negative or
    /// not finite; invalid_state outside a run.
    void add(std::size_t layer, std::span<const float> mass) {
        detail::check<invalid_state>(!needle_.empty(), "add() before begin()");
        detail::check(layer < layers_, "there is no layer ", layer, " among ", layers_);
        detail::check(mass.size() == heads_, "attention of ", mass.size(), " query heads; there are ", heads_);
        for (std::size_t h = 0; h < heads_; ++h) {
            detail::check(std::isfinite(mass[h]) && mass[h] >= 0, "attention of query head ", h, " is ", mass[h]);
        }
        for (std::size_t h = 0; h < heads_; ++h) {
            run_[layer * heads_ + h] += static_cast<double>(mass[h]);
        }
    }

    /// Ends a run and says whether it counts: where recall > least_recall.
    /// Throws invalid_argument for a recall outside [0, 1] (a percentage, say), invalid_state outside a run.
    bool finish(double recall, double least_recall = 0.5) {
        detail::check<invalid_state>(!needle_.empty(), "finish() before begin()");
        detail::check(recall >= 0 && recall <= 1, "recall is ", recall, "; it must lie in [0, 1]");
        needle_.clear();
        if (!(recall > least_recall)) {
            return false;
        }
        ++runs_;
        for (std::size_t i = 0; i < total_.size(); ++i) {
            total_[i] += run_[i];
        }
        return true;
    }

    /// Runs that count.
    [[nodiscard]] std::size_t runs() const { return runs_; }

    /// Mean credit of a head over the runs that count; 0 before the first.
    /// Throws invalid_argument for a head that does not exist.
    [[nodiscard]] double score(std::size_t layer, std::size_t head) const {
        detail::check(layer < layers_ && head < heads_, "there is no query head ", head, " of layer ", layer, " among ",
                      heads_, " of ", layers_, " layers");
        return runs_ > 0 ? total_[layer * heads_ + head] / static_cast<double>(runs_) : 0;
    }

    /// The `count` heads of a layer with the highest scores, best first; equal scores to the lower head.
    /// Throws invalid_argument for a layer that does not exist, or more heads than it has.
    [[nodiscard]] std::vector<std::size_t> best(std::size_t layer, std::size_t count) const {
        detail::check(layer < layers_ && count <= heads_, "there are no ", count, " query heads of layer ", layer,
                      "; there are ", layers_, " layers of ", heads_);
        std::vector<std::size_t> order(heads_);
        std::iota(order.begin(), order.end(), std::size_t{0});
        const double* of = total_.data() + layer * heads_;
        std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return of[a] > of[b]; });
        order.resize(count);
        return order;
    }

private:
    std::size_t layers_;
    std::size_t heads_;
    std::size_t runs_ = 0;
    std::vector<token_id> needle_;  // sorted; empty between runs
    std::vector<double> total_;     // [layer, head], of the runs that count
    std::vector<double> run_;       // of this run
};

}  // namespace verkv::inline v0
