# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The two data sets of the papers' experiments, each with its catalogue and the same split. Knows no model.

Leave-one-out, as TIGER and LC-Rec do: a user's last item is the test row, the one before it the validation row, and
the rest trains. A tenth of the users trains nothing here: AtSpeed's teacher prompts come from them, so that the
target model does not know them by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from beauty_data import DEFAULT_DATA, read_items, read_users

from hf_gr import ConstraintIndex, SemanticIds
from hf_gr.demo.data import keep_most_rated, load_movielens
from hf_gr.demo.semantic_ids import film_features
from hf_gr.training import semantic_ids_from_features

STUDIES = ("beauty", "movielens")
HELD_OUT = 10  # one user in so many trains nothing
FAST_USERS, FAST_FILMS = 400, 500
MOVIELENS_CODES = 128  # of each of three levels, as in the demo
SEED = 0  # of the split and of the films' codes: never a run's


@dataclass(frozen=True)
class Row:
    """A question with its answer.

    Attributes:
        history: what the user had before, oldest first.
        item: what came next.
        user: the user's number.
    """

    history: np.ndarray
    item: int
    user: int


@dataclass(frozen=True)
class Study:
    """A data set with its catalogue. Items and users are numbered from 0; histories are oldest first.

    Attributes:
        name: "beauty" or "movielens".
        ids: the items' semantic IDs, in the order of their numbers.
        train: histories to train on, without each user's last two items.
        align: the same of users of whom the backbone knows nothing.
        valid: a row for every user with three items or more: the last but one.
        test: a row for every user: the last item.
    """

    name: str
    ids: SemanticIds
    train: list[np.ndarray]
    align: list[np.ndarray]
    valid: list[Row]
    test: list[Row]

    @cached_property
    def tokens(self) -> np.ndarray:
        """`[N, L]` tokens of the items."""
        return self.ids.token_sequences()

    @cached_property
    def index(self) -> ConstraintIndex:
        """The catalogue."""
        return self.ids.constraint_index()


def read_study(name: str, fast: bool = False, data: Path = DEFAULT_DATA) -> Study:
    """Read a data set and split it.

    Args:
        name: "beauty" or "movielens".
        fast: few users, and of the films the most rated: to show an experiment, not to measure.
        data: the folder of the Beauty data.
    """
    if name == "beauty":
        return _beauty(data, fast)
    if name == "movielens":
        return _movielens(fast)
    raise ValueError(f"name={name!r}, expected one of {', '.join(STUDIES)}")


def has_study(name: str, data: Path = DEFAULT_DATA) -> bool:
    """Whether its data are there: MovieLens comes with a package, Beauty does not."""
    return name != "beauty" or (data / "users.jsonl").is_file()


def _beauty(data: Path, fast: bool) -> Study:
    """All periods of a user in a row. IDs are those of the data, made from the items' texts."""
    numbers, codes = read_items(data)
    if numbers != list(range(len(codes))):
        raise SystemExit(f"the items of {data / 'items.tsv'} are not numbered 0, 1, 2, ...: number them as their rows")
    users = read_users(data)[: FAST_USERS if fast else None]
    histories = [np.array(user["train"] + user["valid"] + user["test"]) for user in users]
    return _split("beauty", SemanticIds(codes, level_sizes=[256] * codes.shape[1]), histories)


def _movielens(fast: bool) -> Study:
    """IDs are residual k-means of films' genres, years, titles and neighbours in training histories."""
    films = keep_most_rated(load_movielens(), FAST_FILMS) if fast else load_movielens()
    known = [history[:-2] for history in films.histories]
    features = film_features(films, known, seed=SEED)
    ids = semantic_ids_from_features(features, num_codes=16 if fast else MOVIELENS_CODES, seed=SEED)
    return _split("movielens", ids, films.histories)


def _split(name: str, ids: SemanticIds, histories: Sequence[np.ndarray]) -> Study:
    held_out = np.zeros(len(histories), dtype=bool)
    held_out[np.random.default_rng(SEED).permutation(len(histories))[: len(histories) // HELD_OUT]] = True
    known = [history[:-2] for history in histories]
    return Study(
        name=name,
        ids=ids,
        train=[history for history, held in zip(known, held_out, strict=True) if len(history) and not held],
        align=[history for history, held in zip(known, held_out, strict=True) if len(history) and held],
        valid=_rows(histories, 2),
        test=_rows(histories, 1),
    )


def _rows(histories: Sequence[np.ndarray], back: int) -> list[Row]:
    return [
        Row(history[:-back], int(history[-back]), user)
        for user, history in enumerate(histories)
        if len(history) > back
    ]
