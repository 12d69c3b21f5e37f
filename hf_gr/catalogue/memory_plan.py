# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a catalogue takes on a device, before it is moved there. Counts bytes; knows no framework.

The constants that decide what is on a device are here and in `tables`, and the backends (`hf_gr.torch.device_trie`,
`hf_gr.flax.device_trie`) import them: a plan counts the arrays that they make, exactly.

Source: STATIC, appendix B (its model of memory is in `hf_gr.catalogue.size_estimates`).
Axes: P parents and C children of a level; E exceptions; B requests; U rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .buckets import bucket
from .fanout import Fanout, smallest_dtype
from .segment import Liveness, Segment
from .snapshot import BatchRules
from .tables import LARGEST_TABLE, TableShape, table_shape
from .trie import Trie

Backend = Literal["torch", "flax"]

# PyTorch.
SPREAD = 8 * 2**10  # bytes of the penalties of every byte of bits
MOST_NODES = 2**22  # of tries that are walked by their edges, eight bytes each: 32 MB

# Flax: sizes that programs are compiled for.
STEPS = 8  # sizes of a compiled catalogue's arrays, and of its branching, per doubling: at most a ninth is left empty
ADDED_NODES, ADDED_CHILDREN = 1024, 16  # what additions have room for before another program is compiled
CHILDREN = 4  # the least branching that a program is compiled for
PARENTS = 2**14  # a level of so many nodes has all of its offsets on the device: one window each
SMALLEST = 64  # entries of a compiled catalogue's arrays
HIDDEN_NODES = 16  # of a row: so many, or 4, 16, ... times as many


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device; the sum of the first six is `nbytes`.

    Attributes:
        backend: `"torch"` or `"flax"`.
        tokens: of the tokens on the trie's edges.
        offsets: of the maps from nodes to their children.
        tables: of the tables for levels near the root, without additions; and of constants.
        rules: of the bits that say what is alive: removals, and every filtered view of the batch; those of the tables
            are made when a rule is used for the second time.
        additions: of what was added since the index was built; in Flax also of the room for it.
        requests: of what belongs to single requests: which rule each has, and the nodes hidden by its exclusions.
        each_view: of each further `where` view.
        edges: of what a `ConstraintLogitsProcessor` adds (PyTorch); 0 where it reads the levels.
    """

    backend: Backend
    tokens: int
    offsets: int
    tables: int
    rules: int
    additions: int
    requests: int
    each_view: int
    edges: int

    @property
    def nbytes(self) -> int:
        """Bytes in total, without further views and edges."""
        return self.tokens + self.offsets + self.tables + self.rules + self.additions + self.requests


@dataclass(frozen=True)
class LevelSizes:
    """What decides the size of one level's arrays.

    Attributes:
        num_parents: P.
        num_children: C.
        largest: the most children of one parent.
        num_exceptions: E; None where all offsets are stored.
        offset_size: bytes of an offset.
        exception_size: bytes of an exception.
        table: the level's table; None without one.
    """

    num_parents: int
    num_children: int
    largest: int
    num_exceptions: int | None
    offset_size: int
    exception_size: int
    table: TableShape | None

    @property
    def num_offsets(self) -> int:
        """Entries of the offsets."""
        return 1 + (self.num_parents if self.num_exceptions is None else self.num_exceptions)

    @property
    def offset_bytes(self) -> int:
        """Bytes of the offsets and exceptions, on the host."""
        return self.num_offsets * self.offset_size + (self.num_exceptions or 0) * self.exception_size

    @property
    def is_straight(self) -> bool:
        """Whether every parent has one child."""
        return self.num_exceptions == 0


@dataclass(frozen=True)
class TrieSizes:
    """What decides the size of a trie on a device.

    Attributes:
        levels: by level from 0.
        token_size: bytes of a token.
    """

    levels: tuple[LevelSizes, ...]
    token_size: int

    @classmethod
    def of(cls, trie: Trie) -> TrieSizes:
        """Those of a trie; reads tokens and offsets of the levels that may have tables."""
        levels = tuple(_level_sizes(trie, level) for level in range(trie.max_length))
        return cls(levels, trie.tokens.itemsize)

    @property
    def num_nodes(self) -> int:
        """All nodes, the root included."""
        return 1 + sum(level.num_children for level in self.levels)

    @property
    def most_children(self) -> int:
        """The most children of one node."""
        return max(level.largest for level in self.levels)


def plan_memory(rules: BatchRules, *, backend: Backend = "torch", num_rows: int = 1) -> MemoryPlan:
    """What `device_catalogue` of a backend has on the device for a batch: nothing is moved.

    Args:
        rules: the catalogue of every request; for one of them, see `ConstraintIndex.memory_plan`.
        backend: `"torch"` or `"flax"`.
        num_rows: B, where `rules` hold for any number of requests (Flax).

    Raises:
        ValueError: another backend.

    Example:
        >>> from hf_gr import ConstraintIndex
        >>> from hf_gr.catalogue.snapshot import combine_rules
        >>> index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]])
        >>> plan_memory(combine_rules([index.snapshot])).tokens  # 6 nodes and 2 of padding, 2 bytes each
        16
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r}, expected 'torch' or 'flax'")
    return _on_torch(rules) if backend == "torch" else _on_flax(rules, num_rows)


# PyTorch


def torch_arrays(sizes: TrieSizes) -> dict[str, int]:
    """Bytes of a trie's tokens, offsets and tables in PyTorch: the host's arrays, and what is made of them."""
    return {
        "tokens": (sizes.num_nodes + sizes.most_children) * sizes.token_size,
        "offsets": sum(level.offset_bytes for level in sizes.levels),
        "tables": constant_bytes(sizes) + sum(map(table_bytes, sizes.levels)),
    }


def constant_bytes(sizes: TrieSizes) -> int:
    """Bytes of what steps read: of a level four numbers and places of children, of the root the tokens below it."""
    return 8 * (sizes.levels[0].num_children + sum(4 + level.largest for level in sizes.levels))


def table_bytes(level: LevelSizes) -> int:
    """Bytes of a level's table; 0 for one that has none."""
    if (table := level.table) is None:
        return 0
    entry = 4 + smallest_dtype(level.largest).itemsize  # a penalty and a rank
    # And each node's first child; two rows for what is no node; the tokens of the span; which nodes have rows.
    numbers = 8 * (table.span + (0 if table.parents is None else table.num_rows))
    return (table.num_rows + 2) * (table.span * entry + 8) + numbers


def living_bytes(level: LevelSizes) -> int:
    """Bytes of the bits of one rule in a level's table."""
    return 0 if level.table is None else level.table.living_bytes


def _on_torch(rules: BatchRules) -> MemoryPlan:
    base, *added = (part.segment.trie for part in rules.shared.parts)
    sizes = TrieSizes.of(base)
    arrays = torch_arrays(sizes)
    alive, views = _torch_rules(rules, 0), len(rules.snapshots)
    living = sum(map(living_bytes, sizes.levels))
    if added or (alive and views * living > LARGEST_TABLE):
        arrays["tables"], living = constant_bytes(sizes), 0
    elif alive and living:
        arrays["tables"] += SPREAD
        alive += living if views == 1 else living * (len(_lives(rules, 0)) + views)  # of several, one array with all
    additions = 0
    if added and rules.shared.twins is not None:
        added_sizes = TrieSizes.of(added[0])
        added_arrays = torch_arrays(added_sizes)
        additions = (
            added_arrays["tokens"]
            + added_arrays["offsets"]
            + constant_bytes(added_sizes)
            + _torch_rules(rules, 1)
            + rules.shared.twins.nbytes
        )
    hidden = sum(level.nbytes for part in rules.excluded for level in part if level is not None)
    own_rules = 0 if rules.rule_of_row is None else rules.rule_of_row.nbytes
    return MemoryPlan(
        backend="torch",
        **arrays,
        rules=alive,
        additions=additions,
        requests=hidden + own_rules,
        each_view=sum(map(_num_bytes, levels_of_view(sizes))) + sum(map(living_bytes, sizes.levels)),
        edges=8 * (sizes.num_nodes - 1) if sizes.num_nodes <= MOST_NODES else 0,
    )


def _torch_rules(rules: BatchRules, number: int) -> int:
    """The bits of a segment: those of every rule and, of several, one array by level with all of them."""
    segment = rules.shared.parts[number].segment
    lives = [snapshot.parts[number].alive for snapshot in rules.snapshots]
    if all(live is None for live in lives):
        return 0
    by_rule = [_bits(segment, live) for live in lives]
    moved = {key: size for level in by_rule for key, size in level}
    if len(lives) == 1:
        return sum(moved.values())
    stacked = {
        tuple(key for key, _ in level): sum(size for _, size in level)
        for above, level in enumerate(zip(*by_rule, strict=True))
        # The only child of a node is not checked, unless there may be others.
        if not above or rules.shared.added is not None or not segment.trie.fanouts[above].is_straight
    }
    return sum(moved.values()) + sum(stacked.values())


def _lives(rules: BatchRules, number: int) -> set[int]:
    """The rules that are not the same."""
    return {id(snapshot.parts[number].alive) for snapshot in rules.snapshots}


def _bits(segment: Segment, alive: Liveness | None) -> list[tuple[object, int]]:
    """By level from 1, the identity and the bytes of an array of bits; levels without branches may share one."""
    if alive is not None:
        return [(id(bits), bits.nbytes) for bits in alive.nodes]
    return [(level, _num_bytes(fanout.num_children)) for level, fanout in enumerate(segment.trie.fanouts)]


# Flax


def flax_arrays(sizes: TrieSizes) -> dict[str, int]:
    """Bytes of a trie's tokens and offsets in Flax: padded, and a bit for each exception."""
    offsets = 4 * (2 * len(sizes.levels) + 2)  # where levels start, and the bases of their tokens
    for level in sizes.levels:
        if level.num_parents > PARENTS and level.is_straight:
            continue
        if level.num_exceptions is None or level.num_parents > PARENTS:
            offsets += _flax_size(level.num_offsets + 1) * level.offset_size
        else:
            offsets += _flax_size(level.num_parents + 2) * smallest_dtype(level.num_children).itemsize
        if level.num_exceptions is not None and level.num_parents > PARENTS:
            offsets += _flax_size(2 * -(-level.num_parents // 32) + 1) * 4
    return {"tokens": _flax_size(sizes.num_nodes + max(flax_branching(sizes))) * sizes.token_size, "offsets": offsets}


def flax_branching(sizes: TrieSizes) -> list[int]:
    """By level, the children of a node that a program is compiled for."""
    return [
        1 if level.num_parents > PARENTS and level.is_straight else bucket(level.largest, least=CHILDREN, steps=STEPS)
        for level in sizes.levels
    ]


def flax_bits(num_nodes: int, most_children: int) -> int:
    """Bytes of the bits of a level: 32 in each number, and as many more as a window may reach past the last node."""
    behind = most_children // 8 + 8
    return 4 * _flax_size(-(-(_num_bytes(num_nodes) + behind) // 4))


def _on_flax(rules: BatchRules, num_rows: int) -> MemoryPlan:
    tries = [part.segment.trie for part in rules.shared.parts]
    sizes = TrieSizes.of(tries[0])
    most_children = max(flax_branching(sizes))
    moved = {
        key: flax_bits(fanout.num_children, most_children)
        for snapshot in rules.snapshots
        for (key, _), fanout in zip(
            _bits(snapshot.base.segment, snapshot.base.alive), snapshot.base.segment.trie.fanouts, strict=True
        )
    }
    room, num_tokens = ADDED_NODES, ADDED_NODES + ADDED_CHILDREN
    if len(tries) > 1:
        room = bucket(tries[1].level_starts[-1] + 1, least=ADDED_NODES)
        num_tokens = room + max(bucket(width, least=ADDED_CHILDREN) for width in tries[1].branching)
    alive_in_added = {id(snapshot.added and snapshot.added.alive) for snapshot in rules.snapshots}
    num_rows = rules.num_rows or num_rows
    hidden = 0
    if rules.excluded_ids is not None:
        most = max((level.shape[1] for part in rules.excluded for level in part if level is not None), default=0)
        size = HIDDEN_NODES
        while size < most:
            size *= 4
        hidden = 2 * max(trie.max_length for trie in tries) * num_rows * size * 4
    return MemoryPlan(
        backend="flax",
        **flax_arrays(sizes),
        tables=0,
        rules=sum(moved.values()),
        additions=4 * (2 * room + num_tokens * (1 + len(alive_in_added))),
        requests=hidden + 4 * num_rows,
        each_view=sum(flax_bits(num_nodes, most_children) for num_nodes in levels_of_view(sizes)),
        edges=0,
    )


def _flax_size(number: int) -> int:
    return bucket(number, least=SMALLEST, steps=STEPS)


# Both


def levels_of_view(sizes: TrieSizes) -> Sequence[int]:
    """Nodes of the levels that have bits of their own in a view; levels without branches share those below them."""
    above = (*(level.is_straight for level in sizes.levels[1:]), False)
    return [level.num_children for level, is_shared in zip(sizes.levels, above, strict=True) if not is_shared]


def _num_bytes(num_bits: int) -> int:
    return -(-num_bits // 8)


def _level_sizes(trie: Trie, level: int) -> LevelSizes:
    fanout: Fanout = trie.fanouts[level]
    return LevelSizes(
        fanout.num_parents,
        fanout.num_children,
        fanout.largest,
        None if fanout.exceptions is None else len(fanout.exceptions),
        fanout.offsets.itemsize,
        0 if fanout.exceptions is None else fanout.exceptions.itemsize,
        table_shape(trie, level),
    )
