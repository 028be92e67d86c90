// What a run of verify_decode is asked to do.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/arguments.hpp"
#include "common/combination.hpp"
#include "common/registry.hpp"

struct settings : example::replay_options {
    std::string trace = VERKV_EXAMPLE_DATA_DIR "/smollm2-8k-layer15";
    std::string scorer = example::default_scorer;
    std::vector<std::string> sketch{"exact", example::default_sketch};
    unsigned bits = 0;  // 0: the sketch's own; pairs likewise
    double pairs = 0;
    std::vector<std::string> plan{"water-filling", "greedy", "never"};
    std::vector<std::string> tail{"bernstein"};
    std::vector<std::string> target{"denominator", "output"};
    std::vector<std::string> group{"joint"};
    std::vector<std::string> check{"sample"};
    std::vector<std::string> uniforms{"permanent"};
    std::vector<std::string> bounds{"none"};
    std::vector<std::string> exact_for{"shortlist"};
    std::size_t steps = 0;  // 0: all
    std::size_t threads = 1;
    std::string json;
    std::string plot;
    bool times = false;
    std::map<std::string, std::string> given;  ///< arguments of the flags of the command line

    [[nodiscard]] bool was_given(const std::string& flag) const { return given.contains(flag); }

    /// What a flag chooses from a list, as the command line would have it; empty for another flag.
    [[nodiscard]] std::string names_of(const std::string& flag) const {
        for (const auto& [name, list] :
             {std::pair{"--sketch", &sketch}, std::pair{"--plan", &plan}, std::pair{"--target", &target},
              std::pair{"--bounds", &bounds}, std::pair{"--check", &check}}) {
            if (flag == name) {
                return example::joined_list(*list);
            }
        }
        return "";
    }
};

/// Describes the options; parsing fills `s`, but for what was given: example::given_options() tells.
inline void add_options(CLI::App& app, settings& s) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    constexpr std::size_t most = 1'000'000'000;  // tokens and steps
    example::add_path(app, "--trace", s.trace, "folder of an attention trace; see examples/data/README.md");
    example::add_fraction(app, "--kept", s.kept, {0, 1, false, true},
                          "share of the tokens that stays resident, sink and local included, the sketch apart", "1/16");
    example::add_count(app, "--sink", s.sink, 0, most, "first tokens, always resident");
    example::add_count(app, "--local", s.local, 0, most, "last tokens of the prompt, always resident");
    example::add_numbers(app, "--epsilon", s.epsilon, {0, infinity, false, false}, "relative errors to certify");
    example::add_fraction(app, "--delta", s.delta, {0, 1, false, false},
                          "share of the decisions whose error may be larger");
    app.add_option("--scorer", s.scorer, "how prefill ranks tokens")
        ->check(CLI::IsMember(example::names_of(example::scorers)))
        ->capture_default_str();
    example::add_names(app, "--sketch", s.sketch, example::names_of(example::sketches<verkv::half>),
                       "how decode estimates weights");
    example::add_count(app, "--bits", s.bits, 0, 8,
                       "bits a channel of a sketch of codes, 0 for its own default; rotated, turbo-quant and anchors "
                       "take at most 4");
    example::add_fraction(app, "--pairs", s.pairs, {0, 1, true, true},
                          "share of the channel pairs in the rope-pairs sketch, 0 for its own default");
    app.add_option("--shrinkage", s.shrinkage, "how the estimate trades bias for variance")
        ->check(CLI::IsMember({"binary", "bounded", "none"}))
        ->capture_default_str();
    example::add_names(app, "--plan", s.plan, {"water-filling", "greedy", "never", "everything"},
                       "how rows to fetch are chosen");
    example::add_names(app, "--tail", s.tail, {"bernstein", "chernoff"}, "inequality behind the certificate");
    example::add_names(app, "--target", s.target, {"denominator", "output"},
                       "what is certified (without this option, outputs for water-filling alone)");
    example::add_names(app, "--group", s.group, {"joint", "per-head"}, "whether the heads of a group plan together");
    example::add_names(app, "--check", s.check, {"sample", "none"}, "what follows a fetch");
    example::add_count(app, "--rounds", s.rounds, 1, 15, "fetches that a check may add");
    example::add_names(app, "--uniforms", s.uniforms, {"permanent", "fresh"}, "which uniforms plans draw with");
    example::add_names(app, "--bounds", s.bounds, {"none", "sketch"}, "whether plans carry the sketch's error bound");
    example::add_names(app, "--exact-for", s.exact_for, {"shortlist", "resident"}, "which tokens get exact weights");
    example::add_count(app, "--shortlist", s.shortlist, 0, most, "tokens scored exactly for each query head");
    example::add_count(app, "--steps", s.steps, 0, most, "decode steps, spread over the trace; 0 for all");
    example::add_count(app, "--redraws", s.redraws, 1, 1'000'000, "independent samples of the prompt");
    example::add_count(app, "--seed", s.seed, 0, std::numeric_limits<std::uint64_t>::max(), "of the first sample");
    example::add_count(app, "--threads", s.threads, 0, 1024, "threads of the decode step; 0 for all");
    app.add_flag("--times", s.times, "adds a table of times");
    example::add_path(app, "--json", s.json, "file for the results as JSON, times included");
    example::add_path(app, "--plot", s.plot, "file for a plot, SVG");
}
