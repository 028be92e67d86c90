// Retrieval heads, the scorer that looks through them, and the error of keeping some tokens alone.
#include <algorithm>
#include <cmath>
#include <limits>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/valued_prompt.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/compress_kv.hpp"
#include "verkv/score/eviction_error.hpp"
#include "verkv/score/retrieval_heads.hpp"

using namespace verkv;

namespace {

using doubles = std::vector<double>;
using ids = std::vector<token_id>;
using tokens = std::vector<token_index>;
const float nan_value = std::numeric_limits<float>::quiet_NaN();

static_assert(layer_scorer<compress_kv, cpu, half> && layer_scorer<compress_kv, cpu, prompt<bfloat16>>);

template <class T>
using projected_prompt = prompt_with<T, output_projection<T>>;

// The error by its definition, in double: both outputs behind W_o in full, then their difference.
template <class T>
double error_in_double(const projected_prompt<T>& p, const std::vector<tokens>& kept) {
    const std::size_t width = p.shape.value_dim;
    double off = 0;
    double all = 0;
    for (std::size_t j = 0; j < p.queries.tokens; ++j) {
        doubles full(p.output_weights.width);
        doubles some(p.output_weights.width);
        for (std::size_t h = 0; h < p.shape.query_heads; ++h) {
            const std::size_t kv = h / p.shape.group();
            const doubles a = attention_in_double(static_cast<const prompt<T>&>(p), h, j);
            double mass = 0;
            for (const token_index i : kept[kv]) {
                mass += a[i];
            }
            for (std::size_t c = 0; c < width; ++c) {
                double o = 0;
                double o_kept = 0;
                for (std::size_t i = 0; i < p.tokens(); ++i) {
                    o += a[i] * support::value_of(p.values[kv][i][c]);
                }
                for (const token_index i : kept[kv]) {
                    o_kept += mass > 0 ? a[i] / mass * support::value_of(p.values[kv][i][c]) : 0.0;
                }
                for (std::size_t e = 0; e < full.size(); ++e) {
                    const double w = support::value_of(p.output_weights[h * width + c][e]);
                    full[e] += o * w;
                    some[e] += o_kept * w;
                }
            }
        }
        for (std::size_t e = 0; e < full.size(); ++e) {
            off += (full[e] - some[e]) * (full[e] - some[e]);
            all += full[e] * full[e];
        }
    }
    return std::sqrt(off / all);
}

std::vector<std::span<const token_index>> spans_of(const std::vector<tokens>& kept) {
    return {kept.begin(), kept.end()};
}

}  // namespace

TEST_CASE("ROUGE-1 recall: clipped counts over the reference") {
    CHECK(rouge1_recall(ids{1, 2, 3, 4}, ids{}) == 0);
    CHECK(rouge1_recall(ids{1, 2, 3, 4}, ids{4, 9, 1, 7}) == 0.5);
    CHECK(rouge1_recall(ids{1, 2, 3, 4}, ids{4, 3, 2, 1, 0, 0, 0}) == 1);
    CHECK(rouge1_recall(ids{5, 5, 5, 7}, ids{5, 5, 8}) == 0.5);
    CHECK(rouge1_recall(ids{5, 7}, ids{5, 5, 5, 5}) == 0.5);
    CHECK(rouge1_recall(ids{-3, 2000000000}, ids{2000000000}) == 0.5);
    CHECK(support::refused([] { (void)rouge1_recall(ids{}, ids{1}); }, {"0 tokens"}));
}

TEMPLATE_TEST_CASE("span attention: the sum of softmax attention over a span", "", float, half) {
    for (const std::size_t group : {1u, 3u}) {
        const valued_prompt<TestType> owner({2 * group, 2, 24, 4, 0}, positions_from(0, 1200), {3, 700, 1199}, 2,
                                            layout::listed);
        const auto p = owner.view();
        thread_pool pool(3);
        for (const std::size_t j : {0u, 1u, 2u}) {
            for (const auto& [first, last] : {std::pair{0u, 0u}, {2u, 3u}, {500u, 530u}, {0u, 1200u}, {690u, 800u}}) {
                std::vector<float> out(2 * group);
                std::vector<float> again(2 * group);
                span_attention(cpu{}, p, j, first, last, out);
                span_attention(cpu{&pool}, p, j, first, last, again);
                CHECK(out == again);
                for (std::size_t h = 0; h < out.size(); ++h) {
                    const doubles a = attention_in_double(p, h, j);
                    double expected = 0;
                    for (std::size_t i = first; i < last; ++i) {
                        expected += a[i];
                    }
                    CHECK(static_cast<double>(out[h]) == Approx(expected).epsilon(1e-5).margin(1e-30));
                }
            }
        }
        std::vector<float> out(2 * group);
        const std::span<float> o(out);
        CHECK(support::refused([&] { span_attention(cpu{}, p, 3, 0, 1, o); }, {"query 3", "3"}));
        CHECK(support::refused([&] { span_attention(cpu{}, p, 0, 5, 4, o); }, {"5 to 4"}));
        CHECK(support::refused([&] { span_attention(cpu{}, p, 0, 5, 1201, o); }, {"1201", "1200"}));
        CHECK(support::refused([&] { span_attention(cpu{}, p, 0, 5, 6, o.first(1)); }, {"1"}));
    }
}

TEST_CASE("retrieval heads: credit of runs that found the needle") {
    retrieval_head_scores found(2, 4);
    const auto add = [&](token_id token, std::size_t layer, std::vector<float> mass) {
        if (found.counts(token)) {
            found.add(layer, mass);
        }
    };
    CHECK(found.best(0, 4) == std::vector<std::size_t>{0, 1, 2, 3});
    CHECK(found.score(1, 3) == 0);
    found.begin(ids{7, 3, 9});
    add(3, 0, {0.1f, 0.5f, 0.0f, 0.5f});
    add(4, 0, {1, 1, 1, 1});  // no token of the needle
    add(9, 0, {0.1f, 0.25f, 0.0f, 0.25f});
    add(9, 1, {0, 0, 1, 0});
    CHECK(found.finish(0.75));
    found.begin(ids{1});
    CHECK_FALSE(found.counts(7));
    add(1, 0, {1, 0, 0, 0});
    CHECK_FALSE(found.finish(0.5));  // not above a half
    found.begin(ids{1});
    add(1, 0, {0, 0, 0.5f, 0});
    CHECK(found.finish(0.51));
    CHECK(found.runs() == 2);
    CHECK(found.score(0, 0) == Approx(0.1));
    CHECK(found.score(0, 1) == 0.375);
    CHECK(found.score(0, 2) == 0.25);
    CHECK(found.score(1, 2) == 0.5);
    CHECK(found.best(0, 3) == std::vector<std::size_t>{1, 3, 2});  // 1 and 3 are equal
    CHECK(found.best(1, 2) == std::vector<std::size_t>{2, 0});
    CHECK(found.best(1, 0).empty());
}

TEST_CASE("retrieval heads: refusals change nothing") {
    using support::refused;
    CHECK(refused([] { retrieval_head_scores(0, 4); }, {"0 layers"}));
    CHECK(refused([] { retrieval_head_scores(2, 0); }, {"0 query heads"}));
    retrieval_head_scores found(2, 3);
    const std::vector<float> mass(3, 1.0f);
    CHECK(refused<invalid_state>([&] { found.add(0, mass); }, {"begin"}));
    CHECK(refused<invalid_state>([&] { found.finish(1); }, {"begin"}));
    CHECK(refused([&] { found.begin(ids{}); }, {"0 tokens"}));
    CHECK_FALSE(found.counts(0));
    found.begin(ids{1});
    CHECK(refused<invalid_state>([&] { found.begin(ids{2}); }, {"run 1"}));
    CHECK(refused([&] { found.add(2, mass); }, {"layer 2", "2"}));
    CHECK(refused([&] { found.add(0, std::vector<float>(2)); }, {"2 query heads", "3"}));
    CHECK(refused([&] { found.add(0, std::vector<float>{1, nan_value, 1}); }, {"head 1", "nan"}));
    CHECK(refused([&] { found.add(0, std::vector<float>{1, 1, -1}); }, {"head 2", "-1"}));
    CHECK(refused([&] { found.finish(75); }, {"75"}));
    found.add(1, mass);
    CHECK(found.finish(1));
    CHECK(found.score(0, 0) == 0);
    CHECK(found.score(1, 0) == 1);
    CHECK(refused([&] { (void)found.score(2, 0); }, {"layer 2"}));
    CHECK(refused([&] { (void)found.score(0, 3); }, {"head 3"}));
    CHECK(refused([&] { (void)found.best(0, 4); }, {"4", "3"}));
}

TEMPLATE_TEST_CASE("compress_kv: mean of the chosen heads' pooled window attention", "", float, half) {
    constexpr std::size_t n = 90;
    const valued_prompt<TestType> owner({10, 2, 16, 4, 0}, positions_from(0, 90), positions_from(70, 90), 3,
                                        layout::strided);
    const auto p = owner.view();
    const std::vector<std::size_t> heads{7, 0, 4};
    for (const std::size_t window : {1u, 8u, 20u}) {
        for (const std::size_t width : {1u, 5u}) {
            doubles expected(n);
            for (const std::size_t h : heads) {
                doubles sum(n);
                for (std::size_t j = 20 - window; j < 20; ++j) {
                    const doubles a = attention_in_double(p, h, j);
                    for (std::size_t i = 0; i < n - window; ++i) {
                        sum[i] += a[i] / static_cast<double>(window);
                    }
                }
                for (std::size_t i = 0; i < n; ++i) {
                    for (std::size_t j = i - std::min(i, width / 2); j <= std::min(n - 1, i + width / 2); ++j) {
                        expected[i] += sum[j] / static_cast<double>(width * heads.size());
                    }
                }
            }
            std::vector<float> layer(2 * n);
            const compress_kv s{heads, window, width};
            s.score_layer(cpu{}, p, matrix_of(std::span(layer), 2, n));
            for (std::size_t i = 0; i < n; ++i) {
                CAPTURE(window, width, i);
                CHECK(layer[i] == layer[n + i]);
                if (i + window < n) {
                    CHECK(static_cast<double>(layer[i]) == Approx(expected[i]).epsilon(1e-5));
                } else {
                    CHECK(layer[i] == 1.0f);
                }
            }
            for (const std::size_t kv : {0u, 1u}) {
                std::vector<float> one(n);
                s.score(cpu{}, p, kv, std::span<float>(one));
                CHECK(std::equal(one.begin(), one.end(), layer.begin()));
            }
        }
    }
}

TEST_CASE("compress_kv: only the chosen heads count; short prompts; refusals") {
    valued_prompt<float> owner({4, 2, 8, 4, 0}, positions_from(0, 40), positions_from(32, 40), 3);
    const std::vector<std::size_t> heads{1};
    std::vector<float> before(40);
    std::vector<float> after(40);
    compress_kv{heads}.score(cpu{}, owner.view(), 1, std::span<float>(before));
    owner.key(1, 5)[0] = nan_value;  // of a KV head that head 1 does not read
    compress_kv{heads}.score(cpu{}, owner.view(), 1, std::span<float>(after));
    CHECK(before == after);

    for (const int n : {0, 1, 8}) {
        const valued_prompt<float> few({4, 2, 8, 4, 0}, positions_from(0, n), {}, 3);
        std::vector<float> out(static_cast<std::size_t>(n));
        compress_kv{heads}.score(cpu{}, few.view(), 0, std::span<float>(out));
        CHECK(out == std::vector<float>(static_cast<std::size_t>(n), 1.0f));
    }
    std::vector<float> out(40, 3.0f);
    const auto refused = [&](const compress_kv& s, std::initializer_list<std::string> parts) {
        const bool is = support::refused([&] { s.score(cpu{}, owner.view(), 0, std::span<float>(out)); }, parts);
        return is && out == std::vector<float>(40, 3.0f);
    };
    CHECK(refused({}, {"at least one"}));
    const std::vector<std::size_t> beyond{1, 4};
    CHECK(refused({beyond}, {"head 4", "4"}));
    const std::vector<std::size_t> twice{1, 2, 1};
    CHECK(refused({twice}, {"head 1", "twice"}));
    CHECK(refused({heads, 0}, {"window"}));
    CHECK(refused({heads, 8, 4}, {"4"}));
    const valued_prompt<float> unseen({4, 2, 8, 4, 0}, positions_from(0, 40), {}, 3);
    CHECK(support::refused([&] { compress_kv{heads}.score(cpu{}, unseen.view(), 0, std::span<float>(out)); }, {"40"}));
}

TEMPLATE_TEST_CASE("eviction error: agrees with both outputs in double", "", float, half, bfloat16) {
    for (const std::size_t group : {1u, 3u, 5u}) {
        for (const std::size_t model_dim : {7u, 300u}) {
            const geometry shape{2 * group, 2, 16, 6, 0};
            const valued_prompt<TestType> owner(shape, positions_from(0, 80), {5, 40, 60, 79}, 4,
                                                group == 3 ? layout::listed : layout::strided);
            const support::own_rows<TestType> weights(
                support::generator(3).normals<TestType>(2 * group * 6 * model_dim), 2 * group * 6, model_dim,
                group == 5 ? support::rows_layout::listed : support::rows_layout::strided);
            const projected_prompt<TestType> p{owner.view(), {weights.view()}};
            tokens some;
            for (token_index i = 10; i < 80; i += 3) {
                some.push_back(i);
            }
            tokens all(80);
            for (token_index i = 0; i < 80; ++i) {
                all[i] = i;
            }
            thread_pool pool(3);
            for (const auto& kept : {std::vector{some, all}, {all, some}, {tokens{}, some}, {tokens{79}, tokens{0}}}) {
                const double expected = error_in_double(p, kept);
                const double error = eviction_error(cpu{}, p, spans_of(kept));
                CHECK(error == Approx(expected).epsilon(2e-6));
                CHECK(error == eviction_error(cpu{&pool}, p, spans_of(kept)));
            }
            CHECK(eviction_error(cpu{}, p, spans_of({all, all})) == 0);
            CHECK(eviction_error(cpu{}, p, spans_of({{}, {}})) == Approx(1).epsilon(1e-12));
        }
    }
}

TEST_CASE("eviction error: tiny losses, distant logits, and what is not finite") {
    // One token in 60 lost, whose weight is some 1e-11 of all: a difference of two outputs would show nothing in
    // floats.
    const geometry shape{1, 1, 4, 3, 1};
    valued_prompt<float> owner(shape, positions_from(0, 60), {59}, 4);
    const auto memory = support::generator(1).normals<float>(3 * 5);
    const auto p = [&] {
        return projected_prompt<float>{owner.view(), {contiguous_rows(std::span<const float>(memory), 5)}};
    };
    for (std::size_t i = 0; i < 60; ++i) {
        std::fill_n(owner.key(0, i), 4, 0.0f);
    }
    const float* q = owner.view().queries.row(0, 0);
    const std::size_t c = q[0] != 0 ? 0 : 1;
    owner.key(0, 20)[c] = -20 / q[c];
    tokens kept;
    for (token_index i = 0; i < 60; ++i) {
        if (i != 20) {
            kept.push_back(i);
        }
    }
    const double error = eviction_error(cpu{}, p(), spans_of({kept}));
    CHECK(error > 1e-12);
    CHECK(error < 1e-9);
    CHECK(error == Approx(error_in_double(p(), {kept})).epsilon(1e-4));
    // The only kept token lies 2,000 below: its weight is 0 in doubles, and still it is all there is.
    owner.key(0, 20)[c] = -2000 / q[c];
    const double alone = eviction_error(cpu{}, p(), spans_of({{20}}));
    owner.key(0, 20)[c] = -20 / q[c];
    CHECK(alone == Approx(eviction_error(cpu{}, p(), spans_of({{20}}))).epsilon(1e-9));
    owner.key(0, 3)[0] = nan_value;
    CHECK(std::isnan(eviction_error(cpu{}, p(), spans_of({kept}))));
}

TEST_CASE("eviction error: refusals name their numbers") {
    const geometry shape{4, 2, 8, 3, 0};
    const valued_prompt<float> owner(shape, positions_from(0, 20), {10, 19}, 4);
    const auto memory = support::generator(1).normals<float>(12 * 5);
    const auto weights = contiguous_rows(std::span<const float>(memory), 5);
    const projected_prompt<float> p{owner.view(), {weights}};
    const auto refused = [&](const auto& prompt, const std::vector<tokens>& kept,
                             std::initializer_list<std::string> parts) {
        return support::refused([&] { (void)eviction_error(cpu{}, prompt, spans_of(kept)); }, parts);
    };
    CHECK(refused(p, {{1}}, {"1 KV heads", "2"}));
    CHECK(refused(p, {{1}, {3, 20}}, {"kept token 1 of KV head 1 is 20", "20"}));
    CHECK(refused(p, {{5, 5}, {3}}, {"kept token 1 of KV head 0 is 5"}));
    CHECK(refused(projected_prompt<float>{owner.view(), {weights.slice(0, 11)}}, {{1}, {1}}, {"11", "12"}));
    const valued_prompt<float> unseen(shape, positions_from(0, 20), {}, 4);
    CHECK(refused(projected_prompt<float>{unseen.view(), {weights}}, {{1}, {1}}, {"kept queries", "20"}));
}
