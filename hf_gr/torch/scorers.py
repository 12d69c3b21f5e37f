# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores tree nodes by a model. Knows no trie and no selection.

The nodes of a request are on the sequence axis, over one prompt: nodes of several levels take one forward. Masks say
what each of them sees (the prompt's real tokens, its ancestors and itself), for any model that takes this layout; an
argument does where attention functions are ours (`hf_gr.torch.tree_attention`).

Axes: B batch, N nodes of a level, V vocabulary, P prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .ops import to_device
from .tree import Nodes, Tree, prompt_attention, to_additive
from .tree_attention import TreeAttention

# Tokens from the prompt to the nodes of a first level, themselves included; or for every row, to those of each level.
Depth = int | Sequence[Sequence[int]]


@runtime_checkable
class Scorer(Protocol):
    """Scores the children of a prompt, then of its tree nodes. Serves one call."""

    num_forwards: int  # after the prompt's, so far
    columns: Callable[..., Tensor] | None  # of tokens and their level in that level's logits; None for all tokens

    @property
    def takes_prompt(self) -> bool:
        """Whether nodes can be scored in the prompt's own forward."""
        ...

    def begin(self, levels: Sequence[Nodes] = ()) -> list[Float[Tensor, "batch _ vocab"]]:
        """Logits after the prompt, and after levels of nodes read with it, if it takes any. To be called once."""
        ...

    def score(self, levels: Sequence[Nodes], *, depth: Depth) -> list[Float[Tensor, "batch _ vocab"]]:
        """Logits after new nodes of consecutive levels, the first at a depth, below nodes of the last forward."""
        ...


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose keys are known."""

    logits: Float[Tensor, "batch 1 vocab"]
    cache: Any  # the model appends to it
    mask: Bool[Tensor, "batch prompt"]  # its real tokens
    next_position: Int[Tensor, "*batch 1"]  # `[..., B, 1]`, the position after it
    # By kind of layer, how far back it sees and how many of the prompt's keys its cache holds; one mask for all is
    # under None.
    windows: Mapping[str | None, tuple[int | None, int]]


@dataclass(frozen=True)
class Unread:
    """A prompt that can be read together with nodes after it."""

    input_ids: Int[Tensor, "batch prompt"]
    positions: Int[Tensor, "*batch prompt"]  # `[..., B, P]`
    mask: Bool[Tensor, "batch prompt"]  # its real tokens
    windows: Mapping[str | None, int | None]  # how far back a kind of layer sees; see `Prefilled`
    tail: Int[Tensor, " tail"]  # read after the prompt, for hidden states; no node sees it
    # The forward, given how many last tokens need logits, and arguments; appends to a new cache that keeps all keys.
    read: Callable[..., tuple[Any, Any]]


@dataclass(eq=False)
class TreeScorer:
    """Beams on the sequence axis: one forward of `[B, K]` tokens over `P + slots` keys, nothing ever reordered."""

    model: Callable[..., Any]
    prefill: Callable[[], Prefilled]  # computes the prompt alone, into a cache of this scorer's own
    unread: Unread | None = None  # the prompt, if it may be read together with nodes, which takes masks
    mask_dtype: torch.dtype | None = None  # the model's if masks are added to scores (eager), None if they are boolean
    argument: str | None = None  # its name; None for a mask `[B, 1, N, keys]` for every kind of layer
    num_forwards: int = 0
    columns: Callable[..., Tensor] | None = None
    prompt: Any = field(default=None, init=False)  # Prefilled, once it is
    tree: Any = field(default=None, init=False)  # the nodes scored last

    @property
    def takes_prompt(self) -> bool:
        """See `Scorer.takes_prompt`."""
        return self.unread is not None

    def begin(self, levels: Sequence[Nodes] = ()) -> list[Float[Tensor, "batch _ vocab"]]:
        """See `Scorer.begin`."""
        if not levels:
            self.prompt = self.prefill()
            self.tree = Tree.over_prompt(len(self.prompt.logits), self.prompt.logits.device)
            return [self.prompt.logits]
        given = self.unread
        assert given is not None
        batch_size, length = given.input_ids.shape
        self.prompt = Prefilled(
            logits=torch.empty(0),
            cache=None,
            mask=given.mask,
            next_position=given.positions[..., -1:] + 1,
            windows={kind: (window, length) for kind, window in given.windows.items()},
        )
        root = self.tree = Tree.over_prompt(batch_size, given.input_ids.device)
        chain = (token.expand(batch_size, 1) for token in given.tail.unbind())
        tail = [Nodes(tokens, torch.zeros_like(tokens), tokens) for tokens in chain]
        parts = [self._grow(tail, depth=1)] if tail else []
        self.tree = replace(root, num_slots=len(tail))
        parts.append(self._grow(levels, depth=1))
        num_slots = self.tree.num_slots
        masks = {
            kind: torch.cat(
                [
                    prompt_attention(given.mask, num_slots, window),
                    *(
                        _padded(tree.attention_mask(given.mask, window, depths=depths), length + num_slots)
                        for _, tree, depths in parts
                    ),
                ],
                dim=2,
            )
            for kind, window in given.windows.items()
        }
        after = [self._positions(depths).expand(*given.positions.shape[:-1], -1) for _, _, depths in parts]
        outputs, cache = given.read(
            num_slots + 1,
            input_ids=torch.cat([given.input_ids, *(tokens for tokens, _, _ in parts)], dim=1),
            position_ids=torch.cat([given.positions, *after], dim=-1),
            attention_mask=self._of_model(masks),
        )
        self.tree = Tree.joined([replace(root, num_slots=num_slots), self.tree])  # the prompt is place 0
        logits = outputs.logits[:, -num_slots - 1 :].to(given.input_ids.device)
        self.prompt = replace(self.prompt, logits=logits[:, :1], cache=cache)
        of_levels = logits[:, len(tail) + 1 :].split([nodes.tokens.shape[1] for nodes in levels], dim=1)
        return [self.prompt.logits, *of_levels]

    def score(self, levels: Sequence[Nodes], *, depth: Depth) -> list[Float[Tensor, "batch _ vocab"]]:
        """See `Scorer.score`; one forward for all levels."""
        tokens, tree, depths = self._grow(levels, depth=depth)
        logits = self.read(tokens, tree, depths)
        return list(logits.split([nodes.tokens.shape[1] for nodes in levels], dim=1))

    def read(
        self, tokens: Int[Tensor, "batch nodes"], tree: Tree, depths: Int[Tensor, "#batch nodes"]
    ) -> Float[Tensor, "batch nodes vocab"]:
        """Logits after nodes in the last slots of a tree, wherever among all so far their ancestors are.

        Depths are tokens from the prompt to each node, itself included.
        """
        self.tree = tree
        prompt, how = self.prompt, {}
        if self.argument is None:
            masks = {
                kind: tree.attention_mask(prompt.mask[:, prompt.mask.shape[-1] - width :], window, depths=depths)
                for kind, (window, width) in prompt.windows.items()
            }
            mask = self._of_model(masks)
        else:
            mask = prompt.mask[:1, :1, None, None]  # a placeholder for a prepared mask; never read
            mask = mask if None in prompt.windows else dict.fromkeys(prompt.windows, mask)
            how = {
                self.argument: TreeAttention(tree, prompt.mask, tree.ancestry.shape[-1] if tree.is_level else depths)
            }
        outputs = self.model(
            input_ids=tokens,
            position_ids=self._positions(depths),
            attention_mask=mask,
            **how,
            past_key_values=prompt.cache,
            use_cache=True,
            return_dict=True,
        )
        self.num_forwards += 1
        return outputs.logits.to(tokens.device)

    def _grow(
        self, levels: Sequence[Nodes], *, depth: Depth
    ) -> tuple[Int[Tensor, "batch nodes"], Tree, Int[Tensor, "#batch nodes"]]:
        """Grow the tree by levels: tokens of the new nodes, their tree, and tokens from the prompt to each."""
        is_level = isinstance(depth, int)
        by_level = range(depth, depth + len(levels)) if isinstance(depth, int) else np.array(depth).T
        tokens: list[Tensor] = []
        depths, grown = [], [self.tree]
        for nodes, of in zip(levels, by_level, strict=True):
            if isinstance(of, int):
                deepest, own = of, torch.full((1, 1), of, device=nodes.tokens.device)
            else:
                deepest, own = int(of.max()), to_device(of, nodes.tokens.device)[:, None]
            tokens.append(nodes.tokens)
            depths.append(own.expand(-1, nodes.tokens.shape[1]))
            grown.append(grown[-1].grow(nodes.parents, depth=deepest, is_level=is_level))
        self.tree = Tree.joined(grown[1:])
        return torch.cat(tokens, dim=1), self.tree, torch.cat(depths, dim=1)

    def _positions(self, depths: Int[Tensor, "#batch nodes"]) -> Int[Tensor, "*batch nodes"]:
        return self.prompt.next_position + depths - 1

    def _of_model(self, masks: Mapping[str | None, Tensor]) -> Any:
        """Masks as the model takes them."""
        if self.mask_dtype is not None:
            masks = {kind: to_additive(seen, self.mask_dtype) for kind, seen in masks.items()}
        return masks[None] if None in masks else masks


def _padded(seen: Bool[Tensor, "batch 1 nodes keys"], num_keys: int) -> Bool[Tensor, "batch 1 nodes all_keys"]:
    """A mask of more keys, the last of which are not seen."""
    return torch.nn.functional.pad(seen, (0, num_keys - seen.shape[-1]))
