// What a run of compare is asked to do.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "baselines.hpp"
#include "common/arguments.hpp"
#include "common/combination.hpp"
#include "common/registry.hpp"

namespace compare {

/// `kept`, `epsilon` and so on of the base are those of all caches; the first part goes through `kept_shares` instead.
struct settings : example::replay_options {
    settings() {
        epsilon = {0.05, 0.1, 0.2};
        redraws = 2;
    }

    std::string trace = VERKV_EXAMPLE_DATA_DIR "/smollm2-8k-layer15";
    std::vector<std::string> parts{"scorers", "sketches", "baselines"};
    std::vector<std::string> scorers = example::names_of(example::scorers);
    std::string scorer = example::default_scorer;  // of the second part
    std::vector<double> kept_shares{0.06, 0.12, 0.25};
    std::vector<std::string> sketches = example::names_of(example::sketches<verkv::half>);
    std::string sketch = example::default_sketch;  // of the first part
    std::vector<unsigned> bits{0};                 // part 2 has each; the others the first
    std::vector<double> pairs{0};
    std::vector<std::string> plans{"never", "greedy", "water-filling"};
    std::vector<std::string> targets{"denominator", "output"};
    std::vector<std::string> baselines = names_of_baselines();
    std::vector<std::string> ranks{"exact", example::default_sketch};
    baseline_settings baseline;
    std::size_t steps = 8;
    std::size_t threads = 1;
    std::string csv, json, plot;
};

/// Describes the options; parsing fills `s`.
inline void add_options(CLI::App& app, settings& s) {
    constexpr std::size_t most = 1'000'000'000;
    const auto scorer_names = example::names_of(example::scorers);
    const auto sketch_names = example::names_of(example::sketches<verkv::half>);
    example::add_path(app, "--trace", s.trace, "folder of an attention trace; see examples/data/README.md");
    example::add_names(app, "--part", s.parts, {"scorers", "sketches", "baselines"}, "what to compare");
    example::add_numbers(app, "--epsilon", s.epsilon, {0, 1, false, false}, "relative errors to keep");
    example::add_fraction(app, "--delta", s.delta, {0, 1, false, false},
                          "share of the decisions whose error may be larger");
    example::add_count(app, "--sink", s.sink, 0, most, "first tokens, always in fast memory");
    example::add_count(app, "--local", s.local, 0, most, "last tokens of the prompt, always in fast memory");

    example::add_names(app, "--scorer", s.scorers, scorer_names, "part 1: how prefill ranks tokens");
    example::add_numbers(app, "--kept", s.kept_shares, {0, 1, false, true}, "part 1: shares of the tokens that stay");
    app.add_option("--with-sketch", s.sketch, "part 1: how decode estimates weights")
        ->check(CLI::IsMember(sketch_names))
        ->capture_default_str();

    example::add_names(app, "--sketch", s.sketches, sketch_names, "part 2: how decode estimates weights");
    example::add_names(app, "--plan", s.plans, {"never", "greedy", "water-filling", "everything"},
                       "part 2: how rows to fetch are chosen");
    example::add_names(app, "--target", s.targets, {"denominator", "output"},
                       "part 2: what is certified (the output by water-filling alone)");
    app.add_option("--with-scorer", s.scorer, "parts 2 and 3: how prefill ranks tokens")
        ->check(CLI::IsMember(scorer_names))
        ->capture_default_str();
    example::add_fraction(app, "--with-kept", s.kept, {0, 1, false, true},
                          "parts 2 and 3: share of the tokens that stay", "1/16");
    example::add_counts(app, "--bits", s.bits, 0, 8,
                        "bits a channel of a sketch of codes, 0 for its own default; rotated, turbo-quant and anchors "
                        "take at most 4; parts 1 and 3 take the first");
    example::add_numbers(app, "--pairs", s.pairs, {0, 1, true, true},
                         "shares of the channel pairs in the rope-pairs sketch, 0 for its own default; as --bits");

    example::add_names(app, "--baseline", s.baselines, names_of_baselines(), "part 3: estimators of the field");
    example::add_names(app, "--rank", s.ranks, sketch_names, "part 3: sketches whose weights rank tokens");
    example::add_fraction(app, "--heavy", s.baseline.heavy, {0, 1, true, true},
                          "part 3: share of exact tokens beside a uniform sample");
    example::add_fraction(app, "--pilot", s.baseline.pilot, {0, 1, false, true}, "part 3: share of a pilot");
    example::add_numbers(app, "--count", s.baseline.counts, {0, 1, false, true},
                         "part 3: shares of the tokens for methods that take a number of them");

    example::add_count(app, "--steps", s.steps, 1, most, "decode steps, spread over the trace");
    example::add_count(app, "--redraws", s.redraws, 1, 1'000'000, "independent samples");
    example::add_count(app, "--seed", s.seed, 0, std::numeric_limits<std::uint64_t>::max(), "of the first sample");
    example::add_count(app, "--threads", s.threads, 0, 1024, "threads of a decode step; 0 for all");
    example::add_path(app, "--csv", s.csv, "file for the results as CSV");
    example::add_path(app, "--json", s.json, "file for the results as JSON");
    example::add_path(app, "--plot", s.plot,
                      "start of the names of three plots, SVG: NAME-error.svg, NAME-scorers.svg, NAME-sketches.svg");
}

}  // namespace compare
