// What a method comes to at one epsilon: a line of the tables, whatever kind of method it is.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/registry.hpp"

namespace compare {

/// Shares are of the context; means over query heads, or KV heads, steps and draws. NaN: does not apply.
struct row {
    static constexpr double none = std::numeric_limits<double>::quiet_NaN();

    std::string part;          ///< scorers, sketches or baselines
    std::string method;        ///< a plan, or a baseline
    std::string scorer;        ///< of the resident sample; empty where there is none
    std::string sketch;        ///< whose weights plans go by, or rank tokens
    double bits = none;        ///< of the sketch, where it was not left as it is
    double pairs = none;       ///< likewise
    std::string claims;        ///< what the error is claimed of: D, output, or nothing
    double kept = none;        ///< share of the prompt that was to stay resident
    double epsilon = none;     ///< that was asked for; methods that have no use for it come to the same for each
    double attention = none;   ///< exact attention of the tokens that are there, of all: resident, or selected
    double error_mean = none;  ///< ||o^ - o|| / ||o||
    double error_p99 = none;
    double rows = none;         ///< keys and values read from offloaded rows, for a KV head
    double keys = none;         ///< keys alone, read besides
    double rows_beyond = none;  ///< of the rows, those that a resident sample such as the caches' would not hold
    double failures_denominator = none;  ///< decisions with |D^ - D| > epsilon D
    double failures_output = none;       ///< decisions with ||o^ - o|| > epsilon ||o||
    double sketch_bytes = none;          ///< a token and KV head
    double milliseconds = none;          ///< a KV head and step, one thread
    std::size_t decisions = 0;

    /// The sketch with its setting, "rope-pairs 0.5 at 4 bits"; "-" where there is none.
    [[nodiscard]] std::string weights() const {
        return weights_but_bits() + (std::isnan(bits) ? "" : fmt::format(" at {:g} bits", bits));
    }
    [[nodiscard]] std::string weights_but_bits() const {
        return (sketch.empty() ? "-" : sketch) + (std::isnan(pairs) ? "" : fmt::format(" {:g}", pairs));
    }

    /// Whether what is claimed fails more often than promised.
    [[nodiscard]] bool breaks_promise(double delta) const {
        return (claims == "D" && failures_denominator > delta) || (claims == "output" && failures_output > delta);
    }
};

/// Notes what was asked of a row's sketch by --bits and --pairs, as far as it has a use for them.
inline void set_sketch_setting(row& r, const std::string& sketch, unsigned bits, double pairs) {
    const unsigned uses = example::facts_of_sketch(sketch).uses;
    r.bits = (uses & example::uses_bits) != 0 && bits != 0 ? bits : row::none;
    r.pairs = (uses & example::uses_pairs) != 0 && pairs != 0 ? pairs : row::none;
}

/// The numbers of a row by name, in the order of the files.
struct row_number {
    const char* name;
    double row::*value;
};
inline constexpr row_number row_numbers[] = {{"bits", &row::bits},
                                             {"pairs", &row::pairs},
                                             {"kept", &row::kept},
                                             {"epsilon", &row::epsilon},
                                             {"attention", &row::attention},
                                             {"output_error_mean", &row::error_mean},
                                             {"output_error_p99", &row::error_p99},
                                             {"rows_read", &row::rows},
                                             {"keys_read_besides", &row::keys},
                                             {"rows_read_beyond_sample", &row::rows_beyond},
                                             {"failures_denominator", &row::failures_denominator},
                                             {"failures_output", &row::failures_output},
                                             {"sketch_bytes_per_token", &row::sketch_bytes},
                                             {"milliseconds", &row::milliseconds}};

/// A header line and a line for each row; an empty cell for NaN. Names hold no comma or quote.
inline std::string as_csv(const std::vector<row>& rows) {
    std::string text = "part,method,scorer,sketch,claims";
    for (const row_number& n : row_numbers) {
        text += fmt::format(",{}", n.name);
    }
    text += ",decisions\n";
    for (const row& r : rows) {
        text += fmt::format("{},{},{},{},{}", r.part, r.method, r.scorer, r.sketch, r.claims);
        for (const row_number& n : row_numbers) {
            text += std::isnan(r.*n.value) ? std::string(",") : fmt::format(",{}", r.*n.value);
        }
        text += fmt::format(",{}\n", r.decisions);
    }
    return text;
}

/// The same as objects; null for NaN.
inline nlohmann::ordered_json as_json(const std::vector<row>& rows) {
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    for (const row& r : rows) {
        nlohmann::ordered_json one = {
            {"part", r.part}, {"method", r.method}, {"scorer", r.scorer}, {"sketch", r.sketch}, {"claims", r.claims}};
        for (const row_number& n : row_numbers) {
            one[n.name] = r.*n.value;
        }
        one["decisions"] = r.decisions;
        all.push_back(std::move(one));
    }
    return all;
}

}  // namespace compare
