// Statistical leverage of keys: how far a key lies outside what the others span.
#pragma once

#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "verkv/core/prompt.hpp"
#include "verkv/core/rope.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/score/detail/checks.hpp"
#include "verkv/score/detail/gaussian_projection.hpp"
#include "verkv/score/detail/plain_keys.hpp"

namespace verkv::inline v0 {

/// Approximate leverage scores of the keys before RoPE, the geometric half of Compactor (Chari and Van Durme 2025,
/// arXiv 2507.08143).
/// l_i = y_i (Y^T Y + jitter I)^-1 y_i^T, Y = (K - mean K) Phi, Phi [key_dim, sketch_dim] of N(0, 1/sketch_dim). l_i
/// lies in [0, 1] and their sum is at most sketch_dim: usable as importance as it is.
/// Needs no query. Keys are turned back at their positions by `rotation`; with no frequencies in it they are taken as
/// they are stored. Phi comes from Philox, keyed by seed and KV head, unless `projection` brings one.
/// Y^T Y + jitter I is factored by Cholesky, the jitter growing tenfold while that fails.
/// Time O(n d sketch_dim) and a sine and a cosine for each pair of each key, reads every key once; n sketch_dim doubles
/// and sketch_dim^2 doubles for every 512 tokens of memory. All in double, summed over fixed blocks, so the same bits
/// for any number of threads and any strides; relative error about the condition number of Y^T Y + jitter I times
/// 2^-53, and one rounding to float. A key that is not finite is left out of the sums: its own score is NaN, no other.
/// Throws invalid_argument for sketch_dim 0 or key_dim sketch_dim of 2^31 and more, a jitter that is not positive, a
/// projection of another size or that is not finite, or a rotation that does not fit the keys.
struct leverage_score {
    rope rotation = {};                      ///< of the keys; without frequencies they count as not rotated
    std::size_t sketch_dim = 48;             ///< channels after the projection
    std::uint64_t seed = 0;                  ///< of the projection
    double jitter = 1e-2;                    ///< first one tried
    std::span<const float> projection = {};  ///< [key_dim, sketch_dim], for all KV heads; empty: made from seed

    template <class Backend, class T>
    void score(const Backend& exec, const prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        detail::scoring::check_kv_head(p, kv_head, out);
        const std::size_t n = out.size();
        const std::size_t d = p.shape.key_dim;
        check_options(d);
        const detail::scoring::plain_keys<T> keys(p, kv_head, rotation);
        if (n == 0) {
            return;
        }
        const std::vector<double> phi = projection_of(kv_head, d);
        const Eigen::Map<const matrix> projection_matrix(phi.data(), at(d), at(sketch_dim));
        const std::size_t blocks = (n + block - 1) / block;
        const auto length = [&](std::size_t b) { return (std::min)(block, n - b * block); };
        matrix y(at(n), at(sketch_dim));
        const auto part = [&](std::size_t b) { return y.middleRows(at(b * block), at(length(b))); };
        std::vector<char> sound(n);
        std::vector<matrix> plain(workers(exec), matrix(at((std::min)(block, n)), at(d)));
        std::vector<matrix> sums(blocks, matrix(1, at(sketch_dim)));
        for_each_task(exec, blocks, [&](std::size_t b, std::size_t worker) {
            for (std::size_t i = 0; i < length(b); ++i) {
                const std::size_t token = b * block + i;
                double* to = plain[worker].row(at(i)).data();
                sound[token] = keys.take(token, to) ? 1 : 0;
            }
            part(b).noalias() = plain[worker].topRows(at(length(b))) * projection_matrix;
            sums[b] = part(b).colwise().sum();
        });

        // The mean of projected rows is the projection of the mean. Rows that are not sound are 0, and stay so.
        const auto members = static_cast<double>(std::count(sound.begin(), sound.end(), 1));
        const Eigen::RowVectorXd mean = total(sums) / (members > 0 ? members : 1.0);
        std::vector<matrix> grams(blocks, matrix(at(sketch_dim), at(sketch_dim)));
        for_each_task(exec, blocks, [&](std::size_t b, std::size_t) {
            for (std::size_t i = 0; i < length(b); ++i) {
                if (sound[b * block + i]) {
                    part(b).row(at(i)) -= mean;
                }
            }
            grams[b].noalias() = part(b).transpose() * part(b);
        });
        const Eigen::LLT<matrix> factor = factored(total(grams));
        std::vector<matrix> solved(workers(exec), matrix(at(sketch_dim), at((std::min)(block, n))));
        for_each_task(exec, blocks, [&](std::size_t b, std::size_t worker) {
            auto z = solved[worker].leftCols(at(length(b)));
            z = part(b).transpose();
            factor.matrixL().solveInPlace(z);
            for (std::size_t i = 0; i < length(b); ++i) {
                const double leverage = (std::min)(1.0, z.col(at(i)).squaredNorm());
                out[b * block + i] =
                    sound[b * block + i] ? static_cast<float>(leverage) : std::numeric_limits<float>::quiet_NaN();
            }
        });
    }

private:
    using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    static constexpr std::size_t block = 512;

    static Eigen::Index at(std::size_t i) { return static_cast<Eigen::Index>(i); }

    void check_options(std::size_t d) const {
        detail::check(sketch_dim > 0, "leverage_score needs a sketch_dim of at least 1");
        detail::check(std::isfinite(jitter) && jitter > 0, "leverage_score has jitter ", jitter,
                      "; it must be positive");
        detail::check(sketch_dim <= 0x7fffffff / d, "leverage_score has sketch_dim ", sketch_dim, " for keys of ", d,
                      " channels: the projection is too large");
        detail::check(projection.empty() || projection.size() == d * sketch_dim, "a projection of ", projection.size(),
                      " elements; keys of ", d, " channels and sketch_dim ", sketch_dim, " take ", d, " * ",
                      sketch_dim);
        for (std::size_t i = 0; i < projection.size(); ++i) {
            detail::check(std::isfinite(projection[i]), "element ", i, " of the projection is ", projection[i]);
        }
    }

    [[nodiscard]] std::vector<double> projection_of(std::size_t kv_head, std::size_t d) const {
        if (projection.empty()) {
            return detail::scoring::gaussian_projection(seed, kv_head, d, sketch_dim);
        }
        return {projection.begin(), projection.end()};
    }

    // In the order of the blocks.
    static matrix total(std::vector<matrix>& parts) {
        for (std::size_t b = 1; b < parts.size(); ++b) {
            parts[0] += parts[b];
        }
        return parts[0];
    }

    // Ends: everything is finite, and by the time the jitter is as large as the trace the sum is diagonally dominated.
    [[nodiscard]] Eigen::LLT<matrix> factored(const matrix& gram) const {
        Eigen::LLT<matrix> factor;
        double added = jitter;
        do {
            factor.compute(gram + added * matrix::Identity(gram.rows(), gram.cols()));
            added *= 10;
        } while (factor.info() != Eigen::Success);
        return factor;
    }
};

}  // namespace verkv::inline v0
