# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of tree nodes in every way, against the dense mask in double precision, over trees as decoding grows them.

Axes: B batch, H query heads, h key heads, N nodes, P prompt, S slots, W width of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_gr.torch import tree_attention as module
from hf_gr.torch.tree import Tree
from hf_gr.torch.tree_attention import TreeAttention, tree_attention

pytestmark = pytest.mark.shapes

SPREAD = 2.0  # standard deviation of queries: scores that differ by several units, as in a trained model
UNUSED = float("nan")  # what memory holds that nobody may read
# Sums of at most 40 products and weights in another order. float64: what is left of it after log and exp.
TOL = {torch.float32: 3e-6, torch.float64: 1e-12}
# Errors in units of the mask's own: of all numbers, and of the worst one. Half types round both parts and then their
# sum, where the mask rounds once.
HALF_RATIO, HALF_WORST = 1.5, 2.0
HALF = (torch.float16, torch.bfloat16)
WAYS = ("at once", "in parts", "plain")
KINDS = ("first level", "levels", "dead beams", "drafts", "rows of different depth")


@contextmanager
def going(way: str) -> Iterator[None]:
    """Within this context attention is computed that way."""
    products = module._by_products if way == "plain" else module._attend
    at_once = 10**6 if way == "at once" else 0
    with mock.patch.object(module, "SLOTS_AT_ONCE", at_once), mock.patch.object(module, "_attend", products):
        yield


@dataclass(frozen=True)
class Shape:
    """Of a layer and its prompt, of which `kept` tokens still have keys; `room` keys more are in the same memory."""

    batch: int = 2
    key_heads: int = 2
    groups: int = 2
    width: int = 8
    value_width: int = 8
    prompt: int = 7
    kept: int = 7
    room: int = 5


@dataclass(frozen=True)
class Case:
    """One forward of tree nodes through one layer."""

    query: Tensor
    key: Tensor
    value: Tensor
    tree: Tree
    prompt_mask: Tensor  # [B, P]
    depths: Tensor  # [B, N]
    window: int | None = None
    softcap: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of the layer."""
        return {"scale": self.query.shape[-1] ** -0.5, "window": self.window, "softcap": self.softcap}

    def how(self) -> TreeAttention:
        """The tree as forwards hand it on."""
        return TreeAttention(self.tree, self.prompt_mask, self.tree.depth if self.tree.is_level else self.depths)

    def ours(self, how: TreeAttention | None = None) -> Tensor:
        """`[B, N, H, W]`, by the function that is tested."""
        return tree_attention(self.query, self.key, self.value, how or self.how(), **self.options)

    def mask(self) -> Tensor:
        """`[B, 1, N, P + S]`, by the slow twin."""
        kept = self.key.shape[2] - self.tree.num_slots
        prompt_mask = self.prompt_mask[:, self.prompt_mask.shape[1] - kept :]
        return self.tree.attention_mask(prompt_mask, self.window, depths=self.depths)

    def repeated(self) -> tuple[Tensor, Tensor]:
        """Keys and values for every query head."""
        groups = self.query.shape[1] // self.key.shape[1]
        return self.key.repeat_interleave(groups, dim=1), self.value.repeat_interleave(groups, dim=1)

    def by_mask(self) -> Tensor:
        """`[B, N, H, W]` by the mask, in float64."""
        key, value = (states.double() for states in self.repeated())
        scores = self.query.double() @ key.mT * self.options["scale"]
        scores = scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap
        return (scores.masked_fill(~self.mask(), -torch.inf).softmax(-1) @ value).transpose(1, 2)

    def by_kernel(self) -> Tensor:
        """`[B, N, H, W]` by the mask, in the dtype of the queries: as transformers' `sdpa_attention_forward`."""
        scale = self.options["scale"]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(self.query, *self.repeated(), attn_mask=self.mask(), scale=scale).transpose(1, 2)


def grow(kind: str, batch: int, nodes: int, generator: torch.Generator) -> tuple[Tree, Tensor]:
    """A tree as decoding grows it, and the depths of its nodes."""

    def parents(above: int, width: int) -> Tensor:
        return torch.randint(0, above, (batch, width), generator=generator)

    tree = Tree.over_prompt(batch, torch.device("cpu")).grow(parents(1, nodes), depth=1)
    depth, above = 1, nodes
    if kind in ("levels", "dead beams"):
        for depth in (2, 3):
            # Dead beams go on as copies of the first one.
            below = parents(above, nodes) if kind == "levels" else parents(1, nodes)
            tree, above = tree.grow(below, depth=depth), nodes
    if kind not in ("drafts", "rows of different depth"):
        return tree, torch.full((batch, nodes), depth)
    widths = (nodes, nodes + 2, 1)  # three levels in one forward, each below the one before
    first, start = torch.full((batch, 1), 2), parents(nodes, widths[0])
    if kind == "rows of different depth":
        # The first forward scored two levels, and some rows go on from the first of them.
        both = Tree.joined([tree, tree.grow(parents(nodes, nodes), depth=2)])
        ahead = torch.arange(batch)[:, None] % 2
        tree, first, start = both, 2 + ahead, start + nodes * ahead
    deepest, grown, below = int(first.max()), [tree], start
    for number, width in enumerate(widths):
        grown.append(grown[-1].grow(below, depth=deepest + number, is_level=False))
        below = parents(width, widths[min(number + 1, 2)])
    depths = torch.cat([(first + number).expand(-1, width) for number, width in enumerate(widths)], dim=1)
    return Tree.joined(grown[1:]), depths


def make(
    kind: str,
    shape: Shape = Shape(),  # noqa: B008
    *,
    nodes: int = 4,
    seed: int = 0,
    padded: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Case:
    """A case. Keys are views of larger memory, as those of our caches; the rest of the memory is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    tree, depths = grow(kind, shape.batch, nodes, generator)
    num_keys = shape.kept + tree.num_slots

    def states(width: int) -> Tensor:
        memory = torch.full((shape.batch, shape.key_heads, num_keys + shape.room, width), UNUSED, dtype=dtype)
        memory[:, :, :num_keys] = torch.randn((*memory.shape[:2], num_keys, width), generator=generator).to(dtype)
        return memory[:, :, :num_keys]

    size = (shape.batch, depths.shape[1], shape.key_heads * shape.groups, shape.width)
    query = SPREAD * torch.randn(size, generator=generator).to(dtype).transpose(1, 2)
    prompt_mask = torch.ones((shape.batch, shape.prompt), dtype=torch.bool)
    if padded:  # a row of padding alone, and rows in between
        for row in range(shape.batch):
            prompt_mask[row, : shape.prompt * (shape.batch - row) // shape.batch] = False
    return Case(query, states(shape.width), states(shape.value_width), tree, prompt_mask, depths, **options)


def check(case: Case, found: Tensor | None = None) -> None:
    """Ours is the dense mask's."""
    found, expected = case.ours() if found is None else found, case.by_mask()
    assert found.shape == expected.shape
    assert found.dtype == case.query.dtype
    assert found.is_contiguous()
    tolerance = TOL[case.query.dtype] * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    prompt = draw(st.integers(1, 12))
    sizes = {name: draw(st.sampled_from([1, 2, 3])) for name in ("batch", "key_heads", "groups")}
    widths = {name: draw(st.sampled_from([5, 8, 16])) for name in ("width", "value_width")}
    return Shape(**sizes, **widths, prompt=prompt, kept=draw(st.integers(0, prompt)), room=draw(st.integers(0, 3)))


@settings(max_examples=100)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.just(Shape()) | shapes(),
    way=st.sampled_from(WAYS),
    nodes=st.sampled_from([1, 4, 40]),
    seed=st.integers(0, 1000),
    padded=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    window=st.none() | st.integers(1, 20),
    softcap=st.sampled_from([None, None, 1.5]),
)
def test_nodes_attend_as_by_the_dense_mask(way: str, **options: Any) -> None:
    with going(way):
        check(make(**options))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", HALF)
def test_half_types_err_little_more_than_the_mask(dtype: torch.dtype, way: str) -> None:
    errors, worst = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    with going(way):
        for kind in KINDS:
            for seed, length in enumerate((9, 9, 300)):
                shape = Shape(width=32, value_width=32, prompt=length, kept=length)
                case = make(kind, shape, nodes=12, seed=seed, dtype=dtype, padded=bool(seed % 2))
                exact = case.by_mask()
                both = [(found.double() - exact).abs() for found in (case.ours(), case.by_kernel())]
                errors += torch.stack([error.square().mean() for error in both])
                worst = torch.maximum(worst, torch.stack([error.max() for error in both]))
    assert errors[0] <= HALF_RATIO**2 * errors[1]
    assert worst[0] <= HALF_WORST * worst[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_what_is_hidden_weighs_nothing_at_all(dtype: torch.dtype, way: str) -> None:
    """Large finite numbers in hidden keys and values change no bit; a row may see nothing of the prompt."""
    for kind in KINDS:
        for window in (None, 3):
            case = make(kind, padded=True, window=window, dtype=dtype)
            with going(way):
                before = case.ours()
                assert before.isfinite().all()
                hidden = ~case.mask()[:, :, :, :7].any(2)[..., None]
                for states in (case.key, case.value):
                    states[:, :, :7] = torch.where(hidden, torch.tensor(3e4, dtype=dtype), states[:, :, :7])
                assert torch.equal(case.ours(), before)


def test_huge_scores_stay_numbers() -> None:
    case = make("levels", padded=True)
    case = replace(case, query=case.query * 1e4)
    with going("in parts"):
        torch.testing.assert_close(case.ours().double(), case.by_mask(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("memory", ["columns", "by token", "expanded"])
@pytest.mark.parametrize("way", ["at once", "in parts"])
def test_keys_in_any_memory(memory: str, way: str) -> None:
    for kind in KINDS:
        case = make(kind)
        if memory == "columns":
            key, value = (states.mT.contiguous().mT for states in (case.key, case.value))
        elif memory == "by token":
            key, value = (states.transpose(1, 2).contiguous().transpose(1, 2) for states in (case.key, case.value))
        else:
            key, value = (states[:1, :1].expand_as(states) for states in (case.key, case.value))
        with going(way):
            check(replace(case, key=key, value=value, query=case.query.contiguous()))


@pytest.mark.parametrize("way", ["at once", "in parts"])
def test_layers_of_all_kinds_share_one_tree(way: str) -> None:
    """What one layer keeps is not taken for another's: other windows, lengths, heads, dtypes, memory."""
    for kind in ("levels", "rows of different depth"):
        cases = [
            make(kind, shape, padded=True, window=window, dtype=dtype)
            for shape in (Shape(), Shape(room=0), Shape(key_heads=4), Shape(kept=3), Shape(width=16))
            for window in (None, 3)
            for dtype in (torch.float32, torch.float64)
        ]
        how = cases[0].how()
        with going(way):
            for case in cases + cases[::-1]:
                check(case, case.ours(how))


class Recorded(TorchDispatchMode):
    """Operations that are more than views, in order, and the numbers in each new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = func(*args, **(kwargs or {})), func._schema.name.split("::")[1]
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        if not is_view and name not in ("empty", "new_empty", "_unsafe_view"):
            self.launches.append(name)
            self.sizes += [each.numel() for each in tree_leaves(made) if isinstance(each, Tensor)]
        return made


# At once: queries are folded, and answers brought into order. In parts: queries are folded, two gathers, two kernels,
# blind rows, the merge.
@pytest.mark.parametrize(("way", "number"), [("at once", 3), ("in parts", 9)])
@pytest.mark.parametrize("kind", ["levels", "rows of different depth"])
def test_layers_launch_little_beside_what_they_have_in_common(kind: str, way: str, number: int) -> None:
    case = make(kind, padded=True, nodes=40, window=5)
    how = case.how()
    with going(way):
        case.ours(how)
        with Recorded() as again:
            case.ours(how)
    assert len(again.launches) == number, again.launches


@pytest.mark.parametrize("way", ["at once", "in parts"])
@pytest.mark.parametrize("window", [None, 2500])
def test_the_prompts_keys_are_never_copied(way: str, window: int | None) -> None:
    shape = Shape(prompt=3000, kept=3000, width=64, value_width=64, batch=1)
    for kind in KINDS:
        case = make(kind, shape, nodes=3, padded=window is None, window=window)
        most = 4 * 8 * 3000  # biases, for 4 heads and up to 8 nodes
        with going(way), Recorded() as recorded:
            case.ours()
        assert max(recorded.sizes) <= most < case.key.numel() // 3


@pytest.mark.parametrize(("kind", "way"), [("levels", "at once"), ("rows of different depth", "in parts")])
def test_it_compiles_into_one_graph(kind: str, way: str) -> None:
    case = make(kind, padded=True, window=5)

    def layers(ancestry: Tensor, prompt_mask: Tensor, depths: Tensor, *states: Tensor) -> Tensor:
        how = TreeAttention(replace(case.tree, ancestry=ancestry), prompt_mask, 3 if kind == "levels" else depths)
        return tree_attention(*states, how, **case.options) + tree_attention(*states, how, **case.options)

    torch._dynamo.reset()
    given = (case.tree.ancestry, case.prompt_mask, case.depths, case.query, case.key, case.value)
    with going(way):
        found = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=False)(*given)
    check(case, (found / 2).contiguous())


def test_another_device_is_moved_to_once() -> None:
    how = make("drafts", padded=True).how()
    assert how.to(torch.device("cpu")) is how
    moved = how.to(torch.device("meta"))
    assert how.to(torch.device("meta")) is moved
    assert moved.made == {}
    assert {each.device.type for each in (moved.tree.ancestry, moved.prompt_mask, moved.depths)} == {"meta"}  # pyright: ignore
