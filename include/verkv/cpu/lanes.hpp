// Vectors of floats as wide as the target has them, written with compiler vector extensions: no intrinsics but for
// half, masks and tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__F16C__) || defined(__AVX__)
#include <immintrin.h>
#endif

#include "verkv/core/storage.hpp"

// Translation units built for different targets may meet in one program. Each target's vectors live in a namespace of
// their own, so that the linker never joins functions whose vectors differ in width or in what they can do.
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define VERKV_LANES_NAMESPACE lanes16_dots
#define VERKV_LANES_WIDTH 16
#define VERKV_LANES_DOTS 1
#elif defined(__AVX512F__)
#define VERKV_LANES_NAMESPACE lanes16
#define VERKV_LANES_WIDTH 16
#elif defined(__AVX__) && defined(__AVXVNNI__)
#define VERKV_LANES_NAMESPACE lanes8_dots
#define VERKV_LANES_WIDTH 8
#define VERKV_LANES_DOTS 1
#elif defined(__AVX__)
#define VERKV_LANES_NAMESPACE lanes8
#define VERKV_LANES_WIDTH 8
#else
#define VERKV_LANES_NAMESPACE lanes4
#define VERKV_LANES_WIDTH 4
#endif

#ifndef VERKV_LANES_DOTS
#define VERKV_LANES_DOTS 0
#endif

#define VERKV_ALWAYS_INLINE inline __attribute__((always_inline))

namespace verkv::inline v0::detail {
inline namespace VERKV_LANES_NAMESPACE {

inline constexpr std::size_t lane_count = VERKV_LANES_WIDTH;

/// Whether add_byte_dots() is one instruction; without, it is not there.
inline constexpr bool has_byte_dots = VERKV_LANES_DOTS != 0;

using lanes = float __attribute__((vector_size(VERKV_LANES_WIDTH * 4)));
using int_lanes = std::int32_t __attribute__((vector_size(VERKV_LANES_WIDTH * 4)));
using word_lanes = std::uint32_t __attribute__((vector_size(VERKV_LANES_WIDTH * 4)));
using short_lanes = std::uint16_t __attribute__((vector_size(VERKV_LANES_WIDTH * 2)));
using byte_lanes = std::uint8_t __attribute__((vector_size(VERKV_LANES_WIDTH)));

template <class To, class From>
VERKV_ALWAYS_INLINE To lanes_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

VERKV_ALWAYS_INLINE lanes broadcast(float x) {
    return x - lanes{};
}

/// a where the mask's lane is set, else b.
VERKV_ALWAYS_INLINE lanes select(const int_lanes& mask, const lanes& a, const lanes& b) {
    return mask ? a : b;
}

/// The larger of two lane by lane; b where they do not compare (NaN).
VERKV_ALWAYS_INLINE lanes larger_of(const lanes& a, const lanes& b) {
    return b < a ? a : b;
}

VERKV_ALWAYS_INLINE lanes load(const float* p) {
    lanes x;
    std::memcpy(&x, p, sizeof(x));
    return x;
}

VERKV_ALWAYS_INLINE word_lanes load_widened(const std::uint16_t* p) {
    short_lanes x;
    std::memcpy(&x, p, sizeof(x));
    return __builtin_convertvector(x, word_lanes);
}

VERKV_ALWAYS_INLINE lanes load(const bfloat16* p) {
    return lanes_cast<lanes>(load_widened(reinterpret_cast<const std::uint16_t*>(p)) << 16);
}

VERKV_ALWAYS_INLINE lanes load(const half* p) {
#if defined(__F16C__) && VERKV_LANES_WIDTH == 16
    return lanes_cast<lanes>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__) && VERKV_LANES_WIDTH == 8
    return lanes_cast<lanes>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    // As to_float(half), lane by lane.
    const word_lanes bits = load_widened(reinterpret_cast<const std::uint16_t*>(p));
    const word_lanes sign = (bits & 0x8000u) << 16;
    const word_lanes rest = (bits & 0x7fffu) << 13;
    const lanes magnitude = lanes_cast<lanes>(rest) * 0x1p112f;
    const word_lanes special = lanes_cast<word_lanes>(rest >= (0x7c00u << 13)) & 0x7f800000u;
    return lanes_cast<lanes>(sign | lanes_cast<word_lanes>(magnitude) | special);
#endif
}

/// The first n < lane_count elements at p; zero in the other lanes.
template <class T>
VERKV_ALWAYS_INLINE lanes load_first(const T* p, std::size_t n) {
    T whole[lane_count] = {};
    // n as it is; the compiler does not know, and would warn.
    std::memcpy(static_cast<void*>(whole), p, (n < lane_count ? n : lane_count) * sizeof(T));
    return load(static_cast<const T*>(whole));
}

VERKV_ALWAYS_INLINE void store(float* p, const lanes& x) {
    std::memcpy(p, &x, sizeof(x));
}

/// Bit i is set where lane i of the mask is.
VERKV_ALWAYS_INLINE std::uint32_t bits_of(const int_lanes& mask) {
#if VERKV_LANES_WIDTH == 16
    return _mm512_cmplt_epi32_mask(lanes_cast<__m512i>(mask), _mm512_setzero_si512());
#elif VERKV_LANES_WIDTH == 8
    return static_cast<std::uint32_t>(_mm256_movemask_ps(lanes_cast<__m256>(mask)));
#else
    std::uint32_t bits = 0;
    for (unsigned i = 0; i < lane_count; ++i) {
        bits |= (lanes_cast<word_lanes>(mask)[i] >> 31) << i;
    }
    return bits;
#endif
}

/// Folds the lanes by halves, always in the same order: op(lower half, upper half), again and again.
template <class Op>
VERKV_ALWAYS_INLINE float fold(const lanes& x, Op&& op) {
#if VERKV_LANES_WIDTH == 16
    const lanes a = op(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    const lanes b = op(a, __builtin_shufflevector(a, a, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
    const lanes c = op(b, __builtin_shufflevector(b, b, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));
    return op(c, __builtin_shufflevector(c, c, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1))[0];
#elif VERKV_LANES_WIDTH == 8
    const lanes b = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    const lanes c = op(b, __builtin_shufflevector(b, b, 2, 3, 2, 3, 2, 3, 2, 3));
    return op(c, __builtin_shufflevector(c, c, 1, 1, 1, 1, 1, 1, 1, 1))[0];
#else
    const lanes c = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
    return op(c, __builtin_shufflevector(c, c, 1, 1, 1, 1))[0];
#endif
}

/// Sum of the lanes.
VERKV_ALWAYS_INLINE float sum(const lanes& x) {
    return fold(
        x, [](const lanes& a, const lanes& b) __attribute__((always_inline)) { return a + b; });
}

/// Largest of the lanes.
VERKV_ALWAYS_INLINE float largest(const lanes& x) {
    return fold(
        x, [](const lanes& a, const lanes& b) __attribute__((always_inline)) { return larger_of(a, b); });
}

/// Sums of four vectors at once: out[j] = sum(x_j), bit for bit, in a quarter of the steps.
VERKV_ALWAYS_INLINE void sum_four(const lanes& a, const lanes& b, const lanes& c, const lanes& d, float* out) {
#if VERKV_LANES_WIDTH == 16
    const lanes ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                     __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const lanes cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                     __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const lanes abcd = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                       __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const lanes pairs =
        abcd + __builtin_shufflevector(abcd, abcd, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    const lanes all =
        pairs + __builtin_shufflevector(pairs, pairs, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    out[0] = all[0];
    out[1] = all[4];
    out[2] = all[8];
    out[3] = all[12];
#elif VERKV_LANES_WIDTH == 8
    const lanes ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
                     __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    const lanes cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11) +
                     __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
    const lanes abcd = __builtin_shufflevector(ab, cd, 0, 1, 4, 5, 8, 9, 12, 13) +
                       __builtin_shufflevector(ab, cd, 2, 3, 6, 7, 10, 11, 14, 15);
    const lanes all = abcd + __builtin_shufflevector(abcd, abcd, 1, 0, 3, 2, 5, 4, 7, 6);
    out[0] = all[0];
    out[1] = all[2];
    out[2] = all[4];
    out[3] = all[6];
#else
    const lanes ab = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    const lanes cd = __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
    const lanes all = __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
    std::memcpy(out, &all, sizeof(all));
#endif
}

/// exp of each lane: error at most 2 units in the last place; exactly 0 below -87.3, infinity above 88.7, NaN stays
/// NaN. Argument reduction by ln 2 in two parts and the polynomial of Cephes' expf (Moshier).
VERKV_ALWAYS_INLINE lanes exp(const lanes& x) {
    const lanes shifted = x * 1.44269504088896341f + 12582912.0f;  // rounds to an integer in the low bits
    const lanes n = shifted - 12582912.0f;
    const lanes r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    lanes y = broadcast(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = (y * r) * r + r + 1.0f;
#if VERKV_LANES_WIDTH == 16
    // One instruction for y 2^n; where x is -infinity, y is NaN.
    const __mmask16 inside = _mm512_cmp_ps_mask(lanes_cast<__m512>(x), _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
    const lanes scaled =
        lanes_cast<lanes>(_mm512_maskz_scalef_ps(inside, lanes_cast<__m512>(y), lanes_cast<__m512>(n)));
    return select(lanes_cast<int_lanes>(x > 88.7f), broadcast(__builtin_inff()), scaled);
#else
    // 2^n by adding n to the exponent bits.
    const word_lanes scaled = lanes_cast<word_lanes>(y) + (lanes_cast<word_lanes>(shifted) << 23);
    const lanes inside = lanes_cast<lanes>(scaled);
    const lanes low = select(lanes_cast<int_lanes>(x < -87.3f), lanes{}, inside);
    const lanes high = select(lanes_cast<int_lanes>(x > 88.7f), broadcast(__builtin_inff()), low);
    return select(lanes_cast<int_lanes>(x != x), x, high);
#endif
}

/// Natural logarithm of each lane, for positive normal numbers: error at most 2 units in the last place. Exponent and
/// mantissa within sqrt(1/2) ... sqrt(2), and the polynomial of Cephes' logf (Moshier).
VERKV_ALWAYS_INLINE lanes log(const lanes& x) {
    const word_lanes shifted = lanes_cast<word_lanes>(x) + (0x3f800000u - 0x3f3504f3u);
    const int_lanes exponent = lanes_cast<int_lanes>(shifted >> 23) - 127;
    const lanes m = lanes_cast<lanes>((shifted & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    const lanes e = __builtin_convertvector(exponent, lanes);
    lanes y = broadcast(7.0376836292e-2f);
    y = y * m - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    const lanes square = m * m;
    y = (y * m * square - e * 2.12194440e-4f) - 0.5f * square;
    return (m + y) + e * 0.693359375f;
}

/// table[index & 15] of each lane.
VERKV_ALWAYS_INLINE lanes lookup(const float* table, const word_lanes& index) {
#if VERKV_LANES_WIDTH == 16
    return lanes_cast<lanes>(
        _mm512_maskz_permutexvar_ps(0xffff, lanes_cast<__m512i>(index), lanes_cast<__m512>(load(table))));
#elif VERKV_LANES_WIDTH == 8 && defined(__AVX2__)
    const __m256i at = lanes_cast<__m256i>(index);
    const lanes low = lanes_cast<lanes>(_mm256_permutevar8x32_ps(lanes_cast<__m256>(load(table)), at));
    const lanes high = lanes_cast<lanes>(_mm256_permutevar8x32_ps(lanes_cast<__m256>(load(table + 8)), at));
    return select(lanes_cast<int_lanes>((index & 8u) != 0u), high, low);
#else
    float found[lane_count];
    for (std::size_t i = 0; i < lane_count; ++i) {
        found[i] = table[index[i] & 15u];
    }
    return load(static_cast<const float*>(found));
#endif
}

#if VERKV_LANES_DOTS
/// sums + <4 unsigned bytes of a lane, the 4 signed bytes of quad>, lane by lane. Exact.
VERKV_ALWAYS_INLINE int_lanes add_byte_dots(const int_lanes& sums, const word_lanes& bytes, std::int32_t quad) {
#if VERKV_LANES_WIDTH == 16
    return lanes_cast<int_lanes>(
        _mm512_dpbusd_epi32(lanes_cast<__m512i>(sums), lanes_cast<__m512i>(bytes), _mm512_set1_epi32(quad)));
#else
    return lanes_cast<int_lanes>(
        _mm256_dpbusd_avx_epi32(lanes_cast<__m256i>(sums), lanes_cast<__m256i>(bytes), _mm256_set1_epi32(quad)));
#endif
}
#endif

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace verkv::inline v0::detail
