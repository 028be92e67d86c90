// The largest attention that a sample of the prompt's queries gives a token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/score/detail/attention_blocks.hpp"
#include "verkv/score/detail/checks.hpp"

namespace verkv::inline v0 {

/// Largest attention that any sampled query of the prompt gives a token from a distance: what KVzip (Kim et al. 2025)
/// measures, without its second pass over the text.
/// tau_i = clip(max over queries q at positions p >= position_i + min_distance of softmax(scale <q, K>)[i], floor, 1),
/// the softmax over all tokens at or before p. The queries are those kept at positions last, last - stride, ..., above
/// the first token's, where last is the last token's position; other kept queries are not looked at. As a head scorer:
/// of one query head. As a scorer: the maximum over the group, the same as over_group<reduction::maximum>. A prompt
/// that spans no such distance gets `floor` everywhere and needs no query. Time O(n/stride * n * d) a query head, reads
/// every key once for 64 queries; memory 64 n floats. Logits and exponentials in float, denominators in double:
/// relative error about |logit| units roundoff. Same bits for any number of threads and any strides. A NaN key makes
/// the scores of all tokens before it NaN where a query sees both, and to_importance() refuses that. Throws
/// invalid_argument for stride = 0, a floor outside [0, 1], or when none of the positions above has a kept query.
struct largest_attention {
    std::size_t min_distance = 64;  ///< least distance in positions from which attention counts; 0 counts a token's own
    std::size_t stride = 16;        ///< positions from one sampled query to the next
    float floor = 1e-6f;            ///< least score

    template <class Backend, class T>
    void score_head(const Backend& exec, const prompt<T>& p, std::size_t query_head, std::span<float> out) const {
        detail::scoring::check_query_head(p, query_head, out);
        run(exec, p, query_head, 1, out);
    }

    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        run(exec, p, kv_head * p.shape.group(), p.shape.group(), out);
    }

private:
    template <class Backend, class T>
    void run(const Backend& exec, const prompt<T>& p, std::size_t first_head, std::size_t heads,
             std::span<float> out) const {
        detail::check(stride > 0, "largest_attention needs a stride of at least 1");
        detail::check(floor >= 0 && floor <= 1, "largest_attention has floor ", floor, "; it must lie in [0, 1]");
        const auto distance = [](position_t from, position_t to) {
            return static_cast<std::uint64_t>(static_cast<std::int64_t>(to) - static_cast<std::int64_t>(from));
        };
        const bool looks_far = p.tokens() > 1 && distance(p.positions.front(), p.positions.back()) >=
                                                     static_cast<std::uint64_t>(min_distance);
        if (!looks_far) {
            std::fill(out.begin(), out.end(), floor);
            return;
        }
        const position_t last = p.positions.back();
        std::vector<std::size_t> kept;
        for (std::size_t j = 0; j < p.query_positions.size(); ++j) {
            const position_t at = p.query_positions[j];
            if (at > p.positions.front() && at <= last && distance(at, last) % stride == 0) {
                kept.push_back(j);
            }
        }
        detail::check(!kept.empty(), "largest_attention looks at queries at position ", last, " and every ", stride,
                      " before it; none of the ", p.query_positions.size(), " kept queries is at one of them");
        std::vector<position_t> positions(kept.size());
        std::vector<std::size_t> reach(kept.size());
        for (std::size_t j = 0; j < kept.size(); ++j) {
            positions[j] = p.query_positions[kept[j]];
            // A distance beyond all positions leaves nothing to look at, and must not wrap.
            constexpr auto most = std::size_t{1} << 33;
            reach[j] = detail::scoring::tokens_until(
                p.positions,
                static_cast<std::int64_t>(positions[j]) - static_cast<std::int64_t>((std::min)(min_distance, most)));
        }
        std::fill(out.begin(), out.end(), floor);
        std::vector<const T*> queries(kept.size());
        for (std::size_t h = first_head; h < first_head + heads; ++h) {
            for (std::size_t j = 0; j < kept.size(); ++j) {
                queries[j] = p.queries.row(kept[j], h);
            }
            detail::scoring::attention_blocks(
                exec, p.keys[h / p.shape.group()], p.positions, std::span<const T* const>(queries),
                std::span<const position_t>(positions), p.shape.logit_scale(),
                [&](std::size_t j, std::size_t first, const float* e, std::size_t count, float factor) {
                    const std::size_t end = reach[j] > first ? (std::min)(reach[j] - first, count) : 0;
                    float* to = out.data() + first;
                    if (std::isnan(factor)) {
                        std::fill_n(to, end, std::numeric_limits<float>::quiet_NaN());
                        return;
                    }
                    for (std::size_t i = 0; i < end; ++i) {
                        const float a = e[i] * factor;
                        to[i] = a > to[i] ? a : to[i];
                    }
                });
        }
        for (float& x : out) {
            x = x > 1.0f ? 1.0f : x;
        }
    }
};

}  // namespace verkv::inline v0
