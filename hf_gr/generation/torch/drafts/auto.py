# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"`: of no draft, the catalogue, the draft head and a draft model, what real calls show to be fastest.

What a draft costs follows from measured forwards; what it saves depends on how often it is right, which only calls can
tell. Answers are the same whichever serves a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.internals import attention_of
from hf_gr.generation.messages import logger
from hf_gr.generation.torch.layouts import may_take_nodes
from hf_gr.generation.torch.prompts import Prompt
from hf_gr.generation.trials import Trial, Trials
from hf_gr.torch.costs import LEAST_GAIN, WIDER_BY, ForwardCosts, Stopwatch, measure_costs, plan_merges
from hf_gr.torch.decode import Decoded
from hf_gr.torch.drafters import TreeDrafter
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transition import DeviceCatalogue

from . import Draft, Prepared, Search
from .assistant import AssistantDraft
from .head import HeadDraft
from .trie import TrieDraft


@dataclass
class Known:
    """What is known of one kind of call: of one model, and alike in all that decides which draft is the fastest.

    Attributes:
        costs: of a forward; None before the first call.
        trials: of the drafts that may be worth it; None before the end of the first prefill.
        lock: held while forwards are timed, and the trials made.
    """

    costs: ForwardCosts | None = None
    trials: Trials | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_KNOWN: WeakKeyDictionary[Any, dict[tuple[Any, ...], Known]] = WeakKeyDictionary()


class AutoDraft(Draft):
    """A call served by another draft: the first calls of a kind try them, then one is kept."""

    scores_ahead = True
    reads_assistant = True
    candidates: dict[str, Draft]  # after `check`, the simplest first
    size: tuple[int, int, int]  # after `start`, like the next three
    known: Known
    served_by: Draft
    timed: tuple[Trial, Stopwatch, float] | None = None  # a trial, its time, and about how long plain search takes

    def check(
        self, prompt: Prompt, catalogue: Snapshot, *, given: Mapping[str, Any], model_kwargs: Mapping[str, Any]
    ) -> None:
        """See `Draft.check`; a draft head that does not fit the call does not serve it."""
        model, config = self.model, self.config
        arguments: dict[str, Any] = {"given": given, "model_kwargs": model_kwargs}
        self.check_verification()
        self.candidates = {"none": Draft(model, config), "trie": PlannedTrie(model, config)}
        if getattr(model, "draft_head", None) is not None and not self.verification.samples:
            head = PlannedHead(model, config)
            try:
                head.check(prompt, catalogue, **arguments)
                self.candidates["head"] = head
            except ValueError:
                if self.assistant is None and given.get("num_draft_beams") is not None:
                    raise  # only the head could have used them
        if self.assistant is not None:
            assistant = PlannedAssistant(model, config, self.assistant)
            assistant.check(prompt, catalogue, **arguments)
            # Relaxed answers depend on the draft: there is nothing to choose.
            self.candidates = {**({} if self.verification.samples else self.candidates), "assistant": assistant}
        elif "head" not in self.candidates:
            self.candidates["trie"].check(prompt, catalogue, **arguments)

    def start(self, prepared: Prepared) -> Search:
        """See `Draft.start`; the first call of a kind measures forwards, which rule out some drafts."""
        self.size = _size_of(prepared)
        self.known = _KNOWN.setdefault(self.model, {}).setdefault(self._kind_of_call(prepared), Known())
        name = next(name for name, draft in self.candidates.items() if draft.scores_ahead)
        if self.known.trials is not None:
            trial = self.known.trials.begin()
            name = trial.name
            if trial.round is not None:
                self.timed = trial, Stopwatch(self.model.device), self._plain_seconds(prepared)
        self.served_by = self.candidates[name]
        if isinstance(self.served_by, PlannedTrie):
            self.served_by.known = self.known
        search = self.served_by.start(prepared)
        if self.known.trials is None and isinstance(search.drafter, TreeDrafter):  # else nothing can be drafted
            with self.known.lock:  # other threads may have begun trials meanwhile, and count their rounds
                self.known.trials = self.known.trials or Trials(self._worth_trying(prepared, search.drafter))
        return search

    def report(self, search: Search, decoded: Decoded) -> None:
        """See `Draft.report`; logs what was chosen."""
        if self.timed is not None and self.known.trials is not None:
            trial, watch, plain_seconds = self.timed
            if self.known.trials.end(trial, watch.read() / plain_seconds):
                logger.info("drafting='auto' chose %r among %s", self.known.trials.chosen, list(self.candidates))
        self.served_by.report(search, decoded)

    @property
    def chosen(self) -> str | None:
        """See `Draft.chosen`."""
        return None if self.known.trials is None else self.known.trials.chosen

    def _worth_trying(self, prepared: Prepared, drafter: TreeDrafter) -> list[str]:
        """The names of drafts that could gain something: a model or a head at most all forwards after the prefill."""
        if "none" not in self.candidates:
            return list(self.candidates)
        assert self.known.costs is not None
        most = (prepared.rules.shared.max_length - 1) * self.known.costs.forward
        names = list(self.candidates) if most > LEAST_GAIN * self._plain_seconds(prepared) else ["none", "trie"]
        return [name for name in names if name != "trie" or any(drafter.merges or ())]

    def _plain_seconds(self, prepared: Prepared) -> float:
        """About how long plain search takes: by this, prompts of different lengths and numbers compare."""
        assert self.known.costs is not None
        num_rows, num_tokens, num_cached = self.size
        num_levels, num_beams = prepared.rules.shared.max_length, prepared.plan.width
        num_read = num_tokens - num_cached
        return self.known.costs.plain(num_rows, num_read, num_beams=num_beams, num_levels=num_levels) or 1.0

    def _kind_of_call(self, prepared: Prepared) -> tuple[Any, ...]:
        """What decides which draft is the fastest; sizes up to a factor of two."""
        model, config, plan, rules = self.model, self.config, prepared.plan, prepared.rules.shared
        tries = [part.segment.trie for part in rules.parts]
        sizes = [*self.size, plan.width, rules.num_items]
        sizes += [number for trie in tries for number in trie.level_starts]
        return (
            *(model.device, model.dtype, attention_of(model.config), prepared.layout, prepared.synced_gpus),
            prepared.layout is not None and may_take_nodes(model, prepared.layout, config, prepared.model_kwargs),
            *(plan.is_beam_search, plan.do_sample, plan.is_relaxed, plan.processors is not None),
            *(plan.output_scores, plan.output_logits),
            *(config.num_draft_beams, config.num_assistant_tokens, config.draft_token_budget),
            *(None if one is None else ref(one) for one in (self.assistant, getattr(model, "draft_head", None))),
            tuple(self.candidates),
            tuple(size.bit_length() for size in sizes),
        )


class PlannedTrie(TrieDraft):
    """The levels of the catalogue that measured costs say are worth their nodes."""

    known: Known  # set before `start`
    takes_prompt: bool  # of the model's scorer

    def drafter(
        self, prepared: Prepared, catalogue: DeviceCatalogue, scorer: Scorer, new_scorer: Callable[[], Scorer]
    ) -> TreeDrafter | None:
        """See `Draft.drafter`."""
        self.takes_prompt = scorer.takes_prompt
        return super().drafter(prepared, catalogue, scorer, new_scorer)

    def limits(
        self, prepared: Prepared, catalogue: DeviceCatalogue, new_scorer: Callable[[], Scorer], *, budget: int
    ) -> dict[str, Any]:
        """See `TrieDraft.limits`."""
        width, known = prepared.plan.width, self.known
        with known.lock:
            if known.costs is None:
                known.costs = measure_costs(new_scorer, width, wider_by=min(WIDER_BY, budget))
        merges = plan_merges(
            catalogue.nodes_per_level, width, known.costs, budget=budget, below_prompt=self.takes_prompt
        )
        return {"merges": merges, "worth": known.costs.worth + width}


class PlannedHead(PlannedTrie, HeadDraft):
    """The head, and such levels below its draft."""


class PlannedAssistant(PlannedTrie, AssistantDraft):
    """The draft model, and such levels below its draft."""


def _size_of(prepared: Prepared) -> tuple[int, int, int]:
    """Prompts, the tokens of each, an encoder's included, and those of them that are in a cache."""
    given, cache = prepared.inputs, prepared.model_kwargs.get("past_key_values")
    num_rows, num_tokens = prepared.input_ids.shape
    if given is not None and given.ndim > 1:
        num_tokens = max(num_tokens, given.shape[1])
    return num_rows, num_tokens, 0 if cache is None else cache.get_seq_length()
