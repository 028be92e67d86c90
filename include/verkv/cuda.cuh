// Everything on the CUDA side of verkv. Needs nvcc with -std=c++20. Made by tests/lint/umbrella.cmake.
#pragma once

#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/hardware_block.cuh"
#include "verkv/cuda/launch.cuh"
