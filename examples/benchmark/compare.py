# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""This checkout against another one: the same calls of the public API, paired, in two processes that take turns.

    git worktree add /tmp/before main~20
    python examples/benchmark/compare.py /tmp/before
    python examples/benchmark/compare.py /tmp/before --fast  # a tiny model, some seconds

Each process imports its own hf_gr and builds the same model, catalogue and users from the same seed. One makes
a call while the other waits; who goes first alternates. No ratio is printed before the answers are equal; if they are
not, the exit status is 1. The last line is JSON.

Cases: `generate` by (batch, prompt, beams), greedy included; trie drafts; a draft head; a batch with rules by row and
exclusions; and `recommend` over a table of users.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

HERE = Path(__file__).resolve().parents[2]
SETTINGS = ((1, 64, 1), (1, 256, 10), (1, 256, 50), (8, 256, 20), (1, 512, 128))
FAST_SETTINGS = ((1, 16, 1), (2, 16, 8))


def make_cases(folder: Path, *, fast: bool) -> dict[str, Callable[[], Any]]:
    """The calls by name; each returns what both sides must agree on."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import hf_gr

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    hidden, layers, items = (64, 2, 500) if fast else (512, 6, 12_000)
    index = hf_gr.ConstraintIndex.from_sequences(
        np.unique(rng.integers(0, 256, size=(items, 4)), axis=0) + 256 * np.arange(4)
    )
    model = hf_gr.enable(
        Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=1024,
                hidden_size=hidden,
                intermediate_size=3 * hidden,
                num_hidden_layers=layers,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=hidden // 8,
                eos_token_id=None,
                bos_token_id=None,
            )
        )
    ).eval()
    model.generation_config.pad_token_id = 0
    model.add_draft_head(index)
    ids = index.item_ids

    def generate(batch: int, prompt: int, beams: int, **options: Any) -> Any:
        prompts = torch.randint(1, 1024, (batch, prompt), generator=torch.Generator().manual_seed(prompt))
        out = model.generate(prompts, constraint_index=index, num_beams=beams, num_return_sequences=beams, **options)
        return out.tolist()

    cases: dict[str, Callable[[], Any]] = {}
    for setting in FAST_SETTINGS if fast else SETTINGS:
        cases[f"generate {setting}"] = lambda setting=setting: generate(*setting)
    largest = (FAST_SETTINGS if fast else SETTINGS)[-2]
    cases[f"trie {largest}"] = lambda: generate(*largest, drafting="trie")
    cases[f"head {largest}"] = lambda: generate(*largest, drafting="head")
    views = [index.where(ids[start::2]) for start in (0, 1)]

    def with_rules() -> Any:
        batch, prompt, beams = largest
        prompts = torch.randint(1, 1024, (batch, prompt), generator=torch.Generator().manual_seed(prompt))
        rules = [views[row % 2] for row in range(batch)]
        excluded = [ids[row : row + 100] for row in range(batch)]
        return model.generate(
            prompts, constraint_index=rules, exclude_items=excluded, num_beams=beams, num_return_sequences=beams
        ).tolist()

    cases[f"rules {largest}"] = with_rules
    users = folder / "users.parquet"
    histories = [rng.choice(ids, size=rng.integers(2, 30)).tolist() for _ in range(20 if fast else 100)]
    pq.write_table(pa.table({"history": histories}), users)

    def recommend() -> Any:
        output = folder / "recs.parquet"
        hf_gr.recommend(
            model,
            users,
            output,
            constraint_index=index,
            history="history",
            num_beams=20,
            overwrite=True,
            progress=False,
        )
        found = pq.read_table(output).column("items").to_pylist()
        output.unlink()
        return found

    cases["recommend"] = recommend
    return cases


def work(*, fast: bool) -> None:
    """A worker: reads the name of a case, makes the call, and writes seconds and a digest of the answer."""
    with tempfile.TemporaryDirectory() as folder:
        cases = make_cases(Path(folder), fast=fast)
        print(json.dumps(list(cases)), flush=True)
        for line in sys.stdin:
            call = cases[json.loads(line)]
            start = perf_counter()
            answer = call()
            seconds = perf_counter() - start
            digest = hashlib.sha256(json.dumps(answer).encode()).hexdigest()
            print(json.dumps([seconds, digest]), flush=True)


class Worker:
    """A process with the hf_gr of one checkout."""

    def __init__(self, checkout: Path, *, fast: bool) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--work", *["--fast"] * fast]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(checkout)}, **pipes)
        self.cases: list[str] = self._read()

    def call(self, case: str) -> tuple[float, str]:
        """Seconds, and the digest of the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        seconds, digest = self._read()
        return seconds, digest

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker has ended with {self.process.wait()}: see its message above")
        return json.loads(line)


def main(arguments: list[str] | None = None) -> int:
    """Compare; 1 if the answers differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, default=HERE, help="the other checkout (this one)")
    parser.add_argument("--repeats", type=int, default=9, help="pairs of calls of each case (9)")
    parser.add_argument("--fast", action="store_true", help="a tiny model, some seconds")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(fast=options.fast)
        return 0
    if not (options.other / "hf_gr").is_dir():
        parser.error(f"other={options.other} has no hf_gr, expected a checkout of this repository")
    here, there = (Worker(checkout, fast=options.fast) for checkout in (HERE, options.other))
    rows, agree = [], True
    print(f"{'case':28} {'other':>9} {'here':>9}  here / other")
    for case in here.cases:
        answers = [worker.call(case)[1] for worker in (here, there, here, there)]  # the first calls warm up
        if len(set(answers)) > 1:
            print(f"{case:28} the answers differ")
            agree = False
            continue
        pairs = []
        for turn in range(2 if options.fast else options.repeats):
            first, second = (here, there) if turn % 2 else (there, here)
            taken = {first: first.call(case)[0], second: second.call(case)[0]}
            pairs.append((taken[there], taken[here]))
        seconds = [median(side) for side in zip(*pairs, strict=True)]
        ratio = median(own / other for other, own in pairs)
        print(f"{case:28} {seconds[0]:8.4f}s {seconds[1]:8.4f}s  {ratio:.3f}")
        rows.append({"case": case, "other": seconds[0], "here": seconds[1], "ratio": ratio})
    print(json.dumps({"benchmark": "compare", "other": str(options.other), "agree": agree, "results": rows}))
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
