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

Scorers that look at all queries, a folder full_* each with queries of all positions, keys and values [token, head, width],
and observed.npy, tova.npy, expected.npy, expected_mean.npy [kv_heads, tokens]; a line in full.txt: name tokens
query_heads kv_heads key_dim sinks.

KVzip, driven through a small random Llama: a folder kvzip_* for each layer with keys and values, the second pass's
pass_queries, pass_keys and hidden_norms, output_weights [query_heads * width, hidden], scores and kept marks of both
variants [kv_heads, tokens]; kvzip.txt has: tokens query_heads kv_heads width hidden sinks compression_ratio, then a line
for each chunk: first_token tokens first_query queries.

Budgets: given.npy [heads, tokens] are scores, budgets.txt has what kvpress makes of them, a line each:
    adakv ratio alpha counts...                 rows of each head
    pyramid layers tokens ratio window beta counts...   rows of each layer
"""

import json
import pathlib
from importlib.metadata import version

import numpy as np
import torch
from kvpress import (
    AdaKVPress,
    ExpectedAttentionPress,
    KnormPress,
    KVzipPress,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.presses.scorer_press import ScorerPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
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

# name, tokens, query heads, KV heads, key width, sinks, spread of the logits
FULL_CASES = [
    ("full_group1", 70, 3, 3, 16, 4, 1.0),
    ("full_group3", 97, 6, 2, 24, 4, 4.0),
    ("full_group4", 150, 4, 1, 32, 2, 9.0),
]
KVZIP = {"tokens": 90, "sinks": 4, "chunk": 40, "ratio": 0.6}

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


def write_full_case(folder, number, tokens, query_heads, kv_heads, width, sinks, spread):
    torch.manual_seed(100 + number)
    hidden = query_heads * width
    config = LlamaConfig(
        hidden_size=hidden,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        max_position_embeddings=4096,
    )
    module = LlamaAttention(config, layer_idx=0).eval()
    module.rotary_emb = LlamaRotaryEmbedding(config)
    with torch.no_grad():
        for projection in (module.q_proj, module.k_proj):
            projection.weight.normal_(0, (spread / hidden) ** 0.5)
        module.v_proj.weight.normal_(0, 1 / hidden**0.5)
        # A mean that is not 0, as hidden states have.
        states = torch.randn(1, tokens, hidden) + 0.5 * torch.randn(hidden)
        cos, sin = module.rotary_emb(states, torch.arange(tokens)[None])
        heads = lambda projection, count: projection(states).view(tokens, count, width).transpose(0, 1)
        queries = rotate(heads(module.q_proj, query_heads), cos[0], sin[0])
        keys = rotate(heads(module.k_proj, kv_heads), cos[0], sin[0])[None]
        values = heads(module.v_proj, kv_heads)[None]
        logits = queries @ keys[0].repeat_interleave(query_heads // kv_heads, 0).transpose(1, 2) / width**0.5
        attention = (logits + torch.full((tokens, tokens), -torch.inf).triu(1)).softmax(-1)[None]
        extra = {"position_embeddings": (cos, sin)}
        scores = {
            "observed": ObservedAttentionPress().score(module, states, keys, values, attention, extra),
            "tova": TOVAPress().score(module, states, keys, values, None, extra),
            "expected": ExpectedAttentionPress(n_sink=sinks).score(module, states, keys, values, None, extra),
            "expected_mean": ExpectedAttentionPress(
                n_sink=sinks, use_covariance=False, use_vnorm=False, n_future_positions=64
            ).score(module, states, keys, values, None, extra),
        }
        scores["tova"] = scores["tova"].expand(1, kv_heads, tokens)
        folder.mkdir(exist_ok=True)
        for name, score in scores.items():
            save(folder / name, score[0])
        save(folder / "queries", queries.transpose(0, 1))
        save(folder / "keys", keys[0].transpose(0, 1))
        save(folder / "values", values[0].transpose(0, 1))


def save(path, tensor):
    np.save(path.with_suffix(".npy"), np.ascontiguousarray(tensor.detach().numpy(), dtype="<f4"))


class WordTokenizer:
    """As many ids as a text has words, all below 64: what KVzipPress asks of a tokenizer."""

    def encode(self, text, return_tensors, add_special_tokens):
        return torch.tensor([[7 + 3 * i % 57 for i, _ in enumerate(text.split())]])


def run_kvzip(model, context, plus, record):
    """Scores and kept marks [layer, KV head, token]; record, where given, gets each layer's second pass."""
    press = KVzipPress(
        compression_ratio=KVZIP["ratio"],
        n_sink=KVZIP["sinks"],
        chunk_size=KVZIP["chunk"],
        kvzip_plus_normalization=plus,
    )
    cache = DynamicCache()
    model.model(input_ids=context, past_key_values=cache)
    press._context_ids, press._cache = context, cache
    press.prefix_length = KVZIP["sinks"]
    press._suffix_ids = torch.tensor([[1, 2]])
    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb

        def hook(module, inputs, kwargs, output):
            states = kwargs["hidden_states"]
            cos, sin = kwargs["position_embeddings"]
            count = states.shape[1]
            heads = module.q_proj(states).view(count, -1, module.head_dim).transpose(0, 1)
            record[module.layer_idx].append(
                (
                    rotate(heads, cos[0], sin[0]).transpose(0, 1),
                    cache.layers[module.layer_idx].keys[0, :, -count:].transpose(0, 1),
                    states[0].norm(dim=-1),
                )
            )

        if record is not None:
            hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    press._perform_kvzip_compression(model, WordTokenizer())
    for hook in hooks:
        hook.remove()
    kept = torch.ones_like(press.score_val[:, 0])
    for layer in model.model.layers:
        _, heads, tokens = layer.self_attn.masked_key_indices
        kept[layer.self_attn.layer_idx, heads, tokens] = 0
        layer.self_attn.masked_key_indices = None
    return press.score_val[:, 0], kept, cache


def write_kvzip(here):
    torch.manual_seed(200)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=40,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.normal_(0, 0.35)
            for projection in (layer.self_attn.v_proj, layer.self_attn.o_proj):
                projection.weight.normal_(0, 0.2)
        context = torch.randint(0, 64, (1, KVZIP["tokens"]))
        record = [[] for _ in model.model.layers]
        scores, kept, cache = run_kvzip(model, context, False, record)
        scores_plus, kept_plus, _ = run_kvzip(model, context, True, None)
        for index, layer in enumerate(model.model.layers):
            folder = here / f"kvzip_layer{index}"
            folder.mkdir(exist_ok=True)
            queries, keys, norms = (torch.cat(parts) for parts in zip(*record[index]))
            save(folder / "pass_queries", queries)
            save(folder / "pass_keys", keys)
            save(folder / "hidden_norms", norms)
            save(folder / "keys", cache.layers[index].keys[0].transpose(0, 1))
            save(folder / "values", cache.layers[index].values[0].transpose(0, 1))
            save(folder / "output_weights", layer.self_attn.o_proj.weight.T)
            for name, table in [("", (scores, kept)), ("_plus", (scores_plus, kept_plus))]:
                save(folder / f"scores{name}", table[0][index])
                save(folder / f"kept{name}", table[1][index])
    shape = [KVZIP["tokens"], 6, 2, 12, 40, KVZIP["sinks"], KVZIP["ratio"]]
    lines = [" ".join(str(x) for x in shape)]
    token, query = KVZIP["sinks"], 0
    for queries, _, _ in record[0]:
        tokens = min(KVZIP["chunk"], KVZIP["tokens"] - token)
        lines.append(f"{token} {tokens} {query} {len(queries)}")
        token, query = token + tokens, query + len(queries)
    (here / "kvzip.txt").write_text("\n".join(lines) + "\n")


class GivenPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.given.clone()


def write_budgets(here):
    torch.manual_seed(300)
    heads, tokens = 4, 120
    given = torch.rand(1, heads, tokens) ** torch.tensor([0.5, 1.0, 3.0, 9.0])[None, :, None]
    save(here / "given", given[0])
    lines = []
    config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=heads, head_dim=4, hidden_size=16)
    config._attn_implementation = "sdpa"
    module = LlamaAttention(config, layer_idx=0)
    for ratio in (0.25, 0.5, 0.9):
        for alpha in (0.0, 0.2, 0.7, 1.0):
            press = GivenPress(compression_ratio=ratio)
            press.given = given
            AdaKVPress(press, alpha_safeguard=alpha).compress(module, None, None, None, None, None)
            pruned = torch.bincount(module.masked_key_indices[1], minlength=heads)
            lines.append(" ".join(str(x) for x in ["adakv", ratio, alpha, *(tokens - pruned).tolist()]))
    for layers, length, ratio, window, beta in [
        (8, 4000, 0.8, 16, 20),
        (8, 4000, 0.8, 16, 5),
        (5, 3001, 0.7, 8, 12),
        (6, 1000, 0.4, 64, 20),
        (6, 300, 0.9, 64, 20),
    ]:
        press = PyramidKVPress(compression_ratio=ratio, window_size=window, beta=beta)
        module.config.num_hidden_layers = layers
        counts = []
        for module.layer_idx in range(layers):
            counts.append(press.get_layer_budget(module, length))
        lines.append(" ".join(str(x) for x in ["pyramid", layers, length, ratio, window, beta, *counts]))
    (here / "budgets.txt").write_text("\n".join(lines) + "\n")


def main():
    here = pathlib.Path(__file__).parent
    lines = []
    for number, (name, *shape) in enumerate(CASES):
        write_case(here / name, number, *shape)
        lines.append(" ".join(str(x) for x in [name, *shape[:-1]]))
    (here / "cases.txt").write_text("\n".join(lines) + "\n")
    lines = []
    for number, (name, *shape) in enumerate(FULL_CASES):
        write_full_case(here / name, number, *shape)
        lines.append(" ".join(str(x) for x in [name, *shape[:-1]]))
    (here / "full.txt").write_text("\n".join(lines) + "\n")
    write_kvzip(here)
    write_budgets(here)
    packages = ["kvpress", "torch", "transformers", "numpy"]
    (here / "versions.json").write_text(json.dumps({p: version(p) for p in packages}, indent=2) + "\n")


if __name__ == "__main__":
    main()
