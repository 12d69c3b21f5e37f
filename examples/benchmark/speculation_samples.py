# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches and samples under drafts, for `speculation.py`. Trains nothing and times nothing.

- `batch`: the target's work for eight users in one batch, relative to that for the eight alone;
- `sample`: whether sampled answers are those of the target, and how many steps they accept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
import torch
from experiments import show_progress
from report import print_table
from speculation_counts import (
    ASSISTANT,
    DEFAULTS,
    EIGHT,
    OWN,
    TRIE,
    TWICE,
    Counting,
    Forwards,
    Memory,
    ask,
    counted,
    interval_cell,
    intervals,
    seeded,
    some_users,
    widths,
)
from speculation_models import Data, prompts_of
from torch import Tensor

# ------------------------------------------------------------------------------------------------------------- batches


def batch(target: Any, draft: Any, data: Data, counting: Counting) -> dict[str, Any]:
    """The target's work for eight users in one batch, and for the eight alone.

    Work is tokens that the target computes besides the prompts', padding included.
    """
    users = some_users(data, EIGHT * counting.batches)
    batches = [users[start : start + EIGHT] for start in range(0, len(users) - EIGHT + 1, EIGHT)]
    model = {"assistant_model": draft}
    ways = {
        "none": {},
        TRIE[0]: TRIE[1],
        "N = 2 K": ASSISTANT | model | {"num_draft_beams": None},
        DEFAULTS[0]: DEFAULTS[1] | model,
    }
    rows = []
    for num_beams, (name, settings) in product(counting.batch_beams, ways.items()):
        work = partial(work_of, target, data, settings, num_beams=num_beams)
        together = [work(some) for some in batches]
        alone = [[work([user]) for user in some] for some in batches]
        nodes, nodes_alone = sum(one.nodes for one in together), sum(one.nodes for some in alone for one in some)
        rows.append(
            {
                "num_beams": num_beams,
                "draft": name,
                "nodes": nodes,
                "nodes_alone": nodes_alone,
                "ratio": nodes / nodes_alone,
                "forwards": mean(one.forwards for one in together),
                "forwards_alone": mean(one.forwards for some in alone for one in some),
                "most_forwards_alone": mean(max(one.forwards for one in some) for some in alone),
                "not_equal": sum(
                    answer != one.answers[0]
                    for joint, some in zip(together, alone, strict=True)
                    for answer, one in zip(joint.answers, some, strict=True)
                ),
            }
        )
        show_progress(f"batch: K = {num_beams}, {name}: {rows[-1]['ratio']:.2f}")
    return {"batches": len(batches), "batch_size": EIGHT, "rows": rows}


@dataclass(frozen=True)
class Work:
    """What a call computed: the answers by user, the target's tokens besides the prompts', and its forwards."""

    answers: list[list[list[int]]]
    nodes: int
    forwards: int


def work_of(target: Any, data: Data, settings: dict[str, Any], users: Sequence[int], *, num_beams: int) -> Work:
    prompt = prompts_of(target, data, users)
    with Forwards(target) as forwards:
        output = ask(target, prompt, data.index, settings, num_beams=num_beams)
    answers = output.sequences[:, prompt["input_ids"].shape[1] :].unflatten(0, (len(users), num_beams))
    return Work(answers.tolist(), forwards.nodes(prompt["input_ids"]), len(forwards))


def show_batches(result: dict[str, Any]) -> None:
    """Work for batches over that for their rows alone."""
    print(
        f"{result['batches']} batches of {result['batch_size']} and their rows alone: tokens after the prompts that\n"
        "the target computes, padding included; forwards of a batch, of a row alone, and of the row that needs most"
    )
    print_table(
        ["draft", "K", "nodes", "alone", "ratio", "forwards", "alone", "most", "rows that differ"],
        [
            [
                row["draft"],
                str(row["num_beams"]),
                f"{row['nodes']:,}",
                f"{row['nodes_alone']:,}",
                f"{row['ratio']:.2f}",
                f"{row['forwards']:.2f}",
                f"{row['forwards_alone']:.2f}",
                f"{row['most_forwards_alone']:.2f}",
                str(row["not_equal"]),
            ]
            for row in result["rows"]
        ],
    )
    print()


# ------------------------------------------------------------------------------------------------------------- samples


def sample(target: Any, draft: Any, data: Data, counting: Counting) -> dict[str, Any]:
    """Strict and relaxed sampling beams with a draft, each beside the same without one, from the same seeds."""
    users = some_users(data, counting.sample_users)
    rows = []
    for num_beams in counting.sample_beams:
        ways = [*sampling_ways(draft, num_beams)]
        counts: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
        unlike: Counter[tuple[str, str]] = Counter()
        with Memory(target) as memory:
            for user in users:
                prompt = prompts_of(target, data, [user])
                memory.forget(prompt["input_ids"])
                call = partial(ask, target, prompt, data.index, num_beams=num_beams)
                own = {name: call(settings, generator=seeded(user)) for name, settings in OWN.items()}
                for verification, name, settings in ways:
                    run = partial(call, settings, generator=seeded(user))
                    # A strict call reads the logits that the target's own has read.
                    with memory.recalling() if verification == "strict" else nullcontext():
                        output, found = counted(target, draft, run, max_length=data.index.max_length)
                    counts.setdefault((verification, name), []).append(found)
                    unlike[verification, name] += not torch.equal(output.sequences, own[verification].sequences)
        show_progress(f"sample: K = {num_beams}, {len(users):,} users")
        variation = variations(target, data, ways, users[: counting.tv_users], counting, num_beams=num_beams)
        for key, value in variation.items():
            row = {"num_beams": num_beams, **dict(zip(("verification", "draft"), key, strict=True))}
            rows.append(row | {"variation": value})
            if key in counts:
                accepted, forwards, _ = intervals(np.array(counts[key]))
                rows[-1] |= {"accepted_steps": accepted, "target_forwards": forwards, "unlike": unlike[key]}
    return {"users": len(users), "tv_users": counting.tv_users, "tv_draws": counting.tv_draws, "rows": rows}


def sampling_ways(draft: Any, num_beams: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Verification, name and arguments of `generate`."""
    for verification in OWN:
        for name, settings in widths(num_beams, times=(1, 2, 4), fixed=()):
            yield verification, name, OWN[verification] | settings | {"assistant_model": draft}


def variations(
    target: Any,
    data: Data,
    ways: Sequence[tuple[str, str, dict[str, Any]]],
    users: Sequence[int],
    counting: Counting,
    *,
    num_beams: int,
) -> dict[tuple[str, str], float]:
    """The total variation from the target's own beams of how often each first code is drawn; mean over users.

    Two runs of the target's own from other seeds are apart by chance.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for user in users:
        prompt = prompts_of(target, data, [user] * counting.tv_draws)
        start = prompt["input_ids"].shape[1]

        def shares(settings: dict[str, Any], seed: int, prompt=prompt, start=start) -> Tensor:
            output = ask(target, prompt, data.index, settings, num_beams=num_beams, generator=seeded(seed))
            return output.sequences[:, start].bincount(minlength=target.config.vocab_size) / len(output.sequences)

        own = {verification: shares(settings, user) for verification, settings in OWN.items()}
        for verification, settings in OWN.items():
            again = shares(settings, user + 1)
            found.setdefault((verification, TWICE), []).append(apart(own[verification], again))
        for verification, name, settings in ways:
            theirs = shares(settings, user)
            found.setdefault((verification, name), []).append(apart(own[verification], theirs))
        show_progress(f"sample: K = {num_beams}, user {user} drawn {counting.tv_draws} times")
    return {key: mean(values) for key, values in found.items()}


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().sum() / 2)


def show_samples(result: dict[str, Any]) -> None:
    """Accepted steps and total variation of sampling beams."""
    print(
        f"sampling beams of {result['users']:,} users, each with a seed: users whose answers are not those without a\n"
        "draft, accepted steps, forwards of the target in all; total variation of how often a first code is drawn\n"
        f"({result['tv_users']} users, {result['tv_draws']} calls each)"
    )
    print_table(
        ["verification", "draft", "K", "other answers", "AS@K", "forwards", "total variation"],
        [
            [
                *(row[what] for what in ("verification", "draft")),
                str(row["num_beams"]),
                str(row.get("unlike", "")),
                *(interval_cell(row[what]) if what in row else "" for what in ("accepted_steps", "target_forwards")),
                f"{row['variation']:.3f}",
            ]
            for row in result["rows"]
        ],
    )
    print()
