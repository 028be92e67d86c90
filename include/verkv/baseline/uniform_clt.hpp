// vAttention as its theorem says: heavy tokens for certain, a uniform sample of the rest, as large as the central limit
// theorem asks for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "verkv/baseline/clt_budget.hpp"
#include "verkv/baseline/detail/choose.hpp"
#include "verkv/baseline/selection.hpp"

namespace verkv::inline v0 {

/// vAttention (Desai et al. 2025, arXiv 2510.05688). Fixed tokens and the heaviest by their estimates are exact. Of the
/// m others, b are drawn uniformly and count m/b times, each:
///     N^ = sum_exact w v + (m/b) sum_drawn w v,   D^ likewise.
/// b is clt_draws() for the denominator, or split_quotient() for the output, with the spread and the size of both sums
/// from a pilot, a uniform sample of the m before the other; b is at least the pilot's size, less would be to trust a
/// variance more than what it is known from. b >= m: every row is read, and nothing is estimated.
///
/// The paper's guarantee is asymptotic: P(relative error > epsilon) -> at most delta as b grows. Nothing holds for a
/// finite b: where a few of the m tokens have most of their weight, the pilot misses them, takes the spread for small,
/// and so does the sample. docs/baselines.md has what that comes to.
///
/// Reads: heavy and drawn rows; the pilot's keys, with output as the target or the pilot kept its values as well.
/// Ranking reads nothing: it goes by the estimates.
struct uniform_clt {
    enum class target_of_draws { denominator, output };
    enum class replacement {
        without,  ///< the theorem's variance is then too large, by (m - 1)/(m - b): it errs on the safe side
        with,     ///< the theorem's variance; a token drawn k times counts k m/b times
    };
    enum class pilot_rows {
        discard,  ///< the sample is drawn from all m tokens, whatever the pilot was: the paper's Algorithm 2
        keep,  ///< pilot rows count once, as exact ones, and the sample is drawn from the others: given the pilot it is
               ///< a uniform sample still, and D^ unbiased. For the same rows the estimate has less variance
    };

    token_count heavy = token_count::share(0.02);  ///< exact tokens beside the fixed ones
    double pilot = 0.02;                           ///< share of the m tokens, (0, 1]; 2 tokens at least
    target_of_draws target = target_of_draws::denominator;
    replacement draws = replacement::without;
    pilot_rows pilot_use = pilot_rows::discard;
    quotient_rule quotient = quotient_rule::lemma;
    std::optional<quotient_shares> shares = {};  ///< of the numerator; none: the split that takes the fewest draws

    /// Memory that is reused from decision to decision.
    struct workspace {
        top_k_workspace top;
        std::vector<token_index> heavy;
        std::vector<token_index> rest;   ///< the m tokens that are sampled from, shuffled as far as they were drawn
        std::vector<token_index> pilot;  ///< as drawn
        std::vector<detail::weighted_token> chosen;
        std::vector<double> numerator, mean;
    };

    /// O(n + b value_dim). Sums in double. The same inputs give the same bits; ties among heavy tokens go to the lower
    /// index. Claims promise.epsilon for its target, 0 where every row is read, nothing where sums are not finite
    /// (every row is then selected). Throws invalid_argument for lengths that differ, values that are missing where the
    /// target is the output, and a pilot, tolerance or shares out of range; `out` is then as it was.
    template <storage T>
    void select(const cpu& exec, const decision_view<T>& d, workspace& w, selection& out) const {
        detail::check_weights(d);
        validate(d.promise);
        detail::check(pilot > 0 && pilot <= 1, "a pilot of ", pilot, " of the tokens; it must lie in (0, 1]");
        const bool of_output = target == target_of_draws::output;
        const std::size_t n = d.weight.size();
        detail::check(!of_output || d.values.count == n, d.values.count, " values for ", n,
                      " tokens; the output's error depends on them");
        (void)split_quotient({}, {}, d.promise, of_output ? quotient : quotient_rule::sharp, shares);

        out.clear();
        const std::size_t first = d.fixed.free_begin(n);
        const std::size_t last = d.fixed.free_end(n);
        detail::choose_heavy(exec, d, heavy.of(last - first), w.top, w.heavy);
        list_rest(first, last, w);
        const std::size_t m = w.rest.size();
        const std::size_t pilot_size =
            (std::min)(m, (std::max)(std::size_t{2}, static_cast<std::size_t>(pilot * static_cast<double>(m))));
        if (m <= pilot_size) {
            everything(out, of_output, 0);
            detail::select_everything(n, out);
            return;
        }

        // Two sequences: the sample does not depend on who the pilot was.
        detail::uniform_sequence of_pilot(fresh_stream(d.stream, 1));
        detail::uniform_sequence of_sample(fresh_stream(d.stream, 2));
        draw(pilot_size, of_pilot, w.rest, w.pilot);
        out.inspected = w.pilot;
        std::sort(out.inspected.begin(), out.inspected.end());
        out.inspected.erase(std::unique(out.inspected.begin(), out.inspected.end()), out.inspected.end());
        const bool keep = pilot_use == pilot_rows::keep;
        if (keep) {
            take_out(out.inspected, w.rest);
        }
        const double wanted = draws_for(d, m, w.rest.size(), of_output, w);
        if (!(wanted < static_cast<double>(w.rest.size()))) {
            // All of it is read. What is not finite comes here, too.
            out.inspected.clear();
            everything(out, of_output, wanted);
            detail::select_everything(n, out);
            return;
        }
        w.chosen.clear();
        for (const token_index i : w.heavy) {
            w.chosen.push_back({i, 0.0f});
        }
        for (std::size_t j = 0; j < out.inspected.size() && keep; ++j) {
            w.chosen.push_back({out.inspected[j], 0.0f});
        }
        const auto count = (std::max)(pilot_size, static_cast<std::size_t>(std::ceil(wanted)));
        add_sample((std::min)(w.rest.size(), count), of_sample, w);
        out.inspected_values = of_output || keep;
        out.claims = of_output ? claim::output : claim::denominator;
        out.claimed_error = d.promise.epsilon;
        detail::write_selection(d.fixed, n, w.chosen, 0.0f, out);
    }

private:
    static void everything(selection& out, bool of_output, double wanted) {
        if (!std::isnan(wanted)) {
            out.claims = of_output ? claim::output : claim::denominator;
            out.claimed_error = 0;
        }
    }

    /// Free tokens that are not heavy.
    static void list_rest(std::size_t first, std::size_t last, workspace& w) {
        w.rest.clear();
        std::size_t next = 0;
        for (std::size_t i = first; i < last; ++i) {
            if (next < w.heavy.size() && w.heavy[next] == i) {
                ++next;
            } else {
                w.rest.push_back(static_cast<token_index>(i));
            }
        }
    }

    /// Draws `count` of `from`; a token drawn twice is listed twice.
    void draw(std::size_t count, detail::uniform_sequence& u, std::vector<token_index>& from,
              std::vector<token_index>& drawn) const {
        drawn.clear();
        if (draws == replacement::without) {
            detail::draw_to_front(from, 0, count, u);
            drawn.assign(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(count));
            return;
        }
        for (std::size_t j = 0; j < count; ++j) {
            drawn.push_back(from[u.below(from.size())]);
        }
    }

    /// Takes the listed tokens out of `from`; `listed` ascends.
    static void take_out(const std::vector<token_index>& listed, std::vector<token_index>& from) {
        from.erase(std::remove_if(from.begin(), from.end(),
                                  [&](token_index i) { return std::binary_search(listed.begin(), listed.end(), i); }),
                   from.end());
    }

    /// b for a sample of `population` of the m tokens, by the pilot.
    template <storage T>
    double draws_for(const decision_view<T>& d, std::size_t m, std::size_t population, bool of_output,
                     workspace& w) const {
        const std::size_t n = d.weight.size();
        const auto count = static_cast<double>(w.pilot.size());
        const std::size_t width = of_output ? d.values.width : 0;
        double denominator = 0;
        w.numerator.assign(width, 0.0);
        const auto add = [&](std::size_t i, double factor) {
            const double weight = factor * static_cast<double>(d.weight[i]);
            denominator += weight;
            for (std::size_t c = 0; c < width; ++c) {
                w.numerator[c] += weight * static_cast<double>(to_float(d.values[i][c]));
            }
        };
        // The pilot's mean, its spread about it, then the sums.
        for (const token_index i : w.pilot) {
            add(i, 1 / count);
        }
        const double mean_weight = denominator;
        w.mean = w.numerator;
        double weight_variance = 0;
        double trace = 0;
        for (const token_index i : w.pilot) {
            const auto weight = static_cast<double>(d.weight[i]);
            weight_variance += (weight - mean_weight) * (weight - mean_weight) / (count - 1);
            for (std::size_t c = 0; c < width; ++c) {
                const double off = weight * static_cast<double>(to_float(d.values[i][c])) - w.mean[c];
                trace += off * off / (count - 1);
            }
        }
        denominator *= static_cast<double>(m);
        for (double& x : w.numerator) {
            x *= static_cast<double>(m);
        }
        for (std::size_t i = 0; i < d.fixed.free_begin(n); ++i) {
            add(i, 1);
        }
        for (std::size_t i = d.fixed.free_end(n); i < n; ++i) {
            add(i, 1);
        }
        for (const token_index i : w.heavy) {
            add(i, 1);
        }
        const auto all = static_cast<double>(population);
        const sampled_sum of_weights{all * std::sqrt(weight_variance), denominator};
        if (!of_output) {
            return clt_draws(of_weights, d.promise);
        }
        double norm = 0;
        for (const double x : w.numerator) {
            norm += x * x;
        }
        return split_quotient({all * std::sqrt(trace), std::sqrt(norm)}, of_weights, d.promise, quotient, shares).draws;
    }

    /// Draws the sample of the tokens in w.rest, into w.chosen.
    void add_sample(std::size_t count, detail::uniform_sequence& u, workspace& w) const {
        const double each = static_cast<double>(w.rest.size()) / static_cast<double>(count);
        std::vector<token_index>& drawn = w.pilot;  // what it said is known by now
        draw(count, u, w.rest, drawn);
        std::sort(drawn.begin(), drawn.end());
        for (std::size_t j = 0; j < drawn.size();) {
            std::size_t times = 1;
            while (j + times < drawn.size() && drawn[j + times] == drawn[j]) {
                ++times;
            }
            w.chosen.push_back({drawn[j], static_cast<float>(std::log(static_cast<double>(times) * each))});
            j += times;
        }
    }
};

static_assert(baseline<uniform_clt, cpu, float>);

}  // namespace verkv::inline v0
