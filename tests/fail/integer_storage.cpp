// expect: constraint.*storage
#include "verkv/core/storage.hpp"

#ifdef VERKV_MUST_FAIL
using element = int;
#else
using element = verkv::half;
#endif

auto stored = verkv::from_float<element>(1.0f);
