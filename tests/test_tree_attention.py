# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention in two parts against attention by a mask, in double precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hf_gr.torch import tree_attention as module
from hf_gr.torch.tree import Tree
from hf_gr.torch.tree_attention import TreeAttention, tree_attention

pytestmark = pytest.mark.shapes

TOL = {torch.float64: 1e-12, torch.float32: 3e-6}  # of values around 1


@pytest.fixture(autouse=True)
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few nodes, too; tests/test_tree_attention_ways.py has every way."""
    monkeypatch.setattr(module, "SLOTS_AT_ONCE", 0)


class Case:
    """A random tree over a random prompt, grown as the loop grows it, with queries of its last nodes.

    Args:
        levels: nodes of every forward; the last one's attend.
        merged: how many levels the last forward has.
        lag: how much less deep the second row is than the first.
        padded: padding on the left of the second row; of all of it, if that is the prompt's length.
    """

    def __init__(
        self,
        levels: Sequence[int] = (5, 5),
        *,
        prompt: int = 13,
        kept: int | None = None,
        batch: int = 2,
        heads: int = 4,
        groups: int = 2,
        width: int = 8,
        value_width: int | None = None,
        merged: int = 1,
        lag: int = 0,
        padded: int = 0,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        tree = Tree.over_prompt(batch, torch.device("cpu"))
        first = len(levels) - merged
        grown = []
        for number, size in enumerate(levels):
            above = tree.ancestry.shape[1]
            parents = torch.randint(0, above, (batch, size), generator=rng)
            tree = tree.grow(parents, depth=number + 1, is_level=not lag)
            grown.append(tree)
        joined = Tree.joined(grown[first:])
        if lag:  # the second row is at an earlier level: fewer ancestors
            ancestry = joined.ancestry.clone()
            ancestry[1, :, :lag] = -1
            joined = replace(joined, ancestry=ancestry)
        sizes = levels[first:]
        depths = torch.cat([torch.full((1, size), first + 1 + n) for n, size in enumerate(sizes)], dim=1)
        if lag:
            depths = torch.cat([depths, depths - lag])
        mask = torch.ones(batch, prompt, dtype=torch.bool)
        mask[-1, :padded] = False
        kept = prompt if kept is None else kept
        self.tree, self.depths, self.mask, self.kept = joined, depths, mask, kept
        self.how = TreeAttention(
            joined,
            mask,
            joined.depth if joined.is_level else depths,
        )
        num_nodes, num_keys = joined.ancestry.shape[1], kept + joined.num_slots
        key_heads, room = heads // groups, 9
        self.query = torch.randn(batch, num_nodes, heads, width, generator=rng, dtype=torch.float64).transpose(1, 2)
        shape = (batch, key_heads, num_keys + room)
        self.key = torch.randn(*shape, width, generator=rng, dtype=torch.float64)[:, :, :num_keys]
        self.value = torch.randn(*shape, value_width or width, generator=rng, dtype=torch.float64)[:, :, :num_keys]
        self.dtype = dtype

    def states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As a model gives them: queries and keys are views."""
        return self.query.to(self.dtype), self.key.to(self.dtype), self.value.to(self.dtype)

    def ours(self, **kwargs: Any) -> torch.Tensor:
        return tree_attention(*self.states(), self.how, scale=0.3, **kwargs)

    def by_mask(self, *, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        """The slow twin, in double precision."""
        seen = self.tree.attention_mask(self.mask[:, self.mask.shape[1] - self.kept :], window, depths=self.depths)
        query, key, value = (states.to(self.dtype).double() for states in (self.query, self.key, self.value))
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        scores = query @ key.mT * 0.3
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)


CASES: dict[str, dict[str, Any]] = {
    "one level": {"levels": (5,)},
    "three levels": {"levels": (1, 3, 7)},
    "a draft": {"levels": (4, 4, 6), "merged": 2},
    "a draft of rows at two depths": {"levels": (4, 4, 6), "merged": 2, "lag": 1},
    "padded": {"padded": 4},
    "padded, a draft at two depths": {"levels": (4, 4, 6), "merged": 2, "lag": 1, "padded": 4},
    "nothing of a prompt is real": {"padded": 13},
    "values of another width": {"value_width": 6},
    "one head": {"heads": 1, "groups": 1},
    "many groups": {"heads": 6, "groups": 6},
    "one row": {"batch": 1},
    "one row, a draft": {"batch": 1, "levels": (4, 4, 6), "merged": 3},
    "one node": {"levels": (1, 1), "batch": 1},
    "a prompt of one token": {"prompt": 1},
    "earlier keys were dropped": {"kept": 6},
    "all keys of the prompt were dropped": {"kept": 0},
    "earlier keys were dropped, padded": {"kept": 6, "padded": 10},
}


@pytest.mark.parametrize(
    ("window", "softcap", "dtype"),
    [
        (None, None, torch.float64),
        (None, 1.5, torch.float32),
        (1, None, torch.float32),
        (3, None, torch.float64),
        (4, 1.5, torch.float64),
        (16, None, torch.float32),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_two_parts_are_one_attention(name: str, window: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    case = Case(**CASES[name], dtype=dtype)
    ours = case.ours(window=window, softcap=softcap)
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    expected = case.by_mask(window=window, softcap=softcap)
    torch.testing.assert_close(ours.double(), expected, atol=TOL[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_as_close_as_by_a_mask(name: str, dtype: torch.dtype) -> None:
    ours, theirs, window = [], [], None
    for seed in range(5):
        case = Case(**{"width": 64, "prompt": 40, **CASES[name]}, dtype=dtype, seed=seed)
        exact = case.by_mask(window=window)
        ours.append(float((case.ours(window=window).double() - exact).abs().mean()))
        query, key, value = case.states()
        seen = case.tree.attention_mask(case.mask[:, case.mask.shape[1] - case.kept :], window, depths=case.depths)
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        masked = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3)
        theirs.append(float((masked.transpose(1, 2).double() - exact).abs().mean()))
    assert np.mean(ours) <= 1.5 * np.mean(theirs) + 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_random_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    levels = rng.integers(1, 9, int(rng.integers(1, 6))).tolist()
    merged = int(rng.integers(1, len(levels) + 1))
    prompt, groups = int(rng.integers(1, 40)), int(rng.integers(1, 4))
    case = Case(
        levels,
        merged=merged,
        lag=int(rng.integers(0, max(1, len(levels) - merged + 1))),
        prompt=prompt,
        padded=int(rng.integers(0, prompt + 1)),
        groups=groups,
        heads=groups * int(rng.integers(1, 4)),
        batch=2,
        seed=seed,
    )
    window = None if rng.random() < 0.3 else int(rng.integers(1, 40))
    torch.testing.assert_close(case.ours(window=window), case.by_mask(window=window), atol=1e-12, rtol=0)


def test_huge_scores_stay_numbers() -> None:
    case = Case((5, 5), padded=13, dtype=torch.float32)
    case.query *= 1e4
    ours = case.ours()
    assert ours.isfinite().all()
    torch.testing.assert_close(ours.double(), case.by_mask(), atol=1e-3, rtol=0)


# Errors, planted: each must be seen


def drop_an_ancestor(case: Case) -> None:
    case.how = replace(case.how, tree=replace(case.how.tree, ancestry=case.how.tree.ancestry[..., 1:]))


def see_a_sibling(case: Case) -> None:
    case.how = replace(case.how, tree=replace(case.how.tree, ancestry=case.how.tree.ancestry.roll(1, 1)))


def forget_the_padding(case: Case) -> None:
    case.how = replace(case.how, prompt_mask=torch.ones_like(case.how.prompt_mask))


def be_one_deeper(case: Case) -> None:
    depths = case.how.depths
    case.how = replace(case.how, depths=depths + 1)


@pytest.mark.parametrize("spoil", [drop_an_ancestor, see_a_sibling, forget_the_padding, be_one_deeper])
def test_a_planted_error_is_seen(spoil: Callable[[Case], None]) -> None:
    case = Case((4, 4, 4), padded=6)
    torch.testing.assert_close(case.ours(window=11), case.by_mask(window=11))
    spoil(case)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(case.ours(window=11), case.by_mask(window=11))


def test_a_wrong_merge_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((4, 4, 4))
    monkeypatch.setattr(module.torch, "sigmoid", lambda weight: torch.full_like(weight, 0.5))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(case.ours(), case.by_mask())


# What a device wants


@pytest.mark.parametrize("name", ["three levels", "padded, a draft at two depths", "one row"])
def test_it_compiles_whole(name: str) -> None:
    case = Case(**CASES[name], dtype=torch.float32)
    compiled = torch.compile(tree_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*case.states(), case.how, scale=0.3, window=9), case.ours(window=9))


def test_it_moves_with_a_model_over_several_devices() -> None:
    how = Case((4, 4, 6), merged=2, padded=4).how
    assert how.to(torch.device("cpu")) is how
    moved = how.to(torch.device("meta"))
    assert {moved.tree.ancestry.device.type, moved.prompt_mask.device.type, moved.depths.device.type} == {"meta"}  # pyright: ignore
