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

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import DataParallel
from torch.nn.utils.rnn import pad_sequence

from hf_gr.generation.prompts import pad
from hf_gr.generation.torch.layouts import takes_tree
from hf_gr.generation.torch.models import base_model, layer_types, mask_dtype, takes_argument
from hf_gr.generation.torch.prompts import positions_of
from hf_gr.torch.tree import to_additive

# The fixed cost of a forward, in tokens; on a GPU (True) thousands of tokens cost no more than one.
OVERHEAD = {False: 128, True: 8192}


@dataclass(frozen=True)
class PathScores:
    """A model's scores after every prefix of some sequences, logits or log-probabilities.

    Attributes:
        first: after the prompt, the same for all its sequences.
        rest: after the first, second, ... token of every sequence; nothing is scored after the last.
    """

    first: Float[Tensor, "batch 1 vocab"]
    rest: Float[Tensor, "batch sequences nodes vocab"]

    def at(self, level: int) -> Float[Tensor, "batch prefixes vocab"]:
        """The scores of the tokens at `level`."""
        return self.first if level == 0 else self.rest[:, :, level - 1]

    def levels(self) -> list[Float[Tensor, "batch prefixes vocab"]]:
        """All of `at`, whose gradients take one pass over the scores together, not one each."""
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


def pad_prompts(prompts: Sequence[Any], *, pad_token_id: int) -> tuple[Int[Tensor, "batch prompt"], Any]:
    """Prompts of any length with padding on the left, and their attention mask."""
    input_ids, mask = pad(prompts, pad_token_id)
    return torch.from_numpy(input_ids), torch.from_numpy(mask)


def pad_rows(rows: Sequence[np.ndarray], *, fill: int) -> Tensor:
    """Rows of any length, such as labels, with padding on the right."""
    tensors = [torch.from_numpy(row.copy()) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=fill)


def can_pack(model: Any, length: int) -> bool:
    """Whether a model takes sequences side by side; at most `length` tokens see each other."""
    inner = base_model(model)
    config = inner.config.get_text_config(decoder=True)
    is_windowed = "sliding_attention" in layer_types(config) and length > config.sliding_window
    return not is_windowed and takes_tree(inner)


def score_paths(
    model: Any,
    input_ids: Int[Tensor, "batch prompt"],
    attention_mask: Int[Tensor, "batch prompt"],
    paths: Int[Tensor, "batch sequences length"],
    *,
    pack: bool | None = None,
) -> PathScores:
    """The logits after every prefix of some sequences that follow a prompt, in one forward.

    Args:
        model: a decoder of transformers, or one wrapped for training.
        input_ids: prompts, padded on the left.
        attention_mask: 1 at their tokens, 0 at padding; no prompt is empty.
        paths: the sequences' tokens, -1 where there are none; scores there mean nothing.
        pack: side by side (True), or one row per sequence (False); by default what the model takes.

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
    length = paths.shape[-1]
    if pack is None:
        pack = can_pack(model, input_ids.shape[1] + length - 1)
    num_nodes = paths[0, :, 1:].numel() if pack else length - 1
    chunks = [list(range(len(paths)))]
    if not _is_distributed(model):
        chunks = split_by_length(attention_mask.sum(-1).tolist(), num_nodes, overhead=OVERHEAD[paths.is_cuda])
    if len(chunks) == 1:
        return _score(model, input_ids, attention_mask, paths, pack)
    parts: list[PathScores] = []
    for chunk in chunks:
        rows = torch.tensor(chunk, device=paths.device)
        width = int(attention_mask[rows[-1]].sum())
        parts.append(_score(model, input_ids[rows, -width:], attention_mask[rows, -width:], paths[rows], pack))
    order = torch.tensor([row for chunk in chunks for row in chunk], device=paths.device).argsort()
    first, rest = (torch.cat([getattr(part, name) for part in parts])[order] for name in ("first", "rest"))
    return PathScores(first, rest)


def split_by_length(lengths: Sequence[int], num_nodes: int, *, overhead: int) -> list[list[int]]:
    """The rows of a batch in groups of similar lengths, so that little padding is computed.

    Args:
        lengths: tokens of each prompt.
        num_nodes: tokens after each prompt.
        overhead: the fixed cost of a forward, in tokens.

    Returns:
        The groups of least cost (rows times longest prompt and nodes, plus the overhead), shortest first; each by
        ascending length.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    # By the end of the last group: the least cost, and where that group starts.
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(order) + 1):
        width = lengths[order[end - 1]] + num_nodes
        best.append(min((best[start][0] + (end - start) * width + overhead, start) for start in range(end)))
    groups: list[list[int]] = []
    end = len(order)
    while end:
        start = best[end][1]
        groups.append(order[start:end])
        end = start
    return groups[::-1]


def _is_distributed(model: Any) -> bool:
    """Whether other processes wait for this one: all must run equally many forwards."""
    group = torch.distributed
    is_several = group.is_available() and group.is_initialized() and group.get_world_size() > 1
    return is_several or isinstance(model, DataParallel)


def _score(model: Any, input_ids: Tensor, attention_mask: Tensor, paths: Tensor, pack: bool) -> PathScores:
    """One forward over all rows."""
    num_paths, length = paths.shape[1:]
    nodes = paths[..., : length - 1].clamp(min=0)
    positions = positions_of(attention_mask)
    depth = torch.arange(1, length, device=paths.device)
    if pack:
        after = positions[:, -1:] + depth.repeat(num_paths)
        mask = packed_mask(attention_mask.bool(), num_paths, length - 1)
        dtype = mask_dtype(base_model(model))
        logits = _forward(
            model,
            torch.cat([input_ids, nodes.flatten(1)], dim=1),
            mask if dtype is None else to_additive(mask, dtype),
            torch.cat([positions, after], dim=1),
            num_logits=1 + nodes[0].numel(),
        )
        return PathScores(logits[:, :1], logits[:, 1:].unflatten(1, (num_paths, length - 1)))
    after = positions[:, -1:] + depth
    logits = _forward(
        model,
        torch.cat([input_ids.repeat_interleave(num_paths, dim=0), nodes.flatten(0, 1)], dim=1),
        torch.nn.functional.pad(attention_mask, (0, length - 1), value=1).repeat_interleave(num_paths, dim=0),
        torch.cat([positions, after], dim=1).repeat_interleave(num_paths, dim=0),
        num_logits=length,
    )
    logits = logits.unflatten(0, (-1, num_paths))
    return PathScores(logits[:, 0, :1], logits[:, :, 1:])


def packed_mask(
    prompt_mask: Bool[Tensor, "batch prompt"], num_paths: int, num_nodes: int
) -> Bool[Tensor, "batch 1 tokens tokens"]:
    """Which token sees which: the prompt is causal; a node sees the prompt's real tokens, its path so far and itself.

    Padding sees itself, because attention to nothing gives NaN.
    """
    batch_size, width = prompt_mask.shape
    device = prompt_mask.device
    causal = torch.ones((width, width), dtype=torch.bool, device=device).tril()
    itself = torch.eye(width, dtype=torch.bool, device=device)
    path = torch.ones((num_nodes, num_nodes), dtype=torch.bool, device=device).tril()
    paths = torch.block_diag(*[path] * num_paths).bool() if num_nodes else path
    mask = torch.zeros((batch_size, 1, width + len(paths), width + len(paths)), dtype=torch.bool, device=device)
    mask[:, 0, :width, :width] = (causal & prompt_mask[:, None]) | itself
    mask[:, 0, width:, :width] = prompt_mask[:, None]
    mask[:, 0, width:, width:] = paths
    return mask


def _forward(model: Any, input_ids: Tensor, mask: Tensor, positions: Tensor, *, num_logits: int) -> Tensor:
    """The logits after the last few tokens."""
    given: dict[str, Any] = {"use_cache": False, "return_dict": True}
    inner = base_model(model)
    if takes_argument(inner, "position_ids"):
        given["position_ids"] = positions
    if takes_argument(inner, "logits_to_keep"):  # the rest is most of the work where the vocabulary is large
        given["logits_to_keep"] = num_logits
    return model(input_ids=input_ids, attention_mask=mask, **given).logits[:, -num_logits:]
