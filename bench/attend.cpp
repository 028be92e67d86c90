// Dense attention over float16 rows, its two halves, and a plain read of the same bytes.
#include "verkv/attend/attend.hpp"
#include "common.hpp"
#include "plain_read.hpp"
#include "verkv/attend/merge.hpp"

namespace {

using verkv::half;

/// n rows of key and value side by side, as a cache stores them.
struct problem {
    explicit problem(const benchmark::State& state)
        : n(static_cast<std::size_t>(state.range(0))),
          width(static_cast<std::size_t>(state.range(1))),
          group(static_cast<std::size_t>(state.range(2))),
          memory(random_rows<half>(n * 2 * width)),
          query_memory(random_rows<float>(group * width)),
          logit_memory(group * n),
          output(group * width),
          lse(group) {}

    verkv::rows<half> keys() const {
        return {memory.data(), static_cast<std::ptrdiff_t>(2 * width), n, width, nullptr};
    }
    verkv::rows<half> values() const {
        return {memory.data() + width, static_cast<std::ptrdiff_t>(2 * width), n, width, nullptr};
    }
    verkv::rows<float> queries() const { return verkv::contiguous_rows(std::span<const float>(query_memory), width); }
    verkv::matrix_view<float> logits() { return {logit_memory.data(), group, n, static_cast<std::ptrdiff_t>(n)}; }
    verkv::matrix_view<float> out() { return {output.data(), group, width, static_cast<std::ptrdiff_t>(width)}; }

    std::size_t n, width, group;
    std::vector<half> memory;
    std::vector<float> query_memory, logit_memory, output, lse;
};

void dense_attention(benchmark::State& state) {
    problem p(state);
    verkv::attend_workspace workspace;
    for (auto _ : state) {
        verkv::dense_attention(verkv::cpu{}, p.queries(), 0.1f, p.keys(), p.values(), workspace, p.out(), p.lse);
        benchmark::DoNotOptimize(p.output.data());
        benchmark::ClobberMemory();
    }
    declare(state, p.memory.size() * sizeof(half), p.n * p.group);
}
BENCHMARK(dense_attention)->Apply(row_axes);

void plain_read(benchmark::State& state) {
    problem p(state);
    for (auto _ : state) {
        benchmark::DoNotOptimize(::plain_read(p.memory));
    }
    declare(state, p.memory.size() * sizeof(half), p.n * p.group);
}
BENCHMARK(plain_read)->Apply(row_axes);

void score_rows(benchmark::State& state) {
    problem p(state);
    for (auto _ : state) {
        verkv::score_rows(verkv::cpu{}, p.queries(), 0.1f, p.keys(), p.logits());
        benchmark::ClobberMemory();
    }
    declare(state, p.n * p.width * sizeof(half), p.n * p.group);
}
BENCHMARK(score_rows)->Apply(row_axes);

void softmax_sum(benchmark::State& state) {
    problem p(state);
    verkv::softmax_sum sum;
    for (auto _ : state) {
        // Logits are used up by a call; zeros stand for any.
        state.PauseTiming();
        std::fill(p.logit_memory.begin(), p.logit_memory.end(), 0.0f);
        state.ResumeTiming();
        sum.reset(p.group, p.width);
        sum.add(verkv::cpu{}, p.logits(), p.values());
        sum.finish(p.out(), p.lse);
        benchmark::ClobberMemory();
    }
    declare(state, p.n * p.width * sizeof(half) + p.n * p.group * sizeof(float), p.n * p.group);
}
BENCHMARK(softmax_sum)->Apply(row_axes);

void merge(benchmark::State& state) {
    const auto width = static_cast<std::size_t>(state.range(0));
    std::vector<float> a = random_rows<float>(width);
    const std::vector<float> b = random_rows<float>(width);
    float lse = 1;
    for (auto _ : state) {
        lse = 1;
        verkv::merge_attention(a, lse, b, 2);
        benchmark::ClobberMemory();
    }
    declare(state, 3 * width * sizeof(float), 1);
}
BENCHMARK(merge)->ArgName("d")->Arg(64)->Arg(128);

}  // namespace
