// expect: build without -ffast-math
// flags: -ffast-math
#include "verkv/core/version.hpp"
