# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One call of `generate` with a catalogue: read and checked, prepared by transformers, answered. Decodes nothing.

Axes: B batch, P prompt, R returned sequences a prompt, T generated tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    TopKLogitsWarper,
)

from hf_gr.catalogue.rules import BatchRules
from hf_gr.generation import internals
from hf_gr.generation.answers import with_items
from hf_gr.generation.checks import check_tokens_of_catalogue, forced_end, options_of
from hf_gr.generation.configuration import set_fields
from hf_gr.generation.messages import say_once
from hf_gr.generation.models import first_of
from hf_gr.generation.named_catalogues import batch_rules, resolve_indexes
from hf_gr.generation.seeds import row_seeds
from hf_gr.torch.decode import Decoded, DecodePlan
from hf_gr.torch.noise import Noise
from hf_gr.torch.transfers import to_device

from .caches import continued
from .checks import check_call, check_generator
from .constraints import SeveralLabels
from .drafts import Draft, Prepared, Search, draft_of
from .layouts import every_step_may_read, takes_tree
from .logits_process import read_several
from .models import output_size_of
from .outputs import output_class
from .prompts import Prompt

ONE_ROW_A_PATH = ("output_attentions", "output_hidden_states", "stop_strings")  # outputs of transformers' loop alone


@dataclass(frozen=True)
class Call:
    """A checked call: from here on, only the model can fail.

    Attributes:
        model: the model.
        inputs: transformers' argument of that name.
        passed_on: transformers' own arguments: processors, criteria, ...
        model_kwargs: the model's arguments, with a copy of a cache.
        config: the prepared generation config, with our fields.
        rules: the catalogue of every prompt.
        prompt: the prompt.
        draft: the kind of draft.
        is_ours: whether our loop decodes it; else transformers' loop does, with a logits processor.
        seeds: of the prompts' samples; None to draw them.
        generator: what they are drawn from; None for the device's own.
        keeps_step_scores: whether `output_scores` asks for more than `sequences_scores`.
        answers: the constraint of answers of several sequences; None for one sequence each.
    """

    model: Any
    inputs: Tensor | None
    passed_on: dict[str, Any]
    model_kwargs: dict[str, Any]
    config: Any
    rules: BatchRules
    prompt: Prompt
    draft: Draft
    is_ours: bool
    seeds: npt.NDArray[np.int64] | None
    generator: torch.Generator | None
    keeps_step_scores: bool
    answers: SeveralLabels | None = None

    @classmethod
    def read(
        cls,
        model: Any,
        inputs: Any,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
        *,
        passed_on: dict[str, Any],
        fields: Mapping[str, Any],
        indexes: Any,
        exclude_items: Any,
        assistant: Any,
        answers: tuple[Any, Any],
        seed: Any,
        generator: Any,
    ) -> Call:
        """Read the arguments of a call.

        Args:
            model: the model.
            inputs: as in transformers.
            generation_config: as in transformers.
            kwargs: fields of the config, and arguments of the model.
            passed_on: transformers' own arguments.
            fields: our fields, as given in the call.
            indexes: the catalogue or catalogues, or their names.
            exclude_items: as in `generate`.
            assistant: the draft model, or None.
            answers: `separator` and `max_labels`, as in `generate`.
            seed: as in `generate`.
            generator: as in `generate`.

        Raises:
            ValueError: names the argument, its value, what is expected, and the fix.
        """
        configs = (generation_config, model.generation_config)
        of_separator = kwargs.pop("tokenizer", None) if isinstance(answers[0], str) else None
        indexes = resolve_indexes(model, indexes)
        if kwargs.pop("custom_generate", None) is not None:
            raise ValueError(
                "custom_generate is given, expected None: with constraint_index this model decodes by hf_gr's own loop"
            )
        if (streamer := kwargs.pop("streamer", None)) is not None:
            if callable(end := getattr(streamer, "end", None)):
                end()  # or a reader in another thread would wait for ever
            raise ValueError(
                "streamer is given, expected None: with constraint_index items are decided as a whole; for a stream "
                "pass logits_processor=[ConstraintLogitsProcessor(index)] instead of constraint_index"
            )
        passed_on = passed_on | {"synced_gpus": internals.is_synced(model, passed_on["synced_gpus"])}
        if first_of("verification", fields, *configs) == "relaxed":
            if kwargs.setdefault("do_sample", True) is False:
                raise ValueError("do_sample=False with verification='relaxed', expected True: it samples beams")
            if first_of("top_k", kwargs, *configs) is None:
                kwargs["top_k"] = 0  # transformers' default, 50, could leave fewer candidates than beams
        # The call's own only: a checkpoint's lengths predate its catalogue, its use_cache=False is from training.
        max_new_tokens, max_length, use_cache = (
            kwargs.get(name, getattr(generation_config, name, None))
            for name in ("max_new_tokens", "max_length", "use_cache")
        )
        _refuse_outputs(lambda name: kwargs.get(name, getattr(generation_config, name, None)))
        keeps_step_scores = kwargs.pop("_step_scores", True)
        config, model_kwargs = internals.prepare_config(model, generation_config, kwargs)
        set_fields(config, fields)
        for name in ONE_ROW_A_PATH:
            setattr(config, name, None)
        prompt = Prompt.read(model, inputs, config, model_kwargs)
        rules = batch_rules(indexes, exclude_items, num_prompts=prompt.num_rows)
        check_call(
            model,
            rules.shared,
            config,
            prompt,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            functions=passed_on,
            past_key_values=model_kwargs.get("past_key_values"),
        )
        several = _read_answers(model, rules, *answers, tokenizer=of_separator)
        draft = draft_of(model, config, assistant)
        if several is not None and type(draft) is not Draft:
            kind = config.drafting if assistant is None else "a draft model"
            raise ValueError(f"separator is given with drafting={kind!r}, expected no draft: omit one of them")
        draft.check(prompt, rules.shared, given=fields, model_kwargs=model_kwargs)
        check_generator(generator, model.device)
        if seed is not None and generator is not None:
            raise ValueError("seed and generator are given, expected one of them: a generator draws the seeds")
        seeds = None if seed is None else row_seeds(seed, prompt.num_rows)
        if (cache := model_kwargs.get("past_key_values")) is not None:
            if use_cache is False:
                raise ValueError("past_key_values is given with use_cache=False, expected one of them: omit one")
            if _checkpoints_activations(model):
                raise ValueError(
                    "past_key_values is given in training mode with gradient checkpointing, expected None, since the "
                    "model ignores it there: omit it, or call model.eval()"
                )
            mask = model_kwargs.get("decoder_attention_mask") if model.config.is_encoder_decoder else prompt.mask
            num_known = prompt.length if mask is None else mask.shape[1]
            model_kwargs["past_key_values"] = continued(cache, num_given=prompt.length, num_known=num_known)
        if max_new_tokens is None:
            longest = rules.shared.max_length if several is None else several.longest_answer
            if max_length is not None:
                longest = max_length - prompt.length
            elif longest is None:
                raise ValueError(
                    "separator is given without a limit, expected max_labels= or max_new_tokens=: an answer could "
                    "name all labels"
                )
            max_new_tokens = longest
        config.max_new_tokens, config.max_length = max_new_tokens, None
        config.use_cache = use_cache is not False and not _checkpoints_activations(model)
        # A catalogue without these tokens could never begin or end with them.
        config.forced_bos_token_id = None
        config.forced_eos_token_id = forced_end(config, rules.shared, max_new_tokens) if several is None else None
        is_ours = several is None and (draft.verification.by_head_alone or _is_ours(model, config, model_kwargs))
        call = cls(
            model,
            inputs,
            passed_on,
            model_kwargs,
            config,
            rules,
            prompt,
            draft,
            is_ours,
            seeds,
            generator,
            keeps_step_scores,
            several,
        )
        if not is_ours:
            call._check_fallback()
        return call

    def _check_fallback(self) -> None:
        """Refuse, or report, options that transformers' loop does not have."""
        for name, value in (("seed", self.seeds), ("generator", self.generator)):
            if value is not None:
                raise ValueError(f"{name} is given, expected None in transformers' loop: use torch.manual_seed")
        if self.draft.scores_ahead:
            say_once("decoding in transformers' loop: without a draft")

    def prepare(self, generate: Callable[..., Any]) -> Prepared:
        """Have transformers prepare inputs, processors and criteria, one row a prompt, and hand them back.

        Args:
            generate: transformers' own, bound to the model.
        """
        config = copy.copy(self.config)
        internals.check_mode(self.model, config)
        kind, config.cache_implementation = config.cache_implementation, None
        if kind not in (None, "dynamic", "static"):
            say_once(f"cache_implementation={kind!r} is not used: beams share a dynamic one")
        # The loop itself forces the end, which spares work as wide as the vocabulary.
        forces_end, config.forced_eos_token_id = config.forced_eos_token_id is not None, None
        # The place of this processor among the others is where transformers applies constraints.
        prefix_function = {"prefix_allowed_tokens_fn": self.passed_on["prefix_allowed_tokens_fn"] or _no_constraint}
        input_ids, processors, criteria, config, model_kwargs = generate(
            self.inputs,
            internals.for_one_path(config),
            custom_generate=_hand_back,
            **(self.passed_on | prefix_function),
            **self.model_kwargs,
        )
        return Prepared(
            input_ids,
            model_kwargs,
            config,
            plan=self._plan(input_ids, processors, criteria, forces_end=forces_end),
            rules=self.rules,
            inputs=self.prompt.inputs,
            synced_gpus=self.passed_on["synced_gpus"],
            is_static=kind == "static",
        )

    def answer(self, prepared: Prepared, search: Search, decoded: Decoded) -> Any:
        """transformers' output; `past_key_values` is the prompt's cache, ready for another call."""
        self.draft.report(search, decoded)
        config, decoded = self.config, decoded.cropped()
        prompts = prepared.input_ids.repeat_interleave(config.num_return_sequences, dim=0)
        sequences = torch.cat([prompts, decoded.sequences.to(prompts.device)], dim=1)
        if not config.return_dict_in_generate:
            return sequences
        fields: dict[str, Any] = {
            "sequences": sequences,
            "scores": decoded.step_scores,
            "logits": decoded.step_logits,
            "past_key_values": search.prompts.cache,
            "speculation": replace(decoded.speculation, chosen=self.draft.chosen),
            "seeds": None if prepared.plan.noise is None else self._host_seeds(prepared.plan.noise),
        }
        if config.num_beams > 1:
            fields["sequences_scores"] = decoded.scores if config.output_scores else None
            fields["beam_indices"] = decoded.beam_indices.int()
        is_encoder_decoder = self.model.config.is_encoder_decoder
        made = output_class(is_encoder_decoder=is_encoder_decoder, is_beam_search=config.num_beams > 1)
        return with_items(made(**fields), self.rules, prompts.shape[1])

    def _plan(
        self, input_ids: Tensor, processors: LogitsProcessorList, criteria: StoppingCriteriaList, *, forces_end: bool
    ) -> DecodePlan:
        """The options of the call, in the loop's terms."""
        config, verification = self.config, self.draft.verification
        before, after = _around_constraint(processors)
        tokens_per_beam = config.num_beams if verification.is_narrow else None
        if tokens_per_beam is not None and (len(before) or len(after)):
            before.append(TopKLogitsWarper(tokens_per_beam))
            tokens_per_beam = None
        stop: Any = _own_criteria(criteria, self.passed_on["stopping_criteria"] or ())
        options = options_of(config, self.rules.shared, max_new_tokens=config.max_new_tokens, forces_end=forces_end)
        options["output_scores"] &= self.keeps_step_scores
        return DecodePlan(
            **options,
            prompt=input_ids,
            processors=(before, after) if len(before) or len(after) else None,
            tokens_per_beam=tokens_per_beam,
            stopping_criteria=(lambda sequences: stop(sequences, None)) if len(stop) else None,
            exit_early=not self.passed_on["synced_gpus"],
            noise=Noise(self._seeds(input_ids)) if config.do_sample else None,
        )

    def _seeds(self, input_ids: Tensor) -> Tensor:
        """The seeds of the prompts' samples, `[B]`; drawn, if the call gives none."""
        if self.seeds is not None:
            return to_device(self.seeds, input_ids.device)
        return torch.randint(2**63 - 1, input_ids.shape[:1], generator=self.generator, device=input_ids.device)

    def _host_seeds(self, noise: Noise) -> list[int]:
        """The same for the user; only what the device drew must be fetched."""
        return noise.seeds.tolist() if self.seeds is None else self.seeds.tolist()


def _read_answers(
    model: Any, rules: BatchRules, separator: Any, max_labels: Any, *, tokenizer: Any
) -> SeveralLabels | None:
    """The constraint of answers of several sequences; None for one sequence each."""
    if separator is None:
        if max_labels is not None:
            raise ValueError(f"max_labels={max_labels} without separator, expected both: pass separator=")
        return None
    several = read_several(rules, separator, max_labels, tokenizer)
    check_tokens_of_catalogue(several, output_size_of(model), name="separator")
    return several


def _refuse_outputs(given: Callable[[str], Any]) -> None:
    """Refuse what a forward over all beams of a prompt cannot give; a checkpoint's own wishes are ignored."""
    asked = [name for name in ONE_ROW_A_PATH if given(name)]
    if asked:
        raise ValueError(
            f"{', '.join(asked)} with constraint_index, expected none: in transformers' own loop, pass "
            "logits_processor=[ConstraintLogitsProcessor(index)] instead of constraint_index"
        )


def _is_ours(model: Any, config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether our loop decodes a call; else transformers' does, which is logged once."""
    if not config.use_cache:
        why = "no cache (use_cache=False, or gradient checkpointing in training mode)"
    elif not takes_tree(model):
        why = f"{type(model).__name__} cannot score the nodes of a tree"
    elif unknown := every_step_may_read(model, model_kwargs):
        why = f"{', '.join(unknown)}: not known to matter to the prompt alone"
    else:
        return True
    say_once(f"{why}: decoding in transformers' own loop, with a logits processor for the catalogue; it is slower")
    return False


def _checkpoints_activations(model: Any) -> bool:
    """Whether a forward computes activations twice for training, and therefore returns no cache."""
    return model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _hand_back(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """transformers' `generate` calls this instead of a loop."""
    return input_ids, logits_processor, stopping_criteria, generation_config, kwargs


def _no_constraint(batch: int, tokens: Tensor) -> list[int]:
    raise AssertionError("stands for the catalogue among the processors, and is never called")


def _around_constraint(processors: LogitsProcessorList) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """The processors before the constraint and those after it."""
    place = next(i for i, one in enumerate(processors) if isinstance(one, PrefixConstrainedLogitsProcessor))
    # A user's own prefix function takes this place, and narrows the catalogue.
    is_ours = internals.prefix_function(processors[place]) is _no_constraint
    return LogitsProcessorList(processors[:place]), LogitsProcessorList(processors[place + is_ours :])


def _own_criteria(criteria: Iterable[Any], given: Iterable[Any]) -> StoppingCriteriaList:
    """The criteria, without those of length and end token, which the catalogue sets, unless the user gave them."""
    users = list(given)
    return StoppingCriteriaList(
        criterion
        for criterion in criteria
        if not isinstance(criterion, MaxLengthCriteria)
        and (not isinstance(criterion, EosTokenCriteria) or any(criterion is own for own in users))
    )
