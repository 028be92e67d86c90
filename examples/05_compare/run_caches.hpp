// Parts 1 and 2: verkv's caches, by scorer and kept share, and by sketch and plan.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/replay.hpp"
#include "row.hpp"
#include "settings.hpp"

namespace compare {

/// One cache to replay.
struct cache_choice {
    std::string part, scorer;
    double kept = 0;
    example::combination choice;
    unsigned bits = 0;  // of the sketch; 0: its own
    double pairs = 0;

    friend bool operator==(const cache_choice&, const cache_choice&) = default;
};

/// The default plan with what it can have of the rest: joint, and checked where that is of use.
inline example::combination combination_of(const std::string& sketch, const std::string& plan,
                                           const std::string& target) {
    example::combination c;
    c.sketch = sketch;
    c.plan = plan;
    c.target = plan == "water-filling" ? target : "denominator";
    if (plan == "water-filling") {
        c.group = "joint";
        const bool proven = c.target == "denominator" && example::facts_of_sketch(sketch).exact;
        c.check = proven ? "none" : "sample";
    }
    return c;
}

/// The settings of --bits and --pairs that make a difference to a sketch, each once.
inline std::vector<std::pair<unsigned, double>> settings_of_sketch(const settings& s, const std::string& sketch) {
    const unsigned uses = example::facts_of_sketch(sketch).uses;
    std::vector<std::pair<unsigned, double>> all;
    for (const double pairs : (uses & example::uses_pairs) != 0 ? s.pairs : std::vector<double>{0}) {
        for (const unsigned bits : (uses & example::uses_bits) != 0 ? s.bits : std::vector<unsigned>{0}) {
            all.emplace_back(bits, pairs);
        }
    }
    return all;
}

/// Scorers x kept shares x {never fetch, the default plan}, then sketches x settings x plans; each cache once in its
/// part.
inline std::vector<cache_choice> cache_choices(const settings& s) {
    std::vector<cache_choice> all;
    const auto asked = [&](const char* part) {
        return std::find(s.parts.begin(), s.parts.end(), part) != s.parts.end();
    };
    for (const std::string& scorer : asked("scorers") ? s.scorers : std::vector<std::string>{}) {
        for (const double kept : s.kept_shares) {
            for (const char* plan : {"never", "water-filling"}) {
                const auto [bits, pairs] = settings_of_sketch(s, s.sketch).front();
                all.push_back({"scorers", scorer, kept, combination_of(s.sketch, plan, "denominator"), bits, pairs});
            }
        }
    }
    for (const std::string& sketch : asked("sketches") ? s.sketches : std::vector<std::string>{}) {
        for (const auto& [bits, pairs] : settings_of_sketch(s, sketch)) {
            for (const std::string& plan : s.plans) {
                for (const std::string& target : s.targets) {
                    const cache_choice c{"sketches", s.scorer, s.kept, combination_of(sketch, plan, target),
                                         bits,       pairs};
                    if (all.empty() || !(all.back() == c)) {
                        all.push_back(c);
                    }
                }
            }
        }
    }
    return all;
}

inline row row_of(const cache_choice& c, const example::replay_result& r) {
    row out;
    out.part = c.part;
    out.method = c.choice.plan + (c.choice.target == "output" ? " for outputs" : "");
    out.scorer = c.scorer;
    out.sketch = c.choice.sketch;
    set_sketch_setting(out, c.choice.sketch, c.bits, c.pairs);
    out.claims = !c.choice.certifies() ? "nothing" : c.choice.target == "output" ? "output" : "D";
    out.kept = c.kept;
    out.epsilon = r.epsilon;
    out.attention = r.resident_attention;
    out.error_mean = r.mean_output_error;
    out.error_p99 = r.p99_output_error;
    out.rows = out.rows_beyond = r.rows_read_per_kv_head;
    out.keys = r.shortlist_keys_read;
    out.failures_denominator = r.failures_denominator;
    out.failures_output = r.failures_output;
    out.sketch_bytes = r.sketch_bytes_per_token;
    out.milliseconds = r.sketch_ms + r.decide_ms + r.fetch_ms + r.attend_ms;
    out.decisions = r.decisions;
    return out;
}

/// Replays one of them: a row for each epsilon.
template <class T>
std::vector<row> run_cache(const example::trace<T>& t, const settings& s, const example::truth& dense,
                           std::span<const std::size_t> steps, const example::attention_shares& exact,
                           const std::vector<std::vector<float>>& importance, const cache_choice& c,
                           verkv::executor* threads) {
    example::replay_options how = s;
    how.kept = c.kept;
    const auto options = example::sketch_options_of(t, c.bits, c.pairs);
    const auto results = example::with_sketch<T>(c.choice.sketch, options, [&](const auto& sketch) {
        const auto with_target = [&](const auto& target) {
            return example::replay(t, how, dense, steps, importance, sketch, target, c.choice, threads, &exact);
        };
        return c.choice.target == "output" ? with_target(verkv::output{}) : with_target(verkv::denominator{});
    });
    std::vector<row> rows;
    for (const example::replay_result& r : results) {
        rows.push_back(row_of(c, r));
    }
    return rows;
}

}  // namespace compare
