// The life of requests: prefill, compress, append, compress again, roll back, shift, release; and what is refused.
#include <cmath>
#include <limits>
#include <vector>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/models.hpp"
#include "support/refusal.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/score/compose.hpp"
#include "verkv/score/given.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/snapkv.hpp"
#include "verkv/sketch/exact.hpp"
#include "verkv/sketch/rope_pairs.hpp"

namespace {

using namespace support;
using verkv::invalid_state;
using verkv::out_of_capacity;

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
const verkv::compression eighth{verkv::budget::fraction(1.0 / 8), {2, 4}};

template <class T = float>
using exact_cache = verkv::layer_cache<T, verkv::exact_sketch<T>>;
template <class T>
using greedy_cache = verkv::layer_cache<T, verkv::exact_sketch<T>, verkv::greedy<>>;

template <class Cache>
verkv::request_id compressed(Cache& cache, const text<float>& t, std::size_t n, std::uint64_t seed = 1) {
    const auto id = cache.open(seed);
    prefill(cache, id, t, 0, n);
    cache.compress(id, verkv::key_norm{}, eighth);
    return id;
}

/// Tokens first ... of a text with other positions.
text<float> moved(text<float> t, int by) {
    for (auto& p : t.positions) {
        p += by;
    }
    return t;
}

}  // namespace

TEST_CASE("cache: the life of a request") {
    const verkv::geometry shape{4, 2, 12, 6, 0};
    constexpr std::size_t n = 300;
    const auto t = random_text<float>(shape, n, 1);
    exact_cache<> cache(roomy(shape, n, 2), {});
    const auto id = cache.open(5);
    for (std::size_t first = 0; first < 200; first += 40) {
        prefill(cache, id, t, first, 40);
    }
    CHECK(cache.free_host_rows() == 2 * 2 * n - 400);
    CHECK(cache.free_resident_rows() == 2 * 2 * n);
    const auto queries = random_queries<float>(shape, 1);
    CHECK(refused<invalid_state>([&] { decode(cache, id, queries); }, {"200", "compress"}));
    CHECK(refused<invalid_state>([&] { append(cache, id, t, 200, 1); }, {"200"}));
    cache.compress(id, verkv::key_norm{}, eighth);
    const auto drawn = state_of<float>(cache, id);
    std::size_t resident = 0;
    for (std::size_t i = 0; i < 400; ++i) {
        resident += drawn.resident[i];
        CHECK((drawn.probability[i] > 0 && drawn.probability[i] <= 1));
        CHECK((drawn.probability[i] < 1 || drawn.resident[i]));
    }
    CHECK(cache.free_resident_rows() == 2 * 2 * n - resident);
    CHECK(cache.sketch_of(id, 1).size() == 200);
    for (const std::size_t h : {0u, 1u}) {
        for (const verkv::token_index fixed : {0u, 1u, 196u, 199u}) {
            CHECK(cache.resident(id, h, fixed));
            CHECK(cache.probability(id, h, fixed) == 1);
        }
    }
    // Tokens that come later are resident, and part of the answer at once.
    for (std::size_t i = 200; i < 250; ++i) {
        append(cache, id, t, i, 1);
        CHECK(cache.resident(id, 1, static_cast<verkv::token_index>(i)));
        if (i % 10 == 0) {
            CHECK(distance(decode(cache, id, queries, {1e-9, 0.1}), dense_in_double(t, i + 1, queries)) <= 1);
        }
    }
    CHECK(cache.sketch_of(id, 1).size() == 200);
    // Compress again: all 250, an independent draw.
    cache.compress(id, verkv::key_norm{}, eighth);
    CHECK(cache.sketch_of(id, 1).size() == 250);
    const auto again = state_of<float>(cache, id);
    cache.compress(id, verkv::key_norm{}, eighth);
    const auto third = state_of<float>(cache, id);
    CHECK(again.probability == third.probability);
    CHECK(again.resident != third.resident);
    CHECK(again.rows == third.rows);
    CHECK(distance(decode(cache, id, queries, {1e-9, 0.1}), dense_in_double(t, 250, queries)) <= 1);
    // More prompt on top of it.
    prefill(cache, id, t, 250, 50);
    CHECK(refused<invalid_state>([&] { decode(cache, id, queries); }, {"50"}));
    cache.compress(id, verkv::key_norm{}, eighth);
    CHECK(distance(decode(cache, id, queries, {1e-9, 0.1}), dense_in_double(t, n, queries)) <= 1);
    cache.release(id);
    CHECK(cache.free_host_rows() == 2 * 2 * n);
    CHECK(cache.free_resident_rows() == 2 * 2 * n);
}

TEST_CASE("cache: draws depend on seed, layer, KV head and number of the draw alone") {
    const verkv::geometry shape{2, 2, 4, 4, 0};
    constexpr std::size_t n = 400;
    auto t = random_text<float>(shape, n, 2);
    for (std::size_t i = 0; i < n; ++i) {  // both KV heads alike, so that their r are
        std::copy_n(t.key(i, 0), 4, t.key(i, 1));
    }
    const auto residents = [&](std::uint64_t seed, std::uint32_t layer, std::size_t draws, std::size_t head) {
        auto config = roomy(shape, n, 2);
        config.layer = layer;
        exact_cache<> cache(config, {});
        static_cast<void>(cache.open(99));
        const auto id = cache.open(seed);
        prefill(cache, id, t, 0, n);
        for (std::size_t i = 0; i < draws; ++i) {
            cache.compress(id, verkv::key_norm{}, eighth);
        }
        std::vector<bool> all;
        for (std::size_t i = 0; i < n; ++i) {
            all.push_back(cache.resident(id, head, static_cast<verkv::token_index>(i)));
        }
        return all;
    };
    const auto base = residents(1, 0, 1, 0);
    CHECK(residents(1, 0, 1, 0) == base);
    CHECK(residents(2, 0, 1, 0) != base);
    CHECK(residents(1, 1, 1, 0) != base);
    CHECK(residents(1, 0, 2, 0) != base);
    CHECK(residents(1, 0, 1, 1) != base);
    // A slot that is used again starts at its first draw.
    exact_cache<> cache(roomy(shape, n), {});
    for (int life = 0; life < 3; ++life) {
        const auto id = compressed(cache, t, n, 1);
        for (std::size_t i = 0; i < n; ++i) {
            REQUIRE(cache.resident(id, 0, static_cast<verkv::token_index>(i)) == base[i]);
        }
        cache.release(id);
    }
}

TEST_CASE("cache: a roll-back, and decoding on") {
    const verkv::geometry shape{4, 2, 12, 6, 0};
    constexpr std::size_t n = 260;
    const auto t = random_text<float>(shape, n, 3);
    const auto other = moved(random_text<float>(shape, 40, 4), 230);
    const auto queries = random_queries<float>(shape, 3);
    greedy_cache<float> cache(roomy(shape, n), {});
    const auto id = compressed(cache, t, 200);
    append(cache, id, t, 200, 60);
    const verkv::tolerance promise{0.3, 0.1};
    decode(cache, id, queries, promise);
    CHECK(cache.truncate(id, 230) == 30);
    CHECK(cache.positions(id).size() == 230);
    CHECK(cache.truncate(id, 230) == 0);
    append(cache, id, other, 0, 20);
    const step_answer a = decode(cache, id, queries, promise);

    // The same tokens without the detour.
    greedy_cache<float> straight(roomy(shape, n), {});
    const auto fresh = compressed(straight, t, 200);
    append(straight, fresh, t, 200, 30);
    append(straight, fresh, other, 0, 20);
    CHECK(decode(straight, fresh, queries, promise) == a);
    auto left = state_of<float>(cache, id);
    auto right = state_of<float>(straight, fresh);
    left.staged = right.staged = {};
    left.places = right.places = {};
    CHECK(left == right);

    // Back into the prompt: what is left keeps its draw.
    CHECK(cache.truncate(id, 150) == 100);
    greedy_cache<float> shorter(roomy(shape, n), {});
    const auto part = shorter.open(77);
    prefill(shorter, part, t, 0, 150);
    std::vector<std::vector<float>> r(2);
    std::vector<std::vector<verkv::token_index>> sample(2);
    for (std::size_t h = 0; h < 2; ++h) {
        for (verkv::token_index i = 0; i < 150; ++i) {
            r[h].push_back(cache.probability(id, h, i));
            if (cache.resident(id, h, i)) {
                sample[h].push_back(i);
            }
        }
    }
    shorter.adopt(part, std::vector<std::span<const float>>{r[0], r[1]},
                  std::vector<std::span<const verkv::token_index>>{sample[0], sample[1]});
    CHECK(decode(cache, id, queries, promise) == decode(shorter, part, queries, promise));
    CHECK(cache.truncate(id, -5) == 150);
    CHECK(decode(cache, id, queries).lse[3] == -std::numeric_limits<float>::infinity());
    CHECK(cache.free_host_rows() == 2 * n);
    CHECK(cache.free_resident_rows() == 2 * n);
}

TEST_CASE("cache: removal while a prompt waits for compress") {
    const verkv::geometry shape{1, 1, 4, 4, 0};
    const auto t = random_text<float>(shape, 100, 4);
    exact_cache<> cache(roomy(shape, 100), {});
    const auto id = compressed(cache, t, 60);
    prefill(cache, id, t, 60, 30);
    CHECK(cache.remove(id, 50, 70) == 20);  // ten of the compressed, ten of those that wait
    const auto queries = random_queries<float>(shape, 4);
    CHECK(refused<invalid_state>([&] { decode(cache, id, queries); }, {"20"}));
    CHECK(cache.remove(id, 70, 200) == 20);
    CHECK(cache.sketch_of(id, 0).size() == 50);
    CHECK(distance(decode(cache, id, queries, {1e-9, 0.1}), dense_in_double(t, 50, queries)) <= 1);
    CHECK(cache.remove(id, 0, 0) == 0);
    CHECK(cache.remove(id, 20, 10) == 0);
    CHECK(cache.remove(id, 1000, 2000) == 0);
}

TEST_CASE("cache: the last position there is") {
    const verkv::geometry shape{1, 1, 1, 1, 1};
    text<float> t(shape, 3);
    t.positions = {5, 2147483646, 2147483647};
    exact_cache<> cache(roomy(shape, 4), {});
    const auto id = cache.open();
    append(cache, id, t, 0, 3);
    CHECK(refused([&] { append(cache, id, t, 2, 1); }, {"2147483647"}));
    CHECK(refused([&] { cache.shift(id, 0, 2147483647, 1); }, {"2147483646"}));
    CHECK(cache.remove(id, 2147483646, 2147483647) == 1);
    CHECK(cache.truncate(id, 2147483647) == 1);
    CHECK(cache.positions(id).size() == 1);
    cache.shift(id, 5, 6, 2147483642);
    CHECK(cache.positions(id)[0] == 2147483647);
    cache.shift(id, 0, 2147483647, -2147483647);  // [0, last) does not hold it
    CHECK(cache.positions(id)[0] == 2147483647);
}

TEST_CASE("cache: shifted keys are turned in host memory, among the residents, in staging and in the sketch") {
    const verkv::geometry shape{2, 1, 4, 2, 1};
    constexpr std::size_t n = 120;
    const auto t = random_text<float>(shape, n, 6);
    const auto queries = random_queries<float>(shape, 6);
    // A rotation of each pair by an angle for each step of the position.
    const auto rotate = [](std::span<float> key, verkv::position_t delta) {
        const double angle = 0.1 * static_cast<double>(delta);
        for (std::size_t c = 0; c < key.size(); c += 2) {
            const double x = static_cast<double>(key[c]);
            const double y = static_cast<double>(key[c + 1]);
            key[c] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
            key[c + 1] = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
        }
    };
    verkv::rope_pair_options options;
    options.key_dim = 4;
    options.pair_fraction = 1;
    options.bits = 8;
    const auto life = [&](auto& cache) {
        const auto id = cache.open(3);
        prefill(cache, id, t, 0, 100);
        cache.compress(id, verkv::key_norm{}, eighth);
        append(cache, id, t, 100, 20);
        decode(cache, id, queries, {1e-9, 0.1});
        CHECK(cache.staged_rows(id, 0) > 0);
        cache.remove(id, 10, 50);
        cache.shift(id, 50, 1000, -40, rotate);
        cache.shift(id, 80, 1000, -2147483647 + 1000, rotate);  // nothing there
        text<float> left(shape, 80);
        for (std::size_t i = 0; i < 80; ++i) {
            const std::size_t from = i < 10 ? i : i + 40;
            std::copy_n(t.keys.begin() + static_cast<std::ptrdiff_t>(4 * from), 4, left.key(i, 0));
            std::copy_n(t.values.begin() + static_cast<std::ptrdiff_t>(2 * from), 2, left.value(i, 0));
            if (i >= 10) {
                rotate({left.key(i, 0), 4}, -40);
            }
        }
        CHECK(cache.positions(id)[10] == 10);
        const step_answer dense = decode(cache, id, queries, {1e-9, 0.1});
        CHECK(distance(dense, dense_in_double(left, 80, queries)) <= 1);
        const step_answer a = decode(cache, id, queries, {0.5, 0.1});
        for (std::size_t g = 0; g < 2; ++g) {
            CHECK(a.lse[g] == Approx(dense_in_double(left, 80, queries)[g].lse).margin(0.7));
        }
        std::vector<float> logits(cache.sketch_of(id, 0).size());
        CHECK(logits.size() == 60);
        cache.sketch_of(id, 0).estimate(verkv::cpu{},
                                        verkv::contiguous_rows(std::span<const float>(queries).first(4), 4), 1.0f,
                                        {logits.data(), 1, logits.size(), static_cast<std::ptrdiff_t>(logits.size())});
        for (std::size_t i = 0; i < 60; ++i) {
            double exact = 0;
            for (std::size_t c = 0; c < 4; ++c) {
                exact += static_cast<double>(queries[c]) * static_cast<double>(left.key(i, 0)[c]);
            }
            CHECK(logits[i] == Approx(exact).margin(0.2));
        }
    };
    exact_cache<> exact(roomy(shape, n), {});
    life(exact);
    verkv::layer_cache<float, verkv::rope_pair_sketch> sketched(roomy(shape, n), verkv::rope_pair_sketch(options));
    life(sketched);
    verkv::layer_cache<float, someone::off_sketch> foreign(roomy(shape, n), someone::off_sketch{});
    life(foreign);
}

TEST_CASE("cache: a shift that would meet or pass other tokens is refused") {
    const verkv::geometry shape{1, 1, 1, 1, 1};
    text<float> t(shape, 4);
    t.positions = {0, 5, 6, 10};
    exact_cache<> cache(roomy(shape, 4), {});
    const auto id = cache.open();
    append(cache, id, t, 0, 4);
    const auto before = state_of<float>(cache, id);
    const auto shift = [&](int first, int last, int delta) {
        return [&cache, id, first, last, delta] { cache.shift(id, first, last, delta); };
    };
    CHECK(refused(shift(5, 7, 4), {"5", "6", "4", "10"}));
    CHECK(refused(shift(5, 7, -5), {"-5"}));
    CHECK(refused(shift(5, 7, -100), {"-100"}));
    CHECK(refused(shift(0, 1, -1), {"-1"}));
    CHECK(refused(shift(0, 1, 5), {"5"}));
    CHECK(refused(shift(10, 11, 2147483647), {"2147483647"}));
    CHECK(refused(shift(0, 100, -2147483647 - 1), {"-2147483648"}));
    CHECK(state_of<float>(cache, id) == before);
    shift(5, 7, 3)();
    CHECK(std::vector<int>(cache.positions(id).begin(), cache.positions(id).end()) == std::vector<int>{0, 8, 9, 10});
    shift(0, 100, 7)();
    shift(0, 100, 0)();
    shift(50, 100, -50)();
    CHECK(std::vector<int>(cache.positions(id).begin(), cache.positions(id).end()) == std::vector<int>{7, 15, 16, 17});
}

TEST_CASE("cache: ids are void after release, and requests run out") {
    const verkv::geometry shape{1, 1, 2, 2, 0};
    const auto t = random_text<float>(shape, 10, 7);
    exact_cache<> cache(roomy(shape, 10, 2), {});
    const auto a = cache.open();
    const auto b = cache.open();
    CHECK(refused<out_of_capacity>([&] { static_cast<void>(cache.open()); }, {"2"}));
    append(cache, a, t, 0, 5);
    cache.release(a);
    const auto c = cache.open();
    CHECK(c.slot == a.slot);
    CHECK_FALSE(c == a);
    append(cache, c, t, 0, 3);
    const auto before = state_of<float>(cache, c);
    const std::vector<float> queries(2, 1.0f);
    for (const verkv::request_id id : {a, verkv::request_id{7, 0}, verkv::request_id{b.slot, b.generation + 1}}) {
        CHECK(refused([&] { cache.release(id); }, {"not open"}));
        CHECK(refused([&] { append(cache, id, t, 3, 1); }, {"not open"}));
        CHECK(refused([&] { prefill(cache, id, t, 3, 1); }, {"not open"}));
        CHECK(refused([&] { cache.compress(id, verkv::key_norm{}, eighth); }, {"not open"}));
        CHECK(refused([&] { adopt(cache, id, {}, {}); }, {"not open"}));
        CHECK(refused([&] { decode(cache, id, queries); }, {"not open"}));
        CHECK(refused([&] { cache.remove(id, 0, 1); }, {"not open"}));
        CHECK(refused([&] { cache.truncate(id, 0); }, {"not open"}));
        CHECK(refused([&] { cache.shift(id, 0, 1, 1); }, {"not open"}));
        CHECK(refused([&] { cache.release_staging(id); }, {"not open"}));
        CHECK(refused([&] { static_cast<void>(cache.positions(id)); }, {"not open"}));
        CHECK(refused([&] { static_cast<void>(cache.resident(id, 0, 0)); }, {"not open"}));
    }
    CHECK(state_of<float>(cache, c) == before);
    // Looking at what is not there.
    CHECK(refused([&] { static_cast<void>(cache.resident(c, 0, 3)); }, {"token 3 of 3"}));
    CHECK(refused([&] { static_cast<void>(cache.probability(c, 1, 0)); }, {"KV head 1 of 1"}));
    CHECK(refused([&] { static_cast<void>(cache.host_row(b, 0, 0)); }, {"token 0 of 0"}));
    CHECK(refused([&] { static_cast<void>(cache.staged_rows(b, 1)); }, {"KV head 1 of 1"}));
}

TEST_CASE("cache: running out of rows changes nothing") {
    const verkv::geometry shape{2, 2, 3, 2, 0};
    const auto t = random_text<float>(shape, 40, 8);
    auto config = roomy(shape, 30);
    config.host_rows = 50;
    config.resident_rows = 20;
    exact_cache<> cache(config, {});
    const auto id = cache.open();
    prefill(cache, id, t, 0, 20);
    cache.compress(id, verkv::key_norm{}, {verkv::budget::tokens(7), {1, 1}});
    const auto queries = random_queries<float>(shape, 8);
    decode(cache, id, queries, {0.2, 0.1});
    const auto before = state_of<float>(cache, id);
    const step_answer answer = decode(cache, id, queries, {0.2, 0.1});
    const auto unchanged = [&] {
        CHECK(state_of<float>(cache, id) == before);
        CHECK(decode(cache, id, queries, {0.2, 0.1}) == answer);
    };
    CHECK(refused<out_of_capacity>([&] { prefill(cache, id, t, 20, 6); }, {"host row", "12", "10 of 50"}));
    unchanged();
    CHECK(refused<out_of_capacity>([&] { append(cache, id, t, 20, 6); }, {"host row", "12"}));
    unchanged();
    const std::size_t free_resident = cache.free_resident_rows();
    if (free_resident < 10) {
        CHECK(refused<out_of_capacity>([&] { append(cache, id, t, 20, 5); }, {"resident row"}));
        unchanged();
    }
    CHECK(refused<out_of_capacity>([&] { prefill(cache, id, t, 20, 11); }, {"20", "11", "30"}));  // max_tokens
    unchanged();
    // A sample that does not fit.
    CHECK(refused<out_of_capacity>(
        [&] {
            cache.compress(id, verkv::key_norm{}, {verkv::budget::fraction(1), {}});
        },
        {"20 tokens", "40"}));
    unchanged();
    std::vector<float> all_certain(20, 1.0f);
    std::vector<verkv::token_index> all(20);
    for (verkv::token_index i = 0; i < 20; ++i) {
        all[i] = i;
    }
    CHECK(refused<out_of_capacity>([&] { adopt(cache, id, all_certain, all); }, {"40"}));
    unchanged();
    // The draw after a refused one is the one that was due.
    cache.compress(id, verkv::key_norm{}, {verkv::budget::tokens(7), {1, 1}});
    exact_cache<> straight(roomy(shape, 30), {});
    const auto other = straight.open();
    prefill(straight, other, t, 0, 20);
    straight.compress(other, verkv::key_norm{}, {verkv::budget::tokens(7), {1, 1}});
    straight.compress(other, verkv::key_norm{}, {verkv::budget::tokens(7), {1, 1}});
    CHECK(state_of<float>(cache, id).resident == state_of<float>(straight, other).resident);
}

TEST_CASE("cache: bad arguments are refused and change nothing") {
    const verkv::geometry shape{4, 2, 6, 4, 0};
    constexpr std::size_t n = 100;
    const auto t = random_text<float>(shape, n, 9);
    exact_cache<> cache(roomy(shape, n, 2), {});
    const auto id = compressed(cache, t, 60);
    append(cache, id, t, 60, 10);
    const auto queries = random_queries<float>(shape, 9);
    decode(cache, id, queries, {0.3, 0.1});
    const auto before = state_of<float>(cache, id);
    const step_answer answer = decode(cache, id, queries, {0.3, 0.1});
    const auto unchanged = [&] {
        CHECK(state_of<float>(cache, id) == before);
        CHECK(decode(cache, id, queries, {0.3, 0.1}) == answer);
    };

    SECTION("tolerances") {
        for (const double epsilon : {0.0, -0.1, not_a_number, static_cast<double>(INFINITY)}) {
            CHECK(refused([&] { decode(cache, id, queries, {epsilon, 0.1}); }, {"epsilon"}));
        }
        for (const double delta : {0.0, 1.0, -0.1, 1.5, not_a_number}) {
            CHECK(refused([&] { decode(cache, id, queries, {0.1, delta}); }, {"delta"}));
        }
    }
    SECTION("budgets") {
        for (const double kept : {0.0, -0.5, 1.0000001, not_a_number}) {
            CHECK(refused(
                [&] {
                    cache.compress(id, verkv::key_norm{}, {verkv::budget::fraction(kept), {}});
                },
                {"kept"}));
        }
        CHECK(refused([&] { cache.compress(id, verkv::key_norm{}, {verkv::budget::tokens(0), {}}); }, {"0"}));
        // Nothing left beside the fixed tokens.
        CHECK(refused(
            [&] {
                cache.compress(id, verkv::key_norm{}, {verkv::budget::tokens(10), {5, 5}});
            },
            {"10", "60"}));
    }
    SECTION("geometries and sizes") {
        const auto build = [&](auto change) {
            return [change, &shape] {
                auto config = roomy(shape, 10);
                change(config);
                exact_cache<> other(config, {});
            };
        };
        CHECK(refused(build([](auto& c) { c.shape.query_heads = 5; }), {"5", "2"}));
        CHECK(refused(build([](auto& c) { c.shape.query_heads = 0; }), {"0"}));
        CHECK(refused(build([](auto& c) { c.shape.kv_heads = 0; }), {"0"}));
        CHECK(refused(build([](auto& c) { c.shape.key_dim = 0; }), {"key_dim 0"}));
        CHECK(refused(build([](auto& c) { c.shape.value_dim = 0; }), {"value_dim 0"}));
        CHECK(refused(build([](auto& c) { c.shape.scale = -1; }), {"-1"}));
        CHECK(refused(build([](auto& c) { c.shape.scale = std::nanf(""); }), {"scale"}));
        CHECK(refused(build([](auto& c) { c.max_requests = 0; }), {"max_requests"}));
        CHECK(refused(build([](auto& c) { c.max_tokens = 0; }), {"max_tokens"}));
        CHECK(refused(build([](auto& c) { c.max_tokens = std::size_t{1} << 31; }), {"max_tokens"}));
        CHECK(refused(build([](auto& c) { c.staging_rows = 63; }), {"63"}));
        CHECK(message_of(build([](auto&) {})).empty());
    }
    SECTION("shapes and strides of rows") {
        const auto keys = t.key_view(70, 3);
        const auto values = t.value_view(70, 3);
        const auto positions = t.position_span(70, 3);
        const auto tried = [&](verkv::heads_view<float> k, verkv::heads_view<float> v,
                               std::span<const verkv::position_t> p, std::initializer_list<std::string> parts) {
            CHECK(refused([&] { cache.append(id, k, v, p); }, parts));
            CHECK(refused([&] { cache.prefill(id, k, v, p); }, parts));
        };
        const auto with = [](auto view, auto change) {
            change(view);
            return view;
        };
        tried(keys, values, t.position_span(70, 2), {"3 keys", "2 positions"});
        tried(keys, t.value_view(70, 2), positions, {"2 values"});
        tried(with(keys, [](auto& v) { v.heads = 1; }), values, positions, {"1", "2 KV heads"});
        tried(keys, with(values, [](auto& v) { v.heads = 3; }), positions, {"3", "2 KV heads"});
        tried(with(keys, [](auto& v) { v.width = 5; }), values, positions, {"5", "6"});
        tried(keys, with(values, [](auto& v) { v.width = 6; }), positions, {"6", "4"});
        tried(with(keys, [](auto& v) { v.token_stride = 11; }), values, positions, {"overlap", "11"});
        tried(with(keys, [](auto& v) { v.head_stride = 5; }), values, positions, {"overlap", "5"});
        tried(keys, with(values, [](auto& v) { v.token_stride = 0; }), positions, {"overlap", "0"});
        tried(keys, with(values, [](auto& v) { v.token_stride = -8; }), positions, {"overlap", "-8"});
        tried(with(keys, [](auto& v) { v.data = nullptr; }), values, positions, {"null"});
    }
    SECTION("positions that go back") {
        for (const std::vector<verkv::position_t>& p :
             {std::vector<verkv::position_t>{69, 70, 71}, {70, 70, 71}, {72, 71, 73}, {-1, 80, 81}}) {
            CHECK(refused([&] { cache.append(id, t.key_view(70, 3), t.value_view(70, 3), p); }, {"position"}));
            CHECK(refused([&] { cache.prefill(id, t.key_view(70, 3), t.value_view(70, 3), p); }, {"position"}));
        }
        const auto empty = cache.open();
        const std::vector<verkv::position_t> negative{-1};
        CHECK(refused([&] { cache.append(empty, t.key_view(0, 1), t.value_view(0, 1), negative); }, {"-1"}));
        cache.release(empty);
    }
    SECTION("decode items") {
        step_answer out;
        const auto good = item_of(shape, id, std::span<const float>(queries), out);
        const auto tried = [&](auto change, std::initializer_list<std::string> parts) {
            auto item = good;
            change(item);
            CHECK(refused([&] { cache.decode(std::span<const verkv::decode_item<float>>(&item, 1)); }, parts));
        };
        tried([](auto& i) { i.queries.count = 3; }, {"[3, 6]", "[4, 6]"});
        tried([](auto& i) { i.queries.width = 5; }, {"[4, 5]"});
        tried([](auto& i) { i.queries.data = nullptr; }, {"queries"});
        tried([](auto& i) { i.output = i.output.first(15); }, {"15", "16"});
        tried([](auto& i) { i.lse = i.lse.first(3); }, {"3", "4"});
        const std::vector<verkv::decode_item<float>> twice{good, good};
        CHECK(refused([&] { cache.decode(std::span<const verkv::decode_item<float>>(twice)); }, {"same request"}));
        const std::vector<verkv::decode_item<float>> many{good, good, good};
        CHECK(refused([&] { cache.decode(std::span<const verkv::decode_item<float>>(many)); }, {"3", "2"}));
        CHECK(out.output == std::vector<float>(16, -7777.0f));
        // None at all is a step of nothing; lse may be left out.
        CHECK(cache.decode(std::span<const verkv::decode_item<float>>{}).per_kv_head.empty());
        auto without = good;
        without.lse = {};
        cache.decode(std::span<const verkv::decode_item<float>>(&without, 1), {0.3, 0.1});
        CHECK(out.output == answer.output);
    }
    SECTION("scores and draws") {
        std::vector<float> scores(2 * 70, 0.5f);
        const auto score = [&] { cache.compress(id, verkv::given_scores(std::span<const float>(scores)), eighth); };
        scores[80] = std::nanf("");
        CHECK(refused(score, {"score of token 10"}));
        scores.pop_back();
        CHECK(refused(score, {"139"}));
        // SnapKV without the queries it looks at.
        CHECK_FALSE(message_of([&] {
                        cache.compress(id, verkv::over_group<verkv::reduction::mean>(verkv::snapkv{}), eighth);
                    }).empty());
        std::vector<float> r(70, 0.5f);
        const auto draw = [&](std::vector<verkv::token_index> sample) {
            return [&cache, id, &r, sample] { adopt(cache, id, r, sample); };
        };
        CHECK(refused(draw({0, 0}), {"drawn token 0"}));
        CHECK(refused(draw({5, 4}), {"drawn token 4"}));
        CHECK(refused(draw({70}), {"drawn token 70 of 70"}));
        r[3] = 1;
        CHECK(refused(draw({0, 4}), {"0 of 1"}));
        for (const float bad : {0.0f, -0.5f, 1.0001f, std::nanf(""), 1e-40f}) {
            r[3] = bad;
            CHECK(refused(draw({}), {"token 3"}));
        }
        r.pop_back();
        CHECK(refused(draw({}), {"69", "70"}));
        CHECK(refused([&] { cache.adopt(id, {}, {}); }, {"0", "2"}));
    }
    unchanged();
}

TEST_CASE("cache: a sketch of keys of another width is refused at once") {
    const verkv::geometry shape{1, 1, 6, 2, 0};
    verkv::rope_pair_options options;
    options.key_dim = 8;  // not this layer's
    using cache = verkv::layer_cache<float, verkv::rope_pair_sketch>;
    CHECK(refused([&] { cache(roomy(shape, 30), verkv::rope_pair_sketch(options)); }, {"6", "8"}));
}

namespace {

/// Cannot erase, and refuses its fit number `fuse`, over all its copies.
struct fused_sketch : someone::off_sketch {
    int* fuse;

    explicit fused_sketch(int* f) : fuse(f) {}
    template <class Backend, class T>
    void fit(const Backend& exec, verkv::rows<T> keys) {
        verkv::detail::check(--*fuse != 0, "no fit of ", keys.count, " keys today");
        someone::off_sketch::fit(exec, keys);
    }
};

}  // namespace

TEST_CASE("cache: going back leaves the request as it was when a sketch or a rotation throws half way") {
    const verkv::geometry shape{2, 2, 4, 3, 0};
    constexpr std::size_t n = 40;
    const auto t = random_text<float>(shape, n, 21);
    int fuse = -1;
    verkv::layer_cache<float, fused_sketch> cache(roomy(shape, n), fused_sketch(&fuse));
    const auto id = cache.open(3);
    prefill(cache, id, t, 0, n);
    cache.compress(id, verkv::key_norm{}, {verkv::budget::tokens(10), {2, 2}});
    const auto queries = random_queries<float>(shape, 21);
    const step_answer answer = decode(cache, id, queries);
    const auto before = state_of<float>(cache, id);
    const auto unchanged = [&] {
        CHECK(state_of<float>(cache, id) == before);
        CHECK(decode(cache, id, queries) == answer);
        for (std::size_t h = 0; h < 2; ++h) {
            CHECK(cache.sketch_of(id, h).size() == n);
        }
    };
    fuse = 2;  // the second KV head
    CHECK(refused([&] { cache.remove(id, 10, 20); }, {"no fit of 30 keys"}));
    unchanged();
    fuse = 2;
    CHECK(refused([&] { cache.truncate(id, 35); }, {"no fit of 35 keys"}));
    unchanged();
    const auto negate = [](std::span<float> key, verkv::position_t) { key[0] = -key[0]; };
    fuse = 2;
    CHECK(refused([&] { cache.shift(id, 20, 100, 7, negate); }, {"no fit of 40 keys"}));
    unchanged();
    fuse = -1;
    std::size_t calls = 0;
    const auto stop = [&](std::span<float> key, verkv::position_t) {
        key[0] = -key[0];
        verkv::detail::check(++calls != 27, "no rotation");
    };
    CHECK(refused([&] { cache.shift(id, 20, 100, 7, stop); }, {"no rotation"}));
    unchanged();
    cache.shift(id, 20, 100, 7, negate);
    CHECK(cache.positions(id)[20] == 27);
    CHECK(cache.host_row(id, 1, 20)[0] == -t.key_view(0, n).row(20, 1)[0]);
    CHECK(cache.host_row(id, 1, 19)[0] == t.key_view(0, n).row(19, 1)[0]);
}

TEST_CASE("cache: the sketch is that of all keys, in order") {
    constexpr std::size_t n = 150;
    auto t = random_text<float>({2, 2, 12, 2, 0}, n, 13);
    for (std::size_t i = 0; i < n; ++i) {
        t.key(i, 0)[4] *= 7;  // KV heads whose energy lies in other channels
        t.key(i, 1)[9] *= 7;
    }
    verkv::rope_pair_options options;
    options.key_dim = 12;
    options.group_length = 16;
    verkv::layer_cache<float, verkv::rope_pair_sketch> cache(roomy(t.shape, n), verkv::rope_pair_sketch(options));
    const auto id = cache.open();
    prefill(cache, id, t, 0, 70);
    cache.compress(id, verkv::key_norm{}, {verkv::budget::fraction(0.5), {2, 4}});
    prefill(cache, id, t, 70, 80);
    cache.compress(id, verkv::key_norm{}, {verkv::budget::fraction(0.5), {2, 4}});
    const auto query = generator(13).normals<float>(12);
    for (std::size_t h = 0; h < 2; ++h) {
        verkv::rope_pair_sketch own(options);
        own.fit(verkv::cpu{}, t.head_keys(h, n));
        own.append(verkv::cpu{}, t.head_keys(h, n));
        std::vector<float> logits[2] = {std::vector<float>(n), std::vector<float>(n)};
        const auto estimate = [&](const verkv::rope_pair_sketch& s, std::vector<float>& out) {
            s.estimate(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(query), 12), 1.0f,
                       {out.data(), 1, n, n});
        };
        estimate(cache.sketch_of(id, h), logits[0]);
        estimate(own, logits[1]);
        CHECK(logits[0] == logits[1]);
    }
}

TEST_CASE("cache: rows may come with any strides, heads first or tokens first") {
    const verkv::geometry shape{4, 2, 5, 3, 0};
    constexpr std::size_t n = 90;
    const auto t = random_text<verkv::half>(shape, n, 11);
    const auto queries = random_queries<float>(shape, 11);
    exact_cache<verkv::half> plain(roomy(shape, n), {});
    const auto first = plain.open(1);
    prefill(plain, first, t, 0, n);
    plain.compress(first, verkv::key_norm{}, eighth);
    const step_answer expected = decode(plain, first, queries, {0.3, 0.1});
    // [head, token, channel] with gaps.
    std::vector<verkv::half> keys(2 * (n * 7 + 4));
    std::vector<verkv::half> values(2 * (n * 3 + 1));
    for (std::size_t i = 0; i < n; ++i) {
        for (std::size_t h = 0; h < 2; ++h) {
            std::copy_n(t.key_view(0, n).row(i, h), 5, keys.data() + h * (n * 7 + 4) + i * 7);
            std::copy_n(t.value_view(0, n).row(i, h), 3, values.data() + h * (n * 3 + 1) + i * 3);
        }
    }
    exact_cache<verkv::half> strided(roomy(shape, n), {});
    const auto id = strided.open(1);
    strided.prefill(id, {keys.data(), n, 2, 5, 7, static_cast<std::ptrdiff_t>(n * 7 + 4)},
                    {values.data(), n, 2, 3, 3, static_cast<std::ptrdiff_t>(n * 3 + 1)}, t.position_span(0, n));
    strided.compress(id, verkv::key_norm{}, eighth);
    // Queries with a stride, of another storage.
    std::vector<float> spread(4 * 9);
    for (std::size_t h = 0; h < 4; ++h) {
        std::copy_n(queries.begin() + static_cast<std::ptrdiff_t>(5 * h), 5,
                    spread.begin() + static_cast<std::ptrdiff_t>(9 * h));
    }
    step_answer a;
    auto item = item_of(shape, id, std::span<const float>(queries), a);
    item.queries = {spread.data(), 9, 4, 5, nullptr};
    strided.decode(std::span<const verkv::decode_item<float>>(&item, 1), {0.3, 0.1});
    CHECK(a == expected);
}

TEST_CASE("cache: positions with gaps are kept, and draws follow them") {
    const verkv::geometry shape{1, 1, 4, 2, 0};
    constexpr std::size_t n = 200;
    auto t = random_text<float>(shape, n, 12);
    const auto residents = [&](const text<float>& which) {
        exact_cache<> cache(roomy(shape, n), {});
        const auto id = compressed(cache, which, n);
        CHECK(std::vector<int>(cache.positions(id).begin(), cache.positions(id).end()) == which.positions);
        return state_of<float>(cache, id).resident;
    };
    const auto dense = residents(t);
    CHECK(residents(moved(t, 1000)) != dense);
    auto gaps = t;
    for (std::size_t i = 100; i < n; ++i) {
        gaps.positions[i] += 50;
    }
    const auto some = residents(gaps);
    CHECK(std::vector<bool>(some.begin(), some.begin() + 100) == std::vector<bool>(dense.begin(), dense.begin() + 100));
    CHECK(some != dense);
}
