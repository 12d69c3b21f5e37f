# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Semantic ids for the demo's films: item features, then residual k-means. Knows no model.

Source: residual quantisation as in TIGER (Rajput et al., 2023, section 3.1), with k-means for the quantiser.
Axes: N films, D features, L codes (the residual levels and the last code, which tells apart films that collide).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .data import MovieLens


def film_features(
    films: MovieLens, train: Sequence[np.ndarray], *, num_factors: int = 32, window: int = 5, seed: int = 0
) -> np.ndarray:
    """`[N, D]` features of the films: their content, and which films users watched next to them.

    Content is the genres, the decade and the words of the title; behaviour is `neighbour_factors`. Each block is
    scaled to the same total variance times its weight, so that none dominates by having more columns.

    Args:
        films: The films.
        train: Histories *without* the held-out films: codes must not leak the targets.
        num_factors: Columns of the behaviour block.
        window: Films at most this far apart in a history count as neighbours.
        seed: Seed of the singular value decompositions.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import MultiLabelBinarizer

    genres: Any = MultiLabelBinarizer().fit_transform(films.genres).astype(float)
    years = np.nan_to_num(films.years, nan=np.nanmedian(films.years))
    vectorizer = TfidfVectorizer(stop_words="english", min_df=2, token_pattern=r"[A-Za-z]{3,}")
    words: Any = vectorizer.fit_transform(films.titles)
    words = TruncatedSVD(min(16, words.shape[1] - 1), random_state=seed).fit_transform(words)
    behaviour = neighbour_factors(train, len(films), num_factors=num_factors, window=window, seed=seed)
    blocks = ((genres, 0.5), (years[:, None] / 10, 0.5), (words, 0.1), (behaviour, 2.0))
    return np.concatenate([weight * _unit_variance(block) for block, weight in blocks], axis=1)


def neighbour_factors(
    train: Sequence[np.ndarray], num_films: int, *, num_factors: int, window: int, seed: int
) -> np.ndarray:
    """`[N, num_factors]` factors of how much more often than chance two films are neighbours in a history.

    The matrix is the positive pointwise mutual information of pairs at most `window` apart; a film nobody watched has
    a row of zeros and is described by its content alone.
    """
    from scipy.sparse import coo_matrix
    from sklearn.decomposition import TruncatedSVD

    pairs = [
        np.stack([history[:-gap], history[gap:]])
        for history in train
        for gap in range(1, window + 1)
        if len(history) > gap
    ]
    first, second = np.concatenate(pairs, axis=1)
    counts = coo_matrix((np.ones(len(first)), (first, second)), shape=(num_films, num_films)).tocsr()
    counts = (counts + counts.T).tocoo()
    totals = np.asarray(counts.sum(axis=0)).ravel() + 20  # smoothed: two rare films meet by chance
    information = np.log(counts.data * counts.data.sum() / (totals[counts.row] * totals[counts.col]))
    matrix = coo_matrix((np.maximum(information, 0), (counts.row, counts.col)), shape=counts.shape).tocsr()
    return TruncatedSVD(min(num_factors, num_films - 1), random_state=seed).fit_transform(matrix)


def residual_kmeans(features: np.ndarray, *, num_levels: int, num_codes: int, seed: int = 0) -> np.ndarray:
    """`[N, num_levels + 1]` codes, unique by row.

    Each level is k-means of the residuals of the levels before; the last code counts the films that share all others.
    """
    from sklearn.cluster import KMeans

    residual = np.array(features, dtype=np.float64)
    codes = np.zeros((len(residual), num_levels + 1), dtype=np.int64)
    for level in range(num_levels):
        kmeans: Any = KMeans(min(num_codes, len(residual)), max_iter=50, random_state=seed + level)
        kmeans.fit(residual)
        codes[:, level] = kmeans.labels_
        residual -= kmeans.cluster_centers_[kmeans.labels_]
    codes[:, -1] = _occurrence_number(codes[:, :-1])
    return codes


def _occurrence_number(rows: np.ndarray) -> np.ndarray:
    """`[N]` how many earlier rows equal this one: 0 for the first of its kind."""
    _, group = np.unique(rows, axis=0, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    _, starts, sizes = np.unique(group.ravel()[order], return_index=True, return_counts=True)
    numbers = np.empty(len(rows), dtype=np.int64)
    numbers[order] = np.arange(len(rows)) - np.repeat(starts, sizes)
    return numbers


def _unit_variance(block: np.ndarray) -> np.ndarray:
    """The block, centred, with a total variance of one."""
    block = block - block.mean(axis=0)
    return block / max(float(np.sqrt(block.var(axis=0).sum())), 1e-12)
