// The check from the sample against sums in double, and against what a step on the CPU does.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/cpu/value_masses.hpp"
#include "verkv/cuda/check_sample.hpp"

namespace {

constexpr float out = -std::numeric_limits<float>::infinity();
constexpr double u = 0x1p-24;
using verkv::gpu::sample_certificate;

struct part {
    std::vector<unsigned> count;
    std::size_t stride = 0;
    std::vector<std::uint32_t> token;  // [tasks, stride]
    std::vector<float> logits;         // [tasks, group, stride]
    std::vector<float> log_weight;     // [tasks, group or 1, stride]
    std::vector<float> probability;    // as log_weight
};

/// Tokens of a few tasks, and what of them is in the sample.
struct check_rig {
    unsigned tasks;
    unsigned group;
    unsigned threads;
    bool joint;
    unsigned tokens = 0;
    part resident, fetched;
    std::vector<float> mass;
    std::vector<std::uint32_t> top;
    std::vector<double> total;
    std::vector<double> decisions;  // before, after, variance, level
    verkv::tolerance promise{0.1, 0.1};
    std::vector<sample_certificate> results;
    std::vector<std::uint32_t> holds;

    check_rig(std::vector<unsigned> residents, std::vector<unsigned> more, unsigned heads, unsigned of_block,
              bool joint_plan, unsigned seed)
        : tasks(static_cast<unsigned>(residents.size())), group(heads), threads(of_block), joint(joint_plan) {
        std::mt19937 random(seed);
        for (unsigned t = 0; t < tasks; ++t) {
            tokens = (std::max)(tokens, residents[t] + more[t] + 5);
        }
        std::normal_distribution<float> normal;
        std::vector<float> logit(std::size_t{tasks} * group * tokens);
        mass.resize(logit.size());
        for (unsigned h = 0; h < tasks * group; ++h) {
            float most = out;
            for (unsigned i = 0; i < tokens; ++i) {
                logit[h * tokens + i] = 3 * normal(random);
                mass[h * tokens + i] = logit[h * tokens + i] + 0.1f * normal(random);
                most = (std::max)(most, mass[h * tokens + i]);
            }
            double sum = 0;
            for (unsigned i = 0; i < tokens; ++i) {
                float& m = mass[h * tokens + i];
                m = std::exp(m - most);
                sum += static_cast<double>(m);
            }
            top.push_back(verkv::gpu::ordered_bits(most));
            total.push_back(sum);
            decisions.insert(decisions.end(), {0.5, 0.09, 1e-5 * static_cast<double>(1 + random() % 100), 1.0});
        }
        fill(resident, residents, logit, 0, random);
        fill(fetched, more, logit, 1, random);
    }

    void fill(part& p, const std::vector<unsigned>& count, const std::vector<float>& logit, unsigned which,
              std::mt19937& random) {
        p.count = count;
        p.stride = *std::max_element(count.begin(), count.end()) + 2;
        const unsigned rows = joint ? 1 : group;
        p.token.resize(tasks * p.stride);
        p.logits.assign(std::size_t{tasks} * group * p.stride, std::numeric_limits<float>::quiet_NaN());
        p.log_weight.assign(std::size_t{tasks} * rows * p.stride, out);
        p.probability.assign(p.log_weight.size(), 0.0f);
        for (unsigned t = 0; t < tasks; ++t) {
            for (unsigned i = 0; i < count[t]; ++i) {
                const unsigned token = which == 0 ? i : tokens - 1 - i;
                p.token[t * p.stride + i] = token;
                for (unsigned g = 0; g < group; ++g) {
                    p.logits[(t * group + g) * p.stride + i] = logit[(t * group + g) * tokens + token];
                }
                for (unsigned g = 0; g < rows; ++g) {
                    const auto kind = random() % 6;
                    const float r = kind == 0  ? 0.0f
                                    : kind < 3 ? 1.0f
                                               : std::exp2(-std::uniform_real_distribution<float>(0.001f, 8)(random));
                    const std::size_t at = (t * rows + g) * p.stride + i;
                    p.probability[at] = r;
                    p.log_weight[at] = r == 0 ? out : static_cast<float>(std::log(1 / static_cast<double>(r)));
                }
            }
        }
    }

    template <class Device>
    verkv::gpu::sample_rows upload(Device& gpu, const part& p) const {
        const unsigned rows = joint ? 1 : group;
        return {gpu.input("count", std::span<const unsigned>(p.count)).data(),
                gpu.input("token", std::span<const std::uint32_t>(p.token)).data(),
                gpu.input("logits", std::span<const float>(p.logits)).data(),
                gpu.input("log-weight", std::span<const float>(p.log_weight)).data(),
                p.stride,
                rows * p.stride,
                joint ? 0 : p.stride};
    }

    template <class Device>
    void run(Device& gpu) {
        const auto made = gpu.template output<sample_certificate>("results", tasks * group);
        const auto held = gpu.template output<std::uint32_t>("holds", tasks * group);
        const auto decision = gpu.input("decisions", std::span<const double>(decisions));
        gpu.launch(verkv::gpu::check_sample_kernel{
            upload(gpu, resident), upload(gpu, fetched), gpu.input("mass", std::span<const float>(mass)).data(), tokens,
            gpu.input("top", std::span<const std::uint32_t>(top)).data(),
            gpu.input("total", std::span<const double>(total)).data(), decision.data() + 2, decision.data() + 1, 4,
            promise.epsilon, promise.log_term(), made.data(), held.data(), tasks, group, threads});
        results = gpu.download(made);
        holds = gpu.download(held);
    }

    [[nodiscard]] std::size_t weight_at(const part& p, unsigned t, unsigned g) const {
        return (joint ? t : t * group + g) * p.stride;
    }

    void compare() const {
        for (unsigned t = 0; t < tasks; ++t) {
            for (unsigned g = 0; g < group; ++g) {
                const std::size_t h = t * group + g;
                const sample_certificate& found = results[h];
                double most = static_cast<double>(verkv::gpu::from_ordered_bits(top[h]));
                double size = 16;  // number of roundings, in u: grows with |a| and the logits' distance from the top
                for (const part* p : {&resident, &fetched}) {
                    for (unsigned i = 0; i < p->count[t]; ++i) {
                        most = (std::max)(most, static_cast<double>(p->logits[h * p->stride + i]));
                    }
                }
                CHECK(found.top == most);
                const double unit = std::exp(static_cast<double>(verkv::gpu::from_ordered_bits(top[h])) - most);
                double denominator = 0, observed = 0, estimated = 0, largest = 0;
                for (const part* p : {&resident, &fetched}) {
                    for (unsigned i = 0; i < p->count[t]; ++i) {
                        const auto r = static_cast<double>(p->probability[weight_at(*p, t, g) + i]);
                        if (r == 0) {
                            continue;
                        }
                        const auto logit = static_cast<double>(p->logits[h * p->stride + i]);
                        const double share = std::exp(logit - most) / r;
                        const double known =
                            static_cast<double>(mass[h * tokens + p->token[t * p->stride + i]]) * unit / r;
                        denominator += share;
                        observed += share * share * (1 - r);
                        estimated += known * known * (1 - r);
                        largest = r < 1 ? (std::max)(largest, share * (std::max)(r, 1 - r)) : largest;
                        size = (std::max)(size, 16 + 4 * -std::log(r) + 2 * std::abs(logit - most));
                    }
                }
                const double planned = decisions[4 * h + 2] * std::pow(total[h] * unit, 2);
                const double variance = (std::max)(planned + (observed - estimated), 0.5 * observed);
                const double room = 2 * size * u;
                INFO("task " << t << ", head " << g);
                CHECK(std::abs(found.denominator - denominator) <= room * denominator);
                CHECK(std::abs(found.largest - largest) <= room * largest);
                CHECK(std::abs(found.variance - variance) <= 2 * room * (planned + observed + estimated));
                const double bound = verkv::bernstein_bound({0, found.variance, found.largest}, promise.log_term());
                const double certificate = found.denominator > 0 ? bound / (found.denominator / (1 + promise.epsilon))
                                                                 : std::numeric_limits<double>::infinity();
                CHECK((found.observed == certificate || std::abs(found.observed / certificate - 1) < 1e-12));
                CHECK(holds[h] == (certificate < promise.epsilon ? 1u : 0u));
                compare_cpu(t, g);
            }
        }
    }

    /// As step::observe_head() goes about it.
    void compare_cpu(unsigned t, unsigned g) const {
        const std::size_t h = t * group + g;
        const sample_certificate& found = results[h];
        const auto most = static_cast<float>(found.top);
        const float unit = std::exp(verkv::gpu::from_ordered_bits(top[h]) - most);
        verkv::detail::observed_moments seen;
        for (const part* p : {&resident, &fetched}) {
            std::vector<float> logit(p->logits.begin() + static_cast<std::ptrdiff_t>(h * p->stride),
                                     p->logits.begin() + static_cast<std::ptrdiff_t>(h * p->stride + p->count[t]));
            std::vector<float> share(p->count[t]);
            for (std::size_t i = 0; i < share.size(); ++i) {
                share[i] = mass[h * tokens + p->token[t * p->stride + i]] * unit;
            }
            verkv::detail::observe(logit, most,
                                   std::span<const float>(p->probability).subspan(weight_at(*p, t, g), p->count[t]), {},
                                   share, seen);
        }
        CHECK(std::abs(found.denominator - seen.denominator) <= 300 * u * seen.denominator);
        CHECK(std::abs(found.largest - seen.moments.largest) <= 300 * u * seen.moments.largest);
        const double planned = decisions[4 * h + 2] * std::pow(total[h] * static_cast<double>(unit), 2);
        CHECK(std::abs(found.variance - verkv::difference_estimate(planned, seen.moments.variance, seen.planned)) <=
              600 * u * (planned + seen.moments.variance + seen.planned));
    }
};

void parity(std::vector<unsigned> residents, std::vector<unsigned> more, unsigned group, unsigned threads, bool joint,
            unsigned seed, unsigned orders = 3) {
    check_rig rig(std::move(residents), std::move(more), group, threads, joint, seed);
    std::vector<double> first;
    support::on_devices(orders, [&](auto& gpu) {
        rig.run(gpu);
        std::vector<double> seen;
        for (const sample_certificate& c : rig.results) {
            seen.insert(seen.end(), {c.denominator, c.variance, c.largest, c.observed});
        }
        if (first.empty()) {
            first = seen;
            rig.compare();
        }
        CHECK(first == seen);
    });
}

}  // namespace

TEST_CASE("the check from the sample, blocks of every size", "[parity]") {
    for (const unsigned threads : {32u, 96u, 256u, 512u, 1024u}) {
        parity({500, 70}, {90, 33}, 4, threads, false, threads);
        parity({333, 1}, {64, 0}, 3, threads, true, threads + 1);
    }
}

TEST_CASE("the check from the sample, samples of every size", "[parity]") {
    parity({0, 0, 1, 2, 31, 32, 33}, {0, 1, 0, 7, 1, 0, 65}, 1, 64, false, 3);
    parity({20000}, {3000}, 1, 256, false, 4, 1);
    parity({100, 200}, {50, 60}, 8, 128, true, 5);
    parity({100, 200}, {50, 60}, 8, 128, false, 6);
}

TEST_CASE("the check leaves heads alone that cannot be weighed, and NaN does not hold", "[parity]") {
    check_rig rig({60}, {10}, 4, 64, false, 1);
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    rig.total[0] = nan;
    rig.decisions[4 * 1 + 1] = nan;
    rig.resident.log_weight[rig.weight_at(rig.resident, 0, 2) + 5] = 0;
    rig.resident.logits[2 * rig.resident.stride + 5] = std::numeric_limits<float>::quiet_NaN();
    for (std::size_t i = 0; i < rig.resident.stride; ++i) {  // all certain
        rig.resident.log_weight[rig.weight_at(rig.resident, 0, 3) + i] = 0;
    }
    for (std::size_t i = 0; i < rig.fetched.stride; ++i) {
        rig.fetched.log_weight[rig.weight_at(rig.fetched, 0, 3) + i] = 0;
    }
    rig.decisions[4 * 3 + 2] = 0;
    support::on_devices(3, [&](auto& gpu) {
        rig.run(gpu);
        CHECK(rig.holds == std::vector<std::uint32_t>{1, 1, 0, 1});
        CHECK(rig.results[0].observed == 0);
        CHECK(rig.results[1].observed == 0);
        CHECK(std::isinf(rig.results[2].observed));
        CHECK(rig.results[3].observed == 0);
    });
}
