// One decode step of one KV head: weigh, plan, fetch, check, attend.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "verkv/cache/detail/weighing.hpp"
#include "verkv/certify/level_steps.hpp"
#include "verkv/certify/sample_check.hpp"
#include "verkv/certify/target.hpp"
#include "verkv/core/random.hpp"

namespace verkv::inline v0::detail {

template <class T, class Sketch, class Planner, class Exact, class Target, class Backend>
struct step : weighing<T, Sketch, Planner, Exact, Backend> {
    const Target& target;
    std::span<const position_t> draw_position;  // of each token at the draw
    uniform_stream fresh;                       // of this step
    std::size_t scored = 0;                     // fetched rows whose logits are known

    using base = weighing<T, Sketch, Planner, Exact, Backend>;
    using base::exec, base::planner, base::policies, base::promise, base::key_dim, base::value_dim, base::host,
        base::device, base::staging, base::head, base::w, base::report, base::head_reports, base::heads, base::tokens,
        base::matrix, base::queries, base::scale;

    static constexpr bool needs_values = value_target<Target, Backend>;
    static constexpr bool can_lower = lowering_planner<Planner, Backend>;
    /// What the check knows how to look at. Another target of weights has masses that are its own affair.
    static constexpr bool can_check = can_lower && (needs_values || std::is_same_v<Target, denominator>);

    /// Plans that are proven as they stand: by weights that are exact or bounded, for a target that guesses nothing.
    [[nodiscard]] bool proven() const {
        bool known = is_exact<Sketch> || this->carries_bounds();
        if constexpr (needs_values) {
            known = known && target.certain();
        }
        return known;
    }

    [[nodiscard]] bool checks() const { return can_check && policies.check.rounds > 0 && !proven(); }

    void run(matrix_view<float> output, std::span<float> lse) {
        lap_timer timer;
        report = {};
        report.tokens = tokens();
        report.rows_resident = head.resident.size();
        for (const token_index t : w.fetched) {
            w.fetched_slot[t] = 0;
        }
        w.fetched.clear();
        this->weigh_tokens();
        report.sketch_seconds = timer.lap();
        start_sample();
        if (checks()) {
            calibrate();
        }
        make_masses(timer);
        make_plans();
        lower_to_calibration();
        use_plans();
        report.decide_seconds += timer.lap();
        std::size_t before = 0;
        while (true) {
            report.rows_by_round[report.rounds] = static_cast<std::uint32_t>(w.fetched.size() - before);
            before = w.fetched.size();
            if (checks()) {
                score_fetched(timer);
            }
            if (!checks() || check(timer) || report.rounds == policies.check.rounds) {
                break;
            }
            ++report.rounds;
            if (report.rounds < policies.check.rounds) {
                lower();
            } else {
                take_everything();
            }
            use_plans();
            report.decide_seconds += timer.lap();
        }
        report.rows_fetched = w.fetched.size();
        attend(output, lse, timer);
        refuse_nan(output, lse);
        report.attend_seconds += timer.lap();
    }

private:
    /// A view of a [G, n] array whose rows are `columns` long.
    matrix_view<float> fetched_view(std::vector<float>& memory, std::size_t first, std::size_t columns) const {
        return {memory.data() + first, heads(), columns, static_cast<std::ptrdiff_t>(tokens())};
    }

    /// Resident rows with the probabilities of the draw, no other row.
    void start_sample() {
        const auto log_weight = matrix(w.resident_log_weight, head.resident.size());
        for (std::size_t g = 0; g < heads(); ++g) {
            std::copy(head.log_weight.begin(), head.log_weight.end(), log_weight.row(g).begin());
        }
        if (checks()) {
            const auto probability = matrix(w.resident_probability, head.resident.size());
            for (std::size_t i = 0; i < head.resident.size(); ++i) {
                probability.row(0)[i] = head.probability[head.resident_token[i]];
            }
            for (std::size_t g = 1; g < heads(); ++g) {
                std::copy(probability.row(0).begin(), probability.row(0).end(), probability.row(g).begin());
            }
        }
        for (std::size_t g = 0; g < heads(); ++g) {
            head_reports[g] = {};
            w.steps[g] = 0;
        }
    }

    /// What errors are measured against, this far below the sum of all masses, leaves no room for an estimate:
    /// everything is fetched.
    static constexpr double least_reference = 0x1p-40;

    [[nodiscard]] bool weighable(std::size_t g) const {
        return std::isfinite(w.total[g]) && w.total[g] > 0 && w.reference[g] >= 0;
    }

    /// By how much the sketch's errors make V larger than the plan thinks, as the resident rows tell, whose exact
    /// logits are known anyway: with V = kappa sum m^ over the tokens between r and 1, and m = m^ e^error, the mean of
    /// e^{2 error} weighted by m^/r, relative to what the errors do to D.
    void calibrate() {
        const auto logits = matrix(w.resident_logits, head.resident.size());
        const auto weights = matrix(w.weights, tokens());
        for (std::size_t g = 0; g < heads(); ++g) {
            const std::span<float> known{w.scratch.data(), head.resident.size()};
            std::copy_n(logits.row(g).data(), known.size(), known.data());
            exponentiate(known, w.shift[g]);
            double spread = 0;
            double planned = 0;
            double denominator = 0;
            for (std::size_t i = 0; i < known.size(); ++i) {
                const token_index t = head.resident_token[i];
                const float odds = head.odds[t];
                const float share = known[i] * (1 + odds);  // m/r
                denominator += static_cast<double>(share);
                if (odds > 0) {
                    const float estimate = larger(weights.row(g)[t], 1e-30f);
                    planned += static_cast<double>(estimate * (1 + odds));
                    spread += static_cast<double>(share) * static_cast<double>(known[i] / estimate);
                }
            }
            const double share = w.total[g] / denominator;
            w.inflation[g] = planned > 0 ? spread / planned * share * share : 1;
        }
    }

    /// Lowers the levels of plans by the inflation, on the grid of the check.
    void lower_to_calibration() {
        if constexpr (can_lower) {
            if (!checks()) {
                return;
            }
            bool any = false;
            for (std::size_t g = 0; g < heads(); ++g) {
                if (!std::isfinite(w.plans[g].certificate_after)) {
                    return;
                }
                const double steps = steps_of_inflation(w.inflation[g], policies.check.step);
                if (steps >= 1 && w.plans[g].raised > 0) {
                    w.level[g] *= std::pow(policies.check.step, -steps);
                    any = true;
                }
            }
            if (any) {
                planner.plan_at(exec, w.masses, w.level, promise, w.planner, w.plans);
            }
        }
    }

    /// ||o^|| of the last attend() into w.output.
    [[nodiscard]] double output_norm(std::size_t g) const {
        double square = 0;
        for (const float x : matrix(w.output, value_dim).row(g)) {
            square += static_cast<double>(x) * static_cast<double>(x);
        }
        return std::sqrt(square);
    }

    /// A power of two that brings a length near 1.
    static double unit_for(double length) {
        return length > 0 && std::isfinite(length) ? std::exp2(-std::ilogb(length)) : 1;
    }

    void make_masses(lap_timer& timer) {
        const auto weights = matrix(w.weights, tokens());
        [[maybe_unused]] double longest_radius = 0;
        if constexpr (needs_values) {
            longest_radius = static_cast<double>(largest_of(head.radius));
            // ||o|| and ||o - c|| from the resident rows. It looks at the draw: the check has to make up for it, or a
            // target that needs neither.
            report.decide_seconds += timer.lap();
            attend(matrix(w.output, value_dim), w.lse, timer);
            report.attend_seconds += timer.lap();
        }
        for (std::size_t g = 0; g < heads(); ++g) {
            w.holds[g] = 1;
            if (!weighable(g)) {
                continue;
            }
            const double reference = larger(w.reference[g], w.total[g] * least_reference);
            masses_view& masses = w.masses[g];
            if constexpr (needs_values) {
                double square = 0;
                for (std::size_t c = 0; c < value_dim; ++c) {
                    const double d =
                        static_cast<double>(w.output[g * value_dim + c]) - static_cast<double>(head.centre[c]);
                    square += d * d;
                }
                const double distance = std::sqrt(square);
                const double norm = output_norm(g);
                w.unit[g] = unit_for(larger(larger(longest_radius, distance), target.limit(promise, norm)));
                // ||o|| is uncertain by the sample's own error. Where a check follows, the plan starts with room for
                // it: what is fetched too early is not given back, and what is missing the check finds.
                masses = target.masses(exec, weights.row(g), head.odds, reference,
                                       {head.radius, distance, norm, w.unit[g]}, promise);
                masses.reference *= checks() ? 1.25 : 1.0;
            } else {
                masses = target.masses(weights.row(g), head.odds, reference);
                if (masses.total > 0) {
                    masses.total = larger(masses.total, w.total[g]);
                }
            }
            w.holds[g] = w.reference[g] >= w.total[g] * least_reference && masses.reference > 0 &&
                         masses.reference >= masses.total * least_reference;
            if (w.holds[g] == 0) {
                masses.reference = masses.total > 0 && std::isfinite(masses.total) ? masses.total : 1.0;
            }
        }
    }

    void make_plans() {
        bool all = true;
        for (std::size_t g = 0; g < heads(); ++g) {
            all = all && weighable(g);
        }
        if constexpr (group_planner<Planner, Backend>) {
            if (all) {
                planner.plan_group(exec, w.masses, promise, w.planner, w.plans);
            }
        }
        for (std::size_t g = 0; g < heads(); ++g) {
            plan& p = w.plans[g];
            if (!weighable(g)) {
                // No token, or a key that is not a number: nothing to plan, and nothing to certify.
                p.clear();
                p.certificate_before = p.certificate_after =
                    tokens() == 0 ? 0 : std::numeric_limits<double>::quiet_NaN();
            } else if (!all || !group_planner<Planner, Backend>) {
                planner.plan(exec, w.masses[g], promise, w.planner, p);
            }
            w.level[g] = p.level;
            head_reports[g].certificate_before = p.certificate_before;
        }
        take_everything();
    }

    /// Whether a plan uses a token that it raises. One that is not resident had U >= r; where the sample was adopted,
    /// no more than that is known of its U, and its stored uniform says so.
    [[nodiscard]] bool uses(const plan_entry& e) const {
        if (e.probability >= 1) {
            return true;
        }
        const float r = head.probability[e.token];
        if (!(e.probability > r)) {
            return false;
        }
        double u = static_cast<double>(head.uniform[e.token]);
        if (policies.uniforms == uniform_policy::fresh) {
            const auto low = static_cast<double>(r);
            u = low + (1 - low) * uniform(fresh, draw_position[e.token]);
        }
        return sampled(static_cast<double>(e.probability), u);
    }

    /// Writes the plans' probabilities over those of the sample, and lists the rows that they add.
    void use_plans() {
        for (std::size_t g = 0; g < heads(); ++g) {
            const plan& p = w.plans[g];
            head_reports[g].rows_shrunk = static_cast<std::uint32_t>(p.shrunk);
            head_reports[g].certificate_after = p.certificate_after;
            if (g > 0 && p.joint && w.plans[0].joint) {
                copy_uses(0, g);
            } else {
                use_plan(g, p);
            }
        }
    }

    void use_plan(std::size_t g, const plan& p) {
        const auto log_weight = matrix(w.resident_log_weight, head.resident.size()).row(g);
        const auto fetched_log_weight = fetched_view(w.fetched_log_weight, 0, tokens()).row(g);
        float* probability = nullptr;
        float* fetched_probability = nullptr;
        if (checks()) {
            probability = matrix(w.resident_probability, head.resident.size()).row(g).data();
            fetched_probability = fetched_view(w.fetched_probability, 0, tokens()).row(g).data();
        }
        std::uint32_t planned = 0;
        inverse_weights some;
        for (const plan_entry& e : p.entries) {
            float* to = nullptr;
            if (const std::uint32_t slot = head.slot[e.token]; slot != head.offloaded) {
                to = &log_weight[slot];
                if (probability) {
                    probability[slot] = e.probability;
                }
            } else if (uses(e)) {
                ++planned;
                const std::uint32_t place = place_of(e.token);
                to = &fetched_log_weight[place];
                if (fetched_probability) {
                    fetched_probability[place] = e.probability;
                }
            }
            if (to) {
                some.add(to, e);
            }
        }
        some.write();
        head_reports[g].rows_planned = planned;
    }

    /// log(lambda/r') of plan entries, some at a time, each to where it belongs.
    class inverse_weights {
    public:
        void add(float* to, const plan_entry& e) {
            to_[count_] = to;
            ratio_[count_] = e.shrinkage / e.probability;
            if (!(ratio_[count_] < 0x1p126f)) {  // in float, the ratio may be infinite
                *to = static_cast<float>(std::log(static_cast<double>(e.shrinkage)) -
                                         std::log(static_cast<double>(e.probability)));
                return;
            }
            if (++count_ == capacity) {
                write();
            }
        }
        void write() {
            logarithms(std::span<float>(ratio_).first(count_));
            for (std::size_t i = 0; i < count_; ++i) {
                *to_[i] = ratio_[i];
            }
            count_ = 0;
        }

    private:
        static constexpr std::size_t capacity = 64;
        std::size_t count_ = 0;
        std::array<float*, capacity> to_;
        std::array<float, capacity> ratio_;
    };

    /// The place of a token among the fetched rows, where it is put if it is not there yet, for no head so far.
    std::uint32_t place_of(token_index token) {
        std::uint32_t& slot = w.fetched_slot[token];
        if (slot == 0) {
            w.fetched.push_back(token);
            slot = static_cast<std::uint32_t>(w.fetched.size());
            const auto log_weight = fetched_view(w.fetched_log_weight, 0, tokens());
            const auto probability = fetched_view(w.fetched_probability, 0, tokens());
            for (std::size_t h = 0; h < heads(); ++h) {
                log_weight.row(h)[slot - 1] = -std::numeric_limits<float>::infinity();
                if (checks()) {
                    probability.row(h)[slot - 1] = 0;
                }
            }
        }
        return slot - 1;
    }

    /// What one head's plan made of the sample, for another with the same plan.
    void copy_uses(std::size_t from, std::size_t to) {
        const std::size_t resident = head.resident.size();
        const std::size_t fetched = w.fetched.size();
        const auto copy = [&](const matrix_view<float>& m, std::size_t n) {
            std::copy_n(m.row(from).data(), n, m.row(to).data());
        };
        copy(matrix(w.resident_log_weight, resident), resident);
        copy(fetched_view(w.fetched_log_weight, 0, tokens()), fetched);
        if (checks()) {
            copy(matrix(w.resident_probability, resident), resident);
            copy(fetched_view(w.fetched_probability, 0, tokens()), fetched);
        }
        head_reports[to].rows_planned = head_reports[from].rows_planned;
    }

    /// Calls use(first, rows) for the fetched rows from `from` on, staged, as many at a time as there is room for.
    template <class Use>
    void for_staged(std::size_t from, lap_timer& timer, Use&& use) {
        const std::size_t bytes = host.width() * sizeof(T);
        for (std::size_t first = from; first < w.fetched.size();) {
            const std::size_t n = smaller(head.staging.capacity(), w.fetched.size() - first);
            report.attend_seconds += timer.lap();
            const std::size_t copied = head.staging.stage(
                {w.fetched.data() + first, n}, {w.staged_rows.data(), n}, [&](token_index token, row_id to) {
                    std::memcpy(static_cast<void*>(staging.row(to)), host.row(head.host[token]), bytes);
                });
            report.rows_copied += copied;
            report.bytes_moved += copied * bytes;
            report.fetch_seconds += timer.lap();
            use(first, std::span<const row_id>{w.staged_rows.data(), n});
            first += n;
        }
    }

    /// Exact logits of the rows that are new. All rows are staged again where they fit together, so that none of an
    /// earlier round makes room for one of this; where they do not, attend() reads them a second time.
    void score_fetched(lap_timer& timer) {
        const std::size_t from = w.fetched.size() <= head.staging.capacity() ? 0 : scored;
        if (scored < w.fetched.size()) {
            for_staged(from, timer, [&](std::size_t first, std::span<const row_id> rows) { score(first, rows); });
            report.attend_seconds += timer.lap();
        }
    }

    /// Logits of those of the staged rows that have none yet.
    void score(std::size_t first, std::span<const row_id> rows) {
        const std::size_t skip = first < scored ? smaller(scored - first, rows.size()) : 0;
        if (skip < rows.size()) {
            score_rows(exec, queries(), scale, staging.view(rows.subspan(skip), 0, key_dim),
                       fetched_view(w.fetched_logits, first + skip, rows.size() - skip));
            scored = first + rows.size();
        }
    }

    matrix_view<float> scratch(std::size_t columns) const { return matrix(w.scratch, columns); }

    /// Attention over the sample as it stands.
    void attend(matrix_view<float> output, std::span<float> lse, lap_timer& timer) {
        w.sum.reset(heads(), value_dim);
        const auto add = [&](const matrix_view<float>& logits, const matrix_view<float>& log_weight, rows<T> values) {
            const auto sum = scratch(values.count);
            for (std::size_t g = 0; g < heads(); ++g) {
                std::copy_n(logits.row(g).data(), values.count, sum.row(g).data());
                add_log_weights(sum.row(g), log_weight.row(g).data());
            }
            w.sum.add(exec, sum, values);
        };
        const std::size_t resident = head.resident.size();
        add(matrix(w.resident_logits, resident), matrix(w.resident_log_weight, resident),
            device.view(head.resident, key_dim, value_dim));
        for_staged(0, timer, [&](std::size_t first, std::span<const row_id> rows) {
            score(first, rows);
            add(fetched_view(w.fetched_logits, first, rows.size()),
                fetched_view(w.fetched_log_weight, first, rows.size()), staging.view(rows, key_dim, value_dim));
        });
        w.sum.finish(output, lse);
    }

    /// The certificates that the sample makes, by itself; whether all hold.
    bool check(lap_timer& timer) {
        if constexpr (needs_values) {
            report.decide_seconds += timer.lap();
            attend(matrix(w.output, value_dim), w.lse, timer);
            measure_distances(timer);
            report.attend_seconds += timer.lap();
        }
        bool all = true;
        const double log_term = promise.log_term();
        for (std::size_t g = 0; g < heads(); ++g) {
            w.holds[g] = 1;
            if (!weighable(g) || !std::isfinite(w.plans[g].certificate_after)) {
                continue;
            }
            const observed_moments seen = observe_head(g);
            double room = seen.denominator / (1 + promise.epsilon);
            if constexpr (needs_values) {
                room = seen.denominator * (target.limit(promise, output_norm(g)) * w.unit[g]);
            }
            head_reports[g].certificate_observed = observed_certificate(seen.moments, seen.denominator, room, log_term);
            w.holds[g] = head_reports[g].certificate_observed < promise.epsilon;
            all = all && w.holds[g] != 0;
        }
        report.decide_seconds += timer.lap();
        return all;
    }

    /// What the sample says of D and V, see difference_estimate().
    observed_moments observe_head(std::size_t g) {
        const std::size_t resident = head.resident.size();
        const auto part = [&](const matrix_view<float>& m) {
            return std::span<const float>(m.row(g).data(), m.columns);
        };
        const auto resident_logits = part(matrix(w.resident_logits, resident));
        const auto fetched_logits = part(fetched_view(w.fetched_logits, 0, w.fetched.size()));
        // A row that only a sibling uses may have the largest logit: it then stands for a smaller one, harmlessly.
        const float top = larger(larger(largest_of(resident_logits), largest_of(fetched_logits)), w.shift[g]);
        const float unit = std::exp(w.shift[g] - top);  // of planned masses
        observed_moments seen;
        const auto observe_part = [&](std::span<const float> logits, const matrix_view<float>& probability,
                                      std::span<const float> distance, auto&& token_of) {
            const std::span<float> sum{w.scratch.data(), logits.size()};
            std::copy(logits.begin(), logits.end(), sum.begin());
            for (std::size_t i = 0; i < logits.size(); ++i) {
                w.share[i] = w.masses[g].mass[token_of(i)] * unit;
            }
            observe(sum, top, part(probability), distance, std::span<const float>(w.share).first(logits.size()), seen);
        };
        const bool by_distance = needs_values;
        observe_part(resident_logits, matrix(w.resident_probability, resident),
                     by_distance ? part(matrix(w.resident_distance, resident)) : std::span<const float>{},
                     [&](std::size_t i) { return head.resident_token[i]; });
        observe_part(
            fetched_logits, fetched_view(w.fetched_probability, 0, w.fetched.size()),
            by_distance ? part(fetched_view(w.fetched_distance, 0, w.fetched.size())) : std::span<const float>{},
            [&](std::size_t i) { return w.fetched[i]; });
        const double reference = w.masses[g].reference * static_cast<double>(unit);
        const double all = w.plans[g].variance * reference * reference;
        seen.moments.variance = difference_estimate(all, seen.moments.variance, seen.planned);
        return seen;
    }

    /// Lengths of all rows of the sample: sqrt(||v - o^||^2 + s^2), in units, s what t/D^ may be: then t bounds the
    /// error of D^ as well. ||v - o^||^2 = R^2 - 2 <v - c, u> + ||u||^2 with u = o^ - c.
    void measure_distances(lap_timer& timer) {
        for (std::size_t g = 0; g < heads(); ++g) {
            for (std::size_t c = 0; c < value_dim; ++c) {
                const std::size_t i = g * value_dim + c;
                w.offset[i] = static_cast<float>(
                    (static_cast<double>(w.output[i]) - static_cast<double>(head.centre[c])) * w.unit[g]);
            }
        }
        const rows<float> offsets{w.offset.data(), static_cast<std::ptrdiff_t>(value_dim), heads(), value_dim, nullptr};
        const auto finish = [&](const matrix_view<float>& product, auto&& token_of) {
            for (std::size_t g = 0; g < heads(); ++g) {
                float own = 0;
                float square = 0;
                for (std::size_t c = 0; c < value_dim; ++c) {
                    own += offsets[g][c] * head.centre[c];
                    square += offsets[g][c] * offsets[g][c];
                }
                const double length = denominator_share * target.limit(promise, output_norm(g)) * w.unit[g];
                const auto beside = static_cast<float>(length * length);
                for (std::size_t i = 0; i < product.columns; ++i) {
                    const auto r = static_cast<float>(static_cast<double>(head.radius[token_of(i)]) * w.unit[g]);
                    const float sum = r * r + square;
                    const auto inner = static_cast<float>(
                        (static_cast<double>(product.row(g)[i]) - static_cast<double>(own)) * w.unit[g]);
                    // Of the difference, what rounding leaves.
                    product.row(g)[i] = std::sqrt(larger(sum - 2 * inner, 0x1p-18f * sum) + beside);
                }
            }
        };
        const auto resident = matrix(w.resident_distance, head.resident.size());
        score_rows(exec, offsets, 1.0f, device.view(head.resident, key_dim, value_dim), resident);
        finish(resident, [&](std::size_t i) { return head.resident_token[i]; });
        for_staged(0, timer, [&](std::size_t first, std::span<const row_id> rows) {
            const auto part = fetched_view(w.fetched_distance, first, rows.size());
            score_rows(exec, offsets, 1.0f, staging.view(rows, key_dim, value_dim), part);
            finish(part, [&](std::size_t i) { return w.fetched[first + i]; });
        });
    }

    /// Lowers the levels of the heads that do not hold, by as many steps of the grid as the sample says are missing.
    void lower() {
        if constexpr (can_lower) {
            const double ratio = policies.check.step;
            for (std::size_t g = 0; g < heads(); ++g) {
                if (w.holds[g] != 0) {
                    continue;
                }
                const double observed = head_reports[g].certificate_observed;
                const double steps =
                    steps_to_lower(observed, promise.epsilon, ratio, report.rounds, w.steps[g], w.observed[g]);
                w.steps[g] = steps;
                w.observed[g] = observed;
                w.level[g] = (std::max)((std::min)(w.level[g], top_of_grid(g)) * std::pow(ratio, -steps), 0x1p-100);
            }
            for (std::size_t g = 0; g < heads(); ++g) {
                if (!std::isfinite(w.plans[g].certificate_after)) {
                    return take_everything();  // a sibling is not a number
                }
            }
            planner.plan_at(exec, w.masses, w.level, promise, w.planner, w.plans);
        }
    }

    /// Where the grid of a plan that raised nothing starts: above it no certificate holds, or no token is raised.
    [[nodiscard]] double top_of_grid(std::size_t g) const {
        const double top = 1.5 * promise.epsilon / promise.log_term();
        if (std::isfinite(w.level[g])) {
            return top;
        }
        const masses_view& m = w.masses[g];
        float highest = 0;  // m/r of the tokens that may be raised
        for (std::size_t i = 0; i < m.mass.size(); ++i) {
            highest = larger(m.odds[i] > 0 ? m.mass[i] * (1 + m.odds[i]) : 0.0f, highest);
        }
        return (std::min)(top, static_cast<double>(highest) / m.reference);
    }

    /// Everything that is left, for the heads that do not hold.
    void take_everything() {
        for (std::size_t g = 0; g < heads(); ++g) {
            plan& p = w.plans[g];
            if (w.holds[g] != 0 || !std::isfinite(p.certificate_after)) {
                continue;
            }
            p.fetch_all(head.odds);
            p.certificate_after = p.variance = 0;
        }
    }

    /// Some key is not a number, and rows that were read may not show it; the answer has to.
    void refuse_nan(matrix_view<float> output, std::span<float> lse) {
        for (std::size_t g = 0; g < heads(); ++g) {
            head_reports[g].denominator_lse = w.sum.log_sum(g);
            if (std::isnan(w.plans[g].certificate_after)) {
                constexpr float nan = std::numeric_limits<float>::quiet_NaN();
                std::fill_n(output.row(g).data(), value_dim, nan);
                lse[g] = nan;
                head_reports[g].denominator_lse = std::numeric_limits<double>::quiet_NaN();
            }
        }
    }
};

}  // namespace verkv::inline v0::detail
