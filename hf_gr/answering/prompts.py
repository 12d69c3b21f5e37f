# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of several lengths as arrays, as a model needs them padded. Knows no requests and no framework.

Axes: B batch, P prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_gr.generation.models import fill_token
from hf_gr.generation.prompts import pad, padding_side


def padded(model: Any, batch: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[np.int64]]:
    """`input_ids` and `attention_mask` `[B, P]`: decoders need padding on the left, encoders on the right."""
    side = padding_side(is_encoder_decoder=model.config.is_encoder_decoder)
    fill = max(fill_token(model.generation_config), 0)
    input_ids, mask = pad(batch, fill, side=side)
    return {"input_ids": input_ids, "attention_mask": mask}
