// Water-filling from sums in logarithmic bins: what a context, or a part of one, has to tell about its masses.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "verkv/certify/bernstein.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/host_device.hpp"
#include "verkv/plan/breakpoint_window.hpp"

namespace verkv::inline v0 {

/// The certificate of a water-filling plan as a function of kappa, from one pass over the tokens [beyond §2].
/// Token i has r' = max(r, min(1, m/kappa)): it is certain below the breakpoint m, and as it was above m/r = m (1 + o).
/// With A = {m < kappa < m/r} and U = {kappa >= m/r}, relative to R and lambda = 1,
///     V(kappa) = kappa sum_A m - sum_A m^2 + sum_U m^2 o,    b(kappa) <= kappa.
/// Bins are an eighth of an octave wide; V is exact at their edges. Mergeable: parts of a context, on other threads,
/// devices or machines, are binned over the same window and added up.
/// Sums in double; sum_A is the difference of two running sums, with an absolute error of 2^-52 kappa sum m.
class breakpoint_bins {
public:
    static constexpr std::size_t per_octave = breakpoint_window::per_octave;
    static constexpr std::size_t most_edges = 40 * per_octave;

    /// Edges from the largest one <= low to the smallest one >= high, 0 < low <= high finite, normal floats.
    /// A window of more than 40 octaves loses its lower end. Throws invalid_argument for one that is out of range.
    breakpoint_bins(float low, float high) {
        detail::check(low >= 0x1p-126f && low <= high && high <= 0x1p120f, "a window from ", low, " to ", high,
                      "; it must lie in [2^-126, 2^120]");
        window_ = breakpoint_window::of(low, high, most_edges);
        for (std::size_t k = 0; k <= edges(); ++k) {
            bins_[k] = {};
        }
    }

    /// The largest edge of any window that is <= x, a positive normal float.
    [[nodiscard]] static float edge_below(float x) { return breakpoint_window::edge_below(x); }

    /// Number of edges.
    [[nodiscard]] std::size_t edges() const { return window_.count; }
    /// Edge k, ascending.
    [[nodiscard]] float edge(std::size_t k) const { return window_.edge(k); }

    /// Adds a token of L: mass m/R and odds o = (1-r)/r > 0.
    void add(float mass, float odds) {
        const double m = static_cast<double>(mass);
        const double o = static_cast<double>(odds);
        bin& enters = bins_[window_.slot_of(mass)];
        ++enters.entering;
        enters.mass += m;
        enters.square += m * m;
        bin& leaves = bins_[window_.slot_of(mass * (1 + odds))];
        ++leaves.leaving;
        leaves.left_mass += m;
        leaves.left_square += m * m;
        leaves.spread += m * m * o;
        leaves.term = larger(m * larger(1.0, o), leaves.term);
    }

    /// Adds tokens whose m/r lies at or below the first edge: no kappa of the window raises them.
    /// variance: sum of m^2 o; largest: of m max(1, o).
    void add_flat(double variance, double largest) {
        bins_[0].spread += variance;
        bins_[0].term = larger(largest, bins_[0].term);
    }

    /// Adds another part of the context. Throws invalid_argument when its window is another one.
    breakpoint_bins& operator+=(const breakpoint_bins& other) {
        detail::check(window_ == other.window_, "bins from ", edge(0), " to ", edge(edges() - 1), " and from ",
                      other.edge(0), " to ", other.edge(other.edges() - 1), " do not add up");
        for (std::size_t k = 0; k <= edges(); ++k) {
            const bin& b = other.bins_[k];
            bin& mine = bins_[k];
            mine.entering += b.entering;
            mine.leaving += b.leaving;
            mine.mass += b.mass;
            mine.square += b.square;
            mine.left_mass += b.left_mass;
            mine.left_square += b.left_square;
            mine.spread += b.spread;
            mine.term = larger(b.term, mine.term);
        }
        return *this;
    }

    /// Calls visit(edge, moments) for every edge, ascending, while it returns true: V exact, b = kappa where some token
    /// has r < r' < 1, else the largest m max(1, o). O(edges()).
    template <class Visit>
    void scan(Visit&& visit) const {
        std::int64_t between = 0;
        double mass = 0;
        double square = 0;
        double spread = 0;
        double term = 0;
        for (std::size_t k = 0; k < edges(); ++k) {
            const bin& b = bins_[k];  // breakpoints in (edge k-1, edge k]
            between += static_cast<std::int64_t>(b.entering) - static_cast<std::int64_t>(b.leaving);
            mass += b.mass - b.left_mass;
            square += b.square - b.left_square;
            spread += b.spread;
            term = larger(b.term, term);
            const double kappa = static_cast<double>(edge(k));
            bernstein_moments at;
            at.variance = spread + (between > 0 ? larger(kappa * mass - square, 0.0) : 0.0);
            at.largest = between > 0 ? kappa : term;
            if (!visit(edge(k), at)) {
                return;
            }
        }
    }

    /// The largest edge with a Bernstein certificate below epsilon, 0 if there is none; l = ln(2/delta).
    /// b = kappa between breakpoints and less beyond them: an edge may certify above one that does not. O(edges()).
    [[nodiscard]] float largest_certified(double epsilon, double log_term) const {
        float best = 0;
        scan([&](float kappa, const bernstein_moments& m) {
            best = bernstein_bound(m, log_term) < epsilon ? kappa : best;
            return true;
        });
        return best;
    }

private:
    // Without initialisers: only the bins of the window are ever cleared or read.
    struct bin {
        std::uint32_t entering;  // tokens with m in the bin
        std::uint32_t leaving;   // tokens with m/r in the bin
        double mass;             // sum of m, by m
        double square;           // sum of m^2, by m
        double left_mass;        // sum of m, by m/r
        double left_square;      // sum of m^2, by m/r
        double spread;           // sum of m^2 o, by m/r
        double term;             // largest m max(1, o), by m/r
    };

    breakpoint_window window_;
    std::array<bin, most_edges + 1> bins_;
};

}  // namespace verkv::inline v0
