// A bit a token: which ones a sketch must not speak of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "verkv/sketch/detail/checks.hpp"

namespace verkv::inline v0::detail {

/// One bit for each token, for sketches whose codes have no value left to say that a key was NaN or infinite.
class token_marks {
public:
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] std::size_t bytes() const noexcept { return (size_ + 31) / 32 * sizeof(std::uint32_t); }
    [[nodiscard]] bool operator[](std::size_t token) const noexcept { return words_[token / 32] >> token % 32 & 1u; }

    /// The bits of tokens 32 i ... 32 i + 31, lowest first; 0 beyond the last token.
    [[nodiscard]] const std::uint32_t* words() const noexcept { return words_.data(); }

    void make_room(std::size_t tokens, bool geometric) { detail::make_room(words_, (tokens + 31) / 32, geometric); }

    void push_back(bool marked) {
        if (size_ % 32 == 0) {
            words_.push_back(0);
        }
        words_[size_ / 32] |= static_cast<std::uint32_t>(marked) << size_ % 32;
        ++size_;
    }

    /// Forgets tokens first ... last-1. Precondition: first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        std::size_t to = first;
        for (std::size_t from = last; from < size_; ++from, ++to) {
            set(to, (*this)[from]);
        }
        for (; to < size_; ++to) {
            set(to, false);
        }
        size_ -= last - first;
        words_.resize((size_ + 31) / 32);
    }

private:
    void set(std::size_t token, bool marked) {
        const std::uint32_t bit = 1u << token % 32;
        words_[token / 32] = marked ? words_[token / 32] | bit : words_[token / 32] & ~bit;
    }

    std::vector<std::uint32_t> words_;
    std::size_t size_ = 0;
};

}  // namespace verkv::inline v0::detail
