// The same bits for any number of threads, any executor, any chunking and any other requests in the batch.
#include <memory>
#include <vector>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/models.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/largest_attention.hpp"
#include "verkv/sketch/exact.hpp"
#include "verkv/sketch/rope_pairs.hpp"

namespace {

using namespace support;

const verkv::compression sixteenth{verkv::budget::fraction(1.0 / 16), {2, 4}};

verkv::rope_pair_sketch pairs_of(std::size_t key_dim) {
    verkv::rope_pair_options options;
    options.key_dim = key_dim;
    options.group_length = 32;
    return verkv::rope_pair_sketch(options);
}

/// What a step of several requests gave, with the counts of its report.
struct outcome {
    std::vector<step_answer> answers;
    std::vector<std::size_t> counts;
    std::vector<double> certificates;

    friend bool operator==(const outcome&, const outcome&) = default;
};

template <class Cache>
outcome step(Cache& cache, const std::vector<verkv::request_id>& ids, const std::vector<std::vector<float>>& queries,
             verkv::tolerance promise = {0.2, 0.1}) {
    outcome o;
    o.answers.resize(ids.size());
    std::vector<verkv::decode_item<float>> batch;
    const verkv::geometry& shape = cache.config().shape;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        batch.push_back(item_of(shape, ids[i], std::span<const float>(queries[i]), o.answers[i]));
    }
    const verkv::step_report& report = cache.decode(std::span<const verkv::decode_item<float>>(batch), promise);
    for (const auto& r : report.per_kv_head) {
        o.counts.insert(o.counts.end(), {r.tokens, r.rows_resident, r.rows_fetched, r.rows_copied,
                                         r.shortlist_keys_read, r.bytes_moved});
    }
    for (const auto& r : report.per_query_head) {
        o.counts.insert(o.counts.end(), {r.rows_planned, r.rows_shrunk});
        o.certificates.insert(o.certificates.end(), {r.certificate_before, r.certificate_after, r.denominator_lse});
    }
    return o;
}

/// Three requests of different lengths, two steps, on a backend.
template <class T, class Sketch>
std::vector<outcome> run(const Sketch& sketch, const verkv::cpu& exec, const verkv::geometry& shape,
                         const std::vector<text<T>>& texts) {
    std::size_t longest = 0;
    for (const auto& t : texts) {
        longest = std::max(longest, t.tokens);
    }
    verkv::layer_cache<T, Sketch> cache(roomy(shape, longest, texts.size()), sketch, exec);
    std::vector<verkv::request_id> ids;
    std::vector<std::vector<float>> queries;
    for (std::size_t i = 0; i < texts.size(); ++i) {
        const auto id = cache.open(i);
        const std::size_t prompt = texts[i].tokens - 3;
        prefill(cache, id, texts[i], 0, prompt);
        cache.compress(id, verkv::key_norm{}, sixteenth);
        append(cache, id, texts[i], prompt, 3);
        ids.push_back(id);
        queries.push_back(random_queries<float>(shape, i));
    }
    std::vector<outcome> all{step(cache, ids, queries), step(cache, ids, queries)};
    std::reverse(ids.begin(), ids.end());
    std::reverse(queries.begin(), queries.end());
    all.push_back(step(cache, ids, queries));
    REQUIRE(all.front().counts[2] > 0);
    return all;
}

template <class T, class Sketch>
void any_threads(const Sketch& sketch) {
    // Long enough for every verb to be cut into several tasks of its own, if it were let.
    const verkv::geometry shape{6, 2, 16, 8, 0};
    const std::vector<text<T>> texts{random_text<T>(shape, 5000, 1), random_text<T>(shape, 200, 2),
                                     random_text<T>(shape, 9000, 3)};
    const auto expected = run<T>(sketch, {}, shape, texts);
    for (const std::size_t threads : {1u, 2u, 5u}) {
        CAPTURE(threads);
        verkv::thread_pool pool(threads);
        CHECK(run<T>(sketch, {&pool}, shape, texts) == expected);
    }
    for (const std::size_t workers : {1u, 3u}) {
        someone::backward_executor backwards(workers);
        CHECK(run<T>(sketch, {&backwards}, shape, texts) == expected);
        CHECK_FALSE(backwards.nested);
        CHECK(backwards.done > 0);
    }
}

}  // namespace

TEST_CASE("cache: the same bits for any threads, exact sketch") {
    any_threads<float>(verkv::exact_sketch<float>{});
}

TEST_CASE("cache: the same bits for any threads, RoPE pairs of halves") {
    any_threads<verkv::half>(pairs_of(16));
}

TEST_CASE("cache: a scorer that looks at queries gives the same draw for any threads") {
    const verkv::geometry shape{4, 2, 8, 4, 0};
    const auto t = random_text<float>(shape, 1500, 4);
    const auto kept = generator(4).normals<float>(100 * 4 * 8);
    std::vector<verkv::position_t> positions;
    for (int i = 0; i < 100; ++i) {
        positions.push_back(15 * i + 14);
    }
    const auto draw = [&](const verkv::cpu& exec) {
        verkv::layer_cache<float, verkv::exact_sketch<float>> cache(roomy(shape, 1500), {}, exec);
        const auto id = cache.open(9);
        prefill(cache, id, t, 0, 1500);
        cache.compress(id, verkv::largest_attention{}, sixteenth,
                       verkv::heads_of(std::span<const float>(kept), 100, 4, 8), positions);
        auto s = state_of<float>(cache, id);
        s.places.clear();
        return s;
    };
    const auto expected = draw({});
    verkv::thread_pool pool(3);
    CHECK(draw({&pool}) == expected);
    someone::backward_executor backwards(2);
    CHECK(draw({&backwards}) == expected);
    CHECK_FALSE(backwards.nested);
}

TEST_CASE("cache: the same bits however the prompt is cut into chunks") {
    const verkv::geometry shape{4, 2, 16, 8, 0};
    constexpr std::size_t n = 700;
    const auto t = random_text<verkv::bfloat16>(shape, n, 5);
    const auto queries = random_queries<float>(shape, 5);
    std::vector<outcome> outcomes;
    for (const std::vector<std::size_t>& chunks : {std::vector<std::size_t>{700},
                                                   {1, 699},
                                                   {0, 64, 0, 636},
                                                   std::vector<std::size_t>(100, 7),
                                                   std::vector<std::size_t>(700, 1)}) {
        verkv::layer_cache<verkv::bfloat16, verkv::rope_pair_sketch> cache(roomy(shape, n), pairs_of(16));
        const auto id = cache.open(3);
        std::size_t first = 0;
        for (const std::size_t chunk : chunks) {
            prefill(cache, id, t, first, chunk);
            first += chunk;
        }
        cache.compress(id, verkv::key_norm{}, sixteenth);
        outcomes.push_back(step(cache, {id}, {queries}));
        CHECK(outcomes.back() == outcomes.front());
    }
}

TEST_CASE("cache: the same bits whatever other requests are in the batch or in the cache") {
    const verkv::geometry shape{4, 2, 16, 8, 0};
    constexpr std::size_t n = 400;
    const auto t = random_text<float>(shape, n, 6);
    const auto other = random_text<float>(shape, n, 7);
    const auto queries = random_queries<float>(shape, 6);
    const auto open = [&](auto& cache, const text<float>& which, std::size_t length, std::uint64_t seed) {
        const auto id = cache.open(seed);
        prefill(cache, id, which, 0, length);
        cache.compress(id, verkv::key_norm{}, sixteenth);
        return id;
    };
    verkv::layer_cache<float, verkv::rope_pair_sketch> alone(roomy(shape, n), pairs_of(16));
    const auto first = step(alone, {open(alone, t, n, 3)}, {queries});
    verkv::layer_cache<float, verkv::rope_pair_sketch> shared(roomy(shape, n, 4), pairs_of(16));
    const auto a = open(shared, other, 100, 5);
    const auto gone = open(shared, other, n, 6);
    const auto id = open(shared, t, n, 3);
    shared.release(gone);
    const auto b = open(shared, other, 0, 7);
    const auto c = open(shared, other, n, 3);
    const auto both = step(shared, {a, b, id, c}, {queries, queries, queries, queries});
    CHECK(both.answers[2] == first.answers[0]);
    const auto reversed = step(shared, {c, id, b, a}, {queries, queries, queries, queries});
    CHECK(reversed.answers[1] == first.answers[0]);
    CHECK(reversed.answers[0] == both.answers[3]);
    const std::vector<std::size_t> counts(first.counts.begin(), first.counts.begin() + 5);
    CHECK(std::vector<std::size_t>(both.counts.begin() + 24, both.counts.begin() + 29) == counts);
}

TEST_CASE("cache: a step that is repeated has the same bits") {
    const verkv::geometry shape{3, 1, 32, 16, 0};
    const auto t = random_text<verkv::half>(shape, 600, 8);
    verkv::layer_cache<verkv::half, verkv::rope_pair_sketch> cache(roomy(shape, 600), pairs_of(32));
    const auto id = cache.open(1);
    prefill(cache, id, t, 0, 600);
    cache.compress(id, verkv::key_norm{}, sixteenth);
    const auto queries = random_queries<float>(shape, 8);
    const auto first = step(cache, {id}, {queries});
    for (int i = 0; i < 20; ++i) {
        // In between, steps that stage other rows.
        step(cache, {id}, {random_queries<float>(shape, 100 + static_cast<std::uint64_t>(i))}, {0.01, 0.1});
        const auto again = step(cache, {id}, {queries});
        CHECK(again.answers == first.answers);
        CHECK(again.certificates == first.certificates);
    }
}
