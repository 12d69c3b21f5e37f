# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a catalogue will take before it is built, from three numbers. Knows no items.

`expected` is for codes that are drawn uniformly at random; those of real items cluster, share prefixes and take less.
`at_most` holds for any catalogue. `static_model` is the paper's own model, of its own arrays.

Source: STATIC, appendix B. Axes: N items, L levels, V tokens of a level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .fanout import smallest_dtype
from .memory_plan import (
    LevelSizes,
    TrieSizes,
    constant_bytes,
    flax_arrays,
    flax_bits,
    flax_branching,
    levels_of_view,
    living_bytes,
    torch_arrays,
)
from .sequences import LARGEST_TOKEN
from .tables import LARGEST_TABLE, WIDE_FROM, TableShape, is_wide
from .trie import SHORT

STATIC_NODE, STATIC_STATE = 12, 4  # bytes of a node in three arrays, and of a state of the dense levels
DENSE_LEVELS = 2  # of STATIC: those of its bit mask
MOST = {"num_items": 2**50, "num_levels": 1024, "vocab_size": LARGEST_TOKEN + 1}


@dataclass(frozen=True)
class SizeEstimate:
    """Bytes of a catalogue that is not built yet.

    Attributes:
        nodes: of the trie.
        host: in memory and on disk, where items are known by their row numbers.
        torch: on a device, PyTorch, without rules and tables.
        tables: PyTorch's tables, which come on top.
        flax: on a device, JAX, without rules.
        each_view: of each `where` view, PyTorch.
    """

    nodes: int
    host: int
    torch: int
    tables: int
    flax: int
    each_view: int


def expected(num_items: int, num_levels: int, vocab_size: int) -> SizeEstimate:
    """The size of N sequences of L tokens, each one of V, drawn uniformly at random.

    Example:
        >>> round(expected(20_000_000, 8, 2048).torch / 1e6)  # megabytes
        265
    """
    _check(num_items, num_levels, vocab_size)
    levels: list[LevelSizes] = []
    for level in range(num_levels):
        parents, children = (_distinct(num_items, vocab_size, level + more) for more in (0, 1))
        levels.append(_expected_level(parents, children, _exceptions(num_items, vocab_size, level), vocab_size))
    sizes = TrieSizes(tuple(levels), _token_size(vocab_size))
    at_leaf = _expected_level(
        levels[-1].num_children, num_items, _sharing(num_items, vocab_size, num_levels), num_items
    )
    living = sum(map(living_bytes, sizes.levels))
    return _estimate(sizes, num_items, torch_arrays(sizes), at_leaf.offset_bytes, living)


def at_most(num_items: int, num_levels: int, vocab_size: int) -> SizeEstimate:
    """A bound for any catalogue of N sequences of at most L tokens, each level of at most V.

    As in STATIC, a level has at most min(V^l, N) nodes; each takes its token and an offset of four bytes. Tables are
    counted for every level that may have one: only a catalogue of a special shape has many.
    """
    _check(num_items, num_levels, vocab_size)
    nodes = [min(vocab_size**level, num_items) for level in range(num_levels + 1)]
    levels = tuple(
        LevelSizes(
            parents, children, min(vocab_size, num_items), None, max(4, smallest_dtype(children).itemsize), 0, None
        )
        for parents, children in zip(nodes, nodes[1:], strict=False)
    )
    sizes = TrieSizes(levels, _token_size(vocab_size))
    arrays = torch_arrays(sizes)
    arrays["tables"] = constant_bytes(sizes) + sum(_most_table_bytes(parents, vocab_size) for parents in nodes[:-1])
    living = sum(_most_living_bytes(parents, vocab_size) for parents in nodes[:-1])
    # A level of fewer nodes than this bound may be wide, too.
    return _estimate(sizes, num_items, arrays, 4 * (num_items + 1), living)


def static_model(num_items: int, num_levels: int, vocab_size: int, *, dense_levels: int = DENSE_LEVELS) -> int:
    """STATIC's bound: `(1/8 + 4) * V^d` bytes for d dense levels, and 12 for each node of the others.

    Example:
        >>> round(static_model(20_000_000, 8, 2048) / 1e6)  # megabytes; the paper: about 1.5 GB
        1457
        >>> round(static_model(1_000_000, 8, 2048) / 1e6)  # the paper: 90 MB
        89
    """
    _check(num_items, num_levels, vocab_size)
    dense = min(dense_levels, num_levels)
    nodes = sum(min(vocab_size**level, num_items) for level in range(dense + 1, num_levels + 1))
    return math.ceil((1 / 8 + STATIC_STATE) * vocab_size**dense) + STATIC_NODE * nodes


def _estimate(sizes: TrieSizes, num_items: int, arrays: dict[str, int], at_leaf: int, living: int) -> SizeEstimate:
    numbers = 2 * smallest_dtype(num_items).itemsize * num_items
    rules = sum(flax_bits(level.num_children, max(flax_branching(sizes))) for level in sizes.levels)
    return SizeEstimate(
        nodes=sizes.num_nodes,
        host=arrays["tokens"] + arrays["offsets"] + numbers + at_leaf,
        torch=arrays["tokens"] + arrays["offsets"],
        tables=arrays["tables"],
        flax=sum(flax_arrays(sizes).values()) + rules,
        each_view=sum(-(-nodes // 8) for nodes in levels_of_view(sizes)) + living,
    )


def _expected_level(parents: int, children: int, exceptions: int, vocab_size: int) -> LevelSizes:
    """A level of so many nodes, whose largest node is a few deviations above the mean."""
    mean = children / parents
    share = mean / vocab_size
    deviation = math.sqrt(max(mean * (1 - share), 0) * 2 * math.log(max(parents, 2)))
    largest = min(vocab_size, children, max(math.ceil(mean), round(mean + deviation), 1 if parents == children else 2))
    are_listed = 2 * (children - parents) < parents
    largest = 1 if parents == children else largest
    return LevelSizes(
        num_parents=parents,
        num_children=children,
        largest=largest,
        num_exceptions=exceptions if are_listed else None,
        offset_size=smallest_dtype(children - parents if are_listed else children).itemsize,
        exception_size=smallest_dtype(parents).itemsize,
        table=TableShape(parents, 0, vocab_size) if is_wide(parents, largest, vocab_size) else None,
    )


def _distinct(num_items: int, vocab_size: int, level: int) -> int:
    """The expected number of distinct prefixes of so many tokens."""
    room = _room(vocab_size, level)
    return max(round(room * -math.expm1(-num_items / room)), 1)


def _exceptions(num_items: int, vocab_size: int, level: int) -> int:
    """The expected number of prefixes that go on with two tokens or more."""
    room = _room(vocab_size, level)
    each = num_items / room / vocab_size  # sequences below one child, of Poisson's law
    some = -math.expm1(-num_items / room)
    one = vocab_size * -math.expm1(-each) * math.exp(-each * (vocab_size - 1))
    return max(round(room * (some - one)), 0)


def _sharing(num_items: int, vocab_size: int, num_levels: int) -> int:
    """The expected number of sequences with two items or more."""
    room = _room(vocab_size, num_levels)
    each = num_items / room
    return max(round(room * (-math.expm1(-each) - each * math.exp(-each))), 0)


def _most_table_bytes(parents: int, vocab_size: int) -> int:
    if vocab_size < WIDE_FROM:
        return 0
    entry = 4 + smallest_dtype(vocab_size).itemsize
    most = min(parents, LARGEST_TABLE // WIDE_FROM)
    return entry * (min(most * vocab_size, LARGEST_TABLE) + 2 * vocab_size) + 8 * (2 * most + 2 + vocab_size)


def _most_living_bytes(parents: int, vocab_size: int) -> int:
    if vocab_size < WIDE_FROM:
        return 0
    most = min(parents, LARGEST_TABLE // WIDE_FROM)
    return (min(most * vocab_size, LARGEST_TABLE) + 2 * vocab_size) // 8 + most + 2


def _token_size(vocab_size: int) -> int:
    return 2 if vocab_size <= 2 * SHORT else 4


def _check(num_items: int, num_levels: int, vocab_size: int) -> None:
    for name, number in {"num_items": num_items, "num_levels": num_levels, "vocab_size": vocab_size}.items():
        if not 1 <= number <= MOST[name]:
            raise ValueError(f"{name}={number}, expected 1 to {MOST[name]}")


def _room(vocab_size: int, level: int) -> float:
    """The number of sequences of so many tokens; where it is beyond all counting, some number that is."""
    return float(min(vocab_size**level, 10**100))
