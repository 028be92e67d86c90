// Everything on the CUDA side of verkv. Needs nvcc with -std=c++20. Made by tests/lint/umbrella.cmake.
#pragma once

#include "verkv/cuda/block.hpp"
#include "verkv/cuda/collectives.hpp"
#include "verkv/cuda/fetch_list.hpp"
#include "verkv/cuda/find_levels.hpp"
#include "verkv/cuda/gather_rows.hpp"
#include "verkv/cuda/greedy_list.hpp"
#include "verkv/cuda/greedy_select.hpp"
#include "verkv/cuda/greedy_survey.hpp"
#include "verkv/cuda/group_plan.hpp"
#include "verkv/cuda/hardware_block.cuh"
#include "verkv/cuda/launch.cuh"
#include "verkv/cuda/rope_pair_logits.hpp"
#include "verkv/cuda/row_logits.hpp"
#include "verkv/cuda/weigh.hpp"
