# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of drafts: one module and one class each, with the same few methods. Decodes nothing.

`drafting="trie"` is the class `TrieDraft` of the module `trie`, and so on: a new kind is a module here and its name in
`configuration.DRAFTING`. Without a draft it is `Draft` itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from hf_gr.catalogue.rules import BatchRules
from hf_gr.generation import internals
from hf_gr.generation.drafts import BaseDraft, kind_of
from hf_gr.generation.torch.caches import with_slots
from hf_gr.generation.torch.layouts import attends_in_parts, may_take_nodes
from hf_gr.generation.torch.models import is_patched
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


class Draft(BaseDraft):
    """No draft; and what all kinds in PyTorch have in common. Serves one call."""

    def not_a_model(self, assistant: Any) -> str | None:
        """See `BaseDraft.not_a_model`."""
        return None if hasattr(assistant, "get_output_embeddings") else "a language model of transformers"

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
    """The draft of a call."""
    kind = kind_of(config, assistant)
    if kind is None:
        return Draft(model, config)
    return getattr(import_module(f"{__name__}.{kind}"), f"{kind.title()}Draft")(model, config, assistant)
