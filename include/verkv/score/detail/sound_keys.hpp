// Keys of a KV head as unit vectors about their mean, those that are not finite left out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cpu/score_rows.hpp"

namespace verkv::inline v0::detail::scoring {

inline constexpr token_index no_anchor = (std::numeric_limits<token_index>::max)();

template <class T>
class sound_keys {
public:
    template <class Backend>
    sound_keys(const Backend& exec, const rows<T>& keys, bool centred)
        : keys_(keys), centre_(keys.width), unit_(keys.count * keys.width), length_(keys.count), sound_(keys.count) {
        std::vector<std::vector<double>> sums(blocks(), std::vector<double>(keys.width));
        for_each_task(exec, blocks(), [&](std::size_t b, std::size_t) {
            for (std::size_t i = first(b); i < last(b); ++i) {
                const T* key = keys_[i];
                sound_[i] = finite_row(key, keys_.width) ? 1 : 0;
                for (std::size_t c = 0; c < keys_.width && sound_[i]; ++c) {
                    sums[b][c] += static_cast<double>(to_float(key[c]));
                }
            }
        });
        const auto members = static_cast<double>(std::count(sound_.begin(), sound_.end(), 1));
        for (std::size_t c = 0; c < keys.width && centred && members > 0; ++c) {
            for (const auto& sum : sums) {
                centre_[c] += sum[c];
            }
            centre_[c] /= members;
        }
        for_each_task(exec, blocks(), [&](std::size_t b, std::size_t) {
            for (std::size_t i = first(b); i < last(b); ++i) {
                double square = 0;
                for (std::size_t c = 0; c < keys_.width && sound_[i]; ++c) {
                    square += value(i, c) * value(i, c);
                }
                length_[i] = std::sqrt(square);
                float* to = unit_.data() + i * keys_.width;
                for (std::size_t c = 0; c < keys_.width && length_[i] > 0; ++c) {
                    to[c] = static_cast<float>(value(i, c) / length_[i]);
                }
            }
        });
    }

    [[nodiscard]] std::size_t size() const { return keys_.count; }
    [[nodiscard]] std::size_t blocks() const { return (size() + block - 1) / block; }
    [[nodiscard]] std::size_t first(std::size_t b) const { return b * block; }
    [[nodiscard]] std::size_t last(std::size_t b) const { return (std::min)(size(), (b + 1) * block); }
    [[nodiscard]] bool sound(std::size_t i) const { return sound_[i] != 0; }
    [[nodiscard]] double length(std::size_t i) const { return length_[i]; }

    // Cosines of a block's keys with one key, written to their places in out, [token]; 0 where one has no direction.
    void cosines(std::size_t with, std::size_t b, std::span<float> out) const {
        const auto width = static_cast<std::ptrdiff_t>(keys_.width);
        const std::size_t count = last(b) - first(b);
        const rows<float> one{unit_.data() + with * keys_.width, width, 1, keys_.width, nullptr};
        const rows<float> these{unit_.data() + first(b) * keys_.width, width, count, keys_.width, nullptr};
        const std::span<float> part = out.subspan(first(b), count);
        score_blocks(one, 1.0f, these, matrix_view<float>{part.data(), 1, count, static_cast<std::ptrdiff_t>(count)});
    }

    // The key that is no anchor and has the most left, given its largest |cosine| with one; size() where nothing is.
    template <class Backend>
    [[nodiscard]] std::size_t farthest(const Backend& exec, const std::vector<float>& best,
                                       const std::vector<char>& is_anchor) const {
        std::vector<std::size_t> top(blocks(), size());
        const auto left = [&](std::size_t i) {
            const double c = (std::min)(1.0, static_cast<double>(best[i]));
            return i < size() && !is_anchor[i] ? length_[i] * length_[i] * (1 - c * c) : 0.0;
        };
        for_each_task(exec, blocks(), [&](std::size_t b, std::size_t) {
            double most = 0;
            for (std::size_t i = first(b); i < last(b); ++i) {
                if (left(i) > most) {
                    most = left(i);
                    top[b] = i;
                }
            }
        });
        std::size_t found = size();
        double most = 0;
        for (const std::size_t i : top) {
            if (i < size() && left(i) > most) {
                most = left(i);
                found = i;
            }
        }
        return found;
    }

    // ||k_i - s a|| / ||k_i|| with the best s; 1 without an anchor. Precondition: length(i) > 0.
    [[nodiscard]] float left_of(std::size_t i, token_index anchor) const {
        if (anchor == no_anchor) {
            return 1;
        }
        double product = 0;
        for (std::size_t c = 0; c < keys_.width; ++c) {
            product += value(i, c) / length_[i] * (value(anchor, c) / length_[anchor]);
        }
        double square = 0;
        for (std::size_t c = 0; c < keys_.width; ++c) {
            const double rest = value(i, c) / length_[i] - product * (value(anchor, c) / length_[anchor]);
            square += rest * rest;
        }
        return static_cast<float>((std::min)(1.0, std::sqrt(square)));
    }

private:
    static constexpr std::size_t block = 512;

    [[nodiscard]] double value(std::size_t i, std::size_t c) const {
        return static_cast<double>(to_float(keys_[i][c])) - centre_[c];
    }

    rows<T> keys_;
    std::vector<double> centre_;
    std::vector<float> unit_;
    std::vector<double> length_;
    std::vector<char> sound_;
};

}  // namespace verkv::inline v0::detail::scoring
