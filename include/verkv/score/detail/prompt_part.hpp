// Some tokens of a prompt, as a prompt.
#pragma once

#include <cstddef>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/score/detail/chunk_attention.hpp"

namespace verkv::inline v0::detail::scoring {

// Tokens first ... last-1 with the kept queries that belong to them. The view is good while this object and the
// prompt's memory are.
template <class T>
class prompt_part {
public:
    prompt_part(const prompt<T>& p, std::size_t first, std::size_t last) : view_(p) {
        for (std::size_t h = 0; h < p.shape.kv_heads; ++h) {
            keys_.push_back(p.keys[h].slice(first, last - first));
            values_.push_back(p.values[h].slice(first, last - first));
        }
        const query_range kept = queries_of(p, first, last);
        view_.keys = keys_;
        view_.values = values_;
        view_.positions = p.positions.subspan(first, last - first);
        view_.queries = p.queries.slice(kept.first, kept.last - kept.first);
        view_.query_positions = p.query_positions.subspan(kept.first, kept.last - kept.first);
    }
    prompt_part(const prompt_part&) = delete;
    prompt_part& operator=(const prompt_part&) = delete;

    [[nodiscard]] const prompt<T>& view() const { return view_; }

private:
    std::vector<rows<T>> keys_;
    std::vector<rows<T>> values_;
    prompt<T> view_;
};

}  // namespace verkv::inline v0::detail::scoring
