// expect: build without -ffast-math
// flags: -ffinite-math-only
#include "verkv/core/tolerance.hpp"
