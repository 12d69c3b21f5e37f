# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Who scores tree nodes: a model, in one of two layouts. Knows no trie and no selection.

`TreeScorer` puts the nodes of a request on the sequence axis, over one prompt, those of several levels in one forward.
`BatchScorer` gives every beam a row of its own, for models whose positions follow from the mask or the length, and
scores a level at a time. Both compute the prompt once.

Axes: B batch, N nodes of a level, V vocabulary, P prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .tree import Nodes, Tree, to_additive


@runtime_checkable
class Scorer(Protocol):
    """Scores the children of a prompt, then of its tree nodes.

    Attributes:
        prompt_logits: logits behind the prompt.
        num_forwards: forwards behind the prompt so far.
    """

    prompt_logits: Float[Tensor, "batch 1 vocab"]
    num_forwards: int

    def score(self, levels: Sequence[Nodes], *, depth: int) -> list[Float[Tensor, "batch _ vocab"]]:
        """Logits behind new nodes.

        Args:
            levels: nodes of consecutive levels, each below the one before it.
            depth: tokens from the prompt to the nodes of the first of them, themselves included; their parents are
                among the nodes that were scored last at the depth above.

        Returns:
            The logits of each level's nodes.
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
        self.num_forwards = 0
        self.trees: list[Tree] = []  # by depth: the nodes that were scored last

    def score(self, levels: Sequence[Nodes], *, depth: int) -> list[Float[Tensor, "batch _ vocab"]]:
        """See `Scorer.score`; one forward for all levels."""
        first = levels[0].tokens
        if not self.trees:
            self.trees = [Tree.over_prompt(*first.shape, device=first.device)]
        num_slots = self.trees[-1].num_slots  # also of nodes that no beam stands on any more
        self.trees = self.trees[:depth]
        above = replace(self.trees[-1], num_slots=num_slots)
        for nodes in levels:
            above = above.grow(nodes.parents)
            self.trees.append(above)
        grown = [replace(tree, num_slots=above.num_slots) for tree in self.trees[depth:]]
        positions = [
            (self.next_position + tree.depth - 1).expand(*self.next_position.shape[:-1], nodes.tokens.shape[1])
            for tree, nodes in zip(grown, levels, strict=True)
        ]
        masks = {kind: self._mask(grown, window, width) for kind, (window, width) in self.windows.items()}
        outputs = self.model(
            input_ids=torch.cat([nodes.tokens for nodes in levels], dim=1),
            position_ids=torch.cat(positions, dim=-1),
            attention_mask=masks[None] if None in masks else masks,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        self.num_forwards += 1
        logits = outputs.logits.to(first.device)
        return list(logits.split([nodes.tokens.shape[1] for nodes in levels], dim=1))

    def _mask(self, grown: list[Tree], window: int | None, width: int) -> Tensor:
        prompt_mask = self.prompt_mask[:, self.prompt_mask.shape[-1] - width :]
        seen = torch.cat([tree.attention_mask(prompt_mask, window) for tree in grown], dim=2)
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
        self.num_forwards = 0  # which is the depth of the nodes that were scored last
        self.num_beams = 0

    def score(self, levels: Sequence[Nodes], *, depth: int) -> list[Float[Tensor, "batch _ vocab"]]:
        """See `Scorer.score`; one forward a level, the first of which follows upon the last one scored."""
        assert depth == self.num_forwards + 1, "a row of the cache holds one path, which only grows"
        return [self._score(nodes.tokens, nodes.parents) for nodes in levels]

    def _score(
        self, tokens: Int[Tensor, "batch nodes"], parents: Int[Tensor, "batch nodes"]
    ) -> Float[Tensor, "batch nodes vocab"]:
        batch_size, num_beams = tokens.shape
        if self.num_forwards == 0 and num_beams > 1:
            self.cache.batch_repeat_interleave(num_beams)
        elif self.num_forwards > 0 and max(num_beams, self.num_beams) > 1:
            first_row = torch.arange(batch_size, device=tokens.device)[:, None] * self.num_beams
            self._reorder((first_row + parents).flatten(), as_many=num_beams == self.num_beams)
        outputs = self.model(**self.arguments(num_beams, tokens.reshape(-1, 1), self.num_forwards))
        self.num_forwards += 1
        self.num_beams = num_beams
        return outputs.logits[:, -1].unflatten(0, (batch_size, num_beams)).to(tokens.device)

    def _reorder(self, rows: Int[Tensor, " rows"], *, as_many: bool) -> None:
        if self.suffix_start is None or not as_many:
            self.cache.reorder_cache(rows)
            return
        for layer in self.cache.layers:
            for states in (layer.keys, layer.values):
                suffix = states[..., self.suffix_start :, :]
                suffix.copy_(suffix[rows.to(states.device)])
