// Selections without a certificate, and priority sampling: against sorts and sums of their own.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/allocations.hpp"
#include "support/attention_reference.hpp"
#include "support/baseline_scene.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/attend/attend.hpp"
#include "verkv/baseline/priority_sampling.hpp"
#include "verkv/baseline/top_k_attention.hpp"

namespace {

using support::baseline_scene;
using support::select;
using verkv::selection;
using verkv::token_count;
using verkv::token_index;
using tokens = std::vector<token_index>;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/// Free tokens by falling estimate, ties by rising index; those above `least` alone.
tokens by_estimate(const baseline_scene& s, float least) {
    tokens order;
    for (std::size_t i = 0; i < s.size(); ++i) {
        if (!s.fixed.fixed(i, s.size()) && s.estimate[i] > least) {
            order.push_back(static_cast<token_index>(i));
        }
    }
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return s.estimate[a] > s.estimate[b]; });
    return order;
}

tokens with_fixed(const baseline_scene& s, tokens chosen) {
    for (std::size_t i = 0; i < s.size(); ++i) {
        if (s.fixed.fixed(i, s.size())) {
            chosen.push_back(static_cast<token_index>(i));
        }
    }
    std::sort(chosen.begin(), chosen.end());
    return chosen;
}

double share_of(const baseline_scene& s, const selection& out) {
    double all = 0, inside = 0;
    for (std::size_t i = 0; i < s.size(); ++i) {
        const double w = s.estimate[i] > 0 ? static_cast<double>(s.estimate[i]) : 0;
        all += w;
        inside += std::binary_search(out.token.begin(), out.token.end(), i) ? w : 0;
    }
    return 1 - inside / all;
}

verkv::decision_view<float> view_of(const std::vector<float>& estimate) {
    verkv::decision_view<float> v;
    v.estimate = estimate;
    v.fixed = {0, 0};
    return v;
}

}  // namespace

TEST_CASE("baseline: counts of tokens") {
    CHECK(token_count::share(0.05).of(99) == 4);
    CHECK(token_count::share(1).of(99) == 99);
    CHECK(token_count::share(0).of(99) == 0);
    CHECK(token_count::tokens(7).of(99) == 7);
    CHECK(token_count::tokens(7).of(5) == 5);
    CHECK(token_count::tokens(7).of(0) == 0);
    CHECK(support::refused([] { (void)token_count::share(1.5); }, {"a share of 1.5"}));
    CHECK(support::refused([] { (void)token_count::share(std::nan("")); }, {"nan"}));
}

TEST_CASE(
    "baseline: what heads read is counted once, selected rows whole, inspected ones as far as they were looked at") {
    selection a;
    a.token = {0, 1, 5, 9};
    a.inspected = {1, 4, 5};
    CHECK(verkv::rows_read_by(a, 10, {1, 1}) == verkv::rows_read{3, 2});  // keys 1, 4, 5; values 1, 5
    a.inspected_values = true;
    CHECK(verkv::rows_read_by(a, 10, {1, 1}) == verkv::rows_read{3, 3});
    selection b;
    b.token = {0, 4, 6, 9};
    verkv::read_tally both(10);
    both.add(a);
    both.add(b);
    CHECK(both.count([](std::size_t) { return false; }) == verkv::rows_read{6, 6});
    CHECK(both.count([](std::size_t i) { return i % 2 == 0; }) == verkv::rows_read{3, 3});
    a.token.push_back(10);
    CHECK(support::refused([&] { both.add(a); }, {"token 10", "10"}));
    a.log_weight = {0, 0};
    CHECK(
        support::refused([&] { (void)verkv::estimate_denominator(a, std::vector<float>(11)); }, {"5 tokens", "2 log"}));
    b.log_weight.assign(4, std::log(2.0f));
    CHECK(verkv::estimate_denominator(b, std::vector<float>{1, 0, 0, 0, 2, 0, 3, 0, 0, 4}) == Approx(20));
    CHECK(support::refused([&] { (void)verkv::estimate_denominator(b, std::vector<float>(9)); }, {"token 9 of 9"}));
}

TEST_CASE("baseline: streaming attention is the windows and nothing else") {
    const baseline_scene s(1, 50, 1, 0.5, 0, {3, 7});
    const selection out = select(verkv::streaming_attention{}, s.view(0));
    CHECK(out.token == with_fixed(s, {}));
    CHECK(out.log_weight == std::vector<float>(10, 0.0f));
    CHECK(out.left_out == Approx(share_of(s, out)).epsilon(1e-12));
    CHECK(verkv::rows_read_by(out, 50, s.fixed) == verkv::rows_read{0, 0});
    CHECK(out.claims == verkv::claim::nothing);
    CHECK(std::isnan(out.claimed_error));
    CHECK(select(verkv::streaming_attention{}, view_of({})).token.empty());
}

TEST_CASE("baseline: top-k takes the heaviest by the estimates") {
    for (const std::size_t n : {0u, 1u, 2u, 11u, 200u}) {
        for (const verkv::windows fixed : {verkv::windows{0, 0}, verkv::windows{4, 9}, verkv::windows{300, 300}}) {
            for (const std::size_t k : {0u, 1u, 5u, 500u}) {
                const baseline_scene s(n + k, n, 1, 0.5, 0, fixed);
                const selection out = select(verkv::top_k_attention{token_count::tokens(k)}, s.view(0));
                tokens expected = by_estimate(s, -infinity);
                expected.resize(std::min(k, expected.size()));
                CHECK(out.token == with_fixed(s, expected));
                CHECK(support::well_formed(out, n, fixed));
                CHECK((n == 0 || std::abs(out.left_out - share_of(s, out)) < 1e-12));
            }
        }
    }
    const std::vector<float> odd{1, not_a_number, 3, 3, -infinity, 3, infinity};
    CHECK(select(verkv::top_k_attention{token_count::tokens(3)}, view_of(odd)).token == tokens{2, 3, 6});
    CHECK(select(verkv::top_k_attention{token_count::tokens(7)}, view_of(odd)).token == tokens{0, 2, 3, 5, 6});
}

TEST_CASE("baseline: top-p takes as few of the heaviest as reach the mass") {
    for (const std::size_t n : {1u, 2u, 3u, 17u, 400u}) {
        for (const verkv::windows fixed : {verkv::windows{0, 0}, verkv::windows{2, 5}}) {
            for (const double p : {0.0, 0.3, 0.9, 0.99, 0.99999, 1.0}) {
                const baseline_scene s(7 * n, n, 2, 0.5, 0, fixed);
                const selection out = select(verkv::top_p_attention{p}, s.view(0));
                const tokens order = by_estimate(s, 0);
                double total = 0, have = 0;
                for (std::size_t i = 0; i < n; ++i) {
                    total += static_cast<double>(s.estimate[i]);
                    have += fixed.fixed(i, n) ? static_cast<double>(s.estimate[i]) : 0;
                }
                std::size_t k = 0;
                while (k < order.size() && (p == 1 || have < p * total)) {
                    have += static_cast<double>(s.estimate[order[k++]]);
                }
                CAPTURE(n, p, k);
                CHECK(out.token == with_fixed(s, {order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k)}));
                CHECK(out.left_out <= 1 - p + 1e-12);
                CHECK(std::abs(out.left_out - share_of(s, out)) < 1e-12);
            }
        }
    }
    // Ties: the lower index; NaN, 0 and less are never taken and count nothing.
    const std::vector<float> odd{2, not_a_number, 2, 2, 2, 0, -5};
    CHECK(select(verkv::top_p_attention{0.5}, view_of(odd)).token == tokens{0, 2});
    CHECK(select(verkv::top_p_attention{0.51}, view_of(odd)).token == tokens{0, 2, 3});
    CHECK(select(verkv::top_p_attention{1}, view_of(odd)).token == tokens{0, 2, 3, 4});
    CHECK(select(verkv::top_p_attention{0.5}, view_of(std::vector<float>(5, 0.0f))).token.empty());
    CHECK(support::refused([&] { (void)select(verkv::top_p_attention{1.5}, view_of(odd)); }, {"a mass of 1.5"}));
}

TEST_CASE("baseline: priority sampling keeps the K largest of w/u, each with max(w, t)") {
    for (const std::size_t n : {0u, 1u, 2u, 30u, 500u}) {
        for (const verkv::windows fixed : {verkv::windows{0, 0}, verkv::windows{3, 4}}) {
            for (const std::size_t k : {0u, 1u, 7u, 30u, 600u}) {
                const baseline_scene s(n + 3 * k, n, 1.5, 0.5, 0, fixed);
                const auto view = s.view(n + k);
                const selection out = select(verkv::priority_sampling{token_count::tokens(k)}, view);
                CHECK(support::well_formed(out, n, fixed));
                std::vector<std::pair<double, token_index>> priority;
                for (const token_index i : by_estimate(s, 0)) {
                    const double u = 1 - verkv::uniform(view.stream, static_cast<verkv::position_t>(i));
                    priority.emplace_back(static_cast<double>(s.estimate[i]) / u, i);
                }
                std::sort(priority.begin(), priority.end(), std::greater<>());
                const double t = k < priority.size() ? priority[k].first : 0;
                tokens expected;
                for (std::size_t j = 0; j < std::min(k, priority.size()); ++j) {
                    const token_index i = priority[j].second;
                    expected.push_back(i);
                    CHECK(s.coefficient(out, i) ==
                          Approx(std::max(static_cast<double>(s.estimate[i]), t) / static_cast<double>(s.estimate[i]))
                              .epsilon(1e-6));
                }
                CHECK(out.token == with_fixed(s, expected));
                CHECK((n == 0 || out.claims == verkv::claim::nothing));  // the estimates are not the weights
            }
        }
    }
    const baseline_scene s(3, 100, 1, 0, 0, {10, 10});
    const selection claimed = select(verkv::priority_sampling{token_count::tokens(26)}, s.view(1, {0.05, 0.25}, true));
    CHECK(claimed.claims == verkv::claim::denominator);
    CHECK(claimed.claimed_error == Approx(1 / std::sqrt(0.25 * 25)));
    const selection all = select(verkv::priority_sampling{token_count::tokens(80)}, s.view(1, {}, true));
    CHECK(all.claimed_error == 0);
    CHECK(verkv::estimate_denominator(all, s.weight) == Approx(s.denominator()).epsilon(1e-12));
}

TEST_CASE("baseline: priorities of equal and of odd estimates") {
    // Equal weights: the smallest uniforms, whatever the weight; the sum of the estimates is K t.
    const std::vector<float> equal(40, 3.0f);
    auto view = view_of(equal);
    view.weight = equal;
    view.stream.seed = 9;
    const selection out = select(verkv::priority_sampling{token_count::tokens(5)}, view);
    std::vector<double> u;
    for (int i = 0; i < 40; ++i) {
        u.push_back(1 - verkv::uniform(view.stream, i));
    }
    std::vector<double> sorted = u;
    std::sort(sorted.begin(), sorted.end());
    REQUIRE(out.token.size() == 5);
    for (const token_index i : out.token) {
        CHECK(u[i] < sorted[5]);
    }
    CHECK(verkv::estimate_denominator(out, equal) == Approx(5 * 3 / sorted[5]).epsilon(1e-6));
    const std::vector<float> odd{0, 1, not_a_number, -1, 2, 0};
    const selection few = select(verkv::priority_sampling{token_count::tokens(3)}, view_of(odd));
    CHECK(few.token == tokens{1, 4});
    CHECK(few.log_weight == std::vector<float>{0, 0});
    CHECK(support::refused(
        [&] {
            auto v = view_of(odd);
            v.promise.delta = 2;
            (void)select(verkv::priority_sampling{}, v);
        },
        {"delta is 2"}));
}

TEST_CASE("baseline: a selection attends as it says, and selecting again allocates nothing") {
    const baseline_scene s(5, 300, 1.5, 0.3, 6, {5, 8});
    const auto view = s.view(2);
    const verkv::priority_sampling method{token_count::tokens(40)};
    verkv::priority_sampling::workspace memory;
    selection out;
    method.select(verkv::cpu{}, view, memory, out);
    // One key channel that is ln w: attention over the listed rows is the estimate.
    std::vector<float> key;
    for (const float w : s.weight) {
        key.push_back(std::log(w));
    }
    const float one = 1;
    verkv::attend_workspace attending;
    std::vector<float> output(6), lse(1);
    verkv::rows<float> keys{key.data(), 1, out.token.size(), 1, out.token.data()};
    verkv::rows<float> values = view.values;
    values.count = out.token.size();
    values.ids = out.token.data();
    verkv::attend(verkv::cpu{}, verkv::rows<float>{&one, 1, 1, 1, nullptr}, 1.0f, keys, values,
                  verkv::matrix_of(std::span<const float>(out.log_weight), 1, out.log_weight.size()), attending,
                  verkv::matrix_of(std::span<float>(output), 1, 6), lse);
    double denominator = 0;
    std::vector<double> numerator(6);
    for (const token_index i : out.token) {
        const double w = s.coefficient(out, i) * static_cast<double>(s.weight[i]);
        denominator += w;
        for (std::size_t c = 0; c < 6; ++c) {
            numerator[c] += w * static_cast<double>(s.value[i * 6 + c]);
        }
    }
    CHECK(verkv::estimate_denominator(out, s.weight) == Approx(denominator).epsilon(1e-12));
    CHECK(std::exp(static_cast<double>(lse[0])) == Approx(denominator).epsilon(1e-5));
    for (std::size_t c = 0; c < 6; ++c) {
        CHECK(static_cast<double>(output[c]) == Approx(numerator[c] / denominator).epsilon(1e-4).margin(1e-5));
    }
    const auto again = [&](const auto& baseline) {
        typename std::remove_cvref_t<decltype(baseline)>::workspace w;
        baseline.select(verkv::cpu{}, view, w, out);
        const selection before = out;
        const std::size_t calls = support::allocations_of([&] { baseline.select(verkv::cpu{}, view, w, out); });
        CHECK(out.token == before.token);
        CHECK(support::bits_of(out.log_weight) == support::bits_of(before.log_weight));
        return calls;
    };
    CHECK(again(method) == 0);
    CHECK(again(verkv::top_k_attention{}) == 0);
    CHECK(again(verkv::top_p_attention{}) == 0);
    CHECK(again(verkv::streaming_attention{}) == 0);
}
