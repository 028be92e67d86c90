// Everything on the CPU side of verkv. Made by tests/lint/umbrella.cmake.
#pragma once

#include "verkv/core/concepts.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/geometry.hpp"
#include "verkv/core/host_device.hpp"
#include "verkv/core/plan.hpp"
#include "verkv/core/prompt.hpp"
#include "verkv/core/random.hpp"
#include "verkv/core/report.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/core/version.hpp"
#include "verkv/core/views.hpp"

#include "verkv/certify/bernstein.hpp"
#include "verkv/certify/estimator.hpp"

#include "verkv/attend/attend.hpp"
#include "verkv/attend/merge.hpp"

#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/mass_blocks.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/cpu/softmax_sum.hpp"
#include "verkv/cpu/thread_pool.hpp"
