// Compactor, Fast KVzip's gate and KVzap against kvpress, written by tests/golden/generate_learned.py; CompressKV
// against numpy, by generate_compress_kv.py; and the reader of their weights.
#include <algorithm>
#include <cmath>

#include "common/gate_weights.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "verkv/score/compactor.hpp"
#include "verkv/score/compress_kv.hpp"
#include "verkv/score/eviction_error.hpp"
#include "verkv/score/kvzap.hpp"
#include "verkv/score/sink_gate.hpp"

#ifndef VERKV_TEST_DATA_DIR
#define VERKV_TEST_DATA_DIR "tests/golden"
#endif

using namespace verkv;

namespace {

const std::string folder = std::string(VERKV_TEST_DATA_DIR) + "/learned/";

example::float_array load(const std::string& name, std::size_t axes) {
    return example::read_floats(folder + name + ".npy", axes);
}

std::vector<position_t> first_positions(std::size_t n) {
    std::vector<position_t> positions(n);
    for (std::size_t i = 0; i < n; ++i) {
        positions[i] = static_cast<position_t>(i);
    }
    return positions;
}

// A prompt as a case has it, every query kept.
struct compactor_case {
    explicit compactor_case(const std::string& name)
        : keys(load(name + "/keys", 3)),
          queries(load(name + "/queries", 3)),
          values(load(name + "/values", 3)),
          projection(load(name + "/projection", 3)),
          positions(first_positions(keys.shape[0])) {
        for (std::size_t h = 0; h < keys.shape[1]; ++h) {
            key_rows.push_back(heads(keys).head(h));
            value_rows.push_back(heads(values).head(h));
        }
        p.shape = {queries.shape[1], keys.shape[1], keys.shape[2], keys.shape[2], 0};
        p.keys = key_rows;
        p.values = value_rows;
        p.positions = p.query_positions = positions;
        p.queries = heads(queries);
    }
    compactor_case(const compactor_case&) = delete;
    compactor_case& operator=(const compactor_case&) = delete;

    static heads_view<float> heads(const example::float_array& a) {
        return heads_of(std::span<const float>(a.data), a.shape[0], a.shape[1], a.shape[2]);
    }
    [[nodiscard]] std::span<const float> projection_of(std::size_t kv) const {
        const std::size_t size = projection.shape[1] * projection.shape[2];
        return std::span<const float>(projection.data).subspan(kv * size, size);
    }

    example::float_array keys, queries, values, projection;
    std::vector<position_t> positions;
    std::vector<rows<float>> key_rows, value_rows;
    prompt<float> p;
};

// Each within `relative` of theirs and `absolute`: both sides compute in float.
void check_close(std::span<const float> ours, std::span<const float> theirs, float relative, float absolute) {
    REQUIRE(ours.size() == theirs.size());
    for (std::size_t i = 0; i < ours.size(); ++i) {
        INFO("token " << i << ": " << ours[i] << ", kvpress has " << theirs[i]);
        CHECK(std::abs(ours[i] - theirs[i]) <= relative * std::abs(theirs[i]) + absolute);
    }
}

std::span<const float> row(const example::float_array& a, std::size_t i) {
    return std::span<const float>(a.data).subspan(i * a.shape[1], a.shape[1]);
}

template <class S, class P>
std::vector<float> scores(const S& s, const P& p, std::size_t kv_head) {
    std::vector<float> out(p.tokens());
    s.score(cpu{}, p, kv_head, std::span<float>(out));
    return out;
}

}  // namespace

TEST_CASE("score: Compactor's parts agree with kvpress where it follows the paper") {
    const compactor_case c("compactor_parts");
    const rope rotation = rope::plain(24);
    const auto leverage = load("compactor_parts/leverage", 2);
    const auto attention = load("compactor_parts/attention", 2);
    const auto raw = load("compactor_parts/attention_raw", 2);
    for (std::size_t h = 0; h < 2; ++h) {
        // kvpress rotates and solves in float.
        check_close(scores(leverage_score{rotation, 16, 0, 1e-2, c.projection_of(h)}, c.p, h), row(leverage, h), 1e-4f,
                    1e-6f);
        const auto ours = scores(non_causal_attention{64}, c.p, h);
        check_close(ours, row(attention, h), 2e-5f, 0);
        check_close(scores(non_causal_attention{64, 3, 1.0f}, c.p, h), row(raw, h), 1e-4f, 1e-6f);
        // Logits that are not divided are another score.
        float apart = 0;
        for (std::size_t i = 0; i < ours.size(); ++i) {
            apart = std::max(apart, std::abs(ours[i] / row(raw, h)[i] - 1));
        }
        CHECK(apart > 0.5f);
    }
}

TEST_CASE("score: Compactor agrees with kvpress on one KV head, logits not divided") {
    const compactor_case c("compactor_whole");
    const compactor s{{rope::plain(32), 48, 0, 1e-2, c.projection_of(0)}, {64, 3, 1.0f}, 0.5f};
    const auto expected = load("compactor_whole/compactor", 2);
    auto ours = scores(s, c.p, 0);
    // kvpress gives protected tokens the highest score there is, which a tie can beat; ours have 1 more.
    for (std::size_t i = 0; i < ours.size(); ++i) {
        ours[i] -= i < 8 || i >= ours.size() - 4 ? 1.0f : 0.0f;
    }
    check_close(ours, row(expected, 0), 1e-4f, 1e-4f);
}

TEST_CASE("score: the sink gate and KVzap agree with kvpress, weights read from files") {
    const auto compare = [](const char* name, std::size_t query_heads, std::size_t kv_heads, const auto& scorer) {
        CAPTURE(name);
        const auto hidden = load(std::string(name) + "/hidden", 2);
        const auto expected = load(std::string(name) + "/scores", 2);
        const std::size_t n = hidden.shape[0];
        const std::vector<float> zeros(n);
        const std::vector<rows<float>> none(kv_heads, contiguous_rows(std::span<const float>(zeros), 1));
        const auto positions = first_positions(n);
        prompt_with<float, hidden_states<float>> p;
        p.shape = {query_heads, kv_heads, 1, 1, 0};
        p.keys = p.values = none;
        p.positions = positions;
        p.hidden = contiguous_rows(std::span<const float>(hidden.data), hidden.shape[1]);
        for (std::size_t h = 0; h < kv_heads; ++h) {
            check_close(scores(scorer, p, h), row(expected, h), 1e-4f, 1e-5f);
        }
    };
    const example::sink_gate_files gate(folder + "sink_gate");
    compare("sink_gate", 6, 2, sink_gate{gate.view(), 0, 0, 0, 0});
    const example::kvzap_files perceptron(folder + "kvzap_mlp");
    compare("kvzap_mlp", 3, 3, kvzap{perceptron.view(), kvzap_output::logarithm});
    const example::kvzap_files linear(folder + "kvzap_linear");
    CHECK(linear.view().hidden_dim == 0);
    compare("kvzap_linear", 3, 3, kvzap{linear.view(), kvzap_output::logarithm});
}

TEST_CASE("examples: gate weights that do not go together are refused") {
    const auto problem = [](auto read) -> std::string {
        try {
            read();
        } catch (const example::file_error& e) {
            return e.what();
        }
        return {};
    };
    const auto has = [](const std::string& text, const std::string& part) {
        return text.find(part) != std::string::npos;
    };
    const test_support::temporary_folder copy;
    const auto path = copy.path() / "gate";
    std::filesystem::copy(folder + "sink_gate", path);
    const auto write = [&](const char* name, const auto& elements, std::vector<std::size_t> shape) {
        example::write_npy(path / name,
                           std::span<const typename std::decay_t<decltype(elements)>::value_type>(elements), shape);
    };
    const auto read_gate = [&] { example::sink_gate_files files(path); };
    CHECK(problem(read_gate).empty());
    write("key_norm.npy", std::vector<double>(16, 0.5), {16});
    CHECK(example::sink_gate_files(path).view().key_norm[3] == 0.5f);
    write("key_norm.npy", std::vector<half>(16, from_float<half>(0.25f)), {16});
    CHECK(example::sink_gate_files(path).view().key_norm[3] == 0.25f);
    write("key_norm.npy", std::vector<std::int32_t>(16), {16});
    CHECK(has(problem(read_gate), "integers"));
    write("key_norm.npy", std::vector<float>(15), {15});
    CHECK(has(problem(read_gate), "key_norm.npy: has shape (15,); the other files make it (16,)"));
    write("key_norm.npy", std::vector<float>(16), {4, 4});
    CHECK(has(problem(read_gate), "1 axes"));
    std::filesystem::remove(path / "key_norm.npy");
    CHECK(has(problem(read_gate), "does not exist"));

    std::filesystem::remove_all(path);
    std::filesystem::copy(folder + "kvzap_mlp", path);
    const auto read_zap = [&] { example::kvzap_files files(path); };
    CHECK(problem(read_zap).empty());
    write("output_weights.npy", std::vector<float>(3 * 23), {3, 23});
    CHECK(has(problem(read_zap), "(3, 23); the other files make it (3, 24)"));
    std::filesystem::remove(path / "hidden_bias.npy");
    CHECK(has(problem(read_zap), "hidden_bias.npy: does not exist"));
}

// No program of the field's to compare with: kvpress 0.5.5 has none. generate_compress_kv.py reads the paper once more.
TEST_CASE("score: CompressKV and the error of a layer agree with the formulas in numpy") {
    const std::string golden = VERKV_TEST_DATA_DIR;
    const auto read = [&](const char* name, std::size_t axes) {
        return example::read_floats(golden + "/" + name + ".npy", axes);
    };
    const auto keys = read("full_group3/keys", 3), queries = read("full_group3/queries", 3),
               values = read("full_group3/values", 3);
    const auto scores = read("compress_kv/scores", 1), kept = read("compress_kv/kept", 1),
               projection = read("compress_kv/projection", 2), error = read("compress_kv/error", 1);
    const std::size_t n = keys.shape[0], width = keys.shape[2], window = 8;
    const auto positions = first_positions(n);
    const auto heads = [](const example::float_array& a) { return compactor_case::heads(a); };
    const std::vector<rows<float>> key_rows{heads(keys).head(0), heads(keys).head(1)};
    const std::vector<rows<float>> value_rows{heads(values).head(0), heads(values).head(1)};
    prompt<float> p{{queries.shape[1], 2, width, width, 0}, key_rows, value_rows, positions, heads(queries), positions};
    const std::vector<std::size_t> looking{0, 2, 5};
    std::vector<float> out(n);
    for (const std::size_t kv : {0u, 1u}) {
        compress_kv{looking, window, 5}.score(cpu{}, p, kv, std::span<float>(out));
        CHECK(std::all_of(out.end() - window, out.end(), [](float x) { return x == 1; }));
        std::for_each(out.begin(), out.end() - window, [](float& x) { x *= window; });  // theirs is the sum
        check_close(std::span<const float>(out).first(n - window),
                    std::span<const float>(scores.data).first(n - window), 3e-5f, 0);
    }
    p.queries = p.queries.slice(n - window, window);
    p.query_positions = std::span<const position_t>(positions).last(window);
    const std::vector<token_index> tokens(kept.data.begin(), kept.data.end());
    const std::vector<std::span<const token_index>> of_heads(2, tokens);
    const prompt_with<float, output_projection<float>> with{
        p, {contiguous_rows(std::span<const float>(projection.data), projection.shape[1])}};
    CHECK(eviction_error(cpu{}, with, of_heads) == Approx(static_cast<double>(error.data[0])).epsilon(1e-5));
}
