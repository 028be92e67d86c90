// Products of a warp's rows with the queries of a group: keys are read in wide loads, sums end in shared memory.
#pragma once

#include <cstddef>

#include "verkv/core/host_device.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/detail/unroll.hpp"
#include "verkv/cuda/row_list.hpp"

namespace verkv::inline v0::gpu::detail {

/// Sums of Count values a lane over the lanes that differ in the bits below `Lanes`: each step halves the values that a
/// lane keeps, so that Count sums take about as many shuffles. On return at[0 ... kept-1] of a lane are the values
/// first ... first + kept - 1; lanes with `copy` hold what another one holds, too.
template <unsigned Count, unsigned Lanes>
struct transposed_sums {
    static constexpr unsigned kept = Count > Lanes ? Count / Lanes : 1;
    unsigned first = 0;
    bool copy = false;

    template <class Block>
    VERKV_HOST_DEVICE transposed_sums(Block& b, float (&at)[Count]) {
        step<Count, Lanes / 2>(b, at);
    }

private:
    template <unsigned Held, unsigned Bit, class Block>
    VERKV_HOST_DEVICE void step(Block& b, float (&at)[Count]) {
        if constexpr (Bit > 0) {
            const bool upper = (b.lane() & Bit) != 0;
            if constexpr (Held > 1) {
                constexpr unsigned half = Held / 2;
                VERKV_UNROLL
                for (unsigned k = 0; k < half; ++k) {
                    const float mine = upper ? at[half + k] : at[k];
                    const float other = upper ? at[k] : at[half + k];
                    at[k] = mine + b.shuffle_xor(other, Bit);
                }
                first += upper ? half : 0u;
                step<half, Bit / 2>(b, at);
            } else {
                at[0] += b.shuffle_xor(at[0], Bit);
                copy = copy || upper;
                step<1, Bit / 2>(b, at);
            }
        }
    }
};

/// <q_h, k_j> of the 32 rows of a warp. Float accumulation: a lane adds its channels in order, lanes are added in
/// pairs. KeyDim 0: any width, channel by channel.
template <class T, unsigned KeyDim, unsigned Heads>
struct row_scores {
    static constexpr unsigned vector = 16 / sizeof(T);                                           // elements of a load
    static constexpr unsigned vectors = KeyDim * sizeof(T) / 16;                                 // of a row
    static constexpr unsigned lanes = KeyDim == 0 || vectors > warp_size ? warp_size : vectors;  // that share a row
    static constexpr unsigned loads = KeyDim == 0 ? 0 : vectors / lanes;
    static constexpr unsigned at_once = 4;  // rows that a lane reads before it uses the first
    static constexpr unsigned together = Heads < 4 ? Heads : 4;
    static constexpr unsigned neighbours = warp_size / lanes;  // rows that a warp reads with one instruction
    static_assert(KeyDim == 0 || (KeyDim * sizeof(T) % 16 == 0 && (vectors & (vectors - 1)) == 0));

    using query_element = pack<float, KeyDim == 0 ? 1 : 4>;

    [[nodiscard]] VERKV_HOST_DEVICE static constexpr std::size_t query_elements(unsigned key_dim) {
        return KeyDim == 0 ? std::size_t{Heads} * key_dim : std::size_t{Heads} * KeyDim / 4;
    }

    /// Puts `here` queries into shared memory, zeros for the others; a barrier has to follow.
    template <class Block, class Queries>
    VERKV_HOST_DEVICE static void load_queries(Block& b, Queries query, const float* from, unsigned here,
                                               unsigned key_dim) {
        if constexpr (KeyDim == 0) {
            for (unsigned e = b.thread(); e < Heads * key_dim; e += b.threads()) {
                query.set(e, {{e < here * key_dim ? b.load_readonly(from + e) : 0.0f}});
            }
        } else {
            // Quarter p of the channels of a load, neighbouring lanes side by side: no bank conflicts.
            constexpr unsigned quarters = vector / 4;
            for (unsigned e = b.thread(); e < Heads * KeyDim / 4; e += b.threads()) {
                const unsigned lane = e % lanes;
                const unsigned quarter = e / lanes % quarters;
                const unsigned load = e / lanes / quarters % loads;
                const unsigned h = e / lanes / quarters / loads;
                const unsigned c = (load * lanes + lane) * vector + quarter * 4;
                query_element q = {};
                for (unsigned k = 0; k < 4 && h < here; ++k) {
                    q.at[k] = b.load_readonly(from + std::size_t{h} * KeyDim + c + k);
                }
                query.set(e, q);
            }
        }
    }

    /// logits[warp, h, j] for the rows j of `mask`; anything for others, of which no memory is read. row: of a lane.
    template <class Block, class Queries, class Logits>
    VERKV_HOST_DEVICE static void score(Block& b, Queries query, Logits logits, const row_memory<T>& keys, row_id row,
                                        unsigned mask, unsigned key_dim) {
        constexpr unsigned batch = neighbours * at_once;
        for (unsigned first = 0; first < warp_size; first += batch) {
            const unsigned of_batch = batch == warp_size ? all_lanes : ((1u << batch % warp_size) - 1) << first;
            unsigned j[at_once];
            const T* key[at_once];
            bool used[at_once];
            VERKV_UNROLL
            for (unsigned r = 0; r < at_once; ++r) {
                j[r] = first + r * neighbours + b.lane() / lanes;
                key[r] = keys.at(b.shuffle(row, j[r]));
                used[r] = (mask >> j[r] & 1u) != 0;
            }
            if ((mask & of_batch) == 0) {
                for (unsigned h = b.lane() / batch; h < Heads; h += warp_size / batch) {
                    logits.set((b.warp() * Heads + h) * warp_size + first + b.lane() % batch, 0.0f);
                }
                continue;
            }
            if constexpr (KeyDim == 0) {
                any_width(b, query, logits, key, used, j, key_dim);
            } else {
                wide(b, query, logits, key, used, j);
            }
        }
    }

private:
    template <class Block, class Queries, class Logits>
    VERKV_HOST_DEVICE static void wide(Block& b, Queries query, Logits logits, const T* const (&key)[at_once],
                                       const bool (&used)[at_once], const unsigned (&j)[at_once]) {
        constexpr unsigned quarters = vector / 4;
        const unsigned lane = b.lane() % lanes;
        pack<T, vector> raw[at_once][loads];
        VERKV_UNROLL
        for (unsigned r = 0; r < at_once; ++r) {
            VERKV_UNROLL
            for (unsigned p = 0; p < loads; ++p) {
                raw[r][p] = {};
                if (used[r]) {
                    raw[r][p] = b.template load_readonly_vector<16>(key[r] + (p * lanes + lane) * vector);
                }
            }
        }
        VERKV_UNROLL
        for (unsigned head = 0; head < Heads; head += together) {
            float dot[at_once * together] = {};
            VERKV_UNROLL
            for (unsigned p = 0; p < loads * quarters; ++p) {
                VERKV_UNROLL
                for (unsigned h = 0; h < together; ++h) {
                    const query_element q = query.get(((head + h) * loads * quarters + p) * lanes + lane);
                    VERKV_UNROLL
                    for (unsigned r = 0; r < at_once; ++r) {
                        VERKV_UNROLL
                        for (unsigned k = 0; k < 4; ++k) {
                            dot[r * together + h] += q.at[k] * to_float(raw[r][p / quarters].at[p % quarters * 4 + k]);
                        }
                    }
                }
            }
            put(b, logits, dot, head, j);
        }
    }

    template <class Block, class Queries, class Logits>
    VERKV_HOST_DEVICE static void any_width(Block& b, Queries query, Logits logits, const T* const (&key)[at_once],
                                            const bool (&used)[at_once], const unsigned (&j)[at_once],
                                            unsigned key_dim) {
        VERKV_UNROLL
        for (unsigned head = 0; head < Heads; head += together) {
            float dot[at_once * together] = {};
            for (unsigned c = b.lane(); c < key_dim; c += warp_size) {
                float k[at_once];
                VERKV_UNROLL
                for (unsigned r = 0; r < at_once; ++r) {
                    k[r] = used[r] ? to_float(b.load_readonly(key[r] + c)) : 0.0f;
                }
                VERKV_UNROLL
                for (unsigned h = 0; h < together; ++h) {
                    const float q = query.get((head + h) * key_dim + c).at[0];
                    VERKV_UNROLL
                    for (unsigned r = 0; r < at_once; ++r) {
                        dot[r * together + h] += q * k[r];
                    }
                }
            }
            put(b, logits, dot, head, j);
        }
    }

    /// Adds lanes up and writes; j: of this lane's rows, all lanes of a row's have the same.
    template <class Block, class Logits>
    VERKV_HOST_DEVICE static void put(Block& b, Logits logits, float (&dot)[at_once * together], unsigned head,
                                      const unsigned (&j)[at_once]) {
        const transposed_sums<at_once * together, lanes> sums(b, dot);
        if (!sums.copy) {
            VERKV_UNROLL
            for (unsigned k = 0; k < sums.kept; ++k) {
                const unsigned v = sums.first + k;
                const unsigned at = j[0] + v / together * neighbours;
                logits.set((b.warp() * Heads + head + v % together) * warp_size + at, dot[k]);
            }
        }
    }
};

}  // namespace verkv::inline v0::gpu::detail
