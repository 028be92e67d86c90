#!/usr/bin/env python3
"""Makes a small copy of an attention trace: all keys and values, but only the queries that the examples look at.

    python3 package_trace.py TRACE_DIR OUT_DIR [--stride 16] [--last 64]

Kept are the queries of the decode steps, of the last 64 prompt positions, and of every 16th prompt position before,
counted back from the last one (n-1, n-17, ...). query_positions.npy says where they stood. Needs NumPy.
"""
import argparse
import json
import pathlib

import numpy as np


def kept_rows(positions, prefill, stride, last):
    """Which query rows stay, in order."""
    back = prefill - 1 - positions  # 0 at the last prompt position, negative at the decode steps
    return np.flatnonzero((back < last) | (back % stride == 0))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--stride", type=int, default=16)
    parser.add_argument("--last", type=int, default=64)
    options = parser.parse_args()
    if options.stride < 1 or options.last < 0:
        parser.error("--stride must be at least 1 and --last at least 0")
    if options.out.exists() and options.out.samefile(options.trace):
        parser.error("OUT_DIR must be another folder than TRACE_DIR")

    meta = json.loads((options.trace / "meta.json").read_text())
    arrays = {name: np.load(options.trace / f"{name}.npy") for name in ("queries", "keys", "values")}
    stored = options.trace / "query_positions.npy"
    positions = np.load(stored) if stored.exists() else np.arange(len(arrays["queries"]))
    rows = kept_rows(positions, meta["prefill_tokens"], options.stride, options.last)

    arrays["queries"] = arrays["queries"][rows]
    arrays["query_positions"] = positions[rows].astype("<i4")
    meta.setdefault("arrays", {}).update(
        queries=f"[query row, query head, channel] {arrays['queries'].dtype}",
        query_positions="[query row] int32: the position of each row of queries",
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    for name, array in arrays.items():
        np.save(options.out / f"{name}.npy", np.ascontiguousarray(array))
    size = sum((options.out / f"{name}.npy").stat().st_size for name in arrays)
    print(f"{options.out}: {len(rows)} of {len(positions)} query rows, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
