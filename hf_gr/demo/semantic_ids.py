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

from hf_gr.training.item_codes import neighbour_factors, unit_variance

from .data import MovieLens


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
