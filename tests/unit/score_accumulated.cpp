// H2O and mean attention against plain double sums; the age bias of the one and what is left of it in the other.
#include <limits>
#include <numeric>

#include "support/catch.hpp"
#include "support/random_prompt.hpp"
#include "support/refusal.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/accumulated_attention.hpp"
#include "verkv/score/mean_attention.hpp"

using namespace verkv;

static_assert(head_scorer<mean_attention, cpu, half> && scorer<mean_attention, cpu, half>);
static_assert(head_scorer<accumulated_attention, cpu, half> && !scorer<accumulated_attention, cpu, half>);
static_assert(scorer<decltype(make_h2o()), cpu, bfloat16>);

namespace {

double tolerance_of(std::size_t d, double spread) {
    return (2 * static_cast<double>(d + 2) * spread + 8) * 0x1p-24;
}

// The published loop, over a full matrix and with a flag for each token: queries at all positions.
std::vector<double> h2o_in_double(const std::vector<std::vector<double>>& attention, std::size_t heavy) {
    const std::size_t n = attention.size();
    std::vector<double> a(n, 0.0);
    for (std::size_t t = 0; t < std::min(heavy, n); ++t) {
        for (std::size_t i = 0; i <= t; ++i) {
            a[i] += attention[t][i];
        }
    }
    for (std::size_t t = heavy; t < n; ++t) {
        std::vector<std::size_t> order(t);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) { return a[x] > a[y]; });
        std::vector<bool> kept(n, false);
        for (std::size_t k = 0; k + 1 < heavy; ++k) {
            kept[order[k]] = true;
        }
        kept[t] = true;
        for (std::size_t i = 0; i < n; ++i) {
            a[i] = kept[i] ? a[i] + attention[t][i] : 0.0;
        }
    }
    return a;
}

// The same for any kept queries, as the docstring has it: a list of members, new ones at the end.
std::vector<double> streamed_in_double(const prompt<float>& p, std::size_t head, std::size_t heavy, double* spread) {
    std::vector<std::pair<std::size_t, double>> set;
    std::size_t next = 0;
    for (std::size_t j = 0; j < p.queries.tokens; ++j) {
        const auto attention = attention_in_double(p, head, j, spread);
        std::vector<std::size_t> fresh;
        for (; next < p.tokens() && p.positions[next] <= p.query_positions[j]; ++next) {
            fresh.push_back(next);
        }
        while (fresh.size() > heavy) {
            fresh.erase(fresh.begin());
        }
        while (set.size() + fresh.size() > heavy) {
            std::size_t least = 0;
            for (std::size_t m = 1; m < set.size(); ++m) {
                least = set[m].second <= set[least].second ? m : least;
            }
            set.erase(set.begin() + static_cast<std::ptrdiff_t>(least));
        }
        for (const std::size_t i : fresh) {
            set.emplace_back(i, 0.0);
        }
        for (auto& [token, gathered] : set) {
            gathered += attention[token];
        }
    }
    std::vector<double> a(p.tokens(), 0.0);
    for (const auto& [token, gathered] : set) {
        a[token] = gathered;
    }
    return a;
}

// Decoding with what is left, by the definition: of `n` tokens, the set and the band are the cache, a flag each; a
// query shares its attention among the cached tokens, as the exact ratios of e^logit of a full softmax have it.
std::vector<double> decoded_in_double(const std::vector<std::vector<double>>& attention, std::size_t heavy,
                                      std::size_t band) {
    const std::size_t n = attention.size();
    std::vector<double> a(n, 0.0);
    std::vector<bool> kept(n, false);
    for (std::size_t t = 0; t < n; ++t) {
        kept[t] = true;
        if (static_cast<std::size_t>(std::count(kept.begin(), kept.end(), true)) > heavy) {
            std::size_t least = n;
            for (std::size_t i = 0; i < t; ++i) {
                if (kept[i] && (least == n || a[i] <= a[least])) {
                    least = i;
                }
            }
            least = least == n ? t : least;  // room for none of them but the new one
            kept[least] = false;
            a[least] = 0;
            kept[t] = true;
        }
        double sum = 0;
        for (std::size_t i = 0; i <= t; ++i) {
            sum += kept[i] || i + band > t ? attention[t][i] : 0.0;
        }
        for (std::size_t i = 0; i <= t; ++i) {
            a[i] += kept[i] ? attention[t][i] / sum : 0.0;
        }
    }
    return a;
}

std::vector<std::vector<double>> matrix_in_double(const prompt<float>& p, std::size_t head, double* spread) {
    std::vector<std::vector<double>> rows;
    for (std::size_t j = 0; j < p.queries.tokens; ++j) {
        rows.push_back(attention_in_double(p, head, j, spread));
    }
    return rows;
}

}  // namespace

TEMPLATE_TEST_CASE("score: mean attention divides by the queries that could see the token", "", float, half, bfloat16) {
    for (const std::size_t group : {1u, 3u, 5u}) {
        const geometry shape{2 * group, 2, 20, 8, 0};
        // Queries at all positions, at every third, and none for the last tokens.
        for (const int which : {0, 1, 2}) {
            const std::vector<position_t> at = which == 0   ? positions_from(10, 160)
                                               : which == 1 ? positions_from(11, 160, 3)
                                                            : positions_from(60, 120);
            const auto lie = which == 0 ? layout::dense : which == 1 ? layout::listed : layout::strided;
            const random_prompt<TestType> owner(shape, positions_from(10, 160), at, static_cast<unsigned>(group), lie);
            const auto p = owner.view();
            const std::size_t n = p.tokens();
            for (std::size_t kv = 0; kv < 2; ++kv) {
                double spread = 0;
                std::vector<double> expected(n, 0.0);
                std::vector<float> got(n);
                for (std::size_t h = kv * group; h < (kv + 1) * group; ++h) {
                    std::vector<double> sum(n, 0.0);
                    for (std::size_t j = 0; j < at.size(); ++j) {
                        const auto a = attention_in_double(p, h, j, &spread);
                        for (std::size_t i = 0; i < n; ++i) {
                            sum[i] += a[i];
                        }
                    }
                    mean_attention{}.score_head(cpu{}, p, h, got);
                    for (std::size_t i = 0; i < n; ++i) {
                        const auto saw =
                            std::count_if(at.begin(), at.end(), [&](position_t q) { return q >= p.positions[i]; });
                        const double mean = saw > 0 ? sum[i] / static_cast<double>(saw) : 0.0;
                        REQUIRE(std::abs(static_cast<double>(got[i]) - mean) <= tolerance_of(20, spread) * mean);
                        expected[i] += mean / static_cast<double>(group);
                    }
                }
                thread_pool pool(2);
                mean_attention{}.score(cpu{&pool}, p, kv, got);
                for (std::size_t i = 0; i < n; ++i) {
                    REQUIRE(std::abs(static_cast<double>(got[i]) - expected[i]) <=
                            2 * tolerance_of(20, spread) * expected[i]);
                }
                CHECK((which != 0) == (got[n - 1] == 0));  // no kept query at or behind the last token
            }
        }
    }
}

TEST_CASE("score: H2O is the published loop") {
    for (const std::size_t group : {1u, 3u}) {
        const geometry shape{group, 1, 16, 8, group == 3 ? 0.1f : 0.0f};
        for (const int n : {1, 2, 7, 64, 65, 200}) {
            const random_prompt<float> owner(shape, positions_from(0, n), positions_from(0, n),
                                             static_cast<unsigned>(n), n == 65 ? layout::listed : layout::dense);
            const auto p = owner.view();
            const auto size = static_cast<std::size_t>(n);
            for (const std::size_t heavy : {std::size_t{1}, std::size_t{2}, std::size_t{9}, size}) {
                CAPTURE(n, heavy, group);
                double spread = 0;
                for (std::size_t h = 0; h < group; ++h) {
                    auto expected = h2o_in_double(matrix_in_double(p, h, &spread), heavy);
                    const auto streamed = streamed_in_double(p, h, heavy, &spread);
                    for (std::size_t i = 0; i < size; ++i) {
                        REQUIRE(streamed[i] == Approx(expected[i]));
                        expected[i] /= n;
                    }
                    std::vector<float> got(size);
                    accumulated_attention{portion::tokens(heavy), portion::tokens(0)}.score_head(cpu{}, p, h, got);
                    for (std::size_t i = 0; i < size; ++i) {
                        REQUIRE(std::abs(static_cast<double>(got[i]) - expected[i]) <=
                                tolerance_of(16, spread) * expected[i]);
                    }
                    // The recent band counts whether evicted or not, and changes nothing else.
                    std::vector<float> banded(size);
                    accumulated_attention{portion::tokens(heavy), portion::tokens(3)}.score_head(cpu{}, p, h, banded);
                    for (std::size_t i = 0; i < size; ++i) {
                        REQUIRE(banded[i] == (i + 3 < size ? got[i] : 1.0f));
                    }
                }
            }
        }
    }
}

TEST_CASE("score: H2O among the cached tokens is what a decoder that evicts would count") {
    for (const std::size_t group : {1u, 3u}) {
        const geometry shape{group, 1, 16, 8, group == 3 ? 0.1f : 0.0f};
        for (const int n : {1, 2, 7, 65, 200}) {
            const random_prompt<float> owner(shape, positions_from(0, n), positions_from(0, n),
                                             static_cast<unsigned>(n), n == 65 ? layout::listed : layout::dense);
            const auto p = owner.view();
            const auto size = static_cast<std::size_t>(n);
            for (const std::size_t heavy : {std::size_t{2}, std::size_t{9}, size}) {
                for (const std::size_t band : {std::size_t{0}, std::size_t{5}, size}) {
                    CAPTURE(n, heavy, band, group);
                    double spread = 0;
                    for (std::size_t h = 0; h < group; ++h) {
                        const auto expected = decoded_in_double(matrix_in_double(p, h, &spread), heavy, band);
                        std::vector<float> got(size);
                        accumulated_attention{portion::tokens(heavy), portion::tokens(band), attention_among::cached}
                            .score_head(cpu{}, p, h, got);
                        double sum = 0;
                        for (std::size_t i = 0; i < size; ++i) {
                            const double mean = i + band < size ? expected[i] / n : 1.0;
                            REQUIRE(std::abs(static_cast<double>(got[i]) - mean) <= tolerance_of(16, spread) * mean);
                            sum += static_cast<double>(got[i]);
                        }
                        if (band == 0 && heavy == size) {  // nothing left: every query gave all of its attention
                            CHECK(sum == Approx(1).epsilon(1e-5));
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("score: H2O over a sample of queries lets several tokens enter at once") {
    const geometry shape{2, 1, 16, 8, 0};
    for (const int step : {2, 5, 31}) {
        for (const std::size_t heavy : {1u, 4u, 20u, 40u}) {
            CAPTURE(step, heavy);
            const random_prompt<float> owner(shape, positions_from(0, 600, 3), positions_from(7, 500, step),
                                             static_cast<unsigned>(step));
            const auto p = owner.view();
            double spread = 0;
            const auto expected = streamed_in_double(p, 1, heavy, &spread);
            std::vector<float> got(p.tokens());
            thread_pool pool(3);
            accumulated_attention{portion::tokens(heavy), portion::tokens(0)}.score_head(cpu{&pool}, p, 1, got);
            std::size_t held = 0;
            for (std::size_t i = 0; i < got.size(); ++i) {
                const double mean = expected[i] / static_cast<double>(p.queries.tokens);
                REQUIRE(std::abs(static_cast<double>(got[i]) - mean) <= tolerance_of(16, spread) * mean);
                held += got[i] > 0;
            }
            CHECK(held == heavy);
            CHECK(got.back() == 0);  // behind the last kept query
        }
    }
}

TEST_CASE("score: eviction is permanent, in H2O alone") {
    // One channel. Token 1 is ignored by the first three queries and gets nearly all of the attention of the later
    // ones. The set has room for two: token 1 leaves at query 2, and nothing it would gather brings it back.
    const geometry shape{1, 1, 1, 1, 1.0f};
    const std::size_t n = 40;
    std::vector<float> keys(n, 0.0f);
    std::vector<float> queries(n, 0.0f);
    std::vector<float> values(n, 0.0f);
    keys[0] = 1;
    keys[1] = -1;
    for (std::size_t t = 0; t < n; ++t) {
        queries[t] = t < 3 ? 9.0f : -9.0f;
    }
    const rows<float> key_rows = contiguous_rows(std::span<const float>(keys), 1);
    const rows<float> value_rows = contiguous_rows(std::span<const float>(values), 1);
    const auto positions = positions_from(0, static_cast<int>(n));
    const prompt<float> p{
        shape,    {&key_rows, 1}, {&value_rows, 1}, positions, heads_of(std::span<const float>(queries), n, 1, 1),
        positions};
    std::vector<float> h2o(n);
    std::vector<float> mean(n);
    accumulated_attention{portion::tokens(2), portion::tokens(0)}.score_head(cpu{}, p, 0, h2o);
    mean_attention{}.score(cpu{}, p, 0, mean);
    CHECK(h2o[1] == 0);
    CHECK(h2o[0] > 0);
    CHECK(std::max_element(mean.begin(), mean.end()) == mean.begin() + 1);
    CHECK(mean[1] > 0.9f);
}

TEST_CASE("score: of tokens that gathered alike the lower index stays in H2O's set") {
    // All queries but the last give token 0 everything, to the last bit: the others gather exactly 0 and tie. The last
    // one looks at all alike, which shows who is in the set.
    const geometry shape{1, 1, 1, 1, 1.0f};
    for (const position_t step : {1, 4}) {
        const std::size_t n = 40;
        std::vector<float> keys(n, 0.0f);
        keys[0] = 1;
        const std::vector<float> values(n, 0.0f);
        const rows<float> key_rows = contiguous_rows(std::span<const float>(keys), 1);
        const rows<float> value_rows = contiguous_rows(std::span<const float>(values), 1);
        const auto positions = positions_from(0, static_cast<int>(n));
        const auto at = positions_from(3, static_cast<int>(n), step);
        std::vector<float> queries(at.size(), 200.0f);
        queries.back() = 0;
        const prompt<float> p{shape,
                              {&key_rows, 1},
                              {&value_rows, 1},
                              positions,
                              heads_of(std::span<const float>(queries), at.size(), 1, 1),
                              at};
        std::vector<float> out(n);
        accumulated_attention{portion::tokens(7), portion::tokens(0)}.score_head(cpu{}, p, 0, out);
        const std::size_t fresh = static_cast<std::size_t>(step);  // those that came with the last query
        for (std::size_t i = 0; i < n; ++i) {
            INFO("token " << i << ", step " << step);
            CHECK((out[i] > 0) == (i < 7 - fresh || i >= n - fresh));
        }
    }
}

TEST_CASE("score: the age bias of sums, and of the mean") {
    // Keys that all look alike to every query: attention of query t is 1/(t+1) on each of t+1 tokens. No token matters
    // more than another, so a fair score has no trend.
    const geometry shape{1, 1, 2, 1, 0};
    const std::size_t n = 400;
    const std::vector<float> keys(2 * n, 0.5f);
    const std::vector<float> values(n, 0.0f);
    const rows<float> key_rows = contiguous_rows(std::span<const float>(keys), 2);
    const rows<float> value_rows = contiguous_rows(std::span<const float>(values), 1);
    const auto positions = positions_from(0, static_cast<int>(n));
    const prompt<float> p{
        shape, {&key_rows, 1}, {&value_rows, 1}, positions, heads_of(std::span<const float>(keys), n, 1, 2), positions};
    std::vector<float> h2o(n);
    std::vector<float> mean(n);
    // Room for all: nothing is evicted, the scores are the raw column sums over n.
    accumulated_attention{portion::fraction(1), portion::tokens(0)}.score_head(cpu{}, p, 0, h2o);
    mean_attention{}.score(cpu{}, p, 0, mean);
    double harmonic = 0;
    for (std::size_t i = n; i-- > 0;) {
        harmonic += 1.0 / static_cast<double>(i + 1);  // sum over t >= i of 1/(t+1)
        CHECK(static_cast<double>(h2o[i]) == Approx(harmonic / static_cast<double>(n)));
        CHECK(static_cast<double>(mean[i]) == Approx(harmonic / static_cast<double>(n - i)));
    }
    // Sums: the first token looks some 2600 times as heavy as the last one, the first quarter has 60 % of all.
    CHECK(h2o[0] > 2000 * h2o[n - 1]);
    CHECK(std::accumulate(h2o.begin(), h2o.begin() + 100, 0.0) > 0.55 * std::accumulate(h2o.begin(), h2o.end(), 0.0));
    // With eviction the bias decides who stays: old tokens gathered more, so the set is the first tokens and the last.
    accumulated_attention{portion::tokens(40), portion::tokens(0)}.score_head(cpu{}, p, 0, h2o);
    for (std::size_t i = 0; i < n; ++i) {
        CHECK((h2o[i] > 0) == (i < 39 || i == n - 1));
    }
    // The mean: within a factor of 7 in all, and within 2 over the last half.
    CHECK(mean[0] < 7 * mean[n - 1]);
    CHECK(mean[n / 2] < 2 * mean[n - 1]);
}

TEST_CASE("score: portions, empty prompts, and what the accumulators refuse") {
    CHECK(portion::fraction(0.1).of(39) == 3);
    CHECK(portion::fraction(0.1).of(5) == 1);
    CHECK(portion::fraction(0).of(500) == 0);
    CHECK(portion::fraction(1).of(500) == 500);
    CHECK(portion::fraction(0.5).of(0) == 0);
    CHECK(portion::tokens(9).of(5) == 5);
    CHECK(portion::tokens(std::numeric_limits<std::size_t>::max()).of(5) == 5);
    using support::refused;
    CHECK(refused([] { (void)portion::fraction(1.5); }, {"1.5"}));
    CHECK(refused([] { (void)portion::fraction(std::numeric_limits<double>::quiet_NaN()); }, {"nan"}));
    const geometry shape{2, 1, 6, 3, 0};
    const random_prompt<float> none(shape, {}, {}, 1);
    make_h2o().score(cpu{}, none.view(), 0, std::span<float>());
    mean_attention{}.score(cpu{}, none.view(), 0, std::span<float>());
    const random_prompt<float> blind(shape, positions_from(0, 5), {}, 1);
    std::vector<float> out(5, 7.0f);
    CHECK(refused([&] { make_h2o().score(cpu{}, blind.view(), 0, out); }, {"1 heavy tokens of 5"}));
    CHECK(refused([&] { mean_attention{}.score(cpu{}, blind.view(), 0, out); }, {"5 tokens"}));
    CHECK(refused([&] { make_h2o(portion::tokens(0), portion::tokens(0)).score(cpu{}, blind.view(), 0, out); },
                  {"no token of 5"}));
    CHECK(out == std::vector<float>(5, 7.0f));
    make_h2o(portion::tokens(0), portion::tokens(2)).score(cpu{}, blind.view(), 0, out);
    CHECK(out == std::vector<float>{0, 0, 0, 1, 1});
    // A NaN key ends in NaN or in nothing, and in no wrong index.
    random_prompt<float> poisoned(shape, positions_from(0, 90), positions_from(0, 90), 1);
    poisoned.key(0, 40)[2] = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> ninety(90);
    make_h2o(portion::tokens(9), portion::tokens(2)).score(cpu{}, poisoned.view(), 0, ninety);
    CHECK(std::isnan(*std::min_element(ninety.begin(), ninety.end(),
                                       [](float a, float b) { return std::isnan(a) && !std::isnan(b); })));
    mean_attention{}.score(cpu{}, poisoned.view(), 0, ninety);
    CHECK(std::isnan(ninety[3]));
}

TEST_CASE("score: threads and layout change no bit of H2O") {
    const geometry shape{4, 2, 24, 8, 0};
    const auto positions = positions_from(0, 1300);
    const random_prompt<float> a(shape, positions, positions, 11, layout::dense);
    const random_prompt<float> b(shape, positions, positions, 11, layout::listed);
    thread_pool pool(3);
    std::vector<float> x(positions.size());
    std::vector<float> y(positions.size());
    make_h2o<reduction::maximum>().score(cpu{}, a.view(), 1, x);
    make_h2o<reduction::maximum>().score(cpu{&pool}, b.view(), 1, y);
    CHECK(x == y);
    const auto cached = make_h2o<reduction::maximum>(portion::tokens(30), portion::tokens(9), attention_among::cached);
    cached.score(cpu{}, a.view(), 1, x);
    cached.score(cpu{&pool}, b.view(), 1, y);
    CHECK(x == y);
}
