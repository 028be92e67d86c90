// Inputs beside the prompt: which a scorer needs, what they are checked for, and how they come through adaptors and
// compress().
#include <limits>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/random_prompt.hpp"
#include "support/refusal.hpp"
#include "verkv/core/prompt_inputs.hpp"
#include "verkv/core/rope.hpp"
#include "verkv/sample/allocation.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/given.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/kvzip.hpp"
#include "verkv/score/largest_attention.hpp"
#include "verkv/sketch/exact.hpp"

using namespace verkv;

namespace {

// Score: first channel of the token's hidden state, times that of the first output weight.
struct first_hidden {
    template <class T>
    using needs = inputs<hidden_states<T>, output_projection<T>>;

    template <class Backend, class P>
    requires carries_needs_of<P, first_hidden>
    void score(const Backend&, const P& p, std::size_t, std::span<float> out) const {
        for (std::size_t i = 0; i < out.size(); ++i) {
            out[i] = to_float(p.hidden[i][0]) * to_float(p.output_weights[0][0]);
        }
    }
};

// The same number for every KV head, counted.
struct counted_layer {
    std::size_t* layers;
    std::size_t* heads;

    template <class Backend, class T>
    void score(const Backend&, const prompt<T>&, std::size_t kv_head, std::span<float> out) const {
        ++*heads;
        std::fill(out.begin(), out.end(), 0.5f + static_cast<float>(kv_head));
    }
    template <class Backend, class T>
    void score_layer(const Backend&, const prompt<T>&, matrix_view<float> out) const {
        ++*layers;
        for (std::size_t h = 0; h < out.rows; ++h) {
            for (std::size_t i = 0; i < out.columns; ++i) {
                out.row(h)[i] = static_cast<float>(i + 1) / static_cast<float>(out.columns + h);
            }
        }
    }
};

// An input from outside the library.
struct offset_input {
    float offset;
};
template <class T>
void validate(const offset_input& o, const prompt<T>&) {
    detail::check(o.offset >= 0, "offset is ", o.offset);
}
struct offset_scorer {
    template <class T>
    using needs = inputs<offset_input>;

    template <class Backend, class P>
    requires carries<P, offset_input>
    void score(const Backend&, const P& p, std::size_t, std::span<float> out) const {
        std::fill(out.begin(), out.end(), p.offset);
    }
};

using plain = prompt<half>;
using with_hidden = prompt_with<half, hidden_states<half>>;
using with_both = prompt_with<half, output_projection<half>, hidden_states<half>>;
static_assert(scorer<key_norm, cpu, half> && scorer<key_norm, cpu, plain> && scorer<key_norm, cpu, with_both>);
static_assert(!scorer<first_hidden, cpu, half> && !scorer<first_hidden, cpu, with_hidden>);
static_assert(scorer<first_hidden, cpu, with_both>);
static_assert(std::same_as<needs_of<key_norm, half>, inputs<>>);
using wrapped = decltype(floored(0, smoothed(3, pooling::average, windowed(1, 1, first_hidden{}))));
static_assert(std::same_as<needs_of<wrapped, half>, needs_of<first_hidden, half>>);
static_assert(scorer<wrapped, cpu, with_both> && !scorer<wrapped, cpu, with_hidden>);
static_assert(carries_needs_of<with_both, wrapped> && !carries_needs_of<plain, wrapped>);
static_assert(layer_scorer<counted_layer, cpu, half> && !layer_scorer<key_norm, cpu, half>);
static_assert(layer_scorer<decltype(windowed(0, 1, floored(0, smoothed(3, pooling::average, counted_layer{})))), cpu,
                           with_hidden>);

template <class T>
std::vector<T> numbers(std::size_t count) {
    std::vector<T> x(count);
    for (std::size_t i = 0; i < count; ++i) {
        x[i] = from_float<T>(static_cast<float>(i % 7) / 8);
    }
    return x;
}

}  // namespace

TEST_CASE("score: inputs are checked against the prompt") {
    const geometry shape{4, 2, 6, 3, 0};
    const random_prompt<float> owner(shape, positions_from(0, 9), {}, 1);
    const prompt<float> p = owner.view();
    const auto memory = numbers<float>(500);
    const std::span<const float> m(memory);
    using support::refused;

    validate(hidden_states<float>{contiguous_rows(m.first(9 * 5), 5)}, p);
    CHECK(refused([&] { validate(hidden_states<float>{contiguous_rows(m.first(8 * 5), 5)}, p); }, {"[8, 5]", "9"}));
    CHECK(refused([&] { validate(hidden_states<float>{{nullptr, 5, 9, 5, nullptr}}, p); }, {"hidden", "null"}));
    CHECK(refused([&] { validate(hidden_states<float>{{m.data(), 4, 9, 5, nullptr}}, p); }, {"hidden", "overlap"}));
    CHECK(refused([&] { validate(hidden_states<float>{{m.data(), 0, 9, 0, nullptr}}, p); }, {"[9, 0]"}));

    validate(output_projection<float>{contiguous_rows(m.first(12 * 5), 5)}, p);
    CHECK(refused([&] { validate(output_projection<float>{contiguous_rows(m.first(11 * 5), 5)}, p); },
                  {"[11, 5]", "4 query heads of 3", "12"}));
    CHECK(refused([&] { validate(output_projection<float>{{nullptr, 5, 12, 5, nullptr}}, p); }, {"null"}));

    const rows<float> pass_key = contiguous_rows(m.first(7 * 6), 6);
    const std::vector<rows<float>> pass_keys{pass_key, pass_key};
    const std::vector<float> norms{1, 2, 3, 4, 5, 6, 7};
    const std::vector<repeat_chunk> chunks{{2, 3, 0, 3}, {5, 4, 4, 3}};
    const repeat_pass<float> good{chunks, heads_of(m.first(7 * 4 * 6), 7, 4, 6), pass_keys, 2, norms};
    validate(good, p);
    const auto bad = [&](auto&& change, std::initializer_list<std::string> parts) {
        repeat_pass<float> r = good;
        std::vector<repeat_chunk> c = chunks;
        std::vector<rows<float>> k = pass_keys;
        std::vector<float> h = norms;
        r.chunks = c;
        r.pass_keys = k;
        r.hidden_norms = h;
        change(r, c, k, h);
        return refused([&] { validate(r, p); }, parts);
    };
    CHECK(bad([](auto& r, auto&, auto&, auto&) { r.sinks = 1; }, {"chunk 0", "go on at 1"}));
    CHECK(bad([](auto& r, auto&, auto&, auto&) { r.sinks = 10; }, {"10 sinks", "9"}));
    CHECK(bad([](auto&, auto& c, auto&, auto&) { c[1].tokens = 5; }, {"chunk 1", "5 tokens", "9"}));
    CHECK(bad([](auto&, auto& c, auto&, auto&) { c[1].tokens = 3; }, {"repeats 8 of 9"}));
    CHECK(bad([](auto&, auto& c, auto&, auto&) { c[0].tokens = 0; }, {"chunk 0", "0 tokens"}));
    CHECK(bad([](auto&, auto& c, auto&, auto&) { c[1].first_query = 2; }, {"chunk 1", "from 2", "3 are taken"}));
    CHECK(bad([](auto&, auto& c, auto&, auto&) { c[1].queries = 4; }, {"chunk 1", "4 queries", "there are 7"}));
    CHECK(
        bad([](auto&, auto& c, auto&, auto&) { c[1].queries = std::numeric_limits<std::size_t>::max(); }, {"chunk 1"}));
    CHECK(
        bad([](auto&, auto& c, auto&, auto&) { c[1].tokens = std::numeric_limits<std::size_t>::max(); }, {"chunk 1"}));
    CHECK(bad([](auto&, auto&, auto& k, auto&) { k[1].count = 6; }, {"KV head 1", "[6, 6]"}));
    CHECK(bad([](auto&, auto&, auto& k, auto&) { k[1].data = nullptr; }, {"null"}));
    CHECK(bad([](auto& r, auto&, auto& k, auto&) { r.pass_keys = std::span(k).first(1); }, {"1 KV heads", "2"}));
    CHECK(bad([](auto&, auto&, auto&, auto& h) { h[3] = 0; }, {"query 3", "is 0"}));
    CHECK(bad([](auto& r, auto&, auto&, auto& h) { r.hidden_norms = std::span(h).first(2); }, {"2 norms", "7"}));
    CHECK(bad([](auto& r, auto&, auto&, auto&) { r.pass_queries.heads = 3; }, {"3 heads of 6"}));
    // Nothing repeats nothing.
    const random_prompt<float> none(shape, {}, {}, 1);
    const std::vector<rows<float>> no_keys(2);
    validate(repeat_pass<float>{{}, {}, no_keys, 0, {}}, none.view());
}

TEST_CASE("score: inputs reach the scorer through adaptors and compress()") {
    const geometry shape{2, 2, 6, 3, 0};
    constexpr std::size_t n = 40;
    auto t = support::random_text<half>(shape, n, 5);
    layer_cache<half, exact_sketch<half>> cache(support::roomy(shape, 64), exact_sketch<half>{});
    const auto id = cache.open(3);
    support::prefill(cache, id, t, 0, n);
    std::vector<half> hidden(n * 2);
    std::vector<float> expected(n);
    for (std::size_t i = 0; i < n; ++i) {
        expected[i] = static_cast<float>(i + 1) / 64;
        hidden[2 * i] = from_float<half>(2 * expected[i]);
    }
    std::vector<half> weights(6 * 2, from_float<half>(0.5f));
    const compression how{budget::tokens(10), {1, 1}};
    const hidden_states<half> h{contiguous_rows(std::span<const half>(hidden), 2)};
    const output_projection<half> o{contiguous_rows(std::span<const half>(weights), 2)};
    cache.compress(id, floored(0.0f, first_hidden{}), how, {}, {}, o, h);
    std::vector<float> r(n);
    inclusion_probabilities(cpu{}, std::span<const float>(expected), how.kept, how.fixed, std::span<float>(r));
    const auto same = [&](std::size_t kv_head) {
        for (std::size_t i = 0; i < n; ++i) {
            if (cache.probability(id, kv_head, static_cast<token_index>(i)) != r[i]) {
                return false;
            }
        }
        return true;
    };
    CHECK(same(0));
    CHECK(same(1));
    cache.compress(id, offset_scorer{}, how, {}, {}, offset_input{0.25f});
    CHECK(!same(0));
    // A scorer that needs nothing takes inputs too.
    cache.compress(id, given_scores(std::span<const float>(std::vector<float>(2 * n, 0.25f))), how, {}, {}, h);
    const float before = cache.probability(id, 0, 3);
    const hidden_states<half> shorter{contiguous_rows(std::span<const half>(hidden).first(2 * n - 2), 2)};
    CHECK(support::refused([&] { cache.compress(id, first_hidden{}, how, {}, {}, shorter, o); }, {"[39, 2]"}));
    CHECK(support::refused([&] { cache.compress(id, offset_scorer{}, how, {}, {}, offset_input{-1}); }, {"-1"}));
    CHECK(cache.probability(id, 0, 3) == before);
}

TEST_CASE("score: a layer scorer is asked once a layer") {
    const geometry shape{6, 3, 6, 3, 0};
    constexpr std::size_t n = 30;
    auto t = support::random_text<half>(shape, n, 5);
    std::size_t layers = 0;
    std::size_t heads = 0;
    const counted_layer counted{&layers, &heads};
    layer_cache<half, exact_sketch<half>> cache(support::roomy(shape, 64), exact_sketch<half>{});
    const auto id = cache.open(3);
    support::prefill(cache, id, t, 0, n);
    const compression how{budget::tokens(10), {0, 0}};
    cache.compress(id, windowed(0, 2, counted), how);
    CHECK(layers == 1);
    CHECK(heads == 0);
    std::vector<float> expected(n);
    std::vector<float> r(n);
    for (std::size_t h = 0; h < 3; ++h) {
        for (std::size_t i = 0; i < n; ++i) {
            expected[i] = i + 2 < n ? static_cast<float>(i + 1) / static_cast<float>(n + h) : 1.0f;
        }
        inclusion_probabilities(cpu{}, std::span<const float>(expected), how.kept, how.fixed, std::span<float>(r));
        for (std::size_t i = 0; i < n; ++i) {
            REQUIRE(cache.probability(id, h, static_cast<token_index>(i)) == r[i]);
        }
    }
    // The adaptors do to each row what they do to one head's scores.
    std::vector<float> rows(3 * n);
    std::vector<float> alone(n);
    const random_prompt<half> owner(shape, positions_from(0, n), {}, 1);
    const auto p = owner.view();
    const auto all = matrix_of(std::span<float>(rows), 3, n);
    smoothed(3, pooling::average, floored(0.5f, counted)).score_layer(cpu{}, p, all);
    for (std::size_t h = 0; h < 3; ++h) {
        for (std::size_t i = 0; i < n; ++i) {
            alone[i] = std::max(0.5f, static_cast<float>(i + 1) / static_cast<float>(n + h));
        }
        std::vector<float> pooled(n);
        detail::scoring::pool(pooling::average, 3, alone, pooled);
        CHECK(std::equal(pooled.begin(), pooled.end(), all.row(h).begin()));
    }
    CHECK(support::refused(
        [&] {
            floored(0, smoothed(1, pooling::average, counted))
                .score_layer(cpu{}, p, matrix_of(std::span<float>(rows).first(2 * n), 2, n));
        },
        {"[2, 30]", "3 KV heads"}));
}

TEST_CASE("score: compress() takes a budget for each KV head") {
    const geometry shape{3, 3, 6, 3, 0};
    constexpr std::size_t n = 60;
    auto t = support::random_text<half>(shape, n, 8);
    layer_cache<half, exact_sketch<half>> cache(support::roomy(shape, 64), exact_sketch<half>{});
    const auto id = cache.open(3);
    support::prefill(cache, id, t, 0, n);
    const std::vector<budget> budgets{budget::tokens(7), budget::tokens(21), budget::tokens(11)};
    compression how{budget::tokens(1), {1, 1}, budgets};
    cache.compress(id, key_norm{}, how);
    double total = 0;
    for (std::size_t h = 0; h < 3; ++h) {
        double sum = 0;
        for (std::size_t i = 0; i < n; ++i) {
            sum += static_cast<double>(cache.probability(id, h, static_cast<token_index>(i)));
        }
        CHECK(sum == Approx(budgets[h].rows(n)).epsilon(1e-6));
        total += sum;
    }
    CHECK(total == Approx(39).epsilon(1e-6));
    how.of_heads = std::span(budgets).first(2);
    CHECK(support::refused([&] { cache.compress(id, key_norm{}, how); }, {"2 budgets", "3 KV heads"}));
}

TEST_CASE("score: KVzip's pass and AdaKV's budgets through compress()") {
    const geometry shape{4, 2, 6, 3, 0};
    constexpr std::size_t n = 50;
    const auto t = support::random_text<half>(shape, n, 8);
    const auto own = support::random_text<half>(shape, 60, 9);  // keys of the second pass
    const auto queries = support::generator(4).normals<half>(60 * 4 * 6);
    const std::vector<repeat_chunk> chunks{{2, 20, 0, 25}, {22, 28, 25, 35}};
    const std::vector<rows<half>> own_keys{own.head_keys(0, 60), own.head_keys(1, 60)};
    const repeat_pass<half> pass{chunks, heads_of(std::span<const half>(queries), 60, 4, 6), own_keys, 2, {}};
    const std::vector<rows<half>> keys{t.head_keys(0, n), t.head_keys(1, n)};
    const std::vector<rows<half>> values{t.head_values(0, n), t.head_values(1, n)};
    const prompt_with<half, repeat_pass<half>> seen{prompt<half>{shape, keys, values, t.positions, {}, {}}, pass};
    std::vector<float> scores(2 * n);
    for (std::size_t h = 0; h < 2; ++h) {
        kvzip{}.score(cpu{}, seen, h, std::span(scores).subspan(h * n, n));
    }
    const windows fixed{2, 3};
    const auto counts = adaptive_budgets(matrix_of(std::span<const float>(scores), 2, n), budget::fraction(0.3), 0.2,
                                         adaptive_rule::floor, fixed);
    CHECK(counts[0] + counts[1] == 30);
    const auto budgets = budgets_of(counts);
    layer_cache<half, exact_sketch<half>> cache(support::roomy(shape, 64), exact_sketch<half>{});
    const auto id = cache.open(3);
    support::prefill(cache, id, t, 0, n);
    cache.compress(id, kvzip{}, {budget::fraction(1), fixed, budgets}, {}, {}, pass);
    for (std::size_t h = 0; h < 2; ++h) {
        std::vector<float> r(n);
        inclusion_probabilities(cpu{}, std::span<const float>(scores).subspan(h * n, n), budgets[h], fixed,
                                std::span<float>(r));
        double sum = 0;
        for (std::size_t i = 0; i < n; ++i) {
            REQUIRE(cache.probability(id, h, static_cast<token_index>(i)) == r[i]);
            sum += static_cast<double>(r[i]);
        }
        CHECK(sum == Approx(static_cast<double>(counts[h])).epsilon(1e-6));
    }
}

TEST_CASE("core: a row is un-rotated at its position") {
    for (const rope_pairing pairing : {rope_pairing::interleaved, rope_pairing::half}) {
        rope r = rope::plain(8, 100, pairing);
        CHECK(r.frequencies[0] == 1.0);
        CHECK(r.frequencies[2] == Approx(0.1));
        r.frequencies.pop_back();  // two channels stay
        r.magnitude = 1.25;
        const std::vector<double> raw{1, -2, 3, 0.5, -0.25, 2, 7, -9};
        std::vector<float> turned(8);
        const position_t at = 1'000'003;
        for (std::size_t i = 0; i < 3; ++i) {
            const double angle = at * r.frequencies[i];
            const std::size_t a = pairing == rope_pairing::half ? i : 2 * i;
            const std::size_t b = pairing == rope_pairing::half ? i + 3 : 2 * i + 1;
            turned[a] = static_cast<float>(1.25 * (std::cos(angle) * raw[a] - std::sin(angle) * raw[b]));
            turned[b] = static_cast<float>(1.25 * (std::sin(angle) * raw[a] + std::cos(angle) * raw[b]));
        }
        turned[6] = 7;
        turned[7] = -9;
        std::vector<float> back(8);
        validate(r, 8);
        unrotate(r, at, turned.data(), 8, back.data());
        for (std::size_t c = 0; c < 8; ++c) {
            CHECK(static_cast<double>(back[c]) == Approx(raw[c]).epsilon(1e-6));
        }
    }
    using support::refused;
    CHECK(refused([] { (void)rope::plain(7); }, {"7 channels"}));
    CHECK(refused([] { (void)rope::plain(8, -1); }, {"base -1"}));
    CHECK(refused([] { validate(rope{}, 8); }, {"0 frequencies"}));
    CHECK(refused([] { validate(rope::plain(8), 6); }, {"4 frequencies", "6"}));
    CHECK(refused([] { validate(rope{{1, std::numeric_limits<double>::infinity()}}, 6); }, {"frequency 1 is inf"}));
    CHECK(refused([] { validate(rope{{1}, rope_pairing::half, 0}, 6); }, {"magnitude 0"}));
}
