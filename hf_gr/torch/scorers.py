# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Who scores tree nodes: a model, in one of two layouts. Knows no trie and no selection.

`TreeScorer` puts the nodes of a request on the sequence axis, over one prompt. `BatchScorer` gives every beam a row
of its own, for models whose positions follow from the mask or the length. Both compute the prompt once.

Axes: B batch, K beams, V vocabulary, P prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .tree import Tree, to_additive


@runtime_checkable
class Scorer(Protocol):
    """Scores the children of a prompt, then of its tree nodes, level by level."""

    prompt_logits: Float[Tensor, "batch 1 vocab"]

    def score(
        self, tokens: Int[Tensor, "batch beams"], parents: Int[Tensor, "batch beams"]
    ) -> Float[Tensor, "batch beams vocab"]:
        """Logits behind new tokens.

        Args:
            tokens: one new token for every beam.
            parents: which node of the last call each is appended to; anything on the first call.
        """
        ...


class TreeScorer:
    """Beams on the sequence axis: one forward of `[B, K]` tokens over `P + slots` keys, nothing ever reordered.

    Serves one call: its tree and its cache grow with every level.

    Args:
        model: called with `input_ids`, `position_ids`, `attention_mask` and `past_key_values`.
        prompt_logits: logits behind the prompt.
        cache: the prompt's keys and values, which the model appends to.
        prompt_mask: real tokens of the prompt.
        next_position: `[..., B, 1]`, the position behind the prompt.
        windows: for every kind of layer how far back it sees and how many of the prompt's keys its cache holds; one
            entry under the key None for a model that takes a single mask.
        mask_dtype: the model's type where masks are added to attention scores (eager), None where they are boolean
            (sdpa).
    """

    def __init__(
        self,
        model: Callable[..., Any],
        prompt_logits: Float[Tensor, "batch 1 vocab"],
        cache: Any,
        *,
        prompt_mask: Bool[Tensor, "batch prompt"],
        next_position: Int[Tensor, "*batch 1"],
        windows: Mapping[str | None, tuple[int | None, int]],
        mask_dtype: torch.dtype | None,
    ) -> None:
        self.model = model
        self.prompt_logits = prompt_logits
        self.cache = cache
        self.prompt_mask = prompt_mask
        self.next_position = next_position
        self.windows = windows
        self.mask_dtype = mask_dtype
        self.tree: Tree | None = None

    def score(
        self, tokens: Int[Tensor, "batch beams"], parents: Int[Tensor, "batch beams"]
    ) -> Float[Tensor, "batch beams vocab"]:
        """See `Scorer.score`."""
        if self.tree is None:
            self.tree = Tree.over_prompt(*tokens.shape, device=tokens.device)
        position = self.next_position + self.tree.depth
        self.tree = self.tree.grow(parents)
        masks = {kind: self._mask(window, width) for kind, (window, width) in self.windows.items()}
        outputs = self.model(
            input_ids=tokens,
            position_ids=position.expand(*position.shape[:-1], tokens.shape[-1]),
            attention_mask=masks[None] if None in masks else masks,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        return outputs.logits.to(tokens.device)

    def _mask(self, window: int | None, width: int) -> Tensor:
        assert self.tree is not None
        seen = self.tree.attention_mask(self.prompt_mask[:, self.prompt_mask.shape[-1] - width :], window)
        return seen if self.mask_dtype is None else to_additive(seen, self.mask_dtype)


class BatchScorer:
    """One row a beam: the prompt's cache is repeated after the prefill, and rows are reordered as beams are.

    Serves one call: its cache grows with every level.

    Args:
        model: called with one token a row.
        prompt_logits: logits behind the prompt.
        cache: the prompt's cache, for B rows; it offers `batch_repeat_interleave`, `reorder_cache` and `layers`.
        arguments: from the number of rows, the rows' tokens `[B * K, 1]` and their depth to the model's arguments.
        suffix_start: the number of keys of the prompt, which all beams of a request share, so that only what follows
            is reordered; None where a layer keeps anything but plain keys and values, which is reordered as a whole.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        prompt_logits: Float[Tensor, "batch 1 vocab"],
        cache: Any,
        *,
        arguments: Callable[[int, Int[Tensor, "rows 1"], int], dict[str, Any]],
        suffix_start: int | None,
    ) -> None:
        self.model = model
        self.prompt_logits = prompt_logits
        self.cache = cache
        self.arguments = arguments
        self.suffix_start = suffix_start
        self.depth = 0

    def score(
        self, tokens: Int[Tensor, "batch beams"], parents: Int[Tensor, "batch beams"]
    ) -> Float[Tensor, "batch beams vocab"]:
        """See `Scorer.score`."""
        batch_size, num_beams = tokens.shape
        if num_beams > 1 and self.depth == 0:
            self.cache.batch_repeat_interleave(num_beams)
        elif num_beams > 1:
            first_row = torch.arange(batch_size, device=tokens.device)[:, None] * num_beams
            self._reorder((first_row + parents).flatten())
        outputs = self.model(**self.arguments(num_beams, tokens.reshape(-1, 1), self.depth))
        self.depth += 1
        return outputs.logits[:, -1].unflatten(0, (batch_size, num_beams)).to(tokens.device)

    def _reorder(self, rows: Int[Tensor, " rows"]) -> None:
        if self.suffix_start is None:
            self.cache.reorder_cache(rows)
            return
        for layer in self.cache.layers:
            for states in (layer.keys, layer.values):
                suffix = states[..., self.suffix_start :, :]
                suffix.copy_(suffix[rows.to(states.device)])
