#include "verkv/verkv.hpp"

double second_uniform();

double second_uniform() {
    return verkv::uniform({.seed = 1}, 0);
}
