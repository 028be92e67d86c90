// SOCKET's sketch: keys in the buckets of many small hash tables, a query spread over all of them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "verkv/core/error.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/socket_estimate.hpp"
#include "verkv/sketch/detail/checks.hpp"
#include "verkv/sketch/detail/hash_tables.hpp"
#include "verkv/sketch/logit_map.hpp"

namespace verkv::inline v0 {

/// Shape of a SOCKET sketch.
struct socket_options {
    std::size_t key_dim = 0;   ///< channels of a key, 1 ... 1024
    std::size_t planes = 10;   ///< hyperplanes of a table, P, 1 ... 16: a bucket is 16 bits wide
    std::size_t tables = 60;   ///< L, at least 1; tables ceil(planes / 4) at most 1024
    float temperature = 0.3f;  ///< tau > 0: the lower, the nearer to a hard hash of the query
    std::uint64_t seed = 0;    ///< of the planes; drawn without a look at keys or queries

    friend bool operator==(const socket_options&, const socket_options&) = default;
};

/// Checks the options of a SOCKET sketch.
/// Throws invalid_argument for a key_dim outside 1 ... 1024, planes outside 1 ... 16, no tables or more than 1024 /
/// ceil(planes / 4), and a temperature that is not positive and finite.
inline void validate(const socket_options& o) {
    detail::validate_tables(o.key_dim, o.planes, o.tables, "a SOCKET sketch");
    detail::check(o.temperature > 0 && std::isfinite(o.temperature), "temperature is ", o.temperature,
                  "; it must be a positive number");
}

/// The keys of one KV head by their buckets in L tables of P random hyperplanes: SOCKET, the soft collision kernel
/// estimator (2026).
///
/// w_lp standard normal. Bit p of a key's bucket in table l is 1 where <w_lp, k> >= 0. A query is hashed softly: u_lp =
/// tanh(<w_lp, q>) / (sqrt(key_dim) tau), and the probability of a bucket with signs c is its share of a softmax of
/// sum_p u_lp c_p over all 2^P buckets. That softmax factorises, prob_l(c) = prod_p 1 / (1 + e^(-2 u_lp c_p)): no table
/// of 2^P entries is made. Collision mass M = (2^P / L) sum_l prob_l(bucket of the key), 1 for a query that says
/// nothing.
/// - The paper ranks tokens by ||v|| M. The length of the value is no property of a key: it is left out here, multiply
///   the weights by it where you rank.
/// - A softmax of ln M has M for its weights, so ln M is the rank. It is no logit, and does not know how long the key
///   is: the estimate is scale (intercept + slope ln M), until calibrate() or set_map() scale times the rank itself,
///   fit for a top-k and for nothing else. ln M is cut off at -87.3.
/// - Every way to cut the same tokens into append() calls gives the same bits. erase() leaves all others as they are.
/// - NaN or infinity in a key makes that token's estimate NaN, of no other one.
/// Copies share the planes. One object may be read by many threads at once, or changed by one.
class socket_sketch {
public:
    /// Draws the planes. Throws as validate(options) does.
    explicit socket_sketch(const socket_options& options)
        : options_(checked(options)), keys_(options.key_dim, options.planes, options.tables, options.seed) {}

    /// Forgets all tokens; the keys teach it nothing, and the map stays. Throws invalid_argument for keys of another
    /// width.
    template <class Backend, class T>
    void fit(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        keys_.erase(0, size());
    }

    /// Adds tokens at the end, in any number of calls with the same result.
    /// keys [n, key_dim]. key_dim planes tables multiply-adds a token, in double, on the caller's thread. Allocates
    /// nothing within what reserve() asked for. Throws invalid_argument for keys of another width.
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options_.key_dim);
        keys_.append(keys, {});
    }

    /// Makes room for so many tokens in all, so that append() up to there allocates nothing.
    void reserve(std::size_t tokens) { keys_.make_room(tokens, false); }

    /// Forgets tokens first ... last-1; the estimates of the others keep their bits, under their new indices. Moves
    /// what lies behind. Allocates nothing. Throws invalid_argument unless first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        detail::check_range(first, last, size());
        keys_.erase(first, last);
    }

    /// Fits the map to keys and queries, a few hundred of each, see fit_logit_map(). The tokens held stay.
    template <class Backend, class T>
    void calibrate(const Backend& exec, rows<T> keys, rows<float> queries) {
        map_ = fit_logit_map(exec, *this, keys, queries);
    }

    /// Sets the map. Throws invalid_argument unless both numbers are finite.
    void set_map(const logit_map& m) {
        validate(m);
        map_ = m;
    }

    [[nodiscard]] const logit_map& map() const noexcept { return map_; }

    /// Writes scale (intercept + slope ln M) of each token: logits [queries.count, size()].
    /// queries [any count, key_dim]; scale of any sign. Projects each query on all planes in double, then reads the
    /// buckets for it, bytes() bytes: once for each query. Allocates nothing; about 110 KiB of the stack. Float
    /// products of ceil(planes / 4) factors and sums of tables of them, all positive: M is off by (tables + 8) 2^-24 of
    /// itself at most, ln M by as much and two units in its last place. Same bits for any chunking and any number of
    /// threads. Throws invalid_argument for queries of another width or logits of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits) const {
        detail::check_output(queries, logits, options_.key_dim, size(), "logits");
        socket_estimate(exec, codes(), queries, scale, logits);
    }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return keys_.size(); }

    /// Memory that stands in for the keys: two bytes a token and table, and a bit a token that says whether its key was
    /// finite. Not counted: the padding to 64 tokens; the planes, shared by all copies.
    [[nodiscard]] std::size_t bytes() const noexcept { return keys_.bytes(); }

    /// bytes() a token, of many: 120.1 for 60 tables; 47 % of a bf16 cache with key_dim 128.
    [[nodiscard]] double bytes_per_token() const noexcept { return keys_.bytes_per_token(); }

    [[nodiscard]] const socket_options& options() const noexcept { return options_; }

    /// The buckets as they lie in memory, for a backend's socket_estimate(); valid until the sketch changes.
    [[nodiscard]] socket_codes codes() const noexcept {
        const double width = std::sqrt(static_cast<double>(options_.key_dim));
        return {keys_.view(), 1 / (width * static_cast<double>(options_.temperature)), map_.intercept, map_.slope};
    }

private:
    static const socket_options& checked(const socket_options& o) {
        validate(o);
        return o;
    }

    socket_options options_;
    detail::hash_tables keys_;
    logit_map map_;
};

}  // namespace verkv::inline v0
