// expect: weight_target.*same_as
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/executor.hpp"

struct model {
#ifdef VERKV_MUST_FAIL
    std::span<const float> masses(std::span<const float> weight, std::span<const float>, double) const {
        return weight;
    }
#else
    verkv::masses_view masses(std::span<const float> weight, std::span<const float> odds, double total) const {
        return {weight, odds, total};
    }
#endif
};

static_assert(verkv::weight_target<model>);  // what a target lacks is said of the kind that it is meant to be
static_assert(verkv::target<model, verkv::cpu>);
