// Coefficients of a low-rank sketch: three formats, one way to store, move and grow them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/cpu/low_rank_estimate.hpp"
#include "verkv/sketch/detail/checks.hpp"

namespace verkv::inline v0::detail {

/// `rank` coefficients a token in one of the formats, as low_rank_codes has them.
class coefficient_store {
public:
    coefficient_store(coefficient_format format, std::size_t rank) : format_(format), rank_(rank) {}

    /// Bytes of a token, its step included.
    [[nodiscard]] std::size_t token_bytes() const noexcept {
        switch (format_) {
            case coefficient_format::float32:
                return rank_ * sizeof(float);
            case coefficient_format::float16:
                return rank_ * sizeof(half);
            default:
                return (rank_ + 3) / 4 * sizeof(std::uint32_t) + sizeof(float);
        }
    }

    /// Sets the pointers of `s`, which has format and rank of this.
    void show(low_rank_codes& s) const noexcept {
        s.singles = singles_.data();
        s.halves = halves_.data();
        s.words = words_.data();
        s.step = step_.data();
    }

    void make_room(std::size_t padded_tokens, bool geometric) {
        detail::make_room(singles_, count_of(coefficient_format::float32, padded_tokens), geometric);
        detail::make_room(halves_, count_of(coefficient_format::float16, padded_tokens), geometric);
        detail::make_room(words_, count_of(coefficient_format::int8, padded_tokens), geometric);
        detail::make_room(step_, format_ == coefficient_format::int8 ? padded_tokens : 0, geometric);
    }

    void resize(std::size_t padded_tokens) {
        singles_.resize(count_of(coefficient_format::float32, padded_tokens));
        halves_.resize(count_of(coefficient_format::float16, padded_tokens));
        words_.resize(count_of(coefficient_format::int8, padded_tokens));
        step_.resize(format_ == coefficient_format::int8 ? padded_tokens : 0);
    }

    void move(std::size_t from, std::size_t to) {
        for (std::size_t e = 0; e < elements(); ++e) {
            move_element(singles_, from, to, e);
            move_element(halves_, from, to, e);
            move_element(words_, from, to, e);
        }
        if (!step_.empty()) {
            step_[to] = step_[from];
        }
    }

    /// Stores a token's coefficients, or NaN for all of them, and puts what is stored in their place. Returns the step
    /// that 8 bits have, else 0.
    double store(std::size_t token, double* coefficients, bool finite) {
        constexpr float nan = std::numeric_limits<float>::quiet_NaN();
        if (format_ == coefficient_format::int8) {
            return store_codes(token, coefficients, finite);
        }
        const bool halves = format_ == coefficient_format::float16;
        const float most = halves ? 65504.0f : (std::numeric_limits<float>::max)();
        for (std::size_t r = 0; r < rank_; ++r) {
            const float x = finite ? larger(smaller(static_cast<float>(coefficients[r]), most), -most) : nan;
            if (halves) {
                halves_[place(token, r)] = from_float<half>(x);
                coefficients[r] = static_cast<double>(to_float(halves_[place(token, r)]));
            } else {
                singles_[place(token, r)] = x;
                coefficients[r] = static_cast<double>(x);
            }
        }
        return 0;
    }

private:
    static constexpr std::size_t block = low_rank_codes::block_tokens;

    [[nodiscard]] std::size_t elements() const noexcept {
        return format_ == coefficient_format::int8 ? (rank_ + 3) / 4 : rank_;
    }

    [[nodiscard]] std::size_t count_of(coefficient_format format, std::size_t tokens) const noexcept {
        return format == format_ ? elements() * tokens : 0;
    }

    [[nodiscard]] std::size_t place(std::size_t token, std::size_t element) const noexcept {
        return (token / block * elements() + element) * block + token % block;
    }

    template <class V>
    void move_element(V& v, std::size_t from, std::size_t to, std::size_t element) const {
        if (!v.empty()) {
            v[place(to, element)] = v[place(from, element)];
        }
    }

    double store_codes(std::size_t token, double* coefficients, bool finite) {
        double most = 0;
        for (std::size_t r = 0; r < rank_; ++r) {
            most = (std::max)(most, std::abs(coefficients[r]));
        }
        // 127 steps have to be a float.
        const float step = finite ? smaller(float_above(most / 127), 2e36f) : std::numeric_limits<float>::quiet_NaN();
        step_[token] = step;
        for (std::size_t e = 0; e < elements(); ++e) {
            words_[place(token, e)] = 0;
        }
        for (std::size_t r = 0; r < rank_; ++r) {
            const double ratio = step > 0 ? coefficients[r] / static_cast<double>(step) : 0.0;
            const auto code = static_cast<int>(std::lround((std::max)((std::min)(ratio, 127.0), -127.0)));
            words_[place(token, r / 4)] |= static_cast<std::uint32_t>(code + 128) << (r % 4 * 8);
            coefficients[r] = static_cast<double>(code) * static_cast<double>(step);
        }
        return static_cast<double>(step);
    }

    coefficient_format format_;
    std::size_t rank_;
    std::vector<float> singles_;
    std::vector<half> halves_;
    std::vector<std::uint32_t> words_;
    std::vector<float> step_;
};

}  // namespace verkv::inline v0::detail
