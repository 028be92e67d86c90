// Names that other people's headers define as macros: windows.h (min, max), complex.h (I), rpcndr.h (small), termios.h
// (B0). Comes after prelude.hpp: a verkv header has to bear these in its own text only.
#pragma once

#undef min
#undef max
#undef I
#undef small
#undef B0
#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))
#define I _Complex_I
#define small char
#define B0 0000000
