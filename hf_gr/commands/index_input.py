# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The input of `hf-gr index build`: its format, the options for it, and the part of the library that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_gr.files.text import named_in_errors

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


ENDINGS = {f".{format}": format for format in Format} | {".pq": Format.PARQUET, ".ndjson": Format.JSONL}
COMPRESSED = (".gz", ".bz2", ".zst")  # tables of text only
# With the names that `read_table` uses.
TABLES: dict[Format, Literal["parquet", "csv", "jsonl"]] = {
    Format.PARQUET: "parquet",
    Format.CSV: "csv",
    Format.TSV: "csv",
    Format.JSONL: "jsonl",
}
TABLE_OPTIONS = ("sequence", "item_id", "no_item_id")
JSON_OPTIONS = ("tokenizer", "offset", "level_sizes", "template")


@dataclass(frozen=True)
class Input:
    """Files and how to read them; what the user omitted is None, empty or False."""

    paths: tuple[Path, ...]
    format: Format | None = None
    eos_token_id: int | None = None
    sequence: tuple[str, ...] = ()
    item_id: str | None = None
    no_item_id: bool = False
    tokenizer: str | None = None
    offset: int | None = None
    level_sizes: str | None = None
    template: str | None = None

    def compile(self) -> ConstraintIndex:
        """Read the files and build the index.

        Raises:
            ValueError: an unknown format, options of another format, or input that the library refuses.
            OSError: a file cannot be read.
            ImportError: a package that reads this format is missing.
        """
        format = self.format or _format_of(self.paths)
        self._refuse(JSON_OPTIONS if format in TABLES else TABLE_OPTIONS, format)
        if format in TABLES:
            return self._compile_table(format)
        path, *others = self.paths
        if others or path.is_dir():
            raise ValueError(f"INPUT is {self._names()}, expected one file of {format}: only tables have several")
        return self._compile_json(path) if format is Format.JSON else self._compile_array(path)

    def _compile_table(self, format: Format) -> ConstraintIndex:
        from hf_gr.catalogue import ConstraintIndex
        from hf_gr.files.tables import read_table

        if self.item_id is not None and self.no_item_id:
            raise ValueError("--item-id and --no-item-id are given, expected one of them")
        table = read_table(
            self.paths,
            format=TABLES[format],
            sequence=self.sequence[0] if len(self.sequence) == 1 else self.sequence or "sequence",
            item_id=None if self.no_item_id else self.item_id or "item_id",
            delimiter="\t" if format is Format.TSV else None,
        )
        with named_in_errors(self.paths):
            return ConstraintIndex.from_sequences(
                table.sequences, item_ids=table.item_ids, eos_token_id=self.eos_token_id
            )

    def _compile_json(self, path: Path) -> ConstraintIndex:
        from hf_gr.catalogue import SemanticIds

        if self.tokenizer is None and self.offset is None:
            raise ValueError(
                f"{self._names()} holds codes, expected --tokenizer NAME, whose tokens they are, or --offset N, the "
                "token of the first code: pass the one that your model was trained with"
            )
        if self.tokenizer is not None and self.offset is not None:
            raise ValueError("--tokenizer and --offset are given, expected one of them: a tokenizer knows its tokens")
        ids = SemanticIds.from_json(
            path,
            level_sizes=self._read_level_sizes(),
            offset=self.offset or 0,
            tokenizer=None if self.tokenizer is None else _load_tokenizer(self.tokenizer),
            **({} if self.template is None else {"template": self.template}),
        )
        with named_in_errors(self.paths):
            return ids.constraint_index(eos_token_id=self.eos_token_id)

    def _compile_array(self, path: Path) -> ConstraintIndex:
        from hf_gr.catalogue import ConstraintIndex

        self._refuse(JSON_OPTIONS, Format.NPY)
        with named_in_errors(self.paths):
            return ConstraintIndex.from_sequences(_load_array(path), eos_token_id=self.eos_token_id)

    def _refuse(self, names: Sequence[str], format: Format) -> None:
        """Refuse options that have no effect: the user misunderstood them."""
        given = [f"--{name.replace('_', '-')}" for name in names if self._is_given(name)]
        if given:
            kind = "tables" if names is TABLE_OPTIONS else "semantic IDs"
            raise ValueError(f"{given[0]} is an option of {kind}, and {self._names()} is {format}: omit it")

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


def _format_of(paths: Sequence[Path]) -> Format:
    """The format that all suffixes agree on; a folder has the format of its files."""
    files = [file for path in paths for file in (path.iterdir() if path.is_dir() else [path])]
    endings = {(file.with_suffix("") if file.suffix in COMPRESSED else file).suffix.lower() for file in files}
    formats = {ENDINGS[ending] for ending in endings if ending in ENDINGS}  # a folder may also hold notes
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

    return AutoTokenizer.from_pretrained(name)
