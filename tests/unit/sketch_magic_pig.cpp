// MagicPIG's tables against slow ones in doubles; the formula of u against the binomial; what is refused.
#include "verkv/sketch/magic_pig.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <vector>

#include "support/catch.hpp"
#include "support/sketch_rig.hpp"

namespace {

using support::dice;
using support::normal_floats;
using support::real;
using support::refused;
using support::rows_of;
using verkv::bfloat16;
using verkv::cpu;
using verkv::half;
using verkv::magic_pig_options;
using verkv::magic_pig_tables;

/// Tables whose collisions stand where the rig expects a sketch's logits; NaN where the token was not finite.
struct counting : magic_pig_tables {
    using magic_pig_tables::magic_pig_tables;

    void estimate(const cpu& exec, verkv::rows<float> queries, float, verkv::matrix_view<float> out) const {
        std::vector<std::uint16_t> counts(queries.count * size());
        collisions(exec, queries, verkv::matrix_of(std::span<std::uint16_t>(counts), queries.count, size()));
        for (std::size_t at = 0; at < counts.size(); ++at) {
            const std::size_t token = at % size();
            const bool marked = buckets().marks[token / 32] >> token % 32 & 1u;
            out.row(at / size())[token] =
                marked ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(counts[at]);
        }
    }
};

template <class T>
void check_against_doubles(dice& d, const magic_pig_options& o, std::size_t n, std::size_t heads) {
    CAPTURE(o.key_dim, o.planes, o.tables, o.least, o.floor, n, heads, sizeof(T));
    const std::size_t width = o.key_dim;
    auto raw = normal_floats(d, n * width);
    const auto queries = normal_floats(d, heads * width);
    for (std::size_t i = 0; i < n; ++i) {
        for (std::size_t c = 0; c < width; ++c) {
            // Some near the first query, all of them off the origin.
            raw[i * width + c] += 2 + (i % 3 == 0 ? 2 * queries[c] : 0.0f);
        }
    }
    const auto keys = support::stored<T>(raw);
    const auto s = support::sketch_of(counting(o), keys);
    const auto counts = support::logits_of(s, queries);
    std::vector<double> centre(width);
    for (std::size_t i = 0; i < n * width; ++i) {
        centre[i % width] += static_cast<double>(verkv::to_float(keys[i])) / static_cast<double>(n);
    }
    for (std::size_t c = 0; c < width; ++c) {
        REQUIRE(static_cast<double>(s.centre()[c]) == Approx(centre[c]).margin(1e-6));
        centre[c] = static_cast<double>(s.centre()[c]);
    }
    const auto planes = s.buckets();
    for (std::size_t h = 0; h < heads; ++h) {
        verkv::collision_sample sample;
        s.sample(cpu{}, rows_of(keys, width), std::span(queries).subspan(h * width, width), sample);
        REQUIRE(sample.tokens.size() == sample.log_weight.size());
        std::size_t listed = 0;
        for (std::size_t i = 0; i < n; ++i) {
            std::size_t together = 0;
            for (std::size_t l = 0; l < o.tables; ++l) {
                bool same = true;
                for (std::size_t p = 0; p < o.planes; ++p) {
                    double of_key = 0, of_query = 0;
                    for (std::size_t c = 0; c < width; ++c) {
                        const auto w = static_cast<double>(planes.normals[c * planes.padded_planes + l * o.planes + p]);
                        of_key += w * (static_cast<double>(verkv::to_float(keys[i * width + c])) - centre[c]);
                        of_query += w * static_cast<double>(queries[h * width + c]);
                    }
                    same = same && (of_key >= 0) == (of_query >= 0);
                }
                together += same;
            }
            REQUIRE(counts[h * n + i] == static_cast<float>(together));
            if (together < o.least) {
                continue;
            }
            double product = 0, key = 0, query = 0;
            for (std::size_t c = 0; c < width; ++c) {
                const double k = static_cast<double>(verkv::to_float(keys[i * width + c])) - centre[c];
                const auto q = static_cast<double>(queries[h * width + c]);
                product += k * q;
                key += k * k;
                query += q * q;
            }
            const double p = 1 - std::acos(product / std::sqrt(key * query)) / std::numbers::pi;
            const double x = std::pow(p, static_cast<double>(o.planes));
            const auto many = static_cast<double>(o.tables);
            const double u = 1 - std::pow(1 - x, many) - (o.least == 2 ? many * x * std::pow(1 - x, many - 1) : 0.0);
            REQUIRE(listed < sample.tokens.size());
            REQUIRE(sample.tokens[listed] == i);
            REQUIRE(static_cast<double>(sample.log_weight[listed]) ==
                    Approx(-std::log(u + o.floor)).margin(1e-5 + 1e-12 / u));
            ++listed;
        }
        REQUIRE(listed == sample.tokens.size());
    }
}

TEST_CASE("magic_pig: collisions, samples and weights are those of slow tables in doubles") {
    dice d(101);
    for (const std::size_t planes : {1u, 3u, 4u, 5u, 10u, 16u}) {
        for (const unsigned least : {1u, 2u}) {
            const magic_pig_options o{
                2 + d.below(40), planes, 2 + d.below(30), least, least == 1 ? verkv::magic_pig_floor : 0.0,
                d.below(1000)};
            check_against_doubles<float>(d, o, 1 + d.below(130), 1 + d.below(4));
            check_against_doubles<half>(d, o, 1 + d.below(70), 2);
            check_against_doubles<bfloat16>(d, o, 1 + d.below(70), 1);
        }
    }
    check_against_doubles<float>(d, {64, 10, 150}, 70, 2);
}

/// P(at least `least` of n) in long double, term by term.
real binomial_tail(real x, int n, int least) {
    real sum = 0;
    for (int j = least; j <= n; ++j) {
        const real log_choose = std::lgamma(static_cast<real>(n) + 1) - std::lgamma(static_cast<real>(j) + 1) -
                                std::lgamma(static_cast<real>(n - j) + 1);
        sum += std::exp(log_choose + static_cast<real>(j) * std::log(x) + static_cast<real>(n - j) * std::log1p(-x));
    }
    return sum;
}

TEST_CASE("magic_pig: u is the binomial's tail, small ones included") {
    CHECK(verkv::collision_probability(1) == 1);
    CHECK(verkv::collision_probability(0) == Approx(0.5));
    CHECK(verkv::collision_probability(-1) == 0);
    CHECK(verkv::collision_probability(1.5) == 1);
    CHECK(verkv::collision_probability(-1.5) == 0);
    CHECK(verkv::collision_probability(0.5) == Approx(2.0 / 3));
    CHECK(std::isnan(verkv::collision_probability(std::nan(""))));
    for (const int tables : {1, 2, 3, 10, 150, 1024}) {
        for (const std::size_t planes : {1u, 2u, 10u, 16u}) {
            for (const int least : {1, 2}) {
                if (least > tables) {
                    continue;
                }
                for (double cosine = -0.99; cosine < 1; cosine += 0.05) {
                    const double p = 1 - std::acos(cosine) / std::numbers::pi;
                    const auto x = static_cast<real>(std::pow(p, static_cast<double>(planes)));
                    const double u = verkv::collision_inclusion(cosine, planes, static_cast<std::size_t>(tables),
                                                                static_cast<unsigned>(least));
                    CAPTURE(tables, planes, least, cosine, u);
                    CHECK(u == Approx(static_cast<double>(binomial_tail(x, tables, least))).epsilon(1e-10).margin(0));
                }
                CHECK(verkv::collision_inclusion(1, planes, static_cast<std::size_t>(tables),
                                                 static_cast<unsigned>(least)) == 1);
                CHECK(verkv::collision_inclusion(-1, planes, static_cast<std::size_t>(tables),
                                                 static_cast<unsigned>(least)) == 0);
            }
        }
    }
    CHECK(std::isnan(verkv::collision_inclusion(std::nan(""), 10, 150)));
    const magic_pig_tables s({8, 7, 20});
    CHECK(s.inclusion(0.3) == verkv::collision_inclusion(0.3, 7, 20, 2));
}

TEST_CASE("magic_pig: what every sketch keeps") {
    dice d(102);
    for (const std::size_t planes : {1u, 3u, 10u}) {
        const auto tables = [&](std::size_t width) { return counting({width, planes, 40, 2, 0, width}); };
        // The centre is that of all keys: chunks and erased tokens keep theirs.
        support::check_same_bits(tables(10), d);
        support::check_erasing(tables(10), d);
        counting s = tables(5);
        const std::vector<float> keys = normal_floats(d, 50);
        CHECK(refused<verkv::invalid_state>([&] { s.append(cpu{}, rows_of(keys, 5)); }, {"10 tokens", "before fit()"}));
    }
}

TEST_CASE("magic_pig: what is not finite is sampled for certain, and spoils no other token") {
    dice d(103);
    const std::size_t width = 5;
    const auto clean = normal_floats(d, 70 * width);
    const auto query = normal_floats(d, width);
    const counting prototype({width, 6, 20, 2, verkv::magic_pig_floor, 1});
    const auto expected = support::logits_of(support::sketch_of(prototype, clean), query);
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
        for (const std::size_t token : {0u, 33u, 69u}) {
            auto keys = clean;
            keys[token * width + 1] = bad;
            counting s = prototype;
            s.fit(cpu{}, rows_of(clean, width));
            s.append(cpu{}, rows_of(keys, width));
            const auto counts = support::logits_of(s, query);
            for (std::size_t i = 0; i < 70; ++i) {
                CHECK((i == token ? std::isnan(counts[i]) : counts[i] == expected[i]));
            }
            verkv::collision_sample sample;
            s.sample(cpu{}, rows_of(keys, width), query, sample);
            CHECK(sample.counts[token] == 20);
            const auto found = std::find(sample.tokens.begin(), sample.tokens.end(), token);
            REQUIRE(found != sample.tokens.end());
            CHECK(sample.log_weight[static_cast<std::size_t>(found - sample.tokens.begin())] == 0);
            // A bad key does not keep fit() from taking a centre.
            s.fit(cpu{}, rows_of(keys, width));
            CHECK(std::isfinite(s.centre()[1]));
        }
        auto spoiled = query;
        spoiled[2] = bad;
        verkv::collision_sample sample;
        const auto s = support::sketch_of(prototype, clean);
        s.sample(cpu{}, rows_of(clean, width), spoiled, sample);
        CHECK(sample.tokens.size() == 70);
        CHECK(std::all_of(sample.log_weight.begin(), sample.log_weight.end(), [](float w) { return w == 0; }));
    }
}

TEST_CASE("magic_pig: a key at the centre, a query of zeros, a key against the query") {
    counting s({2, 2, 10});
    s.fit(cpu{}, rows_of(std::vector<float>{0, 0}, 2));
    const std::vector<float> keys = {0, 0, 1, 1, -1, -1};
    s.append(cpu{}, rows_of(keys, 2));
    for (std::size_t l = 0; l < 10; ++l) {
        CHECK(s.buckets().buckets[l * 64] == 3);
    }
    verkv::collision_sample sample;
    s.sample(cpu{}, rows_of(keys, 2), std::vector<float>{0, 0}, sample);
    const auto even = static_cast<float>(-std::log(verkv::collision_inclusion(0, 2, 10)));
    for (const float w : sample.log_weight) {
        CHECK(w == even);
    }
    CHECK(sample.counts[0] == 10);
    s.sample(cpu{}, rows_of(keys, 2), std::vector<float>{3, 3}, sample);
    CHECK(sample.counts[1] == 10);
    CHECK(sample.counts[2] == 0);
    const auto at = std::find(sample.tokens.begin(), sample.tokens.end(), 1u) - sample.tokens.begin();
    CHECK(sample.log_weight[static_cast<std::size_t>(at)] == Approx(0).margin(1e-6));
}

TEST_CASE("magic_pig: sizes, and memory within what was reserved") {
    dice d(104);
    const std::size_t width = 20;
    const auto keys = normal_floats(d, 96 * width);
    magic_pig_tables s({width, 2, 30});
    s.fit(cpu{}, rows_of(keys, width));
    s.reserve(96);
    verkv::collision_sample sample;
    sample.reserve(96);
    CHECK(support::allocations_of([&] {
              for (std::size_t i = 0; i < 96; ++i) {
                  s.append(cpu{}, rows_of(keys, width).slice(i, 1));
              }
              s.sample(cpu{}, rows_of(keys, width), std::span(keys).first(width), sample);
              s.erase(3, 35);
          }) == 0);
    CHECK(!sample.tokens.empty());
    CHECK(s.size() == 64);
    CHECK(static_cast<double>(s.bytes()) == 64 * s.bytes_per_token());
    CHECK(magic_pig_tables({128}).bytes_per_token() == 300.125);
}

TEST_CASE("magic_pig: what is refused") {
    CHECK(refused([] { magic_pig_tables({0}); }, {"0 channels", "1 to 1024"}));
    CHECK(refused([] { magic_pig_tables({8, 17}); }, {"17 planes", "1 to 16"}));
    CHECK(refused([] { magic_pig_tables({8, 10, 0}); }, {"0 tables"}));
    CHECK(refused([] { magic_pig_tables({8, 10, 342}); }, {"342 tables", "1 to 341"}));
    CHECK(refused([] { magic_pig_tables({8, 10, 1}); }, {"2 collisions in 1 tables"}));
    CHECK(refused([] { magic_pig_tables({8, 10, 10, 3}); }, {"3 collisions"}));
    CHECK(refused([] { magic_pig_tables({8, 10, 10, 0}); }, {"0 collisions"}));
    CHECK(refused([] { magic_pig_tables({8, 10, 10, 2, -1}); }, {"floor is -1"}));
    CHECK(refused([] { magic_pig_tables({8, 10, 10, 2, std::nan("")}); }, {"floor is nan"}));
    const std::vector<float> keys(4 * 6, 1.0f);
    magic_pig_tables s({6, 3, 4});
    s.fit(cpu{}, rows_of(keys, 6));
    s.append(cpu{}, rows_of(keys, 6));
    CHECK(refused([&] { s.fit(cpu{}, rows_of(keys, 3)); }, {"3 channels", "6"}));
    CHECK(refused([&] { s.append(cpu{}, rows_of(keys, 3)); }, {"3 channels", "6"}));
    CHECK(refused([&] { s.erase(2, 5); }, {"2", "5", "4"}));
    std::vector<std::uint16_t> counts(100);
    const verkv::matrix_view<std::uint16_t> good{counts.data(), 2, 4, 4}, wide{counts.data(), 2, 5, 5},
        over{counts.data(), 2, 4, 3}, none{nullptr, 2, 4, 4};
    const auto queries = rows_of(keys, 6).slice(0, 2);
    CHECK(refused([&] { s.collisions(cpu{}, rows_of(keys, 3).slice(0, 2), good); }, {"3 channels"}));
    CHECK(refused([&] { s.collisions(cpu{}, queries, wide); }, {"counts are [2, 5]"}));
    CHECK(refused([&] { s.collisions(cpu{}, queries, over); }, {"counts", "stride 3"}));
    CHECK(refused([&] { s.collisions(cpu{}, queries, none); }, {"null", "counts"}));
    verkv::collision_sample sample;
    sample.tokens = {7};
    const auto query = std::span(keys).first(6);
    CHECK(refused([&] { s.sample(cpu{}, rows_of(keys, 6).slice(0, 3), query, sample); }, {"3 keys", "4 tokens"}));
    CHECK(refused([&] { s.sample(cpu{}, rows_of(keys, 3).slice(0, 4), query, sample); }, {"3 channels"}));
    CHECK(refused([&] { s.sample(cpu{}, rows_of(keys, 6), query.first(5), sample); }, {"query has 5", "6"}));
    CHECK(sample.tokens == std::vector<verkv::token_index>{7});
    CHECK(s.size() == 4);
}

}  // namespace
