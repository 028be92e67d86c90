// Marks the scalar functions that CPU code and CUDA kernels share.
#pragma once

#include "verkv/core/version.hpp"

#if defined(__CUDACC__)
#define VERKV_HOST_DEVICE __host__ __device__
#else
#define VERKV_HOST_DEVICE
#endif

namespace verkv::inline v0 {

/// The larger of two values; the second where they do not compare (NaN).
/// Host and device (std::max is not, under nvcc's strict warnings), and no macro can shadow its name.
template <class T>
[[nodiscard]] VERKV_HOST_DEVICE constexpr T larger(T a, T b) noexcept {
    return b < a ? a : b;
}

/// The smaller of two values; the second where they do not compare (NaN).
/// Host and device.
template <class T>
[[nodiscard]] VERKV_HOST_DEVICE constexpr T smaller(T a, T b) noexcept {
    return a < b ? a : b;
}

/// The value of type To with the bits of `from`, of the same size. std::bit_cast, which nvcc takes for host code only.
/// Host and device.
template <class To, class From>
[[nodiscard]] VERKV_HOST_DEVICE constexpr To bits_as(const From& from) noexcept {
    return __builtin_bit_cast(To, from);
}

}  // namespace verkv::inline v0
