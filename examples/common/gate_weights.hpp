// Weights of trained scorers, read from a folder of .npy files: a folder for each layer.
//
// Matrices have a row for each output, as torch's Linear has; elements are <f2, <f4 or <f8.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "common/file_error.hpp"
#include "common/npy.hpp"
#include "verkv/score/kvzap.hpp"
#include "verkv/score/sink_gate.hpp"

namespace example {

/// An array of real numbers as floats.
struct float_array {
    std::vector<std::size_t> shape;
    std::vector<float> data;
};

/// Reads a .npy file of real numbers with a given number of axes.
/// Throws file_error as read_npy() does, and for integers or another number of axes.
[[nodiscard]] inline float_array read_floats(const std::filesystem::path& file, std::size_t axes) {
    npy_array array = read_npy(file);
    float_array out{array.shape, {}};
    if (array.shape.size() != axes) {
        throw file_error(file, "has shape " + shape_text(array.shape) + "; it takes " + std::to_string(axes) + " axes");
    }
    std::visit(
        [&]<class T>(std::vector<T>& elements) {
            if constexpr (std::is_same_v<T, float>) {
                out.data = std::move(elements);
            } else if constexpr (std::is_same_v<T, verkv::half>) {
                out.data.reserve(elements.size());
                for (const verkv::half x : elements) {
                    out.data.push_back(verkv::to_float(x));
                }
            } else if constexpr (std::is_same_v<T, double>) {
                out.data.reserve(elements.size());
                for (const double x : elements) {
                    out.data.push_back(static_cast<float>(x));
                }
            } else {
                throw file_error(file, "holds integers; weights are real numbers");
            }
        },
        array.elements);
    return out;
}

namespace detail {

// Whether an array has the shape that its neighbours say.
inline void check_shape(const std::filesystem::path& file, const float_array& a, std::vector<std::size_t> expected) {
    if (a.shape != expected) {
        throw file_error(file,
                         "has shape " + shape_text(a.shape) + "; the other files make it " + shape_text(expected));
    }
}

}  // namespace detail

/// Weights of one layer's Fast KVzip gate, with their memory:
///     query_projection.npy  [query_heads * gate_dim, model_dim]    torch: q_proj.weight
///     query_bias.npy        [query_heads * gate_dim]               q_proj.bias
///     key_projection.npy    [kv_heads * gate_dim, model_dim]       k_proj.weight
///     query_norm.npy        [gate_dim]                             q_norm.weight
///     key_norm.npy          [gate_dim]                             k_norm.weight
///     sink_keys.npy         [kv_heads, sinks, gate_dim]            k_base, without its axis of length 1
///     bias.npy              [query_heads]                          b, flat
class sink_gate_files {
public:
    /// Throws file_error for a file that is missing or cannot be read, or shapes that do not go together.
    explicit sink_gate_files(const std::filesystem::path& folder)
        : query_projection_(read_floats(folder / "query_projection.npy", 2)),
          query_bias_(read_floats(folder / "query_bias.npy", 1)),
          key_projection_(read_floats(folder / "key_projection.npy", 2)),
          query_norm_(read_floats(folder / "query_norm.npy", 1)),
          key_norm_(read_floats(folder / "key_norm.npy", 1)),
          sink_keys_(read_floats(folder / "sink_keys.npy", 3)),
          bias_(read_floats(folder / "bias.npy", 1)) {
        const std::size_t kv_heads = sink_keys_.shape[0];
        const std::size_t gate_dim = sink_keys_.shape[2];
        const std::size_t query_heads = bias_.shape[0];
        const std::size_t model_dim = key_projection_.shape[1];
        detail::check_shape(folder / "query_projection.npy", query_projection_, {query_heads * gate_dim, model_dim});
        detail::check_shape(folder / "query_bias.npy", query_bias_, {query_heads * gate_dim});
        detail::check_shape(folder / "key_projection.npy", key_projection_, {kv_heads * gate_dim, model_dim});
        detail::check_shape(folder / "query_norm.npy", query_norm_, {gate_dim});
        detail::check_shape(folder / "key_norm.npy", key_norm_, {gate_dim});
    }

    /// A view that is good while this object is where it is.
    [[nodiscard]] verkv::sink_gate_weights view() const {
        verkv::sink_gate_weights w;
        w.model_dim = key_projection_.shape[1];
        w.gate_dim = sink_keys_.shape[2];
        w.sinks = sink_keys_.shape[1];
        w.query_projection = query_projection_.data;
        w.query_bias = query_bias_.data;
        w.key_projection = key_projection_.data;
        w.query_norm = query_norm_.data;
        w.key_norm = key_norm_.data;
        w.sink_keys = sink_keys_.data;
        w.bias = bias_.data;
        return w;
    }

private:
    float_array query_projection_;
    float_array query_bias_;
    float_array key_projection_;
    float_array query_norm_;
    float_array key_norm_;
    float_array sink_keys_;
    float_array bias_;
};

/// Weights of one layer's KVzap model, with their memory:
///     hidden_weights.npy  [hidden_dim, model_dim]    torch: 0.weight; missing where the model is linear
///     hidden_bias.npy     [hidden_dim]               0.bias; likewise
///     output_weights.npy  [kv_heads, hidden_dim]     2.weight; of a linear model weight, [kv_heads, model_dim]
///     output_bias.npy     [kv_heads]                 2.bias; of a linear model bias
class kvzap_files {
public:
    /// Throws file_error for a file that is missing or cannot be read, or shapes that do not go together.
    explicit kvzap_files(const std::filesystem::path& folder)
        : output_weights_(read_floats(folder / "output_weights.npy", 2)),
          output_bias_(read_floats(folder / "output_bias.npy", 1)) {
        const std::filesystem::path weights = folder / "hidden_weights.npy";
        const std::filesystem::path bias = folder / "hidden_bias.npy";
        detail::check_shape(folder / "output_bias.npy", output_bias_, {output_weights_.shape[0]});
        if (std::filesystem::exists(weights) || std::filesystem::exists(bias)) {
            hidden_weights_ = read_floats(weights, 2);
            hidden_bias_ = read_floats(bias, 1);
            detail::check_shape(bias, hidden_bias_, {hidden_weights_.shape[0]});
            detail::check_shape(folder / "output_weights.npy", output_weights_,
                                {output_weights_.shape[0], hidden_weights_.shape[0]});
        }
    }

    /// A view that is good while this object is where it is.
    [[nodiscard]] verkv::kvzap_weights view(verkv::gelu activation = verkv::gelu::exact) const {
        const bool linear = hidden_weights_.shape.empty();
        verkv::kvzap_weights w;
        w.model_dim = linear ? output_weights_.shape[1] : hidden_weights_.shape[1];
        w.hidden_dim = linear ? 0 : hidden_weights_.shape[0];
        w.hidden_weights = hidden_weights_.data;
        w.hidden_bias = hidden_bias_.data;
        w.output_weights = output_weights_.data;
        w.output_bias = output_bias_.data;
        w.activation = activation;
        return w;
    }

private:
    float_array hidden_weights_;
    float_array hidden_bias_;
    float_array output_weights_;
    float_array output_bias_;
};

}  // namespace example
