// How badly a few anchor keys express a key.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/score/detail/attention_blocks.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/detail/norm.hpp"
#include "verkv/score/detail/sound_keys.hpp"

namespace verkv::inline v0 {

/// What is left of a key when its most similar anchor has expressed all it can: our reading of what AnchorKV's rule
/// (tokens as multiples of anchors, with a coarse residual) would call important. The paper scores nothing; that
/// tokens which no anchor expresses have to be kept is our inference, about the error of an anchor sketch; how much a
/// token is attended to is another matter (docs/scorers.md has figures).
/// Score of token i: min over anchors a and factors s of ||k_i - s a|| / ||k_i||, in [0, 1]; where centred, of keys
/// minus their mean, which no softmax sees. Anchors get 1: they are stored. A key of length 0 gets 0. Anchors are
/// chosen farthest first: the longest key, then each time the key with the most left, ||k - s a||, equal ones by the
/// lower index; fewer than `anchors` where nothing is left. Or they are `given`. Needs no query. Time O(n d anchors),
/// reads every key 3 times; n (d + 4) floats of memory. Similarities in float as score_rows() on unit vectors (so two
/// anchors whose similarities to a key differ by less than about d units roundoff may change places), the residual in
/// double: relative error about 2^-24 of ||k_i|| through the mean's rounding. Same bits for any number of threads and
/// any strides. A key that is not finite gets NaN and is no anchor; no other token notices. Throws invalid_argument for
/// anchors = 0 without given ones, or a given anchor that does not exist or is not finite.
struct anchor_coverage {
    std::size_t anchors = 64;                 ///< at most this many
    bool centred = false;                     ///< keys minus their mean
    std::span<const token_index> given = {};  ///< anchors by index, the same for all KV heads; empty: chosen

    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        detail::check(anchors > 0 || !given.empty(), "anchor_coverage needs at least one anchor");
        const std::size_t n = out.size();
        for (const token_index a : given) {
            detail::check(a < n, "there is no token ", a, " to be an anchor among ", n);
        }
        if (n == 0) {
            return;
        }
        const detail::scoring::sound_keys<T> keys(exec, p.keys[kv_head], centred);
        for (const token_index a : given) {
            detail::check(keys.sound(a), "token ", a, " cannot be an anchor: its key is not finite");
        }
        const std::vector<token_index> nearest = nearest_anchors(exec, keys);
        for_each_task(exec, keys.blocks(), [&](std::size_t b, std::size_t) {
            for (std::size_t i = keys.first(b); i < keys.last(b); ++i) {
                out[i] = !keys.sound(i)        ? std::numeric_limits<float>::quiet_NaN()
                         : keys.length(i) == 0 ? 0.0f
                                               : keys.left_of(i, nearest[i]);
            }
        });
    }

private:
    // Of each token, the anchor that is most similar to it; of an anchor, itself, marked by `none`.
    template <class Backend, class T>
    [[nodiscard]] std::vector<token_index> nearest_anchors(const Backend& exec,
                                                           const detail::scoring::sound_keys<T>& keys) const {
        const std::size_t n = keys.size();
        std::vector<token_index> nearest(n, detail::scoring::no_anchor);
        std::vector<float> cosine(n);
        std::vector<float> best(n, 0.0f);  // largest |cosine| so far
        std::vector<char> is_anchor(n, 0);
        const std::size_t most = given.empty() ? (std::min)(anchors, n) : given.size();
        for (std::size_t round = 0; round < most; ++round) {
            const std::size_t anchor = given.empty() ? keys.farthest(exec, best, is_anchor) : given[round];
            if (anchor == n) {
                break;
            }
            is_anchor[anchor] = 1;
            for_each_task(exec, keys.blocks(), [&](std::size_t b, std::size_t) {
                keys.cosines(anchor, b, cosine);
                for (std::size_t i = keys.first(b); i < keys.last(b); ++i) {
                    const float similar = std::abs(cosine[i]);
                    if (similar > best[i]) {
                        best[i] = similar;
                        nearest[i] = static_cast<token_index>(anchor);
                    }
                }
            });
        }
        for (std::size_t i = 0; i < n; ++i) {
            nearest[i] = is_anchor[i] ? detail::scoring::no_anchor : nearest[i];
        }
        return nearest;
    }
};

}  // namespace verkv::inline v0
