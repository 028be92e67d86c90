// Clusters of keys: what RetroInfer keeps of a context in fast memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "verkv/core/detail/product.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/score_rows.hpp"
#include "verkv/sample/budget.hpp"

namespace verkv::inline v0 {

/// How keys are clustered.
struct cluster_options {
    std::size_t tokens_per_cluster = 16;  ///< on average, > 0
    std::size_t segment_length = 8192;    ///< neighbouring tokens that are clustered among themselves, > 0
    std::size_t iterations = 10;          ///< assignments of tokens to clusters, > 0
};

/// The free tokens of a KV head in clusters of similar keys, each with its mean key and mean value (RetroInfer, Chen et
/// al. 2025, arXiv 2505.02922).
/// Keys less their mean are assigned to the centroid with the largest inner product (spherical k-means, from every
/// so manieth key), segment by segment, centroids being normalised in between; the last assignment is to any
/// cluster, whatever its segment, and leaves centroids as the plain means of their keys, which Jensen's inequality
/// needs. Clusters that end up empty are dropped, so there may be fewer than asked for.
class key_clusters {
public:
    /// Throws invalid_argument for an option of 0.
    explicit key_clusters(cluster_options options = {}) : options_(options) {
        detail::check(options.tokens_per_cluster > 0 && options.segment_length > 0 && options.iterations > 0,
                      "clusters of ", options.tokens_per_cluster, " tokens, segments of ", options.segment_length,
                      " and ", options.iterations, " iterations; all must be positive");
    }

    /// Clusters the tokens that are not fixed. keys [n, key_dim], values [n, value_dim], of any storage.
    /// O(iterations n clusters-a-segment key_dim + n clusters key_dim). Inner products in float, means in double. Ties
    /// go to the lower cluster; a key that is NaN goes to the first one and makes its centroid NaN. The same inputs
    /// give the same bits, for any number of threads. Throws invalid_argument for shapes that disagree, null pointers
    /// and overlapping rows; the clusters are then as they were.
    template <storage T>
    void fit(const cpu& exec, rows<T> keys, rows<T> values, windows fixed) {
        detail::check(keys.count == values.count, keys.count, " keys come with ", values.count, " values");
        detail::check(keys.count <= 0xffffffffu, keys.count, " tokens are more than an index can count");
        detail::check(keys.width > 0 && values.width > 0, "keys of ", keys.width, " and values of ", values.width,
                      " channels; both must have some");
        validate(keys, "keys");
        validate(values, "values");
        const std::size_t first = fixed.free_begin(keys.count);
        const std::size_t count = fixed.free_end(keys.count) - first;
        const rows<T> free_keys = keys.slice(first, count);
        const std::vector<double> mean = mean_of(free_keys);
        std::vector<float> centroids;  // of keys less their mean
        std::vector<std::uint32_t> cluster(count);
        for (std::size_t from = 0; from < count; from += options_.segment_length) {
            const std::size_t length = (std::min)(options_.segment_length, count - from);
            cluster_segment(exec, free_keys.slice(from, length), mean, std::span(cluster).subspan(from, length),
                            centroids);
        }
        assign(exec, free_keys, mean, centroids, cluster);
        finish(free_keys, values.slice(first, count), first, cluster, centroids.size() / keys.width);
    }

    /// Number of clusters.
    [[nodiscard]] std::size_t size() const noexcept { return count_.size(); }
    /// Mean key of each, [size(), key_dim].
    [[nodiscard]] rows<float> centroids() const { return view(key_, key_dim_); }
    /// Mean value of each, [size(), value_dim].
    [[nodiscard]] rows<float> mean_values() const { return view(value_, value_dim_); }
    /// Tokens of a cluster, ascending. c < size(), not checked.
    [[nodiscard]] std::span<const token_index> members(std::size_t c) const {
        return std::span(member_).subspan(start_[c], count_[c]);
    }

    /// Fast memory: centroids, mean values and sizes, as floats; the lists of tokens apart.
    [[nodiscard]] std::size_t bytes() const noexcept {
        return (key_.size() + value_.size() + count_.size()) * sizeof(float);
    }

private:
    static constexpr std::size_t block = 64;  // keys that are scored while they are in the cache

    static rows<float> view(const std::vector<float>& data, std::size_t width) {
        return {data.data(), static_cast<std::ptrdiff_t>(width), width == 0 ? 0 : data.size() / width, width, nullptr};
    }

    template <storage T>
    static std::vector<double> mean_of(const rows<T>& keys) {
        std::vector<double> mean(keys.width);
        for (std::size_t i = 0; i < keys.count; ++i) {
            for (std::size_t c = 0; c < keys.width; ++c) {
                mean[c] += static_cast<double>(to_float(keys[i][c])) / static_cast<double>(keys.count);
            }
        }
        return mean;
    }

    /// The centroid with the largest <k - mean, centroid> for each key.
    template <storage T>
    static void assign(const cpu& exec, const rows<T>& keys, const std::vector<double>& mean,
                       const std::vector<float>& centroids, std::span<std::uint32_t> cluster) {
        const rows<float> c = view(centroids, keys.width);
        std::vector<float> offset(c.count);
        for (std::size_t j = 0; j < c.count; ++j) {
            double dot = 0;
            for (std::size_t x = 0; x < keys.width; ++x) {
                dot += mean[x] * static_cast<double>(c[j][x]);
            }
            offset[j] = static_cast<float>(dot);
        }
        const std::size_t blocks = (keys.count + block - 1) / block;
        std::vector<float> memory(workers(exec) * c.count * block);
        for_each_task(exec, blocks, [&](std::size_t b, std::size_t worker) {
            const std::size_t from = b * block;
            const std::size_t length = (std::min)(block, keys.count - from);
            const matrix_view<float> dots{memory.data() + worker * c.count * block, c.count, length,
                                          static_cast<std::ptrdiff_t>(block)};
            detail::score_blocks(c, 1.0f, keys.slice(from, length), dots);
            for (std::size_t i = 0; i < length; ++i) {
                std::uint32_t best = 0;
                for (std::size_t j = 1; j < c.count; ++j) {
                    if (dots.row(j)[i] - offset[j] > dots.row(best)[i] - offset[best]) {
                        best = static_cast<std::uint32_t>(j);
                    }
                }
                cluster[from + i] = best;
            }
        });
    }

    /// Appends the normalised centroids of a segment.
    template <storage T>
    void cluster_segment(const cpu& exec, const rows<T>& keys, const std::vector<double>& mean,
                         std::span<std::uint32_t> cluster, std::vector<float>& centroids) const {
        const std::size_t width = keys.width;
        const std::size_t wanted = (keys.count + options_.tokens_per_cluster - 1) / options_.tokens_per_cluster;
        std::vector<float> own(wanted * width);
        for (std::size_t j = 0; j < wanted; ++j) {
            const T* key = keys[(2 * j + 1) * keys.count / (2 * wanted)];  // the middle of each part
            for (std::size_t c = 0; c < width; ++c) {
                own[j * width + c] = static_cast<float>(static_cast<double>(to_float(key[c])) - mean[c]);
            }
        }
        for (std::size_t round = 1; round < options_.iterations; ++round) {
            assign(exec, keys, mean, own, cluster);
            std::vector<double> sum(wanted * width);
            std::vector<bool> used(wanted);
            for (std::size_t i = 0; i < keys.count; ++i) {
                used[cluster[i]] = true;
                for (std::size_t c = 0; c < width; ++c) {
                    sum[cluster[i] * width + c] += static_cast<double>(to_float(keys[i][c])) - mean[c];
                }
            }
            for (std::size_t j = 0; j < wanted; ++j) {
                double square = 0;
                for (std::size_t c = 0; c < width; ++c) {
                    square += sum[j * width + c] * sum[j * width + c];
                }
                // One that lost all its keys stays where it was.
                for (std::size_t c = 0; c < width && used[j] && square > 0; ++c) {
                    own[j * width + c] = static_cast<float>(sum[j * width + c] / std::sqrt(square));
                }
            }
        }
        centroids.insert(centroids.end(), own.begin(), own.end());
    }

    /// Means, and lists of tokens, of the clusters that have any.
    template <storage T>
    void finish(const rows<T>& keys, const rows<T>& values, std::size_t first,
                const std::vector<std::uint32_t>& cluster, std::size_t clusters) {
        std::vector<std::size_t> count(clusters), place(clusters);
        for (const std::uint32_t c : cluster) {
            ++count[c];
        }
        std::vector<std::size_t> start, sizes;
        std::size_t next = 0;
        for (std::size_t c = 0; c < clusters; ++c) {
            place[c] = sizes.size();
            if (count[c] > 0) {
                start.push_back(next);
                sizes.push_back(count[c]);
                next += count[c];
            }
        }
        std::vector<double> key(sizes.size() * keys.width), value(sizes.size() * values.width);
        std::vector<token_index> member(cluster.size());
        std::vector<std::size_t> filled = start;
        for (std::size_t i = 0; i < cluster.size(); ++i) {
            const std::size_t c = place[cluster[i]];
            member[filled[c]++] = static_cast<token_index>(first + i);
            for (std::size_t x = 0; x < keys.width; ++x) {
                key[c * keys.width + x] += static_cast<double>(to_float(keys[i][x])) / static_cast<double>(sizes[c]);
            }
            for (std::size_t x = 0; x < values.width; ++x) {
                value[c * values.width + x] +=
                    static_cast<double>(to_float(values[i][x])) / static_cast<double>(sizes[c]);
            }
        }
        key_.assign(key.begin(), key.end());
        value_.assign(value.begin(), value.end());
        key_dim_ = keys.width;
        value_dim_ = values.width;
        member_ = std::move(member);
        start_ = std::move(start);
        count_ = std::move(sizes);
    }

    cluster_options options_;
    std::size_t key_dim_ = 0;
    std::size_t value_dim_ = 0;
    std::vector<float> key_, value_;
    std::vector<token_index> member_;
    std::vector<std::size_t> start_, count_;
};

}  // namespace verkv::inline v0
