// Summaries of the masses of a decision, block by block: planners then visit only the blocks that matter.
#pragma once

#include <limits>
#include <span>
#include <vector>

#include "verkv/core/plan.hpp"
#include "verkv/cpu/lanes.hpp"

namespace verkv::inline v0::detail {

/// Over the tokens of a block that are in L, with x = m/R and odds o: largest x o, sum and largest of x^2 o, largest
/// x max(1, o).
struct mass_block {
    float largest_lift = 0;      ///< of t = x o, which orders shrinkage
    float largest_variance = 0;  ///< of v = x^2 o
    float largest_term = 0;      ///< of b = x max(1, o)
    float mass = 0;              ///< sum of x; not finite where some mass is not
    double variance = 0;         ///< sum of v
};

struct mass_term {
    float variance;  ///< v; computed here only, so that equal inputs give equal keys everywhere
    float term;      ///< b
};

VERKV_HOST_DEVICE constexpr float lift_of(float x, float odds) noexcept {
    return x * odds;
}

VERKV_HOST_DEVICE constexpr mass_term terms_of(float x, float odds) noexcept {
    return {x * (x * odds), odds > 0 ? x * larger(odds, 1.0f) : 0.0f};
}

inline constexpr std::size_t mass_block_size = 64;

inline namespace VERKV_LANES_NAMESPACE {

/// Masses relative to R, and odds, of the tokens i ... i + lane_count - 1 of a block of `count`; 0 beyond.
struct mass_lanes {
    lanes x, odds;
};
VERKV_ALWAYS_INLINE mass_lanes load_masses(const float* mass, const float* odds, float inverse, std::size_t i,
                                           std::size_t count) {
    if (i + lane_count <= count) {
        return {load(mass + i) * inverse, load(odds + i)};
    }
    return {load_first(mass + i, count - i) * inverse, load_first(odds + i, count - i)};
}

/// Term b of each token; 0 outside L.
VERKV_ALWAYS_INLINE lanes largest_terms(const mass_lanes& m) {
    return m.odds > 0.0f ? m.x * larger_of(m.odds, broadcast(1.0f)) : lanes{};
}

/// Summary of a block of `count` tokens. Sums in float over its terms.
VERKV_ALWAYS_INLINE mass_block survey_block(const float* mass, const float* odds, float inverse, std::size_t count) {
    lanes lift{}, top{}, term{}, sums{}, variance{};
    for (std::size_t i = 0; i < count; i += lane_count) {
        const mass_lanes m = load_masses(mass, odds, inverse, i, count);
        const lanes t = m.x * m.odds;
        const lanes v = m.x * t;
        lift = larger_of(t, lift);
        top = larger_of(v, top);
        term = larger_of(largest_terms(m), term);
        sums += m.x;
        variance += v;
    }
    return {largest(lift), largest(top), largest(term), sum(sums), static_cast<double>(sum(variance))};
}

/// Summaries of all blocks. O(n), 8 bytes read a token.
inline void survey(const masses_view& m, float inverse, std::vector<mass_block>& blocks) {
    const std::size_t n = m.mass.size();
    blocks.clear();
    for (std::size_t first = 0; first < n; first += mass_block_size) {
        blocks.push_back(
            survey_block(m.mass.data() + first, m.odds.data() + first, inverse, smaller(mass_block_size, n - first)));
    }
}

/// Adds up v, and finds the largest b, over the tokens of a block with v < bound.
VERKV_ALWAYS_INLINE void below(const float* mass, const float* odds, float inverse, std::size_t count, float bound,
                               double& variance, double& term) {
    lanes sums{}, top{};
    for (std::size_t i = 0; i < count; i += lane_count) {
        const mass_lanes m = load_masses(mass, odds, inverse, i, count);
        const lanes v = m.x * (m.x * m.odds);
        sums += v < bound ? v : lanes{};  // 0 outside L
        top = larger_of(v < bound ? largest_terms(m) : lanes{}, top);
    }
    variance += static_cast<double>(sum(sums));
    term = larger(static_cast<double>(largest(top)), term);
}

/// Calls use(i, its terms) for the tokens of L in a block with v >= bound, by index.
template <class Use>
VERKV_ALWAYS_INLINE void for_each_at_least(const float* mass, const float* odds, float inverse, std::size_t count,
                                           float bound, Use&& use) {
    for (std::size_t first = 0; first < count; first += lane_count) {
        const mass_lanes m = load_masses(mass, odds, inverse, first, count);
        if (!(largest(m.x * (m.x * m.odds)) >= bound)) {
            continue;
        }
        for (std::size_t i = first; i < smaller(first + lane_count, count); ++i) {
            const mass_term own = terms_of(mass[i] * inverse, odds[i]);
            if (own.variance >= bound && odds[i] > 0) {
                use(i, own);
            }
        }
    }
}

/// Calls use(i, t) for the tokens of a block with low <= t < high and t > 0, by index.
template <class Use>
VERKV_ALWAYS_INLINE void for_each_lift(const float* mass, const float* odds, float inverse, std::size_t count,
                                       float low, float high, Use&& use) {
    for (std::size_t first = 0; first < count; first += lane_count) {
        const mass_lanes m = load_masses(mass, odds, inverse, first, count);
        const lanes t = m.x * m.odds;
        if (!(largest(t < high ? t : lanes{}) >= low)) {
            continue;
        }
        for (std::size_t i = first; i < smaller(first + lane_count, count); ++i) {
            const float lift = lift_of(mass[i] * inverse, odds[i]);
            if (lift >= low && lift < high && lift > 0) {
                use(i, lift);
            }
        }
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace verkv::inline v0::detail
