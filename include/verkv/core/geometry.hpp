// Shape of one attention layer.
#pragma once

#include <cmath>
#include <cstddef>

#include "verkv/core/error.hpp"

namespace verkv::inline v0 {

/// Heads and widths of a layer: query head h reads KV head h / group(), whatever the ratio.
struct geometry {
    std::size_t query_heads = 1;  ///< query heads of the layer; a multiple of kv_heads
    std::size_t kv_heads = 1;     ///< key/value heads of the layer
    std::size_t key_dim = 0;      ///< channels of a key and of a query
    std::size_t value_dim = 0;    ///< channels of a value and of an output
    float scale = 0;              ///< factor on <q, k>; 0 stands for 1/sqrt(key_dim)

    /// Query heads that share a KV head.
    [[nodiscard]] std::size_t group() const { return query_heads / kv_heads; }

    /// The factor on <q, k> that is used: scale, or 1/sqrt(key_dim) where scale is 0.
    [[nodiscard]] float logit_scale() const {
        return scale != 0 ? scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(key_dim)));
    }

    friend bool operator==(const geometry&, const geometry&) = default;
};

/// Checks a geometry.
/// Throws invalid_argument for a count or width of zero, or of 2^31 and more; query_heads no multiple of kv_heads; a
/// scale that is negative, infinite or NaN.
inline void validate(const geometry& g) {
    detail::check(g.query_heads > 0 && g.kv_heads > 0, "geometry has ", g.query_heads, " query heads and ", g.kv_heads,
                  " KV heads; both must be positive");
    detail::check(g.query_heads % g.kv_heads == 0, g.query_heads, " query heads do not divide evenly over ", g.kv_heads,
                  " KV heads");
    detail::check(g.key_dim > 0 && g.value_dim > 0, "geometry has key_dim ", g.key_dim, " and value_dim ", g.value_dim,
                  "; both must be positive");
    // So far that no product of two of them wraps.
    constexpr std::size_t most = 0x7fffffff;
    detail::check(g.query_heads <= most && g.key_dim <= most && g.value_dim <= most, "geometry has ", g.query_heads,
                  " query heads, key_dim ", g.key_dim, " and value_dim ", g.value_dim, "; none may exceed ", most);
    detail::check(std::isfinite(g.scale) && g.scale >= 0, "geometry has scale ", g.scale,
                  "; it must be positive, or 0 for 1/sqrt(key_dim)");
}

}  // namespace verkv::inline v0
