// Small linear maps of hidden states, a tile of tokens at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/score/detail/attention_blocks.hpp"

namespace verkv::inline v0::detail::scoring {

inline constexpr std::size_t tile_tokens = 64;

// Checks that weights have the elements that a shape says.
template <class... Sizes>
void check_weights(const char* what, std::span<const float> weights, Sizes... shape) {
    const std::size_t elements = product(what, shape...);
    check(weights.size() == elements, what, " has ", weights.size(), " elements; its shape takes ", elements);
}

[[nodiscard]] inline matrix_view<float> first_rows(std::vector<float>& memory, std::size_t rows, std::size_t columns) {
    return {memory.data(), rows, columns, static_cast<std::ptrdiff_t>(columns)};
}

// out[t][r] = <x_t, w_r> + bias[r]: x [tokens, width], w [rows, width] one row after the other, no bias where it is
// empty. Sums as score_rows(): a token's result does not depend on the tokens around it.
inline void linear(const rows<float>& x, std::span<const float> w, std::span<const float> bias,
                   const matrix_view<float>& out) {
    const rows<float> weights{w.data(), static_cast<std::ptrdiff_t>(x.width), out.columns, x.width, nullptr};
    score_blocks(x, 1.0f, weights, out);
    for (std::size_t t = 0; t < out.rows && !bias.empty(); ++t) {
        for (std::size_t r = 0; r < out.columns; ++r) {
            out.row(t)[r] += bias[r];
        }
    }
}

// Calls consume(first token, hidden states as floats, worker) for tiles of at most tile_tokens tokens, each from one
// task. Tiles are cut at fixed tokens.
template <class Backend, class T, class Consume>
void hidden_tiles(const Backend& exec, const rows<T>& hidden, Consume&& consume) {
    std::vector<std::vector<float>> memory(workers(exec),
                                           std::vector<float>((std::min)(tile_tokens, hidden.count) * hidden.width));
    for_each_task(exec, (hidden.count + tile_tokens - 1) / tile_tokens, [&](std::size_t tile, std::size_t worker) {
        const std::size_t first = tile * tile_tokens;
        const std::size_t count = (std::min)(tile_tokens, hidden.count - first);
        float* to = memory[worker].data();
        for (std::size_t t = 0; t < count; ++t) {
            widen(hidden[first + t], hidden.width, 1.0f, to + t * hidden.width);
        }
        const rows<float> x{to, static_cast<std::ptrdiff_t>(hidden.width), count, hidden.width, nullptr};
        consume(first, x, worker);
    });
}

}  // namespace verkv::inline v0::detail::scoring
