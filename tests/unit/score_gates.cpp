// Scores that trained models make of hidden states, against plain double sums.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/valued_prompt.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/kvzap.hpp"
#include "verkv/score/sink_gate.hpp"

using namespace verkv;

namespace {

using doubles = std::vector<double>;
const float nan_value = std::numeric_limits<float>::quiet_NaN();

template <class T>
using hidden_prompt = prompt_with<T, hidden_states<T>>;
static_assert(scorer<sink_gate, cpu, hidden_prompt<half>> && !scorer<sink_gate, cpu, half>);
static_assert(layer_scorer<kvzap, cpu, hidden_prompt<bfloat16>> && !scorer<kvzap, cpu, half>);
static_assert(!layer_scorer<sink_gate, cpu, hidden_prompt<half>>);
static_assert(std::same_as<needs_of<sink_gate, half>, inputs<hidden_states<half>>>);
static_assert(scorer<decltype(floored(0, sink_gate{})), cpu, hidden_prompt<float>>);

// A prompt with hidden states in memory of its own.
template <class T>
struct hidden_rig {
    hidden_rig(geometry shape, std::size_t n, std::size_t model_dim, layout lie = layout::dense, std::uint64_t seed = 1)
        : plain(shape, positions_from(0, static_cast<int>(n)), {}, 1),
          hidden(support::generator(seed).normals<T>(n * model_dim), n, model_dim,
                 static_cast<support::rows_layout>(lie), seed) {}

    [[nodiscard]] hidden_prompt<T> view() const { return {plain.view(), {hidden.view()}}; }

    random_prompt<T> plain;
    support::own_rows<T> hidden;
};

std::vector<float> numbers(std::size_t count, std::uint64_t seed, double size) {
    return support::generator(seed).normals<float>(count, size);
}

struct gate_memory {
    gate_memory(const geometry& g, std::size_t model_dim, std::size_t dim, std::size_t sinks)
        : query(numbers(g.query_heads * dim * model_dim, 1, 0.3)),
          query_bias(numbers(g.query_heads * dim, 2, 0.5)),
          key(numbers(g.kv_heads * dim * model_dim, 3, 0.3)),
          query_norm(numbers(dim, 4, 2)),
          key_norm(numbers(dim, 5, 2)),
          sink_keys(numbers(g.kv_heads * sinks * dim, 6, 1)),
          bias(numbers(g.query_heads, 7, 3)),
          view{model_dim, dim, sinks, query, query_bias, key, query_norm, key_norm, sink_keys, bias, 1e-5f} {}
    gate_memory(const gate_memory&) = delete;
    gate_memory& operator=(const gate_memory&) = delete;

    std::vector<float> query, query_bias, key, query_norm, key_norm, sink_keys, bias;
    sink_gate_weights view;
};

doubles normed(doubles x, std::span<const float> weight, double epsilon) {
    double square = 0;
    for (const double v : x) {
        square += v * v / static_cast<double>(x.size());
    }
    for (std::size_t c = 0; c < x.size(); ++c) {
        x[c] *= static_cast<double>(weight[c]) / std::sqrt(square + epsilon);
    }
    return x;
}

template <class T>
doubles mapped(const T* h, std::size_t width, const float* w, const float* bias, std::size_t outputs) {
    doubles y(outputs);
    for (std::size_t r = 0; r < outputs; ++r) {
        y[r] = bias ? static_cast<double>(bias[r]) : 0.0;
        for (std::size_t c = 0; c < width; ++c) {
            y[r] += support::value_of(h[c]) * static_cast<double>(w[r * width + c]);
        }
    }
    return y;
}

double dot(const doubles& a, const doubles& b) {
    double sum = 0;
    for (std::size_t c = 0; c < a.size(); ++c) {
        sum += a[c] * b[c];
    }
    return sum;
}

// The gate of one token as a softmax over its key and the sinks, written out.
template <class T>
double gate_in_double(const sink_gate_weights& w, std::size_t group, const T* h, std::size_t kv) {
    const std::size_t m = w.gate_dim;
    const doubles k = normed(mapped(h, w.model_dim, w.key_projection.data() + kv * m * w.model_dim, nullptr, m),
                             w.key_norm, static_cast<double>(w.norm_epsilon));
    double mean = 0;
    for (std::size_t g = kv * group; g < (kv + 1) * group; ++g) {
        const doubles q = normed(
            mapped(h, w.model_dim, w.query_projection.data() + g * m * w.model_dim, w.query_bias.data() + g * m, m),
            w.query_norm, static_cast<double>(w.norm_epsilon));
        const double root = std::sqrt(static_cast<double>(m));
        const double own = std::exp(dot(q, k) / root + static_cast<double>(w.bias[g]));
        double all = own;
        for (std::size_t s = 0; s < w.sinks; ++s) {
            const float* from = w.sink_keys.data() + (kv * w.sinks + s) * m;
            all += std::exp(dot(q, doubles(from, from + m)) / root);
        }
        mean += own / all / static_cast<double>(group);
    }
    return mean;
}

struct zap_memory {
    zap_memory(std::size_t kv_heads, std::size_t model_dim, std::size_t units, gelu activation = gelu::exact)
        : hidden(numbers(units * model_dim, 1, 0.3)),
          hidden_bias(numbers(units, 2, 1)),
          output(numbers(kv_heads * (units > 0 ? units : model_dim), 3, 0.3)),
          output_bias(numbers(kv_heads, 4, 1)),
          view{model_dim, units, hidden, hidden_bias, output, output_bias, activation} {}
    zap_memory(const zap_memory&) = delete;
    zap_memory& operator=(const zap_memory&) = delete;

    std::vector<float> hidden, hidden_bias, output, output_bias;
    kvzap_weights view;
};

template <class T>
double zap_in_double(const kvzap_weights& w, const T* h, std::size_t kv) {
    if (w.hidden_dim == 0) {
        return mapped(h, w.model_dim, w.output_weights.data() + kv * w.model_dim, &w.output_bias[kv], 1)[0];
    }
    doubles y = mapped(h, w.model_dim, w.hidden_weights.data(), w.hidden_bias.data(), w.hidden_dim);
    double s = static_cast<double>(w.output_bias[kv]);
    for (std::size_t u = 0; u < w.hidden_dim; ++u) {
        const double x = y[u];
        const double t = w.activation == gelu::exact
                             ? std::erf(x / std::sqrt(2.0))
                             : std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x));
        s += x / 2 * (1 + t) * static_cast<double>(w.output_weights[kv * w.hidden_dim + u]);
    }
    return s;
}

template <class S, class P>
std::vector<float> scores(const S& s, const P& p, std::size_t kv_head = 0, const cpu& exec = {}) {
    std::vector<float> out(p.tokens(), -7.0f);
    s.score(exec, p, kv_head, std::span<float>(out));
    return out;
}

void check_close(std::span<const float> got, const doubles& expected, double relative, double absolute) {
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
        INFO("token " << i << ": " << got[i] << ", expected " << expected[i]);
        REQUIRE(std::abs(static_cast<double>(got[i]) - expected[i]) <= relative * std::abs(expected[i]) + absolute);
    }
}

}  // namespace

TEMPLATE_TEST_CASE("sink gate: agrees with a softmax in double", "", float, half, bfloat16) {
    for (const std::size_t group : {1u, 3u, 5u}) {
        for (const std::size_t dim : {3u, 16u}) {
            for (const std::size_t sinks : {0u, 1u, 16u}) {
                CAPTURE(group, dim, sinks);
                const geometry shape{2 * group, 2, 8, 4, 0};
                const std::size_t model_dim = dim == 3 ? 21 : 64;
                const gate_memory gate(shape, model_dim, dim, sinks);
                const hidden_rig<TestType> rig(shape, 150, model_dim, group == 3 ? layout::listed : layout::strided);
                const auto p = rig.view();
                const sink_gate s{gate.view};
                for (const std::size_t kv : {0u, 1u}) {
                    doubles expected;
                    for (std::size_t i = 0; i < 150; ++i) {
                        // 2 % of 150 tokens are 3.
                        expected.push_back(i < 4 || i >= 147 ? 1.0 : gate_in_double(gate.view, group, p.hidden[i], kv));
                    }
                    // Logits of up to some tens, off by 1e-6 of their size: so is the gate.
                    check_close(scores(s, p, kv), expected, 1e-4, 1e-20);
                }
            }
        }
    }
}

TEST_CASE("sink gate: the bias counts once") {
    const geometry shape{1, 1, 8, 4, 0};
    gate_memory gate(shape, 16, 4, 4);
    const hidden_rig<float> rig(shape, 20, 16);
    const sink_gate s{gate.view, 0, 0, 0, 0};
    const auto with = scores(s, rig.view());
    const double bias = static_cast<double>(gate.bias[0]);
    gate.bias[0] = 0;
    const auto without = scores(s, rig.view());
    for (std::size_t i = 0; i < 20; ++i) {
        // logit(gate) = a - log sum of the sinks.
        const auto logit = [](float x) { return std::log(static_cast<double>(x) / (1 - static_cast<double>(x))); };
        CHECK(logit(with[i]) - logit(without[i]) == Approx(bias).epsilon(0.02));
    }
}

TEST_CASE("sink gate: which tokens are protected") {
    const sink_gate s{};
    CHECK(s.local_of(0) == 0);
    CHECK(s.local_of(1) == 1);
    CHECK(s.local_of(49) == 1);  // floor(0.98) is 0, and the newest token stays
    CHECK(s.local_of(99) == 1);
    CHECK(s.local_of(100) == 2);
    CHECK((sink_gate{{}, 4, 4096, 32000, 0.0}.local_of(99) == 0));
    CHECK(s.local_of(31999) == 639);
    CHECK(s.local_of(32000) == 4096);
    CHECK((sink_gate{{}, 4, 4096, 10}.local_of(100) == 100));
    const geometry shape{2, 1, 8, 4, 0};
    const gate_memory gate(shape, 8, 4, 2);
    for (const std::size_t n : {0u, 1u, 3u, 49u, 70u}) {
        const hidden_rig<half> rig(shape, n, 8);
        const auto a = scores(sink_gate{gate.view}, rig.view());
        const auto b = scores(sink_gate{gate.view, 2, 5, 60}, rig.view());
        for (std::size_t i = 0; i < n; ++i) {
            CAPTURE(n, i);
            CHECK((a[i] == 1.0f) == (i < 4 || i == n - 1));
            CHECK((b[i] == 1.0f) == (i < 2 || (n == 70 ? i >= 65 : i == n - 1)));
            CHECK((a[i] > 0 && a[i] <= 1));
        }
    }
    // A prompt of less than 60: floor(0.1 * 49) = 4.
    const hidden_rig<half> rig(shape, 49, 8);
    const auto c = scores(sink_gate{gate.view, 0, 5, 60, 0.1}, rig.view());
    CHECK(std::count(c.begin(), c.end(), 1.0f) == 4);
}

TEMPLATE_TEST_CASE("KVzap: agrees with double sums", "", float, half, bfloat16) {
    for (const std::size_t units : {0u, 1u, 37u, 96u}) {
        for (const gelu activation : {gelu::exact, gelu::tanh}) {
            for (const std::size_t model_dim : {5u, 64u}) {
                CAPTURE(units, model_dim);
                const geometry shape{6, 3, 8, 4, 0};
                const zap_memory zap(3, model_dim, units, activation);
                const hidden_rig<TestType> rig(shape, 140, model_dim, units == 37 ? layout::listed : layout::strided);
                const auto p = rig.view();
                std::vector<float> layer(3 * 140);
                kvzap{zap.view, kvzap_output::logarithm}.score_layer(cpu{}, p, matrix_of(std::span(layer), 3, 140));
                std::vector<float> importance(3 * 150);
                matrix_view<float> apart{importance.data(), 3, 140, 150};
                kvzap{zap.view, kvzap_output::importance, 20}.score_layer(cpu{}, p, apart);
                for (std::size_t kv = 0; kv < 3; ++kv) {
                    doubles logs;
                    doubles expected;
                    for (std::size_t i = 0; i < 140; ++i) {
                        logs.push_back(zap_in_double(zap.view, p.hidden[i], kv));
                        expected.push_back(i < 120 ? std::min(1.0, std::exp(logs.back())) : 1.0);
                    }
                    const auto row = std::span<const float>(layer).subspan(kv * 140, 140);
                    check_close(row, logs, 0, 2e-5);
                    check_close(apart.row(kv), expected, 2e-5, 0);
                    const auto one = scores(kvzap{zap.view, kvzap_output::logarithm}, p, kv);
                    CHECK(std::equal(row.begin(), row.end(), one.begin()));
                }
            }
        }
    }
}

TEST_CASE("KVzap: the two GELUs differ, and keep their left tails") {
    const geometry shape{1, 1, 8, 4, 0};
    std::vector<float> one{1.0f};
    std::vector<float> zero{0.0f};
    hidden_rig<float> rig(shape, 4, 1);
    const std::vector<float> x{-6.0f, 0.0f, 1.0f, 30.0f};
    for (std::size_t i = 0; i < 4; ++i) {
        *rig.hidden.row(i) = x[i];
    }
    const auto of = [&](gelu g) {
        return scores(kvzap{{1, 1, one, zero, one, zero, g}, kvzap_output::logarithm}, rig.view());
    };
    const auto exact = of(gelu::exact);
    const auto tanh = of(gelu::tanh);
    CHECK(exact[0] == Approx(-6 * 9.865876450376946e-10).epsilon(1e-6));  // Phi(-6)
    CHECK((tanh[0] < 0 && tanh[0] > -1e-9f));
    CHECK((exact[1] == 0 && tanh[1] == 0));
    CHECK(exact[2] == Approx(0.8413447460685429));
    CHECK(tanh[2] == Approx(0.841192));
    CHECK((exact[3] == 30 && tanh[3] == 30));
}

TEST_CASE("gates: NaN in a hidden state stays in its token") {
    const geometry shape{2, 2, 8, 4, 0};
    hidden_rig<float> rig(shape, 90, 33);
    rig.hidden.row(40)[7] = nan_value;
    const gate_memory gate(shape, 33, 16, 16);
    const zap_memory zap(2, 33, 20);
    const auto a = scores(sink_gate{gate.view}, rig.view(), 1);
    const auto b = scores(kvzap{zap.view, kvzap_output::importance, 8}, rig.view(), 1);
    for (std::size_t i = 0; i < 90; ++i) {
        CHECK(std::isnan(a[i]) == (i == 40));
        CHECK(std::isnan(b[i]) == (i == 40));
    }
    // Huge hidden states: the gate's norms take them, KVzap's score is what it is.
    for (std::size_t c = 0; c < 33; ++c) {
        rig.hidden.row(41)[c] *= 1e18f;
    }
    CHECK(std::isfinite(scores(sink_gate{gate.view}, rig.view(), 1)[41]));
}

TEST_CASE("gates: layout and threads change no bit, chunks neither") {
    const geometry shape{6, 2, 8, 4, 0};
    const gate_memory gate(shape, 50, 16, 16);
    const zap_memory zap(2, 50, 70);
    const hidden_rig<half> a(shape, 700, 50, layout::dense, 3);
    const hidden_rig<half> b(shape, 700, 50, layout::listed, 3);
    thread_pool pool(3);
    const sink_gate s{gate.view, 0, 0, 0, 0};
    const kvzap z{zap.view, kvzap_output::importance, 0};
    const auto gated = scores(s, a.view(), 1);
    const auto zapped = scores(z, a.view(), 1);
    CHECK(gated == scores(s, b.view(), 1, cpu{&pool}));
    CHECK(zapped == scores(z, b.view(), 1, cpu{&pool}));
    const auto p = a.view();
    for (const std::size_t first : {0u, 13u, 600u}) {
        const std::size_t count = 77;
        std::vector<rows<half>> keys;
        std::vector<rows<half>> values;
        for (std::size_t h = 0; h < 2; ++h) {
            keys.push_back(p.keys[h].slice(first, count));
            values.push_back(p.values[h].slice(first, count));
        }
        hidden_prompt<half> part = p;
        part.keys = keys;
        part.values = values;
        part.positions = p.positions.subspan(first, count);
        part.hidden = p.hidden.slice(first, count);
        const auto x = scores(s, part, 1);
        const auto y = scores(z, part, 1);
        CHECK(std::equal(x.begin(), x.end(), gated.begin() + static_cast<std::ptrdiff_t>(first)));
        CHECK(std::equal(y.begin(), y.end(), zapped.begin() + static_cast<std::ptrdiff_t>(first)));
    }
}

TEST_CASE("gates: refusals name their numbers and change nothing") {
    const geometry shape{4, 2, 8, 4, 0};
    const hidden_rig<float> rig(shape, 10, 6);
    const auto p = rig.view();
    std::vector<float> out(10, 3.0f);
    const auto refused = [&](const auto& s, std::initializer_list<std::string> parts) {
        const bool is = support::refused([&] { s.score(cpu{}, p, 0, std::span<float>(out)); }, parts);
        return is && out == std::vector<float>(10, 3.0f);
    };
    const gate_memory gate(shape, 6, 4, 3);
    const auto changed = [&](auto change) {
        sink_gate s{gate.view};
        change(s);
        return s;
    };
    const auto cut = [](std::span<const float> x) { return x.first(x.size() - 1); };
    CHECK(refused(changed([&](auto& s) { s.weights.query_projection = cut(s.weights.query_projection); }),
                  {"query_projection", "95", "96"}));
    CHECK(refused(changed([&](auto& s) { s.weights.query_bias = cut(s.weights.query_bias); }), {"query_bias", "15"}));
    CHECK(refused(changed([&](auto& s) { s.weights.key_projection = {}; }), {"key_projection", "0", "48"}));
    CHECK(refused(changed([&](auto& s) { s.weights.query_norm = {}; }), {"query_norm", "4"}));
    CHECK(refused(changed([&](auto& s) { s.weights.key_norm = {}; }), {"key_norm", "4"}));
    CHECK(refused(changed([&](auto& s) { s.weights.sinks = 4; }), {"sink_keys", "24", "32"}));
    CHECK(refused(changed([&](auto& s) { s.weights.bias = cut(s.weights.bias); }), {"bias", "3", "4"}));
    CHECK(refused(changed([&](auto& s) { s.weights.norm_epsilon = 0; }), {"norm_epsilon 0"}));
    CHECK(refused(changed([&](auto& s) { s.short_local = 1.5; }), {"short_local 1.5"}));
    CHECK(refused(sink_gate{}, {"model_dim 0"}));
    const gate_memory wide(shape, 7, 4, 3);
    CHECK(refused(sink_gate{wide.view}, {"6 channels", "7"}));

    const zap_memory zap(2, 6, 5);
    kvzap z{zap.view};
    z.weights.hidden_bias = cut(z.weights.hidden_bias);
    CHECK(refused(z, {"hidden_bias", "4", "5"}));
    z = kvzap{zap.view};
    z.weights.hidden_dim = 0;
    CHECK(refused(z, {"hidden_weights", "30", "0"}));
    z = kvzap{zap.view};
    z.weights.output_weights = {};
    CHECK(refused(z, {"output_weights", "0", "10"}));
    z = kvzap{zap.view};
    z.weights.output_bias = {};
    CHECK(refused(z, {"output_bias", "2"}));
    z = kvzap{zap.view};
    z.weights.activation = static_cast<gelu>(7);
    CHECK(refused(z, {"activation is 7"}));
    CHECK(refused(kvzap{}, {"model_dim 0"}));
    const zap_memory other(2, 9, 5);
    CHECK(refused(kvzap{other.view}, {"6 channels", "9"}));
    CHECK(support::refused([&] { kvzap{zap.view}.score_layer(cpu{}, p, matrix_of(std::span(out), 1, 10)); },
                           {"[1, 10]"}));
    CHECK(out == std::vector<float>(10, 3.0f));
    // A prompt of nothing needs no hidden state.
    const hidden_rig<float> none(shape, 0, 6);
    CHECK(scores(kvzap{zap.view}, none.view()).empty());
}
