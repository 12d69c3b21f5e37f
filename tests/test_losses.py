# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Each training loss against its literal twin, on random batches with missing sequences and illegal tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_gr.training import losses
from hf_gr.training.losses import LevelLogProbs

B, K, L, V = 3, 4, 3, 6  # rows, sequences, positions, tokens
LOSS_TOL = 1e-9  # double precision throughout, some hundred additions
ALL = [
    ("sft", {}),
    ("seqkd", {}),
    ("align_s", {"num_tokens": 2}),
    ("align_s", {"num_tokens": None}),
    ("align_r", {"num_tokens": 2}),
    ("align_r", {"num_tokens": None}),
    ("align_f", {}),
]


@dataclass(frozen=True)
class Case:
    """One random batch: by level what both models say after every prefix (after one at the first) of all tokens."""

    logits: list[Tensor]  # the draft's, `[B, 1 or K, V]`
    target: list[Tensor]  # log-probabilities
    legal: list[Tensor]
    tokens: Tensor  # `[B, K, L]`, legal ones
    mask: Tensor

    @classmethod
    def of(cls, seed: int) -> Case:
        draw = torch.Generator().manual_seed(seed)
        shapes = [(B, K if level else 1, V) for level in range(L)]
        logits, target = ([torch.randn(shape, generator=draw).double() * 2 for shape in shapes] for _ in range(2))
        legal = [torch.rand(shape, generator=draw) < 0.5 for shape in shapes]
        for level in legal:
            level[..., 0] = True
        liked = [torch.rand(B, K, V, generator=draw) * one for one in legal]
        lengths = torch.randint(0, L + 1, (B, K), generator=draw)
        lengths[:, 0] = lengths[:, 0].clamp(min=1)
        mask = torch.arange(L) < lengths[..., None]
        return cls(
            [one.requires_grad_() for one in logits],
            [one.log_softmax(-1) for one in target],
            legal,
            torch.stack([one.argmax(-1) for one in liked], dim=-1),
            mask,
        )

    def of_tokens(self, levels: list[Tensor]) -> Tensor:
        """`[B, K, L]`, the values of the sequences' own tokens."""
        wide = torch.stack([one.expand(-1, K, -1) for one in levels], dim=2)
        return wide.gather(-1, self.tokens[..., None])[..., 0]

    def ours(self, name: str, *logits: Tensor, **options: Any) -> Tensor:
        draft = [one.log_softmax(-1) for one in logits or self.logits]
        if name == "sft":
            return losses.seqkd(self.of_tokens(draft)[:, :1], self.mask[:, :1])
        if name == "seqkd":
            return losses.seqkd(self.of_tokens(draft), self.mask)
        pairs = [LevelLogProbs(*one) for one in zip(draft, self.target, self.legal, strict=True)]
        if name == "align_s":
            threshold = losses.kth_log_probs(self.of_tokens(self.target), self.mask)
            return losses.align_s(pairs, threshold, self.mask, **options)
        return getattr(losses, name)(pairs, self.mask, **options)

    def twin(self, name: str, **options: Any) -> float:
        def along(levels: list[Any]) -> list[list[list[Any]]]:
            """By row, sequence and position: of sequences and tokens that are there."""
            lengths = self.mask.sum(-1).tolist()
            return [
                [
                    [levels[t][row, k if len(levels[t][row]) > 1 else 0] for t in range(size)]
                    for k, size in enumerate(sizes)
                    if size
                ]
                for row, sizes in enumerate(lengths)
            ]

        q = along([one.detach().log_softmax(-1).numpy() for one in self.logits])
        tokens = along([self.tokens[..., level].numpy() for level in range(L)])
        if name == "sft":
            return reference.reference_sft([row[0] for row in q], [row[0] for row in tokens])
        if name == "seqkd":
            return reference.reference_seqkd(q, tokens)
        p = along([one.numpy() for one in self.target])
        legal = [[[one.nonzero()[:, 0].tolist() for one in k] for k in row] for row in along(self.legal)]
        return getattr(reference, f"reference_{name}")(q, p, legal, tokens, **options)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_losses_equal_their_twins(seed: int) -> None:
    case = Case.of(seed)
    for name, options in ALL:
        assert abs(case.ours(name, **options).item() - case.twin(name, **options)) < LOSS_TOL, (name, options)


@pytest.mark.parametrize(("name", "options"), ALL)
def test_gradients_are_those_of_finite_differences_and_skip_what_is_not_there(
    name: str, options: dict[str, Any]
) -> None:
    case = Case.of(5)
    assert torch.autograd.gradcheck(lambda *logits: case.ours(name, *logits, **options), case.logits)
    case.ours(name, **options).backward()
    for level, logits in enumerate(case.logits):
        assert logits.grad is not None
        if level:
            assert not logits.grad[~case.mask[..., level]].any()


def test_nothing_there_is_nothing_lost() -> None:
    case = Case.of(1)
    case.mask.zero_()
    for one in case.legal:
        one.zero_()
    total = torch.stack([case.ours(name, **options) for name, options in ALL])
    assert not total.any()
    total.sum().backward()
    assert not any(one.grad.any() for one in case.logits)  # pyright: ignore[reportOptionalMemberAccess]


def test_impossible_tokens_give_no_nan() -> None:
    """A model that forbids tokens by logits of -inf, as some do for their special tokens."""
    logits = torch.tensor([[[0.0, 1.0, -torch.inf]]], requires_grad=True)
    draft = logits.log_softmax(-1)
    target = torch.tensor([[[-0.5, -torch.inf, -1.0]]])
    mask = torch.ones((1, 1), dtype=torch.bool)
    pair = LevelLogProbs(draft, target, torch.ones_like(draft, dtype=torch.bool))
    total = losses.align_f([pair], mask[None])
    for num_tokens in (2, 3, None):
        total = total + losses.align_s([pair], mask * -1.0, mask[None], num_tokens=num_tokens)
        total = total + losses.align_r([pair], mask[None], num_tokens=num_tokens)
    total.backward()
    assert total.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
