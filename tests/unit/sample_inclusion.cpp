// Budgets, windows and inclusion probabilities: examples and refusals.
#include <cmath>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/sample/inclusion.hpp"

using namespace verkv;
using support::refused;

namespace {

using floats = std::vector<float>;
const windows no_windows{0, 0};
const float nan_value = std::numeric_limits<float>::quiet_NaN();

floats inclusion(const floats& tau, budget kept, windows fixed = no_windows, inclusion_summary* summary = nullptr) {
    floats r(tau.size(), -1.0f);
    const auto found = inclusion_probabilities(cpu{}, tau, kept, fixed, r);
    if (summary) {
        *summary = found;
    }
    return r;
}

// A budget of rows that need not be whole.
budget rows_of(double rows, std::size_t n) {
    return budget::fraction(rows / static_cast<double>(n));
}

double sum_of(const floats& r) {
    double sum = 0;
    for (const float x : r) {
        sum += static_cast<double>(x);
    }
    return sum;
}

void check_near(const floats& r, const std::vector<double>& expected, double absolute) {
    REQUIRE(r.size() == expected.size());
    for (std::size_t i = 0; i < r.size(); ++i) {
        INFO("token " << i);
        CHECK(std::abs(static_cast<double>(r[i]) - expected[i]) <= absolute);
    }
}

}  // namespace

TEST_CASE("sample: budgets") {
    CHECK(budget::fraction(0.25).rows(10) == 2.5);
    CHECK(budget::fraction(1).rows(7) == 7);
    CHECK(budget::fraction(1.0 / 16).rows(0) == 0);
    CHECK(budget::tokens(512).rows(8192) == 512);
    CHECK(budget::tokens(512).rows(100) == 100);
    for (const double bad : {0.0, -0.1, 1.0000001, std::nan(""), HUGE_VAL}) {
        CHECK(refused([&] { (void)budget::fraction(bad); }, {"(0, 1]"}));
    }
    CHECK(refused([&] { (void)budget::tokens(0); }, {"0 tokens"}));
}

TEST_CASE("sample: windows count a token once") {
    constexpr auto huge = std::numeric_limits<std::size_t>::max();
    struct example {
        windows fixed;
        std::size_t n, begin, end;
    };
    for (const auto& [fixed, n, begin, end] :
         {example{{0, 0}, 6, 0, 6}, example{{2, 0}, 6, 2, 6}, example{{1, 2}, 6, 1, 4}, example{{4, 4}, 6, 4, 4},
          example{{64, 64}, 6, 6, 6}, example{{0, 64}, 6, 0, 0}, example{{huge, huge}, 6, 6, 6},
          example{{3, 3}, 6, 3, 3}, example{{64, 64}, 0, 0, 0}, example{{64, 64}, 129, 64, 65}}) {
        CAPTURE(fixed.sink, fixed.local, n);
        CHECK(fixed.free_begin(n) == begin);
        CHECK(fixed.free_end(n) == end);
        CHECK(fixed.fixed_count(n) == n - (end - begin));
        std::size_t count = 0;
        for (std::size_t i = 0; i < n; ++i) {
            CHECK(fixed.fixed(i, n) == (i < fixed.sink || n - i <= fixed.local));
            count += fixed.fixed(i, n) ? 1 : 0;
        }
        CHECK(count == fixed.fixed_count(n));
    }
}

TEST_CASE("sample: windows and a budget below one token") {  // case O3, (d) and (e)
    const floats raw{0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f};
    for (const windows fixed : {windows{4, 4}, windows{}}) {
        inclusion_summary found;
        CHECK(inclusion(raw, budget::fraction(1), fixed, &found) == floats(6, 1.0f));
        CHECK(found.certain == 6);
        CHECK(found.expected_rows == 6);
        // No free token: a budget below the fixed ones has nothing to spread.
        CHECK(inclusion(raw, budget::fraction(1.0 / 32), fixed) == floats(6, 1.0f));
    }
    inclusion_summary found;
    const floats r = inclusion(raw, budget::fraction(1.0 / 32), no_windows, &found);
    CHECK(found.scale == Approx(0.0892857143).epsilon(1e-6));
    CHECK(found.certain == 0);
    const std::vector<double> expected{0.0089285714, 0.0178571429, 0.0267857143,
                                       0.0357142857, 0.0446428571, 0.0535714286};
    for (std::size_t i = 0; i < 6; ++i) {
        CHECK(r[i] == Approx(expected[i]).epsilon(1e-6));
    }
}

TEST_CASE("sample: cap and rescale") {  // case O4
    inclusion_summary found;
    const floats a{1, 1, 0.5f, 0.2f, 0.2f, 0.1f};
    floats r = inclusion(a, rows_of(4.4, 6), no_windows, &found);
    check_near(r, {1, 1, 1, 0.56, 0.56, 0.28}, 1e-6);
    CHECK((r[0] == 1.0f && r[1] == 1.0f && r[2] == 1.0f));
    CHECK(found.scale == Approx(2.8).epsilon(1e-6));
    CHECK(found.certain == 3);
    CHECK(std::abs(sum_of(r) - 4.4) <= 4.4e-6);
    CHECK(found.expected_rows == sum_of(r));

    CHECK(inclusion({0.2f, 0.4f, 0.1f}, budget::fraction(1), no_windows, &found) == floats(3, 1.0f));
    CHECK(found.certain == 3);
    CHECK(found.scale == Approx(10));

    r = inclusion({0.2f, 0.4f, 0.1f}, rows_of(0.3, 3), no_windows, &found);
    check_near(r, {0.0857142857, 0.1714285714, 0.0428571429}, 1e-7);
    CHECK(found.scale == Approx(0.4285714286).epsilon(1e-6));

    r = inclusion({1, 0.5f, 0, 0}, budget::tokens(3));
    CHECK((r[0] == 1.0f && r[1] == 1.0f));
    CHECK(r[2] == r[3]);
    CHECK(r[2] == Approx(0.5));

    floats scaled = a;
    for (float& x : scaled) {
        x *= 1e-6f;
    }
    r = inclusion(scaled, rows_of(4.4, 6), no_windows, &found);
    check_near(r, {1, 1, 1, 0.56, 0.56, 0.28}, 1e-6);
    CHECK(found.scale == Approx(2.8e6).epsilon(1e-6));
}

TEST_CASE("sample: a hair on either side of the cap") {
    // The largest of (1, 0.5, 0.5) reaches 1 at a budget of 2 rows.
    for (const double off : {-5e-5, -1e-6, 0.0, 1e-6, 5e-5}) {
        CAPTURE(off);
        const double rows = 2 + off;
        inclusion_summary found;
        const floats r = inclusion({1, 0.5f, 0.5f}, rows_of(rows, 3), no_windows, &found);
        const double expected = off < 0 ? rows / 4 : (rows - 1) / 2;
        check_near(r, {std::min(1.0, rows / 2), expected, expected}, 1e-7);
        CHECK(found.certain == (off < 0 ? 0 : 1));
        CHECK(std::abs(sum_of(r) - rows) <= 2e-7);
    }
}

TEST_CASE("sample: fixed tokens are outside the solve") {
    // A low score does not lose its place and a high one takes nothing from the others.
    const floats tau{0, 0.1f, 0.3f, 0.1f, 100};
    const floats r = inclusion(tau, budget::tokens(3), windows{1, 1});
    CHECK((r[0] == 1.0f && r[4] == 1.0f));
    check_near(r, {1, 0.2, 0.6, 0.2, 1}, 1e-6);
    // In place.
    floats same = tau;
    inclusion_probabilities(cpu{}, same, budget::tokens(3), windows{1, 1}, same);
    CHECK(same == r);
}

TEST_CASE("sample: ends of the range") {
    inclusion_summary found;
    CHECK(inclusion({}, budget::fraction(0.1), windows{}, &found).empty());
    CHECK((found.scale == 0 && found.expected_rows == 0 && found.certain == 0));
    CHECK(inclusion({0}, budget::fraction(0.25)) == floats{0.25f});
    CHECK(inclusion({0}, budget::tokens(5)) == floats{1});
    // No importance at all: all are equal.
    CHECK(inclusion(floats(8, 0.0f), budget::tokens(2)) == floats(8, 0.25f));
    // All equal, whole budgets.
    for (std::size_t k = 1; k <= 7; ++k) {
        const floats r = inclusion(floats(7, 0.3f), budget::tokens(k));
        CHECK(std::abs(sum_of(r) - static_cast<double>(k)) < 1e-6);
        CHECK(std::adjacent_find(r.begin(), r.end(), std::not_equal_to<>{}) == r.end());
    }
    // A budget of one row less than all, and a hair less than all.
    CHECK(inclusion({1, 1, 1, 1e-3f}, budget::tokens(3), no_windows, &found)[3] < 1e-2f);
    const floats hair = inclusion({1, 2, 3}, rows_of(3 - 1e-12, 3));
    CHECK(std::abs(sum_of(hair) - 3) < 1e-6);
    // Subnormal and huge importance.
    const float tiny = std::numeric_limits<float>::denorm_min();
    check_near(inclusion({tiny, 2 * tiny, tiny}, budget::tokens(1)), {0.25, 0.5, 0.25}, 1e-7);
    const float most = std::numeric_limits<float>::max();
    check_near(inclusion({most, most, most, most}, budget::tokens(1)), {0.25, 0.25, 0.25, 0.25}, 1e-7);
    const floats wide = inclusion({most, tiny, 0}, budget::tokens(1));
    CHECK((wide[0] > 0.999f && wide[1] > 0 && wide[1] == wide[2]));
}

TEST_CASE("sample: refusals leave r as it was") {
    floats r(200, 0.5f);
    const auto refuse = [&](const floats& tau, budget kept, windows fixed, std::initializer_list<std::string> parts) {
        const bool ok = refused([&] { inclusion_probabilities(cpu{}, tau, kept, fixed, r); }, parts);
        return ok && r == floats(200, 0.5f);
    };
    floats tau(200, 0.5f);
    // 128 fixed tokens use up all of 100 and of 128 rows; 72 free ones need more than 72e-6.
    CHECK(refuse(tau, budget::tokens(100), windows{}, {"100 rows", "leaves 0", "72 free", "7.2"}));
    CHECK(refuse(tau, budget::tokens(128), windows{}, {"128 rows", "leaves 0"}));
    CHECK(refuse(tau, rows_of(128.00007, 200), windows{}, {"72 free"}));
    CHECK(inclusion(tau, rows_of(128.001, 200), windows{})[100] == Approx(0.001 / 72).epsilon(1e-4));
    CHECK(refuse(floats(199, 0.5f), budget::tokens(150), windows{}, {"199", "200"}));
    for (const float bad : {-1e-30f, -1.0f, nan_value, std::numeric_limits<float>::infinity()}) {
        for (const std::size_t where : {0u, 100u, 199u}) {
            tau[where] = bad;
            CHECK(refuse(tau, budget::tokens(150), windows{}, {"token " + std::to_string(where)}));
            tau[where] = 0.5f;
        }
    }
}

TEST_CASE("sample: in place, or apart, or refused") {
    const std::vector<float> importance{1, 2, 3, 4, 5, 6};
    std::vector<float> expected(6);
    verkv::inclusion_probabilities(cpu{}, importance, budget::tokens(3), {1, 1}, expected);
    std::vector<float> odds(6);
    verkv::inclusion_odds(cpu{}, expected, odds);

    std::vector<float> memory = importance;
    memory.resize(12, 7.0f);
    const std::span<float> all(memory);
    const auto before = memory;
    for (std::size_t at = 1; at <= 5; ++at) {
        CHECK(refused(
            [&] {
                verkv::inclusion_probabilities(cpu{}, all.first(6), budget::tokens(3), {1, 1}, all.subspan(at, 6));
            },
            {"6 importances", "overlap"}));
        CHECK(refused(
            [&] {
                verkv::inclusion_probabilities(cpu{}, all.subspan(at, 6), budget::tokens(3), {1, 1}, all.first(6));
            },
            {"6 importances", "overlap"}));
        CHECK(refused([&] { verkv::inclusion_odds(cpu{}, all.first(6), all.subspan(at, 6)); },
                      {"6 probabilities", "overlap"}));
    }
    CHECK(memory == before);
    verkv::inclusion_probabilities(cpu{}, all.first(6), budget::tokens(3), {1, 1}, all.last(6));
    CHECK(std::equal(expected.begin(), expected.end(), memory.begin() + 6));
    verkv::inclusion_probabilities(cpu{}, all.first(6), budget::tokens(3), {1, 1}, all.first(6));
    CHECK(std::equal(expected.begin(), expected.end(), memory.begin()));
    verkv::inclusion_odds(cpu{}, all.first(6), all.first(6));
    CHECK(std::equal(odds.begin(), odds.end(), memory.begin()));
}

TEST_CASE("sample: odds") {
    CHECK(inclusion_odds(1.0f) == 0.0);
    CHECK(inclusion_odds(0.5f) == 1.0);
    CHECK(inclusion_odds(0.25f) == 3.0);
    const float below_one = std::nextafter(1.0f, 0.0f);
    const floats r{1, 0.5f, below_one, 0x1p-126f, 1e-12f};
    floats odds(5, -1.0f);
    inclusion_odds(cpu{}, r, odds);
    CHECK(odds[0] == 0.0f);
    CHECK(odds[1] == 1.0f);
    CHECK(odds[2] == Approx(0x1p-24).epsilon(1e-6));
    CHECK(odds[3] == 0x1p126f);
    CHECK(odds[4] == Approx(1e12).epsilon(1e-6));
    const floats before = odds;
    for (const float bad : {0.0f, -0.5f, nan_value, 1.0000001f, 1e-39f}) {
        CHECK(refused([&] { inclusion_odds(cpu{}, floats{1, 0.5f, 1, bad, 1}, odds); }, {"token 3"}));
    }
    CHECK(refused([&] { inclusion_odds(cpu{}, floats{1}, odds); }, {"1 ", "5 "}));
    CHECK(odds == before);
}
