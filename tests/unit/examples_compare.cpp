// The example compare: its lists, settings, files and plots, and its baselines on a small trace. No cache is run here.
#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "05_compare/report.hpp"
#include "05_compare/run_baselines.hpp"
#include "common/registry.hpp"
#include "common/synthetic.hpp"
#include "support/catch.hpp"

namespace {

using compare::row;
using compare::settings;
using strings = std::vector<std::string>;

settings settings_of(const strings& arguments) {
    settings s;
    CLI::App app("test", "test");
    compare::add_options(app, s);
    app.parse(strings(arguments.rbegin(), arguments.rend()));
    return s;
}

/// A trace of two KV heads, what compare derives from it, and its rows.
struct small_run {
    settings s;
    example::trace<float> t;
    std::vector<std::size_t> steps;
    example::truth dense;
    example::attention_shares exact;

    explicit small_run(const strings& arguments) : s(settings_of(arguments)) {
        example::synthetic_options o;
        o.shape = {6, 2, 16, 8, 0};
        o.prefill_tokens = 400;
        o.decode_tokens = 4;
        t = example::synthetic_trace<float>(o);
        steps = t.spread_steps(s.steps);
        dense = example::dense_truth(t, steps);
        exact = example::exact_shares(t, steps, dense);
    }

    std::vector<row> run() {
        const auto ground = compare::ground_of(t, s, steps, dense, exact);
        const example::sketch_options options{
            .key_dim = 16, .bits = 4, .pairs = 0.25, .pairing = [] { return verkv::rope_pairing::interleaved; }};
        strings told;
        auto rows = compare::run_baselines(ground, s, options, [&](const std::string& name) { told.push_back(name); });
        CHECK(told == s.baselines);
        return rows;
    }
};

const row& row_of(const std::vector<row>& rows, const std::string& method, const std::string& sketch, double epsilon) {
    const auto found = std::find_if(rows.begin(), rows.end(), [&](const row& r) {
        return r.method == method && r.sketch == sketch && r.epsilon == epsilon;
    });
    REQUIRE(found != rows.end());
    return *found;
}

TEST_CASE("examples: the lists of scorers and sketches make what they name") {
    CHECK(example::names_of(example::scorers).front() == "largest-attention");
    CHECK(example::names_of(example::sketches<float>) == example::names_of(example::sketches<verkv::half>));
    const example::sketch_options options{
        .key_dim = 16, .bits = 3, .pairs = 0.5, .pairing = [] { return verkv::rope_pairing::half; }};
    const std::vector<float> keys(40 * 16, 0.5f);
    for (const std::string& name : example::names_of(example::sketches<float>)) {
        INFO(name);
        const example::sketch_facts& facts = example::facts_of_sketch(name);
        CHECK(facts.name == name);
        const std::size_t held = example::with_sketch<float>(name, options, [&](auto sketch) {
            constexpr bool exact = example::detail::is_exact<decltype(sketch)>();
            CHECK(exact == facts.exact);
            const auto rows = verkv::contiguous_rows(std::span(keys), 16);
            sketch.fit(verkv::cpu{}, rows);
            sketch.append(verkv::cpu{}, rows);
            if constexpr (!exact) {
                CHECK((sketch.bound_failure() == 0 || facts.bounded));
            }
            return sketch.size();
        });
        CHECK(held == 40);
    }
    // What is left 0 is the sketch's own; what is given counts.
    const auto bytes = [&](const std::string& name, unsigned bits, double pairs) {
        return example::with_sketch<float>(name, {16, bits, pairs, options.pairing, {}}, [&](auto sketch) {
            sketch.fit(verkv::cpu{}, verkv::contiguous_rows(std::span(keys), 16));
            sketch.append(verkv::cpu{}, verkv::contiguous_rows(std::span(keys), 16));
            return sketch.bytes();
        });
    };
    CHECK(bytes("rope-pairs", 0, 0) == bytes("rope-pairs", verkv::rope_pair_options{}.bits, 0.5));
    CHECK(bytes("rope-pairs", 8, 1) > bytes("rope-pairs", 0, 0));
    CHECK(bytes("rotated", 0, 0) == bytes("rotated", verkv::rotated_options{}.bits, 0));
    // Of both defaults there is something.
    CHECK_NOTHROW(example::chosen_scorer(example::default_scorer, {}));  // and it needs no rotation
    CHECK(example::facts_of_sketch(example::default_sketch).name == example::default_sketch);
    std::set<std::string> different;
    for (const std::string& name : example::names_of(example::scorers)) {
        different.insert(name);
        (void)example::chosen_scorer(name, {[] { return verkv::rope::plain(16); }});
    }
    CHECK(different.size() == std::tuple_size_v<decltype(example::scorers)>);
    CHECK(example::facts_of_sketch("rotated").bounded);
    CHECK(!example::facts_of_sketch("rope-pairs").bounded);
    CHECK_THROWS_AS(example::chosen_scorer("nobody", {}), std::invalid_argument);
    CHECK_THROWS_AS(example::facts_of_sketch("nothing"), std::invalid_argument);
    CHECK_THROWS_AS(example::chosen_sketch<float>("nothing", options), std::invalid_argument);
    CHECK_THROWS_AS(example::chosen_sketch<float>("exact", options), std::invalid_argument);
}

TEST_CASE("examples: a sketch that ranks learns from a trace what its ranks are as logits") {
    example::synthetic_options o;
    o.shape = {6, 2, 32, 8, 0};
    o.prefill_tokens = 600;
    const auto t = example::synthetic_trace<float>(o);
    const auto samples = example::calibration_samples(t);
    REQUIRE(samples.size() == 2);
    CHECK(samples[1].keys.size() == 500 * 32);
    CHECK(samples[1].queries.size() % 32 == 0);
    CHECK(samples[1].keys != samples[0].keys);
    // The map is the mean of the heads' own ones, and the default where there is nothing to learn from.
    verkv::socket_sketch sketch({.key_dim = 32});
    example::calibrate(sketch, {.key_dim = 32});
    CHECK(sketch.map() == verkv::logit_map{});
    example::calibrate(sketch, example::sketch_options_of(t, 0, 0));
    double slope = 0;
    for (const auto& s : samples) {
        verkv::socket_sketch own({.key_dim = 32});
        own.calibrate(verkv::cpu{}, verkv::contiguous_rows(std::span(s.keys), 32),
                      verkv::contiguous_rows(std::span(s.queries), 32));
        slope += static_cast<double>(own.map().slope) / 2;
    }
    CHECK(slope > 0);
    CHECK(static_cast<double>(sketch.map().slope) == Approx(slope));
    // Calibrated, its logits are nearer to the exact ones.
    const auto distance = [&](const example::sketch_options& options) {
        double square = 0;
        example::with_sketch<float>("socket", options, [&](auto made) {
            const auto keys = t.keys().head(0).slice(0, 500);
            made.fit(verkv::cpu{}, keys);
            made.append(verkv::cpu{}, keys);
            const verkv::rows<float> query{t.queries().row(t.decode_row(0), 0), 32, 1, 32, nullptr};
            std::vector<float> estimate(500), exact(500);
            made.estimate(verkv::cpu{}, query, 1.0f, verkv::matrix_of(std::span(estimate), 1, 500));
            score_rows(verkv::cpu{}, query, 1.0f, keys, verkv::matrix_of(std::span(exact), 1, 500));
            for (std::size_t i = 0; i < 500; ++i) {
                square += static_cast<double>(estimate[i] - exact[i]) * static_cast<double>(estimate[i] - exact[i]);
            }
            return 0;
        });
        return square;
    };
    CHECK(distance(example::sketch_options_of(t, 0, 0)) < distance({.key_dim = 32}));
}

TEST_CASE("examples: compare's settings") {
    const settings s = settings_of({});
    CHECK(s.scorers == example::names_of(example::scorers));
    CHECK(s.epsilon == std::vector<double>{0.05, 0.1, 0.2});
    CHECK(s.baselines.back() == "clusters");
    CHECK(s.scorer == example::default_scorer);
    CHECK(s.ranks == strings{"exact", example::default_sketch});
    const settings swept = settings_of({"--bits", "2,4", "--pairs", "1/4,1"});
    CHECK(swept.bits == std::vector<unsigned>{2, 4});
    CHECK(swept.pairs == std::vector<double>{0.25, 1});
    CHECK_THROWS_AS(settings_of({"--bits", "2,9"}), CLI::ValidationError);
    CHECK_THROWS_AS(settings_of({"--bits", "2,2"}), CLI::ValidationError);
    const settings other = settings_of({"--part", "baselines", "--epsilon", "0.3", "--count", "1/50,0.1", "--kept",
                                        "1/8", "--with-kept", "1/4", "--rank", "rotated", "--heavy", "0"});
    CHECK(other.parts == strings{"baselines"});
    CHECK(other.epsilon == std::vector<double>{0.3});
    CHECK(other.baseline.counts == std::vector<double>{0.02, 0.1});
    CHECK(other.baseline.heavy == 0);
    CHECK(other.kept_shares == std::vector<double>{0.125});
    CHECK(other.kept == 0.25);
    CHECK(other.ranks == strings{"rotated"});
    CHECK_THROWS_AS(settings_of({"--scorer", "nobody"}), CLI::ValidationError);
    CHECK_THROWS_AS(settings_of({"--part", "nothing"}), CLI::ValidationError);
    CHECK_THROWS_AS(settings_of({"--epsilon", "1.5"}), CLI::ValidationError);
}

TEST_CASE("examples: compare runs the field's estimators, each as often as its settings differ") {
    small_run small({"--epsilon", "0.1,0.3", "--count", "0.05,1", "--rank", "exact,rotated", "--steps", "3",
                     "--redraws", "2", "--sink", "8", "--local", "8", "--with-kept", "1/4"});
    const auto rows = small.run();
    // Two epsilons; six ranked ones, two of them counted twice, by two sketches each; streaming and clusters once.
    std::size_t ranked = 0;
    std::apply(
        [&](const auto&... part) {
            ((ranked += (part.uses & compare::uses_ranking) == 0 ? 0
                        : (part.uses & compare::uses_count) == 0 ? 1
                                                                 : 2),
             ...);
        },
        compare::baselines);
    CHECK(rows.size() == 2 * (2 * ranked + 2));
    CHECK(std::is_sorted(rows.begin(), rows.end(), [](const row& a, const row& b) { return a.epsilon < b.epsilon; }));
    for (const row& r : rows) {
        CAPTURE(r.method, r.sketch, r.epsilon);
        CHECK(r.part == "baselines");
        CHECK(r.decisions == (r.method == "clusters" ? 18u : 36u));
        CHECK((r.attention > 0 && r.attention <= 1 + 1e-5));
        CHECK(r.rows_beyond <= r.rows + r.keys + 1e-12);
        CHECK(r.rows <= 1);
        CHECK(r.failures_denominator <= 1);
        CHECK(r.error_p99 >= 0);
        CHECK(std::isnan(r.kept));
    }
    // All of it is dense attention; the windows read nothing; top-p keeps D where its weights are exact.
    const row& all = row_of(rows, "top-k 100 %", "exact", 0.1);
    CHECK(all.error_p99 < 1e-5);
    CHECK(all.attention == Approx(1).epsilon(1e-5));
    CHECK(all.rows == Approx((400 - 16) / 402.5).epsilon(0.01));
    CHECK(all.failures_denominator == 0);
    CHECK(row_of(rows, "priority 100 %", "rotated", 0.1).error_p99 < 1e-5);
    const row& window = row_of(rows, "streaming", "", 0.1);
    CHECK(window.rows == 0);
    CHECK(window.error_mean > row_of(rows, "top-k 5 %", "exact", 0.1).error_mean);
    CHECK(row_of(rows, "top-p", "exact", 0.3).failures_denominator == 0);
    CHECK(row_of(rows, "top-p", "exact", 0.3).rows < row_of(rows, "top-p", "exact", 0.1).rows);
    CHECK(row_of(rows, "uniform-clt", "exact", 0.1).claims == "D");
    CHECK(row_of(rows, "uniform-clt-output", "exact", 0.1).claims == "output");
    CHECK(row_of(rows, "uniform-clt-output", "exact", 0.1).keys == 0);
    CHECK(row_of(rows, "top-k 5 %", "exact", 0.1).claims == "nothing");
    CHECK(row_of(rows, "top-k 5 %", "exact", 0.1).sketch_bytes == 64);
    CHECK(row_of(rows, "top-k 5 %", "rotated", 0.1).sketch_bytes < 64);
    // The same settings, the same rows, but for the time they take.
    auto again = small.run();
    for (std::size_t i = 0; i < rows.size(); ++i) {
        again[i].milliseconds = rows[i].milliseconds;
    }
    CHECK(compare::as_csv(again) == compare::as_csv(rows));
}

TEST_CASE("examples: compare's files have a cell for each number, and none for what does not apply") {
    row r;
    r.part = "baselines";
    r.method = "top-k 5 %";
    r.sketch = "exact";
    r.claims = "nothing";
    r.epsilon = 0.1;
    r.rows = 0.0488;
    r.decisions = 9;
    std::istringstream lines(compare::as_csv({r}));
    std::string header, line, cell;
    std::getline(lines, header);
    std::getline(lines, line);
    CHECK(std::count(header.begin(), header.end(), ',') == std::count(line.begin(), line.end(), ','));
    CHECK(line.rfind("baselines,top-k 5 %,,exact,nothing,,,,0.1,,,,0.0488,", 0) == 0);
    CHECK(r.weights() == "exact");
    CHECK(row{}.weights() == "-");
    row setting;
    setting.sketch = "rope-pairs";
    compare::set_sketch_setting(setting, "rope-pairs", 4, 0.5);
    CHECK(setting.weights() == "rope-pairs 0.5 at 4 bits");
    compare::set_sketch_setting(setting, "rope-pairs", 0, 0);
    CHECK(setting.weights() == "rope-pairs");
    compare::set_sketch_setting(setting, "rotated", 3, 0.5);
    CHECK(std::isnan(setting.pairs));
    const auto json = compare::as_json({r});
    CHECK(json[0]["method"] == "top-k 5 %");
    CHECK(json[0]["rows_read"] == 0.0488);
    CHECK(nlohmann::json::parse(json.dump())[0]["kept"].is_null());
    r.claims = "D";
    r.failures_denominator = 0.2;
    CHECK(r.breaks_promise(0.1));
    CHECK(!r.breaks_promise(0.3));
    const std::string table = compare::table_of({r}, 0.1);
    CHECK(table.find("20.0!") != std::string::npos);
    CHECK(table.find("4.88") != std::string::npos);
}

TEST_CASE("examples: compare plots methods, scorers and sketches") {
    settings s = settings_of({"--epsilon", "0.1,0.2", "--scorer", "snapkv,key-norm", "--kept", "1/8"});
    std::vector<row> rows;
    const auto add = [&](const char* part, const char* method, const char* scorer, const char* sketch, double epsilon,
                         double read, double error, double bytes) {
        row r;
        r.part = part;
        r.method = method;
        r.scorer = scorer;
        r.sketch = sketch;
        r.kept = 0.125;
        r.epsilon = epsilon;
        r.rows = read;
        r.keys = 0.01;
        r.error_mean = error;
        r.sketch_bytes = bytes;
        rows.push_back(r);
    };
    for (const double epsilon : s.epsilon) {
        add("scorers", "water-filling", "snapkv", "rope-pairs", epsilon, epsilon / 2, 0.1, 4);
        add("scorers", "never", "snapkv", "rope-pairs", epsilon, 0, 0.1, 4);
        add("scorers", "water-filling", "key-norm", "rope-pairs", epsilon, epsilon, 0.1, 4);
        add("sketches", "water-filling", "snapkv", "rotated", epsilon, 0.02, 0.1, 24);
        add("sketches", "water-filling", "snapkv", "rope-pairs", epsilon, 0.04, 0.1, 4);
        add("sketches", "water-filling", "snapkv", "rope-pairs", epsilon, 0.02, 0.1, 8);
        add("sketches", "water-filling", "snapkv", "exact", epsilon, 0.005, 0.1, 128);
        add("baselines", "top-p", "", "exact", epsilon, 0.03, epsilon, 128);
        add("baselines", "clusters", "", "", epsilon, 0.03, 0.2, 32);
    }
    const auto errors = compare::error_figure({}, s, rows);
    REQUIRE(errors.panels.size() == 2);
    REQUIRE(errors.panels[0].series.size() == 3);  // water-filling, top-p, clusters
    CHECK(errors.panels[1].series.size() == 2);    // nothing of part 3 was ranked by rope-pairs
    CHECK(errors.panels[0].series[1].name == "top-p");
    CHECK(errors.panels[0].series[1].y == std::vector<double>{0.1, 0.2});
    CHECK(errors.panels[0].series[1].x == std::vector<double>{0.04, 0.04});
    const auto scorers = compare::scorer_figure({}, s, rows);
    REQUIRE(scorers.panels.size() == 1);
    REQUIRE(scorers.panels[0].series.size() == 2);
    CHECK(scorers.panels[0].series[0].y == std::vector<double>{0.05, 0.1});
    const auto sketches = compare::sketch_figure({}, s, rows);
    REQUIRE(sketches.panels.size() == 2);            // one for each epsilon
    REQUIRE(sketches.panels[0].series.size() == 3);  // one for each sketch that was run
    CHECK(sketches.panels[0].series[0].name == "rotated");
    CHECK(sketches.panels[0].series[1].name == "rope-pairs");
    CHECK(sketches.panels[0].series[1].x == std::vector<double>{4, 8});  // a line through its settings
    CHECK(sketches.panels[0].series[1].y == std::vector<double>{0.04, 0.02});
    CHECK(sketches.panels[0].series[2].x == std::vector<double>{128});
    const std::string svg = example::svg_text(sketches);
    CHECK(svg.find(">rotated</text>") != std::string::npos);
}

}  // namespace
