# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Who drafts in a call in Flax: from its config to a drafter. Drafts nothing itself. Knows no PyTorch."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

from jax.sharding import Mesh

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.flax.decode import DecodePlan
from hf_gr.flax.devices import replicated
from hf_gr.flax.draft_head import HeadScorer
from hf_gr.flax.drafters import TreeDrafter, plan_sizes
from hf_gr.flax.scorers import Params
from hf_gr.generation.checks import draft_budget


def with_drafter(plan: DecodePlan, config: Any, catalogue: Snapshot, *, num_rows: int, vocab_size: int) -> DecodePlan:
    """The plan of a call with its drafter, if `drafting="trie"` asks for one and there are levels to draft.

    Args:
        plan: what is asked for.
        config: the prepared config, with our fields.
        catalogue: the catalogue of any row.
        num_rows: B, that of the program.
        vocab_size: V.
    """
    if config.drafting != "trie":
        return plan
    budget = draft_budget(config, batch_size=num_rows, vocab_size=vocab_size)
    sizes = plan_sizes(_nodes_per_level(catalogue), plan.width, budget=budget)
    return replace(plan, drafter=TreeDrafter(sizes)) if any(sizes) else plan


def scorer_of(model: Any, config: Any, plan: DecodePlan, mesh: Mesh | None) -> tuple[Any, Params]:
    """Who decides in a call, with parameters: the model, or its draft head behind one prefill.

    Args:
        model: the model.
        config: the prepared config, with our fields.
        plan: what is asked for; outputs want scores over the whole vocabulary.
        mesh: where the program runs.
    """
    params = model.params_on(mesh)
    if config.drafting != "head":
        return model.scorer, params
    head, is_wide = model.draft_head, plan.output_scores or plan.output_logits
    scorer = HeadScorer(head.config, model.scorer, vocab_size=model.spec.vocab_size if is_wide else None)
    return scorer, {"model": params, "head": head.params_on(replicated(mesh))}


def _nodes_per_level(catalogue: Snapshot) -> tuple[int, ...]:
    """Nodes with 0 to L tokens of what was compiled; what was added is little, and would change a program's shapes."""
    starts = catalogue.base.segment.trie.level_starts
    counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    # Levels that only additions have go on as the last one.
    return tuple(
        counts[-1] if count is None else int(count)
        for count, _ in zip_longest(counts, range(catalogue.max_length + 1))
    )
