// Key norm.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "verkv/core/prompt.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/detail/norm.hpp"

namespace verkv::inline v0 {

/// Keys of small norm matter (Devoto et al. 2024, "A simple and effective L2 norm-based strategy for KV cache
/// compression").
/// Score of token i: -||k_i||_2; rotation leaves it as it is, and no query is needed. Not in [0, 1]: to_importance()
/// takes a softmax of it.
/// Time O(n d), reads every key once. Squares are summed in double, one rounding to float: no overflow for any finite
/// key. A NaN stays in its own token. Same bits for any number of threads.
/// Throws invalid_argument where out does not fit the prompt.
struct key_norm {
    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        const rows<T>& keys = p.keys[kv_head];
        constexpr std::size_t block = 1024;
        for_each_task(exec, (out.size() + block - 1) / block, [&](std::size_t b, std::size_t) {
            const std::size_t last = (std::min)(out.size(), (b + 1) * block);
            for (std::size_t i = b * block; i < last; ++i) {
                out[i] = static_cast<float>(-detail::scoring::norm_of(keys[i], keys.width));
            }
        });
    }
};

}  // namespace verkv::inline v0
