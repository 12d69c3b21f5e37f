# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"` in Flax: of all drafts that a call may have, and none, what real calls show to be the fastest.

Each serves some calls in turn and is timed: strict answers are the same whichever serves a call. A call that runs a
program for the first time may have compiled it, and does not count. All calls of a kind run the same program, so their
times compare as they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
from jax.sharding import Mesh

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.flax.decode import Decoded
from hf_gr.flax.plan import DecodePlan
from hf_gr.flax.scorers import Params
from hf_gr.flax.transition import DeviceCatalogue
from hf_gr.generation.messages import logger
from hf_gr.generation.trials import Trial, Trials

from .drafts import AssistantDraft, Draft, SearchingHeadDraft, TrieDraft
from .prompts import HostPrompt, prompt_bucket


@dataclass
class Known:
    """What is known of one kind of call.

    Attributes:
        trials: of the drafts that may be worth it.
        served: the programs that have served a call: the draft, and the shapes of the catalogue's arrays.
    """

    trials: Trials
    served: set[tuple[Any, ...]] = field(default_factory=set)


_KNOWN: WeakKeyDictionary[Any, dict[tuple[Any, ...], Known]] = WeakKeyDictionary()


class AutoDraft(Draft):
    """A call served by another draft: the first calls of a kind try them, then one is kept."""

    scores_ahead = True
    candidates: dict[str, Draft]  # after `check`, the simplest first
    prompt_shape: tuple[int, int]  # in its bucket
    known: Known  # after `plan`, like the next three
    trial: Trial
    start: float
    before: frozenset[tuple[Any, ...]]  # programs that had served a call

    def check(self, prompt: HostPrompt, catalogue: Snapshot, *, given: Mapping[str, Any]) -> None:
        """See `Draft.check`."""
        model, config = self.model, self.config
        self.prompt_shape = prompt_bucket(prompt.input_ids.shape[1]), prompt.length if model.is_encoder_decoder else 0
        is_relaxed = config.verification == "relaxed"
        self.candidates = {"none": Draft(model, config), "trie": TrieDraft(model, config)}
        if model.draft_head is not None and not is_relaxed:
            head = SearchingHeadDraft(model, config)
            try:
                head.check(prompt, catalogue, given=given)
                self.candidates["head"] = head
            except ValueError:
                if self.assistant is None and given.get("num_draft_beams") is not None:
                    raise  # only the head could have used them
        if self.assistant is not None:
            assistant = AssistantDraft(model, config, self.assistant)
            assistant.check(prompt, catalogue, given=given)
            # Relaxed answers depend on the draft: there is nothing to choose.
            self.candidates = {**({} if is_relaxed else self.candidates), "assistant": assistant}
        elif "head" not in self.candidates:
            self.candidates["trie"].check(prompt, catalogue, given=given)

    def plan(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> DecodePlan:
        """See `Draft.plan`."""
        self.start = time.perf_counter()
        kinds, kind = _KNOWN.setdefault(self.model, {}), self._kind_of_call(plan, catalogue, num_rows)
        if kind not in kinds:
            names = [
                name
                for name, draft in self.candidates.items()
                if name != "trie" or draft.plan(plan, catalogue, num_rows=num_rows).drafter is not None
            ]
            kinds.setdefault(kind, Known(Trials(names)))  # another thread may have been faster
        self.known = kinds[kind]
        self.trial, self.before = self.known.trials.begin(), frozenset(self.known.served)
        return self.served_by.plan(plan, catalogue, num_rows=num_rows)

    def scorer(self, plan: DecodePlan, mesh: Mesh | None) -> tuple[Any, Params]:
        """See `Draft.scorer`."""
        return self.served_by.scorer(plan, mesh)

    def draft_params(self, mesh: Mesh | None) -> Params | None:
        """See `Draft.draft_params`."""
        return self.served_by.draft_params(mesh)

    def report(self, decoded: Decoded, catalogue: DeviceCatalogue) -> None:
        """See `Draft.report`; waits for the answer of a call that is timed, and logs what was chosen."""
        if self.known.trials.chosen is not None:
            return
        jax.block_until_ready(decoded)
        seconds = time.perf_counter() - self.start
        program = (self.trial.name, *(leaf.shape for leaf in jax.tree.leaves(catalogue)))
        self.known.served.add(program)
        if program in self.before and self.known.trials.end(self.trial, seconds):
            logger.info("drafting='auto' chose %r among %s", self.known.trials.chosen, list(self.candidates))

    @property
    def calls_model(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Draft.calls_model`."""
        return self.served_by.calls_model

    @property
    def chosen(self) -> str | None:
        """See `Draft.chosen`."""
        return self.known.trials.chosen

    @property
    def served_by(self) -> Draft:
        """The draft of this call."""
        return self.candidates[self.trial.name]

    def _kind_of_call(self, plan: DecodePlan, catalogue: Snapshot, num_rows: int) -> tuple[Any, ...]:
        """What decides which draft is the fastest: the program but for its draft, and the catalogue's size."""
        model, config = self.model, self.config
        sizes = [catalogue.num_items, *catalogue.base.segment.trie.level_starts]
        return (
            *(self.prompt_shape, num_rows, jax.tree.structure(plan)),
            *(config.num_draft_beams, config.num_assistant_tokens, config.draft_token_budget),
            *(tuple(self.candidates), None if self.assistant is None else ref(self.assistant)),
            None if model.draft_head is None else ref(model.draft_head),
            tuple(int(size).bit_length() for size in sizes),  # up to a factor of two
        )
