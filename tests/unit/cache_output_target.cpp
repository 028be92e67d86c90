// A cache whose errors are measured on the output: radii through a request's life, checks, threads, memory.
#include <algorithm>
#include <cmath>
#include <vector>

#include "support/allocations.hpp"
#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/models.hpp"
#include "support/refusal.hpp"
#include "verkv/certify/chernoff.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/score/given.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/sketch/exact.hpp"

namespace {

using namespace support;
using verkv::exact_for_shortlist;
using verkv::position_t;
using verkv::radius_rule;
using verkv::step_policies;
using verkv::token_index;
using verkv::tolerance;
using verkv::uniform_policy;

const verkv::geometry shape{6, 2, 16, 8, 0};
const verkv::compression tenth{verkv::budget::fraction(0.1), {2, 4}};
constexpr std::size_t shortlist = 4;

template <class Sketch, class Planner = verkv::water_filling<>>
using output_cache = verkv::layer_cache<float, Sketch, Planner, exact_for_shortlist, verkv::output>;

template <class Sketch, class Planner = verkv::water_filling<>>
output_cache<Sketch, Planner> make_cache(std::size_t n, const Sketch& sketch, const verkv::output& target = {},
                                         const step_policies& policies = {}, const verkv::cpu& exec = {},
                                         std::size_t requests = 1) {
    return {roomy(shape, n, requests), sketch, exec, Planner{}, exact_for_shortlist{shortlist}, target, policies};
}

/// Largest distance of an output from dense attention, and the norm of that, over query heads; per head.
struct deviation {
    double distance = 0;
    double norm = 0;
};

std::vector<deviation> deviations(const step_answer& a, const std::vector<reference_attention>& exact) {
    std::vector<deviation> all;
    for (std::size_t h = 0; h < exact.size(); ++h) {
        double distance_square = 0, norm_square = 0;
        for (std::size_t c = 0; c < shape.value_dim; ++c) {
            const double x = exact[h].output[c];
            const double e = static_cast<double>(a.output[h * shape.value_dim + c]) - x;
            distance_square += e * e;
            norm_square += x * x;
        }
        all.push_back({std::sqrt(distance_square), std::sqrt(norm_square)});
    }
    return all;
}

/// Adds a constant to every value, so that outputs are not near 0.
text<float> shifted_text(std::size_t n, std::uint64_t seed, float by) {
    auto t = random_text<float>(shape, n, seed, 2);
    for (float& x : t.values) {
        x += by;
    }
    return t;
}

/// Tokens of a text in the order given, positions kept.
text<float> selected(const text<float>& t, const std::vector<std::size_t>& tokens) {
    text<float> out(shape, tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        for (std::size_t h = 0; h < shape.kv_heads; ++h) {
            const auto key = t.head_keys(h, t.tokens)[tokens[i]];
            const auto value = t.head_values(h, t.tokens)[tokens[i]];
            std::copy_n(key, shape.key_dim, out.key(i, h));
            std::copy_n(value, shape.value_dim, out.value(i, h));
        }
        out.positions[i] = t.positions[tokens[i]];
    }
    return out;
}

struct fixed_draw {
    std::vector<float> r;
    std::vector<token_index> sample;
};

fixed_draw some_draw(const text<float>& t, std::size_t n, std::uint64_t seed) {
    fixed_draw d;
    generator g(seed);
    for (std::size_t i = 0; i < n; ++i) {
        d.r.push_back(i % 50 == 0 ? 1.0f : std::min(0.9f, 0.05f * std::exp(0.4f * t.head_keys(0, t.tokens)[i][0])));
        if (g.uniform() < static_cast<double>(d.r.back())) {
            d.sample.push_back(static_cast<token_index>(i));
        }
    }
    return d;
}

}  // namespace

TEST_CASE("cache, output: fetching everything is dense attention through a request's life") {
    const auto t = shifted_text(400, 1, 0.5f);
    const auto queries = random_queries<float>(shape, 1);
    for (const auto rule : {radius_rule::estimated, radius_rule::certain}) {
        auto cache = make_cache<verkv::exact_sketch<float>, verkv::fetch_everything>(400, {}, {rule, 0});
        const auto id = cache.open(1);
        std::vector<std::size_t> held;
        const auto check = [&] {
            const auto now = selected(t, held);
            CHECK(distance(decode(cache, id, queries), dense_in_double(now, now.tokens, queries)) <= 1);
        };
        const auto add = [&](std::size_t first, std::size_t n) {
            for (std::size_t i = first; i < first + n; ++i) {
                held.push_back(i);
            }
        };
        append(cache, id, t, 0, 20);  // before any draw
        add(0, 20);
        check();
        prefill(cache, id, t, 20, 180);
        add(20, 180);
        cache.compress(id, verkv::key_norm{}, tenth);
        check();
        append(cache, id, t, 200, 60);
        add(200, 60);
        check();
        cache.remove(id, 30, 120);
        held.erase(held.begin() + 30, held.begin() + 120);
        check();
        cache.truncate(id, 240);
        held.resize(150);
        check();
        cache.compress(id, verkv::key_norm{}, tenth);
        check();
        append(cache, id, t, 300, 100);
        add(300, 100);
        check();
    }
}

// Values come in pairs v, -v, and go in pairs: the centre is 0 at any draw, and a cache that is built anew from what is
// left has the same radii, plans and draws.
TEST_CASE("cache, output: a cache that was changed plans and checks as one that is built anew") {
    for (const auto rule : {radius_rule::estimated, radius_rule::certain}) {
        for (const double scale : {0.0, 0.7}) {
            for (const auto uniforms : {uniform_policy::permanent, uniform_policy::fresh}) {
                auto t = random_text<float>(shape, 500, 2, 2);
                for (std::size_t i = 0; i + 1 < t.tokens; i += 2) {
                    for (std::size_t h = 0; h < shape.kv_heads; ++h) {
                        for (std::size_t c = 0; c < shape.value_dim; ++c) {
                            t.value(i + 1, h)[c] = -t.value(i, h)[c];
                        }
                    }
                }
                const auto queries = random_queries<float>(shape, 2);
                const fixed_draw draw = some_draw(t, 400, 5);
                step_policies policies;
                policies.uniforms = uniforms;
                const tolerance promise{scale > 0 ? 0.3 : 0.6, 0.1};

                auto changed = make_cache(500, someone::off_sketch(1), {rule, scale}, policies);
                const auto id = changed.open(4);
                prefill(changed, id, t, 0, 400);
                adopt(changed, id, draw.r, draw.sample);
                append(changed, id, t, 400, 100);
                changed.remove(id, 100, 150);
                changed.truncate(id, 480);
                const verkv::step_report* report = nullptr;
                const auto answer = decode(changed, id, queries, promise, &report);
                const verkv::step_report seen = *report;

                std::vector<std::size_t> left;
                fixed_draw rest;
                for (std::size_t i = 0; i < 480; ++i) {
                    if (i >= 100 && i < 150) {
                        continue;
                    }
                    const auto token = static_cast<token_index>(left.size());
                    left.push_back(i);
                    rest.r.push_back(i < 400 ? draw.r[i] : 1.0f);
                    if (i >= 400 || std::binary_search(draw.sample.begin(), draw.sample.end(), i)) {
                        rest.sample.push_back(token);
                    }
                }
                const auto now = selected(t, left);
                auto anew = make_cache(500, someone::off_sketch(1), {rule, scale}, policies);
                const auto other = anew.open(4);
                prefill(anew, other, now, 0, now.tokens);
                adopt(anew, other, rest.r, rest.sample);
                const auto same = decode(anew, other, queries, promise, &report);

                CAPTURE(static_cast<int>(rule), scale, static_cast<int>(uniforms));
                std::size_t rows = 0;
                for (std::size_t k = 0; k < 2; ++k) {
                    CHECK(seen.kv_head(0, k).rows_by_round == report->kv_head(0, k).rows_by_round);
                    CHECK(seen.kv_head(0, k).rows_resident == report->kv_head(0, k).rows_resident);
                    rows += seen.kv_head(0, k).rows_fetched;
                }
                CHECK(rows > 20);
                for (std::size_t h = 0; h < 6; ++h) {
                    const auto& a = seen.query_head(0, h);
                    const auto& b = report->query_head(0, h);
                    CHECK(a.certificate_before == Approx(b.certificate_before).epsilon(1e-4));
                    CHECK(a.certificate_after == Approx(b.certificate_after).epsilon(1e-4));
                    CHECK(a.certificate_observed == Approx(b.certificate_observed).epsilon(1e-3));
                    CHECK(a.rows_planned == b.rows_planned);
                    CHECK(answer.lse[h] == Approx(same.lse[h]).epsilon(1e-5));
                }
                for (std::size_t i = 0; i < answer.output.size(); ++i) {
                    CHECK(answer.output[i] == Approx(same.output[i]).epsilon(1e-3).margin(1e-4));
                }
            }
        }
    }
}

// 12 texts x 20 draws x 6 heads. Bernstein's constants leave a wide margin: the share that errs beyond epsilon stays
// below delta by far.
TEST_CASE("cache, output: checked steps are within epsilon of dense attention, whatever the sketch says") {
    std::size_t beyond = 0, decisions = 0, checked = 0, fetched = 0, beyond_without = 0;
    for (std::uint64_t seed = 1; seed <= 12; ++seed) {
        const auto t = shifted_text(300, seed, 0.5f);
        const auto queries = random_queries<float>(shape, seed);
        const auto exact = dense_in_double(t, 300, queries);
        const tolerance promise{0.3, 0.2};
        const auto run = [&](auto&& cache, auto&& count) {
            const auto id = cache.open(seed);
            prefill(cache, id, t, 0, 300);
            for (int draw = 0; draw < 20; ++draw) {
                cache.compress(id, verkv::key_norm{}, tenth);
                const verkv::step_report* report = nullptr;
                const auto answer = decode(cache, id, queries, promise, &report);
                const auto errors = deviations(answer, exact);
                for (std::size_t h = 0; h < 6; ++h) {
                    count(errors[h].distance > promise.epsilon * errors[h].norm, report->query_head(0, h),
                          report->kv_head(0, h / 3));
                }
            }
        };
        run(make_cache(300, someone::off_sketch(1)), [&](bool wrong, const auto& q, const auto& k) {
            beyond += wrong;
            ++decisions;
            checked += k.rounds > 0;
            fetched += k.rows_fetched;
            CHECK(q.certificate_observed < promise.epsilon);
            CHECK((q.certificate_observed > 0 || q.certificate_after == 0));
        });
        run(make_cache<someone::off_sketch, verkv::never_fetch<verkv::no_shrinkage>>(300, someone::off_sketch(1)),
            [&](bool wrong, const auto&, const auto&) { beyond_without += wrong; });
    }
    CAPTURE(beyond, beyond_without, decisions, checked, fetched);
    CHECK(static_cast<double>(beyond) < 0.2 * static_cast<double>(decisions));
    CHECK(beyond_without > 4 * beyond);
    CHECK(checked > decisions / 10);
    CHECK(fetched < decisions * 270);
}

namespace {

struct outcome {
    std::vector<step_answer> answers;
    std::vector<std::size_t> counts;
    std::vector<double> numbers;
    friend bool operator==(const outcome&, const outcome&) = default;
};

outcome steps(const verkv::cpu& exec, uniform_policy uniforms) {
    step_policies policies;
    policies.uniforms = uniforms;
    auto cache = make_cache(420, someone::off_sketch(1.5f), {}, policies, exec, 3);
    outcome o;
    std::vector<verkv::request_id> ids;
    std::vector<text<float>> texts;
    std::vector<std::vector<float>> queries;
    for (std::uint64_t i = 0; i < 3; ++i) {
        texts.push_back(shifted_text(400 - 100 * i, i + 1, 0.4f));
        queries.push_back(random_queries<float>(shape, i));
        const auto id = cache.open(i);
        prefill(cache, id, texts[i], 0, texts[i].tokens - 3);
        cache.compress(id, verkv::key_norm{}, tenth);
        append(cache, id, texts[i], texts[i].tokens - 3, 3);
        ids.push_back(id);
    }
    for (int step = 0; step < 3; ++step) {
        std::vector<verkv::decode_item<float>> batch;
        std::vector<step_answer> answers(3);
        for (std::size_t i = 0; i < 3; ++i) {
            batch.push_back(item_of(shape, ids[i], std::span<const float>(queries[i]), answers[i]));
        }
        const auto& report = cache.decode(std::span<const verkv::decode_item<float>>(batch), {0.3, 0.1});
        for (const auto& r : report.per_kv_head) {
            o.counts.insert(o.counts.end(), {r.rows_fetched, r.rows_copied, r.rounds, r.bytes_moved});
            o.counts.insert(o.counts.end(), r.rows_by_round.begin(), r.rows_by_round.end());
        }
        for (const auto& r : report.per_query_head) {
            o.numbers.insert(o.numbers.end(), {r.certificate_before, r.certificate_after, r.certificate_observed,
                                               r.denominator_lse, static_cast<double>(r.rows_planned)});
        }
        o.answers.insert(o.answers.end(), answers.begin(), answers.end());
    }
    return o;
}

}  // namespace

// The masses of tokens near the output are small, however much weight they have: were the error of D^ not part of what
// is bounded, a sample without the token that has nearly all the weight would pass.
TEST_CASE("cache, output: a dominant token at the centre of the values is not missed") {
    const verkv::geometry one{1, 1, 8, 1, 0};
    constexpr std::size_t n = 200;
    auto t = random_text<float>(one, n, 2, 0.1);
    for (std::size_t i = 0; i < n; ++i) {
        t.value(i, 0)[0] = i % 2 == 0 ? -1.0f : 1.0f;
    }
    std::fill_n(t.key(100, 0), 8, 3.6f);
    t.value(100, 0)[0] = 0;
    const std::vector<float> queries(8, 1.0f);
    const double exact = dense_in_double(t, n, queries)[0].output[0];
    const std::vector<float> equal(n, 1.0f);
    verkv::layer_cache<float, verkv::exact_sketch<float>, verkv::water_filling<>, exact_for_shortlist, verkv::output>
        cache(roomy(one, n), {}, {}, {}, {}, verkv::output{radius_rule::certain, 1.0});
    // At delta = 1 %, 100 draws fail more than 6 times with probability 6e-5 at most; without the D^ coordinate 32 do.
    int failures = 0;
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
        const auto id = cache.open(seed);
        prefill(cache, id, t, 0, n);
        cache.compress(id, verkv::given_scores(std::span<const float>(equal)), {verkv::budget::tokens(20), {0, 0}});
        const auto answer = decode(cache, id, queries, {0.1, 0.01});
        failures += std::abs(static_cast<double>(answer.output[0]) - exact) > 0.1 ? 1 : 0;
        cache.release(id);
    }
    CHECK(failures <= 6);
}

TEST_CASE("cache, output: an empty sample is no answer") {
    constexpr std::size_t n = 100;
    const auto t = random_text<float>(shape, n, 5);
    const auto queries = random_queries<float>(shape, 5);
    const std::vector<float> r(n, 1e-3f);
    for (const verkv::output target : {verkv::output{}, verkv::output{radius_rule::certain, 1.0}}) {
        auto exact_cache = make_cache<verkv::exact_sketch<float>>(n, {}, target);
        auto lying_cache = make_cache<someone::off_sketch>(n, someone::off_sketch(2.0f), target);
        const auto try_it = [&](auto& cache) {
            const auto id = cache.open(1);
            prefill(cache, id, t, 0, n);
            adopt(cache, id, r, {});
            const auto answer = decode(cache, id, queries);
            const auto all = deviations(answer, dense_in_double(t, n, queries));
            for (const deviation& d : all) {
                CHECK(d.distance <= 0.05 * (target.value_scale > 0 ? 1.0 : d.norm));
            }
        };
        try_it(exact_cache);
        try_it(lying_cache);
    }
}

// Lengths are taken in a unit near the longest: decisions do not depend on the size of the values, to the bit.
TEST_CASE("cache, output: values of any size decide alike") {
    constexpr std::size_t n = 300;
    const auto queries = random_queries<float>(shape, 6);
    for (const auto rule : {radius_rule::estimated, radius_rule::certain}) {
        step_answer first;
        std::size_t first_fetched = 0;
        for (const int power : {0, -80, -40, 1, 62, 100}) {
            auto t = shifted_text(n, 6, 0.5f);
            for (float& x : t.values) {
                x = std::ldexp(x, power);
            }
            auto cache = make_cache<someone::off_sketch>(n, someone::off_sketch(0.5f), {rule, 0});
            const auto id = cache.open(1);
            prefill(cache, id, t, 0, n);
            const auto draw = some_draw(t, n, 3);
            adopt(cache, id, draw.r, draw.sample);
            const verkv::step_report* report = nullptr;
            step_answer a = decode(cache, id, queries, {0.1, 0.1}, &report);
            for (float& x : a.output) {
                x = std::ldexp(x, -power);
            }
            INFO("values times 2^" << power << ", rule " << static_cast<int>(rule));
            if (power == 0) {
                first = a;
                first_fetched = report->kv_head(0, 0).rows_fetched;
            }
            CHECK(a == first);
            CHECK(report->kv_head(0, 0).rows_fetched == first_fetched);
        }
    }
}

TEST_CASE("cache, output: a target that is out of range is refused") {
    const auto with = [](verkv::output target) {
        return [target] { make_cache<verkv::exact_sketch<float>>(50, {}, target); };
    };
    for (const double scale : {-1.0, std::nan(""), std::numeric_limits<double>::infinity(), 1e40, 1e-40}) {
        CHECK(refused(with({radius_rule::certain, scale}), {"value_scale"}));
    }
    CHECK(refused(with({static_cast<radius_rule>(5), 0}), {"radius_rule", "5"}));
}

TEST_CASE("cache, output: the same bits for one thread and for three, and for any executor") {
    verkv::thread_pool pool(3);
    someone::backward_executor backward(2);
    for (const auto uniforms : {uniform_policy::permanent, uniform_policy::fresh}) {
        const outcome alone = steps({}, uniforms);
        CHECK(steps(verkv::cpu{&pool}, uniforms) == alone);
        CHECK(steps(verkv::cpu{&backward}, uniforms) == alone);
        CHECK(*std::max_element(alone.counts.begin(), alone.counts.end()) > 0);
    }
    CHECK(!(steps({}, uniform_policy::permanent) == steps({}, uniform_policy::fresh)));
}

TEST_CASE("cache, output: a step with a check takes no memory") {
    verkv::thread_pool pool(3);
    const auto t = shifted_text(1500, 7, 0.3f);
    std::vector<std::vector<float>> queries;
    for (std::size_t s = 0; s < 21; ++s) {
        queries.push_back(random_queries<float>(shape, s));
    }
    const auto count = [&](auto&& cache, double epsilon) {
        const auto id = cache.open(1);
        prefill(cache, id, t, 0, 1400);
        cache.compress(id, verkv::key_norm{}, tenth);
        step_answer answer;
        auto item = item_of(shape, id, std::span<const float>(queries[0]), answer);
        std::size_t rounds = 0;
        const auto one = [&](std::size_t s) {
            append(cache, id, t, 1400 + s, 1);
            item.queries.data = queries[s].data();
            const auto& report = cache.decode(std::span<const verkv::decode_item<float>>(&item, 1), {epsilon, 0.1});
            rounds += report.kv_head(0, 0).rounds + report.kv_head(0, 1).rounds;
        };
        one(0);
        const std::size_t taken = allocations_of([&] {
            for (std::size_t s = 1; s < 21; ++s) {
                one(s);
            }
        });
        CHECK(rounds > 0);
        return taken;
    };
    for (const verkv::cpu& exec : {verkv::cpu{}, verkv::cpu{&pool}}) {
        for (const auto rule : {radius_rule::estimated, radius_rule::certain}) {
            CHECK(count(make_cache(1500, someone::off_sketch(1), {rule, 0}, {}, exec), 0.3) == 0);
        }
        using sharp = verkv::water_filling<verkv::chernoff_tail>;
        CHECK(count(make_cache<someone::off_sketch, sharp>(1500, someone::off_sketch(1), {}, {}, exec), 0.3) == 0);
    }
}
