# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`ConstraintIndex`: the catalogue as a compiled trie, with the items at the end of its paths. Knows no framework.

Axes: N rows as given, S distinct sequences in lexicographic order, T tokens of a generated row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import storage
from .trie import PADDING, Array, Trie, build_trie, smallest_dtype

ItemId = int | str
LARGEST_TOKEN = 2**31 - 1


class ConstraintIndex:
    """The set of token sequences that may be generated, and the items that they stand for.

    Build one with `from_sequences`, load one with `from_pretrained`, and pass it to `generate(constraint_index=index)`. An
    index is immutable: one instance serves any number of models, calls and threads.

    Example:
        >>> index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])
        >>> len(index), index.max_length, [5, 8] in index
        (3, 2, True)
        >>> index.items([[6, 7], [5, 7]])
        [['yam'], ['ham']]
        >>> index.allowed_next_tokens([5])
        [7, 8]

    Source: STATIC, section 4 (the trie in compressed sparse rows); see `hf_gr.catalogue.trie` for what differs.
    """

    def __init__(self, trie: Trie, item_ids: Array | list[str], item_offsets: Array, eos_token_id: int | None) -> None:
        """Wrap compiled parts; use `from_sequences` instead.

        Args:
            trie: the compiled trie over S distinct sequences.
            item_ids: item ids in the lexicographic order of their sequences.
            item_offsets: `[S + 1]`; sequence `s` stands for `item_ids[item_offsets[s] : item_offsets[s + 1]]`.
            eos_token_id: the token that ends every sequence, or None where all have one length.
        """
        self.trie = trie
        self.eos_token_id = eos_token_id
        self._item_ids = item_ids
        self._item_offsets = item_offsets

    @classmethod
    def from_sequences(
        cls,
        sequences: npt.ArrayLike | Iterable[Sequence[int]],
        *,
        item_ids: Iterable[ItemId] | None = None,
        eos_token_id: int | None = None,
    ) -> ConstraintIndex:
        """Compile a catalogue.

        Args:
            sequences: `[N, L]` integers (NumPy, torch on any device, nested lists), or a ragged list of N token lists, in any
                order. Equal sequences are one path with several items.
            item_ids: N item ids, all integers or all strings; the row numbers by default.
            eos_token_id: the end-of-sequence token, appended to every sequence that does not end with it. Ragged
                sequences need it: it is what tells a sequence from a longer one that begins alike.

        Returns:
            The index.

        Raises:
            ValueError: no sequence at all, an empty one, tokens that are no integers from 0 to 2**31 - 1, ragged rows without
                `eos_token_id`, an `eos_token_id` inside a sequence, or item ids of another number or of mixed types.
        """
        rows = _as_rows(sequences, eos_token_id)
        trie, order, is_first = build_trie(rows)
        ids, offsets = _group_items(_as_item_ids(item_ids, len(rows)), order, is_first)
        return cls(trie, ids, offsets, eos_token_id)

    def __len__(self) -> int:
        """The number of distinct sequences."""
        return len(self._item_offsets) - 1

    def __contains__(self, sequence: object) -> bool:
        """Whether one sequence, with or without its end token, is in the catalogue."""
        tokens = np.asarray(_to_host(sequence))
        if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
            return False
        states, lengths = self._walk(tokens[None].astype(np.int64))
        return bool(states[0] >= 0) and int(lengths[0]) == len(tokens)

    def __iter__(self) -> Iterator[list[int]]:
        """Every distinct sequence, in lexicographic order, with its end token if the catalogue has one."""
        stack = [(0, ())]
        while stack:
            state, prefix = stack.pop()
            first, last = (int(bound) for bound in self.trie.children(np.array(state)))
            if first == last:
                yield list(prefix)
            stack.extend((child, (*prefix, int(self.trie.tokens[child]))) for child in range(last - 1, first - 1, -1))

    def __repr__(self) -> str:
        return (
            f"ConstraintIndex({len(self):,} sequences, {self.num_items:,} items, max_length={self.max_length}, "
            f"eos_token_id={self.eos_token_id}, {self.nbytes / 1e6:.1f} MB)"
        )

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence, its end token included: what `generate` must be able to produce."""
        return self.trie.max_length

    @property
    def num_items(self) -> int:
        """The number of items; larger than `len(index)` where several items share a sequence."""
        return len(self._item_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, item ids included."""
        return sum(array.nbytes for array in self._arrays().values())

    @property
    def max_token_id(self) -> int:
        """The largest token of any sequence; a model needs a vocabulary beyond it."""
        return int(self.trie.tokens.max())

    def items(self, sequences: npt.ArrayLike | Iterable[Sequence[int]]) -> list[list[ItemId]]:
        """The items that generated sequences stand for.

        Args:
            sequences: `[R, T]` tokens or R token lists, the prompt cut off. What follows a complete sequence is taken for padding.

        Returns:
            R lists of item ids, in the order in which the items were given; empty for a row that is no item (a padding row).

        Example:
            >>> ConstraintIndex.from_sequences([[5, 7], [5, 7]]).items([[5, 7, 0], [0, 0, 0]])
            [[0, 1], []]
        """
        rows = _pad(_to_host(sequences))
        if not len(rows):
            return []
        states, _ = self._walk(rows)
        sequence_of = self._sequence_numbers
        return [self._items_of(int(sequence_of(state))) if state >= 0 else [] for state in states]

    def allowed_next_tokens(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that may follow a prefix, ascending; empty after a complete sequence or an unknown prefix.

        For people and tests, and for transformers' `prefix_allowed_tokens_fn`; `generate` never calls it.
        """
        state = np.zeros((), dtype=np.int64)
        for token in _to_host(prefix):
            state = self.trie.advance(state, np.asarray(int(token)))
        if state < 0:
            return []
        first, last = self.trie.children(state)
        return [int(token) for token in self.trie.tokens[int(first) : int(last)]]

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write `constraint_index.json`, `constraint_index.safetensors` and, where there is none yet, a model card.

        A save that is interrupted leaves the previous index readable.

        Args:
            save_directory: a folder, made if need be; it may be that of a model, so that a checkpoint carries its catalogue.
        """
        from ..cards import write_index_card

        directory = Path(save_directory)
        if directory.is_file():
            raise ValueError(f"save_directory={str(directory)!r} is a file, expected a folder: name another one")
        directory.mkdir(parents=True, exist_ok=True)
        description: dict[str, Any] = {
            "num_sequences": len(self),
            "num_items": self.num_items,
            "max_length": self.max_length,
            "eos_token_id": self.eos_token_id,
            "item_id_type": self._item_id_type,
            "level_starts": list(self.trie.level_starts),
            "branching": list(self.trie.branching),
            "has_leaves": list(self.trie.has_leaves),
        }
        storage.save(directory, description, self._arrays())
        write_index_card(self, directory)

    @classmethod
    def from_pretrained(
        cls,
        repo_or_dir: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        subfolder: str = "",
    ) -> ConstraintIndex:
        """Load an index from a folder or from a repository of the Hub.

        Args:
            repo_or_dir: a folder with the two files, or a repository id such as `"me/catalogue"`.
            revision: branch, tag or commit of the repository.
            token: access token of the Hub, or True for the stored one.
            cache_dir: where downloads are kept; the Hub's own cache by default.
            local_files_only: use only what is cached.
            subfolder: folder inside `repo_or_dir`.

        Raises:
            ValueError: a file that is missing, cut short, altered, of a newer format, or no safetensors file (never unpickled).
        """
        from ..hub import resolve_folder

        folder = resolve_folder(
            repo_or_dir,
            storage.FILES,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            subfolder=subfolder,
        )
        description, arrays = storage.load(folder)
        trie = Trie(
            tokens=arrays["tokens"],
            child_offsets=arrays["child_offsets"],
            level_starts=tuple(description["level_starts"]),
            branching=tuple(description["branching"]),
            has_leaves=tuple(description["has_leaves"]),
        )
        item_ids: Array | list[str] = arrays["item_ids"]
        if description["item_id_type"] == "string":
            text, bounds = arrays["item_ids"].tobytes(), arrays["item_id_bounds"].tolist()
            item_ids = [text[start:end].decode() for start, end in zip(bounds, bounds[1:], strict=False)]
        return cls(trie, item_ids, arrays["item_offsets"], description["eos_token_id"])

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload constraint index",
        create_pr: bool = False,
    ) -> str:
        """Upload the index to a repository of the Hub, which is created if need be; an existing model card is kept.

        Returns:
            The commit's address.
        """
        from ..hub import push_folder

        return push_folder(
            self.save_pretrained,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )

    @property
    def _item_id_type(self) -> Literal["integer", "string"]:
        return "string" if isinstance(self._item_ids, list) else "integer"

    def _arrays(self) -> dict[str, Array]:
        """Everything that is stored, by its name in the file."""
        arrays = {
            "tokens": self.trie.tokens,
            "child_offsets": self.trie.child_offsets,
            "item_offsets": self._item_offsets,
        }
        if not isinstance(self._item_ids, list):
            return arrays | {"item_ids": self._item_ids}
        encoded = [item_id.encode() for item_id in self._item_ids]
        bounds = np.cumsum([0, *map(len, encoded)])
        return arrays | {"item_ids": np.frombuffer(b"".join(encoded), dtype=np.uint8), "item_id_bounds": bounds}

    def _items_of(self, sequence: int) -> list[ItemId]:
        found = self._item_ids[int(self._item_offsets[sequence]) : int(self._item_offsets[sequence + 1])]
        return list(found) if isinstance(found, list) else [int(item_id) for item_id in found]

    def _walk(self, rows: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Follow `[R, T]` tokens to `[R]` leaves (-1: none) and the number of tokens that each took."""
        states = np.zeros(len(rows), dtype=np.int64)
        lengths = np.zeros(len(rows), dtype=np.int64)
        for column in rows.T:
            first, last = self.trie.children(np.maximum(states, 0))
            walking = (states >= 0) & (first < last)
            # A row of the token lists may have ended without its end token: PADDING leaves its state as it is.
            walking &= column != PADDING
            states = np.where(walking, self.trie.advance(states, column), states)
            lengths += walking & (states >= 0)
        if self.eos_token_id is not None:
            ended = self.trie.advance(states, np.full_like(states, self.eos_token_id))
            states = np.where(ended >= 0, ended, states)
        first, last = self.trie.children(np.maximum(states, 0))
        return np.where(first == last, states, -1), lengths

    @cached_property
    def _sequence_numbers(self) -> Any:
        """The function from a leaf to its sequence's number in lexicographic order."""
        starts = self.trie.level_starts
        if not any(self.trie.has_leaves[:-1]):
            return lambda leaf: leaf - starts[-2]
        # Ragged: count the leaves under every node from the last level up, then hand numbers down to the children.
        num_leaves = np.ones(starts[-1], dtype=np.int64)
        number = np.zeros(starts[-1], dtype=np.int64)
        levels = [np.arange(start, end) for start, end in zip(starts[:-2], starts[1:-1], strict=True)]
        for nodes in reversed(levels):
            first, last = self.trie.children(nodes)
            running = np.concatenate(([0], np.cumsum(num_leaves[first[0] : last[-1]])))
            below = running[last - first[0]] - running[first - first[0]]
            num_leaves[nodes] = np.where(first == last, 1, below)
        for nodes in levels:
            first, last = self.trie.children(nodes)
            children = np.arange(first[0], last[-1])
            before = np.cumsum(num_leaves[children]) - num_leaves[children]
            parents = np.repeat(np.arange(len(nodes)), last - first)
            number[children] = number[nodes][parents] + before - before[(first - first[0])[parents]]
        return number.__getitem__


def _to_host(values: Any) -> Any:
    """Torch tensors of any device as NumPy arrays, everything else as it is, without importing torch."""
    if hasattr(values, "detach"):
        return values.detach().cpu().numpy()
    return values if isinstance(values, (np.ndarray, list, tuple)) else list(values)


def _pad(sequences: Any) -> npt.NDArray[np.int64]:
    """Token lists of any lengths as one `[R, T]` array, filled up with PADDING."""
    if isinstance(sequences, np.ndarray):
        return np.atleast_2d(sequences).astype(np.int64)
    rows = [np.atleast_1d(np.asarray(_to_host(row))) for row in sequences]
    padded = np.full((len(rows), max(map(len, rows), default=0)), PADDING, dtype=np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def _as_rows(sequences: Any, eos_token_id: int | None) -> npt.NDArray[np.int64]:
    """Check sequences and bring them to `[N, L]`, ends filled with PADDING, the end token appended."""
    sequences = _to_host(sequences)
    if not isinstance(sequences, np.ndarray):
        sequences = [np.asarray(_to_host(row)) for row in sequences]
    if len(sequences) == 0:
        raise ValueError("sequences is empty, expected at least one token sequence: a catalogue needs an item")
    if isinstance(sequences, np.ndarray) and sequences.ndim != 2:
        raise ValueError(f"sequences has shape {list(sequences.shape)}, expected [N, L] or a list of N token lists")
    for number, row in enumerate(sequences if isinstance(sequences, list) else sequences[:1]):
        if row.ndim != 1 or not len(row):
            raise ValueError(f"sequence {number} has shape {list(row.shape)}, expected [L] with L >= 1: drop it")
        if row.dtype.kind not in "iu":
            raise ValueError(f"sequence {number} has dtype {row.dtype}, expected integers: pass token ids, not text")
    lengths = {len(row) for row in sequences} if isinstance(sequences, list) else {sequences.shape[1]}
    if len(lengths) > 1 and eos_token_id is None:
        raise ValueError(
            f"sequences have {min(lengths)} to {max(lengths)} tokens and eos_token_id=None, expected one length or an end "
            "token: pass eos_token_id= (usually model.generation_config.eos_token_id)"
        )
    real = _pad(sequences)
    bad = ((real < 0) | (real > LARGEST_TOKEN)) & (np.arange(real.shape[1]) < _row_lengths(sequences)[:, None])
    if bad.any():
        row, column = (int(axis[0]) for axis in np.nonzero(bad))
        raise ValueError(
            f"sequence {row} has token {real[row, column]} at position {column}, expected 0 to {LARGEST_TOKEN}: "
            "remove padding such as -1 or -100 and pass ragged lists instead"
        )
    return real if eos_token_id is None else _end_rows(real, eos_token_id)


def _row_lengths(sequences: Any) -> npt.NDArray[np.int64]:
    if isinstance(sequences, np.ndarray):
        return np.full(len(sequences), sequences.shape[1])
    return np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))


def _end_rows(rows: npt.NDArray[np.int64], eos_token_id: int) -> npt.NDArray[np.int64]:
    """Append the end token to every row that does not end with it, and refuse it anywhere else."""
    if isinstance(eos_token_id, bool) or not isinstance(eos_token_id, int) or not 0 <= eos_token_id <= LARGEST_TOKEN:
        raise ValueError(f"eos_token_id={eos_token_id!r}, expected one token id: choose one where a model has several")
    rows = np.pad(rows, ((0, 0), (0, 1)), constant_values=PADDING)
    lengths = (rows != PADDING).sum(axis=1)
    lengths -= rows[np.arange(len(rows)), lengths - 1] == eos_token_id
    inside = (rows == eos_token_id) & (np.arange(rows.shape[1]) < lengths[:, None])
    if inside.any() or not lengths.all():
        row = int(np.argmax(inside.any(axis=1) | (lengths == 0)))
        raise ValueError(
            f"sequence {row} is {rows[row, : lengths[row] + 1].tolist()}, expected eos_token_id={eos_token_id} at its end "
            "only, after at least one other token: is it the right end token?"
        )
    rows[np.arange(len(rows)), lengths] = eos_token_id
    return rows[:, : int(lengths.max()) + 1]


def _as_item_ids(item_ids: Iterable[ItemId] | None, num_rows: int) -> Array | list[str]:
    if item_ids is None:
        return np.arange(num_rows, dtype=smallest_dtype(num_rows))
    ids = _to_host(item_ids)
    ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    if len(ids) != num_rows:
        raise ValueError(f"item_ids has {len(ids)} entries, expected {num_rows}: one for each sequence, in the same order")
    if all(isinstance(item_id, str) for item_id in ids):
        return ids
    for number, item_id in enumerate(ids):
        if isinstance(item_id, bool) or not isinstance(item_id, (int, np.integer)):
            raise ValueError(f"item_ids[{number}]={item_id!r}, expected all integers or all strings: convert them first")
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        raise ValueError("item_ids has an integer beyond 64 bits, expected less: pass such ids as strings") from None


def _group_items(
    ids: Array | list[str], order: Array, is_first: npt.NDArray[np.bool_]
) -> tuple[Array | list[str], Array]:
    """Item ids in sequence order with `[S + 1]` bounds; an item given twice on one sequence counts once."""
    sequence = np.cumsum(is_first) - 1
    ids = [ids[row] for row in order] if isinstance(ids, list) else ids[order]
    if not is_first.all():
        seen: set[tuple[int, ItemId]] = set()
        keys = zip(sequence.tolist(), ids if isinstance(ids, list) else ids.tolist(), strict=True)
        fresh = np.array([key not in seen and not seen.add(key) for key in keys])
        sequence = sequence[fresh]
        ids = [ids[row] for row in np.flatnonzero(fresh)] if isinstance(ids, list) else ids[fresh]
    counts = np.bincount(sequence)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return ids, offsets.astype(smallest_dtype(int(offsets[-1])))
