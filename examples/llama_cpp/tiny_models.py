#!/usr/bin/env python3
"""Writes models of a few thousand random weights as GGUF, one for each thing that models differ in: tiny_models.py FOLDER

Only what attention meets is of interest: the text that they generate is noise. Needs nothing but Python."""
import array
import pathlib
import random
import struct
import sys

BYTE_TOKENS = 3  # the first of them, behind <unk>, <s>, </s>
VOCABULARY = 3 + 256


def scalar(value):
    """Type and bytes of a value of GGUF's metadata."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        text = value.encode()
        return 8, struct.pack("<Q", len(text)) + text
    if value and isinstance(value[0], tuple):  # of signed numbers
        return 9, struct.pack("<IQ", 5, len(value)) + b"".join(struct.pack("<i", x) for (x,) in value)
    parts = [scalar(x) for x in value]
    return 9, struct.pack("<IQ", parts[0][0], len(parts)) + b"".join(p for _, p in parts)


def write_gguf(file, metadata, shapes):
    """Tensors are float32 with the given shapes (GGUF's order: the first dimension is adjacent); norms are 1, the rest is random."""
    draw = random.Random(1)
    out = [struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), len(metadata))]
    for key, value in metadata.items():
        kind, body = scalar(value)
        out.append(scalar(key)[1] + struct.pack("<I", kind) + body)
    at, data = 0, []
    for name, shape in shapes.items():
        count = 1
        for dimension in shape:
            count *= dimension
        out.append(scalar(name)[1] + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, at))
        scale = shape[0] ** -0.5 * 1.5
        if name.endswith("ssm_a"):
            numbers = [-1.0] * count  # a state decays
        elif "norm" in name and not name.endswith("bias"):
            numbers = [1.0] * count
        else:
            numbers = [draw.gauss(0, scale) for _ in range(count)]
        tensor = array.array("f", numbers)
        tensor = tensor.tobytes() + bytes(-4 * count % 32)
        at += len(tensor)
        data.append(tensor)
    head = b"".join(out)
    file.write_bytes(head + bytes(-len(head) % 32) + b"".join(data))


def tokenizer(kind):
    if kind == "none":
        return {"tokenizer.ggml.model": "no_vocab"}
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [(2,), (3,), (3,)] + [(6,)] * 256,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def model(arch, width, layers, feed, heads, kv_heads, vocabulary="llama", context=4096, **more):
    """Metadata that all have. `heads` and `kv_heads` are numbers or, where layers differ, lists."""
    found = {
        "general.architecture": arch,
        f"{arch}.context_length": context,
        f"{arch}.embedding_length": width,
        f"{arch}.block_count": layers,
        f"{arch}.feed_forward_length": feed,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.attention.layer_norm_epsilon": 1e-5,
        f"{arch}.vocab_size": VOCABULARY,
    }
    found.update({f"{arch}.{key}": value for key, value in more.items()})
    found.update(tokenizer(vocabulary))
    return found


def of_layers(layers, shapes):
    """{"blk.i.NAME": shape} for shapes(i)."""
    return {f"blk.{i}.{name}": shape for i in range(layers) for name, shape in shapes(i).items()}


def gated(width, feed):
    return {"ffn_norm.weight": [width], "ffn_gate.weight": [width, feed], "ffn_up.weight": [width, feed],
            "ffn_down.weight": [feed, width]}


def ends(width):
    return {"token_embd.weight": [width, VOCABULARY], "output_norm.weight": [width]}


def llama(width=48, layers=2, heads=6, kv_heads=2, dim=8, vocabulary="llama"):
    """The common case: heads of any even width."""
    return (model("llama", width, layers, 64, heads, kv_heads, vocabulary, **{
                "attention.key_length": dim, "attention.value_length": dim, "rope.dimension_count": dim}),
            ends(width) | of_layers(layers, lambda i: gated(width, 64) | {
                "attn_norm.weight": [width], "attn_q.weight": [width, heads * dim],
                "attn_k.weight": [width, kv_heads * dim], "attn_v.weight": [width, kv_heads * dim],
                "attn_output.weight": [heads * dim, width]}))


def openelm(heads=(4, 6, 12), kv_heads=(2, 3, 3), dim=16, width=48):
    """Heads and KV heads differ from layer to layer."""
    layers = len(heads)
    return (model("openelm", width, layers, [64] * layers, list(heads), list(kv_heads), **{
                "attention.key_length": dim, "attention.value_length": dim, "rope.dimension_count": dim}),
            ends(width) | of_layers(layers, lambda i: gated(width, 64) | {
                "attn_norm.weight": [width], "attn_qkv.weight": [width, (heads[i] + 2 * kv_heads[i]) * dim],
                "attn_q_norm.weight": [dim], "attn_k_norm.weight": [dim],
                "attn_output.weight": [heads[i] * dim, width]}))


def deci(heads=(4, 0, 4, 4), kv_heads=(1, 0, 0, 4), dim=16, width=64):
    """Layers without attention, and with a linear map instead."""
    layers = len(heads)

    def attention(i):
        if heads[i] == 0:
            return {}
        if kv_heads[i] == 0:
            return {"attn_norm.weight": [width], "attn_output.weight": [width, width]}
        return {"attn_norm.weight": [width], "attn_q.weight": [width, heads[i] * dim],
                "attn_k.weight": [width, kv_heads[i] * dim], "attn_v.weight": [width, kv_heads[i] * dim],
                "attn_output.weight": [heads[i] * dim, width]}

    return (model("deci", width, layers, [64] * layers, list(heads), list(kv_heads), **{
                "attention.key_length": dim, "attention.value_length": dim, "rope.dimension_count": dim}),
            ends(width) | of_layers(layers, lambda i: gated(width, 64) | attention(i)))


def with_biases(shapes):
    return shapes | {name.replace("weight", "bias"): shape[-1:] for name, shape in shapes.items()}


def gpt2(arch="gpt2", width=48, layers=2, heads=4, context=256):
    """No RoPE: positions are rows of a table (gpt2), or enter the logits (bloom)."""
    normed = ["output_norm"] + (["token_embd_norm"] if arch == "bloom" else [])
    table = {"position_embd.weight": [width, context]} if arch == "gpt2" else {}
    return (model(arch, width, layers, 64, heads, heads, context=context),
            {"token_embd.weight": [width, VOCABULARY]} | table |
            with_biases({f"{n}.weight": [width] for n in normed}) |
            of_layers(layers, lambda i: with_biases({
                "attn_norm.weight": [width], "attn_qkv.weight": [width, 3 * width],
                "attn_output.weight": [width, width], "ffn_norm.weight": [width], "ffn_up.weight": [width, 64],
                "ffn_down.weight": [64, width]})))


def deepseek2(width=64, layers=2, heads=4, latent=32, rope=16, nope=16, value=16, rank=32):
    """MLA: one latent of which keys and values are made, keys wider than values."""
    key = rope + nope
    return (model("deepseek2", width, layers, 64, heads, 1, **{
                "attention.key_length": latent + rope, "attention.value_length": latent,
                "attention.key_length_mla": key, "attention.value_length_mla": value,
                "attention.q_lora_rank": rank, "attention.kv_lora_rank": latent, "rope.dimension_count": rope,
                "leading_dense_block_count": layers, "expert_shared_count": 0, "expert_feed_forward_length": 64,
                "expert_count": 2, "expert_used_count": 1}),
            ends(width) | of_layers(layers, lambda i: gated(width, 64) | {
                "attn_norm.weight": [width], "attn_q_a_norm.weight": [rank], "attn_kv_a_norm.weight": [latent],
                "attn_q_a.weight": [width, rank], "attn_q_b.weight": [rank, heads * key],
                "attn_kv_a_mqa.weight": [width, latent + rope], "attn_k_b.weight": [nope, latent, heads],
                "attn_v_b.weight": [latent, value, heads], "attn_output.weight": [heads * value, width]}))


def gemma2(width=64, layers=2, heads=4, kv_heads=2, dim=16, window=32):
    """Sliding windows in every other layer, and logits that are capped."""
    return (model("gemma2", width, layers, 64, heads, kv_heads, **{
                "attention.key_length": dim, "attention.value_length": dim, "attention.sliding_window": window,
                "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
            ends(width) | of_layers(layers, lambda i: gated(width, 64) | {
                "attn_norm.weight": [width], "attn_q.weight": [width, heads * dim],
                "attn_k.weight": [width, kv_heads * dim], "attn_v.weight": [width, kv_heads * dim],
                "attn_output.weight": [heads * dim, width], "post_attention_norm.weight": [width],
                "post_ffw_norm.weight": [width]}))


def openai_moe(width=64, layers=2, heads=4, kv_heads=2, dim=16, window=32, experts=2):
    """Attention sinks that have no row."""
    return (model("gpt-oss", width, layers, 64, heads, kv_heads, **{
                "attention.key_length": dim, "attention.value_length": dim, "attention.sliding_window": window,
                "rope.dimension_count": dim, "expert_count": experts, "expert_used_count": 1,
                "expert_feed_forward_length": 64}),
            ends(width) | {"output.weight": [width, VOCABULARY]} | of_layers(layers, lambda i: {
                "attn_norm.weight": [width], "attn_q.weight": [width, heads * dim],
                "attn_k.weight": [width, kv_heads * dim], "attn_v.weight": [width, kv_heads * dim],
                "attn_output.weight": [heads * dim, width], "attn_output.bias": [width],
                "post_attention_norm.weight": [width], "attn_sinks.weight": [heads],
                "ffn_gate_inp.weight": [width, experts], "ffn_gate_inp.bias": [experts],
                "ffn_gate_exps.weight": [width, 64, experts], "ffn_gate_exps.bias": [64, experts],
                "ffn_up_exps.weight": [width, 64, experts], "ffn_up_exps.bias": [64, experts],
                "ffn_down_exps.weight": [64, width, experts], "ffn_down_exps.bias": [width, experts]}))


def bert(width=48, layers=2, heads=4, context=256):
    """Every token sees every other: no decoder."""
    metadata = model("bert", width, layers, 64, heads, heads, context=context, **{"attention.causal": False})
    metadata["tokenizer.ggml.token_type_count"] = 1
    return (metadata,
            {"token_embd.weight": [width, VOCABULARY], "position_embd.weight": [width, context],
             "token_types.weight": [width, 1]} | with_biases({"token_embd_norm.weight": [width]}) |
            of_layers(layers, lambda i: with_biases({
                "attn_q.weight": [width, width], "attn_k.weight": [width, width], "attn_v.weight": [width, width],
                "attn_output.weight": [width, width], "attn_output_norm.weight": [width],
                "ffn_up.weight": [width, 64], "ffn_down.weight": [64, width], "layer_output_norm.weight": [width]})))


def mamba(width=32, layers=2, conv=4, state=8, rank=4):
    """No attention at all."""
    inner = 2 * width
    return (model("mamba", width, layers, 0, 0, 0, **{
                "ssm.conv_kernel": conv, "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": rank}),
            ends(width) | of_layers(layers, lambda i: {
                "attn_norm.weight": [width], "ssm_in.weight": [width, 2 * inner],
                "ssm_conv1d.weight": [conv, inner], "ssm_conv1d.bias": [inner],
                "ssm_x.weight": [inner, rank + 2 * state], "ssm_dt.weight": [rank, inner], "ssm_dt.bias": [inner],
                "ssm_a": [state, inner], "ssm_d": [inner], "ssm_out.weight": [inner, width]}))


MODELS = {
    "plain": llama(),
    "wide": llama(heads=5, kv_heads=1, dim=80),
    "narrow": llama(heads=4, kv_heads=4, dim=2),
    "layers_differ": openelm(),
    "no_attention_in_layers": deci(),
    "no_rope": gpt2(),
    "alibi": gpt2("bloom"),
    "latent": deepseek2(),
    "capped": gemma2(),
    "sinks": openai_moe(),
    "encoder": bert(),
    "recurrent": mamba(),
    "no_vocabulary": llama(vocabulary="none"),
}

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, (metadata, shapes) in MODELS.items():
        write_gguf(folder / f"{name}.gguf", metadata, shapes)
