# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of tree nodes in every way, against the dense mask, over trees as decoding grows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import KINDS, Case, Shape, make
from host_syncs import operation, wait_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_gr.torch import tree_attention as module
from hf_gr.torch.tree_attention import TreeAttention, tree_attention

pytestmark = pytest.mark.shapes

# Sums of at most 40 products and weights in another order. float64: what is left of it after log and exp.
TOL = {torch.float32: 3e-6, torch.float64: 1e-13}
# Errors in units of the mask's own: of all numbers, and of the worst one. Half types round both parts and then their
# sum, where the mask rounds once.
HALF_RATIO, HALF_WORST = 1.5, 2.0
HALF = (torch.float16, torch.bfloat16)
WAYS = ("by size", "at once", "in parts", "plain")

SHAPES = {
    "groups": Shape(),
    "one head": Shape(heads=1, key_heads=1),
    "no groups": Shape(heads=3, key_heads=3),
    "one key head": Shape(heads=6, key_heads=1),
    "values narrower": Shape(heads=3, key_heads=3, width=16, value_width=8),
    "values wider": Shape(width=8, value_width=16),
    "no lanes": Shape(width=5, value_width=5),
    "one row": Shape(batch=1),
    "one token": Shape(prompt=1, kept=1),
    "keys were dropped": Shape(prompt=9, kept=3),
    "nothing is left": Shape(prompt=9, kept=0),
    "no room": Shape(room=0),
}


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the way that attention is computed."""

    def set_way(way: str) -> None:
        if way != "by size":
            monkeypatch.setattr(module, "SLOTS_AT_ONCE", 10**6 if way == "at once" else 0)
        if way == "plain":
            monkeypatch.setattr(module, "_attend", module._by_products)

    return set_way


def check(case: Case, found: Tensor | None = None) -> None:
    """Ours is the dense mask's."""
    found, expected = case.ours() if found is None else found, case.dense()
    assert found.shape == expected.shape
    assert found.dtype == case.query.dtype
    assert found.is_contiguous()
    tolerance = TOL[case.query.dtype] * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 6, 8, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_trees(kind: str, window: int | None, padded: bool, way: str, go: Any) -> None:
    go(way)
    for seed, nodes in enumerate((1, 4, 40)):
        check(make(kind, nodes=nodes, seed=seed, padded=padded, window=window))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, way: str, go: Any) -> None:
    go(way)
    for seed, kind in enumerate(KINDS):
        for window in (None, 3):
            for padded in (False, True):
                check(make(kind, SHAPES[name], seed=seed, window=window, padded=padded))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_softcap(kind: str, way: str, go: Any) -> None:
    go(way)
    for window in (None, 4):
        check(make(kind, padded=True, softcap=1.5, window=window))


@pytest.mark.parametrize("way", WAYS)
def test_double_precision(way: str, go: Any) -> None:
    go(way)
    for kind in KINDS:
        check(make(kind, padded=True, window=5, dtype=torch.float64))


@pytest.mark.parametrize("way", ["at once", "in parts", "plain"])
@pytest.mark.parametrize("dtype", HALF)
def test_half_types_err_little_more_than_the_mask(dtype: torch.dtype, way: str, go: Any) -> None:
    """Proof 5 of the design. Root mean square and largest error; with the softcap, against eager attention."""
    go(way)
    for softcap in (None, 20.0):
        errors, worst = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        for seed in range(6):
            for kind in KINDS:
                for length in (9, 300):
                    shape = Shape(width=32, value_width=32, prompt=length, kept=length)
                    case = make(kind, shape, nodes=12, seed=seed, dtype=dtype, softcap=softcap, padded=bool(seed % 2))
                    exact = case.dense()
                    both = [(found.double() - exact).abs() for found in (case.ours(), case.by_mask())]
                    errors += torch.stack([error.square().mean() for error in both])
                    worst = torch.maximum(worst, torch.stack([error.max() for error in both]))
        assert errors[0] <= HALF_RATIO**2 * errors[1]
        assert worst[0] <= HALF_WORST * worst[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_what_is_hidden_weighs_nothing_at_all(dtype: torch.dtype, way: str, go: Any) -> None:
    """Large finite numbers in hidden keys and values change no bit; a row may see nothing of the prompt."""
    go(way)
    for kind in KINDS:
        for window in (None, 3):
            case = make(kind, padded=True, window=window, dtype=dtype)
            mask = case.prompt_mask.clone()
            mask[0] = False
            case = replace(case, prompt_mask=mask)
            before = case.ours()
            assert before.isfinite().all()
            hidden = ~case.mask()[:, :, :, :7].any(2)[..., None]
            for states in (case.key, case.value):
                states[:, :, :7] = torch.where(hidden, torch.tensor(3e4, dtype=dtype), states[:, :, :7])
            assert torch.equal(case.ours(), before)
            if dtype == torch.float32:
                check(case)


@pytest.mark.parametrize("memory", ["columns", "by token", "expanded"])
@pytest.mark.parametrize("way", ["at once", "in parts"])
def test_keys_in_any_memory(memory: str, way: str, go: Any) -> None:
    go(way)
    for kind in KINDS:
        case = make(kind)
        if memory == "columns":
            key, value = (states.mT.contiguous().mT for states in (case.key, case.value))
        elif memory == "by token":
            key, value = (states.transpose(1, 2).contiguous().transpose(1, 2) for states in (case.key, case.value))
        else:
            key, value = (states[:1, :1].expand_as(states) for states in (case.key, case.value))
        check(replace(case, key=key, value=value, query=case.query.contiguous()))


def test_layers_of_all_kinds_share_one_tree(go: Any) -> None:
    """What one layer keeps is not taken for another's: other windows, lengths, heads, dtypes, memory."""
    for way in ("at once", "in parts"):
        go(way)
        for kind in KINDS:
            cases = [
                make(kind, shape, padded=True, window=window, dtype=dtype)
                for shape in (Shape(), Shape(room=0), Shape(heads=8, key_heads=4), Shape(kept=3), Shape(width=16))
                for window in (None, 3, 4)
                for dtype in (torch.float32, torch.float64)
            ]
            how = cases[0].how()
            for case in cases + cases[::-1]:
                check(case, case.ours(how))


def test_what_layers_have_in_common_is_made_once(go: Any) -> None:
    for way, most in (("at once", 3), ("in parts", 9)):
        go(way)
        case = make("rows of different depth", padded=True, window=5)
        how = case.how()
        case.ours(how)
        with Recorded() as again:
            case.ours(how)
        assert len(again.launches) == most, again.launches  # in parts: the weight of rows that see nothing


class Recorded(TorchDispatchMode):
    """Operations that are more than views, new memory, and what makes the host wait.

    Attributes:
        launches: names, in order.
        sizes: numbers in each new tensor.
        waits: why.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.sizes: list[int] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        why = wait_of(func, args, kwargs, device=given[0].device.type if given else "cpu")
        self.waits += [why] if why else []
        made = func(*args, **kwargs)
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        if not is_view and operation(func) not in ("empty", "new_empty", "_unsafe_view"):
            self.launches.append(operation(func))
            self.sizes += [each.numel() for each in tree_leaves(made) if isinstance(each, Tensor)]
        return made


@pytest.mark.parametrize(
    ("way", "dtype", "number"),
    [
        ("at once", torch.float32, 3),  # queries are folded, and answers brought into order
        (
            "in parts",
            torch.float32,
            9,
        ),  # queries are folded, two gathers, two kernels, blind rows, the merge
    ],
)
def test_launches_of_a_layer(way: str, dtype: torch.dtype, number: int, go: Any) -> None:
    go(way)
    case = make("levels", nodes=40, dtype=dtype)
    how = case.how()
    case.ours(how)
    with Recorded() as recorded:
        case.ours(how)
    assert len(recorded.launches) == number, recorded.launches


@pytest.mark.parametrize("way", ["at once", "in parts"])
@pytest.mark.parametrize("window", [None, 2500])
@pytest.mark.parametrize("padded", [False, True])
def test_the_prompts_keys_are_never_copied(way: str, window: int | None, padded: bool, go: Any) -> None:
    go(way)
    shape = Shape(prompt=3000, kept=3000, heads=4, key_heads=2, width=64, value_width=64, batch=1)
    for kind in KINDS:
        case = make(kind, shape, nodes=3, padded=padded, window=window)
        most = 4 * 8 * 3000  # biases, for 4 heads and up to 8 nodes
        with Recorded() as recorded:
            case.ours()
        assert max(recorded.sizes) <= most < case.key.numel() // 3


@pytest.mark.parametrize("way", WAYS)
def test_the_host_never_waits(way: str, go: Any) -> None:
    go(way)
    for kind in KINDS:
        for padded in (False, True):
            case = make(kind, padded=padded, window=5)
            with Recorded() as recorded:
                case.ours()
            assert recorded.waits == []


@pytest.mark.parametrize("way", ["at once", "in parts"])
@pytest.mark.parametrize("kind", ["levels", "rows of different depth"])
def test_it_compiles_into_one_graph(kind: str, way: str, go: Any) -> None:
    go(way)
    case = make(kind, padded=True, window=5)

    def layers(ancestry: Tensor, prompt_mask: Tensor, depths: Tensor, *states: Tensor) -> Tensor:
        tree = replace(case.tree, ancestry=ancestry)
        how = TreeAttention(tree, prompt_mask, 3 if kind == "levels" else depths)
        options = {"scale": case.scale, "window": 5}
        return tree_attention(*states, how, **options) + tree_attention(*states, how, **options)

    torch._dynamo.reset()
    given = (case.tree.ancestry, case.prompt_mask, case.depths, case.query, case.key, case.value)
    found = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=False)(*given)
    check(case, (found / 2).contiguous())


def test_another_device_is_moved_to_once() -> None:
    how = make("drafts", padded=True).how()
    assert how.to(torch.device("cpu")) is how
    moved = how.to(torch.device("meta"))
    assert how.to(torch.device("meta")) is moved
    assert moved.made == {}
    assert {each.device.type for each in (moved.tree.ancestry, moved.prompt_mask, moved.depths)} == {"meta"}  # pyright: ignore
