// Tokens in logarithmic bins of the largest deviation that their terms can have.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "verkv/core/host_device.hpp"

namespace verkv::inline v0::detail {

/// What a bin knows of its tokens. The deviation of one is the largest that it can have in the direction of the bins;
/// in the other direction it deviates by `ratio` times as much at most, so that its variance is ratio * deviation^2.
struct log_bin {
    double variance = 0;                                   ///< sum
    float largest = 0;                                     ///< deviation, rounded up
    float smallest = (std::numeric_limits<float>::max)();  ///< deviation, rounded down
    float ratio = 0;                                       ///< largest, rounded up
    std::uint32_t count = 0;                               ///< stops at its largest value, which stands for any number

    constexpr log_bin& operator+=(const log_bin& other) noexcept {
        variance += other.variance;
        largest = larger(other.largest, largest);
        smallest = smaller(other.smallest, smallest);
        ratio = larger(other.ratio, ratio);
        const std::uint32_t sum = count + other.count;
        count = sum < other.count ? (std::numeric_limits<std::uint32_t>::max)() : sum;
        return *this;
    }

    /// Number of tokens, or more.
    [[nodiscard]] constexpr double tokens() const noexcept {
        return count < (std::numeric_limits<std::uint32_t>::max)() ? static_cast<double>(count) : 0x1p64;
    }
};

/// Bins by the size of the deviation, 2^Bits an octave from 2^-28 to 2^4 relative to the reference, each of them in
/// classes by ratio: above 1/4, above 1/16 and so on. What lies outside is in the first or the last one. Bins outside
/// [first, last) are empty.
template <std::size_t Bits, std::size_t Classes = 1>
class log_bins {
public:
    static constexpr std::size_t size = (std::size_t{32} << Bits) * Classes;

    /// Adds `count` tokens. Any bits will do, NaN as well.
    constexpr void add(std::uint32_t count, double variance, double deviation, double ratio) noexcept {
        // Above the subnormals of float these factors are more than a cast takes away or adds.
        constexpr double more = 1 + 0x1p-23, less = 1 - 0x1p-23;
        const std::size_t k = index(deviation) * Classes + class_of(ratio);
        bins_[k] += log_bin{variance, narrow(larger(deviation, 1e-30) * more), narrow(deviation * less),
                            narrow(larger(ratio, 1e-30) * more), count};
        first_ = smaller(first_, static_cast<std::uint32_t>(k));
        last_ = larger(last_, static_cast<std::uint32_t>(k + 1));
    }

    constexpr log_bins& operator+=(const log_bins& other) noexcept {
        for (std::size_t k = other.first_; k < other.last_; ++k) {
            bins_[k] += other.bins_[k];
        }
        first_ = smaller(first_, other.first_);
        last_ = larger(last_, other.last_);
        return *this;
    }

    /// Calls use(bin) for the bins in use, by rising deviation.
    template <class Use>
    constexpr void for_each(Use&& use) const {
        for (std::size_t k = first_; k < last_; ++k) {
            if (bins_[k].count > 0) {
                use(bins_[k]);
            }
        }
    }

private:
    static constexpr std::int64_t lowest = std::int64_t{1023 - 28} << Bits;

    static constexpr std::size_t place(double x, std::size_t bits, std::int64_t from, std::size_t count) noexcept {
        const auto key = static_cast<std::int64_t>(std::bit_cast<std::uint64_t>(x) >> (52 - bits));
        return static_cast<std::size_t>(
            smaller(larger(key - from, std::int64_t{0}), static_cast<std::int64_t>(count) - 1));
    }
    static constexpr std::size_t index(double deviation) noexcept {
        return place(deviation, Bits, lowest, size / Classes);
    }
    /// By factors of four from 1 downwards.
    static constexpr std::size_t class_of(double ratio) noexcept {
        return place(ratio, 0, 1023 - 2 * static_cast<std::int64_t>(Classes), 2 * Classes) / 2;
    }
    static constexpr float narrow(double x) noexcept {
        return x < 3e38 ? static_cast<float>(x) : std::numeric_limits<float>::infinity();
    }

    std::array<log_bin, size> bins_{};
    std::uint32_t first_ = size;
    std::uint32_t last_ = 0;
};

}  // namespace verkv::inline v0::detail
