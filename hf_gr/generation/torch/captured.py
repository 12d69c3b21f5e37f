# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`cache_implementation="static"`: the loop after the prompt as one captured program. Decodes nothing itself.

1. Plan: what a call reads, and which parts must not change between replays: shapes, options, the numbers of the
   catalogue's structure, and the state of the model. The prompt is computed as usual.
2. Capture, only for `model.warm_up`: `hf_gr.torch.decode.decode` over static buffers is a CUDA graph on a CUDA device,
   and on a CPU the same code uncaptured, so that it is tested there.
3. Replay what was captured for such calls. The prompt's keys are copied into a buffer for so many tokens or a few more
   (its bucket), at the right end, and masked on the left; rules, exclusions and seeds are copied, too. The compiled
   catalogue is read where it is.

All other calls are decoded as usual, and a message says so once.

Axes: B batch, P prompt, H heads, D their width, V vocabulary.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_unflatten
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicCache

from hf_gr.catalogue.sequences import is_integer, to_host
from hf_gr.core.plan import Speculation
from hf_gr.core.widths import bucket, fixed_widths
from hf_gr.generation.messages import say_once
from hf_gr.generation.models import position_limit
from hf_gr.generation.named_catalogues import resolve_index
from hf_gr.torch.decode import Decoded, decode
from hf_gr.torch.device_trie import DeviceTrie
from hf_gr.torch.draft_head import HeadScorer
from hf_gr.torch.drafters import FixedTree, TreeDrafter
from hf_gr.torch.graphs import Captured, backend_of
from hf_gr.torch.noise import Noise
from hf_gr.torch.scorers import Prefilled, Scorer, TreeScorer
from hf_gr.torch.scores import DecodePlan
from hf_gr.torch.transition import DeviceCatalogue

from .caches import Buffers, SlotLayer
from .drafts import Prepared, Search
from .layouts import ordinary_tokens
from .models import decoder_config, layer_types

SMALLEST_BUCKET, STEPS = 16, 4  # sizes a doubling: no bucket is more than 1.25 times the one before
# Processors without a state, which read scores alone.
WARPERS = frozenset([MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper])

PLAIN = frozenset([bool, int, float, str])
# Of PEFT's layers, in addition to plain attributes: which adapters are active or merged, and their scaling.
ADAPTERS = ("_active_adapter", "merged_adapters", "scaling")
# Hooks that act only on request, or on the prompt.
HARMLESS = frozenset(["hf_gr", "transformers"])

# By model its captured programs; they must not hold it.
PROGRAMS: WeakKeyDictionary[Any, list[Program]] = WeakKeyDictionary()
atexit.register(PROGRAMS.clear)  # while the device's driver still answers
_FOUND: ContextVar[list[Program] | None] = ContextVar("found", default=None)

Keys = tuple[Tensor, Tensor] | None  # of a layer; None if it reads another one's

for _kind in (Decoded, DecodePlan, DeviceCatalogue, Noise, Speculation):
    register_pytree_node(
        _kind,
        lambda value: ([getattr(value, field.name) for field in fields(value) if field.init], type(value)),
        lambda values, kind: kind(
            **dict(zip((field.name for field in fields(kind) if field.init), values, strict=True))
        ),
    )


@dataclass(frozen=True)
class Call:
    """What one call reads."""

    values: tuple[DeviceCatalogue, DecodePlan, Any]  # without hidden nodes; the last is what the scorer begins with
    hidden: Sequence[Tensor | None]  # by level and request; nothing if no node is
    keys: Sequence[Keys]  # by layer the prompt's, `[B, H, P, D]`
    widths: Sequence[int]  # by layer how many of the prompt's keys there is room for
    room: int  # tokens after the prompt
    longest: int | None  # tokens of the longest prompt that fits; None for any
    common: tuple[Hashable, ...]  # what else calls of one program have in common
    scorer: Callable[[Any, Any, Any], Scorer]  # of the model, what it begins with, and the prompt's cache
    draft: tuple[tuple[int, ...], ...]  # as `FixedTree` has it

    @cached_property
    def parts(self) -> tuple[list[Any], Any]:
        """The leaves of the values, and how they are put together."""
        return tree_flatten(self.values)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that one program answers, but for the width of what is hidden."""
        leaves, structure = self.parts
        keys = [each and [(*one.shape[:2], one.shape[3], one.dtype, one.device) for one in each] for each in self.keys]
        return self.common, self.widths, self.room, self.draft, keys, [_fact_of(leaf) for leaf in leaves], structure

    @property
    def most_hidden(self) -> int:
        """The largest number of nodes hidden from a request on one level."""
        return max((nodes.shape[1] for nodes in self.hidden if nodes is not None), default=0)


@dataclass(frozen=True, eq=False)
class Program:
    """A captured decode."""

    key: tuple[Any, ...]  # of the calls that it answers
    most_hidden: int  # nodes that may be hidden from a request on one level
    longest: int | None  # tokens of their longest prompt; None for any
    captured: Captured
    catalogue: Callable[[], Any]  # a weak reference to the one that it reads

    def answers(self, call: Call) -> bool:
        """Whether a call is one of those that it was captured for."""
        return call.most_hidden <= self.most_hidden and self.key == call.key


NOT_CAPTURED = "cache_implementation='static' with a call that model.warm_up has not captured: decoding without graphs"


@contextmanager
def capturing() -> Iterator[list[Program]]:
    """Within this context calls capture what is not captured; gives the programs that answered."""
    before = _FOUND.set(found := [])
    try:
        yield found
    finally:
        _FOUND.reset(before)


def decode_captured(model: Any, prepared: Prepared, search: Search) -> Decoded | None:
    """Decode a call by a captured program; None if the caller has to, and the search is not used up.

    Within `capturing` a call that cannot be captured is a `ValueError`.
    """
    found = _FOUND.get()
    obstacle = obstacle_of(prepared, search)
    state, of_model = state_of(model) if obstacle is None else (None, None)  # which takes time
    if (obstacle := obstacle or of_model) is not None:
        if found is not None:
            raise ValueError(f"warm_up with {obstacle}, expected calls that can be captured")
        say_once(f"cache_implementation='static' with {obstacle}: decoding without graphs")
        return None
    programs = PROGRAMS.setdefault(model, [])
    for gone in [program for program in programs if program.catalogue() is None]:
        programs.remove(gone)  # one by one: another thread may be appending
    if found is None and not programs:
        say_once(NOT_CAPTURED)  # before the plan, which computes the prompt without the nodes of a draft
        return None
    call = plan_of(model, prepared, search, state)
    program = next((program for program in programs if program.answers(call)), None)
    if found is not None:
        if program is None:
            programs.append(program := capture(call, model, prepared))
        found.append(program)
    if program is None:
        say_once(NOT_CAPTURED)
        return None
    decoded, fits = program.captured.replay(call)
    return decoded if fits is None or bool(fits.all()) else None


# Plan


def plan_of(model: Any, prepared: Prepared, search: Search, state: Hashable) -> Call:
    """What a call reads; computes the prompt."""
    warpers = tuple(_warpers_of(prepared.plan) or ())
    # Only the number of prompts is read of their tokens.
    plan = replace(prepared.plan, prompt=prepared.input_ids[:, :1], exit_early=False, processors=None)
    catalogue = search.catalogue
    hidden, bare = catalogue.hidden or (), replace(catalogue, hidden=None)
    scorer = search.scorer
    if isinstance(scorer, HeadScorer):
        vocab_size = scorer.vocab_size
        return Call(
            (bare, plan, scorer.hidden),
            hidden,
            keys=(),
            widths=(),
            room=0,
            longest=None,
            common=("head", state, warpers, vocab_size),
            scorer=lambda model, states, cache: HeadScorer(model.draft_head, states, vocab_size=vocab_size),
            draft=(),
        )
    assert isinstance(scorer, TreeScorer)
    prompt, how = scorer.prefill(), {"mask_dtype": scorer.mask_dtype, "argument": scorer.argument}
    config, length = decoder_config(model), prompt.mask.shape[-1]
    limit, levels = position_limit(model.config), catalogue.max_length
    size = bucket_of(length, most=None if limit is None else limit - levels)
    # A sliding layer sees only the last keys.
    kept = {
        kind: min(size, max(config.sliding_window - 1, 1)) if kind == "sliding_attention" else size
        for kind in layer_types(config)
    }
    windows = {
        kind: (window, size if window is None else kept["sliding_attention"])
        for kind, (window, _) in prompt.windows.items()
    }
    layers = list(zip(layer_types(config), prompt.cache.layers, strict=False))
    draft = _draft_of(prepared, search)
    mask = torch.nn.functional.pad(prompt.mask, (size - length, 0))

    def new_scorer(model: Any, start: tuple[Tensor, Tensor, Tensor], cache: Any) -> Scorer:
        logits, mask, next_position = start
        prompt = Prefilled(logits, cache, mask=mask, next_position=next_position, windows=windows)
        return TreeScorer(model, lambda: prompt, **how)

    return Call(
        (bare, plan, (prompt.logits, mask, prompt.next_position)),
        hidden,
        keys=[(layer.keys, layer.values) if layer.is_initialized else None for _, layer in layers],
        widths=[kept[kind] for kind, _ in layers],
        room=plan.width * (levels - 1) + sum(map(sum, draft)),
        longest=size,
        common=("tree", state, warpers, tuple(windows.items()), *how.values()),
        scorer=new_scorer,
        draft=draft,
    )


def obstacle_of(prepared: Prepared, search: Search) -> str | None:
    """Why a call cannot be captured, in words that follow "with"; None if only its model may prevent it."""
    plan = prepared.plan
    if not isinstance(search.scorer, HeadScorer) and "encoder_outputs" in prepared.model_kwargs:
        return "an encoder-decoder"
    found = {
        "verification='relaxed'": plan.is_relaxed,
        "drafting='auto'": prepared.config.drafting == "auto",  # which times forwards
        "logits processors": _warpers_of(plan) is None,
        "stopping criteria": plan.stopping_criteria is not None,
        "output_scores or output_logits of every step": plan.keeps_steps,
        "exact=True": plan.max_nodes > 0,
        "synced_gpus": prepared.synced_gpus,
    }
    return next((name for name, is_there in found.items() if is_there), None)


def bucket_of(length: int, *, most: int | None = None) -> int:
    """The tokens that a prompt of a length gets memory for; its own beyond the `most` that have positions.

    Example:
        >>> [bucket_of(length) for length in (9, 17, 33, 1000)]
        [16, 20, 40, 1024]
    """
    size = bucket(length, least=SMALLEST_BUCKET, steps=STEPS)
    return size if most is None else max(min(size, most), length)


def _draft_of(prepared: Prepared, search: Search) -> tuple[tuple[int, ...], ...]:
    """The nodes that a program drafts, by level of the beams; none without the catalogue's own draft."""
    drafter, plan = search.drafter, prepared.plan
    if drafter is None:
        return ()
    if not isinstance(drafter, TreeDrafter) or drafter.assistant is not None:
        say_once(
            f"drafting={prepared.config.drafting!r} with cache_implementation='static': decoding by a graph without a "
            "draft, which answers the same"
        )
        return ()
    return fixed_widths(search.catalogue.nodes_per_level, plan.width, budget=drafter.budget)


def _warpers_of(plan: DecodePlan) -> list[Hashable] | None:
    """The processors of a call, each by its kind and options; None if one is unknown to us."""
    processors: Any = plan.processors or ()
    every = [one for part in processors for one in (*part, None)]  # None between before and after
    if any(one is not None and type(one) not in WARPERS for one in every):
        return None
    return [None if one is None else (type(one), *sorted(vars(one).items())) for one in every]


def _fact_of(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    if isinstance(leaf, DeviceTrie):
        return id(leaf)  # a program keeps it, so that no other one gets its id
    return type(leaf), leaf


# The model: a captured forward reads weights at the addresses that they had, and does what the modules did then.


def state_of(model: Any) -> tuple[Hashable, str | None]:
    """The state of a model, and why it cannot be captured (after "with"), or None; 0.1 ms a layer of Qwen3."""
    obstacle = "training mode" if model.training else None
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        obstacle = obstacle or "forward hooks of all modules"
    config = vars(decoder_config(model))  # such as its attention implementation
    facts: list[Hashable] = [torch.get_float32_matmul_precision()]
    facts += (item for item in config.items() if type(item[1]) in PLAIN)
    devices: set[torch.device] = set()
    for module in model.modules():
        own = vars(module)
        facts += (type(module), *(item for item in own.items() if type(item[1]) in PLAIN))
        if "_active_adapter" in own:
            facts.append(repr([own.get(name) for name in ADAPTERS]))
        obstacle = obstacle or _hook_of(own)
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                devices.add(tensor.device)
                facts.append((_address(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()))
    if len(devices) > 1:
        obstacle = obstacle or "a model on several devices"
    elif any(device.type != "meta" and torch.is_autocast_enabled(device.type) for device in devices):
        obstacle = obstacle or "autocast"
    return tuple(facts), obstacle


def _hook_of(own: Mapping[str, Any]) -> str | None:
    """A module's hook that a replay would not run."""
    if "_hf_hook" in own:  # of accelerate: moves weights or inputs
        return "hooks of accelerate"
    hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
    foreign = [hook for hook in hooks if str(getattr(hook, "__module__", "")).split(".")[0] not in HARMLESS]
    return "forward hooks" if foreign else None


def _address(tensor: Tensor) -> Hashable:
    """Where a tensor's numbers are; of a subclass that wraps others (quantised, distributed), where theirs are."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return id(tensor), *(_address(getattr(tensor, name)) for name in names)
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return id(tensor)


# Capture


@torch.inference_mode(False)  # its buffers could not be written to after it
@torch.no_grad()
def capture(call: Call, model: Any, prepared: Prepared) -> Program:
    """Capture the decode of calls like this one."""
    leaves, structure = call.parts
    buffers = [leaf.new_zeros(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    catalogue, plan, start = tree_unflatten(buffers, structure)
    plan = replace(plan, processors=prepared.plan.processors)
    most_hidden = call.most_hidden and 1 << (call.most_hidden - 1).bit_length()
    num_rows, device = len(plan.prompt), catalogue.device
    hidden = tuple(torch.zeros((num_rows, most_hidden), dtype=torch.long, device=device) for _ in call.hidden)
    catalogue = replace(catalogue, hidden=hidden or None)
    keys = [_room_for(each, width + call.room) for each, width in zip(call.keys, call.widths, strict=True)]
    layers = [_layer_of(*each) for each in zip(keys, call.widths, strict=True)]
    written = [0] * len(keys)  # by layer: of the prompt's columns, how many on the right hold anything
    copied = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    of_model, draft, new_scorer = ref(model), call.draft, call.scorer  # a program keeps neither its model nor its call

    def fill(call: Call) -> None:
        for number in copied:
            buffers[number].copy_(call.parts[0][number], non_blocking=True)
        for level, buffer in enumerate(hidden):
            nodes = call.hidden[level] if call.hidden else None
            buffer.zero_()  # the root, which hides nothing; ascending: it comes first
            if nodes is not None:
                buffer[:, buffer.shape[1] - nodes.shape[1] :].copy_(nodes, non_blocking=True)
        for number, (of_layer, states) in enumerate(zip(keys, call.keys, strict=True)):
            width, before = call.widths[number], written[number]
            for buffer, given in zip(of_layer or (), states or (), strict=True):
                count = written[number] = min(given.shape[-2], width)
                if before > count:  # nothing of another prompt is left: a masked NaN would still spread
                    buffer[..., width - before : width - count, :].zero_()
                buffer[..., width - count : width, :].copy_(given[..., -count:, :], non_blocking=True)

    def run() -> tuple[Decoded, Tensor | None]:
        drafter = FixedTree(draft) if any(draft) else None
        decoded = decode(new_scorer(of_model(), start, _fresh(layers)), catalogue, plan, drafter)
        return decoded, None if drafter is None else drafter.fits

    static = [buffer for number, buffer in enumerate(buffers) if number in copied]
    static += [buffer for part in (hidden, *(each or () for each in keys)) for buffer in part]
    captured = Captured(backend_of(device), static, fill=fill, run=run, inputs=call)
    return Program(call.key, most_hidden, call.longest, captured, ref(prepared.rules.shared.trie))


def _room_for(keys: Keys, length: int) -> Keys:
    if keys is None:
        return None
    of_keys, of_values = (one.new_zeros((*one.shape[:2], length, one.shape[3])) for one in keys)
    return of_keys, of_values


def _layer_of(buffers: Keys, width: int) -> SlotLayer:
    """A layer over buffers that hold the prompt's keys already; those of nodes are written after them."""
    if buffers is None:
        return SlotLayer(0)
    keys, values = buffers
    layer = SlotLayer(0, keys[..., :width, :], values[..., :width, :])
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


# Warm-up: by `generate` alone, on meaningless tokens


@dataclass(frozen=True)
class Capture:
    """A captured decode.

    Attributes:
        batch_size: prompts of a call that it answers.
        prompt_length: tokens of the longest of them; None if a draft head answers, whatever their length.
        num_beams: of the search.
        num_bytes: memory of its buffers and its graph; a CPU has no graph.
        seconds: that the capture took.
    """

    batch_size: int
    prompt_length: int | None
    num_beams: int
    num_bytes: int
    seconds: float


def warm_up(
    model: Any,
    index: Any,
    *,
    batch_sizes: int | Sequence[int],
    prompt_lengths: int | Sequence[int],
    num_beams: int | Sequence[int],
    options: dict[str, Any],
) -> list[Capture]:
    """Capture the decodes of calls to come; see `GRGenerationMixin.warm_up`."""
    sizes, lengths, widths = (
        _read(name, value)
        for name, value in (("batch_sizes", batch_sizes), ("prompt_lengths", prompt_lengths), ("num_beams", num_beams))
    )
    if (kind := options.pop("cache_implementation", "static")) != "static":
        raise ValueError(f"cache_implementation={kind!r}, expected 'static': others capture nothing")
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"warm_up of a {type(model).__name__}, an encoder-decoder, expected a decoder: only those are captured"
        )
    limit, levels = position_limit(model.config), _num_levels(model, index)
    if limit is not None and max(lengths) + levels > limit:
        raise ValueError(
            f"prompt_lengths has {max(lengths)}, expected at most {limit - levels}: the model has {limit} positions, "
            f"and the catalogue's sequences have {levels} tokens"
        )
    found: dict[Any, Capture] = {}
    for width, size, length in product(widths, sizes, sorted(lengths)):
        tokens = ordinary_tokens(model, size * length).view(size, length)
        call = options | {"attention_mask": torch.ones_like(tokens), "constraint_index": index, "num_beams": width}
        with capturing() as programs:
            model.generate(tokens, cache_implementation="static", **call)
        if not programs:
            raise ValueError(
                "warm_up of a call in transformers' own loop, expected a model that takes beams as a tree"
            )
        for program in programs:
            captured = program.captured
            found[program] = Capture(size, program.longest, width, captured.num_bytes, captured.seconds)
    return list(found.values())


def _read(name: str, value: Any) -> list[int]:
    values = np.ravel(to_host(value)).tolist()
    if not values or not all(is_integer(one) and one > 0 for one in values):
        raise ValueError(f"{name}={value!r}, expected a positive integer, or several of them")
    return [int(one) for one in values]


def _num_levels(model: Any, index: Any) -> int:
    """Tokens of the catalogue's longest sequence."""
    named = getattr(model.generation_config, "constraint_index", None) if index is None else index
    if named is None or named is False:
        raise ValueError("constraint_index is missing, expected a catalogue: pass warm_up(index, ...)")
    indexes = resolve_index(model, named, may_be_list=True)
    return max(one.max_length for one in (indexes if isinstance(indexes, list | tuple) else [indexes]))
