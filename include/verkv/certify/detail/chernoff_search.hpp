// The search for the exponent theta of Chernoff bounds, and for the error at which they reach a failure probability.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include "verkv/certify/detail/cumulants.hpp"
#include "verkv/core/host_device.hpp"

namespace verkv::inline v0::detail {

/// Sum of terms over theta. Those with theta * reach <= 1/16 become one polynomial, which bounds them from above.
/// Source: for_each(use) calls use(term) for at most Source::most terms.
template <class Source>
class folded_sum {
public:
    explicit folded_sum(const Source& source) : source_(&source) {}

    [[nodiscard]] cumulant operator()(double theta) {
        if (!(theta <= cap_)) {
            fold(3 * theta);
        }
        const double square = theta * theta;
        cumulant sum{square * (low_[0] + theta * (low_[1] + theta * low_[2])),
                     theta * (2 * low_[0] + theta * (3 * low_[1] + theta * 4 * low_[2])),
                     2 * low_[0] + theta * (6 * low_[1] + theta * 12 * low_[2])};
        for (std::size_t i = 0; i < count_; ++i) {
            terms_[i].add_to(sum, theta);
        }
        return sum;
    }

    /// What the terms can add up to; infinite before the first evaluation.
    [[nodiscard]] double most() const { return most_; }

private:
    void fold(double cap) {
        cap_ = cap;
        count_ = 0;
        most_ = 0;
        low_[0] = low_[1] = low_[2] = 0;
        source_->for_each([&](const typename Source::term& t) {
            most_ += t.count * t.largest;
            if (t.reach * cap <= 1.0 / 16) {
                t.add_to(low_);
            } else {
                terms_[count_++] = t;
            }
        });
        if (!(most_ >= 0)) {
            most_ = std::numeric_limits<double>::infinity();
        }
    }

    const Source* source_;
    double cap_ = -1;
    double most_ = std::numeric_limits<double>::infinity();
    std::size_t count_ = 0;
    double low_[3]{};
    std::array<typename Source::term, Source::most> terms_;
};

/// Minimum over theta of ln P = offset + psi(theta) - theta (t - shift), by Newton's method on a bracket. Every theta
/// that was visited proves a probability; how far the minimum can be below is known from two tangents, where psi is
/// convex.
template <class Sum>
class exponent {
public:
    /// psi is a callable double -> cumulant, with most(), which no sum of its terms exceeds; start is a first guess at
    /// theta.
    exponent(Sum& psi, double shift, double offset, double start, bool convex)
        : psi_(&psi), shift_(shift), offset_(offset), start_(start), convex_(convex) {}

    /// Turns to another t. What is known of psi stays known.
    void aim(double t) {
        reach_ = t - shift_;
        const point known[] = {left_, right_, best_};
        left_ = right_ = best_ = {};
        has_right_ = stuck_ = false;
        for (const point& p : known) {
            if (p.theta > 0) {
                visit(p);
            }
        }
    }

    /// The proven probability of an error of t and more.
    [[nodiscard]] double probability() const { return impossible() ? 0 : std::exp(smaller(at(best_), 0.0)); }

    /// An error that is never exceeded.
    [[nodiscard]] double certain() const { return (psi_->most() + shift_) * (1 + 1e-12); }

    /// What other values of theta cannot get below.
    [[nodiscard]] double least() const {
        if (!(reach_ > 0)) {
            return 1;
        }
        double floor = -std::numeric_limits<double>::infinity();
        if (has_right_ && convex_) {
            floor = at(left_) + (left_.psi.slope - reach_) * (crossing() - left_.theta);
        }
        // Newton's own estimate, once it is near.
        const double slope = best_.psi.slope - reach_;
        const double decrement = slope * slope / best_.psi.curvature;
        if (best_.theta > 0 && decrement >= 0 && decrement < 0.01) {
            floor = larger(floor, at(best_) - decrement);
        }
        return std::exp(smaller(floor, 0.0));
    }

    /// Whether another value of theta can lower the probability by more than that.
    [[nodiscard]] bool loose(double by) const {
        return reach_ > 0 && !stuck_ && std::exp(smaller(at(best_), 0.0)) - least() > by;
    }

    /// One evaluation of psi, nearer to the minimum.
    void refine() {
        if (!(reach_ > 0) || stuck_) {
            return;
        }
        double next = start_;
        if (best_.theta > 0) {
            next = best_.theta - (best_.psi.slope - reach_) / best_.psi.curvature;
            if (has_right_) {
                if (!(next > left_.theta && next < right_.theta)) {
                    // Where the tangents meet finds the kink of a sum that is all but linear; halves find anything.
                    halve_ = !halve_;
                    next = halve_ ? crossing() : 0;
                    if (!(next > left_.theta && next < right_.theta)) {
                        next = left_.theta + (right_.theta - left_.theta) / 2;
                    }
                }
            } else {
                next = next > left_.theta && next < 8 * left_.theta ? next : 8 * left_.theta;
            }
        }
        const point p{next, (*psi_)(next)};
        if (!(p.theta > 0) || !(std::abs(p.psi.value) < 1e300) || p.theta == best_.theta) {
            stuck_ = true;
            return;
        }
        visit(p);
    }

    [[nodiscard]] double theta() const { return best_.theta; }
    /// The proven probability is exp(intercept() - theta() t).
    [[nodiscard]] double intercept() const { return offset_ + best_.psi.value + best_.theta * shift_; }

private:
    struct point {
        double theta = 0;
        cumulant psi;
    };

    [[nodiscard]] bool impossible() const { return reach_ > psi_->most() * (1 + 1e-12); }

    [[nodiscard]] double at(const point& p) const { return offset_ + p.psi.value - p.theta * reach_; }

    /// Where the tangents of the bracket meet.
    [[nodiscard]] double crossing() const {
        const double a = left_.psi.slope - reach_;
        const double b = right_.psi.slope - reach_;
        return left_.theta + (b * (right_.theta - left_.theta) - (at(right_) - at(left_))) / (b - a);
    }

    void visit(const point& p) {
        if (p.psi.slope < reach_) {
            if (p.theta > left_.theta) {
                left_ = p;
            }
        } else if (!has_right_ || p.theta < right_.theta) {
            right_ = p;
            has_right_ = true;
        }
        if (!(best_.theta > 0) || at(p) <= at(best_)) {
            best_ = p;
        }
    }

    Sum* psi_;
    double shift_;
    double offset_;
    double start_;
    double reach_ = 0;
    point left_, right_, best_;
    bool convex_;
    bool has_right_ = false;
    bool halve_ = false;
    bool stuck_ = false;
};

/// Whether a side, or two sides together, are proven to fail with probability at most delta at the t they are aimed at.
template <class... Sides>
[[nodiscard]] bool sides_hold(double delta, Sides&... sides) {
    for (int step = 0; step < 64; ++step) {
        const double proven = (sides.probability() + ...);
        if (proven <= delta) {
            return true;
        }
        const double least = (smaller(sides.least(), sides.probability()) + ...);
        if (!(least <= delta)) {
            return false;
        }
        // The side that can still gain most.
        double most = 0;
        (..., (most = larger(sides.loose(1e-6 * delta) ? sides.probability() - sides.least() : 0.0, most)));
        if (!(most > 0)) {
            return false;
        }
        bool done = false;
        const auto refine = [&](auto& side) {
            if (!done && side.probability() - side.least() >= most) {
                side.refine();
                done = true;
            }
        };
        (refine(sides), ...);
    }
    return false;
}

/// The smallest t below `start`, at which the sides are proven to hold delta already, that the search proves: down to a
/// relative 1e-4. Each step solves for t with theta held fixed, which is a proven error, and fits theta to that.
template <class... Sides>
[[nodiscard]] double sides_bound(double start, double delta, Sides&... sides) {
    double proven = start;
    double t = start;
    for (int step = 0; step < 64; ++step) {
        (sides.aim(t), ...);
        for (int i = 0; i < 2; ++i) {
            (..., (sides.loose(1e-5 * delta) ? sides.refine() : void()));
        }
        double certain = 0;
        (..., (certain = larger(sides.certain(), certain)));
        if (certain < proven) {
            proven = certain;
            t = certain * (1 - 1e-9);
            continue;
        }
        const bool fitted = !(... || sides.loose(1e-5 * delta));
        // ln P(t)/delta with theta held fixed: convex and falling, so that Newton's steps stay on one side of the root.
        const auto probability = [&](double at) {
            return (std::exp(smaller(sides.intercept() - sides.theta() * at, 700.0)) + ...);
        };
        double next = 0;
        (..., (next = larger((sides.intercept() - std::log(delta)) / sides.theta(), next)));
        for (int i = 0; i < 8; ++i) {
            const double p = probability(next);
            const double weighted =
                ((sides.theta() * std::exp(smaller(sides.intercept() - sides.theta() * next, 700.0))) + ...);
            const double move = std::log(p / delta) * p / weighted;
            if (!(move > 1e-10 * next)) {
                break;
            }
            next += move;
        }
        next *= 1 + 1e-9;
        const bool near = !(t - next > 1e-4 * t);
        if (probability(next) <= delta && next < proven) {
            proven = next;
            t = smaller(next, t);
        }
        if (near && fitted) {
            break;
        }
    }
    return proven;
}

}  // namespace verkv::inline v0::detail
