// What a layer's cache is built with.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/error.hpp"
#include "verkv/core/geometry.hpp"

namespace verkv::inline v0 {

/// Sizes of a layer's cache. A row is the key and the value of one token for one KV head.
struct cache_config {
    geometry shape;
    std::uint32_t layer = 0;       ///< enters the uniforms, so that layers draw independently
    std::size_t max_requests = 1;  ///< requests held at once
    std::size_t max_tokens = 0;    ///< tokens that one request may hold
    std::size_t host_rows = 0;     ///< rows of host memory: every token of every request has one for each KV head
    /// Rows of device memory, of all KV heads of all requests: what compress() keeps, and each token appended since.
    std::size_t resident_rows = 0;
    /// Device rows for what is fetched, of each KV head of each request, >= 64; 0: a sixteenth of max_tokens, 256 at
    /// least. Of a fetch that does not fit, every pass over the sample (a round of the check makes up to three) copies
    /// rows anew: kv_head_report::rows_copied beyond rows_fetched says that more would help.
    std::size_t staging_rows = 0;
};

/// Checks a configuration. Throws invalid_argument.
inline void validate(const cache_config& c) {
    validate(c.shape);
    detail::check(c.max_requests > 0, "max_requests is 0");
    detail::check(c.max_tokens > 0 && c.max_tokens < 0x7fffffffu, "max_tokens is ", c.max_tokens,
                  "; it must lie in [1, 2^31 - 2]");
    detail::check(c.staging_rows == 0 || c.staging_rows >= 64, "staging_rows is ", c.staging_rows,
                  "; a KV head needs at least 64");
}

/// The configuration with the sizes that it leaves to the library. Throws invalid_argument as validate().
inline cache_config completed(cache_config c) {
    validate(c);
    if (c.staging_rows == 0) {
        c.staging_rows = c.max_tokens / 16 > 256 ? c.max_tokens / 16 : 256;
    }
    return c;
}

/// Which request of a cache. A released request's id is never valid again.
struct request_id {
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
    friend bool operator==(const request_id&, const request_id&) = default;
};

}  // namespace verkv::inline v0
