# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of purchases to histories; what is left out is counted and told. Knows no tokens and no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from hf_gr.catalogue import SemanticIds
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.tables.table import Table
from hf_gr.training.histories import WINDOW_ROWS, as_ids, as_times

TIE_SEED = 0  # never a run's: what is held out stays the same


def read_purchases(
    purchases: Any, columns: Mapping[str, str | None], delimiter: str | None
) -> tuple[Table, dict[str, str]]:
    """The table, and which of its columns have which role."""
    roles = {role: name for role, name in columns.items() if name}
    if "text" in roles and find_spec("sentence_transformers") is None:
        raise ImportError(f'text={roles["text"]!r} needs sentence-transformers: pip install "hf-gr[text]"')
    by_column = {name: role for role, name in reversed(roles.items())}
    return Table(purchases, by_column, name="purchases", delimiter=delimiter), roles


def text_features(encoder: str | None, texts: Sequence[str]) -> Any:
    """`[N, D]` embeddings of texts by a model of sentence-transformers."""
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

    return SentenceTransformer(encoder).encode(list(texts))


def clean(
    table: Table, roles: Mapping[str, str], options: Mapping[str, Any], items: SemanticIds | None = None
) -> tuple[list[list[ItemId]], dict[ItemId, str], tuple[str, ...]]:
    """Histories, oldest purchase first; texts of items; and what was found and left out, a line each.

    `roles` names the columns `user`, `item`, perhaps `time`, `quantity` and `text`; `options` are those of `train`.
    """
    import pandas as pd

    columns: dict[str, list[Any]] = {role: [] for role in roles}
    for rows in table.windows(WINDOW_ROWS):
        for role, name in roles.items():
            columns[role] += rows.cells(name)
    frame: Any = pd.DataFrame(columns, dtype=object)
    report = [f"{len(frame):,} rows"]

    def keep(kept: Any, what: str) -> None:
        nonlocal frame
        report.append(f"{len(frame) - len(kept):,} {what}: dropped")
        frame = kept

    whole = frame.dropna(subset=[role for role in roles if role != "text"])
    if len(whole) < len(frame) and not options["drop_missing"]:
        first = frame.index.difference(whole.index)[0]
        raise ValueError(
            f"{table.name}, row {first} has a missing cell, expected none: drop_missing=True drops such rows"
        )
    keep(whole, "with a missing cell (drop_missing)")
    if "quantity" in roles and options["drop_returns"]:
        try:
            is_bought = frame["quantity"].astype(float) > 0
        except (TypeError, ValueError) as error:
            raise ValueError(f"quantity={roles['quantity']!r} is no column of numbers ({error})") from None
        keep(frame[is_bought], "with a quantity of 0 or less, such as returns (drop_returns)")
    # Beside a missing cell, pandas makes floats of integers.
    ids = [int(cell) if isinstance(cell, float) and cell.is_integer() else cell for cell in frame["item"]]
    times = as_times(list(frame["time"]), roles["time"]) if "time" in roles else range(len(frame))
    frame = frame.assign(item=as_ids(ids, items, is_text=table.is_text), time=times)
    if "time" in roles and options["drop_duplicates"]:  # without times, the user may have bought it again
        same = ["user", "item", "time"]
        keep(frame.drop_duplicates(same), "of the same user, item and time as another (drop_duplicates)")
    counts, left = {"item": options["min_item_count"], "user": options["min_user_count"]}, frame
    while any((is_rare := left.groupby(by)[by].transform("size") < least).any() for by, least in counts.items()):
        left = left[~is_rare]
    keep(
        left,
        f"of items with fewer than {counts['item']} purchases (min_item_count) or users with fewer than "
        f"{counts['user']} (min_user_count)",
    )
    if frame.empty:
        raise ValueError(f"{table.name}: no row is left, expected some: leave out less ({'; '.join(report)})")
    tied = int(frame.duplicated(["user", "time"]).sum())
    told = "in a random order, always the same (shuffle_ties)" if options["shuffle_ties"] else "in the order of rows"
    report.append(f"{tied:,} at the time of another of their user: {told}")
    frame = frame.sample(frac=1, random_state=TIE_SEED) if options["shuffle_ties"] else frame
    histories = frame.sort_values("time", kind="stable").groupby("user", sort=False)["item"].agg(list).tolist()
    report.append(
        f"{len(frame):,} purchases of {frame['item'].nunique():,} items by {len(histories):,} users are left"
    )
    texts = frame.dropna(subset="text").drop_duplicates("item") if "text" in roles else frame[:0].assign(text="")
    return histories, dict(zip(texts["item"], texts["text"].astype(str), strict=True)), tuple(report)
