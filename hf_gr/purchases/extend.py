# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`extend`: tomorrow's items, from tomorrow's purchases, for a recommender that was trained before them.

Imports nothing slow before it is called.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_gr.files.text import counted

FALLBACK_FILE = "fallback.parquet"  # of a recommender's folder: a table for `fallback`

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_gr.catalogue import ConstraintIndex, SemanticIds
    from hf_gr.catalogue.item_ids import ItemId


@dataclass(frozen=True, repr=False)
class Extended:
    """What `extend` made.

    Attributes:
        item_ids: the new items.
        told: what was found in the table, left out and made, a line each.
        patch: of a server's catalogue, the body of `PATCH /v1/catalogue`.
    """

    item_ids: tuple[ItemId, ...]
    told: tuple[str, ...]
    patch: Mapping[str, Any]

    def to_json(self) -> str:
        """One JSON object; its fields are those of this class."""
        return json.dumps(vars(self))

    def __repr__(self) -> str:
        return "\n".join(self.told)


def extend(
    recommender: str | Path,
    purchases: Any,
    *,
    user: str = "user",
    item: str = "item",
    time: str | None = "time",
    quantity: str | None = None,
    text: str | None = None,
    min_item_count: int = 1,
    output: str | Path | None = None,
    patch: str | Path | None = None,
    delimiter: str | None = None,
) -> Extended:
    """Give the new items of a table of purchases semantic IDs, and add them to a recommender's catalogue.

    A new item gets codes beside those of the items whose texts are like its own, where the recommender was trained
    with texts; else of those that it is bought with. Known items keep theirs, and the model stays as it is. Items that
    get none become rows of the folder's `fallback.parquet`, if it has one, with what they are bought with.

    Args:
        recommender: the folder that `train` wrote, or a repository of one.
        purchases: a table of purchases as `train` reads it: new ones, or all.
        user: column of users.
        item: column of item ids.
        time: column of times; empty if rows are in order.
        quantity: column of quantities, to find returns by.
        text: column of item texts, as the recommender was trained with.
        min_item_count: new items with fewer purchases are left out.
        output: the folder for semantic IDs and catalogue; by default the recommender's own.
        patch: file for the body of `PATCH /v1/catalogue`, by which a server that runs takes the new items; one that is
            there stays if nothing is new.
        delimiter: of CSV; by default a comma, and a tab for .tsv files.

    Returns:
        The new items, and what was found and left out.

    Raises:
        ValueError: the table cannot be read, the recommender has no texts, or no code is left for an item.

    Example:
        >>> made = extend("recommender", "today.csv", time="day")  # doctest: +SKIP
        >>> print(made)  # doctest: +SKIP
    """
    import numpy as np

    from hf_gr.catalogue import ConstraintIndex, SemanticIds
    from hf_gr.catalogue.new_items import neighbours_of
    from hf_gr.catalogue.sequences import is_integer, shown
    from hf_gr.files.atomic import replaced_file
    from hf_gr.tables.items import read_similar
    from hf_gr.tables.purchases import clean, read_purchases

    folder = Path(recommender if output is None else output)
    if output is None and not folder.is_dir():
        raise ValueError(f"recommender={str(recommender)!r} is no folder here, expected output=, the folder to write")
    if output is not None and folder.is_dir() and not (Path(recommender).exists() and folder.samefile(recommender)):
        if any(folder.glob("semantic_ids.*")):
            raise ValueError(
                f"output={str(output)!r} has semantic IDs of its own, expected a new folder: to extend those, pass it "
                "as recommender="
            )
    if patch is not None and not Path(patch).absolute().parent.is_dir():
        raise ValueError(f"patch={str(patch)!r}, expected an existing folder: {Path(patch).parent} is none")
    ids, index = SemanticIds.from_pretrained(recommender), ConstraintIndex.from_pretrained(recommender)
    if text and ids.encoder is None:
        raise ValueError(f"text={text!r}, expected none: the recommender was trained without texts")
    columns = {"user": user, "item": item, "time": time, "quantity": quantity, "text": text}
    table, roles = read_purchases(purchases, columns, delimiter=delimiter)
    options = dict.fromkeys(("drop_missing", "drop_returns", "drop_duplicates", "shuffle_ties"), True)
    least, are_strings = {"min_item_count": 1, "min_user_count": 1}, isinstance(ids.item_ids[0], str)
    by_user, texts, told = clean(table, roles, options | least, are_strings=are_strings)
    histories, known = list(by_user.values()), set(ids.item_ids)
    counts = Counter(name for history in histories for name in history if name not in known)
    if not are_strings and (odd := [name for name in counts if not is_integer(name)]):
        raise ValueError(f"item={item!r} has {shown(odd)}, expected integers, as the known items are: drop such rows")
    near = neighbours_of(counts, histories, known)
    rare = sorted(name for name, count in counts.items() if count < min_item_count)
    alone = sorted(name for name in counts.keys() - {*rare} if not near[name] and name not in texts)
    new = sorted(counts.keys() - {*rare, *alone})
    features, has_text = None, [row for row, name in enumerate(new) if name in texts]
    if has_text:
        features = np.full((len(new), ids.centroids[0].shape[1]), np.nan)
        features[has_text] = text_features(ids.encoder, [texts[new[row]] for row in has_text])
    ids = ids.extend(new, features, histories=histories)
    sequences = {name: ids.encode([name]) for name in new}
    index.add(list(sequences.values()), new)
    by_texts = f"{len(has_text)} by texts, {len(new) - len(has_text)} by what they are bought with"
    lines = [f"{counted(len(new), 'new item')}: {by_texts}"]
    for left, why in ((rare, f"with fewer than {min_item_count} purchases"), (alone, "bought with no known item")):
        lines += [f"{counted(len(left), 'new item')} {why}: left out ({shown(left)})"] if left else []
    lines.append(agreement(ids, histories))
    body: dict[str, Any] = {"add": [{"item_id": name, "sequence": row} for name, row in sequences.items()]}
    body["code_book"] = ids.code_book()
    if patch is not None and (new or not Path(patch).exists()):  # an earlier one may not have been sent yet
        with replaced_file(Path(patch)) as file:
            file.write(json.dumps(body).encode())
    index.save_pretrained(folder)
    ids.save_pretrained(folder)
    if (written := Path(recommender, FALLBACK_FILE)).is_file():
        save_fallback(folder, histories, index, read_similar("fallback", written))
    return Extended(tuple(new), (*told, *lines), body)


def save_fallback(
    folder: Path,
    histories: Sequence[Sequence[ItemId]],
    index: ConstraintIndex,
    earlier: Mapping[ItemId | None, Any] | None = None,
) -> None:
    """Write the table for `fallback`, which has a row for every item that is bought with others; earlier rows stay."""
    from hf_gr.files.atomic import replaced_file
    from hf_gr.jobs.baselines import Baselines, Histories
    from hf_gr.tables.files import pa, pyarrow

    learned = Histories()
    learned.add(histories)
    rows = {**Baselines(learned, index).fallback(), **(earlier or {})}
    with replaced_file(folder / FALLBACK_FILE) as file:
        table = pa.table({"item_id": list(rows), "similar_items": list(rows.values())})
        pyarrow.parquet.write_table(table, file)


def text_features(encoder: str | None, texts: Sequence[str]) -> Any:
    """`[N, D]` embeddings of texts by a model of sentence-transformers."""
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

    return SentenceTransformer(encoder).encode(list(texts))


def agreement(ids: SemanticIds, histories: Sequence[Sequence[ItemId]]) -> str:
    """How well codes still say what is bought together; it falls as taste drifts from what they were made from."""
    from hf_gr.catalogue.new_items import by_votes, neighbours_of

    known = set(ids.item_ids)
    near = neighbours_of({name for history in histories for name in history} & known, histories, known)
    codes = {name: ids.codes_of(name) for name in known}
    votes = {
        name: next(iter(by_votes([(codes[other], weight) for other, weight in others.items()])(())))
        for name, others in near.items()
        if others
    }
    share = sum(codes[name][0] == code for name, code in votes.items()) / max(len(votes), 1)
    return f"the first codes of {share:.0%} of {counted(len(votes), 'item')} are those of what they are bought with"
