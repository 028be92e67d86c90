// The parts that can be swapped, as concepts. None of them knows which of the others it meets.
#pragma once

#include <concepts>
#include <cstddef>
#include <span>

#include "verkv/core/plan.hpp"
#include "verkv/core/prompt.hpp"
#include "verkv/core/prompt_inputs.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0 {

namespace detail {

template <class P>
struct prompt_type {
    using type = P;
};

template <storage T>
struct prompt_type<T> {
    using type = prompt<T>;
};

/// The prompt that a scorer is asked about: P itself, or of a storage the plain prompt of its rows.
template <class P>
using prompt_type_t = typename prompt_type<P>::type;

}  // namespace detail

/// Importance of every token of a query head, from what prefill saw. Adaptors (over_group) make a scorer of it.
/// P: the prompt's type (prompt_with<T, ...> where a scorer needs inputs), or the storage T of a plain prompt.
///
///     template <class Backend, class T>
///     void score_head(const Backend&, const prompt<T>&, std::size_t query_head, std::span<float> out) const;
template <class S, class Backend, class P>
concept head_scorer = requires(const S& s, const Backend& exec, const detail::prompt_type_t<P>& p,
                               std::size_t query_head, std::span<float> out) {
    s.score_head(exec, p, query_head, out);
};

/// Importance of every token of a KV head, from what prefill saw and before any later query is known [VerKV Symbols,
/// C]. Any real numbers: sample/ maps those outside [0, 1] through a softmax. P as in head_scorer.
///
///     template <class Backend, class T>
///     void score(const Backend&, const prompt<T>&, std::size_t kv_head, std::span<float> out) const;
///
/// One that looks at more than a plain prompt names it in its type, and takes the prompt as it comes:
///
///     template <class T> using needs = inputs<hidden_states<T>>;
///     template <class Backend, class P> requires carries<P, hidden_states<typename P::element>>
///     void score(const Backend&, const P&, std::size_t kv_head, std::span<float> out) const;
template <class S, class Backend, class P>
concept scorer = requires(const S& s, const Backend& exec, const detail::prompt_type_t<P>& p, std::size_t kv_head,
                          std::span<float> out) {
    s.score(exec, p, kv_head, out);
};

/// A scorer whose scores are best found for all KV heads of a layer at once; out is [kv_heads, tokens]. A cache then
/// asks for a layer once instead of for each KV head. P as in head_scorer.
///
///     template <class Backend, class T>
///     void score_layer(const Backend&, const prompt<T>&, matrix_view<float> out) const;
template <class S, class Backend, class P>
concept layer_scorer = scorer<S, Backend, P> &&
    requires(const S& s, const Backend& exec, const detail::prompt_type_t<P>& p, matrix_view<float> out) {
    s.score_layer(exec, p, out);
};

/// What a query will weigh, estimated without its keys: a compact copy of the keys of one KV head [VerKV Symbols, A].
/// fit() looks at all keys once (to choose channels, say) and forgets tokens held so far; append() adds tokens, with
/// the same result however they are cut into pieces; estimate() writes scale * <q, k> of each token, a row for each
/// query.
///
///     void fit(const Backend&, rows<T> keys);
///     void append(const Backend&, rows<T> keys);
///     void estimate(const Backend&, rows<float> queries, float scale, matrix_view<float> logits) const;
///     std::size_t size() const;    // tokens held
///     std::size_t bytes() const;   // memory that stands in for the keys
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

/// A sketch that says how far off its estimates may be.
/// The second estimate() writes the logits of the first, and a bound for each: b_i >= 0 with |logit_i - estimate_i| <=
/// b_i, logit_i = scale * <q, k_i> in real numbers, for all tokens of a query at once.
/// bound_failure() is an upper bound on the probability, over the sketch's own randomness, that any bound of one
/// estimate() call is broken for one query; 0: they hold for certain. Neither estimate nor bound looks at which tokens
/// were drawn: both are independent of the draw of the sample. Where an estimate is NaN its bound is infinite.
///
///     void estimate(const Backend&, rows<float> queries, float scale, matrix_view<float> logits,
///                   matrix_view<float> bounds) const;   // both [G, size()]
///     double bound_failure() const;
template <class S, class Backend, class T>
concept bounded_sketch = sketch<S, Backend, T> && requires(const S c, const Backend& exec, rows<float> queries,
                                                           matrix_view<float> logits, matrix_view<float> bounds) {
    c.estimate(exec, queries, 1.0f, logits, bounds);
    { c.bound_failure() } -> std::convertible_to<double>;
};

/// A sketch that can forget tokens first ... last-1; the estimates of the others stay as they are.
template <class S>
concept erasable_sketch = requires(S s, std::size_t first, std::size_t last) {
    s.erase(first, last);
};

/// Turns estimated weights into what a planner works on [beyond §3]. A target of the output writes the masses over the
/// weights, and says what a bound on the sum is divided by (certify/target.hpp).
///
///     masses_view masses(std::span<const float> weight, std::span<const float> odds, double total) const;
/// or
///     masses_view masses(const Backend&, std::span<float> weight, std::span<const float> odds, double total,
///                        const value_facts&, tolerance) const;
///     double limit(tolerance, double output_norm) const;
///     bool certain() const;   // nothing is guessed: no check is needed
template <class S>
concept weight_target = requires(const S& s, std::span<const float> weight, std::span<const float> odds, double total) {
    { s.masses(weight, odds, total) } -> std::same_as<masses_view>;
};

template <class S, class Backend>
concept value_target = requires(const S& s, const Backend& exec, std::span<float> weight, std::span<const float> odds,
                                double total, const value_facts& v, tolerance t) {
    { s.masses(exec, weight, odds, total, v, t) } -> std::same_as<masses_view>;
    { s.limit(t, total) } -> std::same_as<double>;
    { s.certain() } -> std::convertible_to<bool>;
};

template <class S, class Backend>
concept target = weight_target<S> || value_target<S, Backend>;

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

/// A planner that plans for all query heads of a KV head at once; it is asked to wherever it can.
///
///     void plan_group(const Backend&, std::span<const masses_view>, tolerance, workspace&,
///                     std::span<verkv::plan> out) const;
template <class P, class Backend>
concept group_planner = planner<P, Backend> && requires(const P& p, const Backend& exec, std::span<const masses_view> m,
                                                        tolerance t, typename P::workspace& w, std::span<plan> out) {
    p.plan_group(exec, m, t, w, out);
};

/// A planner whose plans have a level that can be lowered: every r' grows. A check from the sample needs it [beyond
/// §5b].
///
///     void plan_at(const Backend&, std::span<const masses_view>, std::span<const double> level, tolerance, workspace&,
///                  std::span<verkv::plan> out) const;
template <class P, class Backend>
concept lowering_planner = group_planner<P, Backend> &&
    requires(const P& p, const Backend& exec, std::span<const masses_view> m, std::span<const double> level,
             tolerance t, typename P::workspace& w, std::span<plan> out) {
    p.plan_at(exec, m, level, t, w, out);
};

}  // namespace verkv::inline v0
