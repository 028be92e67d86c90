// A program with verkv in two of its shared libraries, and in itself: each runs its own, and they understand each
// other's exceptions.
#include <cmath>
#include <cstdio>

#include "part.hpp"
#include "verkv/core/error.hpp"

namespace {

template <class F>
bool is_refused(F f) {
    try {
        f();
    } catch (const verkv::invalid_argument&) {
        return true;
    }
    return false;
}

}  // namespace

int main() {
    const float first = left_step();
    const float second = right_step();
    const float again = left_step();
    std::printf("left %.9g, right %.9g, left again %.9g\n", static_cast<double>(first), static_cast<double>(second),
                static_cast<double>(again));
    const bool same = first == again && std::abs(first - second) < 1e-4f;
    return same && is_refused(left_refusal) && is_refused(right_refusal) ? 0 : 1;
}
