# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The two data sets of the papers' experiments, each with its catalogue and the same split. Knows no model.

Leave-one-out, as TIGER and LC-Rec do: a user's last item is the test row, the one before it the validation row, and
the rest trains. A tenth of the users trains nothing here: AtSpeed's teacher prompts come from them, so that the
target model does not know them by heart.

Semantic IDs: those that come with Beauty were made from texts alone ("beauty-texts"). A small model learns which of
them follow which far more slowly than IDs that also know which items were bought near each other, so ours begin from
both: an item's neighbours in training histories, and the first two codes of its text. Films have IDs of that kind.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from beauty_data import DEFAULT_DATA, read_items, read_users

from hf_gr import ConstraintIndex, SemanticIds
from hf_gr.demo.data import film_features, keep_most_rated, load_movielens
from hf_gr.files.cache import cache_folder
from hf_gr.training import semantic_ids_from_features
from hf_gr.training.item_codes import neighbour_factors, unit_variance

STUDIES = ("beauty", "movielens")
TEXTS = "beauty-texts"  # the first with the codes that come with it
HELD_OUT = 10  # one user in so many trains nothing
FAST_USERS, FAST_FILMS = 400, 500
CODES = {"beauty": 256, "movielens": 128}  # of each of three levels
FAST_CODES = 16
TEXT_WEIGHT = 0.5  # of an item's text, beside its neighbours in histories
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
        name: as in `read_study`.
        ids: the items' semantic IDs, in the order of their numbers.
        train: histories to train on, without each user's last two items.
        align: the same of users of whom the backbone knows nothing.
        valid: a row for every user with three items or more: the last but one.
        test: a row for every user: the last item.
        held: the users of `align`.
    """

    name: str
    ids: SemanticIds
    train: list[np.ndarray]
    align: list[np.ndarray]
    valid: list[Row]
    test: list[Row]
    held: frozenset[int] = frozenset()

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
        name: "beauty" or "movielens"; "beauty-texts" is Beauty with the codes that come with it.
        fast: few users, and of the films the most rated: to show an experiment, not to measure.
        data: the folder of the Beauty data.
    """
    if name in ("beauty", TEXTS):
        return _beauty(name, data, fast)
    if name == "movielens":
        return _movielens(fast)
    raise ValueError(f"name={name!r}, expected one of {', '.join((*STUDIES, TEXTS))}")


def has_study(name: str, data: Path = DEFAULT_DATA) -> bool:
    """Whether its data are there: MovieLens comes with a package, Beauty does not."""
    return not name.startswith("beauty") or (data / "users.jsonl").is_file()


def _beauty(name: str, data: Path, fast: bool) -> Study:
    """All periods of a user in a row."""
    numbers, codes = read_items(data)
    if numbers != list(range(len(codes))):
        raise SystemExit(f"the items of {data / 'items.tsv'} are not numbered 0, 1, 2, ...: number them as their rows")
    users = read_users(data)[: FAST_USERS if fast else None]
    ids = SemanticIds(codes, level_sizes=[256] * codes.shape[1])
    histories = [np.array(user["train"] + user["valid"] + user["test"]) for user in users]
    study = _split(name, ids, histories)
    if name == TEXTS:
        return study
    return replace(study, ids=_ids(name, _neighbours_and_texts(study.train, codes), fast))


def _ids(name: str, features: np.ndarray, fast: bool) -> SemanticIds:
    """Semantic IDs, made once: k-means adds in another order with other threads, and a code more or less would be
    another catalogue than that of the trained models. Features differ by less than is kept of them here.
    """
    num_codes = FAST_CODES if fast else CODES[name.partition("-")[0]]
    made_from = [num_codes, SEED, features.shape, (features.round(3) + 0.0).tobytes()]  # -0.0 is 0.0
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()[:8]
    file = cache_folder("experiments") / "codes" / f"{name}-{key}.npy"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part.npy")
        np.save(part, semantic_ids_from_features(features, num_codes=num_codes, seed=SEED).codes)
        part.rename(file)
    return SemanticIds(np.load(file))


def _neighbours_and_texts(train: Sequence[np.ndarray], codes: np.ndarray) -> np.ndarray:
    """`[N, D]` features of items: their neighbours in histories to train on, and the codes of their texts.

    Neighbours are directions: an item that was bought twice counts as one bought often.
    """
    from sklearn.decomposition import TruncatedSVD

    factors = neighbour_factors(train, len(codes), num_factors=48, window=5, seed=SEED)
    factors /= np.maximum(np.linalg.norm(factors, axis=1, keepdims=True), 1e-9)
    texts = np.zeros((len(codes), 2 * (codes.max() + 1)))
    for level, weight in enumerate((1.0, 0.7)):
        texts[np.arange(len(codes)), level * (codes.max() + 1) + codes[:, level]] = weight
    texts = TruncatedSVD(32, random_state=SEED).fit_transform(texts)
    return np.concatenate([unit_variance(factors), TEXT_WEIGHT * unit_variance(texts)], axis=1)


def _movielens(fast: bool) -> Study:
    """IDs are residual k-means of films' genres, years, titles and neighbours in training histories."""
    films = keep_most_rated(load_movielens(), FAST_FILMS) if fast else load_movielens()
    study = _split("movielens", SemanticIds(np.arange(len(films))[:, None]), films.histories)
    return replace(study, ids=_ids("movielens", film_features(films, study.train, seed=SEED), fast))


def _split(name: str, ids: SemanticIds, histories: Sequence[np.ndarray]) -> Study:
    known = [history[:-2] for history in histories]
    valid, test = (
        [
            Row(history[:-back], int(history[-back]), user)
            for user, history in enumerate(histories)
            if len(history) > back
        ]
        for back in (2, 1)
    )
    train, align, held = _hold_out(known)
    return Study(name, ids, train, align, valid, test, held)


def _hold_out(known: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray], frozenset[int]]:
    """Histories to train on, those of a tenth of the users, and who these are."""
    held = frozenset(np.random.default_rng(SEED).permutation(len(known))[: len(known) // HELD_OUT].tolist())
    train = [history for user, history in enumerate(known) if len(history) and user not in held]
    return train, [history for user, history in enumerate(known) if len(history) and user in held], held
