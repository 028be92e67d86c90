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

/// Summary of the tokens first ... first + count - 1, count <= mass_block_size. Sums in float over 64 terms.
VERKV_ALWAYS_INLINE mass_block survey_block(const masses_view& m, float inverse, std::size_t first, std::size_t count) {
    lanes lift{}, top{}, term{}, mass{}, variance{};
    for (std::size_t i = 0; i < count; i += lane_count) {
        const bool whole = i + lane_count <= count;
        const float* masses = m.mass.data() + first + i;
        const float* all_odds = m.odds.data() + first + i;
        const lanes x = (whole ? load(masses) : load_first(masses, count - i)) * inverse;
        const lanes odds = whole ? load(all_odds) : load_first(all_odds, count - i);
        const lanes t = x * odds;
        const lanes v = x * t;
        const lanes b = odds > 0.0f ? x * larger_of(odds, broadcast(1.0f)) : lanes{};
        lift = larger_of(t, lift);
        top = larger_of(v, top);
        term = larger_of(b, term);
        mass += x;
        variance += v;
    }
    return {largest(lift), largest(top), largest(term), sum(mass), static_cast<double>(sum(variance))};
}

/// Summaries of all blocks. O(n), 8 bytes read a token.
inline void survey(const masses_view& m, float inverse, std::vector<mass_block>& blocks) {
    const std::size_t n = m.mass.size();
    blocks.clear();
    for (std::size_t first = 0; first < n; first += mass_block_size) {
        blocks.push_back(survey_block(m, inverse, first, smaller(mass_block_size, n - first)));
    }
}

/// Sum of v and largest b over the tokens of a block with v < bound.
VERKV_ALWAYS_INLINE void below(const masses_view& m, float inverse, std::size_t first, std::size_t count, float bound,
                               double& variance, double& term) {
    lanes sums{}, top{};
    for (std::size_t i = 0; i < count; i += lane_count) {
        const bool whole = i + lane_count <= count;
        const float* masses = m.mass.data() + first + i;
        const float* all_odds = m.odds.data() + first + i;
        const lanes x = (whole ? load(masses) : load_first(masses, count - i)) * inverse;
        const lanes odds = whole ? load(all_odds) : load_first(all_odds, count - i);
        const lanes v = x * (x * odds);
        sums += v < bound ? v : lanes{};  // 0 outside L
        const lanes b = odds > 0.0f ? x * larger_of(odds, broadcast(1.0f)) : lanes{};
        top = larger_of(v < bound ? b : lanes{}, top);
    }
    variance += static_cast<double>(sum(sums));
    term = larger(static_cast<double>(largest(top)), term);
}

/// Calls use(token, its terms) for the tokens of L in a block with v >= bound, by index.
template <class Use>
VERKV_ALWAYS_INLINE void for_each_at_least(const masses_view& m, float inverse, std::size_t first, std::size_t count,
                                           float bound, Use&& use) {
    for (std::size_t i = first; i < first + count; i += lane_count) {
        const std::size_t last = smaller(i + lane_count, first + count);
        if (i + lane_count == last) {
            const lanes x = load(m.mass.data() + i) * inverse;
            if (!(largest(x * (x * load(m.odds.data() + i))) >= bound)) {
                continue;
            }
        }
        for (std::size_t token = i; token < last; ++token) {
            const mass_term own = terms_of(m.mass[token] * inverse, m.odds[token]);
            if (own.variance >= bound && m.odds[token] > 0) {
                use(token, own);
            }
        }
    }
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace verkv::inline v0::detail
