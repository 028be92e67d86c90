// vAttention as its authors' public code computes it, which is not what their theorem says.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "verkv/baseline/detail/choose.hpp"
#include "verkv/baseline/detail/normal_quantile.hpp"
#include "verkv/baseline/selection.hpp"

namespace verkv::inline v0 {

/// The adaptive sampling of the public "sparse attention hub" (read in 2026), for comparison with what users of that
/// code get. Where it differs from the theorem and from uniform_clt:
/// - the quantile is Phi^-1(1 - delta), of one side, where the error has two;
/// - the denominator alone decides, whatever is measured afterwards;
/// - pilot and sample are drawn with replacement over the whole range between the windows, heavy tokens included: they
///   swell the pilot's spread, and its D, to which they are added, has them twice;
/// - a token drawn k times is one entry: with the weight 1/p of one draw (collapse), or of k (merge), p = b/range. The
///   sampled part is low by (1 - e^-f)/f or e^-f sum_k f^(k-1)/(min(1, k f)/f k!), f = b/range: by 4.8 % or 7.2 % at f
///   = 0.1. Draws of heavy tokens are wasted;
/// - weights are 1/(p + 1e-6), of exact tokens too;
/// - b is at least the pilot's size and at most the range; b = range still misses a share 1/e of the tokens.
/// Not reproduced: without any fixed or heavy token that code takes the sum over all tokens for the exact part.
///
/// Claims promise.epsilon for the denominator.
/// Reads: heavy and drawn rows, and the pilot's keys.
struct uniform_clt_public {
    enum class duplicates { collapse, merge };

    token_count heavy = token_count::share(0.02);  ///< exact tokens beside the fixed ones
    double pilot = 0.02;                           ///< share of the range, [0, 1]; 2 draws at least
    duplicates repeated = duplicates::collapse;

    /// Memory that is reused from decision to decision.
    struct workspace {
        top_k_workspace top;
        std::vector<token_index> heavy, drawn;
        std::vector<detail::weighted_token> chosen;
    };

    /// O(n + b log b), all exact weights read once for the scale of the code's lower limits (1e-8 of the largest). Sums
    /// in double. The same inputs give the same bits. Throws invalid_argument for lengths that differ, and a pilot or a
    /// tolerance out of range; `out` is then as it was.
    template <storage T>
    void select(const cpu& exec, const decision_view<T>& d, workspace& w, selection& out) const {
        detail::check_weights(d);
        validate(d.promise);
        detail::check(pilot >= 0 && pilot <= 1, "a pilot of ", pilot, " of the tokens; it must lie in [0, 1]");
        out.clear();
        const std::size_t n = d.weight.size();
        const std::size_t first = d.fixed.free_begin(n);
        const std::size_t range = d.fixed.free_end(n) - first;
        out.claims = claim::denominator;
        out.claimed_error = d.promise.epsilon;
        if (range < 2) {
            out.claimed_error = 0;
            detail::select_everything(n, out);
            return;
        }
        detail::choose_heavy(exec, d, heavy.of(range), w.top, w.heavy);
        detail::uniform_sequence u(fresh_stream(d.stream, 1));
        const auto least = (std::max)(std::size_t{2}, static_cast<std::size_t>(pilot * static_cast<double>(range)));
        draw(first, range, least, u, w.drawn);
        const std::size_t b = draws_for(d, range, w);
        out.inspected = w.drawn;
        out.inspected.erase(std::unique(out.inspected.begin(), out.inspected.end()), out.inspected.end());

        draw(first, range, b, u, w.drawn);
        const double p = static_cast<double>(b) / static_cast<double>(range);
        w.chosen.clear();
        for (const token_index i : w.heavy) {
            w.chosen.push_back({i, log_weight(1)});
        }
        for (std::size_t j = 0; j < w.drawn.size();) {
            std::size_t times = 1;
            while (j + times < w.drawn.size() && w.drawn[j + times] == w.drawn[j]) {
                ++times;
            }
            if (!std::binary_search(w.heavy.begin(), w.heavy.end(), w.drawn[j])) {
                const double entry = repeated == duplicates::merge ? static_cast<double>(times) * p : p;
                w.chosen.push_back({w.drawn[j], log_weight((std::min)(1.0, entry))});
            }
            j += times;
        }
        detail::write_selection(d.fixed, n, w.chosen, log_weight(1), out);
    }

private:
    static constexpr double added = 1e-6;
    static constexpr double least_part = 1e-8;

    static float log_weight(double p) { return static_cast<float>(-std::log(p + added)); }

    /// Draws with replacement; ascending, repeated ones stand together.
    static void draw(std::size_t first, std::size_t range, std::size_t count, detail::uniform_sequence& u,
                     std::vector<token_index>& drawn) {
        drawn.clear();
        for (std::size_t j = 0; j < count; ++j) {
            drawn.push_back(static_cast<token_index>(first + u.below(range)));
        }
        std::sort(drawn.begin(), drawn.end());
    }

    /// The sample's size by the pilot in w.drawn.
    template <storage T>
    static std::size_t draws_for(const decision_view<T>& d, std::size_t range, const workspace& w) {
        const auto weight = [&](std::size_t i) { return static_cast<double>(d.weight[i]); };
        const auto count = static_cast<double>(w.drawn.size());
        double mean = 0;
        for (const token_index i : w.drawn) {
            mean += weight(i) / count;
        }
        double variance = 0;
        for (const token_index i : w.drawn) {
            variance += (weight(i) - mean) * (weight(i) - mean) / (count - 1);
        }
        double largest = 0;
        for (const float x : d.weight) {
            largest = (std::max)(largest, static_cast<double>(x));
        }
        double total = 0;
        for (std::size_t i = 0; i < d.weight.size(); ++i) {
            total += d.fixed.fixed(i, d.weight.size()) ? weight(i) : 0;
        }
        for (const token_index i : w.heavy) {
            total += weight(i);
        }
        for (std::size_t j = 0; j < w.drawn.size(); ++j) {
            if (j == 0 || w.drawn[j] != w.drawn[j - 1]) {
                total += weight(w.drawn[j]) / (count / static_cast<double>(range) + added);
            }
        }
        const double spread = (std::max)(std::sqrt(variance), least_part * largest) * static_cast<double>(range);
        const double allowed = (std::max)(d.promise.epsilon * total, least_part * largest);
        const double root = detail::normal_upper_quantile(d.promise.delta) * spread / allowed;
        const double most = static_cast<double>(range);
        // Written so that NaN takes all it can.
        const double wanted = root * root < most ? std::floor(root * root) : most;
        return (std::max)(w.drawn.size(), static_cast<std::size_t>(wanted));
    }
};

static_assert(baseline<uniform_clt_public, cpu, float>);

}  // namespace verkv::inline v0
