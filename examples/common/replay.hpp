// Replays the decode steps of a trace through a cache, and compares with dense attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "common/choices.hpp"
#include "common/combination.hpp"
#include "common/dense.hpp"
#include "common/trace.hpp"
#include "verkv/verkv.hpp"

namespace example {

/// A cache for one combination of choices.
template <class T, class Sketch, class Target>
auto make_cache(const trace<T>& t, const replay_options& s, std::size_t requests, std::size_t tokens,
                const Sketch& sketch, const Target& target, const combination& choice, verkv::executor* threads) {
    const verkv::cache_config config{.shape = t.shape,
                                     .layer = t.layer,
                                     .max_requests = requests,
                                     .max_tokens = tokens,
                                     .host_rows = requests * t.shape.kv_heads * tokens,
                                     .resident_rows = requests * t.shape.kv_heads * tokens,
                                     .staging_rows = (std::max)(std::size_t{256}, tokens / 4)};
    return verkv::layer_cache<T, Sketch, chosen_planner, chosen_exact, Target>(
        config, sketch, verkv::cpu{threads}, planner_of(choice, s),
        chosen_exact{s.shortlist, choice.exact_for == "resident"}, target, policies_of(choice, s));
}

/// Decodes once on the first tokens of the prompt, so that what a combination cannot do is known before anything is
/// computed. Throws what compressing and decoding throw.
template <class T, class Sketch, class Target>
void try_out(const trace<T>& t, const replay_options& s, const Sketch& sketch, const Target& target,
             const combination& choice) {
    using namespace verkv;
    const std::size_t tokens = (std::min)(t.prefill_tokens, std::size_t{64});
    auto cache = make_cache(t, s, 1, tokens, sketch, target, choice, nullptr);
    std::vector<position_t> positions(tokens);
    std::iota(positions.begin(), positions.end(), position_t{0});
    const request_id id = cache.open(s.seed);
    cache.prefill(id, t.keys().slice(0, tokens), t.values().slice(0, tokens), positions);
    cache.compress(id, key_norm{}, {budget::fraction(0.5), {0, 0}});
    std::vector<float> output(t.shape.query_heads * t.shape.value_dim);
    for (const double epsilon : s.epsilon) {
        const decode_item<T> item{id, t.queries().token(t.decode_row(0)), output};
        cache.decode(item, {epsilon, s.delta});
    }
}

/// Runs one combination of choices: a result for each epsilon. With `exact`, results say how much attention the
/// resident tokens have.
template <class T, class Sketch, class Target>
std::vector<replay_result> replay(const trace<T>& t, const replay_options& s, const truth& dense,
                                  std::span<const std::size_t> steps, const std::vector<std::vector<float>>& importance,
                                  const Sketch& sketch, const Target& target, const combination& choice,
                                  verkv::executor* threads, const attention_shares* exact = nullptr) {
    using namespace verkv;
    const geometry& shape = t.shape;
    const std::size_t requests = s.epsilon.size();
    auto cache = make_cache(t, s, requests, t.tokens, sketch, target, choice, threads);

    std::vector<replay_result> results(requests);
    struct times {
        std::vector<double> sketch, decide, fetch, attend;
    };
    std::vector<times> seconds(requests);
    std::vector<std::vector<double>> errors(requests);
    double resident_attention = exact == nullptr ? std::numeric_limits<double>::quiet_NaN() : 0;
    std::vector<position_t> positions(t.tokens);
    std::iota(positions.begin(), positions.end(), position_t{0});
    std::vector<std::span<const float>> per_head(importance.begin(), importance.end());
    std::vector<float> output(shape.query_heads * shape.value_dim);
    std::vector<float> lse(shape.query_heads);
    std::vector<request_id> ids(requests);
    double resident_rows = 0;

    for (std::size_t draw = 0; draw < s.redraws; ++draw) {
        // The same sample for every epsilon: a request each, of one seed.
        for (request_id& id : ids) {
            id = cache.open(s.seed + draw);
            cache.prefill(id, t.keys().slice(0, t.prefill_tokens), t.values().slice(0, t.prefill_tokens),
                          std::span(positions).first(t.prefill_tokens));
            cache.compress(id, given_scores(per_head), {budget::fraction(s.kept), {s.sink, s.local}});
        }
        const std::size_t all_rows = requests * shape.kv_heads * t.tokens;
        resident_rows += static_cast<double>(all_rows - cache.free_resident_rows());
        std::size_t have = t.prefill_tokens;
        for (std::size_t step = 0; step < steps.size(); ++step) {
            const auto n = static_cast<std::size_t>(t.decode_position(steps[step])) + 1;
            for (std::size_t e = 0; e < requests; ++e) {
                cache.append(ids[e], t.keys().slice(have, n - have), t.values().slice(have, n - have),
                             std::span(positions).subspan(have, n - have));
                const rows<T> queries = t.queries().token(t.decode_row(steps[step]));
                const decode_item<T> item{ids[e], queries, output, lse};
                const step_report& report = cache.decode(item, {s.epsilon[e], s.delta});
                replay_result& r = results[e];
                const double context = static_cast<double>(n);
                for (std::size_t h = 0; h < shape.kv_heads; ++h) {
                    const kv_head_report& head = report.kv_head(0, h);
                    r.rows_read_per_kv_head += static_cast<double>(head.rows_fetched) / context;
                    r.rows_copied_per_kv_head += static_cast<double>(head.rows_copied) / context;
                    r.rounds += static_cast<double>(head.rounds);
                    r.shortlist_keys_read += static_cast<double>(head.shortlist_keys_read) / context;
                    seconds[e].sketch.push_back(head.sketch_seconds);
                    seconds[e].decide.push_back(head.decide_seconds);
                    seconds[e].fetch.push_back(head.fetch_seconds);
                    seconds[e].attend.push_back(head.attend_seconds);
                }
                for (std::size_t h = 0; h < shape.query_heads; ++h) {
                    const query_head_report& head = report.query_head(0, h);
                    const std::size_t at = step * shape.query_heads + h;
                    const double error = output_error(t, dense, step, h, output.data() + h * shape.value_dim);
                    const double denominator_error =
                        std::fabs(std::expm1(head.denominator_lse - static_cast<double>(dense.lse[at])));
                    ++r.decisions;
                    r.fetching_decisions += head.rows_planned > 0;
                    r.rows_read_per_query_head += head.rows_planned / context;
                    // Written so that NaN counts as a failure.
                    r.failures_denominator += !(denominator_error <= s.epsilon[e]);
                    r.failures_output += !(error <= s.epsilon[e]);
                    r.mean_denominator_error += denominator_error;
                    r.mean_output_error += error;
                    errors[e].push_back(error);
                    r.mean_certificate += head.certificate_after;
                    r.mean_certificate_observed += head.certificate_observed;
                }
            }
            for (std::size_t h = 0; h < shape.query_heads && exact != nullptr; ++h) {
                const std::vector<float>& share = (*exact)[step * shape.query_heads + h];
                for (std::size_t i = 0; i < n; ++i) {
                    if (cache.resident(ids[0], h / shape.group(), static_cast<token_index>(i))) {
                        resident_attention += static_cast<double>(share[i]);
                    }
                }
            }
            have = n;
        }
        if (draw + 1 == s.redraws) {
            const double cache_bytes =
                static_cast<double>(t.prefill_tokens * (shape.key_dim + shape.value_dim) * sizeof(T));
            double bytes = 0;
            double tokens = 0;
            for (std::size_t h = 0; h < shape.kv_heads; ++h) {
                bytes += static_cast<double>(cache.sketch_of(ids[0], h).bytes());
                tokens += static_cast<double>(cache.sketch_of(ids[0], h).size());
            }
            results[0].sketch_bytes_share = bytes / static_cast<double>(shape.kv_heads) / cache_bytes;
            results[0].sketch_bytes_per_token = bytes / tokens;
        }
        for (const request_id id : ids) {
            cache.release(id);
        }
    }
    for (std::size_t e = 0; e < requests; ++e) {
        replay_result& r = results[e];
        r.epsilon = s.epsilon[e];
        r.choice = choice;
        r.sketch_bytes_share = results[0].sketch_bytes_share;
        r.sketch_bytes_per_token = results[0].sketch_bytes_per_token;
        r.p99_output_error = quantile(errors[e], 0.99);
        r.resident_attention = resident_attention / static_cast<double>(s.redraws * steps.size() * shape.query_heads);
        const auto decisions = static_cast<double>(r.decisions);
        const double heads = decisions / static_cast<double>(shape.group());
        for (double* x :
             {&r.fetching_decisions, &r.rows_read_per_query_head, &r.failures_denominator, &r.failures_output,
              &r.mean_denominator_error, &r.mean_output_error, &r.mean_certificate, &r.mean_certificate_observed}) {
            *x /= decisions;
        }
        if (!choice.checked()) {
            r.mean_certificate_observed = std::numeric_limits<double>::quiet_NaN();
        }
        r.resident_share =
            resident_rows / static_cast<double>(s.redraws * requests * shape.kv_heads * t.prefill_tokens);
        for (double* x : {&r.rows_read_per_kv_head, &r.rows_copied_per_kv_head, &r.shortlist_keys_read, &r.rounds}) {
            *x /= heads;
        }
        r.sketch_ms = 1e3 * median(seconds[e].sketch);
        r.decide_ms = 1e3 * median(seconds[e].decide);
        r.fetch_ms = 1e3 * median(seconds[e].fetch);
        r.attend_ms = 1e3 * median(seconds[e].attend);
        r.dense_ms = dense.milliseconds;
    }
    return results;
}

}  // namespace example
