// The per-channel code: every channel of the keys in a few bits.
#pragma once

#include <cstddef>

#include "verkv/sketch/rope_pairs.hpp"

namespace verkv::inline v0 {

/// The keys of one KV head with every channel uniformly quantised over a group of tokens (KIVI, Liu et al. 2024, arXiv
/// 2402.02750): a rope_pair_sketch that keeps all pairs, so pairing and fit() choose nothing.
/// key_dim even, bits 1 ... 8 of a channel's code, group_length tokens that share a zero and a step. key_dim bits / 8
/// bytes a token and 4 key_dim bytes a group: 36 bytes a token with key_dim 128 and the defaults. Error: that of
/// rope_pair_sketch, without channels left out.
/// Throws invalid_argument as validate(rope_pair_options) does.
[[nodiscard]] inline rope_pair_sketch per_channel_sketch(std::size_t key_dim, unsigned bits = 2,
                                                         std::size_t group_length = 128) {
    rope_pair_options options;
    options.key_dim = key_dim;
    options.bits = bits;
    options.pair_fraction = 1;
    options.group_length = group_length;
    return rope_pair_sketch(options);
}

}  // namespace verkv::inline v0
