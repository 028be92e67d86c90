// Everything on the CUDA side of verkv. Needs nvcc with -std=c++20. Made by tests/lint/umbrella.cmake.
#pragma once

#include "verkv/cuda/append.hpp"
#include "verkv/cuda/append_codes.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/check_sample.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/device_store.hpp"
#include "verkv/cuda/fenced_rows.hpp"
#include "verkv/cuda/hardware_block.cuh"
#include "verkv/cuda/launch.cuh"
#include "verkv/cuda/memory.cuh"
#include "verkv/cuda/memory.hpp"
#include "verkv/cuda/merge_parts.hpp"
#include "verkv/cuda/poisson_draw.hpp"
#include "verkv/cuda/row_list.hpp"
#include "verkv/cuda/sparse_attention.hpp"
#include "verkv/cuda/token_arrays.hpp"
