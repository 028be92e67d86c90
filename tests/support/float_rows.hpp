// Random floats as keys and queries, and comparing them bit by bit.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "support/reference.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"

namespace support {

template <class T>
verkv::rows<T> rows_of(const std::vector<T>& data, std::size_t width) {
    return verkv::contiguous_rows(std::span<const T>(data), width);
}

inline std::vector<float> normal_floats(dice& d, std::size_t n, double deviation = 1) {
    std::vector<float> x(n);
    for (float& value : x) {
        value = static_cast<float>(deviation * d.normal());
    }
    return x;
}

template <class T>
std::vector<T> stored(const std::vector<float>& x) {
    std::vector<T> out;
    for (const float value : x) {
        out.push_back(verkv::from_float<T>(value));
    }
    return out;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace support
