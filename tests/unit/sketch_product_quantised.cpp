// The product-quantised sketch against a slow one in doubles and against faiss; its k-means; what it refuses.
#include "verkv/sketch/product_quantised.hpp"

#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <vector>

#include "support/catch.hpp"
#include "support/npy.hpp"
#include "support/sketch_rig.hpp"
#include "verkv/core/concepts.hpp"

#ifndef VERKV_TEST_DATA_DIR
#define VERKV_TEST_DATA_DIR "tests/golden"
#endif

namespace {

using support::dice;
using support::normal_floats;
using support::refused;
using support::rows_of;
using verkv::bfloat16;
using verkv::cpu;
using verkv::half;
using verkv::product_quantised_options;
using verkv::product_quantised_sketch;

static_assert(verkv::bounded_sketch<product_quantised_sketch, cpu, float>);
static_assert(verkv::bounded_sketch<product_quantised_sketch, cpu, half>);
static_assert(verkv::bounded_sketch<product_quantised_sketch, cpu, bfloat16>);
static_assert(verkv::erasable_sketch<product_quantised_sketch>);

constexpr float infinity = std::numeric_limits<float>::infinity();

product_quantised_options options(std::size_t width, std::size_t subspaces, unsigned bits, std::size_t training = 2048,
                                  std::size_t iterations = 10, std::uint64_t seed = 0) {
    product_quantised_options o;
    o.key_dim = width;
    o.subspaces = subspaces;
    o.bits = bits;
    o.training = training;
    o.iterations = iterations;
    o.seed = seed;
    return o;
}

struct estimates {
    std::vector<float> logits, bounds;
};

/// Logits and bounds, and that logits are the same without bounds.
estimates bounded(const product_quantised_sketch& s, const std::vector<float>& queries, float scale = 1) {
    const std::size_t heads = queries.size() / s.options().key_dim;
    estimates e{std::vector<float>(heads * s.size()), std::vector<float>(heads * s.size())};
    const auto view = [&](std::vector<float>& x) { return verkv::matrix_of(std::span<float>(x), heads, s.size()); };
    s.estimate(cpu{}, rows_of(queries, s.options().key_dim), scale, view(e.logits), view(e.bounds));
    CHECK(support::same_bits(e.logits, support::logits_of(s, queries, scale)));
    return e;
}

double centroid(const verkv::product_quantised_codes& s, std::size_t channel, std::size_t index) {
    return static_cast<double>(s.centroids[channel * s.padded_centroids + index]);
}

template <class T>
void check_against_doubles(dice& d, const product_quantised_options& o, std::size_t n, std::size_t heads) {
    CAPTURE(o.key_dim, o.subspaces, o.bits, o.training, n, heads, sizeof(T));
    const std::size_t width = o.key_dim;
    const auto keys = support::stored<T>(normal_floats(d, n * width, 3));
    const auto queries = normal_floats(d, heads * width);
    const auto scale = static_cast<float>(d.between(-0.3, 0.3));
    const auto s = support::sketch_of(product_quantised_sketch(o), keys);
    REQUIRE(s.size() == n);
    const auto e = bounded(s, queries, scale);
    const auto codes = s.codes();
    const std::size_t piece = width / o.subspaces, k = std::size_t{1} << o.bits;
    double worst = 0, loose = 0;
    bool nearest = true, enough = true, residuals = true;
    for (std::size_t i = 0; i < n; ++i) {
        std::vector<double> decoded(width);
        double residual = 0;
        for (std::size_t j = 0; j < o.subspaces; ++j) {
            const std::size_t code = codes.codes[i * o.subspaces + j];
            REQUIRE(code < k);
            double own = 0, least = 1e300;
            for (std::size_t index = 0; index < k; ++index) {
                double distance = 0;
                for (std::size_t c = j * piece; c < (j + 1) * piece; ++c) {
                    const double off =
                        static_cast<double>(verkv::to_float(keys[i * width + c])) - centroid(codes, c, index);
                    distance += off * off;
                }
                least = (std::min)(least, distance);
                own = index == code ? distance : own;
            }
            nearest = nearest && own <= least * (1 + 1e-5);
            residual += own;
            for (std::size_t c = j * piece; c < (j + 1) * piece; ++c) {
                decoded[c] = centroid(codes, c, code);
            }
        }
        residual = std::sqrt(residual);
        const auto stated = static_cast<double>(codes.residual[i]);
        residuals = residuals && stated >= residual && stated <= residual * (1 + 1e-6);
        for (std::size_t h = 0; h < heads; ++h) {
            double product = 0, reach = 0, length = 0;
            for (std::size_t c = 0; c < width; ++c) {
                const auto q = static_cast<double>(queries[h * width + c]);
                double most = 0;
                for (std::size_t index = 0; index < k; ++index) {
                    most = (std::max)(most, std::abs(centroid(codes, c, index)));
                }
                product += q * decoded[c];
                reach += std::abs(q) * most;
                length += q * q;
            }
            const double factor = std::abs(static_cast<double>(scale));
            const double rounding = factor * reach * (static_cast<double>(o.subspaces) + 1) * 0x1p-24 + 1e-44;
            const double error = static_cast<double>(e.logits[h * n + i]) - static_cast<double>(scale) * product;
            worst = (std::max)(worst, std::abs(error) / rounding);
            const double bound = factor * std::sqrt(length) * residual;
            const auto written = static_cast<double>(e.bounds[h * n + i]);
            enough = enough && written >= bound + factor * reach * static_cast<double>(o.subspaces) * 0x1p-24;
            loose = (std::max)(loose, written / ((bound + rounding) * (1 + 1e-5)));
        }
    }
    CHECK(nearest);
    CHECK(residuals);
    CHECK(worst <= 1);
    CHECK(enough);
    CHECK(loose <= 1);
}

TEST_CASE("product_quantised: estimates and bounds are those of a slow sketch in doubles") {
    dice d(111);
    struct shape {
        std::size_t width, subspaces;
    };
    for (const shape w : {shape{1, 1}, shape{6, 3}, shape{16, 16}, shape{60, 4}, shape{64, 64}, shape{80, 5}}) {
        for (const unsigned bits : {1u, 2u, 4u, 5u, 8u}) {
            const auto o = options(w.width, w.subspaces, bits, 50, 3, d.below(1000));
            check_against_doubles<float>(d, o, 1 + d.below(90), 1 + d.below(5));
            check_against_doubles<half>(d, o, 1 + d.below(40), 3);
            check_against_doubles<bfloat16>(d, o, 1 + d.below(40), 1);
        }
    }
    check_against_doubles<float>(d, options(128, 16, 8, 64, 2), 20, 2);
}

TEST_CASE("product_quantised: codes, products and training are faiss's") {
    const std::string folder = VERKV_TEST_DATA_DIR;
    std::ifstream cases(folder + "/sketch_cases.txt");
    REQUIRE(cases);
    std::size_t seen = 0;
    for (std::string line; std::getline(cases, line); ++seen) {
        std::istringstream fields(line);
        std::string name;
        std::size_t tokens = 0, width = 0, subspaces = 0;
        unsigned bits = 0;
        REQUIRE(fields >> name >> tokens >> width >> subspaces >> bits);
        CAPTURE(name);
        const auto load = [&](const char* file) {
            return read_npy(folder + "/product_quantised_" + name + "/" + file + ".npy");
        };
        const npy_array keys = load("keys"), queries = load("queries"), codes = load("codes"),
                        decoded = load("decoded"), products = load("products");
        REQUIRE(keys.shape == std::vector<std::size_t>{tokens, width});
        REQUIRE(products.shape == std::vector<std::size_t>{5, tokens});
        auto o = options(width, subspaces, bits);
        o.codebook = load("codebook").data;
        const auto s = support::sketch_of(product_quantised_sketch(o), keys.data);
        double their_error = 0;
        for (std::size_t i = 0; i < tokens; ++i) {
            double square = 0;
            for (std::size_t j = 0; j < subspaces; ++j) {
                CHECK(static_cast<float>(s.codes().codes[i * subspaces + j]) == codes.data[i * subspaces + j]);
            }
            for (std::size_t c = 0; c < width; ++c) {
                const double off =
                    static_cast<double>(keys.data[i * width + c]) - static_cast<double>(decoded.data[i * width + c]);
                square += off * off;
            }
            CHECK(static_cast<double>(s.codes().residual[i]) == Approx(std::sqrt(square)).epsilon(1e-6).margin(1e-30));
            their_error += square;
        }
        const auto logits = support::logits_of(s, queries.data);
        for (std::size_t at = 0; at < logits.size(); ++at) {
            CHECK(logits[at] == Approx(products.data[at]).epsilon(1e-5).margin(1e-5));
        }
        // Trained by ourselves on the same keys: no worse than by a tenth.
        const auto own =
            support::sketch_of(product_quantised_sketch(options(width, subspaces, bits, 2048, 25)), keys.data);
        double our_error = 0;
        for (std::size_t i = 0; i < tokens; ++i) {
            our_error += std::pow(static_cast<double>(own.codes().residual[i]), 2);
        }
        CAPTURE(our_error, their_error);
        CHECK(our_error < 1.1 * their_error + 0.05 * static_cast<double>(tokens));
    }
    CHECK(seen == 3);
}

TEST_CASE("product_quantised: what every sketch keeps") {
    dice d(112);
    for (const unsigned bits : {1u, 4u, 7u}) {
        support::check_same_bits(product_quantised_sketch(options(20, 5, bits, 64, 3)), d);
        support::check_erasing(product_quantised_sketch(options(20, 5, bits, 64, 3)), d);
        support::check_poison(product_quantised_sketch(options(5, 1, bits, 64, 3)), d);
        support::check_memory(product_quantised_sketch(options(40, 8, bits, 64, 3)), d);
        support::check_refusals(product_quantised_sketch(options(6, 3, bits, 64, 3)));
    }
}

TEST_CASE("product_quantised: bounds of what is not finite are infinite") {
    const std::vector<float> keys = {1, 2, 3, 4, std::nanf(""), 0, 2, 1, infinity, 1, 3e38f, -3e38f};
    const auto s = support::sketch_of(product_quantised_sketch(options(2, 2, 1)), keys);
    auto e = bounded(s, {1, 1});
    for (std::size_t i = 0; i < 6; ++i) {
        CHECK(std::isnan(e.logits[i]) == (i == 2 || i == 4));
        CHECK((e.bounds[i] == infinity) == (i == 2 || i == 4));
    }
    for (const float bad : {std::nanf(""), infinity}) {
        for (const float bound : bounded(s, {1, bad}).bounds) {
            CHECK(bound == infinity);
        }
    }
    // Estimates that no float holds.
    e = bounded(s, {3e38f, 3e38f}, 10);
    for (const float bound : e.bounds) {
        CHECK(bound == infinity);
    }
    e = bounded(s, {1, 1}, 0);
    CHECK((e.logits[0] == 0 && e.bounds[0] >= 0 && e.bounds[0] < 1e-40f));
    // A distance to the centroids that no float holds: the key is as good as unknown.
    auto o = options(2, 1, 1);
    o.codebook = {-3.4e38f, -3.4e38f, -3e38f, -3e38f};
    const auto far = support::sketch_of(product_quantised_sketch(o), std::vector<float>{3e38f, 3e38f, -3e38f, -3e38f});
    e = bounded(far, {1e-38f, 0});
    CHECK((std::isnan(e.logits[0]) && e.bounds[0] == infinity));
    CHECK((e.logits[1] == Approx(-3) && e.bounds[1] < 1));
}

TEST_CASE("product_quantised: k-means finds clusters that lie apart, and few points themselves") {
    dice d(113);
    // 16 clusters around corners of a cube of side 100.
    std::vector<float> keys;
    for (int i = 0; i < 400; ++i) {
        for (unsigned c = 0; c < 4; ++c) {
            keys.push_back(static_cast<float>(100 * (static_cast<unsigned>(i) >> c & 1u)) +
                           static_cast<float>(0.1 * d.normal()));
        }
    }
    // Seeding may put two centroids in one cluster: rarely, where others are 10^6 times as far away.
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        const auto s = support::sketch_of(product_quantised_sketch(options(4, 1, 4, 400, 5, seed)), keys);
        for (std::size_t i = 0; i < 400; ++i) {
            REQUIRE(s.codes().residual[i] < 1);
        }
    }
    // No more points than centroids: each is one.
    const auto few = normal_floats(d, 8 * 6);
    const auto s = support::sketch_of(product_quantised_sketch(options(6, 2, 3)), few);
    for (std::size_t i = 0; i < 8; ++i) {
        CHECK(s.codes().residual[i] == 0);
    }
    // Equal keys; none at all.
    const auto same = support::sketch_of(product_quantised_sketch(options(6, 2, 8)), std::vector<float>(60, 1.5f));
    CHECK(same.codes().residual[9] == 0);
    CHECK(same.codes().codes[19] == 0);
    product_quantised_sketch none(options(6, 2, 8));
    none.fit(cpu{}, rows_of(std::vector<float>{}, 6));
    none.append(cpu{}, rows_of(std::vector<float>(6, 1.0f), 6));
    CHECK(support::logits_of(none, {1, 1, 1, 1, 1, 1}) == std::vector<float>{0});
    CHECK(none.codes().residual[0] == Approx(std::sqrt(6.0)));
}

TEST_CASE("product_quantised: k-means lowers the error, and its centroids are means of their keys") {
    dice d(114);
    const auto keys = normal_floats(d, 500 * 8);
    double last = 1e300;
    for (const std::size_t iterations : {0u, 1u, 3u, 200u}) {
        const auto s = support::sketch_of(product_quantised_sketch(options(8, 2, 4, 500, iterations)), keys);
        double error = 0;
        for (std::size_t i = 0; i < 500; ++i) {
            error += std::pow(static_cast<double>(s.codes().residual[i]), 2);
        }
        CHECK(error < last);
        last = error;
        if (iterations == 200) {
            std::vector<double> sum(8 * 16), count(2 * 16);
            for (std::size_t i = 0; i < 500; ++i) {
                for (std::size_t j = 0; j < 2; ++j) {
                    const std::size_t code = s.codes().codes[i * 2 + j];
                    ++count[j * 16 + code];
                    for (std::size_t c = j * 4; c < j * 4 + 4; ++c) {
                        sum[c * 16 + code] += static_cast<double>(keys[i * 8 + c]);
                    }
                }
            }
            for (std::size_t c = 0; c < 8; ++c) {
                for (std::size_t code = 0; code < 16; ++code) {
                    CHECK(centroid(s.codes(), c, code) ==
                          Approx(sum[c * 16 + code] / count[c / 4 * 16 + code]).margin(1e-6));
                }
            }
        }
    }
}

TEST_CASE("product_quantised: seeding draws a point by its squared distance") {
    // Points 0, 1 and 3 on a line. The first centroid is any of them; from 0 the second is 3 with probability 9 / 10,
    // from 1 with 4 / 5, from 3 it is 0 with 9 / 13. Shares of 4000 seeds within 5 standard errors: false alarm 6e-7.
    const std::vector<float> points = {0, 1, 3};
    int pairs[4][4] = {};
    constexpr int seeds = 4000;
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
        const auto c = verkv::detail::k_means(points, 1, 2, 0,
                                              verkv::detail::stream_of(seed, verkv::detail::sketch_stream::training));
        REQUIRE(c.size() == 16);
        CHECK(c[15] == c[1]);
        ++pairs[static_cast<int>(c[0])][static_cast<int>(c[1])];
    }
    const auto share = [&](int a, int b, double p) {
        CAPTURE(a, b, p, pairs[a][b]);
        CHECK(std::abs(pairs[a][b] - p * seeds) <= 5 * std::sqrt(p * (1 - p) * seeds));
    };
    share(0, 3, 0.9 / 3);
    share(0, 1, 0.1 / 3);
    share(1, 3, 0.8 / 3);
    share(1, 0, 0.2 / 3);
    share(3, 0, 9.0 / 13 / 3);
    share(3, 1, 4.0 / 13 / 3);
}

TEST_CASE("product_quantised: fit() learns from a key of each stretch, finite ones if there are any") {
    dice d(115);
    std::vector<float> keys;
    for (int i = 0; i < 64; ++i) {
        keys.push_back(static_cast<float>(i));
    }
    for (std::uint64_t seed = 0; seed < 30; ++seed) {
        // As many centroids as training keys: the centroids are those keys.
        product_quantised_sketch s(options(1, 1, 3, 8, 0, seed));
        s.fit(cpu{}, rows_of(keys, 1));
        std::set<int> stretches;
        for (std::size_t i = 0; i < 8; ++i) {
            stretches.insert(static_cast<int>(s.codes().centroids[i]) / 8);
        }
        CHECK(stretches.size() == 8);
        auto spoiled = keys;
        for (std::size_t i = 0; i < 64; ++i) {
            spoiled[i] = i % 8 == 7 ? spoiled[i] : std::nanf("");
        }
        s.fit(cpu{}, rows_of(spoiled, 1));
        for (std::size_t i = 0; i < 8; ++i) {
            CHECK(std::fmod(s.codes().centroids[i], 8.0f) == 7);
        }
    }
    const std::vector<float> none(64, std::nanf(""));
    product_quantised_sketch s(options(1, 1, 3, 8));
    s.fit(cpu{}, rows_of(none, 1));
    CHECK(s.codes().centroids[3] == 0);
}

TEST_CASE("product_quantised: sizes; the seed decides") {
    CHECK(product_quantised_sketch(options(128, 16, 8)).bytes_per_token() == 20);
    CHECK(product_quantised_sketch::bound_failure() == 0);
    dice d(116);
    const auto keys = normal_floats(d, 300 * 8);
    const auto a = support::sketch_of(product_quantised_sketch(options(8, 2, 3, 100)), keys);
    const auto b = support::sketch_of(product_quantised_sketch(options(8, 2, 3, 100, 10, 1)), keys);
    CHECK(a.codes().centroids[0] != b.codes().centroids[0]);
}

TEST_CASE("product_quantised: what is refused") {
    const auto refuse = [](product_quantised_options o, std::initializer_list<std::string> parts) {
        return refused([&] { product_quantised_sketch s(o); }, parts);
    };
    CHECK(refuse(options(0, 1, 8), {"0 channels", "1 to 1024"}));
    CHECK(refuse(options(1025, 1, 8), {"1025"}));
    CHECK(refuse(options(8, 0, 8), {"8 channels", "0 subspaces"}));
    CHECK(refuse(options(130, 65, 8), {"65 subspaces", "1 to 64"}));
    CHECK(refuse(options(8, 3, 8), {"8 channels", "3 subspaces", "equal width"}));
    CHECK(refuse(options(8, 2, 0), {"0 bits"}));
    CHECK(refuse(options(8, 2, 9), {"9 bits", "1 to 8"}));
    CHECK(refuse(options(8, 2, 8, 0), {"training is 0"}));
    CHECK(refuse(options(8, 2, 8, (1u << 20) + 1), {"1048577"}));
    CHECK(refuse(options(8, 2, 8, 10, 1001), {"1001 iterations"}));
    auto o = options(8, 2, 2);
    o.codebook.resize(31);
    CHECK(refuse(o, {"31 numbers", "4 centroids", "32"}));
    o.codebook.resize(32);
    o.codebook[7] = infinity;
    CHECK(refuse(o, {"codebook", "not finite"}));
    product_quantised_sketch s(options(6, 2, 3));
    const std::vector<float> keys(24, 1.0f);
    CHECK(refused<verkv::invalid_state>([&] { s.append(cpu{}, rows_of(keys, 6)); }, {"4 tokens", "before fit()"}));
    s.fit(cpu{}, rows_of(keys, 6));
    s.append(cpu{}, rows_of(keys, 6));
    std::vector<float> out(100);
    const auto queries = rows_of(keys, 6).slice(0, 2);
    const verkv::matrix_view<float> good{out.data(), 2, 4, 4}, wide{out.data(), 2, 5, 5}, none{nullptr, 2, 4, 4};
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, good, wide); }, {"bounds are [2, 5]"}));
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, good, none); }, {"null", "bounds"}));
    CHECK(refused([&] { s.estimate(cpu{}, queries, 1, wide, good); }, {"logits are [2, 5]"}));
}

}  // namespace
