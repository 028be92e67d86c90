// Every kernel: compiled for all architectures, its registers counted, and run on a device where there is one.
#pragma once

#include <cstdint>

#include "support/kernels/collectives.hpp"
#include "support/kernels/sum_rows.hpp"

namespace support {

template <class... Kernels>
struct kernel_list {};

using every_kernel =
    kernel_list<sum_rows_kernel, collectives_kernel<float>, collectives_kernel<std::uint64_t>, compact_kernel>;

}  // namespace support
