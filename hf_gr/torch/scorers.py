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
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .transfers import to_device
from .tree import Nodes, Tree, prompt_attention
from .visibility import Visibility

ROWS_AT_ONCE = 32  # of a forward over whole rows, which may return logits after every token


# Tokens from the prompt to the nodes of a first level, themselves included: one number, or one for every row.
Depth = int | Sequence[int]


@runtime_checkable
class Scorer(Protocol):
    """Scores the children of a prompt, then of its tree nodes. Serves one call.

    Attributes:
        num_forwards: forwards after the prompt's so far.
        takes_levels: whether one forward can score nodes of several levels, and the next continue from any of them.
        takes_prompt: whether nodes can be scored in the prompt's own forward.
        columns: maps tokens and the level that they follow to their columns in that level's logits; None if those are
            over the whole vocabulary.
    """

    num_forwards: int
    takes_levels: bool
    takes_prompt: bool
    columns: Callable[..., Tensor] | None

    def begin(self, levels: Sequence[Nodes] = ()) -> list[Float[Tensor, "batch _ vocab"]]:
        """Logits after the prompt, and after nodes that are read together with it. To be called once, first.

        Args:
            levels: nodes of consecutive levels from the first on; none unless the scorer takes the prompt.

        Returns:
            The logits after the prompt, as those of one node, and those of each level's nodes.
        """
        ...

    def score(self, levels: Sequence[Nodes], *, depth: Depth) -> list[Float[Tensor, "batch _ vocab"]]:
        """Logits after new nodes.

        Args:
            levels: nodes of consecutive levels, each below the one before it; the first level's parents are among all
                nodes of the forward before.
            depth: of the first level. Rows of several depths need a scorer that takes levels.

        Returns:
            The logits of each level's nodes.
        """
        ...


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose keys are known.

    Attributes:
        logits: after the prompt.
        cache: its keys and values, which the model appends to.
        mask: its real tokens.
        next_position: `[..., B, 1]`, the position after it.
        windows: for every kind of layer, how far back it sees and how many of the prompt's keys its cache holds; a
            single entry under the key None for a model that takes one mask.
    """

    logits: Float[Tensor, "batch 1 vocab"]
    cache: Any
    mask: Bool[Tensor, "batch prompt"]
    next_position: Int[Tensor, "*batch 1"]
    windows: Mapping[str | None, tuple[int | None, int]]


@dataclass(frozen=True)
class Unread:
    """A prompt that can be read together with nodes after it.

    Attributes:
        input_ids: its tokens.
        positions: `[..., B, P]`.
        mask: its real tokens.
        windows: for every kind of layer how far back it sees; see `Prefilled`.
        tail: tokens that are read after the prompt, for their hidden states; no node sees them.
        of_model: masks as the model takes them.
        read: the model's forward, given the number of last tokens whose logits are needed, and arguments; appends to
            a new cache whose layers keep all keys, and returns that, too.
    """

    input_ids: Int[Tensor, "batch prompt"]
    positions: Int[Tensor, "*batch prompt"]
    mask: Bool[Tensor, "batch prompt"]
    windows: Mapping[str | None, int | None]
    tail: Int[Tensor, " tail"]
    of_model: Callable[[Mapping[str | None, Tensor]], Any]
    read: Callable[..., tuple[Any, Any]]


class TreeScorer:
    """Beams on the sequence axis: one forward of `[B, K]` tokens over `P + slots` keys, nothing ever reordered.

    Args:
        model: called with `input_ids`, `position_ids`, `attention_mask` and `past_key_values`.
        prefill: computes the prompt alone; the cache is this scorer's own.
        visibility: how the model is told what nodes see.
        unread: the prompt, if it may be read together with nodes, which takes masks.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        prefill: Callable[[], Prefilled],
        *,
        visibility: Visibility,
        unread: Unread | None = None,
    ) -> None:
        self.takes_levels = True
        self.takes_prompt = unread is not None
        self.columns: Callable[..., Tensor] | None = None
        self.model = model
        self.prefill = prefill
        self.visibility = visibility
        self.unread = unread
        self.num_forwards = 0
        self.prompt: Any = None  # Prefilled, once it is
        self.tree: Any = None  # the nodes scored last

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
            attention_mask=given.of_model(masks),
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
        """Logits after new nodes, wherever among all nodes so far their ancestors are.

        Args:
            tokens: of the nodes, which get the last slots of the tree.
            tree: the nodes by the slots of their ancestors.
            depths: tokens from the prompt to each node, itself included.
        """
        self.tree = tree
        prompt = self.prompt
        outputs = self.model(
            input_ids=tokens,
            position_ids=self._positions(depths),
            **self.visibility.arguments(tree, prompt.mask, prompt.windows, depths=depths),
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
        tokens = _joined([nodes.tokens for nodes in levels], dim=1)
        sizes = [nodes.tokens.shape[1] for nodes in levels]
        is_level = isinstance(depth, int)
        least, deepest = (depth, depth) if isinstance(depth, int) else (0, max(depth))
        below = [torch.full((1, size), least + number, device=tokens.device) for number, size in enumerate(sizes)]
        depths = _joined(below, dim=1)
        if not isinstance(depth, int):
            depths = to_device(depth, tokens.device)[:, None] + depths
        grown = [self.tree]
        for number, nodes in enumerate(levels):
            grown.append(grown[-1].grow(nodes.parents, depth=deepest + number, is_level=is_level))
        self.tree = Tree.joined(grown[1:])
        return tokens, self.tree, depths

    def _positions(self, depths: Int[Tensor, "#batch nodes"]) -> Int[Tensor, "*batch nodes"]:
        return self.prompt.next_position + depths - 1


@runtime_checkable
class PathReader(Protocol):
    """How a model reads paths after prompts, one row a path.

    Attributes:
        cache: of the prompt, then of the paths; it offers `batch_repeat_interleave`, `reorder_cache`, `crop` (by a
            negative number of tokens) and `layers`.
        suffix_start: the number of the prompt's keys, which all paths of a request share: only later keys are
            reordered. None if a layer keeps anything but plain keys and values: then the whole cache is reordered.
        start: the prompt's tokens, if they can be read together with paths.
    """

    cache: Any
    suffix_start: int | None
    start: Int[Tensor, "batch start"] | None

    def prefill(self) -> Float[Tensor, "batch 1 vocab"]:
        """Logits after the prompt."""
        ...

    def read(
        self, tokens: Int[Tensor, "batch rows levels"], *, num_read: int | None
    ) -> Float[Tensor, "batch_rows _ vocab"]:
        """Logits after the last tokens of every row.

        Args:
            tokens: new ones.
            num_read: tokens of each row between the prompt and those; None if they begin with the prompt.
        """
        ...


class BatchScorer:
    """One row a path: the prompt's cache is repeated after the prefill, and rows are reordered as beams are.

    Nodes of several levels are scored as paths from the first level, one for each node without nodes below it; the
    tokens of a path after its node are cropped before the next forward. Where requests have come to different depths,
    those ahead read their last tokens again.

    Args:
        reader: the model.
        takes_levels: whether nodes of several levels may be scored together; requires plain keys and values.
    """

    def __init__(self, reader: PathReader, *, takes_levels: bool) -> None:
        self.takes_levels = takes_levels
        self.takes_prompt = takes_levels and reader.start is not None
        self.columns: Callable[..., Tensor] | None = None
        self.reader = reader
        self.num_forwards = 0
        self.num_rows = 0
        self.tokens: Any = None  # [B, rows, tokens after the prompt] that the cache holds
        self.row_of: Any = None  # of each node scored last; None if each is its own

    def begin(self, levels: Sequence[Nodes] = ()) -> list[Float[Tensor, "batch _ vocab"]]:
        """See `Scorer.begin`."""
        if not levels:
            logits = self.reader.prefill()
            self.tokens = torch.zeros((len(logits), 1, 0), dtype=torch.long, device=logits.device)
            return [logits]
        start = self.reader.start
        assert start is not None
        paths, tokens = _read_along(levels)
        given = torch.cat([start[:, None].expand(-1, tokens.shape[1], -1), tokens], dim=-1)
        logits = self._logits(given, num_read=None)
        self.num_rows, self.tokens = tokens.shape[1], tokens
        of_prompt = logits[:, :1, -len(levels) - 1]
        of_levels, rows = _of_nodes(levels, paths, logits[:, :, -len(levels) :])
        self.row_of = torch.cat([torch.zeros_like(rows[0][:, :1]), *rows], dim=1)
        return [of_prompt, *of_levels]

    def score(self, levels: Sequence[Nodes], *, depth: Depth) -> list[Float[Tensor, "batch _ vocab"]]:
        """See `Scorer.score`."""
        depths = [depth] if isinstance(depth, int) else list(depth)
        parents, tokens = levels[0].parents, levels[0].tokens[..., None]
        paths = None
        if len(levels) > 1:
            paths, tokens = _read_along(levels)
            parents = _at(parents, paths[0])
        known = self._move(parents, depths)
        logits = self._read(known, tokens, [depth - min(depths) for depth in depths])
        self.num_forwards += 1
        self.row_of = None
        if paths is None:
            return [logits[:, :, 0]]
        of_levels, rows = _of_nodes(levels, paths, logits)
        self.row_of = torch.cat(rows, dim=1)
        return of_levels

    def _read(
        self, known: Int[Tensor, "batch rows read"], tokens: Int[Tensor, "batch rows levels"], ahead: list[int]
    ) -> Float[Tensor, "batch rows levels vocab"]:
        """Logits after the tokens of every path; requests that are `ahead` of others first read known ones again."""
        num_levels, most = tokens.shape[-1], max(ahead)
        num_read = known.shape[-1]
        if most:
            known, again = known[..., : num_read - most], known[..., num_read - most :]
            num_read = known.shape[-1]
            places = torch.arange(most + num_levels, device=tokens.device)
            first = to_device(ahead, tokens.device)[:, None]
            places = torch.where(places < first, places, (places - first).clamp(max=num_levels - 1) + most)
            given = torch.cat([again, tokens], dim=-1)
            tokens = given.gather(-1, places[:, None].expand(-1, tokens.shape[1], -1))
        logits = self._logits(tokens, num_read=num_read)[:, :, -tokens.shape[-1] :]
        self.num_rows, self.tokens = tokens.shape[1], torch.cat([known, tokens], dim=-1)
        if most:
            places = (first + torch.arange(num_levels, device=tokens.device))[:, None, :, None]
            logits = logits.gather(2, places.expand(-1, logits.shape[1], -1, logits.shape[-1]))
        return logits

    def _logits(
        self, tokens: Int[Tensor, "batch rows levels"], *, num_read: int | None
    ) -> Float[Tensor, "batch rows _ vocab"]:
        logits = self.reader.read(tokens, num_read=num_read)
        return logits.to(tokens.device).unflatten(0, tokens.shape[:2])

    def _move(self, parents: Int[Tensor, "batch rows"], depths: Sequence[int]) -> Int[Tensor, "batch rows read"]:
        """Make every row of the cache end before its next tokens; the tokens between the prompt and those."""
        cache, num_rows = self.reader.cache, parents.shape[1]
        if (excess := self.tokens.shape[-1] + 1 - min(depths)) > 0:
            cache.crop(-excess)  # only if `takes_levels`
        rows = parents if self.row_of is None else self.row_of.gather(1, parents)
        if self.num_rows == 0 and num_rows > 1:
            cache.batch_repeat_interleave(num_rows)
        elif max(num_rows, self.num_rows) > 1:
            first_row = torch.arange(len(rows), device=rows.device)[:, None] * self.num_rows
            self._reorder((first_row + rows).flatten(), as_many=num_rows == self.num_rows)
        known = self.tokens[..., : max(depths) - 1]
        return known.gather(1, rows[..., None].expand(-1, -1, known.shape[-1]))

    def _reorder(self, rows: Int[Tensor, " rows"], *, as_many: bool) -> None:
        cache, start = self.reader.cache, self.reader.suffix_start
        if start is None or not as_many:
            cache.reorder_cache(rows)
            return
        for layer in cache.layers:
            for states in (layer.keys, layer.values):
                suffix = states[..., start:, :]
                suffix.copy_(suffix[rows.to(states.device)])


class PlainScorer:
    """One row a path, recomputed from the prompt's first token for every level: correct for any model, and slow.

    Args:
        read: maps a request's number and paths `[R, D]` after its prompt to the logits after them, `[R, V]`.
        batch_size: B.
    """

    def __init__(self, read: Callable[[int, Int[Tensor, "rows depth"]], Tensor], *, batch_size: int) -> None:
        self.takes_levels = self.takes_prompt = False
        self.columns: Callable[..., Tensor] | None = None
        self.num_forwards = 0
        self.read = read
        self.batch_size = batch_size
        self.paths: Any = None  # of the nodes scored last

    def begin(self, levels: Sequence[Nodes] = ()) -> list[Float[Tensor, "batch _ vocab"]]:
        """See `Scorer.begin`; no levels."""
        nothing = torch.empty((self.batch_size, 1, 0), dtype=torch.long)
        logits = self._read(nothing)
        self.paths = nothing.to(logits.device)
        return [logits]

    def score(self, levels: Sequence[Nodes], *, depth: Depth) -> list[Float[Tensor, "batch _ vocab"]]:
        """See `Scorer.score`; one level."""
        (nodes,) = levels
        above = self.paths.gather(1, nodes.parents[..., None].expand(-1, -1, self.paths.shape[-1]))
        self.paths = torch.cat([above, nodes.tokens[..., None]], dim=-1)
        self.num_forwards += 1
        return [self._read(self.paths)]

    def _read(self, paths: Int[Tensor, "batch nodes depth"]) -> Float[Tensor, "batch nodes vocab"]:
        logits = [
            torch.cat([self.read(request, rows) for rows in of_request.split(ROWS_AT_ONCE)])
            for request, of_request in enumerate(paths)
        ]
        return torch.stack(logits)


def _padded(seen: Bool[Tensor, "batch 1 nodes keys"], num_keys: int) -> Bool[Tensor, "batch 1 nodes all_keys"]:
    """A mask of more keys, the last of which are not seen."""
    return torch.nn.functional.pad(seen, (0, num_keys - seen.shape[-1]))


def _joined(parts: list[Tensor], *, dim: int) -> Tensor:
    """The parts concatenated; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _read_along(
    levels: Sequence[Nodes],
) -> tuple[list[Int[Tensor, "batch rows"]], Int[Tensor, "batch rows levels"]]:
    """Paths through all nodes, and their tokens."""
    paths = _paths(levels)
    return paths, torch.stack([_at(nodes.tokens, path) for nodes, path in zip(levels, paths, strict=True)], dim=-1)


def _of_nodes(
    levels: Sequence[Nodes],
    paths: Sequence[Int[Tensor, "batch rows"]],
    logits: Float[Tensor, "batch rows levels vocab"],
) -> tuple[list[Float[Tensor, "batch _ vocab"]], list[Int[Tensor, "batch _"]]]:
    """The logits of each level's nodes, and the first row that each is in."""
    rows = [_first_rows(path, nodes.tokens.shape[1]) for nodes, path in zip(levels, paths, strict=True)]
    vocab_size = logits.shape[-1]
    found = [logits[:, :, level].gather(1, of[..., None].expand(-1, -1, vocab_size)) for level, of in enumerate(rows)]
    return found, rows


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
