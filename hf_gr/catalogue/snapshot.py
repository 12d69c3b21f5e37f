# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What one call sees of a changing catalogue: segments, and what is alive in them. Nothing here ever changes.

An update makes another snapshot that shares all it can with the previous one: a removal copies some bits, an addition
compiles what was added into a small segment of its own.

Axes: R rows of T tokens; B requests; Q item ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from hf_gr.files.text import counted

from .fanout import Array, Bools, Longs, spans
from .item_ids import ItemId, check_item_ids
from .pieces import take
from .segment import Liveness, Segment, build_segment, dead_nodes, test
from .sequences import ERRORS_SHOWN, is_integer, read_catalogue, to_host
from .trie import PADDING, Trie, lexicographic_order, take_rows


@dataclass(frozen=True, eq=False)
class Part:
    """A segment as one snapshot sees it; `alive` is None where all of it is."""

    segment: Segment
    alive: Liveness | None = None

    @property
    def num_items(self) -> int:
        """Living items."""
        return len(self.segment.items) if self.alive is None else self.alive.num_items

    def item_flags(self) -> Bools:
        """By position: whether an item is alive."""
        return np.ones(len(self.segment.items), dtype=bool) if self.alive is None else self.alive.item_flags()

    def numbers(self) -> Longs:
        """The numbers of living items, ascending: the order in which they were given."""
        if self.alive is None:
            return np.arange(len(self.segment.items))
        return np.flatnonzero(take(self.alive.item_flags(), self.segment.items.positions))

    def living(self, positions: Longs) -> Bools:
        """Whether the items at some positions are alive."""
        return np.ones(len(positions), dtype=bool) if self.alive is None else test(self.alive.items, positions)

    def rows(self) -> Array:
        """The sequences of living items, in the order of `numbers`."""
        items, flags = self.segment.items, self.item_flags()
        rows = self.segment.trie.sequences(items.at_leaf.parents(np.flatnonzero(flags)))  # neighbours share reads
        places = np.cumsum(flags, dtype=items.positions.dtype) - 1
        return take_rows(rows, places[items.positions[self.numbers()]])

    def find(self, ids: Array | list[str]) -> tuple[Longs, Longs]:
        """`[Q]` counts of items with these ids, alive or not, and their positions, concatenated."""
        counts, numbers = self.segment.items.find(ids)
        return counts, self.segment.items.positions[numbers].astype(np.int64)

    def without(self, positions: Longs) -> Part:
        """The same with these items, by position, also dead."""
        if not len(positions):
            return self
        return replace(self, alive=(self.alive or self.segment.all_alive).without(positions))

    def only(self, flags: Bools) -> Part:
        """The same with only the flagged items, by position, alive."""
        return replace(self, alive=Liveness.from_items(self.segment, flags))

    def items(self, rows: Longs, eos_token_id: int | None) -> list[list[ItemId]]:
        """The living items of every row of tokens."""
        leaves, _ = self.segment.trie.walk(rows, eos_token_id)
        first, last = self.segment.items.at_leaf.ranges(np.maximum(leaves, 0))
        last = np.where(leaves >= 0, last, first)
        positions = spans(first, last)
        alive = self.living(positions)
        of = np.repeat(np.arange(len(rows)), last - first)[alive]
        found: list[list[ItemId]] = [[] for _ in rows]
        items = self.segment.items.ids_of(self.segment.items.numbers[positions[alive]])
        for row, item in zip(cast("list[int]", of.tolist()), items, strict=True):
            found[row].append(item)
        return found


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A catalogue at one moment.

    Attributes:
        base: what was compiled.
        eos_token_id: the token that ends every sequence, or None where all have one length.
        added: what was added since; None for nothing.
        twins: for every node of `added`, the node of `base` with the same prefix, or -1; None without `added`.
        tokenizer: a digest of the tokenizer that the sequences come from; None where they are not text.
    """

    base: Part
    eos_token_id: int | None
    added: Part | None = None
    twins: Longs | None = None
    tokenizer: str | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The base and, if there is any, what was added."""
        return (self.base,) if self.added is None else (self.base, self.added)

    @property
    def is_compact(self) -> bool:
        """Whether all of the base is alive, and nothing else."""
        return self.added is None and self.base.alive is None

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that was ever compiled in."""
        return max(part.segment.trie.max_length for part in self.parts)

    @property
    def num_items(self) -> int:
        """Living items."""
        return sum(part.num_items for part in self.parts)

    @cached_property
    def max_token_id(self) -> int:
        """The largest token of any sequence that was ever compiled in."""
        return max(part.segment.trie.max_token_id for part in self.parts)

    @property
    def are_strings(self) -> bool:
        """Whether item ids are strings."""
        ids = self.base.segment.items.ids
        return ids is not None and ids.are_strings

    @cached_property
    def num_sequences(self) -> int:
        """Distinct sequences of living items."""
        trie = self.base.segment.trie
        alive = self.base.alive
        number = trie.num_sequences if alive is None else int(np.count_nonzero(alive.leaf_flags()))
        if self.added is None:
            return number
        leaves = self.added.segment.trie.num_sequences
        is_alive = np.ones(leaves, dtype=bool) if self.added.alive is None else self.added.alive.leaf_flags()
        in_base = np.array([bool(items) for items in self._base_items(self.added.segment.trie)], dtype=bool)
        return number + int(np.count_nonzero(is_alive & ~in_base))

    def rows(self) -> Array:
        """`[S, L]` distinct sequences of living items, in lexicographic order, shorter ones padded."""
        parts = [part.rows() for part in self.parts if part.num_items]
        if not parts:
            return np.zeros((0, self.max_length), dtype=np.int64)
        rows = _stack(parts)
        rows = take_rows(rows, lexicographic_order(rows))
        return rows[np.append(True, (rows[1:] != rows[:-1]).any(axis=1))]

    def items(self, rows: Longs) -> list[list[ItemId]]:
        """The living items of every row of tokens."""
        found = self.base.items(rows, self.eos_token_id)
        if self.added is None:
            return found
        added = self.added.items(rows, self.eos_token_id)
        return [one + two for one, two in zip(found, added, strict=True)]

    def contains(self, row: Longs) -> bool:
        """Whether one row, neither shorter nor longer, is the sequence of a living item."""
        lengths = [part.segment.trie.walk(row[None], self.eos_token_id)[1][0] for part in self.parts]
        return any(
            length == len(row) and bool(part.items(row[None], self.eos_token_id)[0])
            for part, length in zip(self.parts, lengths, strict=True)
        )

    def next_tokens(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that may follow a prefix, ascending."""
        level = len(prefix)
        found: set[int] = set()
        for part in self.parts:
            trie = part.segment.trie
            node = trie.find(prefix)
            if node < 0 or level >= trie.max_length:
                continue
            first, last = trie.children(np.array([node]), level)
            nodes = spans(first, last)
            if part.alive is not None:
                nodes = nodes[test(part.alive.nodes[level], nodes - trie.level_starts[level + 1])]
            found.update(trie.token(nodes, level + 1).tolist())
        return sorted(found)

    def item_ids(self) -> Array | list[str]:
        """The ids of living items, in the order in which they were given."""
        ids = [_select(part, part.numbers()) for part in self.parts]
        if self.are_strings:
            return [text for part in ids for text in part]
        return np.concatenate(cast("list[Array]", ids))

    def has_items(self, item_ids: Any) -> Bools:
        """`[Q]`: whether there is a living item with this id."""
        return self._living(self._check_ids(item_ids, "item_ids"))[0]

    def sequences_of(self, item_ids: Any) -> tuple[Bools, Longs]:
        """The sequences of items by their ids, for prompts: a history may name items sold out since.

        Returns:
            `[Q]` flags: whether there is an item with this id, alive or not; and `[Q, L]` tokens with their end token,
            -1 after them. Of several sequences of one id, the first of a living item.

        Raises:
            ValueError: ids of another type than the catalogue's.
        """
        ids = self._check_ids(item_ids, "item_ids")
        rows = np.full((len(ids), self.max_length), PADDING, dtype=np.int64)
        rank = np.zeros(len(ids), dtype=np.int64)  # 1: found, 2: alive
        for part in self.parts:
            counts, at = part.find(ids)
            of, found = np.repeat(np.arange(len(ids)), counts), 1 + part.living(at)
            order = np.lexsort((-found, of))  # stable
            order = order[np.append(True, of[order][1:] != of[order][:-1])[: len(order)]]
            order = order[found[order] > rank[of[order]]]
            leaves = part.segment.items.at_leaf.parents(at[order])
            sequences = part.segment.trie.sequences(leaves)
            rows[of[order]] = PADDING
            rows[of[order], : sequences.shape[1]] = sequences
            rank[of[order]] = found[order]
        return rank > 0, rows

    def where(self, mask_or_item_ids: Any) -> Snapshot:
        """Only some of the living items: a mask with an entry for each of `item_ids`, or ids."""
        mask = _read_mask(mask_or_item_ids, self.num_items)
        if mask is None:
            found = self._find_living(mask_or_item_ids, "mask_or_item_ids")
            flags = [np.zeros(len(part.segment.items), dtype=bool) for part in self.parts]
            for part, positions in zip(flags, found, strict=True):
                part[positions] = True
            return self._with_parts(part.only(f) for part, f in zip(self.parts, flags, strict=True))
        parts: list[Part] = []
        start = 0
        for part in self.parts:
            by_number = mask[start : start + part.num_items]
            start += part.num_items
            if part.alive is not None:
                chosen, by_number = by_number, take(part.alive.item_flags(), part.segment.items.positions)
                by_number[by_number] = chosen
            parts.append(part.only(take(by_number, part.segment.items.numbers)))
        return self._with_parts(parts)

    def flags_of(self, view: Snapshot) -> Bools:
        """`[I]`, in the order of `item_ids`: which of the living items a view has, for `where` of a compacted copy."""
        flags: list[Bools] = []
        for number, part in enumerate(self.parts):
            is_seen = np.zeros(len(part.segment.items), dtype=bool)
            if number < len(view.parts):
                assert view.parts[number].segment is part.segment, "a view of another catalogue"
                is_seen = view.parts[number].item_flags()
            flags.append(is_seen[part.segment.items.positions[part.numbers()]])
        return np.concatenate(flags)

    def like(self, view: Snapshot, item_ids: Any) -> Snapshot:
        """A view that was taken before an `add`, over what is there now.

        Args:
            view: of the same base, all of whose items are still alive.
            item_ids: of what was added, those that the view has.
        """
        assert view.base.segment is self.base.segment, "a view of another catalogue"
        taken = replace(self, base=view.base)
        if self.added is None:
            return taken
        positions = self.added.find(self._check_ids(item_ids, "item_ids"))[1]
        flags = np.zeros(len(self.added.segment.items), dtype=bool)
        flags[positions] = True
        return taken._with_parts([view.base, self.added.only(flags & self.added.item_flags())])

    def remove(self, item_ids: Any) -> Snapshot:
        """Without some living items."""
        found = self._find_living(item_ids, "item_ids")
        return self._with_parts(part.without(positions) for part, positions in zip(self.parts, found, strict=True))

    def add(self, sequences: Any, item_ids: Any) -> Snapshot:
        """With more items; one that exists already, with the same sequence, stays as it is."""
        host: Any = to_host(sequences)
        is_empty = cast(Array, host).shape[:1] == (0,) if isinstance(host, np.ndarray) else host in ([], ())
        rows = np.zeros((0, self.max_length), dtype=np.int64) if is_empty else read_catalogue(host, self.eos_token_id)
        ids = self._check_ids(item_ids, "item_ids")
        if len(ids) != len(rows):
            raise ValueError(f"item_ids has {len(ids)} entries, expected {len(rows)}: one for each sequence")
        if not len(rows):
            return self
        if self.eos_token_id is None and rows.shape[1] != self.max_length:
            raise ValueError(
                f"sequences have {rows.shape[1]} tokens, expected {self.max_length} as in the catalogue: sequences of "
                "other lengths need an index with eos_token_id="
            )
        is_new = np.array(
            [item not in there for item, there in zip(ids, self.base.items(rows.astype(np.int64), None), strict=True)]
        )
        if not is_new.all():
            rows = rows[is_new]
            ids = ids[is_new] if isinstance(ids, np.ndarray) else [ids[int(row)] for row in np.flatnonzero(is_new)]
        if not len(rows):
            return self
        if self.added is not None and self.added.num_items:
            rows = _stack([self.added.rows(), rows])
            ids = _join([_select(self.added, self.added.numbers()), ids])
        segment = build_segment(rows, ids)
        return replace(self, added=Part(segment), twins=_twins(segment.trie, self.base.segment.trie))

    def compact(self) -> Snapshot:
        """The same catalogue, recompiled from what is alive; itself if nothing would change.

        Raises:
            ValueError: nothing is alive: an index needs an item.
        """
        if self.is_compact:
            return self
        if not self.num_items:
            raise ValueError("no item is alive, expected one or more: an index that is saved or compacted has an item")
        living = [part for part in self.parts if part.num_items]
        rows = _stack([part.rows() for part in living])
        ids = _join([_select(part, part.numbers()) for part in living])
        return Snapshot(Part(build_segment(rows, ids)), self.eos_token_id, tokenizer=self.tokenizer)

    def _with_parts(self, parts: Iterable[Part]) -> Snapshot:
        """The same with other living items. Additions without any go: their length and vocabulary would stay."""
        base, *added = parts
        if added and added[0].num_items:
            return replace(self, base=base, added=added[0])
        return Snapshot(base, self.eos_token_id, tokenizer=self.tokenizer)

    def _check_ids(self, item_ids: Any, argument: str) -> Array | list[str]:
        """Check that ids are of the catalogue's type."""
        ids = check_item_ids(item_ids, argument=argument)
        if len(ids) and isinstance(ids, np.ndarray) == self.are_strings:
            expected = "strings" if self.are_strings else "integers"
            first = ids[0] if self.are_strings is False else int(cast(Any, ids[0]))
            raise ValueError(f"{argument}[0]={first!r}, expected {expected}: the catalogue's item ids are {expected}")
        return ids

    def _find_living(self, item_ids: Any, argument: str) -> list[Longs]:
        """By part: the positions of the living items that have these ids."""
        ids = self._check_ids(item_ids, argument)
        known, found = self._living(ids)
        refuse_unknown(ids, known, argument)
        return found

    def _living(self, ids: Array | list[str]) -> tuple[Bools, list[Longs]]:
        """`[Q]`: whether a living item has this id; and by part, the positions of those that have one."""
        known = np.zeros(len(ids), dtype=bool)
        found: list[Longs] = []
        for part in self.parts:
            counts, at = part.find(ids)
            alive = part.living(at)
            known[np.repeat(np.arange(len(ids)), counts)[alive]] = True
            found.append(at[alive])
        return known, found

    def _base_items(self, trie: Trie) -> list[list[ItemId]]:
        """The base's living items of another trie's sequences."""
        return self.base.items(trie.sequences(np.arange(trie.num_sequences)).astype(np.int64), self.eos_token_id)


@dataclass(frozen=True, eq=False)
class BatchRules:
    """The catalogue of every request of a batch: rules over shared segments, and items that one request must not see.

    Attributes:
        snapshots: distinct rules; all of them share their segments.
        rule_of_row: `[B]` numbers of rules; None where one rule holds for any number of rows.
        excluded_ids: B sets of item ids, or None.
        excluded: by part, by level from 1: `[B, E]` nodes hidden from each request, padded with the root, which is no
            node's child; None for a level without any.
    """

    snapshots: tuple[Snapshot, ...]
    rule_of_row: Longs | None = None
    excluded_ids: tuple[frozenset[ItemId], ...] | None = None
    excluded: tuple[tuple[Longs | None, ...], ...] = ()

    @property
    def shared(self) -> Snapshot:
        """One of the snapshots, for what all of them share: segments, lengths, the end token."""
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

    def items(self, row: int, tokens: Sequence[int]) -> list[ItemId]:
        """The items that one request may be answered with by these tokens."""
        items = self.of_row(row).items(np.array([tokens], dtype=np.int64))[0]
        return items if self.excluded_ids is None else [item for item in items if item not in self.excluded_ids[row]]


def combine_rules(
    snapshots: Sequence[Snapshot], exclude_items: Any = None, *, num_prompts: int | None = None, one_each: bool = False
) -> BatchRules:
    """Rules of a batch.

    Args:
        snapshots: one for all requests, or one for each.
        exclude_items: for each request the ids of items that its answers must not have. Unknown ids are fine: a user's
            history may be older than the catalogue.
        num_prompts: the number of requests, if known.
        one_each: whether a single snapshot belongs to a single request; several are always one for each.

    Raises:
        ValueError: snapshots that share no segments, not as many of them or of exclusions as requests, ids of another
            type than the catalogue's.
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
    distinct = _with_additions(distinct)
    segments = [tuple(id(part.segment) for part in snapshot.parts) for snapshot in distinct]
    if len(set(segments)) > 1:
        row = next(row for row, s in enumerate(snapshots) if segments[numbers[id(s)]] != segments[0])
        raise ValueError(
            f"constraint_index[{row}] is no view of the catalogue of constraint_index[0], expected index.where(...) "
            "of one index for all rows: take the views again after index.add(...) or index.compact()"
        )
    if ids is None:
        return BatchRules(distinct, rule_of_row)
    rules = BatchRules(distinct, rule_of_row, tuple(frozenset(row) for row in ids))
    flat = [item for row in ids for item in row]
    if not flat:
        return rules
    rows = np.repeat(np.arange(len(ids)), [len(row) for row in ids])
    return replace(rules, excluded=_excluded_nodes(rules, check_item_ids(flat, argument="exclude_items"), rows))


def _with_additions(snapshots: tuple[Snapshot, ...]) -> tuple[Snapshot, ...]:
    """Views that dropped the additions to their base get those of the others back, all of them dead."""
    full = next((snapshot for snapshot in snapshots if snapshot.added is not None), None)
    if full is None or full.added is None or all(snapshot.added is not None for snapshot in snapshots):
        return snapshots
    dead = full.added.only(np.zeros(len(full.added.segment.items), dtype=bool))
    return tuple(
        replace(snapshot, added=dead, twins=full.twins)
        if snapshot.added is None and snapshot.base.segment is full.base.segment
        else snapshot
        for snapshot in snapshots
    )


def _excluded_nodes(rules: BatchRules, ids: Array | list[str], rows: Longs) -> tuple[tuple[Longs | None, ...], ...]:
    """By part and level: the nodes hidden from each request, one row each."""
    assert rules.excluded_ids is not None
    num_rows = len(rules.excluded_ids)
    levels: list[tuple[Longs | None, ...]] = []
    for number in range(len(rules.shared.parts)):
        counts, positions = rules.shared.parts[number].find(ids)
        pairs = np.unique(np.stack([np.repeat(rows, counts), positions]), axis=1)
        found: list[list[tuple[Longs, Longs]]] = []
        for rule, snapshot in enumerate(rules.snapshots):
            part = snapshot.parts[number]
            mine = part.living(pairs[1])
            if rules.rule_of_row is not None:
                mine &= rules.rule_of_row[pairs[0]] == rule
            found.append([*dead_nodes(part.segment, part.alive, pairs[0][mine], pairs[1][mine])])
        starts = rules.shared.parts[number].segment.trie.level_starts[1:]
        merged = [
            tuple(np.concatenate(sides) for sides in zip(*level, strict=True)) for level in zip(*found, strict=True)
        ]
        levels.append(
            tuple(_padded(of, nodes + start, num_rows) for (of, nodes), start in zip(merged, starts, strict=False))
        )
    return tuple(levels)


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
    rows: list[list[ItemId]] = []
    for number, row in enumerate(cast("Iterable[Any]", host)):
        values: Any = to_host(row)
        if isinstance(values, np.ndarray) and values.ndim <= 1:
            values = values.tolist()
        if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
            raise ValueError(
                f"exclude_items[{number}] is {values!r}, expected a list of item ids: one list for each request"
            )
        rows.append(list(cast("Iterable[Any]", values)))
        expected = str if snapshot.are_strings else (int, np.integer)
        for item in cast("list[Any]", rows[-1]):
            if not isinstance(item, expected) or isinstance(item, bool):
                kind = "strings" if snapshot.are_strings else "integers"
                raise ValueError(
                    f"exclude_items[{number}] has {item!r}, expected {kind} as the catalogue's item ids are"
                )
    return rows


def _read_mask(mask_or_item_ids: Any, num_items: int) -> Bools | None:
    """A mask as an array; None for anything else."""
    host: Any = to_host(mask_or_item_ids)
    if isinstance(host, (list, tuple)) and host and isinstance(host[0], (bool, np.bool_)):
        host = np.asarray(cast("Sequence[Any]", host))
    mask = cast("Bools", host)
    if not isinstance(host, np.ndarray) or mask.dtype != np.bool_:
        _refuse_flags(host, num_items)
        return None
    if mask.shape != (num_items,):
        raise ValueError(
            f"mask has shape {list(mask.shape)}, expected [{num_items}]: one entry for each of index.item_ids, in "
            "that order"
        )
    return mask


def _refuse_flags(ids: Any, num_items: int) -> None:
    """Refuse what must be a mask by mistake of another type: its entries would be the ids 0 and 1."""
    if not isinstance(ids, np.ndarray) or num_items <= 2:
        return
    flags = cast("Array", ids)
    if flags.dtype.kind in "iu" and flags.shape == (num_items,) and flags.min() >= 0 and flags.max() <= 1:
        raise ValueError(
            f"mask has type {flags.dtype} and {num_items} entries of 0 and 1, expected bool: pass mask.astype(bool); "
            "as ids they would be of two items"
        )


def refuse_unknown(ids: Array | list[str], known: Bools, argument: str) -> None:
    """Refuse ids, `known` of which say whether the catalogue has them; `argument` in the message."""
    if known.all():
        return
    unknown = [ids[int(place)] for place in np.flatnonzero(~known)]
    shown = ", ".join(str(item) if is_integer(item) else repr(item) for item in unknown[:ERRORS_SHOWN])
    shown += ", ..." if len(unknown) > ERRORS_SHOWN else ""
    raise ValueError(
        f"{argument} has {counted(len(unknown), 'id')} that the catalogue does not have ({shown}), "
        "expected ids of its items: index.has_items(ids) tells which are"
    )


def _twins(trie: Trie, base: Trie) -> Longs:
    """For every node of a trie the node of another with the same prefix, -1 for none."""
    twins = np.full(trie.level_starts[-1], -1, dtype=np.int64)
    twins[0] = 0
    for level, fanout in enumerate(trie.fanouts[: base.max_length]):
        nodes = np.arange(trie.level_starts[level + 1], trie.level_starts[level + 2])
        parents = fanout.parents(nodes - trie.level_starts[level + 1]) + trie.level_starts[level]
        twins[nodes] = base.advance(twins[parents], trie.token(nodes, level + 1), level)
    return twins


def _select(part: Part, numbers: Longs) -> Array | list[str]:
    ids = part.segment.items.ids
    return numbers if ids is None else ids.select(numbers)


def _join(ids: list[Array | list[str]]) -> Array | list[str]:
    """Ids of several parts, one after the other."""
    if isinstance(ids[0], list):
        return [text for part in ids for text in cast("list[str]", part)]
    return check_item_ids(np.concatenate(cast("list[Array]", ids)))


def _stack(parts: list[Array]) -> Array:
    """Rows of several widths in one array."""
    width = max(part.shape[1] for part in parts)
    padded = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=PADDING) for part in parts]
    return np.concatenate(padded)
