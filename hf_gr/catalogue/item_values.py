# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a call knows of every item beside its sequence: a bias of its score, and its group. By node of the trie.

Several items of one sequence have the largest bias of theirs, and the group of the first; dead ones do not count.

Axes: I items, by position; S distinct sequences; N nodes, then as much padding as a trie's tokens have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .fanout import Bools, Longs
from .sequences import to_host
from .snapshot import Snapshot
from .trie import Trie

MIXED = -1  # stands for the group of a node with items of several


@dataclass(frozen=True, eq=False)
class ItemBias:
    """What is added to the final score of every item.

    A child's number less its parent's is added to its score when it is scored: an item's own are then its bias, and no
    term of a score is positive, so that a prefix still scores at least as well as every item below it.
    """

    trie: Trie
    by_node: npt.NDArray[np.float32]  # `[N]`: the largest of the items below, less the largest of all: at most 0
    largest: float

    @classmethod
    def read(cls, item_bias: Any, snapshots: Sequence[Snapshot], *, length_penalty: float) -> ItemBias:
        """Read and check the argument of `generate`; scores will be divided by `length ** length_penalty`."""
        given, positions, living = _by_position(item_bias, snapshots, "item_bias")
        try:
            numbers = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"item_bias={item_bias!r:.80}, expected a number for each item") from error
        if len(strange := numbers[~np.isfinite(numbers)]):
            raise ValueError(f"item_bias has {strange[0]}, expected finite numbers: leave such items out by a rule")
        items = snapshots[0].items
        values = np.zeros(len(items))
        values[positions] = numbers
        largest = float(values[living].max(initial=-np.inf)) if living.any() else 0.0
        values = np.where(living, values - largest, (values[living] - largest).min(initial=0.0))
        of_leaves = np.maximum.reduceat(values, items.at_leaf.ranges(np.arange(items.trie.num_sequences))[0])
        lengths = np.arange(1, items.trie.max_length + 1)
        of_leaves *= np.repeat(lengths**length_penalty, np.diff(items.trie.leaf_starts))
        return cls(items.trie, by_node(items.trie, of_leaves.astype(np.float32), np.maximum), largest)


@dataclass(frozen=True, eq=False)
class ItemGroups:
    """The group of every item, a number."""

    trie: Trie
    by_node: npt.NDArray[np.int32]  # `[N]`: the group of all items below, or `MIXED`
    by_leaf: npt.NDArray[np.int32]  # `[S]`

    @classmethod
    def read(cls, item_groups: Any, snapshots: Sequence[Snapshot]) -> ItemGroups:
        """Read and check the argument of `generate`; None for the first token of each sequence."""
        items = snapshots[0].items
        trie, leaves = items.trie, np.arange(items.trie.num_sequences)
        if item_groups is None:
            groups = trie.sequences(leaves)[:, 0].astype(np.int32)
        else:
            given, positions, living = _by_position(item_groups, snapshots, "item_groups")
            numbers = np.arange(len(items), dtype=np.int32) + len(given)  # an item without a group is one of its own
            known: dict[Any, int] = {}
            for at, group in zip(positions, given, strict=True):
                if group is not None and group == group:  # not NaN
                    numbers[at] = known.setdefault(group, len(known))
            first, _ = items.at_leaf.ranges(leaves)
            places = np.where(living, np.arange(len(items)), len(items))
            at = np.minimum.reduceat(places, first)
            groups = numbers[np.where(at < len(items), at, first)]
        least, most = by_node(trie, groups, np.minimum), by_node(trie, groups, np.maximum)
        return cls(trie, np.where(least == most, most, MIXED), groups)

    def fitting(self, snapshot: Snapshot, rows: Longs, at_most: int, number: int) -> tuple[Longs, Bools]:
        """Of `[B, K, L]` sequences, best first, the places of the first that fit, `[B, number]`; and which there are.

        No more than `at_most` of a group fit.
        """
        leaves = snapshot.trie.walk(rows.reshape(-1, rows.shape[-1]), snapshot.eos_token_id)[0].reshape(rows.shape[:2])
        groups = self.by_leaf[leaves]
        before = np.tril(groups[:, :, None] == groups[:, None], -1) & (leaves >= 0)[:, None]
        fits = (before.sum(-1) < at_most) & (leaves >= 0)
        places = np.argsort(~fits, axis=-1, kind="stable")[:, :number]
        return places, np.take_along_axis(fits, places, axis=-1)


def by_node(trie: Trie, of_leaves: npt.NDArray[Any], merge: np.ufunc) -> npt.NDArray[Any]:
    """`[N]`: what merges the numbers, `[S]`, of the sequences below each node."""
    starts, levels = trie.leaf_starts, list[npt.NDArray[Any]]()
    below = of_leaves[starts[-2] :]
    for level in range(trie.max_length - 1, -1, -1):
        levels.insert(0, below)
        first, last = trie.fanouts[level].ranges(np.arange(trie.fanouts[level].num_parents))
        numbers = np.zeros(len(first), of_leaves.dtype)
        numbers[first < last] = merge.reduceat(below, first[first < last])
        if level:
            numbers[first == last] = of_leaves[starts[level - 1] : starts[level]]
        below = numbers
    padding = np.zeros(len(trie.tokens) - trie.level_starts[-1], of_leaves.dtype)
    return np.concatenate([below, *levels, padding])


def read_table(given: Any, name: str, snapshot: Snapshot) -> Any:
    """What the table of a path says of items, in a dictionary; anything else as it is."""
    if not isinstance(given, str | PathLike):
        return given
    from hf_gr.tables.items import read_values

    path = str(cast(Any, given))
    try:
        return read_values(path, name, are_strings=snapshot.are_strings)
    except ValueError as error:
        raise ValueError(f"{name}={path!r}, expected the path of a table: {error}") from error


def _by_position(given: Any, snapshots: Sequence[Snapshot], name: str) -> tuple[list[Any], Longs, Bools]:
    """What is given for items, the positions of those, and which items are alive."""
    snapshot = snapshots[0]
    living = np.any([one.living(np.arange(len(one.items))) for one in snapshots], axis=0)
    given = read_table(given, name, snapshot)
    given = given.to_dict() if hasattr(given, "to_dict") else given  # of pandas
    if isinstance(given, Mapping):
        by_id = cast("Mapping[Any, Any]", given)
        of, positions = snapshot.items.find(snapshot.check_ids(list(by_id), name))
        every = list(by_id.values())
        return [every[place] for place in cast("list[int]", of.tolist())], positions, living
    host: Any = to_host(given)
    host = host.tolist() if isinstance(host, np.ndarray) else host
    values = cast("list[Any] | None", host if isinstance(host, list | tuple) else None)
    if values is None or len(values) != snapshot.num_items or len(snapshots) > 1:
        what = f"type {type(given).__name__}" if values is None else f"{len(values)} entries"
        raise ValueError(
            f"{name} has {what}, expected {snapshot.num_items}, one for each of index.item_ids, or a dictionary by "
            "item id" + (", which several views need" if len(snapshots) > 1 else "")
        )
    positions = snapshot.items.positions[snapshot.flags_by_number()]
    return list(values), positions.astype(np.int64), living
