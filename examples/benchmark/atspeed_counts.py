# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts of `atspeed.py`: accepted steps and recall of some users under some drafts, kept in files. Chooses nothing.

Axes: seeds, users.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import speculation_counts as counts
import torch
from backbone_models import load
from experiments import show_progress
from report import environment
from speculation_counts import ASSISTANT, seeded
from speculation_models import BASE, METHODS, RANDOM, Data, Variant, Workshop, digest, prompts_of, slug

from hf_gr.files.atomic import replaced_file

TRIE = "trie"
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # 97.5% quantiles of Student's t, by the number of seeds


@dataclass(frozen=True)
class Scale:
    """How much is counted; `every` is for `terms` and `sweeps`: one batch of users in so many."""

    users: int = 1000
    beams: tuple[int, ...] = (1, 3, 5, 10, 20)
    relaxed_users: int = 300
    valid_users: int = 500
    batch_size: int = 50
    seeds: int = 3
    every: int = 2
    few_beams: tuple[int, ...] = (10, 20)  # of all but the tables
    draft_beams: tuple[int, ...] = (20, 30, 40, 50, 60)
    gammas: tuple[int, ...] = (1, 2, 3, 4)
    terms: tuple[str, ...] = ()  # of what is tried; none for all
    alphas: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 1.0)


@dataclass(frozen=True)
class Steps:
    """Accepted steps `[seeds, users]` for one K: all seeds count the same users."""

    values: np.ndarray

    def less(self, other: Steps) -> Steps:
        """The differences; a row without seeds is compared with every seed of the other."""
        return Steps(self.values - other.values)

    @property
    def interval(self) -> tuple[float, float, float]:
        """The mean and its 95% interval."""
        num_seeds, num_users = self.values.shape
        variance = 1.96**2 * float(self.values.mean(0).var()) / num_users
        if num_seeds > 1:
            variance += STUDENT[num_seeds] ** 2 * float(self.values.mean(1).var(ddof=1)) / num_seeds
        mean, half = float(self.values.mean()), math.sqrt(variance)
        return mean, mean - half, mean + half

    def row(self, **names: Any) -> dict[str, Any]:
        """A result."""
        return names | {
            "accepted_steps": [round(one, 4) for one in self.interval],
            "by_seed": self.values.mean(1).round(4).tolist(),
            "users": self.values.shape[1],
        }


def rows_of(steps: Sequence[Steps], beams: Sequence[int], **names: Any) -> list[dict[str, Any]]:
    """A result for every K."""
    return [one.row(**names, num_beams=width) for one, width in zip(steps, beams, strict=True)]


def differences(steps: Sequence[Steps], others: Sequence[Steps]) -> list[Steps]:
    """For every K."""
    return [one.less(other) for one, other in zip(steps, others, strict=True)]


class Counter:
    """Counts of some users under drafts, each made once and kept in a file.

    Args:
        shop: the models.
        data: whose rows are counted.
        scale: how many.
        users: of strict verification.
        folder: of the counts.
    """

    def __init__(self, shop: Workshop, data: Data, scale: Scale, users: int, folder: Path) -> None:
        self.shop = shop
        self.data = data
        self.scale = scale
        self.users = users
        self.folder = folder
        self.commits: set[str] = set()

    @cached_property
    def searches(self) -> counts.Searches:
        """Plain searches of the users, remembered."""
        beams = sorted({*self.scale.beams, *self.scale.few_beams})
        return counts.search_all(self.shop.target, self.data, self.batches(self.users), beams)

    def batches(self, number: int) -> list[list[int]]:
        """Some rows, those with prompts of similar lengths together."""
        return counts.in_batches(self.data, counts.some_users(self.data, number), self.scale.batch_size)

    def kept(self, name: str, how: Sequence[Any], make: Callable[[], Any]) -> Any:
        """A result from its file, whose name tells how it is made; or a new one."""
        file = self.folder / f"{slug(name)}-{digest(*how)}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            made = {"result": make(), **environment(torch.device("cpu"))}
            with replaced_file(file) as handle:
                handle.write(json.dumps(made).encode())
        found = json.loads(file.read_text(encoding="utf-8"))
        self.commits.add(found["commit"])
        return found["result"]

    def drafts(self, name: str, variant: Variant | None, seeds: int) -> list[tuple[list[Any], Callable[[], Any]]]:
        """The drafts of a row: what they are, and how to load them."""
        shop = self.shop
        if name == TRIE:
            return [([TRIE], lambda: None)]
        if name == RANDOM:
            return [([RANDOM, seed], partial(shop.untrained, seed)) for seed in range(seeds)]
        if name == BASE:
            return [([BASE, seed], lambda seed=seed: load(shop.base(seed))) for seed in range(seeds)]
        given = METHODS[name] if variant is None else variant

        def aligned(seed: int) -> Any:
            return load(shop.aligned(name, given, seed=seed))

        return [([asdict(given), seed], partial(aligned, seed)) for seed in range(seeds)]

    def steps(
        self,
        verification: str,
        name: str,
        beams: Sequence[int],
        *,
        variant: Variant | None = None,
        seeds: int | None = None,
        every: int = 1,
        **settings: Any,
    ) -> list[Steps]:
        """Accepted steps of users, for every K.

        Args:
            verification: "strict" or "relaxed".
            name: of the row.
            beams: every K.
            variant: how its draft is aligned, if not as the method of that name.
            seeds: how many drafts; by default all there are.
            every: one batch of users in so many.
            settings: of the draft.
        """
        given = ASSISTANT | settings | (counts.OWN["relaxed"] if verification == "relaxed" else {})
        users = self.batches(self.scale.relaxed_users if verification == "relaxed" else self.users)[::every]
        rows = [self.data.users[row] for batch in users for row in batch]
        method = name.partition(",")[0]
        found: dict[int, list[list[int]]] = {width: [] for width in beams}
        for what, make in self.drafts(name, variant, seeds or self.scale.seeds):
            draft = cache(make)  # loaded once it is needed
            for width in beams:
                how = [verification, what, given, rows, self.scale.batch_size, width]
                count = self._relaxed if verification == "relaxed" else partial(self._strict, every=every)
                counted = partial(_call, count, draft, given, width, users)
                found[width].append(self.kept(f"{verification} {method} {width}", how, counted))
        show_progress(f"{self.shop.study.name}: {verification}, {name} {settings or ''}")
        return [Steps(np.array(values)) for values in found.values()]

    def _strict(
        self, draft: Any, settings: dict[str, Any], num_beams: int, users: list[list[int]], *, every: int
    ) -> list[int]:
        """The first batch is checked by the target's own forwards, at K = 10."""
        given = settings | ({} if draft is None else {"assistant_model": draft})
        how: dict[str, Any] = {"batches": slice(0, None, every), "checked": int(num_beams == 10)}
        target, data = self.shop.target, self.data
        return counts.accepted_steps(target, data, self.searches, given, num_beams=num_beams, **how).tolist()

    def _relaxed(self, draft: Any, settings: dict[str, Any], num_beams: int, users: list[list[int]]) -> list[int]:
        """By sampling beams; every row of a batch has its own noise."""
        steps: list[int] = []
        for batch in users:
            prompt = prompts_of(self.shop.target, self.data, batch)
            how: dict[str, Any] = {"num_beams": num_beams, "generator": seeded(batch[0])}
            given = settings | {"assistant_model": draft}
            output = counts.ask(self.shop.target, prompt, self.data.index, given, **how)
            steps += output.speculation.accepted_steps.tolist()
        return steps

    def recall(self, settings: dict[str, Any], num_beams: int) -> list[int]:
        """For every user whether the item is among K recommended."""
        hits: list[int] = []
        for batch in self.batches(self.users):
            prompt = prompts_of(self.shop.target, self.data, batch)
            more = {"generator": seeded(batch[0])} if settings.get("do_sample") else {}
            output = counts.ask(self.shop.target, prompt, self.data.index, settings, num_beams=num_beams, **more)
            items = self.data.index.items(output.sequences[:, prompt["input_ids"].shape[1] :])
            for place, user in enumerate(batch):
                found = {item for row in items[place * num_beams : (place + 1) * num_beams] for item in row}
                hits.append(len(found & self.data.answers[user]))
        return hits


def _call(count: Callable[..., Any], draft: Callable[[], Any], *how: Any) -> Any:
    return count(draft(), *how)
