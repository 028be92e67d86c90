// Where the level of a water-filling plan can lie, and the logarithmic bins that this is cut into.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verkv/core/host_device.hpp"

namespace verkv::inline v0 {

/// Levels kappa/R between which the largest that certifies lies [beyond §2]: every one up to `low` certifies, for
/// V <= kappa sum m and b <= kappa; none above `high` does that leaves a token between r and 1, b being kappa.
struct level_range {
    float low;
    float high;
};

/// The range for l = ln(2/delta) and `mass`, the sum of m/R or a bound above it. Host and device.
[[nodiscard]] VERKV_HOST_DEVICE inline level_range levels_to_search(double epsilon, double log_term,
                                                                    double mass) noexcept {
    const auto level = [](double x) { return static_cast<float>(smaller(larger(x, 0x1p-120), 0x1p100)); };
    const float low = level(epsilon * epsilon / (2 * log_term * (mass + epsilon / 3)) * (1 - 0x1p-12));
    return {low, larger(low, level(1.5 * epsilon / log_term))};
}

/// Logarithmic bins, an eighth of an octave wide: three bits of a float's mantissa.
struct breakpoint_window {
    static constexpr std::uint32_t per_octave = 8;
    static constexpr unsigned shift = 20;

    std::uint32_t first = 0;  ///< key of the first edge
    std::uint32_t count = 0;  ///< edges

    /// Edges from the largest one <= low to the smallest one >= high, 0 < low <= high finite, normal floats; the
    /// upper `most` of them where there are more. Host and device.
    [[nodiscard]] VERKV_HOST_DEVICE static breakpoint_window of(float low, float high, std::uint32_t most) noexcept {
        const std::uint32_t last = key_of(high) + (edge_of(key_of(high)) < high ? 1 : 0);
        const std::uint32_t all = last - key_of(low) + 1;
        const std::uint32_t kept = smaller(all, most);
        return {last + 1 - kept, kept};
    }

    /// The largest edge of any window that is <= x, a positive normal float. Host and device.
    [[nodiscard]] VERKV_HOST_DEVICE static float edge_below(float x) noexcept { return edge_of(key_of(x)); }

    /// Edge k, ascending. Host and device.
    [[nodiscard]] VERKV_HOST_DEVICE float edge(std::size_t k) const noexcept {
        return edge_of(first + static_cast<std::uint32_t>(k));
    }

    /// The bin k of (edge k-1, edge k] that holds a breakpoint; `count` for those beyond the window, 0 for those below
    /// it. Host and device.
    [[nodiscard]] VERKV_HOST_DEVICE std::uint32_t slot_of(float breakpoint) const noexcept {
        const std::uint32_t up = (bits_as<std::uint32_t>(breakpoint) + ((1u << shift) - 1)) >> shift;
        return up <= first ? 0 : smaller(up - first, count);
    }

    friend bool operator==(const breakpoint_window&, const breakpoint_window&) = default;

private:
    VERKV_HOST_DEVICE static std::uint32_t key_of(float x) noexcept { return bits_as<std::uint32_t>(x) >> shift; }
    VERKV_HOST_DEVICE static float edge_of(std::uint32_t key) noexcept { return bits_as<float>(key << shift); }
};

}  // namespace verkv::inline v0
