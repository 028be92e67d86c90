// What tests of the C interface need.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "c_interface/verkv_c.h"
#include "support/cache_rig.hpp"

namespace support {

/// A cache of the C interface that ends with its scope.
class c_cache {
public:
    explicit c_cache(const verkv_options& options) { status = verkv_create(&options, &cache_); }
    c_cache(const c_cache&) = delete;
    c_cache& operator=(const c_cache&) = delete;
    ~c_cache() { verkv_destroy(cache_); }

    operator verkv_cache*() const { return cache_; }

    verkv_status status;

private:
    verkv_cache* cache_ = nullptr;
};

/// Options for `requests` texts of n tokens with every row resident.
inline verkv_options c_options(const verkv::geometry& g, std::size_t n, std::size_t requests = 1) {
    verkv_options o;
    verkv_default_options(&o);
    o.query_heads = static_cast<std::uint32_t>(g.query_heads);
    o.kv_heads = static_cast<std::uint32_t>(g.kv_heads);
    o.key_dim = static_cast<std::uint32_t>(g.key_dim);
    o.value_dim = static_cast<std::uint32_t>(g.value_dim);
    o.logit_scale = g.scale;
    o.max_requests = requests;
    o.max_tokens = n;
    o.resident_rows = requests * n * g.kv_heads;
    return o;
}

/// A text as C sees it.
struct c_text {
    text<verkv::half> rows;
    std::vector<std::int64_t> at;

    c_text(const verkv::geometry& g, std::size_t n, std::uint64_t seed)
        : rows(random_text<verkv::half>(g, n, seed)), at(rows.positions.begin(), rows.positions.end()) {}

    [[nodiscard]] const std::uint16_t* key(std::size_t token) const {
        return &rows.keys[token * rows.shape.kv_heads * rows.shape.key_dim].bits;
    }
    [[nodiscard]] const std::uint16_t* value(std::size_t token) const {
        return &rows.values[token * rows.shape.kv_heads * rows.shape.value_dim].bits;
    }
};

inline verkv_status prefill(verkv_cache* cache, verkv_request id, const c_text& t, std::size_t first, std::size_t n) {
    return verkv_prefill(cache, id, t.key(first), t.value(first), t.at.data() + first, n);
}

inline verkv_status append(verkv_cache* cache, verkv_request id, const c_text& t, std::size_t first, std::size_t n) {
    return verkv_append(cache, id, t.key(first), t.value(first), t.at.data() + first, n);
}

inline verkv_step_item item_of(const verkv::geometry& g, verkv_request id, const std::vector<float>& queries,
                               step_answer& answer) {
    answer.output.assign(g.query_heads * g.value_dim, -7777);
    answer.lse.assign(g.query_heads, -7777);
    return {id, queries.data(), answer.output.data(), answer.lse.data()};
}

/// Whether a call failed with this status, and the thread's message has all of the parts.
inline bool failed(verkv_status status, verkv_status expected, std::initializer_list<std::string> parts) {
    const std::string message = verkv_last_error();
    for (const std::string& part : parts) {
        if (message.find(part) == std::string::npos) {
            return false;
        }
    }
    return status == expected && !message.empty();
}

}  // namespace support
