// lossless_decoder: what comes out is what the verifier alone would say, for every drafter.
#include <catch2/catch.hpp>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "verkv/cache/lossless.hpp"

namespace {

using tokens = std::vector<int>;

/// A model whose next token depends on all tokens before it.
int next_of(const tokens& context) {
    std::uint64_t hash = 1469598103934665603ull;
    for (const int t : context) {
        hash = (hash ^ static_cast<std::uint64_t>(t)) * 1099511628211ull;
    }
    return static_cast<int>(hash >> 33) % 1000;
}

struct dense_model {
    tokens held;
    void verify(std::span<const int> more, std::span<int> next) {
        REQUIRE(more.size() == next.size());
        for (std::size_t i = 0; i < more.size(); ++i) {
            held.push_back(more[i]);
            next[i] = next_of(held);
        }
    }
    void truncate(std::size_t length) {
        REQUIRE(length <= held.size());
        held.resize(length);
    }
};

/// Right in a share of cases that a hash decides.
struct sketchy_model {
    tokens held;
    int right_of_ten;
    std::size_t calls = 0;
    int next(std::span<const int> more) {
        REQUIRE(!more.empty());
        held.insert(held.end(), more.begin(), more.end());
        ++calls;
        const int best = next_of(held);
        return (best / 7) % 10 < right_of_ten ? best : best + 1;
    }
    void truncate(std::size_t length) {
        REQUIRE(length <= held.size());
        held.resize(length);
    }
};

tokens dense_tokens(tokens context, std::size_t count) {
    tokens out;
    for (std::size_t i = 0; i < count; ++i) {
        out.push_back(next_of(context));
        context.push_back(out.back());
    }
    return out;
}

}  // namespace

TEST_CASE("lossless decoding: the verifier's tokens, for drafters from never to always right") {
    const tokens prompt{3, 1, 4, 1, 5};
    for (const int right : {0, 3, 8, 10}) {
        for (const std::size_t chunk : {1u, 2u, 5u, 16u}) {
            for (const std::size_t count : {0u, 1u, 2u, 3u, 17u, 200u}) {
                INFO("right " << right << ", chunk " << chunk << ", count " << count);
                verkv::lossless_decoder<int> decoder(chunk);
                dense_model dense{tokens(prompt.begin(), prompt.end() - 1)};
                sketchy_model draft{dense.held, right};
                tokens out;
                const auto emit = [&](int t) {
                    out.push_back(t);
                    return true;
                };
                // In two calls: the second goes on where the first ended.
                std::size_t length = decoder.generate(draft, dense, prompt.back(), prompt.size(), count, emit);
                CHECK(length == prompt.size() + count);
                CHECK(dense.held.size() == length - 1);
                CHECK(draft.held == dense.held);
                length = decoder.generate(draft, dense, out.empty() ? prompt.back() : out.back(), length, 9, emit);
                CHECK(length == prompt.size() + count + 9);
                CHECK(out == dense_tokens(prompt, count + 9));
                CHECK(draft.held == dense.held);
                const verkv::lossless_report& r = decoder.report();
                CHECK(r.tokens == count + 9);
                CHECK(r.tokens == r.accepted + r.passes);
                CHECK(r.accepted <= r.drafted);
                if (right == 10) {
                    CHECK(r.accepted == r.drafted);
                    CHECK(r.passes == (count + chunk) / (chunk + 1) + (9 + chunk) / (chunk + 1));
                }
                if (right == 0) {
                    CHECK(r.accepted == 0);
                    CHECK(r.passes == count + 9);
                }
            }
        }
    }
}

TEST_CASE("lossless decoding: emit() stops it at any token, and it goes on from there") {
    const tokens prompt{2, 7};
    for (std::size_t stop = 1; stop < 30; ++stop) {
        verkv::lossless_decoder<int> decoder(6);
        dense_model dense{{2}};
        sketchy_model draft{{2}, 8};
        tokens out;
        std::size_t length = decoder.generate(draft, dense, 7, 2, 100, [&](int t) {
            out.push_back(t);
            return out.size() < stop;
        });
        CHECK(out.size() == stop);
        CHECK(length == 2 + stop);
        CHECK(decoder.report().tokens == stop);
        CHECK(decoder.report().accepted <= stop);
        CHECK(draft.held == dense.held);
        decoder.generate(draft, dense, out.back(), length, 20, [&](int t) {
            out.push_back(t);
            return true;
        });
        CHECK(out == dense_tokens(prompt, stop + 20));
    }
}

TEST_CASE("lossless decoding: refusals") {
    CHECK_THROWS_AS(verkv::lossless_decoder<int>(0), verkv::invalid_argument);
    CHECK_THROWS_AS(verkv::lossless_decoder<int>(static_cast<std::size_t>(-1)), verkv::invalid_argument);
    verkv::lossless_decoder<int> decoder(2);
    dense_model dense;
    sketchy_model draft{{}, 5};
    CHECK_THROWS_AS(decoder.generate(draft, dense, 1, 0, 5, [](int) { return true; }), verkv::invalid_argument);
    CHECK(dense.held.empty());
    CHECK(decoder.report().passes == 0);
    CHECK(decoder.report().tokens_per_pass() == 0);
}
