// What collision mass means: with a hard hash its mean is the collision probability of random planes.
#include "verkv/sketch/socket.hpp"

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "support/catch.hpp"
#include "support/sketch_rig.hpp"

namespace {

using support::dice;

TEST_CASE("socket: with a hard hash the mean of the mass is (2 (1 - angle / pi))^planes") {
    // Each table's mass is 2^P or 0: a share of independent tables within 5 standard errors, false alarm 6e-7 each.
    dice d(96);
    for (const std::size_t planes : {1u, 2u, 4u, 5u, 9u}) {
        for (const double angle : {0.3, 1.0, 2.0}) {
            const std::size_t width = 6;
            std::vector<float> key(width), query(width);
            key[0] = 3;
            query[0] = static_cast<float>(5 * std::cos(angle));
            query[4] = static_cast<float>(5 * std::sin(angle));
            double mass = 0, tables = 0;
            for (std::uint64_t seed = 0; seed < 60; ++seed) {
                const verkv::socket_options o{width, planes, 300, 1e-6f, seed};
                const auto rank = support::logits_of(support::sketch_of(verkv::socket_sketch(o), key), query)[0];
                mass += 300 * std::exp(static_cast<double>(rank));
                tables += 300;
            }
            const double p = std::pow(1 - angle / std::numbers::pi, static_cast<double>(planes));
            const double share = mass / tables * std::ldexp(1.0, -static_cast<int>(planes));
            CAPTURE(planes, angle, p, share);
            CHECK(std::abs(share - p) <= 5 * std::sqrt(p * (1 - p) / tables) + 1e-6);
        }
    }
}

TEST_CASE("socket: mass grows with the cosine") {
    dice d(97);
    const std::size_t width = 16;
    std::vector<float> keys, query(width);
    query[0] = 4;
    for (int i = 0; i <= 10; ++i) {
        std::vector<float> key(width);
        key[0] = static_cast<float>(i - 5) / 5;
        key[1] = std::sqrt(1 - key[0] * key[0]);
        keys.insert(keys.end(), key.begin(), key.end());
    }
    std::vector<double> mean(11);
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
        const auto ranks =
            support::logits_of(support::sketch_of(verkv::socket_sketch({width, 10, 60, 0.3f, seed}), keys), query);
        for (std::size_t i = 0; i < 11; ++i) {
            mean[i] += std::exp(static_cast<double>(ranks[i])) / 200;
        }
    }
    for (std::size_t i = 1; i < 11; ++i) {
        CHECK(mean[i] > mean[i - 1]);
    }
}

}  // namespace
