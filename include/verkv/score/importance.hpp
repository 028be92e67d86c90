// From any scores to importance in [0, 1].
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/cpu/executor.hpp"

namespace verkv::inline v0 {

/// Turns scores into importance tau in [0, 1], in place [VerKV Symbols].
/// Scores that all lie in [0, 1] stay, to the bit; otherwise tau_i = exp(s_i - max s) / sum_j exp(s_j - max s).
/// Returns whether the softmax was taken.
/// scores: [tokens], finite (checked). Far-away scores become 0, which sample/ raises to its floor.
/// Time O(n), n exponentials in double; sums in double over fixed blocks, so the same bits for any number of threads.
/// Error: 2 units roundoff of float. Throws invalid_argument for a NaN or an infinity, naming its index; the scores
/// are then as they were.
template <class Backend>
bool to_importance(const Backend& exec, std::span<float> scores) {
    bool inside = true;
    float top = 0;
    for (std::size_t i = 0; i < scores.size(); ++i) {
        detail::check(std::isfinite(scores[i]), "score of token ", i, " is ", scores[i], "; scores must be finite");
        inside = inside && scores[i] >= 0 && scores[i] <= 1;
        top = i == 0 || scores[i] > top ? scores[i] : top;
    }
    if (inside) {
        return false;
    }
    constexpr std::size_t block = 4096;
    const std::size_t blocks = (scores.size() + block - 1) / block;
    std::vector<double> sums(blocks);
    const auto part = [&](std::size_t b) {
        return scores.subspan(b * block, (std::min)(block, scores.size() - b * block));
    };
    for_each_task(exec, blocks, [&](std::size_t b, std::size_t) {
        double sum = 0;
        for (float& s : part(b)) {
            const double e = std::exp(static_cast<double>(s) - static_cast<double>(top));
            sum += e;
            s = static_cast<float>(e);
        }
        sums[b] = sum;
    });
    double total = 0;
    for (const double s : sums) {
        total += s;
    }
    for_each_task(exec, blocks, [&](std::size_t b, std::size_t) {
        for (float& s : part(b)) {
            s = static_cast<float>(static_cast<double>(s) / total);
        }
    });
    return true;
}

}  // namespace verkv::inline v0
