# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch that have come to the same level: what is decided together. Knows no model and scores nothing.

Axes: B batch, S some of its rows, K beams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hf_gr.core.beam import Beams, Finished

from . import ops
from .children import Children
from .plan import DecodePlan
from .transfers import to_device
from .transition import DeviceCatalogue

PerRow = TypeVar("PerRow", Beams, Finished)


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch, with what is legal and asked for there.

    Attributes:
        numbers: which rows, ascending.
        catalogue: the legal sequences of each.
        plan: the options.
    """

    numbers: tuple[int, ...]
    catalogue: DeviceCatalogue
    plan: DecodePlan

    def take(self, numbers: Sequence[int]) -> Rows:
        """Some of the batch's rows; these must be all of them."""
        if len(numbers) == len(self.numbers):
            return self
        which = to_device(numbers, self.catalogue.device)
        return Rows(tuple(numbers), self.catalogue.of_rows(which), self.plan.of_rows(which))


@dataclass(frozen=True)
class Frontier:
    """Beams of one level, and what has been finished above it.

    Attributes:
        batch: all rows of the call.
        rows: those that the beams belong to.
        level: tokens of each beam.
        beams: the live beams.
        finished: the complete sequences so far; None where none is before the last level.
        parents: where the parent of each beam is among the nodes that were scored last.
        is_open: whether some row can still change.
    """

    batch: Rows
    rows: Rows
    level: int
    beams: Beams
    finished: Finished | None
    parents: Int[Tensor, "some beams"]
    is_open: bool = True

    @classmethod
    def start(cls, batch: Rows) -> Frontier:
        """All rows at the root."""
        plan, catalogue, num_rows = batch.plan, batch.catalogue, len(batch.numbers)
        # Equal beams need not be scored K times, unless a processor expects K rows.
        width = plan.width if plan.processors is not None or not plan.is_beam_search else 1
        like = plan.prompt
        beams = Beams.start(ops, like, batch_size=num_rows, width=width, independent=not plan.is_beam_search)
        finished = None
        if not plan.ends_together(is_ragged=catalogue.is_ragged):
            finished = Finished.none_yet(
                ops, like, batch_size=num_rows, width=plan.width, max_length=catalogue.max_length
            )
        return cls(batch, batch, 0, beams, finished, parents=beams.states)

    @cached_property
    def legal(self) -> Children:
        """The children of the beams."""
        return self.rows.catalogue.children(self.beams, level=self.level)

    def where(self, flags: Bool[Tensor, " some"] | Sequence[bool]) -> Frontier:
        """The rows with a flag."""
        kept = [place for place, flag in enumerate(flags) if flag]
        if len(kept) == len(self.rows.numbers):
            return self
        places = to_device(kept, self.beams.scores.device)
        return replace(
            self,
            rows=self.batch.take([self.rows.numbers[place] for place in kept]),
            beams=per_field(lambda array: array[places], self.beams),
            finished=None if self.finished is None else per_field(lambda array: array[places], self.finished),
            parents=self.parents[places],
        )


def per_field(function: Callable[..., Tensor], *states: PerRow) -> PerRow:
    """A state whose arrays are a function of those of other states."""
    names = [field.name for field in fields(states[0])][1:]
    found = {name: function(*(getattr(state, name) for state in states)) for name in names}
    return replace(states[0], **found)


def in_order(numbers: Sequence[Sequence[int]], parts: Sequence[Tensor]) -> Tensor:
    """Arrays of some rows each as one, in the order of the rows' numbers."""
    if len(parts) == 1:
        return parts[0]
    rows = [number for of_part in numbers for number in of_part]
    order = to_device(sorted(range(len(rows)), key=rows.__getitem__), parts[0].device)
    return torch.cat(tuple(parts))[order]


def by_level(frontiers: Iterable[Frontier]) -> list[Frontier]:
    """The same rows, one frontier a level."""
    frontiers = list(frontiers)
    if len(frontiers) < 2:
        return frontiers
    levels: dict[int, list[Frontier]] = {}
    for frontier in frontiers:
        levels.setdefault(frontier.level, []).append(frontier)
    return [_merged(levels[level]) for level in sorted(levels)]


def _merged(frontiers: Sequence[Frontier]) -> Frontier:
    first = frontiers[0]
    if len(frontiers) == 1:
        return first
    numbers = [frontier.rows.numbers for frontier in frontiers]

    def joined(*parts: Tensor) -> Tensor:
        return in_order(numbers, parts)

    finished = [frontier.finished for frontier in frontiers if frontier.finished is not None]

    return Frontier(
        first.batch,
        first.batch.take(sorted(number for of in numbers for number in of)),
        first.level,
        per_field(joined, *(frontier.beams for frontier in frontiers)),
        per_field(joined, *finished) if finished else None,
        joined(*(frontier.parents for frontier in frontiers)),
        any(frontier.is_open for frontier in frontiers),
    )
