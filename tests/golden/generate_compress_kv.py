"""Writes CompressKV's scores and the error of a layer by its formulas, in numpy: tests/unit/score_golden_learned.cpp.

    python3 -m venv venv && venv/bin/pip install numpy && venv/bin/python tests/golden/generate_compress_kv.py

kvpress 0.5.5 has no CompressKV, so these are no one's program's results but a second reading of the paper's description
in another language, in float64, with arrays over whole heads where the library goes block by block. Queries, keys and
values are those of full_group3 (97 tokens, six query heads on two KV heads), already rotated. Under compress_kv/:
scores.npy [tokens]: window attention of HEADS, summed over the window's queries, pooled over POOL positions, mean over
    the heads; 0 for the window itself, which is kept anyway.
projection.npy [query_heads * width, MODEL_DIM]: W_o, random; kept.npy: the KEPT best tokens and the window.
error.npy [1]: || O W_o - O_kept W_o || / || O W_o ||, Frobenius, over the queries of the window.
"""

import pathlib

import numpy as np

HEADS = (0, 2, 5)
WINDOW, POOL, KEPT, MODEL_DIM = 8, 5, 20, 20


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def main():
    here = pathlib.Path(__file__).parent
    queries, keys, values = (
        np.load(here / "full_group3" / f"{name}.npy").astype(np.float64).transpose(1, 0, 2)
        for name in ("queries", "keys", "values")
    )
    heads, tokens, width = queries.shape
    keys = np.repeat(keys, heads // len(keys), axis=0)
    values = np.repeat(values, heads // len(values), axis=0)
    late = np.arange(tokens - WINDOW, tokens)
    logits = queries[:, late] @ keys.transpose(0, 2, 1) / np.sqrt(width)
    logits[:, np.arange(tokens)[None, :] > late[:, None]] = -np.inf

    mass = softmax(logits).sum(axis=1)[:, : tokens - WINDOW]
    box = np.ones(POOL) / POOL
    pooled = np.stack([np.convolve(row, box, mode="same") for row in mass])
    scores = np.zeros(tokens)
    scores[: tokens - WINDOW] = pooled[list(HEADS)].mean(axis=0)

    kept = np.sort(np.concatenate([np.argsort(-scores, kind="stable")[:KEPT], late]))
    projection = np.random.default_rng(7).standard_normal((heads * width, MODEL_DIM)).astype(np.float32)

    def layer_output(visible):
        outputs = softmax(logits[:, :, visible]) @ values[:, visible]
        return outputs.transpose(1, 0, 2).reshape(WINDOW, -1) @ projection.astype(np.float64)

    full = layer_output(np.arange(tokens))
    error = np.linalg.norm(full - layer_output(kept)) / np.linalg.norm(full)

    folder = here / "compress_kv"
    folder.mkdir(exist_ok=True)
    for name, x in {"scores": scores, "projection": projection, "kept": kept, "error": np.array([error])}.items():
        np.save(folder / f"{name}.npy", np.ascontiguousarray(x, dtype="<f4"))


if __name__ == "__main__":
    main()
