// Targets: what a certificate speaks about.
#pragma once

#include <span>

#include "verkv/core/plan.hpp"

namespace verkv::inline v0 {

/// The softmax denominator: mass w_i, measured against D [VerKV Lemma 1].
struct denominator {
    [[nodiscard]] masses_view masses(std::span<const float> weight, std::span<const float> odds, double total) const {
        return {weight, odds, total};
    }
};

}  // namespace verkv::inline v0
