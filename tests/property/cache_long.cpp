// A context of a million tokens, whole.
#include <cmath>
#include <vector>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/sketch/exact.hpp"
#include "verkv/sketch/rope_pairs.hpp"

namespace {

using namespace support;

}  // namespace

TEST_CASE("cache: a million tokens") {
    const verkv::geometry shape{2, 1, 4, 2, 1};
    constexpr std::size_t n = 1000000;
    const auto t = random_text<verkv::half>(shape, n, 1, 2);
    auto config = roomy(shape, n + 10);
    config.resident_rows = n / 8;
    verkv::thread_pool pool(2);
    verkv::layer_cache<verkv::half, verkv::exact_sketch<verkv::half>> cache(config, {}, {&pool});
    const auto id = cache.open(2);
    for (std::size_t first = 0; first < n; first += 250000) {
        prefill(cache, id, t, first, 250000);
    }
    cache.compress(id, verkv::key_norm{}, {verkv::budget::fraction(1.0 / 16), {}});
    const auto queries = random_queries<float>(shape, 1);
    const auto exact = dense_in_double(t, n, queries);
    const verkv::step_report* report = nullptr;
    const step_answer a = decode(cache, id, queries, {0.05, 0.1}, &report);
    CHECK(report->kv_head(0, 0).rows_resident == Approx(n / 16).epsilon(0.02));
    for (std::size_t h = 0; h < 2; ++h) {
        CHECK(report->query_head(0, h).certificate_after < 0.05);
        CHECK(std::exp(static_cast<double>(a.lse[h]) - exact[h].lse) == Approx(1).margin(0.05));
    }
    const step_answer dense = decode(cache, id, queries, {1e-9, 0.1}, &report);
    CHECK(report->kv_head(0, 0).rows_fetched + report->kv_head(0, 0).rows_resident > n / 2);
    CHECK(distance(dense, exact) <= 1);
    CHECK(cache.remove(id, 1000, 999000) == 998000);
    CHECK(cache.positions(id).size() == 2000);
    CHECK(cache.free_host_rows() == config.host_rows - 2000);
    cache.release(id);
    CHECK(cache.free_resident_rows() == config.resident_rows);
}
