# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What all kinds of drafts share in both backends: how one is chosen, and what it refuses. Drafts nothing."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from hf_gr.catalogue.sequences import is_integer
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.core import auto

from .checks import check_code_book, check_codes
from .configuration import VERIFICATION, code_book_of
from .models import position_limit

DRAFT_BEAMS_PER_BEAM = 2


class BaseDraft:
    """No draft; and what all kinds have in common. Serves one call.

    Args:
        model: the model.
        config: the prepared config, with our fields.
        assistant: the draft model of the call, or None.
    """

    scores_ahead = False  # whether nodes of several levels are scored together
    searches: Literal["assistant", "head"] | None = None  # what searches ahead
    lacks: tuple[str, ...] = ()  # verifications that a backend does not have
    chosen: str | None = None  # the kind that "auto" has decided on; see `Speculation.chosen`

    def __init__(self, model: Any, config: Any, assistant: Any = None) -> None:
        self.model = model
        self.config = config
        self.assistant = assistant
        self.verification = VERIFICATION[config.verification]

    def check(
        self, prompt: Any, catalogue: Snapshot, given: Mapping[str, Any], model_kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse a draft that is not possible; `given` are our fields as given in the call itself."""
        if self.searches == "head" and self.assistant is not None:
            raise ValueError(
                "drafting='head' with assistant_model, expected one of them, since both draft: omit one, or pass "
                "drafting='assistant' and verification='strict' for the draft model"
            )
        self.check_verification()
        num_draft_beams, budget = given.get("num_draft_beams"), given.get("draft_token_budget")
        if self.searches == "assistant":
            self._check_assistant(prompt, catalogue, given)
        elif self.searches == "head":
            self._check_head(prompt, catalogue, num_draft_beams)
        elif num_draft_beams is not None:
            raise ValueError(
                f"num_draft_beams={num_draft_beams} without a draft model, expected both: pass assistant_model="
            )
        if self.searches and not self.verification.by_head_alone:
            self._check_widths()
        if budget and not self.scores_ahead:
            raise ValueError(
                f"draft_token_budget={budget} without drafting, expected None: pass drafting='trie' or 'auto'"
            )
        if self.searches:
            self.check_own(prompt, catalogue, model_kwargs)

    def check_verification(self) -> None:
        """Refuse a verification that this kind of draft, or the call, does not support."""
        config, name = self.config, self.config.verification
        if name in self.lacks:
            raise ValueError(f"verification={name!r}, expected another one in Flax: omit it, or use backend='torch'")
        if self.verification.by_head_alone and self.searches != "head":
            raise ValueError(
                f"verification={name!r} with drafting={config.drafting!r}, expected drafting='head': "
                "only a draft head decodes without the model"
            )
        if self.verification.samples and config.num_return_sequences > config.num_beams:
            raise ValueError(
                f"num_return_sequences={config.num_return_sequences}, expected at most "
                f"num_beams={config.num_beams}: relaxed verification samples beams"
            )

    def check_own(self, prompt: Any, catalogue: Snapshot, model_kwargs: Mapping[str, Any]) -> None:
        """Refuse what this backend's searches alone cannot do; the arguments are those of `check`."""

    def not_a_model(self, assistant: Any) -> str | None:
        """What a draft model should be, if `assistant` is not a model of this backend; else None."""
        raise NotImplementedError

    def draft_beams(self, plan: Any) -> tuple[int, int]:
        """How many beams a search has, and the level where it may begin."""
        # Relaxed answers would be further from the model's own with every level drafted: the first one is exact.
        beams_per_beam = 1 if plan.is_relaxed else DRAFT_BEAMS_PER_BEAM
        return self.config.num_draft_beams or plan.width * beams_per_beam, int(plan.is_relaxed)

    def _check_assistant(self, prompt: Any, catalogue: Snapshot, given: Mapping[str, Any]) -> None:
        """Refuse a draft model that cannot draft for the model, or has no positions for these prompts."""
        model, assistant = self.model, self.assistant
        if assistant is None:
            raise ValueError("drafting='assistant' without assistant_model, expected both: pass assistant_model=")
        if given.get("drafting") == "trie":
            raise ValueError(
                "drafting='trie' with assistant_model, expected one of them: drafting='assistant' uses both"
            )
        name = type(assistant).__name__
        if (expected := self.not_a_model(assistant)) is not None:
            raise ValueError(f"assistant_model is a {name}, expected {expected}")
        is_encoder_decoder = assistant.config.is_encoder_decoder
        if is_encoder_decoder != model.config.is_encoder_decoder:
            kinds = ["encoder-decoder" if one.config.is_encoder_decoder else "decoder" for one in (assistant, model)]
            raise ValueError(
                f"assistant_model is a {name}, {kinds[0]}, expected {kinds[1]} like the model: both must read the "
                "same prompt"
            )
        ours, theirs = (one.config.get_text_config(decoder=True).vocab_size for one in (model, assistant))
        if ours != theirs:
            raise ValueError(
                f"assistant_model has a vocabulary of {theirs} tokens, expected the model's, {ours}: "
                "both must be trained with one tokenizer, and resized alike"
            )
        if not prompt.is_tokens:
            raise ValueError("the prompt is not given as input_ids, which assistant_model reads: pass input_ids=")
        if book := code_book_of(assistant):
            check_code_book(book, catalogue, whose="assistant_model")
        if getattr(assistant.config.get_text_config(decoder=True), "rope_parameters", None) is not None:
            return  # positions for any length
        num_tokens, limit = prompt.inputs.shape[1], position_limit(assistant.config, of_encoder=is_encoder_decoder)
        if not is_encoder_decoder:  # where padding has no position; the target alone reads the last level drafted
            num_tokens = num_tokens if prompt.mask is None else int(prompt.mask.sum(-1).max())
            num_tokens += max(catalogue.max_length - 2, 0)
        if limit is not None and num_tokens > limit:
            raise ValueError(
                f"assistant_model has {limit} positions, expected {num_tokens} for this prompt and its drafts: "
                "shorten the prompt, or omit assistant_model"
            )

    def _check_head(self, prompt: Any, catalogue: Snapshot, num_draft_beams: int | None) -> None:
        """Refuse a head that does not fit the catalogue, or whose placeholders have no position after the prompt."""
        head = getattr(self.model, "draft_head", None)
        if num_draft_beams is not None and self.verification.by_head_alone:
            raise ValueError(
                f"num_draft_beams={num_draft_beams} with verification={self.config.verification!r}, expected None: "
                "the head's own num_beams are the answer; with verification='strict' it drafts"
            )
        if head is None:
            raise ValueError(
                "drafting='head' and the model has no draft head, expected one: load a checkpoint that has one, or "
                "in PyTorch make one by model.add_draft_head(...) and train it with hf_gr.training.DraftHeadTrainer"
            )
        check_codes(head, catalogue)
        num, limit = head.config.num_placeholders, position_limit(self.model.config)
        if limit is not None and prompt.length + num > limit:
            raise ValueError(
                f"the prompt has {prompt.length} tokens and the draft head's placeholders {num} more, expected at "
                f"most {limit} together, which is the model's max_position_embeddings: shorten the prompt"
            )

    def _check_widths(self) -> None:
        """Refuse searches that could never be accepted, or that draft no level."""
        config = self.config
        name = "num_beams" if config.num_beams >= config.num_return_sequences else "num_return_sequences"
        if config.num_draft_beams is not None and config.num_draft_beams < getattr(config, name):
            raise ValueError(
                f"num_draft_beams={config.num_draft_beams}, expected at least {name}={getattr(config, name)}: "
                "a step is accepted only if all beams are among those of the draft"
            )
        if not is_integer(config.num_assistant_tokens) or config.num_assistant_tokens < 1:
            raise ValueError(
                f"num_assistant_tokens={config.num_assistant_tokens!r}, expected 1 or more levels a draft"
            )


def drafts_of(
    kinds: Mapping[str | None, Any],
    model: Any,
    config: Any,
    assistant: Any,
    prompt: Any,
    catalogue: Snapshot,
    given: Mapping[str, Any],
    model_kwargs: Mapping[str, Any],
) -> dict[str | None, Any]:
    """The drafts that a call may use, by name, checked, simplest first: one, or those that "auto" chooses from.

    `kinds` are those of a backend, by what `drafting` calls them; the others are the arguments of `BaseDraft` and of
    its `check`. A draft model is used whenever there is one, unless another kind is named.
    """
    name = "assistant" if assistant is not None and config.drafting in (None, "trie") else config.drafting
    if name == "trie" and config.draft_token_budget == 0:
        name = None
    if name != "auto":
        if name not in kinds:
            expected = (*kinds, "auto")
            raise ValueError(f"drafting={name!r}, expected one of {expected} in Flax: omit it, or use backend='torch'")
        draft = kinds[name](model, config, assistant)
        draft.check(prompt, catalogue, given, model_kwargs)
        return {name: draft}
    is_relaxed = config.verification == "relaxed"
    has_head = getattr(model, "draft_head", None) is not None and not is_relaxed
    names = [
        None,
        *["trie"] * (config.draft_token_budget != 0),
        *["head"] * has_head,
        *["assistant"] * (assistant is not None),
    ]
    if is_relaxed and assistant is not None:  # answers depend on the draft: the draft model always drafts
        names = ["assistant"]
    drafts = {name: kinds[name](model, config, assistant if name == "assistant" else None) for name in names}
    drafts[names[0]].check_verification()
    if has_head:
        try:
            drafts["head"].check(prompt, catalogue, given, model_kwargs)
        except ValueError:  # it does not fit the catalogue, say
            if assistant is None and given.get("num_draft_beams") is not None:
                raise  # only the head could have used them
            del drafts["head"]
    if (last := list(drafts)[-1]) != "head":
        drafts[last].check(prompt, catalogue, given, model_kwargs)
    return drafts


def fastest(
    drafts: Mapping[str | None, Any],
    catalogue: Snapshot,
    *,
    kind: tuple[Any, ...],  # what a forward's time depends on, other than the beams
    num_beams: int,
    budget: int,  # the most nodes in addition to the live beams
    below_prompt: bool,  # whether the prompt's own forward may score nodes
    timed_forward: Callable[[int], Callable[[], Any]],  # see `auto.costs_of`
) -> Any:
    """The draft of `drafting="auto"`, with its node budget; the first call of a kind times two forwards."""
    draft = next(iter(drafts.values()))
    model, config = draft.model, copy.copy(draft.config)
    widths = np.diff(catalogue.trie.level_starts).tolist()
    name, config.draft_token_budget = next(iter(drafts)) or "none", budget
    if "trie" in drafts and len(widths) > 2:  # there is something to choose
        costs = auto.costs_of(model, (*kind, num_beams), timed_forward, num_beams, budget)
        width, steps = config.num_draft_beams or DRAFT_BEAMS_PER_BEAM * num_beams, config.num_assistant_tokens
        searches = [auto.Search("head", auto.HEAD, width, steps, first_level=1)] if "head" in drafts else []
        if "assistant" in drafts:
            share = _size(drafts["assistant"].assistant) / _size(model)
            searches.append(auto.Search("assistant", share, width, steps, first_level=0))
        name, config.draft_token_budget = auto.choose_draft(
            widths, num_beams, costs, budget=budget, below_prompt=below_prompt, searches=searches
        )
    draft = drafts[None if name == "none" else name]
    draft.config, draft.chosen = config, name
    return draft


def _size(model: Any) -> int:
    """What weights grow with."""
    config = model.config.get_text_config(decoder=True)
    return config.num_hidden_layers * config.hidden_size**2
