# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of drafts in PyTorch: one class each, with the same few methods. Decodes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_gr.catalogue.rules import BatchRules
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation import internals
from hf_gr.generation.call import Prompt
from hf_gr.generation.defaults import draft_budget
from hf_gr.generation.drafts import BaseDraft, fastest
from hf_gr.generation.messages import say_once
from hf_gr.torch.decode import DecodePlan
from hf_gr.torch.draft_head import HeadScorer
from hf_gr.torch.drafters import Assistant, TreeDrafter
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.speculation import Drafter
from hf_gr.torch.transition import DeviceCatalogue, device_catalogue
from hf_gr.torch.tree import Nodes

from .caches import keeps_all_keys, with_slots
from .heads import check_size
from .layouts import layout_of, may_take_nodes, ordinary_tokens, prefilled, takes_tree
from .logits_process import keeper_of_state
from .models import base_model, is_patched, output_size_of
from .prefill import prefill_in_groups
from .prompts import prefill_with_placeholders
from .scorers import Prompts, make_scorer
from .sliced_head import sliced_head

LEVELS_AT_ONCE = 4  # of the beams' keys, that memory is taken for: long sequences mostly end early


@dataclass(frozen=True)
class Prepared:
    """A call with inputs prepared by transformers."""

    input_ids: Tensor  # that generated tokens are appended to
    model_kwargs: dict[str, Any]  # the model's other arguments
    config: Any
    plan: DecodePlan  # the options
    rules: BatchRules  # the catalogue of every prompt
    inputs: Tensor | None  # the prompt as given in the call: for an encoder-decoder, the encoder's input
    synced_gpus: bool  # whether all processes must run equally many forwards
    is_static: bool  # whether `cache_implementation="static"` asks for a captured decode


@dataclass(frozen=True)
class Search:
    """A call that can be decoded."""

    scorer: Scorer  # its scores decide
    catalogue: DeviceCatalogue
    drafter: Drafter | None  # proposes nodes to score ahead
    prompts: Prompts  # what the scorer is over; they have the cache for another call
    draft: Draft  # its kind


class Draft(BaseDraft):
    """No draft; and what all kinds in PyTorch have in common. Serves one call."""

    def not_a_model(self, assistant: Any) -> str | None:
        """See `BaseDraft.not_a_model`."""
        return None if hasattr(assistant, "get_output_embeddings") else "a language model of transformers"

    def check_own(self, prompt: Prompt, catalogue: Snapshot, model_kwargs: Mapping[str, Any]) -> None:
        """See `BaseDraft.check_own`."""
        if self.config.guidance_scale not in (None, 1.0):
            raise ValueError(
                f"guidance_scale={self.config.guidance_scale} with drafting={self.searches!r}, expected None: its "
                "processor keeps state of the model's paths, and the draft has others"
            )

    def start(self, prepared: Prepared) -> Search:
        """Make the scorer, a drafter and the catalogue on the device; the first forward is the search's."""
        prompts = self.prompts(prepared)
        catalogue = device_catalogue(prepared.rules, prepared.input_ids.device)
        head = None
        if (
            prepared.plan.compares_legal
            and prompts.catch is None
            and not prepared.is_static
            and catalogue.max_length > 1
        ):
            head = sliced_head(self.model, prepared.rules.shared.trie.codebooks, synced_gpus=prepared.synced_gpus)
        scorer = make_scorer(self.model, prompts, in_parts=layout_of(self.model) == "parts", head=head)
        return Search(scorer, catalogue, None, prompts, self)

    def prompts(self, prepared: Prepared, *, run: Callable[[], Any] | None = None, **of_head: Any) -> Prompts:
        """The prompts, with room in their cache for nodes; in their own forward only kinds that draft read some.

        A compiled forward takes transformers' own layers: torch.compile cannot trace ours over several lengths.
        """
        num_levels = min(prepared.rules.shared.max_length - 1, LEVELS_AT_ONCE)
        room = 0 if is_patched(self.model) else prepared.plan.width * num_levels
        given = kwargs = prepared.model_kwargs
        if room and run is None:
            kwargs = {**kwargs, "past_key_values": with_slots(kwargs.get("past_key_values"), room)}
        given_prompt = (self.model, prepared.input_ids, prepared.config, kwargs)
        return Prompts(
            prepared.input_ids,
            given,
            run or partial(prefill_in_groups, *given_prompt, room=room, synced_gpus=prepared.synced_gpus),
            takes_nodes=self.scores_ahead and may_take_nodes(self.model, prepared.config, given),
            room=room,
            **of_head,
        )


class TrieDraft(Draft):
    """All legal continuations of the beams; and what all kinds that draft have in common."""

    scores_ahead = True

    def start(self, prepared: Prepared) -> Search:
        """See `Draft.start`."""
        search = super().start(prepared)
        return replace(search, drafter=self._drafter(prepared, search))

    def _drafter(self, prepared: Prepared, search: Search) -> TreeDrafter | None:
        """Proposes nodes to score ahead; None where that saves no forward, or is not possible."""
        if prepared.synced_gpus:
            say_once("synced_gpus: decoding without a draft: processes would run different numbers of forwards")
            return None
        processors: Any = prepared.plan.processors or ()
        if (keeper := keeper_of_state(chain.from_iterable(processors))) is not None:  # rows advance at their own pace
            say_once(f"{type(keeper).__name__} keeps state between levels: decoding without a draft")
            return None
        # In sequences this short, every level needs a forward in any case.
        if search.catalogue.max_length <= (1 if search.scorer.takes_prompt else 2):
            return None
        batch_size, vocab_size = len(prepared.input_ids), output_size_of(self.model)
        budget = draft_budget(self.config, batch_size=batch_size, vocab_size=vocab_size)
        return TreeDrafter(budget=budget, assistant=self.searcher(prepared, vocab_size))

    def searcher(self, prepared: Prepared, vocab_size: int) -> Assistant | None:
        """The search that narrows levels too wide for the catalogue; None for no search."""
        return None


class AssistantDraft(TrieDraft):
    """A draft model's beams, and the catalogue's subtree below them."""

    searches = "assistant"

    def check_own(self, prompt: Prompt, catalogue: Snapshot, model_kwargs: Mapping[str, Any]) -> None:
        """See `BaseDraft.check_own`."""
        super().check_own(prompt, catalogue, model_kwargs)
        model, assistant = self.model, self.assistant
        if assistant.training:
            raise ValueError("assistant_model is in training mode, expected evaluation: assistant_model.eval()")
        if assistant.device != model.device:
            raise ValueError(
                f"assistant_model is on {assistant.device}, expected {model.device}: assistant_model.to(model.device)"
            )
        if not takes_tree(base_model(assistant)):
            raise ValueError(
                f"assistant_model is a {type(assistant).__name__}, which cannot score the nodes of a tree, "
                "expected another: omit it"
            )

    def searcher(self, prepared: Prepared, vocab_size: int) -> Assistant:
        """The draft model, over a prefill of its own."""
        num_beams, first_level = self.draft_beams(prepared.plan)
        inner, mask = base_model(self.assistant), prepared.model_kwargs.get("attention_mask")
        scorers = prefilled(inner, prepared.plan.prompt, prepared.inputs, mask, width=num_beams)
        num_steps = self.config.num_assistant_tokens
        return Assistant(scorers, num_beams=num_beams, num_steps=num_steps, first_level=first_level)


class HeadDraft(TrieDraft):
    """A search by the draft head: its result is the answer, or a draft that the model verifies."""

    searches = "head"
    hidden: Tensor  # of the prompt's last token and of the placeholders, after the prefill

    def check_own(self, prompt: Prompt, catalogue: Snapshot, model_kwargs: Mapping[str, Any]) -> None:
        """See `BaseDraft.check_own`: a head that does not fit the model."""
        super().check_own(prompt, catalogue, model_kwargs)
        model, config, head = self.model, self.config, self.model.draft_head
        check_size(model, head)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        unknown = [token for token in head.config.placeholder_token_ids if token >= vocabulary]
        if unknown:
            raise ValueError(
                f"the draft head has placeholder tokens {unknown}, expected less than {vocabulary}, which the model "
                "has embeddings for: model.add_draft_head(head) adds them"
            )
        cache = model_kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length() and not keeps_all_keys(cache):
            raise ValueError(
                "past_key_values has layers that drop keys (sliding windows), expected plain ones with "
                "drafting='head', whose placeholders are removed again: omit it"
            )
        is_ragged = any(catalogue.trie.has_leaves[:-1])
        if self.verification.unchecked_levels(2) and is_ragged:
            raise ValueError(
                f"verification={config.verification!r} with sequences of several lengths, expected one length: "
                "verification='catalogue' takes any"
            )

    def start(self, prepared: Prepared) -> Search:
        """See `Draft.start`; if the head decides alone, it is the scorer."""
        if not self.verification.by_head_alone:
            return super().start(prepared)
        prompts = self.prompts(prepared)
        head, catalogue = self.model.draft_head, device_catalogue(prepared.rules, prepared.input_ids.device)
        num_unchecked = self.verification.unchecked_levels(catalogue.max_length)
        codebooks = [head.codebook(level).to(catalogue.device) for level in range(num_unchecked)]
        catalogue = replace(catalogue, unchecked=tuple(codes.sort().values for codes in codebooks))
        scorer = self._scorers(prepared, prompts.outputs.logits.shape[-1])()
        return Search(scorer, catalogue, None, prompts, self)

    def prompts(self, prepared: Prepared, **of_head: Any) -> Prompts:
        """See `Draft.prompts`; the head's placeholders are read after them."""
        tail = self.model.draft_head.config.placeholder_token_ids

        def run() -> Any:
            outputs, hidden = prefill_with_placeholders(
                self.model, prepared.input_ids, prepared.config, prepared.model_kwargs, placeholder_ids=tail
            )
            self._catch(hidden)
            return outputs

        return super().prompts(prepared, tail=tail, catch=self._catch, run=run, **of_head)

    def _catch(self, hidden: Tensor) -> None:
        """Keep the placeholders' hidden states, on the head's device and in its dtype."""
        self.hidden = hidden.to(next(self.model.draft_head.parameters()))

    def searcher(self, prepared: Prepared, vocab_size: int) -> Assistant:
        """The head, which continues from the prompt's own forward: the catalogue alone drafts within that."""
        num_beams, _ = self.draft_beams(prepared.plan)
        scorers, num_steps = self._scorers(prepared, vocab_size), self.config.num_assistant_tokens
        return Assistant(scorers, num_beams=num_beams, num_steps=num_steps, first_level=1)

    def _scorers(self, prepared: Prepared, vocab_size: int) -> Callable[[], Scorer]:
        """Makes scorers; processors and outputs need scores over the whole vocabulary."""
        plan = prepared.plan
        is_wide = plan.processors is not None or plan.output_scores or plan.output_logits
        return lambda: HeadScorer(self.model.draft_head, self.hidden, vocab_size=vocab_size if is_wide else None)


# By what `drafting` calls them; "auto" chooses among these.
KINDS: Mapping[str | None, type[Draft]] = {
    None: Draft,
    "trie": TrieDraft,
    "assistant": AssistantDraft,
    "head": HeadDraft,
}


def draft_of(drafts: Mapping[str | None, Draft], prepared: Prepared) -> Draft:
    """The draft of a call, of several the fastest; all processes of a run must choose the same."""
    name, draft = next(iter(drafts.items()))
    if draft.config.drafting != "auto":
        return draft
    model, start, inputs, width = draft.model, prepared.input_ids, prepared.inputs, prepared.plan.width
    num_rows, length = inputs.shape[:2] if inputs is not None and inputs.ndim > 1 else start.shape

    @cache
    def scorers() -> Callable[[], Scorer]:
        """Makes scorers over prompts of the call's size."""
        prompt = ordinary_tokens(model, num_rows * length).view(num_rows, length)
        given = (start, prompt) if model.config.is_encoder_decoder else (prompt, None)
        return prefilled(model, *given, None, width=width)

    def timed_forward(num_nodes: int) -> Callable[[], Any]:
        scorer = scorers()()
        scorer.begin()
        nodes = torch.zeros((len(start), num_nodes), dtype=torch.long, device=start.device)
        one = nodes[:, :1]
        # The second scorer over a prompt first copies its keys. Work already queued must not count as forward time.
        scorer.score([Nodes(one, one, one)], depth=1)[0].max().item()
        # `item` waits.
        return lambda: scorer.score([Nodes(nodes, nodes, nodes)], depth=2)[0].max().item()

    return fastest(
        {name: draft} if prepared.synced_gpus else drafts,
        prepared.rules.shared,
        kind=(model.device, model.dtype, internals.attention_of(model.config), len(start).bit_length()),
        num_beams=width,
        budget=draft_budget(draft.config, batch_size=len(start), vocab_size=output_size_of(model)),
        below_prompt=may_take_nodes(model, prepared.config, prepared.model_kwargs),
        timed_forward=timed_forward,
    )
