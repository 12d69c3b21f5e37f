# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Every recommendation is a real item: all 3,553 test users of the Amazon Beauty catalogue, 50 beams each.

The model is small and random: validity must not depend on what it has learned. Users are batched by the length of
their history and padded on the left. Sequences are checked against the rows of `items.tsv`, not against the index that
constrained them.

    python examples/benchmark/beauty.py           # all test users
    python examples/benchmark/beauty.py --fast    # 64 of them
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from beauty_data import DEFAULT_DATA, FILES, is_there, read_items, read_users
from report import print_json_line, print_table
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_gr import SemanticIds, enable

PAD = 0
FAST_USERS = 64


def read_histories(data: Path) -> list[list[int]]:
    """What each test user had before the test items."""
    return [user["train"] + user["valid"] for user in read_users(data) if user["test"]]


def make_model(vocab_size: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.1,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    return enable(Qwen3ForCausalLM(config).eval())


def batches(prompts: list[list[int]], batch_size: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Batches of users with similar history lengths, with their left-padded prompts."""
    order = sorted(range(len(prompts)), key=lambda user: len(prompts[user]))
    for start in range(0, len(order), batch_size):
        users = order[start : start + batch_size]
        longest = max(len(prompts[user]) for user in users)
        rows = torch.tensor([[PAD] * (longest - len(prompts[user])) + prompts[user] for user in users])
        yield users, {"input_ids": rows, "attention_mask": (rows != PAD).long()}


def recommend(options: argparse.Namespace) -> dict[str, Any]:
    """Decode all users and count the results."""
    item_ids, codes = read_items(options.data)
    ids = SemanticIds(codes, item_ids=item_ids, level_sizes=[256] * codes.shape[1], offset=PAD + 1)
    index = ids.constraint_index()
    real = {tuple(row) for row in ids.token_sequences().tolist()}
    histories = read_histories(options.data)[: FAST_USERS if options.fast else None]
    prompts = [ids.encode(history[-options.max_items :]) for history in histories]
    model = make_model(ids.vocab_size, options.seed).to(options.device)

    counts = {"users": 0, "sequences": 0, "invalid": 0, "repeated": 0, "unnamed": 0}
    seconds = 0.0
    for users, prompt in batches(prompts, options.batch_size):
        prompt = {name: tensor.to(options.device) for name, tensor in prompt.items()}
        start = time.perf_counter()
        output = model.generate(
            **prompt, constraint_index=index, num_beams=options.num_beams, num_return_sequences=options.num_beams
        )
        found = output[:, prompt["input_ids"].shape[1] :].tolist()
        seconds += time.perf_counter() - start
        counts["users"] += len(users)
        counts["sequences"] += len(found)
        counts["invalid"] += sum(tuple(row) not in real for row in found)
        counts["unnamed"] += sum(not items for items in index.items(found))
        for first in range(0, len(found), options.num_beams):
            rows = {tuple(row) for row in found[first : first + options.num_beams]}
            counts["repeated"] += options.num_beams - len(rows)
        if sys.stderr.isatty():
            print(f"\r{counts['users']:,} of {len(prompts):,} users", end="", file=sys.stderr, flush=True)
    return {**counts, "num_beams": options.num_beams, "batch_size": options.batch_size, "seconds": seconds}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--num-beams", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32, help="users a call")
    parser.add_argument("--max-items", type=int, default=50, help="items of a history to use, the last ones")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help=f"{FAST_USERS} users; skipped without the data")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if not is_there(options.data, fast=options.fast):
        return
    result = recommend(options)
    print_table(
        ["users", "sequences", "no real item", "repeated in a user", "without an item id", "seconds", "users / s"],
        [
            [
                *(f"{result[name]:,}" for name in ("users", "sequences", "invalid", "repeated", "unnamed")),
                f"{result['seconds']:.1f}",
                f"{result['users'] / result['seconds']:.0f}",
            ]
        ],
    )
    print_json_line("beauty", torch.device(options.device), result)
    if result["invalid"] or result["repeated"] or result["unnamed"]:
        raise SystemExit("not every recommendation is a real, distinct item")


if __name__ == "__main__":
    main()
