// KVzip and KVzip+ against plain double sums over each chunk.
#include <cmath>
#include <limits>

#include "support/attention_reference.hpp"
#include "support/catch.hpp"
#include "support/random_prompt.hpp"
#include "support/refusal.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/core/prompt_inputs.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/kvzip.hpp"
#include "verkv/score/proportional.hpp"

using namespace verkv;

namespace {

template <class T>
using repeated = prompt_with<T, repeat_pass<T>>;
template <class T>
using projected = prompt_with<T, repeat_pass<T>, output_projection<T>>;
static_assert(scorer<kvzip, cpu, repeated<half>> && !scorer<kvzip, cpu, half>);
static_assert(scorer<kvzip_plus, cpu, projected<half>> && !scorer<kvzip_plus, cpu, repeated<half>>);
static_assert(scorer<decltype(windowed(4, 4, proportional(kvzip_plus{}))), cpu, projected<bfloat16>>);

// A text, a second pass over it and an output projection, with memory of their own.
template <class T>
struct second_pass {
    static constexpr std::size_t model_dim = 11;

    second_pass(geometry g, std::size_t n, std::vector<repeat_chunk> in, std::size_t queries, std::size_t sinks,
                std::uint64_t seed)
        : shape(g), chunks(std::move(in)) {
        support::generator random(seed);
        for (std::size_t i = 0; i < n; ++i) {
            positions.push_back(static_cast<position_t>(i));
        }
        for (std::size_t h = 0; h < g.kv_heads; ++h) {
            keys.push_back(random.normals<T>(n * g.key_dim, 2));
            values.push_back(random.normals<T>(n * g.value_dim));
            own_keys.push_back(random.normals<T>(queries * g.key_dim, 2));
        }
        for (std::size_t h = 0; h < g.kv_heads; ++h) {
            key_rows.push_back(contiguous_rows(std::span<const T>(keys[h]), g.key_dim));
            value_rows.push_back(contiguous_rows(std::span<const T>(values[h]), g.value_dim));
            own_rows.push_back(contiguous_rows(std::span<const T>(own_keys[h]), g.key_dim));
        }
        own_queries = random.normals<T>(queries * g.query_heads * g.key_dim);
        weights = random.normals<T>(g.query_heads * g.value_dim * model_dim, 0.4);
        for (std::size_t j = 0; j < queries; ++j) {
            norms.push_back(static_cast<float>(0.5 + random.uniform()));
        }
        pass = {chunks, heads_of(std::span<const T>(own_queries), queries, g.query_heads, g.key_dim), own_rows, sinks,
                norms};
    }

    [[nodiscard]] projected<T> view() const {
        return {prompt<T>{shape, key_rows, value_rows, positions, {}, {}}, pass,
                output_projection<T>{contiguous_rows(std::span<const T>(weights), model_dim)}};
    }

    // Scores in double; *spread the largest sum of |q k| scale.
    [[nodiscard]] std::vector<double> expected(std::size_t kv_head, bool plus, double* spread) const {
        const double scale = static_cast<double>(shape.logit_scale());
        std::vector<double> out(positions.size(), 0.0);
        for (const repeat_chunk& c : chunks) {
            for (std::size_t g = 0; g < shape.group(); ++g) {
                const std::size_t head = kv_head * shape.group() + g;
                for (std::size_t t = 0; t < c.queries; ++t) {
                    std::vector<double> w;
                    const auto weigh = [&](const T* k) {
                        double sum = 0;
                        double size = 0;
                        for (std::size_t x = 0; x < shape.key_dim; ++x) {
                            const double product =
                                support::value_of(pass.pass_queries.row(c.first_query + t, head)[x]) *
                                support::value_of(k[x]);
                            sum += scale * product;
                            size += scale * std::abs(product);
                        }
                        w.push_back(std::exp(sum));
                        *spread = std::max(*spread, size);
                    };
                    for (std::size_t i = 0; i < pass.sinks; ++i) {
                        weigh(key_rows[kv_head][i]);
                    }
                    for (std::size_t i = 0; i < c.tokens; ++i) {
                        weigh(key_rows[kv_head][c.first_token + i]);
                    }
                    for (std::size_t u = 0; u <= t; ++u) {
                        weigh(own_rows[kv_head][c.first_query + u]);
                    }
                    double total = 0;
                    for (const double x : w) {
                        total += x;
                    }
                    for (std::size_t i = 0; i < c.tokens; ++i) {
                        double a = w[pass.sinks + i] / total;
                        if (plus) {
                            double square = 0;
                            for (std::size_t m = 0; m < model_dim; ++m) {
                                double written = 0;
                                for (std::size_t x = 0; x < shape.value_dim; ++x) {
                                    written += support::value_of(value_rows[kv_head][c.first_token + i][x]) *
                                               support::value_of(weights[(head * shape.value_dim + x) * model_dim + m]);
                                }
                                square += written * written;
                            }
                            a *= std::sqrt(square) / static_cast<double>(norms[c.first_query + t]);
                        }
                        out[c.first_token + i] = std::max(out[c.first_token + i], a);
                    }
                }
            }
        }
        return out;
    }

    geometry shape;
    std::vector<repeat_chunk> chunks;
    std::vector<position_t> positions;
    std::vector<std::vector<T>> keys, values, own_keys;
    std::vector<rows<T>> key_rows, value_rows, own_rows;
    std::vector<T> own_queries, weights;
    std::vector<float> norms;
    repeat_pass<T> pass;
};

}  // namespace

TEMPLATE_TEST_CASE("score: KVzip is the largest attention of the second pass", "", float, half, bfloat16) {
    for (const std::size_t group : {1u, 3u, 5u}) {
        CAPTURE(group);
        // Chunks of unequal length, one longer than a block of 512 keys, and queries between chunks that belong to
        // none.
        const second_pass<TestType> s({2 * group, 2, 20, 7, group == 3 ? 0.3f : 0.0f}, 700,
                                      {{5, 40, 2, 45}, {45, 560, 50, 70}, {605, 95, 120, 1}}, 122, 5, group);
        const auto p = s.view();
        std::vector<float> got(700);
        for (std::size_t h = 0; h < 2; ++h) {
            double spread = 0;
            const auto plain = s.expected(h, false, &spread);
            const auto plus = s.expected(h, true, &spread);
            const double tolerance = (2 * 22 * spread + 8) * 0x1p-24;
            kvzip{}.score(cpu{}, p, h, got);
            for (std::size_t i = 5; i < 700; ++i) {
                REQUIRE(std::abs(static_cast<double>(got[i]) - plain[i]) <= tolerance * plain[i]);
            }
            CHECK(std::all_of(got.begin(), got.begin() + 5, [](float x) { return x == 1.0f; }));
            CHECK(std::all_of(got.begin(), got.end(), [](float x) { return x > 0 && x <= 1.0f; }));
            thread_pool pool(3);
            std::vector<float> threaded(700);
            kvzip{}.score(cpu{&pool}, p, h, threaded);
            CHECK(got == threaded);
            kvzip_plus{}.score(cpu{}, p, h, got);
            for (std::size_t i = 5; i < 700; ++i) {
                REQUIRE(std::abs(static_cast<double>(got[i]) - plus[i]) <= (tolerance + 2e-5) * plus[i]);
            }
            CHECK(got[0] == std::max(1.0f, *std::max_element(got.begin() + 5, got.end())));
            kvzip_plus{}.score(cpu{&pool}, p, h, threaded);
            CHECK(got == threaded);
        }
    }
}

TEST_CASE("score: KVzip's second pass is checked, and spoiled rows stay in their chunk") {
    const geometry shape{2, 1, 8, 3, 0};
    second_pass<float> s(shape, 30, {{2, 10, 0, 12}, {12, 18, 12, 20}}, 32, 2, 9);
    auto p = s.view();
    std::vector<float> out(30, 7.0f);
    using support::refused;
    p.sinks = 3;
    CHECK(refused([&] { kvzip{}.score(cpu{}, p, 0, out); }, {"chunk 0", "go on at 3"}));
    p.sinks = 2;
    p.hidden_norms = {};
    CHECK(refused([&] { kvzip_plus{}.score(cpu{}, p, 0, out); }, {"norms of 32", "0 were given"}));
    p.output_weights.count = 5;
    p.hidden_norms = s.norms;
    CHECK(refused([&] { kvzip_plus{}.score(cpu{}, p, 0, out); }, {"[5, 11]", "6 rows"}));
    CHECK(out == std::vector<float>(30, 7.0f));
    kvzip{}.score(cpu{}, p, 0, out);  // does not look at norms or projection

    s.values[0][20 * 3] = std::numeric_limits<float>::quiet_NaN();
    kvzip_plus{}.score(cpu{}, s.view(), 0, out);
    for (std::size_t i = 0; i < 30; ++i) {
        REQUIRE(std::isnan(out[i]) == (i == 20));
    }
    s.keys[0][15 * 8] = std::numeric_limits<float>::quiet_NaN();
    kvzip{}.score(cpu{}, s.view(), 0, out);
    for (std::size_t i = 0; i < 30; ++i) {
        REQUIRE(std::isnan(out[i]) == (i >= 12));
    }
    // Nothing but sinks; and nothing at all.
    const second_pass<float> sinks(shape, 4, {}, 0, 4, 9);
    std::vector<float> four(4);
    kvzip{}.score(cpu{}, sinks.view(), 0, four);
    CHECK(four == std::vector<float>(4, 1.0f));
    const second_pass<float> empty(shape, 0, {}, 0, 0, 9);
    kvzip_plus{}.score(cpu{}, empty.view(), 0, std::span<float>());
    // Values of 0 write nothing: KVzip+ is 0, not NaN.
    second_pass<float> silent(shape, 30, {{2, 10, 0, 12}, {12, 18, 12, 20}}, 32, 2, 9);
    std::fill(silent.values[0].begin(), silent.values[0].end(), 0.0f);
    kvzip_plus{}.score(cpu{}, silent.view(), 0, out);
    CHECK(out[0] == 1.0f);
    CHECK(std::all_of(out.begin() + 2, out.end(), [](float x) { return x == 0.0f; }));
    // A projection of 0 has rank 0.
    second_pass<float> blocked(shape, 30, {{2, 10, 0, 12}, {12, 18, 12, 20}}, 32, 2, 9);
    std::fill(blocked.weights.begin(), blocked.weights.end(), 0.0f);
    kvzip_plus{}.score(cpu{}, blocked.view(), 0, out);
    CHECK(std::all_of(out.begin() + 2, out.end(), [](float x) { return x == 0.0f; }));
}
