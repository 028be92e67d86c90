// The low-rank sketch against a slow one in doubles with eigenvectors by Jacobi's rotations; what it refuses.
#include "verkv/sketch/low_rank.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/allocations.hpp"
#include "support/bounded_estimates.hpp"
#include "support/catch.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/thread_pool.hpp"

namespace {

using namespace support;
using verkv::bfloat16;
using verkv::coefficient_format;
using verkv::cpu;
using verkv::half;
using verkv::low_rank_options;
using verkv::low_rank_sketch;
using verkv::rows;

static_assert(verkv::bounded_sketch<low_rank_sketch, cpu, float>);
static_assert(verkv::bounded_sketch<low_rank_sketch, cpu, half>);
static_assert(verkv::bounded_sketch<low_rank_sketch, cpu, bfloat16>);
static_assert(verkv::erasable_sketch<low_rank_sketch>);

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr coefficient_format formats[] = {coefficient_format::float32, coefficient_format::float16,
                                          coefficient_format::int8};

template <class T>
low_rank_sketch sketch_of(const low_rank_options& o, const std::vector<T>& keys) {
    low_rank_sketch s(o);
    s.fit(cpu{}, rows_of(keys, o.key_dim));
    s.append(cpu{}, rows_of(keys, o.key_dim));
    return s;
}

using matrix = std::vector<std::vector<double>>;

/// Eigenvectors (rows) of a symmetric matrix by cyclic rotations, by falling eigenvalue.
matrix jacobi(matrix a) {
    const std::size_t d = a.size();
    matrix v(d, std::vector<double>(d));
    for (std::size_t i = 0; i < d; ++i) {
        v[i][i] = 1;
    }
    for (int sweep = 0; sweep < 60; ++sweep) {
        double off = 0;
        for (std::size_t p = 0; p < d; ++p) {
            for (std::size_t q = p + 1; q < d; ++q) {
                off += a[p][q] * a[p][q];
                if (a[p][q] == 0) {
                    continue;
                }
                const double theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
                const double t = (theta < 0 ? -1 : 1) / (std::abs(theta) + std::sqrt(theta * theta + 1));
                const double c = 1 / std::sqrt(t * t + 1), s = t * c;
                for (std::size_t k = 0; k < d; ++k) {
                    const double x = a[k][p], y = a[k][q];
                    a[k][p] = c * x - s * y;
                    a[k][q] = s * x + c * y;
                }
                for (std::size_t k = 0; k < d; ++k) {
                    const double x = a[p][k], y = a[q][k];
                    a[p][k] = c * x - s * y;
                    a[q][k] = s * x + c * y;
                    const double e = v[p][k], f = v[q][k];
                    v[p][k] = c * e - s * f;
                    v[q][k] = s * e + c * f;
                }
            }
        }
        if (off < 1e-30) {
            break;
        }
    }
    std::vector<std::size_t> order(d);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) { return a[x][x] > a[y][y]; });
    matrix sorted;
    for (const std::size_t i : order) {
        sorted.push_back(v[i]);
    }
    return sorted;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

/// Keys with a mean and variances 4^-j along random directions j, so that eigenvectors are well apart.
template <class T>
std::vector<T> graded_keys(dice& d, std::size_t n, std::size_t width, std::size_t directions) {
    matrix along;
    for (std::size_t j = 0; j < directions; ++j) {
        std::vector<double> x(width);
        for (double& value : x) {
            value = d.normal() / std::sqrt(static_cast<double>(width)) * 8 * std::pow(0.5, static_cast<double>(j));
        }
        along.push_back(x);
    }
    std::vector<T> keys;
    for (std::size_t i = 0; i < n; ++i) {
        std::vector<double> k(width);
        for (std::size_t c = 0; c < width; ++c) {
            k[c] = 2 * std::sin(static_cast<double>(c)) + 0.01 * d.normal();
        }
        for (const auto& x : along) {
            const double share = d.normal();
            for (std::size_t c = 0; c < width; ++c) {
                k[c] += share * x[c];
            }
        }
        for (const double x : k) {
            keys.push_back(verkv::from_float<T>(static_cast<float>(x)));
        }
    }
    return keys;
}

template <class T>
void check_against_doubles(dice& d, std::size_t width, std::size_t rank, coefficient_format format, std::size_t n,
                           std::size_t heads) {
    CAPTURE(width, rank, static_cast<int>(format), n, heads, sizeof(T));
    const auto keys = graded_keys<T>(d, n, width, (std::min)(width, std::size_t{5}));
    const auto queries = normal_floats(d, heads * width);
    const auto scale = static_cast<float>(d.between(-0.3, 0.3));
    const low_rank_sketch s = sketch_of(low_rank_options{width, rank, format}, keys);
    REQUIRE(s.size() == n);
    const auto e = estimates_of(s, queries, scale);

    std::vector<double> mean(width);
    for (std::size_t i = 0; i < n * width; ++i) {
        mean[i % width] += static_cast<double>(verkv::to_float(keys[i])) / static_cast<double>(n);
    }
    matrix gram(width, std::vector<double>(width));
    for (std::size_t i = 0; i < n; ++i) {
        for (std::size_t a = 0; a < width; ++a) {
            for (std::size_t b = 0; b < width; ++b) {
                gram[a][b] += static_cast<double>(verkv::to_float(keys[i * width + a])) *
                              static_cast<double>(verkv::to_float(keys[i * width + b]));
            }
        }
    }
    const matrix basis = jacobi(gram);
    double worst = 0, least = 1e300, most = 0;
    for (std::size_t h = 0; h < heads; ++h) {
        const std::vector<double> q(queries.begin() + static_cast<std::ptrdiff_t>(h * width),
                                    queries.begin() + static_cast<std::ptrdiff_t>((h + 1) * width));
        double beside = dot(q, q), inner = 0;
        for (std::size_t r = 0; r < rank; ++r) {
            beside -= dot(q, basis[r]) * dot(q, basis[r]);
            inner += dot(q, basis[r]) * dot(q, basis[r]);
        }
        for (std::size_t i = 0; i < n; ++i) {
            std::vector<double> k(width);
            for (std::size_t c = 0; c < width; ++c) {
                k[c] = static_cast<double>(verkv::to_float(keys[i * width + c])) - mean[c];
            }
            double estimate = dot(q, mean), left = dot(k, k), largest = 0, square = 0;
            for (std::size_t r = 0; r < rank; ++r) {
                const double a = dot(basis[r], k);
                estimate += dot(q, basis[r]) * a;
                left -= a * a;
                largest = (std::max)(largest, std::abs(a));
                square += a * a;
            }
            const auto factor = std::abs(static_cast<double>(scale));
            // What storing may take from the coefficients, in all.
            const double off = (format == coefficient_format::int8      ? largest / 254 * std::sqrt(double(rank))
                                : format == coefficient_format::float16 ? 0x1p-11 * std::sqrt(square)
                                                                        : 0) +
                               2e-5 * std::sqrt(square);
            const double tolerance = factor * (off * std::sqrt(inner) + 1e-5 * std::sqrt(dot(q, q)));
            worst = (std::max)(
                worst, std::abs(static_cast<double>(e.logits[h * n + i]) - static_cast<double>(scale) * estimate) /
                           (tolerance + 1e-7 * std::abs(estimate)));
            left = (std::max)(left, 0.0);
            beside = (std::max)(beside, 0.0);
            const auto bound = static_cast<double>(e.bounds[h * n + i]);
            least = (std::min)(least, bound - factor * std::sqrt(beside * left) + tolerance);
            most = (std::max)(most, bound / (factor * std::sqrt(beside * (left + off * off)) + 2 * tolerance));
        }
    }
    CHECK(worst <= 1);
    CHECK(least >= 0);
    CHECK(most <= 1.00001);
}

TEST_CASE("low rank: estimates and bounds are those of a slow sketch in doubles") {
    dice d(61);
    for (const std::size_t width : {1u, 2u, 7u, 16u, 33u}) {
        for (const std::size_t rank : {1u, 3u, 5u}) {
            for (const coefficient_format format : formats) {
                if (rank <= width) {
                    check_against_doubles<float>(d, width, rank, format, 60 + d.below(90), 1 + d.below(9));
                    check_against_doubles<half>(d, width, rank, format, 60 + d.below(90), 4);
                    check_against_doubles<bfloat16>(d, width, rank, format, 60 + d.below(90), 3);
                }
            }
        }
    }
    check_against_doubles<float>(d, 64, 4, coefficient_format::int8, 200, 12);
}

TEST_CASE("low rank: with all directions and floats the logit is exact up to rounding") {
    dice d(62);
    for (const std::size_t width : {1u, 5u, 64u, 130u, 300u}) {
        const auto keys = normal_floats(d, 40 * width);
        const auto queries = normal_floats(d, 2 * width);
        const low_rank_sketch s = sketch_of(low_rank_options{width, width, coefficient_format::float32}, keys);
        const auto e = estimates_of(s, queries);
        double worst = 0;
        float widest = 0;
        for (std::size_t at = 0; at < e.logits.size(); ++at) {
            double logit = 0;
            for (std::size_t c = 0; c < width; ++c) {
                logit +=
                    static_cast<double>(keys[at % 40 * width + c]) * static_cast<double>(queries[at / 40 * width + c]);
            }
            worst = (std::max)(worst, std::abs(logit - static_cast<double>(e.logits[at])));
            widest = (std::max)(widest, e.bounds[at]);
        }
        CHECK(worst <= static_cast<double>(widest));
        CHECK(static_cast<double>(widest) < 1e-6 * static_cast<double>(width * (width + 8)));
    }
}

TEST_CASE("low rank: a basis that is given is used, whatever spans it") {
    dice d(63);
    const auto keys = normal_floats(d, 50 * 6);
    const auto queries = normal_floats(d, 3 * 6);
    const low_rank_options o{6, 2, coefficient_format::float32};
    const std::vector<float> axes = {1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0};
    const std::vector<float> skewed = {1e-20f, 0, 0, 1e-20f, 0, 0, 300, 0, 0, -100, 0, 0};
    low_rank_sketch s(o, rows_of(axes, 6));
    CHECK(s.basis()[0] == 1);
    CHECK(s.basis()[s.padded_channels() + 3] == 1);
    s.fit(cpu{}, rows_of(keys, 6));
    s.append(cpu{}, rows_of(keys, 6));
    low_rank_sketch t(o, rows_of(skewed, 6));
    t.fit(cpu{}, rows_of(keys, 6));
    t.append(cpu{}, rows_of(keys, 6));
    const auto e = estimates_of(s, queries), f = estimates_of(t, queries);
    for (std::size_t at = 0; at < e.logits.size(); ++at) {
        const std::size_t h = at / 50, i = at % 50;
        double logit = 0, left = 0, beside = 0;
        for (std::size_t c = 0; c < 6; ++c) {
            const double m = static_cast<double>(s.mean()[c]);
            const double k = static_cast<double>(keys[i * 6 + c]) - m;
            const double q = static_cast<double>(queries[h * 6 + c]);
            const bool in = c == 0 || c == 3;
            logit += q * (in ? k + m : m);
            left += in ? 0 : k * k;
            beside += in ? 0 : q * q;
        }
        CHECK(static_cast<double>(e.logits[at]) == Approx(logit).margin(1e-5));
        CHECK(static_cast<double>(f.logits[at]) == Approx(logit).margin(1e-5));
        CHECK(static_cast<double>(e.bounds[at]) == Approx(std::sqrt(left * beside)).epsilon(1e-4).margin(1e-5));
    }
    CHECK(refused([&] { low_rank_sketch(o, rows_of(axes, 12)); }, {"[1, 12]", "rank 2", "6"}));
    const std::vector<float> twice = {1, 2, 3, 4, 5, 6, 3, 6, 9, 12, 15, 18};
    CHECK(refused([&] { low_rank_sketch(o, rows_of(twice, 6)); }, {"2 rows", "1 directions"}));
    std::vector<float> bad = axes;
    bad[7] = infinity;
    CHECK(refused([&] { low_rank_sketch(o, rows_of(bad, 6)); }, {"row 1", "not finite"}));
}

TEST_CASE("low rank: a matrix whose eigenvectors cannot be found gives the largest channels") {
    Eigen::MatrixXd m = Eigen::MatrixXd::Zero(4, 4);
    m(0, 0) = 1;
    m(1, 1) = 3;
    m(2, 2) = std::numeric_limits<double>::quiet_NaN();
    m(3, 3) = 2;
    const auto rows = verkv::detail::principal_directions(m, 2);
    CHECK(rows == std::vector<double>{0, 1, 0, 0, 0, 0, 0, 1});
}

TEST_CASE("low rank: tokens give the same bits however they arrive, on one thread or many") {
    dice d(64);
    for (int round = 0; round < 40; ++round) {
        const std::size_t width = 1 + d.below(40);
        const low_rank_options o{width, 1 + d.below(width), formats[d.below(3)]};
        const std::size_t n = 1 + d.below(70);
        const auto keys = normal_floats(d, n * width);
        const auto queries = normal_floats(d, 3 * width);
        const auto whole = estimates_of(sketch_of(o, keys), queries);
        low_rank_sketch s(o);
        s.fit(cpu{}, rows_of(keys, width));
        for (std::size_t first = 0; first < n;) {
            const std::size_t count = (std::min)(n - first, d.below(20));
            s.append(cpu{}, rows_of(keys, width).slice(first, count));
            first += count;
        }
        REQUIRE(estimates_of(s, queries) == whole);
    }
    const auto keys = normal_floats(d, 5000 * 20);
    const auto queries = normal_floats(d, 11 * 20);
    const low_rank_sketch s = sketch_of(low_rank_options{20, 7}, keys);
    verkv::thread_pool pool(3);
    CHECK(estimates_of(s, queries, 0.1f, cpu{&pool}) == estimates_of(s, queries, 0.1f));
    for (std::size_t h = 0; h < 11; ++h) {
        const std::vector<float> one(queries.begin() + static_cast<std::ptrdiff_t>(h * 20),
                                     queries.begin() + static_cast<std::ptrdiff_t>((h + 1) * 20));
        const auto alone = estimates_of(s, one), all = estimates_of(s, queries);
        CHECK(std::equal(alone.logits.begin(), alone.logits.end(),
                         all.logits.begin() + static_cast<std::ptrdiff_t>(h * 5000)));
    }
}

TEST_CASE("low rank: keys may lie apart, in any order") {
    dice d(65);
    const auto keys = normal_floats(d, 30 * 9);
    const std::vector<verkv::row_id> ids = {7, 3, 29, 3, 0};
    std::vector<float> copied;
    for (const verkv::row_id id : ids) {
        copied.insert(copied.end(), keys.begin() + static_cast<std::ptrdiff_t>(id * 9 + 2),
                      keys.begin() + static_cast<std::ptrdiff_t>(id * 9 + 7));
    }
    const rows<float> listed{keys.data() + 2, 9, 5, 5, ids.data()};
    low_rank_sketch s(low_rank_options{5, 2});
    s.fit(cpu{}, listed);
    s.append(cpu{}, listed);
    const auto query = normal_floats(d, 5);
    CHECK(estimates_of(s, query) == estimates_of(sketch_of(low_rank_options{5, 2}, copied), query));
}

TEST_CASE("low rank: erasing leaves the others' bits, and appending goes on behind them") {
    dice d(66);
    for (const coefficient_format format : formats) {
        const low_rank_options o{11, 6, format};
        const auto keys = normal_floats(d, 50 * 11);
        const auto queries = normal_floats(d, 11);
        const auto before = estimates_of(sketch_of(o, keys), queries);
        for (int round = 0; round < 25; ++round) {
            low_rank_sketch s = sketch_of(o, keys);
            std::vector<std::size_t> left(50);
            std::iota(left.begin(), left.end(), std::size_t{0});
            while (!left.empty()) {
                const std::size_t first = d.below(left.size() + 1);
                const std::size_t last = first + d.below(left.size() + 1 - first);
                s.erase(first, last);
                left.erase(left.begin() + static_cast<std::ptrdiff_t>(first),
                           left.begin() + static_cast<std::ptrdiff_t>(last));
                if (d.chance(0.3)) {
                    const std::size_t again = d.below(50);
                    s.append(cpu{}, rows_of(keys, 11).slice(again, 1));
                    left.push_back(again);
                }
                const auto after = estimates_of(s, queries);
                REQUIRE(after.logits.size() == left.size());
                for (std::size_t i = 0; i < left.size(); ++i) {
                    REQUIRE(after.logits[i] == before.logits[left[i]]);
                    REQUIRE(after.bounds[i] == before.bounds[left[i]]);
                }
            }
            CHECK(s.bytes() == 0);
        }
    }
}

TEST_CASE("low rank: a NaN or infinite element spoils its own token and nothing else") {
    dice d(67);
    const auto clean = normal_floats(d, 22 * 5);
    const auto query = normal_floats(d, 5);
    for (const coefficient_format format : formats) {
        const low_rank_options o{5, 3, format};
        for (const float bad : {not_a_number, infinity, -infinity}) {
            for (const std::size_t token : {0u, 9u, 21u}) {
                auto keys = clean;
                keys[token * 5 + 2] = bad;
                auto others = clean;
                others.erase(others.begin() + static_cast<std::ptrdiff_t>(token * 5),
                             others.begin() + static_cast<std::ptrdiff_t>(token * 5 + 5));
                const low_rank_sketch s = sketch_of(o, keys);
                low_rank_sketch t(o);
                t.fit(cpu{}, rows_of(others, 5));
                t.append(cpu{}, rows_of(clean, 5));
                const auto e = estimates_of(s, query), expected = estimates_of(t, query);
                for (std::size_t i = 0; i < 22; ++i) {
                    if (i == token) {
                        CHECK(std::isnan(e.logits[i]));
                        CHECK(e.bounds[i] == infinity);
                    } else {
                        CHECK(e.logits[i] == expected.logits[i]);
                        CHECK(e.bounds[i] == expected.bounds[i]);
                    }
                }
            }
        }
        const low_rank_sketch s = sketch_of(o, clean);
        for (const float bad : {not_a_number, infinity}) {
            for (const float bound : estimates_of(s, {bad, 1, 1, 1, 1}).bounds) {
                CHECK(bound == infinity);
            }
        }
        low_rank_sketch none(o);
        none.fit(cpu{}, rows<float>{nullptr, 5, 0, 5, nullptr});
        none.append(cpu{}, rows_of(clean, 5));
        CHECK(estimates_of(none, query).logits.size() == 22);
    }
}

TEST_CASE("low rank: coefficients beyond a half are clamped, and the bound knows") {
    const std::vector<float> keys = {2e5f, 1, -2e5f, -1};
    const low_rank_sketch s = sketch_of(low_rank_options{2, 1, coefficient_format::float16}, keys);
    const auto e = estimates_of(s, {1, 0});
    CHECK(std::abs(e.logits[0]) == Approx(65504).epsilon(1e-3));
    CHECK(std::abs(e.logits[0] - 2e5f) <= e.bounds[0]);
    CHECK(e.bounds[0] < 1.4e5f);
}

TEST_CASE("low rank: sizes, and memory within what was reserved") {
    dice d(68);
    const auto keys = normal_floats(d, 50 * 6);
    const auto queries = normal_floats(d, 5 * 6);
    for (const coefficient_format format : formats) {
        low_rank_sketch s(low_rank_options{6, 5, format});
        CHECK(s.basis().empty());
        s.fit(cpu{}, rows_of(keys, 6));
        CHECK((s.size() == 0 && s.bytes() == 0));
        s.reserve(50);
        std::vector<float> logits(5 * 50), bounds(5 * 50);
        CHECK(support::allocations_of([&] {
                  for (std::size_t i = 0; i < 50; ++i) {
                      s.append(cpu{}, rows_of(keys, 6).slice(i, 1));
                  }
                  s.estimate(cpu{}, rows_of(queries, 6), 1, {logits.data(), 5, 50, 50}, {bounds.data(), 5, 50, 50});
                  s.erase(3, 20);
              }) == 0);
        CHECK(s.size() == 33);
        const std::size_t token = format == coefficient_format::float32 ? 28u
                                  : format == coefficient_format::int8  ? 20u
                                                                        : 18u;
        CHECK(s.bytes() == 33 * token);
        CHECK(s.basis_bytes() == 6 * 6 * 4);
        CHECK(s.bound_failure() == 0);
        s.fit(cpu{}, rows_of(keys, 6));
        CHECK(s.size() == 0);
        s.append(cpu{}, rows_of(keys, 6));
        CHECK(estimates_of(s, queries) == estimates_of(sketch_of(s.options(), keys), queries));
    }
    CHECK(low_rank_sketch(low_rank_options{128}).bytes_per_token() == 44);
    CHECK(low_rank_sketch(low_rank_options{128, 32, coefficient_format::float16}).bytes_per_token() == 72);
}

TEST_CASE("low rank: what is refused") {
    const std::vector<float> keys(4 * 6);
    CHECK(refused([] { low_rank_sketch(low_rank_options{0, 1}); }, {"0 channels"}));
    CHECK(refused([] { low_rank_sketch(low_rank_options{1025, 1}); }, {"1025"}));
    CHECK(refused([] { low_rank_sketch(low_rank_options{8, 0}); }, {"rank 0"}));
    CHECK(refused([] { low_rank_sketch(low_rank_options{8, 9}); }, {"rank 9", "8 channels"}));
    CHECK(refused([] { low_rank_sketch(low_rank_options{8, 2, static_cast<coefficient_format>(7)}); }, {"7"}));
    low_rank_sketch fresh(low_rank_options{6, 2});
    CHECK(refused<verkv::invalid_state>([&] { fresh.append(cpu{}, rows_of(keys, 6)); }, {"4 tokens", "before fit()"}));
    low_rank_sketch s = sketch_of(low_rank_options{6, 2}, keys);
    CHECK(refused([&] { s.fit(cpu{}, rows_of(keys, 3)); }, {"3 channels", "6"}));
    CHECK(refused([&] { s.append(cpu{}, rows_of(keys, 3)); }, {"3 channels", "6"}));
    CHECK(refused([&] { s.append(cpu{}, rows<float>{nullptr, 6, 2, 6, nullptr}); }, {"null", "2 keys"}));
    CHECK(refused([&] { s.erase(2, 1); }, {"2", "1", "4"}));
    CHECK(refused([&] { s.erase(2, 5); }, {"2", "5", "4"}));
    std::vector<float> out(100);
    const auto queries = rows_of(keys, 6).slice(0, 2);
    const verkv::matrix_view<float> good{out.data(), 2, 4, 4}, wide{out.data(), 2, 5, 5}, over{out.data(), 2, 4, 3},
        none{nullptr, 2, 4, 4};
    CHECK(refused([&] { s.estimate(cpu{}, rows_of(keys, 3).slice(0, 2), 1, good, good); }, {"3 channels"}));
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, wide, good); }, {"logits are [2, 5]"}));
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, good, wide); }, {"bounds are [2, 5]"}));
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, good, over); }, {"bounds", "stride 3"}));
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, none); }, {"null", "logits"}));
    CHECK(s.size() == 4);
}

}  // namespace
