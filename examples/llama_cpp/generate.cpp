// Generates text with a model that llama.cpp runs and attention that verkv answers, and tells what it took.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "common/table.hpp"
#include "engine.hpp"
#include "settings.hpp"

namespace {

using example::verified_attention;

struct settings {
    example::engine_options engine;
    example::verification_choice verification;
    example::prompt_choice prompt;
    std::size_t predict = 128;
    std::size_t sequences = 1;
    double temperature = 0;
    bool dense = false;
    bool shift = false;
};

/// The next token: the most likely one, or at a temperature a random one.
class sampler {
public:
    sampler(double temperature, std::uint64_t seed) : temperature_(temperature), random_(seed) {}

    llama_token operator()(std::span<const float> logits) {
        if (temperature_ <= 0) {
            return example::most_likely(logits);
        }
        const double top = *std::max_element(logits.begin(), logits.end());
        weights_.clear();
        for (const float x : logits) {
            weights_.push_back(std::exp((static_cast<double>(x) - top) / temperature_));
        }
        return static_cast<llama_token>(std::discrete_distribution<int>(weights_.begin(), weights_.end())(random_));
    }

private:
    double temperature_;
    std::mt19937_64 random_;
    std::vector<double> weights_;
};

/// Reports layer by layer, and of all.
void print_report(const verified_attention& a) {
    example::table table({{"layer", example::alignment::left},
                          {"resident %", example::alignment::right},
                          {"fetched %", example::alignment::right},
                          {"keys scored %", example::alignment::right},
                          {"rounds", example::alignment::right},
                          {"certificate", example::alignment::right},
                          {"output error: mean %", example::alignment::right},
                          {"largest %", example::alignment::right},
                          {"ms a step", example::alignment::right}});
    const auto row = [&](const std::string& name, const example::layer_totals& t) {
        const auto heads = static_cast<double>(t.kv_heads);
        const auto of = [](double x, double n) { return n > 0 ? x / n : 0.0; };
        table.add({name, fmt::format("{:.2f}", 100 * of(t.resident, heads)),
                   fmt::format("{:.2f}", 100 * of(t.fetched, heads)),
                   fmt::format("{:.2f}", 100 * of(t.keys_scored, heads)), fmt::format("{:.2f}", of(t.rounds, heads)),
                   fmt::format("{:.4f}", of(t.certificate, heads)),
                   fmt::format("{:.2f}", 100 * of(t.error, static_cast<double>(t.query_heads))),
                   fmt::format("{:.1f}", 100 * t.largest_error),
                   fmt::format("{:.2f}", 1e3 * of(t.seconds, static_cast<double>(t.steps)))});
    };
    example::layer_totals all;
    for (std::size_t l = 0; l < a.layers(); ++l) {
        if (a.dense_because(l).empty()) {
            row(fmt::format("{}", l), a.totals(l));
            all += a.totals(l);
        }
    }
    if (all.steps == 0) {
        fmt::print("verkv answered no step of any layer.\n");
    } else {
        row("all", all);
        fmt::print("{}", table.text());
        fmt::print(
            "Layers are counted among those with attention. Shares of the rows that a token sees, means over steps and "
            "KV heads.\nRounds: fetches that the check from the sample added. Certificate: relative error of what "
            "--target names, as the step\nitself judges it. Output error: against the engine's own attention on the "
            "same queries and rows, over query heads and\nsteps. ms: of all KV heads.\n");
    }
    fmt::print("{}", a.dense_layers());
    if (a.resyncs() > 0) {
        fmt::print("{} times rows of a layer were read anew, because the engine had dropped some.\n", a.resyncs());
    }
}

/// A continuation of the prompt.
struct continuation {
    sampler next;
    std::string text;
    std::size_t made = 0;
    bool ended = false;
    std::size_t item = 0;  ///< of the last batch, whose logits are its own
    llama_token token = 0;
};

/// Generates until all have ended, from the logits of a batch on; prints a single one's text as it comes. `position`:
/// that of the next token, the same for all that go on.
void generate(example::engine& engine, const settings& s, verified_attention::mode mode, std::size_t position,
              std::vector<continuation>& all) {
    std::vector<example::engine::item> items;
    std::vector<int> going;
    while (!example::interrupted) {
        going.clear();
        for (std::size_t c = 0; c < all.size(); ++c) {
            continuation& one = all[c];
            if (one.ended || one.made == s.predict) {
                continue;
            }
            one.token = one.next(engine.logits(static_cast<int>(one.item)));
            if (engine.ends(one.token)) {
                one.ended = true;
                continue;
            }
            const std::string piece = engine.text_of(one.token);
            one.text += piece;
            ++one.made;
            if (all.size() == 1) {
                std::fwrite(piece.data(), 1, piece.size(), stdout);
                example::flush_output();
            }
            if (one.made < s.predict) {
                going.push_back(static_cast<int>(c));
            }
        }
        if (going.empty()) {
            return;
        }
        if (position == engine.context_tokens()) {
            if (!s.shift) {
                fmt::print(stderr, "\nthe context of {} tokens is full; --context-shift goes on\n", position);
                return;
            }
            for (std::size_t c = 0; c < all.size(); ++c) {
                if (all[c].ended) {
                    engine.truncate(static_cast<int>(c), 0);
                }
            }
            position = engine.shift(going, s.verification.sink, position);
        }
        items.clear();
        for (const int c : going) {
            continuation& one = all[static_cast<std::size_t>(c)];
            one.item = items.size();
            items.push_back({c, static_cast<std::int64_t>(position), one.token, true});
        }
        ++position;
        engine.decode(mode, items);
    }
}

int run(const settings& s) {
    example::require_possible(s.verification.made(true));
    // The engine may be asked for its trained context, which only the model tells.
    verified_attention attention({}, 1, 1);
    example::engine_options options = s.engine;
    options.sequences = static_cast<std::uint32_t>(s.sequences);
    example::engine engine(options, attention);
    attention = verified_attention(s.verification.made(engine.rope_by_halves()), engine.context_tokens(), s.sequences);
    const std::vector<llama_token> text = example::prompt_of(engine, s.prompt);
    const std::size_t prompt = text.size();
    if (prompt >= engine.context_tokens()) {
        throw std::runtime_error(
            fmt::format("the prompt has {} tokens, the context {}: give --context or --prompt-tokens", prompt,
                        engine.context_tokens()));
    }
    if (engine.context_tokens() > engine.trained_context()) {
        fmt::print(stderr, "note: the model was trained for {} tokens, the context has {}\n", engine.trained_context(),
                   engine.context_tokens());
    }
    if (!engine.has_rope() && !s.dense && s.verification.sketch == "rope-pairs") {
        fmt::print(stderr, "note: the model has no RoPE, whose channel pairs the sketch picks; try --sketch rotated\n");
    }
    if (s.shift) {
        engine.check_shift(s.verification.sink);
    }
    fmt::print(stderr, "{} tokens of prompt\n", prompt);
    attention.expect_prompt(prompt - 1);
    const auto mode = s.dense ? verified_attention::mode::off : verified_attention::mode::verified;
    // The last token is the first that verkv answers for.
    engine.read(verified_attention::mode::dense, 0, text, 0, prompt - 1);
    std::vector<example::engine::item> last;
    std::vector<continuation> all;
    for (std::size_t c = 0; c < s.sequences; ++c) {
        if (c > 0) {
            engine.copy(0, static_cast<int>(c));
        }
        last.push_back({static_cast<int>(c), static_cast<std::int64_t>(prompt) - 1, text[prompt - 1], true});
        all.push_back({.next = sampler(s.temperature, s.verification.seed + c), .text = {}, .item = c});
    }
    engine.decode(mode, last);
    generate(engine, s, mode, prompt, all);
    std::size_t made = 0;
    for (std::size_t c = 0; c < all.size(); ++c) {
        made += all[c].made;
        if (all.size() > 1) {
            fmt::print("--- continuation {}:\n{}\n", c, all[c].text);
        }
    }
    fmt::print("\n\n{} tokens generated{}.\n", made, example::interrupted ? ", then interrupted" : "");
    if (!s.dense) {
        print_report(attention);
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    settings s;
    CLI::App app("Generates text with a model that llama.cpp runs and attention that verkv answers.");
    example::add_engine_options(app, s.engine);
    example::add_verification_options(app, s.verification, true);
    example::add_prompt_options(app, s.prompt);
    example::add_count(app, "--predict", s.predict, 0, std::size_t{1} << 30, "tokens to generate");
    example::add_fraction(app, "--temperature", s.temperature, {0, 100, true, true}, "0: the most likely token");
    example::add_count(app, "--sequences", s.sequences, 1, 64,
                       "continuations of the prompt, decoded as one batch; they differ at a --temperature");
    app.add_flag("--dense", s.dense, "the engine's own attention, for comparison");
    app.add_flag("--context-shift", s.shift, "when the context is full, drop half of what lies behind the sink");
    CLI11_PARSE(app, argc, argv);
    example::stop_at_signals();
    return example::exit_code_of("verkv_generate", [&] { return run(s); });
}
