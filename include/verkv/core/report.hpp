// What a step tells about itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "verkv/core/version.hpp"

namespace verkv::inline v0 {

/// One query head at one step.
struct query_head_report {
    // Relative errors, of the denominator or of the output as the target says. Where a check runs (an approximate
    // sketch without bounds), the plans' are as good as the sketch, and certificate_observed is what was certified.
    double certificate_before = 0;    ///< of the plan without a fetch
    double certificate_after = 0;     ///< of the plan as it was carried out
    double certificate_observed = 0;  ///< from the exact logits of the sample; 0 where there was no check
    double denominator_lse = 0;       ///< ln of the estimated sum of e^logit: what decode() writes to lse, in double
    std::uint32_t rows_planned = 0;   ///< tokens that its plan uses and that are not resident
    std::uint32_t rows_shrunk = 0;    ///< tokens with lambda < 1
};

/// One KV head of one request at one step. Counts are rows; times are seconds on the thread that did the work.
struct kv_head_report {
    std::size_t tokens = 0;                            ///< tokens of the request
    std::size_t rows_resident = 0;                     ///< of them resident
    std::size_t rows_fetched = 0;                      ///< union of its query heads' rows_planned
    std::size_t rows_copied = 0;                       ///< copies to staging; a row that had to make room counts again
    std::size_t rounds = 0;                            ///< fetches that the check from the sample asked for
    std::array<std::uint32_t, 16> rows_by_round = {};  ///< of rows_fetched, those of the plan and of each such round
    std::size_t shortlist_keys_read = 0;  ///< keys read from host memory to score shortlisted tokens exactly
    std::size_t bytes_moved = 0;          ///< from host memory: copied rows and shortlisted keys
    double sketch_seconds = 0;            ///< weights of all tokens: sketch, resident rows, shortlist
    double decide_seconds = 0;            ///< shrinkage, certificate, plan, checks
    double fetch_seconds = 0;             ///< copies to staging
    double attend_seconds = 0;            ///< softmax over all rows that count, and the values
};

/// A whole step: [request of the batch][KV head] and [request of the batch][query head], flattened.
struct step_report {
    std::size_t kv_heads = 0;
    std::size_t query_heads = 0;
    std::vector<kv_head_report> per_kv_head;
    std::vector<query_head_report> per_query_head;

    [[nodiscard]] const kv_head_report& kv_head(std::size_t request, std::size_t head) const {
        return per_kv_head[request * kv_heads + head];
    }
    [[nodiscard]] const query_head_report& query_head(std::size_t request, std::size_t head) const {
        return per_query_head[request * query_heads + head];
    }
};

}  // namespace verkv::inline v0
