// What a run shows: tables, JSON, a plot.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "combinations.hpp"
#include "common/combination.hpp"
#include "common/plot.hpp"
#include "common/table.hpp"
#include "common/trace.hpp"
#include "settings.hpp"

using result = example::replay_result;

/// Everything that a run has found.
struct run_results {
    std::vector<combination> choices;
    std::vector<result> rows;  ///< by epsilon, so that what is compared stands together
    std::size_t steps = 0;
};

/// The certificate as far as it is known: by the check where there was one, by the plan elsewhere.
inline double certificate_of(const result& r) {
    return r.choice.checked() ? r.mean_certificate_observed : r.mean_certificate;
}

/// Whether what is certified fails more often than promised.
inline bool breaks_promise(const result& r, double delta) {
    return r.choice.certifies() && (r.choice.target == "output" ? r.failures_output : r.failures_denominator) > delta;
}

/// A table with what tells the rows apart in its first columns, and a rule between epsilons.
template <class Cells>
void print_table(const std::vector<example::column>& columns, const run_results& found, Cells&& cells) {
    using example::alignment;
    const labels names(found.choices);
    std::vector<example::column> all{
        {"epsilon"}, {"sketch", alignment::left}, {"plan", alignment::left}, {"certified", alignment::left}};
    all.insert(all.end(), columns.begin(), columns.end());
    example::table table(all);
    const result* before = nullptr;
    for (const result& r : found.rows) {
        if (before != nullptr && before->epsilon != r.epsilon) {
            table.add_rule();
        }
        before = &r;
        std::vector<std::string> row{fmt::format("{}", r.epsilon), names.sketch(r.choice), names.plan(r.choice),
                                     labels::certified(r.choice)};
        for (std::string& cell : cells(r)) {
            row.push_back(std::move(cell));
        }
        table.add(std::move(row));
    }
    table.print();
}

/// What the columns of print_results() hold.
inline void print_legend(const settings& s, const run_results& found) {
    std::string sketches;
    std::set<std::string> plans;
    for (const result& r : found.rows) {
        plans.insert(r.choice.plan);
        if (sketches.find(r.choice.sketch + " ") == std::string::npos) {
            sketches +=
                fmt::format("{}{} {:.2f} %", sketches.empty() ? "" : ", ", r.choice.sketch, 100 * r.sketch_bytes_share);
        }
    }
    const std::size_t decisions = found.rows.empty() ? 0 : found.rows.front().decisions;
    const auto line = [](const char* column, const std::string& text) { fmt::print("{:<11} {}\n", column, text); };
    fmt::print("\n");
    line("epsilon", fmt::format("relative error to certify; delta = {} of the decisions may exceed it", s.delta));
    line("sketch",
         fmt::format("estimates the weights (exact: from all keys); its share of the KV cache: {}", sketches));
    line("plan", "chooses the rows to fetch");
    line("certified",
         fmt::format("what error is meant: that of D, the softmax denominator, or of the attention output{}",
                     plans.contains("never") ? "; -: none is certified" : ""));
    line("fetch %", fmt::format("decisions that fetch rows; a line has {}: query heads x steps x samples", decisions));
    line(
        "rows %",
        "rows fetched, of the context without the resident ones: mean of query heads; of KV heads (a union of theirs)");
    line("keys %", "keys read to score a shortlist exactly, of the context, mean of KV heads");
    line("rounds",
         "fetches that the check from the sample added, mean of KV heads; - where nothing is checked: proven as");
    line("", "it stands, a plan that takes no check, or --check none");
    line("fail %", "decisions whose true error exceeds epsilon: that of D, and that of the output;");
    line("", fmt::format("! marks what is certified, where more than delta = {} of the decisions fail", s.delta));
    line("error %", "true relative error of the output, mean");
    line("certificate", "relative error certified, mean: as the check saw it where there is one, else as planned");
}

inline void print_results(const example::trace_info& t, const settings& s, const run_results& found) {
    const double resident = found.rows.empty() ? 0 : found.rows.front().resident_share;
    const labels names(found.choices);
    fmt::print("{}: layer {}, {} prompt tokens, {} query heads on {} KV heads; {} of {} decode steps, {} sample{}\n",
               t.name, t.layer, t.prefill_tokens, t.shape.query_heads, t.shape.kv_heads, found.steps, t.decode_steps(),
               s.redraws, s.redraws == 1 ? "" : "s");
    fmt::print("resident: {} of the prompt (asked for: {}, with {} first and {} last tokens, others by {}){}\n\n",
               example::percent_text(resident, 2), example::percent_text(s.kept, 2), s.sink, s.local, s.scorer,
               names.shared().empty() ? "" : "; " + names.shared());
    const auto share = [](double x, int digits) { return fmt::format("{:.{}f}", 100 * x, digits); };
    print_table({{"fetch\n%"},
                 {"rows %\nquery"},
                 {"\nKV"},
                 {"keys\n%"},
                 {"rounds"},
                 {"fail %\nD"},
                 {"\noutput"},
                 {"error\n%"},
                 {"certi-\nficate"}},
                found, [&](const result& r) {
                    const bool broken = breaks_promise(r, s.delta);
                    const auto fails = [&](double x, const char* what) {
                        return share(x, 2) + (broken && r.choice.target == what ? "!" : " ");
                    };
                    return std::vector<std::string>{share(r.fetching_decisions, 1),
                                                    share(r.rows_read_per_query_head, 2),
                                                    share(r.rows_read_per_kv_head, 2),
                                                    share(r.shortlist_keys_read, 2),
                                                    r.choice.checked() ? fmt::format("{:.2f}", r.rounds) : "-",
                                                    fails(r.failures_denominator, "denominator"),
                                                    fails(r.failures_output, "output"),
                                                    share(r.mean_output_error, 2),
                                                    fmt::format("{:.3f}", certificate_of(r))};
                });
    print_legend(s, found);
    if (s.times) {
        const auto ms = [](double x) { return fmt::format("{:.3f}", x); };
        fmt::print("\n");
        print_table({{"ms:\nsketch"}, {"\ndecide"}, {"\nfetch"}, {"\nattend"}, {"\ndense"}}, found,
                    [&](const result& r) {
                        return std::vector<std::string>{ms(r.sketch_ms), ms(r.decide_ms), ms(r.fetch_ms),
                                                        ms(r.attend_ms), ms(r.dense_ms)};
                    });
        fmt::print(
            "\nms: of a KV head and step, on one thread, median; the sum of the first four is not a median. "
            "dense:\nattention over all rows, without any of this.\n");
    }
}

inline nlohmann::ordered_json as_json(const example::trace_info& t, const settings& s, const run_results& found) {
    nlohmann::ordered_json out;
    const auto given = [](auto x) { return x == 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(x); };
    out["settings"] = {
        {"trace", s.trace},         {"layer", t.layer},         {"kept", s.kept},          {"sink", s.sink},
        {"local", s.local},         {"epsilon", s.epsilon},     {"delta", s.delta},        {"scorer", s.scorer},
        {"sketch", s.sketch},       {"bits", given(s.bits)},    {"pairs", given(s.pairs)}, {"shrinkage", s.shrinkage},
        {"plan", s.plan},           {"tail", s.tail},           {"target", s.target},      {"group", s.group},
        {"check", s.check},         {"max_rounds", s.rounds},   {"uniforms", s.uniforms},  {"bounds", s.bounds},
        {"exact_for", s.exact_for}, {"shortlist", s.shortlist}, {"steps", found.steps},    {"redraws", s.redraws},
        {"seed", s.seed},           {"threads", s.threads}};
    out["rows"] = nlohmann::ordered_json::array();
    for (const result& r : found.rows) {
        out["rows"].push_back({{"epsilon", r.epsilon},
                               {"delta", s.delta},
                               {"sketch", r.choice.sketch},
                               {"plan", r.choice.plan},
                               {"tail", r.choice.tail},
                               {"target", r.choice.target},
                               {"group", r.choice.group},
                               {"check", r.choice.check},
                               {"uniforms", r.choice.uniforms},
                               {"bounds", r.choice.bounds},
                               {"exact_for", r.choice.exact_for},
                               {"resident_share", r.resident_share},
                               {"rounds", r.rounds},
                               {"decisions", r.decisions},
                               {"fetching_decisions", r.fetching_decisions},
                               {"rows_read_per_query_head", r.rows_read_per_query_head},
                               {"rows_read_per_kv_head", r.rows_read_per_kv_head},
                               {"rows_copied_per_kv_head", r.rows_copied_per_kv_head},
                               {"shortlist_keys_read", r.shortlist_keys_read},
                               {"failures_denominator", r.failures_denominator},
                               {"failures_output", r.failures_output},
                               {"mean_denominator_error", r.mean_denominator_error},
                               {"mean_output_error", r.mean_output_error},
                               {"mean_certificate", r.mean_certificate},
                               {"mean_certificate_observed", r.mean_certificate_observed},  // null where unchecked
                               {"sketch_bytes_share", r.sketch_bytes_share},
                               {"sketch_ms", r.sketch_ms},
                               {"decide_ms", r.decide_ms},
                               {"fetch_ms", r.fetch_ms},
                               {"attend_ms", r.attend_ms},
                               {"dense_ms", r.dense_ms}});
    }
    return out;
}

/// Rows against epsilon, and how often what is certified is off. Combinations that certify nothing are left out where
/// there are others: they read nothing, and fail so often that nothing else would be seen.
inline example::plot_figure figure_of(const example::trace_info& t, const settings& s, const run_results& found) {
    const labels names(found.choices);
    std::vector<combination> shown = found.choices;
    std::erase_if(shown, [](const combination& c) { return !c.certifies(); });
    if (shown.empty()) {
        shown = found.choices;
    }
    std::set<std::string> kinds, sketches;
    for (const combination& c : shown) {
        kinds.insert(names.kind(c));
        sketches.insert(names.sketch(c));
    }
    const bool by_kind =
        kinds.size() <= example::detail::plot_colours.size() && sketches.size() <= example::detail::plot_dashes.size();

    example::plot_panel read;
    read.title = "Rows fetched for a KV head and step";
    read.x.title = "epsilon";
    read.x.logarithmic = true;
    read.x.ticks = s.epsilon;
    example::plot_panel fails = read;
    read.y.title = "% of the context";
    read.y.logarithmic = true;
    read.y.percent = true;
    fails.title = "What is certified is off by more than epsilon";
    fails.y.title = "% of decisions";
    fails.y.percent = true;
    fails.y.low = 0.0;
    fails.references = {{s.delta, "delta"}};
    for (const combination& c : shown) {
        example::plot_series reads{names.text(c), {}, {}, {}, {}};
        if (by_kind) {  // a colour for the plan, dashes for the sketch
            reads.colour_key = names.kind(c);
            reads.dash_key = names.sketch(c);
        }
        example::plot_series failing = reads;
        for (const result& r : found.rows) {
            if (r.choice == c) {
                reads.x.push_back(r.epsilon);
                reads.y.push_back(r.rows_read_per_kv_head);
                failing.x.push_back(r.epsilon);
                failing.y.push_back(c.target == "output" ? r.failures_output : r.failures_denominator);
            }
        }
        read.series.push_back(reads);
        fails.series.push_back(failing);
    }
    const double resident = found.rows.empty() ? 0 : found.rows.front().resident_share;
    return {fmt::format("{}, {} resident", t.name, example::percent_text(resident, 2)), {read, fails}};
}
