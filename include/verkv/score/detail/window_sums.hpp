// Sums of neighbouring keys, any window of a length in two additions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/score/detail/plain_keys.hpp"

namespace verkv::inline v0::detail::scoring {

// Tokens are cut in pieces of one window's length, counted from token 0. A window of that length reaches into two
// pieces at most: the end of one and the start of the next, whose running sums are kept (van Herk 1992). Nothing is
// subtracted, so that a huge key leaves no trace outside its windows.
class window_sums {
public:
    // For ranges of at most `most` tokens, whole pieces included.
    window_sums(std::size_t most, std::size_t width)
        : width_(width), from_start_(most * width), to_end_(most * width), sound_(most) {}

    // Keys minus the mean, from the start of the piece of `first` to the end of that of last - 1 (or of the keys).
    template <class T>
    void take(const plain_keys<T>& keys, std::span<const double> mean, std::size_t length, std::size_t first,
              std::size_t last) {
        length_ = length;
        first_ = first / length * length;
        const std::size_t end = (std::min)(keys.size(), (last + length - 1) / length * length);
        for (std::size_t i = first_; i < end; ++i) {
            double* const row = at(to_end_, i);
            sound_[i - first_] = keys.take(i, row) ? 1 : 0;
            for (std::size_t c = 0; c < width_ && sound(i); ++c) {
                row[c] -= mean[c];  // keys that are not finite stay 0: out of every sum
            }
            double* const sum = at(from_start_, i);
            std::copy_n(row, width_, sum);
            if (i % length > 0) {
                add(sum - width_, sum);
            }
        }
        for (std::size_t i = end; i-- > first_;) {
            if (i + 1 < end && (i + 1) % length > 0) {
                add(at(to_end_, i + 1), at(to_end_, i));
            }
        }
    }

    [[nodiscard]] bool sound(std::size_t i) const { return sound_[i - first_] != 0; }

    // Sum of tokens a ... b-1: a whole window, or one cut off by the first token or the last.
    void write(std::size_t a, std::size_t b, double* out) {
        const bool one_piece = a / length_ == (b - 1) / length_;
        std::copy_n(one_piece && a % length_ == 0 ? at(from_start_, b - 1) : at(to_end_, a), width_, out);
        if (!one_piece) {
            add(at(from_start_, b - 1), out);
        }
    }

private:
    double* at(std::vector<double>& of, std::size_t i) { return of.data() + (i - first_) * width_; }

    void add(const double* from, double* to) const {
        for (std::size_t c = 0; c < width_; ++c) {
            to[c] += from[c];
        }
    }

    std::size_t width_;
    std::size_t length_ = 1;
    std::size_t first_ = 0;
    std::vector<double> from_start_;  // of a token's piece up to the token
    std::vector<double> to_end_;      // from the token to the end of its piece
    std::vector<char> sound_;
};

}  // namespace verkv::inline v0::detail::scoring
