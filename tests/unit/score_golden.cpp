// Scores against those of the reference pipeline, written by tests/golden/generate.py.
#include <algorithm>
#include <fstream>
#include <sstream>

#include "support/catch.hpp"
#include "support/npy.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/snapkv.hpp"
#include "verkv/score/streaming_llm.hpp"

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

}  // namespace

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
