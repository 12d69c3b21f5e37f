# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A draft model in the program, without models: beams, scores and counts are those of PyTorch."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import table_scorers as theirs
import torch
from flax_table_scorers import TableScorer, prompt_of
from random_catalogues import VOCABULARY, random_rows, tables
from table_scorers import make_plan

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.core.widths import plan_first, plan_rest, plan_sizes
from hf_gr.flax.assistants import ModelDrafter
from hf_gr.flax.decode import Decoded, decode_program
from hf_gr.flax.drafters import TreeDrafter
from hf_gr.flax.noise import Noise
from hf_gr.flax.scores import DecodePlan
from hf_gr.flax.transition import device_catalogue
from hf_gr.generation.flax.drafts import _nodes_per_level
from hf_gr.torch import decode as torch_decode
from hf_gr.torch import drafters as torch_drafters
from hf_gr.torch import transition as torch_transition
from hf_gr.torch.noise import Noise as TorchNoise

LENGTH, FILL = 5, 9
SCORE_TOL = 1e-4
SCORER = TableScorer(VOCABULARY)
INDEX = ConstraintIndex.from_sequences(random_rows(random.Random(0), 3000, ragged=False, length=LENGTH))


def both(
    seed: int,
    *,
    num_beams: int = 4,
    num_draft_beams: int = 8,
    num_steps: int = 20,
    budget: int = 1,
    noise: float = 0.5,
    is_relaxed: bool = False,
    **options: Any,
) -> tuple[Decoded, torch_decode.Decoded, Decoded]:
    """A call on both sides, and here without a draft."""
    params = tables(seed, 1, vocabulary=VOCABULARY, longest=LENGTH)
    rng = np.random.default_rng(seed + 1)  # a draft scores almost as the target does
    draft = [table + rng.normal(scale=noise, size=table.shape).astype(np.float32) for table in params]
    # All of the catalogue for even seeds; for odd ones some, less what is excluded.
    rng, ids = random.Random(seed), INDEX.item_ids.tolist()
    some = rng.sample(ids, 40 * 4 ** rng.randrange(4)) if seed % 2 else ids
    rules = combine_rules([INDEX.where(some).snapshot], [rng.sample(ids, 5 * (seed % 2))])
    seeds = np.array([100 * seed])
    shared: dict[str, Any] = {"num_return_sequences": num_beams, "num_kept": 2 * num_beams, "early_stopping": "never"}
    shared |= {"do_sample": is_relaxed, "max_new_tokens": LENGTH} | options
    first = int(is_relaxed)
    nodes = _nodes_per_level(rules.shared)
    num_first, size = plan_first(nodes[1:-1], num_beams, budget=budget)
    sizes = plan_sizes(nodes, num_beams, budget=budget, first=1 + num_first)
    drafter = ModelDrafter(
        SCORER,
        num_draft_beams,
        num_steps,
        LENGTH,
        tree=TreeDrafter((size, *sizes[1:]), num_first, budget=budget, least=num_beams),
        rest=plan_rest(nodes, num_draft_beams, budget=budget, least=num_beams),
        whole=() if first else nodes[1:-1][:num_first],
        first_level=first,
    )
    plan = DecodePlan(
        is_relaxed=is_relaxed,
        num_beams=num_beams,
        fill_token_id=FILL,
        missing_token_id=FILL,
        drafter=drafter,
        **shared,
    )

    def run(plan: DecodePlan) -> Decoded:
        catalogue, how = device_catalogue(rules, num_rows=1), Noise.of(seeds) if plan.do_sample else None
        return decode_program(SCORER, params, catalogue, prompt_of(1), plan, how, draft)

    model, draft_model = (theirs.TableModel([torch.from_numpy(table) for table in of], 1) for of in (params, draft))
    assistant = torch_drafters.Assistant(
        draft_model, num_beams=num_draft_beams, num_steps=num_steps, first_level=first
    )
    their_plan = make_plan(1, num_beams, **shared, is_relaxed=is_relaxed)
    if plan.do_sample:
        their_plan = replace(their_plan, noise=TorchNoise(torch.from_numpy(seeds)))
    catalogue = torch_transition.device_catalogue(rules, torch.device("cpu"))
    drafter = torch_drafters.TreeDrafter(budget=budget, assistant=assistant)
    expected = torch_decode.decode(model(), catalogue, their_plan, drafter)
    return run(plan), expected, run(replace(plan, drafter=None))


CASES = {
    "small": {},
    "one step": {"num_steps": 1},
    "two steps": {"num_steps": 2, "noise": 1.0},
    "wide": {"num_draft_beams": 24, "noise": 1.0},
    "with the trie": {"budget": 60},
    "samples": {"do_sample": True},
    "paths": {"num_beams": 1, "num_return_sequences": 4, "num_kept": 2, "do_sample": True, "num_draft_beams": 8},
    "relaxed": {"is_relaxed": True, "num_draft_beams": 4},
    "relaxed wide": {"is_relaxed": True, "num_draft_beams": 10, "noise": 1.0, "num_steps": 2},
}


QUICK = ("with the trie", "relaxed wide")  # every case compiles a large program


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_draft_model_does_what_it_does_in_pytorch(case: str) -> None:
    used = set()
    for seed in range(8):
        ours, expected, plain = both(seed, **CASES[case])
        assert np.asarray(ours.sequences).reshape(-1, LENGTH).tolist() == expected.sequences.tolist()
        np.testing.assert_allclose(np.asarray(ours.scores).ravel(), expected.scores.numpy(), atol=SCORE_TOL)
        if seed % 2 == 0:  # with a rule fewer nodes are there than a draft has room for
            mine, other = ours.speculation, expected.speculation
            assert mine.target_forwards.tolist() == [other.target_forwards]
            assert mine.draft_forwards.tolist() == [other.draft_forwards]
            for name in ("drafted_nodes", "accepted_nodes", "drafted_steps", "accepted_steps"):
                assert getattr(mine, name).tolist() == getattr(other, name).tolist(), name
        used.add(int(ours.speculation.target_forwards[0]))
        if "relaxed" not in case:
            assert ours.sequences.tolist() == plain.sequences.tolist()
            np.testing.assert_allclose(ours.scores, plain.scores, atol=SCORE_TOL)
    assert min(used) < LENGTH - 1
