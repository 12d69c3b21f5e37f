# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Every sequence of a small catalogue, scored exactly: all inner nodes of its trie as one tree. Knows no model.

A forward scores as many nodes as its logits have room for; where a catalogue has more, it is taken apart between
sequences, and the few nodes above such a place are scored once more.

Axes: B batch, S sequences, N inner nodes of a level, L levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.catalogue.fanout import Array, Bools, Longs
from hf_gr.torch.decode import SCORES_AT_ONCE
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.tree import Nodes

NODES_AT_ONCE = 1024  # of one request in a forward: attention is quadratic in them
LOGITS_AT_ONCE = 2**26  # of one forward: 256 MB in fp32


@dataclass(frozen=True, eq=False)
class Sequences:
    """Distinct sequences in lexicographic order, none of them the beginning of another.

    Attributes:
        rows: `[S, L]` tokens, -1 behind the end.
    """

    rows: Array

    @property
    def num_nodes(self) -> int:
        """Inner nodes: distinct proper prefixes, the empty one not counted."""
        return int((self._begins & self._inner).sum())

    def pieces(self, num_nodes: int) -> list[slice]:
        """Consecutive sequences with so many inner nodes at most, or a single one with more."""
        begins, inner = self._begins, self._inner
        added, alone = (begins & inner).sum(axis=1).tolist(), inner.sum(axis=1).tolist()
        starts, used = [0], 0
        for number, (more, own) in enumerate(zip(added, alone, strict=True)):
            if used + more > num_nodes and number > starts[-1]:
                starts.append(number)
                used = own
            else:
                used += more
        return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(self.rows)], strict=True)]

    @cached_property
    def _begins(self) -> Bools:
        """`[S, L]`: whether a prefix is not that of the sequence before."""
        begins = np.ones(self.rows.shape, dtype=bool)
        begins[1:] = np.logical_or.accumulate(self.rows[1:] != self.rows[:-1], axis=1)
        return begins

    @cached_property
    def _inner(self) -> Bools:
        """`[S, L]`: whether a token is followed by another."""
        return np.append(self.rows[:, 1:] >= 0, np.zeros((len(self.rows), 1), dtype=bool), axis=1)

    def levels(self, device: torch.device) -> list[Level]:
        """The inner nodes of every level, the prompt's first."""
        levels: list[Level] = []
        above: Longs = np.zeros(len(self.rows), dtype=np.int64)
        going_on = np.arange(len(self.rows))
        nodes = None
        for depth in range(self.rows.shape[1]):
            if depth:
                inner = self._inner[:, depth - 1]
                first = np.flatnonzero(self._begins[:, depth - 1] & inner)
                going_on = np.flatnonzero(inner)
                if not len(first):
                    break
                nodes = (self._moved(self.rows[first, depth - 1], device), self._moved(above[first], device))
                above = np.cumsum(self._begins[:, depth - 1] & inner) - 1
            moved = (self._moved(array, device) for array in (going_on, above[going_on], self.rows[going_on, depth]))
            levels.append(Level(*moved, nodes=nodes))
        return levels

    @staticmethod
    def _moved(array: Array, device: torch.device) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)


@dataclass(frozen=True)
class Level:
    """Inner nodes with the same number of tokens, and the sequences that go on from them.

    Attributes:
        sequences: those that go on.
        places: the node that each of them goes on from.
        tokens: the token by which it does.
        nodes: the tokens of the nodes, and their parents among those of the level above; None for the prompt.
    """

    sequences: Int[Tensor, " sequences"]
    places: Int[Tensor, " sequences"]
    tokens: Int[Tensor, " sequences"]
    nodes: tuple[Int[Tensor, " nodes"], Int[Tensor, " nodes"]] | None


class ExhaustiveScorer:
    """Log-probabilities of all sequences behind a prompt.

    Args:
        sequences: the sequences.
        batch_size: the most prompts of a call.
        vocab_size: V, which together with the batch says how many nodes a forward has room for.
        as_tree: whether the model scores nodes as a tree. If not, every path is a row of its own, and takes as much
            room as the longest.
        device: where the scorers are.
        num_nodes: nodes of a forward, if not as many as there is room for.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        batch_size: int,
        vocab_size: int,
        as_tree: bool,
        device: torch.device,
        num_nodes: int | None = None,
    ) -> None:
        rows = sequences.rows
        room = num_nodes or max(min(NODES_AT_ONCE, LOGITS_AT_ONCE // (batch_size * vocab_size)), 1)
        each = max(room // rows.shape[1], 1)
        pieces = sequences.pieces(room) if as_tree else [slice(at, at + each) for at in range(0, len(rows), each)]
        self.levels = [Sequences(rows[piece]).levels(device) for piece in pieces]

    def score(self, new_scorer: Callable[[], Scorer]) -> Float[Tensor, "batch sequences"]:
        """Sums of log-softmax values over the full vocabulary, the end token's included.

        Args:
            new_scorer: makes another scorer over the same prompts, one for each piece.
        """
        return torch.cat([_score_piece(new_scorer(), levels) for levels in self.levels], dim=1)


def _score_piece(scorer: Scorer, levels: Sequence[Level]) -> Float[Tensor, "batch sequences"]:
    batch_size, device = len(scorer.prompt_logits), scorer.prompt_logits.device
    total = torch.zeros((batch_size, len(levels[0].sequences)), device=device)
    for level, logits in zip(levels, _logits(scorer, levels), strict=True):
        chosen = logits[:, level.places, level.tokens].float()
        total[:, level.sequences] += chosen - _normalizers(logits)[:, level.places]
    return total


def _logits(scorer: Scorer, levels: Sequence[Level]) -> Iterator[Float[Tensor, "batch nodes vocab"]]:
    """The logits of every level's nodes, by one forward if the model takes several levels in one."""
    batch_size = len(scorer.prompt_logits)
    below: list[Nodes] = []
    for level in levels[1:]:
        assert level.nodes is not None
        tokens, parents = (array.expand(batch_size, -1) for array in level.nodes)
        below.append(Nodes(tokens, parents, torch.zeros_like(tokens)))
    yield scorer.prompt_logits
    if scorer.takes_levels and below:
        yield from scorer.score(below, depth=1)
        return
    for depth, nodes in enumerate(below, start=1):
        yield scorer.score([nodes], depth=depth)[0]


def _normalizers(logits: Float[Tensor, "batch nodes vocab"]) -> Float[Tensor, "batch nodes"]:
    """What log-softmax takes off the logits; in pieces, because nothing else here is as large."""
    rows = logits.flatten(0, 1)
    pieces = rows.split(max(SCORES_AT_ONCE // logits.shape[-1], 1))
    return torch.cat([piece.float().logsumexp(dim=-1) for piece in pieces]).view(logits.shape[:2])
