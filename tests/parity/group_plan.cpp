// Levels and group plans by the kernels, beside those of water_filling on the CPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/device_cases.hpp"
#include "support/device_plans.hpp"
#include "support/trace_decisions.hpp"
#include "verkv/cuda/group_plan.hpp"
#include "verkv/cuda/weigh.hpp"

namespace {

using support::device_decisions;
using support::device_plans;
using verkv::tolerance;

struct comparison {
    double rows_device = 0, rows_cpu = 0;
};

// Compares with the CPU's plans of every KV head; adds up the rows that both expect.
template <unsigned Heads, class Device>
comparison check_plans(Device& gpu, const device_decisions& d, tolerance t, bool joint, unsigned threads,
                       unsigned blocks) {
    INFO("heads " << d.heads << " epsilon " << t.epsilon << " joint " << joint << " threads " << threads << " blocks "
                  << blocks);
    const device_plans found = support::plan_on_device<Heads>(gpu, d, t, joint, threads, blocks);
    CHECK(found.clean);
    comparison sum;
    for (std::size_t kv = 0; kv < d.kv_heads; ++kv) {
        const std::size_t n = d.tokens[kv];
        INFO("KV head " << kv << " of " << n << " tokens");
        std::vector<verkv::masses_view> m;
        for (std::size_t h = 0; h < d.heads; ++h) {
            m.push_back(d.view(kv, h));
        }
        const verkv::water_filling<> planner{joint ? verkv::group_plan::joint : verkv::group_plan::per_head, {}};
        typename verkv::water_filling<>::workspace w;
        std::vector<verkv::plan> plans(d.heads), alone(d.heads);
        planner.plan_group(verkv::cpu{}, m, t, w, plans);
        const auto tokens = found.listed(kv);
        CHECK(std::is_sorted(tokens.begin(), tokens.end()));
        CHECK(std::adjacent_find(tokens.begin(), tokens.end()) == tokens.end());
        double rows = 0, rows_cpu = 0;
        for (std::size_t h = 0; h < d.heads; ++h) {
            planner.plan(verkv::cpu{}, m[h], t, w, alone[h]);
            const verkv::gpu::head_decision& own = found.decided[kv * d.heads + h];
            const verkv::gpu::head_level& level = found.level[kv * d.heads + h];
            // The sample as drawn.
            CHECK(own.certificate_before == Approx(alone[h].certificate_before).epsilon(1e-5));
            // The level lies in the bin that was found, and, of a plan of its own, where the CPU has it.
            if (alone[h].certificate_before < t.epsilon * (1 - 1e-5)) {
                CHECK(level.low == std::numeric_limits<float>::infinity());
            } else if (alone[h].certificate_before > t.epsilon * (1 + 1e-5)) {
                CHECK(static_cast<double>(level.low) <= alone[h].level * (1 + 1e-3));
                if (!joint) {
                    CHECK(own.level == Approx(alone[h].level).epsilon(2e-3));
                }
            }
            // The certificate, from what was written.
            const auto raised = support::spread_out(found, kv, joint ? 0 : h, n);
            const double direct = support::certificate_of(m[h], raised, t);
            CHECK(direct < t.epsilon);
            CHECK(own.certificate_after == Approx(direct).epsilon(1e-5).margin(1e-12));
            if (h < found.rows) {
                rows += support::expected_rows_of(m[h].odds, raised);
                rows_cpu += support::expected_rows_of(m[h].odds, support::spread_out(plans[h], n));
            }
            for (std::size_t i = 0; i < n; ++i) {
                if (raised[i] != 0 && !(raised[i] <= 1 && m[h].odds[i] > 0)) {
                    FAIL("token " << i << " has r' = " << raised[i]);
                }
            }
        }
        CHECK(rows <= rows_cpu * 1.01 + 0.005);
        CHECK(rows >= rows_cpu * 0.99 - 0.02);
        sum.rows_device += rows;
        sum.rows_cpu += rows_cpu;
    }
    return sum;
}

template <unsigned Heads, class Device>
comparison check_random(Device& gpu, std::size_t n, std::size_t heads, unsigned threads, unsigned blocks, unsigned seed,
                        double epsilon, bool joint) {
    INFO("seed " << seed);
    support::dice random(seed + 100 * n);
    device_decisions d(2, heads, n + 3);
    const auto w = support::all_weights[seed % std::size(support::all_weights)];
    const auto p = support::all_probabilities[seed / 2 % std::size(support::all_probabilities)];
    support::fill_group(d, 0, n, random, w, p);
    support::fill_group(d, 1, n / 2, random, support::weights::peaked, support::probabilities::importance);
    return check_plans<Heads>(gpu, d, {epsilon, 0.1}, joint, threads, blocks);
}

}  // namespace

TEST_CASE("group plans are the CPU's", "[parity]") {
    comparison sum;
    const auto add = [&](const comparison& c) {
        sum.rows_device += c.rows_device;
        sum.rows_cpu += c.rows_cpu;
    };
    support::on_cases(30, [&](auto& gpu, unsigned seed) {
        const unsigned threads = 32u << (seed % 6);
        const double epsilon = seed % 3 == 0 ? 0.05 : seed % 3 == 1 ? 0.1 : 0.3;
        add(check_random<4>(gpu, 700 + 13 * seed, 4, threads, 1 + seed % 5, seed, epsilon, true));
        add(check_random<1>(gpu, 300 + 7 * seed, 1, threads, 1 + seed % 3, seed, epsilon, true));
        add(check_random<4>(gpu, 555, 3, threads, 3, seed, epsilon, seed % 2 == 0));
        add(check_random<8>(gpu, 400 + seed, 8, threads, 2, seed, epsilon, seed % 4 != 0));
    });
    CHECK(sum.rows_device == Approx(sum.rows_cpu).epsilon(0.01));
    WARN("expected rows: device " << sum.rows_device << ", CPU " << sum.rows_cpu);
}

TEST_CASE("group plans of few and of many tokens", "[parity]") {
    support::on_cases(12, [](auto& gpu, unsigned c) {
        const std::size_t sizes[] = {0, 1, 2, 31, 33, 1000};
        check_random<4>(gpu, sizes[c % 6], 1 + c % 4, 64, 3, 2, 0.05, true);
    });
    support::on_cases(1, [](auto& gpu, unsigned) { check_random<4>(gpu, 50'000, 4, 256, 8, 6, 0.05, true); });
}

TEST_CASE("plans do not depend on the order of blocks", "[parity]") {
    support::dice random(7);
    device_decisions d(1, 4, 3000);
    support::fill_group(d, 0, 3000, random, support::weights::peaked, support::probabilities::importance);
    std::vector<device_plans> all;
    support::on_cases(9, [&](auto& gpu, unsigned) {
        all.push_back(support::plan_on_device<4>(gpu, d, {0.05, 0.1}, true, 128, 6));
    });
    for (const device_plans& other : all) {
        CHECK(all[0].count == other.count);
        CHECK(std::equal(all[0].raised(0, 0).begin(), all[0].raised(0, 0).end(), other.raised(0, 0).begin()));
        CHECK(all[0].decided[2].certificate_after == other.decided[2].certificate_after);
    }
}

TEST_CASE("masses that are no numbers stay with their head", "[parity]") {
    support::dice random(8);
    device_decisions d(1, 3, 500);
    support::fill_group(d, 0, 500, random, support::weights::peaked, support::probabilities::constant);
    d.mass[1 * d.stride + 77] = std::numeric_limits<float>::quiet_NaN();
    d.total[1] = d.reference[1] = std::numeric_limits<double>::quiet_NaN();
    const tolerance t{0.05, 0.1};
    support::on_cases(3, [&](auto& gpu, unsigned) {
        const auto p = support::plan_on_device<4>(gpu, d, t, true, 64, 2);
        CHECK(std::isnan(p.decided[1].certificate_after));
        const auto raised = support::spread_out(p, 0, 0, 500);
        for (const std::size_t h : {0, 2}) {
            CHECK(support::certificate_of(d.view(0, h), raised, t) < t.epsilon);
        }
    });
}

TEST_CASE("group plans of the packaged trace are the CPU's", "[parity][trace]") {
    const auto& t = support::packaged();
    comparison sum;
    for (std::size_t kv = 0; kv < t.shape.kv_heads; ++kv) {
        const support::real_head head = support::head_of_trace(kv);
        const std::size_t group = t.shape.group();
        for (std::size_t step = 0; step * group < head.decisions.size(); ++step) {
            const std::size_t n = head.decisions[step * group].weight.size();
            device_decisions d(1, group, n);
            for (std::size_t h = 0; h < group; ++h) {
                const support::trace_decision& own = head.decisions[step * group + h];
                support::decision one;
                one.mass = own.weight;
                one.odds = own.odds;
                one.r.assign(n, 1.0f);
                one.reference = 1;
                d.set(0, h, one);
                double total = 0;
                for (const float m : own.weight) {
                    total += static_cast<double>(m);
                }
                d.total[h] = d.reference[h] = total;
            }
            REQUIRE(group <= 4);
            support::on_cases(1, [&](auto& gpu, unsigned) {
                const auto c = check_plans<4>(gpu, d, {0.1, 0.1}, true, 256, 4);
                sum.rows_device += c.rows_device;
                sum.rows_cpu += c.rows_cpu;
            });
        }
    }
    CHECK(sum.rows_device == Approx(sum.rows_cpu).epsilon(0.01));
    WARN("expected rows: device " << sum.rows_device << ", CPU " << sum.rows_cpu);
}

TEST_CASE("weights and their sum are the CPU's", "[parity]") {
    support::on_cases(9, [](auto& gpu, unsigned seed) {
        support::dice random(seed);
        const std::size_t n = seed == 0 ? 0 : 1000 * seed + seed, kv_heads = 2, heads = 3, stride = n + 4;
        std::vector<float> logits(kv_heads * heads * stride);
        std::vector<std::uint32_t> top(kv_heads * heads), arrived(kv_heads * heads);
        const std::vector<std::uint32_t> tokens = {static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(n / 3)};
        for (std::size_t row = 0; row < kv_heads * heads; ++row) {
            float largest = -std::numeric_limits<float>::infinity();
            for (std::size_t i = 0; i < tokens[row / heads]; ++i) {
                logits[row * stride + i] = static_cast<float>(5 * random.normal());
                largest = std::max(largest, logits[row * stride + i]);
            }
            top[row] = verkv::gpu::ordered_bits(largest);
        }
        const unsigned blocks = 1 + seed * 5;
        const auto weights = gpu.in_out("logits", std::span<const float>(logits));
        const auto total = gpu.template output<double>("total", kv_heads * heads);
        verkv::gpu::weigh_kernel k;
        k.logits = weights.data();
        k.tokens = gpu.input("tokens", std::span<const std::uint32_t>(tokens)).data();
        k.top = gpu.input("top", std::span<const std::uint32_t>(top)).data();
        k.partial = gpu.template output<double>("partial", kv_heads * heads * blocks).data();
        k.total = total.data();
        k.arrived = gpu.in_out("arrived", std::span<const std::uint32_t>(arrived)).data();
        k.stride = stride;
        k.kv_heads = kv_heads;
        k.heads = heads;
        k.blocks = blocks;
        k.threads = 32u << (seed % 6);
        gpu.launch(k);
        auto expected = logits;
        logits = gpu.download(weights);
        const std::vector<double> sums = gpu.download(total);
        for (std::size_t row = 0; row < kv_heads * heads; ++row) {
            const std::span<float> right(expected.data() + row * stride, tokens[row / heads]);
            const auto w = verkv::weigh(verkv::cpu{}, right);
            CHECK(sums[row] == Approx(w.total).epsilon(1e-5));
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < right.size(); ++i) {
                wrong += !(std::abs(logits[row * stride + i] - right[i]) <= 4 * 0x1p-24f * right[i]);
            }
            CHECK(wrong == 0);
        }
    });
}
