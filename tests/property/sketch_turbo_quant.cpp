// TurboQuant's promises over its seeds: how biased the plain form is, that the other is not, and its variance.
#include "verkv/sketch/turbo_quant.hpp"

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "support/catch.hpp"
#include "support/sketch_rig.hpp"

namespace {

using support::dice;
using verkv::turbo_quant_form;
using verkv::turbo_quant_options;
using verkv::turbo_quant_sketch;

/// Mean of samples and its standard error.
struct moments {
    double sum = 0, square = 0, count = 0;

    void add(double x) {
        sum += x;
        square += x * x;
        ++count;
    }
    [[nodiscard]] double mean() const { return sum / count; }
    [[nodiscard]] double standard_error() const { return std::sqrt((square / count - mean() * mean()) / count); }
};

/// A key of length `norm` and a query of length 2 at an angle to it.
struct meeting {
    std::vector<float> key, query;
    double logit = 0;

    meeting(dice& d, std::size_t width, double cosine, double norm) {
        std::vector<double> k(width), q(width);
        double square = 0, along = 0, rest = 0;
        for (std::size_t c = 0; c < width; ++c) {
            k[c] = d.normal();
            q[c] = d.normal();
            square += k[c] * k[c];
            along += k[c] * q[c];
        }
        for (std::size_t c = 0; c < width; ++c) {
            q[c] -= along / square * k[c];
            rest += q[c] * q[c];
        }
        for (std::size_t c = 0; c < width; ++c) {
            const double direction = k[c] / std::sqrt(square);
            key.push_back(static_cast<float>(norm * direction));
            query.push_back(
                static_cast<float>(2 * (cosine * direction + std::sqrt(1 - cosine * cosine) * q[c] / std::sqrt(rest))));
            logit += static_cast<double>(key.back()) * static_cast<double>(query.back());
        }
    }
};

double estimate(const meeting& m, const turbo_quant_sketch& prototype) {
    return static_cast<double>(support::logits_of(support::sketch_of(prototype, m.key), m.query)[0]);
}

TEST_CASE("turbo_quant: the plain form is low by its distortion, the other is unbiased") {
    // Means over independent seeds lie within 5 standard errors: false alarm 6e-7 each, 2e-5 for all of them.
    dice d(73);
    struct shape {
        std::size_t width;
        int seeds;
    };
    for (const shape w : {shape{3, 2500}, shape{8, 2000}, shape{32, 800}}) {
        for (const unsigned bits : {1u, 2u, 3u, 4u}) {
            const meeting m(d, w.width, 0.8, 3);
            moments plain, unbiased;
            for (int seed = 0; seed < w.seeds; ++seed) {
                const auto s = static_cast<std::uint64_t>(seed);
                plain.add(estimate(m, turbo_quant_sketch({w.width, bits, turbo_quant_form::mean_squared_error, s})));
                unbiased.add(estimate(m, turbo_quant_sketch({w.width, bits, turbo_quant_form::inner_product, s})));
            }
            const turbo_quant_sketch stated({w.width, bits, turbo_quant_form::mean_squared_error, 0});
            CAPTURE(w.width, bits, m.logit, plain.mean(), unbiased.mean());
            CHECK(std::abs(plain.mean() - (1 + stated.bias()) * m.logit) <= 5 * plain.standard_error());
            CHECK(std::abs(unbiased.mean() - m.logit) <= 5 * unbiased.standard_error());
            // The test can tell: with few bits the bias is many standard errors.
            if (bits <= 2) {
                CHECK(std::abs(plain.mean() - m.logit) > 10 * plain.standard_error());
            }
        }
    }
}

/// ||k||, ||r|| and <r, P q> of the key's code under a rotation.
struct residual {
    double norm = 0, length = 0, along = 0;

    residual(const meeting& m, const turbo_quant_sketch& s) {
        const auto codes = s.codes();
        const std::size_t width = m.key.size();
        std::vector<double> y(width), turned(width);
        for (std::size_t j = 0; j < width; ++j) {
            norm += static_cast<double>(m.key[j]) * static_cast<double>(m.key[j]);
            for (std::size_t i = 0; i < width; ++i) {
                const auto p = static_cast<double>(codes.rotation[j * codes.padded_channels + i]);
                y[i] += p * static_cast<double>(m.key[j]);
                turned[i] += p * static_cast<double>(m.query[j]);
            }
        }
        norm = std::sqrt(norm);
        for (std::size_t i = 0; i < width; ++i) {
            double nearest = 1e300;
            for (const float level : s.levels()) {
                nearest = (std::min)(nearest, std::abs(std::abs(y[i]) / norm - static_cast<double>(level)));
            }
            double rest = y[i] / norm;
            for (const float level : s.levels()) {
                const double off = std::abs(y[i]) / norm - static_cast<double>(level);
                if (std::abs(off) == nearest) {
                    rest = y[i] < 0 ? -off : off;
                }
            }
            length += rest * rest;
            along += rest * turned[i];
        }
        length = std::sqrt(length);
    }
};

TEST_CASE("turbo_quant: the unbiased form's variance over its projections is the stated one") {
    // Errors over the stated deviation have mean 0 and mean square 1; within 5 standard errors, false alarm 6e-7 each.
    dice d(74);
    for (const std::size_t width : {4u, 16u, 32u}) {
        for (const unsigned bits : {1u, 2u, 4u}) {
            const meeting m(d, width, 0.6, 2);
            moments error, square;
            for (std::uint64_t seed = 0; seed < 1200; ++seed) {
                const turbo_quant_sketch s({width, bits, turbo_quant_form::inner_product, 7000 + seed});
                const residual r(m, s);
                const double variance = r.norm * r.norm * r.length * r.length *
                                        (std::numbers::pi / 2 * 4 - r.along * r.along / (r.length * r.length)) /
                                        static_cast<double>(width);
                const double z = (estimate(m, s) - m.logit) / std::sqrt(variance);
                error.add(z);
                square.add(z * z);
            }
            CAPTURE(width, bits, error.mean(), square.mean());
            CHECK(std::abs(error.mean()) <= 5 * error.standard_error());
            CHECK(std::abs(square.mean() - 1) <= 5 * square.standard_error());
        }
    }
}

}  // namespace
