# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Every sequence of a small catalogue, scored exactly: all inner nodes of its trie as one tree. Knows no model.

A forward scores as many nodes as its logits have room for. A larger catalogue is split between sequences, and the few
nodes above a split are scored again.

Axes: B batch, S sequences, N inner nodes of a level, C children of those, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.torch.log_probs import rows_at_once
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transfers import to_device
from hf_gr.torch.tree import Nodes

from .label_trees import LOGITS_AT_ONCE, NODES_AT_ONCE, Level, Sequences


@dataclass(frozen=True)
class OnDevice:
    """A `Level` on a device; the attributes are its own."""

    parents: Int[Tensor, " children"]
    tokens: Int[Tensor, " children"]
    inner: Int[Tensor, " inner"]
    ends: Int[Tensor, " ends"]
    sequences: Int[Tensor, " ends"]

    @classmethod
    def of(cls, level: Level, device: torch.device) -> OnDevice:
        """The arrays of a level as tensors."""
        return cls(*(to_device(getattr(level, each.name), device) for each in fields(cls)))


class ExhaustiveScorer:
    """Log-probabilities of all sequences after a prompt.

    Args:
        sequences: the sequences.
        batch_size: the most prompts of a call.
        vocab_size: V, which with the batch determines how many nodes a forward has room for.
        device: where the scorers are.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        batch_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        room = max(min(NODES_AT_ONCE, LOGITS_AT_ONCE // (batch_size * vocab_size)), 1)
        pieces = sequences.pieces(room)
        self.levels = [[OnDevice.of(level, device) for level in sequences.levels(piece)] for piece in pieces]

    def score(self, new_scorer: Callable[[], Scorer]) -> Float[Tensor, "batch sequences"]:
        """Sums of log-softmax values over the full vocabulary, the end token's included.

        Args:
            new_scorer: makes another scorer over the same prompts, one for each piece.
        """
        return torch.cat([_score_piece(new_scorer(), levels) for levels in self.levels], dim=1)


def _score_piece(scorer: Scorer, levels: Sequence[OnDevice]) -> Float[Tensor, "batch sequences"]:
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
    scorer: Scorer, of_prompt: Float[Tensor, "batch 1 vocab"], levels: Sequence[OnDevice]
) -> Iterator[Float[Tensor, "batch nodes vocab"]]:
    """The logits of every level's nodes, by one forward."""
    batch_size = len(of_prompt)
    below: list[Nodes] = []
    for level in levels[:-1]:
        tokens, parents = (of[level.inner].expand(batch_size, -1) for of in (level.tokens, level.parents))
        below.append(Nodes(tokens, parents, torch.zeros_like(tokens)))
    yield of_prompt
    if below:
        yield from scorer.score(below, depth=1)


def normalizers(logits: Float[Tensor, "batch nodes vocab"]) -> Float[Tensor, "batch nodes"]:
    """What log-softmax subtracts from the logits; in pieces, because nothing else here is as large."""
    rows = logits.flatten(0, 1)
    pieces = rows.split(rows_at_once(rows))
    return torch.cat([piece.float().logsumexp(dim=-1) for piece in pieces]).view(logits.shape[:2])
