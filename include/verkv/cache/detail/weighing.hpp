// The first part of a step: what each token of a KV head weighs, for each query head.
#pragma once

#include <cmath>
#include <limits>
#include <span>

#include "verkv/cache/detail/kv_head.hpp"
#include "verkv/cache/detail/step_workspace.hpp"
#include "verkv/cache/policies.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/core/report.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/cpu/weights.hpp"

namespace verkv::inline v0::detail {

/// Sketches whose estimate is the logit itself say so: `static constexpr bool exact = true`.
template <class S>
inline constexpr bool is_exact = requires {
    requires S::exact;
};

/// Everything it touches belongs to one KV head of one request, or to its worker.
template <class T, class Sketch, class Planner, class Exact, class Backend>
struct weighing {
    const Backend& exec;
    const Planner& planner;
    const Exact& exact;
    const step_policies& policies;
    tolerance promise;
    float scale;
    std::size_t key_dim;
    std::size_t value_dim;
    const row_pool<T>& host;
    const row_pool<T>& device;
    row_pool<T>& staging;
    kv_head<Sketch>& head;
    step_workspace<Planner>& w;
    kv_head_report& report;
    std::span<query_head_report> head_reports;

    static constexpr bool has_bounds = bounded_sketch<Sketch, Backend, T>;

    std::size_t heads() const { return head_reports.size(); }
    std::size_t tokens() const { return head.host.size(); }
    bool carries_bounds() const { return has_bounds && policies.bounds == bound_policy::carry; }

    matrix_view<float> matrix(std::vector<float>& memory, std::size_t columns) const {
        return {memory.data(), heads(), columns, static_cast<std::ptrdiff_t>(columns)};
    }

    rows<float> queries() const {
        return {w.queries.data(), static_cast<std::ptrdiff_t>(key_dim), heads(), key_dim, nullptr};
    }

    /// Logits of the resident rows, and weights of all tokens; exact ones for the shortlist.
    void weigh_tokens() {
        score_rows(exec, queries(), scale, device.view(head.resident, 0, key_dim),
                   matrix(w.resident_logits, head.resident.size()));
        estimate_logits();
        weigh_all();
        if constexpr (!is_exact<Sketch>) {
            refine(matrix(w.weights, tokens()));
        }
    }

private:
    /// Logits of all tokens: the sketch's, and the exact ones of resident rows where the rule takes them. With bounds,
    /// logits are raised by them to upper bounds.
    void estimate_logits() {
        const auto resident = matrix(w.resident_logits, head.resident.size());
        const auto logits = matrix(w.weights, tokens());
        const std::size_t sketched = head.sketch.size();
        const auto bounds = matrix(w.bounds, tokens());
        if (carries_bounds()) {
            std::fill_n(bounds.data, heads() * tokens(), 0.0f);
        }
        if (sketched > 0) {
            const matrix_view<float> out{logits.data, heads(), sketched, logits.stride};
            if constexpr (has_bounds) {
                if (carries_bounds()) {
                    head.sketch.estimate(exec, queries(), scale, out, {bounds.data, heads(), sketched, bounds.stride});
                } else {
                    head.sketch.estimate(exec, queries(), scale, out);
                }
            } else {
                head.sketch.estimate(exec, queries(), scale, out);
            }
        }
        for (std::size_t i = 0; i < head.resident.size(); ++i) {
            const token_index token = head.resident_token[i];
            if (exact.resident_too || head.odds[token] == 0) {
                for (std::size_t g = 0; g < heads(); ++g) {
                    logits.row(g)[token] = resident.row(g)[i];
                    if (carries_bounds()) {
                        bounds.row(g)[token] = 0;
                    }
                }
            }
        }
        if (carries_bounds()) {
            for (std::size_t i = 0; i < heads() * tokens(); ++i) {
                // Beyond the cap there is no reference (lower_references()), and everything is fetched: upper weights
                // only have to stay finite.
                logits.data[i] += smaller(bounds.data[i], widest_bound);
            }
        }
    }

    void weigh_all() {
        const auto weights = matrix(w.weights, tokens());
        for (std::size_t g = 0; g < heads(); ++g) {
            const weighed all = weigh(exec, weights.row(g));
            w.shift[g] = all.shift;
            w.total[g] = all.total;
            w.reference[g] = all.total;
        }
        if (carries_bounds()) {
            lower_references();
        }
    }

    /// A logit that may be this far off may be anything.
    static constexpr float widest_bound = 60;

    /// D by the lower bounds; 0 where some bound is too wide to say anything: an upper weight e^{s + b} is e^{-2b} of
    /// itself at least.
    void lower_references() {
        const auto weights = matrix(w.weights, tokens());
        const auto bounds = matrix(w.bounds, tokens());
        for (std::size_t g = 0; g < heads(); ++g) {
            const std::span<float> least{w.share.data(), tokens()};
            const bool unbounded = largest_of(bounds.row(g)) >= widest_bound;
            for (std::size_t i = 0; i < tokens(); ++i) {
                least[i] = -2 * smaller(bounds.row(g)[i], widest_bound);
            }
            exponentiate(least, 0);
            for (std::size_t i = 0; i < tokens(); ++i) {
                least[i] *= weights.row(g)[i];
            }
            w.reference[g] = unbounded ? 0 : sum_of(least);
        }
    }

    /// Replaces the weights of the shortlist by exact ones.
    void refine(const matrix_view<float>& weights) {
        if (exact.size == 0 || head.sketch.size() == 0) {
            return;
        }
        for (std::size_t g = 0; g < heads(); ++g) {
            w.factor[g] = static_cast<float>(1 / w.total[g]);
        }
        const std::span<float> share{w.share.data(), tokens()};
        largest_share(weights, w.factor, head.odds, share);
        if (exact.resident_too) {
            for (const token_index token : head.resident_token) {
                share[token] = -std::numeric_limits<float>::infinity();
            }
        }
        top_k(exec, share, exact.size * heads(), w.top, w.shortlist);
        score_shortlist();
        bool lost = false;
        for (std::size_t g = 0; g < heads(); ++g) {
            const std::span<float> weight = weights.row(g);
            std::size_t count = 0;
            for_shortlist(g, [&](token_index, float logit) { w.scratch[count++] = logit; });
            exponentiate(std::span<float>(w.scratch).first(count), w.shift[g]);
            count = 0;
            for_shortlist(g, [&](token_index t, float) { weight[t] = w.scratch[count++]; });
            w.total[g] = w.reference[g] = sum_of(weight);
            lost = lost || w.total[g] < 0x1p-24 || w.total[g] > 0x1p80;
        }
        if (lost || carries_bounds()) {
            // The sketch had the largest logit far too high or too low: beside the true one, the weights that were
            // shifted by it have underflowed or overflow.
            estimate_logits();
            const auto bounds = matrix(w.bounds, tokens());
            for (std::size_t g = 0; g < heads(); ++g) {
                const std::span<float> logits = weights.row(g);
                for_shortlist(g, [&](token_index t, float logit) {
                    logits[t] = logit;
                    if (carries_bounds()) {
                        bounds.row(g)[t] = 0;
                    }
                });
            }
            weigh_all();
        }
    }

    /// Calls use(token, exact logit) for each token of the shortlist.
    template <class F>
    void for_shortlist(std::size_t g, F&& use) const {
        const float* offloaded = w.shortlist_logits.data() + g * w.shortlist_tokens.size();
        for (std::size_t i = 0; i < w.shortlist_tokens.size(); ++i) {
            use(w.shortlist_tokens[i], offloaded[i]);
        }
        const float* resident = w.resident_logits.data() + g * head.resident.size();
        for (const token_index t : w.shortlist) {
            if (head.slot[t] != head.offloaded) {
                use(t, resident[head.slot[t]]);
            }
        }
    }

    /// Exact logits of the shortlisted tokens that are not resident, staged ones first: only the keys of the others are
    /// read from host memory.
    void score_shortlist() {
        w.shortlist_tokens.clear();
        w.shortlist_rows.clear();
        for (const token_index t : w.shortlist) {
            if (head.slot[t] == head.offloaded && head.staging.holds(t)) {
                w.shortlist_tokens.push_back(t);
                w.shortlist_rows.push_back(head.staging.row_of(t));
            }
        }
        const std::size_t staged = w.shortlist_tokens.size();
        for (const token_index t : w.shortlist) {
            if (head.slot[t] == head.offloaded && !head.staging.holds(t)) {
                w.shortlist_tokens.push_back(t);
                w.shortlist_rows.push_back(head.host[t]);
            }
        }
        const std::size_t all = w.shortlist_tokens.size();
        const auto logits = matrix(w.shortlist_logits, all);
        const std::span<const row_id> rows{w.shortlist_rows.data(), all};
        score_rows(exec, queries(), scale, staging.view(rows.first(staged), 0, key_dim),
                   {logits.data, heads(), staged, logits.stride});
        score_rows(exec, queries(), scale, host.view(rows.subspan(staged), 0, key_dim),
                   {logits.data + staged, heads(), all - staged, logits.stride});
        report.shortlist_keys_read = all - staged;
        report.bytes_moved += report.shortlist_keys_read * key_dim * sizeof(T);
    }
};

}  // namespace verkv::inline v0::detail
