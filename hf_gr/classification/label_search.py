# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The most probable label sequences after prompts, by the engine's best-first search over their trie. Knows no text.

A node is as probable as all sequences below it together, or more. So what was not visited is bounded, and the search
ends once it cannot matter.

Axes: B batch, P prompt, N nodes of a forward, S sequences, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_gr.catalogue.fanout import Array, Bools, Longs
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import Trie, build_trie
from hf_gr.generation.defaults import LOGITS_AT_ONCE
from hf_gr.torch.best_first import best_masses
from hf_gr.torch.decode import DecodePlan
from hf_gr.torch.device_trie import on_device
from hf_gr.torch.drafters import TreeDrafter
from hf_gr.torch.ops import to_device
from hf_gr.torch.transition import DeviceCatalogue

from .chains import ChainScorer, edges_of
from .model import LabelModel, Prompts
from .result import Method

Doubles = NDArray[np.float64]
# From `[S, T]` sequences to what each stands for: labels that tokenize alike.
LabelsOf = Callable[[Longs], Sequence[Sequence[Any]]]

NODES_AT_ONCE = 1024  # tokens of one request in a forward: attention is quadratic in them
NODES_OF_BATCH = 256  # tokens of all requests in a forward of a bounded search: more would take some not needed
KEYS_AT_ONCE = 2**32  # bytes of all nodes' keys and values
ALL = 2**31  # more nodes than any label set has

_TREES: WeakKeyDictionary[Snapshot, dict[bool, LabelTree]] = WeakKeyDictionary()
# By model and prompt: the logits after it, which say whether the weights are the same, and what `Prior` knows.
_PRIORS: WeakKeyDictionary[Any, dict[bytes, tuple[Tensor, dict[bytes, float]]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Found:
    """The sequences found for one text."""

    rows: Longs  # `[S, T]` label sequences, padded with -1
    log_probs: Doubles  # `[S]`, theirs
    labels: Sequence[Sequence[Any]]  # what each stands for: labels that tokenize alike; of answers one tuple of labels
    mass_left: float  # the most that the others have together, as a share of all
    num_scored: int  # nodes


@dataclass(frozen=True, eq=False)
class LabelTree:
    """Label sequences in the order of the leaves of their trie: all that does not depend on a prompt."""

    trie: Trie  # of the sequences; or of edges, which end where a beginning is no other sequence's
    rows: Longs  # `[S, T]` the whole sequences, padded with -1
    labels: Sequence[Sequence[Any]]  # what each stands for
    leaves: Longs  # `[S]`, their nodes
    chains: Longs | None  # `[1 + E, C]`, the tokens of edges, padded

    @classmethod
    def of(cls, rows: Array, labels_of: LabelsOf, *, is_short: bool = False) -> LabelTree:
        """Distinct sequences; if `is_short`, by the shortest beginnings that no other one has, which are of edges."""
        rows = rows.astype(np.int64)
        edges, chains = edges_of(rows) if is_short else (rows, None)
        trie, order, _ = build_trie(edges)
        starts = trie.level_starts[1:]
        sizes = np.concatenate([*(fanout.counts() for fanout in trie.fanouts), [0] * (starts[-1] - starts[-2])])
        rows = rows[order]
        return cls(trie, rows, labels_of(rows), np.flatnonzero(sizes == 0), chains)

    @classmethod
    def of_labels(cls, snapshot: Snapshot, *, is_short: bool) -> LabelTree:
        """The living labels of a catalogue; made once."""
        known = _TREES.setdefault(snapshot, {})
        if is_short not in known:
            known[is_short] = cls.of(snapshot.rows(), snapshot.items_of, is_short=is_short)
        return known[is_short]

    @property
    def num_nodes(self) -> int:
        """Nodes of the trie with children, the root not counted."""
        return self.trie.level_starts[-1] - 1 - self.trie.num_sequences

    @property
    def num_tokens(self) -> int:
        """Tokens of those nodes together. An edge that ends a sequence has one."""
        return self.num_nodes if self.chains is None else int((self.chains >= 0).sum()) - self.trie.num_sequences


class TreeSearch:
    """Scores the sequences of a tree after prompts; their probabilities may be among the legal tokens of each step.

    The search ends when all sequences not found are together at most `tolerance` times as probable as those found, and
    `at_least` so many are found, if there are; with `proves` when no other is as probable as one of those so many; or
    after `max_nodes`. Tolerance 0 scores every node.
    """

    def __init__(
        self,
        model: LabelModel,
        tree: LabelTree,
        *,
        renormalizes: bool = False,
        tolerance: float = 0.0,
        at_least: int = 1,
        max_nodes: int = ALL,
        proves: bool = False,
    ) -> None:
        self.model, self.tree, self.tolerance, self.renormalizes = model, tree, tolerance, renormalizes
        self.proves = proves and tolerance > 0
        self.at_least, self.max_nodes = min(at_least, len(tree.rows)), max_nodes
        self.method: Method = "exact" if not tolerance and tree.num_nodes <= max_nodes else "bounded"
        # With less, no sequence could be completed.
        self.max_nodes = ALL if self.method == "exact" else max(max_nodes, tree.trie.max_length)

    def find(self, prompts: Prompts) -> list[Found]:
        """The sequences that matter after each prompt of a batch."""
        tree, (tokens, _) = self.tree, self.model.to_device(prompts)
        room = max(min(NODES_AT_ONCE, LOGITS_AT_ONCE // (len(tokens) * self.model.vocab_size)), 1)
        width = min(room, max(NODES_OF_BATCH // len(tokens), 1)) if self.tolerance else room
        width, room = (max(some * tree.num_nodes // max(tree.num_tokens, 1), 1) for some in (width, room))
        plan = DecodePlan(
            prompt=tokens,
            num_beams=min(width, len(tree.rows)),
            num_return_sequences=self.at_least if self.tolerance else len(tree.rows),
            num_kept=len(tree.rows),
            do_sample=False,
            early_stopping=False,
            tolerance=0.0 if self.proves else self.tolerance,
            max_nodes=self.max_nodes,
            renormalizes=self.renormalizes,
            length_penalty=0.0,
        )
        only = None if tree.chains is None else tree.chains[1:, 0]
        scorer: Any = self.model.scorers(prompts, width=min(tree.num_tokens, NODES_AT_ONCE), only=only)()
        if tree.chains is not None:
            scorer = ChainScorer(scorer, to_device(tree.chains, tokens.device))
        catalogue = DeviceCatalogue(on_device(tree.trie, tokens.device))
        drafter = None if self.tolerance else TreeDrafter(room)  # all nodes are needed: whole subtrees in a forward
        masses = best_masses(scorer, catalogue, plan, drafter)
        of_found, of_left = (some.keys.double().cpu().numpy() for some in (masses.found, masses.left))
        states, num_scored = masses.found.states.cpu().numpy(), masses.num_scored.tolist()
        is_broken: Bools = masses.is_broken.cpu().numpy() | ~np.isfinite(of_found[:, 0])
        if is_broken.any():
            raise ValueError(self.model.broken)
        found: list[Found] = []
        for row, log_probs in enumerate(of_found):
            numbers = np.searchsorted(tree.leaves, states[row][log_probs > -np.inf])
            log_probs = log_probs[: len(numbers)]
            # Probable ones together, as a share of the most probable: probabilities themselves may be too small.
            mass, left = (np.exp(some - log_probs[0]).sum() for some in (log_probs, of_left[row]))
            left = max(np.exp(-log_probs[0]) - mass, 0.0) if self.proves else left  # all together have 1
            labels = [tree.labels[number] for number in numbers.tolist()]
            found.append(Found(tree.rows[numbers], log_probs, labels, float(left / (mass + left)), num_scored[row]))
        return found


class Prior:
    """Log-probabilities of sequences after a text that says nothing: each is computed once for a model's weights."""

    def __init__(self, model: LabelModel, prompts: Prompts) -> None:
        self.model, self.prompts = model, prompts
        (logits,) = model.scorers(prompts, width=1)().begin()
        kept, key = _PRIORS.setdefault(model.model, {}), prompts[0].tobytes()
        if key not in kept or not torch.equal(kept[key][0], logits):  # other weights, adapters or types
            kept[key] = logits, {}
        self.known = kept[key][1]

    def of(self, rows: Longs) -> Doubles:
        """`[S]` of `[S, T]` sequences, padded with -1."""
        by_key = {row[row >= 0].tobytes(): row for row in rows}
        if new := [row for key, row in by_key.items() if key not in self.known]:
            (found,) = TreeSearch(self.model, LabelTree.of(np.stack(new), list)).find(self.prompts)
            for row, log_prob in zip(found.rows, found.log_probs.tolist(), strict=True):
                self.known[row[row >= 0].tobytes()] = log_prob
        return np.array([self.known[key] for key in by_key])
