"""Writes golden product quantisation of faiss for tests/unit/sketch_product_quantised.cpp.

    python3 -m venv venv && venv/bin/pip install faiss-cpu && venv/bin/python tests/golden/generate_sketches.py

A case is a folder product_quantised_NAME with
    keys.npy       [tokens, key_dim]
    queries.npy    [queries, key_dim]
    codebook.npy   [subspaces, 2^bits, key_dim / subspaces]   as faiss trained it on the keys
    codes.npy      [tokens, subspaces]                        as floats
    decoded.npy    [tokens, key_dim]
    products.npy   [queries, tokens]                          by faiss's asymmetric search over all tokens
and a line in sketch_cases.txt: name tokens key_dim subspaces bits.
"""

import json
import pathlib
from importlib.metadata import version

import faiss
import numpy as np

# name, tokens, key width, subspaces, bits
CASES = [("few", 400, 24, 4, 4), ("many", 300, 8, 4, 8), ("one", 100, 6, 1, 3)]


def write_case(folder, number, tokens, width, subspaces, bits):
    random = np.random.default_rng(number)
    centres = random.normal(0, 2, (12, width))
    keys = (centres[random.integers(0, 12, tokens)] + random.normal(0, 0.7, (tokens, width))).astype(np.float32)
    queries = random.normal(0, 1, (5, width)).astype(np.float32)
    quantiser = faiss.ProductQuantizer(width, subspaces, bits)
    quantiser.train(keys)
    packed = quantiser.compute_codes(keys)
    # faiss packs codes bit after bit, lowest first.
    flat = np.unpackbits(packed, axis=1, bitorder="little")[:, : subspaces * bits]
    codes = flat.reshape(tokens, subspaces, bits) @ (1 << np.arange(bits))
    index = faiss.IndexPQ(width, subspaces, bits, faiss.METRIC_INNER_PRODUCT)
    index.pq = quantiser
    index.is_trained = True
    index.add(keys)
    values, ids = index.search(queries, tokens)
    products = np.empty_like(values)
    np.put_along_axis(products, ids, values, axis=1)
    codebook = faiss.vector_to_array(quantiser.centroids).reshape(subspaces, 1 << bits, width // subspaces)
    arrays = {
        "keys": keys,
        "queries": queries,
        "codebook": codebook,
        "codes": codes,
        "decoded": quantiser.decode(packed),
        "products": products,
    }
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", np.ascontiguousarray(array, dtype="<f4"))


def main():
    here = pathlib.Path(__file__).parent
    lines = []
    for number, (name, *shape) in enumerate(CASES):
        write_case(here / f"product_quantised_{name}", number, *shape)
        lines.append(" ".join(str(x) for x in [name, *shape]))
    (here / "sketch_cases.txt").write_text("\n".join(lines) + "\n")
    packages = ["faiss-cpu", "numpy"]
    (here / "sketch_versions.json").write_text(json.dumps({p: version(p) for p in packages}, indent=2) + "\n")


if __name__ == "__main__":
    main()
