// Water-filling plans of the query heads of a group: one r' for all, and levels that are given.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/check_levels.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"

namespace {

using namespace support;
using verkv::cpu;
using verkv::group_plan;
using verkv::masses_view;
using verkv::plan;
using verkv::plan_entry;
using verkv::tolerance;
using planner = verkv::water_filling<>;
using floats = std::vector<float>;

enum class likeness { correlated, independent, identical };

/// The decisions of a group: one r for all heads.
std::vector<decision> random_group(dice& d, std::size_t heads, std::size_t n, likeness how) {
    const decision first = any_decision(d, n);
    std::vector<decision> group{first};
    while (group.size() < heads) {
        floats mass = first.mass;
        if (how == likeness::correlated) {
            for (float& m : mass) {
                m *= static_cast<float>(std::exp(0.7 * d.normal()));
            }
        } else if (how == likeness::independent) {
            mass = any_decision(d, n, 0).mass;
        }
        group.emplace_back(mass, first.r);
    }
    return group;
}

std::vector<masses_view> views_of(const std::vector<decision>& group) {
    std::vector<masses_view> m;
    for (const decision& d : group) {
        m.push_back(d.view());
    }
    return m;
}

std::vector<plan> planned(const std::vector<decision>& group, tolerance t, group_plan how = group_plan::joint) {
    planner::workspace w;
    std::vector<plan> out(group.size());
    planner{how, {}}.plan_group(cpu{}, views_of(group), t, w, out);
    return out;
}

std::vector<plan> planned_at(const std::vector<decision>& group, const std::vector<double>& level, tolerance t,
                             group_plan how = group_plan::joint) {
    planner::workspace w;
    std::vector<plan> out(group.size());
    planner{how, {}}.plan_at(cpu{}, views_of(group), level, t, w, out);
    return out;
}

std::vector<double> levels_of(const std::vector<plan>& plans) {
    std::vector<double> level;
    for (const plan& p : plans) {
        level.push_back(p.level);
    }
    return level;
}

/// sum max_h r'_h - r: rows of all heads when each goes by its own plan and they share their uniforms.
double union_rows(const std::vector<decision>& group, const std::vector<plan>& plans) {
    floats r = group[0].r;
    for (std::size_t h = 0; h < group.size(); ++h) {
        const floats own = probabilities_of(group[h], plans[h]);
        for (std::size_t i = 0; i < r.size(); ++i) {
            r[i] = std::max(r[i], own[i]);
        }
    }
    double rows = 0;
    for (std::size_t i = 0; i < r.size(); ++i) {
        rows += static_cast<double>(r[i]) - static_cast<double>(group[0].r[i]);
    }
    return rows;
}

/// sqrt(sum_h (m_h/kappa_h)^2), or the largest of them.
double wish_of(const std::vector<decision>& group, const std::vector<double>& level, std::size_t token, bool largest) {
    double sum = 0, top = 0;
    for (std::size_t h = 0; h < group.size(); ++h) {
        const double x = static_cast<double>(group[h].mass[token]) / group[h].reference / level[h];
        sum += x * x;
        top = std::max(top, x);
    }
    return largest ? top : std::sqrt(sum);
}

/// What is wrong with plans as they say they are: certificates, and r' by their levels. Empty for nothing.
std::string group_fault(const std::vector<decision>& group, const std::vector<plan>& plans, tolerance t,
                        bool may_take_the_largest) {
    const std::vector<double> level = levels_of(plans);
    const auto by = [&](bool largest) {
        return wishes_fault(group[0], plans[0], [&](std::size_t i) { return wish_of(group, level, i, largest); });
    };
    std::string fault = by(false);
    if (!fault.empty() && may_take_the_largest && by(true).empty()) {
        fault.clear();
    }
    for (std::size_t h = 0; h < group.size() && fault.empty(); ++h) {
        const plan& p = plans[h];
        const real own = bound_of(moments_of_plan(group[h], p), log_term_of(t));
        if (p.entries != plans[0].entries || p.raised != p.entries.size() || p.shrunk != 0) {
            fault = text_of("head", h, "has entries of its own");
        } else if (!(static_cast<real>(p.certificate_after) >= own * (1 - 1e-4L))) {
            fault = text_of("head", h, "certificate_after", p.certificate_after, "reference", own);
        }
    }
    return fault;
}

bool all_certify(const std::vector<plan>& plans, tolerance t) {
    return std::all_of(plans.begin(), plans.end(), [&](const plan& p) { return p.certificate_after < t.epsilon; });
}

}  // namespace

TEST_CASE("water-filling: a joint plan certifies every head, and expects no more rows than the union of theirs") {
    dice d(21);
    std::size_t raising = 0, near = 0, heads_in_all = 0;
    double joint_rows = 0, separate_rows = 0;
    for (int round = 0; round < 12; ++round) {
        for (const std::size_t heads : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 12u, 32u}) {
            for (const likeness how : {likeness::correlated, likeness::independent, likeness::identical}) {
                const auto group = random_group(d, heads, 5 + d.below(1200), how);
                const tolerance t{d.log_between(1e-3, 0.5), d.chance(0.5) ? 0.1 : d.log_between(1e-4, 0.9)};
                const auto joint = planned(group, t);
                const auto own = planned(group, t, group_plan::per_head);
                INFO("round " << round << ", heads " << heads << ", likeness " << static_cast<int>(how) << ", n "
                              << group[0].size() << ", epsilon " << t.epsilon << ", delta " << t.delta);
                CHECK(group_fault(group, joint, t, true) == "");
                CHECK(all_certify(joint, t));
                const double rows = expected_rows(group[0], joint[0]);
                const double separate = union_rows(group, own);
                CHECK(rows <= separate * (1 + 1e-4) + 1e-4);
                for (std::size_t h = 0; h < heads; ++h) {
                    CHECK(joint[h].certificate_before == Approx(own[h].certificate_before).epsilon(1e-5));
                    const real direct = bound_of(moments_of_plan(group[h], joint[h]), log_term_of(t));
                    CHECK(direct < static_cast<real>(t.epsilon) * (1 + 1e-5L));
                    near += close(static_cast<real>(joint[h].certificate_after), direct, 1e-4L);
                    ++heads_in_all;
                }
                if (how == likeness::identical) {
                    CHECK(rows == Approx(expected_rows(group[0], own[0])).epsilon(0.01).margin(0.01));
                } else if (how == likeness::independent && heads > 2) {
                    joint_rows += rows;
                    separate_rows += separate;
                }
                raising += rows > 0;
            }
        }
    }
    CHECK(raising > 200);
    CHECK(near > heads_in_all * 98 / 100);  // the others have a token at r' = 1, where b jumps
    CHECK(joint_rows < 0.97 * separate_rows);
}

TEST_CASE("water-filling: plans apart are those of the heads alone, and so is a group of one") {
    dice d(22);
    for (const std::size_t heads : {1u, 3u, 8u}) {
        const auto group = random_group(d, heads, 700, likeness::independent);
        const tolerance t{0.05, 0.1};
        const auto apart = planned(group, t, heads == 1 ? group_plan::joint : group_plan::per_head);
        for (std::size_t h = 0; h < heads; ++h) {
            planner::workspace w;
            plan p;
            planner{}.plan(cpu{}, group[h].view(), t, w, p);
            CHECK(apart[h].entries == p.entries);
            CHECK(apart[h].certificate_after == p.certificate_after);
            CHECK(apart[h].level == p.level);
            CHECK(level_fault(group[h], apart[h], t) == "");
        }
    }
    CHECK(planned({}, {0.1, 0.1}).empty());
}

TEST_CASE("water-filling: a head whose masses are no numbers leaves the others to themselves") {
    dice d(23);
    for (const std::size_t bad : {0u, 1u, 2u}) {
        auto group = random_group(d, 3, 500, likeness::correlated);
        group[bad].mass[100] = std::numeric_limits<float>::quiet_NaN();
        group[bad].odds[100] = group[0].odds[100];
        const tolerance t{0.02, 0.1};
        const auto joint = planned(group, t);
        for (std::size_t h = 0; h < 3; ++h) {
            if (h == bad) {
                CHECK(std::isnan(joint[h].certificate_after));
                CHECK(joint[h].entries.empty());
            } else {
                CHECK(level_fault(group[h], joint[h], t) == "");
            }
        }
    }
}

TEST_CASE("water-filling: a group that needs nothing fetches nothing") {
    dice d(24);
    const auto group = random_group(d, 4, 300, likeness::correlated);
    for (const plan& p : planned(group, {1e6, 0.1})) {
        CHECK(p.entries.empty());
        CHECK(std::isinf(p.level));
        CHECK(p.certificate_after == p.certificate_before);
    }
}

TEST_CASE("water-filling: plans at given levels") {
    dice d(25);
    std::size_t higher = 0;
    for (int round = 0; round < 20; ++round) {
        for (const std::size_t heads : {1u, 2u, 5u, 9u}) {
            for (const group_plan how : {group_plan::per_head, group_plan::joint}) {
                const auto group = random_group(d, heads, 5 + d.below(900), likeness::correlated);
                const tolerance t{0.1, 0.1};
                std::vector<double> level;
                for (std::size_t h = 0; h < heads; ++h) {
                    level.push_back(d.chance(0.1) ? std::numeric_limits<double>::infinity() : d.log_between(1e-5, 1));
                }
                const bool joint = how == group_plan::joint && heads > 1;
                const auto check = [&](const std::vector<plan>& plans) {
                    for (std::size_t h = 0; h < heads; ++h) {
                        CHECK(plans[h].level == Approx(level[h]).epsilon(1e-6));
                    }
                    if (joint) {
                        CHECK(group_fault(group, plans, t, false) == "");
                        return;
                    }
                    for (std::size_t h = 0; h < heads; ++h) {
                        CHECK(wishes_fault(group[h], plans[h], [&](std::size_t i) {
                                  return static_cast<double>(group[h].mass[i]) / group[h].reference / level[h];
                              }) == "");
                        const real own = bound_of(moments_of_plan(group[h], plans[h]), log_term_of(t));
                        CHECK(static_cast<real>(plans[h].certificate_after) >= own * (1 - 1e-4L));
                    }
                };
                auto plans = planned_at(group, level, t, how);
                check(plans);
                for (int step = 0; step < 6; ++step) {
                    level[d.below(heads)] /= 1.15;
                    const auto lower = planned_at(group, level, t, how);
                    check(lower);
                    for (std::size_t h = 0; h < heads; ++h) {
                        const floats a = probabilities_of(group[h], plans[h]);
                        const floats b = probabilities_of(group[h], lower[h]);
                        std::size_t lowered = 0;
                        for (std::size_t i = 0; i < a.size(); ++i) {
                            lowered += b[i] < a[i] * (1 - 1e-6f);
                            higher += b[i] > a[i];
                        }
                        CHECK(lowered == 0);
                        CHECK(lower[h].certificate_after <= plans[h].certificate_after * (1 + 1e-5));
                    }
                    plans = lower;
                }
            }
        }
    }
    CHECK(higher > 1000);
}

TEST_CASE("water-filling: the levels of a plan lead back to it, or to more") {
    dice d(26);
    std::size_t same = 0;
    for (int round = 0; round < 40; ++round) {
        const auto group = random_group(d, 1 + d.below(6), 600, likeness::correlated);
        const tolerance t{d.log_between(0.005, 0.3), 0.1};
        const auto plans = planned(group, t);
        const auto again = planned_at(group, levels_of(plans), t);
        const floats a = probabilities_of(group[0], plans[0]);
        const floats b = probabilities_of(group[0], again[0]);
        std::size_t less = 0, more = 0;
        for (std::size_t i = 0; i < a.size(); ++i) {
            less += b[i] < a[i] * (1 - 1e-5f);
            more += b[i] > a[i] * (1 + 1e-5f);
        }
        CHECK(less == 0);
        same += more == 0;
        for (std::size_t h = 0; h < group.size(); ++h) {
            CHECK(again[h].certificate_after <= plans[h].certificate_after * (1 + 1e-4));
        }
    }
    CHECK(same > 30);
}

TEST_CASE("water-filling: a workspace that planned for one group's masses plans for another's") {
    dice d(2611);
    const auto first = random_group(d, 3, 800, likeness::correlated);
    const auto second = random_group(d, 3, 800, likeness::correlated);
    const std::vector<double> level(3, 0.02);
    verkv::water_filling<> planner;
    verkv::water_filling<>::workspace used, fresh;
    std::vector<plan> out(3), expected(3);
    planner.plan_at(verkv::cpu{}, views_of(first), level, {0.05, 0.1}, used, out);
    planner.plan_at(verkv::cpu{}, views_of(second), level, {0.05, 0.1}, used, out);
    planner.plan_at(verkv::cpu{}, views_of(second), level, {0.05, 0.1}, fresh, expected);
    for (std::size_t h = 0; h < 3; ++h) {
        CHECK(out[h].entries == expected[h].entries);
        CHECK(out[h].certificate_after == expected[h].certificate_after);
    }
}

TEST_CASE("water-filling: groups and levels that are refused") {
    dice d(27);
    const auto group = random_group(d, 3, 50, likeness::correlated);
    const auto m = views_of(group);
    planner::workspace w;
    std::vector<plan> out(3);
    const tolerance t{0.1, 0.1};
    const auto at = [&](std::vector<double> level) {
        return [&, level] { planner{}.plan_at(cpu{}, m, level, t, w, out); };
    };
    const double nan = std::numeric_limits<double>::quiet_NaN();
    CHECK(refused(at({1, 1}), {"2 levels", "3"}));
    CHECK(refused(at({1, 0, 1}), {"query head 1", "0"}));
    CHECK(refused(at({1, 1, -2}), {"query head 2", "-2"}));
    CHECK(refused(at({nan, 1, 1}), {"query head 0"}));
    CHECK(refused([&] { planner{}.plan_group(cpu{}, m, t, w, std::span(out).first(2)); }, {"2 plans", "3"}));
    CHECK(refused(
        [&] {
            planner{}.plan_at(cpu{}, m, std::vector<double>{1, 1, 1}, t, w, std::span(out).first(2));
        },
        {"2 plans", "3"}));
    auto ragged = m;
    ragged[2].mass = ragged[2].mass.first(49);
    ragged[2].odds = ragged[2].odds.first(49);
    CHECK(refused([&] { planner{}.plan_group(cpu{}, ragged, t, w, out); }, {"50", "49"}));
    CHECK(refused([&] { planner{}.plan_at(cpu{}, ragged, std::vector<double>{1, 1, 1}, t, w, out); }, {"50", "49"}));
    CHECK(refused([&] { planner{}.plan_group(cpu{}, m, {0, 0.1}, w, out); }, {"epsilon"}));
    CHECK(refused([&] { planner{}.plan_at(cpu{}, m, std::vector<double>{1, 1, 1}, {0.1, 0}, w, out); }, {"delta"}));
}

TEST_CASE("water-filling: plans of a group take no memory after reserve()") {
    dice d(28);
    for (const std::size_t heads : {1u, 3u, 8u}) {
        planner::workspace w;
        w.reserve(2000, heads);
        std::vector<plan> out(heads);
        for (plan& p : out) {
            p.entries.reserve(2000);
        }
        for (int round = 0; round < 20; ++round) {
            const auto group = random_group(d, heads, round == 0 ? 2000 : 1 + d.below(2000), likeness::correlated);
            const auto m = views_of(group);
            const std::vector<double> level(heads, d.log_between(1e-5, 1));
            const tolerance t{d.log_between(1e-4, 1), 0.1};
            CHECK(allocations_of([&] {
                      planner{}.plan_group(cpu{}, m, t, w, out);
                      planner{}.plan_at(cpu{}, m, level, t, w, out);
                  }) == 0);
        }
    }
}
