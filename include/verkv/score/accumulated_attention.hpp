// Heavy hitters: attention summed up query after query, with eviction on the way.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/detail/attention_blocks.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/portion.hpp"

namespace verkv::inline v0 {

/// Which tokens a query's attention is shared among while heavy hitters are counted.
enum class attention_among {
    all,     ///< all tokens at or before the query, as the authors' program has it, which masks a full attention
    cached,  ///< those that are still there, as the paper's Algorithm 1 and any decoder that has evicted the others
};

/// H2O (Zhang et al. 2023, "H2O: heavy-hitter oracle", arXiv 2306.14048) for one query head, as its authors' code does
/// it: a set of at most `heavy` tokens, each with the attention it gathered while in the set.
/// Kept queries pass in order. Before query j the tokens that came since the query before enter with 0; where the set
/// would exceed `heavy`, the new ones stay (the most recent `heavy` of them), and of the old ones those that gathered
/// most, ties to the lower index. Then every token of the set gains softmax(scale <q_j, K>)[i], over all tokens at or
/// before the query (`among`: all), or over the set and the last `recent` tokens at the query alone (cached): what a
/// decoder that evicts has left. A token that left never returns, and what it gathered is gone: eviction is permanent.
/// With queries at all positions one token enters at a time: the original. With a sample, attention is summed over the
/// kept queries and several enter at once; tokens behind the last kept query do not enter. Score: what a token of the
/// final set gathered over the number of kept queries, in [0, 1]; 0 for the others; 1 for the last `recent` tokens, by
/// index, evicted or not (the paper's local band). Age: sums favour old tokens, which more queries saw, so much that by
/// the end the set can hold hardly a token of the second half. That is the published rule; mean_attention divides by
/// the number of queries instead. The authors' results are those of `all`; over the cached ones every query spends all
/// of its attention on them, so that what is left gathers more. A token of the band that has left the set is attended
/// to, and gathers nothing. Query heads of a group: make_h2o(). heavy and recent: portions of the prompt, not both 0
/// (checked). For m kept queries, all: time O(m (n d + heavy)), reads every key once for 64 queries, memory 64 (n +
/// heavy) floats; cached: O(m (heavy + recent) d), memory heavy + recent. Sums in double, attention as mean_attention;
/// among the cached ones logits in float as score_rows(), the rest in double. Same bits for any number of threads and
/// any strides. A NaN key makes what is gathered from queries that see it NaN. Throws invalid_argument for heavy and
/// recent of 0 tokens, or heavy tokens to find without kept queries.
struct accumulated_attention {
    portion heavy = portion::fraction(0.1);
    portion recent = portion::fraction(0.1);
    attention_among among = attention_among::all;

    template <class Backend, class T>
    void score_head(const Backend& exec, const prompt<T>& p, std::size_t query_head, std::span<float> out) const {
        detail::scoring::check_query_head(p, query_head, out);
        const std::size_t n = out.size();
        const std::size_t room = heavy.of(n);
        const std::size_t band = recent.of(n);
        const std::size_t kept = p.queries.tokens;
        detail::check(n == 0 || room + band > 0, "accumulated_attention keeps no token of ", n,
                      ": heavy and recent are 0");
        detail::check(room == 0 || kept > 0, "accumulated_attention needs kept queries to find ", room,
                      " heavy tokens of ", n, "; there are none");
        std::vector<member> set;
        if (room > 0) {
            set = among == attention_among::cached ? stream_cached(exec, p, query_head, room, band)
                                                   : stream(exec, p, query_head, room);
        }
        std::fill(out.begin(), out.end(), 0.0f);
        for (const member& m : set) {
            out[m.token] = static_cast<float>(m.gathered / static_cast<double>(kept));
        }
        std::fill_n(out.rbegin(), band, 1.0f);
    }

private:
    struct member {
        std::size_t token;
        double gathered;
    };

    // Keeps `room` of the set: the `fresh` last members, and of the others those that gathered most. Order is kept.
    static void evict(std::vector<member>& set, std::size_t fresh, std::size_t room) {
        if (set.size() <= room) {
            return;
        }
        if (fresh >= room) {
            set.erase(set.begin(), set.end() - static_cast<std::ptrdiff_t>(room));
            return;
        }
        const auto end_of_old = set.end() - static_cast<std::ptrdiff_t>(fresh);
        const std::size_t old = set.size() - fresh;
        // NaN counts as the least: it must not order the rest.
        const auto worth = [](const member& m) { return m.gathered == m.gathered ? m.gathered : -1.0; };
        if (old - (room - fresh) == 1) {  // the usual step: the last one of least worth goes
            auto least = set.begin();
            for (auto m = set.begin(); m != end_of_old; ++m) {
                least = worth(*m) <= worth(*least) ? m : least;
            }
            set.erase(least);
            return;
        }
        const auto heavier = [&](const member& a, const member& b) {
            return worth(a) != worth(b) ? worth(a) > worth(b) : a.token < b.token;
        };
        const auto cut = set.begin() + static_cast<std::ptrdiff_t>(room - fresh);
        std::nth_element(set.begin(), cut, end_of_old, heavier);
        set.erase(cut, end_of_old);
        std::sort(set.begin(), cut, [](const member& a, const member& b) { return a.token < b.token; });
    }

    template <class Backend, class T>
    std::vector<member> stream(const Backend& exec, const prompt<T>& p, std::size_t query_head,
                               std::size_t room) const {
        namespace scoring = detail::scoring;
        const std::size_t kept = p.queries.tokens;
        std::vector<member> set;
        std::vector<std::size_t> entered(1, 0);  // tokens at or before each kept query
        std::vector<const T*> queries(kept);
        for (std::size_t j = 0; j < kept; ++j) {
            queries[j] = p.queries.row(j, query_head);
            entered.push_back(scoring::tokens_until(p.positions, p.query_positions[j]));
        }
        // Within a tile of queries only its first set and the tokens that enter meanwhile can matter: their attention
        // is all that is kept of a row.
        std::vector<std::size_t> candidates;
        std::vector<float> attention;
        for (std::size_t start = 0; start < kept; start += scoring::tile_queries) {
            const std::size_t count = (std::min)(scoring::tile_queries, kept - start);
            candidates.clear();
            for (const member& m : set) {
                candidates.push_back(m.token);
            }
            for (std::size_t i = entered[start]; i < entered[start + count]; ++i) {
                candidates.push_back(i);
            }
            attention.assign(candidates.size() * count, 0.0f);
            scoring::attention_blocks(
                exec, p.keys[query_head / p.shape.group()], p.positions,
                std::span<const T* const>(queries).subspan(start, count), p.query_positions.subspan(start, count),
                p.shape.logit_scale(),
                [&](std::size_t j, std::size_t first, const float* e, std::size_t seen, float factor) {
                    float* row = attention.data() + j * candidates.size();
                    auto c = std::lower_bound(candidates.begin(), candidates.end(), first);
                    for (; c != candidates.end() && *c < first + seen; ++c) {
                        row[c - candidates.begin()] = e[*c - first] * factor;
                    }
                });
            for (std::size_t j = 0; j < count; ++j) {
                const std::size_t from = entered[start + j];
                const std::size_t to = entered[start + j + 1];
                for (std::size_t i = from; i < to; ++i) {
                    set.push_back({i, 0.0});
                }
                evict(set, to - from, room);
                const float* row = attention.data() + j * candidates.size();
                std::size_t c = 0;
                for (member& m : set) {
                    while (candidates[c] != m.token) {
                        ++c;
                    }
                    m.gathered += static_cast<double>(row[c]);
                }
            }
        }
        return set;
    }

    // The same where a query sees the set and the `band` last tokens at its position, and nothing else.
    template <class Backend, class T>
    std::vector<member> stream_cached(const Backend& exec, const prompt<T>& p, std::size_t query_head, std::size_t room,
                                      std::size_t band) const {
        const rows<T>& keys = p.keys[query_head / p.shape.group()];
        std::vector<member> set;
        std::vector<row_id> seen;  // the set, then the band's other tokens
        std::vector<float> query(keys.width);
        std::vector<float> logits;
        std::size_t from = 0;  // tokens at or before the query before
        for (std::size_t j = 0; j < p.queries.tokens; ++j) {
            const std::size_t to = detail::scoring::tokens_until(p.positions, p.query_positions[j]);
            for (std::size_t i = from; i < to; ++i) {
                set.push_back({i, 0.0});
            }
            evict(set, to - from, room);
            from = to;
            seen.clear();
            for (const member& m : set) {
                seen.push_back(static_cast<row_id>(m.token));
            }
            auto of_set = set.begin();
            for (std::size_t i = to - (std::min)(band, to); i < to; ++i) {
                while (of_set != set.end() && of_set->token < i) {
                    ++of_set;
                }
                if (of_set == set.end() || of_set->token != i) {
                    seen.push_back(static_cast<row_id>(i));
                }
            }
            if (keys.ids != nullptr) {
                std::transform(seen.begin(), seen.end(), seen.begin(), [&](row_id i) { return keys.ids[i]; });
            }
            rows<T> cached = keys;
            cached.ids = seen.data();
            cached.count = seen.size();
            const T* q = p.queries.row(j, query_head);
            std::transform(q, q + keys.width, query.begin(), [](T x) { return to_float(x); });
            logits.resize(seen.size());
            score_rows(exec, contiguous_rows(std::span<const float>(query), query.size()), p.shape.logit_scale(),
                       cached, matrix_of(std::span(logits), 1, logits.size()));
            share(logits, set);
        }
        return set;
    }

    // Adds to the members, whose logits come first, their parts of a softmax over all of these logits.
    static void share(std::span<const float> logits, std::vector<member>& set) {
        if (logits.empty()) {
            return;
        }
        const double top = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
        double sum = 0;
        for (const float s : logits) {
            sum += std::exp(static_cast<double>(s) - top);
        }
        for (std::size_t m = 0; m < set.size(); ++m) {
            set[m].gathered += std::exp(static_cast<double>(logits[m]) - top) / sum;
        }
    }
};

/// H2O for the query heads of a group: each has a set of its own, as published, and a token scores what it does for all
/// of them together: over_group<Reduction>(accumulated_attention{heavy, recent, among}). mean: what it gathered on
/// average; maximum: what it gathered in the head that needs it most. A token scores 0 where no head kept it.
template <reduction Reduction = reduction::mean>
[[nodiscard]] auto make_h2o(portion heavy = portion::fraction(0.1), portion recent = portion::fraction(0.1),
                            attention_among among = attention_among::all) {
    return over_group<Reduction>(accumulated_attention{heavy, recent, among});
}

}  // namespace verkv::inline v0
