// What the benchmarks share: axes, random rows, and weights as peaked as real attention's.
#pragma once

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/sample/inclusion.hpp"

/// Axes of every verb on rows: tokens, channels, query heads of a group.
inline void row_axes(benchmark::internal::Benchmark* b) {
    b->ArgNames({"n", "d", "G"});
    for (const std::int64_t n : {4096, 32768, 131072}) {
        for (const std::int64_t d : {64, 128}) {
            for (const std::int64_t group : {1, 4}) {
                b->Args({n, d, group});
            }
        }
    }
}

/// Axis of every verb on one number a token.
inline void token_axes(benchmark::internal::Benchmark* b) {
    b->ArgNames({"n"})->Arg(4096)->Arg(32768)->Arg(131072);
}

/// Bytes that a verb has to move, and the time per token (and head).
inline void declare(benchmark::State& state, std::size_t bytes, std::size_t tokens) {
    state.SetBytesProcessed(static_cast<std::int64_t>(bytes) * state.iterations());
    state.counters["per_token"] = benchmark::Counter(
        static_cast<double>(tokens), benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

/// Standard normal numbers, cheap and repeatable: a block of them, again and again, out of step with any row width.
class normals {
public:
    normals() : block_((std::size_t{1} << 16) + 1) {
        std::mt19937 engine(1);
        std::normal_distribution<float> normal;
        for (float& x : block_) {
            x = normal(engine);
        }
    }
    float operator()() { return block_[next_++ % block_.size()]; }

private:
    std::vector<float> block_;
    std::size_t next_ = 0;
};

template <verkv::storage T>
std::vector<T> random_rows(std::size_t elements) {
    normals normal;
    std::vector<T> rows(elements);
    for (T& x : rows) {
        x = verkv::from_float<T>(normal());
    }
    return rows;
}

/// A decision as peaked as those of a real layer: logits with a standard deviation of 3, importance that follows them
/// loosely, a sixteenth of the tokens resident.
struct decision {
    explicit decision(std::size_t n) : mass(n), r(n), odds(n) {
        normals normal;
        std::vector<float> importance(n);
        float top = 0;
        for (std::size_t i = 0; i < n; ++i) {
            const float logit = 3 * normal();
            mass[i] = std::exp(logit);
            importance[i] = std::exp(0.7f * logit + 1.5f * normal());
            top = verkv::larger(mass[i], top);
        }
        for (float& m : mass) {
            m /= top;
            total += static_cast<double>(m);
        }
        verkv::inclusion_probabilities(verkv::cpu{}, importance, verkv::budget::fraction(1.0 / 16), {}, r);
        verkv::inclusion_odds(verkv::cpu{}, r, odds);
    }

    std::vector<float> mass;
    std::vector<float> r;
    std::vector<float> odds;
    double total = 0;
};
