# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The beam step of STATIC and its baselines, each written from its description. Of `hf_gr` they have the selection.

All share one search: the log-softmax over the full vocabulary is added to the beam's score, the method says which
extensions are legal, and the selection that ours has, too (`topk`), picks the next beams. Open choices favour the
baseline: it starts from one beam instead of K equal ones, and carries over what a step can hand to the next (a hash, a
range of rows).

Sources: STATIC, algorithms 1 and 2, appendix A, section 5.2 and its public code; Ye et al., "Efficient and
asymptotically unbiased constrained decoding", for PPV.

Axes: B batch, K beams, V vocabulary, M candidates of a beam, N rows of the catalogue, sorted and distinct, L
    their tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_gr.catalogue.trie import Trie
from hf_gr.torch.ops import topk
from hf_gr.torch.tree import Nodes

DEAD = -torch.inf


class Scorer(Protocol):
    """Logits after the prompt `[B, 1, V]`, then after each beam's new token `[B, K, V]`."""

    prompt_logits: Tensor

    def score(self, levels: Sequence[Nodes], *, depth: int) -> list[Tensor]: ...


@dataclass(frozen=True)
class Beams:
    """Sequences `[B, K, T]`, the beam that each token was appended to `[B, K, T]`, and scores `[B, K]`.

    `chosen` `[B, K]`: places among all candidates of a row, those of the last step.
    """

    sequences: Tensor
    beam_indices: Tensor
    scores: Tensor
    chosen: Tensor | None = None

    @classmethod
    def start(cls, batch_size: int, device: torch.device) -> Beams:
        nothing = torch.zeros((batch_size, 1, 0), dtype=torch.long, device=device)
        return cls(nothing, nothing, torch.zeros((batch_size, 1), device=device))

    @property
    def tokens(self) -> Tensor:
        return self.sequences[..., -1]

    @property
    def parents(self) -> Tensor:
        return self.beam_indices[..., -1]

    def extend(self, scores: Tensor, tokens: Tensor | None, num_beams: int) -> Beams:
        """The K best of the candidates `[B, k, M]`; without tokens, they are the whole vocabulary."""
        width = scores.shape[-1]
        flat = scores.flatten(1)
        missing = num_beams - flat.shape[-1]
        best, chosen = topk(F.pad(flat, (0, missing), value=DEAD) if missing > 0 else flat, num_beams)
        if missing > 0:
            chosen = chosen.clamp(max=flat.shape[-1] - 1)
        parents = chosen // width
        new = chosen - parents * width if tokens is None else tokens.flatten(1).gather(1, chosen)
        along = parents[..., None].expand(-1, -1, self.sequences.shape[-1])
        return Beams(
            torch.cat([self.sequences.gather(1, along), new[..., None]], dim=-1),
            torch.cat([self.beam_indices.gather(1, along), parents[..., None]], dim=-1),
            best,
            chosen,
        )


class Method:
    """A way to know which extensions are legal. This one allows all: unconstrained beam search."""

    def start(self, batch_size: int, device: torch.device) -> Any:
        """What is known of the empty prefix, one per row."""
        return None

    def candidates(self, scores: Tensor, beams: Beams, state: Any, level: int) -> tuple[Tensor, Tensor | None]:
        """From the scores of all extensions `[B, k, V]` to those `[B, k, M]` that compete, and their tokens."""
        return scores, None

    def follow(self, state: Any, beams: Beams, level: int) -> Any:
        """What is known of the beams that were chosen."""
        return state


class Static(Method):
    """STATIC: a mask and states over V x V for the first two levels, below them tokens and states in rows (CSR).

    A step as its public PyTorch code has it, but all legal candidates compete, not the best few of each beam: those
    lose answers. With more tokens than `DENSE_VOCAB` the second level is read from the rows.
    """

    DENSE_VOCAB = 8192  # 5 bytes for each pair of tokens: 335 MB

    def __init__(self, trie: Trie, vocab_size: int, device: torch.device, dense_levels: int = 2) -> None:
        self.branching = trie.branching
        edges, rows = [], []
        for level, (start, end) in enumerate(zip(trie.level_starts, trie.level_starts[1:], strict=False)):
            if level:
                edges.append(trie.token(np.arange(start, end), level).astype(np.int32))
            if level < trie.max_length:  # the edge into node n is number n - 1
                rows.append((trie.children(np.arange(start, end), level)[0] - 1).astype(np.int32))
        tokens = np.concatenate([*edges, np.zeros(max(trie.branching), np.int32)])
        states = np.arange(1, len(tokens) + 1, dtype=np.int32)
        self.packed = torch.from_numpy(np.stack([tokens, states], axis=1)).to(device)
        self.rows = torch.from_numpy(np.append(np.concatenate(rows), np.int32(trie.level_starts[-1] - 1))).to(device)
        first = self.packed[: trie.level_starts[2] - 1].long()
        self.dense_levels = dense_levels if vocab_size <= self.DENSE_VOCAB else 1
        self.mask = [torch.zeros(vocab_size, dtype=torch.bool, device=device)]
        self.mask[0][first[:, 0]] = True
        self.states = [torch.zeros(vocab_size, dtype=torch.int32, device=device)]
        self.states[0][first[:, 0]] = first[:, 1].int()
        if self.dense_levels == 2:
            bounds = self.rows[first[0, 1] : int(first[-1, 1]) + 2].long()
            above = first[:, 0].repeat_interleave(bounds[1:] - bounds[:-1])
            below = self.packed[bounds[0] : bounds[-1]].long()
            for of_root, values in ((self.mask, True), (self.states, below[:, 1].int())):
                of_root.append(torch.zeros((vocab_size, vocab_size), dtype=of_root[0].dtype, device=device))
                of_root[1][above, below[:, 0]] = values
        self.dead = torch.full((), DEAD, device=device)
        self.below: Tensor | None = None

    def start(self, batch_size: int, device: torch.device) -> Tensor:
        """The state of every beam."""
        return torch.zeros((batch_size, 1), dtype=torch.long, device=device)

    def candidates(self, scores: Tensor, beams: Beams, state: Tensor, level: int) -> tuple[Tensor, Tensor | None]:
        if level < self.dense_levels:
            mask = self.mask[0] if level == 0 else self.mask[1][beams.tokens]
            return torch.where(mask, scores, self.dead), None
        # Algorithm 2.
        first = self.rows[state]
        number = self.rows[state + 1] - first
        places = torch.arange(self.branching[level], device=state.device)
        tokens, self.below = self.packed[first[..., None] + places].unbind(-1)
        tokens = tokens.long()
        return torch.where(places < number[..., None], scores.gather(-1, tokens), self.dead), tokens

    def follow(self, state: Tensor, beams: Beams, level: int) -> Tensor:
        if level == 0:
            return self.states[0][beams.tokens].long()
        if level < self.dense_levels:
            return self.states[1][beams.sequences[..., 0], beams.tokens].long()
        assert self.below is not None
        assert beams.chosen is not None
        below = self.below.flatten(1)
        return below.gather(1, beams.chosen.clamp(max=below.shape[1] - 1)).long()


class CpuTrie(Method):
    """A dict trie on the host: at every step the partial beams go there and a mask comes back."""

    def __init__(self, rows: np.ndarray, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        before = resident_bytes()
        self.root = dict_trie(rows)
        self.nbytes = resident_bytes() - before

    def candidates(self, scores: Tensor, beams: Beams, state: Any, level: int) -> tuple[Tensor, None]:
        prefixes = beams.sequences.flatten(0, 1).tolist()
        mask = np.zeros((len(prefixes), self.vocab_size), dtype=bool)
        for row, prefix in zip(mask, prefixes, strict=True):
            node: dict[int, Any] | None = self.root
            for token in prefix:
                node = node.get(token) if node else None
            if node:
                row[list(node)] = True
        return torch.where(torch.from_numpy(mask).to(scores.device).view_as(scores), scores, DEAD), None


def dict_trie(rows: np.ndarray) -> dict[int, Any]:
    """Nested dicts; the last token leads to None."""
    root: dict[int, Any] = {}
    # Millions of small objects, none of them garbage: a collector that scans them again and again takes most of the
    # time here, and would interrupt what is timed later.
    gc.disable()
    for row in rows:
        *prefix, last = row.tolist()
        node = root
        for token in prefix:
            child = node.get(token)
            if child is None:
                child = node[token] = {}
            node = child
        node[last] = None
    gc.freeze()
    gc.enable()
    return root


class Ppv(Method):
    """Parallel prefix verification: a binary search in the sorted rows for every extension of a beam."""

    def __init__(self, rows: np.ndarray, device: torch.device) -> None:
        self.columns = [torch.from_numpy(np.ascontiguousarray(column)).to(device) for column in rows.T]
        # A binary search among the rows of a prefix of this length takes that many rounds: known in advance.
        self.rounds = [int(size - 1).bit_length() for size in longest_runs(rows)]

    def start(self, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The first and one past the last row of every beam's prefix."""
        first = torch.zeros((batch_size, 1), dtype=torch.long, device=device)
        return first, torch.full_like(first, len(self.columns[0]))

    def candidates(
        self, scores: Tensor, beams: Beams, state: tuple[Tensor, Tensor], level: int
    ) -> tuple[Tensor, Tensor | None]:
        tokens = torch.arange(scores.shape[-1], device=scores.device, dtype=self.columns[level].dtype)
        return torch.where(self._has(tokens.expand(scores.shape), state, level), scores, DEAD), None

    def follow(self, state: tuple[Tensor, Tensor], beams: Beams, level: int) -> tuple[Tensor, Tensor]:
        first, last = (bound.gather(1, beams.parents) for bound in state)
        return self.extend((first, last), beams.tokens, level)

    def extend(self, state: tuple[Tensor, Tensor], tokens: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """The rows of longer prefixes: none (first = last) where the token is illegal."""
        first, last = (bound[..., None] for bound in state)
        bounds = [self._lower_bound(tokens[..., None] + past, first, last, level)[..., 0] for past in (0, 1)]
        return bounds[0], bounds[1]

    def _has(self, tokens: Tensor, state: tuple[Tensor, Tensor], level: int) -> Tensor:
        first, last = (bound[..., None] for bound in state)
        row = self._search(tokens, first, last, level)
        return (self.columns[level][row] == tokens) & (first < last)

    def _lower_bound(self, tokens: Tensor, first: Tensor, last: Tensor, level: int) -> Tensor:
        row = self._search(tokens, first, last, level)
        return row + ((self.columns[level][row] < tokens) & (first < last))

    def _search(self, tokens: Tensor, first: Tensor, last: Tensor, level: int) -> Tensor:
        """The last row of the range that is no larger than the token, or the range's first."""
        column = self.columns[level]
        row, size = first.expand(tokens.shape), last - first
        for _ in range(self.rounds[level]):
            half = size // 2
            before = column[(row + half - 1).clamp(min=0)] < tokens
            row = torch.where(before, row + half, row)
            size = size - half
        return row.clamp(max=len(column) - 1)


def longest_runs(rows: np.ndarray) -> list[int]:
    """For prefixes of 0 to L - 1 tokens: the most rows that share one."""
    is_new = np.zeros(len(rows), dtype=bool)
    is_new[0] = True
    longest = []
    for column in rows.T:
        longest.append(int(np.diff(np.append(np.flatnonzero(is_new), len(rows))).max()))
        is_new[1:] |= column[1:] != column[:-1]
    return longest


def search(method: Method, scorer: Scorer, num_beams: int, length: int) -> Beams:
    """Beam search over L levels under one method's constraint."""
    beams = Beams.start(len(scorer.prompt_logits), scorer.prompt_logits.device)
    state = method.start(*beams.scores.shape[:1], beams.scores.device)
    for level in range(length):
        logits = scorer.prompt_logits
        if level > 0:
            [logits] = scorer.score([Nodes(beams.tokens, beams.parents, beams.tokens)], depth=level)
        scores = beams.scores[..., None] + logits.float().log_softmax(-1)
        scores, tokens = method.candidates(scores, beams, state, level)
        beams = beams.extend(scores, tokens, num_beams)
        state = method.follow(state, beams, level)
    return beams


def resident_bytes() -> int:
    """Memory of this process now; 0 where the system does not tell."""
    status = Path("/proc/self/statm")
    return int(status.read_text(encoding="utf-8").split()[1]) * 4096 if status.exists() else 0
