// What a run shows: a table for each part, and three plots.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "common/plot.hpp"
#include "common/table.hpp"
#include "common/trace.hpp"
#include "row.hpp"
#include "settings.hpp"

namespace compare {

inline std::vector<row> rows_of_part(const std::vector<row>& all, const std::string& part) {
    std::vector<row> rows;
    std::copy_if(all.begin(), all.end(), std::back_inserter(rows), [&](const row& r) { return r.part == part; });
    std::stable_sort(rows.begin(), rows.end(), [](const row& a, const row& b) { return a.epsilon < b.epsilon; });
    return rows;
}

/// The table of a part; "-" for what does not apply, "!" where what is claimed fails more often than promised.
inline std::string table_of(const std::vector<row>& rows, double delta) {
    using example::alignment;
    const auto percent = [](double x, int digits) { return example::number_text(100 * x, digits); };
    example::table table({{"epsilon"},
                          {"method", alignment::left},
                          {"scorer", alignment::left},
                          {"kept\n%"},
                          {"weights", alignment::left},
                          {"there\n%"},
                          {"error %\nmean"},
                          {"\np99"},
                          {"rows\n%"},
                          {"keys\n%"},
                          {"beyond\n%"},
                          {"fail %\nD"},
                          {"\noutput"},
                          {"bytes"},
                          {"ms"}});
    const row* before = nullptr;
    for (const row& r : rows) {
        if (before != nullptr && before->epsilon != r.epsilon) {
            table.add_rule();
        }
        before = &r;
        const auto fails = [&](double x, const char* what) {
            return percent(x, 1) + (r.claims == what && x > delta ? "!" : " ");
        };
        table.add({fmt::format("{:g}", r.epsilon), r.method, r.scorer.empty() ? "-" : r.scorer, percent(r.kept, 1),
                   r.weights(), percent(r.attention, 1), percent(r.error_mean, 2), percent(r.error_p99, 1),
                   percent(r.rows, 2), percent(r.keys, 2), percent(r.rows_beyond, 2),
                   fails(r.failures_denominator, "D"), fails(r.failures_output, "output"),
                   example::number_text(r.sketch_bytes, 1), example::number_text(r.milliseconds, 3)});
    }
    return table.text();
}

inline void print_results(const example::trace_info& t, const settings& s, const std::vector<row>& all) {
    fmt::print("{}: layer {}, {} prompt tokens, {} query heads on {} KV heads; {} steps, {} draws; delta = {}\n",
               t.name, t.layer, t.prefill_tokens, t.shape.query_heads, t.shape.kv_heads,
               (std::min)(s.steps, t.decode_steps()), s.redraws, s.delta);
    for (const std::string& part : s.parts) {
        fmt::print("\n{}\n\n{}",
                   part == "scorers"    ? "1. Scorers: who stays, without a fetch and with the default plan"
                   : part == "sketches" ? "2. Sketches and plans"
                                        : "3. The field's estimators; nothing but the windows is in fast memory",
                   table_of(rows_of_part(all, part), s.delta));
    }
    const auto line = [](const char* column, const char* text) { fmt::print("{:<8} {}\n", column, text); };
    fmt::print("\n");
    line("weights", "what stands in for keys that are not read: plans go by it, or tokens are ranked by it");
    line("there", "exact attention of the tokens that are resident (1, 2) or selected (3), mean of query heads");
    line("error", "||o^ - o|| / ||o|| of the outputs");
    line("rows",
         "keys and values read from offloaded rows, of the context, mean of KV heads (a union of their heads')");
    line("keys", "keys read besides: a shortlist's, a pilot's");
    line("beyond", "of rows and keys, those that the resident sample of part 2 would not hold (expected)");
    line("fail", "decisions off by more than epsilon; ! marks what is claimed, where more than delta of them are");
    line("bytes", "of the stand-in, a token and KV head");
    line("ms", "of a KV head and step, one thread, median; part 3 without the time that its ranking takes");
}

/// A logarithmic axis.
inline example::plot_axis axis_of(const char* title, bool percent, std::vector<double> ticks = {}) {
    example::plot_axis axis;
    axis.title = title;
    axis.logarithmic = true;
    axis.percent = percent;
    axis.ticks = std::move(ticks);
    return axis;
}

/// Mean output error against what is read, a line for each method through its epsilons: parts 2 and 3, a panel for
/// exact weights and one for those of the first part's sketch. What needs no weights is in both.
inline example::plot_figure error_figure(const example::trace_info& t, const settings& s, const std::vector<row>& all) {
    example::plot_figure figure{t.name, {}};
    row other;  // than the exact ones
    other.sketch = s.sketch;
    set_sketch_setting(other, s.sketch, s.bits.front(), s.pairs.front());
    std::vector<std::string> names{"exact"};
    if (s.sketch != "exact") {
        names.push_back(other.weights());
    }
    for (const std::string& name : names) {
        example::plot_panel panel;
        panel.title = fmt::format("Error against rows read, weights: {}", name);
        panel.x = axis_of("rows and keys read for a KV head and step, % of the context", true);
        panel.y = axis_of("mean error of the output", true);
        for (const row& r : all) {
            if (r.part == "scorers" || r.method == "never" || !(r.sketch.empty() || r.weights() == name)) {
                continue;
            }
            auto at = std::find_if(panel.series.begin(), panel.series.end(),
                                   [&](const auto& series) { return series.name == r.method; });
            if (at == panel.series.end()) {
                at = panel.series.insert(panel.series.end(), example::plot_series{.name = r.method});
            }
            at->x.push_back(r.rows + r.keys);
            at->y.push_back(r.error_mean);
        }
        figure.panels.push_back(std::move(panel));
    }
    return figure;
}

/// Rows read against epsilon by scorer, a panel for each kept share.
inline example::plot_figure scorer_figure(const example::trace_info& t, const settings& s,
                                          const std::vector<row>& all) {
    example::plot_figure figure{t.name + ", default plan", {}};
    for (const double kept : s.kept_shares) {
        example::plot_panel panel;
        panel.title = fmt::format("{} kept", example::percent_text(kept, 0));
        panel.x = axis_of("epsilon", false, s.epsilon);
        panel.y = axis_of("rows read, % of the context", true);
        for (const std::string& scorer : s.scorers) {
            example::plot_series series{.name = scorer};
            for (const row& r : all) {
                if (r.part == "scorers" && r.scorer == scorer && r.kept == kept && r.method != "never") {
                    series.x.push_back(r.epsilon);
                    series.y.push_back(r.rows);
                }
            }
            panel.series.push_back(std::move(series));
        }
        figure.panels.push_back(std::move(panel));
    }
    return figure;
}

/// Rows read by the default plan of part 2 against a sketch's bytes, a panel for each epsilon. A line joins what one
/// sketch does at different bits; different sketches are points with their names, for nothing lies between them.
inline example::plot_figure sketch_figure(const example::trace_info& t, const settings& s,
                                          const std::vector<row>& all) {
    example::plot_figure figure{t.name + ", default plan", {}};
    for (const double epsilon : s.epsilon) {
        example::plot_panel panel;
        panel.title = fmt::format("epsilon {:g}", epsilon);
        panel.x = axis_of("sketch, bytes a token and KV head", false);
        panel.y = axis_of("rows read, % of the context", true);
        for (const row& r : all) {  // bits ascend as they were asked for
            if (r.part == "sketches" && r.method == "water-filling" && r.epsilon == epsilon) {
                auto at = std::find_if(panel.series.begin(), panel.series.end(),
                                       [&](const auto& series) { return series.name == r.weights_but_bits(); });
                if (at == panel.series.end()) {
                    at = panel.series.insert(panel.series.end(), {.name = r.weights_but_bits(), .named = true});
                }
                at->x.push_back(r.sketch_bytes);
                at->y.push_back(r.rows);
            }
        }
        figure.panels.push_back(std::move(panel));
    }
    return figure;
}

}  // namespace compare
