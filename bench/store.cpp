// Gathering offloaded rows into staging: a hundredth of them, spread over the context.
#include <cstring>

#include "common.hpp"
#include "verkv/store/row_pool.hpp"
#include "verkv/store/staging.hpp"

namespace {

void gather(benchmark::State& state) {
    const auto n = static_cast<std::size_t>(state.range(0));
    const auto width = static_cast<std::size_t>(state.range(1));
    verkv::row_pool<verkv::half> host(n, 2 * width, "host row");
    std::vector<verkv::row_id> rows(n);
    host.allocate(rows);
    for (const verkv::row_id id : rows) {
        std::memset(static_cast<void*>(host.row(id)), 1, 2 * width * sizeof(verkv::half));
    }
    std::vector<verkv::token_index> tokens;
    for (std::size_t i = 0; i < n; i += 100) {
        tokens.push_back(static_cast<verkv::token_index>(i + i / 100 * 37 % 100));
    }
    verkv::row_pool<verkv::half> staging(tokens.size(), 2 * width, "staging row");
    std::vector<verkv::row_id> staged(tokens.size());
    staging.allocate(staged);
    verkv::staging_map map;
    map.open(staged, n);
    const std::size_t bytes = 2 * width * sizeof(verkv::half);
    for (auto _ : state) {
        map.clear();
        map.stage(tokens, staged, [&](verkv::token_index t, verkv::row_id to) {
            std::memcpy(static_cast<void*>(staging.row(to)), host.row(rows[t]), bytes);
        });
        benchmark::ClobberMemory();
    }
    declare(state, tokens.size() * 2 * bytes, tokens.size());
}
BENCHMARK(gather)->ArgNames({"n", "d"})->ArgsProduct({{4096, 32768, 131072}, {64, 128}});

}  // namespace
