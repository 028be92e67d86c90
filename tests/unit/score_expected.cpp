// Expected attention against full matrices in double; scores of any size as importance.
#include <limits>
#include <random>

#include "support/catch.hpp"
#include "support/random_prompt.hpp"
#include "support/refusal.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/expected_attention.hpp"
#include "verkv/score/given.hpp"

using namespace verkv;

static_assert(scorer<expected_attention, cpu, half> && head_scorer<expected_attention, cpu, bfloat16>);
static_assert(scorer<decltype(make_expected_attention({})), cpu, float>);

namespace {

using matrix = std::vector<std::vector<double>>;

// Rotation matrix at a position, written out.
matrix rotation_at(const rope& r, double position, std::size_t d) {
    matrix m(d, std::vector<double>(d, 0.0));
    for (std::size_t c = 0; c < d; ++c) {
        m[c][c] = 1;
    }
    for (std::size_t i = 0; i < r.pairs(); ++i) {
        const std::size_t a = r.pairing == rope_pairing::half ? i : 2 * i;
        const std::size_t b = r.pairing == rope_pairing::half ? i + r.pairs() : 2 * i + 1;
        m[a][a] = m[b][b] = r.magnitude * std::cos(position * r.frequencies[i]);
        m[b][a] = r.magnitude * std::sin(position * r.frequencies[i]);
        m[a][b] = -m[b][a];
    }
    return m;
}

std::vector<double> times(const matrix& m, const std::vector<double>& x) {
    std::vector<double> y(m.size(), 0.0);
    for (std::size_t a = 0; a < m.size(); ++a) {
        for (std::size_t b = 0; b < x.size(); ++b) {
            y[a] += m[a][b] * x[b];
        }
    }
    return y;
}

// Softmax of one query head behind the sinks; the queries that `p` holds were rotated from `raw` [query][head][d].
std::vector<double> attention_of(const prompt<float>& p, std::size_t head, const expected_attention& how,
                                 const std::vector<std::vector<std::vector<double>>>& raw) {
    const std::size_t d = p.shape.key_dim;
    std::vector<double> mean(d, 0.0);
    double used = 0;
    const auto counts = [&](std::size_t j) { return p.query_positions[j] >= p.positions[how.sinks]; };
    for (std::size_t j = 0; j < raw.size(); ++j) {
        for (std::size_t c = 0; c < d && counts(j); ++c) {
            mean[c] += raw[j][head][c];
        }
        used += counts(j);
    }
    for (double& x : mean) {
        x /= used;
    }
    matrix covariance(d, std::vector<double>(d, 0.0));
    for (std::size_t j = 0; j < raw.size(); ++j) {
        for (std::size_t a = 0; a < d && counts(j); ++a) {
            for (std::size_t b = 0; b < d; ++b) {
                covariance[a][b] += (raw[j][head][a] - mean[a]) * (raw[j][head][b] - mean[b]) / used;
            }
        }
    }
    matrix average(d, std::vector<double>(d, 0.0));
    for (std::size_t f = 1; f <= how.n_future; ++f) {
        const matrix r = rotation_at(how.rotation, static_cast<double>(p.positions.back()) + static_cast<double>(f), d);
        for (std::size_t a = 0; a < d; ++a) {
            for (std::size_t b = 0; b < d; ++b) {
                average[a][b] += r[a][b] / static_cast<double>(how.n_future);
            }
        }
    }
    const std::vector<double> moved = times(average, mean);
    const double scale = static_cast<double>(p.shape.logit_scale());
    std::vector<double> logits;
    for (std::size_t i = how.sinks; i < p.tokens(); ++i) {
        const float* k = p.keys[head / p.shape.group()][i];
        std::vector<double> key(k, k + d);
        double logit = 0;
        for (std::size_t c = 0; c < d; ++c) {
            logit += scale * moved[c] * key[c];
        }
        if (how.use_covariance) {
            std::vector<double> back(d, 0.0);  // R^T k
            for (std::size_t a = 0; a < d; ++a) {
                for (std::size_t b = 0; b < d; ++b) {
                    back[b] += average[a][b] * key[a];
                }
            }
            const std::vector<double> product = times(covariance, back);
            for (std::size_t c = 0; c < d; ++c) {
                logit += scale * scale / 2 * product[c] * back[c];
            }
        }
        logits.push_back(logit);
    }
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (double& x : logits) {
        x = std::exp(x - top);
        sum += x;
    }
    for (double& x : logits) {
        x /= sum;
    }
    return logits;
}

// A prompt of floats with values, and kept queries that were rotated from `raw`.
struct rotated_prompt {
    rotated_prompt(geometry g, std::vector<position_t> at, std::vector<position_t> query_at, const rope& r,
                   unsigned seed)
        : shape(g), positions(std::move(at)), query_positions(std::move(query_at)) {
        std::mt19937 random(seed);
        std::normal_distribution<double> normal;
        keys.assign(shape.kv_heads, std::vector<float>(positions.size() * shape.key_dim));
        values.assign(shape.kv_heads, std::vector<float>(positions.size() * shape.value_dim));
        for (std::size_t h = 0; h < shape.kv_heads; ++h) {
            std::generate(keys[h].begin(), keys[h].end(), [&] { return static_cast<float>(normal(random)); });
            std::generate(values[h].begin(), values[h].end(), [&] { return static_cast<float>(normal(random)); });
            key_rows.push_back(contiguous_rows(std::span<const float>(keys[h]), shape.key_dim));
            value_rows.push_back(contiguous_rows(std::span<const float>(values[h]), shape.value_dim));
        }
        for (const position_t position : query_positions) {
            auto& heads = raw.emplace_back();
            for (std::size_t h = 0; h < shape.query_heads; ++h) {
                auto& q = heads.emplace_back(shape.key_dim);
                for (std::size_t c = 0; c < q.size(); ++c) {
                    q[c] = 0.3 * normal(random) + 0.5 * std::sin(static_cast<double>(c + h));
                }
                for (const double x : times(rotation_at(r, position, shape.key_dim), q)) {
                    queries.push_back(static_cast<float>(x));
                }
            }
        }
    }

    [[nodiscard]] prompt<float> view() const {
        return {shape,
                key_rows,
                value_rows,
                positions,
                heads_of(std::span<const float>(queries), query_positions.size(), shape.query_heads, shape.key_dim),
                query_positions};
    }

    geometry shape;
    std::vector<position_t> positions;
    std::vector<position_t> query_positions;
    std::vector<std::vector<float>> keys;
    std::vector<std::vector<float>> values;
    std::vector<rows<float>> key_rows;
    std::vector<rows<float>> value_rows;
    std::vector<float> queries;
    std::vector<std::vector<std::vector<double>>> raw;
};

// Given scores as a layer scorer.
struct layer_of_given {
    given_scores given;

    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        given.score(exec, p, kv_head, out);
    }
    template <class Backend, class T>
    void score_layer(const Backend& exec, const prompt<T>& p, matrix_view<float> out) const {
        for (std::size_t h = 0; h < out.rows; ++h) {
            given.score(exec, p, h, out.row(h));
        }
    }
};

}  // namespace

TEST_CASE("score: expected attention agrees with full matrices in double") {
    int variant = 0;
    for (const std::size_t group : {1u, 3u}) {
        for (const rope_pairing pairing : {rope_pairing::half, rope_pairing::interleaved}) {
            for (const bool few : {false, true}) {
                ++variant;
                const std::size_t d = group == 1 ? 12 : 10;
                rope r = rope::plain(d, 1000, pairing);
                if (variant % 2 == 0) {
                    r.frequencies.pop_back();  // two channels that are not rotated
                    r.magnitude = 1.1;
                }
                const geometry shape{2 * group, 2, d, 5, variant % 3 == 0 ? 0.2f : 0.0f};
                // Far positions, with gaps; few queries: fewer than channels, so the covariance is singular.
                const rotated_prompt owner(
                    shape, positions_from(100'000, 101'700, 3),
                    few ? positions_from(100'003, 100'031, 4) : positions_from(100'000, 101'700, 7), r,
                    static_cast<unsigned>(variant));
                const prompt<float> p = owner.view();
                expected_attention how{r, 50, 4};
                how.use_covariance = variant != 3;
                how.use_value_norm = variant != 5;
                how.epsilon = variant == 7 ? 0.01f : 0.0f;
                CAPTURE(variant);
                for (std::size_t kv = 0; kv < 2; ++kv) {
                    std::vector<double> expected(p.tokens() - 4, 0.0);
                    std::vector<float> got(p.tokens());
                    const auto finish = [&](double a, std::size_t i) {
                        double square = 0;
                        for (std::size_t c = 0; c < 5; ++c) {
                            square += std::pow(static_cast<double>(p.values[kv][i][c]), 2);
                        }
                        return (a + static_cast<double>(how.epsilon)) * (how.use_value_norm ? std::sqrt(square) : 1.0);
                    };
                    for (std::size_t h = kv * group; h < (kv + 1) * group; ++h) {
                        const auto a = attention_of(p, h, how, owner.raw);
                        how.score_head(cpu{}, p, h, got);
                        for (std::size_t i = 0; i < a.size(); ++i) {
                            expected[i] += a[i] / static_cast<double>(group);
                            REQUIRE(static_cast<double>(got[4 + i]) == Approx(finish(a[i], 4 + i)).epsilon(2e-5));
                        }
                    }
                    how.score(cpu{}, p, kv, got);
                    for (std::size_t i = 0; i < expected.size(); ++i) {
                        REQUIRE(static_cast<double>(got[4 + i]) == Approx(finish(expected[i], 4 + i)).epsilon(2e-5));
                    }
                    CHECK(got[0] == std::max(1.0f, *std::max_element(got.begin() + 4, got.end())));
                    CHECK(got[3] == got[0]);
                    thread_pool pool(3);
                    std::vector<float> threaded(p.tokens());
                    how.score(cpu{&pool}, p, kv, threaded);
                    CHECK(got == threaded);
                }
            }
        }
    }
}

TEST_CASE("score: a logit of expected attention is the logarithm of a mean of exponentials") {
    // One token's weight relative to a token of key 0 (logit 0) is E exp(scale <q, k>) over the queries to come: here
    // over draws of N(mean, covariance) of one channel that is not rotated.
    const geometry shape{1, 1, 4, 1, 0.7f};
    rope r{{0.5}};  // channels 0 and 1
    const std::size_t m = 2001;
    std::vector<float> queries(m * 4, 0.0f);
    double mean = 0;
    for (std::size_t j = 0; j < m; ++j) {
        // Even quantiles of a normal distribution, by sums of uniforms' stand-in: a triangle of deviation 0.5.
        const double u = (static_cast<double>(j) + 0.5) / static_cast<double>(m);
        queries[4 * j + 2] =
            static_cast<float>(0.4 + 1.2247 * (u < 0.5 ? std::sqrt(2 * u) - 1 : 1 - std::sqrt(2 - 2 * u)));
        mean += static_cast<double>(queries[4 * j + 2]) / static_cast<double>(m);
    }
    std::vector<float> keys(2 * 4, 0.0f);
    keys[6] = 1.5f;
    const std::vector<float> values(2, 1.0f);
    const rows<float> key_rows = contiguous_rows(std::span<const float>(keys), 4);
    const rows<float> value_rows = contiguous_rows(std::span<const float>(values), 1);
    const auto positions = positions_from(0, 2);
    const auto query_positions = positions_from(0, static_cast<int>(m));
    const prompt<float> p{
        shape,          {&key_rows, 1}, {&value_rows, 1}, positions, heads_of(std::span<const float>(queries), m, 1, 4),
        query_positions};
    std::vector<float> out(2);
    expected_attention{r, 3, 0}.score(cpu{}, p, 0, out);
    double exponential = 0;
    for (std::size_t j = 0; j < m; ++j) {
        exponential += std::exp(0.7 * 1.5 * static_cast<double>(queries[4 * j + 2])) / static_cast<double>(m);
    }
    CHECK(static_cast<double>(out[1] / out[0]) == Approx(exponential).epsilon(2e-3));
    CHECK(std::exp(0.7 * 1.5 * mean) < 0.9 * exponential);  // the mean alone is far off
}

TEST_CASE("score: expected attention as importance, NaN, few tokens and refusals") {
    const geometry shape{2, 1, 8, 3, 0};
    const rope r = rope::plain(8);
    rotated_prompt owner(shape, positions_from(0, 700), positions_from(0, 700), r, 4);
    const prompt<float> p = owner.view();
    const std::size_t n = p.tokens();
    std::vector<float> raw(n);
    std::vector<float> tau(n);
    for (float& x : owner.values[0]) {
        x *= 1e5f;
    }
    expected_attention{r}.score(cpu{}, p, 0, raw);
    CHECK(raw[0] > 1);
    make_expected_attention({r}).score(cpu{}, p, 0, tau);
    CHECK(!to_importance(cpu{}, std::span<float>(tau)));
    CHECK(tau[0] == 1.0f);
    for (std::size_t i = 5; i < n; ++i) {
        REQUIRE(tau[i] / tau[4] == Approx(raw[i] / raw[4]).epsilon(1e-5));
    }
    // A bad key or value spoils its own token.
    std::vector<float> spoiled(n);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    owner.keys[0][20 * 8 + 3] = nan;
    owner.keys[0][30 * 8 + 3] = std::numeric_limits<float>::infinity();
    owner.values[0][40 * 3] = nan;
    expected_attention{r}.score(cpu{}, p, 0, spoiled);
    for (std::size_t i = 0; i < n; ++i) {
        REQUIRE(std::isnan(spoiled[i]) == (i == 20 || i == 30 || i == 40));
    }
    CHECK(support::refused([&] { make_expected_attention({r}).score(cpu{}, p, 0, tau); }, {"token 20", "nan"}));
    owner.queries[100 * 16 + 3] = nan;  // of query head 0
    expected_attention{r}.score_head(cpu{}, p, 0, spoiled);
    CHECK(std::isnan(spoiled[50]));
    expected_attention{r}.score_head(cpu{}, p, 1, spoiled);
    CHECK(!std::isnan(spoiled[50]));

    for (const int few : {0, 1, 4}) {
        const rotated_prompt short_text(shape, positions_from(0, few), {}, r, 4);
        std::vector<float> ones(static_cast<std::size_t>(few));
        make_expected_attention({r}).score(cpu{}, short_text.view(), 0, ones);
        CHECK(ones == std::vector<float>(static_cast<std::size_t>(few), 1.0f));
    }
    // One query behind the sinks: no covariance at all.
    const rotated_prompt five(shape, positions_from(0, 5), positions_from(3, 5), r, 4);
    std::vector<float> out(5);
    expected_attention{r}.score(cpu{}, five.view(), 0, out);
    CHECK(out[4] > 0);
    using support::refused;
    const rotated_prompt early(shape, positions_from(0, 9), positions_from(0, 4), r, 4);
    std::vector<float> nine(9);
    CHECK(refused([&] { expected_attention{r}.score(cpu{}, early.view(), 0, nine); },
                  {"4 sinks", "5 tokens", "4 are kept", "position 4"}));
    CHECK(refused([&] { expected_attention{r, 0}.score(cpu{}, early.view(), 0, nine); }, {"n_future is 0"}));
    CHECK(refused([&] { expected_attention{rope::plain(10)}.score(cpu{}, early.view(), 0, nine); },
                  {"5 frequencies", "8 channels"}));
    CHECK(refused([&] { expected_attention{r, 5, 4, true, true, -1}.score(cpu{}, early.view(), 0, nine); },
                  {"epsilon -1"}));
}

TEST_CASE("score: proportional scores keep their ratios") {
    const geometry shape{2, 2, 6, 3, 0};
    const random_prompt<float> owner(shape, positions_from(0, 3), {}, 1);
    const std::vector<float> given{0, 3, 6, 0, 0, 0};
    std::vector<float> out(3);
    proportional(given_scores(given)).score(cpu{}, owner.view(), 0, out);
    CHECK(out == std::vector<float>{0, 0.5f, 1});
    proportional(given_scores(given)).score(cpu{}, owner.view(), 1, out);
    CHECK(out == std::vector<float>{0, 0, 0});
    const std::vector<float> negative{0, 3, -6, 0, 0, 0};
    CHECK(support::refused([&] { proportional(given_scores(negative)).score(cpu{}, owner.view(), 0, out); },
                           {"token 2", "-6"}));
    CHECK(out == std::vector<float>{0, 0, 0});
    const std::vector<float> two{2, 1, 0, 0, 5, 4};
    std::vector<float> layer(6);
    proportional(layer_of_given{given_scores(two)})
        .score_layer(cpu{}, owner.view(), matrix_of(std::span<float>(layer), 2, 3));
    CHECK(layer == std::vector<float>{1, 0.5f, 0, 0, 1, 0.8f});
}
