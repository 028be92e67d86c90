// Codes of a few bits a channel, as the estimates of sketches read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "verkv/cpu/rope_pair_codes.hpp"
#include "verkv/sketch/detail/checks.hpp"

namespace verkv::inline v0::detail {

/// `words` 32-bit words a token, in blocks of 16 tokens: the words w of a block's tokens lie side by side. A code may
/// go on in the next word.
class packed_codes {
public:
    static constexpr std::size_t block = rope_pair_codes::block_tokens;

    explicit packed_codes(std::size_t words = 0) : words_(words) {}

    /// Tokens rounded up to whole blocks.
    [[nodiscard]] static std::size_t padded(std::size_t tokens) { return (tokens + block - 1) / block * block; }

    [[nodiscard]] std::size_t words() const noexcept { return words_; }
    [[nodiscard]] const std::uint32_t* data() const noexcept { return codes_.data(); }

    void make_room(std::size_t tokens, bool geometric) {
        detail::make_room(codes_, padded(tokens) * words_, geometric);
    }
    void resize(std::size_t tokens) { codes_.resize(padded(tokens) * words_); }

    /// Sets all bits of a token to 0.
    void clear(std::size_t token) {
        for (std::size_t w = 0; w < words_; ++w) {
            *word_of(token, w) = 0;
        }
    }

    void move(std::size_t from, std::size_t to) {
        for (std::size_t w = 0; w < words_; ++w) {
            *word_of(to, w) = *word_of(from, w);
        }
    }

    /// Puts a code of `bits` bits at bit number `bit` of a token, where all are 0 still.
    void put(std::size_t token, std::size_t bit, unsigned bits, std::uint32_t code) {
        const auto shift = static_cast<unsigned>(bit % 32);
        *word_of(token, bit / 32) |= code << shift;
        if (shift + bits > 32) {
            *word_of(token, bit / 32 + 1) |= code >> (32 - shift);
        }
    }

private:
    [[nodiscard]] std::uint32_t* word_of(std::size_t token, std::size_t word) {
        return codes_.data() + (token / block * words_ + word) * block + token % block;
    }

    std::size_t words_;
    std::vector<std::uint32_t> codes_;
};

}  // namespace verkv::inline v0::detail
