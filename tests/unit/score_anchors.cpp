// Anchor coverage and span boundaries against plain double sums.
#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/valued_prompt.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/anchor_coverage.hpp"
#include "verkv/score/span_boundary.hpp"

using namespace verkv;

namespace {

using doubles = std::vector<double>;
using tokens = std::vector<token_index>;
const float nan_value = std::numeric_limits<float>::quiet_NaN();

template <class T>
using entropy_prompt = prompt_with<T, token_entropy>;
static_assert(scorer<anchor_coverage, cpu, half> && scorer<span_boundary, cpu, bfloat16>);
static_assert(scorer<entropy_boundary, cpu, entropy_prompt<half>> && !scorer<entropy_boundary, cpu, half>);

template <class T>
std::vector<doubles> keys_of(const prompt<T>& p, std::size_t kv) {
    std::vector<doubles> k(p.tokens(), doubles(p.shape.key_dim));
    for (std::size_t i = 0; i < k.size(); ++i) {
        for (std::size_t c = 0; c < k[i].size(); ++c) {
            k[i][c] = support::value_of(p.keys[kv][i][c]);
        }
    }
    return k;
}

void centre(std::vector<doubles>& k) {
    const auto n = static_cast<double>(k.size());
    for (std::size_t c = 0; !k.empty() && c < k[0].size(); ++c) {
        double mean = 0;
        for (const auto& row : k) {
            mean += row[c] / n;
        }
        for (auto& row : k) {
            row[c] -= mean;
        }
    }
}

double dot(const doubles& a, const doubles& b) {
    double sum = 0;
    for (std::size_t c = 0; c < a.size(); ++c) {
        sum += a[c] * b[c];
    }
    return sum;
}

double left_by(const doubles& k, const doubles& anchor) {
    const double s = dot(anchor, anchor) > 0 ? dot(k, anchor) / dot(anchor, anchor) : 0.0;
    double square = 0;
    for (std::size_t c = 0; c < k.size(); ++c) {
        square += (k[c] - s * anchor[c]) * (k[c] - s * anchor[c]);
    }
    return std::sqrt(square);
}

doubles coverage_in_double(const std::vector<doubles>& k, const tokens& anchors) {
    doubles out;
    for (std::size_t i = 0; i < k.size(); ++i) {
        double best = std::sqrt(dot(k[i], k[i]));
        const double length = best;
        for (const token_index a : anchors) {
            best = std::min(best, left_by(k[i], k[a]));
        }
        const bool is_anchor = std::find(anchors.begin(), anchors.end(), i) != anchors.end();
        out.push_back(length == 0 ? 0.0 : is_anchor ? 1.0 : best / length);
    }
    return out;
}

tokens farthest_in_double(const std::vector<doubles>& k, std::size_t count) {
    tokens anchors;
    while (anchors.size() < count) {
        double most = 0;
        std::size_t next = k.size();
        for (std::size_t i = 0; i < k.size(); ++i) {
            double left = std::sqrt(dot(k[i], k[i]));
            for (const token_index a : anchors) {
                left = i == a ? 0.0 : std::min(left, left_by(k[i], k[a]));
            }
            if (left > most) {
                most = left;
                next = i;
            }
        }
        if (next == k.size()) {
            break;
        }
        anchors.push_back(static_cast<token_index>(next));
    }
    return anchors;
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

TEMPLATE_TEST_CASE("anchor coverage: agrees with the best multiple of an anchor in double", "", float, half, bfloat16) {
    for (const std::size_t d : {5u, 32u}) {
        for (const bool centred : {true, false}) {
            const valued_prompt<TestType> owner({2, 2, d, 4, 0}, positions_from(0, 600), {}, 5,
                                                d == 5 ? layout::listed : layout::strided);
            auto k = keys_of(owner.view(), 1);
            if (centred) {
                centre(k);
            }
            for (const std::size_t count : {1u, 7u, 40u}) {
                CAPTURE(d, centred, count);
                check_close(scores(anchor_coverage{count, centred}, owner.view(), 1),
                            coverage_in_double(k, farthest_in_double(k, count)), 1e-5, 1e-6);
            }
            const tokens given{500, 3, 77};
            check_close(scores(anchor_coverage{0, centred, given}, owner.view(), 1), coverage_in_double(k, given), 1e-5,
                        1e-6);
        }
    }
}

TEST_CASE("anchor coverage: multiples of anchors are covered, others are not") {
    // Three directions and multiples of them, negative ones too; one token apart; one without length.
    valued_prompt<float> owner({1, 1, 6, 4, 0}, positions_from(0, 32), {}, 5);
    for (std::size_t i = 0; i < 32; ++i) {
        std::fill_n(owner.key(0, i), 6, 0.0f);
        owner.key(0, i)[i % 3] = (i % 2 ? -1.0f : 1.0f) * static_cast<float>(i + 1);
    }
    std::fill_n(owner.key(0, 20), 6, 0.0f);
    std::fill_n(owner.key(0, 21), 6, 0.5f);
    const auto s = scores(anchor_coverage{3, false}, owner.view());
    for (std::size_t i = 0; i < 32; ++i) {
        CAPTURE(i);
        if (i >= 29) {
            CHECK(s[i] == 1.0f);  // the longest of each direction are the anchors
        } else if (i == 21) {
            CHECK(s[i] == Approx(std::sqrt(5.0 / 6)));
        } else {
            CHECK(s[i] < 1e-7f);
        }
    }
    // Anchors end where nothing is left: the fourth is token 21, and no other remains.
    const auto t = scores(anchor_coverage{30, false}, owner.view());
    CHECK(std::count(t.begin(), t.end(), 1.0f) == 4);
    CHECK(t[21] == 1.0f);
    CHECK(t[20] == 0.0f);
}

TEST_CASE("anchor coverage: what is not finite stays in its place; huge and tiny keys") {
    valued_prompt<float> owner({1, 1, 8, 4, 0}, positions_from(0, 80), {}, 5);
    const auto before = scores(anchor_coverage{10}, owner.view());
    for (const float size : {1e30f, 1e-20f}) {
        valued_prompt<float> scaled({1, 1, 8, 4, 0}, positions_from(0, 80), {}, 5);
        for (std::size_t i = 0; i < 80; ++i) {
            for (std::size_t c = 0; c < 8; ++c) {
                scaled.key(0, i)[c] *= size;
            }
        }
        check_close(scores(anchor_coverage{10}, scaled.view()), doubles(before.begin(), before.end()), 1e-4, 1e-6);
    }
    owner.key(0, 40)[2] = nan_value;
    owner.key(0, 41)[3] = std::numeric_limits<float>::infinity();
    const auto s = scores(anchor_coverage{10}, owner.view());
    for (std::size_t i = 0; i < 80; ++i) {
        CHECK(std::isnan(s[i]) == (i == 40 || i == 41));
    }
    for (const int n : {0, 1, 2}) {
        const valued_prompt<half> few({1, 1, 8, 4, 0}, positions_from(0, n), {}, 5);
        // One key is its own mean; two lie on a line through it.
        const auto c = scores(anchor_coverage{64, true}, few.view());
        CHECK(c.size() == static_cast<std::size_t>(n));
        if (n == 1) {
            CHECK(c[0] == 0);
        }
        if (n == 2) {
            CHECK(std::max(c[0], c[1]) == 1.0f);
            CHECK(std::min(c[0], c[1]) < 1e-6f);
        }
    }
}

TEST_CASE("span boundaries: agrees with windows in double") {
    for (const auto pairing : {rope_pairing::half, rope_pairing::interleaved}) {
        const valued_prompt<float> owner({2, 2, 12, 4, 0}, positions_from(4, 1304, 1), {}, 5, layout::listed);
        const auto p = owner.view();
        rope r = rope::plain(12, 500, pairing);
        auto k = keys_of(p, 1);
        for (std::size_t i = 0; i < k.size(); ++i) {
            for (std::size_t j = 0; j < 6; ++j) {
                const std::size_t a = pairing == rope_pairing::half ? j : 2 * j;
                const std::size_t b = pairing == rope_pairing::half ? j + 6 : 2 * j + 1;
                const auto turned =
                    std::complex<double>(k[i][a], k[i][b]) * std::polar(1.0, -r.frequencies[j] * p.positions[i]);
                k[i][a] = turned.real();
                k[i][b] = turned.imag();
            }
        }
        centre(k);
        for (const std::size_t reach : {1u, 3u, 16u, 700u, 5000u}) {
            CAPTURE(reach);
            doubles expected{1.0};
            for (std::size_t i = 1; i < k.size(); ++i) {
                doubles before(12);
                doubles after(12);
                for (std::size_t j = i - std::min(i, reach); j < std::min(k.size(), i + reach); ++j) {
                    for (std::size_t c = 0; c < 12; ++c) {
                        (j < i ? before : after)[c] += k[j][c];
                    }
                }
                expected.push_back((1 - dot(before, after) / std::sqrt(dot(before, before) * dot(after, after))) / 2);
            }
            check_close(scores(span_boundary{r, reach}, p, 1), expected, 0, 1e-6);
        }
    }
}

TEST_CASE("span boundaries: where keys turn, and nothing else") {
    // Three topics of 100 tokens, with noise.
    valued_prompt<half> owner({1, 1, 16, 4, 0}, positions_from(0, 300), {}, 5);
    support::generator g(2);
    for (std::size_t i = 0; i < 300; ++i) {
        for (std::size_t c = 0; c < 16; ++c) {
            owner.key(0, i)[c] = from_float<half>(static_cast<float>((c == i / 100 ? 3.0 : 0.0) + 0.3 * g.normal()));
        }
    }
    const auto s = scores(span_boundary{}, owner.view());
    CHECK(s[0] == 1);
    for (const std::size_t i : {100u, 200u}) {
        CHECK(s[i] > 0.6f);
        CHECK(s[i] > 4 * s[i - 50]);
        CHECK(s[i] > 4 * s[i + 50]);
    }
    // Keys that are all alike do not turn.
    for (std::size_t i = 0; i < 300; ++i) {
        std::fill_n(owner.key(0, i), 16, from_float<half>(0.5f));
    }
    const auto even = scores(span_boundary{}, owner.view());
    CHECK(std::count(even.begin() + 1, even.end(), 0.0f) == 299);
}

TEST_CASE("span boundaries: a bad or a huge key leaves no trace beyond its windows") {
    valued_prompt<float> owner({1, 1, 8, 4, 0}, positions_from(0, 200), {}, 5);
    const auto before = scores(span_boundary{{}, 4}, owner.view());
    owner.key(0, 100)[2] = nan_value;
    const auto s = scores(span_boundary{{}, 4}, owner.view());
    for (std::size_t i = 0; i < 200; ++i) {
        CHECK(std::isnan(s[i]) == (i == 100));
        if (i < 96 || i > 104) {
            CHECK(std::abs(s[i] - before[i]) < 0.2f);  // the mean has moved by a two hundredth
        }
    }
    // Two opposite keys of 1e14: the mean stays, and so do the scores of those that do not see them.
    std::fill_n(owner.key(0, 100), 8, 0.0f);
    const auto small_ones = scores(span_boundary{{}, 4}, owner.view());
    owner.key(0, 100)[1] = 1e12f;
    owner.key(0, 101)[1] = -1e12f;
    const float held = owner.key(0, 101)[1];
    REQUIRE(held == -1e12f);
    const auto large = scores(span_boundary{{}, 4}, owner.view());
    for (std::size_t i = 0; i < 200; ++i) {
        CAPTURE(i);
        if (i < 97 || i > 105) {
            CHECK(std::abs(large[i] - small_ones[i]) < 0.05f);
        }
    }
}

TEST_CASE("entropy boundaries: rises over the largest one") {
    const valued_prompt<float> owner({2, 2, 8, 4, 0}, positions_from(0, 6), {}, 5);
    const std::vector<float> entropy{2, 1, 3, 2.5f, 3.5f, 3.5f};
    const entropy_prompt<float> p{owner.view(), {entropy}};
    CHECK(scores(entropy_boundary{}, p, 1) == std::vector<float>{1, 0, 1, 0, 0.5f, 0});
    const std::vector<float> falling{3, 2, 2, 1, 0, 0};
    CHECK(scores(entropy_boundary{}, entropy_prompt<float>{owner.view(), {falling}}) ==
          std::vector<float>{1, 0, 0, 0, 0, 0});
    const valued_prompt<float> none({1, 1, 8, 4, 0}, {}, {}, 5);
    CHECK(scores(entropy_boundary{}, entropy_prompt<float>{none.view(), {}}).empty());
}

TEST_CASE("anchors and boundaries: layout and threads change no bit") {
    const auto positions = positions_from(0, 1300);
    const valued_prompt<float> a({2, 2, 20, 4, 0}, positions, {}, 9, layout::dense);
    const valued_prompt<float> b({2, 2, 20, 4, 0}, positions, {}, 9, layout::listed);
    thread_pool pool(3);
    CHECK(scores(anchor_coverage{}, a.view(), 1) == scores(anchor_coverage{}, b.view(), 1, cpu{&pool}));
    const span_boundary s{rope::plain(20), 30};
    CHECK(scores(s, a.view(), 1) == scores(s, b.view(), 1, cpu{&pool}));
}

TEST_CASE("anchors and boundaries: refusals name their numbers and change nothing") {
    valued_prompt<float> owner({1, 1, 8, 4, 0}, positions_from(0, 10), {}, 5);
    owner.key(0, 4)[0] = nan_value;
    std::vector<float> out(10, 3.0f);
    const auto refused = [&](const auto& s, const auto& p, std::initializer_list<std::string> parts) {
        const bool is = support::refused([&] { s.score(cpu{}, p, 0, std::span<float>(out)); }, parts);
        return is && out == std::vector<float>(10, 3.0f);
    };
    const auto p = owner.view();
    CHECK(refused(anchor_coverage{0}, p, {"at least one"}));
    const tokens beyond{1, 10};
    CHECK(refused(anchor_coverage{5, true, beyond}, p, {"token 10", "10"}));
    const tokens bad{1, 4};
    CHECK(refused(anchor_coverage{5, true, bad}, p, {"token 4", "finite"}));
    CHECK(refused(span_boundary{{}, 0}, p, {"reach 0"}));
    CHECK(refused(span_boundary{rope::plain(10)}, p, {"5 frequencies", "8"}));
    const std::vector<float> nine(9);
    CHECK(refused(entropy_boundary{}, entropy_prompt<float>{p, {nine}}, {"9", "10"}));
    std::vector<float> negative(10);
    negative[7] = -0.5f;
    CHECK(refused(entropy_boundary{}, entropy_prompt<float>{p, {negative}}, {"token 7", "-0.5"}));
}
