// HashAttention's sketch: 32 learned bits a token.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "verkv/core/detail/floats.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/hash_attention_estimate.hpp"
#include "verkv/sketch/detail/checks.hpp"
#include "verkv/sketch/detail/token_marks.hpp"
#include "verkv/sketch/logit_map.hpp"

namespace verkv::inline v0 {

/// A linear layer y = W x + bias.
struct hash_layer {
    std::size_t in = 0;
    std::size_t out = 0;
    std::vector<float> weight;  ///< W, [out][in], as a torch.nn.Linear has it
    std::vector<float> bias;    ///< [out]

    friend bool operator==(const hash_layer&, const hash_layer&) = default;
};

/// A multi-layer perceptron: linear layers with SiLU, x / (1 + e^-x), between them and nothing after the last.
struct hash_mlp {
    std::vector<hash_layer> layers;  ///< from the input on; the paper has three, 128 wide inside

    friend bool operator==(const hash_mlp&, const hash_mlp&) = default;
};

/// What makes a HashAttention sketch: the two learned networks of one KV head. Training them is not done here.
struct hash_attention_options {
    std::size_t key_dim = 0;  ///< channels of a key and of a query, 1 ... 1024
    hash_mlp key_mlp;         ///< from keys as they are cached (rotated) to code outputs, 1 ... 32 of them
    hash_mlp query_mlp;       ///< from rotated queries to as many outputs

    friend bool operator==(const hash_attention_options&, const hash_attention_options&) = default;
};

namespace detail {

inline void validate_mlp(const hash_mlp& mlp, std::size_t key_dim, const char* what) {
    check(!mlp.layers.empty(), what, " has no layers");
    std::size_t width = key_dim;
    for (std::size_t l = 0; l < mlp.layers.size(); ++l) {
        const hash_layer& layer = mlp.layers[l];
        check(layer.in == width, what, ": layer ", l, " takes ", layer.in, " inputs; ", width, " come in");
        check(layer.out >= 1 && layer.out <= hash_attention_codes::largest_width, what, ": layer ", l, " has ",
              layer.out, " outputs; it may have 1 to ", hash_attention_codes::largest_width);
        check(layer.weight.size() == layer.in * layer.out && layer.bias.size() == layer.out, what, ": layer ", l,
              " has ", layer.weight.size(), " weights and ", layer.bias.size(), " biases; [", layer.out, ", ", layer.in,
              "] take ", layer.in * layer.out, " and ", layer.out);
        check(finite_row(layer.weight.data(), layer.weight.size()) && finite_row(layer.bias.data(), layer.out), what,
              ": layer ", l, " has a weight or a bias that is not finite");
        width = layer.out;
    }
    check(width <= 32, what, " has ", width, " outputs; a code has 1 to 32 bits");
}

}  // namespace detail

/// Checks the options of a HashAttention sketch.
/// Throws invalid_argument for a key_dim outside 1 ... 1024; a network without layers, with layers that do not fit
/// together or are wider than 1024, with numbers missing or not finite, or with more than 32 outputs; two networks with
/// different numbers of outputs.
inline void validate(const hash_attention_options& o) {
    detail::check(o.key_dim >= 1 && o.key_dim <= hash_attention_codes::largest_width,
                  "a HashAttention sketch of keys of ", o.key_dim, " channels; it takes 1 to ",
                  hash_attention_codes::largest_width);
    detail::validate_mlp(o.key_mlp, o.key_dim, "key_mlp");
    detail::validate_mlp(o.query_mlp, o.key_dim, "query_mlp");
    detail::check(o.key_mlp.layers.back().out == o.query_mlp.layers.back().out, "key_mlp has ",
                  o.key_mlp.layers.back().out, " outputs, query_mlp ", o.query_mlp.layers.back().out);
}

/// The keys of one KV head in a learned code each: HashAttention (Desai et al. 2024, arXiv 2412.14468).
///
/// Bit j of a key's code is 1 where output j of key_mlp is >= 0 (so sign(0) = +1), else 0; a query's likewise, by
/// query_mlp. agreement = the dot product of the codes as signs = bits - 2 Hamming distance, in -bits ... bits.
/// - The networks are trained to rank: agreement is no logit. The estimate is scale (intercept + slope * agreement);
///   until calibrate() or set_map() that is scale times the rank itself, fit for a top-k and for nothing else. No line
///   can be fitted when keys arrive: it takes queries.
/// - A calibrated estimate still has 33 values at most, whatever the length of query and key.
/// - Every way to cut the same tokens into append() calls gives the same bits. erase() leaves all others as they are.
/// - NaN or infinity in a key makes that token's estimate NaN, of no other one.
/// Copies share the networks. One object may be read by many threads at once, or changed by one.
class hash_attention_sketch {
public:
    /// Takes the networks. Throws as validate(options) does.
    explicit hash_attention_sketch(hash_attention_options options) {
        validate(options);
        shared_ = std::make_shared<const networks>(std::move(options));
    }

    /// Forgets all tokens; the keys teach it nothing, and the map stays. Throws invalid_argument for keys of another
    /// width.
    template <class Backend, class T>
    void fit(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options().key_dim);
        erase(0, size());
    }

    /// Adds tokens at the end, in any number of calls with the same result.
    /// keys [n, key_dim]. Runs key_mlp on each: 37 thousand multiply-adds for the paper's shape, in double, on the
    /// caller's thread. Allocates nothing within what reserve() asked for. Throws invalid_argument for keys of another
    /// width.
    template <class Backend, class T>
    void append(const Backend&, rows<T> keys) {
        detail::check_keys(keys, options().key_dim);
        make_room(size() + keys.count, true);
        for (std::size_t i = 0; i < keys.count; ++i) {
            double row[hash_attention_codes::largest_width];
            for (std::size_t c = 0; c < keys.width; ++c) {
                row[c] = static_cast<double>(to_float(keys[i][c]));
            }
            bool known = false;
            const std::uint32_t code =
                detail::hash_code(shared_->key.views.data(), shared_->key.views.size(), row, known);
            codes_.push_back(code);
            marks_.push_back(!known || !detail::finite_row(keys[i], keys.width));
        }
    }

    /// Makes room for so many tokens in all, so that append() up to there allocates nothing.
    void reserve(std::size_t tokens) { make_room(tokens, false); }

    /// Forgets tokens first ... last-1; the estimates of the others keep their bits, under their new indices. Moves
    /// what lies behind. Allocates nothing. Throws invalid_argument unless first <= last <= size().
    void erase(std::size_t first, std::size_t last) {
        detail::check_range(first, last, size());
        codes_.erase(codes_.begin() + static_cast<std::ptrdiff_t>(first),
                     codes_.begin() + static_cast<std::ptrdiff_t>(last));
        marks_.erase(first, last);
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

    /// Writes scale (intercept + slope * agreement) of each token: logits [queries.count, size()].
    /// queries [any count, key_dim]; scale of any sign. Runs query_mlp on each query, reads the codes once for each,
    /// bytes() bytes, and writes the logits. Allocates nothing; about 24 KiB of the stack. Four roundings to float.
    /// Same bits for any chunking and any number of threads. Throws invalid_argument for queries of another width or
    /// logits of another shape.
    template <class Backend>
    void estimate(const Backend& exec, rows<float> queries, float scale, matrix_view<float> logits) const {
        detail::check_output(queries, logits, options().key_dim, size(), "logits");
        hash_attention_estimate(exec, codes(), queries, scale, logits);
    }

    /// Tokens held.
    [[nodiscard]] std::size_t size() const noexcept { return codes_.size(); }

    /// Memory that stands in for the keys: a word a token, and a bit that says whether its key was finite. Not counted:
    /// the networks, shared by all copies.
    [[nodiscard]] std::size_t bytes() const noexcept { return codes_.size() * sizeof(std::uint32_t) + marks_.bytes(); }

    /// bytes() a token, of many: 4.125; 1.6 % of a bf16 cache with key_dim 128.
    [[nodiscard]] double bytes_per_token() const noexcept { return sizeof(std::uint32_t) + 0.125; }

    [[nodiscard]] const hash_attention_options& options() const noexcept { return shared_->options; }

    /// The codes as they lie in memory, for a backend's hash_attention_estimate(); valid until the sketch changes.
    [[nodiscard]] hash_attention_codes codes() const noexcept {
        hash_attention_codes s;
        s.query_layers = shared_->query.views.data();
        s.layers = shared_->query.views.size();
        s.codes = codes_.data();
        s.marks = marks_.words();
        s.tokens = size();
        s.bits = static_cast<unsigned>(options().key_mlp.layers.back().out);
        s.intercept = map_.intercept;
        s.slope = map_.slope;
        return s;
    }

private:
    /// A network as hash_code() takes it.
    struct network {
        explicit network(const hash_mlp& mlp) {
            weights.reserve(mlp.layers.size());
            for (const hash_layer& layer : mlp.layers) {
                const std::size_t padded = (layer.out + 15) / 16 * 16;
                std::vector<float>& w = weights.emplace_back(layer.in * padded);
                for (std::size_t i = 0; i < layer.out; ++i) {
                    for (std::size_t j = 0; j < layer.in; ++j) {
                        w[j * padded + i] = layer.weight[i * layer.in + j];
                    }
                }
                views.push_back({w.data(), layer.bias.data(), layer.in, layer.out, padded});
            }
        }
        std::vector<std::vector<float>> weights;
        std::vector<hash_layer_view> views;
    };

    /// Never copied nor moved: views point into it.
    struct networks {
        explicit networks(hash_attention_options o)
            : options(std::move(o)), key(options.key_mlp), query(options.query_mlp) {}
        hash_attention_options options;
        network key;
        network query;
    };

    void make_room(std::size_t tokens, bool geometric) {
        detail::make_room(codes_, tokens, geometric);
        marks_.make_room(tokens, geometric);
    }

    std::shared_ptr<const networks> shared_;
    std::vector<std::uint32_t> codes_;
    detail::token_marks marks_;
    logit_map map_;
};

}  // namespace verkv::inline v0
