// MagicPIG's promise over the planes: a token is sampled with probability u, so that 1 / u makes sums unbiased.
#include "verkv/sketch/magic_pig.hpp"

#include <cmath>
#include <cstdint>
#include <vector>

#include "support/catch.hpp"
#include "support/sketch_rig.hpp"

namespace {

using support::dice;
using support::rows_of;
using verkv::cpu;
using verkv::magic_pig_options;
using verkv::magic_pig_tables;

/// Keys of 8 channels at given cosines to the query (4, 0, 0, ...), about a centre.
struct scene {
    std::vector<float> keys, query = std::vector<float>(8);
    std::vector<double> cosines{-0.5, 0, 0.4, 0.7, 0.9, 0.98};
    std::vector<float> centre_keys;

    explicit scene(dice& d) {
        query[0] = 4;
        std::vector<float> centre(8);
        for (float& x : centre) {
            x = static_cast<float>(d.between(-2, 2));
        }
        centre_keys = centre;
        for (const double cosine : cosines) {
            double square = 0;
            std::vector<double> side(8);
            for (std::size_t c = 1; c < 8; ++c) {
                side[c] = d.normal();
                square += side[c] * side[c];
            }
            const double length = d.log_between(0.1, 10);
            for (std::size_t c = 0; c < 8; ++c) {
                const double direction = c == 0 ? cosine : std::sqrt((1 - cosine * cosine) / square) * side[c];
                keys.push_back(static_cast<float>(static_cast<double>(centre[c]) + length * direction));
            }
        }
    }

    [[nodiscard]] magic_pig_tables tables(const magic_pig_options& o) const {
        magic_pig_tables s(o);
        s.fit(cpu{}, rows_of(centre_keys, 8));
        s.append(cpu{}, rows_of(keys, 8));
        return s;
    }
};

TEST_CASE("magic_pig: tokens are sampled with probability u, over the planes") {
    // Shares of independent seeds lie within 5 standard errors: false alarm 6e-7 each, 2e-5 together.
    dice d(105);
    const scene at(d);
    constexpr int seeds = 3000;
    for (const unsigned least : {1u, 2u}) {
        for (const std::size_t planes : {2u, 5u, 9u}) {
            std::vector<double> sampled(at.cosines.size());
            verkv::collision_sample sample;
            for (int seed = 0; seed < seeds; ++seed) {
                const auto s = at.tables({8, planes, 12, least, 0, static_cast<std::uint64_t>(seed)});
                s.sample(cpu{}, rows_of(at.keys, 8), at.query, sample);
                for (const verkv::token_index t : sample.tokens) {
                    ++sampled[t];
                }
            }
            for (std::size_t i = 0; i < at.cosines.size(); ++i) {
                const double u = verkv::collision_inclusion(at.cosines[i], planes, 12, least);
                CAPTURE(least, planes, at.cosines[i], u, sampled[i] / seeds);
                CHECK(std::abs(sampled[i] - u * seeds) <= 5 * std::sqrt(u * (1 - u) * seeds) + 1e-3 * u * seeds);
            }
        }
    }
}

TEST_CASE("magic_pig: the weighted sum is unbiased; the floor makes it low by what is stated") {
    // Means over independent seeds within 5 standard errors: false alarm 6e-7 each.
    dice d(106);
    const scene at(d);
    constexpr int seeds = 4000;
    const double value[] = {5, 1, -2, 3, 1, 2};
    for (const double floor : {0.0, 0.2}) {
        double sum = 0, square = 0, exact = 0, stated = 0;
        for (std::size_t i = 0; i < 6; ++i) {
            const double u = verkv::collision_inclusion(at.cosines[i], 3, 12);
            exact += value[i];
            stated += value[i] * u / (u + floor);
        }
        verkv::collision_sample sample;
        for (int seed = 0; seed < seeds; ++seed) {
            const auto s = at.tables({8, 3, 12, 2, floor, 50000 + static_cast<std::uint64_t>(seed)});
            s.sample(cpu{}, rows_of(at.keys, 8), at.query, sample);
            double estimate = 0;
            for (std::size_t j = 0; j < sample.tokens.size(); ++j) {
                estimate += value[sample.tokens[j]] * std::exp(static_cast<double>(sample.log_weight[j]));
            }
            sum += estimate / seeds;
            square += estimate * estimate / seeds;
        }
        const double error = std::sqrt((square - sum * sum) / seeds);
        CAPTURE(floor, sum, exact, stated, error);
        CHECK(std::abs(sum - stated) <= 5 * error);
        if (floor > 0) {
            CHECK(std::abs(sum - exact) > 5 * error);
        } else {
            CHECK(stated == Approx(exact));
        }
    }
}

}  // namespace
