// What an engine holds for one layer: the caches of many requests, and a verified decode step over them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "verkv/cache/config.hpp"
#include "verkv/cache/detail/kv_head.hpp"
#include "verkv/cache/detail/step.hpp"
#include "verkv/cache/policies.hpp"
#include "verkv/certify/target.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/core/report.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/plan/exact_weights.hpp"
#include "verkv/plan/greedy.hpp"
#include "verkv/plan/water_filling.hpp"
#include "verkv/sample/budget.hpp"
#include "verkv/sample/inclusion.hpp"
#include "verkv/sample/poisson.hpp"
#include "verkv/score/importance.hpp"
#include "verkv/store/row_pool.hpp"

namespace verkv::inline v0 {

/// One request's part of a decode step.
template <class Q>
struct decode_item {
    request_id request;
    rows<Q> queries;            ///< [query_heads, key_dim], rotated
    std::span<float> output;    ///< [query_heads * value_dim]
    std::span<float> lse = {};  ///< [query_heads], or empty
};

/// Memory of the caller's for a cache's rows: pinned, mapped, on another NUMA node. It outlives the cache. A span is
/// rows * (key_dim + value_dim) elements, or empty: then the cache takes its own. Host and staging rows are a key
/// followed by its value; of the resident rows all keys come first, then all values.
template <class T>
struct cache_memory {
    std::span<T> host = {};
    std::span<T> resident = {};
    std::span<T> staging = {};  ///< max_requests * kv_heads * staging_rows rows, see completed()
};

/// How compress() samples a prompt.
struct compression {
    budget kept = budget::fraction(1.0 / 16).at_least(256);  ///< resident rows of a KV head, fixed ones included
    windows fixed = {};                                      ///< sink and local tokens, resident by position
    std::span<const budget> of_heads = {};  ///< a budget for each KV head in place of kept (sample/allocation.hpp)
};

/// The cache of one layer: resident cells, host rows and staging of many requests, and the step that decodes with them.
///
/// A request goes: open, prefill (in any chunks), compress, then append and decode for each token; compress again
/// whenever its tail has grown long, truncate, remove or shift to go back; release. Tokens that were appended are
/// resident until the next compress. A request that was never prefilled needs no compress.
///
/// T: storage of rows. Sketch, Planner, Exact (which weights are exact), Target, Backend: the parts of the pipeline,
/// see core/concepts.hpp. Not thread-safe; a step spreads over the backend's own threads. Results are the same bits for
/// any number of threads, any chunking of the prompt and any other requests in the batch. A call that throws has
/// changed nothing of what the cache holds (a decode that throws may have written outputs, and staged rows).
template <storage T, class Sketch, class Planner = water_filling<>, class Exact = exact_for_shortlist,
          class Target = denominator, class Backend = cpu>
requires sketch<Sketch, Backend, T> && planner<Planner, Backend> && target<Target, Backend>
class layer_cache {
public:
    /// Takes all the memory a step will need. sketch is copied for each KV head of each request.
    /// Throws invalid_argument for a configuration out of range, or memory of another size than it says.
    layer_cache(const cache_config& config, const Sketch& sketch, const Backend& exec = {}, const Planner& planner = {},
                const Exact& exact = {}, const Target& target = {}, const step_policies& policies = {},
                const cache_memory<T>& memory = {})
        : config_(completed(config)),
          prototype_(sketch),
          exec_(exec),
          planner_(planner),
          exact_(limited(exact, config.max_tokens)),
          target_(target),
          policies_((validate(policies), policies)),
          host_(pool(memory.host, config.host_rows, "host row")),
          device_(pool(memory.resident, config.resident_rows, "resident row", config.shape.key_dim)),
          staging_(
              pool(memory.staging,
                   detail::product("staging rows", config.max_requests, config.shape.kv_heads, config_.staging_rows),
                   "staging row")),
          staging_rows_(config_.staging_rows),
          requests_(config.max_requests),
          workspaces_(workers(exec)) {
        for (auto& w : workspaces_) {
            w.reserve(config.shape.group(), config.shape.key_dim, config.shape.value_dim, config.max_tokens,
                      (std::min)(exact_.size, config.max_tokens) * config.shape.group(), config_.staging_rows,
                      {policies.bounds == bound_policy::carry, needs_values, policies.check.rounds > 0});
        }
        detail::check(!workspaces_.empty(), "the executor has no workers");
        if constexpr (requires { validate(target); }) {
            validate(target);
        }
        // A sketch that does not go with the layer's keys says so now.
        Sketch trial = sketch;
        trial.fit(exec, rows<T>{nullptr, static_cast<std::ptrdiff_t>(row_width()), 0, config.shape.key_dim, nullptr});
        const std::size_t tasks = config.max_requests * config.shape.kv_heads;
        report_.kv_heads = config.shape.kv_heads;
        report_.query_heads = config.shape.query_heads;
        report_.per_kv_head.reserve(tasks);
        report_.per_query_head.reserve(config.max_requests * config.shape.query_heads);
        errors_.reserve(tasks);
    }

    /// What it was built with, sizes that were left to the library filled in.
    [[nodiscard]] const cache_config& config() const { return config_; }
    [[nodiscard]] std::size_t free_host_rows() const { return host_.free_rows(); }
    [[nodiscard]] std::size_t free_resident_rows() const { return device_.free_rows(); }

    /// Starts a request; seed picks its uniforms: requests of one seed and one layer number draw alike, position by
    /// position. Throws out_of_capacity when max_requests are open.
    [[nodiscard]] request_id open(std::uint64_t seed = 0) {
        for (std::size_t slot = 0; slot < requests_.size(); ++slot) {
            request& r = requests_[slot];
            if (!r.open) {
                prepare(r);
                r.open = true;
                r.seed = seed;
                r.draws = 0;
                r.steps = 0;
                return {static_cast<std::uint32_t>(slot), r.generation};
            }
        }
        detail::raise<out_of_capacity>("all ", requests_.size(), " requests are open");
    }

    /// Ends a request: all its rows are free again, its id is void.
    /// Throws invalid_argument for an id that is not open.
    void release(request_id id) {
        request& r = at(id);
        for (auto& head : r.heads) {
            host_.release(head.host);
            device_.release(head.resident);
            staging_.release(head.staging.rows());
            head.clear();
        }
        r.positions.clear();
        r.draw_positions.clear();
        r.pending = 0;
        r.open = false;
        ++r.generation;
    }

    /// Adds tokens of a prompt: their rows go to host memory and wait for compress().
    /// keys [m, kv_heads, key_dim], values [m, kv_heads, value_dim], positions [m] ascending, above all before.
    /// O(m) copies. Throws invalid_argument for shapes, strides or positions that are wrong, out_of_capacity when host
    /// rows or max_tokens do not suffice.
    void prefill(request_id id, heads_view<T> keys, heads_view<T> values, std::span<const position_t> positions) {
        request& r = at(id);
        check_tokens(r, keys, values, positions);
        host_.require(positions.size() * config_.shape.kv_heads);
        for (std::size_t i = 0; i < positions.size(); ++i) {
            for (std::size_t h = 0; h < r.heads.size(); ++h) {
                r.heads[h].add_offloaded(write_host_row(keys.row(i, h), values.row(i, h)));
            }
            add_position(r, positions[i]);
        }
        r.pending += positions.size();
    }

    /// Adds tokens that were just generated: resident, and in host memory too.
    /// Shapes and errors as prefill(); invalid_state when prefilled tokens wait for compress().
    void append(request_id id, heads_view<T> keys, heads_view<T> values, std::span<const position_t> positions) {
        request& r = at(id);
        check_compressed(r);
        check_tokens(r, keys, values, positions);
        host_.require(positions.size() * config_.shape.kv_heads);
        device_.require(positions.size() * config_.shape.kv_heads);
        for (std::size_t i = 0; i < positions.size(); ++i) {
            for (std::size_t h = 0; h < r.heads.size(); ++h) {
                const row_id from = write_host_row(keys.row(i, h), values.row(i, h));
                row_id to;
                device_.allocate({&to, 1});
                device_.write(to, host_.row(from));
                r.heads[h].add_resident(from, to);
                if (needs_values) {
                    r.heads[h].radius.back() = radius_of(values.row(i, h), r.heads[h].centre);
                }
            }
            add_position(r, positions[i]);
        }
    }

    /// PoissonComp [VerKV Algorithm 1]: scores all tokens of a request, draws the sample that stays resident, and
    /// sketches all keys. Called after prefill, and again from time to time for a long request: each call is a fresh,
    /// independent draw. queries [m, query_heads, key_dim] and query_positions [m]: what the scorer may look at (may be
    /// empty, if it needs none). extra: what else the scorer needs (core/prompt_inputs.hpp), in any order; it does not
    /// compile without. A layer scorer is asked once, with all threads, any other for each KV head.
    /// O(n log n) a KV head beside the scorer. Resident rows of the whole request may exceed the budget's expectation
    /// by chance (Poisson sampling): a few times sqrt(kept n) spare rows a KV head suffice.
    /// Throws what the scorer, inclusion_probabilities() and the inputs' validate() throw, invalid_argument for another
    /// number of budgets than KV heads, out_of_capacity when the sample does not fit.
    template <class Scorer, class... Inputs>
    requires(prompt_input<Inputs, T>&&...) void compress(request_id id, const Scorer& scorer, const compression& how,
                                                         heads_view<T> queries = {},
                                                         std::span<const position_t> query_positions = {},
                                                         const Inputs&... extra) {
        using prompt_seen = prompt_with<T, Inputs...>;
        require_needs<Scorer, prompt_seen>();
        static_assert(!carries_needs_of<prompt_seen, Scorer> || verkv::scorer<Scorer, Backend, prompt_seen>,
                      "compress() takes a scorer: score(exec, prompt, kv_head, out); over_group() makes one of a head "
                      "scorer");
        request& r = at(id);
        const std::size_t n = r.positions.size();
        const std::size_t heads = r.heads.size();
        detail::check(how.of_heads.empty() || how.of_heads.size() == heads, how.of_heads.size(),
                      " budgets were given; the layer has ", heads, " KV heads");
        std::vector<rows<T>> keys;
        std::vector<rows<T>> values;
        for (const auto& head : r.heads) {
            keys.push_back(host_.view(head.host, 0, config_.shape.key_dim));
            values.push_back(host_.view(head.host, config_.shape.key_dim, config_.shape.value_dim));
        }
        if (queries.tokens == 0) {
            queries.heads = config_.shape.query_heads;
            queries.width = config_.shape.key_dim;
        }
        const prompt_seen seen{prompt<T>{config_.shape, keys, values, r.positions, queries, query_positions}, extra...};
        validate(seen);
        (validate(extra, seen), ...);
        std::vector<float> scores;
        if constexpr (layer_scorer<Scorer, Backend, prompt_seen>) {
            scores.resize(heads * n);
            scorer.score_layer(exec_, seen, matrix_of(std::span<float>(scores), heads, n));
        }
        std::vector<draw> draws = blank_draws(r);
        in_parallel(heads, [&](std::size_t h, std::size_t, const Backend& exec) {
            draw& d = draws[h];
            std::vector<float> importance(n);
            if constexpr (layer_scorer<Scorer, Backend, prompt_seen>) {
                std::copy_n(scores.begin() + static_cast<std::ptrdiff_t>(h * n), n, importance.begin());
            } else {
                scorer.score(exec, seen, h, std::span<float>(importance));
            }
            to_importance(exec, std::span<float>(importance));
            d.r.resize(n);
            inclusion_probabilities(exec, importance, how.of_heads.empty() ? how.kept : how.of_heads[h], how.fixed,
                                    d.r);
            poisson_draw(exec, d.r, r.positions, stream(r, h, r.draws), d.sample);
            note_values(r.heads[h], stream(r, h, r.draws), r.positions, false, d);
            d.sketch.fit(exec, keys[h]);
            d.sketch.append(exec, keys[h]);
        });
        take(r, draws);
    }

    /// compress() with a sample that was drawn elsewhere: by an engine that draws for itself, or before a restart.
    /// r: for each KV head its tokens' inclusion probabilities, in [2^-126, 1]; sample: for each KV head the indices of
    /// the tokens drawn, ascending, with every token of r = 1 among them. The promise of decode() is that of this draw:
    /// tokens are drawn independently, with probability r. O(n) a KV head. Throws invalid_argument when one of this
    /// does not hold, out_of_capacity when the sample does not fit.
    void adopt(request_id id, std::span<const std::span<const float>> r,
               std::span<const std::span<const token_index>> sample) {
        request& q = at(id);
        const std::size_t n = q.positions.size();
        detail::check(r.size() == q.heads.size() && sample.size() == q.heads.size(), "probabilities for ", r.size(),
                      " and samples for ", sample.size(), " KV heads; the layer has ", q.heads.size());
        for (std::size_t h = 0; h < q.heads.size(); ++h) {
            check_draw(h, n, r[h], sample[h]);
        }
        std::vector<draw> draws = blank_draws(q);
        in_parallel(q.heads.size(), [&](std::size_t h, std::size_t, const Backend& exec) {
            draw& d = draws[h];
            d.r.assign(r[h].begin(), r[h].end());
            d.sample.assign(sample[h].begin(), sample[h].end());
            note_values(q.heads[h], stream(q, h, q.draws), q.positions, true, d);
            const rows<T> keys = host_.view(q.heads[h].host, 0, config_.shape.key_dim);
            d.sketch.fit(exec, keys);
            d.sketch.append(exec, keys);
        });
        take(q, draws);
    }

    /// One verified decode step of many requests. Each token's own key and value were appended before.
    /// What the target certifies of each query head (its denominator, relative to the exact one, or its output) is
    /// within epsilon with probability at least 1 - delta, for a query fixed before the draw and weights that the
    /// sketch has right or bounds; else as far as the check from the sample sees [VerKV Theorem 2; docs/promise.md].
    /// Query head h reads KV head h / group(). A request without tokens: output 0, lse = -infinity. Reads, for each KV
    /// head, the sketch, the resident rows, the shortlist's keys and the rows the plan fetches. Allocation-free. The
    /// report is valid until the next call. Throws invalid_argument for shapes that are wrong, a request that is listed
    /// twice or not open, a tolerance out of range; invalid_state when prefilled tokens wait for compress().
    template <storage Q>
    const step_report& decode(std::span<const decode_item<Q>> batch, tolerance promise = {}) {
        validate(promise);
        detail::check<invalid_state>(workers(exec_) <= workspaces_.size(), "the executor has ", workers(exec_),
                                     " workers; the cache was built for ", workspaces_.size());
        check_batch(batch);
        const geometry& shape = config_.shape;
        report_.per_kv_head.resize(batch.size() * shape.kv_heads);
        report_.per_query_head.resize(batch.size() * shape.query_heads);
        const std::size_t group = shape.group();
        in_parallel(batch.size() * shape.kv_heads, [&](std::size_t task, std::size_t worker, const Backend& exec) {
            const decode_item<Q>& item = batch[task / shape.kv_heads];
            const std::size_t h = task % shape.kv_heads;
            request& r = requests_[item.request.slot];
            auto& w = workspaces_[worker];
            for (std::size_t g = 0; g < group; ++g) {
                const Q* from = item.queries[h * group + g];
                for (std::size_t c = 0; c < shape.key_dim; ++c) {
                    w.queries[g * shape.key_dim + c] = to_float(from[c]);
                }
            }
            detail::step<T, Sketch, Planner, Exact, Target, Backend> s{
                {exec, planner_, exact_, policies_, within_bounds(promise, r.heads[h].sketch), shape.logit_scale(),
                 shape.key_dim, shape.value_dim, host_, device_, staging_, r.heads[h], w, report_.per_kv_head[task],
                 std::span(report_.per_query_head).subspan(task * group, group)},
                target_,
                r.draw_positions,
                fresh_stream(stream(r, h, r.draws - 1), r.steps)};
            const std::span<float> lse =
                item.lse.empty() ? std::span<float>(w.lse).first(group) : item.lse.subspan(h * group, group);
            s.run({item.output.data() + h * group * shape.value_dim, group, shape.value_dim,
                   static_cast<std::ptrdiff_t>(shape.value_dim)},
                  lse);
        });
        for (const decode_item<Q>& item : batch) {
            ++requests_[item.request.slot].steps;
        }
        return report_;
    }

    /// decode() of one request, its queries stored as the rows are.
    const step_report& decode(const decode_item<T>& item, tolerance promise = {}) {
        return decode(std::span<const decode_item<T>>(&item, 1), promise);
    }

    /// decode() of one request.
    template <storage Q>
    const step_report& decode(const decode_item<Q>& item, tolerance promise = {}) {
        return decode(std::span<const decode_item<Q>>(&item, 1), promise);
    }

    /// decode() of a batch that is a vector.
    template <storage Q>
    const step_report& decode(const std::vector<decode_item<Q>>& batch, tolerance promise = {}) {
        return decode(std::span<const decode_item<Q>>(batch), promise);
    }

    /// Removes the tokens at positions first ... last-1 and frees their rows; returns how many there were. Other tokens
    /// keep their positions, probabilities and sketch estimates (a sketch that cannot erase is rebuilt). O(n). Throws
    /// invalid_argument for a request that is not open.
    std::size_t remove(request_id id, position_t first, position_t last) {
        const auto& p = at(id).positions;
        const auto begin = std::lower_bound(p.begin(), p.end(), first);
        const auto end = std::lower_bound(begin, p.end(), last);
        return erase_tokens(at(id), static_cast<std::size_t>(begin - p.begin()),
                            static_cast<std::size_t>(end - p.begin()));
    }

    /// Removes every token at this position or behind: a rollback. As remove().
    std::size_t truncate(request_id id, position_t position) {
        const auto& p = at(id).positions;
        const auto begin = std::lower_bound(p.begin(), p.end(), position);
        return erase_tokens(at(id), static_cast<std::size_t>(begin - p.begin()), p.size());
    }

    /// Adds delta to the positions first ... last-1. Keys stay as they are: right for keys that carry no position, or
    /// when the caller passes `rotate`, called as rotate(std::span<T> key, delta) for every row of those tokens, host
    /// and resident, which turns a rotated key into that of its new position. Sketches are then rebuilt. O(n). Throws
    /// invalid_argument when positions would be negative, meet or change their order.
    template <class Rotate = std::nullptr_t>
    void shift(request_id id, position_t first, position_t last, position_t delta, Rotate rotate = nullptr) {
        request& r = at(id);
        auto& p = r.positions;
        const auto from = static_cast<std::size_t>(std::lower_bound(p.begin(), p.end(), first) - p.begin());
        const auto to =
            static_cast<std::size_t>(std::lower_bound(p.begin(), p.end(), (std::max)(first, last)) - p.begin());
        if (from == to || delta == 0) {
            return;
        }
        const std::int64_t low = static_cast<std::int64_t>(p[from]) + delta;
        const std::int64_t high = static_cast<std::int64_t>(p[to - 1]) + delta;
        const std::int64_t below = from > 0 ? p[from - 1] : -1;
        const std::int64_t above = to < p.size() ? p[to] : std::int64_t{(std::numeric_limits<position_t>::max)()} + 1;
        detail::check(low > below && high < above, "shifting positions ", p[from], " to ", p[to - 1], " by ", delta,
                      " leaves the room between ", below, " and ", above);
        if constexpr (!std::is_same_v<Rotate, std::nullptr_t>) {
            rotate_keys(r, from, to, delta, rotate);
        }
        for (std::size_t i = from; i < to; ++i) {
            p[i] += delta;
        }
    }

    /// Positions of a request's tokens, ascending.
    [[nodiscard]] std::span<const position_t> positions(request_id id) const { return at(id).positions; }

    /// Tokens appended since the last draw, all resident: the tail that the next compress() would sample from.
    [[nodiscard]] std::size_t tail(request_id id) const {
        const request& r = at(id);
        return r.positions.size() - r.pending - r.draw_positions.size();
    }

    /// Whether a token (by index) is resident for a KV head.
    [[nodiscard]] bool resident(request_id id, std::size_t kv_head, token_index token) const {
        const auto& head = head_at(id, kv_head, token);
        return head.slot[token] != head.offloaded;
    }

    /// Inclusion probability r of a token (by index) for a KV head; 1 for tokens appended since the last draw.
    [[nodiscard]] float probability(request_id id, std::size_t kv_head, token_index token) const {
        return head_at(id, kv_head, token).probability[token];
    }

    /// Key and value of a token (by index) in host memory, key_dim and value_dim elements.
    [[nodiscard]] std::span<const T> host_row(request_id id, std::size_t kv_head, token_index token) const {
        return {host_.row(head_at(id, kv_head, token).host[token]), row_width()};
    }

    /// Rows that are staged for a KV head.
    [[nodiscard]] std::size_t staged_rows(request_id id, std::size_t kv_head) const {
        return head_at(id, kv_head).staging.size();
    }

    /// Forgets the rows staged for a request; the next step reads what it needs anew.
    void release_staging(request_id id) {
        for (auto& head : at(id).heads) {
            head.staging.clear();
        }
    }

    /// The sketch of a KV head.
    [[nodiscard]] const Sketch& sketch_of(request_id id, std::size_t kv_head) const {
        return head_at(id, kv_head).sketch;
    }

private:
    struct request {
        bool open = false;
        std::uint32_t generation = 0;
        std::uint64_t seed = 0;
        std::uint32_t draws = 0;
        std::uint64_t steps = 0;  // decoded: which fresh uniforms a step takes
        std::size_t pending = 0;  // prefilled tokens that wait for compress(): the last ones
        std::vector<position_t> positions;
        std::vector<position_t> draw_positions;  // positions at the draw; tokens appended later have none
        std::vector<detail::kv_head<Sketch>> heads;
    };

    /// No shortlist is longer than a request.
    [[nodiscard]] static Exact limited(Exact exact, std::size_t tokens) {
        exact.size = (std::min)(exact.size, tokens);
        return exact;
    }

    static constexpr bool needs_values = value_target<Target, Backend>;

    /// What the sketch's own bounds may fail at is taken from delta.
    [[nodiscard]] tolerance within_bounds(tolerance promise, const Sketch& sketch) const {
        if constexpr (bounded_sketch<Sketch, Backend, T>) {
            if (policies_.bounds == bound_policy::carry) {
                const double failure = sketch.bound_failure();
                detail::check(failure < promise.delta, "the sketch's bounds fail with a probability of ", failure,
                              "; delta is ", promise.delta);
                promise.delta -= failure;
            }
        }
        return promise;
    }

    struct draw {
        std::vector<float> r;
        std::vector<float> uniform;
        std::vector<float> centre;
        std::vector<float> radius;
        std::vector<token_index> sample;
        std::vector<row_id> rows;
        Sketch sketch;
    };

    [[nodiscard]] row_pool<T> pool(std::span<T> memory, std::size_t rows, const char* name,
                                   std::size_t split = 0) const {
        if (memory.empty()) {
            return row_pool<T>(rows, row_width(), name, split);
        }
        detail::check(memory.size() == rows * row_width(), name, " memory has ", memory.size(), " elements; ", rows,
                      " rows of ", row_width(), " take ", rows * row_width());
        return row_pool<T>(memory, row_width(), name, split);
    }

    [[nodiscard]] std::size_t row_width() const { return config_.shape.key_dim + config_.shape.value_dim; }

    row_id write_host_row(const T* key, const T* value) {
        row_id id;
        host_.allocate({&id, 1});
        T* row = host_.row(id);
        std::memcpy(static_cast<void*>(row), key, config_.shape.key_dim * sizeof(T));
        std::memcpy(static_cast<void*>(row + config_.shape.key_dim), value, config_.shape.value_dim * sizeof(T));
        return id;
    }

    [[nodiscard]] request& at(request_id id) {
        return const_cast<request&>(static_cast<const layer_cache&>(*this).at(id));
    }
    [[nodiscard]] const request& at(request_id id) const {
        detail::check(
            id.slot < requests_.size() && requests_[id.slot].open && requests_[id.slot].generation == id.generation,
            "request ", id.slot, " of generation ", id.generation, " is not open");
        return requests_[id.slot];
    }

    [[nodiscard]] const detail::kv_head<Sketch>& head_at(request_id id, std::size_t kv_head) const {
        const request& r = at(id);
        detail::check(kv_head < r.heads.size(), "KV head ", kv_head, " of ", r.heads.size());
        return r.heads[kv_head];
    }

    [[nodiscard]] const detail::kv_head<Sketch>& head_at(request_id id, std::size_t kv_head, token_index token) const {
        const auto& head = head_at(id, kv_head);
        detail::check(token < head.host.size(), "token ", token, " of ", head.host.size());
        return head;
    }

    [[nodiscard]] uniform_stream stream(const request& r, std::size_t kv_head, std::uint32_t which) const {
        return {r.seed, config_.layer, static_cast<std::uint32_t>(kv_head), which};
    }

    /// First use of a slot takes its memory, later ones reuse it. Where that throws, the slot is as it was.
    void prepare(request& r) {
        if (r.heads.empty()) {
            std::vector<detail::kv_head<Sketch>> heads;
            heads.reserve(config_.shape.kv_heads);
            for (std::size_t h = 0; h < config_.shape.kv_heads; ++h) {
                heads.emplace_back(prototype_).reserve(config_.max_tokens);
                heads.back().staging.open(staging_rows_, config_.max_tokens);  // takes memory; rows follow
                heads.back().centre.resize(needs_values ? config_.shape.value_dim : 0);
            }
            r.positions.reserve(config_.max_tokens);
            r.draw_positions.reserve(config_.max_tokens);
            r.heads = std::move(heads);
        }
        for (auto& head : r.heads) {
            head.sketch = prototype_;  // the last thing that may throw
        }
        for (auto& head : r.heads) {
            staging_.allocate(staging_rows_);
            head.staging.open(staging_rows_, config_.max_tokens);
            std::fill(head.centre.begin(), head.centre.end(), 0.0f);
        }
    }

    static void add_position(request& r, position_t p) { r.positions.push_back(p); }

    void check_tokens(const request& r, const heads_view<T>& keys, const heads_view<T>& values,
                      std::span<const position_t> positions) const {
        const geometry& g = config_.shape;
        detail::check(keys.tokens == positions.size() && values.tokens == positions.size(), keys.tokens, " keys and ",
                      values.tokens, " values come with ", positions.size(), " positions");
        if (positions.empty()) {
            return;
        }
        detail::check(keys.heads == g.kv_heads && values.heads == g.kv_heads, "keys of ", keys.heads, " and values of ",
                      values.heads, " heads; the layer has ", g.kv_heads, " KV heads");
        detail::check(keys.width == g.key_dim && values.width == g.value_dim, "keys of ", keys.width, " and values of ",
                      values.width, " channels; the layer has ", g.key_dim, " and ", g.value_dim);
        validate(keys, "keys");
        validate(values, "values");
        position_t last = r.positions.empty() ? -1 : r.positions.back();
        for (const position_t p : positions) {
            detail::check(p > last, "position ", p, " does not come after ", last);
            last = p;
        }
        detail::check<out_of_capacity>(r.positions.size() + positions.size() <= config_.max_tokens,
                                       "the request holds ", r.positions.size(), " tokens and gets ", positions.size(),
                                       " more; max_tokens is ", config_.max_tokens);
    }

    static void check_compressed(const request& r) {
        detail::check<invalid_state>(r.pending == 0, r.pending, " prefilled tokens wait for compress()");
    }

    template <class Q>
    void check_batch(std::span<const decode_item<Q>> batch) const {
        const geometry& g = config_.shape;
        detail::check(batch.size() <= requests_.size(), "a batch of ", batch.size(), " for ", requests_.size(),
                      " requests");
        for (std::size_t i = 0; i < batch.size(); ++i) {
            const decode_item<Q>& item = batch[i];
            check_compressed(at(item.request));
            detail::check(item.queries.data != nullptr, "item ", i, " has queries at a null pointer");
            detail::check(item.queries.count == g.query_heads && item.queries.width == g.key_dim, "item ", i,
                          " has queries [", item.queries.count, ", ", item.queries.width, "]; the layer takes [",
                          g.query_heads, ", ", g.key_dim, "]");
            detail::check(item.output.data() != nullptr, "item ", i, " has an output at a null pointer");
            detail::check(item.output.size() == g.query_heads * g.value_dim, "item ", i, " has an output of ",
                          item.output.size(), " channels; the layer writes ", g.query_heads * g.value_dim);
            detail::check(item.lse.empty() || item.lse.size() == g.query_heads, "item ", i, " has room for ",
                          item.lse.size(), " lse; the layer writes ", g.query_heads);
            for (std::size_t j = 0; j < i; ++j) {
                detail::check(batch[j].request != item.request, "items ", j, " and ", i, " are of the same request");
                detail::check(apart(batch[j].output, item.output) && apart(batch[j].lse, item.lse), "items ", j,
                              " and ", i, " write to the same memory");
            }
            detail::check(apart(item.output, item.lse), "output and lse of item ", i, " share memory");
        }
    }

    static bool apart(std::span<const float> a, std::span<const float> b) {
        const std::less_equal<const float*> before;
        return a.empty() || b.empty() || before(a.data() + a.size(), b.data()) || before(b.data() + b.size(), a.data());
    }

    /// Calls f(index, worker, exec) as tasks, with their exceptions carried to the caller: that of the lowest index.
    /// Tasks that may run at once get a policy without threads of its own: an executor is not called from its tasks.
    template <class F>
    void in_parallel(std::size_t count, F&& f) {
        const Backend inner = count < 2 ? exec_ : sequential(exec_);
        errors_.assign(count, nullptr);
        for_each_task(exec_, count, [&](std::size_t i, std::size_t worker) {
#if defined(__cpp_exceptions)
            try {
                f(i, worker, inner);
            } catch (...) {
                errors_[i] = std::current_exception();
            }
#else
            f(i, worker, inner);
#endif
        });
        for (const std::exception_ptr& e : errors_) {
            if (e) {
                std::rethrow_exception(e);
            }
        }
    }

    [[nodiscard]] std::vector<draw> blank_draws(const request& r) const {
        std::vector<draw> draws;
        draws.reserve(r.heads.size());
        for (std::size_t h = 0; h < r.heads.size(); ++h) {
            draws.push_back({{}, {}, {}, {}, {}, {}, prototype_});
        }
        return draws;
    }

    static void check_draw(std::size_t h, std::size_t n, std::span<const float> r,
                           std::span<const token_index> sample) {
        detail::check(r.size() == n, "KV head ", h, " has ", r.size(), " probabilities for ", n, " tokens");
        std::size_t certain = 0;
        for (std::size_t i = 0; i < n; ++i) {
            detail::check(r[i] >= 0x1p-126f && r[i] <= 1, "KV head ", h, ": inclusion probability of token ", i, " is ",
                          r[i], "; it must lie in [2^-126, 1]");
            certain += r[i] == 1.0f;
        }
        std::size_t drawn = 0;
        for (std::size_t i = 0; i < sample.size(); ++i) {
            detail::check(sample[i] < n && (i == 0 || sample[i - 1] < sample[i]), "KV head ", h, ": drawn token ",
                          sample[i], " of ", n, "; indices must ascend");
            drawn += r[sample[i]] == 1.0f;
        }
        detail::check(drawn == certain, "KV head ", h, ": ", drawn, " of ", certain,
                      " tokens that are kept for certain are in the sample");
    }

    /// What a draw has to know of each token beside r: its uniform, and the radius of its value. The sample of another
    /// may disagree with our uniforms: a token that is not resident then has a U from [r, 1).
    void note_values(const detail::kv_head<Sketch>& head, const uniform_stream& s,
                     std::span<const position_t> positions, bool adopted, draw& d) const {
        d.uniform.resize(positions.size());
        for (std::size_t i = 0; i < positions.size(); ++i) {
            const auto r = static_cast<double>(d.r[i]);
            const double u = verkv::uniform(s, positions[i]);
            d.uniform[i] = static_cast<float>(adopted ? r + (1 - r) * u : u);
        }
        if (!needs_values) {
            return;
        }
        const std::size_t width = config_.shape.value_dim;
        const rows<T> values = host_.view(head.host, config_.shape.key_dim, width);
        std::vector<double> mean(width);
        for (std::size_t i = 0; i < values.count; ++i) {
            for (std::size_t c = 0; c < width; ++c) {
                mean[c] += static_cast<double>(to_float(values[i][c]));
            }
        }
        d.centre.resize(width);
        for (std::size_t c = 0; c < width; ++c) {
            const double x = mean[c] / static_cast<double>((std::max)(values.count, std::size_t{1}));
            // One bad value spoils no other token's radius.
            d.centre[c] = std::isfinite(x) ? static_cast<float>(x) : 0.0f;
        }
        d.radius.resize(values.count);
        for (std::size_t i = 0; i < values.count; ++i) {
            d.radius[i] = radius_of(values[i], d.centre);
        }
    }

    [[nodiscard]] static float radius_of(const T* value, std::span<const float> centre) {
        double square = 0;
        for (std::size_t c = 0; c < centre.size(); ++c) {
            const double x = static_cast<double>(to_float(value[c])) - static_cast<double>(centre[c]);
            square += x * x;
        }
        // Rounded up: a radius is a bound.
        return static_cast<float>(std::sqrt(square) * (1 + 0x1p-23));
    }

    /// Makes the tokens drawn the resident ones. Where it throws, nothing has changed.
    void take(request& r, std::vector<draw>& draws) {
        std::size_t needed = 0;
        std::size_t held = 0;
        for (std::size_t h = 0; h < r.heads.size(); ++h) {
            draws[h].rows.resize(draws[h].sample.size());
            needed += draws[h].sample.size();
            held += r.heads[h].resident.size();
        }
        detail::check<out_of_capacity>(needed <= held + device_.free_rows(), "the sample of ", r.positions.size(),
                                       " tokens has ", needed, " resident rows; the request holds ", held, " and ",
                                       device_.free_rows(), " are free");
        for (auto& head : r.heads) {
            device_.release(head.resident);
            head.staging.clear();
        }
        for (draw& d : draws) {
            device_.allocate(d.rows);
        }
        in_parallel(r.heads.size(), [&](std::size_t h, std::size_t, const Backend&) {
            draw& d = draws[h];
            auto& head = r.heads[h];
            head.replace_residents(d.sample, d.rows, d.r);
            head.uniform.assign(d.uniform.begin(), d.uniform.end());
            if (needs_values) {
                head.centre = std::move(d.centre);
                head.radius.assign(d.radius.begin(), d.radius.end());
            }
            for (std::size_t i = 0; i < d.sample.size(); ++i) {
                device_.write(d.rows[i], host_.row(head.host[d.sample[i]]));
            }
            head.sketch = std::move(d.sketch);
        });
        r.draw_positions = r.positions;
        r.pending = 0;
        ++r.draws;
    }

    std::size_t erase_tokens(request& r, std::size_t from, std::size_t to) {
        if (from == to) {
            return 0;
        }
        std::vector<Sketch> sketches;  // of what remains, where a sketch cannot forget: the only step that may throw
        if constexpr (!erasable_sketch<Sketch>) {
            std::vector<row_id> remaining;
            for (const auto& head : r.heads) {
                const auto at = [&](std::size_t i) {
                    return head.host.begin() + static_cast<std::ptrdiff_t>((std::min)(i, head.sketch.size()));
                };
                remaining.assign(at(0), at(from));
                remaining.insert(remaining.end(), at(to), at(head.sketch.size()));
                sketches.push_back(remaining.size() < head.sketch.size() ? sketch_of_rows(remaining) : head.sketch);
            }
        }
        const std::size_t n = r.positions.size();
        for (std::size_t h = 0; h < r.heads.size(); ++h) {
            auto& head = r.heads[h];
            host_.release(std::span<const row_id>(head.host).subspan(from, to - from));
            for (std::size_t i = from; i < to; ++i) {
                if (head.slot[i] != head.offloaded) {
                    device_.release({&head.resident[head.slot[i]], 1});
                }
            }
            head.erase(from, to);
            if constexpr (erasable_sketch<Sketch>) {
                const std::size_t sketched = head.sketch.size();
                head.sketch.erase((std::min)(from, sketched), (std::min)(to, sketched));
            } else {
                head.sketch = std::move(sketches[h]);
            }
        }
        // Pending tokens are the last ones.
        const std::size_t compressed = n - r.pending;
        r.pending -= to > compressed ? to - (std::max)(from, compressed) : 0;
        const auto cut = [&](auto& positions) {
            const std::size_t size = positions.size();
            positions.erase(positions.begin() + static_cast<std::ptrdiff_t>((std::min)(from, size)),
                            positions.begin() + static_cast<std::ptrdiff_t>((std::min)(to, size)));
        };
        cut(r.positions);
        cut(r.draw_positions);
        return to - from;
    }

    [[nodiscard]] Sketch sketch_of_rows(std::span<const row_id> host_rows) const {
        Sketch sketch = prototype_;
        const rows<T> keys = host_.view(host_rows, 0, config_.shape.key_dim);
        sketch.fit(exec_, keys);
        sketch.append(exec_, keys);
        return sketch;
    }

    /// Turns the keys of tokens from ... to-1 in host memory, then makes what stems from them follow. Where rotate or a
    /// sketch throws, the keys are put back.
    template <class Rotate>
    void rotate_keys(request& r, std::size_t from, std::size_t to, position_t delta, Rotate& rotate) {
        const std::size_t width = config_.shape.key_dim;
        struct saved_keys {
            std::vector<T> elements;
            std::vector<T*> keys;
            std::size_t width;
            ~saved_keys() {
                for (std::size_t i = 0; i < keys.size(); ++i) {
                    std::memcpy(static_cast<void*>(keys[i]), elements.data() + i * width, width * sizeof(T));
                }
            }
        } saved{{}, {}, width};
        saved.elements.reserve(r.heads.size() * (to - from) * width);
        saved.keys.reserve(r.heads.size() * (to - from));
        std::vector<Sketch> sketches;
        for (const auto& head : r.heads) {
            for (std::size_t i = from; i < to; ++i) {
                T* key = host_.row(head.host[i]);
                saved.elements.insert(saved.elements.end(), key, key + width);
                saved.keys.push_back(key);
                rotate(std::span<T>(key, width), delta);
            }
            const std::size_t sketched = head.sketch.size();
            sketches.push_back(sketched > from ? sketch_of_rows(std::span<const row_id>(head.host).first(sketched))
                                               : head.sketch);
        }
        saved.keys.clear();
        for (std::size_t h = 0; h < r.heads.size(); ++h) {
            auto& head = r.heads[h];
            for (std::size_t i = from; i < to; ++i) {
                if (head.slot[i] != head.offloaded) {
                    device_.write(head.resident[head.slot[i]], host_.row(head.host[i]));
                }
            }
            head.staging.clear();
            head.sketch = std::move(sketches[h]);
        }
    }

    cache_config config_;
    Sketch prototype_;
    Backend exec_;
    Planner planner_;
    Exact exact_;
    Target target_;
    step_policies policies_;
    row_pool<T> host_;
    row_pool<T> device_;
    row_pool<T> staging_;
    std::vector<row_id> staging_rows_;  // of a KV head, while open() deals them out
    std::vector<request> requests_;
    std::vector<detail::step_workspace<Planner>> workspaces_;
    std::vector<std::exception_ptr> errors_;
    step_report report_;
};

}  // namespace verkv::inline v0
