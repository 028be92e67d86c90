// What verkv_evaluate finds out of a method, as a table, CSV and plot.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/plot.hpp"
#include "common/table.hpp"
#include "verified_attention.hpp"

namespace example {

/// What a method did to the model.
struct result {
    std::string name;
    std::string kind;    ///< plan, target and epsilon: what a plot gives one colour
    std::string sketch;  ///< what it gives one line
    double kept = 1;
    std::vector<double> divergences;
    std::size_t agreed = 0;
    double log_loss = 0;  ///< summed
    layer_totals totals;
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
    [[nodiscard]] double of_query_heads(double sum) const {
        return totals.query_heads == 0 ? 0 : sum / static_cast<double>(totals.query_heads);
    }
    [[nodiscard]] double of_kv_heads(double sum) const {
        return totals.kv_heads == 0 ? 0 : sum / static_cast<double>(totals.kv_heads);
    }
};

/// All methods, with so many of the prompt's last tokens read through verkv too.
struct reading {
    std::size_t reread = 0;
    std::vector<result> results;
};

inline void print_table(const std::vector<result>& results) {
    table table({{"method", alignment::left},
                 {"kept", alignment::right},
                 {"KL mean", alignment::right},
                 {"KL 99 %", alignment::right},
                 {"top token\nagrees %", alignment::right},
                 {"perplexity", alignment::right},
                 {"resident\n%", alignment::right},
                 {"rows\nread %", alignment::right},
                 {"a head's\nrows %", alignment::right},
                 {"keys\nscored %", alignment::right},
                 {"sketch\n%", alignment::right},
                 {"output error\n%", alignment::right},
                 {"ms a\ntoken", alignment::right}});
    double kept = 1;
    for (const result& r : results) {
        if (r.kept != kept) {
            table.add_rule();
            kept = r.kept;
        }
        const bool dense = r.totals.kv_heads == 0;
        const auto percent = [&](double share) { return dense ? "" : fmt::format("{:.2f}", 100 * share); };
        table.add({r.name, dense ? "" : fmt::format("1/{:.4g}", 1 / r.kept), fmt::format("{:.4f}", r.mean_divergence()),
                   fmt::format("{:.4f}", r.quantile(0.99)), fmt::format("{:.1f}", 100 * r.share_agreed()),
                   fmt::format("{:.2f}", r.perplexity()), dense ? "100" : percent(r.of_kv_heads(r.totals.resident)),
                   percent(r.of_kv_heads(r.totals.fetched)), percent(r.of_query_heads(r.totals.planned)),
                   percent(r.of_kv_heads(r.totals.keys_scored)), percent(r.of_kv_heads(r.totals.sketch)),
                   percent(r.of_query_heads(r.totals.error)),
                   fmt::format("{:.0f}", 1e3 * r.seconds / static_cast<double>(r.divergences.size()))});
    }
    fmt::print("{}", table.text());
    fmt::print(
        "KL: of the next token's distribution from dense, nats. Resident, rows read, keys scored: of the tokens, means "
        "over\nlayers, KV heads and steps, of the layers that verkv answers. A head's rows: what a query head's own "
        "plan uses beside\nthe resident ones. Sketch: its bytes, of those of all rows. Output error: of a query head "
        "against the engine's own\nattention at the same step. ms: the engine and verkv, one token at a time.\n");
}

inline void write_csv(const std::string& file, const std::vector<reading>& readings) {
    std::ofstream out(file);
    out << "reread,method,kept,kl_mean,kl_p99,top_agrees,perplexity,resident,rows_read,rows_planned,keys_scored,sketch,"
           "output_error,seconds_per_token\n";
    for (const reading& all : readings) {
        for (const result& r : all.results) {
            out << fmt::format("{},\"{}\",{},{},{},{},{},{},{},{},{},{},{},{}\n", all.reread, r.name, r.kept,
                               r.mean_divergence(), r.quantile(0.99), r.share_agreed(), r.perplexity(),
                               r.of_kv_heads(r.totals.resident), r.of_kv_heads(r.totals.fetched),
                               r.of_query_heads(r.totals.planned), r.of_kv_heads(r.totals.keys_scored),
                               r.of_kv_heads(r.totals.sketch), r.of_query_heads(r.totals.error),
                               r.seconds / static_cast<double>(r.divergences.size()));
        }
    }
    if (!out.flush()) {
        throw std::runtime_error("cannot write " + file);
    }
}

/// KL against rows read, a line for each method through its compressions; all rows resident is the floor.
inline plot_panel panel_of(const reading& read) {
    const std::vector<result>& results = read.results;
    plot_panel panel;
    panel.title =
        read.reread == 0 ? "Prompt read densely" : fmt::format("Its last {} tokens through verkv", read.reread);
    // Where points make no lines, no dashes tell a method from what it is with exact weights.
    const bool lines = std::any_of(results.begin(), results.end(),
                                   [&](const result& r) { return r.kept != 1 && r.kept != results.back().kept; });
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
            if (lines) {
                at->colour_key = r.kind;
                at->dash_key = r.sketch;
            }
        }
        at->x.push_back(r.of_kv_heads(r.totals.fetched));
        at->y.push_back(r.mean_divergence());
    }
    return panel;
}

/// A panel for each reading, with the same axes.
inline plot_figure figure_of(const std::vector<reading>& readings, const std::string& title) {
    plot_figure figure;
    figure.title = title;
    const auto include = [](plot_axis& axis, double v) {
        if (v > 0) {
            axis.low = (std::min)(axis.low.value_or(v), v / 1.5);
            axis.high = (std::max)(axis.high.value_or(v), v * 1.5);
        }
    };
    plot_axis x, y;
    for (const reading& read : readings) {
        figure.panels.push_back(panel_of(read));
        for (const result& r : read.results) {
            include(x, r.of_kv_heads(r.totals.fetched));
            include(y, r.mean_divergence());
        }
    }
    for (plot_panel& panel : figure.panels) {
        panel.x.low = x.low, panel.x.high = x.high;
        panel.y.low = y.low, panel.y.high = y.high;
    }
    return figure;
}

}  // namespace example
