// The Poisson draw: which tokens stay resident.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/random.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"

namespace verkv::inline v0 {

namespace detail::sampling {

inline constexpr std::size_t block_tokens = 4096;

inline void check_probabilities(std::span<const float> r) {
    check(r.size() <= (std::numeric_limits<token_index>::max)(), r.size(), " tokens are more than an index can count");
    for (std::size_t i = 0; i < r.size(); ++i) {
        check(r[i] >= 0 && r[i] <= 1, "inclusion probability of token ", i, " is ", r[i], "; it must lie in [0, 1]");
    }
}

// Marks in parallel, lists in order: a bit a token between the two.
template <class Backend, class IsIn>
void list_tokens(const Backend& exec, std::size_t n, std::vector<token_index>& sample, IsIn&& is_in) {
    constexpr std::size_t bits = 64;
    std::vector<std::uint64_t> marks((n + bits - 1) / bits);
    for_each_task(exec, (n + block_tokens - 1) / block_tokens, [&](std::size_t b, std::size_t) {
        const std::size_t end = (std::min)(n, (b + 1) * block_tokens);
        for (std::size_t first = b * block_tokens; first < end; first += bits) {
            std::uint64_t word = 0;
            for (std::size_t i = first; i < (std::min)(end, first + bits); ++i) {
                word |= std::uint64_t{is_in(i)} << (i - first);
            }
            marks[first / bits] = word;
        }
    });
    std::size_t count = 0;
    for (const std::uint64_t word : marks) {
        count += static_cast<std::size_t>(std::popcount(word));
    }
    sample.resize(count);
    std::size_t next = 0;
    for (std::size_t w = 0; w < marks.size(); ++w) {
        for (std::uint64_t word = marks[w]; word != 0; word &= word - 1) {
            sample[next++] = static_cast<token_index>(w * bits + static_cast<std::size_t>(std::countr_zero(word)));
        }
    }
}

}  // namespace detail::sampling

/// Draws the resident tokens, H and S together: token i with probability r_i, independently [VerKV Algorithm 1].
/// Token i is in when sampled(r_i, uniform(stream, positions_i)): r = 1 always, r = 0 never, whatever the uniform.
/// r: [n], in [0, 1] (checked). positions: [n], not negative (checked); stored positions, so that a token's uniform
/// survives removals and shifts of its index. sample: replaced by the indices, ascending; its memory is used again.
/// A re-draw of a long-lived request is the same call with stream.draw + 1: independent of every earlier draw. Drawing
/// a prompt in pieces gives the same tokens as drawing it at once.
/// Time O(n), a Philox block for each token with 0 < r < 1; memory n bits. Depends on r, positions and stream alone:
/// the same for any number of threads, any chunking and any batch.
/// Throws invalid_argument for spans of different length, an r or a position out of range, naming its index; sample is
/// then as it was.
template <class Backend>
void poisson_draw(const Backend& exec, std::span<const float> r, std::span<const position_t> positions,
                  const uniform_stream& stream, std::vector<token_index>& sample) {
    detail::check(r.size() == positions.size(), r.size(), " probabilities do not fit ", positions.size(), " positions");
    detail::sampling::check_probabilities(r);
    for (std::size_t i = 0; i < positions.size(); ++i) {
        detail::check(positions[i] >= 0, "token ", i, " has position ", positions[i], "; it must not be negative");
    }
    detail::sampling::list_tokens(exec, r.size(), sample, [&](std::size_t i) {
        const auto p = static_cast<double>(r[i]);
        return sampled(p, p > 0 && p < 1 ? uniform(stream, positions[i]) : 0.0);
    });
}

/// The draw with uniforms of the caller: token i is in when sampled(r_i, uniforms_i).
/// For tests and for generators of one's own. u = r is out, as a generator on [0, 1) needs; one on (0, 1] is let in and
/// then takes a token with r < 1 with a probability that is low by one of its steps.
/// r: [n], in [0, 1] (checked). uniforms: [n], in [0, 1] (checked). Everything else as above.
template <class Backend>
void poisson_draw(const Backend& exec, std::span<const float> r, std::span<const double> uniforms,
                  std::vector<token_index>& sample) {
    detail::check(r.size() == uniforms.size(), r.size(), " probabilities do not fit ", uniforms.size(), " uniforms");
    detail::sampling::check_probabilities(r);
    for (std::size_t i = 0; i < uniforms.size(); ++i) {
        detail::check(uniforms[i] >= 0 && uniforms[i] <= 1, "uniform of token ", i, " is ", uniforms[i],
                      "; it must lie in [0, 1]");
    }
    detail::sampling::list_tokens(exec, r.size(), sample,
                                  [&](std::size_t i) { return sampled(static_cast<double>(r[i]), uniforms[i]); });
}

}  // namespace verkv::inline v0
