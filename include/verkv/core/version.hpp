// Version of the library, and the rules of arithmetic that it needs.
#pragma once

#define VERKV_VERSION_MAJOR 0
#define VERKV_VERSION_MINOR 1
#define VERKV_VERSION_PATCH 0

#if !defined(_MSVC_LANG) && __cplusplus < 202002L
#error "verkv: needs C++20. CMake before 3.25.2 leaves nvcc at C++17, whatever is asked for: pass -std=c++20 to it"
#endif

// lse = -infinity is the value of an empty part, and NaN in a key has to stay visible: a compiler that may assume
// that neither exists would turn certificates into guesses.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "verkv: build without -ffast-math / -ffinite-math-only; certificates need infinities and NaN"
#endif
