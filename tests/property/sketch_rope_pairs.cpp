// The RoPE-pair sketch against a slow one in doubles, on random keys of every shape.
#include "verkv/sketch/rope_pairs.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/float_rows.hpp"

namespace {

using support::same_bits;
using verkv::bfloat16;
using verkv::cpu;
using verkv::half;
using verkv::rope_pair_options;
using verkv::rope_pair_sketch;
using verkv::rope_pairing;
using verkv::row_id;
using verkv::rows;

/// Nearest half of a double, ties to even, within +-65504.
double rounded_to_half(double x) {
    x = (std::min)((std::max)(x, -65504.0), 65504.0);
    if (x == 0) {
        return 0;
    }
    int exponent;
    std::frexp(x, &exponent);
    const double quantum = std::ldexp(1.0, (std::max)(exponent - 11, -24));
    return std::nearbyint(x / quantum) * quantum;
}

/// What a kept channel of a token becomes, and how far the quantiser may be off it.
struct quantised {
    double value = 0;
    double slack = 0;      ///< one step where the code is a matter of rounding
    double bound = 0;      ///< documented bound on |x - x^|
    double magnitude = 0;  ///< |zero| + code * step
};

/// Plain double version of one group's channel.
std::vector<quantised> quantise(const std::vector<double>& x, unsigned bits) {
    const double levels = std::ldexp(1.0, static_cast<int>(bits)) - 1;
    const double low = *std::min_element(x.begin(), x.end());
    const double high = *std::max_element(x.begin(), x.end());
    const double exact_step = (high - low) / levels;
    const double zero = rounded_to_half(low);
    const double step = rounded_to_half(static_cast<double>(static_cast<float>(exact_step)));
    std::vector<quantised> out;
    for (const double value : x) {
        quantised q;
        double code = 0;
        if (step > 0) {
            const double ratio = (value - zero) / step;
            code = (std::min)((std::max)(std::floor(ratio + 0.5), 0.0), levels);
            const double fraction = ratio + 0.5 - std::floor(ratio + 0.5);
            q.slack = fraction < 1e-3 || fraction > 1 - 1e-3 ? step : 0;
        }
        q.value = zero + code * step;
        q.magnitude = std::abs(zero) + code * step;
        q.bound = (std::max)(step * (0.5 + 0x1p-13), std::abs(zero - low) + levels * std::abs(step - exact_step));
        out.push_back(q);
    }
    return out;
}

template <class T>
struct random_keys {
    random_keys(std::size_t n, std::size_t width, unsigned seed) : stride(width + seed % 3), pool(2 * n * stride) {
        std::mt19937 engine(seed);
        std::normal_distribution<float> normal;
        std::vector<float> deviation(width);
        std::vector<float> mean(width);
        for (std::size_t c = 0; c < width; ++c) {
            deviation[c] = std::exp(2 * normal(engine));
            mean[c] = 3 * normal(engine);
        }
        for (std::size_t i = 0; i < pool.size(); ++i) {
            const std::size_t c = i % stride % width;
            pool[i] = verkv::from_float<T>(mean[c] + deviation[c] * normal(engine));
        }
        for (std::size_t i = 0; i < 2 * n; ++i) {
            ids.push_back(static_cast<row_id>(i));
        }
        std::shuffle(ids.begin(), ids.end(), engine);
        view = {pool.data(), static_cast<std::ptrdiff_t>(stride), n, width, ids.data()};
    }
    random_keys(const random_keys&) = delete;
    random_keys& operator=(const random_keys&) = delete;

    std::size_t stride;
    std::vector<T> pool;
    std::vector<row_id> ids;
    rows<T> view;
};

std::vector<float> estimate(const rope_pair_sketch& s, const std::vector<float>& queries, float scale) {
    const std::size_t width = s.options().key_dim;
    const std::size_t heads = queries.size() / width;
    std::vector<float> logits(heads * s.size());
    s.estimate(cpu{}, verkv::contiguous_rows(std::span<const float>(queries), width), scale,
               {logits.data(), heads, s.size(), static_cast<std::ptrdiff_t>(s.size())});
    return logits;
}

/// The kept channels as a full sort by energy finds them.
template <class T>
std::vector<std::uint32_t> best_channels(const rows<T>& keys, const rope_pair_options& o) {
    std::vector<std::pair<double, std::uint32_t>> pairs;
    const auto half_dim = static_cast<std::uint32_t>(o.key_dim / 2);
    const auto channels_of = [&](std::uint32_t p) {
        return o.pairing == rope_pairing::interleaved ? std::pair(2 * p, 2 * p + 1) : std::pair(p, p + half_dim);
    };
    for (std::uint32_t p = 0; p < half_dim; ++p) {
        const auto [a, b] = channels_of(p);
        double energy = 0;
        for (std::size_t i = 0; i < keys.count; ++i) {
            energy += std::pow(static_cast<double>(verkv::to_float(keys[i][a])), 2) +
                      std::pow(static_cast<double>(verkv::to_float(keys[i][b])), 2);
        }
        pairs.emplace_back(-energy, p);
    }
    std::sort(pairs.begin(), pairs.end());
    std::vector<std::uint32_t> channels;
    for (std::size_t i = 0; i < o.pairs(); ++i) {
        const auto [a, b] = channels_of(pairs[i].second);
        channels.push_back(a);
        channels.push_back(b);
    }
    std::sort(channels.begin(), channels.end());
    return channels;
}

/// Checks each element by unit queries, then logits of random queries, then random chunks and erasures.
template <class T>
void check(const rope_pair_options& o, std::size_t n, std::size_t heads, unsigned seed) {
    CAPTURE(o.key_dim, o.bits, o.pair_fraction, o.group_length, static_cast<int>(o.pairing), n, heads, seed);
    std::mt19937 engine(seed);
    const random_keys<T> random(n, o.key_dim, seed);
    const rows<T>& keys = random.view;
    const cpu exec;
    rope_pair_sketch s(o);
    s.fit(exec, keys);
    const auto expected_channels = best_channels(keys, o);
    const std::vector<std::uint32_t> channels(s.channels().begin(), s.channels().end());
    REQUIRE(channels == expected_channels);
    s.append(exec, keys);
    REQUIRE(s.size() == n);

    std::vector<std::vector<quantised>> expected(channels.size());  // [channel][token]
    for (std::size_t c = 0; c < channels.size(); ++c) {
        for (std::size_t first = 0; first < n; first += o.group_length) {
            std::vector<double> x;
            for (std::size_t i = first; i < (std::min)(n, first + o.group_length); ++i) {
                x.push_back(static_cast<double>(verkv::to_float(keys[i][channels[c]])));
            }
            const auto group = quantise(x, o.bits);
            expected[c].insert(expected[c].end(), group.begin(), group.end());
        }
    }

    std::vector<float> units(channels.size() * o.key_dim);
    for (std::size_t c = 0; c < channels.size(); ++c) {
        units[c * o.key_dim + channels[c]] = 1;
    }
    const auto elements = estimate(s, units, 1.0f);
    for (std::size_t c = 0; c < channels.size(); ++c) {
        for (std::size_t i = 0; i < n; ++i) {
            const double x = static_cast<double>(verkv::to_float(keys[i][channels[c]]));
            const double got = static_cast<double>(elements[c * n + i]);
            const quantised& e = expected[c][i];
            const double rounding = 0x1p-22 * e.magnitude;
            REQUIRE(std::abs(got - e.value) <= e.slack + rounding);
            REQUIRE(std::abs(got - x) <= e.bound + rounding);
        }
    }

    std::normal_distribution<float> normal;
    std::vector<float> queries(heads * o.key_dim);
    for (std::size_t i = 0; i < queries.size(); ++i) {
        queries[i] = normal(engine) * (i / o.key_dim % 2 == 0 ? 1.0f : 1e6f);
    }
    const float scale = 0.0883883f;
    const auto logits = estimate(s, queries, scale);
    for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t i = 0; i < n; ++i) {
            double sum = 0;
            double tolerance = 0;
            double largest_factor = 0;  // |q_c| step_c, or somewhat more
            for (std::size_t c = 0; c < channels.size(); ++c) {
                const double q = static_cast<double>(scale) * static_cast<double>(queries[h * o.key_dim + channels[c]]);
                const double got = static_cast<double>(elements[c * n + i]);
                sum += q * got;
                tolerance += std::abs(q) * expected[c][i].magnitude;
                largest_factor = (std::max)(largest_factor, std::abs(q) * 2.01 * expected[c][i].bound);
            }
            // As documented, and the rounding of the elements read back above.
            tolerance *= static_cast<double>(channels.size() + 5) * 0x1p-23;
            if (verkv::detail::by_bytes(o.bits)) {
                tolerance += 0x1p-13 * largest_factor * ((1u << o.bits) - 1) * static_cast<double>(channels.size());
            }
            REQUIRE(std::abs(static_cast<double>(logits[h * n + i]) - sum) <= tolerance);
        }
    }

    // In random pieces.
    rope_pair_sketch pieces(o);
    pieces.fit(exec, keys);
    for (std::size_t first = 0; first < n;) {
        const std::size_t most = engine() % 4 == 0 ? 40 : 4;
        const std::size_t size = (std::min)(n - first, engine() % most);
        pieces.append(exec, keys.slice(first, size));
        first += size;
    }
    REQUIRE(same_bits(estimate(pieces, queries, scale), logits));

    // Random erasures: survivors keep their bits.
    std::vector<std::size_t> left(n);
    for (std::size_t i = 0; i < n; ++i) {
        left[i] = i;
    }
    for (int round = 0; round < 6 && !left.empty(); ++round) {
        const std::size_t first = engine() % (left.size() + 1);
        const std::size_t last = round == 2 && seed % 2 == 0
                                     ? left.size()
                                     : first + engine() % ((std::min)(left.size() - first, std::size_t{50}) + 1);
        if (round == 4) {
            s.erase(0, 1);
            left.erase(left.begin());
            continue;
        }
        s.erase(first, last);
        left.erase(left.begin() + static_cast<std::ptrdiff_t>(first), left.begin() + static_cast<std::ptrdiff_t>(last));
    }
    REQUIRE(s.size() == left.size());
    auto remaining = estimate(s, queries, scale);
    for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t i = 0; i < left.size(); ++i) {
            REQUIRE(remaining[h * left.size() + i] == logits[h * n + left[i]]);
        }
    }

    // Append to what is left: the closed groups do not move; everything stays within its quantisation bounds.
    const std::size_t old_size = s.size();
    s.append(exec, keys);
    REQUIRE(s.size() == old_size + n);
    const auto longer = estimate(s, units, 1.0f);
    const rows<T> all = keys;
    for (std::size_t c = 0; c < channels.size(); ++c) {
        double low = INFINITY;
        double high = -INFINITY;
        for (std::size_t i = 0; i < n; ++i) {
            const double x = static_cast<double>(verkv::to_float(all[i][channels[c]]));
            low = (std::min)(low, x);
            high = (std::max)(high, x);
        }
        const double widest = (high - low) / (std::ldexp(1.0, static_cast<int>(o.bits)) - 1);
        const double bound = widest * 0.5 * 1.01 + 0x1p-10 * ((std::max)(std::abs(low), std::abs(high)) + high - low);
        for (std::size_t i = 0; i < s.size(); ++i) {
            const std::size_t token = i < old_size ? left[i] : i - old_size;
            const double x = static_cast<double>(verkv::to_float(all[token][channels[c]]));
            REQUIRE(std::abs(static_cast<double>(longer[c * s.size() + i]) - x) <= bound);
        }
    }
}

rope_pair_options shape(std::size_t key_dim, rope_pairing pairing, unsigned bits, double fraction,
                        std::size_t group_length) {
    rope_pair_options o;
    o.key_dim = key_dim;
    o.pairing = pairing;
    o.bits = bits;
    o.pair_fraction = fraction;
    o.group_length = group_length;
    return o;
}

TEST_CASE("sketch: RoPE pairs agree with a slow sketch in doubles for all bits, pairings, fractions, group lengths") {
    unsigned seed = 1;
    for (unsigned bits = 1; bits <= 8; ++bits) {
        for (const auto pairing : {rope_pairing::interleaved, rope_pairing::half}) {
            for (const double fraction : {0.25, 0.6, 1.0}) {
                for (const std::size_t group_length : {1u, 5u, 16u, 128u}) {
                    ++seed;
                    const auto o = shape(20, pairing, bits, fraction, group_length);
                    switch (seed % 3) {
                        case 0:
                            check<float>(o, 150, 3, seed);
                            break;
                        case 1:
                            check<half>(o, 133, 1, seed);
                            break;
                        default:
                            check<bfloat16>(o, 129, 6, seed);
                            break;
                    }
                }
            }
        }
    }
}

TEST_CASE("sketch: RoPE pairs agree with a slow sketch in doubles for real widths and group sizes") {
    unsigned seed = 1000;
    const std::size_t heads[] = {1, 3, 4, 5, 7, 12, 32};
    for (const std::size_t key_dim : {64u, 80u, 128u, 256u}) {
        for (const unsigned bits : {2u, 3u, 4u, 8u}) {
            ++seed;
            const std::size_t group = heads[seed % 7];
            check<half>(shape(key_dim, rope_pairing::half, bits, 0.25, 128), 300, group, seed);
        }
    }
    check<float>(shape(256, rope_pairing::interleaved, 2, 1.0, 128), 140, 5, 2000);  // more channels than a tile
    check<float>(shape(256, rope_pairing::interleaved, 7, 1.0, 64), 100, 4, 2001);
    check<float>(shape(2, rope_pairing::half, 2, 1.0, 128), 1, 1, 2002);
    check<float>(shape(2, rope_pairing::half, 5, 0.01, 3), 2, 2, 2003);
}

}  // namespace
