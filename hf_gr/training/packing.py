# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Many sequences after one prompt in one forward, with gradients. Knows no catalogue and no loss.

The sequences of a prompt follow it, concatenated, as branches of a tree: every token has the position of its true
depth and sees the prompt, its own sequence's earlier tokens and itself. The prompt is computed once for all sequences.
Source: AtSpeed, section 3.3 (tree-based attention), which the paper uses at inference only.

Models that cannot take such a mask get one row per sequence, with the prompt repeated.

Axes: B batch, P prompt, S sequences, L positions of a sequence, N nodes: S * (L - 1), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hf_gr.generation.prompts import Side, pad
from hf_gr.generation.torch.layouts import takes_tree
from hf_gr.generation.torch.models import base_model, layer_types, mask_dtype, takes_argument
from hf_gr.generation.torch.prompts import positions_of
from hf_gr.torch.tree import prompt_attention, to_additive


@dataclass(frozen=True)
class PathScores:
    """A model's scores after every prefix of some sequences, logits or log-probabilities; none after their ends."""

    first: Float[Tensor, "batch 1 vocab"]  # after the prompt
    rest: Float[Tensor, "batch sequences nodes vocab"]  # after the first, second, ... token of every sequence

    def levels(self) -> list[Float[Tensor, "batch prefixes vocab"]]:
        """The scores of the tokens at each level; their gradients take one pass over the scores together."""
        return [self.first, *self.rest.unbind(2)]

    def log_softmax(self) -> PathScores:
        """Log-probabilities over the whole vocabulary, in single precision."""
        return PathScores(self.first.float().log_softmax(-1), self.rest.float().log_softmax(-1))

    def of_tokens(self, paths: Int[Tensor, "batch sequences length"]) -> Float[Tensor, "batch sequences length"]:
        """The scores of the sequences' own tokens; 0 where there is no token (-1)."""
        tokens = paths.clamp(min=0)
        first = self.first.expand(-1, paths.shape[1], -1).gather(-1, tokens[..., :1])
        rest = self.rest.gather(-1, tokens[..., 1:, None])[..., 0]
        return torch.cat([first, rest], dim=-1).masked_fill(paths < 0, 0.0)


def pad_token(model: Any) -> int:
    """The token that fills short prompts; the attention mask hides it, so any will do."""
    pad_token_id = getattr(base_model(model).config, "pad_token_id", None)
    return 0 if pad_token_id is None else pad_token_id


def pad_prompts(prompts: Sequence[Any], *, pad_token_id: int, side: Side = "left") -> tuple[Tensor, Tensor]:
    """Prompts of any length as `[B, P]` tokens with padding, and their attention mask."""
    input_ids, mask = pad(prompts, pad_token_id, side=side)
    return torch.from_numpy(input_ids), torch.from_numpy(mask)


def score_paths(
    model: Any,
    input_ids: Int[Tensor, "batch prompt"],
    attention_mask: Int[Tensor, "batch prompt"],
    paths: Int[Tensor, "batch sequences length"],
) -> PathScores:
    """The logits after every prefix of some sequences that follow a prompt, in one forward.

    Args:
        model: a decoder of transformers, or one wrapped for training.
        input_ids: prompts, padded on the left.
        attention_mask: 1 at their tokens, 0 at padding; no prompt is empty.
        paths: the sequences' tokens, -1 where there are none; scores there mean nothing.

    Returns:
        Logits that equal those of plain forwards of the prompt and each sequence, and carry their gradients.

    Example:
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> model = Qwen3ForCausalLM(Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8))
        >>> prompt = torch.tensor([[1, 2]])
        >>> scores = score_paths(model, prompt, torch.ones_like(prompt), torch.tensor([[[3, 4, 5], [3, 6, 7]]]))
        >>> list(scores.first.shape), list(scores.rest.shape)
        ([1, 1, 16], [1, 2, 2, 16])

    Source: AtSpeed, section 3.3 and figure 2c.
    """
    num_paths, length = paths.shape[1:]
    inner, longest = base_model(model), input_ids.shape[1] + length - 1
    config = inner.config.get_text_config(decoder=True)
    is_windowed = "sliding_attention" in layer_types(config) and longest > config.sliding_window
    is_packed = not is_windowed and takes_tree(inner)
    nodes = paths[..., :-1].clamp(min=0)
    depth = torch.arange(1, length, device=paths.device)
    if is_packed:
        mask = packed_mask(attention_mask.bool(), num_paths, length - 1)
        dtype = mask_dtype(inner)
        mask = mask if dtype is None else to_additive(mask, dtype)
        depth = depth.repeat(num_paths)
    else:
        input_ids, attention_mask = (x.repeat_interleave(num_paths, dim=0) for x in (input_ids, attention_mask))
        mask = torch.nn.functional.pad(attention_mask, (0, length - 1), value=1)
        nodes = nodes.flatten(0, 1)
    positions = positions_of(attention_mask)
    num_logits = 1 + len(depth)
    given: dict[str, Any] = {"use_cache": False, "return_dict": True}
    if takes_argument(inner, "position_ids"):
        given["position_ids"] = torch.cat([positions, positions[:, -1:] + depth], dim=1)
    if takes_argument(inner, "logits_to_keep"):  # the rest is most of the work of a large vocabulary
        given["logits_to_keep"] = num_logits
    tokens = torch.cat([input_ids, nodes.flatten(1)], dim=1)
    logits = model(input_ids=tokens, attention_mask=mask, **given).logits[:, -num_logits:]
    if is_packed:
        return PathScores(logits[:, :1], logits[:, 1:].unflatten(1, (num_paths, length - 1)))
    logits = logits.unflatten(0, (-1, num_paths))
    return PathScores(logits[:, 0, :1], logits[:, :, 1:])


def packed_mask(
    prompt_mask: Bool[Tensor, "batch prompt"], num_paths: int, num_nodes: int
) -> Bool[Tensor, "batch 1 tokens tokens"]:
    """Which token sees which: the prompt is causal; a node sees the prompt's tokens, its path so far and itself."""
    path = torch.ones((num_nodes, num_nodes), dtype=torch.bool, device=prompt_mask.device).tril()
    paths = torch.block_diag(*[path] * num_paths).bool()
    of_nodes = [one.expand(len(prompt_mask), len(paths), -1) for one in (prompt_mask[:, None], paths)]
    return torch.cat([prompt_attention(prompt_mask, len(paths)), torch.cat(of_nodes, dim=-1)[:, None]], dim=2)
