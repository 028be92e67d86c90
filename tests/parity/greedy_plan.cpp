// The paper's plan by radix select, beside greedy on the CPU.
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
#include "verkv/cuda/greedy_list.hpp"
#include "verkv/cuda/greedy_select.hpp"
#include "verkv/cuda/greedy_survey.hpp"

namespace {

using support::device_decisions;
using support::device_plans;
using verkv::tolerance;

template <class Device>
device_plans greedy_on_device(Device& gpu, const device_decisions& d, tolerance t, unsigned threads, unsigned blocks) {
    using verkv::gpu::greedy_select_kernel;
    using verkv::gpu::greedy_survey_kernel;
    const std::size_t rows = d.kv_heads * d.heads;
    device_plans out;
    out.rows = d.heads;
    out.stride = d.stride;
    const std::vector<std::uint64_t> no_sums(rows * greedy_select_kernel::bins);
    const std::vector<std::uint32_t> nothing(rows * greedy_select_kernel::bins), none(rows);
    const auto sums = gpu.in_out("sums", std::span<const std::uint64_t>(no_sums));
    const auto terms = gpu.in_out("terms", std::span<const std::uint32_t>(nothing));
    const auto counts = gpu.in_out("counts", std::span<const std::uint32_t>(nothing));
    const auto arrived = gpu.in_out("arrived", std::span<const std::uint32_t>(none));
    const verkv::gpu::detail::greedy_masses m{gpu.input("mass", std::span<const float>(d.mass)).data(),
                                              gpu.input("odds", std::span<const float>(d.odds)).data(),
                                              gpu.input("tokens", std::span<const std::uint32_t>(d.tokens)).data(),
                                              gpu.input("reference", std::span<const double>(d.reference)).data(),
                                              d.stride,
                                              static_cast<std::uint32_t>(d.kv_heads),
                                              static_cast<std::uint32_t>(d.heads)};
    const auto state = gpu.template output<verkv::gpu::greedy_state>("state", rows);
    greedy_survey_kernel survey;
    survey.m = m;
    survey.state = state.data();
    survey.partial = gpu.template output<greedy_survey_kernel::found>("partial", rows * blocks).data();
    survey.arrived = arrived.data();
    survey.epsilon = t.epsilon;
    survey.log_term = t.log_term();
    survey.blocks = blocks;
    survey.threads = threads;
    gpu.launch(survey);
    for (std::uint32_t digit = 0; digit < 3; ++digit) {
        greedy_select_kernel select;
        select.m = m;
        select.state = state.data();
        select.sums = sums.data();
        select.terms = terms.data();
        select.counts = counts.data();
        select.arrived = arrived.data();
        select.digit = digit;
        select.epsilon = t.epsilon;
        select.log_term = t.log_term();
        select.blocks = blocks;
        select.threads = threads;
        gpu.launch(select);
    }
    const auto token = gpu.template output<verkv::token_index>("token", d.kv_heads * d.stride);
    const auto probability = gpu.template output<float>("probability", rows * d.stride);
    const auto count = gpu.template output<std::uint32_t>("count", d.kv_heads);
    const auto decision = gpu.template output<verkv::gpu::head_decision>("decision", rows);
    verkv::gpu::greedy_list_kernel list;
    list.m = m;
    list.state = state.data();
    list.lists = {token.data(), probability.data(), count.data(), d.stride, static_cast<std::uint32_t>(d.heads)};
    list.decision = decision.data();
    list.counts = gpu.template output<std::uint32_t>("counts of blocks", d.kv_heads * blocks).data();
    list.arrived = arrived.data();
    list.blocks = blocks;
    list.threads = threads;
    gpu.launch(list);
    out.decided = gpu.download(decision);
    out.token = gpu.download(token);
    out.probability = gpu.download(probability);
    out.count = gpu.download(count);
    out.clean = gpu.download(sums) == no_sums && gpu.download(terms) == nothing && gpu.download(counts) == nothing &&
                gpu.download(arrived) == none;
    return out;
}

template <class Device>
void check_greedy(Device& gpu, const device_decisions& d, tolerance t, unsigned threads, unsigned blocks) {
    INFO("heads " << d.heads << " epsilon " << t.epsilon << " threads " << threads << " blocks " << blocks);
    const device_plans found = greedy_on_device(gpu, d, t, threads, blocks);
    CHECK(found.clean);
    for (std::size_t kv = 0; kv < d.kv_heads; ++kv) {
        const std::size_t n = d.tokens[kv];
        CHECK(std::is_sorted(found.listed(kv).begin(), found.listed(kv).end()));
        for (std::size_t h = 0; h < d.heads; ++h) {
            INFO("KV head " << kv << " of " << n << " tokens, head " << h);
            const auto m = d.view(kv, h);
            using planner = verkv::greedy<verkv::no_shrinkage>;
            typename planner::workspace w;
            verkv::plan right;
            planner{}.plan(verkv::cpu{}, m, t, w, right);
            const auto raised = support::spread_out(found, kv, h, n);
            const auto expected = support::spread_out(right, n);
            const double direct = support::certificate_of(m, raised, t);
            const auto& own = found.decided[kv * d.heads + h];
            CHECK(own.certificate_before == Approx(right.certificate_before).epsilon(1e-5));
            CHECK(direct < t.epsilon);
            CHECK(own.certificate_after == Approx(direct).epsilon(1e-5).margin(1e-12));
            // The same set, but for tokens at the cut that roundings of certificates tell apart.
            std::size_t fetched = 0, differs = 0;
            for (std::size_t i = 0; i < n; ++i) {
                REQUIRE((raised[i] == 0 || raised[i] == 1));
                fetched += raised[i] == 1;
                differs += (raised[i] == 1) != (expected[i] == 1);
            }
            CHECK(differs <= 1 + right.raised / 1000);
            CHECK(fetched + 1 >= right.raised);
        }
    }
}

}  // namespace

TEST_CASE("greedy plans are the CPU's", "[parity]") {
    support::on_cases(36, [](auto& gpu, unsigned seed) {
        INFO("seed " << seed);
        support::dice random(seed);
        const unsigned threads = 32u << (seed % 6);
        const std::size_t n = 300 + 37 * seed;
        device_decisions d(2, 1 + seed % 4, n + 1);
        support::fill_group(d, 0, n, random, support::all_weights[seed % std::size(support::all_weights)],
                            support::all_probabilities[seed / 2 % std::size(support::all_probabilities)]);
        support::fill_group(d, 1, n / 3, random, support::weights::few_values, support::probabilities::few_values);
        check_greedy(gpu, d, {seed % 3 == 0 ? 0.05 : seed % 3 == 1 ? 0.15 : 0.4, 0.1}, threads, 1 + seed % 4);
    });
}

TEST_CASE("greedy plans of few and of many tokens", "[parity]") {
    support::on_cases(5, [](auto& gpu, unsigned c) {
        const std::size_t sizes[] = {0, 1, 2, 33, 50'000};
        const std::size_t n = sizes[c];
        support::dice random(n);
        device_decisions d(1, 2, n);
        support::fill_group(d, 0, n, random, support::weights::peaked, support::probabilities::importance);
        check_greedy(gpu, d, {0.05, 0.1}, 256, 5);
    });
}

TEST_CASE("greedy plans of equal tokens fetch the first ones", "[parity]") {
    device_decisions d(1, 1, 1000);
    d.set(0, 0, support::decision(std::vector<float>(1000, 0.5f), std::vector<float>(1000, 0.25f)));
    support::on_cases(3, [&](auto& gpu, unsigned) {
        const tolerance t{0.05, 0.1};
        const auto p = greedy_on_device(gpu, d, t, 96, 3);
        const auto raised = support::spread_out(p, 0, 0, 1000);
        CHECK(std::is_sorted(raised.rbegin(), raised.rend()));
        check_greedy(gpu, d, t, 96, 3);
    });
}

TEST_CASE("greedy plans of the packaged trace are the CPU's", "[parity][trace]") {
    const support::real_head head = support::head_of_trace(1);
    support::on_cases(static_cast<unsigned>(head.decisions.size() / 2), [&](auto& gpu, unsigned c) {
        const support::trace_decision& own = head.decisions[2 * c];
        support::decision one;
        one.mass = own.weight;
        one.odds = own.odds;
        one.r.assign(own.weight.size(), 1.0f);
        one.reference = 1;
        device_decisions d(1, 1, own.weight.size());
        d.set(0, 0, one);
        check_greedy(gpu, d, {0.05, 0.1}, 256, 4);
    });
}
