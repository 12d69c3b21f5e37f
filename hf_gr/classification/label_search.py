# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of label sequences after prompts, from the nodes of their trie. Knows no text.

`TreeSearch` scores all nodes, or the most probable ones first: a node is at least as probable as all sequences below
it together, so once all unscored nodes together are improbable compared with what was found, the search can stop.

A forward scores some nodes of every row. Their keys are kept, up to a limit; beyond it they are forgotten, and a node
whose ancestors are gone is read together with them.

Axes: B batch, P prompt, N nodes of a forward, S sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from hf_gr.catalogue.fanout import Bools, Longs
from hf_gr.catalogue.trie import Trie, build_trie
from hf_gr.generation.defaults import LOGITS_AT_ONCE
from hf_gr.torch.log_probs import rows_at_once
from hf_gr.torch.ops import to_device
from hf_gr.torch.scorers import TreeScorer
from hf_gr.torch.tree import Tree

from .model import LabelModel, Prompts
from .result import Method

Floats = NDArray[np.floating[Any]]
# From `[S, T]` sequences to what each stands for: labels that tokenize alike.
LabelsOf = Callable[[Longs], Sequence[Sequence[Any]]]

NODES_AT_ONCE = 1024  # of one request in a forward: attention is quadratic in them
FIRST_NODES = 64  # of a bounded search; later ones take a quarter of what is scored, so that few are taken too early
KEYS_AT_ONCE = 2**30  # bytes of the nodes' keys and values


@dataclass(frozen=True)
class Found:
    """The sequences found for one text."""

    rows: Longs  # `[S, T]` label sequences, padded with -1
    log_probs: Floats  # `[S]`, theirs
    labels: Sequence[Sequence[Any]]  # what each stands for: labels that tokenize alike; of answers one tuple of labels
    num_scored: int  # nodes


def num_inner_nodes(trie: Trie) -> int:
    """Distinct proper prefixes of all sequences, the empty one not counted."""
    return trie.level_starts[-1] - 1 - trie.num_sequences


@dataclass(frozen=True, eq=False)
class Edges:
    """A trie by its nodes, level by level from the root, whose number is 0; all arrays have one entry a node."""

    parents: Longs  # the root's own is itself
    tokens: Longs  # on the edge into the node
    depths: Longs  # tokens from the root
    first: Longs  # child
    last: Longs  # one past the last child
    starts: tuple[int, ...]  # the first node of every level

    @classmethod
    def of(cls, trie: Trie) -> Edges:
        """All edges of a trie, whose nodes are numbered in the order of their parents."""
        starts, no_children = trie.level_starts, np.zeros(trie.fanouts[-1].num_children, dtype=np.int64)
        sizes = np.concatenate([*(fanout.counts() for fanout in trie.fanouts), no_children])
        levels = enumerate(zip(starts[1:], starts[2:], strict=False), start=1)
        tokens = [trie.token(np.arange(start, end), level) for level, (start, end) in levels]
        return cls(
            parents=np.append(0, np.repeat(np.arange(len(sizes)), sizes)),
            tokens=np.append(0, np.concatenate(tokens)),
            depths=np.repeat(np.arange(len(starts) - 1), np.diff(starts)),
            first=1 + np.cumsum(sizes) - sizes,
            last=1 + np.cumsum(sizes),
            starts=starts,
        )

    @cached_property
    def is_inner(self) -> Bools:
        """Whether each node has children."""
        return self.last > self.first

    def depth_first(self) -> Longs:
        """The inner nodes without the root, each before those below it and those before its next sibling."""
        sizes, places = np.ones(len(self.parents), dtype=np.int64), np.zeros(len(self.parents), dtype=np.int64)
        levels = [slice(start, end) for start, end in zip(self.starts[1:], self.starts[2:], strict=False)]
        for level in reversed(levels):
            np.add.at(sizes, self.parents[level], sizes[level])
        for level in levels:
            above = self.parents[level]
            before = np.cumsum(sizes[level]) - sizes[level]
            places[level] = places[above] + 1 + before - before[self.first[above] - level.start]
        order = np.argsort(places)[1:]
        return order[self.is_inner[order]]

    def summed(self, steps: Floats) -> Floats:
        """`[B, nodes]` sums of the steps from the root to each node."""
        totals = steps.copy()
        for start, end in zip(self.starts[1:], self.starts[2:], strict=False):
            totals[:, start:end] += totals[:, self.parents[start:end]]
        return totals


class TreeSearch:
    """Scores the sequences of a trie after prompts.

    The search ends when all sequences not found are together at most `tolerance` times as probable as those found, and
    at least `at_least` are found, if there are so many; tolerance 0 scores every node.
    """

    def __init__(
        self, model: LabelModel, trie: Trie, labels_of: LabelsOf, *, tolerance: float = 0.0, at_least: int = 1
    ) -> None:
        self.model, self.edges, self.tolerance, self.at_least = model, Edges.of(trie), tolerance, at_least
        self.method: Method = "bounded" if tolerance else "exact"
        self.rows = trie.sequences(np.arange(trie.num_sequences)).astype(np.int64)
        self.labels = labels_of(self.rows)
        self.leaves = np.flatnonzero(~self.edges.is_inner)  # in the order of the rows: both go level by level

    def find(self, prompts: Prompts) -> list[Found]:
        """The sequences that matter after each prompt of a batch."""
        of_batch = _Batch(self, prompts)
        if self.tolerance:
            of_batch.score_probable()
        else:
            of_batch.score_all()
        found = []
        for log_probs, num_scored in zip(of_batch.log_probs[:, self.leaves], of_batch.num_scored, strict=True):
            numbers = np.arange(len(self.rows))
            if self.tolerance:
                numbers = np.flatnonzero(~(log_probs == -np.inf))  # NaN is found: it says that the model is broken
            labels = [self.labels[number] for number in numbers.tolist()]
            found.append(Found(self.rows[numbers], log_probs[numbers], labels, int(num_scored)))
        return found


class _Batch:
    """One batch of a search."""

    def __init__(self, search: TreeSearch, prompts: Prompts) -> None:
        self.search, self.edges = search, search.edges
        self.new_scorer = search.model.scorers(prompts, width=NODES_AT_ONCE if search.tolerance else 2)
        self.scorer = self.new_scorer()
        (self.of_prompt,) = self.scorer.begin()
        self.num_rows = len(self.of_prompt)
        shape = self.num_rows, len(self.edges.parents)
        self.log_probs = np.full(shape, -np.inf)  # by row and node
        self.log_probs[:, 0] = 0.0
        self.slots = np.full(shape, -1)  # of the nodes' keys, -1 for none
        self.num_slots = 0  # of all keys
        self.num_scored = np.zeros(self.num_rows, dtype=np.int64)
        self.room = max(min(NODES_AT_ONCE, LOGITS_AT_ONCE // (self.num_rows * search.model.vocab_size)), 1)

    def score_all(self) -> None:
        """Score every node, depth first: few ancestors of a forward are read again."""
        order, root = self.edges.depth_first(), np.zeros(1, dtype=np.int64)
        pieces = [order[start : start + self.room] for start in range(0, len(order), self.room)]
        self._follow(self.of_prompt, [root] * self.num_rows)
        for number, piece in enumerate(pieces):
            if number:
                self._forget()
            self._follow(self._read([piece] * self.num_rows), [piece] * self.num_rows)
        self.log_probs = self.edges.summed(self.log_probs)

    def score_probable(self) -> None:
        """Score the most probable nodes until what is left cannot matter."""
        most_slots = _most_slots(self.scorer)
        is_open = np.zeros(self.log_probs.shape, dtype=bool)  # reached and not scored
        picked: list[Longs] = [np.zeros(1, dtype=np.int64)] * self.num_rows
        logits = self.of_prompt
        while any(map(len, picked)):
            rows, parents, children = self._follow(logits, picked)
            self.log_probs[rows, children] += self.log_probs[rows, parents]
            is_open[rows, parents] = False
            is_open[rows, children] = self.edges.is_inner[children]
            most = min(self.room, max(FIRST_NODES, int(self.num_scored.max()) // 4))
            picked = [self._needed(row, is_open[row])[:most] for row in range(self.num_rows)]
            if not any(map(len, picked)):
                return
            if self.num_slots and self.num_slots + most > most_slots:
                self._forget()
            logits = self._read(picked)

    def _needed(self, row: int, is_open: Bools) -> Longs:
        """The nodes of one row that must be scored as far as is known, the most probable first; none at its end."""
        log_probs = self.log_probs[row]
        nodes = np.flatnonzero(is_open & (log_probs > -np.inf))
        nodes = nodes[np.argsort(-log_probs[nodes], kind="stable")]
        ended = log_probs[self.search.leaves]
        ended = ended[ended > -np.inf]
        if len(ended) < self.search.at_least or not len(nodes):
            return nodes
        most = max(float(ended.max()), float(log_probs[nodes[0]]))
        mass = np.exp(log_probs[nodes] - most)[::-1].cumsum()[::-1]  # of each node and all after it
        return nodes[: int((mass > self.search.tolerance * np.exp(ended - most).sum()).sum())]

    def _read(self, picked: Sequence[Longs]) -> Float[Tensor, "rows nodes vocab"]:
        """Logits after the nodes of every row, and then of others; a row that is done reads the root again."""
        root = np.zeros(1, dtype=np.int64)
        read = [
            np.append(nodes, self._unread_above(row, nodes)) if len(nodes) else root
            for row, nodes in enumerate(picked)
        ]
        width = max(map(len, read))
        nodes = np.stack([np.append(of_row, np.repeat(of_row[:1], width - len(of_row))) for of_row in read])
        for row, of_row in enumerate(read):
            self.slots[row, of_row] = self.num_slots + np.arange(len(of_row))
        self.num_slots += width
        self.num_scored += [len(of_row) for of_row in picked]
        device = self.of_prompt.device
        return self.scorer.read(
            to_device(self.edges.tokens[nodes], device),
            Tree(to_device(self._ancestry(nodes), device), self.num_slots, is_level=False),
            to_device(self.edges.depths[nodes[:1] if (nodes == nodes[0]).all() else nodes], device),
        )

    def _follow(
        self, logits: Float[Tensor, "rows nodes vocab"], scored: Sequence[Longs]
    ) -> tuple[Longs, Longs, Longs]:
        """Note the steps to children of every row's first nodes, by their logits: rows, parents, children."""
        edges = self.edges
        flat = np.concatenate(scored)
        sizes = edges.last[flat] - edges.first[flat]
        above = np.repeat(np.arange(len(flat)), sizes)  # of each child, the place of its parent in `flat`
        children = np.arange(len(above)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + edges.first[flat][above]
        rows = np.repeat(np.arange(len(scored)), [len(of_row) for of_row in scored])[above]
        columns = np.concatenate([np.arange(len(of_row)) for of_row in scored])[above]
        at = [to_device(array, logits.device) for array in (rows, columns, edges.tokens[children])]
        steps = logits[at[0], at[1], at[2]].float() - normalizers(logits)[at[0], at[1]]
        self.log_probs[rows, children] = steps.double().cpu().numpy()
        return rows, flat[above], children

    def _ancestry(self, nodes: Longs) -> Longs:
        """The slots of each node's ancestors and its own; before the first one NO_SLOT, which is the root's."""
        depth = int(self.edges.depths[nodes].max())
        ancestry = np.empty((*nodes.shape, depth), dtype=np.int64)
        for column in range(depth - 1, -1, -1):
            ancestry[..., column] = np.take_along_axis(self.slots, nodes, axis=1)
            nodes = self.edges.parents[nodes]
        return ancestry

    def _unread_above(self, row: int, nodes: Longs) -> Longs:
        """The ancestors of some nodes whose keys are neither stored nor read with them."""
        missing: list[Longs] = []
        slots = self.slots[row]
        above = nodes
        while len(above := np.unique(self.edges.parents[above])) > 1 or above[0]:
            missing.append(above[(slots[above] < 0) & (above > 0)])
        return np.setdiff1d(np.concatenate([*missing, nodes[:0]]), nodes)

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


def normalizers(logits: Float[Tensor, "batch nodes vocab"]) -> Float[Tensor, "batch nodes"]:
    """What log-softmax subtracts from the logits; in pieces, because logits are the largest tensors here."""
    rows = logits.flatten(0, 1)
    pieces = rows.split(rows_at_once(rows))
    return torch.cat([piece.float().logsumexp(dim=-1) for piece in pieces]).view(logits.shape[:2])


class Prior:
    """Log-probabilities of sequences after one prompt that says nothing; each is scored once."""

    def __init__(self, model: LabelModel, prompts: Prompts) -> None:
        self.model, self.prompts = model, prompts
        self.known: dict[bytes, float] = {}  # by tokens

    def of(self, rows: Longs) -> Floats:
        """`[S]` of `[S, T]` sequences, padded with -1."""
        by_key = {row[row >= 0].tobytes(): row for row in rows}
        if new := [row for key, row in by_key.items() if key not in self.known]:
            (found,) = TreeSearch(self.model, build_trie(np.stack(new))[0], list).find(self.prompts)
            for row, log_prob in zip(found.rows, found.log_probs.tolist(), strict=True):
                self.known[row[row >= 0].tobytes()] = log_prob
        return np.array([self.known[key] for key in by_key])
