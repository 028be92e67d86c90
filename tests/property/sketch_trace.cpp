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
#include "support/float_rows.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/sketch/anchors.hpp"
#include "verkv/sketch/hash_attention.hpp"
#include "verkv/sketch/logit_map.hpp"
#include "verkv/sketch/low_rank.hpp"
#include "verkv/sketch/magic_pig.hpp"
#include "verkv/sketch/per_channel.hpp"
#include "verkv/sketch/product_quantised.hpp"
#include "verkv/sketch/quest_pages.hpp"
#include "verkv/sketch/rope_pairs.hpp"
#include "verkv/sketch/rotated.hpp"
#include "verkv/sketch/socket.hpp"
#include "verkv/sketch/spans.hpp"
#include "verkv/sketch/turbo_quant.hpp"

namespace {

using verkv::coefficient_format;
using verkv::cpu;
using verkv::half;

const example::trace<half>& layer() {
    static const auto t = example::load_trace_as<half>(VERKV_EXAMPLE_DATA_DIR "/smollm2-8k-layer15");
    return t;
}

struct figures {
    double rms = 0;         ///< of the logit error, all tokens alike
    double within = 0;      ///< the same without what all tokens of a query have in common: a softmax does not see that
    double weighted = 0;    ///< of the logit error, tokens by their attention
    double bound = 0;       ///< mean; 0 without bounds
    double found = 0;       ///< attention of the 5 % of the tokens with the largest estimates, of what 5 % can have
    double found_rest = 0;  ///< the same where 64 sink and 64 local tokens are kept anyway
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

/// Queries of a KV head's group at a query row of the trace.
std::vector<float> queries_at(std::size_t row, std::size_t head) {
    const auto& t = layer();
    std::vector<float> queries;
    for (std::size_t g = 0; g < t.shape.group(); ++g) {
        const half* const q = t.queries().row(row, head * t.shape.group() + g);
        std::transform(q, q + t.shape.key_dim, std::back_inserter(queries), [](half x) { return verkv::to_float(x); });
    }
    return queries;
}

/// Every 16th key of the prompt and some of its queries tell a sketch that ranks what its ranks are as logits.
template <class Sketch>
void calibrate(Sketch& s, std::size_t head, verkv::rows<half> keys) {
    if constexpr (requires { s.set_map(verkv::logit_map{}); }) {
        std::vector<verkv::row_id> some;
        for (std::size_t i = 0; i < keys.count; i += 16) {
            some.push_back(static_cast<verkv::row_id>(i));
        }
        keys.ids = some.data();
        keys.count = some.size();
        std::vector<float> queries;
        for (const std::size_t row : layer().last_prompt_query_rows(32)) {
            const std::vector<float> more = queries_at(row, head);
            queries.insert(queries.end(), more.begin(), more.end());
        }
        s.calibrate(cpu{}, keys, verkv::contiguous_rows(std::span<const float>(queries), keys.width));
    }
}

/// Twelve decode steps, all query heads.
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
        calibrate(s, head, keys);
        s.fit(cpu{}, keys);
        s.append(cpu{}, keys);
        f.bytes += static_cast<double>(s.bytes()) / static_cast<double>(n * t.shape.kv_heads);
        for (const std::size_t step : t.spread_steps(12)) {
            const std::vector<float> queries = queries_at(t.decode_row(step), head);
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
                double square = 0, common = 0, bound = 0;
                for (std::size_t i = 0; i < n; ++i) {
                    for (std::size_t c = 0; c < width; ++c) {
                        exact[i] += scale * static_cast<double>(queries[g * width + c]) *
                                    static_cast<double>(verkv::to_float(keys[i][c]));
                    }
                    score[i] = static_cast<double>(logits[g * n + i]);
                    square += (score[i] - exact[i]) * (score[i] - exact[i]);
                    common += (score[i] - exact[i]) / static_cast<double>(n);
                    bound += static_cast<double>(bounds[g * n + i]);
                    f.broken += std::abs(score[i] - exact[i]) > static_cast<double>(bounds[g * n + i]);
                }
                f.rms += square / static_cast<double>(n);
                f.within += square / static_cast<double>(n) - common * common;
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
    f.within = std::sqrt(f.within / decisions);
    f.weighted = std::sqrt(f.weighted / decisions);
    f.bound /= decisions;
    f.found /= decisions;
    f.found_rest /= decisions;
    return f;
}

/// MagicPIG's tables as a rank: in how many of them a token shares the query's bucket.
class collision_counts {
public:
    explicit collision_counts(std::size_t width) : tables_({.key_dim = width}) {}
    void fit(const cpu& exec, verkv::rows<half> keys) { tables_.fit(exec, keys); }
    void append(const cpu& exec, verkv::rows<half> keys) { tables_.append(exec, keys); }
    [[nodiscard]] std::size_t size() const { return tables_.size(); }
    [[nodiscard]] std::size_t bytes() const { return tables_.bytes(); }
    void estimate(const cpu& exec, verkv::rows<float> queries, float, verkv::matrix_view<float> out) const {
        std::vector<std::uint16_t> counts(queries.count * size());
        tables_.collisions(exec, queries, verkv::matrix_of(std::span(counts), queries.count, size()));
        for (std::size_t g = 0; g < queries.count; ++g) {
            std::copy_n(counts.begin() + static_cast<std::ptrdiff_t>(g * size()), size(), out.row(g).begin());
        }
    }

private:
    verkv::magic_pig_tables tables_;
};

/// One random layer of 32 planes: HashAttention without its training.
verkv::hash_mlp random_planes(std::size_t width, std::uint64_t seed) {
    support::dice d(seed);
    return {{{width, 32, support::normal_floats(d, 32 * width), std::vector<float>(32)}}};
}

void check(const std::string& name, const figures& f, double least_found, double least_rest) {
    CAPTURE(name, f.bytes, f.rms, f.within, f.weighted, f.bound, f.found, f.found_rest);
    CHECK(f.found >= least_found);
    CHECK(f.found_rest >= least_rest);
    CHECK((f.bound == 0 || f.broken == 0));
}

}  // namespace

TEST_CASE("sketches on a real layer: bounds hold, and most attention is found", "[sketch_trace]") {
    const std::size_t width = layer().shape.key_dim;
    const auto pairs = [&](double share, unsigned bits) {
        return measured(verkv::rope_pair_sketch(
            {.key_dim = width, .pairing = *layer().pairing, .bits = bits, .pair_fraction = share}));
    };
    check("RoPE pairs, a quarter, 2 bits", pairs(0.25, 2), 0.9, 0.85);
    check("RoPE pairs, half, 2 bits", pairs(0.5, 2), 0.95, 0.9);
    check("RoPE pairs, half, 4 bits", pairs(0.5, 4), 0.95, 0.95);
    check("per channel, 2 bits", measured(verkv::per_channel_sketch(width)), 0.95, 0.9);
    check("Quest, pages of 16", measured(verkv::quest_page_sketch({.key_dim = width})), 0.3, 0.3);
    for (const unsigned bits : {1u, 2u, 3u, 4u}) {
        check("TurboQuant, " + std::to_string(bits) + (bits == 1 ? " bit" : " bits"),
              measured(verkv::turbo_quant_sketch({.key_dim = width, .bits = bits})), 0.85, 0.7);
    }
    for (const unsigned bits : {1u, 2u, 3u, 4u}) {
        check("TurboQuant, inner product, " + std::to_string(bits) + (bits == 1 ? " bit" : " bits"),
              measured(verkv::turbo_quant_sketch({width, bits, verkv::turbo_quant_form::inner_product, 0})), 0.8, 0.6);
    }
    check("SOCKET, calibrated", measured(verkv::socket_sketch({.key_dim = width})), 0.85, 0.7);
    check("HashAttention, random planes, calibrated",
          measured(verkv::hash_attention_sketch({width, random_planes(width, 1), random_planes(width, 1)})), 0.3, 0.1);
    check("MagicPIG, by collisions", measured(collision_counts(width)), 0.6, 0.4);
    const auto quantised = [&](std::size_t pieces, unsigned bits) {
        verkv::product_quantised_options o;
        o.key_dim = width;
        o.subspaces = pieces;
        o.bits = bits;
        return measured(verkv::product_quantised_sketch(o));
    };
    check("product, 2 x 6 bits", quantised(2, 6), 0.4, 0.4);
    check("product, 8 x 8 bits", quantised(8, 8), 0.9, 0.9);
    check("product, 16 x 8 bits", quantised(16, 8), 0.95, 0.95);
    check("product, 32 x 8 bits", quantised(32, 8), 0.95, 0.95);
    check("rotated, 4 bits", measured(verkv::rotated_sketch({.key_dim = width, .bits = 4})), 0.95, 0.95);
    check("rotated, 2 bits", measured(verkv::rotated_sketch({.key_dim = width})), 0.9, 0.9);
    check("low rank 16, 8 bits", measured(verkv::low_rank_sketch({.key_dim = width, .rank = 16})), 0.95, 0.9);
    check("low rank 32, 8 bits", measured(verkv::low_rank_sketch({.key_dim = width, .rank = 32})), 0.95, 0.95);
    check("low rank 32, half", measured(verkv::low_rank_sketch({width, 32, coefficient_format::float16})), 0.95, 0.95);
    check("256 anchors alone", measured(verkv::anchor_sketch({width, 256, 0})), 0.9, 0.75);
    check("256 anchors, 1 bit", measured(verkv::anchor_sketch({width, 256, 1})), 0.95, 0.9);
    check("256 anchors, 2 bits", measured(verkv::anchor_sketch({width, 256, 2})), 0.95, 0.95);
    check("spans of 16, not zoomed", measured(verkv::span_sketch({.key_dim = width, .zoomed_spans = 0})), 0.3, 0.85);
    check("spans of 16, 32 zoomed", measured(verkv::span_sketch({.key_dim = width})), 0.95, 0.9);
    check("spans of 32, 64 zoomed",
          measured(verkv::span_sketch({.key_dim = width, .mean_length = 32, .zoomed_spans = 64})), 0.95, 0.9);
}

TEST_CASE("MagicPIG on a real layer: how many tokens it samples, and how far their sum is off", "[sketch_trace]") {
    const auto& t = layer();
    const std::size_t n = t.prefill_tokens, width = t.shape.key_dim, sinks = 4, recent = 64;
    const auto scale = static_cast<double>(t.shape.logit_scale());
    std::vector<double> errors;
    double sampled = 0;
    double square = 0;
    for (std::size_t head = 0; head < t.shape.kv_heads; ++head) {
        const auto keys = t.keys().head(head).slice(sinks, n - sinks - recent);
        verkv::magic_pig_tables tables({.key_dim = width});
        tables.fit(cpu{}, keys);
        tables.append(cpu{}, keys);
        verkv::collision_sample sample;
        for (const std::size_t step : t.spread_steps(12)) {
            const std::vector<float> queries = queries_at(t.decode_row(step), head);
            for (std::size_t g = 0; g < t.shape.group(); ++g) {
                const std::span<const float> query = std::span(queries).subspan(g * width, width);
                tables.sample(cpu{}, keys, query, sample);
                double exact = 0;
                double estimate = 0;
                auto next = sample.tokens.begin();
                for (std::size_t i = 0; i < keys.count; ++i) {
                    double logit = 0;
                    for (std::size_t c = 0; c < width; ++c) {
                        logit +=
                            scale * static_cast<double>(query[c]) * static_cast<double>(verkv::to_float(keys[i][c]));
                    }
                    exact += std::exp(logit);
                    if (next != sample.tokens.end() && *next == i) {
                        const auto at = static_cast<std::size_t>(next++ - sample.tokens.begin());
                        estimate += std::exp(logit + static_cast<double>(sample.log_weight[at]));
                    }
                }
                errors.push_back(std::abs(estimate / exact - 1));
                square += errors.back() * errors.back();
                sampled += static_cast<double>(sample.tokens.size()) / static_cast<double>(keys.count);
            }
        }
    }
    std::sort(errors.begin(), errors.end());
    const auto count = static_cast<double>(errors.size());
    const double rms = std::sqrt(square / count), median = errors[errors.size() / 2], share = sampled / count;
    CAPTURE(share, rms, median);
    CHECK(share < 0.2);
    CHECK(median < 0.5);
    CHECK(rms < 1);
}
