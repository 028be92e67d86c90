// Part 3: the field's estimators on the decode steps of a trace.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "baselines.hpp"
#include "common/dense.hpp"
#include "common/registry.hpp"
#include "common/trace.hpp"
#include "row.hpp"
#include "settings.hpp"
#include "verkv/attend/attend.hpp"
#include "verkv/cpu/weights.hpp"
#include "verkv/sample/inclusion.hpp"
#include "verkv/score/importance.hpp"

namespace compare {

/// Everything of a trace that does not depend on the method.
template <class T>
struct baseline_ground {
    const example::trace<T>& t;
    std::vector<std::size_t> steps;
    const example::truth& dense;
    const example::attention_shares& exact;
    std::vector<std::vector<float>> r;  ///< [KV head][token]: of the sample that a cache would hold

    [[nodiscard]] std::size_t tokens(std::size_t step) const {
        return static_cast<std::size_t>(t.decode_position(steps[step])) + 1;
    }
};

template <class T>
baseline_ground<T> ground_of(const example::trace<T>& t, const settings& s, std::span<const std::size_t> steps,
                             const example::truth& dense, const example::attention_shares& exact) {
    baseline_ground<T> g{t, {steps.begin(), steps.end()}, dense, exact, {}};
    for (std::vector<float>& importance : example::importance_of(t, s.scorer)) {
        verkv::to_importance(verkv::cpu{}, std::span<float>(importance));
        std::vector<float> r(importance.size());
        verkv::inclusion_probabilities(verkv::cpu{}, importance, verkv::budget::fraction(s.kept), {s.sink, s.local}, r);
        g.r.push_back(std::move(r));
    }
    return g;
}

/// Weights that rank tokens: of each query head and step, and what their sketch takes.
struct ranking {
    std::string name = {};
    example::attention_shares weights = {};  ///< empty: the exact ones
    double bytes_per_token = 0;
};

template <class T>
ranking ranking_of(const baseline_ground<T>& g, const std::string& name, const example::sketch_options& options) {
    const verkv::geometry& shape = g.t.shape;
    ranking found{name, {}, 0};
    example::with_sketch<T>(name, options, [&](auto sketch) {
        if constexpr (example::detail::is_exact<decltype(sketch)>()) {
            found.bytes_per_token = static_cast<double>(shape.key_dim * sizeof(T));
        } else {
            found.weights.resize(g.steps.size() * shape.query_heads);
            std::vector<float> queries(shape.group() * shape.key_dim);
            for (std::size_t h = 0; h < shape.kv_heads; ++h) {
                const auto keys = g.t.keys().head(h);
                auto own = sketch;
                own.fit(verkv::cpu{}, keys.slice(0, g.t.prefill_tokens));
                own.append(verkv::cpu{}, keys.slice(0, g.t.prefill_tokens));
                for (std::size_t step = 0; step < g.steps.size(); ++step) {
                    const std::size_t n = g.tokens(step);
                    own.append(verkv::cpu{}, keys.slice(own.size(), n - own.size()));
                    example::read_queries(g.t, g.steps[step], h, std::span(queries));
                    std::vector<float> logits(shape.group() * n);
                    const auto view = verkv::matrix_of(std::span(logits), shape.group(), n);
                    own.estimate(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(queries), shape.key_dim),
                                 shape.logit_scale(), view);
                    for (std::size_t i = 0; i < shape.group(); ++i) {
                        verkv::weigh(verkv::cpu{}, view.row(i));
                        const auto row = view.row(i);
                        found.weights[step * shape.query_heads + h * shape.group() + i].assign(row.begin(), row.end());
                    }
                }
                found.bytes_per_token += static_cast<double>(own.bytes()) / static_cast<double>(own.size()) /
                                         static_cast<double>(shape.kv_heads);
            }
        }
        return 0;
    });
    return found;
}

/// Adds up what a method does, decision by decision and KV head by KV head.
class tally {
public:
    tally(row start, double epsilon) : row_(std::move(start)) {
        row_.epsilon = epsilon;
        for (double* x : {&row_.attention, &row_.error_mean, &row_.rows, &row_.keys, &row_.rows_beyond,
                          &row_.failures_denominator, &row_.failures_output}) {
            *x = 0;
        }
    }

    void add_decision(double denominator_error, double output_error, double attention) {
        ++row_.decisions;
        row_.attention += attention;
        row_.error_mean += output_error;
        errors_.push_back(output_error);
        // Written so that NaN counts as a failure.
        row_.failures_denominator += !(denominator_error <= row_.epsilon);
        row_.failures_output += !(output_error <= row_.epsilon);
    }

    /// What the heads of a group read: shares of the context.
    void add_head(double rows, double keys, double beyond, double seconds) {
        ++heads_;
        row_.rows += rows;
        row_.keys += keys;
        row_.rows_beyond += beyond;
        seconds_.push_back(seconds);
    }

    void claim(verkv::claim what) {
        row_.claims = what == verkv::claim::denominator ? "D" : what == verkv::claim::output ? "output" : "nothing";
    }

    [[nodiscard]] row finish() {
        for (double* x : {&row_.attention, &row_.error_mean, &row_.failures_denominator, &row_.failures_output}) {
            *x /= static_cast<double>(row_.decisions);
        }
        for (double* x : {&row_.rows, &row_.keys, &row_.rows_beyond}) {
            *x /= static_cast<double>(heads_);
        }
        row_.error_p99 = example::quantile(errors_, 0.99);
        row_.milliseconds = 1e3 * example::median(seconds_);
        return row_;
    }

private:
    row row_;
    std::size_t heads_ = 0;
    std::vector<double> errors_, seconds_;
};

/// Of what was read, rows and keys alone outside the windows, and rows expected outside the sample, over n.
template <class T>
void add_reads(const baseline_ground<T>& g, const verkv::read_tally& read, std::size_t n, std::size_t kv_head,
               verkv::windows fixed, double seconds, tally& sum) {
    const verkv::rows_read found = read.count([&](std::size_t i) { return fixed.fixed(i, n); });
    double beyond = 0;
    const std::vector<float>& r = g.r[kv_head];
    (void)read.count([&](std::size_t i) {
        beyond += i < r.size() ? 1 - static_cast<double>(r[i]) : 0;
        return true;
    });
    const auto context = static_cast<double>(n);
    sum.add_head(static_cast<double>(found.values) / context, static_cast<double>(found.keys - found.values) / context,
                 beyond / context, seconds);
}

/// One method, ranked by one sketch, at one epsilon. `start` names it.
template <class T, class Baseline>
row run_baseline(const baseline_ground<T>& g, const settings& s, const ranking& by, const Baseline& method,
                 double epsilon, row start) {
    const verkv::geometry& shape = g.t.shape;
    tally sum(std::move(start), epsilon);
    typename Baseline::workspace memory;
    verkv::selection selected;
    verkv::attend_workspace attending;
    std::vector<float> queries(shape.group() * shape.key_dim), output(shape.value_dim), lse(1);
    for (std::size_t draw = 0; draw < s.redraws; ++draw) {
        for (std::size_t step = 0; step < g.steps.size(); ++step) {
            const std::size_t n = g.tokens(step);
            const verkv::windows fixed{s.sink, s.local + (n - (std::min)(n, g.t.prefill_tokens))};
            for (std::size_t h = 0; h < shape.kv_heads; ++h) {
                example::read_queries(g.t, g.steps[step], h, std::span(queries));
                verkv::read_tally read(n);
                double seconds = 0;
                for (std::size_t i = 0; i < shape.group(); ++i) {
                    const std::size_t head = h * shape.group() + i;
                    const std::size_t at = step * shape.query_heads + head;
                    verkv::decision_view<T> view;
                    view.weight = g.exact[at];
                    view.estimate = by.weights.empty() ? view.weight : std::span<const float>(by.weights[at]);
                    view.values = g.t.values().head(h).slice(0, n);
                    view.fixed = fixed;
                    view.stream = verkv::fresh_stream({.seed = s.seed + draw, .layer = g.t.layer}, at);
                    view.promise = {epsilon, s.delta};
                    const auto begin = std::chrono::steady_clock::now();
                    method.select(verkv::cpu{}, view, memory, selected);
                    verkv::rows<T> keys = g.t.keys().head(h);
                    verkv::rows<T> values = g.t.values().head(h);
                    keys.ids = values.ids = selected.token.data();
                    keys.count = values.count = selected.token.size();
                    verkv::attend(
                        verkv::cpu{},
                        verkv::contiguous_rows(std::span<const float>(queries), shape.key_dim).slice(i, 1),
                        shape.logit_scale(), keys, values,
                        verkv::matrix_of(std::span<const float>(selected.log_weight), 1, selected.log_weight.size()),
                        attending, verkv::matrix_of(std::span(output), 1, output.size()), std::span(lse));
                    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
                    read.add(selected);
                    sum.claim(selected.claims);
                    double attention = 0;
                    for (const verkv::token_index token : selected.token) {
                        attention += static_cast<double>(g.exact[at][token]);
                    }
                    sum.add_decision(std::fabs(verkv::estimate_denominator(selected, g.exact[at]) - 1),
                                     example::output_error(g.t, g.dense, step, head, output.data()), attention);
                }
                add_reads(g, read, n, h, fixed, seconds, sum);
            }
        }
    }
    return sum.finish();
}

/// RetroInfer's clusters: nothing is drawn, and nothing depends on a sketch or on epsilon.
template <class T>
std::vector<row> run_clusters(const baseline_ground<T>& g, const settings& s, const row& start) {
    const verkv::geometry& shape = g.t.shape;
    std::vector<tally> sums;
    for (const double epsilon : s.epsilon) {
        sums.emplace_back(start, epsilon);
    }
    std::vector<float> queries(shape.group() * shape.key_dim), output(shape.value_dim), other(shape.value_dim);
    verkv::attend_workspace attending;
    verkv::cluster_estimate::workspace memory;
    verkv::cluster_selection selected;
    double bytes = 0;
    for (std::size_t h = 0; h < shape.kv_heads; ++h) {
        verkv::key_clusters clusters;
        const auto keys = g.t.keys().head(h);
        const auto values = g.t.values().head(h);
        clusters.fit(verkv::cpu{}, keys.slice(0, g.t.prefill_tokens), values.slice(0, g.t.prefill_tokens),
                     {s.sink, s.local});
        bytes += static_cast<double>(clusters.bytes()) / static_cast<double>(g.t.prefill_tokens * shape.kv_heads);
        std::vector<float> logits(clusters.size());
        for (std::size_t step = 0; step < g.steps.size(); ++step) {
            const std::size_t n = g.tokens(step);
            const verkv::windows fixed{s.sink, s.local + (n - (std::min)(n, g.t.prefill_tokens))};
            example::read_queries(g.t, g.steps[step], h, std::span(queries));
            verkv::read_tally read(n);
            double seconds = 0;
            for (std::size_t i = 0; i < shape.group(); ++i) {
                const std::size_t head = h * shape.group() + i;
                const std::size_t at = step * shape.query_heads + head;
                const auto query = verkv::contiguous_rows(std::span<const float>(queries), shape.key_dim).slice(i, 1);
                const auto begin = std::chrono::steady_clock::now();
                score_rows(verkv::cpu{}, query, shape.logit_scale(), clusters.centroids(),
                           verkv::matrix_of(std::span(logits), 1, logits.size()));
                verkv::cluster_estimate{}.select(verkv::cpu{}, clusters, logits, n, fixed, memory, selected);
                float lse = 0;
                verkv::attend_clusters(verkv::cpu{}, query, shape.logit_scale(), keys, values, clusters, selected,
                                       attending, std::span(output), lse, std::span(other));
                seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
                read.add(selected.exact);
                double attention = 0;
                for (const verkv::token_index token : selected.exact.token) {
                    attention += static_cast<double>(g.exact[at][token]);
                }
                const double ratio = std::exp(static_cast<double>(lse) - static_cast<double>(g.dense.lse[at]));
                const double error = example::output_error(g.t, g.dense, step, head, output.data());
                for (tally& sum : sums) {
                    sum.add_decision(std::fabs(ratio - 1), error, attention);
                }
            }
            for (tally& sum : sums) {
                add_reads(g, read, n, h, fixed, seconds, sum);
            }
        }
    }
    std::vector<row> rows;
    for (tally& sum : sums) {
        rows.push_back(sum.finish());
        rows.back().sketch_bytes = bytes;
    }
    return rows;
}

/// All baselines of the settings: by epsilon, then as they were named. `done` is told of each method.
template <class T, class Done>
std::vector<row> run_baselines(const baseline_ground<T>& g, const settings& s, const example::sketch_options& options,
                               Done&& done) {
    std::vector<ranking> rankings;
    for (const std::string& name : s.ranks) {
        rankings.push_back(ranking_of(g, name, options));
    }
    std::vector<row> rows;
    for (const std::string& name : s.baselines) {
        row start;
        start.part = "baselines";
        start.method = name;
        if (name == clusters_name) {
            start.claims = "nothing";
            for (row& r : run_clusters(g, s, start)) {
                rows.push_back(std::move(r));
            }
            done(name);
            continue;
        }
        example::with_named(baselines, name, [&](const auto& part) {
            const bool counted = (part.uses & uses_count) != 0;
            const bool ranked = (part.uses & uses_ranking) != 0;
            const std::vector<double> counts = counted ? s.baseline.counts : std::vector<double>{0.0};
            const ranking unranked;
            const std::span<const ranking> used = ranked ? std::span<const ranking>(rankings) : std::span(&unranked, 1);
            for (const double count : counts) {
                for (const ranking& by : used) {
                    for (const double epsilon : s.epsilon) {
                        start.method = counted ? fmt::format("{} {:g} %", name, 100 * count) : name;
                        start.sketch = by.name;
                        if (ranked) {
                            set_sketch_setting(start, by.name, options.bits, options.pairs);
                        }
                        start.sketch_bytes = ranked ? by.bytes_per_token : row::none;
                        rows.push_back(run_baseline(
                            g, s, by, part.make({epsilon, s.baseline.heavy, s.baseline.pilot, count}), epsilon, start));
                    }
                }
            }
        });
        done(name);
    }
    std::stable_sort(rows.begin(), rows.end(), [](const row& a, const row& b) { return a.epsilon < b.epsilon; });
    return rows;
}

}  // namespace compare
