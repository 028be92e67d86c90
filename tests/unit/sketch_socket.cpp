// The SOCKET sketch against a softmax over all buckets in doubles; tables and logarithms of its loop; what it refuses.
#include "verkv/sketch/socket.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/sketch_rig.hpp"
#include "verkv/core/concepts.hpp"

namespace {

using support::dice;
using support::normal_floats;
using support::refused;
using verkv::bfloat16;
using verkv::cpu;
using verkv::half;
using verkv::socket_options;
using verkv::socket_sketch;

static_assert(verkv::sketch<socket_sketch, cpu, float>);
static_assert(verkv::sketch<socket_sketch, cpu, half>);
static_assert(verkv::sketch<socket_sketch, cpu, bfloat16>);
static_assert(verkv::erasable_sketch<socket_sketch>);
static_assert(!verkv::bounded_sketch<socket_sketch, cpu, float>);

TEST_CASE("socket: logarithms of lanes") {
    using namespace verkv::detail;
    dice d(91);
    double worst = 0;
    for (int i = 0; i < 20000; ++i) {
        float x[lane_count];
        for (float& value : x) {
            const auto exponent = static_cast<int>(d.below(252)) - 125;
            value = std::ldexp(static_cast<float>(d.between(1, 2)), d.chance(0.5) ? exponent : d.chance(0.5) ? 0 : -1);
            value = d.chance(0.01) ? std::numeric_limits<float>::min() : value;
            value = d.chance(0.01) ? std::numeric_limits<float>::max() : value;
        }
        const lanes y = log(load(static_cast<const float*>(x)));
        for (std::size_t j = 0; j < lane_count; ++j) {
            const double exact = std::log(static_cast<double>(x[j]));
            const double unit = std::ldexp(1.0, (std::max)(std::ilogb(exact), -126) - 23);
            worst = (std::max)(worst, std::abs(static_cast<double>(y[j]) - exact) / unit);
        }
    }
    CHECK(worst <= 2);
    CHECK(log(broadcast(1.0f))[0] == 0);
}

TEST_CASE("socket: tables of sixteen looked up lane by lane") {
    using namespace verkv::detail;
    alignas(64) float table[16];
    for (int i = 0; i < 16; ++i) {
        table[i] = static_cast<float>(100 + i);
    }
    dice d(92);
    for (int round = 0; round < 200; ++round) {
        word_lanes index{};
        for (std::size_t j = 0; j < lane_count; ++j) {
            index[j] = static_cast<std::uint32_t>(d.below(std::size_t{1} << 32));
        }
        const lanes found = lookup(table, index);
        for (std::size_t j = 0; j < lane_count; ++j) {
            REQUIRE(found[j] == table[index[j] & 15u]);
        }
    }
}

/// ln of the collision mass, from a softmax over all corners.
template <class T>
double rank_of(const socket_options& o, const verkv::hash_buckets& planes, const T* key, const float* query) {
    double mass = 0;
    for (std::size_t l = 0; l < o.tables; ++l) {
        std::vector<double> u(o.planes);
        std::size_t bucket = 0;
        for (std::size_t p = 0; p < o.planes; ++p) {
            double of_key = 0, of_query = 0;
            for (std::size_t c = 0; c < o.key_dim; ++c) {
                const auto w = static_cast<double>(planes.normals[c * planes.padded_planes + l * o.planes + p]);
                of_key += w * static_cast<double>(verkv::to_float(key[c]));
                of_query += w * static_cast<double>(query[c]);
            }
            bucket |= static_cast<std::size_t>(of_key >= 0) << p;
            u[p] =
                std::tanh(of_query) / (std::sqrt(static_cast<double>(o.key_dim)) * static_cast<double>(o.temperature));
        }
        double all = 0, own = 0;
        for (std::size_t corner = 0; corner < std::size_t{1} << o.planes; ++corner) {
            double logit = 0;
            for (std::size_t p = 0; p < o.planes; ++p) {
                logit += corner >> p & 1u ? u[p] : -u[p];
            }
            all += std::exp(logit);
            own = corner == bucket ? std::exp(logit) : own;
        }
        mass += own / all;
    }
    return std::log(mass * std::ldexp(1.0, static_cast<int>(o.planes)) / static_cast<double>(o.tables));
}

template <class T>
void check_against_doubles(dice& d, const socket_options& o, std::size_t n, std::size_t heads) {
    CAPTURE(o.key_dim, o.planes, o.tables, o.temperature, n, heads, sizeof(T));
    const auto keys = support::stored<T>(normal_floats(d, n * o.key_dim, 3));
    const auto queries = normal_floats(d, heads * o.key_dim, 0.4);
    auto s = support::sketch_of(socket_sketch(o), keys);
    const auto ranks = support::logits_of(s, queries);
    s.set_map({0.5f, 3});
    const auto logits = support::logits_of(s, queries, -0.25f);
    double worst = 0, mapped = 0;
    for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t i = 0; i < n; ++i) {
            const double rank = rank_of(o, s.codes().keys, keys.data() + i * o.key_dim, queries.data() + h * o.key_dim);
            const double slack = (static_cast<double>(o.tables) + 8 + 4 * std::abs(rank)) * 0x1p-24;
            worst = (std::max)(worst, std::abs(static_cast<double>(ranks[h * n + i]) - rank) / slack);
            const double expected = -0.25 * (0.5 + 3 * rank);
            mapped = (std::max)(mapped, std::abs(static_cast<double>(logits[h * n + i]) - expected) /
                                            (slack + 2 * std::abs(expected) * 0x1p-24));
        }
    }
    CHECK(worst <= 1);
    CHECK(mapped <= 1);
}

TEST_CASE("socket: ranks are those of a softmax over all buckets in doubles") {
    dice d(93);
    for (const std::size_t planes : {1u, 2u, 3u, 4u, 5u, 8u, 10u, 12u}) {
        for (const float temperature : {0.05f, 0.3f, 2.0f}) {
            const socket_options o{1 + d.below(70), planes, 1 + d.below(20), temperature, d.below(1000)};
            const std::size_t n = planes > 8 ? 5 : 1 + d.below(90);
            check_against_doubles<float>(d, o, n, 1 + d.below(3));
            check_against_doubles<half>(d, o, 1 + n / 2, 2);
            check_against_doubles<bfloat16>(d, o, 1 + n / 2, 1);
        }
    }
    check_against_doubles<float>(d, {8, 16, 2, 0.3f, 1}, 2, 1);
    check_against_doubles<float>(d, {128, 4, 1024, 0.3f, 1}, 3, 1);
}

TEST_CASE("socket: a product of 0 counts as positive; mass that vanishes is cut off") {
    // A key of zeros lies in the last bucket of every table, a query of zeros in all alike.
    const socket_options o{3, 2, 5, 0.3f, 1};
    const auto s = support::sketch_of(socket_sketch(o), std::vector<float>{0, 0, 0, 1, 2, 3});
    for (std::size_t l = 0; l < 5; ++l) {
        CHECK(s.codes().keys.buckets[l * 64] == 3);
    }
    CHECK(support::logits_of(s, {0, 0, 0}) == std::vector<float>{0, 0});
    // One plane, hard: a key on the query's side has mass 2, one on the other none.
    const auto hard = support::sketch_of(socket_sketch({3, 1, 1, 1e-4f, 1}), std::vector<float>{1, 2, 3, -1, -2, -3});
    const auto ranks = support::logits_of(hard, {1, 2, 3});
    CHECK(ranks[0] == Approx(std::log(2.0)));
    CHECK(ranks[1] == Approx(std::log(static_cast<double>(std::numeric_limits<float>::min()))));
}

TEST_CASE("socket: what every sketch keeps") {
    dice d(94);
    for (const std::size_t planes : {1u, 7u, 10u, 16u}) {
        support::check_same_bits(socket_sketch({20, planes, 6, 0.3f, 1}), d);
        support::check_erasing(socket_sketch({20, planes, 6, 0.3f, 2}), d);
        support::check_poison(socket_sketch({5, planes, 6, 0.3f, 3}), d);
        support::check_memory(socket_sketch({40, planes, 6, 0.3f, 4}), d);
        support::check_refusals(socket_sketch({6, planes, 6, 0.3f, 5}));
    }
}

TEST_CASE("socket: a calibrated estimate is nearer to the logit than the rank") {
    dice d(95);
    const std::size_t width = 32, n = 300;
    const auto keys = normal_floats(d, n * width);
    const auto queries = normal_floats(d, 8 * width);
    auto s = support::sketch_of(socket_sketch({width, 10, 60, 0.3f, 1}), keys);
    const auto error = [&] {
        const auto logits = support::logits_of(s, queries, 0.5f);
        double sum = 0;
        for (std::size_t h = 0; h < 8; ++h) {
            for (std::size_t i = 0; i < n; ++i) {
                double exact = 0;
                for (std::size_t c = 0; c < width; ++c) {
                    exact += static_cast<double>(keys[i * width + c]) * static_cast<double>(queries[h * width + c]);
                }
                sum += std::pow(static_cast<double>(logits[h * n + i]) - 0.5 * exact, 2);
            }
        }
        return sum;
    };
    const double before = error();
    s.calibrate(cpu{}, support::rows_of(keys, width), support::rows_of(queries, width));
    CHECK(s.size() == n);
    CHECK(s.map().slope > 0);
    CHECK(error() < 0.5 * before);
}

TEST_CASE("socket: sizes; copies share their planes") {
    const socket_sketch s({128});
    CHECK(s.bytes_per_token() == 120.125);
    const socket_sketch copy = s;
    CHECK(copy.codes().keys.normals == s.codes().keys.normals);
    const socket_sketch fewer({128, 10, 7});
    CHECK(fewer.codes().keys.normals[0] == s.codes().keys.normals[0]);
}

TEST_CASE("socket: what is refused") {
    CHECK(refused([] { socket_sketch({0}); }, {"0 channels", "1 to 1024"}));
    CHECK(refused([] { socket_sketch({1025}); }, {"1025"}));
    CHECK(refused([] { socket_sketch({8, 0}); }, {"0 planes", "1 to 16"}));
    CHECK(refused([] { socket_sketch({8, 17}); }, {"17 planes"}));
    CHECK(refused([] { socket_sketch({8, 10, 0}); }, {"0 tables", "10 planes", "1 to 341"}));
    CHECK(refused([] { socket_sketch({8, 16, 257}); }, {"257 tables", "1 to 256"}));
    CHECK(refused([] { socket_sketch({8, 10, 60, 0}); }, {"temperature is 0"}));
    CHECK(refused([] { socket_sketch({8, 10, 60, std::nanf("")}); }, {"temperature is nan"}));
    socket_sketch s({6, 3, 4});
    CHECK(refused([&] { s.set_map({0, std::nanf("")}); }, {"slope nan"}));
}

}  // namespace
