"""Writes golden scores of kvpress for Compactor, Fast KVzip's gate and KVzap: tests/unit/score_golden_learned.cpp.

    python3 -m venv venv && venv/bin/pip install kvpress && venv/bin/python tests/golden/generate_learned.py

All on the CPU in float32, random inputs and random weights. Under learned/:
compactor_*/: keys.npy [tokens, kv_heads, key_dim] and queries.npy [tokens, query_heads, key_dim], rotated (plain RoPE,
    base 10,000, channels paired by halves), values.npy [tokens, kv_heads, key_dim]; projection.npy [kv_heads, key_dim,
    sketch_dim], the matrices that kvpress drew. Whole chunks only: kvpress lets the padding of a last, shorter chunk
    take part.
compactor_parts/: two KV heads, [kv_heads, tokens] each, before z-scores:
    leverage.npy
    attention.npy       pooled column sums, the logits divided by sqrt(key_dim) as in the paper
    attention_raw.npy   the same as kvpress has it: not divided
compactor_whole/: one KV head (kvpress takes z-scores over all heads together); compactor.npy [1, tokens] is
    CompactorPress.score(), protected tokens included.
sink_gate/, kvzap_mlp/, kvzap_linear/: weights as docs/scorers.md lays them out, hidden.npy [tokens, model_dim], and
    scores.npy [kv_heads, tokens] of the gate or of the model, nothing protected.
"""

import json
import math
import pathlib
from importlib.metadata import version

import numpy as np
import torch
from kvpress import CompactorPress
from kvpress.presses.fastkvzip_press import FastKVzipGate
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from kvpress.presses.leverage_press import LeverageScorePress
from kvpress.presses.non_causal_attention_press import NonCausalAttnPress
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, repeat_kv, rotate_half

SINK_SIZES = (8, 4)  # CompactorPress's own: first and last tokens that it protects


def save(folder, **arrays):
    folder.mkdir(parents=True, exist_ok=True)
    for name, x in arrays.items():
        np.save(folder / f"{name}.npy", np.ascontiguousarray(x.detach().numpy(), dtype="<f4"))


def attention_layer(tokens, query_heads, kv_heads, width):
    """A Llama layer, hidden states, and what it makes of them, [1, head, token, channel]; keys before RoPE too."""
    hidden = query_heads * width
    config = LlamaConfig(
        hidden_size=hidden,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        max_position_embeddings=4096,
    )
    module = LlamaAttention(config, layer_idx=0).eval()
    states = torch.randn(1, tokens, hidden)
    for projection in (module.q_proj, module.k_proj, module.v_proj):
        projection.weight.normal_(0, (2.0 / hidden) ** 0.5)
    cos, sin = LlamaRotaryEmbedding(config)(states, torch.arange(tokens)[None])

    def heads(projection, count):
        return projection(states).view(1, tokens, count, width).transpose(1, 2)

    def rotate(x):
        return x * cos + rotate_half(x) * sin

    plain_keys = heads(module.k_proj, kv_heads)
    rows = (rotate(heads(module.q_proj, query_heads)), rotate(plain_keys), heads(module.v_proj, kv_heads))
    return module, states, {"position_embeddings": (cos, sin)}, plain_keys, *rows


def save_rows(folder, queries, keys, values, projection):
    by_token = {"queries": queries, "keys": keys, "values": values}
    save(folder, projection=projection[0], **{name: x[0].transpose(0, 1) for name, x in by_token.items()})


def draw_projection(seed, kv_heads, width, sketch):
    """What compute_leverage_scores() draws right after this, from the same seed."""
    torch.manual_seed(seed)
    projection = torch.randn(1, kv_heads, width, sketch) * (1 / math.sqrt(sketch))
    torch.manual_seed(seed)
    return projection


def compactor_parts(folder):
    """Two KV heads of three query heads each: leverage and attention, each for itself."""
    tokens, query_heads, kv_heads, width, chunk, sketch = 192, 6, 2, 24, 64, 16
    torch.manual_seed(1)
    _, _, _, plain_keys, queries, keys, values = attention_layer(tokens, query_heads, kv_heads, width)
    projection = draw_projection(2, kv_heads, width, sketch)
    leverage = LeverageScorePress.compute_leverage_scores(plain_keys, sketch)
    save_rows(folder, queries, keys, values, projection)
    save(folder, leverage=leverage[0])
    for name, scale in (("attention", width**-0.5), ("attention_raw", 1.0)):
        groups = query_heads // kv_heads
        sums = NonCausalAttnPress.non_causal_chunked_attn(queries * scale, repeat_kv(keys, groups), chunk)
        scores = sums.view(1, kv_heads, groups, tokens).mean(dim=-2) * values.norm(dim=-1)
        save(folder, **{name: F.avg_pool1d(scores, kernel_size=3, padding=1, stride=1)[0]})


def compactor_whole(folder):
    """One KV head, so that kvpress's z-scores are those of a head: all of CompactorPress."""
    width, chunk, sketch = 32, 64, 48
    tokens = sum(SINK_SIZES) + 2 * chunk
    torch.manual_seed(3)
    module, states, extra, _, queries, keys, values = attention_layer(tokens, 3, 1, width)
    press = CompactorPress(chunk_size=chunk, sketch_dimension=sketch, blending=0.5)
    assert (press.sink_size_start, press.sink_size_end) == SINK_SIZES
    projection = draw_projection(4, 1, width, sketch)
    scores = press.score(module, states, keys, values, None, extra)
    save_rows(folder, queries, keys, values, projection)
    save(folder, compactor=scores[0])


def sink_gate(folder):
    torch.manual_seed(5)
    model_dim, dim, kv_heads, group, sinks = 48, 16, 2, 3, 16
    gate = FastKVzipGate(0, model_dim, kv_heads, group, torch.float32, output_dim=dim, sink=sinks)
    for parameter in gate.parameters():
        parameter.normal_(0, 1 / math.sqrt(model_dim) if parameter.shape[-1] == model_dim else 1)
    hidden = torch.randn(1, 100, model_dim)
    save(
        folder,
        hidden=hidden[0],
        scores=gate(hidden)[0],
        query_projection=gate.q_proj.weight,
        query_bias=gate.q_proj.bias,
        key_projection=gate.k_proj.weight,
        query_norm=gate.q_norm.weight,
        key_norm=gate.k_norm.weight,
        sink_keys=gate.k_base[:, 0],
        bias=gate.b.reshape(-1),
    )


def kvzap(folder, units):
    torch.manual_seed(6)
    model = KVzapModel(KVzapConfig(input_dim=40, output_dim=3, n_modules=1, hidden_dim=units)).eval()
    for parameter in model.parameters():
        parameter.normal_(0, 0.4)
    layer = model.layers[0]
    hidden = torch.randn(1, 100, 40)
    save(folder, hidden=hidden[0], scores=layer(hidden)[0].transpose(0, 1))
    last = layer
    if units:
        save(folder, hidden_weights=layer[0].weight, hidden_bias=layer[0].bias)
        last = layer[2]
    save(folder, output_weights=last.weight, output_bias=last.bias)


def main():
    here = pathlib.Path(__file__).parent / "learned"
    with torch.no_grad():
        compactor_parts(here / "compactor_parts")
        compactor_whole(here / "compactor_whole")
        sink_gate(here / "sink_gate")
        kvzap(here / "kvzap_mlp", 24)
        kvzap(here / "kvzap_linear", None)
    packages = ["kvpress", "torch", "transformers", "numpy"]
    (here / "versions.json").write_text(json.dumps({p: version(p) for p in packages}, indent=2) + "\n")


if __name__ == "__main__":
    main()
