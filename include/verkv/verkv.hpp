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

#include "verkv/score/compose.hpp"
#include "verkv/score/given.hpp"
#include "verkv/score/importance.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/largest_attention.hpp"
#include "verkv/score/snapkv.hpp"
#include "verkv/score/streaming_llm.hpp"

#include "verkv/sample/budget.hpp"
#include "verkv/sample/inclusion.hpp"
#include "verkv/sample/poisson.hpp"

#include "verkv/sketch/exact.hpp"
#include "verkv/sketch/rope_pairs.hpp"

#include "verkv/certify/bernstein.hpp"
#include "verkv/certify/estimator.hpp"
#include "verkv/certify/shrinkage.hpp"
#include "verkv/certify/target.hpp"

#include "verkv/plan/exact_weights.hpp"
#include "verkv/plan/fixed.hpp"
#include "verkv/plan/greedy.hpp"
#include "verkv/plan/stage.hpp"
#include "verkv/plan/top_k.hpp"

#include "verkv/store/row_pool.hpp"
#include "verkv/store/staging.hpp"

#include "verkv/attend/attend.hpp"
#include "verkv/attend/merge.hpp"

#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/lanes.hpp"
#include "verkv/cpu/mass_blocks.hpp"
#include "verkv/cpu/rope_pair_estimate.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/cpu/softmax_sum.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/cpu/weights.hpp"

#include "verkv/cache/config.hpp"
#include "verkv/cache/layer_cache.hpp"
