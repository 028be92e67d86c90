// Arguments, tables and plots of the example programs.
#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/arguments.hpp"
#include "common/exit_code.hpp"
#include "common/output_file.hpp"
#include "common/plot.hpp"
#include "common/table.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

namespace {

TEST_CASE("examples: fractions and numbers are parsed whole or not at all") {
    CHECK(example::parse_fraction("1/16") == 0.0625);
    CHECK(example::parse_fraction("0.0625") == 0.0625);
    CHECK(example::parse_fraction("1e-2") == 0.01);
    CHECK(example::parse_fraction("-3/4") == -0.75);
    for (const char* text : {"", "/", "1/", "/2", "1/0", "0/0", "1/2/3", "nan", "inf", "1/inf", "0.1x", " 1", "1 ",
                             "0x10", "1,5", "1e999", "six"}) {
        INFO(text);
        CHECK(!example::parse_fraction(text));
    }
    CHECK(example::split_list("a,,b") == std::vector<std::string>{"a", "", "b"});
    CHECK(example::split_list(" a b , c\t,") == std::vector<std::string>{"a b", "c", ""});
    CHECK(example::split_list("") == std::vector<std::string>{""});
    CHECK(example::split_list(" ") == std::vector<std::string>{""});
}

struct options {
    double kept = 1.0 / 16;
    std::vector<double> epsilon = {0.01, 0.05};
    std::vector<std::string> plan = {"greedy"};
    std::size_t sink = 64;
    unsigned bits = 2;
    std::uint64_t seed = 1;
    std::string trace = "here";

    std::string parse(const std::vector<std::string>& arguments) {
        CLI::App app("test", "test");
        example::add_fraction(app, "--kept", kept, {0, 1, false, true}, "share kept", "1/16");
        example::add_numbers(app, "--epsilon", epsilon, {0, std::numeric_limits<double>::infinity()}, "tolerance");
        example::add_names(app, "--plan", plan, {"greedy", "never"}, "planner");
        example::add_count(app, "--sink", sink, 0, 1'000'000'000, "first tokens");
        example::add_count(app, "--bits", bits, 1, 8, "bits of a code");
        example::add_count(app, "--seed", seed, 0, std::numeric_limits<std::uint64_t>::max(), "of the sample");
        example::add_path(app, "--trace", trace, "folder");
        try {
            app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
        } catch (const CLI::CallForHelp&) {
            return app.help();
        } catch (const CLI::ParseError& e) {
            return e.what();
        }
        return "";
    }
};

TEST_CASE("examples: options take fractions and lists, and say what is wrong") {
    options o;
    CHECK(o.parse({}).empty());
    CHECK(o.kept == 0.0625);
    CHECK(o.epsilon == std::vector<double>{0.01, 0.05});
    CHECK(o.parse({"--kept", "1/8", "--epsilon", "0.3,1/100", "--plan", "never,greedy"}).empty());
    CHECK(o.kept == 0.125);
    CHECK(o.epsilon == std::vector<double>{0.3, 0.01});
    CHECK(o.plan == std::vector<std::string>{"never", "greedy"});
    CHECK(o.parse({"--kept", "1"}).empty());

    CHECK(o.parse({"--kept", "0"}) == "--kept: 0 is out of range; it must be in (0, 1]");
    CHECK(o.parse({"--kept", "17/16"}) == "--kept: 17/16 is out of range; it must be in (0, 1]");
    CHECK(o.parse({"--kept", "some"}) == "--kept: \"some\" is no number; write 0.0625 or 1/16");
    CHECK(o.parse({"--epsilon", "0.1,-1"}) == "--epsilon: -1 is out of range; it must be above 0");
    CHECK(o.parse({"--epsilon", "0.1,,1"}) == "--epsilon: \"\" is no number; write 0.0625 or 1/16");
    CHECK(o.parse({"--epsilon", "0.1,1/10"}) == "--epsilon: 1/10 occurs twice");
    CHECK(o.parse({"--plan", "greed"}) == "--plan: \"greed\" is not known; choose from greedy, never");
    CHECK(o.parse({"--plan", "greedy,greedy"}) == "--plan: greedy occurs twice");
    CHECK(!o.parse({"--plan"}).empty());
    CHECK(o.parse({"--epsilon", ""}) == "--epsilon: \"\" is no number; write 0.0625 or 1/16");
    CHECK(o.parse({"--epsilon", "0.1,"}) == "--epsilon: \"\" is no number; write 0.0625 or 1/16");
    CHECK(o.parse({"--epsilon", "0.1", "--epsilon", "0.1"}) == "--epsilon: 0.1 occurs twice");
    CHECK(o.plan == std::vector<std::string>{"never", "greedy"});

    const std::string help = options{}.parse({"--help"});
    for (const char* part : {"1/16", "0.01,0.05", "any of greedy, never"}) {
        INFO(help);
        CHECK(help.find(part) != std::string::npos);
    }
}

TEST_CASE("examples: lists may have blanks, and repeated options are added") {
    for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
             {"--epsilon", "0.1,0.2", "--plan", "never,greedy"},
             {"--epsilon", " 0.1 , 0.2 ", "--plan", "never, greedy"},
             {"--epsilon", "0.1,", "0.2", "--plan", "never", ",greedy"},
             {"--epsilon", "0.1", "0.2", "--plan", "never", ",", "greedy"},
             {"--epsilon", "0.1", "--plan", "never", "--epsilon", "0.2", "--plan", "greedy"},
         }) {
        options o;
        CHECK(o.parse(arguments).empty());
        CHECK(o.epsilon == std::vector<double>{0.1, 0.2});
        CHECK(o.plan == std::vector<std::string>{"never", "greedy"});
    }
}

TEST_CASE("examples: what was given on the command line is known by name") {
    CLI::App app("test", "test");
    double kept = 0;
    bool times = false;
    std::vector<double> epsilon;
    example::add_fraction(app, "--kept", kept, {0, 1}, "share kept");
    example::add_numbers(app, "--epsilon", epsilon, {0, 1}, "tolerance");
    app.add_flag("--times", times, "times");
    app.parse(std::vector<std::string>{"0.2", "0.1, ", "--epsilon", "--times"});
    const auto given = example::given_options(app);
    CHECK(given.size() == 2);
    CHECK(given.contains("--times"));
    CHECK(given.at("--epsilon") == "0.1,0.2");
}

TEST_CASE("examples: counts are digits within their range, paths are not empty") {
    options o;
    CHECK(o.parse({"--sink", "0", "--bits", "8", "--seed", "18446744073709551615", "--trace", "there"}).empty());
    CHECK(o.sink == 0);
    CHECK(o.bits == 8);
    CHECK(o.seed == std::numeric_limits<std::uint64_t>::max());
    CHECK(o.trace == "there");
    CHECK(o.parse({"--sink", "1000000000", "--bits", "1"}).empty());
    CHECK(o.parse({"--bits", "0"}) == "--bits: \"0\" is no whole number from 1 to 8");
    for (const char* text : {"-1", "+1", "-0", "1000000001", "18446744073709551616", "99999999999999999999999", "1e3",
                             "0x10", "1.0", " 1", "1 ", "six"}) {
        CHECK(o.parse({"--sink", text}) ==
              "--sink: \"" + std::string(text) + "\" is no whole number from 0 to 1000000000");
    }
    CHECK(o.parse({"--bits", "4294967298"}) == "--bits: \"4294967298\" is no whole number from 1 to 8");
    CHECK(o.parse({"--seed", "18446744073709551616"}).find("from 0 to 18446744073709551615") != std::string::npos);
    CHECK(o.parse({"--seed=-1"}).find("\"-1\" is no whole number") != std::string::npos);
    CHECK(o.parse({"--trace", ""}) == "--trace: the name is empty");
    CHECK(o.sink == 1'000'000'000);
    CHECK(o.bits == 1);
    CHECK(o.trace == "there");
    const std::string help = options{}.parse({"--help"});
    for (const char* part : {"64", "COUNT", "here", "PATH"}) {
        CHECK(help.find(part) != std::string::npos);
    }
}

TEST_CASE("examples: files that results cannot go to are known beforehand") {
    const test_support::temporary_folder folder;
    example::require_writable(folder / "new.json");
    CHECK(!std::filesystem::exists(folder / "new.json"));
    const auto old = folder / "old.json";
    std::ofstream(old) << "kept";
    example::require_writable(old);
    std::string text;
    std::ifstream(old) >> text;
    CHECK(text == "kept");
    for (const auto& file : {folder / "nowhere/new.json", folder.path(), old / "new.json"}) {
        try {
            example::require_writable(file);
            FAIL("accepted");
        } catch (const example::file_error& e) {
            CHECK(std::string(e.what()) == file.string() + ": cannot be written");
        }
    }
}

TEST_CASE("examples: results that would overwrite what is read, or each other, are refused") {
    const test_support::temporary_folder folder;
    std::ofstream(folder / "read") << "kept";
    const auto problem = [&](const char* a, const char* b) -> std::string {
        const auto named = [&](const char* name) { return *name == '\0' ? std::filesystem::path() : folder / name; };
        try {
            example::require_outputs({{"--csv", named(a)}, {"--plot", named(b)}}, {folder / "read"});
            return "";
        } catch (const example::file_error& e) {
            return e.problem();
        }
    };
    CHECK(problem("", "").empty());
    CHECK(problem("a", "b").empty());
    CHECK(problem("", "./read").find("would be overwritten") != std::string::npos);
    CHECK(problem("read", "b").find("would be overwritten") != std::string::npos);
    CHECK(problem("a", "./a").find("of --csv and of --plot") != std::string::npos);
    CHECK(problem("a", "nowhere/b") == "cannot be written");
    std::string text;
    std::ifstream(folder / "read") >> text;
    CHECK(text == "kept");
}

TEST_CASE("examples: a program's end tells what went wrong, and whether its output arrived") {
    CHECK(example::exit_code_of("test", [] { return 3; }) == 3);
    CHECK(example::exit_code_of("test", []() -> int { throw std::runtime_error("as it should be"); }) == 1);
    const std::filesystem::path full = "/dev/full";
    if (!std::filesystem::exists(full)) {
        return;
    }
    std::fflush(stdout);
    const int kept = dup(STDOUT_FILENO);
    const int sink = open(full.c_str(), O_WRONLY);
    dup2(sink, STDOUT_FILENO);
    const int code = example::exit_code_of("test", [] {
        std::fputs("lost", stdout);
        return 0;
    });
    std::clearerr(stdout);
    dup2(kept, STDOUT_FILENO);
    close(sink);
    close(kept);
    CHECK(code == 1);
}

TEST_CASE("examples: one file is known by all its names") {
    const test_support::temporary_folder folder;
    std::filesystem::create_directory(folder / "sub");
    const auto file = folder / "file";
    CHECK(example::same_file(file, folder / "sub/../file"));  // neither exists
    CHECK(!example::same_file(file, folder / "sub/file"));
    CHECK(example::same_file("file", std::filesystem::current_path() / "file"));
    std::ofstream(file) << "x";
    CHECK(example::same_file(file, folder / "./file"));
    std::filesystem::create_symlink(file, folder / "sub/link");
    CHECK(example::same_file(file, folder / "sub/link"));
    CHECK(!example::same_file(file, folder / "other"));
}

TEST_CASE("examples: tables align their columns") {
    example::table t({{"name", example::alignment::left}, {"ε"}, {"rows read\nper head"}});
    t.add({"exact", example::number_text(0.05, 2), example::percent_text(0.0451, 1)});
    t.add_rule();
    t.add({"RoPE pairs", example::number_text(0.3, 2), example::percent_text(std::nan(""), 1)});
    t.add({"δ"});
    CHECK(t.text() ==
          "                  rows read\n"
          "name           ε   per head\n"
          "---------------------------\n"
          "exact       0.05      4.5 %\n"
          "---------------------------\n"
          "RoPE pairs  0.30          -\n"
          "δ\n");
    CHECK(example::table({}).text() == "\n\n");
}

TEST_CASE("examples: progress writes plain lines, and few, where there is no terminal") {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), &std::fclose);
    REQUIRE(file);
    {
        example::progress p("steps", 1000, file.get());
        for (std::size_t i = 0; i < 1000; ++i) {
            p.update(i);
        }
    }
    CHECK(std::ftell(file.get()) < 40);
}

std::size_t occurrences(const std::string& text, const std::string& part) {
    std::size_t count = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
        ++count;
    }
    return count;
}

TEST_CASE("examples: a plot shows every point and survives odd data") {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    example::plot_figure f;
    f.title = "a < b & \"c\"";
    example::plot_panel p;
    p.x = {"ε", true, false, {}, {}, {0.01, 0.05, 0.0501, 0.3}};
    p.y.percent = true;
    p.series = {{"one", {0.01, 0.05, 0.3}, {0.2, nan, 0.1}, "", ""},
                {"two", {0.01, 0.05, 0.3}, {0.1, 0.1, 0.1}, "", ""}};
    p.references = {{0.1, "δ"}};
    f.panels = {p, p};
    const std::string svg = example::svg_text(f);
    CHECK(svg.find("a &lt; b &amp; &quot;c&quot;") != std::string::npos);
    CHECK(occurrences(svg, "<title>one: ") == 4);
    CHECK(occurrences(svg, "<title>two: ") == 6);
    CHECK(occurrences(svg, ">one</text>") == 1);   // one legend for both panels
    CHECK(occurrences(svg, ">0.05</text>") == 2);  // 0.0501 would overlap it
    CHECK(occurrences(svg, ">0.0501</text>") == 0);
    CHECK(occurrences(svg, ">δ</text>") == 2);
    CHECK(svg.find("nan") == std::string::npos);
    const std::size_t end = svg.find("\" fill=\"none\" stroke=\"#0072b2\"");
    REQUIRE(end != std::string::npos);
    const std::string line = svg.substr(0, end).substr(svg.rfind("d=\"", end) + 3);
    CHECK(occurrences(line, "M") == 2);  // broken by the NaN
    CHECK(occurrences(line, "L") == 0);

    for (const bool logarithmic : {false, true}) {
        for (const std::vector<double>& values :
             std::vector<std::vector<double>>{{},
                                              {nan},
                                              {0},
                                              {1},
                                              {-1, -1},
                                              {0, 0},
                                              {1e-300, 1e300},
                                              {-1e300, 1e300},
                                              {0, 1e-320},
                                              {std::numeric_limits<double>::infinity()},
                                              {5, 5.000000001}}) {
            example::plot_panel odd;
            odd.x.logarithmic = odd.y.logarithmic = logarithmic;
            odd.series = {{"odd", values, values, "", ""}};
            const std::string text = example::svg_text({"", {odd}});
            CHECK(text.size() < 100'000);
            CHECK(occurrences(text, "nan") + occurrences(text, "\"inf") == 0);
        }
    }
    CHECK(example::svg_text({}).find("</svg>") != std::string::npos);

    // A colour for each key, dashes for each key; without keys another colour for each name.
    example::plot_panel keyed;
    for (const char* name : {"a1", "b1", "a2", "b2"}) {
        keyed.series.push_back({name, {1}, {1}, std::string(name, 1), std::string(name + 1, 1)});
    }
    const std::string styled = example::svg_text({"", {keyed}});
    CHECK(occurrences(styled, "stroke=\"#0072b2\" stroke-width=\"2\" stroke-dasharray=\"none\"") == 2);  // line, legend
    CHECK(occurrences(styled, "stroke=\"#0072b2\" stroke-width=\"2\" stroke-dasharray=\"7 3\"") == 2);
    CHECK(occurrences(styled, "stroke=\"#d55e00\" stroke-width=\"2\" stroke-dasharray=\"7 3\"") == 2);
    CHECK(occurrences(styled, "#009e73") == 0);

    const test_support::temporary_folder folder;
    example::write_svg(f, folder / "plot.svg");
    std::ifstream in(folder / "plot.svg");
    CHECK(std::string(std::istreambuf_iterator<char>(in), {}) == svg);
    CHECK_THROWS_AS(example::write_svg(f, folder / "nowhere" / "plot.svg"), example::file_error);
}

}  // namespace
