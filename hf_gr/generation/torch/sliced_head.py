# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits of a catalogue's tokens alone, for calls that look at no others: most rows of an output head have no item.

Axes: B batch, N nodes, V vocabulary, U tokens of the catalogue.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_gr.catalogue.fanout import Longs
from hf_gr.torch.ops import to_device

from .models import TREE_FAMILIES, is_patched

# Models whose logits are their last hidden states by the head, and no more: tests/test_sliced_head.py compares each.
PLAIN_HEADS = TREE_FAMILIES - {"bart", "cohere2", "gemma2", "gemma3_text", "t5"}
MOST = 0.25  # of the vocabulary: copying rows costs about as much as a forward's use of them


class SlicedHead:
    """A model's forward with some rows of its head, as they are now; for one call."""

    def __init__(self, model: Any, tokens: Int[Tensor, " tokens"]) -> None:
        head = model.get_output_embeddings()
        self.tokens, self.forward = tokens, model.base_model
        self.weight, self.bias = head.weight[tokens], None if head.bias is None else head.bias[tokens]
        self.places = torch.zeros(len(head.weight), dtype=torch.long, device=tokens.device)
        self.places[tokens] = torch.arange(len(tokens), device=tokens.device)

    def __call__(self, *, logits_to_keep: int = 0, **arguments: Any) -> CausalLMOutputWithPast:
        """What the model returns, with logits `[B, N, U]` of some last tokens, 0 for all."""
        outputs = self.forward(**arguments)
        logits = F.linear(outputs.last_hidden_state[:, -logits_to_keep:], self.weight, self.bias)
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)

    def columns(self, tokens: Int[Tensor, "*shape"], *, level: int) -> Int[Tensor, "*shape"]:
        """Where tokens of any level are among these logits; anywhere for others. See `Scorer.columns`."""
        return self.places[tokens]

    def of(self, logits: Float[Tensor, "batch nodes vocab"]) -> Float[Tensor, "batch nodes tokens"]:
        """The same part of logits of the whole head."""
        return logits[..., self.tokens]


def sliced_head(model: Any, codebooks: Sequence[Longs], *, synced_gpus: bool = False) -> SlicedHead | None:
    """The head for the tokens of some levels; None where that saves little, or the head may be more than its rows."""
    head = model.get_output_embeddings() if model.config.model_type in PLAIN_HEADS else None
    is_plain = (
        type(head) is nn.Linear
        and type(head.weight) is nn.Parameter  # neither quantised nor distributed
        and head.weight.shape == (head.out_features, head.in_features)  # nor partitioned
        and not head.weight.is_meta
        and type(model).forward.__module__.startswith("transformers.models.")
        and not is_patched(model)
        and "forward" not in vars(head)
        and not any(hooks for one in (model, head) for hooks in (one._forward_hooks, one._forward_pre_hooks))
        and not any(hasattr(one, "_hf_hook") for one in (model, head))  # Accelerate's, which move weights
        and not synced_gpus
    )
    if head is None or not is_plain:
        return None
    tokens = np.unique(np.concatenate(codebooks))
    return SlicedHead(model, to_device(tokens, head.weight.device)) if len(tokens) <= MOST * len(head.weight) else None
