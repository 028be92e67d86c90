#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/reference.hpp"
#include "verkv/plan/top_k.hpp"

namespace {

using support::dice;
using verkv::cpu;
using verkv::token_index;
using floats = std::vector<float>;
using tokens = std::vector<token_index>;

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

tokens top(const floats& score, std::size_t k) {
    verkv::top_k_workspace w;
    tokens out{7, 7, 7};
    verkv::top_k(cpu{}, score, k, w, out);
    return out;
}

/// By a full sort: falling score, ties by rising index.
tokens sorted_top(const floats& score, std::size_t k) {
    tokens order;
    for (std::size_t i = 0; i < score.size(); ++i) {
        if (score[i] > -infinity) {
            order.push_back(static_cast<token_index>(i));
        }
    }
    std::stable_sort(order.begin(), order.end(), [&](token_index a, token_index b) { return score[a] > score[b]; });
    order.resize(std::min(k, order.size()));
    std::sort(order.begin(), order.end());
    return order;
}

}  // namespace

TEST_CASE("plan: a shortlist with ties at the cut") {
    const floats score{5, 4, 4, 4, 1};
    CHECK(top(score, 3) == tokens{0, 1, 2});
    CHECK(top(score, 5) == tokens{0, 1, 2, 3, 4});
    CHECK(top(score, 7) == tokens{0, 1, 2, 3, 4});
    CHECK(top(score, 1) == tokens{0});
    CHECK(top(score, 0).empty());
    CHECK(top({}, 3).empty());
    CHECK(top({}, 0).empty());
}

TEST_CASE("plan: scores of minus infinity and NaN are never on the shortlist") {
    CHECK(top({-infinity, not_a_number, 1, -infinity, -5, infinity}, 2) == tokens{2, 5});
    CHECK(top({-infinity, not_a_number, 1, -infinity, -5, infinity}, 5) == tokens{2, 4, 5});
    CHECK(top(floats(500, -infinity), 10).empty());
    CHECK(top(floats(500, not_a_number), 10).empty());
    floats score(500, not_a_number);
    score[499] = -3;
    score[63] = -4;
    CHECK(top(score, 1) == tokens{499});
    CHECK(top(score, 10) == tokens{63, 499});
    CHECK(top(floats(500, std::numeric_limits<float>::lowest()), 3) == tokens{0, 1, 2});
}

TEST_CASE("plan: the shortlist is what a full sort finds") {
    dice d(41);
    verkv::top_k_workspace w;
    tokens out;
    for (const std::size_t n : {1u, 2u, 3u, 31u, 63u, 64u, 65u, 127u, 128u, 129u, 257u, 1000u, 1023u, 4096u, 10000u}) {
        for (int kind = 0; kind < 7; ++kind) {
            floats score(n);
            for (std::size_t i = 0; i < n; ++i) {
                switch (kind) {
                    case 0:
                        score[i] = static_cast<float>(d.normal());
                        break;
                    case 1:  // many ties
                        score[i] = static_cast<float>(d.below(4));
                        break;
                    case 2:  // sparse
                        score[i] = d.chance(0.05) ? static_cast<float>(d.normal()) : -infinity;
                        break;
                    case 3:
                        score[i] = d.chance(0.3) ? not_a_number : static_cast<float>(d.below(100));
                        break;
                    case 4:
                        score[i] = static_cast<float>(i);
                        break;
                    case 5:
                        score[i] = -static_cast<float>(i / 3);
                        break;
                    default:
                        score[i] = 2.5f;
                }
            }
            for (const std::size_t k : {std::size_t{0},
                                        std::size_t{1},
                                        std::size_t{2},
                                        std::size_t{3},
                                        std::size_t{63},
                                        std::size_t{64},
                                        std::size_t{65},
                                        std::size_t{128},
                                        n / 129,
                                        n / 128,
                                        n / 65,
                                        n / 64,
                                        n / 3,
                                        n / 2 - (n > 1),
                                        n / 2,
                                        n / 2 + 1,
                                        n - 1,
                                        n,
                                        n + 1,
                                        std::numeric_limits<std::size_t>::max() / 2 + 1,
                                        std::numeric_limits<std::size_t>::max()}) {
                verkv::top_k(cpu{}, score, k, w, out);
                if (out != sorted_top(score, k)) {
                    INFO("n " << n << ", kind " << kind << ", k " << k);
                    CHECK(out == sorted_top(score, k));
                }
            }
        }
    }
    CHECK(!out.empty());
}

TEST_CASE("plan: a shortlist allocates nothing after reserve") {
    dice d(42);
    const std::size_t n = 5000;
    floats score(n);
    for (float& s : score) {
        s = static_cast<float>(d.normal());
    }
    const floats equal(n, 1.0f);
    verkv::top_k_workspace w;
    tokens out;
    w.reserve(n);
    out.reserve(n);
    CHECK(support::allocations_of([&] {
              for (const std::size_t k : {1u, 2u, 39u, 128u, 2499u, 2500u, 4999u, 5000u, 6000u}) {
                  verkv::top_k(cpu{}, score, k, w, out);
                  verkv::top_k(cpu{}, equal, k, w, out);
                  verkv::top_k(cpu{}, std::span<const float>(score).first(17), k, w, out);
              }
          }) == 0);
}
