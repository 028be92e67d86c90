// Statistics of the Poisson draw: frequencies and independence. Seeds are fixed, so a test that passes goes on passing;
// the false-alarm rates say how likely it was to fail by chance when it was written.
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "support/catch.hpp"
#include "verkv/sample/poisson.hpp"

using namespace verkv;

namespace {

constexpr std::size_t many = std::size_t{1} << 18;

std::vector<position_t> counting(std::size_t n) {
    std::vector<position_t> positions(n);
    std::iota(positions.begin(), positions.end(), 0);
    return positions;
}

std::vector<bool> drawn(const std::vector<float>& r, const uniform_stream& stream) {
    std::vector<token_index> sample;
    poisson_draw(cpu{}, r, counting(r.size()), stream, sample);
    std::vector<bool> in(r.size());
    for (const token_index i : sample) {
        in[i] = true;
    }
    return in;
}

// Correlation of two indicators of the same r, a shifted by `lag`.
double correlation(const std::vector<bool>& a, const std::vector<bool>& b, double r, std::size_t lag = 0) {
    double sum = 0;
    for (std::size_t i = 0; i + lag < a.size(); ++i) {
        sum += ((a[i + lag] ? 1 : 0) - r) * ((b[i] ? 1 : 0) - r);
    }
    return sum / (static_cast<double>(a.size() - lag) * r * (1 - r));
}

}  // namespace

TEST_CASE("sample: tokens are drawn with frequency r") {
    // Chi-square over eight classes of r, 2^15 tokens each: beyond 42.70 with probability 1e-6.
    const std::vector<float> levels{0.9375f, 0.7f, 0.5f, 0.3f, 0.1f, 0.03f, 0.01f, 0.003f};
    std::vector<float> r(many);
    for (std::size_t i = 0; i < many; ++i) {
        r[i] = levels[(i / 3) % levels.size()];
    }
    for (const std::uint64_t seed : {1u, 2u, 3u}) {
        const auto in = drawn(r, {seed, 0, 0, 0});
        std::vector<double> hits(levels.size());
        std::vector<double> tokens(levels.size());
        for (std::size_t i = 0; i < many; ++i) {
            hits[(i / 3) % levels.size()] += in[i] ? 1 : 0;
            tokens[(i / 3) % levels.size()] += 1;
        }
        double chi_square = 0;
        for (std::size_t k = 0; k < levels.size(); ++k) {
            const auto p = static_cast<double>(levels[k]);
            const double off = hits[k] - tokens[k] * p;
            chi_square += off * off / (tokens[k] * p * (1 - p));
        }
        CAPTURE(seed, chi_square);
        CHECK(chi_square < 42.70);
    }
}

TEST_CASE("sample: draws, layers, heads, seeds and neighbours are independent") {
    // Each correlation is close to normal with deviation 2^-9: beyond 5 of them with probability 6e-7, for 33
    // comparisons 2e-5.
    for (const float r : {0.5f, 0.1f, 0.01f}) {
        const std::vector<float> all(many, r);
        const uniform_stream base{77, 4, 5, 0};
        const auto first = drawn(all, base);
        const auto p = static_cast<double>(r);
        const double bound = 5 * 0x1p-9;
        const std::vector<uniform_stream> others{{77, 4, 5, 1}, {77, 4, 5, 2}, {77, 5, 5, 0},
                                                 {77, 4, 6, 0}, {78, 4, 5, 0}, {77 + (std::uint64_t{1} << 32), 4, 5, 0},
                                                 {77, 5, 4, 0}};
        for (const auto& other : others) {
            CAPTURE(other.seed, other.layer, other.kv_head, other.draw, r);
            CHECK(std::abs(correlation(first, drawn(all, other), p)) < bound);
        }
        for (const std::size_t lag : {1u, 2u, 3u, 64u}) {
            CAPTURE(lag, r);
            CHECK(std::abs(correlation(first, first, p, lag)) < bound);
        }
        // The same stream twice is the same draw: the test above can fail.
        CHECK(correlation(first, drawn(all, base), p) > 0.9);
    }
}
