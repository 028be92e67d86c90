// Bounds that sketches of a basis, of anchors and of spans state for certain: on thousands of hostile inputs, and with
// queries that are chosen to reach them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "support/bounded_estimates.hpp"
#include "support/catch.hpp"
#include "support/reference.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/sketch/anchors.hpp"
#include "verkv/sketch/low_rank.hpp"
#include "verkv/sketch/spans.hpp"

namespace {

using namespace support;
using verkv::anchor_options;
using verkv::anchor_sketch;
using verkv::bfloat16;
using verkv::coefficient_format;
using verkv::cpu;
using verkv::half;
using verkv::low_rank_options;
using verkv::low_rank_sketch;
using verkv::span_options;
using verkv::span_sketch;

constexpr float scales[] = {1, -1, 0, 0.088f, -1.7f, 1e-30f, 1e-42f};

/// Logits of the unit vectors say what a sketch holds in place of a token's key; what the key has beside that, as a
/// query, is where the estimate errs most.
template <class Sketch, class T>
void add_worst_queries(const Sketch& s, const std::vector<T>& keys, std::vector<float>& queries) {
    const std::size_t width = s.options().key_dim;
    std::vector<float> units(width * width);
    for (std::size_t c = 0; c < width; ++c) {
        units[c * width + c] = 1;
    }
    const auto held = estimates_of(s, units).logits;
    for (std::size_t i = 0; i < s.size(); ++i) {
        for (std::size_t c = 0; c < width; ++c) {
            const float error = verkv::to_float(keys[i * width + c]) - held[c * s.size() + i];
            queries.push_back(std::isfinite(error) ? std::clamp(error, -1e15f, 1e15f) : 1.0f);
        }
    }
}

template <class Sketch, class T>
void check_bounds(dice& d, Sketch&& s, hostility kind, std::size_t n, broken_bounds& out) {
    const std::size_t width = s.options().key_dim;
    const auto keys = hostile_keys<T>(d, kind, n, width);
    s.fit(cpu{}, rows_of(keys, width).slice(0, 1 + d.below(n)));
    s.append(cpu{}, rows_of(keys, width));
    auto queries = hostile_queries(d, keys, 1 + d.below(9), width);
    add_worst_queries(s, keys, queries);
    const std::size_t before = out.broken;
    count_broken(s, keys, queries, scales[d.below(7)], out);
    if (out.broken != before) {
        CAPTURE(static_cast<int>(kind), width, n, sizeof(T));
        FAIL_CHECK(out.broken - before << " bounds broken");
    }
}

template <class T>
void check_low_rank(dice& d, broken_bounds& out) {
    for (const hostility kind : all_hostilities) {
        for (const std::size_t width : {1u, 2u, 3u, 7u, 40u, 65u}) {
            for (const coefficient_format format :
                 {coefficient_format::float32, coefficient_format::float16, coefficient_format::int8}) {
                const low_rank_options o{width, 1 + d.below(width), format};
                check_bounds<low_rank_sketch, T>(d, low_rank_sketch(o), kind, 1 + d.below(20), out);
            }
        }
    }
}

template <class T>
void check_anchors(dice& d, broken_bounds& out) {
    for (const hostility kind : all_hostilities) {
        for (const std::size_t width : {1u, 2u, 3u, 7u, 40u, 65u}) {
            for (const unsigned bits : {0u, 1u, 2u, 3u, 4u}) {
                const anchor_options o{width, 1 + d.below(12), bits, 1 + d.below(20), d.below(100)};
                check_bounds<anchor_sketch, T>(d, anchor_sketch(o), kind, 1 + d.below(20), out);
            }
        }
    }
}

template <class T>
void check_spans(dice& d, broken_bounds& out) {
    for (const hostility kind : all_hostilities) {
        for (const std::size_t width : {1u, 2u, 3u, 7u, 40u, 65u}) {
            for (const std::size_t rank : {0u, 1u, 4u, 16u}) {
                const std::size_t least = 1 + d.below(4), mean = least + d.below(4), most = mean + d.below(9);
                const span_options o{width, least, mean, most, rank, d.below(6)};
                check_bounds<span_sketch, T>(d, span_sketch(o), kind, 1 + d.below(40), out);
            }
        }
    }
}

TEST_CASE("certain bounds: a low-rank sketch's are never broken, and queries reach them") {
    dice d(71);
    broken_bounds all;
    for (int round = 0; round < 3; ++round) {
        check_low_rank<float>(d, all);
        check_low_rank<half>(d, all);
        check_low_rank<bfloat16>(d, all);
    }
    CHECK(all.broken == 0);
    CHECK(all.cases > 100000);
    CHECK(static_cast<double>(all.finite) > 0.95 * static_cast<double>(all.cases));
    CHECK(all.nearest > 0.99L);
    CHECK(all.nearest <= 1);
}

TEST_CASE("certain bounds: an anchor sketch's are never broken, and queries reach them") {
    dice d(72);
    broken_bounds all;
    for (int round = 0; round < 3; ++round) {
        check_anchors<float>(d, all);
        check_anchors<half>(d, all);
        check_anchors<bfloat16>(d, all);
    }
    CHECK(all.broken == 0);
    CHECK(all.cases > 100000);
    CHECK(static_cast<double>(all.finite) > 0.95 * static_cast<double>(all.cases));
    CHECK(all.nearest > 0.99L);
    CHECK(all.nearest <= 1);
}

TEST_CASE("certain bounds: a span sketch's are never broken, and queries reach them") {
    dice d(73);
    broken_bounds all;
    for (int round = 0; round < 3; ++round) {
        check_spans<float>(d, all);
        check_spans<half>(d, all);
        check_spans<bfloat16>(d, all);
    }
    CHECK(all.broken == 0);
    CHECK(all.cases > 100000);
    CHECK(static_cast<double>(all.finite) > 0.95 * static_cast<double>(all.cases));
    CHECK(all.nearest > 0.99L);
    CHECK(all.nearest <= 1);
}

}  // namespace
