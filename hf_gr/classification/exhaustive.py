# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Every sequence of a small catalogue, scored exactly: all inner nodes of its trie as one tree. Knows no model.

A forward scores as many nodes as its logits have room for. A larger catalogue is split between sequences, and the few
nodes above a split are scored again.

Axes: B batch, S sequences, N inner nodes of a level, C children of those, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.catalogue.fanout import Array, Bools, Longs
from hf_gr.catalogue.trie import Trie
from hf_gr.torch.log_probs import rows_at_once
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transfers import to_device
from hf_gr.torch.tree import Nodes

NODES_AT_ONCE = 1024  # of one request in a forward: attention is quadratic in them
LOGITS_AT_ONCE = 2**26  # of one forward: 256 MB in fp32


def num_inner_nodes(trie: Trie) -> int:
    """Distinct proper prefixes of all sequences, the empty one not counted."""
    return trie.level_starts[-1] - 1 - trie.num_sequences


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a trie in lexicographic order, and which of them are below each node.

    Attributes:
        trie: the trie.
        first: by level, the root's first: the first sequence below each node.
        last: by level: one past the last.
        goes_on: by level: whether a node has children; if not, it ends a sequence.
    """

    trie: Trie
    first: tuple[Longs, ...]
    last: tuple[Longs, ...]
    goes_on: tuple[Bools, ...]

    @classmethod
    def of(cls, trie: Trie) -> Sequences:
        """Count the sequences below every node from the last level up, and number them from the root down."""
        ranges = [fanout.ranges(np.arange(fanout.num_parents)) for fanout in trie.fanouts]
        below = [np.ones(trie.fanouts[-1].num_children, dtype=np.int64)]
        for start, end in reversed(ranges):
            before = np.append(0, np.cumsum(below[0]))
            below.insert(0, np.maximum(before[end] - before[start], 1))
        first = [np.zeros(1, dtype=np.int64)]
        for fanout, (start, _), counts in zip(trie.fanouts, ranges, below[1:], strict=True):
            parents, before = fanout.parents(np.arange(fanout.num_children)), np.cumsum(counts) - counts
            first.append(first[-1][parents] + before - before[start[parents]])
        last = tuple(start + counts for start, counts in zip(first, below, strict=True))
        goes_on = [end > start for start, end in ranges]
        return cls(trie, tuple(first), last, (*goes_on, np.zeros(len(below[-1]), dtype=bool)))

    def __len__(self) -> int:
        return self.trie.num_sequences

    @property
    def num_inner_nodes(self) -> int:
        """Distinct proper prefixes of all sequences, the empty one not counted."""
        return num_inner_nodes(self.trie)

    def leaves(self) -> Longs:
        """The leaf of every sequence."""
        leaves = np.empty(len(self), dtype=np.int64)
        for level, start in enumerate(self.trie.leaf_starts[:-1], start=1):
            ended = self.first[level][~self.goes_on[level]]
            leaves[ended] = start + np.arange(len(ended))
        return leaves

    def pieces(self, num_nodes: int) -> list[slice]:
        """Runs of consecutive sequences with at most so many inner nodes, or a single one with more."""
        added, alone = np.zeros(len(self), dtype=np.int64), np.zeros(len(self), dtype=np.int64)
        for level, (first, goes_on) in enumerate(zip(self.first[1:], self.goes_on[1:], strict=True)):
            added[first[goes_on]] += 1  # nodes of one level begin at different sequences
            alone[first[~goes_on]] = level
        starts, used = [0], 0
        for number, (more, own) in enumerate(zip(added.tolist(), alone.tolist(), strict=True)):
            if used + more > num_nodes and number > starts[-1]:
                starts.append(number)
                used = own
            else:
                used += more
        return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(self)], strict=True)]

    def levels(self, piece: slice, device: torch.device) -> list[Level]:
        """The nodes above some consecutive sequences, renumbered from 0."""

        def moved(array: Array) -> Tensor:
            return to_device(array.astype(np.int64), device)

        levels: list[Level] = []
        inner: Longs = np.zeros(1, dtype=np.int64)
        for level, fanout in enumerate(self.trie.fanouts, start=1):
            first, last = self.first[level], self.last[level]
            # Those with a sequence of the piece below them are consecutive.
            nodes = np.arange(np.searchsorted(last, piece.start, "right"), np.searchsorted(first, piece.stop))
            if not len(nodes):
                break
            goes_on = self.goes_on[level][nodes]
            made = (
                np.searchsorted(inner, fanout.parents(nodes)),
                self.trie.token(nodes + self.trie.level_starts[level], level),
                np.flatnonzero(goes_on),
                np.flatnonzero(~goes_on),
                first[nodes[~goes_on]] - piece.start,
            )
            levels.append(Level(*map(moved, made)))
            inner = nodes[goes_on]
        return levels


@dataclass(frozen=True)
class Level:
    """The children of the inner nodes of one level, the first of which has the prompt alone.

    Attributes:
        parents: the place of each child's parent among those nodes.
        tokens: the token of each child.
        inner: the children that continue: the nodes of the next level.
        ends: the children that end a sequence.
        sequences: the sequence that each of those ends.
    """

    parents: Int[Tensor, " children"]
    tokens: Int[Tensor, " children"]
    inner: Int[Tensor, " inner"]
    ends: Int[Tensor, " ends"]
    sequences: Int[Tensor, " ends"]


class ExhaustiveScorer:
    """Log-probabilities of all sequences after a prompt.

    Args:
        sequences: the sequences.
        batch_size: the most prompts of a call.
        vocab_size: V, which with the batch determines how many nodes a forward has room for.
        as_tree: whether the model scores nodes as a tree. If not, every path is a row of its own, and takes as much
            room as the longest.
        device: where the scorers are.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        batch_size: int,
        vocab_size: int,
        as_tree: bool,
        device: torch.device,
    ) -> None:
        room = max(min(NODES_AT_ONCE, LOGITS_AT_ONCE // (batch_size * vocab_size)), 1)
        each = max(room // sequences.trie.max_length, 1)
        pieces = sequences.pieces(room) if as_tree else [slice(at, at + each) for at in range(0, len(sequences), each)]
        self.levels = [sequences.levels(piece, device) for piece in pieces]

    def score(self, new_scorer: Callable[[], Scorer]) -> Float[Tensor, "batch sequences"]:
        """Sums of log-softmax values over the full vocabulary, the end token's included.

        Args:
            new_scorer: makes another scorer over the same prompts, one for each piece.
        """
        return torch.cat([_score_piece(new_scorer(), levels) for levels in self.levels], dim=1)


def _score_piece(scorer: Scorer, levels: Sequence[Level]) -> Float[Tensor, "batch sequences"]:
    (of_prompt,) = scorer.begin()
    batch_size, device = len(of_prompt), of_prompt.device
    found = torch.zeros((batch_size, sum(len(level.sequences) for level in levels)), device=device)
    log_probs = torch.zeros((batch_size, 1), device=device)  # of the nodes
    for level, logits in zip(levels, _logits(scorer, of_prompt, levels), strict=True):
        chosen = logits[:, level.parents, level.tokens].float()
        log_probs = log_probs[:, level.parents] + (chosen - normalizers(logits)[:, level.parents])
        found[:, level.sequences] = log_probs[:, level.ends]
        log_probs = log_probs[:, level.inner]
    return found


def _logits(
    scorer: Scorer, of_prompt: Float[Tensor, "batch 1 vocab"], levels: Sequence[Level]
) -> Iterator[Float[Tensor, "batch nodes vocab"]]:
    """The logits of every level's nodes, by one forward if the model takes several levels in one."""
    batch_size = len(of_prompt)
    below: list[Nodes] = []
    for level in levels[:-1]:
        tokens, parents = (of[level.inner].expand(batch_size, -1) for of in (level.tokens, level.parents))
        below.append(Nodes(tokens, parents, torch.zeros_like(tokens)))
    yield of_prompt
    if scorer.takes_levels and below:
        yield from scorer.score(below, depth=1)
        return
    for depth, nodes in enumerate(below, start=1):
        yield scorer.score([nodes], depth=depth)[0]


def normalizers(logits: Float[Tensor, "batch nodes vocab"]) -> Float[Tensor, "batch nodes"]:
    """What log-softmax subtracts from the logits; in pieces, because nothing else here is as large."""
    rows = logits.flatten(0, 1)
    pieces = rows.split(rows_at_once(len(rows), rows.shape[1], rows.device))
    return torch.cat([piece.float().logsumexp(dim=-1) for piece in pieces]).view(logits.shape[:2])
