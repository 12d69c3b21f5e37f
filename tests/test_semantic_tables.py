# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Semantic IDs from tables of codes, and saved: every form of the same codes gives the same catalogue."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import HubServer
from test_semantic_ids import small_tokenizer

from hf_gr import ConstraintIndex, SemanticIds
from hf_gr.catalogue import semantic_ids, storage

CODES = [[12, 5, 9], [12, 5, 3], [0, 7, 9], [4, 0, 1]]
NAMES = ["ham", "jam", "yam", "tea"]
RAGGED = [[12, 5, 9], [12, 5], [0], [4, 0, 1]]
OFFSET = 3


def tokenizer_of(template: str) -> Any:
    """One that has the texts of 13 codes on each of three levels, the last ones first."""
    texts = [template.format(level=a, LEVEL=a.upper(), code=code) for a in "abc" for code in range(13)]
    return small_tokenizer(*reversed(texts))


def texts(row: list[int], template: str = "<{level}_{code}>") -> list[str]:
    names = zip("abc", row, strict=False)
    return [template.format(level=level, LEVEL=level.upper(), code=code) for level, code in names]


def write(path: Path, columns: dict[str, Any]) -> Path:
    """The same table in the format of the suffix."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    elif path.suffix == ".jsonl":
        rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        lines = [";".join(columns), *(";".join(map(str, cells)) for cells in zip(*columns.values(), strict=True))]
        path.write_text("\n".join(lines))
    return path


def read(path: Path, **options: Any) -> SemanticIds:
    if path.suffix == ".csv":
        options["delimiter"] = ";"
    return SemanticIds.from_table(path, **options)


FORMS: dict[str, Any] = {
    "lists": lambda row: row,
    "texts": texts,
    "one text": lambda row: "".join(texts(row)),
    "spaced": lambda row: " ".join(texts(row)),
    "printed": lambda row: str(texts(row)),
    "printed numbers": str,
    "numbers": lambda row: "-".join(map(str, row)),
}


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_codes_is_the_same(form: str, suffix: str, tmp_path: Path) -> None:
    if form == "printed numbers" and suffix in (".parquet", ".jsonl"):
        pytest.skip("a column of lists there")
    for codes in (CODES, RAGGED):
        path = write(tmp_path / f"items{suffix}", {"codes": [FORMS[form](row) for row in codes], "item_id": NAMES})
        expected = SemanticIds(codes, item_ids=NAMES, offset=OFFSET)
        found = read(path, offset=OFFSET)
        assert found.codes.tolist() == expected.codes.tolist()
        assert (found.item_ids, found.level_sizes) == (expected.item_ids, expected.level_sizes)
        assert found.encode(NAMES) == expected.encode(NAMES)


def test_columns_of_one_code_each_and_other_names(tmp_path: Path) -> None:
    columns = {f"c{level}": [row[level] for row in CODES] for level in range(3)} | {"asin": NAMES}
    path = write(tmp_path / "items.csv", columns)
    found = read(path, codes=["c0", "c1", "c2"], item_id="asin", level_sizes=[16, 16, 16], offset=OFFSET)
    assert found.encode(["jam"]) == [3 + 12, 3 + 16 + 5, 3 + 32 + 3]
    assert read(path, codes=["c0", "c1"], item_id=None).item_ids == [0, 1, 2, 3]


@pytest.mark.parametrize("template", ["<{level}_{code}>", "<{LEVEL}_{code}>", "<|{level}_{code}|>"])
def test_a_tokenizer_gives_the_tokens_and_capitals_are_read(template: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(template)
    expected = [tokenizer.get_vocab()[text] for row in CODES for text in texts(row, template)]
    path = write(tmp_path / "items.parquet", {"codes": [texts(row, template) for row in CODES], "item_id": NAMES})
    # Levels in capitals need no template.
    options: dict[str, Any] = {} if "|" not in template else {"template": template}
    assert read(path, tokenizer=tokenizer, **options).encode(NAMES) == expected
    recipe = dict(zip(NAMES, [texts(row, template) for row in CODES], strict=True))
    assert SemanticIds.from_json(recipe, tokenizer=tokenizer, **options).encode(NAMES) == expected
    # Of integers too, where the template is named.
    path = write(tmp_path / "numbers.parquet", {"codes": CODES, "item_id": NAMES})
    assert read(path, tokenizer=tokenizer, template=template).encode(NAMES) == expected
    if "LEVEL" in template:
        with pytest.raises(ValueError, match=r"lacks .* '<a_0>'.*template='<\{LEVEL\}_\{code\}>', since .* '<A_0>'"):
            read(path, tokenizer=tokenizer)


@pytest.mark.parametrize("kind", ["pyarrow", "pandas", "polars"])
def test_a_table_in_memory(kind: str) -> None:
    library, names = pytest.importorskip(kind), [17, -5, 2**40, 3]
    columns = {"codes": CODES, "tokens": [[7, 8 + n] for n in range(len(CODES))], "item_id": names}
    table = library.table(columns) if kind == "pyarrow" else library.DataFrame(columns)
    ids = SemanticIds.from_table(table, offset=OFFSET)
    assert (ids.codes.tolist(), ids.item_ids) == (CODES, names)
    columns["codes"] = [texts(row) for row in CODES]
    written = library.table(columns) if kind == "pyarrow" else library.DataFrame(columns)
    assert SemanticIds.from_table(written, offset=OFFSET).codes.tolist() == CODES
    assert ConstraintIndex.from_table(table, sequence="tokens").items([[7, 9]]) == [[names[1]]]
    with pytest.raises(ValueError, match="the table has no column 'code', expected one of 'codes'"):
        SemanticIds.from_table(table, codes="code")
    with pytest.raises(ValueError, match="format= or delimiter= with a table in memory, expected neither"):
        SemanticIds.from_table(table, delimiter=";")
    with pytest.raises(ValueError, match=r"items.txt does not say what it is, .*: pass format="):
        SemanticIds.from_table("items.txt")


def test_capitals_and_others_are_not_mixed() -> None:
    with pytest.raises(ValueError, match=r"item 'jam' has '<a_1>' at level 0, .*'<A_0>': levels are named"):
        SemanticIds.from_json({"ham": ["<A_1>", "<B_2>"], "jam": ["<a_1>", "<b_2>"]}, offset=0)


@pytest.mark.parametrize(
    ("codes", "options", "message"),
    [
        (CODES[:2], {"item_id": "sku"}, "no column 'sku', .*name it with item_id=, or item_id=None"),
        ([[1], [-1]], {}, r"row 1 is \[-1\], expected integers from 0 .*are these codes\?"),
        ([["<a_1>"], ["<b_1>"]], {"offset": 0}, r"row 1 is .*it has '<b_1>' at level 0, expected"),
        ([["<a_1>"], ["<a_2>"]], {}, r"row 0 is .*the token texts \['<a_1>'\], expected tokenizer= or offset="),
        (["12-5", None], {}, "row 1 is None, it has None, expected its codes"),
        ([1, 2], {}, r"lists of integers: .*as in codes=\["),
        ([[5], [9]], {"level_sizes": [8]}, r"items\.parquet: item 2 has code 9 at level 0, expected 0 to 7"),
        (CODES[:2], {"offset": 3, "tokenizer": object()}, "offset=3 and a tokenizer"),
        (CODES[:2], {"model": object()}, "model is given and tokenizer=None"),
    ],
)
def test_bad_tables_are_refused(codes: Any, options: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "items.parquet", {"codes": codes, "item_id": [1, 2]})
    with pytest.raises(ValueError, match=message):
        read(path, **options)


@pytest.mark.parametrize("names", [NAMES, [17, -5, 2**40, 3]], ids=["strings", "integers"])
@pytest.mark.parametrize("by_tokenizer", [False, True])
def test_saved_semantic_ids_come_back_with_an_index(by_tokenizer: bool, names: Any, tmp_path: Path) -> None:
    if by_tokenizer:
        ids = SemanticIds.from_tokenizer(RAGGED, tokenizer_of("<{level}_{code}>"), item_ids=names)
    else:
        ids = SemanticIds(CODES, item_ids=names, level_sizes=[16, 8, 10], offset=OFFSET)
    index = ids.constraint_index(eos_token_id=2)
    index.save_pretrained(tmp_path)
    ids.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text().count("# Constraint index") == 1  # the first card stays
    again = SemanticIds.from_pretrained(tmp_path)
    assert again.codes.tolist() == ids.codes.tolist()
    assert (again.item_ids, again.level_sizes, again.vocab_size) == (ids.item_ids, ids.level_sizes, ids.vocab_size)
    assert again.encode(names) == ids.encode(names) == ConstraintIndex.from_pretrained(tmp_path).encode(names)
    assert [level.tolist() for level in again.codebooks()] == [level.tolist() for level in ids.codebooks()]


def test_semantic_ids_go_to_the_hub_with_a_card(hub: HubServer, tmp_path: Path) -> None:
    ids = SemanticIds(CODES, item_ids=NAMES, level_sizes=[16, 8, 10], offset=OFFSET)
    ids.push_to_hub("me/codes")
    assert SemanticIds.from_pretrained("me/codes").encode(NAMES) == ids.encode(NAMES)
    ids.save_pretrained(tmp_path / "codes")
    card = (tmp_path / "codes" / "README.md").read_text()
    assert 'from_pretrained("codes")' in card
    assert "Codes by level: 16, 8, 10." in card
    assert "at least 37 tokens" in card


def test_damaged_semantic_ids_are_refused(tmp_path: Path) -> None:
    """Files are read as those of an index; codes that do not fit are refused where digests do."""
    SemanticIds(CODES, item_ids=NAMES, offset=OFFSET).save_pretrained(tmp_path)
    path = tmp_path / semantic_ids.FILES[1]
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match="was altered after it was saved"):
        SemanticIds.from_pretrained(tmp_path)
    arrays = {"codes": np.array([[0, 5]]), "tokens": np.array([7, 8, 9]), "item_ids.values": np.array([1])}
    storage.save(tmp_path, {"level_sizes": [1, 2]}, arrays, card="card", files=semantic_ids.FILES, version=1)
    with pytest.raises(ValueError, match="expected 0 to 1"):
        SemanticIds.from_pretrained(tmp_path)
