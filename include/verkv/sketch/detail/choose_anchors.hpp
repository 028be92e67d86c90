// Which keys become anchors: k-means++ on a bounded sample, with distances to lines through 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/random.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/score_rows.hpp"

namespace verkv::inline v0::detail {

/// Chooses at most `count` of the finite keys, as row numbers, in the order chosen.
/// Candidates are every ceil(n / sample)-th key. Each next anchor is drawn with probability proportional to what the
/// anchors so far leave of a candidate, min over anchors a and gains g of ||k - g a||^2 (k-means++, Arthur and
/// Vassilvitskii 2007, with scaled centres); the first one likewise, of ||k||^2. Stops early where nothing is left of
/// any. O(sample count width); products in float, the rest in double. Uniforms of the seed, on a stream that no sample
/// uses; the running sums decide ties by the lower row.
template <class T>
[[nodiscard]] std::vector<token_index> choose_anchors(const rows<T>& keys, std::size_t count, std::size_t sample,
                                                      std::uint64_t seed) {
    const std::size_t width = keys.width;
    const std::size_t every = (std::max)(std::size_t{1}, (keys.count + sample - 1) / sample);
    std::vector<token_index> candidate;
    std::vector<float> elements;
    std::vector<double> left;
    for (std::size_t i = 0; i < keys.count; i += every) {
        const T* const key = keys[i];
        if (!finite_row(key, width)) {
            continue;
        }
        candidate.push_back(static_cast<token_index>(i));
        double square = 0;
        for (std::size_t c = 0; c < width; ++c) {
            elements.push_back(to_float(key[c]));
            square += static_cast<double>(elements.back()) * static_cast<double>(elements.back());
        }
        left.push_back(std::isfinite(square) ? square : 0.0);
    }
    const uniform_stream stream{seed, 0xffffffffu, 0xfffffffeu, 0xffffffffu};
    const std::vector<double> whole = left;
    const rows<float> all{elements.data(), static_cast<std::ptrdiff_t>(width), left.size(), width, nullptr};
    std::vector<float> dots(left.size());
    std::vector<token_index> chosen;
    while (chosen.size() < count) {
        double total = 0;
        for (const double x : left) {
            total += x;
        }
        if (!(total > 0)) {
            break;
        }
        const double mark = uniform(stream, static_cast<position_t>(chosen.size())) * total;
        std::size_t next = left.size();
        double sum = 0;
        for (std::size_t i = 0; i < left.size(); ++i) {
            sum += left[i];
            if (left[i] > 0 && (next == left.size() || sum - left[i] <= mark)) {
                next = i;
            }
        }
        chosen.push_back(candidate[next]);
        const rows<float> anchor = all.slice(next, 1);
        score_blocks(anchor, 1.0f, all, {dots.data(), 1, dots.size(), static_cast<std::ptrdiff_t>(dots.size())});
        for (std::size_t i = 0; i < left.size(); ++i) {
            const auto dot = static_cast<double>(dots[i]);
            // Below 2^-16 of the key it may be rounding of the float product.
            const double rest = whole[i] - dot * dot / whole[next];
            left[i] = (std::min)(left[i], rest > whole[i] * 0x1p-16 ? rest : 0.0);
        }
        left[next] = 0;
    }
    return chosen;
}

}  // namespace verkv::inline v0::detail
