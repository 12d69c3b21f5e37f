# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Items <-> code tuples <-> token ids. NumPy only: tokenizers and models are used by their methods, never imported.

Axes: N items, L levels of the longest semantic ID.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from hf_gr.files.atomic import make_folder
from hf_gr.files.cards import semantic_ids_card
from hf_gr.files.hub_mixin import HubMixin
from hf_gr.files.text import counted, named_in_errors

from . import storage
from .code_book import as_text, some_items
from .fanout import smallest_dtype
from .index import ConstraintIndex
from .item_ids import ItemId, ItemIds, check_item_ids, history_lists, read_item_ids
from .new_items import as_features, by_distance, by_votes, free_codes, neighbours_of
from .recipes import TEMPLATE, CodeReader, in_other_case, read_recipe, token_texts
from .sequences import LARGEST_TOKEN, is_integer, read_rows, to_host
from .trie import PADDING

FORMAT_VERSION = 1
FILES = ("semantic_ids.json", "semantic_ids.safetensors")  # one folder may hold those of an index, too


class SemanticIds(HubMixin, what="set of semantic IDs", files=FILES):
    """The semantic IDs of a set of items, and the tokens that a model knows them by.

    Code `c` of level `l` is a token of its own: by default `offset + level_sizes[0] + ... + level_sizes[l - 1] + c`,
    which suits a model trained from scratch; with `from_tokenizer` the tokenizer's own added token, such as `<a_47>`.

    Semantic IDs may differ in length: some recipes tell items with equal codes apart by one more code. Loading
    restores the saved tokens and needs no tokenizer. Their files may share a folder with those of an index.

    Attributes:
        codes: `[N, L]` integers; -1 pads the rows of shorter semantic IDs.
        level_sizes: L codebook sizes.
        item_ids: N item ids.
        centroids: `[C, D]` of each level of residual k-means, for `extend`; none where codes came without.
        encoder: the model of sentence-transformers that made the D features; None for others.

    Example:
        >>> ids = SemanticIds([[0, 1], [2, 0], [2, 0, 1]], item_ids=["ham", "jam", "yam"], offset=3)
        >>> ids.level_sizes, ids.vocab_size
        ((3, 2, 2), 10)
        >>> ids.encode(["jam", "yam", "ham"])
        [5, 6, 5, 6, 9, 3, 7]
        >>> ids.decode([5, 6, 9, 5, 6])
        [['yam'], ['jam']]
    """

    def __init__(
        self,
        codes: npt.ArrayLike,
        *,
        item_ids: npt.ArrayLike | Iterable[ItemId] | None = None,
        level_sizes: Sequence[int] | None = None,
        offset: int = 0,
    ) -> None:
        """Give every level its own range of tokens.

        Args:
            codes: integers from 0, one row an item: `[N, L]`, shorter rows padded with -1, or N lists of several
                lengths. Several items may share one code tuple.
            item_ids: N distinct item ids, all integers or all strings; the row numbers by default.
            level_sizes: L codebook sizes; the largest code of each level plus one by default.
            offset: the first token of the first level: the number of tokens that are not codes.

        Raises:
            ValueError: codes of another shape, type or range, or item ids that are not N distinct ones.
        """
        try:
            self.codes: npt.NDArray[np.int64] = read_rows(codes)[0]
        except ValueError as error:
            what = str(error).partition(", expected")[0].replace("sequence", "code list", 1)
            fix = "texts of tokens are read by SemanticIds.from_json"
            raise ValueError(f"codes: {what}, expected [N, L] integers or N lists of them: {fix}") from error
        if not self.codes.size:
            raise ValueError(f"codes has shape {list(self.codes.shape)}, expected [N, L] integers")
        ids = read_item_ids(item_ids, len(self.codes))
        ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
        self.item_ids: list[ItemId] = [*(range(len(self.codes)) if ids is None else ids)]
        if len(set(self.item_ids)) != len(self):
            raise ValueError(
                f"item_ids has {len(self)} entries, {len(set(self.item_ids))} of them distinct, expected all: "
                "an item has one semantic ID"
            )
        largest: list[int] = self.codes.max(axis=0).tolist()
        sizes: Any = [max(code, 0) + 1 for code in largest] if level_sizes is None else to_host(level_sizes)
        if np.ndim(sizes) != 1 or not all(map(is_integer, sizes)):
            raise ValueError(f"level_sizes={sizes}, expected integers: the codebook size of each level")
        self.level_sizes: tuple[int, ...] = tuple(map(int, sizes))
        self._check_codes()
        if not is_integer(offset) or offset < 0:
            raise ValueError(f"offset={offset!r}, expected 0 or more: the number of tokens before the first code")
        if offset + sum(self.level_sizes) > LARGEST_TOKEN:
            raise ValueError(
                f"offset={offset} and level_sizes={self.level_sizes} give tokens beyond {LARGEST_TOKEN}, expected "
                "codes of a codebook: are these item ids?"
            )
        self.centroids: list[npt.NDArray[np.float32]] = []
        self.encoder: str | None = None
        # By code, for each level. The last entry stands for code -1, and is not a token either.
        self._tokens: list[npt.NDArray[np.int64]] = []
        for size in self.level_sizes:
            self._tokens.append(np.append(np.arange(offset, offset + size, dtype=np.int64), PADDING))
            offset += size

    @classmethod
    def from_json(
        cls,
        source: str | PathLike[str] | Mapping[Any, Any] | Sequence[Any],
        *,
        level_sizes: Sequence[int] | None = None,
        offset: int | None = None,
        tokenizer: Any = None,
        model: Any = None,
        template: str | None = None,
    ) -> SemanticIds:
        """Read the semantic IDs that public recipes write.

        An item's semantic ID may be

        - a list of token texts, `["<a_47>", "<b_103>", "<c_8>"]`: `*.index.json` of LC-Rec, LETTER and MiniOneRec
          (with `template="<|{level}_{code}|>"` where `rqkmeans_constrained.py` wrote `"<|a_47|>"`);
        - a list of integers, `[47, 103, 8]`;
        - a string of the package semantic-id, `"47-103-8"` or `"<a_47><b_103><c_8>"`. The number that it appends to
          collisions, `"47-103-8-1"`, is one more code; an item id that it appends (its `item_ids=`) is not. Its `sep=`
          may be one of `-_,;|` or a space.

        Args:
            source: a JSON file, or what one holds: item -> semantic ID, or a list of semantic IDs, whose items are
                the row numbers. Item ids such as `"17"` become integers, as the recipes' histories have them; where
                one is not such a number (`"B001"`, `"007"`), all stay strings.
            level_sizes: as in the constructor.
            offset: as in the constructor; only without a tokenizer. By default 0 for integers. Token texts need
                `tokenizer` or an offset that is given: they name a tokenizer's tokens.
            tokenizer: as in `from_tokenizer`; the constructor's tokens by default.
            model: as in `from_tokenizer`.
            template: a token's text in the tokenizer, and in `source` but for the case of its level. By default
                `"<{level}_{code}>"`, or `"<{LEVEL}_{code}>"` where `source` has capitals, as `<A_154>` of MQL4GRec.

        Raises:
            ValueError: a file that is not JSON or is cut short, an item whose semantic ID cannot be read, token texts
                with neither `tokenizer` nor `offset`, or what the constructor and `from_tokenizer` refuse. Nothing is
                added to the tokenizer in that case.

        Example:
            >>> ids = SemanticIds.from_json({"17": ["<a_0>", "<b_1>"], "23": "2-0-1"}, offset=3)
            >>> ids.item_ids, ids.codes.tolist()
            ([17, 23], [[0, 1, -1], [2, 0, 1]])
        """
        files = [source] if isinstance(source, (str, PathLike)) else []

        def read(reader: CodeReader) -> tuple[Any, Any]:
            with named_in_errors(files):
                return read_recipe(source, reader)

        return cls._read(read, files, level_sizes, offset, tokenizer, model, template)

    @classmethod
    def from_table(
        cls,
        table: Any,
        *,
        codes: str | Sequence[str] = "codes",
        item_id: str | None = "item_id",
        level_sizes: Sequence[int] | None = None,
        offset: int | None = None,
        tokenizer: Any = None,
        model: Any = None,
        template: str | None = None,
        format: Literal["parquet", "csv", "jsonl"] | None = None,
        delimiter: str | None = None,
        progress: bool = True,
    ) -> SemanticIds:
        r"""Read the semantic IDs of a table, files of which are read in pieces.

        Args:
            table: a file, a folder of part files, or a list of files: Parquet, CSV with a header, or JSON lines such
                as `{"item_id": 7, "codes": [12, 5, 9]}`. Or a table in memory: of pandas, Polars or pyarrow.
            codes: the column of codes: lists of integers, or whatever `from_json` reads, such as lists of token texts
                or `"12-5-9"`; in CSV, texts such as `12 5 9`, `[12, 5, 9]` or `<a_12><b_5><c_9>`. Or several columns
                with one integer each, in which shorter semantic IDs end with nulls.
            item_id: the column of item ids, each once; None for the row numbers.
            level_sizes: as in the constructor.
            offset: as in `from_json`.
            tokenizer: as in `from_json`.
            model: as in `from_json`.
            template: as in `from_json`.
            format: of the files; by default what their names end with.
            delimiter: of CSV; by default a comma, and a tab for `.tsv` and `.inter`.
            progress: show a progress bar.

        Raises:
            ValueError: a missing file or column, or a value of another type, by its row; or what the constructor and
                `from_tokenizer` refuse. Nothing is added to the tokenizer in that case.
            ImportError: pyarrow is missing: `pip install "hf-gr[tables]"`.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp(), "items.csv")
            >>> _ = path.write_text("item_id,codes\nham,0 1\njam,2 0\n")
            >>> ids = SemanticIds.from_table(path, offset=3)
            >>> ids.encode(["jam"]), ids.constraint_index().items([[5, 6]])
            ([5, 6], [['jam']])
        """
        from hf_gr.tables.memory import paths_of
        from hf_gr.tables.sequences import read_sequences

        how: Any = {"item_id": item_id, "format": format, "delimiter": delimiter, "progress": progress}

        def read(reader: CodeReader) -> tuple[Any, Any]:
            return read_sequences(table, sequence=codes, argument="codes", read_text=reader.read, **how)

        return cls._read(read, paths_of(table), level_sizes, offset, tokenizer, model, template)

    @classmethod
    def from_tokenizer(
        cls,
        codes: npt.ArrayLike,
        tokenizer: Any,
        *,
        item_ids: npt.ArrayLike | Iterable[ItemId] | None = None,
        level_sizes: Sequence[int] | None = None,
        template: str = TEMPLATE,
        model: Any = None,
    ) -> SemanticIds:
        """Use a tokenizer's own tokens, one for every code of every level, and add those that it lacks.

        A code that no item has may lack its token: recipes add only those of their items.

        Args:
            codes: as in the constructor.
            tokenizer: a tokenizer of transformers. Missing tokens are added to it, as non-special tokens.
            item_ids: as in the constructor.
            level_sizes: as in the constructor.
            template: a token's text, with `{level}` (a, b, c, ...) or `{LEVEL}` (A, B, C, ...), and `{code}`.
            model: a model whose embeddings are resized where they do not hold the tokens; needed where tokens are
                missing.

        Raises:
            ValueError: tokens of items are missing and no model was given; nothing is added in that case. Or a
                template that does not tell levels and codes apart, or more levels than letters.
        """
        ids = cls(codes, item_ids=item_ids, level_sizes=level_sizes)
        texts = token_texts(template, ids.level_sizes)
        columns: list[list[int]] = ids.codes.T.tolist()
        by_level = zip(texts, columns, strict=True)
        used = [level[code] for level, column in by_level for code in sorted({*column} - {PADDING})]
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        missing = [text for text in used if text not in vocabulary]
        if missing and model is None:
            other = in_other_case(template)
            has = next((text for text in token_texts(other, ids.level_sizes)[0] if text in vocabulary), None)
            fix = "template=, where the tokenizer writes them otherwise"
            fix = fix if has is None else f"template={other!r}, since the tokenizer has {has!r}"
            raise ValueError(
                f"the tokenizer lacks {len(missing)} of {len(used)} code tokens, such as {missing[0]!r}, and "
                f"model=None: pass model=, so that they are added and its embeddings resized, or {fix}"
            )
        if missing:
            tokenizer.add_tokens([text for level in texts for text in level if text not in vocabulary])
            vocabulary = tokenizer.get_vocab()
        ids._tokens = [
            np.array([*(vocabulary.get(text, PADDING) for text in level), PADDING], dtype=np.int64) for level in texts
        ]
        if model is not None and ids.vocab_size > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(max(ids.vocab_size, len(tokenizer)))
        return ids

    def __repr__(self) -> str:
        return (
            f"SemanticIds({counted(len(self), 'item')}, level_sizes={self.level_sizes}, vocab_size={self.vocab_size})"
        )

    def __len__(self) -> int:
        """The number of items."""
        return len(self.item_ids)

    @property
    def num_levels(self) -> int:
        """Tokens of one item, the longest."""
        return len(self.level_sizes)

    @property
    def vocab_size(self) -> int:
        """The smallest vocabulary that holds every code token: the largest of them plus one."""
        return max(int(tokens.max()) for tokens in self._tokens) + 1

    @cached_property
    def is_ragged(self) -> bool:
        """Whether semantic IDs differ in length, so that a catalogue of them needs an end token."""
        return bool((self.codes[:, -1] == PADDING).any())

    def codebooks(self) -> list[npt.NDArray[np.int64]]:
        """The tokens of every level's codes, also of those that no item has, if they have one."""
        return [tokens[tokens != PADDING] for tokens in self._tokens]

    def token_sequences(self) -> npt.NDArray[np.int64]:
        """The `[N, L]` tokens of every item; -1 pads shorter rows."""
        return np.stack([tokens[self.codes[:, level]] for level, tokens in enumerate(self._tokens)], axis=1)

    def extend(
        self,
        item_ids: npt.ArrayLike | Iterable[ItemId],
        features: npt.ArrayLike | None = None,
        *,
        histories: Any = (),
    ) -> SemanticIds:
        """Give new items semantic IDs, so that a trained model knows them; those of the others stay as they are.

        An item with features gets the codes of the nearest centroids of the residual k-means that made these IDs; an
        item without, level by level, the code of most items that it stands beside in histories, where an item that
        stands beside many counts less. The last code is the smallest that is free. `index.add` takes the new items.

        Args:
            item_ids: M new ids.
            features: `[M, D]` numbers, as those that the IDs were made from (`semantic_ids_from_features`, or
                `features=` of `semantic_ids_from_histories`); NaN where an item has none.
            histories: a list of items per user, oldest first, or a dictionary of them: known and new ones.

        Returns:
            The IDs of all items, the new ones last.

        Raises:
            ValueError: an id that has a semantic ID, features of another shape, an item without features that stands
                beside no known item, or one whose codes are all taken.

        Example:
            >>> ids = SemanticIds([[0, 0], [1, 0]], item_ids=["tea", "jam"], level_sizes=[2, 8])
            >>> more = ids.extend(["mate"], histories=[["mate", "tea"]])
            >>> more.codes_of("mate"), more.encode(["tea"]) == ids.encode(["tea"])
            ((0, 1), True)

        Source: the assignment of residual quantisation, TIGER (Rajput et al., 2023), sections 3.1 and 4.3.
        """
        checked = check_item_ids(item_ids)
        names: list[ItemId] = [*(checked if isinstance(checked, list) else checked.tolist())]
        if known := [name for name in names if name in self._row_of]:
            raise ValueError(f"item_ids has {known[0]!r}, which has a semantic ID, expected new items: omit it")
        num_features = self.centroids[0].shape[1] if self.centroids else 0
        rows = None if features is None else as_features(features, len(names), num_features)
        near = neighbours_of(names, history_lists(histories), self._row_of)
        allowed: list[list[int]] = [np.flatnonzero(tokens[:-1] != PADDING).tolist() for tokens in self._tokens]
        allowed[-1][:0] = [PADDING] * self.is_ragged
        rows_of_codes: list[list[int]] = self.codes.tolist()
        taken: set[tuple[int, ...]] = set(map(tuple, rows_of_codes))
        made: list[tuple[int, ...]] = []
        for place, name in enumerate(names):
            if rows is not None and np.isfinite(rows[place]).all():
                next_codes = by_distance(rows[place], self.centroids)
            elif weights := near[name]:
                codes_of = [tuple(self.codes[self._row_of[other]].tolist()) for other in weights]
                if all(PADDING in codes[:-1] for codes in codes_of):
                    raise ValueError(
                        f"item {name!r} stands beside items of fewer than {self.num_levels - 1} codes alone, "
                        f"expected one of {self.num_levels - 1} or more in histories, whose codes it could share: "
                        "leave it out until it is bought with such an item"
                    )
                next_codes = by_votes(list(zip(codes_of, weights.values(), strict=True)))
            else:
                raise ValueError(
                    f"item {name!r} has no features and stands beside no known item in histories, expected either: "
                    "leave it out until it is bought with others"
                )
            codes = free_codes(next_codes, taken=taken, allowed=allowed)
            if codes is None:
                raise ValueError(
                    f"item {name!r} fits codes that are all taken, expected room in level_sizes={self.level_sizes}: "
                    "make new semantic IDs, and train again"
                )
            taken.add(codes)
            made.append(codes)
        if not made:
            return self
        of_all: Any = np.concatenate([self.codes, np.array(made)])
        extended = SemanticIds(of_all, item_ids=[*self.item_ids, *names], level_sizes=self.level_sizes)
        extended._tokens, extended.centroids, extended.encoder = self._tokens, self.centroids, self.encoder
        return extended

    def constraint_index(self, *, eos_token_id: int | None = None) -> ConstraintIndex:
        """Compile the catalogue of these items.

        Args:
            eos_token_id: the token that ends an item; needed where semantic IDs differ in length.

        Raises:
            ValueError: semantic IDs of different lengths and no end token.
        """
        if self.is_ragged and eos_token_id is None:
            raise ValueError(
                "semantic IDs differ in length and eos_token_id=None, expected an end token, which tells an item from "
                "a longer one: pass eos_token_id= (usually model.generation_config.eos_token_id)"
            )
        index = ConstraintIndex.from_sequences(
            self.token_sequences(), item_ids=self.item_ids, eos_token_id=eos_token_id
        )
        levels = [[int(tokens.min()), int(tokens.max())] for tokens in self.codebooks()]
        return ConstraintIndex(replace(index.snapshot, levels=levels))

    def code_book(self) -> dict[str, str]:
        """What the tokens mean: see `ConstraintIndex.code_book`."""
        return {str(self.item_ids[row]): as_text(self._sequences[row].tolist()) for row in some_items(len(self))}

    def tokens_of(self, names: Iterable[str]) -> Mapping[str, set[str]]:
        """By the names that are ids of items, as texts: the item's tokens."""
        sought, rows = set(names), enumerate(map(str, self.item_ids))
        return {name: {as_text(self._sequences[row].tolist())} for row, name in rows if name in sought}

    def encode(self, item_ids: Iterable[ItemId]) -> list[int]:
        """A history as one list of tokens: as many per item as it has codes.

        Raises:
            ValueError: an item without a semantic ID, by name.
        """
        if isinstance(item_ids, str):
            raise ValueError(f"item_ids={item_ids!r}, expected a list of item ids: pass [{item_ids!r}]")
        tokens = self._sequences[[self._row(item_id) for item_id in item_ids]]
        return tokens[tokens != PADDING].tolist()

    def decode(self, token_ids: npt.ArrayLike | Sequence[int]) -> list[list[ItemId]]:
        """The items of a list of tokens, in order; empty where tokens are those of no item.

        L tokens are an item; where semantic IDs differ in length, as many as follow each other level by level.

        Raises:
            ValueError: several rows, a number of tokens that is not a multiple of L, or, where semantic IDs differ in
                length, a token that is not a code's.
        """
        rows, _ = read_rows(token_ids, one_is_enough=True)
        if len(rows) > 1 or not self.is_ragged and rows.size % self.num_levels:
            number = "" if self.is_ragged else f"a multiple of {self.num_levels} "
            raise ValueError(
                f"token_ids has shape {list(rows.shape)}, expected one list of {number}"
                "tokens: cut the prompt and the end token off, and decode one row at a time"
            )
        return [list(self._items_of.get(tuple(part), [])) for part in self._split(rows.reshape(-1))]

    def codes_of(self, item_id: ItemId) -> tuple[int, ...]:
        """The code tuple of an item.

        Raises:
            ValueError: an item without a semantic ID.
        """
        codes = self.codes[self._row(item_id)]
        return tuple(codes[codes != PADDING].tolist())

    def _save(self, directory: Path, *, name: str) -> None:
        make_folder(directory)
        tokens = np.concatenate([tokens[:-1] for tokens in self._tokens])
        card = semantic_ids_card(len(self), self.level_sizes, vocab_size=self.vocab_size, name=name)
        ids = ItemIds.pack(check_item_ids(self.item_ids))
        arrays = {
            "codes": np.ascontiguousarray(self.codes, dtype=smallest_dtype(max(self.level_sizes))),
            "tokens": tokens.astype(smallest_dtype(self.vocab_size)),
            "item_ids.values": ids.values,
            **({} if ids.bounds is None else {"item_ids.bounds": ids.bounds}),
            **{f"centroids.{level}": table for level, table in enumerate(self.centroids)},
        }
        description = {
            "num_items": len(self),
            "level_sizes": list(self.level_sizes),
            "item_id_type": "string" if ids.are_strings else "integer",
            **({} if self.encoder is None else {"encoder": self.encoder}),
        }
        how: Any = {"version": FORMAT_VERSION, "digests": ["arrays_xxh3"]}
        storage.save(directory, description, arrays, card=card, files=FILES, **how)

    @classmethod
    def _from_folder(cls, folder: Path) -> SemanticIds:
        fix = "does the folder hold semantic IDs?"
        try:
            description, arrays = storage.load(folder, files=FILES, newest=FORMAT_VERSION, fix=fix)
            packed = ItemIds(arrays["item_ids.values"], arrays.get("item_ids.bounds"))
            sizes = cast("list[int]", description["level_sizes"])
            ids = cls(arrays["codes"], item_ids=packed.take(np.arange(len(packed))), level_sizes=sizes)
            ends = np.cumsum(sizes)[:-1]
            ids._tokens = [np.append(part, PADDING).astype(np.int64) for part in np.split(arrays["tokens"], ends)]
            ids.centroids = [arrays[name] for name in sorted(arrays) if name.startswith("centroids.")]
            ids.encoder = cast("str | None", description.get("encoder"))
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{folder / FILES[1]} holds no semantic IDs ({error}): download or save it again"
            ) from error
        return ids

    @classmethod
    def _read(
        cls,
        read: Callable[[CodeReader], tuple[Any, Any]],  # codes and item ids
        files: Sequence[Any],  # named in errors
        level_sizes: Sequence[int] | None,
        offset: int | None,
        tokenizer: Any,
        model: Any,
        template: str | None,
    ) -> SemanticIds:
        """Read codes, and give them tokens of their own or a tokenizer's."""
        if tokenizer is None and model is not None:
            raise ValueError("model is given and tokenizer=None, expected both: pass tokenizer= too")
        if tokenizer is not None and offset:
            raise ValueError(f"offset={offset} and a tokenizer, expected one of them: its tokens have their own ids")
        reader = CodeReader(template or TEMPLATE, takes_texts=tokenizer is not None or offset is not None)
        codes, item_ids = read(reader)
        given: Any = {"item_ids": item_ids, "level_sizes": level_sizes}
        with named_in_errors(files):
            if tokenizer is None:
                return cls(codes, offset=0 if offset is None else offset, **given)
            return cls.from_tokenizer(codes, tokenizer, template=template or reader.template, model=model, **given)

    def _check_codes(self) -> None:
        """Check that every code is one of its level, and that -1 stands only after the last code of a row."""
        num_levels = self.codes.shape[1]
        if len(self.level_sizes) != num_levels:
            raise ValueError(
                f"level_sizes has {len(self.level_sizes)} entries, expected {num_levels}: one for each level"
            )
        is_filling = np.ones(len(self), dtype=np.bool_)
        for level in reversed(range(num_levels)):
            column, size = self.codes[:, level], self.level_sizes[level]
            if size < 1:
                raise ValueError(f"level_sizes has {size} at level {level}, expected 1 or more")
            is_filling &= (column == PADDING) & (level > 0)  # an item has one code at least
            bad = ~is_filling & ((column < 0) | (column >= size))
            if bad.any():
                row = int(np.argmax(bad))
                fix = "was the level offset added already?" if column[row] > 0 else "only the end of a row may be -1"
                raise ValueError(
                    f"item {self.item_ids[row]!r} has code {column[row]} at level {level}, "
                    f"expected 0 to {size - 1}: {fix}"
                )

    def _split(self, tokens: npt.NDArray[np.int64]) -> list[list[int]]:
        """The tokens of each item; where lengths differ, cut before any token that is not of the next level."""
        if not self.is_ragged:
            return tokens.reshape(-1, self.num_levels).tolist()
        parts: list[list[int]] = []
        next_level = 0
        for position, token in enumerate(tokens.tolist()):
            level = self._level_of.get(token)
            if level is None:
                raise ValueError(
                    f"token_ids has {token} at position {position}, expected code tokens only: "
                    "cut the prompt and the end token off"
                )
            if level == 0 or level != next_level:
                parts.append([])
            parts[-1].append(token)
            next_level = level + 1
        return parts

    def _row(self, item_id: ItemId) -> int:
        if item_id not in self._row_of:
            raise ValueError(
                f"item {item_id!r} has no semantic ID, expected one of the {len(self)} known items: omit it"
            )
        return self._row_of[item_id]

    @cached_property
    def _sequences(self) -> npt.NDArray[np.int64]:
        return self.token_sequences()

    @cached_property
    def _row_of(self) -> dict[ItemId, int]:
        return {item_id: row for row, item_id in enumerate(self.item_ids)}

    @cached_property
    def _level_of(self) -> dict[int, int]:
        return {token: level for level, tokens in enumerate(self._tokens) for token in tokens.tolist() if token >= 0}

    @cached_property
    def _items_of(self) -> dict[tuple[int, ...], list[ItemId]]:
        items: dict[tuple[int, ...], list[ItemId]] = {}
        lengths: list[int] = (self.codes != PADDING).sum(axis=1).tolist()
        for item_id, row, length in zip(self.item_ids, self._sequences.tolist(), lengths, strict=True):
            items.setdefault(tuple(row[:length]), []).append(item_id)
        return items
