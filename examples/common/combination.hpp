// What can be chosen of a cache by name, what a replay of a trace is asked to do, and what it comes to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace example {

/// One choice of everything that can be chosen; what has no meaning for it holds the default.
struct combination {
    std::string sketch, plan, tail = "bernstein", target = "denominator", group = "per-head", check = "none",
                              uniforms = "permanent", bounds = "none", exact_for = "shortlist";

    [[nodiscard]] bool checked() const { return check == "sample"; }
    [[nodiscard]] bool certifies() const { return plan != "never"; }

    friend bool operator==(const combination&, const combination&) = default;
};

/// What all combinations of a replay have in common.
struct replay_options {
    double kept = 1.0 / 16;  ///< share of the prompt that stays resident
    std::size_t sink = 64;
    std::size_t local = 64;
    std::vector<double> epsilon{0.01, 0.05, 0.1, 0.3};
    double delta = 0.1;
    std::string shrinkage = "binary";
    std::size_t rounds = 15;
    std::size_t shortlist = 128;
    std::size_t redraws = 8;
    std::uint64_t seed = 1;
};

/// What a combination comes to at one epsilon. Shares are of the context, means over decisions or KV heads and steps.
struct replay_result {
    double epsilon = 0;
    combination choice;
    std::size_t decisions = 0;
    double fetching_decisions = 0;
    double rows_read_per_query_head = 0;
    double rows_read_per_kv_head = 0;
    double rows_copied_per_kv_head = 0;
    double rounds = 0;
    double shortlist_keys_read = 0;
    double failures_denominator = 0;
    double failures_output = 0;
    double mean_denominator_error = 0;
    double mean_output_error = 0;
    double p99_output_error = 0;
    double mean_certificate = 0;           // the plans' own
    double mean_certificate_observed = 0;  // what the check saw; NaN where nothing is checked
    double resident_share = 0;             // of the prompt
    double resident_attention = 0;         // exact attention of the resident tokens; NaN where it was not asked for
    double sketch_bytes_share = 0;         // of the prompt's rows
    double sketch_bytes_per_token = 0;
    double sketch_ms = 0, decide_ms = 0, fetch_ms = 0, attend_ms = 0, dense_ms = 0;
};

}  // namespace example
