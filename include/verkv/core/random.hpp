// Counter-based uniforms: one number a token, the same however it is reached.
#pragma once

#include <Random123/philox.h>

#include <cstdint>

#include "verkv/core/host_device.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0 {

/// Which stream of uniforms: one per layer, KV head and draw of a request.
struct uniform_stream {
    std::uint64_t seed = 0;  ///< of the request
    std::uint32_t layer = 0;
    std::uint32_t kv_head = 0;
    std::uint32_t draw = 0;  ///< counts re-draws of a long-lived request, so that each is independent of the last
};

/// Uniform U in [0, 1) of the token at a position.
/// U = k 2^-53 with k from Philox4x32-10 (Salmon et al. 2011), keyed by seed; counter (position / 2, layer, kv_head,
/// draw). 53 bits: a 24-bit uniform would make 1/r wrong for r < 2^-20 [VerKV Conventions]. Precondition: position >=
/// 0. Depends on its arguments alone: the same for any number of threads, any chunking and any batch. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE inline double uniform(const uniform_stream& s, position_t position) noexcept {
    const auto p = static_cast<std::uint32_t>(position);
    using philox = r123::Philox4x32;
    philox::ctr_type counter = {{p >> 1, s.layer, s.kv_head, s.draw}};
    philox::key_type key = {{static_cast<std::uint32_t>(s.seed), static_cast<std::uint32_t>(s.seed >> 32)}};
    const philox::ctr_type word = philox()(counter, key);
    const unsigned half_of_it = (p & 1u) * 2u;
    const std::uint64_t bits = (static_cast<std::uint64_t>(word[half_of_it + 1]) << 32) | word[half_of_it];
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

/// The stream of one decode step, for plans that draw afresh: as `s`, under a key that Philox makes of seed and step.
[[nodiscard]] inline uniform_stream fresh_stream(const uniform_stream& s, std::uint64_t step) noexcept {
    using philox = r123::Philox4x32;
    philox::ctr_type counter = {
        {static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32), 0xffffffffu, 0xffffffffu}};
    philox::key_type key = {{static_cast<std::uint32_t>(s.seed), static_cast<std::uint32_t>(s.seed >> 32)}};
    const philox::ctr_type word = philox()(counter, key);
    uniform_stream own = s;
    own.seed = (static_cast<std::uint64_t>(word[1]) << 32) | word[0];
    return own;
}

/// Whether a token with inclusion probability r is in the sample of a uniform u: r >= 1, or u < r and r > 0.
/// A token with r = 1 is in whatever u is (also u = 1 from a generator on (0, 1]); one with r = 0 never is; u = r is
/// out, as [0, 1) needs. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE constexpr bool sampled(double r, double u) noexcept {
    return r >= 1 || (r > 0 && u < r);
}

}  // namespace verkv::inline v0
