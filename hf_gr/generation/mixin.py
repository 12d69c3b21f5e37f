# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`GRGenerationMixin`: `generate` with a catalogue. Checks, lets transformers prepare, and hands over to `decode`.

The way of a call: `generate` -> `_decode_prepared` (transformers has prepared the inputs) ->
`hf_gr.torch.decode.decode`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
)
from transformers.generation.configuration_utils import GenerationMode

from hf_gr.catalogue import ConstraintIndex
from hf_gr.torch.decode import Decoded, DecodePlan, decode
from hf_gr.torch.transition import device_trie

from .configuration import GR_FIELDS, check_fields
from .layouts import Layout, check_cache, choose_layout, copy_cache, make_scorer
from .logits_process import ConstraintLogitsProcessor

logger = logging.getLogger(__name__)

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
# Below this transformers' score of a beam is its mark for "no such beam", -1e9, divided by a length.
DEAD_IN_TRANSFORMERS = -1e6
# True while transformers prepares a call of ours: the prompt is not repeated for every beam.
_ONE_ROW_PER_REQUEST: ContextVar[bool] = ContextVar("one_row_per_request", default=False)
_SAID: set[str] = set()


@dataclass(frozen=True)
class _Call:
    """What a call carries past transformers' preparation."""

    index: ConstraintIndex
    layout: Layout
    has_prefix_fn: bool
    synced_gpus: bool


class GRGenerationMixin(GenerationMixin):
    """Adds `constraint_index` to `generate`: only sequences of a catalogue, and the prompt computed once.

    Put it in front of a model class, or give it to a loaded model with `hf_gr.enable`:

        class Recommender(GRGenerationMixin, Qwen3ForCausalLM): ...
    """

    @torch.no_grad()
    def generate(  # noqa: D417
        self: Any,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        synced_gpus: bool | None = None,
        *args: Any,
        constraint_index: ConstraintIndex | str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate sequences of a catalogue; without one this is transformers' `generate`, untouched.

        Args:
            constraint_index: the catalogue; by default the one that `generation_config.constraint_index` names.
            all others: transformers' own, with its meanings. Decoding modes are greedy, sampling, beam search and beam
                sampling. With a catalogue the length need not be given, `past_key_values` holds one row a prompt (it
                is left as it is), and `sequences_scores` sums log-probabilities over the full vocabulary, unless
                `renormalize_logits=True` has the legal tokens of each step renormalised.

        Returns:
            What transformers returns: a tensor, or with `return_dict_in_generate` an output object. Where fewer legal
            sequences exist than are asked for, the rest are rows of `pad_token_id` (behind the prompt) with score
            `-inf`.

        Raises:
            ValueError: before any work, for arguments that cannot lead to the catalogue's sequences: a vocabulary
                that lacks its tokens, too small a length, right-padded prompts, a cache of another batch size, an
                unsupported mode.

        Example:
            >>> from transformers import Qwen3Config, Qwen3ForCausalLM
            >>> from hf_gr import ConstraintIndex, enable
            >>> config = Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8, eos_token_id=None)
            >>> model = enable(Qwen3ForCausalLM(config)).eval()
            >>> index = ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]], item_ids=["ham", "jam", "yam"])
            >>> prompt = torch.tensor([[1, 2]])
            >>> out = model.generate(prompt, constraint_index=index, num_beams=3, num_return_sequences=3)
            >>> sorted(index.items(out[:, 2:]))
            [['ham'], ['jam'], ['yam']]

        Source: STATIC, algorithm 1; xGR, sections 4 and 5.
        """
        super_: Any = super()
        ours = {name: kwargs.pop(name) for name in GR_FIELDS if name in kwargs}
        passed_on = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
        }
        configs = (generation_config, self.generation_config)
        named = [getattr(config, "constraint_index", None) for config in configs]
        named = [name for name in named if name is not None]
        if constraint_index is None and not named:
            _refuse_alone(ours, kwargs)
            return super_.generate(
                inputs, generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, synced_gpus,
                *args, **kwargs,
            )  # fmt: skip
        index = self._resolve_index(named[0] if constraint_index is None else constraint_index)
        if kwargs.get("custom_generate") is not None:
            raise ValueError("custom_generate is given, expected None: with constraint_index hf_gr decodes")
        if args or kwargs.get("assistant_model") is not None:
            raise ValueError(
                "assistant_model is given, expected None: with constraint_index this release decodes without a draft"
            )
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        # Of the call itself: a checkpoint's default length is older than its catalogue, and its use_cache=False is
        # from training.
        asked = {
            name: kwargs.get(name, getattr(generation_config, name, None)) for name in ("max_length", "use_cache")
        }

        config, model_kwargs = self._prepare_generation_config(generation_config, **kwargs)
        for name, value in ours.items():
            setattr(config, name, value)
        self._check_call(index, config, asked, inputs, model_kwargs, stopping_criteria)
        if config.max_new_tokens is None:
            config.max_new_tokens = index.max_length
            if asked["max_length"] is not None:
                config.max_new_tokens = asked["max_length"] - self._prompt_length(inputs, model_kwargs)
        config.max_length = None
        config.use_cache = asked["use_cache"] is not False

        layout = self._layout(config, model_kwargs)
        if layout is None:
            return self._generate_by_processor(index, config, inputs, passed_on, model_kwargs)
        if config.cache_implementation is not None:
            _say_once(
                f"cache_implementation={config.cache_implementation!r} is not used: beams share one dynamic cache"
            )
            config.cache_implementation = None
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            model_kwargs["past_key_values"] = copy_cache(cache)
        call = _Call(index, layout, prefix_allowed_tokens_fn is not None, bool(synced_gpus))

        def decode_prepared(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
            return _decode_prepared(model, input_ids, call=call, **prepared)

        # The position of this processor among the others is where transformers applies constraints.
        passed_on["prefix_allowed_tokens_fn"] = prefix_allowed_tokens_fn or _no_constraint
        token = _ONE_ROW_PER_REQUEST.set(True)
        try:
            return super_.generate(inputs, config, custom_generate=decode_prepared, **passed_on, **model_kwargs)
        finally:
            _ONE_ROW_PER_REQUEST.reset(token)

    def _prepare_generation_config(
        self: Any, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """transformers' own, once: what a call of ours has prepared passes through."""
        if _ONE_ROW_PER_REQUEST.get():
            return generation_config, kwargs
        super_: Any = super()
        return super_._prepare_generation_config(generation_config, *args, **kwargs)

    def _expand_inputs_for_generation(self: Any, expand_size: int = 1, **kwargs: Any) -> Any:
        """transformers' own, but beams of ours share one row."""
        super_: Any = super()
        return super_._expand_inputs_for_generation(1 if _ONE_ROW_PER_REQUEST.get() else expand_size, **kwargs)

    def _get_logits_processor(
        self: Any,
        generation_config: GenerationConfig,
        *args: Any,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> LogitsProcessorList:
        """transformers' own; processors that keep a mask get it with one row a beam, as they will see the scores."""
        super_: Any = super()
        if _ONE_ROW_PER_REQUEST.get() and model_kwargs is not None:
            width = max(generation_config.num_beams, generation_config.num_return_sequences)
            masks = {name: model_kwargs.get(name) for name in ("attention_mask", "decoder_attention_mask")}
            repeated = {name: mask.repeat_interleave(width, dim=0) for name, mask in masks.items() if mask is not None}
            model_kwargs = {**model_kwargs, **repeated}
        return super_._get_logits_processor(generation_config, *args, model_kwargs=model_kwargs, **kwargs)

    def _resolve_index(self: Any, index: Any) -> ConstraintIndex:
        """An index object as it is, a name loaded once; `"."` is the checkpoint that the model came from."""
        if isinstance(index, ConstraintIndex):
            return index
        if not isinstance(index, (str, Path)):
            raise ValueError(
                f"constraint_index is a {type(index).__name__}, expected a ConstraintIndex or the name of one: "
                "ConstraintIndex.from_sequences(...) makes it"
            )
        name = str(index)
        if name == ".":
            name = self.config._name_or_path
            if not name:
                raise ValueError(
                    'constraint_index="." means the checkpoint itself, but this model was not loaded from one'
                )
        loaded: dict[str, ConstraintIndex] = self.__dict__.setdefault("_loaded_indexes", {})
        if name not in loaded:
            loaded[name] = ConstraintIndex.from_pretrained(name)
        return loaded[name]

    def _prompt_length(self: Any, inputs: Tensor | None, model_kwargs: dict[str, Any]) -> int:
        """Tokens in front of the generated ones, by which `max_length` counts."""
        if self.config.is_encoder_decoder:
            start = model_kwargs.get("decoder_input_ids")
            return 1 if start is None else start.shape[1]
        prompt = inputs if inputs is not None else model_kwargs.get("input_ids")
        return 0 if prompt is None else prompt.shape[1]

    def _check_call(
        self: Any,
        index: ConstraintIndex,
        config: Any,
        asked: dict[str, Any],
        inputs: Tensor | None,
        model_kwargs: dict[str, Any],
        stopping_criteria: StoppingCriteriaList | None,
    ) -> None:
        """Refuse what cannot lead to the catalogue's sequences."""
        check_fields({name: getattr(config, name, default) for name, default in GR_FIELDS.items()})
        if getattr(config, "drafting", None) is not None:
            raise ValueError(f"drafting={config.drafting!r}, expected None: this release decodes without a draft")
        mode = config.get_generation_mode(None)
        if mode not in MODES:
            raise ValueError(
                f"generation mode {mode.value!r}, expected one of {[str(m.value) for m in MODES]} with a catalogue"
            )
        head = self.get_output_embeddings()
        vocabulary = self.config.get_text_config(decoder=True).vocab_size if head is None else head.weight.shape[0]
        if index.max_token_id >= vocabulary:
            raise ValueError(
                f"constraint_index has token {index.max_token_id}, expected less than the vocabulary, {vocabulary}: "
                "is it another model's catalogue, or were the embeddings not resized?"
            )
        prompt_length = self._prompt_length(inputs, model_kwargs)
        lengths = [(f"max_new_tokens={config.max_new_tokens}", config.max_new_tokens)]
        if config.max_new_tokens is None and asked["max_length"] is not None:
            lengths.append((f"max_length={asked['max_length']}", asked["max_length"] - prompt_length))
        lengths += [
            (f"stopping criterion of max_length={criterion.max_length}", criterion.max_length - prompt_length)
            for criterion in stopping_criteria or ()
            if isinstance(criterion, MaxLengthCriteria)
        ]
        for name, room in lengths:
            if room is not None and room < index.max_length:
                raise ValueError(
                    f"{name} leaves {room} new tokens, expected at least {index.max_length} for the longest sequence: "
                    "leave the length away, the catalogue gives it"
                )
        self._check_prompt(config, inputs, model_kwargs)

    def _check_prompt(
        self: Any, config: GenerationConfig, inputs: Tensor | None, model_kwargs: dict[str, Any]
    ) -> None:
        """Refuse right-padded prompts, empty ones, and a cache that does not fit them."""
        input_ids = inputs if inputs is not None else model_kwargs.get("input_ids")
        embeds = model_kwargs.get("inputs_embeds")
        prompt = embeds if embeds is not None else input_ids
        if prompt is not None and model_kwargs.get("past_key_values") is not None:
            check_cache(model_kwargs["past_key_values"], prompt.shape[0])
        if self.config.is_encoder_decoder:
            return
        mask = model_kwargs.get("attention_mask")
        if mask is None and input_ids is not None and config.pad_token_id is not None and prompt is input_ids:
            eos = config.eos_token_id
            is_eos = config.pad_token_id in (eos if isinstance(eos, list) else [eos])
            mask = None if is_eos else input_ids != config.pad_token_id
        if mask is not None and mask.ndim == 2 and mask.shape[1] and not bool(mask[:, -1].all()):
            row = int((mask[:, -1] == 0).nonzero()[0])
            raise ValueError(
                f"prompt {row} ends with padding, expected padding on the left: set tokenizer.padding_side='left'"
            )

    def _layout(self: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Layout | None:
        """The layout of this call, None for transformers' own loop, which is said once."""
        asked = [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name)]
        asked += ["streamer"] if model_kwargs.get("streamer") is not None else []
        asked += ["stop_strings"] if config.stop_strings is not None else []  # transformers hands us no tokenizer
        asked += [] if config.use_cache else ["use_cache=False"]
        if asked:
            _say_once(
                f"{', '.join(asked)}: decoding in transformers' own loop, with a logits processor for the catalogue"
            )
            return None
        layout = choose_layout(self)
        if layout is None:
            _say_once(
                f"{type(self).__name__} takes neither the tree nor the batch layout: decoding in transformers' loop, "
                "with a logits processor for the catalogue; it is slower"
            )
        return layout

    def _generate_by_processor(
        self: Any,
        index: ConstraintIndex,
        config: GenerationConfig,
        inputs: Tensor | None,
        passed_on: dict[str, Any],
        model_kwargs: dict[str, Any],
    ) -> Any:
        """transformers' own loop under `ConstraintLogitsProcessor`; what is no item afterwards becomes padding."""
        super_: Any = super()
        user = list(passed_on["logits_processor"] or ())
        passed_on = {**passed_on, "logits_processor": LogitsProcessorList([ConstraintLogitsProcessor(index), *user])}
        as_tensor, with_scores = not config.return_dict_in_generate, config.output_scores
        config.return_dict_in_generate = config.output_scores = True
        if index.eos_token_id is not None:
            config.eos_token_id = index.eos_token_id
        out = super_.generate(inputs, config, **passed_on, **model_kwargs)

        prompt_length = self._prompt_length(inputs, model_kwargs)
        scores = getattr(out, "sequences_scores", None)
        wrong = torch.tensor(
            [not items for items in index.items(out.sequences[:, prompt_length:])], device=self.device
        )
        if scores is not None:
            wrong |= scores < DEAD_IN_TRANSFORMERS
        requests = wrong.view(-1, config.num_return_sequences).int()
        order = requests.argsort(dim=1, stable=True)
        order = (order + torch.arange(len(order), device=order.device)[:, None] * requests.shape[1]).flatten()
        sequences = out.sequences.clone()
        sequences[wrong, prompt_length:] = _fill_token(config)
        out.sequences = sequences[order]
        if as_tensor:
            return out.sequences
        if scores is not None:
            out.sequences_scores = scores.masked_fill(wrong, -torch.inf)[order] if with_scores else None
            out.beam_indices = out.beam_indices.masked_fill(wrong[:, None], -1)[order]
        if not with_scores:
            out.scores = None
        return out


def _decode_prepared(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    call: _Call,
    **model_kwargs: Any,
) -> Any:
    """Prefill by transformers' own code, then decode; called by transformers' `generate` once inputs are prepared."""
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    plan = _make_plan(input_ids, logits_processor, stopping_criteria, generation_config, call)
    scorer = make_scorer(model, call.layout, outputs, model_kwargs, batch_size=input_ids.shape[0], width=plan.width)
    del outputs.logits
    decoded = decode(scorer, device_trie(call.index, scorer.prompt_logits.device), plan)
    return _as_output(model, input_ids, decoded, generation_config, outputs.past_key_values, model_kwargs)


def _make_plan(
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: Any,
    call: _Call,
) -> DecodePlan:
    position = next(i for i, p in enumerate(logits_processor) if isinstance(p, PrefixConstrainedLogitsProcessor))
    before = LogitsProcessorList(logits_processor[:position])
    after = LogitsProcessorList(logits_processor[position + (not call.has_prefix_fn) :])
    # Length and end token are the catalogue's business; what else there is comes from the user.
    criteria = StoppingCriteriaList(
        criterion
        for criterion in stopping_criteria
        if not isinstance(criterion, (MaxLengthCriteria, EosTokenCriteria))
    )
    stop: Any = criteria
    eos = config._eos_token_tensor
    num_ends = 0 if eos is None else eos.shape[0]
    return DecodePlan(
        prompt=input_ids,
        num_beams=config.num_beams,
        num_return_sequences=config.num_return_sequences,
        num_kept=max(2, 1 + num_ends) * config.num_beams,
        do_sample=config.do_sample,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        max_new_tokens=config.max_new_tokens,
        fill_token_id=_fill_token(config),
        processors=(before, after) if len(before) or len(after) else None,
        stopping_criteria=(lambda sequences: stop(sequences, None)) if len(criteria) else None,
        output_scores=bool(config.return_dict_in_generate and config.output_scores),
        output_logits=bool(config.return_dict_in_generate and config.output_logits),
        exit_early=not call.synced_gpus,
    )


def _as_output(
    model: Any,
    input_ids: Tensor,
    decoded: Decoded,
    config: GenerationConfig,
    cache: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    """Transformers' output for what was decoded; `past_key_values` is the prompt's cache, ready for another call."""
    prompts = input_ids.repeat_interleave(config.num_return_sequences, dim=0)
    sequences = torch.cat([prompts, decoded.sequences.to(prompts.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": decoded.step_scores,
        "logits": decoded.step_logits,
        "past_key_values": cache,
    }
    is_encoder_decoder = model.config.is_encoder_decoder
    if config.num_beams == 1:
        return (GenerateEncoderDecoderOutput if is_encoder_decoder else GenerateDecoderOnlyOutput)(**fields)
    fields["sequences_scores"] = decoded.scores if config.output_scores else None
    fields["beam_indices"] = decoded.beam_indices.int()
    return (GenerateBeamEncoderDecoderOutput if is_encoder_decoder else GenerateBeamDecoderOnlyOutput)(**fields)


def _fill_token(config: GenerationConfig) -> int:
    """What stands behind the end of a sequence: the padding token, else the end token, else -1, which is no token."""
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    return next((token for token in (config.pad_token_id, eos) if token is not None), -1)


def _refuse_alone(ours: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Our options mean nothing without a catalogue."""
    given = [name for name, value in ours.items() if value is not None and name != "verification"]
    if given:
        raise ValueError(f"{', '.join(given)} given without constraint_index, expected both: pass constraint_index=")


def _no_constraint(batch: int, tokens: Tensor) -> list[int]:
    raise AssertionError("stands for the catalogue among the processors, and is never called")


def _say_once(message: str) -> None:
    if message not in _SAID:
        _SAID.add(message)
        logger.warning(message)
