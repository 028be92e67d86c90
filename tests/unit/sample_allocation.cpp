// Budgets of heads and layers against full sorts, and what holds whatever the scores: the sum, and no head without a
// row.
#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/sample/allocation.hpp"
#include "verkv/sample/layer_allocation.hpp"

using namespace verkv;
using counts = std::vector<std::size_t>;

namespace {

struct score_table {
    score_table(std::size_t heads, std::size_t tokens, std::uint64_t seed, bool ties)
        : data(heads * tokens), view(matrix_of(std::span<const float>(data), heads, tokens)) {
        std::mt19937_64 random(seed);
        for (std::size_t h = 0; h < heads; ++h) {
            for (std::size_t i = 0; i < tokens; ++i) {
                const auto u = static_cast<double>(random() >> 11) * 0x1p-53;
                data[h * tokens + i] =
                    ties ? static_cast<float>(random() % 4) : static_cast<float>(std::pow(u, 1.0 + double(h)));
            }
        }
    }
    std::vector<float> data;
    matrix_view<const float> view;
};

// One sort of everything: each head's own best first, then the rest by score, head, token.
counts by_sorting(const matrix_view<const float>& s, std::size_t total, windows fixed, std::size_t least) {
    struct entry {
        float score;
        std::size_t head, token;
    };
    const auto before = [](const entry& a, const entry& b) {
        return a.score != b.score ? a.score > b.score : std::pair(a.head, a.token) < std::pair(b.head, b.token);
    };
    counts out(s.rows, 0);
    std::vector<entry> rest;
    for (std::size_t h = 0; h < s.rows; ++h) {
        std::vector<entry> own;
        for (std::size_t i = 0; i < s.columns; ++i) {
            if (fixed.fixed(i, s.columns)) {
                ++out[h];
            } else {
                own.push_back({s.row(h)[i], h, i});
            }
        }
        std::sort(own.begin(), own.end(), before);
        const std::size_t sure = std::min(least, own.size());
        out[h] += sure;
        rest.insert(rest.end(), own.begin() + static_cast<std::ptrdiff_t>(sure), own.end());
    }
    std::sort(rest.begin(), rest.end(), before);
    std::size_t left = total - std::accumulate(out.begin(), out.end(), std::size_t{0});
    for (const entry& e : rest) {
        if (left > 0) {
            ++out[e.head];
            --left;
        }
    }
    return out;
}

std::size_t sum_of(const counts& c) {
    return std::accumulate(c.begin(), c.end(), std::size_t{0});
}

}  // namespace

TEST_CASE("sample: budgets of heads are one cut through all scores") {
    for (const bool ties : {false, true}) {
        for (const std::size_t heads : {1u, 3u, 8u}) {
            for (const std::size_t n : {1u, 7u, 200u}) {
                const score_table table(heads, n, heads * 1000 + n + (ties ? 1 : 0), ties);
                for (const windows fixed : {windows{0, 0}, windows{2, 3}, windows{500, 0}}) {
                    for (const double share : {0.05, 0.31, 0.77, 1.0}) {
                        CAPTURE(ties, heads, n, fixed.sink, share);
                        const std::size_t certain = fixed.fixed_count(n);
                        const std::size_t floor = certain + (certain < n ? 1 : 0);
                        const budget kept = budget::fraction(share).at_least(floor);
                        const std::size_t total = total_rows(heads, n, kept);
                        const counts cut = global_budgets(table.view, kept, fixed);
                        CHECK(cut == by_sorting(table.view, total, fixed, 1));
                        CHECK(sum_of(cut) == total);
                        CHECK(*std::min_element(cut.begin(), cut.end()) >= floor);

                        CHECK(adaptive_budgets(table.view, kept, 0, adaptive_rule::floor, fixed) == cut);
                        CHECK(adaptive_budgets(table.view, kept, 0, adaptive_rule::mixture, fixed) == cut);
                        const std::size_t mean_rest = total / heads - certain;
                        for (const double alpha : {0.2, 0.5, 1.0}) {
                            const auto sure =
                                std::max<std::size_t>(1, static_cast<std::size_t>(alpha * double(mean_rest)));
                            const counts floored =
                                adaptive_budgets(table.view, kept, alpha, adaptive_rule::floor, fixed);
                            CHECK(floored == by_sorting(table.view, total, fixed, sure));
                            CHECK(sum_of(floored) == total);
                            const counts mixed =
                                adaptive_budgets(table.view, kept, alpha, adaptive_rule::mixture, fixed);
                            CHECK(sum_of(mixed) == total);
                            const double mean = double(total) / double(heads);
                            for (std::size_t h = 0; h < heads; ++h) {
                                CHECK(std::abs(double(mixed[h]) - ((1 - alpha) * double(cut[h]) + alpha * mean)) < 1);
                                CHECK(mixed[h] >= floor);
                                CHECK(mixed[h] <= n);
                            }
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("sample: a threshold above, or at least, and its ties") {
    const std::vector<float> data{5, 1, 1, 1, 0,  //
                                  3, 1, 1, 0, 0,  //
                                  0, 0, 0, 0, 0};
    const auto scores = matrix_of(std::span<const float>(data), 3, 5);
    // Five rows: 5, 3 and three of the five ones. The sixth is where it ties.
    CHECK(threshold_of(scores, budget::tokens(2)) == 1.0f);
    CHECK(threshold_budgets(scores, 1, passing::above) == counts{1, 1, 1});
    CHECK(threshold_budgets(scores, 1, passing::at_least) == counts{4, 3, 1});
    CHECK(threshold_budgets(scores, 1, passing::at_least, {0, 0}, 2) == counts{4, 3, 2});
    CHECK(global_budgets(scores, budget::tokens(2)) ==
          counts{4, 1, 1});  // ties to the lower head, one row for the last
    CHECK(global_budgets(scores, budget::tokens(5)) == counts{5, 5, 5});
    CHECK(threshold_of(scores, budget::tokens(5)) == 0.0f);
    // Fixed tokens are kept by index and compete with nobody.
    CHECK(threshold_budgets(scores, 1, passing::at_least, {1, 1}) == counts{5, 4, 3});
    CHECK(threshold_of(scores, budget::tokens(3), {1, 1}) == 1.0f);
    // Without ties: above keeps one less than the total, at_least the total.
    const score_table table(4, 300, 5, false);
    for (const std::size_t each : {70u, 299u}) {
        const float t = threshold_of(table.view, budget::tokens(each));
        CHECK(sum_of(threshold_budgets(table.view, t, passing::at_least)) == 4 * each);
        CHECK(sum_of(threshold_budgets(table.view, t, passing::above)) == 4 * each - 1);
    }
    using support::refused;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    CHECK(refused([&] { (void)threshold_budgets(scores, nan, passing::above); }, {"nan"}));
    CHECK(refused([&] { (void)threshold_of(scores, budget::tokens(5), {5, 0}); }, {"no free tokens", "3 heads of 5"}));
    std::vector<float> bad = data;
    bad[7] = nan;
    const auto poisoned = matrix_of(std::span<const float>(bad), 3, 5);
    CHECK(refused([&] { (void)global_budgets(poisoned, budget::tokens(2)); }, {"token 2 in head 1", "nan"}));
    CHECK(global_budgets(poisoned, budget::tokens(4), {3, 0}) == counts{4, 4, 4});  // a fixed token's is not looked at
    CHECK(refused(
        [&] {
            (void)global_budgets(scores, budget::tokens(2), {1, 1});
        },
        {"total of 6", "3 heads", "2 fixed and 1 free", "9"}));
    CHECK(refused([&] { (void)adaptive_budgets(scores, budget::tokens(2), 1.5); }, {"alpha is 1.5"}));
    CHECK(refused(
        [&] {
            (void)global_budgets(matrix_view<const float>{nullptr, 3, 5, 5}, budget::tokens(2));
        },
        {"null"}));
}

TEST_CASE("sample: a head of small scores keeps its share, and gets its rows back where it wins") {
    // Head 0 holds all large scores. One cut leaves head 1 a single row; AdaKV's share does not.
    std::vector<float> data(2 * 100);
    for (std::size_t i = 0; i < 100; ++i) {
        data[i] = 10 + static_cast<float>(i);
        data[100 + i] = static_cast<float>(i) / 100;
    }
    const auto scores = matrix_of(std::span<const float>(data), 2, 100);
    CHECK(global_budgets(scores, budget::tokens(20)) == counts{39, 1});
    CHECK(adaptive_budgets(scores, budget::tokens(20)) == counts{36, 4});
    CHECK(adaptive_budgets(scores, budget::tokens(20), 0.2, adaptive_rule::mixture) == counts{35, 5});
    CHECK(adaptive_budgets(scores, budget::tokens(20), 1) == counts{20, 20});
    CHECK(adaptive_budgets(scores, budget::tokens(20), 1, adaptive_rule::mixture) == counts{20, 20});
    CHECK(adaptive_budgets(scores, budget::fraction(0.2)) == counts{36, 4});
}

TEST_CASE("sample: uniform budgets") {
    CHECK(uniform_budgets(3, 100, budget::tokens(7)) == counts{7, 7, 7});
    CHECK(uniform_budgets(3, 7, budget::fraction(0.5)) == counts{4, 4, 3});  // 10.5 in all
    CHECK(uniform_budgets(2, 5, budget::tokens(9)) == counts{5, 5});
    CHECK(uniform_budgets(0, 5, budget::tokens(9)).empty());
    CHECK(uniform_budgets(2, 0, budget::tokens(9)) == counts{0, 0});
    CHECK(support::refused([] { (void)uniform_budgets(8, 10, budget::fraction(0.01)); }, {"total of 1", "8 heads"}));
    CHECK(budgets_of(counts{3, 4})[1].rows(100) == 4);
    CHECK(support::refused([] { (void)budgets_of(counts{3, 0}); }, {"0"}));
}

TEST_CASE("sample: a pyramid of layers") {
    // Mean 100, last 5, first 195.
    const counts c = pyramid_budgets(20, 10'000, budget::tokens(100));
    CHECK(c.front() == 195);
    CHECK(c.back() == 5);
    CHECK(sum_of(c) == 2000);
    CHECK(std::is_sorted(c.rbegin(), c.rend()));
    for (std::size_t l = 0; l < 20; ++l) {
        CHECK(std::abs(double(c[l]) - (195 - double(l) * 10)) < 1);
    }
    // The fixed tokens come on top, the first layer holds no more than there is.
    const counts fixed = pyramid_budgets(5, 150, budget::tokens(110), {4, 6});
    CHECK(fixed.front() == 150);
    CHECK(fixed.back() == 70);
    CHECK(sum_of(fixed) == 550);
    CHECK(pyramid_budgets(1, 1000, budget::tokens(30)) == counts{30});
    CHECK(pyramid_budgets(0, 1000, budget::tokens(30)).empty());
    CHECK(pyramid_budgets(3, 1000, budget::tokens(30), {0, 0}, 1) == counts{30, 30, 30});
    CHECK(pyramid_budgets(3, 10, budget::fraction(1)) == counts{10, 10, 10});
    // A tiny mean: nobody is left without a row.
    CHECK(pyramid_budgets(4, 1000, budget::tokens(2)) == counts{3, 2, 2, 1});
    for (const std::size_t layers : {2u, 3u, 7u, 32u}) {
        for (const std::size_t n : {1u, 9u, 333u}) {
            for (const double share : {0.01, 0.26, 0.9}) {
                for (const double beta : {1.0, 3.0, 20.0}) {
                    const budget kept = budget::fraction(share).at_least(1);
                    const counts p = pyramid_budgets(layers, n, kept, {0, 0}, beta);
                    CHECK(sum_of(p) == total_rows(layers, n, kept));
                    CHECK(*std::min_element(p.begin(), p.end()) >= 1);
                    CHECK(*std::max_element(p.begin(), p.end()) <= n);
                }
            }
        }
    }
    using support::refused;
    CHECK(refused(
        [] {
            (void)pyramid_budgets(4, 100, budget::tokens(5), {2, 3});
        },
        {"total of 20", "4 layers", "5 fixed", "24"}));
    CHECK(refused([] { (void)pyramid_budgets(4, 100, budget::tokens(5), {0, 0}, 0.5); }, {"beta 0.5"}));
}

TEST_CASE("sample: budgets by shares of the layers") {
    // 32 each and the rest of 400 - 128 = 272 by tenths: 27.2, 54.4, 81.6, 108.8.
    const std::vector<double> shares{0.1, 0.2, 0.3, 0.4};
    CHECK(shared_budgets(shares, 1000, budget::tokens(100)) == counts{59, 86, 114, 141});
    // The same shares unnormalised.
    const std::vector<double> tenfold{1, 2, 3, 4};
    CHECK(shared_budgets(tenfold, 1000, budget::tokens(100)) == counts{59, 86, 114, 141});
    // A limit of 1.2 means: 120; what the last two may not have goes to the others one by one, larger shares first.
    CHECK(shared_budgets(shares, 1000, budget::tokens(100), 32, 1.2) == counts{66, 94, 120, 120});
    // Rounding up too often is taken back from the smallest share first: of 36, 12.6, 12.6 and 10.8 make 13, 13, 11.
    const std::vector<double> halves{0.35, 0.35, 0.3};
    CHECK(shared_budgets(halves, 100, budget::tokens(13), 1) == counts{14, 14, 11});
    const std::vector<double> up{0.26, 0.26, 0.26, 0.22};  // of 10, 2.6, 2.6, 2.6, 2.2 make 3, 3, 3, 2: one too many
    CHECK(shared_budgets(up, 100, budget::fraction(0.035), 1) == counts{4, 4, 4, 2});
    const std::vector<double> one{0, 0, 1};
    CHECK(shared_budgets(one, 1000, budget::tokens(100)) == counts{32, 32, 236});
    CHECK(shared_budgets(one, 200, budget::tokens(100)) == counts{50, 50, 200});
    CHECK(shared_budgets(one, 100, budget::fraction(1)) == counts{100, 100, 100});
    std::mt19937_64 random(3);
    for (int run = 0; run < 200; ++run) {
        std::vector<double> s(1 + random() % 40);
        for (double& x : s) {
            x = static_cast<double>(random() % 5) * static_cast<double>(random() % 100);
        }
        s.front() += 1;
        const budget kept = budget::tokens(40 + random() % 300);
        const std::size_t n = 50 + random() % 1000;
        const counts c = shared_budgets(s, n, kept);
        const double mean = double(sum_of(c)) / double(s.size());
        CHECK(sum_of(c) == total_rows(s.size(), n, kept));
        CHECK(*std::min_element(c.begin(), c.end()) >= 32);
        CHECK(*std::max_element(c.begin(), c.end()) <=
              std::min<std::size_t>(n, static_cast<std::size_t>(3 * mean) + 1));
    }
    CHECK(shared_budgets({}, 100, budget::tokens(50)).empty());
    using support::refused;
    const std::vector<double> bad{1, -1};
    CHECK(refused([&] { (void)shared_budgets(bad, 100, budget::tokens(50)); }, {"layer 1 is -1"}));
    const std::vector<double> none{0, 0};
    CHECK(refused([&] { (void)shared_budgets(none, 100, budget::tokens(50)); }, {"sum to 0"}));
    CHECK(refused([&] { (void)shared_budgets(shares, 100, budget::tokens(20)); }, {"total of 80", "32", "128"}));
    CHECK(refused([&] { (void)shared_budgets(shares, 100, budget::tokens(50), 0); }, {"0 rows"}));
    CHECK(refused([&] { (void)shared_budgets(shares, 100, budget::tokens(50), 32, 0.5); }, {"0.5 times"}));
}
