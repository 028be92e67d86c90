// Everything side by side on a real attention trace: scorers, sketches and plans of verkv, and the field's estimators.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/dense.hpp"
#include "common/exit_code.hpp"
#include "common/output_file.hpp"
#include "common/plot.hpp"
#include "common/table.hpp"
#include "common/trace.hpp"
#include "report.hpp"
#include "row.hpp"
#include "run_baselines.hpp"
#include "run_caches.hpp"
#include "settings.hpp"
#include "verkv/cpu/thread_pool.hpp"

namespace {

using compare::row;
using compare::settings;

std::vector<std::string> plot_files(const settings& s) {
    return {s.plot + "-error.svg", s.plot + "-scorers.svg", s.plot + "-sketches.svg"};
}

/// Files that would cost a result, or the trace.
void require_outputs(const settings& s) {
    std::vector<example::output_file> files{{"--csv", s.csv}, {"--json", s.json}};
    if (!s.plot.empty()) {
        for (const std::string& file : plot_files(s)) {
            files.push_back({"--plot", file});
        }
    }
    example::require_outputs(files, example::files_of_trace(s.trace));
}

template <class T>
std::vector<row> run(const example::trace<T>& t, const settings& s) {
    const auto steps = t.spread_steps(s.steps);
    const auto choices = compare::cache_choices(s);
    for (const compare::cache_choice& c : choices) {  // what cannot be had is said at once
        example::with_sketch<T>(c.choice.sketch, example::sketch_options_of(t, c.bits, c.pairs),
                                [](const auto&) { return 0; });
        (void)example::scorer_of(t, c.scorer);
    }
    const bool with_baselines = std::find(s.parts.begin(), s.parts.end(), "baselines") != s.parts.end();
    std::optional<verkv::thread_pool> pool;
    if (s.threads != 1) {
        pool.emplace(s.threads);
    }
    example::progress progress("compare", choices.size() + 1 + (with_baselines ? s.baselines.size() : 0));
    std::size_t done = 0;
    progress.update(done, "dense attention");
    const example::truth dense = example::dense_truth(t, steps);
    const example::attention_shares exact = example::exact_shares(t, steps, dense);
    std::vector<row> rows;
    std::map<std::string, std::vector<std::vector<float>>> importance;
    for (const compare::cache_choice& c : choices) {
        progress.update(++done, fmt::format("{}, {}, {}", c.scorer, c.choice.sketch, c.choice.plan));
        auto& scores = importance[c.scorer];
        if (scores.empty()) {
            scores = example::importance_of(t, c.scorer);
        }
        for (row& r : compare::run_cache(t, s, dense, steps, exact, scores, c, pool ? &*pool : nullptr)) {
            rows.push_back(std::move(r));
        }
    }
    if (with_baselines) {
        const auto ground = compare::ground_of(t, s, steps, dense, exact);
        const auto options = example::sketch_options_of(t, s.bits.front(), s.pairs.front());
        for (row& r : compare::run_baselines(ground, s, options,
                                             [&](const std::string& name) { progress.update(++done, name); })) {
            rows.push_back(std::move(r));
        }
    }
    progress.finish();
    return rows;
}

void write(const std::string& file, const std::string& text) {
    std::ofstream out(file, std::ios::binary | std::ios::trunc);
    out << text;
    if (!out.flush()) {
        throw example::file_error(file, "cannot be written");
    }
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app(
        "Compares, on a recorded trace, what the parts of verkv and the field's estimators read, and how far they are "
        "off.");
    settings s;
    compare::add_options(app, s);
    CLI11_PARSE(app, argc, argv);
    std::sort(s.epsilon.begin(), s.epsilon.end());
    return example::exit_code_of("compare", [&] {
        require_outputs(s);
        // As float16, whatever the folder has: what caches store, and half of what there would be to compile.
        const auto t = example::load_trace_as<verkv::half>(s.trace);
        const std::vector<row> rows = run(t, s);
        compare::print_results(t, s, rows);
        if (!s.csv.empty()) {
            write(s.csv, compare::as_csv(rows));
        }
        if (!s.json.empty()) {
            write(s.json, compare::as_json(rows).dump(1) + "\n");
        }
        if (!s.plot.empty()) {
            const auto files = plot_files(s);
            example::write_svg(compare::error_figure(t, s, rows), files[0]);
            example::write_svg(compare::scorer_figure(t, s, rows), files[1]);
            example::write_svg(compare::sketch_figure(t, s, rows), files[2]);
        }
        return 0;
    });
}
