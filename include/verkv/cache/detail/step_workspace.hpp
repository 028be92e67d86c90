// Memory that a decode step needs, one for each worker.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "verkv/core/plan.hpp"
#include "verkv/cpu/softmax_sum.hpp"
#include "verkv/plan/top_k.hpp"

namespace verkv::inline v0::detail {

/// Seconds since the last call.
class lap_timer {
public:
    double lap() {
        const auto now = std::chrono::steady_clock::now();
        const double seconds = std::chrono::duration<double>(now - last_).count();
        last_ = now;
        return seconds;
    }

private:
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// What of a step the policies switch on: memory follows.
struct step_needs {
    bool bounds = false;  ///< of the sketch
    bool values = false;  ///< an output target
    bool check = false;
};

template <class Planner>
struct step_workspace {
    std::vector<float> queries;           // [G, key_dim]
    std::vector<float> weights;           // [G, n]: logits, then weights, then masses
    std::vector<float> bounds;            // [G, n]
    std::vector<float> resident_logits;   // [G, resident]
    std::vector<float> shortlist_logits;  // [G, shortlist]
    std::vector<float> fetched_logits;    // [G, fetched]
    std::vector<float> scratch;           // [G, rows]: logits with log-weights, then weights
    std::vector<float> share;             // [n]
    std::vector<float> factor;            // [G]
    std::vector<float> shift;             // [G]
    std::vector<double> total;            // [G] sum of weights
    std::vector<double> reference;        // [G] D, or a bound below it
    // r' of each row and what it adds to its logit, ln(lambda/r'); 0 and -infinity where a head does not use it.
    std::vector<float> resident_probability, resident_log_weight;  // [G, resident]
    std::vector<float> fetched_probability, fetched_log_weight;    // [G, fetched]
    std::vector<float> resident_distance, fetched_distance;        // [G, rows] ||v - o^||
    std::vector<float> offset;                                     // [G, value_dim] o^ - c
    std::vector<float> output;                                     // [G, value_dim] o^
    std::vector<token_index> shortlist;
    std::vector<row_id> shortlist_rows;
    std::vector<token_index> shortlist_tokens;
    std::vector<token_index> fetched;         // in the order of rounds
    std::vector<std::uint32_t> fetched_slot;  // of a token: its place in `fetched` plus 1; 0 for none
    std::vector<row_id> staged_rows;
    std::vector<plan> plans;
    std::vector<masses_view> masses;
    std::vector<double> level;
    std::vector<double> inflation;
    std::vector<double> steps;     // by which the check lowered a head's level last; 0: not yet
    std::vector<double> observed;  // what it had seen then
    std::vector<double> unit;      // of length, [G]
    std::vector<unsigned char> holds;
    std::vector<float> lse;
    top_k_workspace top;
    softmax_sum sum;
    typename Planner::workspace planner;

    void reserve(std::size_t heads, std::size_t key_dim, std::size_t value_dim, std::size_t tokens,
                 std::size_t shortlisted, std::size_t staging, step_needs needs) {
        queries.resize(heads * key_dim);
        for (auto* v :
             {&weights, &resident_logits, &fetched_logits, &scratch, &resident_log_weight, &fetched_log_weight}) {
            v->resize(heads * tokens);
        }
        if (needs.bounds) {
            bounds.resize(heads * tokens);
        }
        if (needs.check) {
            resident_probability.resize(heads * tokens);
            fetched_probability.resize(heads * tokens);
        }
        if (needs.values) {
            resident_distance.resize(heads * tokens);
            fetched_distance.resize(heads * tokens);
            offset.resize(heads * value_dim);
            output.resize(heads * value_dim);
        }
        shortlist_logits.resize(heads * shortlisted);
        share.resize(tokens);
        factor.resize(heads);
        shift.resize(heads);
        total.resize(heads);
        reference.resize(heads);
        shortlist.reserve(shortlisted);
        shortlist_rows.reserve(shortlisted);
        shortlist_tokens.reserve(shortlisted);
        fetched.reserve(tokens);
        fetched_slot.assign(tokens, 0);
        staged_rows.resize(staging);
        plans.resize(heads);
        for (plan& p : plans) {
            p.entries.reserve(tokens);
        }
        masses.resize(heads);
        level.resize(heads);
        inflation.resize(heads);
        steps.resize(heads);
        observed.resize(heads);
        unit.resize(heads);
        holds.resize(heads);
        lse.resize(heads);
        top.reserve(tokens);
        sum.reserve(heads, value_dim);
        if constexpr (requires { planner.reserve(tokens, heads); }) {
            planner.reserve(tokens, heads);
        } else {
            planner.reserve(tokens);
        }
    }
};

}  // namespace verkv::inline v0::detail
