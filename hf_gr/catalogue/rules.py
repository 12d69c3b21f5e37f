# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules of a batch: the catalogue of every request, and what its answers must not have. Knows no framework.

Axes: B requests; E hidden nodes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from .fanout import Array, Longs
from .item_ids import ItemId, check_item_ids
from .item_values import ItemBias, ItemGroups
from .items import dead_nodes
from .sequences import to_host
from .snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class BatchRules:
    """The catalogue of every request of a batch: rules over shared items, and some that one request must not see."""

    snapshots: tuple[Snapshot, ...]  # distinct rules; all of them share their items
    rule_of_row: Longs | None = None  # `[B]` numbers of rules; None where one rule holds for any number of rows
    excluded_ids: tuple[frozenset[ItemId], ...] | None = None  # B sets of item ids, or None
    # by level from 1: `[B, E]` nodes hidden from each request, padded with the root, which is no node's child; None
    # for a level without any
    excluded: tuple[Longs | None, ...] = ()
    bias: ItemBias | None = None  # of scores
    groups: ItemGroups | None = None  # of which a list has so many items at most

    @property
    def shared(self) -> Snapshot:
        """One of the snapshots, for what all of them share: items, lengths, the end token."""
        return self.snapshots[0]

    @property
    def num_rows(self) -> int | None:
        """B; None where the rules hold for any number of rows."""
        if self.excluded_ids is not None:
            return len(self.excluded_ids)
        return None if self.rule_of_row is None else len(self.rule_of_row)

    def of_row(self, row: int) -> Snapshot:
        """The rule of one request."""
        return self.snapshots[0 if self.rule_of_row is None else int(self.rule_of_row[row])]


def combine_rules(
    snapshots: Sequence[Snapshot], exclude_items: Any = None, *, num_prompts: int | None = None, one_each: bool = False
) -> BatchRules:
    """Rules of a batch, from one snapshot for all requests (unless `one_each`) or one for each, and exclusions.

    Unknown ids are fine: a user's history may be older than the catalogue.
    """
    counts = {"constraint_index": len(snapshots)} if one_each or len(snapshots) != 1 else {}
    ids = None
    if exclude_items is not None and snapshots:
        ids = read_exclusions(exclude_items, snapshots[0])
        counts["exclude_items"] = len(ids)
    expected = next(iter(counts.values()), 1) if num_prompts is None else num_prompts
    for name, count in counts.items():
        if not count or count != expected:
            known = expected or "1 or more"
            raise ValueError(f"{name} has {count} entries, expected {known}: one for each prompt")
    distinct = tuple({id(snapshot): snapshot for snapshot in snapshots}.values())
    numbers = {id(snapshot): number for number, snapshot in enumerate(distinct)}
    rule_of_row = np.array([numbers[id(snapshot)] for snapshot in snapshots]) if len(distinct) > 1 else None
    others = [row for row, snapshot in enumerate(snapshots) if snapshot.items is not snapshots[0].items]
    if others:
        raise ValueError(
            f"constraint_index[{others[0]}] is no view of the catalogue of constraint_index[0], expected "
            "index.where(...) of one index for all rows: take the views again after index.add(...) or index.compact()"
        )
    if ids is None:
        return BatchRules(distinct, rule_of_row)
    rules = BatchRules(distinct, rule_of_row, tuple(frozenset(row) for row in ids))
    flat = [item for row in ids for item in row]
    if not flat:
        return rules
    rows = np.repeat(np.arange(len(ids)), [len(row) for row in ids])
    return replace(rules, excluded=_excluded_nodes(rules, check_item_ids(flat, argument="exclude_items"), rows))


def _excluded_nodes(rules: BatchRules, ids: Array | list[str], rows: Longs) -> tuple[Longs | None, ...]:
    """By level: the nodes hidden from each request, one row each."""
    assert rules.excluded_ids is not None
    items = rules.shared.items
    of, positions = items.find(ids)
    rows, positions = np.unique(np.stack([rows[of], positions]), axis=1)
    found: list[tuple[tuple[Longs, Longs], ...]] = []
    for rule, snapshot in enumerate(rules.snapshots):
        mine = snapshot.living(positions)
        if rules.rule_of_row is not None:
            mine &= rules.rule_of_row[rows] == rule
        found.append(dead_nodes(items, snapshot.alive, rows[mine], positions[mine]))
    merged = [[np.concatenate(sides) for sides in zip(*level, strict=True)] for level in zip(*found, strict=True)]
    starts = items.trie.level_starts[1:]
    return tuple(
        _padded(of, nodes + start, len(rules.excluded_ids)) for (of, nodes), start in zip(merged, starts, strict=False)
    )


def _padded(rows: Longs, nodes: Longs, num_rows: int) -> Longs | None:
    """Nodes as `[num_rows, most]`, padded with the root; None without any."""
    if not len(rows):
        return None
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=num_rows)
    before = np.cumsum(counts) - counts
    padded = np.zeros((num_rows, int(counts.max())), dtype=np.int64)
    padded[rows[order], np.arange(len(rows)) - before[rows[order]]] = nodes[order]
    return padded


def read_exclusions(exclude_items: Any, snapshot: Snapshot) -> list[list[ItemId]]:
    """Rows of item ids of the catalogue's type, whether an item has them or not."""
    host: Any = to_host(exclude_items)
    if isinstance(host, np.ndarray) and not host.ndim:
        host = host.tolist()
    if not isinstance(host, Iterable) or isinstance(host, (str, bytes)):
        raise ValueError(f"exclude_items is {host!r}, expected a list of item ids for each request")
    requests = enumerate(cast(Iterable[Any], host))
    rows: list[Any] = [snapshot.check_ids(row, f"exclude_items[{number}]") for number, row in requests]
    return [row if isinstance(row, list) else row.tolist() for row in rows]
