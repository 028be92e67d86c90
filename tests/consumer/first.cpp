// A user's program in two files that include everything.
#include <cstdio>

#include "verkv/verkv.hpp"

double second_uniform();

int main() {
    const double first = verkv::uniform({.seed = 1}, 0);
    std::printf("verkv %d.%d.%d\n", VERKV_VERSION_MAJOR, VERKV_VERSION_MINOR, VERKV_VERSION_PATCH);
    return first == second_uniform() ? 0 : 1;
}
