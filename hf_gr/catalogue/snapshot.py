# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What one call sees of a changing catalogue: items, and which of them are alive. Immutable.

A removal or a rule shares the items and has bits of its own; an addition compiles them anew.

Axes: I items, in the order in which they were given; R rows of T tokens; Q item ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from hf_gr.files.text import counted

from .bits import test
from .code_book import as_text, some_items
from .fanout import Array, Bools, Longs, spans
from .item_ids import ItemId, check_item_ids
from .items import Items, Liveness, build_items
from .pieces import take
from .sequences import read_catalogue, shown, to_host
from .trie import PADDING, Trie, sort_rows


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A catalogue at one moment."""

    items: Items  # all that was compiled, dead ones included
    eos_token_id: int | None  # the token that ends every sequence, or None where all have one length
    alive: Liveness | None = None  # which of them are alive; None for all
    # a digest of the tokenizer that the sequences come from; None where they are not text
    tokenizer: str | None = None
    # by level the first and the last token of its codes, as semantic IDs say; None where nothing does
    levels: Sequence[Sequence[int]] | None = None

    @cached_property
    def trie(self) -> Trie:
        """The sequences of all items, dead ones included."""
        return self.items.trie

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest sequence, dead ones included."""
        return self.trie.max_length

    @cached_property
    def max_token_id(self) -> int:
        """The largest token of any sequence, dead ones included."""
        return self.trie.max_token_id

    @property
    def num_items(self) -> int:
        """Living items."""
        return len(self.items) if self.alive is None else self.alive.num_items

    @property
    def num_sequences(self) -> int:
        """Distinct sequences of living items."""
        return self.trie.num_sequences if self.alive is None else int(np.count_nonzero(self.alive.leaf_flags()))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.items.nbytes + (0 if self.alive is None else self.alive.nbytes)

    @property
    def are_strings(self) -> bool:
        """Whether item ids are strings."""
        return self.items.are_strings

    def living(self, positions: Longs) -> Bools:
        """Whether the items at some positions are alive."""
        return np.ones(len(positions), dtype=bool) if self.alive is None else test(self.alive.items, positions)

    def rows(self) -> Array:
        """`[S, L]` distinct sequences of living items, in lexicographic order, shorter ones padded."""
        leaves = np.arange(self.trie.num_sequences)
        rows = self.trie.sequences(leaves if self.alive is None else leaves[self.alive.leaf_flags()])
        return sort_rows(rows)[1] if len(rows) else rows

    def items_of(self, rows: Longs) -> list[list[ItemId]]:
        """The living items of every row of tokens."""
        leaves, _ = self.trie.walk(rows, self.eos_token_id)
        first, last = self.items.at_leaf.ranges(np.maximum(leaves, 0))
        last = np.where(leaves >= 0, last, first)
        positions = spans(first, last)
        alive = self.living(positions)
        of = np.repeat(np.arange(len(rows)), last - first)[alive]
        found: list[list[ItemId]] = [[] for _ in rows]
        ids = self.items.ids_of(self.items.numbers[positions[alive]])
        named = ids if isinstance(ids, list) else cast("list[int]", ids.tolist())
        for row, item in zip(cast("list[int]", of.tolist()), named, strict=True):
            found[row].append(item)
        return found

    def contains(self, row: Longs) -> bool:
        """Whether one row, neither shorter nor longer, is the sequence of a living item."""
        length = self.trie.walk(row[None], self.eos_token_id)[1][0]
        return length == len(row) and bool(self.items_of(row[None])[0])

    def next_tokens(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that may follow a prefix, ascending."""
        level, node = len(prefix), self.trie.find(prefix)
        if node < 0 or level >= self.max_length:
            return []
        nodes = spans(*self.trie.children(np.array([node]), level))
        if self.alive is not None:
            nodes = nodes[test(self.alive.nodes[level], nodes - self.trie.level_starts[level + 1])]
        return self.trie.token(nodes, level + 1).tolist()

    def item_ids(self) -> Array | list[str]:
        """The ids of living items, in the order in which they were given; integers have 64 bits, however stored."""
        ids = self.items.ids_of(np.flatnonzero(self.flags_by_number()))
        return ids.astype(np.int64) if isinstance(ids, np.ndarray) else ids

    def has_items(self, item_ids: Any) -> Bools:
        """`[Q]`: whether there is a living item with this id."""
        return self._find_living(self.check_ids(item_ids, "item_ids"))[0]

    def sequences_of(self, item_ids: Any) -> tuple[Bools, Longs]:
        """`[Q]`: whether there is an item with this id, alive or not; and `[Q, L]`, its tokens, end token and padding.

        A history may name items that are sold out. Of several sequences of one id, the first of a living item.
        """
        ids = self.check_ids(item_ids, "item_ids")
        rows = np.full((len(ids), self.max_length), PADDING, dtype=np.int64)
        of, at = self.items.find(ids)
        order = np.lexsort((~self.living(at), of))  # stable
        known, first = np.unique(of[order], return_index=True)
        rows[known] = self.trie.sequences(self.items.at_leaf.parents(at[order[first]]))
        is_known = np.zeros(len(ids), dtype=bool)
        is_known[known] = True
        return is_known, rows

    def code_book(self) -> dict[str, str]:
        """`ConstraintIndex.code_book`; dead items included."""
        ids: Any = self.items.ids_of(np.array(some_items(len(self.items))))
        return {str(name): min(tokens) for name, tokens in self.tokens_of(map(str, ids)).items()}

    def tokens_of(self, names: Iterable[str]) -> Mapping[str, set[str]]:
        """See `code_book.HasTokens`; dead items included."""
        texts = [name for name in names if self.are_strings or re.fullmatch(r"-?\d{1,18}", name)]
        of, at = self.items.find(texts if self.are_strings else np.array(texts, dtype=np.int64))
        rows: list[list[int]] = self.trie.sequences(self.items.at_leaf.parents(at)).tolist()
        found: dict[str, set[str]] = {}
        for place, row in zip(cast("list[int]", of.tolist()), rows, strict=True):
            found.setdefault(texts[place], set()).add(as_text(row, self.eos_token_id))
        return found

    def where(self, mask_or_item_ids: Any) -> Snapshot:
        """Only some of the living items: a mask with an entry for each of `item_ids`, or ids."""
        mask = _read_mask(mask_or_item_ids, self.num_items)
        if mask is None:
            flags = np.zeros(len(self.items), dtype=bool)
            flags[self._positions_of(mask_or_item_ids, "mask_or_item_ids")] = True
        else:
            by_number = mask
            if self.alive is not None:
                by_number = self.flags_by_number()
                by_number[by_number] = mask
            flags = take(by_number, self.items.numbers)
        return replace(self, alive=Liveness.from_items(self.items, flags))

    def flags_of(self, view: Snapshot) -> Bools:
        """`[I]`: which of the living items a view has, for `where` of a catalogue that was compiled anew."""
        assert view.items is self.items, "a view of another catalogue"
        return view.flags_by_number()[self.flags_by_number()]

    def remove(self, item_ids: Any) -> Snapshot:
        """Without some living items."""
        positions = self._positions_of(item_ids, "item_ids")
        if not len(positions):
            return self
        return replace(self, alive=(self.alive or self.items.all_alive).without(positions))

    def removed(self) -> list[ItemId]:
        """The ids of items that were removed, or left out by a view."""
        ids = self.items.ids_of(np.flatnonzero(~self.flags_by_number()))
        every: list[ItemId] = [*(ids if isinstance(ids, list) else ids.tolist())]
        return [one for one, is_there in zip(every, self.has_items(every), strict=True) if not is_there]

    def restore(self, item_ids: Any) -> Snapshot:
        """With some items that were removed."""
        ids = self.check_ids(item_ids, "item_ids")
        of, at = self.items.find(ids)
        known = np.zeros(len(ids), dtype=bool)
        known[of] = True
        refuse_unknown(ids, known, "item_ids", fix="add them with their sequences: saving forgets what was removed")
        if self.alive is None:
            return self
        flags = self.alive.item_flags()
        flags[at] = True
        return replace(self, alive=None if flags.all() else Liveness.from_items(self.items, flags))

    def add(self, sequences: Any, item_ids: Any) -> Snapshot:
        """With more items, all compiled anew; a living one with the same sequence stays as it is."""
        host: Any = to_host(sequences)
        is_empty = cast(Array, host).shape[:1] == (0,) if isinstance(host, np.ndarray) else host in ([], ())
        rows = np.zeros((0, self.max_length), dtype=np.int64) if is_empty else read_catalogue(host, self.eos_token_id)
        ids = self.check_ids(item_ids, "item_ids")
        if len(ids) != len(rows):
            raise ValueError(f"item_ids has {len(ids)} entries, expected {len(rows)}: one for each sequence")
        if not len(rows):
            return self
        if self.eos_token_id is None and rows.shape[1] != self.max_length:
            raise ValueError(
                f"sequences have {rows.shape[1]} tokens, expected {self.max_length} as in the catalogue: sequences of "
                "other lengths need an index with eos_token_id="
            )
        if self.levels is not None:
            self._check_levels(rows, self.levels)
        leaves, _ = self.trie.walk(rows.astype(np.int64), None)
        of, at = self.items.find(ids)
        alive = self.living(at)
        is_new = np.ones(len(rows), dtype=bool)
        is_new[of[alive & (self.items.at_leaf.parents(at) == leaves[of])]] = False
        if not is_new.any():
            return self
        if self.levels is not None and len(twice := np.unique(of[alive & is_new[of]])):
            raise ValueError(
                f"item_ids has {counted(len(twice), 'id')} with another semantic ID in the catalogue "
                f"({shown(ids[int(place)] for place in twice)}), expected new ids: remove them first to replace it"
            )
        kept = np.ones(len(self.items), dtype=bool)
        kept[at[~alive]] = False  # a removed id that is added again loses its old sequence: histories use the new one
        old_rows, numbers = self.items.rows(kept)
        new_ids = ids[is_new] if isinstance(ids, np.ndarray) else [ids[int(row)] for row in np.flatnonzero(is_new)]
        items = build_items(_stack(old_rows, rows[is_new]), _join(self.items.ids_of(numbers), new_ids))
        flags = np.ones(len(items), dtype=bool)
        flags[: len(numbers)] = self.flags_by_number()[numbers]
        return replace(
            self, items=items, alive=None if flags.all() else Liveness.from_items(items, take(flags, items.numbers))
        )

    def _check_levels(self, rows: Array, levels: Sequence[Sequence[int]]) -> None:
        """Refuse tokens that are no codes of their level; after the last comes the end."""
        ends = [PADDING, PADDING if self.eos_token_id is None else self.eos_token_id]
        for level, column in enumerate(rows.T):
            first, last = levels[level] if level < len(levels) else (0, -1)
            is_bad = ((column < first) | (column > last)) & ~np.isin(column, ends)
            if is_bad.any():
                row = int(is_bad.argmax())
                raise ValueError(
                    f"sequence {row} has token {column[row]} at position {level}, expected {first} to {last}, the "
                    "codes of this level: are these tokens of the same semantic IDs?"
                )

    def compact(self) -> Snapshot:
        """The same catalogue, compiled anew from what is alive; itself if nothing is dead."""
        if self.alive is None:
            return self
        if not self.num_items:
            raise ValueError("no item is alive, expected one or more: an index that is saved or compacted has an item")
        rows, numbers = self.items.rows(self.alive.item_flags())
        return replace(self, items=build_items(rows, self.items.ids_of(numbers)), alive=None)

    def fingerprint(self) -> str:
        """A digest of the compiled arrays and of which items are alive; stored on users' disks: it must not change."""
        digest = hashlib.sha256(str(self.eos_token_id).encode())
        for name, array in sorted(self.items.arrays().items()):
            digest.update(f"{name} {array.shape} {array.dtype}".encode())
            digest.update(array.data)
        if self.alive is not None:
            digest.update(self.alive.items.data)
        return digest.hexdigest()

    def fingerprint_of_sequences(self) -> str:
        """A digest of the sequences, whatever their item ids; stored on users' disks: it must not change."""
        rows = np.ascontiguousarray(self.rows(), dtype="<i8")
        header = json.dumps([self.eos_token_id, list(rows.shape)]).encode()
        return hashlib.sha256(header + rows.tobytes()).hexdigest()

    def check_ids(self, item_ids: Any, argument: str) -> Array | list[str]:
        """Check that ids are of the catalogue's type."""
        ids = check_item_ids(item_ids, argument=argument)
        if len(ids) and isinstance(ids, np.ndarray) == self.are_strings:
            expected = "strings" if self.are_strings else "integers"
            first = ids[0] if self.are_strings is False else int(cast(Any, ids[0]))
            raise ValueError(f"{argument}[0]={first!r}, expected {expected}: the catalogue's item ids are {expected}")
        return ids

    def flags_by_number(self) -> Bools:
        """Of all items, in the order in which they were given: whether they are alive."""
        if self.alive is None:
            return np.ones(len(self.items), dtype=bool)
        return take(self.alive.item_flags(), self.items.positions)

    def _positions_of(self, item_ids: Any, argument: str) -> Longs:
        """The positions of the living items that have these ids."""
        ids = self.check_ids(item_ids, argument)
        known, positions = self._find_living(ids)
        refuse_unknown(ids, known, argument)
        return positions

    def _find_living(self, ids: Array | list[str]) -> tuple[Bools, Longs]:
        """`[Q]`: whether a living item has this id; and the positions of those that have one."""
        of, at = self.items.find(ids)
        alive = self.living(at)
        known = np.zeros(len(ids), dtype=bool)
        known[of[alive]] = True
        return known, at[alive]


def _read_mask(mask_or_item_ids: Any, num_items: int) -> Bools | None:
    """A mask as an array; None for ids, which must not be a mask of another type by mistake."""
    host: Any = to_host(mask_or_item_ids)
    if isinstance(host, (list, tuple)) and host and isinstance(host[0], (bool, np.bool_)):
        host = np.asarray(cast("Sequence[Any]", host))
    if not isinstance(host, np.ndarray):
        return None
    mask = cast("Bools", host)
    if mask.dtype != np.bool_:
        is_whole = mask.dtype.kind in "iu" and mask.shape == (num_items,) and num_items > 2
        if is_whole and mask.min() >= 0 and mask.max() <= 1:
            raise ValueError(
                f"mask has type {mask.dtype} and {num_items} entries of 0 and 1, expected bool: pass "
                "mask.astype(bool); as ids they would be of two items"
            )
        return None
    if mask.shape != (num_items,):
        raise ValueError(
            f"mask has shape {list(mask.shape)}, expected [{num_items}]: one entry for each of index.item_ids, in "
            "that order"
        )
    return mask


def refuse_unknown(
    ids: Array | list[str], known: Bools, argument: str, *, fix: str = "index.has_items(ids) tells which are"
) -> None:
    """Refuse ids, `known` of which say whether the catalogue has them; `argument` and the fix in the message."""
    if known.all():
        return
    unknown = [ids[int(place)] for place in np.flatnonzero(~known)]
    raise ValueError(
        f"{argument} has {counted(len(unknown), 'id')} that the catalogue does not have ({shown(unknown)}), "
        f"expected ids of its items: {fix}"
    )


def _join(old: Array | list[str], new: Array | list[str]) -> Array | list[str]:
    """Ids one after the other."""
    if isinstance(old, list):
        return [*old, *cast("list[str]", new)]
    return check_item_ids(np.concatenate([old, cast(Array, new)]))


def _stack(*parts: Array) -> Array:
    """Rows of several widths in one array."""
    width = max(part.shape[1] for part in parts)
    padded = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=PADDING) for part in parts]
    return np.concatenate(padded)
