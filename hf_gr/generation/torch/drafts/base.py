# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""No draft, which all kinds of drafts begin from; a call that is prepared, and one that can be decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_gr.catalogue.rules import BatchRules
from hf_gr.generation import internals
from hf_gr.generation.drafts import BaseDraft
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
        draft: its kind.
    """

    scorer: Scorer
    catalogue: DeviceCatalogue
    drafter: Drafter | None
    prompts: Prompts
    draft: Draft


class Draft(BaseDraft):
    """No draft; and what all kinds in PyTorch have in common. Serves one call."""

    def not_a_model(self, assistant: Any) -> str | None:
        """See `BaseDraft.not_a_model`."""
        return None if hasattr(assistant, "get_output_embeddings") else "a language model of transformers"

    def start(self, prepared: Prepared) -> Search:
        """Make the scorer, the drafter and the catalogue on the device; the first forward is the search's."""
        prompts = self.prompts(prepared)
        catalogue = device_catalogue(prepared.rules, prepared.input_ids.device)
        scorer = make_scorer(self.model, prompts, in_parts=attends_in_parts(self.model))
        return Search(scorer, catalogue, self.drafter(prepared, catalogue, scorer), prompts, self)

    def prompts(self, prepared: Prepared, **of_head: Any) -> Prompts:
        """The prompts, with room in their cache for nodes; in their own forward only kinds that draft read some.

        A compiled forward takes transformers' own layers: torch.compile cannot trace ours over several lengths.
        """
        num_levels = min(prepared.rules.shared.max_length - 1, LEVELS_AT_ONCE)
        room = 0 if is_patched(self.model) else prepared.plan.width * num_levels
        return Prompts(
            prepared.input_ids,
            prepared.model_kwargs,
            lambda: self.prefill(prepared, room),
            takes_nodes=self.scores_ahead and may_take_nodes(self.model, prepared.config, prepared.model_kwargs),
            room=room,
            **of_head,
        )

    def prefill(self, prepared: Prepared, room: int) -> Any:
        """The prompts alone, by transformers' own code."""
        kwargs = prepared.model_kwargs
        if room:
            kwargs = {**kwargs, "past_key_values": with_slots(kwargs.get("past_key_values"), room)}
        return internals.prefill(self.model, prepared.input_ids, prepared.config, kwargs)

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
