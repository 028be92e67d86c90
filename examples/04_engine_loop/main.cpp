// What an inference engine writes around verkv: a cache for each layer, many requests, and all that happens to them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <span>
#include <vector>

#include "common/synthetic.hpp"
#include "verkv/verkv.hpp"

namespace {

using verkv::half;
using verkv::position_t;

constexpr verkv::geometry shape{.query_heads = 8, .kv_heads = 2, .key_dim = 64, .value_dim = 64};
constexpr verkv::tolerance promise{.epsilon = 0.1, .delta = 0.1};
constexpr std::size_t layer_count = 2;
constexpr std::size_t chunk = 512;      // tokens of a prompt that are processed at once
constexpr std::size_t tail_limit = 48;  // generated tokens that may be resident before the request is sampled again
constexpr std::size_t kept_queries = 64;  // of each request and layer: what SnapKV looks at

/// One request. `model` stands in for the network: the keys, values and queries that each layer computes for its text.
struct sequence {
    const char* name;
    std::vector<example::trace<half>> model;
    std::vector<verkv::request_id> ids = {};  // in the cache of each layer
    std::size_t tokens = 0;                   // of the text, processed so far
    std::size_t tail = 0;                     // of them generated since the last compress
    position_t next = 0;                      // position of the next token
    std::vector<float> output = std::vector<float>(shape.query_heads * shape.value_dim);

    sequence(const char* request_name, std::size_t prompt, std::uint64_t seed) : name(request_name) {
        for (std::size_t layer = 0; layer < layer_count; ++layer) {
            example::synthetic_options o = example::peaked_attention();
            o.shape = shape;
            o.prefill_tokens = prompt;
            o.decode_tokens = 200;
            o.query_stride = 0;
            o.last_queries = kept_queries;
            o.seed = seed + layer;
            model.push_back(example::synthetic_trace<half>(o));
        }
    }
};

verkv::heads_view<half> slice(verkv::heads_view<half> all, std::size_t first, std::size_t count) {
    all.data = all.row(first, 0);
    all.tokens = count;
    return all;
}

class engine {
public:
    explicit engine(std::size_t tokens) {
        for (std::uint32_t layer = 0; layer < layer_count; ++layer) {
            layers_.emplace_back(
                verkv::cache_config{.shape = shape,
                                    .layer = layer,
                                    .max_requests = 4,
                                    .max_tokens = 4096,
                                    .host_rows = tokens * shape.kv_heads,
                                    .resident_rows = tokens / 4 * shape.kv_heads,  // an eighth, tails, and chance
                                    .staging_rows = 512},
                verkv::rope_pair_sketch({.key_dim = shape.key_dim, .pairing = verkv::rope_pairing::interleaved}),
                verkv::cpu{&pool_});
        }
    }

    /// Prefill, chunk after chunk. Where rows run out, the call that needed them has changed nothing: what is left to
    /// do is to release the request, and to tell the caller to try again later.
    void admit(sequence& s, std::uint64_t seed) {
        try {
            for (verkv::layer_cache... 
