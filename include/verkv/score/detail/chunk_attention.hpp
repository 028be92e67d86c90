// Attention without a causal mask, inside chunks of a prompt.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/score/detail/attention_blocks.hpp"

namespace verkv::inline v0::detail::scoring {

// Kept queries that belong to tokens first ... last-1: a query belongs to the token at or before its position.
struct query_range {
    std::size_t first;
    std::size_t last;
};

template <class T>
[[nodiscard]] query_range queries_of(const prompt<T>& p, std::size_t first, std::size_t last) {
    const auto before = [&](std::size_t token) {
        const auto end = p.query_positions.end();
        const auto found =
            token < p.tokens() ? std::lower_bound(p.query_positions.begin(), end, p.positions[token]) : end;
        return static_cast<std::size_t>(found - p.query_positions.begin());
    };
    return {before(first), before(last)};
}

// Sums of the columns of attention inside one chunk, tokens first ... first+length-1, over the heads of a group and the
// chunk's kept queries; the group's mean, times tokens / kept queries, so that a sample stands for all of them.
// A chunk without a kept query gets 1 everywhere, which is the mean column sum whatever the attention.
template <class T>
class chunk_attention {
public:
    chunk_attention(std::size_t longest, std::size_t width)
        : width_(width),
          keys_(at(longest), at(width)),
          queries_(at((std::min)(tile_queries, longest)), at(width)),
          weights_(queries_.rows(), at((longest + widest_packet - 1) / widest_packet * widest_packet)),
          sound_(longest),
          sum_(longest) {}

    void columns(const prompt<T>& p, std::size_t kv_head, std::size_t first, std::size_t length, float scale,
                 float* out) {
        const query_range kept = queries_of(p, first, first + length);
        const std::size_t count = kept.last - kept.first;
        if (count == 0) {
            std::fill_n(out, length, 1.0f);
            return;
        }
        take_keys(p.keys[kv_head], first, length);
        std::fill_n(sum_.begin(), length, 0.0);
        const std::size_t group = p.shape.group();
        const auto tile = static_cast<std::size_t>(queries_.rows());
        for (std::size_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
            for (std::size_t start = kept.first; start < kept.last; start += tile) {
                const std::size_t rows = (std::min)(tile, kept.last - start);
                for (std::size_t j = 0; j < rows; ++j) {
                    widen(p.queries.row(start + j, h), width_, scale, queries_.row(at(j)).data());
                }
                weights_.topLeftCorner(at(rows), at(length)).noalias() =
                    queries_.topRows(at(rows)) * keys_.topRows(at(length)).transpose();
                for (std::size_t j = 0; j < rows; ++j) {
                    add_row(weights_.row(at(j)).data(), length);
                }
            }
        }
        const double share = static_cast<double>(length) / (static_cast<double>(count) * static_cast<double>(group));
        for (std::size_t i = 0; i < length; ++i) {
            out[i] = sound_[i] ? static_cast<float>(sum_[i] * share) : std::numeric_limits<float>::quiet_NaN();
        }
    }

private:
    // A key that is not finite becomes 0 and is kept out of every sum.
    void take_keys(const rows<T>& keys, std::size_t first, std::size_t length) {
        all_sound_ = true;
        for (std::size_t i = 0; i < length; ++i) {
            const T* key = keys[first + i];
            float* to = keys_.row(at(i)).data();
            widen(key, width_, 1.0f, to);
            sound_[i] = std::all_of(to, to + width_, [](float x) { return std::isfinite(x); }) ? 1 : 0;
            if (!sound_[i]) {
                std::fill_n(to, width_, 0.0f);
                all_sound_ = false;
            }
        }
    }

    void add_row(float* row, std::size_t length) {
        constexpr float lowest = std::numeric_limits<float>::lowest();
        // Below every logit: weight 0. Where nothing is sound it does not matter, all sums are NaN in the end.
        for (std::size_t i = 0; !all_sound_ && i < length; ++i) {
            row[i] = sound_[i] ? row[i] : lowest;
        }
        const float top = larger(lowest, Eigen::Map<const Eigen::ArrayXf>(row, at(length)).maxCoeff());
        // Whole packets only, as in attention_blocks().
        const std::size_t padded = (length + widest_packet - 1) / widest_packet * widest_packet;
        std::fill(row + length, row + padded, top);
        Eigen::Map<Eigen::ArrayXf, Eigen::AlignedMax> packets(row, at(padded));
        packets = (packets - top).exp();
        std::fill(row + length, row + padded, 0.0f);
        const double mass = packets.template cast<double>().sum();
        if (mass == 0) {  // every logit is -infinity
            return;
        }
        const double share = 1 / mass;
        for (std::size_t i = 0; i < length; ++i) {
            sum_[i] += static_cast<double>(row[i]) * share;
        }
    }

    std::size_t width_;
    tile_matrix keys_;
    tile_matrix queries_;
    tile_matrix weights_;
    std::vector<char> sound_;
    std::vector<double> sum_;
    bool all_sound_ = true;
};

}  // namespace verkv::inline v0::detail::scoring
