// The floor under every verb that moves data: reading the same bytes once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

/// Sum of the memory's 64-bit words: a plain sequential read, vectorised by the compiler.
template <class Range>
std::uint64_t plain_read(const Range& range) {
    const auto bytes = std::as_bytes(std::span(range));
    constexpr std::size_t lanes = 16;
    std::uint64_t sums[lanes] = {};
    for (std::size_t i = 0; i + sizeof(sums) <= bytes.size(); i += sizeof(sums)) {
        std::uint64_t words[lanes];
        std::memcpy(words, bytes.data() + i, sizeof(words));
        for (std::size_t j = 0; j < lanes; ++j) {
            sums[j] += words[j];
        }
    }
    std::uint64_t total = 0;
    for (const std::uint64_t s : sums) {
        total += s;
    }
    return total;
}
