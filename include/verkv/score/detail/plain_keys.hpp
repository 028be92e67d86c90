// Keys of a KV head as they were before RoPE.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/prompt.hpp"
#include "verkv/core/rope.hpp"
#include "verkv/cpu/executor.hpp"

namespace verkv::inline v0::detail::scoring {

// The rotation lives with the caller. Throws where it does not fit the keys; without frequencies keys stay as stored.
template <class T>
class plain_keys {
public:
    plain_keys(const prompt<T>& p, std::size_t kv_head, const rope& rotation)
        : keys_(p.keys[kv_head]), positions_(p.positions), rotation_(&rotation) {
        if (rotation.pairs() > 0) {
            validate(rotation, keys_.width);
        }
    }

    [[nodiscard]] std::size_t size() const { return positions_.size(); }

    // Writes the key of token i, [key_dim]; zeros, and false, where it is not finite.
    bool take(std::size_t i, double* to) const {
        const T* const key = keys_[i];
        const bool finite = finite_row(key, keys_.width);
        if (!finite) {
            std::fill_n(to, keys_.width, 0.0);
        } else if (rotation_->pairs() > 0) {
            unrotate(*rotation_, positions_[i], key, keys_.width, to);
        } else {
            std::transform(key, key + keys_.width, to, [](T x) { return static_cast<double>(to_float(x)); });
        }
        return finite;
    }

    // Mean of those that are finite, summed over fixed blocks; zeros where there is none.
    template <class Backend>
    [[nodiscard]] std::vector<double> mean(const Backend& exec) const {
        const std::size_t n = positions_.size();
        const std::size_t d = keys_.width;
        const std::size_t blocks = (n + block - 1) / block;
        std::vector<double> sums(blocks * d);
        std::vector<std::size_t> members(blocks);
        std::vector<std::vector<double>> row(workers(exec), std::vector<double>(d));
        for_each_task(exec, blocks, [&](std::size_t b, std::size_t worker) {
            for (std::size_t i = b * block; i < (std::min)(n, (b + 1) * block); ++i) {
                members[b] += take(i, row[worker].data()) ? 1u : 0u;
                for (std::size_t c = 0; c < d; ++c) {
                    sums[b * d + c] += row[worker][c];
                }
            }
        });
        std::vector<double> out(d);
        std::size_t all = 0;
        for (std::size_t b = 0; b < blocks; ++b) {
            all += members[b];
            for (std::size_t c = 0; c < d; ++c) {
                out[c] += sums[b * d + c];
            }
        }
        for (double& x : out) {
            x /= all > 0 ? static_cast<double>(all) : 1.0;
        }
        return out;
    }

private:
    static constexpr std::size_t block = 512;

    rows<T> keys_;
    std::span<const position_t> positions_;
    const rope* rotation_;
};

}  // namespace verkv::inline v0::detail::scoring
