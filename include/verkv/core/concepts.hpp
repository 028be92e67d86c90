// The parts that can be swapped, as concepts. None of them knows which of the others it meets.
#pragma once

#include <concepts>
#include <cstddef>
#include <span>

#include "verkv/core/plan.hpp"
#include "verkv/core/prompt.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0 {

/// Importance of every token of a query head, from what prefill saw. Adaptors (over_group) make a scorer of it.
///
///     template <class Backend, class T>
///     void score_head(const Backend&, const prompt<T>&, std::size_t query_head, std::span<float> out) const;
template <class S, class Backend, class T>
concept head_scorer = requires(const S& s, const Backend& exec, const prompt<T>& p, std::size_t query_head,
                               std::span<float> out) {
    s.score_head(exec, p, query_head, out);
};

/// Importance of every token of a KV head, from what prefill saw and before any later query is known [VerKV Symbols,
/// C]. Any real numbers: sample/ maps those outside [0, 1] through a softmax.
///
///     template <class Backend, class T>
///     void score(const Backend&, const prompt<T>&, std::size_t kv_head, std::span<float> out) const;
template <class S, class Backend, class T>
concept scorer = requires(const S& s, const Backend& exec, const prompt<T>& p, std::size_t kv_head,
                          std::span<float> out) {
    s.score(exec, p, kv_head, out);
};

/// What a query will weigh, estimated without its keys: a compact copy of the keys of one KV head [VerKV Symbols, A].
/// fit() looks at all keys once (to choose channels, say) and forgets tokens held so far; append() adds tokens, with
/// the same result however they are cut into pieces; estimate() writes scale * <q, k> of each token, a row for each
/// query.
///
///     void fit(const Backend&, rows<T> keys);
///     void append(const Backend&, rows<T> keys);
///     void estimate(const Backend&, rows<float> queries, float scale, matrix_view<float> logits) const;   // [G,
///     size()] std::size_t size() const;    // tokens held std::size_t bytes() const;   // memory that stands in for
///     the keys
///
/// estimate() allocates nothing. erasable_sketch adds the removal of tokens; caches rebuild a sketch that has none.
template <class S, class Backend, class T>
concept sketch = requires(S s, const S c, const Backend& exec, rows<T> keys, rows<float> queries,
                          matrix_view<float> logits) {
    s.fit(exec, keys);
    s.append(exec, keys);
    c.estimate(exec, queries, 1.0f, logits);
    { c.size() } -> std::convertible_to<std::size_t>;
    { c.bytes() } -> std::convertible_to<std::size_t>;
};

/// A sketch that can forget tokens first ... last-1; the estimates of the others stay as they are.
template <class S>
concept erasable_sketch = requires(S s, std::size_t first, std::size_t last) {
    s.erase(first, last);
};

/// Turns estimated weights into what a planner works on [beyond §3].
///
///     masses_view masses(std::span<const float> weight, std::span<const float> odds, double total) const;
template <class S>
concept target = requires(const S& s, std::span<const float> weight, std::span<const float> odds, double total) {
    { s.masses(weight, odds, total) } -> std::same_as<masses_view>;
};

/// Decides (r', lambda) without looking at the sample [VerKV Algorithm 2; beyond §1].
/// `workspace` keeps what a plan needs from one step to the next, so that planning does not allocate after reserve(n).
///
///     struct workspace { void reserve(std::size_t n); };
///     void plan(const Backend&, masses_view, tolerance, workspace&, verkv::plan& out) const;
template <class P, class Backend>
concept planner = requires(const P& p, const Backend& exec, masses_view m, tolerance t, typename P::workspace& w,
                           plan& out) {
    p.plan(exec, m, t, w, out);
    w.reserve(std::size_t{});
};

}  // namespace verkv::inline v0
