// The paper's plan by radix select, beside greedy on the CPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/device_plans.hpp"
#include "support/trace_decisions.hpp"
#include "verkv/cuda/greedy_list.hpp"
#include "verkv/cuda/greedy_select.hpp"
#include "verkv/cuda/greedy_survey.hpp"

namespace {

using support::device_decisions;
using support::device_plans;
using verkv::tolerance;

device_plans greedy_on_device(const device_decisions& d, tolerance t, unsigned threads, unsigned blocks,
                              std::uint64_t seed) {
    using verkv::gpu::greedy_select_kernel;
    const std::size_t rows = d.kv_heads * d.heads;
    device_plans out;
    out.rows = d.heads;
    out.stride = d.stride;
    out.decided.resize(rows);
    out.token.resize(d.kv_heads * d.stride);
    out.probability.resize(rows * d.stride, -1.0f);
    out.count.resize(d.kv_heads);
    std::vector<std::uint64_t> sums(rows * greedy_select_kernel::bins);
    std::vector<std::uint32_t> terms(sums.size()), counts(sums.size()), arrived(rows);
    emulator::machine gpu;
    gpu.input("mass", std::span<const float>(d.mass));
    gpu.input("odds", std::span<const float>(d.odds));
    gpu.input("tokens", std::span<const std::uint32_t>(d.tokens));
    gpu.input("reference", std::span<const double>(d.reference));
    gpu.in_out("sums", std::span<std::uint64_t>(sums));
    gpu.in_out("terms", std::span<std::uint32_t>(terms));
    gpu.in_out("counts", std::span<std::uint32_t>(counts));
    gpu.in_out("arrived", std::span<std::uint32_t>(arrived));
    gpu.in_out("token", std::span<verkv::token_index>(out.token));
    gpu.in_out("probability", std::span<float>(out.probability));
    gpu.in_out("count", std::span<std::uint32_t>(out.count));
    gpu.in_out("decision", std::span<verkv::gpu::head_decision>(out.decided));
    const verkv::gpu::detail::greedy_masses m{d.mass.data(),
                                              d.odds.data(),
                                              d.tokens.data(),
                                              d.reference.data(),
                                              d.stride,
                                              static_cast<std::uint32_t>(d.kv_heads),
                                              static_cast<std::uint32_t>(d.heads)};
    const auto order = emulator::schedule::numbered(seed);
    const auto state = gpu.output<verkv::gpu::greedy_state>("state", rows);
    verkv::gpu::greedy_survey_kernel survey;
    survey.m = m;
    survey.state = state.data();
    survey.partial = gpu.output<verkv::gpu::greedy_survey_kernel::found>("partial", rows * blocks).data();
    survey.arrived = arrived.data();
    survey.epsilon = t.epsilon;
    survey.log_term = t.log_term();
    survey.blocks = blocks;
    survey.threads = threads;
    gpu.launch(survey, order);
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
        gpu.launch(select, order);
    }
    verkv::gpu::greedy_list_kernel list;
    list.m = m;
    list.state = state.data();
    list.lists = {out.token.data(), out.probability.data(), out.count.data(), d.stride,
                  static_cast<std::uint32_t>(d.heads)};
    list.decision = out.decided.data();
    list.counts = gpu.output<std::uint32_t>("block counts", d.kv_heads * blocks).data();
    list.arrived = arrived.data();
    list.blocks = blocks;
    list.threads = threads;
    gpu.launch(list, order);
    const auto zero = [](const auto& v) { return std::all_of(v.begin(), v.end(), [](auto x) { return x == 0; }); };
    REQUIRE((zero(sums) && zero(terms) && zero(counts) && zero(arrived)));
    return out;
}

void check_greedy(const device_decisions& d, tolerance t, unsigned threads, unsigned blocks, std::uint64_t seed) {
    INFO("heads " << d.heads << " epsilon " << t.epsilon << " threads " << threads << " blocks " << blocks << " seed "
                  << seed);
    const device_plans found = greedy_on_device(d, t, threads, blocks, seed);
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
    for (unsigned seed = 0; seed < 36; ++seed) {
        support::dice random(seed);
        const unsigned threads = 32u << (seed % 6);
        const std::size_t n = 300 + 37 * seed;
        device_decisions d(2, 1 + seed % 4, n + 1);
        support::fill_group(d, 0, n, random, support::all_weights[seed % std::size(support::all_weights)],
                            support::all_probabilities[seed / 2 % std::size(support::all_probabilities)]);
        support::fill_group(d, 1, n / 3, random, support::weights::few_values, support::probabilities::few_values);
        check_greedy(d, {seed % 3 == 0 ? 0.05 : seed % 3 == 1 ? 0.15 : 0.4, 0.1}, threads, 1 + seed % 4, seed);
    }
}

TEST_CASE("greedy plans of few and of many tokens", "[parity]") {
    for (const std::size_t n : {0, 1, 2, 33, 50'000}) {
        support::dice random(n);
        device_decisions d(1, 2, n);
        support::fill_group(d, 0, n, random, support::weights::peaked, support::probabilities::importance);
        check_greedy(d, {0.05, 0.1}, 256, 5, 4);
    }
}

TEST_CASE("greedy plans of equal tokens fetch the first ones", "[parity]") {
    device_decisions d(1, 1, 1000);
    d.set(0, 0, support::decision(std::vector<float>(1000, 0.5f), std::vector<float>(1000, 0.25f)));
    const tolerance t{0.05, 0.1};
    const auto p = greedy_on_device(d, t, 96, 3, 5);
    const auto raised = support::spread_out(p, 0, 0, 1000);
    CHECK(std::is_sorted(raised.rbegin(), raised.rend()));
    check_greedy(d, t, 96, 3, 5);
}

TEST_CASE("greedy plans of the packaged trace are the CPU's", "[parity][trace]") {
    const support::real_head head = support::head_of_trace(1);
    for (std::size_t k = 0; k < head.decisions.size(); k += 2) {
        const support::trace_decision& own = head.decisions[k];
        support::decision one;
        one.mass = own.weight;
        one.odds = own.odds;
        one.r.assign(own.weight.size(), 1.0f);
        one.reference = 1;
        device_decisions d(1, 1, own.weight.size());
        d.set(0, 0, one);
        check_greedy(d, {0.05, 0.1}, 256, 4, k);
    }
}
