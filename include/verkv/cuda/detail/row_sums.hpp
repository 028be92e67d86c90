// Weighted sums of a warp's values for the heads of a group: in registers, or in shared memory for any width.
#pragma once

#include <cstddef>

#include "verkv/core/host_device.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/detail/unroll.hpp"
#include "verkv/cuda/row_list.hpp"

namespace verkv::inline v0::gpu::detail {

/// sum_h[c] = sum_j w[j][h] v_j[c] over the rows that a warp adds, in their order, in float. Weight 0 adds nothing,
/// whatever the value. A lane has ValueDim / 32 channels of each head in registers.
template <class T, unsigned ValueDim, unsigned Heads>
class row_sums {
public:
    template <class Block, class Sums>
    VERKV_HOST_DEVICE row_sums(Block&, Sums, unsigned) {
        VERKV_UNROLL
        for (unsigned h = 0; h < Heads; ++h) {
            VERKV_UNROLL
            for (unsigned c = 0; c < channels; ++c) {
                sum_[h][c] = 0;
            }
        }
    }

    template <class Block, class Sums>
    VERKV_HOST_DEVICE void rescale(Block&, Sums, const float (&factor)[Heads], unsigned) {
        VERKV_UNROLL
        for (unsigned h = 0; h < Heads; ++h) {
            VERKV_UNROLL
            for (unsigned c = 0; c < channels; ++c) {
                sum_[h][c] *= factor[h];
            }
        }
    }

    /// Adds the rows of `mask`; weights[32 warp + j] are those of row j. row: of a lane.
    template <class Block, class Sums, class Weights>
    VERKV_HOST_DEVICE void add(Block& b, Sums, Weights weights, const row_memory<T>& values, row_id row, unsigned mask,
                               unsigned) {
        for (unsigned first = 0; first < warp_size; first += at_once) {
            const unsigned some = mask >> first & ((1u << at_once) - 1);
            if (some == 0) {
                continue;
            }
            pack<T, vector> raw[at_once][loads];
            VERKV_UNROLL
            for (unsigned r = 0; r < at_once; ++r) {
                const T* value = values.at(b.shuffle(row, first + r));
                VERKV_UNROLL
                for (unsigned p = 0; p < loads; ++p) {
                    raw[r][p] = {};
                    if ((some >> r & 1u) != 0) {
                        raw[r][p] = b.template load_readonly_vector<vector * sizeof(T)>(
                            value + (p * warp_size + b.lane()) * vector);
                    }
                }
            }
            VERKV_UNROLL
            for (unsigned r = 0; r < at_once; ++r) {
                VERKV_UNROLL
                for (unsigned h = 0; h < Heads; h += together) {
                    const pack<float, together> w =
                        weights.get((b.warp() * warp_size + first + r) * (Heads / together) + h / together);
                    VERKV_UNROLL
                    for (unsigned k = 0; k < together; ++k) {
                        if (w.at[k] != 0) {
                            VERKV_UNROLL
                            for (unsigned c = 0; c < channels; ++c) {
                                sum_[h + k][c] += w.at[k] * to_float(raw[r][c / vector].at[c % vector]);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Writes the sums to a slot, [Heads, ValueDim].
    template <class Block, class Sums>
    VERKV_HOST_DEVICE void store(Block& b, Sums sums, unsigned slot) const {
        VERKV_UNROLL
        for (unsigned h = 0; h < Heads; ++h) {
            VERKV_UNROLL
            for (unsigned c = 0; c < channels; ++c) {
                const unsigned channel = (c / vector * warp_size + b.lane()) * vector + c % vector;
                sums.set((slot * Heads + h) * ValueDim + channel, sum_[h][c]);
            }
        }
    }

private:
    static_assert(ValueDim % warp_size == 0);
    static constexpr unsigned channels = ValueDim / warp_size;                                 // of a lane
    static constexpr unsigned vector = channels * sizeof(T) > 16 ? 16 / sizeof(T) : channels;  // elements of a load
    static constexpr unsigned loads = channels / vector;
    static constexpr unsigned at_once = 8;  // rows that a lane reads before it uses the first
    static constexpr unsigned together = Heads < 4 ? Heads : 4;

    float sum_[Heads][channels];
};

/// Of any width: a warp's slot in shared memory has the sums.
template <class T, unsigned Heads>
class row_sums<T, 0, Heads> {
public:
    template <class Block, class Sums>
    VERKV_HOST_DEVICE row_sums(Block& b, Sums sums, unsigned width) {
        VERKV_UNROLL
        for (unsigned h = 0; h < Heads; ++h) {
            for (unsigned c = b.lane(); c < width; c += warp_size) {
                sums.set((b.warp() * Heads + h) * width + c, 0.0f);
            }
        }
    }

    template <class Block, class Sums>
    VERKV_HOST_DEVICE void rescale(Block& b, Sums sums, const float (&factor)[Heads], unsigned width) {
        VERKV_UNROLL
        for (unsigned h = 0; h < Heads; ++h) {
            for (unsigned c = b.lane(); c < width; c += warp_size) {
                const unsigned at = (b.warp() * Heads + h) * width + c;
                sums.set(at, sums.get(at) * factor[h]);
            }
        }
    }

    template <class Block, class Sums, class Weights>
    VERKV_HOST_DEVICE void add(Block& b, Sums sums, Weights weights, const row_memory<T>& values, row_id row,
                               unsigned mask, unsigned width) {
        for (unsigned first = 0; first < width; first += warp_size) {
            const unsigned c = first + b.lane();
            const bool inside = c < width;
            float sum[Heads];
            VERKV_UNROLL
            for (unsigned h = 0; h < Heads; ++h) {
                sum[h] = inside ? sums.get((b.warp() * Heads + h) * width + c) : 0.0f;
            }
            for (unsigned left = mask; left != 0; left &= left - 1) {
                const unsigned j = lowest_bit(left);
                const T* value = values.at(b.shuffle(row, j));
                const float v = inside ? to_float(b.load_readonly(value + c)) : 0.0f;
                VERKV_UNROLL
                for (unsigned h = 0; h < Heads; h += together) {
                    const pack<float, together> w =
                        weights.get((b.warp() * warp_size + j) * (Heads / together) + h / together);
                    VERKV_UNROLL
                    for (unsigned k = 0; k < together; ++k) {
                        sum[h + k] += w.at[k] != 0 ? w.at[k] * v : 0.0f;
                    }
                }
            }
            for (unsigned h = 0; h < Heads && inside; ++h) {
                sums.set((b.warp() * Heads + h) * width + c, sum[h]);
            }
        }
    }

    /// They are there already.
    template <class Block, class Sums>
    VERKV_HOST_DEVICE void store(Block&, Sums, unsigned) const {}

private:
    static constexpr unsigned together = Heads < 4 ? Heads : 4;
};

}  // namespace verkv::inline v0::gpu::detail
