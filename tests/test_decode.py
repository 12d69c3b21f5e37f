# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop without a model: scores come from a table, results from the slow beam search."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import reference_beam_search

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.core import beam
from hf_gr.torch import decode, transition
from hf_gr.torch.decode import DecodePlan
from hf_gr.torch.tree import Nodes

pytestmark = pytest.mark.shapes

CPU = torch.device("cpu")
LIKE = torch.zeros(())
VOCABULARY, EOS = 10, 0
SCORE_TOL = 1e-5  # fp32, at most 5 additions
FP32 = torch.finfo(torch.float32)


class TableScorer:
    """Logits that depend on the whole prefix, and on nothing else."""

    def __init__(self, seed: int, batch_size: int) -> None:
        self.seeds = [seed + row for row in range(batch_size)]
        self.paths = torch.zeros((batch_size, 1, 0), dtype=torch.long)  # of the nodes scored last
        self.num_forwards, self.takes_prompt, self.columns = 0, False, None
        self.prompt_logits = torch.stack([self.logits(row, ())[None] for row in range(batch_size)])

    def logits(self, row: int, prefix: tuple[int, ...]) -> torch.Tensor:
        rng = np.random.default_rng([self.seeds[row], *prefix])
        return torch.tensor(rng.normal(scale=2.0, size=VOCABULARY), dtype=torch.float32)

    def begin(self, levels: Sequence[Nodes] = ()) -> list[torch.Tensor]:
        return [self.prompt_logits]

    def score(self, levels: Sequence[Nodes], *, depth: int) -> list[torch.Tensor]:
        self.num_forwards += 1
        (nodes,) = levels
        above = self.paths.gather(1, nodes.parents[..., None].expand(-1, -1, depth - 1))
        self.paths = torch.cat([above, nodes.tokens[..., None]], dim=-1)
        rows = enumerate(self.paths.tolist())
        tables = [[self.logits(row, tuple(path)) for path in paths] for row, paths in rows]
        return [torch.stack([torch.stack(table) for table in tables])]


def catalogue_of(index: ConstraintIndex) -> transition.DeviceCatalogue:
    return transition.device_catalogue(combine_rules([index.snapshot]), CPU)


def make_plan(batch_size: int, num_beams: int, **kwargs: Any) -> DecodePlan:
    """A plan with transformers' defaults."""
    defaults = {
        "num_return_sequences": num_beams,
        "num_kept": 2 * num_beams,
        "do_sample": False,
        "length_penalty": 1.0,
    }
    defaults |= {"early_stopping": "never", "max_new_tokens": 9, "fill_token_id": 9, "missing_token_id": 9}
    return DecodePlan(prompt=torch.ones((batch_size, 2), dtype=torch.long), num_beams=num_beams, **(defaults | kwargs))


def check(
    sequences: list[list[int]], num_beams: int, *, ragged: bool, length_penalty: float = 1.0, **kwargs: Any
) -> None:
    """Decode two rows and compare each with the slow beam search."""
    index = ConstraintIndex.from_sequences(sequences, eos_token_id=EOS if ragged else None)
    scorer = TableScorer(seed=len(sequences), batch_size=2)
    trie = catalogue_of(index)
    plan = make_plan(2, num_beams, length_penalty=length_penalty, max_new_tokens=index.max_length, **kwargs)
    decoded = decode.decode(scorer, trie, plan)
    for row in range(2):
        expected = reference_beam_search(
            lambda prefix, row=row: scorer.logits(row, prefix).log_softmax(-1).numpy(),
            list(index),
            num_beams,
            length_penalty=length_penalty,
        )
        rows = slice(row * num_beams, row * num_beams + len(expected))
        found = [[token for token in path if token != 9] for path in decoded.sequences[rows].tolist()]
        assert found == [list(sequence) for sequence, _ in expected]
        scores = torch.tensor([score for _, score in expected], dtype=torch.float32).clamp_min(FP32.min)
        torch.testing.assert_close(decoded.scores[rows], scores, atol=SCORE_TOL, rtol=SCORE_TOL)
        rest = slice(row * num_beams + len(expected), (row + 1) * num_beams)
        assert (decoded.sequences[rest] == 9).all()
        assert (decoded.scores[rest] == beam.DEAD).all()


tokens = st.integers(1, 6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(tokens, min_size=3, max_size=3), min_size=1, max_size=40), st.integers(2, 9))
def test_fixed_catalogues_equal_the_slow_search(sequences: list[list[int]], num_beams: int) -> None:
    check(sequences, num_beams, ragged=False)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=40),
    st.integers(2, 9),
    st.sampled_from([1.0, 0.0, 2.0, -3.0, 40.0, -40.0]),
)
def test_ragged_catalogues_equal_the_slow_search(
    sequences: list[list[int]], num_beams: int, length_penalty: float
) -> None:
    check(sequences, num_beams, ragged=True, length_penalty=length_penalty)


def test_the_vocabulary_wide_path_gives_the_same() -> None:
    sequences = np.random.default_rng(0).integers(1, 7, size=(40, 3)).tolist()
    check(sequences, 5, ragged=False, output_scores=True)
    check(sequences, 5, ragged=False, processors=(lambda ids, scores: scores, lambda ids, scores: scores))


def test_a_closed_ragged_search_stops_early_unless_processes_must_agree() -> None:
    index = ConstraintIndex.from_sequences([[1], [2], [3, 4, 5, 6, 6, 6]], eos_token_id=EOS)
    trie = catalogue_of(index)
    forwards = {}
    for exit_early in (True, False):
        scorer = TableScorer(seed=0, batch_size=1)
        scorer.prompt_logits[0, 0, 3] = -50.0
        plan = make_plan(1, 2, early_stopping=True, exit_early=exit_early)
        decoded = decode.decode(scorer, trie, plan)
        assert sorted(decoded.sequences[:, 0].tolist()) == [1, 2]
        forwards[exit_early] = scorer.num_forwards
    assert forwards[True] < forwards[False] == 6


def test_logits_are_gone_before_the_next_ones_are_made() -> None:
    """They are as wide as the vocabulary: two of them at once would be the largest part of a call's memory."""
    alive: list[int] = []

    class Counting(TableScorer):
        made: list[Any] = []

        def score(self, levels: Sequence[Nodes], *, depth: int) -> list[torch.Tensor]:
            alive.append(sum(of() is not None for of in self.made))
            scored = super().score(levels, depth=depth)
            self.made += [weakref.ref(logits) for logits in scored]
            return scored

    index = ConstraintIndex.from_sequences(np.random.default_rng(0).integers(1, 7, size=(40, 4)))
    decode.decode(Counting(0, 2), catalogue_of(index), make_plan(2, 3, max_new_tokens=4))
    assert alive == [0, 0, 0]
