// Leverage, attention in chunks, and Compactor against plain double sums.
#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>

#include "support/catch.hpp"
#include "support/dense_solve.hpp"
#include "support/refusal.hpp"
#include "support/valued_prompt.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/compactor.hpp"

using namespace verkv;

namespace {

using doubles = std::vector<double>;
const float nan_value = std::numeric_limits<float>::quiet_NaN();

template <class S>
constexpr bool scores_all_types = scorer<S, cpu, float>&& scorer<S, cpu, half>&& scorer<S, cpu, bfloat16>;
static_assert(scores_all_types<leverage_score> && scores_all_types<non_causal_attention> &&
              scores_all_types<compactor>);

// A key turned back: by complex numbers.
template <class T>
doubles plain_key(const prompt<T>& p, std::size_t kv, std::size_t i, const rope& r) {
    doubles k(p.shape.key_dim);
    for (std::size_t c = 0; c < k.size(); ++c) {
        k[c] = support::value_of(p.keys[kv][i][c]);
    }
    const std::size_t pairs = r.frequencies.size();
    for (std::size_t j = 0; j < pairs; ++j) {
        const std::size_t a = r.pairing == rope_pairing::half ? j : 2 * j;
        const std::size_t b = r.pairing == rope_pairing::half ? j + pairs : 2 * j + 1;
        const std::complex<double> turned =
            std::complex<double>(k[a], k[b]) * std::polar(1 / r.magnitude, -r.frequencies[j] * p.positions[i]);
        k[a] = turned.real();
        k[b] = turned.imag();
    }
    return k;
}

template <class T>
doubles leverage_in_double(const prompt<T>& p, std::size_t kv, const rope& r, std::span<const float> phi,
                           std::size_t width, double jitter, std::size_t first, std::size_t last) {
    const std::size_t d = p.shape.key_dim;
    const std::size_t n = last - first;
    std::vector<doubles> x;
    doubles mean(d);
    for (std::size_t i = first; i < last; ++i) {
        x.push_back(plain_key(p, kv, i, r));
        for (std::size_t c = 0; c < d; ++c) {
            mean[c] += x.back()[c] / static_cast<double>(n);
        }
    }
    std::vector<doubles> y(n, doubles(width));
    for (std::size_t i = 0; i < n; ++i) {
        for (std::size_t j = 0; j < width; ++j) {
            for (std::size_t c = 0; c < d; ++c) {
                y[i][j] += (x[i][c] - mean[c]) * static_cast<double>(phi[c * width + j]);
            }
        }
    }
    std::vector<doubles> gram(width, doubles(width));
    for (std::size_t a = 0; a < width; ++a) {
        gram[a][a] = jitter;
        for (std::size_t b = 0; b < width; ++b) {
            for (std::size_t i = 0; i < n; ++i) {
                gram[a][b] += y[i][a] * y[i][b];
            }
        }
    }
    doubles out(n);
    for (std::size_t i = 0; i < n; ++i) {
        const doubles z = support::solve_in_double(gram, y[i]);
        for (std::size_t j = 0; j < width; ++j) {
            out[i] += y[i][j] * z[j];
        }
    }
    return out;
}

// Tokens first ... last-1 alone, chunks from `first` on; before pooling. `padded`: the last chunk as kvpress had it,
// the padding's keys not masked and its queries counted.
template <class T>
doubles columns_in_double(const prompt<T>& p, std::size_t kv, std::size_t first, std::size_t last, std::size_t chunk,
                          double scale, bool padded = false) {
    const std::size_t group = p.shape.group();
    doubles out(last - first);
    for (std::size_t start = first; start < last; start += chunk) {
        const std::size_t end = std::min(start + chunk, last);
        doubles sum(end - start);
        std::size_t rows_seen = 0;
        for (std::size_t j = 0; j < p.query_positions.size(); ++j) {
            std::size_t owner = p.tokens();  // the last token at or before the query
            for (std::size_t i = 0; i < p.tokens(); ++i) {
                owner = p.positions[i] <= p.query_positions[j] ? i : owner;
            }
            if (owner < start || owner >= end) {
                continue;
            }
            ++rows_seen;
            for (std::size_t h = kv * group; h < (kv + 1) * group; ++h) {
                doubles w(end - start);
                double total = padded ? static_cast<double>(start + chunk - end) : 0.0;
                for (std::size_t i = start; i < end; ++i) {
                    double logit = 0;
                    for (std::size_t c = 0; c < p.shape.key_dim; ++c) {
                        logit += support::value_of(p.queries.row(j, h)[c]) * support::value_of(p.keys[kv][i][c]);
                    }
                    w[i - start] = std::exp(scale * logit);
                    total += w[i - start];
                }
                for (std::size_t i = 0; i < w.size(); ++i) {
                    sum[i] += w[i] / total;
                }
            }
        }
        for (std::size_t i = 0; i < sum.size(); ++i) {
            const auto tokens = static_cast<double>(end - start);
            out[start - first + i] =
                rows_seen == 0
                    ? 1.0
                    : sum[i] / static_cast<double>(group) * tokens / static_cast<double>(rows_seen) +
                          (padded ? static_cast<double>(start + chunk - end) / static_cast<double>(chunk) : 0.0);
        }
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
        double square = 0;
        for (std::size_t c = 0; c < p.shape.value_dim; ++c) {
            const double v = support::value_of(p.values[kv][first + i][c]);
            square += v * v;
        }
        out[i] *= std::sqrt(square);
    }
    return out;
}

doubles pooled_in_double(const doubles& x, std::size_t width) {
    doubles out(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
        for (std::size_t j = 0; j < x.size(); ++j) {
            const std::size_t gap = i > j ? i - j : j - i;
            out[i] += gap <= width / 2 ? x[j] / static_cast<double>(width) : 0.0;
        }
    }
    return out;
}

doubles z_in_double(doubles x) {
    double mean = 0;
    for (const double v : x) {
        mean += v / static_cast<double>(x.size());
    }
    double square = 0;
    for (const double v : x) {
        square += (v - mean) * (v - mean) / static_cast<double>(x.size() - 1);
    }
    for (double& v : x) {
        v = (v - mean) / std::sqrt(square);
    }
    return x;
}

void check_close(std::span<const float> got, const doubles& expected, double relative, double absolute = 0) {
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
        INFO("token " << i << ": " << got[i] << ", expected " << expected[i]);
        REQUIRE(std::abs(static_cast<double>(got[i]) - expected[i]) <= relative * std::abs(expected[i]) + absolute);
    }
}

std::vector<float> floats_of(std::size_t count, std::uint64_t seed) {
    return support::generator(seed).normals<float>(count, 0.2);
}

template <class S, class T>
std::vector<float> scores(const S& s, const prompt<T>& p, std::size_t kv_head = 0, const cpu& exec = {}) {
    std::vector<float> out(p.tokens(), -7.0f);
    s.score(exec, p, kv_head, std::span<float>(out));
    return out;
}

}  // namespace

TEMPLATE_TEST_CASE("leverage: agrees with double sums and Gaussian elimination", "", float, half, bfloat16) {
    for (const std::size_t d : {10u, 24u}) {
        for (const std::size_t width : {1u, 7u, 16u}) {
            for (const auto pairing : {rope_pairing::half, rope_pairing::interleaved}) {
                const valued_prompt<TestType> owner({2, 2, d, 4, 0}, positions_from(5, 1100, 2), {}, 3,
                                                    d == 10 ? layout::listed : layout::strided);
                const auto p = owner.view();
                const auto phi = floats_of(d * width, 9);
                rope r = rope::plain(d, 1000, pairing);
                r.magnitude = 1.25;
                if (d == 24) {
                    r.frequencies.resize(8);  // the last channels do not turn
                }
                // Wider than the keys: Y^T Y has no inverse, and only the jitter gives it one.
                const double jitter = width > d ? 10 : 0.01;
                check_close(scores(leverage_score{r, width, 0, jitter, phi}, p, 1),
                            leverage_in_double(p, 1, r, phi, width, jitter, 0, p.tokens()), 1e-6);
            }
        }
    }
}

TEST_CASE("leverage: keys without rotation are taken as they are") {
    const valued_prompt<float> owner({1, 1, 12, 4, 0}, positions_from(0, 90), {}, 5);
    const auto phi = floats_of(12 * 6, 2);
    check_close(scores(leverage_score{{}, 6, 0, 0.01, phi}, owner.view()),
                leverage_in_double(owner.view(), 0, {}, phi, 6, 0.01, 0, 90), 1e-6);
}

TEST_CASE("leverage: between 0 and 1, with a sum of at most sketch_dim") {
    const valued_prompt<float> owner({1, 1, 64, 4, 0}, positions_from(0, 700), {}, 6);
    const auto l = scores(leverage_score{rope::plain(64)}, owner.view());
    double sum = 0;
    for (const float x : l) {
        CHECK((x >= 0 && x <= 1));
        sum += static_cast<double>(x);
    }
    // Full rank, many tokens, a small jitter: the sum is sketch_dim but for the jitter's share.
    CHECK(sum <= 48);
    CHECK(sum > 47.9);
    // One token of each direction alone: everything is an outlier.
    const valued_prompt<float> few({1, 1, 64, 4, 0}, positions_from(0, 10), {}, 6);
    const auto high = scores(leverage_score{rope::plain(64)}, few.view());
    sum = 0;
    for (const float x : high) {
        CHECK((x > 0.7f && x <= 1));
        sum += static_cast<double>(x);
    }
    CHECK(sum <= 9.0001);  // the mean takes one dimension
}

TEST_CASE("leverage: the generated projection is Gaussian, one for each seed and head") {
    const auto phi = detail::scoring::gaussian_projection(1, 0, 128, 48);
    double mean = 0;
    double square = 0;
    double fourth = 0;
    double neighbours = 0;
    for (std::size_t i = 0; i < phi.size(); ++i) {
        const double x = phi[i] * std::sqrt(48.0);
        mean += x / 6144;
        square += x * x / 6144;
        fourth += x * x * x * x / 6144;
        neighbours += i > 0 ? x * phi[i - 1] * std::sqrt(48.0) / 6144 : 0.0;
    }
    // 4.5 standard deviations each; fixed seed.
    CHECK(std::abs(mean) < 4.5 / std::sqrt(6144.0));
    CHECK(std::abs(square - 1) < 4.5 * std::sqrt(2 / 6144.0));
    CHECK(std::abs(fourth - 3) < 4.5 * std::sqrt(96 / 6144.0));
    CHECK(std::abs(neighbours) < 4.5 / std::sqrt(6144.0));
    CHECK(phi != detail::scoring::gaussian_projection(1, 1, 128, 48));
    CHECK(phi != detail::scoring::gaussian_projection(2, 0, 128, 48));
    CHECK(detail::scoring::gaussian_projection(1, 0, 3, 3).size() == 9);

    const valued_prompt<float> owner({2, 2, 32, 4, 0}, positions_from(0, 300), {}, 7);
    const auto made = detail::scoring::gaussian_projection(8, 1, 32, 20);
    const std::vector<float> given(made.begin(), made.end());
    const auto expected = scores(leverage_score{rope::plain(32), 20, 8, 0.01, given}, owner.view(), 1);
    check_close(scores(leverage_score{rope::plain(32), 20, 8}, owner.view(), 1),
                doubles(expected.begin(), expected.end()), 1e-4);
}

TEST_CASE("leverage: does not see where a text starts, nor what all keys share") {
    // The same keys before RoPE, turned at other positions, and moved by a constant.
    constexpr std::size_t d = 16;
    constexpr std::size_t n = 120;
    const rope r = rope::plain(d);
    support::generator g(4);
    const auto plain = g.normals<float>(n * d);
    const auto rotated = [&](int offset, double shift) {
        std::vector<float> out(n * d);
        for (std::size_t i = 0; i < n; ++i) {
            for (std::size_t j = 0; j < d / 2; ++j) {
                const std::complex<double> turned =
                    std::complex<double>(static_cast<double>(plain[i * d + j]) + shift,
                                         static_cast<double>(plain[i * d + j + d / 2]) - 2 * shift) *
                    std::polar(1.0, r.frequencies[j] * (static_cast<double>(i) + offset));
                out[i * d + j] = static_cast<float>(turned.real());
                out[i * d + j + d / 2] = static_cast<float>(turned.imag());
            }
        }
        return out;
    };
    const auto leverage_at = [&](int offset, double shift) {
        const auto keys = rotated(offset, shift);
        const auto rows_of = contiguous_rows(std::span<const float>(keys), d);
        const auto positions = positions_from(offset, offset + static_cast<int>(n));
        prompt<float> p;
        p.shape = {1, 1, d, d, 0};
        p.keys = p.values = {&rows_of, 1};
        p.positions = positions;
        return scores(leverage_score{r, 12}, p);
    };
    const auto here = leverage_at(0, 0);
    const doubles expected(here.begin(), here.end());
    check_close(leverage_at(100000, 0), expected, 2e-5);
    check_close(leverage_at(7, 5), expected, 2e-5);
    // Without turning back it would not be so.
    const auto keys = rotated(1000, 0);
    const auto rows_of = contiguous_rows(std::span<const float>(keys), d);
    const auto positions = positions_from(1000, 1120);
    prompt<float> p;
    p.shape = {1, 1, d, d, 0};
    p.keys = p.values = {&rows_of, 1};
    p.positions = positions;
    const auto other = scores(leverage_score{{}, 12}, p);
    double apart = 0;
    for (std::size_t i = 0; i < n; ++i) {
        apart = std::max(apart, std::abs(static_cast<double>(other[i]) - expected[i]));
    }
    CHECK(apart > 0.02);
}

TEST_CASE("leverage: a key that is not finite spoils its own score alone") {
    for (const float bad : {nan_value, std::numeric_limits<float>::infinity()}) {
        valued_prompt<float> owner({1, 1, 16, 4, 0}, positions_from(0, 200), {}, 8);
        owner.key(0, 150)[3] = bad;
        const auto p = owner.view();
        const leverage_score s{rope::plain(16), 8};
        const auto l = scores(s, p);
        CHECK(std::isnan(l[150]));
        // As if the token were not there.
        std::vector<row_id> ids;
        std::vector<position_t> positions;
        for (row_id i = 0; i < 200; ++i) {
            if (i != 150) {
                ids.push_back(i);
                positions.push_back(static_cast<position_t>(i));
            }
        }
        rows<float> rest = p.keys[0];
        rest.ids = ids.data();
        rest.count = ids.size();
        prompt<float> without = p;
        without.keys = {&rest, 1};
        rows<float> values = p.values[0];
        values.count = ids.size();
        without.values = {&values, 1};
        without.positions = positions;
        const auto expected = scores(s, without);
        for (std::size_t i = 0; i < expected.size(); ++i) {
            CHECK(l[ids[i]] == Approx(expected[i]).epsilon(1e-6));
        }
    }
}

TEST_CASE("leverage: huge and tiny keys") {
    for (const float size : {1e30f, 1e-30f, 1e-3f, 1e4f}) {
        CAPTURE(size);
        valued_prompt<float> owner({1, 1, 16, 4, 0}, positions_from(0, 64), {}, 8);
        for (std::size_t i = 0; i < 64; ++i) {
            for (std::size_t c = 0; c < 16; ++c) {
                owner.key(0, i)[c] *= size;
            }
        }
        // sketch_dim above key_dim: only the jitter makes Y^T Y invertible.
        for (const float x : scores(leverage_score{rope::plain(16), 24}, owner.view())) {
            CHECK((x >= 0 && x <= 1));
        }
    }
}

TEMPLATE_TEST_CASE("non-causal attention: agrees with double sums", "", float, half) {
    for (const std::size_t group : {1u, 3u, 5u}) {
        for (const std::size_t chunk : {1u, 7u, 64u, 100u, 1000u}) {
            for (const int step : {1, 4, 29}) {
                CAPTURE(group, chunk, step);
                const valued_prompt<TestType> owner({2 * group, 2, 20, 6, group == 3 ? 0.5f : 0.0f},
                                                    positions_from(3, 203), positions_from(3, 203, step),
                                                    static_cast<unsigned>(group),
                                                    group == 5 ? layout::listed : layout::strided);
                const auto p = owner.view();
                const auto expected = pooled_in_double(
                    columns_in_double(p, 1, 0, 200, chunk, static_cast<double>(p.shape.logit_scale())), 3);
                // Logits of at most 20 * 4 * 0.5 in size.
                check_close(scores(non_causal_attention{chunk}, p, 1), expected, 40 * 0x1p-21);
            }
        }
    }
}

TEST_CASE("non-causal attention: tiles of queries, and queries between tokens") {
    // Several tiles of 64 queries in a chunk.
    const valued_prompt<float> owner({1, 1, 16, 4, 0}, positions_from(0, 400), positions_from(0, 400), 3);
    check_close(scores(non_causal_attention{300, 5}, owner.view()),
                pooled_in_double(columns_in_double(owner.view(), 0, 0, 400, 300, 0.25), 5), 1e-5);
    // Tokens at 10, 13, ...: a query at 12 belongs to the token at 10; those at 8 and 9 to none, 31 to the last.
    const valued_prompt<float> gaps({1, 1, 16, 4, 0}, positions_from(10, 31, 3), {8, 9, 12, 15, 16, 24, 28, 31}, 4);
    check_close(scores(non_causal_attention{2, 1}, gaps.view()), columns_in_double(gaps.view(), 0, 0, 7, 2, 0.25),
                1e-5);
}

TEST_CASE("non-causal attention: logits are scaled, padding is none") {
    // What kvpress computes, and why it differs: logits not divided by sqrt(d), and, up to 0.4, a last chunk whose
    // padding takes part.
    const valued_prompt<float> owner({2, 1, 64, 8, 0}, positions_from(0, 150), positions_from(0, 150), 5);
    const auto p = owner.view();
    const auto ours = scores(non_causal_attention{64, 1}, p);
    check_close(ours, columns_in_double(p, 0, 0, 150, 64, 0.125), 1e-5);
    const auto unscaled = columns_in_double(p, 0, 0, 150, 64, 1);
    check_close(scores(non_causal_attention{64, 1, 1.0f}, p), unscaled, 1e-4, 1e-30);
    std::size_t other = 0;
    for (std::size_t i = 0; i < 150; ++i) {
        other += std::abs(static_cast<double>(ours[i]) - unscaled[i]) > 0.5 * static_cast<double>(ours[i]);
    }
    CHECK(other > 40);
    const auto padded = columns_in_double(p, 0, 0, 150, 64, 0.125, true);
    other = 0;
    for (std::size_t i = 0; i < 150; ++i) {
        const double apart = std::abs(static_cast<double>(ours[i]) / padded[i] - 1);
        CHECK((i >= 128 || apart < 1e-5));
        other += apart > 0.05;
    }
    CHECK(other > 15);
}

TEST_CASE("non-causal attention: a sample of queries stands for all, none for even attention") {
    // Without pooling and with values of length 1 the scores of a chunk sum to its tokens, whatever was kept.
    valued_prompt<float> owner({3, 1, 16, 1, 0}, positions_from(0, 100), {2, 3, 11, 50, 51, 52, 53, 99}, 6);
    for (std::size_t i = 0; i < 100; ++i) {
        *owner.value(0, i) = i % 2 ? 1.0f : -1.0f;
    }
    const auto a = scores(non_causal_attention{20, 1}, owner.view());
    for (std::size_t first = 0; first < 100; first += 20) {
        double sum = 0;
        for (std::size_t i = first; i < first + 20; ++i) {
            sum += static_cast<double>(a[i]);
            CHECK((a[i] == 1.0f) == (first == 20 || first == 60));
        }
        CHECK(sum == Approx(20).epsilon(1e-5));
    }
}

TEST_CASE("non-causal attention: what is not finite stays in its place") {
    valued_prompt<float> owner({2, 1, 16, 4, 0}, positions_from(0, 100), positions_from(0, 100), 7);
    const auto before = scores(non_causal_attention{50, 1}, owner.view());
    owner.key(0, 20)[5] = nan_value;
    owner.key(0, 21)[0] = std::numeric_limits<float>::infinity();
    *owner.value(0, 70) = nan_value;
    const auto a = scores(non_causal_attention{50, 1}, owner.view());
    for (std::size_t i = 0; i < 100; ++i) {
        CAPTURE(i);
        CHECK(std::isnan(a[i]) == (i == 20 || i == 21 || i == 70));
        if (i >= 50 && i != 70) {
            CHECK(a[i] == before[i]);
        } else if (i != 20 && i != 21 && i != 70) {
            CHECK(a[i] > before[i]);  // two keys fewer share the attention
        }
    }
    // A chunk of nothing sound.
    CHECK(std::isnan(scores(non_causal_attention{1, 1}, owner.view())[20]));
    // Huge values have a norm.
    for (float* v = owner.value(0, 3); v != owner.value(0, 3) + 4; ++v) {
        *v = 1e30f;
    }
    CHECK(std::isfinite(scores(non_causal_attention{50, 1}, owner.view())[3]));
}

TEMPLATE_TEST_CASE("compactor: z-scores of a head's tokens between the protected ones", "", float, bfloat16) {
    constexpr std::size_t d = 24;
    constexpr std::size_t n = 170;
    const valued_prompt<TestType> owner({6, 2, d, 10, 0}, positions_from(2, 2 + 2 * 170, 2), positions_from(2, 342, 2),
                                        9);
    const auto p = owner.view();
    const auto phi = floats_of(d * 16, 3);
    const rope r = rope::plain(d);
    compactor s{{r, 16, 0, 0.01, phi}, {64}, 0.5f};
    const auto leverage = z_in_double(leverage_in_double(p, 1, r, phi, 16, 0.01, 8, n - 4));
    const auto attention = z_in_double(
        pooled_in_double(columns_in_double(p, 1, 8, n - 4, 64, static_cast<double>(p.shape.logit_scale())), 3));
    doubles expected(n);
    double top = -1e300;
    for (std::size_t i = 8; i < n - 4; ++i) {
        expected[i] = 0.5 * leverage[i - 8] + attention[i - 8];
        top = std::max(top, expected[i]);
    }
    for (const std::size_t i : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u, 166u, 167u, 168u, 169u}) {
        expected[i] = top + 1;
    }
    check_close(scores(s, p, 1), expected, 0, 1e-4);
    // What another head holds changes nothing.
    valued_prompt<TestType> changed({6, 2, d, 10, 0}, positions_from(2, 342, 2), positions_from(2, 342, 2), 9);
    for (std::size_t i = 0; i < n; ++i) {
        changed.value(0, i)[0] = from_float<TestType>(100);
        changed.key(0, i)[0] = from_float<TestType>(5);
    }
    CHECK(scores(s, p, 1) == scores(s, changed.view(), 1));
    CHECK(scores(s, p, 0) != scores(s, changed.view(), 0));
}

TEST_CASE("compactor: short prompts, protected tokens and NaN") {
    for (const int n : {0, 1, 8, 11, 12}) {
        const valued_prompt<float> owner({1, 1, 8, 4, 0}, positions_from(0, n), {}, 1);
        CHECK(scores(compactor{}, owner.view()) == std::vector<float>(static_cast<std::size_t>(n), 1.0f));
    }
    // One token between: no deviation, both z-scores 0.
    const valued_prompt<float> one({1, 1, 8, 4, 0}, positions_from(0, 13), positions_from(0, 13), 1);
    const auto s = scores(compactor{}, one.view());
    for (std::size_t i = 0; i < 13; ++i) {
        CHECK(s[i] == (i == 8 ? 0.0f : 1.0f));
    }
    valued_prompt<float> spoilt({1, 1, 8, 4, 0}, positions_from(0, 60), positions_from(0, 60), 1);
    spoilt.key(0, 30)[0] = nan_value;
    const auto t = scores(compactor{}, spoilt.view());
    for (std::size_t i = 0; i < 60; ++i) {
        CHECK(std::isnan(t[i]) == (i >= 29 && i <= 31));  // pooling takes it to its neighbours
    }
    CHECK(t[0] == *std::max_element(t.begin(), t.begin() + 29));
    compactor open{};
    open.sink = open.local = 0;
    const auto u = scores(open, one.view());
    double sum = 0;
    for (const float x : u) {
        sum += static_cast<double>(x);
    }
    CHECK(std::abs(sum) < 1e-5);
}

TEST_CASE("compactor: layout and threads change no bit") {
    const auto positions = positions_from(0, 1300);
    const auto queries = positions_from(0, 1300, 3);
    const geometry shape{6, 2, 40, 12, 0};
    const valued_prompt<float> a(shape, positions, queries, 11, layout::dense);
    const valued_prompt<float> b(shape, positions, queries, 11, layout::listed);
    thread_pool pool(3);
    const compactor s{{rope::plain(40)}, {}};
    CHECK(scores(s, a.view(), 1) == scores(s, b.view(), 1, cpu{&pool}));
    CHECK(scores(s, a.view(), 1) != scores(s, a.view(), 0));
}

TEST_CASE("compactor: refusals name their numbers and change nothing") {
    const valued_prompt<float> owner({2, 2, 8, 4, 0}, positions_from(0, 20), {}, 1);
    const auto p = owner.view();
    std::vector<float> out(20, 3.0f);
    const auto refused = [&](const auto& s, std::initializer_list<std::string> parts) {
        const bool is = support::refused([&] { s.score(cpu{}, p, 0, std::span<float>(out)); }, parts);
        return is && out == std::vector<float>(20, 3.0f);
    };
    CHECK(refused(leverage_score{{}, 0}, {"sketch_dim"}));
    CHECK(refused(leverage_score{{}, std::size_t{1} << 40}, {"1099511627776", "8"}));
    CHECK(refused(leverage_score{{}, 5, 0, 0.0}, {"jitter 0"}));
    const std::vector<float> phi(39);
    CHECK(refused(leverage_score{{}, 5, 0, 1, phi}, {"39", "8 * 5"}));
    const std::vector<float> spoilt{1, 2, 3, 4, 5, 6, 7, nan_value};
    CHECK(refused(leverage_score{{}, 1, 0, 1, spoilt}, {"element 7", "nan"}));
    CHECK(refused(leverage_score{rope::plain(10)}, {"5 frequencies", "8"}));
    CHECK(refused(non_causal_attention{}, {"20", "none"}));
    CHECK(refused(non_causal_attention{0}, {"chunks of 0"}));
    CHECK(refused(non_causal_attention{5, 2}, {"2"}));
    CHECK(refused(non_causal_attention{5, 3, -1.0f}, {"scale -1"}));
    CHECK(refused(compactor{}, {"kept queries", "8 tokens"}));
    compactor c{};
    c.blending = nan_value;
    CHECK(refused(c, {"nan"}));
    CHECK(support::refused([&] { leverage_score{}.score(cpu{}, p, 2, std::span<float>(out)); }, {"2"}));
    CHECK(support::refused([&] { compactor{}.score(cpu{}, p, 0, std::span<float>(out).first(3)); }, {"20", "3"}));
}
