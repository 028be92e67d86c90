// The paper's planner on the device, first part: certificates of the samples, and the tokens that alone attain b.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "verkv/certify/bernstein.hpp"
#include "verkv/core/host_device.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/detail/last_block.hpp"

// KVFetch [VerKV Algorithm 2] without shrinkage: plan/greedy.hpp says what is selected and why a token's variance is
// its key. Five launches: greedy_survey, greedy_select with digit 0, 1 and 2, greedy_list. Each reads 8 bytes a token
// and query head.

namespace verkv::inline v0::gpu {

/// What a search for a head's prefix knows.
struct greedy_state {
    double variance;  ///< of the tokens whose keys lie below those that begin with `prefix`
    double term;      ///< the largest term of these
    double before;    ///< certificate of the sample as it was drawn
    double after;     ///< and of what is not fetched
    float leader_key;
    token_index leader;     ///< the token that alone attains b, or no token
    std::uint32_t prefix;   ///< bits of the smallest key that is fetched, as far as they are known
    std::uint32_t ties;     ///< tokens with that key
    std::uint32_t staying;  ///< the last of these, which are not fetched
    std::uint32_t outcome;  ///< a verkv::gpu::greedy_outcome
};

enum greedy_outcome : std::uint32_t { greedy_nothing, greedy_prefix, greedy_everything, greedy_not_a_number };

namespace detail {

/// The masses of query heads, as greedy kernels read them.
struct greedy_masses {
    const float* mass = nullptr;            ///< [KV head][G][stride]
    const float* odds = nullptr;            ///< [KV head][stride]
    const std::uint32_t* tokens = nullptr;  ///< [KV head]
    const double* reference = nullptr;      ///< R, [KV head][G]
    std::size_t stride = 0;
    std::uint32_t kv_heads = 0;
    std::uint32_t heads = 0;  ///< G

    struct token {
        float odds, variance, term;
    };

    /// Token i of a row (KV head * G + query head), relative to 1/R; odds 0 outside L.
    template <class Block>
    [[nodiscard]] VERKV_HOST_DEVICE token load(Block& b, std::size_t row, float inverse, unsigned i) const {
        const float o = b.load_readonly(odds + row / heads * stride + i);
        if (!(o > 0)) {
            return {0, 0, 0};
        }
        const float x = b.load_readonly(mass + row * stride + i) * inverse;
        return {o, x * (x * o), x * larger(o, 1.0f)};
    }

    template <class Block>
    [[nodiscard]] VERKV_HOST_DEVICE float inverse(Block& b, std::size_t row) const {
        return static_cast<float>(1 / b.load_readonly(reference + row));
    }
};

/// A value in the order of the gain; float, so that its bits are in that order, too.
[[nodiscard]] VERKV_HOST_DEVICE inline std::uint32_t greedy_key(const greedy_state& s, unsigned i, float variance) {
    return bits_as<std::uint32_t>(i == s.leader ? s.leader_key : variance);
}

}  // namespace detail

/// Certificates of the samples as drawn, and the tokens that alone attain b, which gain more than by their variance.
/// blocks_y is KV heads * G. Sums in double, by threads, then blocks, in their order.
struct greedy_survey_kernel {
    static constexpr unsigned most_threads = 1024;

    /// What a block has found: the largest term, how many tokens have it, one of these, the next term.
    struct found {
        double variance;
        float top, second;
        std::uint32_t holders, token;
    };

    detail::greedy_masses m;
    greedy_state* state = nullptr;     ///< [KV head][G]
    found* partial = nullptr;          ///< [KV head][G][blocks], scratch
    std::uint32_t* arrived = nullptr;  ///< [KV head][G]
    double epsilon = 0.05;
    double log_term = 0;
    std::uint32_t blocks = 1;
    std::uint32_t threads = 256;

    [[nodiscard]] launch_shape shape() const {
        const std::size_t warps = threads / warp_size;
        return {blocks, m.kv_heads * m.heads, threads,
                shared_layout().array<double>(warps).array<float>(warps).array<std::uint32_t>(warps).bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto doubles = b.template allocate_shared<double>(b.warps());
        auto floats = b.template allocate_shared<float>(b.warps());
        auto words = b.template allocate_shared<std::uint32_t>(b.warps());
        const std::size_t row = b.block_index_y();
        const float inverse = m.inverse(b, row);
        const detail::token_range own = detail::tokens_of(b, b.load_readonly(m.tokens + row / m.heads));
        found mine = {0, 0, 0, 0, 0xffffffffu};
        for (unsigned i = own.first + b.thread(); i < own.last; i += b.threads()) {
            const auto t = m.load(b, row, inverse, i);
            mine.variance += static_cast<double>(t.variance);
            add(mine, t.term, 1, i);
        }
        found all;
        all.variance = block_sum(b, doubles, mine.variance);
        all.top = block_max(b, floats, mine.top);
        const bool holds = mine.holders > 0 && mine.top >= all.top;
        all.second = block_max(b, floats, holds ? mine.second : mine.top);
        all.holders = block_sum(b, words, holds ? mine.holders : 0u);
        all.token = block_min(b, words, holds ? mine.token : 0xffffffffu);
        if (b.thread() == 0) {
            b.store_global(partial + row * b.blocks() + b.block_index(), all);
        }
        if (detail::last_block(b, arrived + row, words) && b.thread() == 0) {
            conclude(b, row);
        }
    }

private:
    VERKV_HOST_DEVICE static void add(found& to, float term, unsigned holders, unsigned token) {
        if (holders == 0 || !(term > 0)) {
            return;
        }
        if (term > to.top) {
            to.second = to.top;
            to.top = term;
            to.holders = holders;
            to.token = token;
        } else if (term < to.top) {
            to.second = larger(term, to.second);
        } else {
            to.holders += holders;
            to.token = smaller(token, to.token);
        }
    }

    template <class Block>
    VERKV_HOST_DEVICE void conclude(Block& b, std::size_t row) const {
        found all = {0, 0, 0, 0, 0xffffffffu};
        for (unsigned k = 0; k < b.blocks(); ++k) {
            const found* from = partial + row * b.blocks() + k;
            const found part = {b.load_coherent(&from->variance), b.load_coherent(&from->top),
                                b.load_coherent(&from->second), b.load_coherent(&from->holders),
                                b.load_coherent(&from->token)};
            all.variance += part.variance;
            add(all, part.top, part.holders, part.token);
            all.second = larger(part.second, all.second);
        }
        const bool unique = all.holders == 1;
        greedy_state s = {0, 0, 0, 0, 0, 0xffffffffu, 0, 0, 0, greedy_prefix};
        s.before = s.after = bernstein_bound({0, all.variance, static_cast<double>(all.top)}, log_term);
        if (s.before < epsilon) {
            s.outcome = greedy_nothing;
        } else if (!(b.load_readonly(m.reference + row) > 0) || s.before != s.before) {
            s.before = s.after = __builtin_nan("");
            s.outcome = greedy_not_a_number;
        } else if (!(all.variance < 0x1p100)) {
            s.after = 0;
            s.outcome = greedy_everything;
        } else if (unique) {
            s.leader = all.token;
            s.leader_key = static_cast<float>(
                leader_key(b, row, all.token, all.variance, static_cast<double>(all.top), all.second));
        }
        b.store_global(state + row, s);
    }

    /// The variance of a token that would gain as much as the one that alone attains b = largest; beyond what a
    /// variance can gain, in the order of the gain. See greedy::key_of_gain().
    template <class Block>
    VERKV_HOST_DEVICE double leader_key(Block& b, std::size_t row, unsigned token, double variance, double largest,
                                        float others) const {
        const double own = static_cast<double>(m.load(b, row, m.inverse(b, row), token).variance);
        const double x = largest * log_term / 3;
        const double y = static_cast<double>(others) * log_term / 3;
        const double root = std::sqrt(x * x + 2 * variance * log_term);
        const double other = std::sqrt(larger(y * y + 2 * (variance - own) * log_term, 0.0));
        const double gain = (x - y) + ((x - y) * (x + y) + 2 * own * log_term) / (root + other);
        return (gain <= root ? gain * (2 * root - gain) : gain * gain) / (2 * log_term);
    }
};

}  // namespace verkv::inline v0::gpu
