// TOVA against plain double sums.
#include <limits>

#include "support/catch.hpp"
#include "support/random_prompt.hpp"
#include "support/refusal.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/tova.hpp"

using namespace verkv;

static_assert(layer_scorer<tova, cpu, half> && layer_scorer<tova, cpu, bfloat16> && !head_scorer<tova, cpu, float>);
static_assert(layer_scorer<decltype(windowed(0, 4, tova{})), cpu, float>);

TEMPLATE_TEST_CASE("score: TOVA is the last query's attention, averaged over the layer", "", float, half, bfloat16) {
    for (const std::size_t group : {1u, 3u, 5u}) {
        for (const auto lie : {layout::dense, layout::strided, layout::listed}) {
            const geometry shape{2 * group, 2, 20, 8, group == 3 ? 0.25f : 0.0f};
            const std::size_t n = 530;
            // The last query sits before the last three tokens.
            const random_prompt<TestType> owner(shape, positions_from(3, 533), positions_from(100, 530),
                                                static_cast<unsigned>(group), lie);
            const auto p = owner.view();
            double spread = 0;
            std::vector<double> expected(n);
            for (std::size_t h = 0; h < shape.query_heads; ++h) {
                const auto a = attention_in_double(p, h, p.queries.tokens - 1, &spread);
                for (std::size_t i = 0; i < n; ++i) {
                    expected[i] += a[i] / static_cast<double>(shape.query_heads);
                }
            }
            std::vector<float> layer(2 * n);
            tova{}.score_layer(cpu{}, p, matrix_of(std::span<float>(layer), 2, n));
            const double tolerance = (2 * 22 * spread + 8) * 0x1p-24;
            for (std::size_t i = 0; i < n; ++i) {
                REQUIRE(std::abs(static_cast<double>(layer[i]) - expected[i]) <= tolerance * expected[i]);
                REQUIRE(layer[n + i] == layer[i]);
            }
            CHECK(layer[n - 1] == 0);
            CHECK(layer[n - 4] > 0);
            thread_pool pool(3);
            std::vector<float> alone(n);
            tova{}.score(cpu{&pool}, p, 1, alone);
            CHECK(std::equal(alone.begin(), alone.end(), layer.begin()));
            tova{true}.score(cpu{}, p, 0, alone);
            CHECK(alone.back() == 1);
            alone.back() = 0;
            CHECK(std::equal(alone.begin(), alone.end(), layer.begin()));
        }
    }
}

TEST_CASE("score: TOVA of few tokens, and what it refuses") {
    const geometry shape{4, 2, 6, 3, 0};
    std::vector<float> out(1);
    const random_prompt<float> one(shape, positions_from(0, 1), positions_from(0, 1), 1);
    tova{}.score(cpu{}, one.view(), 1, out);
    CHECK(out[0] == 1.0f);
    const random_prompt<float> none(shape, {}, {}, 1);
    tova{}.score(cpu{}, none.view(), 0, std::span<float>());
    tova{}.score_layer(cpu{}, none.view(), matrix_view<float>{nullptr, 2, 0, 0});
    const random_prompt<float> blind(shape, positions_from(0, 1), {}, 1);
    CHECK(support::refused([&] { tova{}.score(cpu{}, blind.view(), 0, out); }, {"1 tokens", "none"}));
    CHECK(support::refused([&] { tova{}.score(cpu{}, one.view(), 2, out); }, {"KV head 2", "2"}));
    std::vector<float> two(2);
    CHECK(support::refused([&] { tova{}.score_layer(cpu{}, one.view(), matrix_of(std::span<float>(two), 1, 2)); },
                           {"[1, 2]"}));
    random_prompt<float> poisoned(shape, positions_from(0, 9), positions_from(8, 9), 1);
    poisoned.key(1, 4)[2] = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> nine(9);
    tova{}.score(cpu{}, poisoned.view(), 0, nine);
    CHECK(std::isnan(nine[0]));
    CHECK(support::refused([&] { to_importance(cpu{}, std::span<float>(nine)); }, {"token 0", "nan"}));
}
