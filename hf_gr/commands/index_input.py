# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The input of `hf-gr index build`: its format, the options for it, and the part of the library that reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_gr.files.text import named_in_errors

from .text import flag_of
from .text import in_flags as with_flags

if TYPE_CHECKING:
    import numpy as np

    from hf_gr.catalogue import ConstraintIndex


class Format(StrEnum):
    """The format of a file."""

    PARQUET = "parquet"
    CSV = "csv"
    TSV = "tsv"
    JSONL = "jsonl"
    JSON = "json"
    NPY = "npy"
    TXT = "txt"


ENDINGS = {f".{format}": format for format in Format} | {".pq": Format.PARQUET, ".ndjson": Format.JSONL}
COMPRESSED = (".gz", ".bz2", ".zst")  # tables of text only
# With what the constructors of the library are called by: `from_parquet`.
TABLES = {Format.PARQUET: "parquet", Format.CSV: "csv", Format.TSV: "csv", Format.JSONL: "jsonl"}
OF_TABLES = ("item_id", "no_item_id", "delimiter")
OF_CODES = ("tokenizer", "offset", "level_sizes", "template")
# By what is read: the options that it has.
OPTIONS = {
    "a table of tokens": ("sequence", *OF_TABLES, "eos_token_id"),
    "an array of tokens": ("eos_token_id",),
    "a table of codes": ("codes", *OF_TABLES, *OF_CODES, "eos_token_id"),
    "a recipe's codes": (*OF_CODES, "eos_token_id"),
    "labels": ("labels", "tokenizer", "prefix"),
}
# Of the library's errors: arguments that are options here, and what the command line does otherwise.
ARGUMENTS = "sequence|codes|item_id|eos_token_id|level_sizes|offset|tokenizer|template|delimiter|prefix"
OTHERWISE = {
    "item_id=None for row numbers": "--no-item-id for row numbers",
    "and model=None: pass model=, so that they are added and its embeddings resized, or": "expected all of them: add "
    "them to tokenizer and model in Python (tokenizer= and model= of SemanticIds.from_parquet), or pass",
    "name it with sequence=": "name it with --sequence, if it holds tokens, or with --codes, and --offset or "
    "--tokenizer, if it holds codes",
    "build the index with this one by ConstraintIndex.from_labels": "build the index with this one",
}


@dataclass(frozen=True)
class Input:
    """Files and how to read them; what the user omitted is None, empty or False."""

    paths: tuple[Path, ...]
    format: Format | None = None
    eos_token_id: int | None = None
    sequence: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    item_id: str | None = None
    no_item_id: bool = False
    delimiter: str | None = None
    tokenizer: str | None = None
    offset: int | None = None
    level_sizes: str | None = None
    template: str | None = None
    labels: bool = False
    prefix: str | None = None

    def compile(self) -> ConstraintIndex:
        """Read the files and build the index.

        Raises:
            ValueError: an unknown format, options of another kind of input, or input that the library refuses.
            OSError: a file cannot be read.
            ImportError: a package that reads this format is missing.
        """
        format = self.format or _format_of(self.paths)
        kind = self._kind(format)
        self._refuse_others(kind)
        path, *others = self.paths
        if format not in TABLES and (others or path.is_dir()):
            raise ValueError(f"INPUT is {self._names()}, expected one file of {format}: only tables have several")
        try:
            if kind == "labels":
                return self._compile_labels()
            if kind == "an array of tokens":
                return self._compile_array()
            return self._compile_tokens(format) if kind == "a table of tokens" else self._compile_codes(format)
        except ValueError as error:
            raise ValueError(in_flags(str(error))) from error

    def _kind(self, format: Format) -> str:
        """What is read, a key of `OPTIONS`."""
        if format is Format.TXT or self.labels:
            if not self.labels:
                raise ValueError(
                    f"{self._names()} is a text file, expected --labels, if it has one label a line: a table needs "
                    "--format"
                )
            if format is not Format.TXT:
                raise ValueError(
                    f"--labels is given, and {self._names()} is {format}, expected .txt: one label a line"
                )
            return "labels"
        if format not in TABLES:
            return "a recipe's codes" if format is Format.JSON else "an array of tokens"
        of_codes = [name for name in ("codes", *OF_CODES) if self._is_given(name)]
        if self.sequence and of_codes:
            raise ValueError(
                f"--sequence and {flag_of(of_codes[0])} are given, expected one of them: --sequence names a column of "
                "tokens; codes, which --offset or --tokenizer turns into tokens, are named by --codes"
            )
        return "a table of codes" if of_codes else "a table of tokens"

    def _compile_tokens(self, format: Format) -> ConstraintIndex:
        from hf_gr.catalogue import ConstraintIndex

        options = self._table_options(format) | {"sequence": _one_or_all(self.sequence, "sequence")}
        read = getattr(ConstraintIndex, f"from_{TABLES[format]}")
        return read(self.paths, eos_token_id=self.eos_token_id, **options)

    def _compile_codes(self, format: Format) -> ConstraintIndex:
        from hf_gr.catalogue import SemanticIds

        if self.tokenizer is None and self.offset is None:
            raise ValueError(
                f"{self._names()} holds codes, expected --tokenizer NAME, whose tokens they are, or --offset N, the "
                "token of the first code: pass the one that your model was trained with"
            )
        if self.tokenizer is not None and self.offset is not None:
            raise ValueError("--tokenizer and --offset are given, expected one of them: a tokenizer knows its tokens")
        options: dict[str, Any] = {
            "level_sizes": self._read_level_sizes(),
            "offset": self.offset,
            "tokenizer": None if self.tokenizer is None else _load_tokenizer(self.tokenizer),
            **({} if self.template is None else {"template": self.template}),
        }
        if format is Format.JSON:
            ids = SemanticIds.from_json(self.paths[0], **options)
        else:
            options |= self._table_options(format) | {"codes": _one_or_all(self.codes, "codes")}
            ids = getattr(SemanticIds, f"from_{TABLES[format]}")(self.paths, **options)
        with named_in_errors(self.paths):
            return ids.constraint_index(eos_token_id=self.eos_token_id)

    def _compile_array(self) -> ConstraintIndex:
        from hf_gr.catalogue import ConstraintIndex

        with named_in_errors(self.paths):
            return ConstraintIndex.from_sequences(_load_array(self.paths[0]), eos_token_id=self.eos_token_id)

    def _compile_labels(self) -> ConstraintIndex:
        from hf_gr.catalogue import ConstraintIndex

        if self.tokenizer is None:
            raise ValueError(
                f"{self._names()} holds labels, expected --tokenizer NAME: that of the model that answers with them"
            )
        prefix = {} if self.prefix is None else {"prefix": self.prefix}
        with named_in_errors(self.paths):
            try:
                lines = self.paths[0].read_text(encoding="utf-8-sig").splitlines()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"it is no UTF-8 text ({error}), expected one label a line: save it as UTF-8"
                ) from error
            labels = [line.strip() for line in lines if line.strip()]
            return ConstraintIndex.from_labels(labels, _load_tokenizer(self.tokenizer), **prefix)

    def _table_options(self, format: Format) -> dict[str, Any]:
        if self.item_id is not None and self.no_item_id:
            raise ValueError("--item-id and --no-item-id are given, expected one of them")
        options: dict[str, Any] = {"item_id": None if self.no_item_id else self.item_id or "item_id"}
        if TABLES[format] == "csv":
            options["delimiter"] = self.delimiter or ("\t" if format is Format.TSV else None)
        elif self.delimiter is not None:
            raise ValueError(f"--delimiter is given, and {self._names()} is {format}, expected a CSV file: omit it")
        return options

    def _refuse_others(self, kind: str) -> None:
        """Refuse options that have no effect: the user misunderstood them."""
        every = dict.fromkeys(name for names in OPTIONS.values() for name in names)
        for name in every:
            if name not in OPTIONS[kind] and self._is_given(name):
                if kind == "a recipe's codes" and name in ("codes", "sequence", *OF_TABLES):
                    raise ValueError(
                        f"{flag_of(name)} is given, and {self._names()} is a .json file of a recipe, which has its "
                        f"codes by item, expected no columns: omit {flag_of(name)}, and give --tokenizer or --offset"
                    )
                raise ValueError(f"{flag_of(name)} is no option for {kind}, and {self._names()} holds that: omit it")

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        return not (value is None or value is False or value == ())  # 0 is given

    def _names(self) -> str:
        return ", ".join(map(str, self.paths))

    def _read_level_sizes(self) -> list[int] | None:
        if self.level_sizes is None:
            return None
        try:
            return [int(size) for size in self.level_sizes.split(",")]
        except ValueError:
            raise ValueError(f"--level-sizes {self.level_sizes}: expected integers, such as 256,256,256,256") from None


def in_flags(message: str) -> str:
    """An error of the library, which names arguments, with the options that they are here.

    Example:
        >>> in_flags("sequences have 1 to 2 tokens and eos_token_id=None: pass eos_token_id= (usually 2)")
        'sequences have 1 to 2 tokens and no --eos-token-id: pass --eos-token-id (usually 2)'
    """
    for words, others in OTHERWISE.items():
        message = message.replace(words, others)
    message = re.sub(
        rf'\b({ARGUMENTS})=\["c0", "c1"\]', lambda found: f"{flag_of(found[1])} c0 {flag_of(found[1])} c1", message
    )
    message = with_flags(message, {name: flag_of(name) for name in ARGUMENTS.split("|")})
    return re.sub(r"\blevel_sizes\b", "--level-sizes", message)


def _one_or_all(columns: tuple[str, ...], default: str) -> str | tuple[str, ...]:
    """A column of lists, or several columns of one integer each."""
    return columns if len(columns) > 1 else columns[0] if columns else default


def _format_of(paths: Sequence[Path]) -> Format:
    """The format that all suffixes agree on; a folder has the format of its files."""
    files = [file for path in paths for file in (path.iterdir() if path.is_dir() else [path])]
    endings = {(file.with_suffix("") if file.suffix in COMPRESSED else file).suffix.lower() for file in files}
    formats = {ENDINGS[ending] for ending in endings if ending in ENDINGS}  # a folder may also hold notes
    formats -= {Format.TXT} if len(formats) > 1 else set()
    if len(formats) == 1:
        return formats.pop()
    found = f"files of {' and '.join(sorted(formats))}" if formats else "no known ending"
    raise ValueError(
        f"INPUT {', '.join(map(str, paths))} has {found}, expected one of {', '.join(ENDINGS)}: pass --format"
    )


def _load_array(path: Path) -> np.ndarray[Any, Any]:
    import numpy as np

    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a header is Python, which fails in many ways; NumPy's own message suggests unpickling
        raise _no_array(path) from error
    if not isinstance(array, np.ndarray):  # an archive of several
        array.close()
        raise _no_array(path)
    return array


def _no_array(path: Path) -> ValueError:
    return ValueError(f"{path} is no .npy file or is cut short, expected integers of np.save: write it again")


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--tokenizer {name} cannot be read ({error}), expected a folder or repository with a tokenizer"
        ) from error
