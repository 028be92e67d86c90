// What every sketch has to keep, whatever it estimates: same bits however tokens arrive, erasing, NaN, memory,
// refusals.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/float_rows.hpp"
#include "support/reference.hpp"
#include "support/refusal.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/thread_pool.hpp"

namespace support {

/// The sketch's logits, [query][token]; and that nothing is written beside them.
template <class Sketch>
std::vector<float> logits_of(const Sketch& s, const std::vector<float>& queries, float scale = 1,
                             const verkv::cpu& exec = {}) {
    const std::size_t width = s.options().key_dim;
    const std::size_t heads = queries.size() / width;
    const std::size_t stride = s.size() + 3;
    std::vector<float> padded(heads * stride, -7.5f);
    s.estimate(exec, rows_of(queries, width), scale,
               {padded.data(), heads, s.size(), static_cast<std::ptrdiff_t>(stride)});
    std::vector<float> logits;
    for (std::size_t at = 0; at < padded.size(); ++at) {
        if (at % stride < s.size()) {
            logits.push_back(padded[at]);
        } else {
            REQUIRE(padded[at] == -7.5f);
        }
    }
    return logits;
}

/// `prototype` fitted to the keys and holding them.
template <class Sketch, class T>
Sketch sketch_of(Sketch prototype, const std::vector<T>& keys) {
    const std::size_t width = prototype.options().key_dim;
    prototype.fit(verkv::cpu{}, rows_of(keys, width));
    prototype.append(verkv::cpu{}, rows_of(keys, width));
    return prototype;
}

/// The same bits for any chunking, any number of threads, any other queries beside one, and rows behind a list.
template <class Sketch>
void check_same_bits(const Sketch& prototype, dice& d, std::size_t many = 5000) {
    const std::size_t width = prototype.options().key_dim;
    for (int round = 0; round < 12; ++round) {
        const std::size_t n = 1 + d.below(150);
        const auto keys = normal_floats(d, n * width);
        const auto queries = normal_floats(d, 3 * width);
        const auto whole = logits_of(sketch_of(prototype, keys), queries);
        Sketch s = prototype;
        s.fit(verkv::cpu{}, rows_of(keys, width));
        for (std::size_t first = 0; first < n;) {
            const std::size_t count = (std::min)(n - first, d.below(40));
            s.append(verkv::cpu{}, rows_of(keys, width).slice(first, count));
            first += count;
        }
        REQUIRE(same_bits(logits_of(s, queries), whole));
        // The same rows in another order of memory, further apart.
        std::vector<float> scattered(n * (width + 2), 1e30f);
        std::vector<verkv::row_id> ids(n);
        for (std::size_t i = 0; i < n; ++i) {
            ids[i] = static_cast<verkv::row_id>(n - 1 - i);
            std::copy_n(keys.begin() + static_cast<std::ptrdiff_t>(i * width), width,
                        scattered.begin() + static_cast<std::ptrdiff_t>((n - 1 - i) * (width + 2)));
        }
        const verkv::rows<float> listed{scattered.data(), static_cast<std::ptrdiff_t>(width + 2), n, width, ids.data()};
        s.fit(verkv::cpu{}, listed);
        REQUIRE(s.size() == 0);
        s.append(verkv::cpu{}, listed);
        REQUIRE(same_bits(logits_of(s, queries), whole));
        for (std::size_t h = 0; h < 3; ++h) {
            const std::vector<float> one(queries.begin() + static_cast<std::ptrdiff_t>(h * width),
                                         queries.begin() + static_cast<std::ptrdiff_t>((h + 1) * width));
            const auto alone = logits_of(s, one);
            REQUIRE(std::equal(alone.begin(), alone.end(), whole.begin() + static_cast<std::ptrdiff_t>(h * n)));
        }
    }
    const auto keys = normal_floats(d, many * width);
    const auto queries = normal_floats(d, 11 * width);
    const Sketch s = sketch_of(prototype, keys);
    verkv::thread_pool pool(3);
    CHECK(same_bits(logits_of(s, queries, 0.1f, verkv::cpu{&pool}), logits_of(s, queries, 0.1f)));
    CHECK(logits_of(s, {}).empty());
}

/// Erasing leaves the others' bits, and appending goes on behind them.
template <class Sketch>
void check_erasing(const Sketch& prototype, dice& d) {
    const std::size_t width = prototype.options().key_dim;
    constexpr std::size_t n = 140;
    const auto keys = normal_floats(d, n * width);
    const auto queries = normal_floats(d, width);
    const Sketch full = sketch_of(prototype, keys);
    const auto before = logits_of(full, queries);
    for (int round = 0; round < 20; ++round) {
        Sketch s = full;
        std::vector<std::size_t> left(n);
        std::iota(left.begin(), left.end(), std::size_t{0});
        while (!left.empty()) {
            const std::size_t first = d.below(left.size() + 1);
            const std::size_t last = first + d.below(left.size() + 1 - first);
            s.erase(first, last);
            left.erase(left.begin() + static_cast<std::ptrdiff_t>(first),
                       left.begin() + static_cast<std::ptrdiff_t>(last));
            if (d.chance(0.3)) {
                const std::size_t again = d.below(n);
                s.append(verkv::cpu{}, rows_of(keys, width).slice(again, 1));
                left.push_back(again);
            }
            const auto after = logits_of(s, queries);
            REQUIRE(after.size() == left.size());
            for (std::size_t i = 0; i < left.size(); ++i) {
                REQUIRE(after[i] == before[left[i]]);
            }
        }
        CHECK(s.size() == 0);
        CHECK(s.bytes() == 0);
    }
}

/// NaN or infinity in a key makes that token's estimate NaN, and no other one's; in a query, all of its estimates.
template <class Sketch>
void check_poison(const Sketch& prototype, dice& d) {
    const std::size_t width = prototype.options().key_dim;
    const auto clean = normal_floats(d, 70 * width);
    const auto queries = normal_floats(d, 2 * width);
    const auto expected = logits_of(sketch_of(prototype, clean), queries);
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()}) {
        for (const std::size_t token : {0u, 9u, 63u, 69u}) {
            auto keys = clean;
            keys[token * width + width / 2] = bad;
            Sketch s = prototype;
            s.fit(verkv::cpu{}, rows_of(clean, width));
            s.append(verkv::cpu{}, rows_of(keys, width));
            auto logits = logits_of(s, queries);
            for (std::size_t i = 0; i < logits.size(); ++i) {
                if (i % 70 == token) {
                    CHECK(std::isnan(logits[i]));
                } else {
                    CHECK(logits[i] == expected[i]);
                }
            }
            // Its mark goes with it.
            s.erase(token, token + 1);
            s.append(verkv::cpu{}, rows_of(clean, width).slice(token, 1));
            logits = logits_of(s, queries);
            CHECK(std::none_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); }));
            // A bad key does not keep fit() from learning of the others.
            s = sketch_of(prototype, keys);
            logits = logits_of(s, queries);
            CHECK(std::count_if(logits.begin(), logits.end(), [](float x) { return std::isnan(x); }) == 2);
        }
    }
    const Sketch s = sketch_of(prototype, clean);
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        auto spoiled = queries;
        spoiled[width / 2] = bad;
        const auto logits = logits_of(s, spoiled);
        for (std::size_t i = 0; i < 140; ++i) {
            CHECK(std::isfinite(logits[i]) == (i >= 70));
        }
    }
}

/// Within what was reserved nothing is allocated; bytes() is a token's share times their number.
template <class Sketch>
void check_memory(const Sketch& prototype, dice& d) {
    const std::size_t width = prototype.options().key_dim;
    const auto keys = normal_floats(d, 96 * width);
    const auto queries = normal_floats(d, 9 * width);
    Sketch s = prototype;
    s.fit(verkv::cpu{}, rows_of(keys, width));
    s.reserve(96);
    std::vector<float> logits(9 * 96);
    CHECK(allocations_of([&] {
              for (std::size_t i = 0; i < 96; ++i) {
                  s.append(verkv::cpu{}, rows_of(keys, width).slice(i, 1));
              }
              s.estimate(verkv::cpu{}, rows_of(queries, width), 1, {logits.data(), 9, 96, 96});
              s.erase(3, 35);
          }) == 0);
    CHECK(s.size() == 64);
    CHECK(static_cast<double>(s.bytes()) == 64 * s.bytes_per_token());
}

/// What every sketch of keys of 6 channels refuses, and that it is unchanged then.
template <class Sketch>
void check_refusals(const Sketch& prototype) {
    const std::vector<float> keys(4 * 6, 1.0f);
    REQUIRE(prototype.options().key_dim == 6);
    Sketch s = sketch_of(prototype, keys);
    const verkv::cpu exec;
    CHECK(refused([&] { s.fit(exec, rows_of(keys, 3)); }, {"3 channels", "6"}));
    CHECK(refused([&] { s.append(exec, rows_of(keys, 3)); }, {"3 channels", "6"}));
    CHECK(refused([&] { s.append(exec, verkv::rows<float>{nullptr, 6, 2, 6, nullptr}); }, {"null", "2 keys"}));
    CHECK(refused([&] { s.erase(2, 1); }, {"2", "1", "4"}));
    CHECK(refused([&] { s.erase(2, 5); }, {"2", "5", "4"}));
    std::vector<float> out(100);
    const auto queries = rows_of(keys, 6).slice(0, 2);
    const verkv::matrix_view<float> good{out.data(), 2, 4, 4}, wide{out.data(), 2, 5, 5}, over{out.data(), 2, 4, 3},
        none{nullptr, 2, 4, 4};
    CHECK(refused([&] { s.estimate(exec, rows_of(keys, 3).slice(0, 2), 1, good); }, {"3 channels"}));
    CHECK(refused([&] { s.estimate(exec, queries, 1, wide); }, {"logits are [2, 5]"}));
    CHECK(refused([&] { s.estimate(exec, queries, 1, over); }, {"logits", "stride 3"}));
    CHECK(refused([&] { s.estimate(exec, queries, 1, none); }, {"null", "logits"}));
    CHECK(s.size() == 4);
}

}  // namespace support
