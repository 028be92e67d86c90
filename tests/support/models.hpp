// A user's parts, in a namespace of their own and written against the concepts alone: one foreign model of each.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/concepts.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/plan.hpp"
#include "verkv/core/prompt.hpp"
#include "verkv/cpu/executor.hpp"

namespace someone {

/// Runs its tasks from the last to the first, and hands out the workers in turn.
class backward_executor final : public verkv::executor {
public:
    explicit backward_executor(std::size_t workers) : workers_(workers) {}

    [[nodiscard]] std::size_t workers() const noexcept override { return workers_; }

    void run(std::size_t tasks, void (*task)(void*, std::size_t, std::size_t), void* context) override {
        // An executor need not nest: a call from one of its own tasks is a fault of the caller.
        nested = nested || running_;
        running_ = true;
        for (std::size_t i = tasks; i > 0; --i) {
            task(context, i - 1, i % workers_);
            ++done;
        }
        running_ = false;
    }

    std::size_t done = 0;
    bool nested = false;

private:
    std::size_t workers_;
    bool running_ = false;
};

/// A backend of one's own: the verbs of the cpu policy that it derives from, and one that it replaces.
struct counting_backend : verkv::cpu {
    std::size_t* weighed = nullptr;  ///< calls of weigh(), all threads: give it no executor
};

inline verkv::weighed weigh(const counting_backend& exec, std::span<float> logits) {
    ++*exec.weighed;
    return verkv::weigh(static_cast<const verkv::cpu&>(exec), logits);
}

/// Importance falls with the distance from the end.
struct recency {
    template <class Backend, class T>
    void score(const Backend&, const verkv::prompt<T>& p, std::size_t, std::span<float> out) const {
        const auto last = static_cast<float>(p.positions.empty() ? 0 : p.positions.back());
        for (std::size_t i = 0; i < out.size(); ++i) {
            out[i] = 1.0f / (1.0f + last - static_cast<float>(p.positions[i]));
        }
    }
};

/// Importance of a query head: how near its first channel is to the first kept query's. For adaptors.
struct first_channel {
    template <class Backend, class T>
    void score_head(const Backend&, const verkv::prompt<T>& p, std::size_t query_head, std::span<float> out) const {
        const auto& keys = p.keys[query_head / p.shape.group()];
        for (std::size_t i = 0; i < out.size(); ++i) {
            out[i] = 1.0f / (1.0f + std::abs(verkv::to_float(keys[i][0])));
        }
    }
};

/// The logits with an error for each token, made from its key alone. Has no erase().
class off_sketch {
public:
    explicit off_sketch(float error = 0) : error_(error) {}

    template <class Backend, class T>
    void fit(const Backend&, verkv::rows<T>) {
        keys_.clear();
        count_ = 0;
    }

    template <class Backend, class T>
    void append(const Backend&, verkv::rows<T> keys) {
        width_ = keys.width;
        for (std::size_t i = 0; i < keys.count; ++i) {
            for (std::size_t c = 0; c < keys.width; ++c) {
                keys_.push_back(verkv::to_float(keys[i][c]));
            }
        }
        count_ += keys.count;
    }

    template <class Backend>
    void estimate(const Backend&, verkv::rows<float> queries, float scale, verkv::matrix_view<float> logits) const {
        for (std::size_t g = 0; g < queries.count; ++g) {
            for (std::size_t i = 0; i < count_; ++i) {
                const float* key = keys_.data() + i * width_;
                float sum = 0;
                for (std::size_t c = 0; c < width_; ++c) {
                    sum += queries[g][c] * key[c];
                }
                logits.row(g)[i] = sum * scale + error_ * std::sin(1000 * key[0]);
            }
        }
    }

    [[nodiscard]] std::size_t size() const { return count_; }
    [[nodiscard]] std::size_t bytes() const { return keys_.size() * sizeof(float); }

private:
    float error_;
    std::vector<float> keys_;
    std::size_t width_ = 0;
    std::size_t count_ = 0;
};

/// Held against half the denominator: twice as strict as it has to be.
struct strict_denominator {
    [[nodiscard]] verkv::masses_view masses(std::span<const float> weight, std::span<const float> odds,
                                            double total) const {
        return {weight, odds, total / 2};
    }
};

/// r' = min(1, factor r) for every token that is not kept for certain, lambda = 1. Certifies nothing.
struct raise_all {
    struct workspace {
        void reserve(std::size_t) {}
    };
    float factor = 2;

    template <class Backend>
    void plan(const Backend&, verkv::masses_view m, verkv::tolerance, workspace&, verkv::plan& out) const {
        out.clear();
        for (std::size_t i = 0; i < m.odds.size(); ++i) {
            if (m.odds[i] > 0) {
                const double r = 1 / (1 + static_cast<double>(m.odds[i]));
                const auto raised = static_cast<float>(std::min(1.0, static_cast<double>(factor) * r));
                out.entries.push_back({static_cast<verkv::token_index>(i), raised, 1});
            }
        }
        out.raised = out.entries.size();
    }
};

/// The same entries for every query head.
struct injected {
    struct workspace {
        void reserve(std::size_t) {}
    };
    std::vector<verkv::plan_entry> entries;

    template <class Backend>
    void plan(const Backend&, verkv::masses_view, verkv::tolerance, workspace&, verkv::plan& out) const {
        out.clear();
        out.entries.assign(entries.begin(), entries.end());
    }
};

/// Another planner, whose plans are written down. One thread, one planner for all heads.
template <class Planner>
struct recorded {
    using workspace = typename Planner::workspace;
    Planner planner{};
    std::vector<verkv::plan>* log = nullptr;

    template <class Backend>
    void plan(const Backend& exec, verkv::masses_view m, verkv::tolerance t, workspace& w, verkv::plan& out) const {
        planner.plan(exec, m, t, w, out);
        log->push_back(out);
    }
};

}  // namespace someone
