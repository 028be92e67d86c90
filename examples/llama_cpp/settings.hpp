// Options that the programs of this folder share.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/arguments.hpp"
#include "common/exit_code.hpp"
#include "engine.hpp"

namespace example {

inline void add_engine_options(CLI::App& app, engine_options& o) {
    const std::map<std::string, ggml_type> types{
        {"f16", GGML_TYPE_F16},   {"f32", GGML_TYPE_F32},   {"bf16", GGML_TYPE_BF16}, {"q8_0", GGML_TYPE_Q8_0},
        {"q4_0", GGML_TYPE_Q4_0}, {"q4_1", GGML_TYPE_Q4_1}, {"q5_0", GGML_TYPE_Q5_0}, {"q5_1", GGML_TYPE_Q5_1}};
    app.add_option("--model", o.model, "a model, GGUF")->required();
    add_count(app, "--context", o.context, 0, 1u << 30, "tokens of context; 0: what the model was trained for");
    add_count(app, "--batch", o.batch, 1, 1u << 16, "tokens of the prompt that the engine computes at once");
    app.add_option("--threads", o.threads, "of the engine; 0: its default")->check(CLI::Range(0, 1024));
    std::vector<std::string> names;
    for (const auto& [name, type] : types) {
        names.push_back(name);
    }
    const auto add_type = [&](const char* option, ggml_type& type, const char* description) {
        app.add_option_function<std::string>(
               option, [&type, types](const std::string& name) { type = types.at(name); }, description)
            ->check(CLI::IsMember(names))
            ->type_name("NAME")
            ->default_str("f16");
    };
    add_type("--cache-type-k,--ctk", o.keys, "how the engine stores keys");
    add_type("--cache-type-v,--ctv", o.values, "how the engine stores values");
}

/// What is read first.
struct prompt_choice {
    std::string file;
    std::size_t tokens = 0;  ///< of it; 0: all
};

inline void add_prompt_options(CLI::App& app, prompt_choice& p) {
    app.add_option("--prompt", p.file, "file with the prompt")->required()->check(CLI::ExistingFile);
    add_count(app, "--prompt-tokens", p.tokens, 0, std::size_t{1} << 30,
              "tokens of the file that are the prompt; 0: all");
}

/// Its tokens, one at least.
inline std::vector<llama_token> prompt_of(const engine& e, const prompt_choice& p) {
    std::vector<llama_token> text = e.tokens_of(read_text(p.file), true);
    if (p.tokens > 0 && text.size() > p.tokens) {
        text.resize(p.tokens);
    }
    if (text.empty()) {
        throw std::runtime_error("the prompt has no tokens");
    }
    return text;
}

/// What verkv does, as it is asked for by name.
struct verification_choice {
    /// What the C interface takes where nothing is said.
    [[nodiscard]] static verkv_options own() {
        verkv_options o;
        verkv_default_options(&o);
        return o;
    }

    std::string plan = "water-filling";
    std::string sketch = "rope-pairs";
    std::string target = "denominator";
    double kept = 1.0 / 16;
    std::size_t sink = 16;
    std::size_t local = 48;
    double epsilon = 0.05;
    double delta = 0.1;
    unsigned bits = own().sketch_bits;
    double share = static_cast<double>(own().sketch_share);
    std::uint32_t shortlist = 128;
    bool per_head = false;
    unsigned rounds = 15;
    bool carry = false;
    std::uint64_t seed = 1;

    [[nodiscard]] verification made(bool rope_by_halves) const {
        verification v;
        v.options.plan = plan == "greedy"  ? VERKV_PLAN_GREEDY
                         : plan == "never" ? VERKV_PLAN_NEVER
                                           : VERKV_PLAN_WATER_FILLING;
        v.options.sketch = sketch == "exact"     ? VERKV_SKETCH_EXACT
                           : sketch == "rotated" ? VERKV_SKETCH_ROTATED
                                                 : VERKV_SKETCH_ROPE_PAIRS;
        v.options.target = target == "output" ? VERKV_TARGET_OUTPUT : VERKV_TARGET_DENOMINATOR;
        v.options.sketch_bits = bits;
        v.options.sketch_share = static_cast<float>(share);
        v.options.rope = rope_by_halves ? VERKV_ROPE_HALF : VERKV_ROPE_INTERLEAVED;
        v.options.shortlist = shortlist;
        v.options.joint = per_head ? 0 : 1;
        v.options.carry_bounds = carry ? 1 : 0;
        v.options.check_rounds = rounds;
        v.options.kept = kept;
        v.options.kept_at_least = sink + local + 1;
        v.options.sink = sink;
        v.options.local = local;
        v.epsilon = epsilon;
        v.delta = delta;
        v.seed = seed;
        return v;
    }
};

/// Options of how much is kept and what is promised; which parts do it, where `parts`.
inline void add_verification_options(CLI::App& app, verification_choice& c, bool parts) {
    add_count(app, "--sink", c.sink, 0, 1u << 20, "first tokens that stay resident");
    add_count(app, "--local", c.local, 0, 1u << 20, "last tokens of the prompt that stay resident");
    add_fraction(app, "--delta", c.delta, {0, 1, false, false}, "how often the error may be larger than epsilon");
    app.add_option("--sketch", c.sketch, "how weights are estimated")
        ->check(CLI::IsMember({"rope-pairs", "rotated", "exact"}))
        ->capture_default_str();
    add_count(app, "--bits", c.bits, 1, 8, "bits a channel of the sketch; rotated takes at most 4");
    add_fraction(app, "--pairs", c.share, {0, 1, false, true}, "share of the channel pairs in the rope-pairs sketch");
    add_count(app, "--shortlist", c.shortlist, 0, 1u << 20, "tokens of a query head whose keys are read to weigh them");
    app.add_flag("--per-head", c.per_head,
                 "query heads of a KV head plan on their own, and it reads what any asks for");
    add_count(app, "--rounds", c.rounds, 0, 15, "fetches that the check from the sample may add; 0: no check");
    add_count(app, "--seed", c.seed, 0, ~std::uint64_t{0}, "of the sample");
    if (parts) {
        add_fraction(app, "--kept", c.kept, {0, 1, false, true}, "share of the tokens that stays resident", "1/16");
        add_fraction(app, "--epsilon", c.epsilon, {0, 1e9, false, true}, "relative error to certify");
        app.add_option("--plan", c.plan, "how rows to fetch are chosen")
            ->check(CLI::IsMember({"water-filling", "greedy", "never"}))
            ->capture_default_str();
        app.add_option("--target", c.target, "what is certified")
            ->check(CLI::IsMember({"denominator", "output"}))
            ->capture_default_str();
        app.add_flag("--carry-bounds", c.carry, "plans carry the rotated sketch's bounds: a theorem, more rows");
    }
}

}  // namespace example
