// Decisions for the planning kernels, in a device's memory, and what is asked of their plans.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "support/reference.hpp"
#include "verkv/cuda/find_levels.hpp"
#include "verkv/cuda/group_plan.hpp"
#include "verkv/verkv.hpp"

namespace support {

/// Masses of the query heads of some KV heads, each KV head with a number of tokens of its own.
struct device_decisions {
    std::size_t kv_heads = 1, heads = 1, stride = 0;
    std::vector<float> mass, odds, r;
    std::vector<std::uint32_t> tokens;
    std::vector<double> reference, total;

    device_decisions(std::size_t kv, std::size_t g, std::size_t room)
        : kv_heads(kv),
          heads(g),
          stride(room),
          mass(kv * g * room),
          odds(kv * room),
          r(kv * room, 1.0f),
          tokens(kv),
          reference(kv * g, 1.0),
          total(kv * g, 1.0) {}

    /// Makes query head h of a KV head weigh like d, whose probabilities are the KV head's.
    void set(std::size_t kv, std::size_t h, const decision& d) {
        tokens[kv] = static_cast<std::uint32_t>(d.size());
        std::copy(d.mass.begin(), d.mass.end(), mass.begin() + at(kv, h));
        if (h == 0) {
            std::copy(d.odds.begin(), d.odds.end(), odds.begin() + static_cast<std::ptrdiff_t>(kv * stride));
            std::copy(d.r.begin(), d.r.end(), r.begin() + static_cast<std::ptrdiff_t>(kv * stride));
        }
        reference[kv * heads + h] = total[kv * heads + h] = d.reference;
    }

    [[nodiscard]] verkv::masses_view view(std::size_t kv, std::size_t h) const {
        verkv::masses_view m;
        m.mass = std::span<const float>(mass).subspan((kv * heads + h) * stride, tokens[kv]);
        m.odds = std::span<const float>(odds).subspan(kv * stride, tokens[kv]);
        m.reference = reference[kv * heads + h];
        m.total = total[kv * heads + h];
        return m;
    }

private:
    [[nodiscard]] std::ptrdiff_t at(std::size_t kv, std::size_t h) const {
        return static_cast<std::ptrdiff_t>((kv * heads + h) * stride);
    }
};

/// The masses of a group whose heads look at much the same tokens, each in its own way.
inline void fill_group(device_decisions& d, std::size_t kv, std::size_t n, dice& random, weights w, probabilities p) {
    const decision first = random_decision(random, n, w, p);
    for (std::size_t h = 0; h < d.heads; ++h) {
        std::vector<float> mass = first.mass;
        const double spread = h == 0 ? 0 : random.between(0, 1.5);
        for (float& m : mass) {
            m *= static_cast<float>(std::exp(spread * random.normal()));
        }
        // Relative to the largest, as weights are.
        const float top = mass.empty() ? 1.0f : *std::max_element(mass.begin(), mass.end());
        for (float& m : mass) {
            m = top > 0 ? m / top : m;
        }
        d.set(kv, h, decision(std::move(mass), first.r));
    }
}

/// What planning kernels leave in global memory.
struct device_plans {
    std::vector<verkv::gpu::head_level> level;
    std::vector<verkv::gpu::head_decision> decided;
    std::vector<verkv::token_index> token;
    std::vector<float> probability;
    std::vector<std::uint32_t> count;
    std::size_t rows = 1, stride = 0;
    bool clean = false;  // scratch memory is 0 again

    [[nodiscard]] std::span<const verkv::token_index> listed(std::size_t kv) const {
        return std::span<const verkv::token_index>(token).subspan(kv * stride, count[kv]);
    }
    /// r' of the listed tokens, or 0.
    [[nodiscard]] std::span<const float> raised(std::size_t kv, std::size_t row) const {
        return std::span<const float>(probability).subspan((kv * rows + row) * stride, count[kv]);
    }
};

/// Runs find_levels and group_plan.
template <unsigned Heads, class Device>
device_plans plan_on_device(Device& gpu, const device_decisions& d, verkv::tolerance t, bool joint, unsigned threads,
                            unsigned blocks) {
    const std::size_t rows = d.kv_heads * d.heads;
    device_plans out;
    out.rows = joint ? 1 : d.heads;
    out.stride = d.stride;

    verkv::gpu::find_levels_kernel<Heads> levels;
    levels.edges = levels.edges_of(t);
    const std::vector<std::uint64_t> no_sums(rows * levels.edges * 3);
    const std::vector<std::uint32_t> no_counts(rows * levels.edges * 2), none(d.kv_heads);
    const auto sums = gpu.in_out("sums", std::span<const std::uint64_t>(no_sums));
    const auto counts = gpu.in_out("counts", std::span<const std::uint32_t>(no_counts));
    const auto arrived = gpu.in_out("arrived", std::span<const std::uint32_t>(none));
    const auto level = gpu.template output<verkv::gpu::head_level>("level", rows);
    levels.mass = gpu.input("mass", std::span<const float>(d.mass)).data();
    levels.odds = gpu.input("odds", std::span<const float>(d.odds)).data();
    levels.tokens = gpu.input("tokens", std::span<const std::uint32_t>(d.tokens)).data();
    levels.reference = gpu.input("reference", std::span<const double>(d.reference)).data();
    levels.total = gpu.input("total", std::span<const double>(d.total)).data();
    levels.level = level.data();
    levels.sums = sums.data();
    levels.counts = counts.data();
    levels.variance = gpu.template output<double>("partial variance", d.kv_heads * blocks * 2 * Heads).data();
    levels.term = gpu.template output<float>("partial term", d.kv_heads * blocks * 2 * Heads).data();
    levels.arrived = arrived.data();
    levels.stride = d.stride;
    levels.kv_heads = static_cast<std::uint32_t>(d.kv_heads);
    levels.heads = static_cast<std::uint32_t>(d.heads);
    levels.epsilon = t.epsilon;
    levels.log_term = t.log_term();
    levels.blocks = blocks;
    levels.threads = std::min(threads, levels.most_threads);
    gpu.launch(levels);

    verkv::gpu::group_plan_kernel<Heads> plan;
    const auto token = gpu.template output<verkv::token_index>("token", d.kv_heads * d.stride);
    const auto probability = gpu.template output<float>("probability", d.kv_heads * out.rows * d.stride);
    const auto count = gpu.template output<std::uint32_t>("count", d.kv_heads);
    const auto decision = gpu.template output<verkv::gpu::head_decision>("decision", rows);
    plan.mass = levels.mass;
    plan.odds = levels.odds;
    plan.tokens = levels.tokens;
    plan.reference = levels.reference;
    plan.level = levels.level;
    plan.lists = {token.data(), probability.data(), count.data(), d.stride, static_cast<std::uint32_t>(out.rows)};
    plan.decision = decision.data();
    plan.listed_odds = gpu.template output<float>("listed odds", d.kv_heads * d.stride).data();
    plan.listed_mass = gpu.template output<float>("listed mass", rows * d.stride).data();
    plan.counts = gpu.template output<std::uint32_t>("counts of blocks", d.kv_heads * blocks).data();
    plan.variance = levels.variance;
    plan.term = levels.term;
    plan.arrived = arrived.data();
    plan.stride = d.stride;
    plan.kv_heads = levels.kv_heads;
    plan.heads = levels.heads;
    plan.epsilon = t.epsilon;
    plan.log_term = t.log_term();
    plan.blocks = blocks;
    plan.threads = std::min(threads, plan.most_threads);
    gpu.launch(plan);
    out.level = gpu.download(level);
    out.decided = gpu.download(decision);
    out.token = gpu.download(token);
    out.probability = gpu.download(probability);
    out.count = gpu.download(count);

    // What kernels promise to leave behind for the next step.
    out.clean = gpu.download(sums) == no_sums && gpu.download(counts) == no_counts && gpu.download(arrived) == none;
    return out;
}

/// Certificate of a query head at r', in double, without the plan's help. raised[i]: r', or 0 for r.
inline double certificate_of(const verkv::masses_view& m, std::span<const float> raised, verkv::tolerance t) {
    verkv::bernstein_moments all;
    for (std::size_t i = 0; i < m.mass.size(); ++i) {
        const double own = static_cast<double>(m.odds[i]);
        const double p = static_cast<double>(raised[i]);
        const double odds = p > 0 ? std::min((1 - p) / p, own) : own;
        if (odds > 0) {
            all.add(static_cast<double>(m.mass[i]) / m.reference, odds, 1, 0);
        }
    }
    return verkv::bernstein_bound(all, t.log_term());
}

/// Rows that a plan expects to fetch.
inline double expected_rows_of(std::span<const float> odds, std::span<const float> raised) {
    double sum = 0;
    for (std::size_t i = 0; i < odds.size(); ++i) {
        sum += std::max(0.0, static_cast<double>(raised[i]) - 1 / (1 + static_cast<double>(odds[i])));
    }
    return sum;
}

/// r' of all tokens, or 0, from a device's list.
inline std::vector<float> spread_out(const device_plans& p, std::size_t kv, std::size_t row, std::size_t n) {
    std::vector<float> all(n, 0.0f);
    for (std::size_t i = 0; i < p.count[kv]; ++i) {
        all[p.listed(kv)[i]] = p.raised(kv, row)[i];
    }
    return all;
}

inline std::vector<float> spread_out(const verkv::plan& p, std::size_t n) {
    std::vector<float> all(n, 0.0f);
    for (const verkv::plan_entry& e : p.entries) {
        all[e.token] = e.probability;
    }
    return all;
}

}  // namespace support
