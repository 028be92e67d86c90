// Every kernel: compiled for all architectures, its registers counted, and run on a device where there is one.
#pragma once

#include <cstdint>

#include "support/kernels/collectives.hpp"
#include "support/kernels/sum_rows.hpp"
#include "verkv/cuda/append.hpp"
#include "verkv/cuda/append_codes.hpp"
#include "verkv/cuda/check_sample.hpp"
#include "verkv/cuda/merge_parts.hpp"
#include "verkv/cuda/poisson_draw.hpp"
#include "verkv/cuda/sparse_attention.hpp"

namespace support {

template <class... Kernels>
struct kernel_list {};

template <class T, unsigned KeyDim, unsigned ValueDim, unsigned Heads>
using attention = verkv::gpu::sparse_attention_kernel<T, KeyDim, ValueDim, Heads>;

using every_kernel =
    kernel_list<sum_rows_kernel, collectives_kernel<float>, collectives_kernel<std::uint64_t>, compact_kernel,
                attention<verkv::bfloat16, 64, 64, 4>, attention<verkv::bfloat16, 128, 128, 1>,
                attention<verkv::bfloat16, 128, 128, 4>, attention<verkv::bfloat16, 128, 128, 8>,
                attention<verkv::bfloat16, 256, 256, 4>, attention<verkv::bfloat16, 0, 0, 4>,
                attention<verkv::half, 64, 64, 4>, attention<verkv::half, 128, 128, 4>,
                attention<verkv::half, 256, 256, 4>, attention<float, 128, 128, 4>, attention<float, 256, 256, 4>,
                attention<float, 0, 0, 8>, verkv::gpu::merge_parts_kernel, verkv::gpu::check_sample_kernel,
                verkv::gpu::poisson_draw_kernel, verkv::gpu::append_kernel<verkv::bfloat16>,
                verkv::gpu::append_kernel<float>, verkv::gpu::append_codes_kernel<verkv::bfloat16>,
                verkv::gpu::append_codes_kernel<verkv::half>>;

}  // namespace support
