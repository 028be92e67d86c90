// A step of a layer by its launches, beside layer_cache::decode(): the same plans, fetches, rounds and outputs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/device_cases.hpp"
#include "support/device_mirror.hpp"
#include "support/refusal.hpp"
#include "support/trace_decisions.hpp"
#include "verkv/cuda/layer_step.hpp"

namespace {

using verkv::half;
using cache_type =
    verkv::layer_cache<half, verkv::rope_pair_sketch, verkv::water_filling<>, verkv::exact_for_shortlist>;

constexpr std::uint64_t seed = 7;

cache_type cache_for(const verkv::cache_config& c, std::size_t rounds, double pair_fraction = 0.25) {
    const verkv::rope_pair_sketch sketch(
        {.key_dim = c.shape.key_dim, .pairing = verkv::rope_pairing::half, .bits = 2, .pair_fraction = pair_fraction});
    return cache_type(c, sketch, {}, {}, {.size = 0}, {}, {.check = {.rounds = rounds}});
}

/// The packaged trace in a cache, its prompt drawn.
struct traced {
    const example::trace<half>& t = support::packaged();
    cache_type cache;
    verkv::request_id id;
    std::size_t tokens = 0;

    explicit traced(std::size_t rounds) : cache(cache_for(config(), rounds)), id(cache.open(seed)) {
        take(t.prefill_tokens, [&](auto... rows) { cache.prefill(id, rows...); });
        const auto kept = example::prompt_of(t, t.prompt_query_rows(64));
        cache.compress(id, verkv::largest_attention{}, {.kept = verkv::budget::fraction(1.0 / 16), .fixed = {64, 64}},
                       kept.view().queries, kept.view().query_positions);
    }
    static verkv::cache_config config() {
        verkv::cache_config c = support::roomy(support::packaged().shape, support::packaged().tokens);
        c.layer = 15;
        return c;
    }
    /// Appends what was decoded up to a step.
    void append_up_to(std::size_t step) {
        take(static_cast<std::size_t>(t.decode_position(step)) + 1, [&](auto... rows) { cache.append(id, rows...); });
    }

private:
    template <class Add>
    void take(std::size_t end, Add add) {
        std::vector<verkv::position_t> positions;
        for (std::size_t i = tokens; i < end; ++i) {
            positions.push_back(static_cast<verkv::position_t>(i));
        }
        const std::size_t heads = t.shape.kv_heads, n = end - tokens;
        const auto part = [&](const std::vector<half>& v, std::size_t width) {
            return verkv::heads_of(std::span(v).subspan(tokens * heads * width, n * heads * width), n, heads, width);
        };
        add(part(t.key_data, t.shape.key_dim), part(t.value_data, t.shape.value_dim),
            std::span<const verkv::position_t>(positions));
        tokens = end;
    }
};

/// A text of normal rows in a cache: smaller, and not as kind.
struct normal {
    support::text<half> rows;
    cache_type cache;
    verkv::request_id id;
    std::size_t prompt;

    normal(std::size_t n, std::size_t rounds, double pair_fraction, double peak = 3,
           void (*spoil)(support::text<half>&) = nullptr)
        : rows(support::random_text<half>(shape(), n, 11, peak)),
          cache(cache_for(support::roomy(shape(), n), rounds, pair_fraction)),
          id(cache.open(seed)),
          prompt(n - 5) {
        if (spoil != nullptr) {
            spoil(rows);
        }
        support::prefill(cache, id, rows, 0, prompt);
        const std::vector<float> scores(shape().kv_heads * prompt, 1.0f);
        cache.compress(id, verkv::given_scores(std::span<const float>(scores)),
                       {.kept = verkv::budget::fraction(1.0 / 8).at_least(8), .fixed = {4, 4}});
        support::append(cache, id, rows, prompt, n - prompt);
    }
    static verkv::geometry shape() {
        verkv::geometry g;
        g.query_heads = 8;
        g.kv_heads = 2;
        g.key_dim = g.value_dim = 64;
        return g;
    }
};

/// What the CPU plans for a KV head, from the verbs that its step is made of.
struct cpu_plan {
    std::vector<verkv::token_index> used;  // beside the resident tokens
    std::vector<float> raised;             // r' of every token, 0: none
};

cpu_plan plan_on_cpu(const traced& s, std::size_t kv, std::span<const float> queries, verkv::tolerance promise,
                     std::span<const float> u) {
    const verkv::geometry& g = s.t.shape;
    const std::size_t n = s.tokens, heads = g.group();
    const verkv::rows<float> q{queries.data() + kv * heads * g.key_dim, static_cast<std::ptrdiff_t>(g.key_dim), heads,
                               g.key_dim, nullptr};
    const auto& sketch = s.cache.sketch_of(s.id, kv);
    std::vector<float> logits(heads * n), odds(n);
    sketch.estimate(verkv::cpu{}, q, g.logit_scale(),
                    {logits.data(), heads, sketch.size(), static_cast<std::ptrdiff_t>(n)});
    std::vector<verkv::masses_view> masses(heads);
    for (std::size_t i = 0; i < n; ++i) {
        const double r = static_cast<double>(s.cache.probability(s.id, kv, static_cast<verkv::token_index>(i)));
        odds[i] = static_cast<float>((1 - r) / r);
        for (std::size_t h = 0; h < heads && odds[i] == 0; ++h) {
            const auto row = s.cache.host_row(s.id, kv, static_cast<verkv::token_index>(i));
            double dot = 0;
            for (std::size_t c = 0; c < g.key_dim; ++c) {
                dot += static_cast<double>(q[h][c]) * static_cast<double>(verkv::to_float(row[c]));
            }
            logits[h * n + i] = static_cast<float>(dot * static_cast<double>(g.logit_scale()));
        }
    }
    for (std::size_t h = 0; h < heads; ++h) {
        const std::span<float> row(logits.data() + h * n, n);
        const double total = verkv::weigh(verkv::cpu{}, row).total;
        masses[h] = {row, odds, total};
        masses[h].total = total;
    }
    verkv::water_filling<> planner;
    verkv::water_filling<>::workspace w;
    std::vector<verkv::plan> plans(heads);
    planner.plan_group(verkv::cpu{}, masses, promise, w, plans);
    cpu_plan made;
    made.raised.resize(n);
    for (const verkv::plan_entry& e : plans[0].entries) {
        const float r = s.cache.probability(s.id, kv, e.token);
        made.raised[e.token] = e.probability;
        if (!s.cache.resident(s.id, kv, e.token) &&
            (e.probability >= 1 || (e.probability > r && verkv::sampled(static_cast<double>(e.probability),
                                                                        static_cast<double>(u[e.token]))))) {
            made.used.push_back(e.token);
        }
    }
    return made;
}

double largest_of(std::span<const float> v) {
    double most = 0;
    for (const float x : v) {
        most = std::max(most, std::abs(static_cast<double>(x)));
    }
    return most;
}

/// How far two outputs of a head are apart, relative to the largest channel.
double apart(std::span<const float> a, std::span<const float> b) {
    double most = 0;
    for (std::size_t c = 0; c < a.size(); ++c) {
        most = std::max(most, std::abs(static_cast<double>(a[c]) - static_cast<double>(b[c])));
    }
    return most / largest_of(b);
}

template <class Device>
using mirror = support::device_mirror<Device, half, 2, 4, 64>;

/// What the device and the CPU make of a decode step.
struct answers {
    std::vector<float> queries;
    support::device_outcome found;
    support::step_answer right;
    const verkv::step_report* report = nullptr;
};

template <class Mirror>
answers answers_at(traced& s, Mirror& device, std::size_t step, std::size_t prompt, const verkv::tolerance& promise) {
    s.append_up_to(step);
    device.upload(s.cache, s.id, seed, 0, prompt);
    answers both;
    both.queries = support::queries_at(s.t, step);
    both.found = device.run(both.queries);
    both.right = support::decode(s.cache, s.id, both.queries, promise, &both.report);
    return both;
}

}  // namespace

TEST_CASE("a step on the packaged trace is the CPU's", "[parity]") {
    const verkv::tolerance promise{0.05, 0.1};
    support::on_devices(2, [&](auto& gpu) {
        traced s(0);
        const std::size_t prompt = s.tokens, heads = s.t.shape.query_heads, group = s.t.shape.group();
        const std::size_t dim = s.t.shape.value_dim;
        mirror<std::remove_reference_t<decltype(gpu)>> device(gpu, s.cache, s.id, 600, promise, 0);
        std::size_t listed = 0, different = 0, alike = 0, all = 0;
        for (const std::size_t step : s.t.spread_steps(2)) {
            INFO("step " << step);
            const auto [queries, found, right, report] = answers_at(s, device, step, prompt, promise);
            for (std::size_t kv = 0; kv < s.t.shape.kv_heads; ++kv) {
                INFO("KV head " << kv);
                std::vector<float> u(s.tokens);
                for (std::size_t i = 0; i < prompt; ++i) {
                    u[i] = static_cast<float>(verkv::uniform({seed, 15, static_cast<std::uint32_t>(kv), 0},
                                                             static_cast<verkv::position_t>(i)));
                }
                const auto [used, raised] = plan_on_cpu(s, kv, queries, promise, u);
                // A level differs by 2^-9 at most: so do the r' that decide about U.
                std::vector<verkv::token_index> odd;
                std::set_symmetric_difference(used.begin(), used.end(), found.listed[kv].begin(),
                                              found.listed[kv].end(), std::back_inserter(odd));
                for (const verkv::token_index t : odd) {
                    CHECK(std::abs(raised[t] - u[t]) <= 0x1p-8f * u[t]);
                }
                listed += used.size();
                different += odd.size();
                const verkv::kv_head_report& k = report->kv_head(0, kv);
                CHECK(std::abs(static_cast<double>(k.rows_fetched) - static_cast<double>(used.size())) <= 1);
                CHECK(found.pinned[kv] == 0);
                CHECK(found.rounds[kv] == 0);
                for (std::size_t h = kv * group; h < (kv + 1) * group; ++h) {
                    const verkv::query_head_report& r = report->query_head(0, h);
                    CHECK(found.decision[h].certificate_before == Approx(r.certificate_before).epsilon(1e-3));
                    CHECK(found.decision[h].certificate_after < promise.epsilon);
                    const std::span<const float> out(right.output.data() + h * dim, dim);
                    const double error = apart(std::span<const float>(found.output).subspan(h * dim, dim), out);
                    CHECK(error < (odd.empty() ? 2e-3 : promise.epsilon));
                    CHECK(static_cast<double>(std::abs(found.lse[h] - right.lse[h])) <
                          (odd.empty() ? 1e-3 : promise.epsilon));
                    alike += odd.empty();
                    ++all;
                }
            }
            // Nothing is known of the task without tokens, and nothing comes out.
            for (std::size_t h = heads; h < heads + group; ++h) {
                CHECK(found.lse[h] == -std::numeric_limits<float>::infinity());
                CHECK(largest_of(std::span<const float>(found.output).subspan(h * dim, dim)) == 0);
            }
            CHECK(found.fetched.back() == 0);

            // The same step again: the same bits, and all rows are staged.
            const support::device_outcome again = device.run(queries);
            CHECK(support::bits_of(again.output) == support::bits_of(found.output));
            CHECK(again.listed == found.listed);
            CHECK(std::count(again.copied.begin(), again.copied.end(), 0u) ==
                  static_cast<std::ptrdiff_t>(again.copied.size()));
        }
        CHECK(listed > 200);
        CHECK(different * 100 <= listed);
        CHECK(2 * alike >= all);
    });
}

TEST_CASE("the check of a step asks for the rounds that the CPU's does", "[parity]") {
    const verkv::tolerance promise{0.05, 0.1};
    constexpr std::size_t rounds = 8;
    support::on_devices(1, [&](auto& gpu) {
        traced s(rounds);
        const std::size_t prompt = s.tokens, group = s.t.shape.group(), dim = s.t.shape.value_dim;
        mirror<std::remove_reference_t<decltype(gpu)>> device(gpu, s.cache, s.id, 2000, promise, rounds);
        std::size_t heads = 0, same_rounds = 0, asked = 0;
        for (const std::size_t step : s.t.spread_steps(3)) {
            INFO("step " << step);
            const auto [queries, found, right, report] = answers_at(s, device, step, prompt, promise);
            for (std::size_t kv = 0; kv < s.t.shape.kv_heads; ++kv) {
                const verkv::kv_head_report& k = report->kv_head(0, kv);
                INFO("KV head " << kv << ": rounds " << k.rounds << ", device " << found.rounds[kv] << "; rows "
                                << k.rows_fetched << ", device " << found.fetched[kv]);
                ++heads;
                asked += k.rounds;
                const bool same = k.rounds == found.rounds[kv];
                same_rounds += same;
                CHECK(std::max<std::size_t>(k.rounds, found.rounds[kv]) <=
                      1 + std::min<std::size_t>(k.rounds, found.rounds[kv]));
                CHECK(found.fetched[kv] == Approx(static_cast<double>(k.rows_fetched)).epsilon(0.2));
                CHECK(std::is_sorted(found.listed[kv].begin(), found.listed[kv].end()));
                for (std::size_t h = kv * group; h < (kv + 1) * group; ++h) {
                    CHECK(found.holds[h] == 1);
                    CHECK(found.observed[h].observed < promise.epsilon);
                    const std::span<const float> out(right.output.data() + h * dim, dim);
                    if (same) {
                        CHECK(found.observed[h].observed ==
                              Approx(report->query_head(0, h).certificate_observed).epsilon(0.03));
                        CHECK(apart(std::span<const float>(found.output).subspan(h * dim, dim), out) < 0.03);
                    }
                }
                if (same) {
                    CHECK(found.fetched[kv] == Approx(static_cast<double>(k.rows_fetched)).epsilon(0.02));
                }
            }
        }
        CHECK(asked > 0);
        // Levels that agree to 2^-8 may stop at neighbouring steps of the grid.
        CHECK(10 * same_rounds >= 7 * heads);
    });
}

TEST_CASE("rounds and rows of random texts are the CPU's", "[parity]") {
    // Sketches that know little: calibration and every kind of round.
    std::size_t heads = 0, same = 0, asked = 0;
    support::on_cases(18, [&](auto& gpu, unsigned seed_of_case) {
        const double fractions[] = {0.01, 0.1, 0.25};
        const std::size_t rounds = 1 + seed_of_case % 4;
        normal s(300 + 40 * seed_of_case, rounds, fractions[seed_of_case % 3], seed_of_case % 2 == 0 ? 1 : 3);
        const verkv::tolerance promise{seed_of_case % 5 == 0 ? 0.3 : 0.1, 0.1};
        mirror<std::remove_reference_t<decltype(gpu)>> device(gpu, s.cache, s.id, 400, promise, rounds,
                                                              1 + seed_of_case % 4, 32u << (seed_of_case % 4));
        device.upload(s.cache, s.id, seed, 0, s.prompt);
        std::vector<float> queries = support::random_queries<half>(s.shape(), seed_of_case);
        for (float& q : queries) {
            q *= static_cast<float>(1 + seed_of_case % 3);
        }
        const support::device_outcome found = device.run(queries);
        const verkv::step_report* report = nullptr;
        const support::step_answer right = support::decode(s.cache, s.id, queries, promise, &report);
        const auto exact = support::dense_in_double(s.rows, s.rows.tokens, queries);
        for (std::size_t kv = 0; kv < 2; ++kv) {
            const verkv::kv_head_report& k = report->kv_head(0, kv);
            INFO("case " << seed_of_case << " KV head " << kv << ": rounds " << k.rounds << ", device "
                         << found.rounds[kv] << "; rows " << k.rows_fetched << ", device " << found.fetched[kv]);
            ++heads;
            asked += k.rounds;
            const bool alike = k.rounds == found.rounds[kv] && k.rows_fetched == found.fetched[kv];
            same += alike;
            for (std::size_t h = kv * 4; h < (kv + 1) * 4; ++h) {
                CHECK(found.holds[h] == 1);
                // In the last round the device uses everything for all heads, the CPU for those that need it.
                if (k.rounds == rounds) {
                    CHECK(found.observed[h].observed == 0);
                    CHECK(static_cast<double>(found.lse[h]) == Approx(exact[h].lse).margin(1e-4));
                } else if (alike) {
                    CHECK(found.observed[h].observed ==
                          Approx(report->query_head(0, h).certificate_observed).epsilon(0.05).margin(1e-4));
                    CHECK(apart(std::span<const float>(found.output).subspan(h * 64, 64),
                                std::span<const float>(right.output).subspan(h * 64, 64)) < 2e-2);
                    CHECK(std::abs(found.lse[h] - right.lse[h]) < 1e-2f);
                }
            }
            CHECK(found.copied[kv] <= found.fetched[kv] * (1 + found.rounds[kv]));
        }
    });
    CHECK(asked >= 8);
    CHECK(10 * same >= 9 * heads);
}

TEST_CASE("a staging area that is too small changes no bit", "[parity]") {
    support::on_devices(3, [](auto& gpu) {
        normal s(700, 2, 0.25);
        const std::vector<float> queries = support::random_queries<half>(s.shape(), 5);
        std::vector<support::device_outcome> found;
        for (const std::size_t capacity : {700u, 13u, 1u}) {
            mirror<std::remove_reference_t<decltype(gpu)>> device(gpu, s.cache, s.id, capacity, {0.1, 0.1}, 2);
            device.upload(s.cache, s.id, seed, 0, s.prompt);
            found.push_back(device.run(queries));
            for (std::size_t kv = 0; kv < 2; ++kv) {
                CHECK(found.back().pinned[kv] ==
                      (found[0].fetched[kv] > capacity ? found[0].fetched[kv] - capacity : 0));
            }
            CHECK(found.back().fetched == found[0].fetched);
            CHECK(support::bits_of(found.back().output) == support::bits_of(found[0].output));
            CHECK(support::bits_of(found.back().lse) == support::bits_of(found[0].lse));
        }
        CHECK(found[0].fetched[0] > 13);
    });
}

TEST_CASE("the last round of a check uses everything", "[parity]") {
    // A sketch of one pair of channels knows next to nothing of these keys, and one round does not find out.
    support::on_devices(2, [](auto& gpu) {
        normal s(500, 1, 0.01, 1);
        const verkv::tolerance promise{0.3, 0.1};
        mirror<std::remove_reference_t<decltype(gpu)>> device(gpu, s.cache, s.id, 100, promise, 1);
        device.upload(s.cache, s.id, seed, 0, s.prompt);
        std::vector<float> queries = support::random_queries<half>(s.shape(), 6);
        for (float& q : queries) {
            q *= 2;
        }
        const support::device_outcome found = device.run(queries);
        const auto exact = support::dense_in_double(s.rows, s.rows.tokens, queries);
        std::size_t everything = 0;
        for (std::size_t kv = 0; kv < 2; ++kv) {
            if (found.rounds[kv] == 0) {
                continue;
            }
            ++everything;
            for (std::size_t h = kv * 4; h < (kv + 1) * 4; ++h) {
                CHECK(found.holds[h] == 1);
                CHECK(found.observed[h].observed == 0);
                CHECK(found.decision[h].certificate_after == 0);
                CHECK(static_cast<double>(found.lse[h]) == Approx(exact[h].lse).margin(1e-4));
                for (std::size_t c = 0; c < 64; ++c) {
                    CHECK(std::abs(static_cast<double>(found.output[h * 64 + c]) - exact[h].output[c]) < 1e-4);
                }
            }
        }
        CHECK(everything > 0);
    });
}

TEST_CASE("the last round leaves no token out", "[parity]") {
    // On the trace most tokens weigh so little that no level lists them.
    support::on_devices(1, [](auto& gpu) {
        traced s(1);
        const std::size_t prompt = s.tokens;
        const std::size_t step = s.t.decode_steps() - 1;
        s.append_up_to(step);
        mirror<std::remove_reference_t<decltype(gpu)>> device(gpu, s.cache, s.id, 100, {0.05, 0.1}, 1);
        device.upload(s.cache, s.id, seed, 0, prompt);
        const support::device_outcome found = device.run(support::queries_at(s.t, step));
        std::size_t everything = 0;
        for (std::size_t kv = 0; kv < s.t.shape.kv_heads; ++kv) {
            std::size_t resident = 0;
            for (std::size_t i = 0; i < s.tokens; ++i) {
                resident += s.cache.resident(s.id, kv, static_cast<verkv::token_index>(i));
            }
            if (found.rounds[kv] > 0) {
                ++everything;
                CHECK(found.fetched[kv] + resident == s.tokens);
            } else {
                CHECK(2 * found.fetched[kv] < s.tokens);
            }
        }
        CHECK(everything > 0);
    });
}

TEST_CASE("a key that is not a number makes its KV head NaN, and no other", "[parity]") {
    support::on_devices(2, [](auto& gpu) {
        normal s(400, 2, 0.25, 3, [](support::text<half>& t) {
            // All channels: some are in the sketch.
            std::fill_n(t.key(123, 1), 64, verkv::from_float<half>(std::numeric_limits<float>::quiet_NaN()));
        });
        mirror<std::remove_reference_t<decltype(gpu)>> device(gpu, s.cache, s.id, 100, {0.1, 0.1}, 2);
        device.upload(s.cache, s.id, seed, 0, s.prompt);
        const std::vector<float> queries = support::random_queries<half>(s.shape(), 5);
        const support::device_outcome found = device.run(queries);
        const support::step_answer right = support::decode(s.cache, s.id, queries, {0.1, 0.1});
        for (std::size_t h = 0; h < 8; ++h) {
            CHECK(std::isnan(found.lse[h]) == (h >= 4));
            CHECK(std::isnan(right.lse[h]) == (h >= 4));
            for (std::size_t c = 0; c < 64; ++c) {
                CHECK(std::isnan(found.output[h * 64 + c]) == (h >= 4));
            }
        }
    });
}

TEST_CASE("a step says what it cannot be built for", "[parity]") {
    support::on_devices(1, [](auto& gpu) {
        using device_type = std::remove_reference_t<decltype(gpu)>;
        using step = typename mirror<device_type>::step_type;
        const auto refuses = [&](auto change, std::initializer_list<std::string> parts) {
            verkv::gpu::layer_step_config c;
            c.key_dim = c.value_dim = 64;
            c.heads = 3;
            c.max_tokens = 100;
            c.max_residents = 50;
            c.channel_count = c.padded_channels = 16;
            change(c);
            return support::refused([&] { (void)step(c, support::test_memory<device_type>{&gpu}); }, parts);
        };
        CHECK(refuses([](auto& c) { c.heads = 5; }, {"of 5 query heads", "1 to 4"}));
        CHECK(refuses([](auto& c) { c.tasks = 30000; }, {"30000 KV heads of 3", "65535"}));
        CHECK(refuses([](auto& c) { c.max_tokens = (1u << 22) + 1; }, {"4194305 tokens", "4194304"}));
        CHECK(refuses([](auto& c) { c.max_residents = 101; }, {"101 resident rows of 100"}));
        CHECK(refuses([](auto& c) { c.key_dim = 128; }, {"128 + 64 channels", "64 + 64"}));
        CHECK(refuses([](auto& c) { c.channel_count = 0; }, {"0 channels"}));
        CHECK(refuses([](auto& c) { c.threads = 100; }, {"100 threads"}));
        CHECK(refuses([](auto& c) { c.promise.epsilon = 0; }, {"epsilon is 0"}));
    });
}
