// Settings, combinations and reports of the example verify_decode; its cache is not run here.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "01_verify_decode/combinations.hpp"
#include "01_verify_decode/report.hpp"
#include "01_verify_decode/requirements.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

namespace {

settings settings_of(const std::vector<std::string>& arguments) {
    settings s;
    CLI::App app("test", "test");
    add_options(app, s);
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
    s.given = example::given_options(app);
    return s;
}

std::vector<std::string> unused(const std::vector<std::string>& arguments) {
    const settings s = settings_of(arguments);
    return unused_flags(s, combinations(s));
}

TEST_CASE("examples: verify_decode names the flags that no combination has a use for") {
    CHECK(unused({}).empty());
    const auto of_bounds = unused({"--bounds", "sketch"});
    REQUIRE(of_bounds.size() == 1);
    CHECK(of_bounds[0].rfind("--bounds sketch has no effect with --sketch exact,rope-pairs: only rotated, ", 0) == 0);
    CHECK(of_bounds[0].ends_with(" bound their error"));
    // What makes each of them useless, and what gives it a use.
    struct example_of {
        std::vector<std::string> flag, useless, useful;
    };
    for (const example_of& e : std::vector<example_of>{
             {{"--tail", "chernoff"}, {"--plan", "never,everything"}, {"--plan", "never,greedy"}},
             {{"--target", "output"}, {"--plan", "never"}, {"--plan", "greedy"}},
             {{"--group", "per-head"}, {"--plan", "greedy,never"}, {"--plan", "water-filling"}},
             {{"--uniforms", "fresh"}, {"--plan", "greedy,never"}, {"--plan", "water-filling"}},
             {{"--bounds", "none,sketch"}, {"--sketch", "exact"}, {"--sketch", "exact,rotated"}},
             {{"--exact-for", "resident"}, {"--sketch", "exact"}, {"--sketch", "per-channel"}},
             {{"--check", "none"}, {"--plan", "greedy"}, {"--plan", "water-filling"}},
             {{"--check", "sample"}, {"--sketch", "exact", "--target", "denominator"}, {"--sketch", "exact"}},
             {{"--rounds", "3"}, {"--check", "none"}, {"--check", "none,sample"}},
             {{"--bits", "3"}, {"--sketch", "exact,quest-pages"}, {"--sketch", "rotated"}},
             {{"--pairs", "1/2"}, {"--sketch", "per-channel"}, {"--sketch", "rope-pairs"}},
             {{"--shortlist", "9"}, {"--sketch", "exact"}, {"--sketch", "quest-pages"}},
             {{"--shrinkage", "none"}, {"--plan", "water-filling"}, {"--plan", "never"}},
         }) {
        const auto with = [&](std::vector<std::string> more) {
            more.insert(more.end(), e.flag.begin(), e.flag.end());
            return unused(more);
        };
        INFO(e.flag[0]);
        const auto lines = with(e.useless);
        REQUIRE(lines.size() == 1);
        CHECK(lines[0].rfind(e.flag[0] + " " + e.flag[1] + " has no effect with --", 0) == 0);
        CHECK(with(e.useful).empty());
    }
    CHECK(unused({"--rounds", "3", "--check", "sample", "--plan", "greedy", "--uniforms", "fresh"}).size() == 3);
}

TEST_CASE("examples: verify_decode counts no combination twice, and names what tells them apart") {
    const settings s = settings_of({"--sketch", "exact,rotated", "--plan", "water-filling,never", "--bounds",
                                    "none,sketch", "--tail", "chernoff", "--group", "per-head"});
    const auto all = combinations(s);
    for (auto c = all.begin(); c != all.end(); ++c) {
        CHECK(std::find(c + 1, all.end(), *c) == all.end());
    }
    const labels names(all);
    CHECK(names.shared() == "chernoff, per head");
    std::vector<std::string> texts;
    for (const combination& c : all) {
        texts.push_back(names.text(c));
    }
    CHECK(texts == std::vector<std::string>{"exact sketch, water-filling for the denominator",
                                            "exact sketch, water-filling for the output", "exact sketch, never",
                                            "rotated sketch, water-filling for the denominator",
                                            "rotated sketch, bounds carried, water-filling for the denominator",
                                            "rotated sketch, water-filling for the output",
                                            "rotated sketch, bounds carried, water-filling for the output",
                                            "rotated sketch, never", "rotated sketch, bounds carried, never"});
    const settings checks = settings_of(
        {"--sketch", "exact,rotated", "--plan", "water-filling", "--check", "sample,none", "--target", "denominator"});
    const auto checked = combinations(checks);
    REQUIRE(checked.size() == 3);
    CHECK(labels(checked).plan(checked[0]) == "water-filling");  // proven: nothing to check
    CHECK(labels(checked).plan(checked[1]) == "water-filling, checked");
    CHECK(labels(checked).plan(checked[2]) == "water-filling");
    CHECK(flags_of(all.back(), s) == "--sketch rotated --plan never --bounds sketch");
    CHECK(labels(combinations(settings_of({}))).shared().empty());
}

TEST_CASE("examples: verify_decode refuses files that would cost a result or the trace") {
    const test_support::temporary_folder folder;
    std::ofstream(folder / "meta.json") << "{}";
    settings s;
    s.trace = folder.path().string();
    s.json = (folder / "a.json").string();
    s.plot = (folder / "a.svg").string();
    require_outputs(s);
    s.plot = (folder / "." / "a.json").string();
    CHECK_THROWS_AS(require_outputs(s), example::file_error);
    s.plot = (folder / "meta.json").string();
    CHECK_THROWS_AS(require_outputs(s), example::file_error);
    CHECK(std::filesystem::exists(folder / "meta.json"));
    s.plot = (folder / "nowhere" / "a.svg").string();
    CHECK_THROWS_AS(require_outputs(s), example::file_error);
}

TEST_CASE("examples: verify_decode says which flags leave no budget") {
    example::trace_info t;
    t.prefill_tokens = 8064;
    const auto problem = [&](const std::vector<std::string>& arguments) -> std::string {
        try {
            require_budget(t, settings_of(arguments));
        } catch (const std::invalid_argument& e) {
            return e.what();
        }
        return "";
    };
    CHECK(problem({}).empty());
    CHECK(problem({"--kept", "1/1000"}) ==
          "--kept 1/1000 of 8064 prompt tokens is 8.064 rows, but --sink 64 and --local 64 take 128 of them and leave "
          "none to sample: raise --kept, or lower --sink and --local");
    CHECK(problem({"--kept", "1/1000", "--sink", "4", "--local", "4"}).empty());
    CHECK(!problem({"--sink", "400", "--local", "104"}).empty());
    CHECK(problem({"--sink", "5000", "--local", "5000"}).empty());  // all of it is resident
    CHECK(problem({"--kept", "1", "--sink", "400", "--local", "400"}).empty());
}

TEST_CASE("examples: verify_decode marks and plots what is certified") {
    const settings s = settings_of({"--epsilon", "0.05", "--sketch", "exact,rope-pairs"});
    run_results found;
    found.choices = combinations(s);
    for (const combination& c : found.choices) {
        result r;
        r.epsilon = 0.05;
        r.choice = c;
        r.failures_denominator = 0.05;
        r.failures_output = 0.5;
        r.mean_certificate = 0.01;
        r.mean_certificate_observed = 0.04;
        found.rows.push_back(r);
        CHECK(breaks_promise(r, s.delta) == (c.plan != "never" && c.target == "output"));
        CHECK(certificate_of(r) == (c.checked() ? 0.04 : 0.01));
    }
    const example::plot_figure figure = figure_of({}, s, found);
    REQUIRE(figure.panels.size() == 2);
    CHECK(figure.panels[0].series.size() == 6);  // of 8: "never" is left out
    for (const example::plot_series& series : figure.panels[1].series) {
        CHECK(series.name.find("never") == std::string::npos);
        CHECK(series.y == std::vector<double>{series.name.find("output") != std::string::npos ? 0.5 : 0.05});
    }
    std::erase_if(found.choices, [](const combination& c) { return c.certifies(); });
    CHECK(figure_of({}, s, found).panels[0].series.size() == 2);
}

}  // namespace
