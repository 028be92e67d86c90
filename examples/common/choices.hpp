// Parts of the pipeline that are chosen by name while the program runs.
#pragma once

#include <span>
#include <string>
#include <utility>

#include "common/combination.hpp"
#include "verkv/verkv.hpp"

namespace example {

/// Which tokens get exact weights.
struct chosen_exact {
    std::size_t size = 128;
    bool resident_too = false;
};

class chosen_planner {
public:
    struct workspace {
        verkv::greedy<>::workspace greedy;
        verkv::water_filling<>::workspace bernstein;
        verkv::water_filling<verkv::chernoff_tail>::workspace chernoff;

        void reserve(std::size_t n, std::size_t heads = 1) {
            greedy.reserve(n);
            bernstein.reserve(n, heads);
            chernoff.reserve(n, heads);
        }
    };

    chosen_planner() = default;
    chosen_planner(const combination& c, std::string shrinkage)
        : plan_(c.plan),
          shrinkage_(std::move(shrinkage)),
          chernoff_(c.tail == "chernoff"),
          group_(c.group == "joint" ? verkv::group_plan::joint : verkv::group_plan::per_head) {}

    void plan(const verkv::cpu& exec, verkv::masses_view m, verkv::tolerance t, workspace& w, verkv::plan& out) const {
        if (plan_ == "water-filling") {
            with_water([&](const auto& planner, auto& memory) { planner.plan(exec, m, t, memory, out); }, w);
        } else if (plan_ == "everything") {
            verkv::fetch_everything{}.plan(exec, m, t, w.greedy, out);
        } else if (shrinkage_ == "binary") {
            shrinking<verkv::binary_shrinkage>(exec, m, t, w, out);
        } else if (shrinkage_ == "bounded") {
            shrinking<verkv::bounded_shrinkage>(exec, m, t, w, out);
        } else {
            shrinking<verkv::no_shrinkage>(exec, m, t, w, out);
        }
    }

    void plan_group(const verkv::cpu& exec, std::span<const verkv::masses_view> m, verkv::tolerance t, workspace& w,
                    std::span<verkv::plan> out) const {
        if (plan_ == "water-filling") {
            with_water([&](const auto& planner, auto& memory) { planner.plan_group(exec, m, t, memory, out); }, w);
            return;
        }
        for (std::size_t h = 0; h < m.size(); ++h) {
            plan(exec, m[h], t, w, out[h]);
        }
    }

    void plan_at(const verkv::cpu& exec, std::span<const verkv::masses_view> m, std::span<const double> level,
                 verkv::tolerance t, workspace& w, std::span<verkv::plan> out) const {
        with_water([&](const auto& planner, auto& memory) { planner.plan_at(exec, m, level, t, memory, out); }, w);
    }

private:
    template <class Use>
    void with_water(Use&& use, workspace& w) const {
        if (chernoff_) {
            use(verkv::water_filling<verkv::chernoff_tail>{group_}, w.chernoff);
        } else {
            use(verkv::water_filling<>{group_}, w.bernstein);
        }
    }

    template <class Rule>
    void shrinking(const verkv::cpu& exec, verkv::masses_view m, verkv::tolerance t, workspace& w,
                   verkv::plan& out) const {
        if (plan_ == "never") {
            verkv::never_fetch<Rule>{}.plan(exec, m, t, w.greedy, out);
        } else if (chernoff_) {
            verkv::greedy<Rule, verkv::chernoff_tail>{}.plan(exec, m, t, w.greedy, out);
        } else {
            verkv::greedy<Rule>{}.plan(exec, m, t, w.greedy, out);
        }
    }

    std::string plan_;
    std::string shrinkage_;
    bool chernoff_ = false;
    verkv::group_plan group_ = verkv::group_plan::joint;
};

inline chosen_planner planner_of(const combination& c, const replay_options& s) {
    return {c, s.shrinkage};
}

inline verkv::step_policies policies_of(const combination& c, const replay_options& s) {
    verkv::step_policies p;
    p.check.rounds = c.check == "sample" ? s.rounds : 0;
    p.uniforms = c.uniforms == "fresh" ? verkv::uniform_policy::fresh : verkv::uniform_policy::permanent;
    p.bounds = c.bounds == "sketch" ? verkv::bound_policy::carry : verkv::bound_policy::ignore;
    return p;
}

}  // namespace example
