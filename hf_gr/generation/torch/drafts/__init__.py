# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of drafts: one module and one class each, with the same few methods. Decodes nothing.

`drafting="trie"` is the class `TrieDraft` of the module `trie`, and so on: a new kind is a module here and its name in
`configuration.DRAFTING`. Without a draft it is `Draft` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from hf_gr.catalogue.rules import BatchRules
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation import internals
from hf_gr.generation.configuration import VERIFICATION
from hf_gr.generation.torch.caches import with_slots
from hf_gr.generation.torch.layouts import attends_in_parts, may_take_nodes
from hf_gr.generation.torch.models import is_patched
from hf_gr.generation.torch.prompts import Prompt
from hf_gr.generation.torch.scorers import Prompts, make_scorer
from hf_gr.torch.decode import Decoded, DecodePlan
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.speculation import Drafter
from hf_gr.torch.transition import DeviceCatalogue, device_catalogue

LEVELS_AT_ONCE = 4  # of the beams' keys, that memory is taken for: long sequences mostly end early


@dataclass(frozen=True)
class Prepared:
    """A call with inputs prepared by transformers.

    Attributes:
        input_ids: the tokens that generated ones are appended to.
        model_kwargs: the model's other arguments.
        config: the generation config.
        plan: the options.
        rules: the catalogue of every prompt.
        inputs: the prompt as given in the call: for an encoder-decoder, the encoder's input.
        synced_gpus: whether all processes must run equally many forwards.
        is_static: whether `cache_implementation="static"` asks for a captured decode.
    """

    input_ids: Tensor
    model_kwargs: dict[str, Any]
    config: Any
    plan: DecodePlan
    rules: BatchRules
    inputs: Tensor | None
    synced_gpus: bool
    is_static: bool = False


@dataclass(frozen=True)
class Search:
    """A call that can be decoded.

    Attributes:
        scorer: its scores decide.
        catalogue: the legal sequences of each row.
        drafter: proposes nodes to score ahead; None for no draft.
        prompts: what the scorer is over; they have the cache for another call.
    """

    scorer: Scorer
    catalogue: DeviceCatalogue
    drafter: Drafter | None
    prompts: Prompts


class Draft:
    """No draft; and what all kinds have in common. Serves one call.

    Args:
        model: the model.
        config: the prepared config, with our fields.
        assistant: the draft model of the call, or None.
    """

    scores_ahead = False  # whether nodes of several levels are scored together
    decides_alone = False  # whether it can answer without the model
    chosen: str | None = None  # the kind that "auto" has decided on; see `Speculation.chosen`
    reads_assistant = False  # whether it uses or refuses the draft model of a call; else that model drafts instead

    def __init__(self, model: Any, config: Any, assistant: Any = None) -> None:
        self.model = model
        self.config = config
        self.assistant = assistant
        self.verification = VERIFICATION[config.verification]

    def check(
        self, prompt: Prompt, catalogue: Snapshot, *, given: Mapping[str, Any], model_kwargs: Mapping[str, Any]
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
        self.check_verification()
        self.check_no_search(given)
        if given.get("draft_token_budget") is not None and not self.scores_ahead:
            raise ValueError(
                f"draft_token_budget={given['draft_token_budget']} without drafting, expected None: "
                "pass drafting='trie' or 'auto'"
            )

    def check_verification(self) -> None:
        """Refuse a verification that this kind of draft, or the call, does not support."""
        config = self.config
        if self.verification.by_head_alone and not self.decides_alone:
            raise ValueError(
                f"verification={config.verification!r} with drafting={config.drafting!r}, expected drafting='head': "
                "only a draft head decodes without the model"
            )
        if self.verification.samples and config.num_return_sequences > config.num_beams:
            raise ValueError(
                f"num_return_sequences={config.num_return_sequences}, expected at most "
                f"num_beams={config.num_beams}: relaxed verification samples beams"
            )

    def check_no_search(self, given: Mapping[str, Any]) -> None:
        """Refuse the width of a search if no search drafts."""
        if given.get("num_draft_beams") is not None:
            raise ValueError(
                f"num_draft_beams={given['num_draft_beams']} without a draft model, expected both: "
                "pass assistant_model="
            )

    def start(self, prepared: Prepared) -> Search:
        """Make the scorer, the drafter and the catalogue on the device; the first forward is the search's."""
        prompts = self.prompts(prepared)
        device = prepared.input_ids.device
        catalogue = device_catalogue(prepared.rules, device)
        scorer = make_scorer(self.model, prompts, in_parts=attends_in_parts(self.model))
        return Search(scorer, catalogue, self.drafter(prepared, catalogue, scorer), prompts)

    def prompts(self, prepared: Prepared) -> Prompts:
        """The prompts, to be computed by transformers' own code unless nodes are read with them."""
        model, config, kwargs, room = self.model, prepared.config, prepared.model_kwargs, self.room(prepared)

        def run() -> Any:
            given = (
                kwargs if not room else {**kwargs, "past_key_values": with_slots(kwargs.get("past_key_values"), room)}
            )
            return internals.prefill(model, prepared.input_ids, config, given)

        return Prompts(prepared.input_ids, kwargs, run, takes_nodes=self.takes_nodes(prepared), room=room)

    def room(self, prepared: Prepared) -> int:
        """Tokens that the prompt's cache has room for after it: those of the first levels; 0 for none.

        A compiled forward takes transformers' own layers: torch.compile cannot trace ours over several lengths.
        """
        if is_patched(self.model):
            return 0
        return prepared.plan.width * min(prepared.rules.shared.max_length - 1, LEVELS_AT_ONCE)

    def takes_nodes(self, prepared: Prepared) -> bool:
        """Whether nodes may be read in the prompts' own forward."""
        return self.scores_ahead and may_take_nodes(self.model, prepared.config, prepared.model_kwargs)

    def drafter(self, prepared: Prepared, catalogue: DeviceCatalogue, scorer: Scorer) -> Drafter | None:
        """The drafter; None for no draft.

        Args:
            prepared: the call.
            catalogue: the legal sequences of each row.
            scorer: the model's.
        """
        return None

    def report(self, search: Search, decoded: Decoded) -> None:
        """Warn of a draft that was never used."""


def draft_of(model: Any, config: Any, assistant: Any) -> Draft:
    """The draft of a call: a draft model is used whenever there is one."""
    kind = _kind_of(config.drafting)
    if assistant is not None and not kind.reads_assistant:
        kind = _kind_of("assistant")
    return kind(model, config, assistant)


def _kind_of(drafting: str | None) -> type[Draft]:
    if drafting is None:
        return Draft
    return getattr(import_module(f"{__name__}.{drafting}"), f"{drafting.title()}Draft")
