// Scores against those of the reference pipeline, written by tests/golden/generate.py.
#include <algorithm>
#include <fstream>
#include <sstream>

#include "support/catch.hpp"
#include "support/npy.hpp"
#include "verkv/core/prompt_inputs.hpp"
#include "verkv/sample/allocation.hpp"
#include "verkv/sample/layer_allocation.hpp"
#include "verkv/score/expected_attention.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/kvzip.hpp"
#include "verkv/score/mean_attention.hpp"
#include "verkv/score/snapkv.hpp"
#include "verkv/score/streaming_llm.hpp"
#include "verkv/score/tova.hpp"

#ifndef VERKV_TEST_DATA_DIR
#define VERKV_TEST_DATA_DIR "tests/golden"
#endif

using namespace verkv;

namespace {

// The tokens of the `count` highest scores; equal scores to the lower token.
std::vector<bool> highest(std::span<const float> scores, std::size_t count) {
    std::vector<std::size_t> order(scores.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
    std::vector<bool> in(scores.size());
    for (std::size_t i = 0; i < count; ++i) {
        in[order[i]] = true;
    }
    return in;
}

// Equal sets, but for tokens whose reference score is within `tie` of the lowest one kept.
void check_same_kept(std::span<const float> ours, std::span<const float> theirs, std::size_t count, float tie) {
    const auto a = highest(ours, count);
    const auto b = highest(theirs, count);
    float cut = 3e38f;
    for (std::size_t i = 0; i < b.size(); ++i) {
        cut = b[i] ? std::min(cut, theirs[i]) : cut;
    }
    for (std::size_t i = 0; i < a.size(); ++i) {
        INFO("token " << i << ": ours " << ours[i] << ", theirs " << theirs[i] << ", cut " << cut);
        CHECK((a[i] == b[i] || std::abs(theirs[i] - cut) <= tie));
    }
}

const std::string golden = VERKV_TEST_DATA_DIR;

// Rows of each KV head of an array [token, head, width].
std::vector<rows<float>> heads_in(const npy_array& a) {
    std::vector<rows<float>> heads;
    for (std::size_t h = 0; h < a.shape.at(1); ++h) {
        heads.push_back(heads_of(std::span<const float>(a.data), a.shape.at(0), a.shape.at(1), a.shape.at(2)).head(h));
    }
    return heads;
}

std::vector<position_t> first_positions(std::size_t n) {
    std::vector<position_t> positions(n);
    for (std::size_t i = 0; i < n; ++i) {
        positions[i] = static_cast<position_t>(i);
    }
    return positions;
}

// Scores first ... last-1 within a relative tolerance; kvpress puts a maximum + 1 on what it protects.
void check_scores(std::span<const float> ours, std::span<const float> theirs, std::size_t first, std::size_t last,
                  float tolerance) {
    REQUIRE(ours.size() == theirs.size());
    for (std::size_t i = first; i < last; ++i) {
        INFO("token " << i << ": " << ours[i] << ", kvpress has " << theirs[i]);
        CHECK(std::abs(ours[i] - theirs[i]) <= tolerance * theirs[i]);
    }
}

}  // namespace

TEST_CASE("score: mean attention, TOVA and expected attention agree with kvpress") {
    std::ifstream cases(golden + "/full.txt");
    REQUIRE(cases);
    std::size_t seen = 0;
    for (std::string line; std::getline(cases, line); ++seen) {
        std::istringstream fields(line);
        std::string name;
        std::size_t tokens = 0, query_heads = 0, kv_heads = 0, width = 0, sinks = 0;
        REQUIRE(fields >> name >> tokens >> query_heads >> kv_heads >> width >> sinks);
        CAPTURE(name);
        const auto load = [&](const char* file) { return read_npy(golden + "/" + name + "/" + file + ".npy"); };
        const npy_array queries = load("queries");
        const npy_array keys = load("keys");
        const npy_array values = load("values");
        REQUIRE(queries.shape == std::vector<std::size_t>{tokens, query_heads, width});
        const auto key_rows = heads_in(keys);
        const auto value_rows = heads_in(values);
        const auto positions = first_positions(tokens);
        const prompt<float> p{{query_heads, kv_heads, width, width, 0},
                              key_rows,
                              value_rows,
                              positions,
                              heads_of(std::span<const float>(queries.data), tokens, query_heads, width),
                              positions};
        const npy_array observed = load("observed");
        const npy_array last = load("tova");
        const npy_array expected = load("expected");
        const npy_array expected_mean = load("expected_mean");
        std::vector<float> out(tokens);
        for (std::size_t h = 0; h < kv_heads; ++h) {
            const auto head_of = [&](const npy_array& a) {
                REQUIRE(a.shape == std::vector<std::size_t>{kv_heads, tokens});
                return std::span<const float>(a.data).subspan(h * tokens, tokens);
            };
            // Both sides compute in float: logits of at most about 60, off by some tens of units roundoff each.
            mean_attention{}.score(cpu{}, p, h, out);
            check_scores(out, head_of(observed), 0, tokens, 2e-5f);
            check_same_kept(out, head_of(observed), tokens / 3, 1e-6f);
            // kvpress protects the last token; the paper, and ours unless asked, does not.
            tova{true}.score(cpu{}, p, h, out);
            check_scores(out, head_of(last), 0, tokens - 1, 2e-5f);
            CHECK(out.back() == 1.0f);
            check_same_kept(out, head_of(last), tokens / 3, 1e-6f);
            tova{}.score(cpu{}, p, h, out);
            CHECK(out.back() < 1.0f);
            // A logit's quadratic term reaches some hundreds in the peaked case: 1e-4 of a float chain of two products
            // with d x d matrices on their side.
            const rope rotation = rope::plain(width);
            expected_attention{rotation, 512, sinks}.score(cpu{}, p, h, out);
            check_scores(out, head_of(expected), sinks, tokens, 3e-4f);
            check_same_kept(out, head_of(expected), tokens / 3, 1e-6f);
            CHECK(out[0] >= *std::max_element(out.begin() + static_cast<std::ptrdiff_t>(sinks), out.end()));
            expected_attention{rotation, 64, sinks, false, false}.score(cpu{}, p, h, out);
            check_scores(out, head_of(expected_mean), sinks, tokens, 2e-5f);
        }
    }
    CHECK(seen == 3);
}

TEST_CASE("score: KVzip and KVzip+ agree with kvpress' second pass, and so do budgets over all layers") {
    std::ifstream cases(golden + "/kvzip.txt");
    REQUIRE(cases);
    std::size_t tokens = 0, query_heads = 0, kv_heads = 0, width = 0, hidden = 0, sinks = 0;
    double ratio = 0;
    REQUIRE(cases >> tokens >> query_heads >> kv_heads >> width >> hidden >> sinks >> ratio);
    std::vector<repeat_chunk> chunks;
    for (repeat_chunk c; cases >> c.first_token >> c.tokens >> c.first_query >> c.queries;) {
        chunks.push_back(c);
    }
    REQUIRE(chunks.size() == 3);
    const auto positions = first_positions(tokens);
    constexpr std::size_t layers = 2;
    const std::size_t heads = layers * kv_heads;
    for (const bool plus : {false, true}) {
        std::vector<float> scores(heads * tokens);
        std::vector<std::size_t> kept(heads, 0);
        std::vector<float> marks;
        for (std::size_t l = 0; l < layers; ++l) {
            CAPTURE(plus, l);
            const auto load = [&](std::string file) {
                return read_npy(golden + "/kvzip_layer" + std::to_string(l) + "/" + file + ".npy");
            };
            const npy_array keys = load("keys");
            const npy_array values = load("values");
            const npy_array pass_keys = load("pass_keys");
            const npy_array pass_queries = load("pass_queries");
            const npy_array norms = load("hidden_norms");
            const npy_array weights = load("output_weights");
            REQUIRE(pass_queries.shape.at(1) == query_heads);
            const auto key_rows = heads_in(keys);
            const auto value_rows = heads_in(values);
            const auto pass_rows = heads_in(pass_keys);
            const prompt_with<float, repeat_pass<float>, output_projection<float>> p{
                prompt<float>{{query_heads, kv_heads, width, width, 0}, key_rows, value_rows, positions, {}, {}},
                repeat_pass<float>{
                    chunks,
                    heads_of(std::span<const float>(pass_queries.data), pass_queries.shape[0], query_heads, width),
                    pass_rows, sinks, norms.data},
                output_projection<float>{contiguous_rows(std::span<const float>(weights.data), hidden)}};
            const npy_array theirs = load(plus ? "scores_plus" : "scores");
            const npy_array marked = load(plus ? "kept_plus" : "kept");
            marks.insert(marks.end(), marked.data.begin(), marked.data.end());
            for (std::size_t h = 0; h < kv_heads; ++h) {
                const std::span<float> out = std::span(scores).subspan((l * kv_heads + h) * tokens, tokens);
                plus ? kvzip_plus{}.score(cpu{}, p, h, out) : kvzip{}.score(cpu{}, p, h, out);
                check_scores(out, std::span<const float>(theirs.data).subspan(h * tokens, tokens), sinks, tokens,
                             3e-5f);
                for (std::size_t i = 0; i < tokens; ++i) {
                    kept[l * kv_heads + h] += marked.data[h * tokens + i] == 1.0f;
                }
            }
        }
        // kvpress prunes int(ratio * all) pairs: one cut over layers, heads and tokens.
        const auto all = static_cast<double>(heads * tokens);
        const budget share = budget::fraction((all - std::floor(all * ratio)) / all);
        const auto table = matrix_of(std::span<const float>(scores), heads, tokens);
        const auto ours = global_budgets(table, share, {sinks, 0});
        CHECK(ours == kept);
        for (std::size_t h = 0; h < heads; ++h) {
            const auto in = highest(table.row(h), ours[h]);
            for (std::size_t i = 0; i < tokens; ++i) {
                CHECK(in[i] == (marks[h * tokens + i] == 1.0f));
            }
        }
        // The original's strict threshold keeps one pair less than its own count where nothing ties.
        const float cut = threshold_of(table, share, {sinks, 0});
        std::size_t above = 0;
        for (const std::size_t count : threshold_budgets(table, cut, passing::above, {sinks, 0})) {
            above += count;
        }
        CHECK(above + 1 == total_rows(heads, tokens, share));
    }
}

TEST_CASE("sample: AdaKV's budgets are kvpress', a pyramid's where it does not fall back") {
    const npy_array given = read_npy(golden + "/given.npy");
    const auto scores = matrix_of(std::span<const float>(given.data), given.shape.at(0), given.shape.at(1));
    std::ifstream cases(golden + "/budgets.txt");
    REQUIRE(cases);
    std::size_t seen = 0;
    for (std::string line; std::getline(cases, line); ++seen) {
        CAPTURE(line);
        std::istringstream fields(line);
        std::string kind;
        double ratio = 0;
        fields >> kind;
        if (kind == "adakv") {
            double alpha = 0;
            fields >> ratio >> alpha;
            std::vector<std::size_t> theirs;
            for (std::size_t count = 0; fields >> count;) {
                theirs.push_back(count);
            }
            const auto each = static_cast<std::size_t>(static_cast<double>(scores.columns) * (1 - ratio));
            CHECK(adaptive_budgets(scores, budget::tokens(each), alpha) == theirs);
            // The authors' code mixes instead: no head above, and none below, both (1 - alpha) f + alpha B.
            const auto cut = adaptive_budgets(scores, budget::tokens(each), 0);
            const auto mixed = adaptive_budgets(scores, budget::tokens(each), alpha, adaptive_rule::mixture);
            for (std::size_t h = 0; h < cut.size(); ++h) {
                const double exact = (1 - alpha) * static_cast<double>(cut[h]) + alpha * static_cast<double>(each);
                CHECK(std::abs(static_cast<double>(mixed[h]) - exact) < 1);
            }
            CHECK((mixed == theirs) == (alpha == 0.0 || alpha == 1.0));
        } else {
            REQUIRE(kind == "pyramid");
            std::size_t layers = 0, tokens = 0, window = 0;
            double beta = 0;
            fields >> layers >> tokens >> ratio >> window >> beta;
            const budget kept = budget::fraction(1 - ratio);
            const auto ours = pyramid_budgets(layers, tokens, kept, {0, 0}, beta);
            const double mean = kept.rows(tokens);
            const double first = 2 * mean - mean / beta;
            const bool cut = first > static_cast<double>(tokens - window);
            const bool fallback = mean / beta < static_cast<double>(window);
            std::size_t sum = 0;
            for (std::size_t l = 0; l < layers; ++l) {
                double theirs = 0;
                REQUIRE(fields >> theirs);
                const double off = std::abs(static_cast<double>(ours[l]) - theirs);
                sum += ours[l];
                if (!cut && !fallback) {
                    CHECK(off <= 1);  // they round each layer by itself
                } else if (cut && l == 0) {
                    // They leave the window's tokens out of what a layer can hold, though it holds them.
                    CHECK(theirs == static_cast<double>(tokens - window));
                    CHECK(ours[0] == tokens);
                } else if (fallback && !cut) {
                    // They give up the pyramid where the last layer would not hold the window; ours puts it on top.
                    CHECK(theirs == std::round(mean));
                }
            }
            CHECK(sum == total_rows(layers, tokens, kept));
        }
    }
    CHECK(seen == 17);
}

TEST_CASE("score: SnapKV, key norm and StreamingLLM agree with kvpress") {
    const std::string folder = VERKV_TEST_DATA_DIR;
    std::ifstream cases(folder + "/cases.txt");
    REQUIRE(cases);
    std::size_t seen = 0;
    for (std::string line; std::getline(cases, line); ++seen) {
        std::istringstream fields(line);
        std::string name;
        std::size_t tokens = 0;
        std::size_t query_heads = 0;
        std::size_t kv_heads = 0;
        std::size_t width = 0;
        std::size_t window = 0;
        std::size_t pool = 0;
        std::size_t sinks = 0;
        double ratio = 0;
        REQUIRE(fields >> name >> tokens >> query_heads >> kv_heads >> width >> window >> pool >> sinks >> ratio);
        CAPTURE(name);
        const auto load = [&](const char* file) { return read_npy(folder + "/" + name + "/" + file + ".npy"); };
        const npy_array queries = load("queries");
        const npy_array keys = load("keys");
        REQUIRE(keys.shape == std::vector<std::size_t>{tokens, kv_heads, width});
        REQUIRE(queries.shape == std::vector<std::size_t>{window, query_heads, width});

        prompt<float> p;
        p.shape = {query_heads, kv_heads, width, width, 0};
        std::vector<rows<float>> key_rows;
        for (std::size_t h = 0; h < kv_heads; ++h) {
            key_rows.push_back(heads_of(std::span<const float>(keys.data), tokens, kv_heads, width).head(h));
        }
        std::vector<position_t> positions(tokens);
        for (std::size_t i = 0; i < tokens; ++i) {
            positions[i] = static_cast<position_t>(i);
        }
        p.keys = p.values = key_rows;
        p.positions = positions;
        p.queries = heads_of(std::span<const float>(queries.data), window, query_heads, width);
        p.query_positions = p.positions.last(window);

        const auto kept = static_cast<std::size_t>(static_cast<double>(tokens) * (1 - ratio));
        const npy_array snapkv_scores = load("snapkv");
        const npy_array norms = load("knorm");
        const npy_array streaming = load("streaming");
        std::vector<float> out(tokens);
        for (std::size_t h = 0; h < kv_heads; ++h) {
            const auto head_of = [&](const npy_array& a) {
                REQUIRE(a.shape == std::vector<std::size_t>{kv_heads, tokens});
                return std::span<const float>(a.data).subspan(h * tokens, tokens);
            };
            // Both sides compute in float: logits of at most about 30, off by some tens of units roundoff.
            const auto snap = head_of(snapkv_scores);
            make_snapkv(window, pool).score(cpu{}, p, h, out);
            for (std::size_t i = 0; i + window < tokens; ++i) {
                INFO("token " << i << ": " << out[i] << ", kvpress has " << snap[i]);
                CHECK(std::abs(out[i] - snap[i]) <= 1e-5f * snap[i]);
            }
            CHECK(std::all_of(out.end() - static_cast<std::ptrdiff_t>(window), out.end(),
                              [](float x) { return x == 1.0f; }));
            check_same_kept(out, snap, std::max(kept, window), 1e-6f);

            const auto norm = head_of(norms);
            key_norm{}.score(cpu{}, p, h, out);
            for (std::size_t i = 0; i < tokens; ++i) {
                CHECK(std::abs(out[i] - norm[i]) <= 1e-6f * -norm[i]);
            }
            check_same_kept(out, norm, kept, 1e-5f);

            // kvpress marks what is kept with 1.
            const auto marks = head_of(streaming);
            streaming_llm{sinks}.score(cpu{}, p, h, out);
            const auto ours = highest(out, kept);
            for (std::size_t i = 0; i < tokens; ++i) {
                CHECK(ours[i] == (marks[i] == 1.0f));
            }
        }
    }
    CHECK(seen == 6);
}
