// Where one span of the text ends and the next begins.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/prompt_inputs.hpp"
#include "verkv/core/rope.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/detail/plain_keys.hpp"
#include "verkv/score/detail/window_sums.hpp"

namespace verkv::inline v0 {

/// Entropy of the model's prediction at each token: how open the text was behind it.
struct token_entropy {
    std::span<const float> entropy;  ///< [token], in any unit; finite
};

/// Checks that entropies belong to a prompt: one for each token, finite and not negative.
/// O(n). Throws invalid_argument where not.
template <class T>
void validate(const token_entropy& e, const prompt<T>& p) {
    detail::check(e.entropy.size() == p.tokens(), e.entropy.size(), " entropies for ", p.tokens(), " tokens");
    for (std::size_t i = 0; i < e.entropy.size(); ++i) {
        detail::check(std::isfinite(e.entropy[i]) && e.entropy[i] >= 0, "entropy at token ", i, " is ", e.entropy[i]);
    }
}

/// Tokens at which the next-token entropy rises: our reading of what SeKV's rule (Abaskohi et al. 2026, arXiv
/// 2606.31145: spans are cut where entropy rises) would call important. The paper cuts spans by it and scores no token.
/// Score of token i: max(0, e_i - e_(i-1)) over the largest such rise of the prompt, 1 for the first token; 0 where
/// nothing rises. In [0, 1], the same for every KV head.
/// Needs token_entropy, no query. Time O(n). In double, one rounding. Throws as validate().
struct entropy_boundary {
    template <class T>
    using needs = inputs<token_entropy>;

    template <class Backend, class P>
    requires carries<P, token_entropy>
    void score(const Backend&, const P& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        validate(static_cast<const token_entropy&>(p), p);
        double most = 0;
        const auto rise = [&](std::size_t i) {
            return (std::max)(0.0, static_cast<double>(p.entropy[i]) - static_cast<double>(p.entropy[i - 1]));
        };
        for (std::size_t i = 1; i < out.size(); ++i) {
            most = (std::max)(most, rise(i));
        }
        for (std::size_t i = 0; i < out.size(); ++i) {
            out[i] = i == 0 ? 1.0f : most > 0 ? static_cast<float>(rise(i) / most) : 0.0f;
        }
    }
};

/// Tokens at which keys turn: span boundaries as keys show them, for prompts without entropies. Ours, in place of
/// SeKV's entropy_boundary.
/// Score of token i: (1 - cos(mean of the `reach` keys before i, mean of the `reach` keys from i on)) / 2, keys before
/// RoPE (turned back by `rotation`; without frequencies as they are stored) minus the mean of all; fewer keys at the
/// ends. In [0, 1]; 1 for the first token, 0 where one side has mean 0.
/// Needs no query. Time O(n d) whatever the reach, and a sine and a cosine for each pair of each key, twice; reads
/// every key twice; (1024 + 8 reach) d doubles a worker. All in double, one rounding; windows are sums of their own
/// keys, never differences: relative error reach units roundoff of double times the keys' length over that of their
/// mean. Same bits for any number of threads and any strides. A key that is not finite gets NaN and is left out of its
/// neighbours' means. Throws invalid_argument for a reach of 0 or of 2^31 and more, or a rotation that does not fit the
/// keys.
struct span_boundary {
    rope rotation = {};      ///< of the keys; without frequencies they count as not rotated
    std::size_t reach = 16;  ///< keys on each side

    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        detail::check(reach > 0 && reach <= 0x7fffffff, "span_boundary has reach ", reach, "; it takes 1 to ",
                      0x7fffffff);
        const detail::scoring::plain_keys<T> keys(p, kv_head, rotation);
        const std::size_t n = out.size();
        const std::size_t d = p.shape.key_dim;
        if (n == 0) {
            return;
        }
        const std::vector<double> mean = keys.mean(exec);
        const std::size_t near = (std::min)(reach, n);
        const std::size_t most = (std::min)(n, block + 4 * near);
        std::vector<window_sums> sums(workers(exec), window_sums(most, d));
        std::vector<std::vector<double>> sides(workers(exec), std::vector<double>(2 * d));
        for_each_task(exec, (n + block - 1) / block, [&](std::size_t b, std::size_t worker) {
            const std::size_t start = b * block;
            const std::size_t end = (std::min)(n, start + block);
            sums[worker].take(keys, mean, near, start - (std::min)(start, near), (std::min)(n, end + near));
            double* const before = sides[worker].data();
            double* const after = before + d;
            for (std::size_t i = start; i < end; ++i) {
                if (!sums[worker].sound(i)) {
                    out[i] = std::numeric_limits<float>::quiet_NaN();
                } else if (i == 0) {
                    out[i] = 1;
                } else {
                    sums[worker].write(i - (std::min)(i, near), i, before);
                    sums[worker].write(i, (std::min)(n, i + near), after);
                    out[i] = turn(before, after, d);
                }
            }
        });
    }

private:
    static constexpr std::size_t block = 512;
    using window_sums = detail::scoring::window_sums;

    // (1 - cos) / 2 of two sums; a sum points where its mean does.
    static float turn(const double* a, const double* b, std::size_t d) {
        double aa = 0;
        double bb = 0;
        double ab = 0;
        for (std::size_t c = 0; c < d; ++c) {
            aa += a[c] * a[c];
            bb += b[c] * b[c];
            ab += a[c] * b[c];
        }
        if (!(aa > 0 && bb > 0)) {
            return 0;
        }
        return static_cast<float>((std::clamp)((1 - ab / (std::sqrt(aa) * std::sqrt(bb))) / 2, 0.0, 1.0));
    }
};

}  // namespace verkv::inline v0
