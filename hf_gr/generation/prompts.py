# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of several lengths as one array. Knows NumPy alone.

Axes: B prompts, P tokens of the longest.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Side = Literal["left", "right"]


def padding_side(*, is_encoder_decoder: bool) -> Side:
    """Where a model expects padding: a decoder's answer follows the last token; an encoder counts from the first."""
    return "right" if is_encoder_decoder else "left"


def pad(
    prompts: Sequence[Any], fill: int, *, side: Side = "left"
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`[B, P]` tokens and their attention mask, 1 at tokens and 0 at padding.

    Example:
        >>> tokens, mask = pad([[5, 6], [7]], 0)
        >>> tokens.tolist(), mask.tolist()
        ([[5, 6], [0, 7]], [[1, 1], [0, 1]])
    """
    width = max(len(prompt) for prompt in prompts)
    tokens = np.full((len(prompts), width), fill, dtype=np.int64)
    mask = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        here = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        tokens[row, here], mask[row, here] = prompt, 1
    return tokens, mask
