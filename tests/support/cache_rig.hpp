// What tests of the cache need: the rows of a text, a step of one request, and the answer in double.
#pragma once

#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <vector>

#include "support/attention_reference.hpp"
#include "verkv/cache/layer_cache.hpp"

namespace support {

/// Keys and values of a text, [token, KV head, channel]; positions 0, 1, ... unless changed.
template <class T>
struct text {
    verkv::geometry shape;
    std::size_t tokens = 0;
    std::vector<T> keys;
    std::vector<T> values;
    std::vector<verkv::position_t> positions;

    text(const verkv::geometry& g, std::size_t n)
        : shape(g), tokens(n), keys(n * g.kv_heads * g.key_dim), values(n * g.kv_heads * g.value_dim), positions(n) {
        for (std::size_t i = 0; i < n; ++i) {
            positions[i] = static_cast<verkv::position_t>(i);
        }
    }

    T* key(std::size_t token, std::size_t head) {
        return keys.data() + (token * shape.kv_heads + head) * shape.key_dim;
    }
    T* value(std::size_t token, std::size_t head) {
        return values.data() + (token * shape.kv_heads + head) * shape.value_dim;
    }

    [[nodiscard]] verkv::heads_view<T> key_view(std::size_t first, std::size_t n) const {
        const std::size_t stride = shape.kv_heads * shape.key_dim;
        return verkv::heads_of(std::span<const T>(keys).subspan(first * stride, n * stride), n, shape.kv_heads,
                               shape.key_dim);
    }
    [[nodiscard]] verkv::heads_view<T> value_view(std::size_t first, std::size_t n) const {
        const std::size_t stride = shape.kv_heads * shape.value_dim;
        return verkv::heads_of(std::span<const T>(values).subspan(first * stride, n * stride), n, shape.kv_heads,
                               shape.value_dim);
    }
    [[nodiscard]] std::span<const verkv::position_t> position_span(std::size_t first, std::size_t n) const {
        return std::span<const verkv::position_t>(positions).subspan(first, n);
    }

    /// Keys of a KV head, of the first n tokens.
    [[nodiscard]] verkv::rows<T> head_keys(std::size_t head, std::size_t n) const { return key_view(0, n).head(head); }
    [[nodiscard]] verkv::rows<T> head_values(std::size_t head, std::size_t n) const {
        return value_view(0, n).head(head);
    }
};

/// Normal keys whose first channel is `peak` times as large, normal values.
template <class T>
text<T> random_text(const verkv::geometry& g, std::size_t n, std::uint64_t seed, double peak = 3) {
    text<T> t(g, n);
    generator random(seed);
    for (std::size_t i = 0; i < n * g.kv_heads; ++i) {
        for (std::size_t c = 0; c < g.key_dim; ++c) {
            t.keys[i * g.key_dim + c] =
                verkv::from_float<T>(static_cast<float>(random.normal() * (c == 0 ? peak : 1.0)));
        }
        for (std::size_t c = 0; c < g.value_dim; ++c) {
            t.values[i * g.value_dim + c] = verkv::from_float<T>(static_cast<float>(random.normal()));
        }
    }
    return t;
}

template <class T>
std::vector<float> random_queries(const verkv::geometry& g, std::uint64_t seed) {
    return generator(seed + 77).normals<float>(g.query_heads * g.key_dim);
}

/// Sizes that hold `requests` texts of n tokens with every row resident.
inline verkv::cache_config roomy(const verkv::geometry& g, std::size_t n, std::size_t requests = 1) {
    verkv::cache_config c;
    c.shape = g;
    c.max_requests = requests;
    c.max_tokens = n;
    c.host_rows = c.resident_rows = requests * n * g.kv_heads;
    return c;
}

template <class Cache, class T>
void prefill(Cache& cache, verkv::request_id id, const text<T>& t, std::size_t first, std::size_t n) {
    cache.prefill(id, t.key_view(first, n), t.value_view(first, n), t.position_span(first, n));
}

template <class Cache, class T>
void append(Cache& cache, verkv::request_id id, const text<T>& t, std::size_t first, std::size_t n) {
    cache.append(id, t.key_view(first, n), t.value_view(first, n), t.position_span(first, n));
}

struct step_answer {
    std::vector<float> output;
    std::vector<float> lse;

    friend bool operator==(const step_answer& a, const step_answer& b) {
        return bits_of(a.output) == bits_of(b.output) && bits_of(a.lse) == bits_of(b.lse);
    }
};

template <class Q>
verkv::decode_item<Q> item_of(const verkv::geometry& g, verkv::request_id id, std::span<const Q> queries,
                              step_answer& answer) {
    answer.output.assign(g.query_heads * g.value_dim, -7777);
    answer.lse.assign(g.query_heads, -7777);
    return {id, verkv::contiguous_rows(queries, g.key_dim), answer.output, answer.lse};
}

/// A step of one request; the report stays with the cache until its next step.
template <class Cache, class Q>
step_answer decode(Cache& cache, verkv::request_id id, const std::vector<Q>& queries, verkv::tolerance promise = {},
                   const verkv::step_report** report = nullptr) {
    step_answer answer;
    const auto item = item_of(cache.config().shape, id, std::span<const Q>(queries), answer);
    const verkv::step_report& r = cache.decode(std::span<const verkv::decode_item<Q>>(&item, 1), promise);
    if (report) {
        *report = &r;
    }
    return answer;
}

/// Dense attention of every query head over the first n tokens, in double.
template <class T>
std::vector<reference_attention> dense_in_double(const text<T>& t, std::size_t n, const std::vector<float>& queries) {
    std::vector<reference_attention> all;
    const verkv::geometry& g = t.shape;
    for (std::size_t h = 0; h < g.query_heads; ++h) {
        all.push_back(attend_in_double(queries.data() + h * g.key_dim, static_cast<double>(g.logit_scale()),
                                       t.head_keys(h / g.group(), n), t.head_values(h / g.group(), n)));
    }
    return all;
}

/// How far an answer is from dense attention, in units of what float may cost: at most 1 when it is the same thing.
inline double distance(const step_answer& a, const std::vector<reference_attention>& exact) {
    double worst = 0;
    for (std::size_t h = 0; h < exact.size(); ++h) {
        const std::size_t width = exact[h].output.size();
        if (std::isinf(exact[h].lse)) {
            worst = std::max(worst, static_cast<double>(a.lse[h]) == exact[h].lse ? 0 : 1e300);
        } else {
            const double error = std::abs(static_cast<double>(a.lse[h]) - exact[h].lse);
            worst = std::max(worst, std::isfinite(error) ? error / exact[h].lse_error : 1e300);
        }
        for (std::size_t c = 0; c < width; ++c) {
            const double error = std::abs(static_cast<double>(a.output[h * width + c]) - exact[h].output[c]);
            worst = std::max(worst, std::isfinite(error) ? (error == 0 ? 0 : error / exact[h].output_error[c]) : 1e300);
        }
    }
    return worst;
}

/// The same draw for every KV head: r and the indices sampled.
template <class Cache>
void adopt(Cache& cache, verkv::request_id id, const std::vector<float>& r,
           const std::vector<verkv::token_index>& sample) {
    const std::size_t heads = cache.config().shape.kv_heads;
    const std::vector<std::span<const float>> all_r(heads, r);
    const std::vector<std::span<const verkv::token_index>> all_samples(heads, sample);
    cache.adopt(id, all_r, all_samples);
}

/// Everything that can be seen of a request from outside.
template <class T>
struct request_state {
    std::vector<verkv::position_t> positions;
    std::vector<bool> resident;
    std::vector<float> probability;
    std::vector<float> rows;
    std::vector<const T*> places;
    std::vector<std::size_t> staged;
    std::vector<std::size_t> sketched;
    std::size_t free_host = 0;
    std::size_t free_resident = 0;

    friend bool operator==(const request_state&, const request_state&) = default;
};

template <class T, class Cache>
request_state<T> state_of(const Cache& cache, verkv::request_id id) {
    request_state<T> s;
    const auto p = cache.positions(id);
    s.positions.assign(p.begin(), p.end());
    for (std::size_t h = 0; h < cache.config().shape.kv_heads; ++h) {
        for (std::size_t i = 0; i < p.size(); ++i) {
            const auto token = static_cast<verkv::token_index>(i);
            s.resident.push_back(cache.resident(id, h, token));
            s.probability.push_back(cache.probability(id, h, token));
            const auto row = cache.host_row(id, h, token);
            s.places.push_back(row.data());
            for (const T x : row) {
                s.rows.push_back(verkv::to_float(x));
            }
        }
        s.staged.push_back(cache.staged_rows(id, h));
        s.sketched.push_back(cache.sketch_of(id, h).size());
    }
    s.free_host = cache.free_host_rows();
    s.free_resident = cache.free_resident_rows();
    return s;
}

}  // namespace support
