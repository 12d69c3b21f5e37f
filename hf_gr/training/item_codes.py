# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Semantic IDs for items that have none: features, then residual k-means. Knows no model; needs scikit-learn.

Source: residual quantisation as in TIGER (Rajput et al., 2023, section 3.1), with k-means for the quantiser.
Axes: N items, D features, L codes (the residual levels and the last code, which tells apart items that collide).
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from hf_gr.catalogue import SemanticIds
from hf_gr.catalogue.item_ids import ItemId, history_lists
from hf_gr.catalogue.new_items import WINDOW

ROOM = 8  # last codes that no item has yet, more than the fullest prefix needs: `SemanticIds.extend` gives them away


def semantic_ids_from_features(
    features: Any,
    item_ids: Sequence[ItemId] | None = None,
    *,
    num_levels: int = 3,
    num_codes: int = 256,
    offset: int = 0,
    seed: int = 0,
) -> SemanticIds:
    """Semantic IDs from features of items, such as embeddings of their texts.

    Args:
        features: `[N, D]` numbers; near rows get IDs that begin alike.
        item_ids: N ids; by default the row numbers.
        num_levels: levels of residual k-means; one more code tells apart items that collide.
        num_codes: codes per level.
        offset: the token of the first code.
        seed: of k-means.

    Returns:
        The IDs, distinct for every item.

    Raises:
        ValueError: the features are no table of finite numbers, or a number is not positive.
        ImportError: scikit-learn is missing: `pip install "hf-gr[demo]"`.

    Example:
        >>> ids = semantic_ids_from_features([[0.0], [0.1], [5.0]], ["tea", "mate", "jam"], num_levels=1, num_codes=2)
        >>> ids.codes_of("tea")[0] == ids.codes_of("mate")[0] != ids.codes_of("jam")[0]
        True

    Source: TIGER, section 3.1, with k-means instead of an RQ-VAE.
    """
    array = np.asarray(features, dtype=np.float64)
    if array.ndim != 2 or not array.size or not np.isfinite(array).all():
        raise ValueError(
            f"features has shape {list(array.shape)}, expected [N, D] finite numbers, a row for each item"
        )
    for name, value in {"num_levels": num_levels, "num_codes": num_codes}.items():
        if value < 1:
            raise ValueError(f"{name}={value}, expected 1 or more")
    _need_sklearn()
    codes, centroids = residual_kmeans(array, num_levels=num_levels, num_codes=num_codes, seed=seed)
    sizes: list[int] = (codes.max(axis=0) + 1).tolist()
    ids = SemanticIds(codes, item_ids=item_ids, level_sizes=[*sizes[:-1], sizes[-1] + ROOM], offset=offset)
    ids.centroids = [table.astype(np.float32) for table in centroids]
    return ids


def semantic_ids_from_histories(
    histories: Iterable[Iterable[ItemId]],
    *,
    item_ids: Sequence[ItemId] | None = None,
    features: Any = None,
    num_levels: int = 3,
    num_codes: int = 256,
    offset: int = 0,
    seed: int = 0,
) -> SemanticIds:
    """Semantic IDs from the order in which users had items, and from features if there are any.

    Args:
        histories: a list of items per user, oldest first, without held-out items; or a dictionary of them.
        item_ids: N ids, those of the histories and perhaps others; by default those of the histories, in ascending
            order.
        features: `[N, D]` numbers, such as embeddings of texts: they count half as much as the histories.
        num_levels: levels of residual k-means; one more code tells apart items that collide.
        num_codes: codes per level.
        offset: the token of the first code.
        seed: of the factors and of k-means.

    Returns:
        The IDs of all items.

    Raises:
        ValueError: there are fewer than three items, none follows another, one is not among `item_ids`, or there are
            more or fewer features.
        ImportError: scikit-learn is missing: `pip install "hf-gr[demo]"`.

    Example:
        >>> ids = semantic_ids_from_histories([["tea", "jam"], ["tea", "jam", "ham"]], num_levels=2, num_codes=2)
        >>> ids.item_ids, ids.num_levels
        (['ham', 'jam', 'tea'], 3)
    """
    rows = history_lists(histories)
    names = sorted({item for row in rows for item in row}) if item_ids is None else list(item_ids)
    if len(names) < 3 or not any(len(row) > 1 for row in rows):
        raise ValueError(
            f"histories has {len(names)} items, expected 3 or more, some after others: IDs come from which items "
            "follow each other"
        )
    if features is not None and np.shape(features)[:1] != (len(names),):
        raise ValueError(
            f"features has shape {list(np.shape(features))}, expected a row for each of {len(names)} items"
        )
    _need_sklearn()
    row_of = {item: row for row, item in enumerate(names)}
    if unknown := [item for row in rows for item in row if item not in row_of]:
        raise ValueError(f"histories has item {unknown[0]!r}, expected one of item_ids: add it there")
    known = [np.array([row_of[item] for item in row], dtype=np.int64) for row in rows]
    blocks = neighbour_factors(known, len(names), num_factors=32, window=WINDOW, seed=seed)
    own = np.zeros((len(names), 0)) if features is None else np.asarray(features, dtype=np.float64)
    if features is not None:
        blocks = np.concatenate([2 * unit_variance(blocks), unit_variance(own)], axis=1)
    ids = semantic_ids_from_features(
        blocks, names, num_levels=num_levels, num_codes=num_codes, offset=offset, seed=seed
    )
    # Of the features alone, as they were given: a new item has no factors.
    tables = [table[:, table.shape[1] - own.shape[1] :] * scale_of(own) for table in ids.centroids]
    ids.centroids = [table.astype(np.float32) for table in [tables[0] + own.mean(axis=0), *tables[1:]] if own.size]
    return ids


def unit_variance(block: np.ndarray) -> np.ndarray:
    """Features, centred, with a total variance of one, so that no block dominates by having more columns."""
    return (block - block.mean(axis=0)) / scale_of(block)


def scale_of(block: np.ndarray) -> float:
    """The root of the total variance."""
    return max(float(np.sqrt(block.var(axis=0).sum())), 1e-12)


def neighbour_factors(
    histories: Sequence[np.ndarray], num_items: int, *, num_factors: int, window: int, seed: int
) -> np.ndarray:
    """`[N, num_factors]` factors of how much more often than chance two items are neighbours in a history.

    The matrix is the positive pointwise mutual information of pairs at most `window` apart; an item without
    neighbours has a row of zeros.
    """
    from scipy.sparse import coo_matrix
    from sklearn.decomposition import TruncatedSVD

    pairs = [
        np.stack([history[:-gap], history[gap:]])
        for history in histories
        for gap in range(1, window + 1)
        if len(history) > gap
    ]
    first, second = np.concatenate(pairs, axis=1)
    counts = coo_matrix((np.ones(len(first)), (first, second)), shape=(num_items, num_items)).tocsr()
    counts = (counts + counts.T).tocoo()
    totals = np.asarray(counts.sum(axis=0)).ravel() + 20  # smoothed: two rare items meet by chance
    information = np.log(counts.data * counts.data.sum() / (totals[counts.row] * totals[counts.col]))
    matrix = coo_matrix((np.maximum(information, 0), (counts.row, counts.col)), shape=counts.shape).tocsr()
    with np.errstate(invalid="ignore"):  # for a constant matrix scikit-learn divides 0 by 0, in an unused ratio
        return TruncatedSVD(min(num_factors, num_items - 1), random_state=seed).fit_transform(matrix)


def residual_kmeans(
    features: np.ndarray, *, num_levels: int, num_codes: int, seed: int = 0
) -> tuple[np.ndarray, list[np.ndarray]]:
    """`[N, num_levels + 1]` codes, unique by row, and the `[C, D]` centroids of each level.

    Each level is k-means of the residuals of the levels before; the last code counts the items that share all others.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    residual = np.array(features, dtype=np.float64)
    codes, centroids = np.zeros((len(residual), num_levels + 1), dtype=np.int64), list[np.ndarray]()
    for level in range(num_levels):
        num_clusters = min(num_codes, len(np.unique(residual, axis=0)))
        kmeans: Any = KMeans(num_clusters, max_iter=50, random_state=seed + level)
        with warnings.catch_warnings(category=ConvergenceWarning, action="ignore"):  # fewer distinct items than codes
            kmeans.fit(residual)
        codes[:, level] = kmeans.labels_
        residual -= kmeans.cluster_centers_[kmeans.labels_]
        centroids.append(kmeans.cluster_centers_)
    seen = Counter[tuple[int, ...]]()
    for code in codes:
        code[-1] = seen[key := tuple(code[:-1].tolist())]
        seen[key] += 1
    return codes, centroids


def _need_sklearn() -> None:
    if find_spec("sklearn") is None:
        raise ImportError('making semantic IDs needs scikit-learn: pip install "hf-gr[demo]"')
