// Dense attention of a trace's decode steps: what every estimate is compared with.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "common/registry.hpp"
#include "common/trace.hpp"
#include "verkv/attend/attend.hpp"
#include "verkv/cpu/score_rows.hpp"

namespace example {

inline double median(std::vector<double> x) {
    if (x.empty()) {
        return 0;
    }
    const auto middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
    std::nth_element(x.begin(), middle, x.end());
    return *middle;
}

/// The element below which a share q of them lies: the ceil(q n)-th smallest; 0 for none.
inline double quantile(std::vector<double> x, double q) {
    if (x.empty()) {
        return 0;
    }
    const double rank = std::ceil(q * static_cast<double>(x.size()));
    const auto at = x.begin() + static_cast<std::ptrdiff_t>(std::clamp(rank, 1.0, static_cast<double>(x.size()))) - 1;
    std::nth_element(x.begin(), at, x.end());
    return *at;
}

/// Dense attention of the decode steps: what every estimate is compared with, and how long it takes.
struct truth {
    std::vector<float> output;  // [step, query head, value_dim]
    std::vector<float> lse;     // [step, query head]
    double milliseconds = 0;    // a KV head and step, median
};

/// Queries of a step for the heads of one KV head, [group, key_dim].
template <class T>
void read_queries(const trace<T>& t, std::size_t step, std::size_t kv_head, std::span<float> queries) {
    const std::size_t group = t.shape.group();
    for (std::size_t g = 0; g < group; ++g) {
        const T* q = t.queries().row(t.decode_row(step), kv_head * group + g);
        for (std::size_t c = 0; c < t.shape.key_dim; ++c) {
            queries[g * t.shape.key_dim + c] = verkv::to_float(q[c]);
        }
    }
}

template <class T>
truth dense_truth(const trace<T>& t, std::span<const std::size_t> steps) {
    using namespace verkv;
    const geometry& shape = t.shape;
    const std::size_t group = shape.group();
    const std::size_t width = shape.key_dim + shape.value_dim;
    truth result;
    result.output.resize(steps.size() * shape.query_heads * shape.value_dim);
    result.lse.resize(steps.size() * shape.query_heads);
    std::vector<double> seconds;
    std::vector<T> memory(t.tokens * width);  // rows as the cache stores them: key, then value
    std::vector<float> queries(group * shape.key_dim);
    attend_workspace workspace;
    for (std::size_t h = 0; h < shape.kv_heads; ++h) {
        for (std::size_t i = 0; i < t.tokens; ++i) {
            std::copy_n(t.keys().row(i, h), shape.key_dim, memory.begin() + static_cast<std::ptrdiff_t>(i * width));
            std::copy_n(t.values().row(i, h), shape.value_dim,
                        memory.begin() + static_cast<std::ptrdiff_t>(i * width + shape.key_dim));
        }
        for (std::size_t s = 0; s < steps.size(); ++s) {
            read_queries(t, steps[s], h, std::span(queries));
            const auto n = static_cast<std::size_t>(t.decode_position(steps[s])) + 1;
            const auto stride = static_cast<std::ptrdiff_t>(width);
            const std::size_t at = s * shape.query_heads + h * group;
            const auto start = std::chrono::steady_clock::now();
            dense_attention(cpu{}, contiguous_rows(std::span<const float>(queries), shape.key_dim), shape.logit_scale(),
                            rows<T>{memory.data(), stride, n, shape.key_dim, nullptr},
                            rows<T>{memory.data() + shape.key_dim, stride, n, shape.value_dim, nullptr}, workspace,
                            {result.output.data() + at * shape.value_dim, group, shape.value_dim,
                             static_cast<std::ptrdiff_t>(shape.value_dim)},
                            std::span(result.lse).subspan(at, group));
            seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
    }
    result.milliseconds = 1e3 * median(seconds);
    return result;
}

/// Exact attention that each query head gives each token: e^(s - lse), [step * query_heads + head][token].
using attention_shares = std::vector<std::vector<float>>;

template <class T>
attention_shares exact_shares(const trace<T>& t, std::span<const std::size_t> steps, const truth& dense) {
    const verkv::geometry& shape = t.shape;
    attention_shares shares;
    std::vector<float> query(shape.key_dim);
    for (std::size_t s = 0; s < steps.size(); ++s) {
        const auto n = static_cast<std::size_t>(t.decode_position(steps[s])) + 1;
        for (std::size_t h = 0; h < shape.query_heads; ++h) {
            const T* q = t.queries().row(t.decode_row(steps[s]), h);
            std::transform(q, q + shape.key_dim, query.begin(), [](T x) { return verkv::to_float(x); });
            std::vector<float> share(n);
            score_rows(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(query), shape.key_dim),
                       shape.logit_scale(), t.keys().head(h / shape.group()).slice(0, n),
                       verkv::matrix_of(std::span(share), 1, n));
            for (float& x : share) {
                x = std::exp(x - dense.lse[s * shape.query_heads + h]);
            }
            shares.push_back(std::move(share));
        }
    }
    return shares;
}

/// ||o^ - o|| / ||o|| for a head of a step.
template <class T>
double output_error(const trace<T>& t, const truth& dense, std::size_t step, std::size_t head, const float* output) {
    const float* exact = dense.output.data() + (step * t.shape.query_heads + head) * t.shape.value_dim;
    double difference = 0;
    double norm = 0;
    for (std::size_t c = 0; c < t.shape.value_dim; ++c) {
        const auto o = static_cast<double>(exact[c]);
        const double d = static_cast<double>(output[c]) - o;
        difference += d * d;
        norm += o * o;
    }
    return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

/// The scorer of a name. Throws std::invalid_argument for a name that there is not, trace_error where the trace does
/// not say what it needs.
[[nodiscard]] inline chosen_scorer scorer_of(const trace_info& t, std::string_view name) {
    return chosen_scorer(name, {.rotation = [&] { return t.rotation(); }});
}

/// Importance of the prompt's tokens for each KV head, by the scorer of a name.
template <class T>
std::vector<std::vector<float>> importance_of(const trace<T>& t, std::string_view scorer) {
    std::vector<std::size_t> kept(t.first_decode_row());
    std::iota(kept.begin(), kept.end(), std::size_t{0});
    const auto prompt = prompt_of(t, kept);
    const chosen_scorer chosen = scorer_of(t, scorer);
    std::vector<std::vector<float>> scores(t.shape.kv_heads, std::vector<float>(t.prefill_tokens));
    for (std::size_t h = 0; h < t.shape.kv_heads; ++h) {
        chosen.score(verkv::cpu{}, prompt.view(), h, std::span<float>(scores[h]));
    }
    return scores;
}

/// Some 500 keys and 64 queries of each KV head's prompt, spread evenly, for sketches whose ranks are to be logits.
template <class T>
std::vector<calibration_sample> calibration_samples(const trace<T>& t) {
    const auto copy = [&](std::vector<float>& to, const T* from) {
        std::transform(from, from + t.shape.key_dim, std::back_inserter(to), [](T x) { return verkv::to_float(x); });
    };
    const auto spread = [](std::size_t i, std::size_t count, std::size_t all) { return i * all / count; };
    std::vector<calibration_sample> samples(t.shape.kv_heads);
    const std::size_t keys = verkv::smaller(t.prefill_tokens, std::size_t{500});
    const std::size_t queries = verkv::smaller(t.first_decode_row(), std::size_t{64});
    for (std::size_t h = 0; h < t.shape.kv_heads; ++h) {
        samples[h].width = t.shape.key_dim;
        for (std::size_t i = 0; i < keys; ++i) {
            copy(samples[h].keys, t.keys().row(spread(i, keys, t.prefill_tokens), h));
        }
        for (std::size_t i = 0; i < queries; ++i) {
            copy(samples[h].queries,
                 t.queries().row(spread(i, queries, t.first_decode_row()), h * t.shape.group() + i % t.shape.group()));
        }
    }
    return samples;
}

/// What sketches for a trace are made with.
template <class T>
sketch_options sketch_options_of(const trace<T>& t, unsigned bits, double pairs) {
    return {t.shape.key_dim, bits, pairs, [&t] { return t.known_pairing(); }, [&t] { return calibration_samples(t); }};
}

}  // namespace example
