// Given scores, sinks and recency, key norm, importance, and scorers made of scorers.
#include <algorithm>
#include <cmath>
#include <limits>

#include "support/catch.hpp"
#include "support/random_prompt.hpp"
#include "support/refusal.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/given.hpp"
#include "verkv/score/importance.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/largest_attention.hpp"
#include "verkv/score/snapkv.hpp"
#include "verkv/score/streaming_llm.hpp"

using namespace verkv;

namespace {

const float nan_value = std::numeric_limits<float>::quiet_NaN();
const float infinity = std::numeric_limits<float>::infinity();

// A head scorer from outside: query head h gives token i the score table[h][i].
struct table_scorer {
    std::vector<std::vector<float>> table;

    template <class Backend, class T>
    void score_head(const Backend&, const prompt<T>&, std::size_t query_head, std::span<float> out) const {
        std::copy(table[query_head].begin(), table[query_head].end(), out.begin());
    }
};

template <class S>
std::vector<float> score_of(const S& scorer, std::size_t n, std::size_t group = 1, std::size_t kv_head = 0,
                            std::size_t kv_heads = 1) {
    const random_prompt<float> owner({group * kv_heads, kv_heads, 4, 4, 0}, positions_from(0, static_cast<int>(n)), {},
                                     1);
    std::vector<float> out(n, -7.0f);
    scorer.score(cpu{}, owner.view(), kv_head, std::span<float>(out));
    return out;
}

using floats = std::vector<float>;

template <class S>
constexpr bool scores_all_types = scorer<S, cpu, float>&& scorer<S, cpu, half>&& scorer<S, cpu, bfloat16>;
template <class S>
constexpr bool scores_heads_of_all_types =
    head_scorer<S, cpu, float>&& head_scorer<S, cpu, half>&& head_scorer<S, cpu, bfloat16>;

static_assert(scores_all_types<given_scores> && scores_all_types<streaming_llm> && scores_all_types<key_norm>);
static_assert(scores_all_types<largest_attention> && scores_heads_of_all_types<largest_attention>);
static_assert(scores_heads_of_all_types<snapkv> && !scorer<snapkv, cpu, float>);
static_assert(scores_all_types<decltype(make_snapkv())>);
using smoothed_norm = decltype(smoothed(3, pooling::maximum, key_norm{}));
static_assert(scores_all_types<smoothed_norm> && !head_scorer<smoothed_norm, cpu, float>);
using smoothed_head = decltype(windowed(1, 1, floored(0, smoothed(3, pooling::maximum, snapkv{}))));
static_assert(scores_heads_of_all_types<smoothed_head> && !scorer<smoothed_head, cpu, float>);
using both = decltype(floored(0, largest_attention{}));
static_assert(scores_all_types<both> && scores_heads_of_all_types<both>);

}  // namespace

TEST_CASE("score: given scores come back, per head or dense") {
    const floats all{1, 2, 3, 4, 5, 6};
    CHECK(score_of(given_scores(all), 3, 1, 0, 2) == floats{1, 2, 3});
    CHECK(score_of(given_scores(all), 3, 2, 1, 2) == floats{4, 5, 6});
    const floats a{9, 8};
    const floats b{7, 6};
    const std::vector<std::span<const float>> heads{a, b};
    CHECK(score_of(given_scores(heads), 2, 1, 1, 2) == b);
    CHECK(support::refused([&] { (void)score_of(given_scores(all), 4, 1, 0, 2); }, {"6 given scores"}));
    CHECK(support::refused([&] { (void)score_of(given_scores(heads), 3, 1, 0, 2); }, {"2 given scores"}));
    CHECK(support::refused([&] { (void)score_of(given_scores(heads), 2, 1, 0, 1); }, {"2 KV heads"}));
}

TEST_CASE("score: StreamingLLM keeps sinks and the most recent tokens") {
    CHECK(score_of(streaming_llm{2}, 6) == floats{1, 1, 0.25f, 0.5f, 0.75f, 1});
    CHECK(score_of(streaming_llm{0}, 2) == floats{0.5f, 1});
    CHECK(score_of(streaming_llm{4}, 3) == floats{1, 1, 1});
    CHECK(score_of(streaming_llm{4}, 0).empty());
    const auto many = score_of(streaming_llm{}, 100'000);
    CHECK(std::is_sorted(many.begin() + 4, many.end()));
    CHECK(std::adjacent_find(many.begin() + 4, many.end()) == many.end());
}

TEST_CASE("score: key norm") {
    const geometry shape{1, 1, 11, 4, 0};
    random_prompt<float> owner(shape, positions_from(0, 3), {}, 1);
    std::fill_n(owner.key(0, 0), 11, 0.0f);
    owner.key(0, 0)[2] = 3;
    owner.key(0, 0)[10] = -4;
    std::fill_n(owner.key(0, 1), 11, 1e30f);
    std::fill_n(owner.key(0, 2), 11, 1e-30f);
    floats out(3);
    key_norm{}.score(cpu{}, owner.view(), 0, out);
    CHECK(out[0] == -5.0f);
    CHECK(out[1] == Approx(-1e30 * std::sqrt(11.0)));
    CHECK(out[2] == Approx(-1e-30 * std::sqrt(11.0)).epsilon(1e-6));
    owner.key(0, 1)[0] = nan_value;
    key_norm{}.score(cpu{}, owner.view(), 0, out);
    CHECK(out[0] == -5.0f);
    CHECK(std::isnan(out[1]));

    const random_prompt<half> dense({2, 2, 80, 4, 0}, positions_from(0, 3000), {}, 5, layout::dense);
    const random_prompt<half> listed({2, 2, 80, 4, 0}, positions_from(0, 3000), {}, 5, layout::listed);
    thread_pool pool(3);
    floats x(3000);
    floats y(3000);
    key_norm{}.score(cpu{}, dense.view(), 1, x);
    key_norm{}.score(cpu{&pool}, listed.view(), 1, y);
    CHECK(x == y);
    double sum = 0;
    for (std::size_t c = 0; c < 80; ++c) {
        const double k = static_cast<double>(to_float(dense.view().keys[1][2999][c]));
        sum += k * k;
    }
    CHECK(x[2999] == static_cast<float>(-std::sqrt(sum)));
}

TEST_CASE("score: scores in [0, 1] stay, others go through a softmax") {
    floats inside{0, 1, 0.25f, 1e-30f};
    const floats before = inside;
    CHECK_FALSE(to_importance(cpu{}, inside));
    CHECK(inside == before);

    floats outside{-1, 0, 1, 0.5f};
    CHECK(to_importance(cpu{}, outside));
    double sum = 0;
    for (const double s : {-1.0, 0.0, 1.0, 0.5}) {
        sum += std::exp(s);
    }
    CHECK(outside[0] == Approx(std::exp(-1) / sum).epsilon(1e-7));
    CHECK(outside[2] == Approx(std::exp(1) / sum).epsilon(1e-7));
    CHECK(outside[3] == Approx(std::exp(0.5) / sum).epsilon(1e-7));

    floats far_apart{-3e38f, 3e38f, 3e38f};
    to_importance(cpu{}, far_apart);
    CHECK(far_apart == floats{0, 0.5f, 0.5f});
    floats low{-5, -5};
    to_importance(cpu{}, low);
    CHECK(low == floats{0.5f, 0.5f});
    floats none;
    CHECK_FALSE(to_importance(cpu{}, none));

    for (const float bad : {nan_value, infinity, -infinity}) {
        floats scores{2, 3, bad, 1};
        CHECK(support::refused([&] { to_importance(cpu{}, scores); }, {"token 2"}));
        CHECK(scores[0] == 2);
        CHECK(scores[3] == 1);
    }

    floats many(20'000);
    for (std::size_t i = 0; i < many.size(); ++i) {
        many[i] = static_cast<float>(i % 97) - 50;
    }
    floats same = many;
    thread_pool pool(3);
    to_importance(cpu{}, many);
    to_importance(cpu{&pool}, same);
    CHECK(many == same);
}

TEST_CASE("score: reduction over the group") {
    const table_scorer heads{{{1, 2, 3}, {4, 0, 9}, {1, 1, 0}, {5, 5, 5}, {7, 8, 9}, {0, nan_value, 0}}};
    CHECK(score_of(over_group<reduction::maximum>(heads), 3, 3, 0, 2) == floats{4, 2, 9});
    CHECK(score_of(over_group<reduction::mean>(heads), 3, 3, 0, 2) == floats{2, 1, 4});
    CHECK(score_of(over_group<reduction::sum>(heads), 3, 3, 0, 2) == floats{6, 3, 12});
    CHECK(score_of(over_group<reduction::sum>(heads), 3, 1, 3, 6) == floats{5, 5, 5});
    for (const auto& out : {score_of(over_group<reduction::maximum>(heads), 3, 3, 1, 2),
                            score_of(over_group<reduction::mean>(heads), 3, 3, 1, 2)}) {
        CHECK(std::isnan(out[1]));
        CHECK_FALSE(std::isnan(out[0]));
    }
    // NaN first, a number after it.
    const table_scorer nan_first{{{nan_value}, {2}}};
    CHECK(std::isnan(score_of(over_group<reduction::maximum>(nan_first), 1, 2)[0]));
}

TEST_CASE("score: smoothing") {
    const floats raw{3, 0, 6, 9, 0};
    const given_scores given(raw);
    CHECK(score_of(smoothed(1, pooling::average, given), 5) == raw);
    // Divided by the width at the ends too.
    CHECK(score_of(smoothed(3, pooling::average, given), 5) == floats{1, 3, 5, 5, 3});
    CHECK(score_of(smoothed(3, pooling::maximum, given), 5) == floats{3, 6, 9, 9, 9});
    CHECK(score_of(smoothed(9, pooling::average, given), 5) == floats{2, 2, 2, 2, 2});
    CHECK(score_of(smoothed(101, pooling::maximum, given), 5) == floats{9, 9, 9, 9, 9});
    const floats negative{-3, -1, -2};
    CHECK(score_of(smoothed(3, pooling::maximum, given_scores(negative)), 3) == floats{-1, -1, -1});
    CHECK(score_of(smoothed(5, pooling::average, given_scores(std::span<const float>{})), 0).empty());
    for (const std::size_t width : {0u, 2u, 4u}) {
        CHECK(support::refused([&] { (void)score_of(smoothed(width, pooling::average, given), 5); }, {"odd"}));
    }
    // Average pooling commutes with the group mean; maximum pooling does not.
    const table_scorer heads{{{0, 4, 0, 0}, {0, 0, 0, 8}}};
    const auto mean = [](auto s) { return over_group<reduction::mean>(s); };
    CHECK(score_of(mean(smoothed(3, pooling::average, heads)), 4, 2) ==
          score_of(smoothed(3, pooling::average, mean(heads)), 4, 2));
    CHECK(score_of(mean(smoothed(3, pooling::maximum, heads)), 4, 2) == floats{2, 2, 6, 4});
    CHECK(score_of(smoothed(3, pooling::maximum, mean(heads)), 4, 2) == floats{2, 2, 4, 4});
}

TEST_CASE("score: windows of length zero, overlapping, off by one") {  // case O3
    floats raw{0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f};
    const auto tau = [&](std::size_t sink, std::size_t local) {
        return score_of(windowed(sink, local, given_scores(raw)), raw.size());
    };
    CHECK(tau(0, 0) == raw);
    CHECK(tau(2, 0) == floats{1, 1, 0.3f, 0.4f, 0.5f, 0.6f});
    CHECK(tau(1, 2) == floats{1, 0.2f, 0.3f, 0.4f, 1, 1});
    CHECK(tau(4, 4) == floats{1, 1, 1, 1, 1, 1});
    CHECK(tau(64, 64) == floats{1, 1, 1, 1, 1, 1});
    CHECK(tau(0, 1) == floats{0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 1});
    raw.push_back(0.7f);
    CHECK(tau(1, 2) == floats{1, 0.2f, 0.3f, 0.4f, 0.5f, 1, 1});
}

TEST_CASE("score: windows turn scores of any size into importance first") {
    const floats raw{-10, 300, -10, 299};
    const auto tau = score_of(windowed(1, 0, given_scores(raw)), 4);
    CHECK(tau[0] == 1);
    CHECK(tau[1] == Approx(1 / (1 + std::exp(-1.0))).epsilon(1e-6));
    CHECK(tau[2] == 0);
    const floats bad{0, nan_value};
    CHECK(support::refused([&] { (void)score_of(windowed(0, 0, given_scores(bad)), 2); }, {"token 1"}));
}

TEST_CASE("score: floors") {
    const floats raw{0, 0.5f, -1, nan_value};
    const auto out = score_of(floored(0.1f, given_scores(raw)), 4);
    CHECK(out[0] == 0.1f);
    CHECK(out[1] == 0.5f);
    CHECK(out[2] == 0.1f);
    CHECK(std::isnan(out[3]));
    CHECK(support::refused([&] { (void)score_of(floored(nan_value, given_scores(raw)), 4); }, {"floor"}));
    // Deep compositions of scorers and of head scorers.
    const table_scorer heads{{{0, 1, 0}, {1, 0, 0}}};
    const auto deep = windowed(
        1, 0, floored(0.25f, over_group<reduction::mean>(smoothed(3, pooling::maximum, floored(0.5f, heads)))));
    CHECK(score_of(deep, 3, 2) == floats{1, 1, 0.75f});
    const auto inside_group = over_group<reduction::mean>(windowed(0, 1, heads));
    CHECK(score_of(inside_group, 3, 2) == floats{0.5f, 0.5f, 1});
}

TEST_CASE("score: a score outside a smoothing is the window's, inside it leaks") {
    const random_prompt<float> owner({2, 1, 16, 16, 0}, positions_from(0, 40), positions_from(0, 40), 3);
    floats composed(40);
    floats leaking(40);
    make_snapkv(8, 5).score(cpu{}, owner.view(), 0, composed);
    over_group<reduction::mean>(smoothed(5, pooling::average, snapkv{8})).score(cpu{}, owner.view(), 0, leaking);
    CHECK(composed[31] < 0.2f);
    CHECK(leaking[31] > 0.4f);
    CHECK(composed[32] == 1.0f);
    CHECK(composed[29] == leaking[29]);
}
