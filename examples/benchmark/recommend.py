# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf_gr.recommend` over a table of users, histories of Amazon Beauty: users a second, and memory by their number.

The model is a small Qwen3 with random weights: neither figure depends on what it has learnt. Each row is a process.

    python examples/benchmark/recommend.py         # 10,000 and 200,000 users
    python examples/benchmark/recommend.py --fast
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from beauty_data import DEFAULT_DATA, is_there, read_items, read_users
from report import print_json_line, print_table
from transformers import Qwen3Config, Qwen3ForCausalLM

import hf_gr

SIZES, FAST_SIZES = (10_000, 200_000), (500, 2_000)


def save_recommender(ids: hf_gr.SemanticIds, folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "eos_token_id": None}
    model = hf_gr.enable(Qwen3ForCausalLM(Qwen3Config(vocab_size=ids.vocab_size, **sizes, **heads)))
    model.save_pretrained(folder / "model")
    ids.constraint_index().save_pretrained(folder / "index")


def write_users(users: list[list[int]], size: int, folder: Path) -> None:
    """A table of this many users, repeated where there are fewer."""
    with pq.ParquetWriter(folder / "users.parquet", pa.schema([("items", pa.list_(pa.int64()))])) as writer:
        for start in range(0, size, 10_000):
            rows = [users[row % len(users)] for row in range(start, min(start + 10_000, size))]
            writer.write_table(pa.table({"items": rows}, schema=writer.schema))


def one_run(folder: Path) -> None:
    start = time.perf_counter()
    how: dict[str, Any] = {"constraint_index": folder / "index", "history": "items"}
    hf_gr.recommend(folder / "model", folder / "users.parquet", folder / "answers.parquet", **how)
    print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder of the Beauty data")
    parser.add_argument("--fast", action="store_true", help="few users, no claim")
    parser.add_argument("--one-run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_run is not None:
        one_run(options.one_run)
        return
    if not is_there(options.data, fast=options.fast):
        return
    item_ids, codes = read_items(options.data)
    users = [user["train"] for user in read_users(options.data) if user["train"]]
    rows: list[dict[str, float]] = []
    for size in FAST_SIZES if options.fast else SIZES:
        with tempfile.TemporaryDirectory() as name:
            save_recommender(hf_gr.SemanticIds(codes, item_ids=item_ids, offset=3), Path(name))
            write_users(users, size, Path(name))
            command = [sys.executable, __file__, "--one-run", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, peak = map(float, done.stdout.split()[-2:])
        rows.append({"users": size, "seconds": seconds, "peak_mb": peak})
    cells = [
        [f"{row['users']:,}", f"{row['seconds']:.1f}", f"{row['users'] / row['seconds']:.0f}", f"{row['peak_mb']:.0f}"]
        for row in rows
    ]
    print_table(["users", "seconds, loading included", "users a second", "peak MB"], cells)
    print_json_line("recommend", torch.device("cpu"), {"rows": rows})


if __name__ == "__main__":
    main()
