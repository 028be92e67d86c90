// The methods that verkv_evaluate compares, by name.
#pragma once

#include <fmt/format.h>

#include <optional>
#include <string>
#include <vector>

#include "settings.hpp"

namespace example {

/// A way to answer attention; without a choice, the engine's own.
struct method {
    std::string name;
    std::optional<verification_choice> choice;
};

/// Never fetch, the paper's plan, ours for each certificate, with what `common` says of all of them. The exact sketch
/// shows what a method would do with weights that cost nothing.
inline std::vector<method> all_methods(const verification_choice& common) {
    std::vector<method> methods;
    const auto add = [&](const std::string& name, const char* plan, const std::string& sketch, const char* target,
                         double epsilon) {
        verification_choice c = common;
        c.plan = plan;
        c.sketch = sketch;
        c.target = target;
        c.epsilon = epsilon;
        methods.push_back({name, c});
    };
    add("never fetch", "never", common.sketch, "denominator", 0.05);
    add("paper: greedy, eps 0.05", "greedy", common.sketch, "denominator", 0.05);
    add("default: water-filling, checked, eps 0.05", "water-filling", common.sketch, "denominator", 0.05);
    add("default, eps 0.3", "water-filling", common.sketch, "denominator", 0.3);
    add("output verified, eps 0.1", "water-filling", common.sketch, "output", 0.1);
    add("output verified, eps 0.3", "water-filling", common.sketch, "output", 0.3);
    add("exact weights, greedy, eps 0.05", "greedy", "exact", "denominator", 0.05);
    add("exact weights, water-filling, eps 0.05", "water-filling", "exact", "denominator", 0.05);
    add("exact weights, output verified, eps 0.1", "water-filling", "exact", "output", 0.1);
    add("exact weights, output verified, eps 0.3", "water-filling", "exact", "output", 0.3);
    return methods;
}

}  // namespace example
