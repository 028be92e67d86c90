// The field's estimators by name, with the settings that they are compared at.
#pragma once

#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "common/registry.hpp"
#include "verkv/baseline/cluster_estimate.hpp"
#include "verkv/baseline/priority_sampling.hpp"
#include "verkv/baseline/top_k_attention.hpp"
#include "verkv/baseline/uniform_clt.hpp"
#include "verkv/baseline/uniform_clt_public.hpp"

namespace compare {

struct baseline_settings {
    double heavy = 0.02;
    double pilot = 0.02;
    std::vector<double> counts{0.01, 0.05};
};

/// One setting of them.
struct baseline_options {
    double epsilon = 0.1;
    double heavy = 0.02;
    double pilot = 0.02;
    double count = 0.05;
};

/// What a method depends on.
enum baseline_uses : unsigned {
    uses_nothing = 0,
    uses_ranking = 1,  ///< weights that rank tokens: once for each sketch that is asked for
    uses_count = 2,    ///< a number of tokens: once for each of baseline_settings::counts
};

template <class Make>
struct named_baseline {
    std::string_view name;
    unsigned uses;
    Make make;  ///< (const baseline_options&) -> a baseline
};
template <class Make>
named_baseline(std::string_view, unsigned, Make) -> named_baseline<Make>;

inline verkv::uniform_clt uniform_clt_of(const baseline_options& o) {
    verkv::uniform_clt method;
    method.heavy = verkv::token_count::share(o.heavy);
    method.pilot = o.pilot;
    return method;
}

inline constexpr std::tuple baselines{
    named_baseline{"uniform-clt", uses_ranking, [](const baseline_options& o) { return uniform_clt_of(o); }},
    named_baseline{"uniform-clt-output", uses_ranking,
                   [](const baseline_options& o) {
                       verkv::uniform_clt method = uniform_clt_of(o);
                       method.target = verkv::uniform_clt::target_of_draws::output;
                       return method;
                   }},
    named_baseline{"uniform-clt-output-sharp", uses_ranking,
                   [](const baseline_options& o) {
                       verkv::uniform_clt method = uniform_clt_of(o);
                       method.target = verkv::uniform_clt::target_of_draws::output;
                       method.quotient = verkv::quotient_rule::sharp;
                       method.pilot_use = verkv::uniform_clt::pilot_rows::keep;
                       return method;
                   }},
    named_baseline{"uniform-clt-public", uses_ranking,
                   [](const baseline_options& o) {
                       return verkv::uniform_clt_public{.heavy = verkv::token_count::share(o.heavy), .pilot = o.pilot};
                   }},
    named_baseline{
        "priority", uses_ranking | uses_count,
        [](const baseline_options& o) { return verkv::priority_sampling{verkv::token_count::share(o.count)}; }},
    named_baseline{
        "top-k", uses_ranking | uses_count,
        [](const baseline_options& o) { return verkv::top_k_attention{verkv::token_count::share(o.count)}; }},
    named_baseline{"top-p", uses_ranking,
                   [](const baseline_options& o) { return verkv::top_p_attention{1 - o.epsilon}; }},
    named_baseline{"streaming", uses_nothing, [](const baseline_options&) { return verkv::streaming_attention{}; }},
};

/// Clusters are no selection of tokens alone: a program of their own.
inline constexpr std::string_view clusters_name = "clusters";

inline std::vector<std::string> names_of_baselines() {
    std::vector<std::string> names = example::names_of(baselines);
    names.emplace_back(clusters_name);
    return names;
}

}  // namespace compare
