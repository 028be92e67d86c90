#include "verkv/core/storage.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "support/catch.hpp"

namespace {

using verkv::bfloat16;
using verkv::from_float;
using verkv::half;
using verkv::to_float;

/// What a 16-bit format is, in double arithmetic and independent of the code under test.
struct format {
    int mantissa_bits;
    int exponent_bias;
    std::uint32_t infinity;  ///< bits of +infinity; everything above is NaN

    [[nodiscard]] double value(std::uint32_t bits) const {
        const std::uint32_t magnitude = bits & 0x7fffu;
        const double sign = (bits & 0x8000u) ? -1.0 : 1.0;
        const auto exponent = static_cast<int>(magnitude >> mantissa_bits);
        const double fraction = std::ldexp(magnitude & ((1u << mantissa_bits) - 1u), -mantissa_bits);
        return exponent == 0 ? sign * std::ldexp(fraction, 1 - exponent_bias)
                             : sign * std::ldexp(1.0 + fraction, exponent - exponent_bias);
    }

    /// Nearest value to |x|, ties to even, by rounding x / ulp in double: exact, as x has 24 bits.
    [[nodiscard]] std::uint32_t nearest(float x) const {
        const double magnitude = std::fabs(static_cast<double>(x));
        int exponent = 0;
        std::frexp(magnitude, &exponent);
        const int lowest = 1 - exponent_bias;
        const int ulp = (exponent - 1 < lowest ? lowest : exponent - 1) - mantissa_bits;
        const double rounded = std::ldexp(std::nearbyint(std::ldexp(magnitude, -ulp)), ulp);
        const std::uint32_t sign = std::signbit(x) ? 0x8000u : 0u;
        // Bits ascend with the value: bisect for the one that is `rounded`.
        std::uint32_t low = 0;
        std::uint32_t high = infinity;
        while (low < high) {
            const std::uint32_t middle = (low + high) / 2;
            if (value(middle) < rounded) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return sign | low;
    }
};

constexpr format half_format{10, 15, 0x7c00u};
constexpr format bfloat16_format{7, 127, 0x7f80u};

template <class T>
T stored(std::uint32_t bits) {
    return T{static_cast<std::uint16_t>(bits)};
}

template <class T>
void every_value_survives(const format& f) {
    std::size_t wrong = 0;
    for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
        const float x = to_float(stored<T>(bits));
        const std::uint32_t magnitude = bits & 0x7fffu;
        bool right = std::signbit(x) == ((bits & 0x8000u) != 0);
        if (magnitude > f.infinity) {
            right = right && std::isnan(x) && std::isnan(to_float(from_float<T>(x)));
        } else {
            right = right && (magnitude == f.infinity ? std::isinf(x) : static_cast<double>(x) == f.value(bits));
            right = right && from_float<T>(x).bits == bits;
        }
        wrong += !right;
    }
    CHECK(wrong == 0);
}

/// Every place where rounding changes: the middle between two neighbours, and one float to either side of it.
template <class T>
void every_tie_goes_to_even(const format& f) {
    std::size_t wrong = 0;
    double worst = 0;
    const float infinity = std::numeric_limits<float>::infinity();
    for (std::uint32_t low = 0; low < f.infinity; ++low) {
        const double above = f.value(low + 1);  // for the last one: what would follow the largest number
        const double middle = (f.value(low) + above) / 2;
        const auto tie = static_cast<float>(middle);
        REQUIRE(static_cast<double>(tie) == middle);
        const std::uint32_t even = (low & 1u) ? low + 1 : low;
        for (const std::uint32_t sign : {0u, 0x8000u}) {
            const float s = sign ? -1.0f : 1.0f;
            wrong += from_float<T>(s * tie).bits != (sign | even);
            wrong += from_float<T>(s * std::nextafter(tie, 0.0f)).bits != (sign | low);
            wrong += from_float<T>(s * std::nextafter(tie, infinity)).bits != (sign | (low + 1));
        }
        if (low >> f.mantissa_bits && low + 1 < f.infinity) {  // normal numbers
            worst = std::fmax(worst, std::fabs(to_float(from_float<T>(tie)) - middle) / middle);
        }
    }
    CHECK(wrong == 0);
    CHECK(worst <= verkv::unit_roundoff<T>);
    CHECK(worst > 0.9 * verkv::unit_roundoff<T>);
}

template <class T>
void any_float_is_rounded_as_in_double(const format& f) {
    std::mt19937 generator(20240601);
    std::size_t wrong = 0;
    for (int k = 0; k < 500000; ++k) {
        auto word = static_cast<std::uint32_t>(generator());
        if (k % 2) {  // half of the draws within the range of a half
            word = (word & 0x807fffffu) | ((100u + (word >> 23) % 50u) << 23);
        }
        const auto x = std::bit_cast<float>(word);
        if (!std::isnan(x)) {
            wrong += from_float<T>(x).bits != f.nearest(x);
        }
    }
    CHECK(wrong == 0);
}

template <class T>
void nan_stays_nan() {
    for (const std::uint32_t word : {0x7f800001u, 0x7f801000u, 0x7fbfffffu, 0x7fc00000u, 0x7fffffffu, 0xff800001u}) {
        const T narrow = from_float<T>(std::bit_cast<float>(word));
        CHECK(std::isnan(to_float(narrow)));
        CHECK(((narrow.bits & 0x8000u) != 0) == ((word >> 31) != 0));
    }
}

}  // namespace

TEST_CASE("core: every half is exact as a float and comes back") {
    every_value_survives<half>(half_format);
}

TEST_CASE("core: every bfloat16 is exact as a float and comes back") {
    every_value_survives<bfloat16>(bfloat16_format);
}

TEST_CASE("core: rounding to a half is to nearest, ties to even, at every tie there is") {
    every_tie_goes_to_even<half>(half_format);
}

TEST_CASE("core: rounding to a bfloat16 is to nearest, ties to even, at every tie there is") {
    every_tie_goes_to_even<bfloat16>(bfloat16_format);
}

TEST_CASE("core: arbitrary floats round to a half as in double arithmetic") {
    any_float_is_rounded_as_in_double<half>(half_format);
}

TEST_CASE("core: arbitrary floats round to a bfloat16 as in double arithmetic") {
    any_float_is_rounded_as_in_double<bfloat16>(bfloat16_format);
}

TEST_CASE("core: NaN stays NaN with its sign, whatever its payload") {
    nan_stays_nan<half>();
    nan_stays_nan<bfloat16>();
}

TEST_CASE("core: stored elements at the ends of their range") {
    CHECK(from_float<half>(65504.0f).bits == 0x7bffu);
    CHECK(from_float<half>(65519.996f).bits == 0x7bffu);
    CHECK(from_float<half>(65520.0f).bits == 0x7c00u);
    CHECK(from_float<half>(-65520.0f).bits == 0xfc00u);
    CHECK(from_float<half>(0x1p-24f).bits == 0x0001u);
    CHECK(from_float<half>(0x1p-25f).bits == 0x0000u);
    CHECK(from_float<half>(-0x1p-25f).bits == 0x8000u);
    CHECK(from_float<half>(std::nextafter(0x1p-25f, 1.0f)).bits == 0x0001u);
    CHECK(from_float<bfloat16>((std::numeric_limits<float>::max)()).bits == 0x7f80u);
    CHECK(from_float<bfloat16>(std::numeric_limits<float>::denorm_min()).bits == 0x0000u);
}

TEST_CASE("core: conversions work at compile time, and float passes through") {
    static_assert(to_float(half{0x3c00u}) == 1.0f);
    static_assert(to_float(bfloat16{0x3f80u}) == 1.0f);
    static_assert(from_float<half>(-2.0f) == half{0xc000u});
    static_assert(from_float<bfloat16>(-2.0f) == bfloat16{0xc000u});
    static_assert(to_float(0.1f) == 0.1f && from_float<float>(0.1f) == 0.1f);
    static_assert(verkv::storage<float> && verkv::storage<half> && verkv::storage<bfloat16>);
    static_assert(!verkv::storage<double> && !verkv::storage<std::uint16_t>);
    static_assert(sizeof(half) == 2 && sizeof(bfloat16) == 2);
    SUCCEED();
}
