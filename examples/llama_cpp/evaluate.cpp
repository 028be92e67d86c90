// What a compressed cache does to a real model: teacher-forced over a long text, each method against dense attention.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "common/plot.hpp"
#include "common/table.hpp"
#include "engine.hpp"
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
    std::size_t reread = 0;
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
        sum += std::exp(a) * (a - static_cast<double>(q[i]));
    }
    return sum > 0 ? sum : 0;
}

struct result {
    std::string name;
    std::string kind;    ///< plan, target and epsilon: what a plot gives one colour
    std::string sketch;  ///< what it gives one line
    double kept = 1;
    std::vector<double> divergences;
    std::size_t agreed = 0;
    double log_loss = 0;  ///< summed
    example::layer_totals totals;
    double seconds = 0;

    [[nodiscard]] double mean_divergence() const {
        return std::accumulate(divergences.begin(), divergences.end(), 0.0) / static_cast<double>(divergences.size());
    }
    /// The smallest value that at least this share is not above.
    [[nodiscard]] double quantile(double share) const {
        std::vector<double> sorted = divergences;
        std::sort(sorted.begin(), sorted.end());
        const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(sorted.size())));
        return sorted[std::clamp<std::size_t>(rank, 1, sorted.size()) - 1];
    }
    [[nodiscard]] double share_agreed() const {
        return static_cast<double>(agreed) / static_cast<double>(divergences.size());
    }
    [[nodiscard]] double perplexity() const { return std::exp(log_loss / static_cast<double>(divergences.size())); }
    [[nodiscard]] double of_kv_heads(double sum) const {
        return totals.kv_heads == 0 ? 0 : sum / static_cast<double>(totals.kv_heads);
    }
};

void print_table(const std::vector<result>& results) {
    using example::alignment;
    example::table table({{"method", alignment::left},
                          {"kept", alignment::right},
                          {"KL mean", alignment::right},
                          {"KL 99 %", alignment::right},
                          {"top token\nagrees %", alignment::right},
                          {"perplexity", alignment::right},
                          {"resident\n%", alignment::right},
                          {"rows\nread %", alignment::right},
                          {"keys\nscored %", alignment::right},
                          {"output error\n%", alignment::right},
                          {"ms a\ntoken", alignment::right}});
    double kept = 1;
    for (const result& r : results) {
        if (r.kept != kept) {
            table.add_rule();
            kept = r.kept;
        }
        const bool dense = r.totals.kv_heads == 0;
        table.add({r.name, dense ? "" : fmt::format("1/{:.4g}", 1 / r.kept), fmt::format("{:.4f}", r.mean_divergence()),
                   fmt::format("{:.4f}", r.quantile(0.99)), fmt::format("{:.1f}", 100 * r.share_agreed()),
                   fmt::format("{:.2f}", r.perplexity()),
                   dense ? "100" : fmt::format("{:.2f}", 100 * r.of_kv_heads(r.totals.resident)),
                   dense ? "" : fmt::format("{:.2f}", 100 * r.of_kv_heads(r.totals.fetched)),
                   dense ? "" : fmt::format("{:.2f}", 100 * r.of_kv_heads(r.totals.keys_scored)),
                   dense ? "" : fmt::format("{:.2f}", 100 * r.totals.error / static_cast<double>(r.totals.query_heads)),
                   fmt::format("{:.0f}", 1e3 * r.seconds / static_cast<double>(r.divergences.size()))});
    }
    fmt::print("{}", table.text());
    fmt::print(
        "KL: of the next token's distribution from dense, nats. Resident, rows read, keys scored: of the tokens, means "
        "over\nlayers, KV heads and steps, of the layers that verkv answers. Output error: of a query head against the "
        "engine's own\nattention at the same step. ms: the engine and verkv, one token at a time.\n");
}

void write_csv(const std::string& file, const std::vector<result>& results) {
    std::ofstream out(file);
    out << "method,kept,kl_mean,kl_p99,top_agrees,perplexity,resident,rows_read,keys_scored,output_error,seconds_per_"
           "token\n";
    for (const result& r : results) {
        out << fmt::format("\"{}\",{},{},{},{},{},{},{},{},{},{}\n", r.name, r.kept, r.mean_divergence(),
                           r.quantile(0.99), r.share_agreed(), r.perplexity(), r.of_kv_heads(r.totals.resident),
                           r.of_kv_heads(r.totals.fetched), r.of_kv_heads(r.totals.keys_scored),
                           r.totals.query_heads == 0 ? 0 : r.totals.error / static_cast<double>(r.totals.query_heads),
                           r.seconds / static_cast<double>(r.divergences.size()));
    }
    if (!out.flush()) {
        throw std::runtime_error("cannot write " + file);
    }
}

/// KL against rows read, a line for each method through its compressions; all rows resident is the floor.
void write_plot(const std::string& file, const std::vector<result>& results, const std::string& title) {
    example::plot_panel panel;
    panel.title = title;
    panel.x.title = "rows read for a KV head and step, % of the context";
    panel.x.logarithmic = panel.x.percent = true;
    panel.y.title = "mean KL of the next token from dense";
    panel.y.logarithmic = true;
    for (const result& r : results) {
        if (r.totals.kv_heads == 0) {
            continue;
        }
        if (r.kept == 1) {
            panel.references.push_back({r.mean_divergence(), r.name});
            continue;
        }
        auto at =
            std::find_if(panel.series.begin(), panel.series.end(), [&](const auto& s) { return s.name == r.name; });
        if (at == panel.series.end()) {
            at = panel.series.emplace(panel.series.end());
            at->name = r.name;
            at->colour_key = r.kind;
            at->dash_key = r.sketch;
        }
        at->x.push_back(r.of_kv_heads(r.totals.fetched));
        at->y.push_back(r.mean_divergence());
    }
    example::plot_figure figure;
    figure.panels.push_back(std::move(panel));
    example::write_svg(figure, file);
}

int run(const settings& s) {
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
    if (s.reread + 2 > s.prompt) {
        throw std::runtime_error(
            fmt::format("of {} tokens of prompt, {} cannot be read through verkv", s.prompt, s.reread));
    }
    const bool halves = engine.rope_by_halves();
    attention = verified_attention(s.common.made(halves), engine.context_tokens(), 1);
    // Logits at position p tell of token p + 1: the first to be compared stand at prompt - 1.
    const std::size_t first = s.prompt - 1;
    const std::size_t start = first - s.reread;
    attention.expect_prompt(start);

    std::vector<example::method> methods{{"dense", std::nullopt}};
    std::vector<result> results;
    // How far apart two exact ways to compute attention are: what a method cannot be told from.
    example::verification_choice all = s.common;
    all.plan = "never";
    all.sketch = "exact";
    all.kept = 1;
    methods.push_back({"all rows resident", all});
    for (const double kept : s.kept) {
        example::verification_choice c = s.common;
        c.kept = kept;
        for (example::method& m : example::all_methods(c)) {
            if (s.only.empty() || m.name.find(s.only) != std::string::npos) {
                methods.push_back(std::move(m));
            }
        }
    }
    if (methods.size() == 2) {
        throw std::runtime_error("no method has \"" + s.only + "\" in its name");
    }
    example::progress progress("tokens", methods.size() * (s.tokens + s.reread) + start);
    std::size_t done = 0;
    for (; done < start; done += options.batch) {
        progress.update(done, "prompt");
        engine.read(verified_attention::mode::dense, 0, text, done, (std::min)(done + options.batch, start));
    }
    done = start;
    std::vector<std::vector<float>> dense(s.tokens);
    std::vector<float> own;
    for (const example::method& m : methods) {
        auto mode = verified_attention::mode::off;
        result r;
        r.name = m.name;
        if (m.choice) {
            mode = verified_attention::mode::verified;
            r.kept = m.choice->kept;
            r.kind = fmt::format("{} {} {}", m.choice->plan, m.choice->target, m.choice->epsilon);
            r.sketch = m.choice->sketch;
        }
        engine.truncate(0, start);
        attention.restart(m.choice ? m.choice->made(halves) : example::verification{});
        const auto began = std::chrono::steady_clock::now();
        engine.read(mode, 0, text, start, first);
        for (std::size_t i = 0; i < s.tokens; ++i) {
            progress.update(done + i, m.name);
            engine.read(mode, 0, text, first + i, first + i + 1);
            std::vector<float>& log_p = m.choice ? own : dense[i];
            log_softmax(engine.logits(), log_p);
            r.divergences.push_back(m.choice ? divergence(dense[i], own) : 0);
            r.agreed += example::most_likely(log_p) == example::most_likely(dense[i]) ? 1u : 0u;
            r.log_loss -= static_cast<double>(log_p[static_cast<std::size_t>(text[first + i + 1])]);
        }
        r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        done += s.tokens + s.reread;
        for (std::size_t l = 0; l < attention.layers(); ++l) {
            if (attention.dense_because(l).empty()) {
                r.totals += attention.totals(l);
            }
        }
        results.push_back(std::move(r));
    }
    progress.finish();
    std::size_t verified = 0;
    for (std::size_t l = 0; l < attention.layers(); ++l) {
        verified += attention.dense_because(l).empty() ? 1u : 0u;
    }
    fmt::print(
        "{} tokens of prompt, {} of them read through verkv, then {} teacher-forced; {} of {} layers answered by "
        "verkv{}{}.\n{}\n",
        s.prompt, s.reread, s.tokens, verified, attention.layers(), verified > 0 ? ": " : "", attention.shapes(),
        attention.dense_layers());
    print_table(results);
    if (!s.csv.empty()) {
        write_csv(s.csv, results);
    }
    if (!s.plot.empty()) {
        write_plot(s.plot, results, fmt::format("{} + {} tokens, {} layers", s.prompt, s.tokens, verified));
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
    example::add_count(app, "--reread", s.reread, 0, std::size_t{1} << 30,
                       "last tokens of the prompt that are read through verkv too, one by one; they stay resident");
    example::add_numbers(app, "--kept", s.kept, {0, 1, false, true}, "shares of the tokens that stay resident");
    app.add_option("--only", s.only, "only methods whose name has this in it");
    app.add_option("--csv", s.csv, "file for the table as CSV");
    app.add_option("--plot", s.plot, "file for KL against rows read, SVG");
    CLI11_PARSE(app, argc, argv);
    try {
        return run(s);
    } catch (const std::exception& e) {
        fmt::print(stderr, "verkv_evaluate: {}\n", e.what());
        return 1;
    }
}
