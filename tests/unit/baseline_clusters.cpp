// Clusters of keys and RetroInfer's estimate: means against sums, Jensen's inequality, attention in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/attention_reference.hpp"
#include "support/baseline_scene.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/baseline/cluster_estimate.hpp"
#include "verkv/cpu/thread_pool.hpp"

namespace {

using support::own_rows;
using support::value_of;
using verkv::cluster_selection;
using verkv::cpu;
using verkv::half;
using verkv::key_clusters;
using verkv::token_count;
using verkv::token_index;

/// Keys about a few directions, with values.
template <class T>
struct scene {
    std::size_t n, key_dim, value_dim;
    own_rows<T> keys, values;

    scene(std::uint64_t seed, std::size_t tokens, std::size_t width, std::size_t value_width,
          support::rows_layout layout = support::rows_layout::dense, float mean = 1)
        : n(tokens),
          key_dim(width),
          value_dim(value_width),
          keys(grouped(seed, tokens, width, mean), tokens, width, layout, seed),
          values(support::generator(seed + 1).normals<T>(tokens * value_width), tokens, value_width, layout, seed) {}

    static std::vector<T> grouped(std::uint64_t seed, std::size_t tokens, std::size_t width, float mean) {
        support::generator g(seed);
        const auto direction = g.normals<float>(5 * width, 2);
        std::vector<T> keys;
        for (std::size_t i = 0; i < tokens; ++i) {
            const std::size_t group = g.below(5);
            for (std::size_t c = 0; c < width; ++c) {
                keys.push_back(
                    verkv::from_float<T>(direction[group * width + c] + static_cast<float>(0.3 * g.normal()) + mean));
            }
        }
        return keys;
    }
};

template <class T>
void check_clusters(const key_clusters& c, const scene<T>& s, verkv::windows fixed) {
    std::vector<int> seen(s.n);
    for (std::size_t j = 0; j < c.size(); ++j) {
        const auto members = c.members(j);
        REQUIRE(!members.empty());
        std::vector<double> key(s.key_dim), value(s.value_dim);
        for (const token_index i : members) {
            ++seen[i];
            for (std::size_t x = 0; x < s.key_dim; ++x) {
                key[x] += value_of(s.keys.view()[i][x]) / static_cast<double>(members.size());
            }
            for (std::size_t x = 0; x < s.value_dim; ++x) {
                value[x] += value_of(s.values.view()[i][x]) / static_cast<double>(members.size());
            }
        }
        for (std::size_t x = 0; x < s.key_dim; ++x) {
            CHECK(static_cast<double>(c.centroids()[j][x]) == Approx(key[x]).epsilon(1e-6).margin(1e-6));
        }
        for (std::size_t x = 0; x < s.value_dim; ++x) {
            CHECK(static_cast<double>(c.mean_values()[j][x]) == Approx(value[x]).epsilon(1e-6).margin(1e-6));
        }
        CHECK(std::is_sorted(members.begin(), members.end()));
    }
    for (std::size_t i = 0; i < s.n; ++i) {
        CHECK(seen[i] == (fixed.fixed(i, s.n) ? 0 : 1));
    }
}

template <class T>
std::vector<float> logits_of(verkv::rows<T> keys, const std::vector<float>& query) {
    std::vector<float> logits(keys.count);
    for (std::size_t i = 0; i < keys.count; ++i) {
        double dot = 0;
        for (std::size_t x = 0; x < keys.width; ++x) {
            dot += value_of(keys[i][x]) * static_cast<double>(query[x]);
        }
        logits[i] = static_cast<float>(0.25 * dot);
    }
    return logits;
}

std::vector<float> weights_of(std::vector<float> logits, double shift) {
    for (float& x : logits) {
        x = static_cast<float>(std::exp(static_cast<double>(x) - shift));
    }
    return logits;
}

}  // namespace

TEST_CASE("clusters: every free token is in one, which has the mean of its keys and values") {
    for (const std::size_t n : {0u, 1u, 7u, 40u, 500u}) {
        for (const auto layout :
             {support::rows_layout::dense, support::rows_layout::strided, support::rows_layout::listed}) {
            const scene<half> s(n + 1, n, 19, 5, layout);
            const verkv::windows fixed{3, 6};
            key_clusters c({.tokens_per_cluster = 9, .segment_length = 200});
            c.fit(cpu{}, s.keys.view(), s.values.view(), fixed);
            check_clusters(c, s, fixed);
            const std::size_t free = fixed.free_end(n) - fixed.free_begin(n);
            CHECK(c.size() <= (free + 8) / 9 + 3);
            CHECK(c.bytes() == c.size() * (19 + 5 + 1) * 4);
        }
    }
    // Keys that are all alike: one cluster; then others, with what was there forgotten.
    key_clusters c;
    const std::vector<float> same(64 * 8, 1.0f);
    const auto rows = verkv::contiguous_rows(std::span(same), 8);
    c.fit(cpu{}, rows, rows, {0, 0});
    CHECK(c.size() == 1);
    CHECK(c.members(0).size() == 64);
    const scene<float> s(5, 300, 8, 8);
    c.fit(cpu{}, s.keys.view(), s.values.view(), {0, 0});
    check_clusters(c, s, {0, 0});
}

TEST_CASE("clusters: similar keys meet, and threads do not matter") {
    // What all keys have in common must not matter: it changes all logits of a query alike.
    const scene<float> s(9, 800, 16, 4, support::rows_layout::dense, 20);
    key_clusters one({.tokens_per_cluster = 100}), four({.tokens_per_cluster = 100});
    one.fit(cpu{}, s.keys.view(), s.values.view(), {10, 10});
    verkv::thread_pool pool(4);
    four.fit(cpu{&pool}, s.keys.view(), s.values.view(), {10, 10});
    REQUIRE(one.size() == four.size());
    double within = 0, all = 0;
    std::vector<double> mean(16);
    for (std::size_t i = 0; i < 800; ++i) {
        for (std::size_t x = 0; x < 16; ++x) {
            mean[x] += value_of(s.keys.view()[i][x]) / 800;
        }
    }
    for (std::size_t j = 0; j < one.size(); ++j) {
        CHECK(std::equal(one.centroids()[j], one.centroids()[j] + 16, four.centroids()[j]));
        CHECK(std::equal(one.members(j).begin(), one.members(j).end(), four.members(j).begin(), four.members(j).end()));
        for (const token_index i : one.members(j)) {
            for (std::size_t x = 0; x < 16; ++x) {
                within += std::pow(value_of(s.keys.view()[i][x]) - static_cast<double>(one.centroids()[j][x]), 2);
                all += std::pow(value_of(s.keys.view()[i][x]) - mean[x], 2);
            }
        }
    }
    CHECK(within < 0.05 * all);  // five directions, eight clusters
}

TEST_CASE("clusters: the estimate of a mean is never above the sum (Jensen)") {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        const scene<float> s(seed, 400, 12, 3);
        const verkv::windows fixed{5, 5};
        key_clusters c({.tokens_per_cluster = 1 + seed});
        c.fit(cpu{}, s.keys.view(), s.values.view(), fixed);
        const auto query = support::generator(seed + 50).normals<float>(12, 1.5);
        const auto logits = logits_of(s.keys.view(), query);
        const double shift = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
        const auto weight = weights_of(logits, shift);
        const auto centroid = logits_of(c.centroids(), query);
        const auto centroid_weight = weights_of(centroid, shift);
        double total = 0;
        for (const float w : weight) {
            total += static_cast<double>(w);
        }
        double before = -1;
        verkv::cluster_estimate::workspace memory;
        for (const double read : {0.0, 0.2, 0.6, 1.0}) {
            cluster_selection out;
            const verkv::cluster_estimate all{token_count::share(read), token_count::share(1)};
            all.select(cpu{}, c, centroid, 400, fixed, memory, out);
            const double estimate = verkv::estimate_denominator(out, weight, centroid_weight);
            CHECK(estimate <= total * (1 + 1e-6));
            CHECK(estimate >= before * (1 - 1e-6));  // what is read loses nothing
            before = estimate;
            const verkv::cluster_estimate some{token_count::share(read), token_count::share(0.1)};
            cluster_selection fewer;
            some.select(cpu{}, c, centroid, 400, fixed, memory, fewer);
            CHECK(verkv::estimate_denominator(fewer, weight, centroid_weight) <= estimate * (1 + 1e-6));
        }
        CHECK(before == Approx(total).epsilon(1e-6));
    }
}

TEST_CASE("clusters: zones by rank, rows read, and attention over both parts") {
    const scene<half> s(3, 300, 16, 6);
    const verkv::windows fixed{4, 8};
    key_clusters c({.tokens_per_cluster = 10});
    c.fit(cpu{}, s.keys.view(), s.values.view(), fixed);
    const auto query = support::generator(8).normals<float>(16, 1);
    auto centroid = logits_of(c.centroids(), query);
    cluster_selection out;
    verkv::cluster_estimate::workspace memory;
    verkv::cluster_estimate{token_count::tokens(3), token_count::tokens(7)}.select(cpu{}, c, centroid, 300, fixed,
                                                                                   memory, out);
    std::vector<std::size_t> order(c.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return centroid[a] > centroid[b]; });
    std::size_t read = 0;
    for (std::size_t j = 0; j < 3; ++j) {
        read += c.members(order[j]).size();
        for (const token_index i : c.members(order[j])) {
            CHECK(std::binary_search(out.exact.token.begin(), out.exact.token.end(), i));
        }
    }
    CHECK(out.exact.token.size() == 12 + read);
    CHECK(verkv::rows_read_by(out.exact, 300, fixed) == verkv::rows_read{read, read});
    CHECK(support::well_formed(out.exact, 300, fixed));
    std::vector<verkv::row_id> expected;
    for (std::size_t j = 3; j < 10; ++j) {
        expected.push_back(static_cast<verkv::row_id>(order[j]));
    }
    std::sort(expected.begin(), expected.end());
    CHECK(out.cluster == expected);

    verkv::attend_workspace attending;
    std::vector<float> output(6), other(6);
    float lse = 0;
    verkv::attend_clusters(cpu{}, verkv::contiguous_rows(std::span(query), 16), 0.25f, s.keys.view(), s.values.view(),
                           c, out, attending, output, lse, other);
    std::vector<double> numerator(6);
    double denominator = 0;
    const auto add = [&](double w, auto&& value) {
        denominator += w;
        for (std::size_t x = 0; x < 6; ++x) {
            numerator[x] += w * value(x);
        }
    };
    const auto logits = logits_of(s.keys.view(), query);
    for (const token_index i : out.exact.token) {
        add(std::exp(static_cast<double>(logits[i])), [&](std::size_t x) { return value_of(s.values.view()[i][x]); });
    }
    for (const verkv::row_id j : out.cluster) {
        for (const token_index i : c.members(j)) {  // each as if it had the centroid's key
            add(std::exp(static_cast<double>(centroid[j])),
                [&](std::size_t x) { return value_of(s.values.view()[i][x]); });
        }
    }
    CHECK(static_cast<double>(lse) == Approx(std::log(denominator)).epsilon(1e-5));
    for (std::size_t x = 0; x < 6; ++x) {
        CHECK(static_cast<double>(output[x]) == Approx(numerator[x] / denominator).epsilon(1e-4).margin(1e-4));
    }
    // A centroid that is not a number is neither read nor estimated.
    centroid[order[0]] = std::numeric_limits<float>::quiet_NaN();
    verkv::cluster_estimate{token_count::tokens(1), token_count::share(1)}.select(cpu{}, c, centroid, 300, fixed,
                                                                                  memory, out);
    CHECK(out.exact.token.size() == 12 + c.members(order[1]).size());
    CHECK(out.cluster.size() == c.size() - 2);
}

TEST_CASE("clusters: what does not fit is refused") {
    CHECK(support::refused([] { key_clusters({.tokens_per_cluster = 0}); }, {"clusters of 0"}));
    const scene<float> s(2, 50, 8, 4);
    key_clusters c;
    c.fit(cpu{}, s.keys.view(), s.values.view(), {0, 0});
    const std::size_t before = c.size();
    CHECK(support::refused([&] { c.fit(cpu{}, s.keys.view(), s.values.view().slice(0, 49), {0, 0}); }, {"50", "49"}));
    CHECK(c.size() == before);
    cluster_selection out;
    verkv::cluster_estimate::workspace memory;
    CHECK(support::refused(
        [&] {
            verkv::cluster_estimate{}.select(cpu{}, c, std::vector<float>(before + 1), 50, {0, 0}, memory, out);
        },
        {"logits of"}));
    out.exact.token = {1};
    out.exact.log_weight = {0};
    out.cluster = {9};
    out.log_size = {0};
    CHECK(
        support::refused([&] { (void)verkv::estimate_denominator(out, std::vector<float>(2), std::vector<float>(9)); },
                         {"cluster 9 of 9"}));
}
