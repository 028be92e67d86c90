// What llama.cpp's attention node tells: queries, cached rows, who sees which of them, and the engine's own answer.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace example {

/// A GGML_OP_FLASH_ATTN_EXT node that has just been computed. All that attention needs hangs on it: queries and keys
/// after RoPE (or whatever the model has instead), values, mask, scale. So nothing depends on the names that a model's
/// graph gives its nodes. Reads go through the backend interface: the tensors may lie on a device.
class attention_node {
public:
    explicit attention_node(ggml_tensor* node) : node_(node) {
        float parameters[3];
        std::memcpy(parameters, node->op_params, sizeof(parameters));
        scale_ = parameters[0];
        alibi_ = parameters[1];
        softcap_ = parameters[2];
    }

    static bool is(const ggml_tensor* t) { return t->op == GGML_OP_FLASH_ATTN_EXT; }

    [[nodiscard]] std::size_t key_dim() const { return static_cast<std::size_t>(keys()->ne[0]); }
    [[nodiscard]] std::size_t value_dim() const { return static_cast<std::size_t>(values()->ne[0]); }
    [[nodiscard]] std::size_t query_heads() const { return static_cast<std::size_t>(queries()->ne[2]); }
    [[nodiscard]] std::size_t kv_heads() const { return static_cast<std::size_t>(keys()->ne[2]); }
    [[nodiscard]] std::size_t cells() const { return static_cast<std::size_t>(keys()->ne[1]); }
    [[nodiscard]] std::size_t streams() const { return static_cast<std::size_t>(queries()->ne[3]); }
    [[nodiscard]] std::size_t tokens() const { return static_cast<std::size_t>(queries()->ne[1]) * streams(); }
    [[nodiscard]] float scale() const { return scale_; }

    /// Why these heads cannot be answered for the engine; empty where they can.
    [[nodiscard]] std::string unsupported() const {
        if (softcap_ != 0) {
            return "logits are capped (softcap)";
        }
        if (alibi_ != 0) {
            return "positions enter the logits (ALiBi)";
        }
        if (node_->src[4] != nullptr) {
            return "attention has sinks without rows";
        }
        if (mask() == nullptr || mask()->ne[2] != 1) {
            return "no mask tells which cells a token sees";
        }
        if (mask()->type != GGML_TYPE_F16) {
            return std::string("a mask of type ") + ggml_type_name(mask()->type);
        }
        if (kv_heads() == 0 || query_heads() % kv_heads() != 0 || values()->ne[2] != keys()->ne[2]) {
            return "query heads do not divide among KV heads";
        }
        if (!readable(keys()->type) || !readable(values()->type) || queries()->type != GGML_TYPE_F32) {
            return std::string("rows of type ") + ggml_type_name(keys()->type) + " and " +
                   ggml_type_name(values()->type);
        }
        if (!rows_in_order(keys()) || !rows_in_order(values())) {
            return "a row's channels are not contiguous";
        }
        return {};
    }

    /// Which cells the j-th token of the batch sees: a flag for each.
    void visible(std::size_t token, std::vector<unsigned char>& seen) {
        const ggml_tensor* m = mask();
        halves_.resize(cells());
        const auto [stream, row] = place(token);
        const std::size_t third = m->ne[3] == 1 ? 0 : stream;
        read(m, row * m->nb[1] + third * m->nb[3], halves_.data(), cells() * sizeof(ggml_fp16_t));
        seen.resize(cells());
        for (std::size_t c = 0; c < cells(); ++c) {
            seen[c] = (halves_[c] & 0x7fffu) == 0;  // 0, or -infinity
        }
    }

    /// Queries of a token, [query head, channel].
    void read_queries(std::size_t token, float* out) {
        const auto [stream, row] = place(token);
        const ggml_tensor* q = queries();
        for (std::size_t h = 0; h < query_heads(); ++h) {
            read(q, row * q->nb[1] + h * q->nb[2] + stream * q->nb[3], out + h * key_dim(), key_dim() * sizeof(float));
        }
    }

    /// Key and value of a cell as half, [KV head, channel] each. The token says which stream's cells.
    void read_cell(std::size_t token, std::size_t cell, std::uint16_t* key, std::uint16_t* value) {
        const std::size_t stream = place(token).stream;
        for (std::size_t h = 0; h < kv_heads(); ++h) {
            read_row(keys(), cell, h, stream, key + h * key_dim());
            read_row(values(), cell, h, stream, value + h * value_dim());
        }
    }

    /// The engine's own answer for a token, [query head, channel].
    void read_output(std::size_t token, float* out) const {
        ggml_backend_tensor_get(node_, out, output_offset(token), query_heads() * value_dim() * sizeof(float));
    }
    /// Puts another in its place: the rest of the graph goes on with it.
    void write_output(std::size_t token, const float* in) {
        ggml_backend_tensor_set(node_, in, output_offset(token), query_heads() * value_dim() * sizeof(float));
    }

    /// The tensor of the engine's cache that holds the keys: the same at every step, another one in every layer.
    [[nodiscard]] const ggml_tensor* key_store() const {
        const ggml_tensor* t = keys();
        while (t->view_src != nullptr) {
            t = t->view_src;
        }
        return t;
    }

private:
    struct spot {
        std::size_t stream, row;
    };
    [[nodiscard]] spot place(std::size_t token) const {
        const auto a_stream = static_cast<std::size_t>(queries()->ne[1]);
        return {token / a_stream, token % a_stream};
    }

    [[nodiscard]] const ggml_tensor* queries() const { return node_->src[0]; }
    [[nodiscard]] const ggml_tensor* keys() const { return node_->src[1]; }
    [[nodiscard]] const ggml_tensor* values() const { return node_->src[2]; }
    [[nodiscard]] const ggml_tensor* mask() const { return node_->src[3]; }

    static bool readable(ggml_type type) {
        return type == GGML_TYPE_F16 || type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
    }
    static bool rows_in_order(const ggml_tensor* t) { return t->nb[0] == ggml_type_size(t->type); }

    static void read(const ggml_tensor* t, std::size_t offset, void* out, std::size_t bytes) {
        ggml_backend_tensor_get(t, out, offset, bytes);
    }

    [[nodiscard]] std::size_t output_offset(std::size_t token) const {
        const auto [stream, row] = place(token);
        return row * node_->nb[2] + stream * node_->nb[3];
    }

    /// A row as half: as it is, or through float.
    void read_row(const ggml_tensor* t, std::size_t cell, std::size_t head, std::size_t stream, std::uint16_t* out) {
        const auto width = static_cast<std::size_t>(t->ne[0]);
        const std::size_t offset = cell * t->nb[1] + head * t->nb[2] + stream * t->nb[3];
        if (t->type == GGML_TYPE_F16) {
            read(t, offset, out, width * sizeof(ggml_fp16_t));
            return;
        }
        floats_.resize(width);
        if (t->type == GGML_TYPE_F32) {
            read(t, offset, floats_.data(), width * sizeof(float));
        } else {
            bytes_.resize(ggml_row_size(t->type, t->ne[0]));
            read(t, offset, bytes_.data(), bytes_.size());
            ggml_get_type_traits(t->type)->to_float(bytes_.data(), floats_.data(), t->ne[0]);
        }
        ggml_fp32_to_fp16_row(floats_.data(), out, t->ne[0]);
    }

    ggml_tensor* node_;
    float scale_ = 1, alibi_ = 0, softcap_ = 0;
    std::vector<ggml_fp16_t> halves_;
    std::vector<float> floats_;
    std::vector<unsigned char> bytes_;
};

}  // namespace example
