// Estimating every token's logit: the sketches there are, with bounds where they have them, and a plain read. Those of
// examples/common/registry.hpp by their names there, with their own defaults; then some other settings.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "common/registry.hpp"
#include "verkv/core/concepts.hpp"
#include "verkv/sketch/anchors.hpp"
#include "verkv/sketch/hash_attention.hpp"
#include "verkv/sketch/low_rank.hpp"
#include "verkv/sketch/magic_pig.hpp"
#include "verkv/sketch/rope_pairs.hpp"
#include "verkv/sketch/rotated.hpp"
#include "verkv/sketch/turbo_quant.hpp"

namespace {

struct problem {
    problem(std::size_t n, std::size_t key_dim, std::size_t group)
        : keys(n * key_dim), queries(group * key_dim), logits(group * n), width(key_dim), heads(group) {
        std::mt19937 engine(1);
        std::normal_distribution<float> normal;
        std::vector<float> noise(std::size_t{1} << 16);
        for (auto& x : noise) {
            x = normal(engine);
        }
        for (std::size_t i = 0; i < keys.size(); ++i) {
            keys[i] = verkv::from_float<verkv::half>(noise[(i * 31 + i / 65521) % noise.size()]);
        }
        for (auto& x : queries) {
            x = normal(engine);
        }
    }
    [[nodiscard]] verkv::rows<verkv::half> key_rows() const {
        return verkv::contiguous_rows(std::span<const verkv::half>(keys), width);
    }
    [[nodiscard]] verkv::rows<float> query_rows() const {
        return verkv::contiguous_rows(std::span<const float>(queries), width);
    }
    [[nodiscard]] verkv::matrix_view<float> out() {
        const std::size_t n = keys.size() / width;
        return {logits.data(), heads, n, static_cast<std::ptrdiff_t>(n)};
    }

    std::vector<verkv::half> keys;
    std::vector<float> queries;
    std::vector<float> logits;
    std::size_t width;
    std::size_t heads;
};

problem problem_of(const benchmark::State& state) {
    return {static_cast<std::size_t>(state.range(0)), static_cast<std::size_t>(state.range(1)),
            static_cast<std::size_t>(state.range(2))};
}

void declare(benchmark::State& state, std::size_t bytes) {
    state.SetBytesProcessed(static_cast<std::int64_t>(bytes) * state.iterations());
    state.counters["per_token_head"] =
        benchmark::Counter(static_cast<double>(state.range(0) * state.range(2)),
                           benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

template <class Sketch>
void estimate(benchmark::State& state, problem& p, Sketch&& sketch) {
    const verkv::cpu exec;
    sketch.fit(exec, p.key_rows());
    sketch.append(exec, p.key_rows());
    std::vector<float> bounds;
    if constexpr (verkv::bounded_sketch<std::remove_cvref_t<Sketch>, verkv::cpu, verkv::half>) {
        bounds.resize(p.logits.size());
    }
    for (auto _ : state) {
        if constexpr (verkv::bounded_sketch<std::remove_cvref_t<Sketch>, verkv::cpu, verkv::half>) {
            sketch.estimate(exec, p.query_rows(), 0.1f, p.out(),
                            {bounds.data(), p.out().rows, p.out().columns, p.out().stride});
        } else {
            sketch.estimate(exec, p.query_rows(), 0.1f, p.out());
        }
        benchmark::DoNotOptimize(p.logits.data());
        benchmark::ClobberMemory();
    }
    declare(state, sketch.bytes());
}

/// A share of the pairs in per cent, and bits: 25 and 2 are the paper's.
template <unsigned Pairs, unsigned Bits>
void rope_pairs(benchmark::State& state) {
    problem p = problem_of(state);
    estimate(
        state, p,
        verkv::rope_pair_sketch({.key_dim = p.width, .bits = Bits, .pair_fraction = static_cast<double>(Pairs) / 100}));
}

template <unsigned Bits>
void rotated(benchmark::State& state) {
    problem p = problem_of(state);
    estimate(state, p, verkv::rotated_sketch(verkv::rotated_options{p.width, Bits}));
}

template <verkv::coefficient_format Format>
void low_rank(benchmark::State& state) {
    problem p = problem_of(state);
    estimate(state, p, verkv::low_rank_sketch(verkv::low_rank_options{p.width, 32, Format}));
}

template <unsigned Bits>
void anchors(benchmark::State& state) {
    problem p = problem_of(state);
    estimate(state, p, verkv::anchor_sketch(verkv::anchor_options{p.width, 256, Bits}));
}

template <unsigned Bits, verkv::turbo_quant_form Form>
void turbo_quant(benchmark::State& state) {
    problem p = problem_of(state);
    estimate(state, p, verkv::turbo_quant_sketch({p.width, Bits, Form, 0}));
}

/// Networks of the paper's shape, 128 wide inside and 32 bits, of weights that mean nothing.
void hash_attention(benchmark::State& state) {
    problem p = problem_of(state);
    verkv::hash_mlp mlp;
    for (const auto& [in, out] : {std::pair{p.width, std::size_t{128}}, {128, 128}, {128, 32}}) {
        std::vector<float> weight(in * out);
        for (std::size_t i = 0; i < weight.size(); ++i) {
            weight[i] = 0.1f * p.queries[i * 7 % p.queries.size()];
        }
        mlp.layers.push_back({in, out, weight, std::vector<float>(out)});
    }
    estimate(state, p, verkv::hash_attention_sketch({p.width, mlp, mlp}));
}

/// Counting collisions; samples follow from that by reading their keys.
void magic_pig(benchmark::State& state) {
    problem p = problem_of(state);
    const verkv::cpu exec;
    verkv::magic_pig_tables tables({p.width});
    tables.fit(exec, p.key_rows());
    tables.append(exec, p.key_rows());
    std::vector<std::uint16_t> counts(p.logits.size());
    for (auto _ : state) {
        tables.collisions(exec, p.query_rows(), {counts.data(), p.out().rows, p.out().columns, p.out().stride});
        benchmark::DoNotOptimize(counts.data());
        benchmark::ClobberMemory();
    }
    declare(state, tables.bytes());
}

/// Sum of the bytes that a 2-bit sketch of a quarter of the channels has, as 64-bit words.
void plain_read(benchmark::State& state) {
    const auto n = static_cast<std::size_t>(state.range(0));
    verkv::rope_pair_options options;
    options.key_dim = static_cast<std::size_t>(state.range(1));
    options.pair_fraction = 0.25;
    const verkv::rope_pair_sketch shape(options);
    std::vector<std::uint64_t> words(
        static_cast<std::size_t>(shape.bytes_per_token() * static_cast<double>(n)) / sizeof(std::uint64_t), 1);
    for (auto _ : state) {
        std::uint64_t sum = 0;
        for (const std::uint64_t word : words) {
            sum += word;
        }
        benchmark::DoNotOptimize(sum);
        benchmark::ClobberMemory();
    }
    declare(state, words.size() * sizeof(std::uint64_t));
}

/// One token appended to a sketch whose open group is half full, as a decode step does.
void append_one(benchmark::State& state) {
    problem p = problem_of(state);
    const verkv::cpu exec;
    verkv::rope_pair_options options;
    options.key_dim = p.width;
    verkv::rope_pair_sketch sketch(options);
    sketch.fit(exec, p.key_rows());
    sketch.append(exec, p.key_rows().slice(0, 64));
    for (auto _ : state) {
        sketch.append(exec, p.key_rows().slice(64, 1));
        sketch.erase(64, 65);
    }
}

/// Choosing the channels of a prompt and quantising it.
void fit_and_append(benchmark::State& state) {
    problem p = problem_of(state);
    const verkv::cpu exec;
    verkv::rope_pair_options options;
    options.key_dim = p.width;
    verkv::rope_pair_sketch sketch(options);
    for (auto _ : state) {
        sketch.fit(exec, p.key_rows());
        sketch.append(exec, p.key_rows());
    }
    declare(state, p.keys.size() * sizeof(verkv::half));
}

void axes(benchmark::internal::Benchmark* b) {
    b->ArgNames({"n", "d", "G"});
    for (const int n : {4096, 32768, 131072}) {
        for (const int d : {64, 128}) {
            for (const int group : {1, 4}) {
                b->Args({n, d, group});
            }
        }
    }
    b->Unit(benchmark::kMicrosecond);
}

}  // namespace

[[maybe_unused]] const bool named = [] {
    const auto add = [](const auto& part) {
        auto* made = benchmark::RegisterBenchmark(std::string(part.name).c_str(), [part](benchmark::State& state) {
            problem p = problem_of(state);
            estimate(state, p, part.make({.key_dim = p.width, .pairing = [] { return verkv::rope_pairing::half; }}));
        });
        made->Apply(axes);
        if (part.name == "socket" || part.name == "product-quantised") {  // making these takes long
            made->Iterations(20);
        }
    };
    std::apply([&](const auto&... part) { (add(part), ...); }, example::sketches<verkv::half>);
    return true;
}();

BENCHMARK(rope_pairs<25, 2>)->Apply(axes);
BENCHMARK(rope_pairs<50, 4>)->Apply(axes);
BENCHMARK(rotated<1>)->Apply(axes);
BENCHMARK(rotated<3>)->Apply(axes);
BENCHMARK(rotated<4>)->Apply(axes);
BENCHMARK(low_rank<verkv::coefficient_format::int8>)->Apply(axes);
BENCHMARK(low_rank<verkv::coefficient_format::float16>)->Apply(axes);
BENCHMARK(anchors<1>)->Apply(axes);
BENCHMARK(turbo_quant<4, verkv::turbo_quant_form::mean_squared_error>)->Apply(axes);
BENCHMARK(turbo_quant<4, verkv::turbo_quant_form::inner_product>)->Apply(axes);
// Making these takes long: once, then a fixed number of estimates.
BENCHMARK(hash_attention)->Apply(axes)->Iterations(100);
BENCHMARK(magic_pig)->Apply(axes)->Iterations(20);
BENCHMARK(plain_read)->Apply(axes);
BENCHMARK(append_one)->ArgNames({"n", "d", "G"})->Args({4096, 128, 1})->Unit(benchmark::kMicrosecond);
BENCHMARK(fit_and_append)->ArgNames({"n", "d", "G"})->Args({32768, 128, 1})->Unit(benchmark::kMicrosecond);

BENCHMARK_MAIN();
