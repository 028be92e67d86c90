// expect: operator\+
#include "verkv/core/storage.hpp"

// Stored elements have no arithmetic: sums in 16 bits lose what the certificate counts.
auto sum(verkv::half a, verkv::half b) {
#ifdef VERKV_MUST_FAIL
    return a + b;
#else
    return verkv::to_float(a) + verkv::to_float(b);
#endif
}
