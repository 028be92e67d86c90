// How a step goes about its plan: uniforms, checks from the sample, bounds of a sketch.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/models.hpp"
#include "support/refusal.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/score/given.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/sketch/exact.hpp"

namespace {

using namespace support;
using verkv::bound_policy;
using verkv::exact_for_shortlist;
using verkv::step_policies;
using verkv::tolerance;
using verkv::uniform_policy;

const verkv::geometry shape{6, 2, 16, 8, 0};
const verkv::compression tenth{verkv::budget::fraction(0.1), {2, 4}};

/// A sketch that is off, and says by how much at most.
class bounded_off_sketch : public someone::off_sketch {
public:
    explicit bounded_off_sketch(float error = 0, double failure = 0, float slack = 1e-5f)
        : off_sketch(error), bound_(std::abs(error) * 1.0001f + slack), failure_(failure) {}

    using off_sketch::estimate;
    template <class Backend>
    void estimate(const Backend& exec, verkv::rows<float> queries, float scale, verkv::matrix_view<float> logits,
                  verkv::matrix_view<float> bounds) const {
        off_sketch::estimate(exec, queries, scale, logits);
        for (std::size_t g = 0; g < queries.count; ++g) {
            std::fill_n(bounds.row(g).data(), size(), bound_);
        }
    }
    [[nodiscard]] double bound_failure() const { return failure_; }

private:
    float bound_;
    double failure_;
};

static_assert(verkv::bounded_sketch<bounded_off_sketch, verkv::cpu, float>);

template <class Sketch, class Target = verkv::denominator>
using cache_of = verkv::layer_cache<float, Sketch, verkv::water_filling<>, exact_for_shortlist, Target>;

template <class Sketch, class Target = verkv::denominator>
cache_of<Sketch, Target> make_cache(std::size_t n, const Sketch& sketch, const step_policies& policies,
                                    std::size_t shortlist = 4, const Target& target = {},
                                    std::size_t staging_rows = 256) {
    verkv::cache_config config = roomy(shape, n);
    config.staging_rows = staging_rows;
    return {config, sketch, {}, {}, exact_for_shortlist{shortlist}, target, policies};
}

/// Importance that rises with the first channel of the keys, roughly as some query's weights do.
std::vector<float> importance_of(const text<float>& t, std::size_t n) {
    std::vector<float> tau;
    for (std::size_t h = 0; h < shape.kv_heads; ++h) {
        for (std::size_t i = 0; i < n; ++i) {
            tau.push_back(std::exp(0.3f * t.head_keys(h, n)[i][0]) / 20);
        }
    }
    return tau;
}

template <class Cache>
verkv::request_id filled(Cache& cache, const text<float>& t, std::uint64_t seed = 3) {
    const auto id = cache.open(seed);
    prefill(cache, id, t, 0, t.tokens);
    const auto tau = importance_of(t, t.tokens);
    cache.compress(id, verkv::given_scores(std::span<const float>(tau)), tenth);
    return id;
}

std::uint32_t sum_of_rounds(const verkv::kv_head_report& r) {
    return std::accumulate(r.rows_by_round.begin(), r.rows_by_round.end(), std::uint32_t{0});
}

/// Largest relative error of the denominators of a step.
double error_of(const step_answer& a, const std::vector<reference_attention>& exact, std::size_t head) {
    return std::abs(std::exp(static_cast<double>(a.lse[head]) - exact[head].lse) - 1);
}

}  // namespace

TEST_CASE("cache policies: what is out of range is refused") {
    const auto with = [](auto change) {
        return [change] {
            step_policies p;
            change(p);
            make_cache(50, verkv::exact_sketch<float>{}, p);
        };
    };
    CHECK(refused(with([](step_policies& p) { p.check.rounds = 16; }), {"16", "15"}));
    for (const double step : {1.0, 0.5, -2.0, std::nan(""), std::numeric_limits<double>::infinity(), 1e7}) {
        CHECK(refused(with([&](step_policies& p) { p.check.step = step; }), {"levels of a check"}));
    }
    CHECK(refused(with([](step_policies& p) { p.uniforms = static_cast<uniform_policy>(7); }), {"7"}));
    CHECK(refused(with([](step_policies& p) { p.bounds = static_cast<bound_policy>(9); }), {"9"}));
    CHECK_NOTHROW(with([](step_policies& p) { p.check = {15, 1.0001}; })());
    CHECK_NOTHROW(with([](step_policies& p) { p.check.rounds = 0; })());
}

TEST_CASE("cache policies: permanent uniforms want the same rows again, fresh ones do not") {
    const auto t = random_text<float>(shape, 500, 1, 2);
    const auto queries = random_queries<float>(shape, 1);
    step_policies fresh;
    fresh.uniforms = uniform_policy::fresh;
    auto a = make_cache(500, verkv::exact_sketch<float>{}, {});
    auto b = make_cache(500, verkv::exact_sketch<float>{}, fresh);
    const auto id_a = filled(a, t);
    const auto id_b = filled(b, t);
    std::size_t resident = 0;
    for (std::size_t h = 0; h < 2; ++h) {
        for (verkv::token_index i = 0; i < 500; ++i) {
            CHECK(a.resident(id_a, h, i) == b.resident(id_b, h, i));
            resident += a.resident(id_a, h, i);
        }
    }
    CHECK(resident > 50);
    const tolerance promise{0.15, 0.1};
    const verkv::step_report* report = nullptr;
    const auto first = decode(a, id_a, queries, promise, &report);
    const std::size_t rows = report->kv_head(0, 0).rows_fetched;
    CHECK(report->kv_head(0, 0).rows_copied == rows);
    CHECK((rows > 5 && rows < 400));
    CHECK(decode(a, id_a, queries, promise, &report) == first);
    CHECK(report->kv_head(0, 0).rows_fetched == rows);
    CHECK(report->kv_head(0, 0).rows_copied == 0);

    const auto once = decode(b, id_b, queries, promise, &report);
    const std::size_t fresh_rows = report->kv_head(0, 0).rows_fetched;
    CHECK(report->kv_head(0, 0).rows_copied == fresh_rows);
    const double after = report->query_head(0, 0).certificate_after;
    CHECK(decode(b, id_b, queries, promise, &report) != once);
    CHECK(report->kv_head(0, 0).rows_copied > 0);
    CHECK(report->query_head(0, 0).certificate_after == after);
    // Which step it is decides, and nothing else.
    auto c = make_cache(500, verkv::exact_sketch<float>{}, fresh);
    const auto id_c = filled(c, t);
    CHECK(decode(c, id_c, queries, promise) == once);
}

// 2 policies x 6 heads at 5 sigma of a binomial of delta, and the mean at 5 standard errors of the draws: 24 limits,
// false alarms below 1e-5.
TEST_CASE("cache policies: either kind of uniforms keeps the promise, and is unbiased") {
    constexpr std::size_t draws = 2500;
    const auto t = random_text<float>(shape, 160, 2, 2);
    const auto queries = random_queries<float>(shape, 2);
    const auto exact = dense_in_double(t, 160, queries);
    const auto tau = importance_of(t, 160);
    const tolerance promise{0.3, 0.3};
    for (const uniform_policy how : {uniform_policy::permanent, uniform_policy::fresh}) {
        step_policies policies;
        policies.uniforms = how;
        auto cache = make_cache(160, verkv::exact_sketch<float>{}, policies);
        const auto id = filled(cache, t);
        std::vector<std::size_t> failures(6, 0);
        std::vector<double> sum(6, 0.0), squares(6, 0.0);
        std::size_t fetched = 0, whole = 0;
        for (std::size_t d = 0; d < draws; ++d) {
            cache.compress(id, verkv::given_scores(std::span<const float>(tau)), tenth);
            const verkv::step_report* report = nullptr;
            decode(cache, id, queries, promise);
            const auto answer = decode(cache, id, queries, promise, &report);
            for (std::size_t h = 0; h < 6; ++h) {
                const double x = std::exp(static_cast<double>(answer.lse[h]) - exact[h].lse);
                failures[h] += std::abs(x - 1) > promise.epsilon;
                sum[h] += x;
                squares[h] += x * x;
            }
            fetched += report->kv_head(0, 0).rows_fetched;
            whole += report->kv_head(0, 0).rows_fetched + report->kv_head(0, 0).rows_resident == 160;
        }
        CHECK(fetched > draws);
        CHECK(whole == 0);
        for (std::size_t h = 0; h < 6; ++h) {
            const auto n = static_cast<double>(draws);
            const double mean = sum[h] / n;
            const double deviation = std::sqrt((squares[h] / n - mean * mean) / n);
            INFO("policy " << static_cast<int>(how) << ", head " << h << ", mean " << mean);
            CHECK(static_cast<double>(failures[h]) <=
                  n * promise.delta + 5 * std::sqrt(n * promise.delta * (1 - promise.delta)));
            CHECK(std::abs(mean - 1) <= 5 * deviation);
        }
    }
}

TEST_CASE("cache policies: a sketch that lies is found out from the sample") {
    std::size_t checked = 0, everything = 0, certified = 0;
    for (std::uint64_t seed = 1; seed <= 12; ++seed) {
        const auto t = random_text<float>(shape, 400, seed, 2);
        const auto queries = random_queries<float>(shape, seed);
        const auto exact = dense_in_double(t, 400, queries);
        for (const std::size_t rounds : {1u, 2u, 15u}) {
            for (const float error : {1.0f, 4.0f}) {
                for (const std::size_t staging : {64u, 400u}) {
                    step_policies policies;
                    policies.check.rounds = rounds;
                    auto cache =
                        make_cache(400, someone::off_sketch(error), policies, 4, verkv::denominator{}, staging);
                    const auto id = filled(cache, t, seed);
                    const verkv::step_report* report = nullptr;
                    const tolerance promise{0.1, 0.1};
                    const auto answer = decode(cache, id, queries, promise, &report);
                    INFO("seed " << seed << ", rounds " << rounds << ", error " << error << ", staging " << staging);
                    for (std::size_t k = 0; k < 2; ++k) {
                        const verkv::kv_head_report& r = report->kv_head(0, k);
                        CHECK(r.rounds <= rounds);
                        CHECK(sum_of_rounds(r) == r.rows_fetched);
                        for (std::size_t i = r.rounds + 1; i < r.rows_by_round.size(); ++i) {
                            CHECK(r.rows_by_round[i] == 0);
                        }
                        checked += r.rounds > 0;
                        for (std::size_t h = 3 * k; h < 3 * k + 3; ++h) {
                            const verkv::query_head_report& q = report->query_head(0, h);
                            CHECK(q.certificate_observed < promise.epsilon);
                            if (q.certificate_after == 0) {
                                // After the last round: dense.
                                CHECK(q.rows_planned + r.rows_resident == 400);
                                CHECK(q.certificate_observed == 0);
                                CHECK(error_of(answer, exact, h) < 1e-4);
                                ++everything;
                            } else {
                                CHECK(q.certificate_observed > 0);
                                CHECK(error_of(answer, exact, h) < 2 * promise.epsilon);
                                ++certified;
                            }
                        }
                    }
                }
            }
        }
    }
    CHECK(checked > 100);
    CHECK(certified > 50);
    CHECK(everything > 10);
}

namespace {

/// Every token weighs the same to it.
class flat_sketch : public someone::off_sketch {
public:
    flat_sketch() = default;

    template <class Backend>
    void estimate(const Backend&, verkv::rows<float> queries, float, verkv::matrix_view<float> logits) const {
        for (std::size_t g = 0; g < queries.count; ++g) {
            std::fill_n(logits.row(g).data(), size(), 0.0f);
        }
    }
};

}  // namespace

TEST_CASE("cache policies: a plan that raised nothing is lowered to where tokens are raised") {
    // 2000 tokens of weight 1, half of them resident, would do; but one that was drawn at 1/8 weighs 6.8: the check
    // misses its mark by a little, and nothing is raised before levels are a twelfth of where a certificate might
    // begin.
    const verkv::geometry one{1, 1, 4, 4, 1.0f};
    const std::size_t n = 2000;
    text<float> t = random_text<float>(one, n, 3);
    std::fill(t.keys.begin(), t.keys.end(), 0.0f);
    t.keys[4 * 1000] = std::log(6.8f);
    std::vector<float> r(n, 0.5f);
    r[1000] = 0.125f;
    std::vector<verkv::token_index> sample;
    for (std::size_t i = 0; i < n; i += 2) {
        sample.push_back(static_cast<verkv::token_index>(i));
    }
    cache_of<flat_sketch> cache(roomy(one, n), flat_sketch(), {}, {}, exact_for_shortlist{0});
    const auto id = cache.open();
    prefill(cache, id, t, 0, n);
    cache.adopt(id, std::vector<std::span<const float>>{r}, std::vector<std::span<const verkv::token_index>>{sample});
    const std::vector<float> query{1, 0, 0, 0};
    std::vector<float> output(4);
    const auto& report = cache.decode(
        verkv::decode_item<float>{id, verkv::contiguous_rows(std::span<const float>(query), 4), output}, {0.1, 0.1});
    const auto& head = report.kv_head(0, 0);
    CHECK(report.query_head(0, 0).certificate_before < 0.1);
    CHECK(report.query_head(0, 0).certificate_observed < 0.1);
    CHECK(head.rounds >= 1);
    CHECK(head.rounds <= 6);
    CHECK(head.rows_fetched < 500);
}

TEST_CASE("cache policies: no check where none is asked for, and none where weights are exact") {
    const auto t = random_text<float>(shape, 300, 3, 2);
    const auto queries = random_queries<float>(shape, 3);
    const auto none = [&](auto&& cache) {
        const auto id = filled(cache, t);
        const verkv::step_report* report = nullptr;
        decode(cache, id, queries, {0.1, 0.1}, &report);
        std::size_t fetched = 0;
        for (const auto& r : report->per_kv_head) {
            CHECK(r.rounds == 0);
            CHECK(r.rows_by_round[0] == r.rows_fetched);
            CHECK(sum_of_rounds(r) == r.rows_fetched);
            fetched += r.rows_fetched;
        }
        for (const auto& r : report->per_query_head) {
            CHECK(r.certificate_observed == 0);
        }
        CHECK(fetched > 0);
    };
    step_policies off;
    off.check.rounds = 0;
    none(make_cache(300, someone::off_sketch(3), off));
    none(make_cache(300, verkv::exact_sketch<float>{}, {}));
    none(verkv::layer_cache<float, someone::off_sketch, verkv::greedy<>>(roomy(shape, 300), someone::off_sketch(3)));
}

TEST_CASE("cache policies: waves of a small staging change nothing of a checked step") {
    const auto t = random_text<float>(shape, 600, 4, 1);
    const auto queries = random_queries<float>(shape, 4);
    const auto run = [&](std::size_t staging, step_answer& answer) {
        auto cache = make_cache(600, someone::off_sketch(2), {}, 4, verkv::output{}, staging);
        const auto id = filled(cache, t);
        const verkv::step_report* report = nullptr;
        answer = decode(cache, id, queries, {0.4, 0.1}, &report);
        CHECK(report->kv_head(0, 0).rows_fetched > 70);
        return *report;
    };
    step_answer small, large;
    const auto a = run(64, small);
    const auto b = run(600, large);
    for (std::size_t k = 0; k < 2; ++k) {
        CHECK(a.kv_head(0, k).rows_fetched == b.kv_head(0, k).rows_fetched);
        CHECK(a.kv_head(0, k).rounds == b.kv_head(0, k).rounds);
        CHECK(a.kv_head(0, k).rows_by_round == b.kv_head(0, k).rows_by_round);
    }
    for (std::size_t h = 0; h < 6; ++h) {
        CHECK(a.query_head(0, h).certificate_observed ==
              Approx(b.query_head(0, h).certificate_observed).epsilon(1e-3).margin(1e-12));
        CHECK(small.lse[h] == Approx(large.lse[h]).epsilon(1e-5));
    }
    for (std::size_t i = 0; i < small.output.size(); ++i) {
        CHECK(small.output[i] == Approx(large.output[i]).epsilon(1e-3).margin(1e-5));
    }
}

// 6 heads at 5 sigma: false alarms below 2e-6 if the bound were tight. No check: the bounds alone keep the promise.
TEST_CASE("cache policies: bounds that hold are carried into the plan, and keep the promise") {
    constexpr std::size_t draws = 1500;
    const auto t = random_text<float>(shape, 160, 5, 2);
    const auto queries = random_queries<float>(shape, 5);
    const auto exact = dense_in_double(t, 160, queries);
    const auto tau = importance_of(t, 160);
    const tolerance promise{0.4, 0.3};
    std::vector<std::size_t> rows;
    for (const bound_policy how : {bound_policy::ignore, bound_policy::carry}) {
        step_policies policies;
        policies.bounds = how;
        policies.check.rounds = 0;
        auto cache = make_cache(160, bounded_off_sketch(0.4f), policies);
        const auto id = filled(cache, t);
        std::vector<std::size_t> failures(6, 0);
        std::size_t fetched = 0;
        for (std::size_t d = 0; d < draws; ++d) {
            cache.compress(id, verkv::given_scores(std::span<const float>(tau)), tenth);
            const verkv::step_report* report = nullptr;
            const auto answer = decode(cache, id, queries, promise, &report);
            for (std::size_t h = 0; h < 6; ++h) {
                failures[h] += error_of(answer, exact, h) > promise.epsilon;
            }
            fetched += report->kv_head(0, 0).rows_fetched + report->kv_head(0, 1).rows_fetched;
        }
        rows.push_back(fetched);
        const auto n = static_cast<double>(draws);
        for (std::size_t h = 0; h < 6 && how == bound_policy::carry; ++h) {
            CHECK(static_cast<double>(failures[h]) <=
                  n * promise.delta + 5 * std::sqrt(n * promise.delta * (1 - promise.delta)));
        }
    }
    CHECK(rows[1] > rows[0]);
    CHECK(rows[0] > draws);
}

TEST_CASE("cache policies: bounds too wide to say anything fetch everything") {
    constexpr std::size_t n = 200;
    const auto t = random_text<float>(shape, n, 8);
    const auto queries = random_queries<float>(shape, 8);
    const auto exact = dense_in_double(t, n, queries);
    for (const float bound : {5.0f, 20.0f, 43.0f, 44.0f, 59.0f, 61.0f, 200.0f, 1e30f}) {
        step_policies p;
        p.bounds = bound_policy::carry;
        auto cache = make_cache(n, bounded_off_sketch(0, 0, bound), p, 0);
        const verkv::step_report* report = nullptr;
        const auto answer = decode(cache, filled(cache, t), queries, {}, &report);
        INFO("bound " << bound);
        CHECK(distance(answer, exact) <= 1);
        for (std::size_t h = 0; h < shape.kv_heads; ++h) {
            const auto& head = report->kv_head(0, h);
            CHECK(head.rows_fetched == n - head.rows_resident);
        }
    }
}

TEST_CASE("cache policies: levels far apart end at everything, not in an error") {
    constexpr std::size_t n = 200;
    const auto t = random_text<float>(shape, n, 9);
    const auto queries = random_queries<float>(shape, 9);
    for (const double ratio : {1e3, 2e5, 1e6}) {
        step_policies p;
        p.check.step = ratio;
        auto cache = make_cache(n, someone::off_sketch(3.0f), p, 0);
        const auto id = cache.open(1);
        prefill(cache, id, t, 0, n);
        support::adopt(cache, id, std::vector<float>(n, 0.01f), {});
        for (const double epsilon : {0.05, 3.0}) {
            const verkv::step_report* report = nullptr;
            decode(cache, id, queries, {epsilon, 0.1}, &report);
            CHECK(report->query_head(0, 0).certificate_observed < epsilon);
        }
    }
}

TEST_CASE("cache policies: what a sketch's bounds may fail at is taken from delta, or refused") {
    const auto t = random_text<float>(shape, 300, 6, 2);
    const auto queries = random_queries<float>(shape, 6);
    const auto certificate = [&](bound_policy how, double failure, double delta) {
        step_policies policies;
        policies.bounds = how;
        auto cache = make_cache(300, bounded_off_sketch(0.1f, failure), policies);
        const auto id = filled(cache, t);
        const verkv::step_report* report = nullptr;
        decode(cache, id, queries, {0.1, delta}, &report);
        return report->query_head(0, 0).certificate_before;
    };
    CHECK(certificate(bound_policy::carry, 0.04, 0.1) == certificate(bound_policy::carry, 0, 0.1 - 0.04));
    CHECK(certificate(bound_policy::carry, 0, 0.06) > certificate(bound_policy::carry, 0, 0.1));
    CHECK(certificate(bound_policy::carry, 0, 0.1) > certificate(bound_policy::ignore, 0, 0.1));
    CHECK(certificate(bound_policy::ignore, 0.9, 0.1) == certificate(bound_policy::ignore, 0, 0.1));
    for (const double failure : {0.1, 0.5, 1.0, std::nan("")}) {
        CHECK(refused([&] { certificate(bound_policy::carry, failure, 0.1); },
                      {"delta is 0.1", failure == 0.5 ? "0.5" : "fail"}));
    }
}
