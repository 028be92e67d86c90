// Random traces of any geometry, for tests and benchmarks.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "common/trace.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/geometry.hpp"
#include "verkv/core/random.hpp"
#include "verkv/core/storage.hpp"

namespace example {

/// What a synthetic trace is like. Shares of weight are of the expected denominator at the end of the prompt.
struct synthetic_options {
    verkv::geometry shape{3, 1, 64, 64, 0};
    std::optional<rope_pairing> pairing = rope_pairing::interleaved;  ///< how the heavy channels pair up
    std::size_t prefill_tokens = 1024;
    std::size_t decode_tokens = 8;
    std::size_t query_stride = 16;  ///< prompt queries kept: every so manieth, counted back from the last ...
    std::size_t last_queries = 64;  ///< ... and the last ones; 0 and 0 keep none
    double logit_deviation = 3;     ///< standard deviation of a query's logits: 0.5 is flat, 3 peaked
    std::size_t heavy_pairs = 4;    ///< channel pairs that carry most of the keys' energy
    double heaviness = 2;           ///< their standard deviation; that of the other channels is 1
    double shared = 0.5;            ///< share of their energy that all queries of a KV head have in common
    double sink_share = 0;          ///< share of the weight that the first 4 tokens get
    double local_share = 0;         ///< share of the weight that the last 64 prompt tokens get
    std::uint64_t seed = 1;
};

/// Options for attention that sinks, recent tokens and few others dominate, as in the packaged trace.
/// The greedy plan then reads about 5 % of the context at epsilon = 0.05, 1/16 kept, for 8K tokens, 3 query heads a
/// group and 64 channels. The less `shared`, the more is read: with 32K tokens, 4 heads and 128 channels it takes 0.4
/// for 5 %.
[[nodiscard]] inline synthetic_options peaked_attention() {
    synthetic_options o;
    o.shared = 0.69;
    o.sink_share = 0.35;
    o.local_share = 0.35;
    return o;
}

/// Options for attention that is spread over nearly all tokens.
[[nodiscard]] inline synthetic_options flat_attention() {
    synthetic_options o;
    o.logit_deviation = 0.5;
    return o;
}

namespace detail {

/// Independent standard normal numbers, a function of (seed, array, head, token, channel) alone; Box and Muller (1958).
inline void normal_row(std::uint64_t seed, std::uint32_t array, std::size_t head, std::size_t token,
                       std::span<double> out) {
    for (std::size_t c = 0; c < out.size(); c += 2) {
        const verkv::uniform_stream stream{seed, array, static_cast<std::uint32_t>(head),
                                           static_cast<std::uint32_t>(c)};
        const auto position = static_cast<verkv::position_t>(2 * token);
        const double radius = std::sqrt(-2 * std::log(1 - verkv::uniform(stream, position)));
        const double angle = 2 * std::numbers::pi * verkv::uniform(stream, position + 1);
        out[c] = radius * std::cos(angle);
        if (c + 1 < out.size()) {
            out[c + 1] = radius * std::sin(angle);
        }
    }
}

}  // namespace detail

/// A random trace: normal keys with a few heavy channel pairs a head, normal values about a mean, and queries along the
/// heavy pairs, scaled so that each query's logits have the deviation asked for. One pair, 0 in all other tokens,
/// raises the logits of the first 4 tokens, and of those from the last 64 of the prompt on, where they are to have a
/// share. Depends on the options alone (on another C library's log and cos by a last bit); a token's key and value, and
/// the query at a position, do not depend on how many others there are. Throws verkv::invalid_argument for a geometry
/// that cannot be, no tokens, more than 2^30 of them, or shares outside [0, 1].
template <verkv::storage T>
[[nodiscard]] trace<T> synthetic_trace(const synthetic_options& o) {
    verkv::validate(o.shape);
    const std::size_t n = o.prefill_tokens;
    verkv::detail::check(n > 0 && n < (1u << 30) && o.decode_tokens < (1u << 30), "synthetic trace of ", n, " and ",
                         o.decode_tokens, " tokens; there must be 1 to 2^30 - 1 and at most as many");
    verkv::detail::check(o.shared >= 0 && o.shared <= 1, "shared is ", o.shared, "; it must lie in [0, 1]");
    verkv::detail::check(o.sink_share >= 0 && o.local_share >= 0 && o.sink_share + o.local_share < 1, "sink_share is ",
                         o.sink_share, " and local_share ", o.local_share,
                         "; they must not be negative and stay below 1 together");
    verkv::detail::check((o.sink_share == 0 && o.local_share == 0) || o.shape.key_dim >= 4, "key_dim is ",
                         o.shape.key_dim, "; sinks and local tokens with a share need at least 4 channels");
    verkv::detail::check(o.heaviness > 0 && o.logit_deviation >= 0, "heaviness is ", o.heaviness,
                         " and logit_deviation ", o.logit_deviation, "; they must be positive");

    trace<T> t;
    t.name = "synthetic";
    t.model = "synthetic";
    t.shape = o.shape;
    t.shape.scale = o.shape.logit_scale();
    t.pairing = o.shape.key_dim % 2 == 0 ? o.pairing : std::nullopt;
    t.prefill_tokens = n;
    t.tokens = n + o.decode_tokens;
    for (std::size_t p = 0; p < t.tokens; ++p) {
        const bool sampled = o.query_stride > 0 && p < n && (n - 1 - p) % o.query_stride == 0;
        if (p >= n || p + o.last_queries >= n || sampled) {
            t.query_positions.push_back(static_cast<verkv::position_t>(p));
        }
    }

    const std::size_t key_dim = o.shape.key_dim;
    const std::size_t pairs = key_dim / 2;
    const bool halves = o.pairing == rope_pairing::half;
    const std::size_t sinks = 4;
    const std::size_t local_from = n - verkv::smaller(n, std::size_t{64});
    const bool raised = o.sink_share > 0 || o.local_share > 0;
    // Weight is shared out as counts are, where logits have the same law but for what is added. Four tokens are too few
    // for an average: the sinks' logits are what is added and nearly nothing else, so they need the others' mean
    // exp(s).
    const double others = static_cast<double>(n > sinks + 64 ? n - sinks - 64 : 1) / (1 - o.sink_share - o.local_share);
    const auto root_of_raise = [&](double share, double count, double more) {  // in the key's channel and the query's
        const double raise = share > 0 ? std::log(share * others / count) + more : 0;
        return raise > 0 ? std::sqrt(raise / double{t.shape.scale}) : 0;
    };
    const double sink_root =
        root_of_raise(o.sink_share, static_cast<double>(sinks), o.logit_deviation * o.logit_deviation / 2);
    const double local_root = root_of_raise(o.local_share, 64, 0);
    enum : std::uint32_t { keys, values, queries, directions, means, choices };  // which array, in the uniforms' stream
    std::vector<std::vector<double>> deviations(o.shape.kv_heads, std::vector<double>(key_dim, 1));
    std::vector<std::vector<double>> common(o.shape.kv_heads, std::vector<double>(key_dim));
    std::vector<std::vector<double>> mean_values(o.shape.kv_heads, std::vector<double>(o.shape.value_dim));
    std::vector<std::array<std::size_t, 2>> raising(o.shape.kv_heads);  // the channels for sinks and for local tokens
    for (std::size_t head = 0; head < o.shape.kv_heads; ++head) {
        const verkv::uniform_stream stream{o.seed, choices, static_cast<std::uint32_t>(head), 0};
        std::vector<std::size_t> order(pairs);
        for (std::size_t i = 0; i < pairs; ++i) {
            order[i] = i;
        }
        const std::size_t to_choose = verkv::smaller(o.heavy_pairs, pairs - (raised ? 1 : 0)) + (raised ? 1 : 0);
        for (std::size_t i = 0; i < to_choose; ++i) {
            const double u = verkv::uniform(stream, static_cast<verkv::position_t>(i));
            std::swap(order[i], order[i + static_cast<std::size_t>(u * static_cast<double>(pairs - i))]);
            const std::size_t first = halves ? order[i] : 2 * order[i];
            const std::size_t second = halves ? first + pairs : first + 1;
            const bool reserved = raised && i == 0;
            if (reserved) {
                raising[head] = {first, second};
            }
            deviations[head][first] = deviations[head][second] = reserved ? 0 : o.heaviness;
        }
        detail::normal_row(o.seed, directions, head, 0, common[head]);
        detail::normal_row(o.seed, means, head, 0, mean_values[head]);
    }

    t.key_data.reserve(t.tokens * o.shape.kv_heads * key_dim);
    t.value_data.reserve(t.tokens * o.shape.kv_heads * o.shape.value_dim);
    std::vector<double> row(key_dim);
    std::vector<double> value_row(o.shape.value_dim);
    for (std::size_t token = 0; token < t.tokens; ++token) {
        for (std::size_t head = 0; head < o.shape.kv_heads; ++head) {
            detail::normal_row(o.seed, keys, head, token, row);
            for (std::size_t c = 0; c < key_dim; ++c) {
                row[c] *= deviations[head][c] * (o.sink_share > 0 && token < sinks ? 0.1 : 1);
            }
            if (raised) {
                row[raising[head][0]] = token < sinks ? sink_root : 0;
                row[raising[head][1]] = token >= local_from && token >= sinks ? local_root : 0;
            }
            for (std::size_t c = 0; c < key_dim; ++c) {
                t.key_data.push_back(verkv::from_float<T>(static_cast<float>(row[c])));
            }
            detail::normal_row(o.seed, values, head, token, value_row);
            for (std::size_t c = 0; c < o.shape.value_dim; ++c) {
                t.value_data.push_back(verkv::from_float<T>(static_cast<float>(value_row[c] + mean_values[head][c])));
            }
        }
    }
    t.query_data.reserve(t.query_rows() * o.shape.query_heads * key_dim);
    for (const verkv::position_t position : t.query_positions) {
        for (std::size_t query_head = 0; query_head < o.shape.query_heads; ++query_head) {
            const std::size_t head = query_head / o.shape.group();
            detail::normal_row(o.seed, queries, query_head, static_cast<std::size_t>(position), row);
            double variance = 0;  // of <q, k> over the keys
            for (std::size_t c = 0; c < key_dim; ++c) {
                row[c] =
                    (std::sqrt(o.shared) * common[head][c] + std::sqrt(1 - o.shared) * row[c]) * deviations[head][c];
                variance += row[c] * row[c] * deviations[head][c] * deviations[head][c];
            }
            const double factor =
                variance > 0 ? o.logit_deviation / (static_cast<double>(t.shape.scale) * std::sqrt(variance)) : 0;
            for (std::size_t c = 0; c < key_dim; ++c) {
                row[c] *= factor;
            }
            if (raised) {
                row[raising[head][0]] = sink_root;
                row[raising[head][1]] = local_root;
            }
            for (std::size_t c = 0; c < key_dim; ++c) {
                t.query_data.push_back(verkv::from_float<T>(static_cast<float>(row[c])));
            }
        }
    }
    return t;
}

}  // namespace example
