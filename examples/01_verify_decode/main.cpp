// The main job: what verified attention reads, and how often it is wrong, on a real attention trace.
#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "common/output_file.hpp"
#include "common/plot.hpp"
#include "common/table.hpp"
#include "common/trace.hpp"
#include "replay.hpp"
#include "settings.hpp"

namespace {

verkv::rope_pairing pairing_of(const example::trace_info& t, const settings& s) {
    if (!t.pairing) {
        throw example::trace_error(s.trace + "/meta.json", "says no RoPE pairing, which the rope-pairs sketch needs");
    }
    return *t.pairing;
}

template <class T>
std::vector<result> run(const example::trace<T>& t, const settings& s) {
    using namespace verkv;
    const auto steps = t.spread_steps(s.steps == 0 ? t.decode_steps() : s.steps);
    std::optional<thread_pool> pool;
    if (s.threads != 1) {
        pool.emplace(s.threads);
    }
    executor* threads = pool ? &*pool : nullptr;
    const auto all = combinations(s);
    example::progress progress("verify_decode", all.size() + 2);
    progress.update(0, "dense attention");
    const truth dense = dense_truth(t, steps);
    progress.update(1, s.scorer);
    const auto importance = importance_of(t, s);
    std::vector<std::vector<result>> found;
    for (const combination& c : all) {
        progress.update(found.size() + 2, c.text());
        const auto with_target = [&](const auto& sketch) {
            return c.target == "output" ? replay(t, s, dense, steps, importance, sketch, output{}, c, threads)
                                        : replay(t, s, dense, steps, importance, sketch, denominator{}, c, threads);
        };
        found.push_back(c.sketch == "exact" ? with_target(exact_sketch<T>{})
                                            : with_target(chosen_sketch<T>(c.sketch, t.shape.key_dim, s,
                                                                           [&] { return pairing_of(t, s); })));
    }
    progress.finish();
    std::vector<result> rows;  // by epsilon, so that what is compared stands together
    for (std::size_t e = 0; e < s.epsilon.size(); ++e) {
        for (const auto& results : found) {
            rows.push_back(results[e]);
        }
    }
    return rows;
}

void print(const example::trace_info& t, const settings& s, const std::vector<result>& rows) {
    fmt::print("{}: layer {}, {} prompt tokens, {} query heads on {} KV heads; {} kept for {}, delta = {}\n\n", t.name,
               t.layer, t.prefill_tokens, t.shape.query_heads, t.shape.kv_heads, example::percent_text(s.kept, 2),
               s.scorer, s.delta);
    using example::alignment;
    example::table table({{"epsilon"},
                          {"sketch", alignment::left},
                          {"plan", alignment::left},
                          {"certified", alignment::left},
                          {"% that\nfetch"},
                          {"rows read, %\nquery head"},
                          {"\nKV head"},
                          {"rounds"},
                          {"keys\nscored"},
                          {"fails, %\nD"},
                          {"\noutput"},
                          {"output\nerror, %"},
                          {"certi-\nficate"},
                          {"ms:\nsketch"},
                          {"\ndecide"},
                          {"\nfetch"},
                          {"\nattend"},
                          {"\n(dense)"}});
    const auto share = [](double x, int digits = 2) { return fmt::format("{:.{}f}", 100 * x, digits); };
    double epsilon = rows.empty() ? 0 : rows.front().epsilon;
    for (const result& r : rows) {
        if (r.epsilon != epsilon) {
            table.add_rule();
            epsilon = r.epsilon;
        }
        const auto fails = [&](double x) { return share(x) + (x > s.delta ? " !" : "  "); };
        table.add({fmt::format("{}", r.epsilon), r.choice.sketch, r.choice.plan_text(), r.choice.target_text(),
                   share(r.fetching_decisions, 1), share(r.rows_read_per_query_head), share(r.rows_read_per_kv_head),
                   fmt::format("{:.2f}", r.rounds), share(r.shortlist_keys_read), fails(r.failures_denominator),
                   fails(r.failures_output), share(r.mean_output_error), fmt::format("{:.3f}", r.mean_certificate),
                   fmt::format("{:.3f}", r.sketch_ms), fmt::format("{:.3f}", r.decide_ms),
                   fmt::format("{:.3f}", r.fetch_ms), fmt::format("{:.3f}", r.attend_ms),
                   fmt::format("{:.3f}", r.dense_ms)});
    }
    table.print();
    fmt::print(
        "\nrows read, keys scored: % of the context, resident rows not counted. fails: % of {} decisions a row whose "
        "true\n"
        "error exceeds epsilon; \"!\" marks more than delta = {}. D: the softmax denominator. rounds: fetches that the "
        "check\n"
        "from the sample added to the first. sketch: {} of the KV cache.\n",
        rows.empty() ? 0 : rows.front().decisions, s.delta, [&] {
            std::string text;
            for (const auto& name : s.sketch) {
                for (const result& r : rows) {
                    if (r.choice.sketch == name) {
                        text += (text.empty() ? "" : ", ") + name + " " + share(r.sketch_bytes_share) + " %";
                        break;
                    }
                }
            }
            return text;
        }());
}

nlohmann::ordered_json as_json(const example::trace_info& t, const settings& s, const std::vector<result>& rows) {
    nlohmann::ordered_json out;
    out["settings"] = {{"trace", s.trace},
                       {"layer", t.layer},
                       {"kept", s.kept},
                       {"sink", s.sink},
                       {"local", s.local},
                       {"epsilon", s.epsilon},
                       {"delta", s.delta},
                       {"scorer", s.scorer},
                       {"sketch", s.sketch},
                       {"bits", s.bits},
                       {"pairs", s.pairs},
                       {"shrinkage", s.shrinkage},
                       {"plan", s.plan},
                       {"tail", s.tail},
                       {"target", s.target},
                       {"group", s.group},
                       {"check", s.check},
                       {"max_rounds", s.rounds},
                       {"uniforms", s.uniforms},
                       {"bounds", s.bounds},
                       {"exact_for", s.exact_for},
                       {"shortlist", s.shortlist},
                       {"steps", s.steps == 0 ? t.decode_steps() : s.steps},
                       {"redraws", s.redraws},
                       {"seed", s.seed},
                       {"threads", s.threads}};
    out["rows"] = nlohmann::ordered_json::array();
    for (const result& r : rows) {
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
                               {"sketch_bytes_share", r.sketch_bytes_share},
                               {"sketch_ms", r.sketch_ms},
                               {"decide_ms", r.decide_ms},
                               {"fetch_ms", r.fetch_ms},
                               {"attend_ms", r.attend_ms},
                               {"dense_ms", r.dense_ms}});
    }
    return out;
}

void plot(const example::trace_info& t, const settings& s, const std::vector<result>& rows) {
    example::plot_panel read;
    read.title = "Rows read for a KV head";
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
    for (const combination& c : combinations(s)) {
        example::plot_series reads{c.text(), {}, {}};
        example::plot_series failing{reads.name, {}, {}};
        for (const result& r : rows) {
            if (r.choice == c) {
                reads.x.push_back(r.epsilon);
                reads.y.push_back(r.rows_read_per_kv_head);
                failing.x.push_back(r.epsilon);
                failing.y.push_back(c.target == "output" ? r.failures_output : r.failures_denominator);
            }
        }
        if (c.plan != "never") {
            read.series.push_back(reads);
        }
        fails.series.push_back(failing);
    }
    example::write_svg({fmt::format("{}, {} resident", t.name, example::percent_text(s.kept, 2)), {read, fails}},
                       s.plot);
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app(
        "Verified attention on a recorded trace: compresses its prompt, replays its decode steps, and shows what the "
        "certificate buys.");
    settings s;
    add_options(app, s);
    CLI11_PARSE(app, argc, argv);
    s.target_given = app.count("--target") > 0;
    std::sort(s.epsilon.begin(), s.epsilon.end());
    try {
        for (const std::string& file : {s.json, s.plot}) {
            if (!file.empty()) {
                example::require_writable(file);
            }
        }
        const example::any_trace loaded = example::load_trace(s.trace);
        const example::trace_info& t = example::info(loaded);
        const std::vector<result> rows = std::visit([&](const auto& typed) { return run(typed, s); }, loaded);
        print(t, s, rows);
        if (!s.json.empty()) {
            std::ofstream file(s.json);
            file << as_json(t, s, rows).dump(1) << '\n';
            if (!file.flush()) {
                throw std::runtime_error(s.json + ": cannot be written");
            }
        }
        if (!s.plot.empty()) {
            plot(t, s, rows);
        }
    } catch (const std::exception& e) {
        fmt::print(stderr, "verify_decode: {}\n", e.what());
        return 1;
    }
    return 0;
}
