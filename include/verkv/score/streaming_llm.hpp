// Sinks and recency.
#pragma once

#include <cstddef>
#include <span>

#include "verkv/core/prompt.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/score/detail/checks.hpp"

namespace verkv::inline v0 {

/// The first tokens and the most recent ones matter, the rest by age (Xiao et al. 2024, "Efficient streaming language
/// models with attention sinks").
/// Score of token i: 1 for i < sink, else (i - sink + 1) / (n - sink): strictly increasing, 1 at the last token. The
/// highest scores are the sinks and the most recent tokens, so a cut at any budget keeps what StreamingLLM keeps; as
/// inclusion weights, a token's chance falls linearly with its age. Scored by index in the prompt. Only scores are
/// computed: keys keep their rotation and tokens their original positions, where the paper re-numbers them by their
/// place in the cache.
/// Time O(n); reads no key. Computed in double, one rounding to float; above 2^24 tokens neighbours can tie.
/// Throws invalid_argument where out does not fit the prompt.
struct streaming_llm {
    std::size_t sink = 4;  ///< tokens at the start that always matter

    template <class Backend, class T>
    void score(const Backend&, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        const std::size_t n = out.size();
        for (std::size_t i = 0; i < n; ++i) {
            out[i] =
                i < sink ? 1.0f : static_cast<float>(static_cast<double>(i - sink + 1) / static_cast<double>(n - sink));
        }
    }
};

}  // namespace verkv::inline v0
