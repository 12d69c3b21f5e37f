# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="head"`: the checkpoint's draft head continues from one prefill; it decides alone (NEZHA), or drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.call import Prompt
from hf_gr.generation.torch.caches import keeps_all_keys
from hf_gr.generation.torch.models import hidden_size_of
from hf_gr.generation.torch.prompts import prefill_with_placeholders
from hf_gr.generation.torch.scorers import Prompts
from hf_gr.torch.draft_head import HeadScorer
from hf_gr.torch.drafters import Assistant
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transition import device_catalogue

from .base import Prepared, Search
from .trie import TrieDraft


class HeadDraft(TrieDraft):
    """A search by the draft head: the answer, or a draft of it."""

    searches = "head"
    hidden: Tensor  # of the prompt's last token and of the placeholders, after the prefill

    def check_own(self, prompt: Prompt, catalogue: Snapshot, model_kwargs: Mapping[str, Any]) -> None:
        """See `BaseDraft.check_own`: a head that does not fit the model."""
        model, config, head = self.model, self.config, self.model.draft_head
        sizes = head.config.hidden_size, hidden_size_of(model)
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the draft head has hidden_size={sizes[0]}, expected the model's, {sizes[1]}: is it another model's "
                "head?"
            )
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
        if config.guidance_scale not in (None, 1.0):
            raise ValueError(
                f"guidance_scale={config.guidance_scale} with drafting='head', expected None: its processor calls the "
                "model after every path, and the head has paths of its own"
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
        return super().prompts(prepared, tail=tail, catch=self._catch, **of_head)

    def prefill(self, prepared: Prepared, room: int) -> Any:
        """See `Draft.prefill`."""
        tail = self.model.draft_head.config.placeholder_token_ids
        outputs, hidden = prefill_with_placeholders(
            self.model, prepared.input_ids, prepared.config, prepared.model_kwargs, placeholder_ids=tail
        )
        self._catch(hidden)
        return outputs

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
