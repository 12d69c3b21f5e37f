# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`GRGenerationMixin`: `generate` with a catalogue. Checks, lets transformers prepare, and hands over to `decode`.

The way of a call: `generate` -> `_decode_prepared` (transformers has prepared the inputs) ->
`hf_gr.torch.decode.decode`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    TopKLogitsWarper,
)
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.snapshot import BatchRules
from hf_gr.generation.catalogues import batch_rules, resolve_indexes
from hf_gr.generation.checks import fill_token, first_of, missing_token
from hf_gr.generation.configuration import BY_HEAD_ALONE, GR_FIELDS, check_fields
from hf_gr.torch.decode import Decoded, DecodePlan, decode
from hf_gr.torch.draft_head import DraftHead
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transition import DeviceCatalogue, device_catalogue

from .checkpoints import prepare_upload, save_beside
from .checks import check_call, check_draft_head, check_drafting, check_generator, describe_prompt
from .drafting import assistant_scorers, drafting_of, head_scorers, make_drafter
from .heads import add_draft_head
from .layouts import Layout, choose_layout, copy_cache, make_scorer
from .loop import generate_by_processor
from .outputs import output_class
from .placeholders import prefill_with_placeholders

logger = logging.getLogger(__name__)

# What the model is called with again at every step, or needs at the prefill alone.
CONTINUED_ARGUMENTS = frozenset(
    "attention_mask decoder_attention_mask decoder_input_ids encoder_outputs input_ids inputs_embeds logits_to_keep "
    "past_key_values position_ids tokenizer".split()
) | frozenset(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
# A call that is prepared already: transformers takes its config as it is.
_IS_PREPARED: ContextVar[bool] = ContextVar("is_prepared", default=False)
# True while transformers prepares a call of ours: the prompt is not repeated for every beam.
_ONE_ROW_PER_REQUEST: ContextVar[bool] = ContextVar("one_row_per_request", default=False)
# False where `output_scores=True` asks for `sequences_scores` alone.
_KEEP_STEP_SCORES: ContextVar[bool] = ContextVar("keep_step_scores", default=True)
# True while a checkpoint is saved or pushed that is to carry `custom_generate/generate.py`.
_CUSTOM_GENERATE: ContextVar[bool] = ContextVar("custom_generate", default=False)
_SAID: set[str] = set()


@dataclass(frozen=True)
class _Call:
    """What a call carries past transformers' preparation."""

    rules: BatchRules
    layout: Layout | None  # None where the draft head alone decodes
    user_criteria: tuple[Any, ...]
    synced_gpus: bool
    inputs: Tensor | None
    assistant: Any
    generator: torch.Generator | None


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
        constraint_index: ConstraintIndex | str | Sequence[ConstraintIndex | str] | Literal[False] | None = None,
        exclude_items: Sequence[Iterable[ItemId]] | None = None,
        assistant_model: Any = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate sequences of a catalogue; without one this is transformers' `generate`, untouched.

        Args:
            constraint_index: the catalogue, or the name of one; by default the one that
                `generation_config.constraint_index` names, which `constraint_index=False` switches off. A list gives
                every prompt its own: views of one index (`index.where(...)`), or that index itself.
            exclude_items: for every prompt the ids of items that it must not be answered with, such as those that the
                user has; ids that the catalogue does not have are fine. Where items share a sequence, all of them must
                be excluded for it to go.
            assistant_model: a draft model with the same vocabulary, which proposes nodes that are scored ahead; also
                with several beams (AtSpeed). See `GRGenerationConfig` for `num_draft_beams`, `draft_token_budget` and
                `verification`, and for drafts of the catalogue itself, which need no model: `drafting="trie"`. Logits
                processors see the draft's scores, too: they must not keep state between calls.
            generator: of all random draws; the device's own one by default.
            all others: transformers' own, with its meanings. Decoding modes are greedy, sampling, beam search and beam
                sampling. With a catalogue the length need not be given, `past_key_values` holds one row a prompt (it
                is left as it is), and `sequences_scores` sums log-probabilities over the full vocabulary, unless
                `renormalize_logits=True` has the legal tokens of each step renormalised.

        Returns:
            What transformers returns: a tensor, or with `return_dict_in_generate` an output object. Where fewer legal
            sequences exist than are asked for, the rest are rows of `pad_token_id` (behind the prompt) with score
            `-inf`. The object's `speculation` counts forwards, and what was scored ahead (None in transformers' loop).

        Raises:
            ValueError: before any work, for arguments that cannot lead to the catalogue's sequences: a vocabulary
                that lacks its tokens, too small a length, right-padded prompts, a cache of another batch size, an
                unsupported mode, views of different indexes in one batch, excluded ids of another type.

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
        if isinstance(generation_config, ConstraintIndex):
            raise ValueError("generation_config is a ConstraintIndex, expected a config: pass it as constraint_index=")
        ours = {name: kwargs.pop(name) for name in GR_FIELDS if name in kwargs}
        passed_on = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
        }
        configs = (generation_config, self.generation_config)
        named = first_of("constraint_index", {}, *configs)
        if constraint_index is False or (constraint_index is None and named is None):
            _refuse_alone(ours | {"exclude_items": exclude_items, "generator": generator})
            if assistant_model is not None:
                kwargs["assistant_model"] = assistant_model
            return super_.generate(
                inputs, generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, synced_gpus,
                *args, **kwargs,
            )  # fmt: skip
        indexes = resolve_indexes(self, named if constraint_index is None else constraint_index)
        if kwargs.pop("custom_generate", None) is not None or args:
            raise ValueError(
                "custom_generate is given, expected None: with constraint_index this model decodes by hf_gr's own loop"
            )
        if first_of("verification", ours, *configs) == "relaxed":
            if kwargs.setdefault("do_sample", True) is False:
                raise ValueError("do_sample=False with verification='relaxed', expected True: it samples beams")
            if first_of("top_k", kwargs, *configs) is None:
                kwargs["top_k"] = 0  # transformers' default, 50, could leave fewer candidates than beams
        # Of the call itself: a checkpoint's lengths are older than its catalogue, its use_cache=False is training's.
        max_new_tokens, max_length, use_cache = (
            kwargs.get(name, getattr(generation_config, name, None))
            for name in ("max_new_tokens", "max_length", "use_cache")
        )
        config, model_kwargs = self._prepare_generation_config(generation_config, **kwargs)
        for name, default in GR_FIELDS.items():
            setattr(config, name, ours.get(name, getattr(config, name, default)))
        config.verification = config.verification or ("catalogue" if config.drafting == "head" else "strict")
        prompt = describe_prompt(self, inputs, config, model_kwargs)
        rules = batch_rules(indexes, exclude_items, num_prompts=prompt.num_rows)
        cache = model_kwargs.get("past_key_values")
        check_call(
            self,
            rules.any,
            config,
            prompt,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            stopping_criteria=stopping_criteria,
            past_key_values=cache,
        )
        check_drafting(self, assistant_model, config, prompt, ours)
        if config.drafting == "head":
            check_draft_head(self, rules.any, config, prompt, model_kwargs)
        check_generator(generator, self.device)
        if max_new_tokens is None:
            max_new_tokens = rules.any.max_length if max_length is None else max_length - prompt.length
        config.max_new_tokens, config.max_length = max_new_tokens, None
        config.use_cache = use_cache is not False
        # Both name tokens that no catalogue without them could begin or end with.
        config.forced_bos_token_id = config.forced_eos_token_id = None

        by_head_alone = config.verification in BY_HEAD_ALONE
        layout = None if by_head_alone else self._choose_layout(config, model_kwargs)
        prepared = _IS_PREPARED.set(True)
        try:
            if layout is None and not by_head_alone:
                if generator is not None:
                    raise ValueError("generator is given, expected None in transformers' loop: use torch.manual_seed")
                if drafting_of(config, assistant_model) is not None:
                    _say_once("decoding in transformers' loop: without a draft")
                fill_token_id = fill_token(config)
                return generate_by_processor(
                    super_.generate, rules, config, inputs, passed_on, model_kwargs, fill_token_id=fill_token_id
                )
            if config.cache_implementation is not None:
                _say_once(
                    f"cache_implementation={config.cache_implementation!r} is not used: beams share a dynamic one"
                )
                config.cache_implementation = None
            if cache is not None:
                model_kwargs["past_key_values"] = copy_cache(cache)
            call = _Call(
                rules,
                layout,
                user_criteria=tuple(stopping_criteria or ()),
                synced_gpus=bool(synced_gpus),
                inputs=prompt.inputs,
                assistant=assistant_model,
                generator=generator,
            )

            def decode_prepared(model: Any, input_ids: Tensor, **arguments: Any) -> Any:
                return _decode_prepared(model, input_ids, call=call, **arguments)

            # The position of this processor among the others is where transformers applies constraints.
            passed_on["prefix_allowed_tokens_fn"] = prefix_allowed_tokens_fn or _no_constraint
            one_row = _ONE_ROW_PER_REQUEST.set(True)
            try:
                return super_.generate(inputs, config, custom_generate=decode_prepared, **passed_on, **model_kwargs)
            finally:
                _ONE_ROW_PER_REQUEST.reset(one_row)
        finally:
            _IS_PREPARED.reset(prepared)

    def add_draft_head(self: Any, codebooks: Any, **options: Any) -> DraftHead:
        """Give the model a draft head for `drafting="head"`, in the place of one that it may have.

        Args:
            codebooks: what the head chooses from: a `ConstraintIndex`, `SemanticIds`, a list of token ids for every
                level, or a `DraftHead`.
            options: `tokenizer`, which gets the placeholders; and the fields of `DraftHeadConfig`: `transition`,
                `use_state`, `use_placeholders`, `placeholder_tokens`.

        Returns:
            The head, `model.draft_head`, untrained unless it was given.

        Raises:
            ValueError: what does not fit the model or the tokenizer. Nothing is changed then. All of it is told by
                `help(hf_gr.generation.torch.heads.add_draft_head)`.

        Example:
            >>> from transformers import Qwen3Config, Qwen3ForCausalLM
            >>> from hf_gr import ConstraintIndex, enable
            >>> config = Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8, eos_token_id=None)
            >>> model = enable(Qwen3ForCausalLM(config)).eval()
            >>> index = ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]], item_ids=["ham", "jam", "yam"])
            >>> head = model.add_draft_head(index)  # to be trained by hf_gr.training.DraftHeadTrainer
            >>> prompt = torch.tensor([[1, 2]])
            >>> how = {"num_beams": 3, "num_return_sequences": 3, "drafting": "head"}
            >>> out = model.generate(prompt, constraint_index=index, **how)
            >>> sorted(index.items(out[:, 2:]))
            [['ham'], ['jam'], ['yam']]
        """
        return add_draft_head(self, codebooks, **options)

    def save_pretrained(
        self: Any,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *args: Any,
        custom_generate: bool = False,
        **kwargs: Any,
    ) -> None:
        """transformers' own; a draft head has two files of its own beside the model's.

        Args:
            save_directory: as in transformers, like all but the last.
            is_main_process: as there.
            state_dict: as there.
            args: as there.
            custom_generate: also write `custom_generate/generate.py`. Whoever loads the checkpoint by
                `AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)` (or `AutoModelForSeq2SeqLM`) has
                this `generate` then, without importing hf_gr, which must be installed; without `trust_remote_code`
                it is an ordinary checkpoint.
            kwargs: as in transformers.

        A checkpoint with a draft head, a named catalogue or `custom_generate` gets a model card, where there is none.

        Raises:
            ValueError: a file in the folder's place, or a draft head with layers of an adapter.
        """
        super_: Any = super()
        carries = _CUSTOM_GENERATE.set(custom_generate or _CUSTOM_GENERATE.get())
        try:
            if self.should_save_on_this_rank(is_main_process):
                save_beside(self, save_directory, state_dict=state_dict, custom_generate=_CUSTOM_GENERATE.get())
            super_.save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)
        finally:
            _CUSTOM_GENERATE.reset(carries)

    def push_to_hub(self: Any, repo_id: str, *, custom_generate: bool = False, **kwargs: Any) -> Any:
        """transformers' own, with the draft head's files, and a model card where the repository has none.

        A card that somebody wrote gets tags, and keeps all that it says.

        Args:
            repo_id: as in transformers.
            custom_generate: as in `save_pretrained`.
            kwargs: as in transformers.

        Returns:
            What transformers returns.
        """
        super_: Any = super()
        carries = _CUSTOM_GENERATE.set(custom_generate)
        try:
            return super_.push_to_hub(repo_id, **kwargs)
        finally:
            _CUSTOM_GENERATE.reset(carries)

    def _upload_modified_files(
        self: Any, working_dir: str | Path, repo_id: str, files_timestamps: dict[str, float], *args: Any, **kwargs: Any
    ) -> Any:
        """transformers' own, with the files that are ours, and a card that tells of them."""
        super_: Any = super()
        files_timestamps = prepare_upload(
            self, working_dir, repo_id, files_timestamps, custom_generate=_CUSTOM_GENERATE.get()
        )
        return super_._upload_modified_files(working_dir, repo_id, files_timestamps, *args, **kwargs)

    def _prepare_generation_config(
        self: Any, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """transformers' own, once: what a call of ours has prepared passes through."""
        if _IS_PREPARED.get():
            # From here on processors and criteria of the user run, which may call `generate` themselves.
            _IS_PREPARED.set(False)
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

    def _choose_layout(self: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Layout | None:
        """The layout of this call, None for transformers' own loop, which is said once."""
        asked = [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name)]
        asked += [
            name for name, value in model_kwargs.items() if value is not None and name not in CONTINUED_ARGUMENTS
        ]
        asked += ["stop_strings"] if config.stop_strings is not None else []  # transformers hands us no tokenizer
        asked += [] if config.use_cache else ["use_cache=False"]
        if asked:
            _say_once(
                f"{', '.join(dict.fromkeys(asked))}: decoding in transformers' own loop, "
                "with a logits processor for the catalogue"
            )
            return None
        layout = choose_layout(self)
        if layout is None:
            _say_once(
                f"{type(self).__name__} takes neither the tree nor the batch layout: decoding in transformers' loop, "
                "with a logits processor for the catalogue; it is slower"
            )
        return layout


@contextmanager
def sequences_scores_only() -> Iterator[None]:
    """`output_scores=True` gives `sequences_scores` and not the scores of all steps, `[batch * beams, vocab]` each.

    transformers' loop, where a model decodes in it, keeps them all the same.
    """
    token = _KEEP_STEP_SCORES.set(False)
    try:
        yield
    finally:
        _KEEP_STEP_SCORES.reset(token)


def _decode_prepared(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    *,
    call: _Call,
    **model_kwargs: Any,
) -> Any:
    """Prefill by transformers' own code, then decode; called by transformers' `generate` once inputs are prepared."""
    _ONE_ROW_PER_REQUEST.set(False)
    plan = _make_plan(input_ids, logits_processor, stopping_criteria, generation_config, call)
    drafting = drafting_of(generation_config, call.assistant)
    draft_scorers = None
    if drafting == "head":
        head = model.draft_head
        outputs, hidden = prefill_with_placeholders(
            model, input_ids, generation_config, model_kwargs, placeholder_ids=head.config.placeholder_token_ids
        )
        draft_scorers = head_scorers(head, hidden, plan, outputs.logits.shape[-1])
    else:
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
    if call.assistant is not None:
        mask = model_kwargs.get("attention_mask")
        draft_scorers = assistant_scorers(call.assistant, plan.prompt, call.inputs, mask)
    catalogue = device_catalogue(call.rules, outputs.logits.device)
    layout = call.layout
    if layout is None:
        assert draft_scorers is not None, "checked at the door"
        decoded = decode(draft_scorers(plan.width)(), _checked(catalogue, model.draft_head, generation_config), plan)
        return _as_output(model, input_ids, decoded, generation_config, outputs.get("past_key_values"))

    def new_scorer() -> Scorer:
        ahead = drafting is not None
        rows = {"batch_size": input_ids.shape[0], "width": plan.width}
        return make_scorer(model, layout, outputs, model_kwargs, **rows, scores_ahead=ahead)

    scorer, drafter = new_scorer(), None
    if drafting is not None and _can_draft(model, scorer, call):
        shape = scorer.prompt_logits.shape
        drafter = make_drafter(
            model, drafting, generation_config, plan, catalogue, new_scorer, draft_scorers, logits_shape=shape
        )
    decoded = decode(scorer, catalogue, plan, drafter)
    happened = decoded.speculation
    if drafting == "trie" and drafter is not None and happened.target_forwards and not happened.drafted_steps.any():
        _say_once(
            f"draft_token_budget={drafter.budget} is too small for any level of this catalogue with "
            f"num_beams={plan.num_beams}: decoding as without a draft",
            about="draft_token_budget",
        )
    return _as_output(model, input_ids, decoded, generation_config, outputs.past_key_values)


def _checked(catalogue: DeviceCatalogue, head: DraftHead, config: Any) -> DeviceCatalogue:
    """The catalogue with as many unchecked levels as the verification says."""
    levels = {"catalogue": 0, "last_level": catalogue.max_length - 1, "none": catalogue.max_length}
    codes = (head.codebook(level).to(catalogue.device) for level in range(levels[config.verification]))
    return replace(catalogue, unchecked=tuple(codes))


def _can_draft(model: Any, scorer: Scorer, call: _Call) -> bool:
    """Whether several levels can be scored together; if not, that is said once."""
    if not scorer.takes_levels:
        _say_once(f"{type(model).__name__} cannot score nodes of several levels together: decoding without a draft")
    elif call.synced_gpus:
        _say_once("synced_gpus: decoding without a draft, whose forwards are not equally many everywhere")
    return scorer.takes_levels and not call.synced_gpus


def _make_plan(
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: Any,
    call: _Call,
) -> DecodePlan:
    position = next(i for i, p in enumerate(logits_processor) if isinstance(p, PrefixConstrainedLogitsProcessor))
    # A prefix function of the user's own has the place instead, and narrows the catalogue.
    is_ours = logits_processor[position]._prefix_allowed_tokens_fn is _no_constraint
    before = LogitsProcessorList(logits_processor[:position])
    if config.verification == "last_level":
        before.append(TopKLogitsWarper(config.num_beams))  # NEZHA, algorithm 3, line 19
    after = LogitsProcessorList(logits_processor[position + is_ours :])
    # Length and end token are the catalogue's business, unless the user says otherwise.
    criteria = StoppingCriteriaList(
        criterion
        for criterion in stopping_criteria
        if not isinstance(criterion, MaxLengthCriteria)
        and (not isinstance(criterion, EosTokenCriteria) or any(criterion is own for own in call.user_criteria))
    )
    stop: Any = criteria
    eos = config._eos_token_tensor
    num_ends = 0 if eos is None else eos.shape[0]
    is_relaxed = config.verification == "relaxed"
    fill = fill_token(config)
    return DecodePlan(
        prompt=input_ids,
        num_beams=config.num_beams,
        num_return_sequences=config.num_return_sequences,
        num_kept=config.num_beams if is_relaxed else max(2, 1 + num_ends) * config.num_beams,
        do_sample=config.do_sample,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        max_new_tokens=config.max_new_tokens,
        fill_token_id=fill,
        missing_token_id=missing_token(call.rules.any, fill),
        processors=(before, after) if len(before) or len(after) else None,
        stopping_criteria=(lambda sequences: stop(sequences, None)) if len(criteria) else None,
        output_scores=bool(config.return_dict_in_generate and config.output_scores and _KEEP_STEP_SCORES.get()),
        output_logits=bool(config.return_dict_in_generate and config.output_logits),
        exit_early=not call.synced_gpus,
        is_relaxed=is_relaxed,
        generator=call.generator,
    )


def _as_output(
    model: Any,
    input_ids: Tensor,
    decoded: Decoded,
    config: GenerationConfig,
    cache: Any,
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
        "speculation": decoded.speculation,
    }
    if config.num_beams > 1:
        fields["sequences_scores"] = decoded.scores if config.output_scores else None
        fields["beam_indices"] = decoded.beam_indices.int()
    made = output_class(is_encoder_decoder=model.config.is_encoder_decoder, is_beam_search=config.num_beams > 1)
    return made(**fields)


def _refuse_alone(ours: dict[str, Any]) -> None:
    """Our options mean nothing without a catalogue."""
    check_fields(ours)
    given = [name for name, value in ours.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)} given without constraint_index, expected both: pass constraint_index=")


def _no_constraint(batch: int, tokens: Tensor) -> list[int]:
    raise AssertionError("stands for the catalogue among the processors, and is never called")


def _say_once(message: str, *, about: str | None = None) -> None:
    """Log a message, and none about the same (by default: the same message) again."""
    if (about or message) not in _SAID:
        _SAID.add(about or message)
        logger.warning(message)
