// The TurboQuant sketch against a slow one in doubles; its codebook against the literature's; what it refuses.
#include "verkv/sketch/turbo_quant.hpp"

#include <cmath>
#include <cstdint>
#include <numbers>
#include <numeric>
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
using verkv::turbo_quant_form;
using verkv::turbo_quant_options;
using verkv::turbo_quant_sketch;

static_assert(verkv::sketch<turbo_quant_sketch, cpu, float>);
static_assert(verkv::sketch<turbo_quant_sketch, cpu, half>);
static_assert(verkv::sketch<turbo_quant_sketch, cpu, bfloat16>);
static_assert(verkv::erasable_sketch<turbo_quant_sketch>);
static_assert(!verkv::bounded_sketch<turbo_quant_sketch, cpu, float>);

constexpr turbo_quant_form forms[] = {turbo_quant_form::mean_squared_error, turbo_quant_form::inner_product};

/// matrix x, a matrix held as rotate() takes it.
std::vector<double> times(const float* matrix, std::size_t padded, const std::vector<double>& x) {
    std::vector<double> y(x.size());
    for (std::size_t j = 0; j < x.size(); ++j) {
        for (std::size_t i = 0; i < x.size(); ++i) {
            y[i] += static_cast<double>(matrix[j * padded + i]) * x[j];
        }
    }
    return y;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

template <class T>
void check_against_doubles(dice& d, const turbo_quant_options& o, std::size_t n, std::size_t heads) {
    CAPTURE(o.key_dim, o.bits, static_cast<int>(o.form), n, heads, sizeof(T));
    const std::size_t width = o.key_dim;
    const auto keys = support::stored<T>(normal_floats(d, n * width, std::exp(d.normal())));
    const auto queries = normal_floats(d, heads * width);
    const auto scale = static_cast<float>(d.between(-0.3, 0.3));
    const auto s = support::sketch_of(turbo_quant_sketch(o), keys);
    REQUIRE(s.size() == n);
    const auto logits = support::logits_of(s, queries, scale);
    const verkv::turbo_quant_codes codes = s.codes();
    const bool projects = o.form == turbo_quant_form::inner_product;
    const unsigned level_bits = projects ? o.bits - 1 : o.bits;
    REQUIRE(s.levels().size() == (level_bits == 0 ? 0u : 1u << (level_bits - 1)));
    double worst = 0;
    for (std::size_t i = 0; i < n; ++i) {
        std::vector<double> key(width);
        for (std::size_t c = 0; c < width; ++c) {
            key[c] = static_cast<double>(verkv::to_float(keys[i * width + c]));
        }
        const double norm = std::sqrt(dot(key, key));
        std::vector<double> y = times(codes.rotation, codes.padded_channels, key), levels(width);
        for (std::size_t c = 0; c < width; ++c) {
            y[c] /= norm;
            double nearest = 1e300;
            for (const float size : s.levels()) {
                for (const double level : {static_cast<double>(size), -static_cast<double>(size)}) {
                    if (std::abs(y[c] - level) < nearest) {
                        nearest = std::abs(y[c] - level);
                        levels[c] = level;
                    }
                }
            }
            y[c] -= levels[c];
        }
        const double rest = std::sqrt(dot(y, y));
        for (std::size_t h = 0; h < heads; ++h) {
            const std::vector<double> q(queries.begin() + static_cast<std::ptrdiff_t>(h * width),
                                        queries.begin() + static_cast<std::ptrdiff_t>((h + 1) * width));
            const auto turned = times(codes.rotation, codes.padded_channels, q);
            double expected = dot(levels, turned);
            double size = 0;
            for (std::size_t c = 0; c < width; ++c) {
                size += std::abs(levels[c] * turned[c]);
            }
            if (projects) {
                const auto signs = times(codes.projection, codes.padded_channels, y);
                const auto met = times(codes.projection, codes.padded_channels, turned);
                const double factor = rest * std::sqrt(std::numbers::pi / 2) / static_cast<double>(width);
                for (std::size_t c = 0; c < width; ++c) {
                    expected += factor * (signs[c] < 0 ? -met[c] : met[c]);
                    size += factor * std::abs(met[c]);
                }
            }
            const double unit = norm * std::abs(static_cast<double>(scale)) * size * 0x1p-24;
            const double error =
                std::abs(static_cast<double>(logits[h * n + i]) - norm * static_cast<double>(scale) * expected);
            worst = (std::max)(worst, error / (unit * (static_cast<double>(width) + 4)));
        }
    }
    CHECK(worst <= 1);
}

TEST_CASE("turbo_quant: estimates are those of a slow sketch in doubles") {
    dice d(71);
    for (const auto form : forms) {
        for (const std::size_t width : {2u, 3u, 31u, 32u, 33u, 64u, 65u, 80u, 128u}) {
            for (const unsigned bits : {1u, 2u, 3u, 4u}) {
                const turbo_quant_options o{width, bits, form, d.below(1000)};
                check_against_doubles<float>(d, o, 1 + d.below(50), 1 + d.below(9));
                check_against_doubles<half>(d, o, 1 + d.below(50), 4);
                check_against_doubles<bfloat16>(d, o, 1 + d.below(50), 5);
            }
        }
        check_against_doubles<float>(d, {300, 3, form, 1}, 20, 3);
    }
}

TEST_CASE("turbo_quant: the codebook is the literature's where there are many channels") {
    // Max 1960, table I; distortions of Max and of the paper.
    const std::vector<std::vector<double>> levels = {{0.7980},
                                                     {0.4528, 1.510},
                                                     {0.2451, 0.7560, 1.344, 2.152},
                                                     {0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733}};
    const double distortions[] = {0.3634, 0.1175, 0.03454, 0.009497};
    for (unsigned bits = 1; bits <= 4; ++bits) {
        const auto book = verkv::detail::lloyd_max_sphere(4096, std::size_t{1} << (bits - 1));
        REQUIRE(book.levels.size() == levels[bits - 1].size());
        for (std::size_t i = 0; i < book.levels.size(); ++i) {
            CHECK(book.levels[i] * 64 == Approx(levels[bits - 1][i]).epsilon(1e-3));
        }
        CHECK(book.distortion == Approx(distortions[bits - 1]).epsilon(1e-3));
    }
}

TEST_CASE("turbo_quant: levels are the means of their cells, and the distortion is the squared error") {
    for (const std::size_t width : {3u, 4u, 5u, 16u, 64u, 127u}) {
        for (unsigned bits = 1; bits <= 4; ++bits) {
            const auto book = verkv::detail::lloyd_max_sphere(width, std::size_t{1} << (bits - 1));
            CAPTURE(width, bits);
            // Simpson in the angle, z = sin(angle): the density of z is cos(angle)^(width - 3), and dz = cos(angle).
            const auto integral = [&](double from, double to, auto f) {
                constexpr int steps = 4000;
                const double a = std::asin(from), b = std::asin(to);
                double sum = 0;
                for (int i = 0; i <= steps; ++i) {
                    const double angle = a + (b - a) * i / steps;
                    const double weight = i == 0 || i == steps ? 1 : i % 2 ? 4 : 2;
                    sum += weight * f(std::sin(angle)) * std::pow(std::cos(angle), static_cast<double>(width) - 2);
                }
                return sum * (b - a) / steps / 3;
            };
            const double all = integral(0, 1, [](double) { return 1.0; });
            double from = 0, error = 0;
            for (std::size_t i = 0; i < book.levels.size(); ++i) {
                const double level = book.levels[i];
                const double to = i + 1 < book.levels.size() ? (level + book.levels[i + 1]) / 2 : 1.0;
                const double mass = integral(from, to, [](double) { return 1.0; });
                const double moment = integral(from, to, [](double z) { return z; });
                CHECK(level == Approx(moment / mass).epsilon(1e-8));
                error += integral(from, to, [&](double z) { return (z - level) * (z - level); });
                from = to;
            }
            CHECK(book.distortion == Approx(static_cast<double>(width) * error / all).epsilon(1e-7));
        }
    }
    // On the circle each coordinate is a sine: one level, 2 / pi.
    CHECK(verkv::detail::lloyd_max_sphere(2, 1).levels[0] == Approx(2 / std::numbers::pi).epsilon(1e-12));
}

TEST_CASE("turbo_quant: what it says of its bias") {
    for (unsigned bits = 1; bits <= 4; ++bits) {
        const turbo_quant_sketch plain({64, bits, turbo_quant_form::mean_squared_error, 0});
        CHECK(plain.bias() == -plain.distortion());
        CHECK(plain.distortion() == verkv::detail::lloyd_max_sphere(64, std::size_t{1} << (bits - 1)).distortion);
        const turbo_quant_sketch unbiased({64, bits, turbo_quant_form::inner_product, 0});
        CHECK(unbiased.bias() == 0);
    }
    CHECK(turbo_quant_sketch({64, 1, turbo_quant_form::inner_product, 0}).distortion() == 1);
}

TEST_CASE("turbo_quant: what every sketch keeps") {
    dice d(72);
    for (const auto form : forms) {
        for (const unsigned bits : {1u, 3u}) {
            support::check_same_bits(turbo_quant_sketch({20, bits, form, 1}), d);
            support::check_erasing(turbo_quant_sketch({20, bits, form, 2}), d);
            support::check_poison(turbo_quant_sketch({5, bits, form, 3}), d);
            support::check_memory(turbo_quant_sketch({40, bits, form, 4}), d);
            support::check_refusals(turbo_quant_sketch({6, bits, form, 5}));
        }
    }
}

TEST_CASE("turbo_quant: keys of zeros, tiny and huge ones") {
    for (const auto form : forms) {
        const turbo_quant_sketch prototype({4, 2, form, 1});
        const std::vector<float> keys = {0, 0, 0, 0, 1e-30f, 2e-30f, 0, 1e-30f, 1e30f, 2e30f, 0, 1e30f, 1, 2, 0, 1};
        const auto logits = support::logits_of(support::sketch_of(prototype, keys), {1, 1, 1, 1});
        CHECK(logits[0] == 0);
        CHECK(logits[1] == Approx(1e-30 * logits[3]).epsilon(1e-5));
        CHECK(logits[2] == Approx(1e30 * logits[3]).epsilon(1e-5));
        const auto none = support::logits_of(support::sketch_of(prototype, keys), {1, 1, 1, 1}, 0);
        CHECK(none == std::vector<float>{0, 0, 0, 0});
    }
}

TEST_CASE("turbo_quant: sizes; seeds; copies share their matrices") {
    const double expected[] = {20, 36, 52, 68};
    for (unsigned bits = 1; bits <= 4; ++bits) {
        CHECK(turbo_quant_sketch({128, bits, turbo_quant_form::mean_squared_error, 0}).bytes_per_token() ==
              expected[bits - 1]);
        CHECK(turbo_quant_sketch({128, bits, turbo_quant_form::inner_product, 0}).bytes_per_token() ==
              expected[bits - 1] + 4);
    }
    const turbo_quant_sketch a({16, 2, turbo_quant_form::inner_product, 1}),
        same = a, b({16, 2, turbo_quant_form::inner_product, 2});
    CHECK(a.codes().rotation == same.codes().rotation);
    CHECK(a.codes().projection == same.codes().projection);
    CHECK(a.codes().rotation[0] != b.codes().rotation[0]);
    CHECK(a.codes().projection[0] != b.codes().projection[0]);
    // The projection is drawn apart from the rotation: no element of the one's Gaussian is the other's.
    CHECK(verkv::detail::standard_normal(verkv::detail::stream_of(1, verkv::detail::sketch_stream::rotation), 0) !=
          static_cast<double>(a.codes().projection[0]));
}

TEST_CASE("turbo_quant: what is refused") {
    CHECK(refused([] { turbo_quant_sketch({1}); }, {"1 channels", "2 to 1024"}));
    CHECK(refused([] { turbo_quant_sketch({1025}); }, {"1025"}));
    CHECK(refused([] { turbo_quant_sketch({8, 0}); }, {"0 bits"}));
    CHECK(refused([] { turbo_quant_sketch({8, 5}); }, {"5 bits"}));
    CHECK(refused([] { turbo_quant_sketch({8, 2, static_cast<turbo_quant_form>(7)}); }, {"turbo_quant_form is 7"}));
}

}  // namespace
