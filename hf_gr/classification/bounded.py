# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The probable sequences of a large catalogue, and a bound on all others: best-first search. Knows no model.

A node is at least as probable as all sequences below it together. So the nodes are scored from the most probable one
on, and once those that are left are together improbable beside what was found, nothing below them can matter. The slow
twin is `exhaustive`, which scores every node.

A forward scores the best nodes of every row. Their keys are kept, up to a limit; beyond it they are forgotten, and a
node whose ancestors are gone is read together with them.

Axes: B batch, N nodes of a forward, D depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hf_gr.catalogue.fanout import Bools, Longs
from hf_gr.torch.scorers import TreeScorer
from hf_gr.torch.transfers import to_device
from hf_gr.torch.tree import Tree

from .exhaustive import normalizers
from .label_trees import LOGITS_AT_ONCE, NODES_AT_ONCE, Sequences

FIRST_NODES = 64  # of a forward; later ones take a quarter of what is scored, so that few are taken too early
KEYS_AT_ONCE = 2**30  # bytes of the nodes' keys and values


@dataclass(frozen=True, eq=False)
class Edges:
    """A trie by its nodes, the root's number 0; all arrays have one entry a node.

    Attributes:
        parents: the node above; the root's own.
        tokens: on the edge into the node.
        depths: tokens from the root.
        first: the first child.
        last: one past the last child.
        is_inner: whether it has children, or is the root.
        sequences: the number of the sequence that ends here; meaningless for inner nodes.
    """

    parents: Longs
    tokens: Longs
    depths: Longs
    first: Longs
    last: Longs
    is_inner: Bools
    sequences: Longs

    @classmethod
    def of(cls, sequences: Sequences) -> Edges:
        """All edges of a trie."""
        trie, starts = sequences.trie, sequences.trie.level_starts
        none = np.zeros(1, dtype=np.int64)
        parents, tokens, depths, first, last = [none], [none], [none], [], []
        for level, (fanout, start, below) in enumerate(zip(trie.fanouts, starts, starts[1:], strict=False), start=1):
            nodes = np.arange(fanout.num_children)
            parents.append(fanout.parents(nodes) + start)
            tokens.append(trie.token(nodes + below, level))
            depths.append(np.full(len(nodes), level))
            ranges = fanout.ranges(np.arange(fanout.num_parents))
            first.append(ranges[0] + below)
            last.append(ranges[1] + below)
        nothing = np.zeros(trie.fanouts[-1].num_children, dtype=np.int64)
        return cls(
            parents=np.concatenate(parents),
            tokens=np.concatenate(tokens),
            depths=np.concatenate(depths),
            first=np.concatenate([*first, nothing]),
            last=np.concatenate([*last, nothing]),
            is_inner=np.concatenate(sequences.goes_on),
            sequences=np.concatenate(sequences.first),
        )


@dataclass(frozen=True)
class Probable:
    """What was found for one row.

    Attributes:
        numbers: of the sequences.
        log_probs: theirs.
        num_scored: nodes that were scored.
    """

    numbers: Longs
    log_probs: Float[Tensor, " found"]
    num_scored: int


class BoundedScorer:
    """Log-probabilities of the sequences that matter after a prompt.

    Args:
        sequences: all sequences.
        vocab_size: V, which with the batch determines how many nodes a forward has room for.
        tolerance: the search ends when all that was not found is at most this share of what was.
        at_least: sequences to find in any case, as far as there are so many.
    """

    def __init__(self, sequences: Sequences, *, vocab_size: int, tolerance: float, at_least: int) -> None:
        self.edges = Edges.of(sequences)
        self.vocab_size = vocab_size
        self.tolerance = tolerance
        self.at_least = at_least

    def score(self, new_scorer: Callable[[], TreeScorer]) -> list[Probable]:
        """Search for every row of a batch.

        Args:
            new_scorer: makes another scorer over the same prompts.
        """
        return _Search(self, new_scorer).run()


class _Search:
    """One batch.

    Attributes:
        log_probs: by row of the batch and by node; `-inf` for what was not reached.
        is_open: whether the node was reached and not scored.
        slots: of the node's keys, -1 for none.
        num_slots: of all keys.
        num_scored: nodes scored, by row.
    """

    def __init__(self, over: BoundedScorer, new_scorer: Callable[[], TreeScorer]) -> None:
        self.over = over
        self.edges = over.edges
        self.new_scorer = new_scorer
        self.scorer = new_scorer()
        (self.of_prompt,) = self.scorer.begin()
        self.num_rows = len(self.of_prompt)
        shape = self.num_rows, len(self.edges.parents)
        self.log_probs = np.full(shape, -np.inf)
        self.log_probs[:, 0] = 0.0
        self.is_open = np.zeros(shape, dtype=bool)
        self.slots = np.full(shape, -1)
        self.num_slots = 0
        self.num_scored = np.zeros(self.num_rows, dtype=np.int64)
        self.most_slots = _most_slots(self.scorer)

    def run(self) -> list[Probable]:
        """Score nodes until every row is done."""
        rows = range(self.num_rows)
        self._reach(self.of_prompt, [np.zeros(1, dtype=np.int64) for _ in rows])
        while any(map(len, needed := [self._needed(row) for row in rows])):
            self._score(needed)
        return [self._found(row) for row in rows]

    def _needed(self, row: int) -> Longs:
        """The nodes of one row that must be scored as far as is known, the most probable first; none at its end."""
        nodes = np.flatnonzero(self.is_open[row] & (self.log_probs[row] > -np.inf))
        nodes = nodes[np.argsort(-self.log_probs[row, nodes], kind="stable")]
        ended = self._ended(row)
        if len(ended) < self.over.at_least or not len(nodes):
            return nodes
        most = max(float(self.log_probs[row, ended].max()), float(self.log_probs[row, nodes[0]]))
        found = np.exp(self.log_probs[row, ended] - most).sum()
        mass = np.exp(self.log_probs[row, nodes] - most)[::-1].cumsum()[::-1]  # of each node and all after it
        return nodes[: int((mass > self.over.tolerance * found).sum())]

    def _ended(self, row: int) -> Longs:
        """The leaves that were reached."""
        return np.flatnonzero(~self.edges.is_inner & (self.log_probs[row] > -np.inf))

    def _found(self, row: int) -> Probable:
        nodes = np.flatnonzero(~self.edges.is_inner & ~(self.log_probs[row] == -np.inf))
        log_probs = torch.from_numpy(self.log_probs[row, nodes])
        return Probable(self.edges.sequences[nodes], log_probs, int(self.num_scored[row]))

    def _score(self, needed: Sequence[Longs]) -> None:
        """Score the most probable nodes of every row; one that is done reads the root again."""
        room = max(min(NODES_AT_ONCE, LOGITS_AT_ONCE // (len(needed) * self.over.vocab_size)), 1)
        most = min(room, max(FIRST_NODES, int(self.num_scored.max()) // 4))
        picked = [nodes[:most] for nodes in needed]
        if self.num_slots and self.num_slots + most > self.most_slots:
            self._forget()
        read = [
            np.append(nodes, self._unread_above(row, nodes)) if len(nodes) else np.zeros(1, dtype=np.int64)
            for row, nodes in enumerate(picked)
        ]
        width = max(map(len, read))
        nodes = np.stack([np.append(of_row, np.repeat(of_row[:1], width - len(of_row))) for of_row in read])
        for row, of_row in enumerate(read):
            self.slots[row, of_row] = self.num_slots + np.arange(len(of_row))
        self.num_slots += width
        ancestry = self._ancestry(nodes)
        device = self.of_prompt.device
        logits = self.scorer.read(
            to_device(self.edges.tokens[nodes], device),
            Tree(to_device(ancestry, device), self.num_slots, is_level=False),
            to_device(self.edges.depths[nodes], device),
        )
        self.num_scored += [len(of_row) for of_row in picked]
        self._reach(logits, picked)

    def _reach(self, logits: Float[Tensor, "rows nodes vocab"], scored: Sequence[Longs]) -> None:
        """Open the children of the first nodes of every row, whose logits these are."""
        edges = self.edges
        flat = np.concatenate(scored)
        sizes = edges.last[flat] - edges.first[flat]
        above = np.repeat(np.arange(len(flat)), sizes)  # of each child, the place of its parent in `flat`
        children = np.arange(len(above)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + edges.first[flat][above]
        rows = np.repeat(np.arange(len(scored)), [len(of_row) for of_row in scored])
        columns = np.concatenate([np.arange(len(of_row)) for of_row in scored])
        at = [to_device(array, logits.device) for array in (rows[above], columns[above], edges.tokens[children])]
        steps = logits[at[0], at[1], at[2]].float() - normalizers(logits)[at[0], at[1]]
        self.log_probs[rows[above], children] = self.log_probs[rows, flat][above] + steps.double().cpu().numpy()
        self.is_open[rows, flat] = False
        self.is_open[rows[above], children] = edges.is_inner[children]

    def _ancestry(self, nodes: Longs) -> Longs:
        """The slots of each node's ancestors and its own; before the first one NO_SLOT, which is the root's."""
        depth = int(self.edges.depths[nodes].max())
        ancestry = np.empty((*nodes.shape, depth), dtype=np.int64)
        for column in range(depth - 1, -1, -1):
            ancestry[..., column] = np.take_along_axis(self.slots, nodes, axis=1)
            nodes = self.edges.parents[nodes]
        return ancestry

    def _unread_above(self, row: int, nodes: Longs) -> Longs:
        """The ancestors of some nodes whose keys are not there."""
        missing: list[Longs] = []
        while len(nodes := np.unique(self.edges.parents[nodes])) > 1 or nodes[0]:
            missing.append(nodes[(self.slots[row, nodes] < 0) & (nodes > 0)])
        return np.unique(np.concatenate([*missing, nodes[:0]]))

    def _forget(self) -> None:
        """Drop the keys of all nodes."""
        self.scorer = self.new_scorer()
        self.scorer.begin()
        self.slots[:] = -1
        self.num_slots = 0


def _most_slots(scorer: TreeScorer) -> int:
    """How many nodes of each row may have their keys at a time."""
    layers = [layer for layer in scorer.prompt.cache.layers if layer.keys is not None]  # others read another one's
    held = [states for layer in layers for states in (layer.keys, layer.values)]
    of_node = sum(states[..., :1, :].numel() * states.element_size() for states in held)
    return max(KEYS_AT_ONCE // max(of_node, 1), NODES_AT_ONCE)
