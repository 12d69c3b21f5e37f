# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a batch costs, and how large it should be. Knows neither requests nor models.

A batch takes `fixed + token * tokens` seconds, where padding and beams are tokens, too (`num_batch_tokens` of
`hf_gr.answering.batching`). On two CPU cores that has a median error of 3%. Both are fitted while a server warms up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A batch is full when its tokens take so many times its fixed cost. With 25.7 M parameters, 2 workers, that is 0.6 s;
# 5.5 times, 1.4 s, answered 6% more requests when there was no end of them.
FULL = 2.5
FEWEST_TOKENS, MOST_TOKENS = 128, 65_536
LEAST_SECONDS = 1e-9  # of a token, where times say nothing


@dataclass(frozen=True)
class Costs:
    """Seconds of a batch, and of each of its tokens."""

    fixed: float
    token: float

    @classmethod
    def fit(cls, tokens: Sequence[int], seconds: Sequence[float]) -> Costs:
        """The costs that explain measured batches best, as shares of their times; neither is negative.

        Example:
            >>> Costs.fit([100, 200, 400], [0.3, 0.5, 0.9])
            Costs(fixed=0.1, token=0.002)
        """
        took = np.maximum(np.asarray(seconds, dtype=np.float64), LEAST_SECONDS)
        terms = np.stack([np.ones_like(took), np.asarray(tokens, dtype=np.float64)], axis=1)
        fixed, token = np.linalg.lstsq(terms / took[:, None], np.ones_like(took), rcond=None)[0].tolist()
        if token <= 0.0:
            return cls(float(np.median(took)), LEAST_SECONDS)
        if fixed < 0.0:
            return cls(0.0, float(np.median(took / terms[:, 1])))
        return cls(round(fixed, 12), round(token, 12))

    def seconds(self, tokens: float) -> float:
        """What a batch of so many tokens takes."""
        return self.fixed + self.token * tokens

    @property
    def token_budget(self) -> int:
        """The tokens of a full batch."""
        return int(np.clip(FULL * self.fixed / self.token, FEWEST_TOKENS, MOST_TOKENS))
