// The (epsilon, delta) promise on real decisions: those of the packaged trace, over 10^4 draws of its sample.
#include <cmath>
#include <numeric>
#include <vector>

#include "common/trace.hpp"
#include "support/catch.hpp"
#include "verkv/verkv.hpp"

namespace {

/// One query head at one step: its exact weights relative to D, and the probabilities of its tokens.
struct decision {
    std::vector<float> weight;
    std::vector<float> odds;

    [[nodiscard]] verkv::masses_view masses() const { return {weight, odds, 1.0}; }
};

/// A KV head of the packaged trace: inclusion probabilities, and the decisions of its query heads at some steps.
struct real_head {
    std::vector<float> r;  // of the prompt's tokens; those decoded since are certain
    std::vector<decision> decisions;
};

const example::trace<verkv::half>& packaged() {
    static const auto t =
        example::load_trace_as<verkv::half>(std::string(VERKV_EXAMPLE_DATA_DIR) + "/smollm2-8k-layer15");
    return t;
}

std::vector<float> probabilities(const example::trace<verkv::half>& t, std::size_t kv_head) {
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
decision decide_exactly(const example::trace<verkv::half>& t, std::size_t step, std::size_t query_head,
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
    decision d;
    for (std::size_t i = 0; i < n; ++i) {
        const double p = i < r.size() ? static_cast<double>(r[i]) : 1.0;
        d.weight.push_back(static_cast<float>(logit[i] / total));
        d.odds.push_back(static_cast<float>((1 - p) / p));
    }
    return d;
}

real_head head_of_trace(std::size_t kv_head) {
    const auto& t = packaged();
    real_head head{probabilities(t, kv_head), {}};
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
    estimate(const decision& d, std::span<const float> r, const verkv::plan& p) : use_below_(r.begin(), r.end()) {
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

    /// Tokens that may be used but are not certain, each with its uniform.
    struct candidate {
        std::size_t token;
        float uniform;
    };

    [[nodiscard]] double error(std::span<const candidate> candidates) const {
        double sum = mean_;
        for (const candidate& c : candidates) {
            sum += c.uniform < use_below_[c.token] ? share_[c.token] : 0.0;
        }
        return sum;
    }
    [[nodiscard]] float use_below(std::size_t token) const { return use_below_[token]; }
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

constexpr std::size_t draws = 10'000;

/// Errors of many plans over the same draws.
std::vector<outcome> redraw(const std::vector<estimate>& estimates, std::size_t tokens, double epsilon,
                            std::uint32_t kv_head) {
    std::vector<float> largest(tokens, 0.0f);
    for (const estimate& e : estimates) {
        for (std::size_t i = 0; i < tokens; ++i) {
            largest[i] = std::max(largest[i], e.use_below(i));
        }
    }
    std::vector<outcome> outcomes(estimates.size());
    std::vector<estimate::candidate> candidates;
    for (std::size_t d = 0; d < draws; ++d) {
        const verkv::uniform_stream stream{.seed = 1000 + d, .layer = 15, .kv_head = kv_head};
        candidates.clear();
        for (std::size_t i = 0; i < tokens; ++i) {
            const auto u = static_cast<float>(verkv::uniform(stream, static_cast<verkv::position_t>(i)));
            if (u < largest[i]) {
                candidates.push_back({i, u});
            }
        }
        for (std::size_t i = 0; i < estimates.size(); ++i) {
            const double error = estimates[i].error(candidates);
            outcomes[i].failures += !(std::abs(error) <= epsilon);
            outcomes[i].sum += error;
        }
    }
    return outcomes;
}

}  // namespace

// 27 decisions x 2 promises, each held to its own 6 sigma of a binomial of its delta: false alarms below 1e-7 if the
// bound were tight. Means: 27 x 3 plans at 6 standard errors, below 2e-7.
TEST_CASE("promise: real decisions keep it over ten thousand draws, and break it without a fetch") {
    constexpr double epsilon = 0.05;
    std::size_t broken_without = 0;
    std::size_t fetching = 0;
    for (std::uint32_t h = 0; h < 3; ++h) {
        const real_head head = head_of_trace(h);
        std::vector<estimate> estimates;
        std::vector<double> deltas;
        verkv::greedy<>::workspace memory;
        for (const double delta : {0.1, 0.5}) {
            for (const decision& d : head.decisions) {
                verkv::plan p;
                verkv::greedy<>{}.plan(verkv::cpu{}, d.masses(), {epsilon, delta}, memory, p);
                CHECK(p.certificate_after < epsilon);
                fetching += p.raised > 0;
                estimates.emplace_back(d, head.r, p);
                deltas.push_back(delta);
            }
        }
        const std::size_t promised = estimates.size();
        for (const decision& d : head.decisions) {
            verkv::plan p;
            verkv::never_fetch<verkv::no_shrinkage>{}.plan(verkv::cpu{}, d.masses(), {epsilon, 0.1}, memory, p);
            estimates.emplace_back(d, head.r, p);
            deltas.push_back(0.1);
        }
        const auto outcomes = redraw(estimates, head.r.size(), epsilon, h);
        for (std::size_t i = 0; i < outcomes.size(); ++i) {
            CAPTURE(h, i, deltas[i]);
            const double most = draws * deltas[i] + 6 * std::sqrt(draws * deltas[i] * (1 - deltas[i]));
            const bool kept = static_cast<double>(outcomes[i].failures) <= most;
            if (i < promised) {
                CHECK(kept);
            } else {
                broken_without += !kept;
            }
            const double deviation = std::abs(outcomes[i].sum / draws - estimates[i].expected());
            CHECK(deviation <= 6 * std::sqrt(estimates[i].variance() / draws) + 1e-6);
        }
    }
    // The same draws can tell: of 27 decisions, many break the promise when nothing is fetched.
    CHECK(broken_without >= 12);
    CHECK(fetching >= 36);
}
