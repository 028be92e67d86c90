// MagicPIG's tables: tokens are sampled by colliding with a query, and weighed by how likely that was.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>
#include <span>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/host_device.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/magic_pig_collisions.hpp"
#include "verkv/sketch/detail/checks.hpp"
#include "verkv/sketch/detail/hash_tables.hpp"

namespace verkv::inline v0 {

/// Added to u by the authors' program: weights end at 10^4, and tokens that are rarely sampled count for too little.
inline constexpr double magic_pig_floor = 1e-4;

/// Shape of MagicPIG tables; the defaults are the paper's.
struct magic_pig_options {
    std::size_t key_dim = 0;   ///< channels of a key, 1 ... 1024
    std::size_t planes = 10;   ///< hyperplanes of a table, K, 1 ... 16
    std::size_t tables = 150;  ///< L, at least `least`; tables ceil(planes / 4) at most 1024
    unsigned least = 2;        ///< tables that a sampled token collides in: 2 in the paper, 1 in other programs
    double floor = 0;          ///< added to u, >= 0; magic_pig_floor is what the authors' program has
    std::uint64_t seed = 0;    ///< of the planes; drawn without a look at keys or queries

    friend bool operator==(const magic_pig_options&, const magic_pig_options&) = default;
};

/// Checks the options of MagicPIG tables.
/// Throws invalid_argument for a key_dim outside 1 ... 1024, planes outside 1 ... 16, no tables or more than 1024 /
/// ceil(planes / 4), a `least` that is neither 1 nor 2 or more than the tables, and a floor that is negative or not
/// finite.
inline void validate(const magic_pig_options& o) {
    detail::validate_tables(o.key_dim, o.planes, o.tables, "MagicPIG tables");
    detail::check((o.least == 1 || o.least == 2) && o.least <= o.tables, "a token is sampled by ", o.least,
                  " collisions in ", o.tables, " tables; it takes 1 or 2, of as many tables at least");
    detail::check(o.floor >= 0 && std::isfinite(o.floor), "floor is ", o.floor, "; it must not be negative");
}

/// Probability that a random plane through 0 has two vectors on one side: p = 1 - angle / pi (Goemans and Williamson
/// 1995). A cosine outside [-1, 1] counts as the nearer end; NaN stays NaN. Double.
[[nodiscard]] inline double collision_probability(double cosine) noexcept {
    const double inside = cosine > 1 ? 1.0 : cosine < -1 ? -1.0 : cosine;
    return 1 - std::acos(inside) / std::numbers::pi;
}

/// u: probability that two vectors of this cosine share a bucket in `least` of the tables at least, over the planes.
/// With x = p^planes, p = collision_probability(): least 1, 1 - (1 - x)^L; least 2, 1 - (1 - x)^L - L x (1 - x)^(L - 1)
/// (MagicPIG, Chen et al. 2024, arXiv 2410.16179). Where L x <= 1 and x <= 1/2 the sum of the positive terms j = least
/// ... L of the binomial is taken instead: no difference of near-equal numbers; relative error about L 2^-52.
/// Preconditions (not checked): least is 1 or 2, tables >= least. NaN for a cosine that is NaN.
[[nodiscard]] inline double collision_inclusion(double cosine, std::size_t planes, std::size_t tables,
                                                unsigned least = 2) noexcept {
    const double x = std::pow(collision_probability(cosine), static_cast<double>(planes));
    const auto n = static_cast<double>(tables);
    if (!(n * x <= 1 && x <= 0.5)) {
        const double none = std::pow(1 - x, n);
        return 1 - none - (least == 2 ? n * x * std::pow(1 - x, n - 1) : 0.0);
    }
    double term = least == 2 ? n * (n - 1) / 2 * x * x * std::exp((n - 2) * std::log1p(-x))
                             : n * x * std::exp((n - 1) * std::log1p(-x));
    double sum = term;
    for (double j = static_cast<double>(least); j < n && term > sum * 0x1p-60; ++j) {
        term *= (n - j) / (j + 1) * x / (1 - x);
        sum += term;
    }
    return sum;
}

/// Tokens that were sampled for one query, and what attention adds to their logits.
struct collision_sample {
    std::vector<token_index> tokens;    ///< ascending
    std::vector<float> log_weight;      ///< -ln(u + floor) of each
    std::vector<std::uint16_t> counts;  ///< working memory: collisions of all tokens

    /// Makes magic_pig_tables::sample() allocation-free up to so many tokens.
    void reserve(std::size_t n) {
        tokens.reserve(n);
        log_weight.reserve(n);
        counts.reserve(n);
    }
};

/// The keys of one KV head by their buckets in L tables of K random hyperplanes: MagicPIG (Chen et al. 2024, arXiv
/// 2410.16179). No sketch of logits but an estimator: it samples the tokens whose key collides with a query in `least`
/// tables, and gives each the weight 1 / u, u its probability to be sampled.
///
/// Keys are hashed about their mean c (of the finite keys that fit() saw), queries as they are; u is that of the angle
/// between q and k - c.
/// - For a query, keys and a centre that do not depend on the seed, sum over sampled tokens of f_i / u_i has the mean
///   sum_i f_i, over the planes: D and the numerator are unbiased, their ratio is not. With floor f a token's share has
///   the mean u / (u + f): low, by half where u = f.
/// - One set of planes serves all tokens and all queries: tokens are not sampled independently, nor afresh for each
///   query. No tail bound of this library holds for such a sample.
/// - The paper attends to sinks, recent and generated tokens exactly: leave those out of these tables.
/// - The buckets are read one after the other, 2 tables bytes a token; the paper's index of them is not made here.
/// - Every way to cut the same tokens into append() calls gives the same bits. erase() leaves all others as they are.
/// - NaN or infinity in a key, or in the query, must stay visible: such a token, or every token, is sampled with u = 1.
/// Copies share the planes. One object may be read by many threads at once, or changed by one.
class magic_pig_tables {
public:
    /// Draws the planes. Throws as validate(options) does.
    explicit magic_pig_tables(const magic_pig_options& options)
        : options_(checked(options)), keys_(options.key_dim, options.planes, options.tables, options.seed) {}

    /// Takes the centre and forgets all tokens.
    /// The mean of the keys whose channels are all finite; 0 without any. keys [n, key_dim]. Sums in double, token
    /// after token, rounded to float; on the caller's thread. Throws invalid_argument for keys of another width.
    template <class Backend, class T>
    void fit(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        std::vector<double> total(options_.key_dim);
        double finite = 0;
        for (std::size_t i = 0; i < keys.count; ++i) {
            if (detail::finite_row(keys[i], keys.width)) {
                for (std::size_t c = 0; c < keys.width; ++c) {
                    total[c] += static_cast<double>(to_float(keys[i][c]));
                }
                ++finite;
            }
        }
        std::vector<float> centre(options_.key_dim);
        for (std::size_t c = 0; c < options_.key_dim && finite > 0; ++c) {
            centre[c] = static_cast<float>(total[c] / finite);
        }
        centre_ = std::move(centre);
        keys_.erase(0, size());
    }

    /// Adds tokens at the end, in any number of calls with the same result.
    /// keys [n, key_dim]. key_dim planes tables multiply-adds a token, in double, on the caller's thread. Allocates
    /// nothing within what reserve() asked for. Throws invalid_argument for keys of another width, invalid_state before
    /// fit().
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        detail::check<invalid_state>(!centre_.empty(), "append() of ", keys.count,
                                     " tokens to MagicPIG tables before fit() took their centre");
        keys_.append(keys, centre_);
    }

    /// Makes room for so many tokens in all, so that append() up to there allocates nothing.
    void reserve(std::size_t tokens) { keys_.make_room(tokens, false); }

    /// Forgets tokens first ... last-1; the others stay as they are, under their new indices. Moves what lies behind.
    /// Allocates nothing. Throws invalid_argument unless first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        detail::check_range(first, last, size());
        keys_.erase(first, last);
    }

    /// Writes in how many tables each token shares the query's bucket: counts [queries.count, size()].
    /// queries [any count, key_dim]. Projects each query on all planes in double, then reads the buckets for it,
    /// bytes() bytes. Allocates nothing; about 45 KiB of the stack. All tables for a key or a query that is not finite.
    /// Same numbers for any number of threads. Throws invalid_argument for queries of another width or counts of
    /// another shape.
    template <class Backend>
    void collisions(const Backend& exec, rows<float> queries, matrix_view<std::uint16_t> counts) const {
        detail::check_output(queries, counts, options_.key_dim, size(), "counts");
        magic_pig_collisions(exec, keys_.view(), queries, counts);
    }

    /// u of a token, from the exact cosine of the query and k - c or from an estimate of it: collision_inclusion().
    [[nodiscard]] double inclusion(double cosine) const noexcept {
        return collision_inclusion(cosine, options_.planes, options_.tables, options_.least);
    }

    /// Lists the tokens that a query samples, with -ln(u + floor) of their exact cosine: what attend() takes, as rows
    /// of these ids with these log-weights.
    /// keys [size(), key_dim], the ones appended: only rows of sampled tokens are read. query [key_dim]. Counts
    /// collisions on the backend, the rest on the caller's thread, in double. A key at the centre, and a query of
    /// zeros, have the cosine 0, as their buckets have it; u counts as 2^-1022 at least. Allocates nothing within what
    /// out.reserve(size()) asked for. Throws invalid_argument for keys or a query of another shape; out is then as it
    /// was.
    template <class Backend, class T>
    void sample(const Backend& exec, rows<T> keys, std::span<const float> query, collision_sample& out) const {
        detail::check_keys(keys, options_.key_dim);
        detail::check(keys.count == size(), "sample() got ", keys.count, " keys for tables of ", size(), " tokens");
        const rows<float> row{query.data(), static_cast<std::ptrdiff_t>(query.size()), 1, query.size(), nullptr};
        detail::check(query.size() == options_.key_dim, "the query has ", query.size(),
                      " channels; the tables are of keys of ", options_.key_dim);
        out.counts.resize(size());
        collisions(exec, row, matrix_view<std::uint16_t>{out.counts.data(), 1, size(), 0});
        out.tokens.clear();
        out.log_weight.clear();
        for (std::size_t i = 0; i < size(); ++i) {
            if (out.counts[i] >= options_.least) {
                out.tokens.push_back(static_cast<token_index>(i));
                out.log_weight.push_back(log_weight(keys[i], query));
            }
        }
    }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return keys_.size(); }

    /// Memory of the tables: two bytes a token and table, and a bit a token that says whether its key was finite. Not
    /// counted: the padding to 64 tokens; the planes, shared by all copies.
    [[nodiscard]] std::size_t bytes() const noexcept { return keys_.bytes(); }

    /// bytes() a token, of many: 300.1 for 150 tables, more than a bf16 key of 128 channels.
    [[nodiscard]] double bytes_per_token() const noexcept { return keys_.bytes_per_token(); }

    [[nodiscard]] const magic_pig_options& options() const noexcept { return options_; }

    /// c, [key_dim]; empty before fit().
    [[nodiscard]] std::span<const float> centre() const noexcept { return centre_; }

    /// The buckets as they lie in memory, for a backend's magic_pig_collisions(); valid until the tables change.
    [[nodiscard]] hash_buckets buckets() const noexcept { return keys_.view(); }

private:
    static const magic_pig_options& checked(const magic_pig_options& o) {
        validate(o);
        return o;
    }

    /// -ln(u + floor); 0 where key or query is not finite.
    template <class T>
    [[nodiscard]] float log_weight(const T* key, std::span<const float> query) const noexcept {
        double product = 0;
        double key_square = 0;
        double query_square = 0;
        for (std::size_t c = 0; c < query.size(); ++c) {
            const double k = static_cast<double>(to_float(key[c])) - static_cast<double>(centre_[c]);
            const auto q = static_cast<double>(query[c]);
            product += k * q;
            key_square += k * k;
            query_square += q * q;
        }
        if (!std::isfinite(key_square) || !std::isfinite(query_square)) {
            return 0;
        }
        const double length = std::sqrt(key_square) * std::sqrt(query_square);
        const double u = inclusion(length > 0 ? product / length : 0.0);
        return static_cast<float>(-std::log(larger(u, (std::numeric_limits<double>::min)()) + options_.floor));
    }

    magic_pig_options options_;
    detail::hash_tables keys_;
    std::vector<float> centre_;
};

}  // namespace verkv::inline v0
