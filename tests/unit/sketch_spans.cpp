// The span sketch against slow spans in doubles: where they end, what they keep, which a query zooms into; what it
// refuses.
#include "verkv/sketch/spans.hpp"

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
using verkv::cpu;
using verkv::half;
using verkv::rows;
using verkv::span_options;
using verkv::span_sketch;

static_assert(verkv::bounded_sketch<span_sketch, cpu, float>);
static_assert(verkv::bounded_sketch<span_sketch, cpu, half>);
static_assert(verkv::bounded_sketch<span_sketch, cpu, bfloat16>);
static_assert(verkv::erasable_sketch<span_sketch>);

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

template <class T>
span_sketch sketch_of(const span_options& o, const std::vector<T>& keys) {
    span_sketch s(o);
    s.fit(cpu{}, rows_of(keys, o.key_dim));
    s.append(cpu{}, rows_of(keys, o.key_dim));
    return s;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

template <class T>
std::vector<double> row_of(const std::vector<T>& keys, std::size_t width, std::size_t i) {
    std::vector<double> x;
    for (std::size_t c = 0; c < width; ++c) {
        x.push_back(static_cast<double>(verkv::to_float(keys[i * width + c])));
    }
    return x;
}

/// Keys in runs that are alike.
template <class T>
std::vector<T> runs_of_keys(dice& d, std::size_t n, std::size_t width) {
    std::vector<T> keys;
    std::vector<double> centre(width);
    for (std::size_t i = 0; i < n; ++i) {
        if (i == 0 || d.chance(0.1)) {
            for (double& x : centre) {
                x = 2 * d.normal();
            }
        }
        for (std::size_t c = 0; c < width; ++c) {
            const double x = 1 + centre[c] + std::exp(-static_cast<double>(c % 7)) * d.normal();
            keys.push_back(verkv::from_float<T>(static_cast<float>(x)));
        }
    }
    return keys;
}

/// First tokens of all spans, the open one's too, and whether one is open, as the docstring has it.
template <class T>
std::vector<std::size_t> starts_of(const std::vector<T>& keys, const span_options& o, double& threshold) {
    const std::size_t n = keys.size() / o.key_dim;
    std::vector<double> mean(o.key_dim);
    for (std::size_t i = 0; i < keys.size(); ++i) {
        mean[i % o.key_dim] += static_cast<double>(verkv::to_float(keys[i])) / static_cast<double>(n);
    }
    std::vector<double> cosine(1, 1.0);
    for (std::size_t i = 1; i < n; ++i) {
        std::vector<double> a = row_of(keys, o.key_dim, i - 1), b = row_of(keys, o.key_dim, i);
        for (std::size_t c = 0; c < o.key_dim; ++c) {
            const auto m = static_cast<double>(static_cast<float>(mean[c]));
            a[c] -= m;
            b[c] -= m;
        }
        cosine.push_back(dot(a, b) / std::sqrt(dot(a, a) * dot(b, b)));
    }
    std::vector<double> sorted(cosine.begin() + 1, cosine.end());
    std::sort(sorted.begin(), sorted.end());
    const std::size_t below = sorted.size() / o.mean_length;
    threshold = sorted.empty() || below == sorted.size() ? 2 : sorted[below] - 1e-9;
    std::vector<std::size_t> starts;
    std::size_t length = 0;
    for (std::size_t i = 0; i < n; ++i) {
        if (i == 0 || length == o.max_length || (length >= o.min_length && cosine[i] < threshold)) {
            starts.push_back(i);
            length = 0;
        }
        ++length;
    }
    if (length == o.max_length) {
        starts.push_back(n);
    }
    return starts;
}

/// Sum of the squares that the best `rank` directions leave of some rows, by deflation with long power iterations.
double least_left(std::vector<std::vector<double>> x, std::size_t rank) {
    const std::size_t width = x[0].size();
    for (std::size_t r = 0; r < rank; ++r) {
        std::vector<double> v(width, 1.0);
        for (std::size_t c = 0; c < width; ++c) {
            v[c] += 0.01 * static_cast<double>(c % 13);
        }
        for (int step = 0; step < 400; ++step) {
            std::vector<double> next(width);
            for (const auto& row : x) {
                const double share = dot(row, v);
                for (std::size_t c = 0; c < width; ++c) {
                    next[c] += share * row[c];
                }
            }
            const double norm = std::sqrt(dot(next, next));
            if (!(norm > 1e-200)) {
                break;
            }
            for (std::size_t c = 0; c < width; ++c) {
                v[c] = next[c] / norm;
            }
        }
        const double unit = dot(v, v);
        for (auto& row : x) {
            const double share = dot(row, v) / unit;
            for (std::size_t c = 0; c < width; ++c) {
                row[c] -= share * v[c];
            }
        }
    }
    double left = 0;
    for (const auto& row : x) {
        left += dot(row, row);
    }
    return left;
}

template <class T>
void check_against_doubles(dice& d, const span_options& o, std::size_t n, std::size_t heads) {
    CAPTURE(o.key_dim, o.min_length, o.mean_length, o.max_length, o.rank, o.zoomed_spans, n, heads, sizeof(T));
    const std::size_t width = o.key_dim;
    const auto keys = runs_of_keys<T>(d, n, width);
    const auto queries = normal_floats(d, heads * width);
    const auto scale = static_cast<float>(d.between(-0.3, 0.3));
    const span_sketch s = sketch_of(o, keys);
    const auto e = estimates_of(s, queries, scale);
    const verkv::span_codes codes = s.codes();
    REQUIRE(s.size() == n);

    double threshold = 0;
    const auto starts = starts_of(keys, o, threshold);
    if (n > 2) {
        CHECK(s.threshold() == Approx(threshold).margin(1e-9));
    }
    REQUIRE(s.spans() + 1 == starts.size());
    std::vector<std::vector<double>> mean;
    std::vector<double> radius;
    bool means = true, bases = true, norms = true, radii = true;
    for (std::size_t p = 0; p < s.spans(); ++p) {
        REQUIRE(codes.first_token[p] == starts[p]);
        std::vector<double> m(width);
        for (std::size_t i = starts[p]; i < starts[p + 1]; ++i) {
            for (std::size_t c = 0; c < width; ++c) {
                m[c] += row_of(keys, width, i)[c] / static_cast<double>(starts[p + 1] - starts[p]);
            }
        }
        std::vector<double> stored(width);
        double mean_norm = 0;
        for (std::size_t c = 0; c < width; ++c) {
            stored[c] = static_cast<double>(verkv::to_float(codes.means[p * codes.padded_channels + c]));
            means = means && std::abs(stored[c] - m[c]) <= 0x1p-11 * std::abs(m[c]) + 0x1p-24;
            mean_norm += stored[c] * stored[c];
        }
        // Directions are orthonormal up to half's rounding, and leave nearly the least.
        std::vector<std::vector<double>> offset;
        double farthest = 0, left = 0;
        for (std::size_t i = starts[p]; i < starts[p + 1]; ++i) {
            auto x = row_of(keys, width, i);
            for (std::size_t c = 0; c < width; ++c) {
                x[c] -= stored[c];
            }
            farthest = (std::max)(farthest, std::sqrt(dot(x, x)));
            offset.push_back(x);
            std::vector<double> along, inner;
            for (std::size_t r = 0; r < o.rank; ++r) {
                const double a = static_cast<double>(verkv::to_float(codes.coefficients[i * o.rank + r]));
                for (std::size_t c = 0; c < width; ++c) {
                    x[c] -= a * static_cast<double>(
                                    verkv::to_float(codes.basis[(p * o.rank + r) * codes.padded_channels + c]));
                }
            }
            double inside = 0;
            for (std::size_t r = 0; r < o.rank; ++r) {
                double share = 0;
                for (std::size_t c = 0; c < width; ++c) {
                    share += x[c] * static_cast<double>(
                                        verkv::to_float(codes.basis[(p * o.rank + r) * codes.padded_channels + c]));
                }
                inside += share * share;
            }
            left += dot(x, x);
            const double slack = 1e-12 + 1e-6 * std::sqrt(dot(x, x));
            norms = norms && static_cast<double>(codes.outside[i]) >= std::sqrt(dot(x, x)) &&
                    static_cast<double>(codes.outside[i]) <= std::sqrt(dot(x, x)) + slack &&
                    static_cast<double>(codes.inside[i]) >= std::sqrt(inside) &&
                    static_cast<double>(codes.inside[i]) <= std::sqrt(inside) * (1 + 1e-6) + slack;
        }
        if (o.rank > 0) {
            const double best = least_left(offset, o.rank);
            double all = 0;
            for (const auto& x : offset) {
                all += dot(x, x);
            }
            bases = bases && left <= 1.1 * best + 1e-5 * all + 1e-12;
        }
        const double rounded = farthest + std::sqrt(mean_norm) * static_cast<double>(width + 8) * 0x1p-24;
        radii = radii && static_cast<double>(codes.radius[p]) >= rounded &&
                static_cast<double>(codes.radius[p]) <= rounded * (1 + 1e-6);
        mean.push_back(stored);
        radius.push_back(rounded);
    }
    CHECK(means);
    CHECK(radii);
    CHECK(norms);
    CHECK(bases);

    double worst = 0;
    bool enough = true, tight = true;
    for (std::size_t h = 0; h < heads; ++h) {
        const auto q = row_of(queries, width, h);
        const auto factor = static_cast<double>(scale);
        const double norm = std::abs(factor) * std::sqrt(dot(q, q));
        std::vector<std::pair<double, std::size_t>> weight;
        for (std::size_t p = 0; p < s.spans(); ++p) {
            weight.emplace_back(-(factor * dot(q, mean[p]) + norm * radius[p] +
                                  std::log(static_cast<double>(starts[p + 1] - starts[p]))),
                                p);
        }
        std::sort(weight.begin(), weight.end());
        std::vector<bool> zoomed(s.spans());
        for (std::size_t k = 0; k < (std::min)(o.rank > 0 ? o.zoomed_spans : 0, s.spans()); ++k) {
            zoomed[weight[k].second] = true;
        }
        for (std::size_t p = 0; p < starts.size(); ++p) {
            const bool open = p == s.spans();
            for (std::size_t i = starts[p]; i < (open ? n : starts[p + 1]); ++i) {
                const auto logit = static_cast<double>(e.logits[h * n + i]);
                const auto bound = static_cast<double>(e.bounds[h * n + i]);
                double expected = 0, expected_bound = 0;
                if (open) {
                    expected = factor * dot(q, row_of(keys, width, i));
                } else if (!zoomed[p]) {
                    expected = factor * dot(q, mean[p]);
                    expected_bound = norm * radius[p];
                } else {
                    expected = dot(q, mean[p]);
                    std::vector<double> beside = q;
                    double inner = 0;
                    for (std::size_t r = 0; r < o.rank; ++r) {
                        std::vector<double> b(width);
                        for (std::size_t c = 0; c < width; ++c) {
                            b[c] = static_cast<double>(
                                verkv::to_float(codes.basis[(p * o.rank + r) * codes.padded_channels + c]));
                        }
                        const double share = dot(q, b);
                        expected += share * static_cast<double>(verkv::to_float(codes.coefficients[i * o.rank + r]));
                        inner += share * share;
                        for (std::size_t c = 0; c < width; ++c) {
                            beside[c] -= share * b[c];
                        }
                    }
                    expected *= factor;
                    expected_bound =
                        std::abs(factor) * (std::sqrt(dot(beside, beside)) * static_cast<double>(codes.outside[i]) +
                                            std::sqrt(inner) * static_cast<double>(codes.inside[i]));
                }
                const double rounding = 2e-7 * std::abs(expected) + 1e-6 * norm;
                worst = (std::max)(worst, std::abs(logit - expected) / (rounding + 1e-30));
                enough = enough && bound >= expected_bound * (1 - 1e-12);
                tight = tight && bound <= expected_bound * (1 + 1e-6) + rounding;
            }
        }
    }
    CHECK(worst <= static_cast<double>(width));
    CHECK(enough);
    CHECK(tight);
}

TEST_CASE("spans: what is kept, estimates and bounds are those of slow spans in doubles") {
    dice d(91);
    for (const std::size_t width : {1u, 2u, 7u, 16u, 33u, 64u}) {
        for (const std::size_t rank : {0u, 1u, 3u, 4u}) {
            const std::size_t least = 1 + d.below(4), mean = least + d.below(6), most = mean + d.below(20);
            const span_options o{width, least, mean, most, rank, d.below(9)};
            check_against_doubles<float>(d, o, 3 + d.below(120), 1 + d.below(9));
            check_against_doubles<half>(d, o, 3 + d.below(120), 4);
            check_against_doubles<bfloat16>(d, o, 3 + d.below(120), 3);
        }
    }
    check_against_doubles<float>(d, span_options{128}, 400, 5);
    check_against_doubles<float>(d, span_options{.key_dim = 20, .rank = 16, .zoomed_spans = 1024}, 300, 3);
    check_against_doubles<float>(d, span_options{5, 1, 1, 1, 2, 3}, 20, 2);
}

TEST_CASE("spans: the caller's marks end them, whatever the keys") {
    const std::vector<float> keys = {1, 2, 3, 10, 20, 30, 40, 50, 7};
    span_sketch s(span_options{1, 1, 2, 4, 1, 0});
    s.fit(cpu{}, rows_of(keys, 1));
    const std::vector<std::uint8_t> marks = {0, 0, 0, 1, 0, 0, 0, 0, 1};
    s.append(cpu{}, rows_of(keys, 1), marks);
    REQUIRE(s.spans() == 3);  // three, four (the most) and one
    const auto e = estimates_of(s, {1});
    CHECK(e.logits == std::vector<float>{2, 2, 2, 25, 25, 25, 25, 50, 7});
    const float expected[] = {1, 1, 1, 15, 15, 15, 15, 0, 0};
    for (std::size_t i = 0; i < 9; ++i) {
        CHECK(e.bounds[i] == Approx(expected[i]).margin(1e-4));
    }
    SECTION("in any chunks") {
        for (std::size_t cut = 0; cut <= 9; ++cut) {
            span_sketch t(s.options());
            t.fit(cpu{}, rows_of(keys, 1));
            t.append(cpu{}, rows_of(keys, 1).slice(0, cut), std::span(marks).first(cut));
            t.append(cpu{}, rows_of(keys, 1).slice(cut, 9 - cut), std::span(marks).subspan(cut));
            CHECK(estimates_of(t, {1}) == e);
        }
    }
    SECTION("a mark at the first token, and marks at all") {
        span_sketch t(s.options());
        t.fit(cpu{}, rows_of(keys, 1));
        t.append(cpu{}, rows_of(keys, 1), std::vector<std::uint8_t>(9, 1));
        CHECK(t.spans() == 8);
        CHECK(estimates_of(t, {1}).logits == keys);
    }
    CHECK(refused([&] { s.append(cpu{}, rows_of(keys, 1), std::vector<std::uint8_t>(8)); }, {"8 marks", "9 keys"}));
    CHECK(s.size() == 9);
}

TEST_CASE("spans: a query zooms into those that may weigh most") {
    // Five spans of two keys: m -+ 1 in channel 0, where the query looks; a second channel only widens the last one.
    std::vector<float> keys;
    const float centre[] = {0, 8, 3, 8, -20};
    for (const float m : centre) {
        const float wide = m < 0 ? 40.0f : 0.0f;
        keys.insert(keys.end(), {m - 1, -wide, m + 1, wide});
    }
    keys.insert(keys.end(), {0, 0});
    const std::vector<std::uint8_t> marks = {1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1};
    for (std::size_t zoomed = 0; zoomed <= 6; ++zoomed) {
        span_sketch s(span_options{2, 1, 2, 4, 1, zoomed});
        s.fit(cpu{}, rows_of(keys, 2));
        s.append(cpu{}, rows_of(keys, 2), marks);
        REQUIRE(s.spans() == 5);
        const auto e = estimates_of(s, {1, 0});
        // The wide one first, by its radius; then 8 twice, the earlier one first; then 3, then 0.
        const std::size_t order[] = {4, 1, 3, 2, 0};
        for (std::size_t k = 0; k < 5; ++k) {
            const std::size_t p = order[k];
            const bool seen = k < zoomed;
            CAPTURE(zoomed, p, seen);
            CHECK(e.logits[2 * p] == Approx(centre[p] - (seen ? 1 : 0)).margin(0.01));
            CHECK(e.logits[2 * p + 1] == Approx(centre[p] + (seen ? 1 : 0)).margin(0.01));
            CHECK((seen ? e.bounds[2 * p] < 0.1f : e.bounds[2 * p] >= 1));
        }
    }
}

TEST_CASE("spans: tokens give the same bits however they arrive, on one thread or many") {
    dice d(92);
    for (int round = 0; round < 40; ++round) {
        const std::size_t width = 1 + d.below(30);
        const std::size_t least = 1 + d.below(4), mean = least + d.below(6), most = mean + d.below(20);
        const span_options o{width, least, mean, most, d.below(5), d.below(6)};
        const std::size_t n = 1 + d.below(150);
        auto keys = runs_of_keys<float>(d, n, width);
        if (d.chance(0.3)) {
            keys[d.below(keys.size())] = not_a_number;
        }
        const auto queries = normal_floats(d, 3 * width);
        const auto whole = estimates_of(sketch_of(o, keys), queries);
        for (const std::size_t longest : {1u, 20u}) {
            span_sketch s(o);
            s.fit(cpu{}, rows_of(keys, width));
            for (std::size_t first = 0; first < n;) {
                const std::size_t count = (std::min)(n - first, longest == 1 ? 1 : d.below(longest));
                s.append(cpu{}, rows_of(keys, width).slice(first, count));
                first += count;
            }
            REQUIRE(estimates_of(s, queries) == whole);
        }
    }
    const auto keys = runs_of_keys<float>(d, 3000, 20);
    const auto queries = normal_floats(d, 7 * 20);
    const span_sketch s = sketch_of(span_options{20}, keys);
    verkv::thread_pool pool(3);
    const auto all = estimates_of(s, queries, 0.1f);
    CHECK(estimates_of(s, queries, 0.1f, cpu{&pool}) == all);
    for (std::size_t h = 0; h < 7; ++h) {
        const std::vector<float> one(queries.begin() + static_cast<std::ptrdiff_t>(h * 20),
                                     queries.begin() + static_cast<std::ptrdiff_t>((h + 1) * 20));
        const auto alone = estimates_of(s, one, 0.1f);
        CHECK(std::equal(alone.logits.begin(), alone.logits.end(),
                         all.logits.begin() + static_cast<std::ptrdiff_t>(h * 3000)));
    }
}

TEST_CASE("spans: keys may lie apart, in any order") {
    dice d(93);
    const auto keys = normal_floats(d, 30 * 9);
    const std::vector<verkv::row_id> ids = {7, 3, 29, 3, 0, 11};
    std::vector<float> copied;
    for (const verkv::row_id id : ids) {
        copied.insert(copied.end(), keys.begin() + static_cast<std::ptrdiff_t>(id * 9 + 2),
                      keys.begin() + static_cast<std::ptrdiff_t>(id * 9 + 7));
    }
    const span_options o{5, 1, 2, 3, 1, 1};
    const rows<float> listed{keys.data() + 2, 9, 6, 5, ids.data()};
    span_sketch s(o);
    s.fit(cpu{}, listed);
    s.append(cpu{}, listed);
    const auto query = normal_floats(d, 5);
    CHECK(estimates_of(s, query) == estimates_of(sketch_of(o, copied), query));
}

TEST_CASE("spans: erasing leaves the others' bits where none or all are zoomed, and appending goes on") {
    dice d(94);
    for (const std::size_t zoomed : {0u, 1024u}) {
        const span_options o{6, 2, 4, 9, 2, zoomed};
        const auto keys = runs_of_keys<float>(d, 60, 6);
        const auto queries = normal_floats(d, 6);
        const auto before = estimates_of(sketch_of(o, keys), queries);
        for (int round = 0; round < 60; ++round) {
            span_sketch s = sketch_of(o, keys);
            std::vector<std::size_t> left(60);
            std::iota(left.begin(), left.end(), std::size_t{0});
            while (!left.empty()) {
                const std::size_t first = d.below(left.size() + 1);
                const std::size_t last = first + d.below(left.size() + 1 - first);
                s.erase(first, last);
                left.erase(left.begin() + static_cast<std::ptrdiff_t>(first),
                           left.begin() + static_cast<std::ptrdiff_t>(last));
                REQUIRE(s.size() == left.size());
                const auto after = estimates_of(s, queries);
                for (std::size_t i = 0; i < left.size(); ++i) {
                    REQUIRE(after.logits[i] == before.logits[left[i]]);
                    REQUIRE(after.bounds[i] == before.bounds[left[i]]);
                }
            }
            CHECK((s.bytes() == 0 && s.host_bytes() == 0));
        }
    }
    SECTION("the open span goes on with what is left of it, or anew") {
        const std::vector<float> keys = {1, 2, 3, 4, 5, 6};
        const std::vector<std::uint8_t> none(6);
        span_sketch s(span_options{1, 1, 2, 4, 1, 0});
        s.fit(cpu{}, rows_of(keys, 1));
        s.append(cpu{}, rows_of(keys, 1), none);  // 1 ... 4 closed, 5 and 6 open
        s.erase(3, 5);
        CHECK(estimates_of(s, {1}).logits == std::vector<float>{2.5f, 2.5f, 2.5f, 6});
        s.append(cpu{}, rows_of(keys, 1).slice(0, 3), std::span(none).first(3));
        CHECK(s.spans() == 2);
        CHECK(estimates_of(s, {1}).logits == std::vector<float>{2.5f, 2.5f, 2.5f, 3, 3, 3, 3});
        s.erase(0, 7);
        s.append(cpu{}, rows_of(keys, 1).slice(0, 1), std::span(none).first(1));
        CHECK(estimates_of(s, {1}).logits == std::vector<float>{1});
    }
}

TEST_CASE("spans: a NaN or infinite element spoils its own token and nothing else") {
    dice d(95);
    const auto clean = runs_of_keys<float>(d, 40, 5);
    const auto query = normal_floats(d, 5);
    const span_options o{5, 2, 4, 9, 2, 3};
    for (const float bad : {not_a_number, infinity, -infinity}) {
        for (const std::size_t token : {0u, 9u, 20u, 38u, 39u}) {
            auto keys = clean;
            keys[token * 5 + 2] = bad;
            auto others = clean;
            others.erase(others.begin() + static_cast<std::ptrdiff_t>(token * 5),
                         others.begin() + static_cast<std::ptrdiff_t>(token * 5 + 5));
            const span_sketch s = sketch_of(o, keys);
            const auto e = estimates_of(s, query);
            broken_bounds count;
            for (std::size_t i = 0; i < 40; ++i) {
                double logit = 0;
                for (std::size_t c = 0; c < 5; ++c) {
                    logit += static_cast<double>(keys[i * 5 + c]) * static_cast<double>(query[c]);
                }
                if (i == token) {
                    CHECK(std::isnan(e.logits[i]));
                    CHECK(e.bounds[i] == infinity);
                } else {
                    CHECK(std::abs(static_cast<double>(e.logits[i]) - logit) <= static_cast<double>(e.bounds[i]));
                    CHECK(e.bounds[i] < 100);
                }
            }
            // Tokens that come before it do not know.
            span_sketch t(o);
            t.fit(cpu{}, rows_of(keys, 5));
            t.append(cpu{}, rows_of(keys, 5).slice(0, token));
            for (const float x : estimates_of(t, query).logits) {
                CHECK(std::isfinite(x));
            }
        }
    }
    const span_sketch s = sketch_of(o, clean);
    for (const float bad : {not_a_number, infinity}) {
        for (const float bound : estimates_of(s, {bad, 1, 1, 1, 1}).bounds) {
            CHECK(bound == infinity);
        }
    }
}

TEST_CASE("spans: means beyond a half are clamped, and the radius knows") {
    const std::vector<float> keys = {1e6f, 1e6f, 3, 4};
    span_sketch s(span_options{1, 1, 2, 2, 1, 0});
    s.fit(cpu{}, rows_of(keys, 1));
    s.append(cpu{}, rows_of(keys, 1), std::vector<std::uint8_t>(4));
    const auto e = estimates_of(s, {1});
    CHECK(e.logits[0] == 65504);
    CHECK(e.bounds[0] >= 1e6f - 65504);
    CHECK(e.bounds[0] < 1e6f);
    CHECK(e.bounds[2] < 0.51f);
}

TEST_CASE("spans: sizes, and memory within what was reserved") {
    dice d(96);
    const auto keys = runs_of_keys<float>(d, 200, 6);
    const auto queries = normal_floats(d, 5 * 6);
    span_sketch s(span_options{6, 4, 8, 16, 2, 5});
    s.fit(cpu{}, rows_of(keys, 6));
    CHECK((s.size() == 0 && s.bytes() == 0 && s.host_bytes() == 0));
    s.reserve(200);
    std::vector<float> logits(5 * 200), bounds(5 * 200);
    CHECK(support::allocations_of([&] {
              for (std::size_t i = 0; i < 200; ++i) {
                  s.append(cpu{}, rows_of(keys, 6).slice(i, 1));
              }
              s.estimate(cpu{}, rows_of(queries, 6), 1, {logits.data(), 5, 200, 200}, {bounds.data(), 5, 200, 200});
          }) == 0);
    CHECK(s.bytes() == s.spans() * (6 * 2 + 4 + 4));
    CHECK(s.host_bytes() == s.spans() * 2 * 6 * 2 + s.codes().closed_tokens * (2 * 2 + 2 * 4));
    CHECK(s.open_bytes() == 16 * 6 * 4);
    CHECK(s.spans() > 200 / 16);
    CHECK(s.spans() <= 200 / 4);
    CHECK(support::allocations_of([&] { s.erase(3, 20); }) == 0);
    CHECK(s.size() == 183);
    CHECK(s.bound_failure() == 0);
    CHECK(span_sketch(span_options{128}).bytes_per_token() == 16.5);
    s.fit(cpu{}, rows_of(keys, 6));
    CHECK(s.size() == 0);
    s.append(cpu{}, rows_of(keys, 6));
    CHECK(estimates_of(s, queries) == estimates_of(sketch_of(s.options(), keys), queries));
}

TEST_CASE("spans: what is refused") {
    const std::vector<float> keys(4 * 6, 1.0f);
    CHECK(refused([] { span_sketch(span_options{0}); }, {"0 channels"}));
    CHECK(refused([] { span_sketch(span_options{1025}); }, {"1025"}));
    CHECK(refused([] { span_sketch(span_options{8, 0}); }, {"at least 0"}));
    CHECK(refused([] { span_sketch(span_options{8, 17}); }, {"at least 17", "average 16"}));
    CHECK(refused([] { span_sketch(span_options{8, 1, 65}); }, {"average 65", "at most 64"}));
    CHECK(refused([] { span_sketch(span_options{8, 1, 65, 1025}); }, {"1025"}));
    CHECK(refused([] { span_sketch(span_options{8, 1, 2, 3, 17}); }, {"rank 17"}));
    CHECK(refused([] { span_sketch(span_options{8, 1, 2, 3, 4, 1025}); }, {"1025"}));
    span_sketch fresh(span_options{6});
    CHECK(refused<verkv::invalid_state>([&] { fresh.append(cpu{}, rows_of(keys, 6)); }, {"4 tokens", "before fit()"}));
    span_sketch s = sketch_of(span_options{6}, keys);
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
