// Stands in for the network: the keys, values and queries that its layers compute for a text.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/synthetic.hpp"

using verkv::half;
using verkv::position_t;

constexpr verkv::geometry shape{.query_heads = 8, .kv_heads = 2, .key_dim = 64, .value_dim = 64};
constexpr std::size_t layer_count = 2;
constexpr std::size_t kept_queries = 64;  ///< an engine keeps the last ones of each request, for its scorer

/// Tokens first ... first + count - 1.
inline verkv::heads_view<half> slice(verkv::heads_view<half> all, std::size_t first, std::size_t count) {
    all.data = all.row(first, 0);
    all.tokens = count;
    return all;
}

/// Rotary embedding of the channels (2i, 2i+1): turns a key or a query from position p to p + by.
inline void rotate(std::span<half> row, position_t by) {
    for (std::size_t c = 0; c < row.size(); c += 2) {
        const double angle = by * std::pow(1e4, -static_cast<double>(c) / static_cast<double>(row.size()));
        const auto cosine = static_cast<float>(std::cos(angle)), sine = static_cast<float>(std::sin(angle));
        const float x = verkv::to_float(row[c]), y = verkv::to_float(row[c + 1]);
        row[c] = verkv::from_float<half>(x * cosine - y * sine);
        row[c + 1] = verkv::from_float<half>(x * sine + y * cosine);
    }
}

class fake_model {
public:
    fake_model(std::size_t prompt_tokens, std::uint64_t seed) {
        example::synthetic_options o = example::peaked_attention();
        o.shape = shape;
        o.prefill_tokens = prompt_tokens;
        o.decode_tokens = 200;
        o.query_stride = 0;
        o.last_queries = kept_queries;
        for (std::size_t layer = 0; layer < layer_count; ++layer) {
            o.seed = seed + layer;
            layers_.push_back(example::synthetic_trace<half>(o));
        }
    }

    [[nodiscard]] std::size_t prompt_tokens() const { return layers_.front().prefill_tokens; }

    /// Of tokens first ... first + count - 1, for each KV head.
    [[nodiscard]] verkv::heads_view<half> keys(std::size_t layer, std::size_t first, std::size_t count) const {
        return slice(layers_[layer].keys(), first, count);
    }
    [[nodiscard]] verkv::heads_view<half> values(std::size_t layer, std::size_t first, std::size_t count) const {
        return slice(layers_[layer].values(), first, count);
    }
    /// Of the last `kept_queries` tokens before token `end`, for each query head.
    [[nodiscard]] verkv::heads_view<half> last_queries(std::size_t layer, std::size_t end) const {
        return slice(layers_[layer].queries(), end - prompt_tokens(), kept_queries);
    }

    /// Key or query rows of one token [head, channel], computed at a position `moved` away from its place in the text.
    [[nodiscard]] std::vector<half> key(std::size_t layer, std::size_t token, position_t moved) const {
        return rotated(keys(layer, token, 1), moved);
    }
    [[nodiscard]] std::vector<half> query(std::size_t layer, std::size_t token, position_t moved) const {
        return rotated(slice(layers_[layer].queries(), token - prompt_tokens() + kept_queries, 1), moved);
    }

private:
    static std::vector<half> rotated(verkv::heads_view<half> token, position_t moved) {
        std::vector<half> out(token.data, token.data + token.heads * token.width);
        for (std::size_t h = 0; h < token.heads && moved != 0; ++h) {
            rotate(std::span(out).subspan(h * token.width, token.width), moved);
        }
        return out;
    }

    std::vector<example::trace<half>> layers_;
};
