// Normal numbers of sketches: their moments, and that streams and matrices do not share them.
#include "verkv/sketch/detail/normal.hpp"

#include <cmath>
#include <vector>

#include "support/catch.hpp"

namespace {

using verkv::detail::gaussian_matrix;
using verkv::detail::sketch_stream;
using verkv::detail::standard_normal;
using verkv::detail::stream_of;

TEST_CASE("normal: moments of a standard normal, and no correlation") {
    // Each mean within 5 standard errors: false alarm 6e-7.
    constexpr int n = 100000;
    for (const auto purpose : {sketch_stream::rotation, sketch_stream::projection, sketch_stream::planes}) {
        const auto stream = stream_of(3, purpose);
        const auto other =
            stream_of(3, purpose == sketch_stream::rotation ? sketch_stream::planes : sketch_stream::rotation);
        double sum = 0, square = 0, cube = 0, fourth = 0, next = 0, beside = 0, below = 0, last = 0;
        for (int i = 0; i < n; ++i) {
            const double x = standard_normal(stream, static_cast<std::size_t>(i));
            sum += x;
            square += x * x;
            cube += x * x * x;
            fourth += x * x * x * x;
            next += x * last;
            beside += x * standard_normal(other, static_cast<std::size_t>(i));
            below += x < -1;
            last = x;
        }
        const double unit = 5 * std::sqrt(static_cast<double>(n));
        CHECK(std::abs(sum) <= unit);
        CHECK(std::abs(square - n) <= unit * std::sqrt(2.0));
        CHECK(std::abs(cube) <= unit * std::sqrt(15.0));
        CHECK(std::abs(fourth - 3 * n) <= unit * std::sqrt(96.0));
        CHECK(std::abs(next) <= unit);
        CHECK(std::abs(beside) <= unit);
        const double p = 0.15865525393145707;
        CHECK(std::abs(below - p * n) <= unit * std::sqrt(p * (1 - p)));
    }
}

TEST_CASE("normal: a matrix's rows do not depend on how many there are; padding is 0") {
    const auto stream = stream_of(1, sketch_stream::planes);
    const auto two = gaussian_matrix(stream, 2, 3, 16);
    const auto five = gaussian_matrix(stream, 5, 3, 16);
    for (std::size_t j = 0; j < 3; ++j) {
        for (std::size_t i = 0; i < 16; ++i) {
            CHECK(five[j * 16 + i] == (i < 5 ? static_cast<float>(standard_normal(stream, i * 3 + j)) : 0.0f));
            CHECK(two[j * 16 + i] == (i < 2 ? five[j * 16 + i] : 0.0f));
        }
    }
    CHECK(gaussian_matrix(stream_of(2, sketch_stream::planes), 2, 3, 16) != two);
}

}  // namespace
