# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The scorer of a layout over a prompt. Knows transformers' caches, masks and positions; chooses no layout.

Axes: B batch, P prompt, R paths a request, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_gr.generation import internals
from hf_gr.torch.scorers import BatchScorer, Prefilled, TreeScorer, Unread
from hf_gr.torch.transfers import to_device
from hf_gr.torch.tree import to_additive
from hf_gr.torch.visibility import Visibility

from .attention import ARGUMENT, attend_in_parts
from .caches import cache_of, copy_cache, keeps_all_keys, to_keep_all_keys, to_plain, with_slots
from .cross_attention import fold_beams, foldable_modules
from .models import layer_types, mask_dtype, takes_argument
from .prompts import catch_hidden_states, positions_of


class Prompts:
    """Prompts of a batch, computed when that is needed, and at most once: alone, or together with nodes after them.

    Args:
        input_ids: the decoder's tokens.
        kwargs: the other arguments of their forward, prepared by transformers.
        run: their forward alone, from which transformers' own next step would continue.
        takes_nodes: whether nodes may be read in their own forward instead.
        tail: tokens to be read after each prompt, for their hidden states; they are not part of it.
        catch: told those of a prompt's last token and of its tail, if nodes are read with it.
        room: nodes whose keys will follow the prompts', as far as that is known.
    """

    def __init__(
        self,
        input_ids: Int[Tensor, "batch prompt"],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
        *,
        takes_nodes: bool = False,
        tail: Sequence[int] = (),
        catch: Callable[[Tensor], None] | None = None,
        room: int = 0,
    ) -> None:
        self.input_ids = input_ids
        self.kwargs = kwargs
        self.run = run
        self.takes_nodes = takes_nodes
        self.tail = tail
        self.catch = catch
        self.room = room
        self.read_with_nodes: Callable[[], Any] | None = None  # gives their cache, if they were read so

    @cached_property
    def outputs(self) -> Any:
        """What the model returns for them alone; scorers do not change its cache."""
        return self.run()

    @property
    def cache(self) -> Any:
        """Their cache, for another call; copied from that of a forward with nodes.

        Else its tensors are the first part of the call's own: while they live, so does the rest.
        """
        return (
            to_plain(self.outputs.get("past_key_values")) if self.read_with_nodes is None else self.read_with_nodes()
        )

    @property
    def mask(self) -> Tensor | None:
        """The mask of real tokens; None if there is none."""
        return self.kwargs.get("attention_mask")


def make_scorer(
    model: Any, layout: str, prompts: Prompts, *, width: int, scores_ahead: bool = False, in_parts: bool = False
) -> TreeScorer | BatchScorer:
    """A scorer over prompts.

    A single path over unpadded prompts has nothing to share and nothing to mask: it takes the batch layout, which is
    then transformers' own.

    Args:
        model: the model.
        layout: from `layouts.choose_layout`.
        prompts: shared by all scorers over them.
        width: paths a request.
        scores_ahead: whether nodes of several levels will be scored together, which takes the tree layout even for a
            single path.
        in_parts: whether the model's attention can be ours where nodes are scored.
    """
    if model.config.is_encoder_decoder:
        reader = _EncoderDecoderPaths(model, prompts, folds=layout == "folded")
        return BatchScorer(reader, takes_levels=reader.folds and reader.keeps_keys)
    if layout == "tree" and (width > 1 or prompts.mask is not None or scores_ahead):
        if in_parts:
            attend_in_parts(model)
        return TreeScorer(
            model,
            lambda: _prefilled(model, prompts),
            visibility=Visibility(mask_dtype(model), ARGUMENT if in_parts else None),
            unread=_unread(model, prompts) if prompts.takes_nodes else None,
        )
    # Every path has a copy of the prompt's keys here: many more paths than beams would cost more than they save.
    return BatchScorer(_DecoderPaths(model, prompts), takes_levels=False)


def _prefilled(model: Any, prompts: Prompts) -> Prefilled:
    outputs = prompts.outputs
    logits, length = outputs.logits[:, -1:].to(prompts.input_ids.device), outputs.past_key_values.get_seq_length()
    _check_prefix(length, prompts.kwargs)
    mask = _prompt_mask(prompts, length)
    next_position = _next_position(model, prompts)
    return Prefilled(
        logits,
        to_keep_all_keys(outputs.past_key_values, room=prompts.room),
        mask=mask,
        next_position=mask.sum(-1, keepdim=True) if next_position is None else next_position,
        windows=_windows(model.config.get_text_config(decoder=True), outputs.past_key_values, length),
    )


def _unread(model: Any, prompts: Prompts) -> Unread:
    """Prompts that are read together with nodes; positions are those of transformers' own first step."""
    input_ids, config = prompts.input_ids, model.config.get_text_config(decoder=True)
    mask = _prompt_mask(prompts, input_ids.shape[1])
    kwargs: dict[str, Any] = {"attention_mask": mask.long(), "use_cache": True}
    if (own := prompts.kwargs.get("position_ids")) is not None:
        kwargs["position_ids"] = own.clone()  # some models count on in place
    given = model.prepare_inputs_for_generation(
        input_ids, past_key_values=DynamicCache(), is_first_iteration=True, **kwargs
    )
    positions = given.get("position_ids")
    positions = positions_of(mask.long()) if positions is None else positions
    windows: dict[str | None, int | None] = {
        kind: config.sliding_window if kind == "sliding_attention" else None for kind in layer_types(config)
    }

    def read(num_last: int, **arguments: Any) -> tuple[Any, Any]:
        cache, length = with_slots(DynamicCache(), prompts.room), input_ids.shape[1]
        last = {"logits_to_keep": num_last} if takes_argument(model, "logits_to_keep") else {}
        with catch_hidden_states(model) if prompts.catch else nullcontext([]) as caught:
            outputs = model(**arguments, **last, past_key_values=cache, use_cache=True, return_dict=True)
        if prompts.catch:
            prompts.catch(caught[-1][:, length - 1 : length + len(prompts.tail)])
        prompts.read_with_nodes = partial(_cropped, copy_cache(cache), length)
        return outputs, cache

    return Unread(
        input_ids,
        positions.expand(*positions.shape[:-2], *input_ids.shape),
        mask,
        windows if len(windows) > 1 else {None: next(iter(windows.values()))},
        tail=to_device(prompts.tail, input_ids.device),
        of_model=Visibility(mask_dtype(model)).of_model,
        read=read,
    )


def _cropped(cache: Any, length: int, *, every: int = 1) -> DynamicCache:
    """The first keys of a cache, and of every so many rows the first; copies, which do not keep the others alive."""
    return cache_of(
        (layer.keys[::every, :, :length].clone(), layer.values[::every, :, :length].clone())
        if layer.is_initialized
        else None
        for layer in cache.layers
    )


class _DecoderPaths:
    """A decoder that reads one row a path. See `hf_gr.torch.scorers.PathReader`."""

    def __init__(self, model: Any, prompts: Prompts) -> None:
        self.start: Tensor | None = None
        self.model = model
        self.prompts = prompts
        self.is_padded = prompts.mask is not None
        self.cache: Any = None
        self.suffix_start: int | None = None

    def prefill(self) -> Float[Tensor, "batch 1 vocab"]:
        """See `PathReader.prefill`."""
        outputs = self.prompts.outputs
        self.cache, length = copy_cache(outputs.past_key_values), outputs.past_key_values.get_seq_length()
        _check_prefix(length, self.prompts.kwargs)
        self.suffix_start = length if keeps_all_keys(self.cache) else None
        self.mask = _prompt_mask(self.prompts, length)
        self.next_position = _next_position(self.model, self.prompts)
        return outputs.logits[:, -1:].to(self.prompts.input_ids.device)

    def read(self, tokens: Int[Tensor, "batch rows levels"], *, num_read: int | None) -> Tensor:
        """See `PathReader.read`."""
        assert num_read is not None
        num_rows, num_new = tokens.shape[1:]
        given: dict[str, Any] = {"input_ids": tokens.flatten(0, 1), "past_key_values": self.cache, "use_cache": True}
        if self.is_padded:
            mask = self.mask.long().repeat_interleave(num_rows, dim=0)
            given["attention_mask"] = torch.nn.functional.pad(mask, (0, num_read + num_new), value=1)
        if self.next_position is not None:
            steps = torch.arange(num_read, num_read + num_new, device=tokens.device)
            given["position_ids"] = (self.next_position + steps).repeat_interleave(num_rows, dim=-2)
        return self.model(**given, return_dict=True).logits


class _EncoderDecoderPaths:
    """A decoder that reads one row a path, next to an encoder of one row a prompt. See `PathReader`.

    Args:
        model: the model.
        prompts: the first tokens of the decoder; their arguments have the encoder's output.
        folds: whether the beams share the encoder's keys.
    """

    def __init__(self, model: Any, prompts: Prompts, *, folds: bool) -> None:
        kwargs = prompts.kwargs
        self.model = model
        self.prompts = prompts
        self.modules = foldable_modules(model) if folds else []
        self.folds = bool(self.modules)
        self.cache: Any = None  # of the decoder's own tokens
        self.shared: Any = None  # of the encoder's
        self.hidden, self.mask = kwargs["encoder_outputs"][0], kwargs.get("attention_mask")
        if self.folds and self.mask is not None:
            self.mask = self.mask[:, None, None].bool()
            self.mask = self.mask if (dtype := mask_dtype(model)) is None else to_additive(self.mask, dtype)
        self.decoder_mask = kwargs.get("decoder_attention_mask")
        takes_prompt = prompts.takes_nodes and self.folds
        self.start = prompts.input_ids if takes_prompt else None
        self.keeps_keys = takes_prompt
        self.suffix_start: int | None = prompts.input_ids.shape[1] if takes_prompt else None
        if not takes_prompt:
            self._take(prompts.outputs.past_key_values)
            self.keeps_keys = keeps_all_keys(self.cache)
            self.suffix_start = self.cache.get_seq_length() if self.keeps_keys else None

    def prefill(self) -> Float[Tensor, "batch 1 vocab"]:
        """See `PathReader.prefill`."""
        self._take(self.prompts.outputs.past_key_values)
        return self.prompts.outputs.logits[:, -1:].to(self.prompts.input_ids.device)

    def read(self, tokens: Int[Tensor, "batch rows levels"], *, num_read: int | None) -> Tensor:
        """See `PathReader.read`."""
        num_rows, num_new = tokens.shape[1:]
        if num_read is None:
            self._take(EncoderDecoderCache(DynamicCache(), DynamicCache()))
            num_read = -self.prompts.input_ids.shape[1]  # those are among the new ones
        given: dict[str, Any] = {
            "decoder_input_ids": tokens.flatten(0, 1),
            "past_key_values": self.whole,
            "use_cache": True,
            "return_dict": True,
        }
        hidden, mask = self.hidden, self.mask
        if not self.folds and num_rows > 1:
            hidden = hidden.repeat_interleave(num_rows, dim=0)
            mask = None if mask is None else mask.repeat_interleave(num_rows, dim=0)
            self.whole.cross_attention_cache = self._repeated(num_rows)
        given["encoder_outputs"] = type(self.prompts.kwargs["encoder_outputs"])(last_hidden_state=hidden)
        given["attention_mask"] = mask
        if self.decoder_mask is not None:
            rows = self.decoder_mask.repeat_interleave(num_rows, dim=0)
            given["decoder_attention_mask"] = torch.nn.functional.pad(rows, (0, num_read + num_new), value=1)
        with fold_beams(self.modules, len(tokens)):
            logits = self.model(**given).logits
        if num_read < 0:
            own, shared, length = copy_cache(self.cache), copy_cache(self.shared), -num_read
            self.prompts.read_with_nodes = lambda: EncoderDecoderCache(_cropped(own, length, every=num_rows), shared)
        return logits

    def _take(self, cache: Any) -> None:
        self.whole = copy_cache(cache)
        self.cache, self.shared = self.whole.self_attention_cache, self.whole.cross_attention_cache
        self.copies: dict[int, Any] = {}

    def _repeated(self, num_rows: int) -> Any:
        if num_rows not in self.copies:
            self.copies[num_rows] = copy_cache(self.shared)
            self.copies[num_rows].batch_repeat_interleave(num_rows)
        return self.copies[num_rows]


def _windows(config: Any, cache: Any, prompt_length: int) -> dict[str | None, tuple[int | None, int]]:
    """How far each kind of layer sees, and how many of the prompt's keys its cache holds (`Prefilled.windows`)."""
    kinds: dict[str | None, tuple[int | None, int]] = {}
    for kind, layer in zip(layer_types(config), cache.layers, strict=False):
        if not layer.is_initialized:
            continue
        window = config.sliding_window if kind == "sliding_attention" else None
        kinds.setdefault(kind, (window, layer.keys.shape[-2] if window is not None else prompt_length))
    return kinds if len(kinds) > 1 else {None: next(iter(kinds.values()))}


def _next_position(model: Any, prompts: Prompts) -> Int[Tensor, "*batch 1"] | None:
    """`[..., B, 1]`, the position after the prompt, as the model wants it; None if it counts positions by itself.

    Some models count from 1 (PaliGemma), and only the arguments of transformers' own steps say so.
    """
    token = torch.zeros((len(prompts.input_ids), 1), dtype=torch.long, device=prompts.input_ids.device)
    position = internals.next_inputs(model, token, prompts.outputs, prompts.kwargs)[0].get("position_ids")
    return None if position is None else position.to(token.device).expand(*position.shape[:-2], *token.shape)


def _prompt_mask(prompts: Prompts, length: int) -> Bool[Tensor, "batch keys"]:
    """Real tokens among the keys of the prompt."""
    if prompts.mask is None:
        return torch.ones((len(prompts.input_ids), length), dtype=torch.bool, device=prompts.input_ids.device)
    return prompts.mask.to(prompts.input_ids.device).bool()


def _check_prefix(prompt_length: int, model_kwargs: dict[str, Any]) -> None:
    """Refuse keys before the prompt that no argument accounts for: a learned prefix with positions of its own."""
    mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    known = next((known.shape[-1] for known in (mask, position_ids) if known is not None), prompt_length)
    if known != prompt_length:
        raise ValueError(
            f"the prompt has {prompt_length} keys for {known} tokens, expected one key a token: prefix, prompt and "
            "p-tuning are not supported on decoders; use ConstraintLogitsProcessor in transformers' own loop"
        )
