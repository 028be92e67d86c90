// expect: deleted
#include "verkv/core/storage.hpp"

// Sixteen bits are no number: half(1.5f) would be the smallest number there is.
#ifdef VERKV_MUST_FAIL
verkv::half stored(float x) {
    return verkv::half(x);
}
verkv::bfloat16 counted(int x) {
    return verkv::bfloat16(x);
}
#else
verkv::half stored(float x) {
    return verkv::from_float<verkv::half>(x);
}
#endif
