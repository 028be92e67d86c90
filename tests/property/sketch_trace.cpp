// Sketches on a real layer: how far their logits are off, how wide their bounds are, and how much attention they find.
// The figures of docs/sketches.md: verkv_property "[sketch_trace]" -s
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "common/trace.hpp"
#include "support/catch.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/sketch/anchors.hpp"
#include "verkv/sketch/low_rank.hpp"
#include "verkv/sketch/rope_pairs.hpp"
#include "verkv/sketch/rotated.hpp"
#include "verkv/sketch/spans.hpp"

namespace {

using verkv::coefficient_format;
using verkv::cpu;
using verkv::half;

const example::trace<half>& layer() {
    static const auto t = example::load_trace_as<half>(VERKV_EXAMPLE_DATA_DIR "/smollm2-8k-layer15");
    return t;
}

struct figures {
    double rms = 0;          ///< of the logit error, all tokens alike
    double weighted = 0;     ///< the same, tokens by their attention
    double bound = 0;        ///< mean; 0 without bounds
    double found = 0;        ///< attention of the 5 % of the tokens with the largest estimates, of what 5 % can have
    double found_rest = 0;   ///< the same where 64 sink and 64 local tokens are kept anyway
    std::size_t broken = 0;  ///< bounds
    double bytes = 0;        ///< a token
};

/// Attention of the 5 % of tokens that `score` ranks first, over what the best 5 % have.
double share_found(const std::vector<double>& weight, const std::vector<double>& score) {
    const std::size_t n = weight.size(), kept = n / 20;
    std::vector<std::size_t> order(n);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::partial_sort(
        order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
        [&](std::size_t a, std::size_t b) { return score[a] > score[b] || (score[a] == score[b] && a < b); });
    double found = 0;
    for (std::size_t k = 0; k < kept; ++k) {
        found += weight[order[k]];
    }
    std::vector<double> best = weight;
    std::partial_sort(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(kept), best.end(), std::greater<>());
    return found / std::accumulate(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(kept), 0.0);
}

/// Five decode steps, all query heads.
template <class Sketch>
figures measured(const Sketch& prototype) {
    const auto& t = layer();
    const std::size_t group = t.shape.group(), n = t.prefill_tokens, width = t.shape.key_dim;
    const auto scale = static_cast<double>(t.shape.logit_scale());
    figures f;
    double decisions = 0;
    for (std::size_t head = 0; head < t.shape.kv_heads; ++head) {
        const auto keys = t.keys().head(head).slice(0, n);
        Sketch s = prototype;
        s.fit(cpu{}, keys);
        s.append(cpu{}, keys);
        f.bytes += static_cast<double>(s.bytes()) / static_cast<double>(n * t.shape.kv_heads);
        for (const std::size_t step : t.spread_steps(5)) {
            std::vector<float> queries;
            for (std::size_t g = 0; g < group; ++g) {
                const half* const q = t.queries().row(t.decode_row(step), head * group + g);
                for (std::size_t c = 0; c < width; ++c) {
                    queries.push_back(verkv::to_float(q[c]));
                }
            }
            std::vector<float> logits(group * n), bounds(group * n);
            const auto query_rows = verkv::contiguous_rows(std::span<const float>(queries), width);
            if constexpr (verkv::bounded_sketch<Sketch, cpu, half>) {
                s.estimate(cpu{}, query_rows, t.shape.logit_scale(), verkv::matrix_of(std::span(logits), group, n),
                           verkv::matrix_of(std::span(bounds), group, n));
            } else {
                s.estimate(cpu{}, query_rows, t.shape.logit_scale(), verkv::matrix_of(std::span(logits), group, n));
            }
            for (std::size_t g = 0; g < group; ++g, ++decisions) {
                std::vector<double> exact(n), score(n);
                double square = 0, bound = 0;
                for (std::size_t i = 0; i < n; ++i) {
                    for (std::size_t c = 0; c < width; ++c) {
                        exact[i] += scale * static_cast<double>(queries[g * width + c]) *
                                    static_cast<double>(verkv::to_float(keys[i][c]));
                    }
                    score[i] = static_cast<double>(logits[g * n + i]);
                    square += (score[i] - exact[i]) * (score[i] - exact[i]);
                    bound += static_cast<double>(bounds[g * n + i]);
                    f.broken += std::abs(score[i] - exact[i]) > static_cast<double>(bounds[g * n + i]);
                }
                f.rms += square / static_cast<double>(n);
                f.bound += bound / static_cast<double>(n);
                const double top = *std::max_element(exact.begin(), exact.end());
                double total = 0, weighted = 0;
                std::vector<double> weight(n);
                for (std::size_t i = 0; i < n; ++i) {
                    weight[i] = std::exp(exact[i] - top);
                    total += weight[i];
                    weighted += weight[i] * (score[i] - exact[i]) * (score[i] - exact[i]);
                }
                f.weighted += weighted / total;
                f.found += share_found(weight, score);
                std::fill(weight.begin(), weight.begin() + 64, 0.0);
                std::fill(weight.end() - 64, weight.end(), 0.0);
                f.found_rest += share_found(weight, score);
            }
        }
    }
    f.rms = std::sqrt(f.rms / decisions);
    f.weighted = std::sqrt(f.weighted / decisions);
    f.bound /= decisions;
    f.found /= decisions;
    f.found_rest /= decisions;
    return f;
}

void check(const std::string& name, const figures& f, double least_found, double least_rest) {
    CAPTURE(name, f.bytes, f.rms, f.weighted, f.bound, f.found, f.found_rest);
    CHECK(f.found >= least_found);
    CHECK(f.found_rest >= least_rest);
    CHECK((f.bound == 0 || f.broken == 0));
}

}  // namespace

TEST_CASE("sketches on a real layer: bounds hold, and most attention is found", "[sketch_trace]") {
    const std::size_t width = layer().shape.key_dim;
    check("RoPE pairs, 2 bits", measured(verkv::rope_pair_sketch({.key_dim = width, .pairing = *layer().pairing})), 0.9,
          0.85);
    check("rotated, 2 bits", measured(verkv::rotated_sketch({.key_dim = width})), 0.9, 0.9);
    check("low rank 16, 8 bits", measured(verkv::low_rank_sketch({.key_dim = width, .rank = 16})), 0.95, 0.9);
    check("low rank 32, 8 bits", measured(verkv::low_rank_sketch({.key_dim = width, .rank = 32})), 0.95, 0.95);
    check("low rank 32, half", measured(verkv::low_rank_sketch({width, 32, coefficient_format::float16})), 0.95, 0.95);
    check("256 anchors alone", measured(verkv::anchor_sketch({width, 256, 0})), 0.9, 0.75);
    check("256 anchors, 1 bit", measured(verkv::anchor_sketch({width, 256, 1})), 0.95, 0.9);
    check("256 anchors, 2 bits", measured(verkv::anchor_sketch({width, 256, 2})), 0.95, 0.95);
    check("spans of 16, not zoomed", measured(verkv::span_sketch({.key_dim = width, .zoomed_spans = 0})), 0.4, 0.85);
    check("spans of 16, 32 zoomed", measured(verkv::span_sketch({.key_dim = width})), 0.95, 0.9);
    check("spans of 32, 64 zoomed",
          measured(verkv::span_sketch({.key_dim = width, .mean_length = 32, .zoomed_spans = 64})), 0.95, 0.9);
}
