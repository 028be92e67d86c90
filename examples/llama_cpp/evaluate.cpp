// What a compressed cache does to a real model: teacher-forced over a long text, each method against dense attention.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <regex>
#include <span>
#include <string>
#include <vector>

#include "common/output_file.hpp"
#include "common/plot.hpp"
#include "common/table.hpp"
#include "engine.hpp"
#include "evaluation.hpp"
#include "method.hpp"
#include "settings.hpp"

namespace {

using example::verified_attention;

struct settings {
    example::engine_options engine;
    example::verification_choice common;
    std::string text;
    std::size_t skip = 0;
    std::size_t prompt = 4096;
    std::size_t tokens = 150;
    std::vector<double> reread{0};
    std::vector<double> kept{1.0 / 8, 1.0 / 16, 1.0 / 32};
    std::string only;
    std::string csv, plot;
};

/// Logarithms of the probabilities of all tokens.
void log_softmax(std::span<const float> logits, std::vector<float>& out) {
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float x : logits) {
        sum += std::exp(static_cast<double>(x) - top);
    }
    const double log_sum = top + std::log(sum);
    out.resize(logits.size());
    std::transform(logits.begin(), logits.end(), out.begin(),
                   [&](float x) { return static_cast<float>(static_cast<double>(x) - log_sum); });
}

/// KL(p || q) in nats, of log-probabilities.
double divergence(std::span<const float> p, std::span<const float> q) {
    double sum = 0;
    for (std::size_t i = 0; i < p.size(); ++i) {
        const auto a = static_cast<double>(p[i]);
        const double weight = std::exp(a);
        sum += weight > 0 ? weight * (a - static_cast<double>(q[i])) : 0;
    }
    return sum < 0 ? 0 : sum;  // below 0 by rounding; NaN stays
}

std::vector<example::method> methods_of(const settings& s) {
    std::vector<example::method> methods{{"dense", std::nullopt}};
    // How far apart two exact ways to compute attention are: what a method cannot be told from.
    example::verification_choice all = s.common;
    all.plan = "never";
    all.sketch = "exact";
    all.kept = 1;
    methods.push_back({"all rows resident", all});
    const std::regex only = [&] {
        try {
            return std::regex(s.only);
        } catch (const std::regex_error& e) {
            throw std::runtime_error(fmt::format("--only \"{}\" is no regular expression: {}", s.only, e.what()));
        }
    }();
    for (const double kept : s.kept) {
        example::verification_choice c = s.common;
        c.kept = kept;
        for (example::method& m : example::all_methods(c)) {
            if (std::regex_search(m.name, only)) {
                methods.push_back(std::move(m));
            }
        }
    }
    if (methods.size() == 2) {
        throw std::runtime_error("no method's name matches " + s.only);
    }
    return methods;
}

/// Results of all methods on a text, the dense one first. `done` counts tokens.
std::vector<example::result> measure(example::engine& engine, verified_attention& attention, const settings& s,
                                     std::size_t reread, std::span<const llama_token> text,
                                     const std::vector<example::method>& methods, example::progress& progress,
                                     std::size_t& done) {
    // Logits at position p tell of token p + 1: the first to be compared stand at prompt - 1.
    const std::size_t first = s.prompt - 1;
    const std::size_t start = first - reread;
    engine.truncate(0, 0);
    attention.restart({});
    attention.expect_prompt(start);
    for (std::size_t read = 0; read < start; read += s.engine.batch) {
        progress.update(done + read, "prompt");
        engine.read(verified_attention::mode::dense, 0, text, read, (std::min)(read + s.engine.batch, start));
    }
    done += s.prompt;
    std::vector<example::result> results;
    std::vector<std::vector<float>> dense(s.tokens);
    std::vector<float> own;
    for (const example::method& m : methods) {
        auto mode = verified_attention::mode::off;
        example::result r;
        r.name = m.name;
        if (m.choice) {
            mode = verified_attention::mode::verified;
            r.kept = m.choice->kept;
            r.kind = fmt::format("{} {} {}", m.choice->plan, m.choice->target, m.choice->epsilon);
            r.sketch = m.choice->sketch;
        }
        engine.truncate(0, start);
        attention.restart(m.choice ? m.choice->made(engine.rope_by_halves()) : example::verification{});
        for (std::size_t i = start; i < first; ++i) {
            progress.update(done++, m.name);
            engine.read(mode, 0, text, i, i + 1);
        }
        attention.forget_totals();
        const auto began = std::chrono::steady_clock::now();
        for (std::size_t i = 0; i < s.tokens; ++i) {
            progress.update(done++, m.name);
            engine.read(mode, 0, text, first + i, first + i + 1);
            std::vector<float>& log_p = m.choice ? own : dense[i];
            log_softmax(engine.logits(), log_p);
            r.divergences.push_back(m.choice ? divergence(dense[i], own) : 0);
            r.agreed += example::most_likely(log_p) == example::most_likely(dense[i]) ? 1u : 0u;
            r.log_loss -= static_cast<double>(log_p[static_cast<std::size_t>(text[first + i + 1])]);
        }
        r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        for (std::size_t l = 0; l < attention.layers(); ++l) {
            if (attention.dense_because(l).empty()) {
                r.totals += attention.totals(l);
            }
        }
        results.push_back(std::move(r));
    }
    return results;
}

int run(const settings& s) {
    std::vector<std::size_t> rereads;
    for (const double x : s.reread) {
        rereads.push_back(static_cast<std::size_t>(x));
        if (static_cast<double>(rereads.back()) != x || rereads.back() + 2 > s.prompt) {
            throw std::runtime_error(
                fmt::format("of {} tokens of prompt, {} cannot be read through verkv", s.prompt, x));
        }
    }
    example::require_outputs({{"--csv", s.csv}, {"--plot", s.plot}}, {s.engine.model, s.text});
    const std::vector<example::method> methods = methods_of(s);
    for (const example::method& m : methods) {
        if (m.choice) {
            example::require_possible(m.choice->made(true));
        }
    }
    verified_attention attention({}, 1, 1);
    example::engine_options options = s.engine;
    if (options.context == 0) {
        options.context = static_cast<std::uint32_t>(s.prompt + s.tokens);
    }
    example::engine engine(options, attention);
    if (options.context > engine.trained_context()) {
        fmt::print(stderr, "note: the model was trained for {} tokens, the context has {}\n", engine.trained_context(),
                   options.context);
    }
    // The last token of the text is compared, not read.
    if (s.prompt + s.tokens - 1 > engine.context_tokens()) {
        throw std::runtime_error(fmt::format("{} tokens of prompt and {} after it are more than the context of {}",
                                             s.prompt, s.tokens, engine.context_tokens()));
    }
    std::vector<llama_token> text = engine.tokens_of(example::read_text(s.text), false);
    if (text.size() < s.skip + s.prompt + s.tokens) {
        throw std::runtime_error(
            fmt::format("the text has {} tokens; {} to skip, {} of prompt and {} after it were asked for", text.size(),
                        s.skip, s.prompt, s.tokens));
    }
    text.erase(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(s.skip));
    attention = verified_attention({}, engine.context_tokens(), 1);
    std::size_t all_tokens = 0;
    for (const std::size_t reread : rereads) {
        all_tokens += s.prompt + methods.size() * (s.tokens + reread);
    }
    std::vector<example::reading> readings;
    {
        example::progress progress("tokens", all_tokens);
        std::size_t done = 0;
        for (const std::size_t reread : rereads) {
            readings.push_back({reread, measure(engine, attention, s, reread, text, methods, progress, done)});
        }
    }
    std::size_t verified = 0;
    for (std::size_t l = 0; l < attention.layers(); ++l) {
        verified += attention.dense_because(l).empty() ? 1u : 0u;
    }
    fmt::print("{} of {} layers answered by verkv{}{}.\n{}", verified, attention.layers(), verified > 0 ? ": " : "",
               attention.shapes(), attention.dense_layers());
    for (const example::reading& r : readings) {
        fmt::print("\n{} tokens of prompt, {} of them read through verkv, then {} teacher-forced.\n", s.prompt,
                   r.reread, s.tokens);
        example::print_table(r.results);
    }
    if (!s.csv.empty()) {
        example::write_csv(s.csv, readings);
    }
    if (!s.plot.empty()) {
        const std::string title = fmt::format("{} + {} tokens, {} layers", s.prompt, s.tokens, verified);
        example::write_svg(example::figure_of(readings, title), s.plot);
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    settings s;
    CLI::App app("What a compressed cache does to a model: each method against dense attention, teacher-forced.");
    example::add_engine_options(app, s.engine);
    example::add_verification_options(app, s.common, false);
    app.add_option("--text", s.text, "file with a long text")->required()->check(CLI::ExistingFile);
    example::add_count(app, "--skip", s.skip, 0, std::size_t{1} << 30, "first tokens of the text that are left out");
    example::add_count(app, "--prompt", s.prompt, 2, std::size_t{1} << 30, "tokens of the text that are read first");
    example::add_count(app, "--tokens", s.tokens, 1, std::size_t{1} << 20, "tokens behind them that are compared");
    example::add_numbers(app, "--reread", s.reread, {0, 1 << 30, true, true},
                         "last tokens of the prompt that are read through verkv too, one by one; they stay resident; a "
                         "table for each number");
    example::add_numbers(app, "--kept", s.kept, {0, 1, false, true}, "shares of the tokens that stay resident");
    app.add_option("--only", s.only, "only methods whose name has a match of this regular expression");
    example::add_path(app, "--csv", s.csv, "file for the table as CSV");
    example::add_path(app, "--plot", s.plot, "file for KL against rows read, SVG");
    CLI11_PARSE(app, argc, argv);
    return example::exit_code_of("verkv_evaluate", [&] { return run(s); });
}
