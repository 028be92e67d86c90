// A step takes no memory, and requests that come and go do not make the cache grow.
#include <vector>

#include "support/allocations.hpp"
#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/models.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/sketch/exact.hpp"
#include "verkv/sketch/rope_pairs.hpp"

namespace {

using namespace support;

verkv::rope_pair_sketch pairs_of(std::size_t key_dim) {
    verkv::rope_pair_options options;
    options.key_dim = key_dim;
    return verkv::rope_pair_sketch(options);
}

/// Allocations of 40 steps with appends, after one.
template <class Planner, class T, class Sketch>
std::size_t allocations_of_steps(const Sketch& sketch, const verkv::cpu& exec, double epsilon) {
    const verkv::geometry shape{6, 2, 16, 8, 0};
    constexpr std::size_t prompt = 3000;
    constexpr std::size_t steps = 41;
    const auto t = random_text<T>(shape, prompt + steps, 1);
    verkv::layer_cache<T, Sketch, Planner> cache(roomy(shape, prompt + steps, 3), sketch, exec);
    std::vector<verkv::request_id> ids;
    for (std::uint64_t i = 0; i < 3; ++i) {
        const auto id = cache.open(i);
        prefill(cache, id, t, 0, prompt - 700 * i);
        cache.compress(id, verkv::key_norm{}, {verkv::budget::fraction(1.0 / 16), {4, 16}});
        ids.push_back(id);
    }
    std::vector<step_answer> answers(3);
    std::vector<std::vector<float>> queries;
    for (std::size_t s = 0; s < steps; ++s) {
        queries.push_back(random_queries<float>(shape, s));
    }
    std::vector<verkv::decode_item<float>> batch;
    for (std::size_t i = 0; i < 3; ++i) {
        batch.push_back(item_of(shape, ids[i], std::span<const float>(queries[0]), answers[i]));
    }
    std::size_t fetched = 0;
    std::size_t shrunk = 0;
    const auto one = [&](std::size_t s) {
        for (std::size_t i = 0; i < 3; ++i) {
            append(cache, ids[i], t, prompt + s, 1);
            batch[i].queries.data = queries[s].data();
        }
        const auto& report = cache.decode(std::span<const verkv::decode_item<float>>(batch), {epsilon, 0.1});
        fetched += report.kv_head(0, 0).rows_fetched;
        shrunk += report.query_head(0, 0).rows_shrunk;
    };
    one(0);
    const std::size_t count = allocations_of([&] {
        for (std::size_t s = 1; s < steps; ++s) {
            one(s);
        }
    });
    CHECK(fetched + shrunk > 0);
    return count;
}

}  // namespace

TEST_CASE("cache: a step and an append allocate nothing") {
    verkv::thread_pool pool(3);
    for (const verkv::cpu& exec : {verkv::cpu{}, verkv::cpu{&pool}}) {
        for (const double epsilon : {0.01, 0.1, 0.5}) {
            CAPTURE(epsilon, exec.threads != nullptr);
            CHECK(allocations_of_steps<verkv::greedy<>, verkv::half>(pairs_of(16), exec, epsilon) == 0);
            CHECK(allocations_of_steps<verkv::greedy<>, float>(verkv::exact_sketch<float>{}, exec, epsilon) == 0);
        }
        CHECK(allocations_of_steps<verkv::greedy<verkv::bounded_shrinkage>, float>(pairs_of(16), exec, 0.1) == 0);
        CHECK(allocations_of_steps<verkv::greedy<verkv::no_shrinkage>, float>(pairs_of(16), exec, 0.1) == 0);
        CHECK(allocations_of_steps<verkv::never_fetch<>, float>(pairs_of(16), exec, 0.1) == 0);
        CHECK(allocations_of_steps<verkv::fetch_everything, verkv::bfloat16>(pairs_of(16), exec, 0.1) == 0);
    }
}

TEST_CASE("cache: ten thousand requests come and go") {
    const verkv::geometry shape{2, 2, 4, 4, 0};
    const auto t = random_text<float>(shape, 40, 2);
    const auto queries = random_queries<float>(shape, 2);
    verkv::layer_cache<float, verkv::exact_sketch<float>> cache(roomy(shape, 40, 3), {});
    const std::size_t host = cache.free_host_rows();
    const std::size_t resident = cache.free_resident_rows();
    step_answer answer;
    const auto life = [&](std::uint64_t seed) {
        const auto id = cache.open(seed);
        prefill(cache, id, t, 0, 30);
        cache.compress(id, verkv::key_norm{}, {verkv::budget::tokens(10), {1, 2}});
        append(cache, id, t, 30, 3);
        const auto item = item_of(shape, id, std::span<const float>(queries), answer);
        cache.decode(std::span<const verkv::decode_item<float>>(&item, 1));
        cache.truncate(id, 31);
        cache.release(id);
    };
    // Two others stay open, so that slots of all ages are used.
    const auto stays = cache.open(1);
    append(cache, stays, t, 0, 5);
    life(1);
    const std::size_t of_one = allocations_of([&] { life(2); });
    std::size_t most = 0;
    for (std::uint64_t i = 0; i < 10000; ++i) {
        most = std::max(most, allocations_of([&] { life(i); }));
    }
    // What compress() takes, it gives back: a life takes the same number of times whatever its number.
    CHECK(most <= of_one + 4);
    CHECK(cache.free_host_rows() == host - 10);
    CHECK(cache.free_resident_rows() == resident - 10);
    const std::size_t without = allocations_of([&] {
        for (int i = 0; i < 10000; ++i) {
            const auto id = cache.open(3);
            append(cache, id, t, 0, 2);
            cache.release(id);
        }
    });
    CHECK(without == 0);
}
