# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A search by two models: beams are chosen by a mixture of their probabilities. Knows no catalogue and no data.

Source: AtSpeed, section 3.1: D' is TopK((1 - lambda) q + lambda p), after MiniLLM's teacher-mixed sampling.
Axes: B batch, K beams, P prompt, T tokens after it, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor

from hf_gr.generation.torch.models import base_model, takes_argument
from hf_gr.generation.torch.prompts import positions_of


class Mixture(LogitsProcessor):
    """Replaces a target's log-probabilities by those of `share * p + (1 - share) * q`; for one call of beam search.

    Args:
        draft: q, a decoder of the same tokens.
        attention_mask: 1 at the prompts' tokens.
        num_beams: K.
        share: of the target, the paper's lambda.
    """

    def __init__(self, draft: Any, attention_mask: Int[Tensor, "batch prompt"], num_beams: int, share: float) -> None:
        self.draft = draft
        self.mask = attention_mask.repeat_interleave(num_beams, dim=0)
        self.share = share

    @torch.no_grad()
    def __call__(
        self, input_ids: Int[Tensor, "paths tokens"], scores: Float[Tensor, "paths vocab"]
    ) -> Float[Tensor, "paths vocab"]:
        """The mixture's; `-inf` stays."""
        mask = torch.nn.functional.pad(self.mask, (0, input_ids.shape[1] - self.mask.shape[1]), value=1)
        given: dict[str, Any] = {"use_cache": False, "return_dict": True}
        inner = base_model(self.draft)
        if takes_argument(inner, "position_ids"):
            given["position_ids"] = positions_of(mask)
        if takes_argument(inner, "logits_to_keep"):
            given["logits_to_keep"] = 1
        logits = self.draft(input_ids=input_ids.clamp(min=0), attention_mask=mask, **given).logits[:, -1]
        q = logits.float().softmax(-1)[:, : scores.shape[1]]  # its vocabulary may be padded to more
        mixed = (self.share * scores.exp() + (1 - self.share) * q).log()
        return mixed.masked_fill(scores == -torch.inf, -torch.inf)
