// Importance that the caller brings along.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "verkv/core/prompt.hpp"
#include "verkv/score/detail/checks.hpp"

namespace verkv::inline v0 {

/// Scores that the caller computed: from a model's second pass, a trained gate, another library.
/// Either one dense array [kv_heads, tokens] or a span of tokens for each KV head; the memory stays the caller's.
/// O(n), copies n floats. Throws invalid_argument when the lengths are not those of the prompt.
class given_scores {
public:
    /// scores: [kv_heads, tokens], one head after the other.
    explicit given_scores(std::span<const float> scores) : dense_(scores) {}

    /// scores: a span [tokens] for each KV head.
    explicit given_scores(std::span<const std::span<const float>> scores) : heads_(scores), per_head_(true) {}

    /// Copies the scores of one KV head to out, [tokens].
    template <class Backend, class T>
    void score(const Backend&, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        std::span<const float> from;
        if (per_head_) {
            detail::check(heads_.size() == p.shape.kv_heads, "scores given for ", heads_.size(),
                          " KV heads; the prompt has ", p.shape.kv_heads);
            from = heads_[kv_head];
            detail::check(from.size() == p.tokens(), "KV head ", kv_head, " has ", from.size(),
                          " given scores; the prompt has ", p.tokens(), " tokens");
        } else {
            detail::check(dense_.size() == p.shape.kv_heads * p.tokens(), dense_.size(), " given scores for ",
                          p.shape.kv_heads, " KV heads of ", p.tokens(), " tokens");
            from = dense_.subspan(kv_head * p.tokens(), p.tokens());
        }
        std::copy(from.begin(), from.end(), out.begin());
    }

private:
    std::span<const float> dense_;
    std::span<const std::span<const float>> heads_;
    bool per_head_ = false;
};

}  // namespace verkv::inline v0
