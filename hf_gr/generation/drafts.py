# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What the kinds of drafts of both backends have in common: how one is chosen, and what it refuses. Drafts nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.core import auto

from .checks import (
    check_assistant,
    check_codes,
    check_draft_width,
    check_room_for_drafts,
    check_room_for_placeholders,
)
from .configuration import VERIFICATION


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
        self,
        prompt: Any,
        catalogue: Snapshot,
        *,
        given: Mapping[str, Any],
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Refuse a draft that is not possible.

        Args:
            prompt: the prompt.
            catalogue: the catalogue of any row.
            given: our fields as given in the call itself.
            model_kwargs: the call's other arguments for the model.

        Raises:
            ValueError: names the argument, its value, what is expected, and the fix.
        """
        if self.searches == "head" and self.assistant is not None:
            raise ValueError(
                "drafting='head' with assistant_model, expected one of them, since both draft: omit one, or pass "
                "drafting='assistant' and verification='strict' for the draft model"
            )
        self.check_verification()
        if self.searches == "assistant":
            self._check_assistant(prompt, catalogue, given)
        elif self.searches == "head":
            self._check_head(prompt, catalogue, given)
        elif given.get("num_draft_beams") is not None:
            raise ValueError(
                f"num_draft_beams={given['num_draft_beams']} without a draft model, expected both: "
                "pass assistant_model="
            )
        if given.get("draft_token_budget") is not None and not self.scores_ahead:
            raise ValueError(
                f"draft_token_budget={given['draft_token_budget']} without drafting, expected None: "
                "pass drafting='trie' or 'auto'"
            )
        self.check_own(prompt, catalogue, model_kwargs or {})

    def check_own(self, prompt: Any, catalogue: Snapshot, model_kwargs: Mapping[str, Any]) -> None:
        """Refuse what one backend alone cannot do; the arguments are those of `check`."""

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

    def _check_assistant(self, prompt: Any, catalogue: Snapshot, given: Mapping[str, Any]) -> None:
        """Refuse a draft model that cannot draft for the model."""
        assistant = self.assistant
        if assistant is None:
            raise ValueError("drafting='assistant' without assistant_model, expected both: pass assistant_model=")
        if given.get("drafting") == "trie":
            raise ValueError(
                "drafting='trie' with assistant_model, expected one of them: drafting='assistant' uses both"
            )
        if (expected := self.not_a_model(assistant)) is not None:
            raise ValueError(f"assistant_model is a {type(assistant).__name__}, expected {expected}")
        check_assistant(self.model, assistant)
        if not prompt.is_tokens:
            raise ValueError("the prompt is not given as input_ids, which assistant_model reads: pass input_ids=")
        check_draft_width(self.config)
        check_room_for_drafts(assistant, catalogue, prompt.inputs.shape[1], prompt.mask)

    def not_a_model(self, assistant: Any) -> str | None:
        """What a draft model should be, if it is none of this backend's."""
        raise NotImplementedError

    def _check_head(self, prompt: Any, catalogue: Snapshot, given: Mapping[str, Any]) -> None:
        """Refuse a head that does not fit the catalogue or the prompt."""
        head, name = getattr(self.model, "draft_head", None), self.config.verification
        if given.get("num_draft_beams") is not None and self.verification.by_head_alone:
            raise ValueError(
                f"num_draft_beams={given['num_draft_beams']} with verification={name!r}, expected None: the head's "
                "own num_beams are the answer; with verification='strict' it drafts"
            )
        if head is None:
            raise ValueError(
                "drafting='head' and the model has no draft head, expected one: load a checkpoint that has one, or "
                "in PyTorch make one by model.add_draft_head(...) and train it with hf_gr.training.DraftHeadTrainer"
            )
        check_codes(head, catalogue)
        check_room_for_placeholders(head, self.model.config, prompt.length)
        if not self.verification.by_head_alone:
            check_draft_width(self.config)


class BaseAuto(BaseDraft):
    """A call served by whichever draft is expected to be the fastest."""

    scores_ahead = True
    kinds: Mapping[str, type[BaseDraft]]  # of the backend
    candidates: dict[str, Any]  # after `check`, the simplest first
    prompt: Any  # after `check`

    def check(
        self,
        prompt: Any,
        catalogue: Snapshot,
        *,
        given: Mapping[str, Any],
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Refuse what none could serve; a draft head that does not fit the call does not serve it."""
        self.check_verification()
        model, assistant, is_relaxed = self.model, self.assistant, self.config.verification == "relaxed"
        has_head = getattr(model, "draft_head", None) is not None and not is_relaxed
        names = ["none", "trie", *["head"] * has_head, *["assistant"] * (assistant is not None)]
        if is_relaxed and assistant is not None:  # answers depend on the draft: the draft model always drafts
            names = ["assistant"]
        of_call = {"assistant": assistant}
        drafts = {name: self.kinds[name](model, self.config, of_call.get(name)) for name in names}

        def check(name: str) -> None:
            drafts[name].check(prompt, catalogue, given=given, model_kwargs=model_kwargs)

        if has_head:
            try:
                check("head")
            except ValueError:  # it does not fit the catalogue, say
                if assistant is None and given.get("num_draft_beams") is not None:
                    raise  # only the head could have used them
                del drafts["head"]
        if (last := list(drafts)[-1]) != "head":
            check(last)
        self.candidates, self.prompt = drafts, prompt

    def decide(
        self, catalogue: Snapshot, *, kind: tuple[Any, ...], num_beams: int, budget: int, below_prompt: bool
    ) -> Any:
        """The draft that serves the call, with its node budget; the first call of a kind times two forwards.

        Args:
            catalogue: the catalogue of any row.
            kind: what a forward's time depends on, besides the beams.
            num_beams: K.
            budget: the most nodes besides the live beams.
            below_prompt: whether the prompt's own forward may score nodes.
        """
        model, config, drafts = self.model, copy.copy(self.config), self.candidates
        widths = np.diff(catalogue.trie.level_starts).tolist()
        self.chosen, config.draft_token_budget = next(iter(drafts)), budget
        if "trie" in drafts and len(widths) > 2:  # there is something to choose
            costs = auto.costs_of(model, (*kind, num_beams), self.timed_forward, num_beams, budget)
            width, steps = config.num_draft_beams or 2 * num_beams, config.num_assistant_tokens
            searches = []
            if "head" in drafts:
                searches.append(auto.Search("head", auto.HEAD, width, steps, first_level=1))
            if "assistant" in drafts:
                share = _size(self.assistant) / _size(model)
                searches.append(auto.Search("assistant", share, width, steps, first_level=0))
            self.chosen, config.draft_token_budget = auto.choose_draft(
                widths, num_beams, costs, budget=budget, below_prompt=below_prompt, searches=searches
            )
        served_by = drafts[self.chosen]
        served_by.config = config
        return served_by

    def timed_forward(self, num_nodes: int) -> Callable[[], Any]:
        """Prepares a forward of so many nodes after prompts of the call's size; it returns when it is done."""
        raise NotImplementedError


def _size(model: Any) -> int:
    """What weights grow with."""
    config = model.config.get_text_config(decoder=True)
    return config.num_hidden_layers * config.hidden_size**2


def kind_of(config: Any, assistant: Any) -> str | None:
    """The kind of draft of a call: a draft model is used whenever there is one, unless another kind is named."""
    return "assistant" if assistant is not None and config.drafting in (None, "trie") else config.drafting
