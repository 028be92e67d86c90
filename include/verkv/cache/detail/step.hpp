// One decode step of one KV head: estimate, decide, fetch, attend.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "verkv/cache/detail/kv_head.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/core/random.hpp"
#include "verkv/core/report.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/cpu/softmax_sum.hpp"
#include "verkv/cpu/weights.hpp"
#include "verkv/plan/top_k.hpp"

namespace verkv::inline v0::detail {

/// Sketches whose estimate is the logit itself say so: `static constexpr bool exact = true`.
template <class S>
inline constexpr bool is_exact = requires {
    requires S::exact;
};

/// Memory of a step; one for each worker.
template <class Planner>
struct step_workspace {
    std::vector<float> queries;           // [G, key_dim]
    std::vector<float> weights;           // [G, n]: logits, then weights
    std::vector<float> resident_logits;   // [G, resident]
    std::vector<float> shortlist_logits;  // [G, shortlist]
    std::vector<float> staged_logits;     // [G, staging]
    std::vector<float> share;             // [n]
    std::vector<float> factor;            // [G]
    std::vector<float> shift;             // [G]
    std::vector<double> total;            // [G]
    std::vector<float> log_weight;        // [G, fetched]
    std::vector<float> resident_weight;   // [resident]
    std::vector<token_index> shortlist;
    std::vector<row_id> shortlist_rows;
    std::vector<token_index> shortlist_tokens;
    std::vector<token_index> fetched;
    std::vector<token_index> merged;
    std::vector<row_id> staged_rows;
    std::vector<plan> plans;
    std::vector<float> lse;
    top_k_workspace top;
    softmax_sum sum;
    typename Planner::workspace planner;

    void reserve(std::size_t heads, std::size_t key_dim, std::size_t value_dim, std::size_t tokens,
                 std::size_t shortlisted, std::size_t staging) {
        queries.resize(heads * key_dim);
        weights.resize(heads * tokens);
        resident_logits.resize(heads * tokens);
        shortlist_logits.resize(heads * shortlisted);
        staged_logits.resize(heads * staging);
        share.resize(tokens);
        factor.resize(heads);
        shift.resize(heads);
        total.resize(heads);
        log_weight.resize(heads * tokens);
        resident_weight.resize(tokens);
        shortlist.reserve(shortlisted);
        shortlist_rows.reserve(shortlisted);
        shortlist_tokens.reserve(shortlisted);
        fetched.reserve(tokens);
        merged.reserve(tokens);
        staged_rows.resize(staging);
        plans.resize(heads);
        for (plan& p : plans) {
            p.entries.reserve(tokens);
        }
        lse.resize(heads);
        top.reserve(tokens);
        sum.reserve(heads, value_dim);
        planner.reserve(tokens);
    }
};

/// Seconds since the last call.
class lap_timer {
public:
    double lap() {
        const auto now = std::chrono::steady_clock::now();
        const double seconds = std::chrono::duration<double>(now - last_).count();
        last_ = now;
        return seconds;
    }

private:
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// The step. Everything it touches belongs to one KV head of one request, or to its worker.
template <class T, class Sketch, class Planner, class Exact, class Target, class Backend>
struct step {
    const Backend& exec;
    const Planner& planner;
    const Exact& exact;
    const Target& target;
    const tolerance& promise;
    float scale;
    std::size_t key_dim;
    std::size_t value_dim;
    const row_pool<T>& host;
    const row_pool<T>& device;
    row_pool<T>& staging;
    kv_head<Sketch>& head;
    std::span<const position_t> draw_position;  // of each token at the draw
    uniform_stream stream;
    bool adopted;  // the sample was not drawn with `stream`
    step_workspace<Planner>& w;
    kv_head_report& report;
    std::span<query_head_report> head_reports;

    std::size_t heads() const { return head_reports.size(); }
    std::size_t tokens() const { return head.host.size(); }

    matrix_view<float> matrix(std::vector<float>& memory, std::size_t columns) const {
        return {memory.data(), heads(), columns, static_cast<std::ptrdiff_t>(columns)};
    }

    rows<float> queries() const {
        return {w.queries.data(), static_cast<std::ptrdiff_t>(key_dim), heads(), key_dim, nullptr};
    }

    void run(matrix_view<float> output, std::span<float> lse) {
        lap_timer timer;
        report = {};
        report.tokens = tokens();
        report.rows_resident = head.resident.size();
        estimate();
        report.sketch_seconds = timer.lap();
        decide();
        report.decide_seconds = timer.lap();
        attend(output, lse, timer);
    }

    /// Logits of the resident rows, and weights of all tokens; exact ones for the shortlist.
    void estimate() {
        score_rows(exec, queries(), scale, device.view(head.resident, 0, key_dim),
                   matrix(w.resident_logits, head.resident.size()));
        estimate_logits();
        weigh_all();
        if constexpr (!is_exact<Sketch>) {
            refine(matrix(w.weights, tokens()));
        }
    }

    /// Logits of all tokens: the sketch's, and the exact ones of resident rows where the rule takes them.
    void estimate_logits() {
        const auto resident = matrix(w.resident_logits, head.resident.size());
        const auto logits = matrix(w.weights, tokens());
        const std::size_t sketched = head.sketch.size();
        if (sketched > 0) {
            head.sketch.estimate(exec, queries(), scale, {logits.data, heads(), sketched, logits.stride});
        }
        for (std::size_t i = 0; i < head.resident.size(); ++i) {
            const token_index token = head.resident_token[i];
            if (Exact::resident_too || head.odds[token] == 0) {
                for (std::size_t g = 0; g < heads(); ++g) {
                    logits.row(g)[token] = resident.row(g)[i];
                }
            }
        }
    }

    void weigh_all() {
        const auto weights = matrix(w.weights, tokens());
        for (std::size_t g = 0; g < heads(); ++g) {
            const weighed all = weigh(exec, weights.row(g));
            w.shift[g] = all.shift;
            w.total[g] = all.total;
        }
    }

    void decide() {
        const auto weights = matrix(w.weights, tokens());
        for (std::size_t g = 0; g < heads(); ++g) {
            plan& p = w.plans[g];
            if (std::isfinite(w.total[g]) && w.total[g] > 0) {
                planner.plan(exec, target.masses(weights.row(g), head.odds, w.total[g]), promise, w.planner, p);
            } else {
                // No token, or a key that is not a number: nothing to plan, and nothing to certify.
                p.clear();
                p.certificate_before = p.certificate_after =
                    tokens() == 0 ? 0 : std::numeric_limits<double>::quiet_NaN();
            }
            head_reports[g] = {};
            head_reports[g].certificate_before = p.certificate_before;
            head_reports[g].certificate_after = p.certificate_after;
            head_reports[g].rows_shrunk = static_cast<std::uint32_t>(p.shrunk);
        }
        unite();
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
        if constexpr (Exact::resident_too) {
            for (const token_index token : head.resident_token) {
                share[token] = -std::numeric_limits<float>::infinity();
            }
        }
        top_k(exec, share, exact.size, w.top, w.shortlist);
        score_shortlist();
        bool lost = false;
        for (std::size_t g = 0; g < heads(); ++g) {
            const std::span<float> weight = weights.row(g);
            for_shortlist(g, [&](token_index t, float logit) { weight[t] = std::exp(logit - w.shift[g]); });
            w.total[g] = sum_of(weight);
            lost = lost || w.total[g] < 0x1p-24 || w.total[g] > 0x1p80;
        }
        if (lost) {
            // The sketch had the largest logit far too high or too low: beside the true one, the weights that were
            // shifted by it have underflowed or overflow.
            estimate_logits();
            for (std::size_t g = 0; g < heads(); ++g) {
                const std::span<float> logits = weights.row(g);
                for_shortlist(g, [&](token_index t, float logit) { logits[t] = logit; });
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

    /// Whether a plan uses a token that it lists. One that is not resident had U >= r; where the sample was adopted,
    /// no more than that is known of its U.
    bool uses(const plan_entry& e) const {
        if (e.probability >= 1 || head.slot[e.token] != head.offloaded) {
            return true;
        }
        if (!(e.probability > probability_of(static_cast<double>(head.odds[e.token])))) {
            return false;
        }
        const double r = static_cast<double>(head.probability[e.token]);
        const double u = uniform(stream, draw_position[e.token]);
        return sampled(static_cast<double>(e.probability), adopted ? r + (1 - r) * u : u);
    }

    /// The tokens that have to come from host memory: the union over the query heads, ascending.
    void unite() {
        w.fetched.clear();
        for (std::size_t g = 0; g < heads(); ++g) {
            w.merged.clear();
            std::size_t have = 0;
            for (const plan_entry& e : w.plans[g].entries) {
                if (head.slot[e.token] == head.offloaded && uses(e)) {
                    ++head_reports[g].rows_planned;
                    while (have < w.fetched.size() && w.fetched[have] < e.token) {
                        w.merged.push_back(w.fetched[have++]);
                    }
                    have += have < w.fetched.size() && w.fetched[have] == e.token;
                    w.merged.push_back(e.token);
                }
            }
            while (have < w.fetched.size()) {
                w.merged.push_back(w.fetched[have++]);
            }
            std::swap(w.fetched, w.merged);
        }
        report.rows_fetched = w.fetched.size();
    }

    static float log_weight_of(const plan_entry& e) {
        return e.probability == e.shrinkage ? 0.0f
                                            : static_cast<float>(std::log(static_cast<double>(e.shrinkage) /
                                                                          static_cast<double>(e.probability)));
    }

    void attend(matrix_view<float> output, std::span<float> lse, lap_timer& timer) {
        w.sum.reset(heads(), value_dim);
        const auto logits = matrix(w.resident_logits, head.resident.size());
        for (std::size_t g = 0; g < heads(); ++g) {
            const std::span<float> add{w.resident_weight.data(), head.resident.size()};
            std::copy(head.log_weight.begin(), head.log_weight.end(), add.begin());
            for (const plan_entry& e : w.plans[g].entries) {
                if (head.slot[e.token] != head.offloaded) {
                    add[head.slot[e.token]] = log_weight_of(e);
                }
            }
            add_log_weights(logits.row(g), add.data());
        }
        w.sum.add(exec, logits, device.view(head.resident, key_dim, value_dim));
        if (!w.fetched.empty()) {
            spread_log_weights();
            report.attend_seconds += timer.lap();
            // A fetch larger than the staging area goes through it in waves.
            for (std::size_t first = 0; first < w.fetched.size(); first += head.staging.capacity()) {
                const std::size_t n = smaller(head.staging.capacity(), w.fetched.size() - first);
                fetch({w.fetched.data() + first, n});
                report.fetch_seconds += timer.lap();
                attend_staged(first, n);
                report.attend_seconds += timer.lap();
            }
        }
        w.sum.finish(output, lse);
        for (std::size_t g = 0; g < heads(); ++g) {
            head_reports[g].denominator_lse = w.sum.log_sum(g);
            if (std::isnan(w.plans[g].certificate_after)) {
                // Some key is not a number. Rows that were read may not show it; the answer has to.
                constexpr float nan = std::numeric_limits<float>::quiet_NaN();
                std::fill_n(output.row(g).data(), value_dim, nan);
                lse[g] = nan;
                head_reports[g].denominator_lse = std::numeric_limits<double>::quiet_NaN();
            }
        }
        report.attend_seconds += timer.lap();
    }

    /// Log-weight of each fetched token for each query head; a row that only a sibling uses weighs nothing.
    void spread_log_weights() {
        const auto add = matrix(w.log_weight, w.fetched.size());
        for (std::size_t g = 0; g < heads(); ++g) {
            const std::span<float> row = add.row(g);
            std::fill(row.begin(), row.end(), -std::numeric_limits<float>::infinity());
            std::size_t at = 0;
            for (const plan_entry& e : w.plans[g].entries) {
                if (head.slot[e.token] == head.offloaded && uses(e)) {
                    while (w.fetched[at] != e.token) {
                        ++at;
                    }
                    row[at] = log_weight_of(e);
                }
            }
        }
    }

    void fetch(std::span<const token_index> tokens) {
        const std::size_t bytes = host.width() * sizeof(T);
        const std::size_t copied =
            head.staging.stage(tokens, {w.staged_rows.data(), tokens.size()}, [&](token_index token, row_id to) {
                std::memcpy(static_cast<void*>(staging.row(to)), host.row(head.host[token]), bytes);
            });
        report.rows_copied += copied;
        report.bytes_moved += copied * bytes;
    }

    void attend_staged(std::size_t first, std::size_t n) {
        const auto logits = matrix(w.staged_logits, n);
        const auto add = matrix(w.log_weight, w.fetched.size());
        const std::span<const row_id> rows{w.staged_rows.data(), n};
        score_rows(exec, queries(), scale, staging.view(rows, 0, key_dim), logits);
        for (std::size_t g = 0; g < heads(); ++g) {
            add_log_weights(logits.row(g), add.row(g).data() + first);
        }
        w.sum.add(exec, logits, staging.view(rows, key_dim, value_dim));
    }
};

}  // namespace verkv::inline v0::detail
