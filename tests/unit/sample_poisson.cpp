// The Poisson draw: end points, resolution, chunking, refusals.
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/sample/poisson.hpp"

using namespace verkv;
using support::refused;

namespace {

using tokens = std::vector<token_index>;

std::vector<position_t> counting_from(position_t first, std::size_t n) {
    std::vector<position_t> positions(n);
    std::iota(positions.begin(), positions.end(), first);
    return positions;
}

}  // namespace

TEST_CASE("sample: end points of the draw") {  // case O5
    const std::vector<float> r{0, 1, 0.5f, 0.5f, 0.5f, 1};
    std::vector<double> u{0, 1 - 0x1p-24, 0.5, 0.5 - 0x1p-25, 0.5 + 0x1p-24, 0};
    tokens sample{99};
    poisson_draw(cpu{}, r, u, sample);
    CHECK(sample == tokens{1, 3, 5});
    u[1] = 1.0;  // a generator on (0, 1]
    poisson_draw(cpu{}, r, u, sample);
    CHECK(sample == tokens{1, 3, 5});
    poisson_draw(cpu{}, std::vector<float>{}, std::vector<double>{}, sample);
    CHECK(sample.empty());
}

TEST_CASE("sample: the draw uses the uniform of the stored position") {
    const std::size_t n = 5000;
    const auto positions = counting_from(7, n);
    const uniform_stream stream{1234567890123u, 3, 2, 1};
    std::vector<float> r(n);
    tokens expected;
    for (std::size_t i = 0; i < n; ++i) {
        r[i] = i % 50 == 0 ? 1.0f : i % 50 == 1 ? 0.0f : static_cast<float>(i % 13) / 13;
        if (sampled(static_cast<double>(r[i]), uniform(stream, positions[i]))) {
            expected.push_back(static_cast<token_index>(i));
        }
    }
    tokens sample;
    poisson_draw(cpu{}, r, positions, stream, sample);
    CHECK(sample == expected);

    // Threads change nothing.
    thread_pool pool(3);
    tokens threaded;
    poisson_draw(cpu{&pool}, r, positions, stream, threaded);
    CHECK(threaded == expected);

    // In pieces of any length.
    for (const std::size_t piece : {1u, 63u, 64u, 65u, 4096u}) {
        tokens joined;
        for (std::size_t first = 0; first < n; first += piece) {
            const std::size_t count = std::min(piece, n - first);
            poisson_draw(cpu{}, std::span<const float>(r).subspan(first, count),
                         std::span<const position_t>(positions).subspan(first, count), stream, sample);
            for (const token_index i : sample) {
                joined.push_back(i + static_cast<token_index>(first));
            }
        }
        CHECK(joined == expected);
    }

    // Tokens taken out: those left are drawn as before.
    std::vector<float> fewer_r;
    std::vector<position_t> fewer_positions;
    for (std::size_t i = 0; i < n; i += 3) {
        fewer_r.push_back(r[i]);
        fewer_positions.push_back(positions[i]);
    }
    poisson_draw(cpu{}, fewer_r, fewer_positions, stream, sample);
    tokens left;
    for (const token_index i : expected) {
        if (i % 3 == 0) {
            left.push_back(i / 3);
        }
    }
    CHECK(sample == left);
}

TEST_CASE("sample: uniforms are finer than 24 bits") {
    // Each threshold lies half a step of 2^-24 above a 24-bit uniform cut off from the token's own: a generator of 24
    // bits is below all of them, one of more bits below half. 2^18 tokens at 6 standard deviations: false alarm 2e-9.
    const uniform_stream stream{42, 0, 0, 0};
    std::vector<float> r;
    std::vector<position_t> positions;
    for (position_t p = 0; p < (1 << 19); ++p) {
        const double u = uniform(stream, p);
        if (u < 0.25) {
            r.push_back(static_cast<float>((std::floor(u * 0x1p24) + 0.5) * 0x1p-24));
            positions.push_back(p);
        }
    }
    tokens sample;
    poisson_draw(cpu{}, r, positions, stream, sample);
    const auto n = static_cast<double>(r.size());
    CHECK(n > 1e5);
    CHECK(std::abs(static_cast<double>(sample.size()) - n / 2) < 6 * std::sqrt(n / 4));
}

namespace {

// Tokens in the sample of `draws` tokens at one r.
std::size_t ones(std::uint64_t draws, float r, std::uint64_t seed) {
    constexpr std::size_t piece = std::size_t{1} << 20;
    const std::vector<float> all(piece, r);
    std::size_t count = 0;
    tokens sample;
    for (std::uint64_t first = 0; first < draws; first += piece) {
        const auto positions = counting_from(static_cast<position_t>(first), piece);
        poisson_draw(cpu{}, all, positions, uniform_stream{seed, 0, 0, 0}, sample);
        count += sample.size();
    }
    return count;
}

}  // namespace

TEST_CASE("sample: rare tokens are drawn as often as they should") {
    // 2^22 draws at r = 2^-18, expectation 16: outside 3 ... 36 with probability 2e-5.
    const std::size_t count = ones(std::uint64_t{1} << 22, 0x1p-18f, 7);
    CHECK(count >= 3);
    CHECK(count <= 36);
}

TEST_CASE("sample: long run of rare tokens", "[.slow]") {  // case O5
    // 2^30 draws at r = 2^-26, expectation 16: outside 3 ... 36 with probability 2e-5. A 24-bit uniform gives 64.
    const std::size_t count = ones(std::uint64_t{1} << 30, 0x1p-26f, 7);
    CHECK(count >= 3);
    CHECK(count <= 36);
}

TEST_CASE("sample: a draw refuses bad input and leaves the sample") {
    const auto positions = counting_from(0, 4);
    const tokens before{7, 8};
    tokens sample = before;
    const float nan_value = std::numeric_limits<float>::quiet_NaN();
    for (const float bad : {-0.1f, 1.1f, nan_value, std::numeric_limits<float>::infinity()}) {
        const std::vector<float> r{0.5f, 0.5f, bad, 0.5f};
        CHECK(refused([&] { poisson_draw(cpu{}, r, positions, uniform_stream{}, sample); }, {"token 2"}));
        CHECK(refused([&] { poisson_draw(cpu{}, r, std::vector<double>(4, 0.5), sample); }, {"token 2"}));
    }
    const std::vector<float> r(4, 0.5f);
    CHECK(refused([&] { poisson_draw(cpu{}, r, counting_from(0, 3), uniform_stream{}, sample); }, {"4", "3"}));
    CHECK(refused([&] { poisson_draw(cpu{}, r, counting_from(-1, 4), uniform_stream{}, sample); }, {"-1"}));
    CHECK(refused([&] { poisson_draw(cpu{}, r, std::vector<double>(5, 0.5), sample); }, {"4", "5"}));
    for (const double bad : {-0.1, 1.1, std::nan("")}) {
        CHECK(refused([&] { poisson_draw(cpu{}, r, std::vector<double>{0, 0, 0, bad}, sample); }, {"token 3"}));
    }
    CHECK(sample == before);
}
