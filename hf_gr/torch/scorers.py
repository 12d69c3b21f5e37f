# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores tree nodes by a model, in one of two layouts. Knows no trie and no selection.

`TreeScorer` puts the nodes of a request on the sequence axis, over one prompt. `BatchScorer` gives every path a row
of its own, for models that derive positions from the mask or the length. Both compute the prompt once, and score
nodes of several levels in one forward. `PlainScorer` uses no cache and works with any model.

Axes: B batch, N nodes of a level, R rows a request, M levels, V vocabulary, P prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .tree import Nodes, Tree, to_additive

ROWS_AT_ONCE = 32  # of a forward over whole rows, which may return logits after every token


@runtime_checkable
class Scorer(Protocol):
    """Scores the children of a prompt, then of its tree nodes.

    Attributes:
        prompt_logits: logits after the prompt.
        num_forwards: forwards after the prompt so far.
        takes_levels: whether one forward can score nodes of several levels, and the next continue from any of them.
        columns: maps tokens and the level that they follow to their columns in that level's logits; None if those are
            over the whole vocabulary.
    """

    prompt_logits: Float[Tensor, "batch 1 vocab"]
    num_forwards: int
    takes_levels: bool
    columns: Callable[..., Tensor] | None

    def score(self, levels: Sequence[Nodes], *, depth: int) -> list[Float[Tensor, "batch _ vocab"]]:
        """Logits after new nodes.

        Args:
            levels: nodes of consecutive levels, each below the one before it.
            depth: tokens from the prompt to the nodes of the first level, themselves included; their parents are
                among the nodes scored last at the depth above.

        Returns:
            The logits of each level's nodes.
        """
        ...


class TreeScorer:
    """Beams on the sequence axis: one forward of `[B, K]` tokens over `P + slots` keys, nothing ever reordered.

    Serves one call: its tree and its cache grow with every level.

    Args:
        model: called with `input_ids`, `position_ids`, `attention_mask` and `past_key_values`.
        prompt_logits: logits after the prompt.
        cache: the prompt's keys and values, which the model appends to.
        prompt_mask: real tokens of the prompt.
        next_position: `[..., B, 1]`, the position after the prompt.
        windows: for every kind of layer, how far back it sees and how many of the prompt's keys its cache holds; a
            single entry under the key None for a model that takes one mask.
        mask_dtype: the model's dtype if masks are added to attention scores (eager), None if they are boolean (sdpa).
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
        self.takes_levels = True
        self.columns: Callable[..., Tensor] | None = None
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
        num_slots = self.trees[-1].num_slots  # including nodes that no beam uses any more
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
            input_ids=_joined([nodes.tokens for nodes in levels], dim=1),
            position_ids=_joined(positions, dim=-1),
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
        seen = _joined([tree.attention_mask(prompt_mask, window) for tree in grown], dim=2)
        return seen if self.mask_dtype is None else to_additive(seen, self.mask_dtype)


class BatchScorer:
    """One row a path: the prompt's cache is repeated after the prefill, and rows are reordered as beams are.

    Nodes of several levels are scored as paths from the first level, one for each node without nodes below it; the
    tokens of a path after its node are cropped before the next forward.

    Serves one call: its cache grows with every level.

    Args:
        model: called with the tokens of every row.
        prompt_logits: logits after the prompt.
        cache: the prompt's cache, for B rows; it offers `batch_repeat_interleave`, `reorder_cache`, `crop` (by a
            negative number of tokens) and `layers`.
        arguments: makes the model's arguments from the number of rows a request, the rows' tokens `[B * R, M]` and
            the number of tokens between the prompt and those.
        suffix_start: the number of the prompt's keys, which all paths of a request share: only later keys are
            reordered. None if a layer keeps anything but plain keys and values: then the whole cache is reordered.
        takes_levels: whether nodes of several levels may be scored together; requires plain keys and values.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        prompt_logits: Float[Tensor, "batch 1 vocab"],
        cache: Any,
        *,
        arguments: Callable[[int, Int[Tensor, "rows levels"], int], dict[str, Any]],
        suffix_start: int | None,
        takes_levels: bool,
    ) -> None:
        self.takes_levels = takes_levels
        self.columns: Callable[..., Tensor] | None = None
        self.model = model
        self.prompt_logits = prompt_logits
        self.cache = cache
        self.arguments = arguments
        self.suffix_start = suffix_start
        self.num_forwards = 0
        self.num_rows = 0
        self.cached = 0  # tokens of each row after the prompt
        self.rows: list[Int[Tensor, "batch _"] | None] = [None]  # by depth: the row of each node scored last

    def score(self, levels: Sequence[Nodes], *, depth: int) -> list[Float[Tensor, "batch _ vocab"]]:
        """See `Scorer.score`."""
        if len(levels) == 1:
            logits = self._forward(levels[0].tokens[..., None], levels[0].parents, depth=depth)
            self.rows = [*self.rows[:depth], None]
            return [logits[:, :, 0]]
        paths = _paths(levels)
        tokens = torch.stack([_at(nodes.tokens, path) for nodes, path in zip(levels, paths, strict=True)], dim=-1)
        logits = self._forward(tokens, _at(levels[0].parents, paths[0]), depth=depth)
        self.rows = self.rows[:depth]
        of_levels = []
        for level, (nodes, path) in enumerate(zip(levels, paths, strict=True)):
            rows = _first_rows(path, nodes.tokens.shape[1])
            self.rows.append(rows)
            of_levels.append(logits[:, :, level].gather(1, rows[..., None].expand(-1, -1, logits.shape[-1])))
        return of_levels

    def _forward(
        self, tokens: Int[Tensor, "batch rows levels"], parents: Int[Tensor, "batch rows"], *, depth: int
    ) -> Float[Tensor, "batch rows levels vocab"]:
        batch_size, num_rows, num_levels = tokens.shape
        self._move(parents, depth=depth)
        outputs = self.model(**self.arguments(num_rows, tokens.flatten(0, 1), depth - 1))
        self.num_forwards += 1
        self.num_rows, self.cached = num_rows, depth - 1 + num_levels
        return outputs.logits.to(tokens.device).unflatten(0, (batch_size, num_rows))[:, :, -num_levels:]

    def _move(self, parents: Int[Tensor, "batch rows"], *, depth: int) -> None:
        """Make every row of the cache end with the parent of its next tokens."""
        batch_size, num_rows = parents.shape
        if self.cached > depth - 1:
            self.cache.crop(depth - 1 - self.cached)  # this many tokens fewer; only if `takes_levels`
        if self.num_rows == 0 and num_rows > 1:
            self.cache.batch_repeat_interleave(num_rows)
        if self.num_rows == 0 or max(num_rows, self.num_rows) == 1:
            return
        above = self.rows[depth - 1]
        rows = parents if above is None else above.gather(1, parents)
        first_row = torch.arange(batch_size, device=rows.device)[:, None] * self.num_rows
        self._reorder((first_row + rows).flatten(), as_many=num_rows == self.num_rows)

    def _reorder(self, rows: Int[Tensor, " rows"], *, as_many: bool) -> None:
        if self.suffix_start is None or not as_many:
            self.cache.reorder_cache(rows)
            return
        for layer in self.cache.layers:
            for states in (layer.keys, layer.values):
                suffix = states[..., self.suffix_start :, :]
                suffix.copy_(suffix[rows.to(states.device)])


class PlainScorer:
    """One row a path, recomputed from the prompt's first token for every level: correct for any model, and slow.

    Args:
        read: maps a request's number and paths `[R, D]` after its prompt to the logits after them, `[R, V]`.
        batch_size: B.
    """

    def __init__(self, read: Callable[[int, Int[Tensor, "rows depth"]], Tensor], *, batch_size: int) -> None:
        self.takes_levels = False
        self.columns: Callable[..., Tensor] | None = None
        self.num_forwards = 0
        self.read = read
        nothing = torch.empty((batch_size, 1, 0), dtype=torch.long)
        self.prompt_logits = self._read(nothing)
        self.paths = [nothing.to(self.prompt_logits.device)]  # by depth, of the nodes scored last

    def score(self, levels: Sequence[Nodes], *, depth: int) -> list[Float[Tensor, "batch _ vocab"]]:
        """See `Scorer.score`; one level."""
        (nodes,) = levels
        above = self.paths[depth - 1]
        parents = nodes.parents if depth > 1 else torch.zeros_like(nodes.parents)
        above = above.gather(1, parents[..., None].expand(-1, -1, depth - 1))
        self.paths = [*self.paths[:depth], torch.cat([above, nodes.tokens[..., None]], dim=-1)]
        self.num_forwards += 1
        return [self._read(self.paths[depth])]

    def _read(self, paths: Int[Tensor, "batch nodes depth"]) -> Float[Tensor, "batch nodes vocab"]:
        logits = [
            torch.cat([self.read(request, rows) for rows in of_request.split(ROWS_AT_ONCE)])
            for request, of_request in enumerate(paths)
        ]
        return torch.stack(logits)


def _joined(parts: list[Tensor], *, dim: int) -> Tensor:
    """The parts concatenated; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _paths(levels: Sequence[Nodes]) -> list[Int[Tensor, "batch rows"]]:
    """For every level the node on each path, -1 after its end: one path to each node without nodes below it."""
    last = levels[-1].tokens
    paths = [torch.arange(last.shape[1], device=last.device).expand(last.shape)]
    for nodes, below in zip(reversed(levels[:-1]), reversed(levels[1:]), strict=True):
        own = _childless(nodes, below)
        through = _at(below.parents, paths[0])
        paths = [torch.nn.functional.pad(path, (0, own.shape[1]), value=-1) for path in paths]
        paths.insert(0, torch.cat([through, own], dim=1))
    return paths


def _childless(nodes: Nodes, below: Nodes) -> Int[Tensor, "batch _"]:
    """The nodes without nodes below them, -1 for padding."""
    batch_size, num_nodes = nodes.tokens.shape
    is_end = torch.ones((batch_size, num_nodes), dtype=torch.bool, device=nodes.tokens.device)
    is_end = is_end.scatter(1, below.parents, False)
    width = int(is_end.sum(dim=-1).max())  # synchronises: the shape of the forward depends on it
    first = is_end.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
    return torch.where(is_end.gather(1, first), first, -1)


def _at(values: Int[Tensor, "batch nodes"], places: Int[Tensor, "batch rows"]) -> Int[Tensor, "batch rows"]:
    """The values at places; those of the first node if there is no place."""
    return values.gather(1, places.clamp(min=0))


def _first_rows(path: Int[Tensor, "batch rows"], num_nodes: int) -> Int[Tensor, "batch nodes"]:
    """The first row whose path contains each node."""
    batch_size, num_rows = path.shape
    rows = torch.arange(num_rows, device=path.device).expand(batch_size, -1)
    # Paths that have ended write to an extra column, which is dropped.
    columns = torch.where(path >= 0, path, num_nodes)
    first = torch.zeros((batch_size, num_nodes + 1), dtype=torch.long, device=path.device)
    return first.scatter_reduce(1, columns, rows, "amin", include_self=False)[:, :-1]
