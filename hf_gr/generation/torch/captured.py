# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`cache_implementation="static"`: the loop after the prompt as one captured program. Decodes nothing by itself.

The program is `hf_gr.torch.decode.decode` over static buffers: a CUDA graph on a CUDA device, and on a CPU the same
code uncaptured, so that it is tested there. The prompt is computed as ever; its keys are copied into a buffer for so
many tokens or a few more (its bucket), at the right end, and masked on the left. What a catalogue's rules, exclusions
and additions are is copied, too; the compiled catalogue is read where it is. What may not change between replays is in
the program's key: shapes, options, the numbers of the catalogue's structure, and the state of the model.

Calls that a program cannot answer are decoded as ever, and a message says so once.

Axes: B batch, P prompt, H heads, D their width, V vocabulary.
"""

from __future__ import annotations

import atexit
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol
from weakref import ref

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicCache

from hf_gr.core.widths import fixed_widths
from hf_gr.generation.messages import say_once
from hf_gr.generation.models import position_limit
from hf_gr.torch.decode import Decoded, decode
from hf_gr.torch.draft_head import HeadScorer
from hf_gr.torch.drafters import FixedTree, TreeDrafter
from hf_gr.torch.graphs import MOST_KEYS, GraphCache, Recipe
from hf_gr.torch.plan import DecodePlan
from hf_gr.torch.scorers import Prefilled, Scorer, TreeScorer
from hf_gr.torch.static import buffers_like, copy_into, num_bytes, put_together, take_apart
from hf_gr.torch.transition import DeviceCatalogue, DevicePart
from hf_gr.torch.visibility import Visibility

from .caches import Buffers, SlotLayer
from .drafts import Prepared, Search
from .model_state import ModelState, state_of
from .models import layer_types

SMALLEST_BUCKET = 16
# Of a power of two, so that no bucket is more than 1.25 times the one before.
STEPS = (1.0, 1.25, 1.5, 1.75)
# Processors without a state, which read scores alone.
WARPERS = frozenset([MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper])

# All captured programs of this process, whatever the model: they share the device's memory.
GRAPHS = GraphCache(report=say_once)
atexit.register(GRAPHS.clear)  # while the device's driver still answers
# The key of a call's program and the longest prompt that it answers; or else, why there is none.
Attempt = tuple[Hashable, int | None, str | None]
_AT_ONCE: ContextVar[list[Attempt] | None] = ContextVar("at_once", default=None)


Widths = tuple[tuple[int, ...], ...]
NO_WIDTHS: Widths = ()


class Drafts:
    """Whether drafts of fixed widths fit, by program."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Hashable, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def fits(self, key: Hashable, fits: Tensor) -> bool:
        """Whether all rows of a draft fitted; synchronises."""
        found = bool(fits.all())
        with self._lock:
            counts = self._counts.setdefault(key, [0, 0])
            self._counts.move_to_end(key)
            counts[0] += 1
            counts[1] += not found
            if len(self._counts) > MOST_KEYS:
                self._counts.popitem(last=False)
        return found

    def pays(self, key: Hashable) -> bool:
        """Whether a draft is worth trying: one that does not fit costs a decode, one that fits saves a part of one."""
        with self._lock:
            tried, missed = self._counts.get(key, (0, 0))
        return missed <= 2 or missed * 4 <= tried


DRAFTS = Drafts()


@contextmanager
def capturing_at_once() -> Iterator[list[Attempt]]:
    """Within this context a call captures on the first use of its shape; gives what became of that."""
    attempts: list[Attempt] = []
    before = _AT_ONCE.set(attempts)
    try:
        yield attempts
    finally:
        _AT_ONCE.reset(before)


def decode_captured(model: Any, prepared: Prepared, search: Search) -> Decoded | None:
    """Decode a call by a captured program.

    Args:
        model: the model.
        prepared: the call.
        search: the same, ready to be decoded; not used up unless there is an answer.

    Returns:
        The result; None if the caller has to decode by itself: the shape is new, or cannot be captured.
    """
    attempts = _AT_ONCE.get()
    obstacle = obstacle_of(prepared, search)
    state = state_of(model) if obstacle is None else None  # which takes time
    if state is None or (obstacle := state.obstacle) is not None:
        if attempts is not None:
            attempts.append((None, None, obstacle))
        say_once(f"cache_implementation='static' with {obstacle}: decoding without graphs")
        return None
    widths = _widths_of(prepared, search)
    decoded, is_whole = _run(model, prepared, search, state, widths)
    return decoded if is_whole else _run(model, prepared, search, state, NO_WIDTHS)[0]


def _run(
    model: Any, prepared: Prepared, search: Search, state: ModelState, widths: Widths
) -> tuple[Decoded | None, bool]:
    """What the program of a call answers, and whether all that it drafted fitted; else that is no answer."""
    given = _of_head(search.scorer, prepared, search) or _of_tree(model, prepared, search, widths)
    key, attempts = (*given.structure, id(model), state.token), _AT_ONCE.get()
    if any(widths) and not DRAFTS.pays(key):
        return None, False
    if attempts is not None:
        attempts.append((key, given.start.longest, None))
    of_model = ref(model)  # a program must not keep its model
    found = GRAPHS.run(
        key,
        given,
        device=given.catalogue.device,
        size=given.size,
        make=lambda: given.recipe(of_model),
        owners=(*state.modules, prepared.rules.shared.trie),
        at_once=attempts is not None,
    )
    if found is None:
        return None, True
    decoded, fits = found
    return decoded, fits is None or DRAFTS.fits(key, fits)


def _widths_of(prepared: Prepared, search: Search) -> Widths:
    """The nodes that a program drafts, by level of the beams; none without the catalogue's own draft."""
    drafter, plan = search.drafter, prepared.plan
    if drafter is None:
        return NO_WIDTHS
    if not isinstance(drafter, TreeDrafter) or drafter.assistant is not None:
        say_once(
            f"drafting={prepared.config.drafting!r} with cache_implementation='static': decoding by a graph without a "
            "draft, which answers the same"
        )
        return NO_WIDTHS
    return fixed_widths(search.catalogue.nodes_per_level, plan.width, budget=drafter.budget)


def obstacle_of(prepared: Prepared, search: Search) -> str | None:
    """Why a call cannot be captured, in words that follow "with"; None if nothing but its model stands against it."""
    plan = prepared.plan
    if not isinstance(search.scorer, HeadScorer) and "encoder_outputs" in prepared.model_kwargs:
        return "an encoder-decoder"
    found = {
        "verification='relaxed'": plan.is_relaxed,
        "drafting='auto'": prepared.config.drafting == "auto",  # which times forwards
        "logits processors": _warpers_of(plan) is None,
        "stopping criteria": plan.stopping_criteria is not None,
        "output_scores or output_logits of every step": plan.keeps_steps,
        "synced_gpus": prepared.synced_gpus,
    }
    return next((name for name, is_there in found.items() if is_there), None)


def bucket_of(length: int, *, most: int | None = None) -> int:
    """The tokens that a prompt of a length gets memory for.

    Args:
        length: of the prompt.
        most: that the model has positions for; a longer prompt gets exactly its own.

    Example:
        >>> [bucket_of(length) for length in (9, 17, 33, 1000)]
        [16, 20, 40, 1024]
    """
    power = SMALLEST_BUCKET
    while power * 2 <= length:
        power *= 2
    bucket = next((int(power * step) for step in STEPS if power * step >= length), power * 2)
    return bucket if most is None else max(min(bucket, most), length)


def _warpers_of(plan: DecodePlan) -> tuple[Hashable, ...] | None:
    """The processors of a call, each by its kind and options; None if one is none of ours to know."""
    processors: Any = plan.processors or ()
    every = [one for part in processors for one in (*part, None)]  # None between before and after
    if any(one is not None and type(one) not in WARPERS for one in every):
        return None
    return tuple(None if one is None else (type(one), *sorted(vars(one).items())) for one in every)


@dataclass(frozen=True)
class _Given:
    """What one call reads that may change between replays, and what of it may not.

    Attributes:
        start: what the scorer begins with.
        catalogue: of the call, hidden nodes padded.
        plan: of the call.
        widths: what is drafted, as `FixedTree` has it.
    """

    start: _Start
    catalogue: DeviceCatalogue
    plan: DecodePlan
    widths: Widths

    @cached_property
    def stays(self) -> tuple[Any, ...]:
        """What is read where it is."""
        base = self.catalogue.base
        return (base.trie,) if base.wide is None else (base.trie, base.wide)

    @cached_property
    def parts(self) -> Any:
        """All but the prompt's keys."""
        return take_apart(self._values, stays=self.stays)

    @property
    def _values(self) -> tuple[DeviceCatalogue, DecodePlan, Any]:
        return self.catalogue, replace(self.plan, processors=None), self.start.values

    @property
    def structure(self) -> tuple[Hashable, ...]:
        """What a program is captured for, besides the model."""
        return type(self.start), self.start.structure, _warpers_of(self.plan), self.parts.structure, self.widths

    @property
    def size(self) -> int:
        """Bytes of the buffers."""
        return num_bytes(self.parts.tensors) + self.start.size

    def recipe(self, model: Callable[[], Any]) -> Recipe:
        """Buffers for calls like this one, and the program over them."""
        buffers = buffers_like(self.parts.tensors)
        catalogue, plan, values = put_together(self._values, buffers, stays=self.stays)
        plan = replace(plan, processors=self.plan.processors)
        of_start, fill_start, new_scorer = self.start.static(values, model)

        def fill(given: _Given) -> None:
            copy_into(buffers, given.parts.tensors)
            fill_start(given.start)

        widths = self.widths  # the program must not keep this call

        def run() -> tuple[Decoded, Tensor | None]:
            drafter = FixedTree(widths) if any(widths) else None
            decoded = decode(new_scorer(), catalogue, plan, drafter)
            return decoded, None if drafter is None else drafter.fits

        return Recipe((*buffers, *of_start), fill, run)


# Buffers, how a call fills them, and how scorers over them are made.
Static = tuple[tuple[Tensor, ...], Callable[[Any], None], Callable[[], Scorer]]


class _Start(Protocol):
    """What a scorer begins with.

    Attributes:
        values: its tensors that are copied as they are.
        structure: what else a program is captured for.
        size: bytes of the buffers for what is not among the values.
        longest: tokens of the longest prompt that fits; None for any.
    """

    values: Any
    structure: Hashable
    size: int
    longest: int | None

    def static(self, values: Any, model: Callable[[], Any]) -> Static:
        """Buffers of its own, how they are filled, and how scorers over them and the buffered values are made."""
        ...


@dataclass(frozen=True)
class _Hidden:
    """What a draft head begins with that decides alone: hidden states."""

    values: Float[Tensor, "batch positions hidden"]
    vocab_size: int | None
    size: int = 0
    longest: int | None = None

    @property
    def structure(self) -> Hashable:
        return self.vocab_size

    def static(self, values: Any, model: Callable[[], Any]) -> Static:
        vocab_size = self.vocab_size
        return (), lambda start: None, lambda: HeadScorer(model().draft_head, values, vocab_size=vocab_size)


@dataclass(frozen=True)
class _Prompt:
    """What a tree begins with: prompts, and memory for the nodes after them.

    Attributes:
        values: logits, mask and next positions; the mask is as wide as the bucket.
        keys: by layer its keys and values `[B, H, P, D]`; None for a layer that reads another one's.
        widths: by layer how many of the prompt's keys it has room for.
        room: tokens after the prompt.
        windows: as `Prefilled.windows`, for these widths.
        visibility: how nodes are told what they see.
    """

    values: tuple[Tensor, Tensor, Tensor]
    keys: Sequence[tuple[Tensor, Tensor] | None]
    widths: Sequence[int]
    room: int
    windows: Mapping[str | None, tuple[int | None, int]]
    visibility: Visibility

    @property
    def longest(self) -> int:
        return self.values[1].shape[-1]

    @property
    def _shapes(self) -> list[tuple[tuple[int, ...], torch.dtype, torch.device] | None]:
        """Of each layer's keys, then its values, with room."""
        return [
            None
            if states is None
            else ((*states.shape[:-2], width + self.room, states.shape[-1]), states.dtype, states.device)
            for of_layer, width in zip(self.keys, self.widths, strict=True)
            for states in (of_layer or (None, None))
        ]

    @property
    def structure(self) -> Hashable:
        windows = tuple(self.windows.items())
        return tuple(self._shapes), tuple(self.widths), self.room, windows, take_apart(self.visibility).structure

    @property
    def size(self) -> int:
        return sum(torch.Size(each[0]).numel() * each[1].itemsize for each in self._shapes if each is not None)

    def static(self, values: Any, model: Callable[[], Any]) -> Static:
        logits, mask, next_position = values
        made = [None if each is None else torch.zeros(each[0], dtype=each[1], device=each[2]) for each in self._shapes]
        widths, windows, visibility = self.widths, self.windows, self.visibility
        buffers: list[tuple[Tensor, Tensor] | None] = [
            None if keys is None or values is None else (keys, values)
            for keys, values in zip(made[::2], made[1::2], strict=True)
        ]
        layers = [_layer_of(*each) for each in zip(buffers, widths, strict=True)]

        written = [0] * len(buffers)  # by layer: of the prompt's columns, how many on the right hold anything

        def fill(start: _Prompt) -> None:
            for number, (of_layer, states) in enumerate(zip(buffers, start.keys, strict=True)):
                width, before = widths[number], written[number]
                for buffer, given in zip(of_layer or (), states or (), strict=True):
                    count = written[number] = min(given.shape[-2], width)  # a sliding layer sees only the last ones
                    if before > count:  # nothing of another prompt is left: a masked NaN would still spread
                        buffer[..., width - before : width - count, :].zero_()
                    buffer[..., width - count : width, :].copy_(given[..., -count:, :], non_blocking=True)

        def new_scorer() -> Scorer:
            prompt = Prefilled(logits, _fresh(layers), mask=mask, next_position=next_position, windows=windows)
            return TreeScorer(model(), lambda: prompt, visibility=visibility)

        return tuple(each for each in made if each is not None), fill, new_scorer


def _of_head(scorer: Scorer, prepared: Prepared, search: Search) -> _Given | None:
    """A call that the draft head decodes alone; None if it does not."""
    if not isinstance(scorer, HeadScorer):
        return None
    return _given(_Hidden(scorer.hidden, scorer.vocab_size), prepared, search, NO_WIDTHS)


def _of_tree(model: Any, prepared: Prepared, search: Search, widths: Widths) -> _Given:
    """A call in the tree layout; computes the prompt."""
    scorer, plan = search.scorer, prepared.plan
    assert isinstance(scorer, TreeScorer)
    prompt, visibility = scorer.prefill(), scorer.visibility
    config, length = model.config.get_text_config(decoder=True), prompt.mask.shape[-1]
    num_levels = search.catalogue.max_length
    limit = position_limit(model.config)
    bucket = bucket_of(length, most=None if limit is None else limit - num_levels)
    kinds = {kind: config.sliding_window if kind == "sliding_attention" else None for kind in set(layer_types(config))}
    kept = {kind: bucket if window is None else min(bucket, max(window - 1, 1)) for kind, window in kinds.items()}
    layers = list(zip(layer_types(config), prompt.cache.layers, strict=False))
    windows = {
        kind: (window, bucket if window is None else kept["sliding_attention"])
        for kind, (window, _) in prompt.windows.items()
    }
    start = _Prompt(
        (prompt.logits, torch.nn.functional.pad(prompt.mask, (bucket - length, 0)), prompt.next_position),
        keys=[(layer.keys, layer.values) if layer.is_initialized else None for _, layer in layers],
        widths=[kept[kind] for kind, _ in layers],
        room=plan.width * (num_levels - 1) + sum(map(sum, widths)),
        windows=windows,
        visibility=visibility,
    )
    return _given(start, prepared, search, widths)


def _given(start: Any, prepared: Prepared, search: Search, widths: Widths) -> _Given:
    # Only the number of prompts is read of their tokens.
    plan = replace(prepared.plan, prompt=prepared.input_ids[:, :1], exit_early=False)
    catalogue, num_rows = search.catalogue, len(prepared.input_ids)
    added = None if catalogue.added is None else _with_padding(catalogue.added, num_rows)
    padded = replace(catalogue, base=_with_padding(catalogue.base, num_rows), added=added)
    return _Given(start, padded, plan, widths)


def _with_padding(part: DevicePart, num_rows: int) -> DevicePart:
    """A segment whose hidden nodes, if it has any, are a power of two on every level; the root hides nothing."""
    if part.hidden is None:
        return part
    none = torch.zeros((num_rows, 1), dtype=torch.long, device=part.trie.tokens.device)
    hidden = [none if nodes is None else nodes for nodes in part.hidden]
    widths = [1 << (nodes.shape[1] - 1).bit_length() for nodes in hidden]
    return replace(
        part,
        hidden=tuple(
            torch.nn.functional.pad(nodes, (width - nodes.shape[1], 0))  # ascending: the root comes first
            for nodes, width in zip(hidden, widths, strict=True)
        ),
    )


def _layer_of(buffers: tuple[Tensor, Tensor] | None, width: int) -> SlotLayer:
    """A layer over buffers that hold the prompt's keys already; those of nodes are written behind them."""
    if buffers is None:
        return SlotLayer(0)
    keys, values = buffers
    layer = SlotLayer.of(keys[..., :width, :], values[..., :width, :], room=0)
    layer.buffers = Buffers(keys, values, width)
    return layer


def _fresh(layers: Sequence[SlotLayer]) -> DynamicCache:
    """A cache of layers that have no nodes yet."""
    cache = DynamicCache()
    for layer in layers:
        layer = copy(layer)  # a new one would copy from the host, even if only an empty list
        layer.buffers = copy(layer.buffers)
        cache.layers.append(layer)
    return cache
