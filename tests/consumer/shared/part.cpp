// One of two shared libraries that were built with different flags, each with all of verkv in it.
#include "part.hpp"

#include <cmath>
#include <vector>

#include "verkv/verkv.hpp"

namespace {

float step() {
    const verkv::geometry shape{.query_heads = 2, .kv_heads = 1, .key_dim = 32, .value_dim = 32};
    verkv::cache_config config;
    config.shape = shape;
    config.max_tokens = config.host_rows = config.resident_rows = 256;
    const verkv::rope_pair_sketch sketch({.key_dim = 32});
    verkv::layer_cache<float, verkv::rope_pair_sketch> cache(config, sketch);
    const verkv::request_id id = cache.open(1);
    std::vector<float> rows(256 * 32);
    std::vector<verkv::position_t> positions(256);
    for (std::size_t i = 0; i < rows.size(); ++i) {
        rows[i] = std::sin(static_cast<float>(i) * 0.37f);
        positions[i / 32] = static_cast<verkv::position_t>(i / 32);
    }
    const auto view = verkv::heads_of(std::span<const float>(rows), 256, 1, 32);
    cache.prefill(id, view, view, positions);
    cache.compress(id, verkv::key_norm{}, {.kept = verkv::budget::fraction(0.75)});
    std::vector<float> output(64), lse(2);
    const verkv::rows<float> queries = verkv::contiguous_rows(std::span<const float>(rows).first(64), 32);
    cache.decode(verkv::decode_item<float>{id, queries, output, lse});
    return lse[0];
}

void refusal() {
    verkv::validate(verkv::tolerance{-1, 0.1});
}

}  // namespace

#if defined(LEFT)
float left_step() {
    return step();
}
void left_refusal() {
    refusal();
}
#else
float right_step() {
    return step();
}
void right_refusal() {
    refusal();
}
#endif
