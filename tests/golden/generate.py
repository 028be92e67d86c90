"""Writes golden scores of kvpress, the reference pipeline, for tests/unit/score_golden.cpp.

    python3 -m venv venv && venv/bin/pip install kvpress && venv/bin/python tests/golden/generate.py

Runs its SnapKV, key-norm and StreamingLLM presses on the CPU in float32, on random inputs of several geometries, through
a real attention module of the Llama family (random weights, rotary positions). A case is a folder with
    queries.npy    [window, query_heads, key_dim]   the last queries, rotated
    keys.npy       [tokens, kv_heads, key_dim]      rotated
    snapkv.npy     [kv_heads, tokens]               kvpress puts max + 1 on the window
    knorm.npy      [kv_heads, tokens]
    streaming.npy  [kv_heads, tokens]               1 on what is kept
and a line in cases.txt: name tokens query_heads kv_heads key_dim window pool sinks compression_ratio.
"""

import json
import pathlib
from importlib.metadata import version

import numpy as np
import torch
from kvpress import KnormPress, SnapKVPress, StreamingLLMPress
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, rotate_half

# name, tokens, query heads, KV heads, key width, window, pooling width, sinks, compression ratio, spread of the logits
CASES = [
    ("group1", 150, 2, 2, 16, 16, 5, 4, 0.5, 1.0),
    ("group3", 97, 6, 2, 24, 8, 5, 4, 0.75, 3.0),
    ("group5", 61, 5, 1, 64, 16, 7, 2, 0.6, 2.0),
    ("group4_peaked", 260, 4, 1, 32, 32, 3, 8, 0.9, 8.0),
    ("one_token_scored", 17, 2, 1, 16, 16, 5, 1, 0.5, 1.0),
    ("not_pooled", 80, 4, 2, 16, 10, 1, 4, 0.3, 4.0),
]


def rotate(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def write_case(folder, number, tokens, query_heads, kv_heads, width, window, pool, sinks, ratio, spread):
    torch.manual_seed(number)
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
    with torch.no_grad():
        for projection in (module.q_proj, module.k_proj):
            projection.weight.normal_(0, (spread / hidden) ** 0.5)
        position_ids = torch.arange(tokens)[None]
        cos, sin = LlamaRotaryEmbedding(config)(states, position_ids)
        queries = rotate(module.q_proj(states).view(tokens, query_heads, width).transpose(0, 1), cos[0], sin[0])
        keys = rotate(module.k_proj(states).view(tokens, kv_heads, width).transpose(0, 1), cos[0], sin[0])[None]
        values = torch.zeros_like(keys)
        extra = {"position_embeddings": (cos, sin)}
        presses = {
            "snapkv": SnapKVPress(compression_ratio=ratio, window_size=window, kernel_size=pool),
            "knorm": KnormPress(compression_ratio=ratio),
            "streaming": StreamingLLMPress(compression_ratio=ratio, n_sink=sinks),
        }
        folder.mkdir(exist_ok=True)
        for name, press in presses.items():
            scores = press.score(module, states, keys, values, None, extra)
            np.save(folder / f"{name}.npy", np.ascontiguousarray(scores[0].numpy(), dtype="<f4"))
        np.save(folder / "queries.npy", np.ascontiguousarray(queries.transpose(0, 1)[-window:].numpy(), dtype="<f4"))
        np.save(folder / "keys.npy", np.ascontiguousarray(keys[0].transpose(0, 1).numpy(), dtype="<f4"))


def main():
    here = pathlib.Path(__file__).parent
    lines = []
    for number, (name, *shape) in enumerate(CASES):
        write_case(here / name, number, *shape)
        lines.append(" ".join(str(x) for x in [name, *shape[:-1]]))
    (here / "cases.txt").write_text("\n".join(lines) + "\n")
    packages = ["kvpress", "torch", "transformers", "numpy"]
    (here / "versions.json").write_text(json.dumps({p: version(p) for p in packages}, indent=2) + "\n")


if __name__ == "__main__":
    main()
