// What planners have in common: the survey, the shrinkage, and the certificate before anything is fetched.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "verkv/certify/bernstein.hpp"
#include "verkv/certify/shrinkage.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/odds.hpp"
#include "verkv/core/plan.hpp"

namespace verkv::inline v0::detail {

/// A token that a plan could fetch, with its share of the moments. Ordered by falling gain.
struct plan_candidate {
    double key;   ///< grows with the gain g of the token
    double bias;  ///< 0 unless it is shrunk
    float variance;
    float term;
    token_index token;

    [[nodiscard]] bool before(const plan_candidate& other) const {
        return key != other.key ? key > other.key : token < other.token;
    }
};

/// Memory of a planner.
struct plan_workspace {
    shrinkage_workspace shrinkage;
    std::vector<shrunk_token> shrunk;           ///< by token once staged
    std::vector<float> patches;                 ///< odds of blocks in which tokens are singled out
    std::vector<std::uint32_t> patch_of_block;  ///< which of them, or none
    std::vector<plan_candidate> singles;        ///< those: the shrunk ones, then the one that alone attains b
    std::vector<plan_candidate> candidates;     ///< plain tokens that may be fetched, by token
    std::vector<plan_candidate> selection;      ///< both, partitioned
    std::vector<plan_entry> single_entries;
    float bound = 0;  ///< on the variance of a plain token: candidates have at least this

    void reserve(std::size_t n) {
        shrinkage.reserve(n);
        shrunk.reserve(n);
        patches.reserve(n + mass_block_size);
        patch_of_block.reserve(n / mass_block_size + 1);
        singles.reserve(n + 1);
        candidates.reserve(n);
        selection.reserve(n + 1);
        single_entries.reserve(n + 1);
    }
};

/// 1/R as a float. Throws where R is not a positive number that a float can hold with its inverse.
inline float inverse_reference(const masses_view& m) {
    check(m.mass.size() == m.odds.size(), m.mass.size(), " masses and ", m.odds.size(), " odds");
    check(m.reference >= 0x1p-120 && m.reference <= 0x1p120, "reference ", m.reference,
          " of the masses; it must lie in [2^-120, 2^120]: shift the logits by their maximum");
    return static_cast<float>(1 / m.reference);
}

inline constexpr std::uint32_t no_patch = 0xffffffffu;

/// A block of masses and odds; tokens that are looked at one by one have odds 0.
struct plain_block {
    std::size_t first;
    std::size_t count;
    const float* mass;
    const float* odds;
};

inline plain_block block_of(const masses_view& m, std::size_t block, const plan_workspace& w) {
    const std::size_t first = block * mass_block_size;
    const std::uint32_t patch = w.patch_of_block[block];
    return {first, smaller(mass_block_size, m.mass.size() - first), m.mass.data() + first,
            patch == no_patch ? m.odds.data() + first : w.patches.data() + patch * mass_block_size};
}

/// Takes a token out of its block: from now on its odds there are 0. The block's summary is then out of date.
inline void single_out(const masses_view& m, std::size_t token, plan_workspace& w) {
    std::uint32_t& patch = w.patch_of_block[token / mass_block_size];
    if (patch == no_patch) {
        const plain_block b = block_of(m, token / mass_block_size, w);
        patch = static_cast<std::uint32_t>(w.patches.size() / mass_block_size);
        w.patches.insert(w.patches.end(), b.odds, b.odds + b.count);
        w.patches.resize((patch + 1) * mass_block_size);
    }
    w.patches[patch * mass_block_size + token % mass_block_size] = 0;
}

inline void survey_again(const masses_view& m, float inverse, std::size_t block, plan_workspace& w) {
    const plain_block b = block_of(m, block, w);
    w.shrinkage.blocks[block] = survey_block(b.mass, b.odds, inverse, b.count);
}

/// Surveys the masses, chooses lambda, and takes the shrunk tokens out of their blocks' summaries.
/// Returns false where some mass or square of one is not finite: then nothing can be certified.
template <class Shrinkage>
bool stage(const cpu& exec, const masses_view& m, float inverse, const Shrinkage& rule, plan_workspace& w) {
    survey(m, inverse, w.shrinkage.blocks);
    double total = 0;
    for (const mass_block& b : w.shrinkage.blocks) {
        total += static_cast<double>(b.mass) + static_cast<double>(b.largest_term) + b.variance;
    }
    w.shrunk.clear();
    if (!std::isfinite(total)) {
        return false;
    }
    rule.select(exec, m, inverse, w.shrinkage, w.shrunk);
    std::sort(w.shrunk.begin(), w.shrunk.end(), [](const auto& a, const auto& b) { return a.token < b.token; });
    w.patches.clear();
    w.patch_of_block.assign(w.shrinkage.blocks.size(), no_patch);
    for (std::size_t i = 0; i < w.shrunk.size(); ++i) {
        single_out(m, w.shrunk[i].token, w);
        const std::size_t block = w.shrunk[i].token / mass_block_size;
        if (i + 1 == w.shrunk.size() || w.shrunk[i + 1].token / mass_block_size != block) {
            survey_again(m, inverse, block, w);
        }
    }
    return true;
}

inline void add_shrunk(bernstein_moments& moments, const shrunk_token& s) {
    moments.add(s.mass, s.odds, s.lambda, s.complement);
}

/// Moments of L, relative to R, after stage(). Sums of blocks in double: relative error (n/64 + 64) 2^-24 at most, and
/// no subtraction anywhere.
inline bernstein_moments staged_moments(const plan_workspace& w) {
    bernstein_moments all;
    for (const mass_block& b : w.shrinkage.blocks) {
        all.variance += b.variance;
        all.largest = larger(static_cast<double>(b.largest_term), all.largest);
    }
    for (const shrunk_token& s : w.shrunk) {
        add_shrunk(all, s);
    }
    return all;
}

/// A shrunk token that stays as it is: r' = r, lambda < 1.
inline plan_entry keep_shrunk(const shrunk_token& s) {
    return {s.token, probability_of(s.odds), larger(static_cast<float>(s.lambda), probability_of(s.odds))};
}

/// The certificate of a sample whose moments are not finite: infinity where all masses and odds are, and the moments
/// only overflowed; else NaN.
inline double certificate_without_moments(const masses_view& m) {
    double sum = 0;  // of floats: it does not overflow
    for (std::size_t i = 0; i < m.mass.size(); ++i) {
        sum += static_cast<double>(m.mass[i]) + static_cast<double>(m.odds[i]);
    }
    return std::isfinite(sum) ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
}

/// A plan where the moments are not finite: all of L where they only overflowed; else nothing, and a certificate of
/// NaN.
inline void plan_without_moments(const masses_view& m, plan& out) {
    out.clear();
    out.certificate_before = certificate_without_moments(m);
    if (std::isnan(out.certificate_before)) {
        out.certificate_after = out.certificate_before;
    } else {
        out.fetch_all(m.odds);
    }
}

}  // namespace verkv::inline v0::detail
