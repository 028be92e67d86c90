// VERKV_UNROLL, before a loop.
#pragma once

// Arrays that a thread indexes have to be in registers: loops over them are unrolled.
#if defined(__CUDA_ARCH__)
#define VERKV_UNROLL _Pragma("unroll")
#else
#define VERKV_UNROLL
#endif
