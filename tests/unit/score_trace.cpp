// What the best eighth of a real layer's tokens holds of later attention: the figures of docs/scorers.md.
#include <algorithm>
#include <cmath>

#include "common/trace.hpp"
#include "support/catch.hpp"
#include "verkv/score/anchor_coverage.hpp"
#include "verkv/score/compactor.hpp"
#include "verkv/score/compress_kv.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/snapkv.hpp"
#include "verkv/score/span_boundary.hpp"

using namespace verkv;

namespace {

constexpr std::size_t sink = 4;
constexpr std::size_t local = 64;

struct layer_under_test {
    example::trace<half> t = example::load_trace_as<half>(std::string(VERKV_EXAMPLE_DATA_DIR) + "/smollm2-8k-layer15");
    std::size_t n = t.prefill_tokens;
    std::vector<rows<half>> keys, values;
    std::vector<position_t> positions = std::vector<position_t>(n);
    std::vector<std::vector<double>> weight;  // of each KV head, over decode steps and the group's heads: sums to 1

    layer_under_test() : weight(t.shape.kv_heads, std::vector<double>(n)) {
        for (std::size_t i = 0; i < n; ++i) {
            positions[i] = static_cast<position_t>(i);
        }
        const auto steps = t.spread_steps(10);
        const double share = 1 / static_cast<double>(steps.size() * t.shape.group());
        std::vector<double> w(n);
        for (std::size_t kv = 0; kv < t.shape.kv_heads; ++kv) {
            keys.push_back(t.keys().head(kv).slice(0, n));
            values.push_back(t.values().head(kv).slice(0, n));
            for (const std::size_t step : steps) {
                for (std::size_t h = kv * t.shape.group(); h < (kv + 1) * t.shape.group(); ++h) {
                    const half* q = t.queries().row(t.decode_row(step), h);
                    double total = 0;
                    for (std::size_t i = sink; i + local < n; ++i) {
                        float logit = 0;
                        for (std::size_t c = 0; c < t.shape.key_dim; ++c) {
                            logit += to_float(q[c]) * to_float(keys[kv][i][c]);
                        }
                        total += w[i] = std::exp(static_cast<double>(logit * t.shape.logit_scale()));
                    }
                    for (std::size_t i = sink; i + local < n; ++i) {
                        weight[kv][i] += w[i] / total * share;
                    }
                }
            }
        }
    }

    [[nodiscard]] prompt<half> view() const {
        const std::size_t rows_before = t.first_decode_row();
        return {t.shape,
                keys,
                values,
                positions,
                t.queries().slice(0, rows_before),
                std::span<const position_t>(t.query_positions).first(rows_before)};
    }

    // Mean over KV heads of what the n/8 best tokens hold; 0.125 is chance.
    template <class Scorer>
    [[nodiscard]] double held_by(const Scorer& scorer) const {
        double held = 0;
        std::vector<float> score(n);
        for (std::size_t kv = 0; kv < t.shape.kv_heads; ++kv) {
            scorer.score(cpu{}, view(), kv, std::span<float>(score));
            std::vector<std::size_t> order(n - sink - local);
            for (std::size_t i = 0; i < order.size(); ++i) {
                order[i] = sink + i;
            }
            std::nth_element(
                order.begin(), order.begin() + static_cast<std::ptrdiff_t>(n / 8), order.end(),
                [&](std::size_t a, std::size_t b) { return score[a] != score[b] ? score[a] > score[b] : a < b; });
            for (std::size_t i = 0; i < n / 8; ++i) {
                held += weight[kv][order[i]] / static_cast<double>(t.shape.kv_heads);
            }
        }
        return held;
    }
};

}  // namespace

TEST_CASE("score: what the best eighth of a real layer holds") {
    const layer_under_test layer;
    const rope rotation = rope::plain(64, 100000, rope_pairing::interleaved);
    const std::vector<std::size_t> all_heads{0, 1, 2, 3, 4, 5, 6, 7, 8};
    const auto check = [&](const char* what, double held, double documented) {
        CAPTURE(what);
        CHECK(held == Approx(documented).margin(0.006));
    };
    check("snapkv", layer.held_by(make_snapkv()), 0.92);
    check("compress_kv, all heads", layer.held_by(compress_kv{all_heads}), 0.92);
    check("non_causal_attention", layer.held_by(non_causal_attention{}), 0.33);
    check("non_causal_attention, scale 1", layer.held_by(non_causal_attention{256, 3, 1.0f}), 0.30);
    check("leverage_score", layer.held_by(leverage_score{rotation}), 0.38);
    check("leverage_score of rotated keys", layer.held_by(leverage_score{}), 0.17);
    check("compactor", layer.held_by(compactor{{rotation}, {}}), 0.36);
    check("compactor, scale 1", layer.held_by(compactor{{rotation}, {256, 3, 1.0f}}), 0.32);
    check("key_norm", layer.held_by(key_norm{}), 0.17);
    check("anchor_coverage", layer.held_by(anchor_coverage{}), 0.13);
    check("anchor_coverage, centred", layer.held_by(anchor_coverage{64, true}), 0.03);
    check("span_boundary", layer.held_by(span_boundary{rotation}), 0.08);
}
