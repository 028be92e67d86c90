// A random prompt whose values are random, too.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "support/attention_reference.hpp"
#include "support/random_prompt.hpp"

template <class T>
class valued_prompt {
public:
    valued_prompt(verkv::geometry shape, std::vector<verkv::position_t> positions,
                  std::vector<verkv::position_t> query_positions, unsigned seed, layout lie = layout::dense,
                  int amplitude = 2)
        : keys_and_queries_(shape, std::move(positions), std::move(query_positions), seed, lie, amplitude) {
        const std::size_t n = keys_and_queries_.view().tokens();
        for (std::size_t h = 0; h < shape.kv_heads; ++h) {
            support::generator g(1000 * seed + h);
            values_.emplace_back(g.normals<T>(n * shape.value_dim), n, shape.value_dim,
                                 static_cast<support::rows_layout>(lie), seed);
        }
        for (auto& v : values_) {
            rows_.push_back(v.view());
        }
    }
    valued_prompt(const valued_prompt&) = delete;
    valued_prompt& operator=(const valued_prompt&) = delete;

    [[nodiscard]] verkv::prompt<T> view() const {
        verkv::prompt<T> p = keys_and_queries_.view();
        p.values = rows_;
        return p;
    }

    T* key(std::size_t kv_head, std::size_t token) { return keys_and_queries_.key(kv_head, token); }
    T* value(std::size_t kv_head, std::size_t token) { return values_[kv_head].row(token); }

private:
    random_prompt<T> keys_and_queries_;
    std::vector<support::own_rows<T>> values_;
    std::vector<verkv::rows<T>> rows_;
};

static_assert(static_cast<int>(layout::dense) == static_cast<int>(support::rows_layout::dense) &&
              static_cast<int>(layout::strided) == static_cast<int>(support::rows_layout::strided) &&
              static_cast<int>(layout::listed) == static_cast<int>(support::rows_layout::listed));
