// Rotary positions: which channels turn together, and how fast.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0 {

/// Which channels RoPE rotates together.
enum class rope_pairing {
    interleaved,  ///< (2i, 2i + 1)
    half,         ///< (i, i + pairs); with all channels rotated, (i, i + key_dim / 2)
};

/// The rotation of a model, as it is applied to queries and keys: pair i of a row at position p turns by
/// p * frequencies[i] radians (Su et al. 2021, "RoFormer", arXiv 2104.09864). Scaled variants (Llama 3, YaRN, linear)
/// have other frequencies, which the caller writes down; YaRN also has a magnitude.
/// Channels from 2 * frequencies.size() on are not rotated.
struct rope {
    std::vector<double> frequencies;            ///< a pair each, radians a position
    rope_pairing pairing = rope_pairing::half;  ///< half: Llama as Hugging Face stores it
    double magnitude = 1;                       ///< factor on rotated channels (YaRN's attention factor)

    /// The plain rotation: frequencies base^(-2i / key_dim), all channels.
    /// Throws invalid_argument for an odd key_dim or a base that is not above 0.
    [[nodiscard]] static rope plain(std::size_t key_dim, double base = 10000,
                                    rope_pairing pairing = rope_pairing::half) {
        detail::check(key_dim > 0 && key_dim % 2 == 0, "RoPE of ", key_dim, " channels; their number must be even");
        detail::check(std::isfinite(base) && base > 0, "RoPE has base ", base, "; it must be positive");
        rope r{{}, pairing, 1};
        for (std::size_t i = 0; i < key_dim / 2; ++i) {
            r.frequencies.push_back(std::pow(base, -2 * static_cast<double>(i) / static_cast<double>(key_dim)));
        }
        return r;
    }

    [[nodiscard]] std::size_t pairs() const { return frequencies.size(); }
    [[nodiscard]] std::size_t first(std::size_t pair) const {
        return pairing == rope_pairing::interleaved ? 2 * pair : pair;
    }
    [[nodiscard]] std::size_t second(std::size_t pair) const {
        return pairing == rope_pairing::interleaved ? 2 * pair + 1 : pair + pairs();
    }
};

/// Checks a rotation against the width of a key.
/// Throws invalid_argument for no pairs or more than key_dim / 2, a frequency that is not finite, a magnitude that is
/// not positive.
inline void validate(const rope& r, std::size_t key_dim) {
    detail::check(r.pairs() > 0 && r.pairs() <= key_dim / 2, "RoPE has ", r.pairs(), " frequencies; keys of ", key_dim,
                  " channels have 1 to ", key_dim / 2, " pairs");
    for (std::size_t i = 0; i < r.pairs(); ++i) {
        detail::check(std::isfinite(r.frequencies[i]), "RoPE frequency ", i, " is ", r.frequencies[i]);
    }
    detail::check(std::isfinite(r.magnitude) && r.magnitude > 0, "RoPE has magnitude ", r.magnitude,
                  "; it must be positive");
}

/// A row as it was before it was rotated at a position: the inverse rotation, divided by the magnitude.
/// from, to: [width] elements; they may not overlap. Preconditions, not checked: validate(r, width).
/// Angles, sines and products in double, so that far positions of a fast pair lose nothing: the error is that of the
/// stored row, and one rounding where Out is float. Time O(width), a sine and a cosine a pair.
template <class T, class Out>
void unrotate(const rope& r, position_t position, const T* from, std::size_t width, Out* to) {
    const std::size_t pairs = r.pairs();
    for (std::size_t i = 0; i < pairs; ++i) {
        const double angle = static_cast<double>(position) * r.frequencies[i];
        const double c = std::cos(angle) / r.magnitude;
        const double s = std::sin(angle) / r.magnitude;
        const auto x = static_cast<double>(to_float(from[r.first(i)]));
        const auto y = static_cast<double>(to_float(from[r.second(i)]));
        to[r.first(i)] = static_cast<Out>(c * x + s * y);
        to[r.second(i)] = static_cast<Out>(c * y - s * x);
    }
    for (std::size_t c = 2 * pairs; c < width; ++c) {
        to[c] = static_cast<Out>(to_float(from[c]));
    }
}

}  // namespace verkv::inline v0
