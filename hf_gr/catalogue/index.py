# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`ConstraintIndex`: the catalogue that `generate` takes. Checks, files and locks; the content is a `Snapshot`.

Axes: N rows as given, I living items, R generated rows of T tokens, Q item ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hf_gr.files.atomic import make_folder
from hf_gr.files.cards import index_card
from hf_gr.files.hub import Source
from hf_gr.files.hub_mixin import HubMixin
from hf_gr.files.text import named_in_errors

from . import storage
from .fanout import Bools
from .generated import check_cut, read_generated, without
from .item_ids import ItemId, check_item_ids, read_item_ids
from .items import build_items
from .labels import fingerprint, read_labels, tokenize_labels
from .rules import read_exclusions
from .sequences import read_catalogue, read_eos_token_id, read_rows
from .snapshot import Snapshot, refuse_unknown
from .summary import summarise
from .trie import PADDING

OPTIONAL = ("tokenizer", "levels")  # of a description: of labels, of semantic IDs


class ConstraintIndex(HubMixin, what="constraint index", files=storage.FILES):
    """The set of token sequences that may be generated, and the items that they stand for.

    Pass it to `generate(constraint_index=index)`. One instance serves any number of models, calls and threads, and may
    change meanwhile: a call sees the catalogue as it is when the call begins. `copy.copy(index)` keeps that of this
    moment and shares the arrays. Saving writes what is served: an updated or filtered index is saved compacted, and
    stays unchanged itself.

    Example:
        >>> index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])
        >>> len(index), index.max_length, [5, 8] in index
        (3, 2, True)
        >>> index.items([[6, 7], [5, 7]])
        [['yam'], ['ham']]
        >>> index.allowed_next_tokens([5])
        [7, 8]
        >>> index.remove(["jam"])
        >>> index.allowed_next_tokens([5])
        [7]

    Source: STATIC, section 4 (the trie in compressed sparse rows).
    """

    def __init__(self, snapshot: Snapshot) -> None:
        """Wrap a compiled catalogue; use `from_sequences` instead."""
        self._snapshot = snapshot
        self._updates = Lock()  # held by one update at a time; readers take `snapshot` once and need none

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
                lists, in any order. Equal sequences are one path with several items. In an array, -1 may fill the
                tails of shorter rows, if there is an end token.
            item_ids: N item ids, all integers or all strings; the row numbers by default.
            eos_token_id: the end-of-sequence token, appended to every sequence that does not end with it. Ragged
                sequences need it: it tells a sequence from a longer one with the same beginning.

        Returns:
            The index. 20 million rows of 8 tokens take some seconds and 21 bytes each (the guide on catalogues).

        Raises:
            ValueError: no sequence, an empty one, tokens that are not integers from 0 to 2**31 - 1, ragged rows
                without `eos_token_id`, an `eos_token_id` inside a sequence, or item ids of the wrong number or of
                mixed types.
        """
        eos_token_id = read_eos_token_id(eos_token_id)
        rows = read_catalogue(sequences, eos_token_id)
        return cls(Snapshot(build_items(rows, read_item_ids(item_ids, len(rows))), eos_token_id))

    @classmethod
    def from_labels(cls, labels: Iterable[str], tokenizer: Any, *, prefix: str = " ") -> ConstraintIndex:
        """Compile a set of labels: a taxonomy, for a language model that classifies.

        A label is tokenized as the text `prefix + label` after another text, without special tokens or a space of the
        tokenizer's own, and ends with its end token. Labels that tokenize alike are one sequence with several items;
        one label may be the beginning of another.

        Args:
            labels: distinct strings, in any order; they are the item ids, so `items` gives them back.
            tokenizer: the model's, from transformers or with the same methods.
            prefix: the text between the prompt and a label. A prompt that ends with a space needs `""`.

        Returns:
            The index; it remembers the tokenizer for `check_tokenizer`.

        Raises:
            ValueError: no label, an empty one, a duplicate, one that is not a string; a tokenizer without an end
                token; the end token inside a label; or labels that do not survive the tokenizer.

        A label survives if its tokens decode back to it. If the tokenizer normalises, case, accents, spaces and
        compatibility forms may differ, as long as the decoded text has the same tokens. Unknown tokens never survive.

        Example:
            >>> from transformers import AutoTokenizer
            >>> tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M")  # doctest: +SKIP
            >>> index = ConstraintIndex.from_labels(["Sports", "Science"], tokenizer)  # doctest: +SKIP
        """
        texts = read_labels(labels)
        sequences, eos_token_id = tokenize_labels(texts, tokenizer, prefix)
        index = cls.from_sequences(sequences, item_ids=texts, eos_token_id=eos_token_id)
        return cls(replace(index.snapshot, tokenizer=fingerprint(tokenizer)))

    @classmethod
    def from_table(
        cls,
        table: Any,
        *,
        sequence: str | Sequence[str] = "sequence",
        item_id: str | None = "item_id",
        eos_token_id: int | None = None,
        format: Literal["parquet", "csv", "jsonl"] | None = None,
        delimiter: str | None = None,
        progress: bool = True,
    ) -> ConstraintIndex:
        """Compile a catalogue from a table, files of which are read in pieces.

        Args:
            table: a file, a folder of part files, or a list of files: Parquet, CSV with a header, or JSON lines such
                as `{"item_id": 7, "sequence": [5, 7]}`. Or a table in memory: of pandas, Polars or pyarrow.
            sequence: the column that holds lists of tokens (in CSV, text such as `"5 7 9"`), or several columns with
                one token each, of which those after the end are empty.
            item_id: the column of item ids; None for the row numbers.
            eos_token_id: as in `from_sequences`.
            format: of the files; by default what their names end with.
            delimiter: of CSV; by default a comma, and a tab for `.tsv` and `.inter`.
            progress: show a progress bar.

        Raises:
            ValueError: as `from_sequences`; also a missing file or column, or a value of another type, by its row.
            ImportError: pyarrow is missing: `pip install "hf-gr[tables]"`.
        """
        from hf_gr.tables.memory import paths_of
        from hf_gr.tables.sequences import read_sequences

        how: Any = {"format": format, "delimiter": delimiter, "progress": progress}
        tokens, item_ids = read_sequences(table, sequence=sequence, item_id=item_id, **how)
        with named_in_errors(paths_of(table)):
            return cls.from_sequences(tokens, item_ids=item_ids, eos_token_id=eos_token_id)

    @property
    def snapshot(self) -> Snapshot:
        """The catalogue as it is now: immutable, and what a call of `generate` works with."""
        return self._snapshot

    def __reduce__(self) -> tuple[type[ConstraintIndex], tuple[Snapshot]]:
        return type(self), (self._snapshot,)  # a lock belongs to one process

    def __len__(self) -> int:
        """The number of distinct sequences."""
        return self._snapshot.num_sequences

    def __contains__(self, sequence: object) -> bool:
        """Whether one sequence, with or without its end token, is in the catalogue."""
        try:
            rows, _ = read_rows(sequence, one_is_enough=True)
        except ValueError:
            return False
        return rows.shape[0] == 1 and PADDING not in rows and self._snapshot.contains(rows[0])

    def __iter__(self) -> Iterator[list[int]]:
        """Every distinct sequence, in lexicographic order, with its end token if the catalogue has one."""
        for row in self._snapshot.rows():
            yield [token for token in row.tolist() if token != PADDING]

    def __repr__(self) -> str:
        return (
            f"ConstraintIndex({len(self):,} sequences, {self.num_items:,} items, max_length={self.max_length}, "
            f"eos_token_id={self.eos_token_id}, {self.nbytes / 1e6:.1f} MB)"
        )

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends every sequence, or None where all have one length."""
        return self._snapshot.eos_token_id

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence, its end token included: what `generate` must be able to produce."""
        return self._snapshot.max_length

    @property
    def num_items(self) -> int:
        """The number of items; larger than `len(index)` where several items share a sequence."""
        return self._snapshot.num_items

    @property
    def item_ids(self) -> npt.NDArray[np.integer] | list[str]:
        """The ids of all items, in the order in which they were given.

        An item given twice is listed once, an id with two sequences twice.
        """
        return self._snapshot.item_ids()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, item ids and rules included; views of one index share most of theirs."""
        return self._snapshot.nbytes

    @property
    def max_token_id(self) -> int:
        """The largest token of any sequence; a model's vocabulary must be larger."""
        return self._snapshot.max_token_id

    def has_items(self, item_ids: npt.ArrayLike | Iterable[ItemId]) -> Bools:
        """`[Q]` flags: for which of these ids the catalogue has an item."""
        return self._snapshot.has_items(item_ids)

    def items(
        self,
        sequences: npt.ArrayLike | Iterable[Sequence[int]],
        *,
        exclude_items: Sequence[Iterable[ItemId]] | None = None,
    ) -> list[list[ItemId]]:
        """The items that generated sequences stand for.

        If you have an output object of `generate`, use its `item_ids` instead: they know where the prompt ends.

        Args:
            sequences: `[R, T]` tokens (NumPy, torch on any device) or R token lists, the prompt cut off; or one
                sequence. After a complete sequence comes padding: one token, repeated; everything from a negative
                token (-1, -100) on is padding, too.
            exclude_items: as in `generate`: B lists of item ids, each for R / B rows. It matters only where items
                share a sequence, which is generated as long as one of them is wanted.

        If the index may change between `generate` and this call, give both the same `copy.copy(index)`.

        Returns:
            R lists of item ids, in the order in which the items were given; empty for a row that is not an item (a
            padding row).

        Raises:
            ValueError: tokens that are not integers, or more than two axes; a row that continues after its item with
                anything but padding, as when the prompt is not cut off; rows that all begin with a start token; or
                `exclude_items` that are not lists of ids of the catalogue's type.

        Example:
            >>> ConstraintIndex.from_sequences([[5, 7], [5, 7]]).items([[5, 7, 0], [0, 0, 0]])
            [[0, 1], []]
        """
        snapshot = self._snapshot
        rows = read_generated(sequences)
        found = snapshot.items_of(rows)
        check_cut(snapshot, rows, found)
        if exclude_items is None:
            return found
        excluded = [set(row) for row in read_exclusions(exclude_items, snapshot)]
        if not excluded or len(rows) % len(excluded):
            raise ValueError(
                f"exclude_items has {len(excluded)} rows for {len(rows)} sequences, expected one for each request"
            )
        return without(found, excluded)

    def encode(self, item_ids: npt.ArrayLike | Iterable[ItemId]) -> list[int]:
        """A history as tokens, for a prompt: the items' sequences, one after the other, without end tokens.

        Items that were removed or filtered out keep their tokens: a history may name what has sold out. Of several
        sequences of one id, the first of a living item is taken.

        Raises:
            ValueError: an id that the catalogue never had, or one of another type than its ids.

        Example:
            >>> index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])
            >>> index.encode(["jam", "ham"])
            [5, 8, 5, 7]
        """
        snapshot = self._snapshot
        if isinstance(item_ids, (list, tuple)) and item_ids and isinstance(item_ids[0], (list, tuple)):
            raise ValueError("item_ids holds several histories, expected the ids of one: call encode once for each")
        ids = check_item_ids(item_ids)
        is_known, rows = snapshot.sequences_of(ids)
        refuse_unknown(ids, is_known, "item_ids")
        endings = [PADDING, *([] if snapshot.eos_token_id is None else [snapshot.eos_token_id])]
        return rows[~np.isin(rows, endings)].tolist()

    def code_book(self) -> dict[str, str]:
        """What the tokens mean, as some of the items and their tokens, 32 at most.

        `train_recommender` writes that of its catalogue to `model.generation_config.code_book`. `generate`, and all
        that calls it, refuse a catalogue in which most of these items have other tokens.

        Example:
            >>> ConstraintIndex.from_sequences([[5, 7], [5, 8]], item_ids=["ham", "jam"]).code_book()
            {'ham': '5 7', 'jam': '5 8'}
        """
        return self._snapshot.code_book()

    def allowed_next_tokens(self, prefix: npt.ArrayLike | Sequence[int]) -> list[int]:
        """The tokens that may follow a prefix, ascending; empty after a complete sequence or an unknown prefix.

        For people and tests, and for transformers' `prefix_allowed_tokens_fn`; `generate` never calls it.
        """
        rows, _ = read_rows(prefix, one_is_enough=True)
        if rows.shape[0] > 1:
            raise ValueError(f"prefix has shape {list(rows.shape)}, expected one sequence: call it once for each")
        return self._snapshot.next_tokens(rows.reshape(-1).tolist())

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Check that a tokenizer is the one given to `from_labels`; other indexes accept any.

        Raises:
            ValueError: it tokenizes texts differently, or ends them with another token.
        """
        snapshot = self._snapshot
        if snapshot.tokenizer is None:
            return
        if fingerprint(tokenizer) != snapshot.tokenizer:
            raise ValueError(
                "tokenizer is not the one that the index was built with, expected the same tokens for the same text: "
                "pass that one, or build the index with this one by ConstraintIndex.from_labels"
            )
        if tokenizer.eos_token_id != snapshot.eos_token_id:
            raise ValueError(
                f"tokenizer.eos_token_id is {tokenizer.eos_token_id}, expected {snapshot.eos_token_id} as when the "
                "index was built: build it again, or set tokenizer.eos_token"
            )

    def where(self, mask_or_item_ids: npt.ArrayLike | Iterable[ItemId]) -> ConstraintIndex:
        """A view of some items: a region, what is in stock, what is new. It shares the arrays.

        Results equal those of an index built from these items alone. Views of one index may be mixed in a batch:
        `generate(constraint_index=[view, other, index])`. Later updates of the index do not reach its views: take them
        again. Where another thread updates the index, take a mask, and the views of one batch, from one
        `copy.copy(index)`.

        Args:
            mask_or_item_ids: `[I]` truth values, one for each of `item_ids`, in that order; or the ids of items. A
                mask is of type bool: integers 0 and 1 are ids.

        Returns:
            An index of its own, which may be updated, saved and filtered again. All items may be filtered out: such an
            index generates only padding.

        Raises:
            ValueError: a mask of another length, or an id that is not in the catalogue.

        Example:
            >>> index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])
            >>> list(index.where(["ham", "yam"])), list(index.where([False, True, False]))
            ([[5, 7], [6, 7]], [[5, 8]])
        """
        return type(self)(self._snapshot.where(mask_or_item_ids))

    def remove(self, item_ids: npt.ArrayLike | Iterable[ItemId]) -> None:
        """Remove items; the next call of `generate` no longer sees them.

        Takes time in proportion to the number of items removed, and copies one bit per node.

        Raises:
            ValueError: an id that is not in the catalogue; nothing is removed then.
        """
        with self._updates:
            self._snapshot = self._snapshot.remove(item_ids)

    def restore(self, item_ids: npt.ArrayLike | Iterable[ItemId]) -> None:
        """Bring back items that were removed, such as those in stock again, or that a view left out.

        Takes time in proportion to the catalogue: 0.1 s for a million items.

        Raises:
            ValueError: an id that the index never had, or forgot when it was saved or compacted; nothing is restored
                then.

        Example:
            >>> index = ConstraintIndex.from_sequences([[5, 7], [5, 8]], item_ids=["ham", "jam"])
            >>> index.remove(["jam"])
            >>> index.restore(["jam"])
            >>> list(index)
            [[5, 7], [5, 8]]
        """
        with self._updates:
            self._snapshot = self._snapshot.restore(item_ids)

    def add(
        self, sequences: npt.ArrayLike | Iterable[Sequence[int]], item_ids: npt.ArrayLike | Iterable[ItemId]
    ) -> None:
        """Add items; the next call of `generate` sees them.

        All items are compiled anew while calls read the old ones, which takes as long as `from_sequences` (0.1 s for
        100,000, some seconds for 20 million): add many at once. What `warm_up` captured belongs to the old catalogue.

        Args:
            sequences: as in `from_sequences`, or none; of the catalogue's length where it has no end token.
            item_ids: one id each, of the catalogue's type. An existing id gets a second sequence; remove it first to
                replace its sequence.

        Raises:
            ValueError: as `from_sequences`; in a catalogue of `SemanticIds.constraint_index` also an id with another
                semantic ID, and a token that is no code of its level. Nothing is added then.
        """
        with self._updates:
            self._snapshot = self._snapshot.add(sequences, item_ids)

    def compact(self) -> None:
        """Rebuild the arrays without the items that were removed; histories can no longer name those.

        It takes as long as building the index. Calls of `generate` continue; other updates wait.

        Raises:
            ValueError: no item is left.
        """
        with self._updates:
            self._snapshot = self._snapshot.compact()

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
        verify: bool | None = None,
    ) -> ConstraintIndex:
        """Load an index from a folder or from a repository of the Hub, mapped into memory.

        Args:
            repo_or_dir: a folder with the two files, or a repository id such as `"me/catalogue"`.
            revision: branch, tag or commit of the repository.
            token: access token of the Hub, or True for the stored one.
            cache_dir: where downloads are kept; the Hub's own cache by default.
            local_files_only: use only what is cached.
            subfolder: folder inside `repo_or_dir`.
            verify: by default every byte is compared with its checksum, in 0.15 s for 20 million items. True compares
                it with SHA-256, too, which takes longer. False skips the check: bytes are read when first used.

        The arrays' file holds its own copy of the description, which wins: a JSON of another save is ignored (`hf-gr
        index check` refuses it). A checksum is no signature: load indexes only from people you trust to choose the
        catalogue. Nothing in a file can run code.

        Raises:
            ValueError: a file that is missing, cut short, altered, of a newer format, or not a safetensors file (never
                unpickled); a repository that does not exist, or that this token may not read.
            ConnectionError: the Hub fails, or the connection broke; partial downloads are discarded.
        """
        source = Source(repo_or_dir, revision, token, cache_dir, local_files_only, subfolder)
        return cls._from_folder(source.resolve_folder(cls._files), verify=verify)

    @classmethod
    def _from_folder(cls, folder: Path, *, verify: bool | None = None) -> ConstraintIndex:
        description, arrays = storage.load(folder, verify=verify)
        try:
            eos_token_id = read_eos_token_id(description["eos_token_id"])
            items = storage.read_items(description, arrays)
            known = {name: description.get(name) for name in OPTIONAL}
            return cls(Snapshot(items, eos_token_id, **known))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{folder / storage.ARRAYS_FILE} holds no constraint index ({error}): download it or save it again"
            ) from error

    def _save(self, directory: Path, *, name: str) -> None:
        index = ConstraintIndex(self._snapshot.compact())
        make_folder(directory)
        items = index.snapshot.items
        description = {
            "num_sequences": len(index),
            "num_items": index.num_items,
            "max_length": index.max_length,
            "eos_token_id": index.eos_token_id,
            **storage.describe_items(items),
        }
        known = {name: getattr(index.snapshot, name) for name in OPTIONAL}
        description |= {name: value for name, value in known.items() if value is not None}
        card = index_card(summarise(index.snapshot), name)
        storage.save(directory, description, items.arrays(), card=card)
