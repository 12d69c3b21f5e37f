# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`ConstraintIndex`: the catalogue as a compiled trie, with the items at the end of its paths. Knows no framework.

Axes: N rows as given, S distinct sequences in lexicographic order, R generated rows of T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import storage
from .item_ids import ItemId, ItemIds, group_items, read_item_ids
from .sequences import read_catalogue, read_eos_token_id, read_rows
from .trie import PADDING, Array, Trie, build_trie, smallest_dtype


class ConstraintIndex:
    """The set of token sequences that may be generated, and the items that they stand for.

    Build one with `from_sequences`, load one with `from_pretrained`, and pass it to
    `generate(constraint_index=index)`. An index is immutable: one instance serves any number of models, calls and
    threads.

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

    def __init__(self, trie: Trie, item_ids: ItemIds, item_offsets: Array, eos_token_id: int | None) -> None:
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
        item_ids: npt.ArrayLike | Iterable[ItemId] | None = None,
        eos_token_id: int | None = None,
    ) -> ConstraintIndex:
        """Compile a catalogue.

        Args:
            sequences: `[N, L]` integers (NumPy, torch on any device, nested lists), or a ragged list of N token
                lists, in any order. Equal sequences are one path with several items.
            item_ids: N item ids, all integers or all strings; the row numbers by default.
            eos_token_id: the end-of-sequence token, appended to every sequence that does not end with it. Ragged
                sequences need it: it is what tells a sequence from a longer one that begins alike.

        Returns:
            The index.

        Raises:
            ValueError: no sequence at all, an empty one, tokens that are no integers from 0 to 2**31 - 1, ragged rows
                without `eos_token_id`, an `eos_token_id` inside a sequence, or item ids of another number or of mixed
                types.
        """
        eos_token_id = read_eos_token_id(eos_token_id)
        rows = read_catalogue(sequences, eos_token_id)
        ids = read_item_ids(item_ids, len(rows))
        trie, order, is_first = build_trie(rows)
        ids, offsets = group_items(ids, order, is_first)
        return cls(trie, ItemIds.pack(ids), offsets, eos_token_id)

    def __len__(self) -> int:
        """The number of distinct sequences."""
        return len(self._item_offsets) - 1

    def __contains__(self, sequence: object) -> bool:
        """Whether one sequence, with or without its end token, is in the catalogue."""
        try:
            rows, _ = read_rows(sequence, one_is_enough=True)
        except ValueError:
            return False
        if rows.shape[0] != 1 or PADDING in rows:
            return False
        states, lengths = self._walk(rows)
        return bool(states[0] >= 0) and int(lengths[0]) == rows.shape[1]

    def __iter__(self) -> Iterator[list[int]]:
        """Every distinct sequence, in lexicographic order, with its end token if the catalogue has one."""
        for row in self.trie.sequences():
            yield [token for token in row.tolist() if token != PADDING]

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

    @cached_property
    def max_token_id(self) -> int:
        """The largest token of any sequence; a model needs a vocabulary beyond it."""
        return int(self.trie.tokens.max())

    def items(self, sequences: npt.ArrayLike | Iterable[Sequence[int]]) -> list[list[ItemId]]:
        """The items that generated sequences stand for.

        Args:
            sequences: `[R, T]` tokens (NumPy, torch on any device) or R token lists, the prompt cut off; or one
                sequence. What follows a complete sequence is taken for padding. So is everything from a negative
                token (-1, -100) on.

        Returns:
            R lists of item ids, in the order in which the items were given; empty for a row that is no item (a
            padding row).

        Raises:
            ValueError: tokens that are no integers, or more than two axes.

        Example:
            >>> ConstraintIndex.from_sequences([[5, 7], [5, 7]]).items([[5, 7, 0], [0, 0, 0]])
            [[0, 1], []]
        """
        rows = read_rows(sequences, one_is_enough=True)[0][:, : self.max_length]
        rows = np.where(np.logical_or.accumulate(rows < 0, axis=1), PADDING, rows)
        states, _ = self._walk(rows)
        is_item = states >= 0
        numbers = self._sequence_numbers(np.where(is_item, states, self.trie.level_starts[-2]))
        first, last = self._item_offsets[numbers], self._item_offsets[numbers + 1]
        return self._item_ids.between(first, np.where(is_item, last, first))

    def allowed_next_tokens(self, prefix: npt.ArrayLike | Sequence[int]) -> list[int]:
        """The tokens that may follow a prefix, ascending; empty after a complete sequence or an unknown prefix.

        For people and tests, and for transformers' `prefix_allowed_tokens_fn`; `generate` never calls it.
        """
        rows, _ = read_rows(prefix, one_is_enough=True)
        if rows.shape[0] > 1:
            raise ValueError(f"prefix has shape {list(rows.shape)}, expected one sequence: call it once for each")
        state = self.trie.find(rows.reshape(-1).tolist())
        first, last = self.trie.child_range(state) if state >= 0 else (0, 0)
        return self.trie.tokens[first:last].tolist()

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write `constraint_index.json`, `constraint_index.safetensors` and, where there is none yet, a model card.

        A save that is interrupted leaves the previous index readable.

        Args:
            save_directory: a folder, made if need be; it may be that of a model, so that a checkpoint carries its
                catalogue.
        """
        directory = Path(save_directory)
        self._save(directory, name=directory.resolve().name)

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
            ValueError: a file that is missing, cut short, altered, of a newer format, or no safetensors file (never
                unpickled).
        """
        from hf_gr.hub import resolve_folder

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
        try:
            trie = Trie.from_arrays(arrays["tokens"], arrays["child_offsets"])
            item_ids = ItemIds(arrays["item_ids"], arrays.get("item_id_bounds"))
            offsets = arrays["item_offsets"]
            if len(offsets) != trie.num_sequences + 1 or not _bounds(offsets, len(item_ids), at_least=1):
                raise ValueError("item_offsets do not give every sequence its items")
            if item_ids.bounds is not None and not _bounds(item_ids.bounds, len(item_ids.values), at_least=0):
                raise ValueError("item_id_bounds do not divide the text of the item ids")
            return cls(trie, item_ids, offsets, description["eos_token_id"])
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(
                f"{folder / storage.ARRAYS_FILE} holds no constraint index ({error}): download it or save it again"
            ) from error

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
        from hf_gr.hub import push_folder

        return push_folder(
            lambda folder, name: self._save(folder, name=name),
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )

    def _save(self, directory: Path, *, name: str) -> None:
        """Save under the name by which the card tells users to load it."""
        from hf_gr.cards import index_card

        if directory.exists() and not directory.is_dir():
            raise ValueError(f"save_directory={str(directory)!r} is a file, expected a folder: name another one")
        directory.mkdir(parents=True, exist_ok=True)
        starts = self.trie.level_starts
        description: dict[str, Any] = {
            "num_sequences": len(self),
            "num_items": self.num_items,
            "max_length": self.max_length,
            "eos_token_id": self.eos_token_id,
            "item_id_type": "string" if self._item_ids.are_strings else "integer",
            "level_sizes": [end - start for start, end in zip(starts[1:], starts[2:], strict=False)],
            "branching": list(self.trie.branching),
        }
        storage.save(directory, description, self._arrays(), card=index_card(self, name))

    def _arrays(self) -> dict[str, Array]:
        """Everything that is stored, by its name in the file."""
        arrays = {
            "tokens": self.trie.tokens,
            "child_offsets": self.trie.child_offsets,
            "item_offsets": self._item_offsets,
            "item_ids": self._item_ids.values,
        }
        return arrays if self._item_ids.bounds is None else arrays | {"item_id_bounds": self._item_ids.bounds}

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

    def _sequence_numbers(self, leaves: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number of every leaf's sequence, in lexicographic order."""
        if any(self.trie.has_leaves[:-1]):
            return self._number_of_node[leaves].astype(np.int64)
        return leaves - self.trie.level_starts[-2]

    @cached_property
    def _number_of_node(self) -> Array:
        """Where sequences differ in length: the number of the first sequence below every node."""
        return self.trie.first_sequences().astype(smallest_dtype(len(self)))


def _bounds(offsets: Array, total: int, *, at_least: int) -> bool:
    """Whether offsets divide `total` things into parts of a smallest size."""
    return bool(offsets[0] == 0 and offsets[-1] == total and (np.diff(offsets.astype(np.int64)) >= at_least).all())
