// Decisions of the packaged trace, and their errors over many draws of the sample.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "common/trace.hpp"
#include "verkv/verkv.hpp"

namespace support {

/// One query head at one step: its exact weights relative to D, and the probabilities of its tokens.
struct trace_decision {
    std::vector<float> weight;
    std::vector<float> odds;

    [[nodiscard]] verkv::masses_view masses() const { return {weight, odds, 1.0}; }
};

/// A KV head of the packaged trace: inclusion probabilities, and the decisions of its query heads at some steps.
struct real_head {
    std::vector<float> r;                   // of the prompt's tokens; those decoded since are certain
    std::vector<trace_decision> decisions;  // [step][query head of the group]
};

inline const example::trace<verkv::half>& packaged() {
    static const auto t =
        example::load_trace_as<verkv::half>(std::string(VERKV_EXAMPLE_DATA_DIR) + "/smollm2-8k-layer15");
    return t;
}

/// Queries of all heads at a decode step, [query head][channel].
inline std::vector<float> queries_at(const example::trace<verkv::half>& t, std::size_t step) {
    std::vector<float> q;
    for (std::size_t h = 0; h < t.shape.query_heads; ++h) {
        const verkv::half* row = t.queries().row(t.decode_row(step), h);
        for (std::size_t c = 0; c < t.shape.key_dim; ++c) {
            q.push_back(verkv::to_float(row[c]));
        }
    }
    return q;
}

inline std::vector<float> trace_probabilities(const example::trace<verkv::half>& t, std::size_t kv_head) {
    std::vector<std::size_t> kept(t.first_decode_row());
    std::iota(kept.begin(), kept.end(), std::size_t{0});
    const auto prompt = example::prompt_of(t, kept);
    std::vector<float> importance(t.prefill_tokens);
    verkv::largest_attention{}.score(verkv::cpu{}, prompt.view(), kv_head, std::span<float>(importance));
    verkv::to_importance(verkv::cpu{}, std::span<float>(importance));
    std::vector<float> r(importance.size());
    verkv::inclusion_probabilities(verkv::cpu{}, importance, verkv::budget::fraction(1.0 / 16), {64, 64}, r);
    return r;
}

/// Weights in double from the stored rows.
inline trace_decision decide_exactly(const example::trace<verkv::half>& t, std::size_t step, std::size_t query_head,
                                     std::span<const float> r) {
    const verkv::half* q = t.queries().row(t.decode_row(step), query_head);
    const std::size_t n = static_cast<std::size_t>(t.decode_position(step)) + 1;
    std::vector<double> logit(n);
    for (std::size_t i = 0; i < n; ++i) {
        const verkv::half* k = t.keys().row(i, query_head / t.shape.group());
        for (std::size_t c = 0; c < t.shape.key_dim; ++c) {
            logit[i] += static_cast<double>(verkv::to_float(q[c])) * static_cast<double>(verkv::to_float(k[c]));
        }
        logit[i] *= static_cast<double>(t.shape.logit_scale());
    }
    const double top = *std::max_element(logit.begin(), logit.end());
    double total = 0;
    for (double& x : logit) {
        x = std::exp(x - top);
        total += x;
    }
    trace_decision d;
    for (std::size_t i = 0; i < n; ++i) {
        const double p = i < r.size() ? static_cast<double>(r[i]) : 1.0;
        d.weight.push_back(static_cast<float>(logit[i] / total));
        d.odds.push_back(static_cast<float>((1 - p) / p));
    }
    return d;
}

inline real_head head_of_trace(std::size_t kv_head) {
    const auto& t = packaged();
    real_head head{trace_probabilities(t, kv_head), {}};
    for (const std::size_t step : t.spread_steps(3)) {
        for (std::size_t g = 0; g < t.shape.group(); ++g) {
            head.decisions.push_back(decide_exactly(t, step, kv_head * t.shape.group() + g, head.r));
        }
    }
    return head;
}

/// D_hat/D - 1 as a function of the uniforms of the prompt's tokens, for one plan of one decision.
class estimate {
public:
    estimate(const trace_decision& d, std::span<const float> r, const verkv::plan& p) : use_below_(r.begin(), r.end()) {
        std::vector<float> lambda(r.size(), 1.0f);
        for (const verkv::plan_entry& e : p.entries) {
            use_below_[e.token] = e.probability;
            lambda[e.token] = e.shrinkage;
        }
        for (std::size_t i = 0; i < r.size(); ++i) {
            const double m = static_cast<double>(d.weight[i]);
            const double l = static_cast<double>(lambda[i]);
            const double p_i = static_cast<double>(use_below_[i]);
            share_.push_back(l * m / p_i);
            mean_ -= m;
            expected_ += m * (l - 1);
            variance_ += l * m * l * m * (1 - p_i) / p_i;
            if (use_below_[i] >= 1) {
                mean_ += share_[i];
                use_below_[i] = 0;
            }
        }
    }

    [[nodiscard]] float use_below(std::size_t token) const { return use_below_[token]; }
    [[nodiscard]] double share(std::size_t token) const { return share_[token]; }
    [[nodiscard]] double of_certain() const { return mean_; }
    [[nodiscard]] double expected() const { return expected_; }
    [[nodiscard]] double variance() const { return variance_; }

private:
    std::vector<float> use_below_;  // a token is used when its uniform is below r'; 0 where it always is
    std::vector<double> share_;     // lambda m / r'
    double mean_ = 0;               // of the certain tokens, less D
    double expected_ = 0;
    double variance_ = 0;
};

struct outcome {
    std::size_t failures = 0;
    double sum = 0;
};

inline constexpr std::size_t draws = 10'000;

/// Errors of many plans over the same draws.
inline std::vector<outcome> redraw(const std::vector<estimate>& estimates, std::size_t tokens, double epsilon,
                                   std::uint32_t kv_head) {
    // Token by token, so that a draw walks through memory once.
    const std::size_t plans = estimates.size();
    std::vector<float> largest(tokens, 0.0f), use_below(tokens * plans);
    std::vector<double> share(tokens * plans);
    for (std::size_t i = 0; i < tokens; ++i) {
        for (std::size_t e = 0; e < plans; ++e) {
            use_below[i * plans + e] = estimates[e].use_below(i);
            share[i * plans + e] = estimates[e].share(i);
            largest[i] = std::max(largest[i], estimates[e].use_below(i));
        }
    }
    std::vector<outcome> outcomes(plans);
    std::vector<double> error(plans);
    for (std::size_t d = 0; d < draws; ++d) {
        const verkv::uniform_stream stream{.seed = 1000 + d, .layer = 15, .kv_head = kv_head};
        for (std::size_t e = 0; e < plans; ++e) {
            error[e] = estimates[e].of_certain();
        }
        for (std::size_t i = 0; i < tokens; ++i) {
            const auto u = static_cast<float>(verkv::uniform(stream, static_cast<verkv::position_t>(i)));
            if (u < largest[i]) {
                for (std::size_t e = 0; e < plans; ++e) {
                    error[e] += u < use_below[i * plans + e] ? share[i * plans + e] : 0.0;
                }
            }
        }
        for (std::size_t e = 0; e < plans; ++e) {
            outcomes[e].failures += !(std::abs(error[e]) <= epsilon);
            outcomes[e].sum += error[e];
        }
    }
    return outcomes;
}

}  // namespace support
