// The main job: what verified attention reads, and how often it is wrong, on a real attention trace.
#include <fmt/format.h>

#include <fstream>
#include <optional>

#include "common/exit_code.hpp"
#include "common/plot.hpp"
#include "common/registry.hpp"
#include "common/replay.hpp"
#include "common/table.hpp"
#include "common/trace.hpp"
#include "report.hpp"
#include "requirements.hpp"
#include "settings.hpp"

namespace {

/// Calls use(sketch, target) with those of a combination.
template <class T, class Use>
auto with_policies(const example::trace<T>& t, const settings& s, const combination& c, Use&& use) {
    const auto options = example::sketch_options_of(t, s.bits, s.pairs);
    return example::with_sketch<T>(c.sketch, options, [&](const auto& sketch) {
        return c.target == "output" ? use(sketch, verkv::output{}) : use(sketch, verkv::denominator{});
    });
}

template <class T>
run_results run(const example::trace<T>& t, const settings& s) {
    using namespace verkv;
    run_results found;
    found.choices = combinations(s);
    // What cannot be done is said before the long part.
    require_budget(t, s);
    for (const combination& c : found.choices) {
        try {
            with_policies(t, s, c, [&](const auto& sketch, const auto& target) { try_out(t, s, sketch, target, c); });
        } catch (const error& e) {
            throw std::invalid_argument(fmt::format("{}: {}", flags_of(c, s), e.what()));
        }
    }
    const auto steps = t.spread_steps(s.steps == 0 ? t.decode_steps() : s.steps);
    found.steps = steps.size();
    std::optional<thread_pool> pool;
    if (s.threads != 1) {
        pool.emplace(s.threads);
    }
    executor* threads = pool ? &*pool : nullptr;
    example::progress progress("verify_decode", found.choices.size() + 2);
    progress.update(0, s.scorer);
    const auto importance = importance_of(t, s.scorer);
    progress.update(1, "dense attention");
    const example::truth dense = dense_truth(t, steps);
    std::vector<std::vector<result>> results;
    for (const combination& c : found.choices) {
        progress.update(results.size() + 2, flags_of(c, s));
        results.push_back(with_policies(t, s, c, [&](const auto& sketch, const auto& target) {
            return replay(t, s, dense, steps, importance, sketch, target, c, threads);
        }));
    }
    progress.finish();
    for (std::size_t e = 0; e < s.epsilon.size(); ++e) {
        for (const auto& of_choice : results) {
            found.rows.push_back(of_choice[e]);
        }
    }
    return found;
}

void note(const std::string& text) {
    fmt::print(stderr, "note: {}\n", text);
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app(
        "Verified attention on a recorded trace: compresses its prompt, replays its decode steps, and shows what the "
        "certificate buys.");
    settings s;
    add_options(app, s);
    CLI11_PARSE(app, argc, argv);
    s.given = example::given_options(app);
    std::sort(s.epsilon.begin(), s.epsilon.end());
    return example::exit_code_of("verify_decode", [&] {
        require_outputs(s);
        for (const std::string& line : unused_flags(s, combinations(s))) {
            note(line);
        }
        const example::any_trace loaded = example::load_trace(s.trace);
        const example::trace_info& t = example::info(loaded);
        if (s.steps > t.decode_steps()) {
            note(fmt::format("--steps {}: the trace has {} decode steps; all are replayed", s.steps, t.decode_steps()));
        }
        const run_results found = std::visit([&](const auto& typed) { return run(typed, s); }, loaded);
        if (!found.rows.empty() && found.rows.front().resident_share == 1) {
            note("every token of the prompt is resident (--kept, --sink, --local): nothing is sampled or fetched");
        }
        print_results(t, s, found);
        if (!s.json.empty()) {
            std::ofstream file(s.json);
            // Names of files may be of any bytes.
            file << as_json(t, s, found).dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
            if (!file.flush()) {
                throw example::file_error(s.json, "cannot be written");
            }
        }
        if (!s.plot.empty()) {
            example::write_svg(figure_of(t, s, found), s.plot);
        }
        return 0;
    });
}
