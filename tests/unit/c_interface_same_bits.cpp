// The C interface: the same bits and the same reports as the C++ cache that it stands for.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "support/allocations.hpp"
#include "support/c_cache.hpp"
#include "support/catch.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/largest_attention.hpp"
#include "verkv/sketch/exact.hpp"
#include "verkv/sketch/rope_pairs.hpp"
#include "verkv/sketch/rotated.hpp"

namespace {

using namespace support;
using verkv::half;

constexpr std::size_t prompt = 1200;
constexpr std::size_t room = prompt + 40;
constexpr std::size_t stride = 8;

verkv::geometry shape() {
    return {.query_heads = 6, .kv_heads = 2, .key_dim = 32, .value_dim = 16, .scale = 0.21f};
}

/// What a script of two requests gave: each step's answers, and what its reports say apart from times.
struct outcome {
    std::vector<step_answer> answers;
    std::vector<std::size_t> counts;
    std::vector<double> certificates;
    std::size_t failed = 0;  // calls: counted, for Catch's macros are for one thread

    friend bool operator==(const outcome&, const outcome&) = default;
};

/// Queries of the prompt, half of them where the scorer does not look.
struct seen_queries {
    std::vector<float> rows;
    std::vector<std::int64_t> at;

    seen_queries() {
        for (std::int64_t p = 3; p < std::int64_t{prompt}; p += 4) {
            at.push_back(p);
            const auto one = random_queries<float>(shape(), 1000 + static_cast<std::uint64_t>(p));
            rows.insert(rows.end(), one.begin(), one.end());
        }
    }
};

std::vector<float> queries_of(std::size_t step, std::size_t request) {
    auto q = random_queries<float>(shape(), 10 * step + request);
    for (float& x : q) {
        x *= 2;
    }
    return q;
}

constexpr std::size_t steps = 4;

verkv_options options_of(std::size_t requests = 2) {
    verkv_options o = c_options(shape(), room, requests);
    o.layer = 3;
    o.kept_at_least = 100;
    o.sink = 5;
    o.local = 9;
    return o;
}

/// Two requests: one ranked by attention, one by key norm; a draft that is taken back; a second draw.
outcome run_c(const verkv_options& options, double epsilon) {
    const c_text a(shape(), room, 1), b(shape(), room, 2);
    const seen_queries seen;
    c_cache cache(options);
    outcome o;
    const auto must = [&](bool ok) { o.failed += ok ? 0 : 1; };
    must(cache.status == VERKV_OK);
    verkv_request first{}, second{};
    must(verkv_open(cache, 11, &first) == VERKV_OK);
    must(verkv_open(cache, 12, &second) == VERKV_OK);
    must(prefill(cache, first, a, 0, 500) == VERKV_OK);
    must(prefill(cache, first, a, 500, prompt - 500) == VERKV_OK);
    must(prefill(cache, second, b, 0, 700) == VERKV_OK);
    must(verkv_compress(cache, first, seen.rows.data(), seen.at.data(), seen.at.size(), stride) == VERKV_OK);
    must(verkv_compress(cache, second, nullptr, nullptr, 0, 0) == VERKV_OK);
    for (std::size_t s = 0; s < steps; ++s) {
        must(append(cache, first, a, prompt + s, 1) == VERKV_OK);
        must(append(cache, second, b, 700 + s, 1) == VERKV_OK);
        if (s == 1) {
            must(append(cache, first, a, prompt + s + 1, 3) == VERKV_OK);
            must(verkv_truncate(cache, first, static_cast<std::int64_t>(prompt + s + 1)) == VERKV_OK);
            must(verkv_remove(cache, second, 100, 140) == VERKV_OK);
        }
        if (s == 2) {
            must(verkv_compress(cache, second, nullptr, nullptr, 0, 0) == VERKV_OK);
        }
        const auto q = queries_of(s, 0), r = queries_of(s, 1);
        step_answer x, y;
        const verkv_step_item items[] = {item_of(shape(), first, q, x), item_of(shape(), second, r, y)};
        must(verkv_step(cache, items, 2, epsilon, 0.1) == VERKV_OK);
        o.answers.insert(o.answers.end(), {x, y});
        for (std::size_t i = 0; i < 2; ++i) {
            for (std::uint32_t h = 0; h < shape().kv_heads; ++h) {
                verkv_head_report k{};
                must(verkv_report(cache, i, h, &k) == VERKV_OK);
                o.counts.insert(o.counts.end(), {k.tokens, k.rows_resident, k.rows_fetched, k.rows_planned,
                                                 k.rows_copied, k.rounds, k.shortlist_keys_read, k.bytes_moved});
                o.certificates.insert(o.certificates.end(),
                                      {k.certificate_before, k.certificate_after, k.certificate_observed});
                must(k.sketch_seconds > 0);
                must(k.attend_seconds > 0);
                must(verkv_sketch_bytes(cache, i == 0 ? first : second, h) > 0);
            }
        }
    }
    return o;
}

/// The same with a C++ cache.
template <class Cache>
outcome run_cpp(Cache&& cache, double epsilon) {
    const c_text a(shape(), room, 1), b(shape(), room, 2);
    const seen_queries seen;
    std::vector<half> rows(seen.rows.size());
    std::transform(seen.rows.begin(), seen.rows.end(), rows.begin(), verkv::from_float<half>);
    const std::vector<verkv::position_t> at(seen.at.begin(), seen.at.end());
    const verkv::compression how{verkv::budget::fraction(1.0 / 16).at_least(100), {5, 9}};
    const verkv::request_id first = cache.open(11), second = cache.open(12);
    prefill(cache, first, a.rows, 0, prompt);
    prefill(cache, second, b.rows, 0, 700);
    cache.compress(first, verkv::largest_attention{.stride = stride}, how,
                   verkv::heads_of(std::span<const half>(rows), at.size(), shape().query_heads, shape().key_dim), at);
    cache.compress(second, verkv::key_norm{}, how);
    outcome o;
    for (std::size_t s = 0; s < steps; ++s) {
        append(cache, first, a.rows, prompt + s, 1);
        append(cache, second, b.rows, 700 + s, 1);
        if (s == 1) {
            append(cache, first, a.rows, prompt + s + 1, 3);
            cache.truncate(first, static_cast<verkv::position_t>(prompt + s + 1));
            cache.remove(second, 100, 140);
        }
        if (s == 2) {
            cache.compress(second, verkv::key_norm{}, how);
        }
        const auto q = queries_of(s, 0), r = queries_of(s, 1);
        step_answer x, y;
        const std::vector<verkv::decode_item<float>> items{item_of(shape(), first, std::span<const float>(q), x),
                                                           item_of(shape(), second, std::span<const float>(r), y)};
        const verkv::step_report& report = cache.decode(items, {epsilon, 0.1});
        o.answers.insert(o.answers.end(), {x, y});
        for (std::size_t i = 0; i < 2; ++i) {
            for (std::size_t h = 0; h < shape().kv_heads; ++h) {
                const verkv::kv_head_report& k = report.kv_head(i, h);
                std::size_t planned = 0;
                double before = 0, after = 0, observed = 0;
                for (std::size_t g = 0; g < shape().group(); ++g) {
                    const verkv::query_head_report& query = report.query_head(i, h * shape().group() + g);
                    planned += query.rows_planned;
                    before = std::max(before, query.certificate_before);
                    after = std::max(after, query.certificate_after);
                    observed = std::max(observed, query.certificate_observed);
                }
                o.counts.insert(o.counts.end(), {k.tokens, k.rows_resident, k.rows_fetched, planned, k.rows_copied,
                                                 k.rounds, k.shortlist_keys_read, k.bytes_moved});
                o.certificates.insert(o.certificates.end(), {before, after, observed});
            }
        }
    }
    return o;
}

verkv::cache_config config_of() {
    verkv::cache_config c = roomy(shape(), room, 2);
    c.layer = 3;
    return c;
}

template <class Sketch, class Planner = verkv::water_filling<>, class Target = verkv::denominator>
auto cpp_cache(const Sketch& sketch, const Planner& planner = {}, const Target& target = {},
               const verkv::step_policies& policies = {}, std::size_t shortlist = 128) {
    return verkv::layer_cache<half, Sketch, Planner, verkv::exact_for_shortlist, Target>(
        config_of(), sketch, {}, planner, {shortlist}, target, policies);
}

verkv::rope_pair_sketch pairs(verkv::rope_pairing pairing = verkv::rope_pairing::half) {
    return verkv::rope_pair_sketch({.key_dim = shape().key_dim, .pairing = pairing});
}

std::size_t fetched(const outcome& o) {
    std::size_t sum = 0;
    for (std::size_t i = 2; i < o.counts.size(); i += 8) {
        sum += o.counts[i];
    }
    return sum;
}

std::size_t rounds(const outcome& o) {
    std::size_t sum = 0;
    for (std::size_t i = 5; i < o.counts.size(); i += 8) {
        sum += o.counts[i];
    }
    return sum;
}

}  // namespace

TEST_CASE("C interface: the defaults are the library's") {
    verkv_options o;
    verkv_default_options(&o);
    CHECK(o.struct_size == sizeof(o));
    CHECK(o.max_requests == verkv::cache_config{}.max_requests);
    CHECK(o.sketch_bits == verkv::rope_pair_options{}.bits);
    CHECK(static_cast<double>(o.sketch_share) == verkv::rope_pair_options{}.pair_fraction);
    CHECK(o.shortlist == verkv::exact_for_shortlist{}.size);
    CHECK(o.joint == int{verkv::water_filling<>{}.group == verkv::group_plan::joint});
    CHECK(o.carry_bounds == int{verkv::step_policies{}.bounds == verkv::bound_policy::carry});
    CHECK(o.check_rounds == verkv::step_policies{}.check.rounds);
    CHECK(verkv::windows{o.sink, o.local} == verkv::compression{}.fixed);
    const verkv::budget kept = verkv::budget::fraction(o.kept).at_least(o.kept_at_least);
    for (const std::size_t n : {std::size_t{100}, std::size_t{256}, std::size_t{1000}, std::size_t{100000}}) {
        CHECK(kept.rows(n) == verkv::compression{}.kept.rows(n));
    }
}

TEST_CASE("C interface: RoPE pairs, water-filling") {
    const outcome c = run_c(options_of(), 0.05);
    CHECK(fetched(c) > 0);
    CHECK(rounds(c) > 0);
    CHECK(c == run_cpp(cpp_cache(pairs()), 0.05));

    verkv_options o = options_of();
    o.rope = VERKV_ROPE_INTERLEAVED;
    o.joint = 0;
    o.check_rounds = 1;
    o.shortlist = 7;
    const outcome other = run_c(o, 0.05);
    CHECK_FALSE(other == c);
    verkv::step_policies policies;
    policies.check.rounds = 1;
    CHECK(other ==
          run_cpp(cpp_cache(pairs(verkv::rope_pairing::interleaved),
                            verkv::water_filling<>{verkv::group_plan::per_head}, verkv::denominator{}, policies, 7),
                  0.05));
}

TEST_CASE("C interface: RoPE pairs, the output") {
    verkv_options o = options_of();
    o.target = VERKV_TARGET_OUTPUT;
    const outcome c = run_c(o, 0.2);
    CHECK(fetched(c) > 0);
    CHECK(c == run_cpp(cpp_cache(pairs(), verkv::water_filling<>{}, verkv::output{}), 0.2));
    o.value_scale = 3;
    const outcome scaled = run_c(o, 0.2);
    CHECK_FALSE(scaled == c);
    CHECK(scaled ==
          run_cpp(cpp_cache(pairs(), verkv::water_filling<>{}, verkv::output{verkv::radius_rule::certain, 3}), 0.2));
}

TEST_CASE("C interface: rotated, with its bounds and without") {
    const verkv::rotated_sketch sketch({.key_dim = shape().key_dim, .bits = 4});
    verkv_options o = options_of();
    o.sketch = VERKV_SKETCH_ROTATED;
    o.sketch_bits = 4;
    const outcome plain = run_c(o, 0.05);
    CHECK(plain == run_cpp(cpp_cache(sketch), 0.05));
    o.carry_bounds = 1;
    const outcome carried = run_c(o, 0.05);
    CHECK_FALSE(carried == plain);
    verkv::step_policies policies;
    policies.bounds = verkv::bound_policy::carry;
    CHECK(carried == run_cpp(cpp_cache(sketch, verkv::water_filling<>{}, verkv::denominator{}, policies), 0.05));
}

TEST_CASE("C interface: exact, greedy and never") {
    verkv_options o = options_of();
    o.sketch = VERKV_SKETCH_EXACT;
    o.plan = VERKV_PLAN_GREEDY;
    const outcome greedy = run_c(o, 0.05);
    CHECK(fetched(greedy) > 0);
    CHECK(greedy == run_cpp(cpp_cache(verkv::exact_sketch<half>(), verkv::greedy<>{}), 0.05));
    o.plan = VERKV_PLAN_NEVER;
    const outcome never = run_c(o, 0.05);
    CHECK(fetched(never) == 0);
    CHECK(never == run_cpp(cpp_cache(verkv::exact_sketch<half>(), verkv::never_fetch<>{}), 0.05));
}

TEST_CASE("C interface: RoPE pairs, greedy is not checked") {
    verkv_options o = options_of();
    o.plan = VERKV_PLAN_GREEDY;
    const outcome c = run_c(o, 0.05);
    CHECK(rounds(c) == 0);
    CHECK(c == run_cpp(cpp_cache(pairs(), verkv::greedy<>{}), 0.05));
}

TEST_CASE("C interface: what a sketch holds") {
    verkv_options o = options_of();
    const auto bytes = [&](verkv_sketch sketch) {
        o.sketch = sketch;
        return verkv_sketch_bytes_per_token(c_cache(o));
    };
    CHECK(bytes(VERKV_SKETCH_EXACT) == 64);
    CHECK(bytes(VERKV_SKETCH_ROPE_PAIRS) == pairs().bytes_per_token());
    CHECK(bytes(VERKV_SKETCH_ROTATED) == verkv::rotated_sketch({.key_dim = 32, .bits = 2}).bytes_per_token());
}

TEST_CASE("C interface: caches of two threads do not disturb each other, nor do threads that they share") {
    const verkv_options alone = options_of();
    verkv_options output = options_of();
    output.target = VERKV_TARGET_OUTPUT;
    const outcome expected[] = {run_c(alone, 0.05), run_c(output, 0.2)};
    for (const std::uint32_t threads : {1u, 3u}) {
        outcome got[2];
        std::thread workers[2];
        for (std::size_t i = 0; i < 2; ++i) {
            workers[i] = std::thread([&, i] {
                verkv_options o = i == 0 ? alone : output;
                o.threads = threads;
                got[i] = run_c(o, i == 0 ? 0.05 : 0.2);
            });
        }
        for (std::thread& w : workers) {
            w.join();
        }
        CHECK(got[0] == expected[0]);
        CHECK(got[1] == expected[1]);
    }
}

TEST_CASE("C interface: a step allocates nothing") {
    const c_text t(shape(), room, 1);
    c_cache cache(options_of());
    verkv_request id{};
    REQUIRE(verkv_open(cache, 1, &id) == VERKV_OK);
    REQUIRE(prefill(cache, id, t, 0, prompt) == VERKV_OK);
    REQUIRE(verkv_compress(cache, id, nullptr, nullptr, 0, 0) == VERKV_OK);
    REQUIRE(append(cache, id, t, prompt, 1) == VERKV_OK);
    const auto q = queries_of(0, 0);
    step_answer x;
    const verkv_step_item item = item_of(shape(), id, q, x);
    std::size_t ok = 0;
    const std::size_t allocated = allocations_of([&] {
        for (std::size_t i = 1; i < 4; ++i) {
            ok += append(cache, id, t, prompt + i, 1) == VERKV_OK;
            ok += verkv_step(cache, &item, 1, 0.05, 0.1) == VERKV_OK;
            verkv_head_report report;
            ok += verkv_report(cache, 0, 0, &report) == VERKV_OK;
        }
    });
    CHECK(ok == 9);
    CHECK(allocated == 0);
}
