// Every kernel: compiled for all architectures, its registers counted, and run on a device where there is one.
#pragma once

#include <cstdint>

#include "support/kernels/collectives.hpp"
#include "support/kernels/sum_rows.hpp"
#include "verkv/cuda/append.hpp"
#include "verkv/cuda/append_codes.hpp"
#include "verkv/cuda/calibrate_levels.hpp"
#include "verkv/cuda/check_sample.hpp"
#include "verkv/cuda/clear.hpp"
#include "verkv/cuda/fetch_list.hpp"
#include "verkv/cuda/find_levels.hpp"
#include "verkv/cuda/gather_rows.hpp"
#include "verkv/cuda/greedy_list.hpp"
#include "verkv/cuda/greedy_select.hpp"
#include "verkv/cuda/greedy_survey.hpp"
#include "verkv/cuda/group_plan.hpp"
#include "verkv/cuda/lower_levels.hpp"
#include "verkv/cuda/merge_parts.hpp"
#include "verkv/cuda/poisson_draw.hpp"
#include "verkv/cuda/reset_staging.hpp"
#include "verkv/cuda/rope_pair_logits.hpp"
#include "verkv/cuda/row_logits.hpp"
#include "verkv/cuda/sparse_attention.hpp"
#include "verkv/cuda/weigh.hpp"

namespace support {

template <class... Kernels>
struct kernel_list {};

template <class T, unsigned KeyDim, unsigned ValueDim, unsigned Heads>
using attention = verkv::gpu::sparse_attention_kernel<T, KeyDim, ValueDim, Heads>;

using every_kernel =
    kernel_list<sum_rows_kernel, collectives_kernel<float>, collectives_kernel<std::uint64_t>, compact_kernel,
                verkv::gpu::rope_pair_logits_kernel<1, 2>, verkv::gpu::rope_pair_logits_kernel<2, 1>,
                verkv::gpu::rope_pair_logits_kernel<2, 4>, verkv::gpu::rope_pair_logits_kernel<4, 8>,
                verkv::gpu::rope_pair_logits_kernel<8, 4>, verkv::gpu::row_logits_kernel<verkv::half, 4>,
                verkv::gpu::row_logits_kernel<verkv::bfloat16, 8>, verkv::gpu::row_logits_kernel<float, 1>,
                verkv::gpu::clear_kernel<std::uint32_t>, verkv::gpu::clear_kernel<std::uint64_t>,
                verkv::gpu::calibrate_levels_kernel, verkv::gpu::lower_levels_kernel, verkv::gpu::weigh_kernel,
                verkv::gpu::find_levels_kernel<1>, verkv::gpu::find_levels_kernel<4>, verkv::gpu::find_levels_kernel<8>,
                verkv::gpu::group_plan_kernel<1>, verkv::gpu::group_plan_kernel<4>, verkv::gpu::group_plan_kernel<8>,
                verkv::gpu::greedy_survey_kernel, verkv::gpu::greedy_select_kernel, verkv::gpu::greedy_list_kernel,
                verkv::gpu::fetch_list_kernel, verkv::gpu::gather_rows_kernel<verkv::half>,
                attention<verkv::bfloat16, 64, 64, 4>, attention<verkv::bfloat16, 128, 128, 1>,
                attention<verkv::bfloat16, 128, 128, 4>, attention<verkv::bfloat16, 128, 128, 8>,
                attention<verkv::bfloat16, 256, 256, 4>, attention<verkv::bfloat16, 0, 0, 4>,
                attention<verkv::half, 64, 64, 4>, attention<verkv::half, 128, 128, 4>,
                attention<verkv::half, 256, 256, 4>, attention<float, 128, 128, 4>, attention<float, 256, 256, 4>,
                attention<float, 0, 0, 8>, verkv::gpu::merge_parts_kernel, verkv::gpu::check_sample_kernel,
                verkv::gpu::poisson_draw_kernel, verkv::gpu::reset_staging_kernel,
                verkv::gpu::append_kernel<verkv::bfloat16>, verkv::gpu::append_kernel<float>,
                verkv::gpu::append_codes_kernel<verkv::bfloat16>, verkv::gpu::append_codes_kernel<verkv::half>>;

}  // namespace support
