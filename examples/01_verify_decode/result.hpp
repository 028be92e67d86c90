// What a combination comes to at one epsilon.
#pragma once

#include <cstddef>

#include "combinations.hpp"

/// One line of the table.
struct result {
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
    double mean_certificate = 0;           // the plans' own
    double mean_certificate_observed = 0;  // what the check saw; NaN where nothing is checked
    double resident_share = 0;             // of the prompt
    double sketch_bytes_share = 0;
    double sketch_ms = 0, decide_ms = 0, fetch_ms = 0, attend_ms = 0, dense_ms = 0;
};
