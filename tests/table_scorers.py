# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of the tests for drafts: logits from tables by prefix, and catalogues in every state that rules bring about.

Looking a prefix up costs one index, whatever the number of rows: tests of distributions decode thousands at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import random_catalogues
import torch
from random_catalogues import VOCABULARY, random_index, random_rows, random_rules

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.torch import transition
from hf_gr.torch.decode import DecodePlan
from hf_gr.torch.drafters import Assistant
from hf_gr.torch.noise import Noise
from hf_gr.torch.scorers import Depth
from hf_gr.torch.transition import DeviceCatalogue
from hf_gr.torch.tree import Nodes

LONGEST = 5  # with an end token
CPU = torch.device("cpu")


def catalogue_of(*views: ConstraintIndex, excluded: Any = None) -> DeviceCatalogue:
    """One for all rows, or one each."""
    return transition.device_catalogue(combine_rules([view.snapshot for view in views], excluded), CPU)


def make_plan(batch_size: int, num_beams: int, **kwargs: Any) -> DecodePlan:
    """A plan with transformers' defaults."""
    how = {"num_return_sequences": num_beams, "num_kept": 2 * num_beams, "do_sample": False, "length_penalty": 1.0}
    how |= {"early_stopping": "never", "max_new_tokens": 9, "fill_token_id": 9, "missing_token_id": 9}
    return DecodePlan(prompt=torch.ones((batch_size, 2), dtype=torch.long), num_beams=num_beams, **(how | kwargs))


def tables(seed: int, num_rows: int, *, scale: float = 2.0) -> list[torch.Tensor]:
    """By depth: logits of every row after every prefix, which is read as a number of base VOCABULARY."""
    made = random_catalogues.tables(seed, num_rows, vocabulary=VOCABULARY, longest=LONGEST, scale=scale)
    return [torch.from_numpy(table) for table in made]


class TableModel:
    """Prefills: a call gives a new scorer, as a model would; `logits` by depth are of one row for all, or one each."""

    def __init__(self, logits: list[torch.Tensor], num_rows: int, *, takes_prompt: bool = True) -> None:
        self.logits = logits
        self.num_rows = num_rows
        self.takes_prompt = takes_prompt
        self.scored: list[list[int]] = []  # of every forward: the nodes of its levels
        self.deepest = 0  # tokens from the prompt to any node, padding included

    def __call__(self) -> TableScorer:
        return TableScorer(self)


class TableScorer:
    """A scorer that knows of every node its prefix only: what it is asked for is all that it can answer by."""

    def __init__(self, model: TableModel) -> None:
        self.takes_prompt, self.columns = model.takes_prompt, None
        self.model = model
        self.num_forwards = 0
        self.logits = [table.expand(model.num_rows, -1, -1) for table in model.logits]
        self.prefixes = self.depths = torch.zeros((model.num_rows, 1), dtype=torch.long)  # of the nodes scored last

    def begin(self, levels: Sequence[Nodes] = ()) -> list[torch.Tensor]:
        assert self.takes_prompt or not levels
        root = self.prefixes, self.depths
        scored = self._score(levels, 1) if levels else []
        if levels:
            self.prefixes = torch.cat([root[0], self.prefixes], dim=1)
            self.depths = torch.cat([root[1], self.depths], dim=1)
        return [self.logits[0], *scored]

    def score(self, levels: Sequence[Nodes], *, depth: Depth) -> list[torch.Tensor]:
        self.num_forwards += 1
        return self._score(levels, depth)

    def _score(self, levels: Sequence[Nodes], depth: Depth) -> list[torch.Tensor]:
        self.model.scored.append([nodes.tokens.shape[1] for nodes in levels])
        alike = isinstance(depth, int)
        wanted = torch.tensor([range(depth, depth + len(levels))] * len(self.prefixes) if alike else depth)
        self.model.deepest = max(self.model.deepest, int(wanted.max()))
        above, prefixes, found = (self.prefixes, self.depths), [], []
        for number, nodes in enumerate(levels):
            assert nodes.tokens.shape[0] == len(wanted)
            parent, depths = (values.gather(1, nodes.parents) for values in above)
            # A node whose parent is not of the level above is padding, or an error: its logits are not numbers.
            is_below = depths + 1 == wanted[:, number, None]
            above = (parent * VOCABULARY + nodes.tokens, torch.where(is_below, depths + 1, -1))
            prefixes.append(above)
            found.append(self._look_up(*above))
        self.prefixes, self.depths = (torch.cat(parts, dim=1) for parts in zip(*prefixes, strict=True))
        return found

    def _look_up(self, prefixes: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        found = torch.full((*prefixes.shape, VOCABULARY), torch.nan)
        for depth, table in enumerate(self.logits):
            rows, nodes = (depths == depth).nonzero(as_tuple=True)
            found[rows, nodes] = table[rows, prefixes[rows, nodes]]
        return found


def assistant_of(draft: TableModel, *, num_beams: int, num_steps: int) -> Assistant:
    """A draft model as `generate` would ask it."""
    return Assistant(draft, num_beams=num_beams, num_steps=num_steps)


def random_catalogue(rng: random.Random, num_rows: int, *, ragged: bool) -> DeviceCatalogue:
    """Fixed or ragged, with any updates; one for all rows, or a rule and excluded items for each."""
    index = random_index(rng, ragged=ragged, largest=800)
    if rng.random() < 0.5:
        return catalogue_of(index)
    return transition.device_catalogue(random_rules(rng, index, num_rows=num_rows), CPU)


def fixed_catalogue(seed: int, number: int, *, length: int = LONGEST) -> DeviceCatalogue:
    rows = random_rows(random.Random(seed), number, ragged=False, length=length)
    return catalogue_of(ConstraintIndex.from_sequences(rows))


def noise_of(seed: int, num_rows: int) -> Noise:
    """Of rows with seeds of their own, none of which is another call's."""
    return Noise(torch.arange(num_rows) + 10**6 * seed)


def relaxed_plan(num_rows: int, num_beams: int, *, seed: int = 0, **kwargs: Any) -> DecodePlan:
    how = {"num_kept": num_beams, "do_sample": True, "is_relaxed": True, "noise": noise_of(seed, num_rows)}
    return make_plan(num_rows, num_beams, **how, **kwargs)
