# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One call of `generate` with a catalogue: read and checked, prepared by transformers, answered. Decodes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    LogitNormalization,
    PrefixConstrainedLogitsProcessor,
    TopKLogitsWarper,
)

from hf_gr.core.plan import Speculation
from hf_gr.generation import internals
from hf_gr.generation.call import BaseCall, WithItems, with_items
from hf_gr.generation.checks import check_tokens_of_catalogue, not_with_exact, options_of
from hf_gr.generation.configuration import OF_OUR_LOOP, VERIFICATION
from hf_gr.generation.messages import say_once
from hf_gr.generation.models import growing_angles
from hf_gr.torch import ops
from hf_gr.torch.decode import Decoded, DecodePlan
from hf_gr.torch.noise import Noise
from hf_gr.torch.ops import to_device

from .caches import continued
from .constraints import SeveralLabels
from .drafts import KINDS, Prepared, Search
from .layouts import every_step_may_read, layout_of
from .logits_process import read_several
from .models import decoder_config, output_size_of
from .prompts import read_prompt

ONE_ROW_A_PATH = ("output_attentions", "output_hidden_states", "stop_strings")  # outputs of transformers' loop alone


@dataclass
class _Ours(WithItems):
    num_proven: Tensor | None = None  # by prompt, how many of its first answers are the best of its catalogue
    perturbed_scores: Tensor | None = None  # of samples without replacement, by which they are ranked
    speculation: Speculation | None = None  # forwards, and nodes scored ahead
    seeds: list[int] | None = None  # of samples


@dataclass
class GRGenerateDecoderOnlyOutput(_Ours, GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput`, `speculation` (forwards, scored ahead), `seeds` (of samples), `item_ids`."""


@dataclass
class GRGenerateEncoderDecoderOutput(_Ours, GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput`, `speculation` (forwards, scored ahead), `seeds` (of samples), `item_ids`."""


@dataclass
class GRGenerateBeamDecoderOnlyOutput(_Ours, GenerateBeamDecoderOnlyOutput):
    """`GenerateBeamDecoderOnlyOutput`, `speculation` (forwards, scored ahead), `seeds` (of samples), `item_ids`."""


@dataclass
class GRGenerateBeamEncoderDecoderOutput(_Ours, GenerateBeamEncoderDecoderOutput):
    """`GenerateBeamEncoderDecoderOutput`, `speculation` (forwards, scored ahead), `seeds` (of samples), `item_ids`."""


def output_class(*, is_encoder_decoder: bool, is_beam_search: bool) -> Any:
    """The class of a call's output."""
    if is_beam_search:
        return GRGenerateBeamEncoderDecoderOutput if is_encoder_decoder else GRGenerateBeamDecoderOnlyOutput
    return GRGenerateEncoderDecoderOutput if is_encoder_decoder else GRGenerateDecoderOnlyOutput


@dataclass(frozen=True)
class Call(BaseCall):
    """A checked call, in PyTorch."""

    kinds = KINDS
    prepare_config = staticmethod(internals.prepare_config)
    read_prompt = staticmethod(read_prompt)
    vocabulary_of = staticmethod(output_size_of)

    inputs: Tensor | None = None  # transformers' argument of that name
    passed_on: dict[str, Any] = field(default_factory=dict)  # transformers' own: processors, criteria, ...
    generator: torch.Generator | None = None  # what seeds are drawn from; None for the device's own
    several: SeveralLabels | None = None  # the constraint of answers of several sequences
    is_ours: bool = True  # else transformers' loop decodes it, with a logits processor

    @classmethod
    def read(
        cls,
        model: Any,
        inputs: Any,
        generation_config: Any,
        kwargs: dict[str, Any],
        *,
        passed_on: dict[str, Any],
        answers: tuple[Any, Any],
        generator: Any,
        **shared: Any,
    ) -> Call:
        """Read the arguments of a call: `answers` are `separator` and `max_labels`, `shared` `BaseCall.read`'s."""
        separator, max_labels = answers
        tokenizer = kwargs.pop("tokenizer", None) if isinstance(separator, str) else None
        _refuse(model, generation_config, kwargs, passed_on, generator)
        if shared["seed"] is not None and generator is not None:
            raise ValueError("seed and generator are given, expected one of them: a generator draws the seeds")
        if separator is None and max_labels is not None:
            raise ValueError(f"max_labels={max_labels} without separator, expected both: pass separator=")

        # The call's own only: a checkpoint's use_cache=False is from training.
        use_cache, ends = kwargs.get("use_cache", getattr(generation_config, "use_cache", None)), {}
        for one in passed_on["stopping_criteria"] or ():
            if isinstance(one, MaxLengthCriteria):
                ends[f"stopping criterion of max_length={one.max_length}"] = one.max_length
        shared |= {"max_lengths": ends, "several": separator is not None}
        call = super().read(model, inputs, generation_config, kwargs, **shared)
        config, several = call.config, None
        if separator is not None:
            several = read_several(call.rules, separator, max_labels, tokenizer)
            check_tokens_of_catalogue(several, output_size_of(model), name="separator")
            if None not in call.drafts or len(call.drafts) > 1:
                kind = "a draft model" if shared["assistant"] is not None else repr(config.drafting)
                raise ValueError(f"separator is given with drafting={kind}, expected no draft: omit one of them")
            if not call.is_limited:
                config.max_new_tokens = several.longest_answer
            if config.max_new_tokens is None:
                raise ValueError(
                    "separator is given without a limit, expected max_labels= or max_new_tokens=: an answer could "
                    "name all labels"
                )
            config.forced_eos_token_id = None
        for name in ONE_ROW_A_PATH:
            setattr(config, name, None)
        checkpoints = model.training and any(getattr(one, "gradient_checkpointing", False) for one in model.modules())
        if call.model_kwargs.get("past_key_values") is not None:
            call._continue_cache(use_cache, checkpoints_activations=checkpoints)
        config.use_cache = use_cache is not False and not checkpoints
        passed_on = passed_on | {"synced_gpus": internals.is_synced(model, passed_on["synced_gpus"])}
        angles = call._changing_angles()
        is_ours = several is None and call._is_ours(angles)
        if is_ours and angles == "dynamic" and any(draft.scores_ahead for draft in call.drafts.values()):
            # Nodes read ahead would give the others the rotary angles of a longer sequence.
            say_once("rope_type='dynamic', for more tokens than max_position_embeddings: decoding without a draft")
            call = replace(call, drafts={None: KINDS[None](model, config)})
        given = vars(config) | {"seed": shared["seed"], "generator": generator, "item_bias": shared["item_bias"]}
        for name, fix in OF_OUR_LOOP.items():
            if not is_ours and given[name] is not None and given[name] is not False:
                raise ValueError(f"{name} is given, expected None in transformers' loop: {fix}")
        return replace(call, inputs=inputs, passed_on=passed_on, generator=generator, several=several, is_ours=is_ours)

    def _continue_cache(self, use_cache: Any, *, checkpoints_activations: bool) -> None:
        """Check that a user's cache is used, and take a copy of it."""
        cache, prompt = self.model_kwargs["past_key_values"], self.prompt
        if use_cache is False:
            raise ValueError("past_key_values is given with use_cache=False, expected one of them: omit one")
        if checkpoints_activations:
            raise ValueError(
                "past_key_values is given in training mode with gradient checkpointing, expected None, since the "
                "model ignores it there: omit it, or call model.eval()"
            )
        mask: Any = prompt.mask
        if self.model.config.is_encoder_decoder:
            mask = self.model_kwargs.get("decoder_attention_mask")
        num_known = prompt.length if mask is None else mask.shape[1]
        self.model_kwargs["past_key_values"] = continued(cache, num_given=prompt.length, num_known=num_known)

    def _changing_angles(self) -> str | None:
        """The kind of rotary angles that change while items are decoded; None if they do not."""
        for kind, limit in growing_angles(decoder_config(self.model)).items():
            mask = self.prompt.mask
            length = self.prompt.length if mask is None else int(mask.sum(-1).max())
            if limit < length + self.rules.shared.max_length - 1 and (kind == "dynamic" or length <= limit):
                return kind
        return None

    def _is_ours(self, angles: str | None) -> bool:
        """Whether our loop decodes the call; else transformers' does, which is logged once."""
        if VERIFICATION[self.config.verification].by_head_alone:
            return True
        if not self.config.use_cache:
            why = "no cache (use_cache=False, or gradient checkpointing in training mode)"
        elif layout_of(self.model) is None:
            why = f"{type(self.model).__name__} cannot score the nodes of a tree"
        elif angles == "longrope":  # transformers reads the prompt again
            why = "rope_type='longrope', and only the prompt is within original_max_position_embeddings"
        elif self.config.exact and angles:  # prefixes of several lengths would be read at the angles of the longest
            why = f"rope_type={angles!r}, for more tokens than max_position_embeddings"
        elif unknown := every_step_may_read(self.model, self.model_kwargs):
            why = f"{', '.join(unknown)}: not known to matter to the prompt alone"
        else:
            return True
        say_once(f"{why}: decoding in transformers' own loop, with a logits processor for the catalogue; it is slower")
        if any(draft.scores_ahead for draft in self.drafts.values()):
            say_once("decoding in transformers' loop: without a draft")
        return False

    def prepare(self, generate: Callable[..., Any]) -> Prepared:
        """Have transformers' own `generate` prepare inputs, processors and criteria, one row a prompt."""
        config = copy.copy(self.config)
        kind, config.cache_implementation = config.cache_implementation, None
        if kind not in (None, "dynamic", "static"):
            say_once(f"cache_implementation={kind!r} is not used: beams share a dynamic one")
        if config.exact:
            config.renormalize_logits = config.temperature = None  # the search does both
        config.forced_eos_token_id = None  # the loop itself forces it, which spares work as wide as the vocabulary
        # The place of this processor among the others is where transformers applies constraints.
        prefix_function = {"prefix_allowed_tokens_fn": self.passed_on["prefix_allowed_tokens_fn"] or _no_constraint}
        input_ids, processors, criteria, config, model_kwargs = generate(
            self.inputs,
            internals.for_one_path(self.model, config),
            custom_generate=_hand_back,
            **(self.passed_on | prefix_function),
            **self.model_kwargs,
        )
        return Prepared(
            input_ids,
            model_kwargs,
            config,
            plan=self._plan(input_ids, processors, criteria),
            rules=self.rules,
            inputs=self.prompt.inputs,
            synced_gpus=self.passed_on["synced_gpus"],
            is_static=kind == "static",
        )

    def answer(self, prepared: Prepared, search: Search, decoded: Decoded) -> Any:
        """transformers' output; `past_key_values` is the prompt's cache, ready for another call."""
        config, decoded = self.config, decoded.cropped()
        if self.rules.groups is not None or self.rules.bias is not None:
            decoded = self._with_values(decoded, prepared.plan)
        prompts = prepared.input_ids.repeat_interleave(config.num_return_sequences, dim=0)
        sequences = torch.cat([prompts, decoded.sequences.to(prompts.device)], dim=1)
        if not config.return_dict_in_generate:
            return sequences
        noise = prepared.plan.noise
        fields: dict[str, Any] = {
            "sequences": sequences,
            "scores": decoded.step_scores,
            "logits": decoded.step_logits,
            "past_key_values": search.prompts.cache,
            "num_proven": decoded.num_proven,
            "speculation": replace(decoded.speculation, chosen=search.draft.chosen),
            "seeds": None if noise is None else (noise.seeds if self.seeds is None else self.seeds).tolist(),
        }
        if config.num_beams > 1:
            fields["sequences_scores"] = decoded.scores if config.output_scores else None
            fields["beam_indices"] = decoded.beam_indices.int()
            fields["perturbed_scores"] = decoded.perturbed_scores
        is_encoder_decoder = self.model.config.is_encoder_decoder
        made = output_class(is_encoder_decoder=is_encoder_decoder, is_beam_search=config.num_beams > 1)
        return with_items(made(**fields), self.rules, prompts.shape[1])

    def _with_values(self, decoded: Decoded, plan: DecodePlan) -> Decoded:
        """The same with what the call gives for items."""
        of_rows = ("sequences", "scores", "beam_indices", "perturbed_scores")
        found = {name: getattr(decoded, name) for name in of_rows}
        by_row = {
            name: one.unflatten(0, (-1, plan.num_return_sequences)) for name, one in found.items() if one is not None
        }
        device, how = decoded.scores.device, {"missing_token": plan.missing_token_id}
        by_row = self.with_values(
            ops, by_row | {"num_proven": decoded.num_proven}, put=lambda array: to_device(array, device), **how
        )
        num_proven = by_row.pop("num_proven")
        return replace(decoded, **{name: one.flatten(0, 1) for name, one in by_row.items()}, num_proven=num_proven)

    def _plan(self, input_ids: Tensor, processors: Any, criteria: Iterable[Any]) -> DecodePlan:
        """The options of the call, in the loop's terms."""
        config, place = self.config, 0
        while not isinstance(processors[place], PrefixConstrainedLogitsProcessor):
            place += 1
        # A user's own prefix function takes this place, and narrows the catalogue.
        is_users = internals.prefix_function(processors[place]) is not _no_constraint
        before = LogitsProcessorList(processors[:place])
        after = LogitsProcessorList(processors[place if is_users else place + 1 :])
        tokens_per_beam = config.num_beams if VERIFICATION[config.verification].is_narrow else None
        if tokens_per_beam is not None and (before or after):
            before.append(TopKLogitsWarper(tokens_per_beam))
            tokens_per_beam = None
        stop: Any = StoppingCriteriaList()
        users = list(map(id, self.passed_on["stopping_criteria"] or ()))
        for one in criteria:  # length and end are the catalogue's, but for end tokens that a user gives
            if not isinstance(one, MaxLengthCriteria | EosTokenCriteria) or (
                isinstance(one, EosTokenCriteria) and id(one) in users
            ):
                stop.append(one)
        options = options_of(config, self.rules.shared, step_scores=self.step_scores)
        options["certifies"] &= not (before or after or stop)
        others: Any = [*before, *(getattr(one, "inner", one) for one in after)]
        if config.renormalize_logits is True and all(isinstance(one, LogitNormalization) for one in others):
            options["renormalizes"] = True  # among the children alone
            before = after = LogitsProcessorList()
        noise = None
        if config.do_sample and self.seeds is not None:
            noise = Noise(to_device(self.seeds, input_ids.device))
        elif config.do_sample:
            device, shape = input_ids.device, input_ids.shape[:1]
            noise = Noise(torch.randint(2**63 - 1, shape, generator=self.generator, device=device))
        if config.exact:
            options["temperature"] = float(config.temperature or 1.0) if config.do_sample else 1.0
            if others := [*before, *after, *stop]:
                raise not_with_exact(type(others[0]).__name__)
        return DecodePlan(
            **options,
            prompt=input_ids,
            processors=(before, after) if before or after else None,
            tokens_per_beam=tokens_per_beam,
            stopping_criteria=(lambda sequences: stop(sequences, None)) if stop else None,
            exit_early=not self.passed_on["synced_gpus"],
            noise=noise,
        )


def _refuse(
    model: Any, generation_config: Any, kwargs: dict[str, Any], passed_on: Mapping[str, Any], generator: Any
) -> None:
    """Refuse outputs that a forward over all beams cannot give; the same wishes of a checkpoint are ignored."""
    if kwargs.pop("custom_generate", None) is not None:
        raise ValueError(
            "custom_generate is given, expected None: with constraint_index this model decodes by hf_gr's own loop"
        )
    if (streamer := kwargs.pop("streamer", None)) is not None:
        if callable(end := getattr(streamer, "end", None)):
            end()  # or a reader in another thread would wait for ever
        raise ValueError(
            "streamer is given, expected None: with constraint_index items are decoded as a whole; for a stream "
            "pass logits_processor=[ConstraintLogitsProcessor(index)] instead of constraint_index"
        )
    for name in ONE_ROW_A_PATH:
        if kwargs.get(name, getattr(generation_config, name, None)):
            raise ValueError(
                f"{name} with constraint_index, expected none: in transformers' own loop, pass "
                "logits_processor=[ConstraintLogitsProcessor(index)] instead of constraint_index"
            )
    for name in ("logits_processor", "stopping_criteria"):
        given = passed_on[name]
        if given is not None and not (isinstance(given, Iterable) and all(map(callable, given))):
            raise ValueError(f"{name}={given!r}, expected a list of functions: [MyProcessor()]")
    prefix_function = passed_on["prefix_allowed_tokens_fn"]
    if prefix_function is not None and not callable(prefix_function):
        raise ValueError(f"prefix_allowed_tokens_fn={prefix_function!r}, expected a function of (batch, tokens)")
    if generator is not None:
        kind, found = model.device.type, getattr(generator, "device", type(generator).__name__)
        if not isinstance(generator, torch.Generator) or generator.device.type != kind:
            raise ValueError(f"generator is {found}, expected a torch.Generator: torch.Generator({kind!r})")


def _hand_back(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """transformers' `generate` calls this instead of a loop."""
    return input_ids, logits_processor, stopping_criteria, generation_config, kwargs


def _no_constraint(batch: int, tokens: Tensor) -> list[int]:
    raise AssertionError("stands for the catalogue among the processors, and is never called")
