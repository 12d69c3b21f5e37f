# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of several lengths as tensors on a model's device. Knows no requests.

Axes: B batch, P prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_gr.generation.models import fill_token
from hf_gr.generation.prompts import pad, padding_side

from .loading import input_device


def padded(model: Any, batch: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` `[B, P]`: decoders need padding on the left, encoders on the right."""
    side = padding_side(is_encoder_decoder=model.config.is_encoder_decoder)
    fill = max(fill_token(model.generation_config), 0)
    input_ids, mask = map(torch.from_numpy, pad(batch, fill, side=side))
    device = input_device(model)
    return {"input_ids": input_ids.to(device), "attention_mask": mask.to(device)}
