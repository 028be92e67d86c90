// What a run chooses from lists, which of it a combination has a use for, and how a combination is called.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "common/combination.hpp"
#include "common/registry.hpp"
#include "settings.hpp"

using example::combination;

/// A flag that some combinations have no use for.
struct conditional_flag {
    const char* name;
    std::string combination::*choice;  ///< what it chooses; null for a number or name that all combinations share
    bool (*used)(const combination&);  ///< looks at choices of flags before this one alone
    std::string use;                   ///< what combinations have a use for it
    std::vector<std::string> depends;  ///< the flags that decide it
    const char* special = "";          ///< the value that is worth a word where combinations are told apart,
    const char* word = "";             ///< and that word
};

/// "only rotated and quest-pages bound their error": the sketches of which something is true, with what it is.
template <class Holds>
std::string only_sketches(Holds&& holds, const char* of_one, const char* of_several) {
    std::vector<std::string> names;
    for (const example::sketch_facts& facts : example::all_sketch_facts()) {
        if (holds(facts)) {
            names.push_back(facts.name);
        }
    }
    std::string text = "only ";
    for (std::size_t i = 0; i < names.size(); ++i) {
        text += (i == 0 ? "" : i + 1 == names.size() ? " and " : ", ") + names[i];
    }
    return fmt::format("{} {}", text, names.size() == 1 ? of_one : of_several);
}

inline const std::vector<conditional_flag>& conditional_flags() {
    using c = combination;
    static const auto plans = [](const c& x) { return x.plan == "water-filling" || x.plan == "greedy"; };
    static const auto fills = [](const c& x) { return x.plan == "water-filling"; };
    using example::facts_of_sketch;
    using example::sketch_facts;
    static const auto bounded = [](const c& x) { return facts_of_sketch(x.sketch).bounded; };
    static const auto approximate = [](const c& x) { return !facts_of_sketch(x.sketch).exact; };
    static const auto coded = [](const c& x) { return (facts_of_sketch(x.sketch).uses & example::uses_bits) != 0; };
    static const auto proven = [](const c& x) {
        return x.target == "denominator" && (!approximate(x) || x.bounds == "sketch");
    };
    static const std::vector<conditional_flag> all{
        {"--tail",
         &c::tail,
         plans,
         "only greedy and water-filling plan by an inequality",
         {"--plan"},
         "chernoff",
         "chernoff"},
        {"--target", &c::target, plans, "only greedy and water-filling plan for a target", {"--plan"}},
        {"--group",
         &c::group,
         fills,
         "only water-filling can plan for the heads of a group together",
         {"--plan"},
         "per-head",
         "per head"},
        {"--uniforms",
         &c::uniforms,
         fills,
         "only water-filling draws rows at random",
         {"--plan"},
         "fresh",
         "fresh uniforms"},
        {"--bounds",
         &c::bounds,
         bounded,
         only_sketches([](const sketch_facts& f) { return f.bounded; }, "bounds its error", "bound their error"),
         {"--sketch"},
         "sketch",
         "bounds carried"},
        {"--exact-for",
         &c::exact_for,
         approximate,
         "with the exact sketch all weights are exact",
         {"--sketch"},
         "resident",
         "resident exact"},
        {"--check",
         &c::check,
         [](const c& x) { return fills(x) && !proven(x); },
         "only water-filling is checked, and not where it is proven as it stands: denominators with weights that are "
         "exact, or bounded with the bounds carried",
         {"--plan", "--sketch", "--target", "--bounds"},
         "sample",
         "checked"},
        {"--rounds",
         nullptr,
         [](const c& x) { return x.checked(); },
         "nothing is checked",
         {"--plan", "--sketch", "--target", "--bounds", "--check"}},
        {"--bits",
         nullptr,
         coded,
         only_sketches([](const sketch_facts& f) { return (f.uses & example::uses_bits) != 0; }, "stores codes",
                       "store codes"),
         {"--sketch"}},
        {"--pairs",
         nullptr,
         [](const c& x) { return (facts_of_sketch(x.sketch).uses & example::uses_pairs) != 0; },
         only_sketches([](const sketch_facts& f) { return (f.uses & example::uses_pairs) != 0; },
                       "leaves channel pairs out", "leave channel pairs out"),
         {"--sketch"}},
        {"--shortlist", nullptr, approximate, "with the exact sketch all weights are exact", {"--sketch"}},
        {"--shrinkage",
         nullptr,
         [](const c& x) { return x.plan == "greedy" || x.plan == "never"; },
         "only greedy and never shrink by a rule",
         {"--plan"}},
    };
    return all;
}

/// Every combination of the lists, once: settings that make no difference to one are not counted as another.
inline std::vector<combination> combinations(const settings& s) {
    std::vector<combination> all;
    const auto add = [&](combination c) {
        for (const conditional_flag& flag : conditional_flags()) {
            if (flag.choice != nullptr && !flag.used(c)) {
                c.*flag.choice = combination{}.*flag.choice;
            }
        }
        if (c.plan != "water-filling" && c.target == "output" && !s.was_given("--target")) {
            return;
        }
        if (std::find(all.begin(), all.end(), c) == all.end()) {
            all.push_back(std::move(c));
        }
    };
    for (const auto& sketch : s.sketch) {
        for (const auto& plan : s.plan) {
            for (const auto& tail : s.tail) {
                for (const auto& target : s.target) {
                    for (const auto& group : s.group) {
                        for (const auto& check : s.check) {
                            for (const auto& uniforms : s.uniforms) {
                                for (const auto& bounds : s.bounds) {
                                    for (const auto& exact_for : s.exact_for) {
                                        add({sketch, plan, tail, target, group, check, uniforms, bounds, exact_for});
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    return all;
}

/// A line for each flag that was given and that none of the combinations has a use for.
inline std::vector<std::string> unused_flags(const settings& s, const std::vector<combination>& all) {
    std::vector<std::string> lines;
    for (const conditional_flag& flag : conditional_flags()) {
        if (s.was_given(flag.name) && std::none_of(all.begin(), all.end(), flag.used)) {
            std::string with;
            for (const std::string& other : flag.depends) {
                with += " " + other + " " + s.names_of(other);
            }
            lines.push_back(
                fmt::format("{} {} has no effect with{}: {}", flag.name, s.given.at(flag.name), with, flag.use));
        }
    }
    return lines;
}

/// A combination as flags: sketch, plan, target, and what else was given and has a use.
inline std::string flags_of(const combination& c, const settings& s) {
    std::string text = fmt::format("--sketch {} --plan {}", c.sketch, c.plan);
    for (const conditional_flag& flag : conditional_flags()) {
        const bool named = flag.choice == &combination::target || s.was_given(flag.name);
        if (named && flag.used(c)) {
            text += fmt::format(" {} {}", flag.name, flag.choice != nullptr ? c.*flag.choice : s.given.at(flag.name));
        }
    }
    return text;
}

/// Names of combinations that stand together: with what tells them apart, and without what they share.
class labels {
public:
    explicit labels(const std::vector<combination>& all) {
        for (const conditional_flag& flag : conditional_flags()) {
            if (*flag.word == '\0') {
                continue;
            }
            const auto special = [&](const combination& c) { return flag.used(c) && c.*flag.choice == flag.special; };
            const auto users = std::count_if(all.begin(), all.end(), flag.used);
            const auto specials = std::count_if(all.begin(), all.end(), special);
            if (specials > 0 && specials < users) {
                varied_.push_back(&flag);
            } else if (specials > 0 && flag.choice != &combination::check) {
                shared_ += fmt::format("{}{}", shared_.empty() ? "" : ", ", flag.word);
            }
        }
    }

    [[nodiscard]] std::string sketch(const combination& c) const { return c.sketch + words(c, true); }
    [[nodiscard]] std::string plan(const combination& c) const { return c.plan + words(c, false); }
    [[nodiscard]] static std::string certified(const combination& c) {
        return !c.certifies() ? "-" : c.target == "output" ? "output" : "D";
    }
    /// For one who sees nothing else of it.
    [[nodiscard]] std::string text(const combination& c) const {
        return fmt::format("{} sketch{}, {}", c.sketch, words(c, true), kind(c));
    }
    /// The same whatever its sketch.
    [[nodiscard]] std::string kind(const combination& c) const {
        return plan(c) + (!c.certifies() ? "" : c.target == "output" ? " for the output" : " for the denominator");
    }
    /// What all that have a use for it share beside the defaults; whether they are checked is not among it.
    [[nodiscard]] const std::string& shared() const { return shared_; }

private:
    [[nodiscard]] std::string words(const combination& c, bool of_sketch) const {
        std::string text;
        for (const conditional_flag* flag : varied_) {
            const bool sketches = flag->depends.front() == "--sketch";
            if (sketches == of_sketch && flag->used(c) && c.*flag->choice == flag->special) {
                text += fmt::format(", {}", flag->word);
            }
        }
        return text;
    }

    std::vector<const conditional_flag*> varied_;
    std::string shared_;
};
