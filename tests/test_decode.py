# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop without a model: scores come from a table, results from the slow beam search."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from random_catalogues import EOS, TOKENS, VOCABULARY
from reference import reference_beam_search
from table_scorers import TableModel, TableScorer, catalogue_of, make_plan, tables

from hf_gr import ConstraintIndex
from hf_gr.core.beam import DEAD
from hf_gr.torch.decode import decode
from hf_gr.torch.tree import Nodes

pytestmark = pytest.mark.shapes

SCORE_TOL = 1e-5  # fp32, at most 5 additions
FP32 = torch.finfo(torch.float32)
LOGITS = tables(0, 2)


def check(
    sequences: list[list[int]], num_beams: int, *, ragged: bool, length_penalty: float = 1.0, **kwargs: Any
) -> None:
    """Decode two rows and compare each with the slow beam search."""
    index = ConstraintIndex.from_sequences(sequences, eos_token_id=EOS if ragged else None)
    plan = make_plan(2, num_beams, length_penalty=length_penalty, max_new_tokens=index.max_length, **kwargs)
    decoded = decode(TableModel(LOGITS, 2)(), catalogue_of(index), plan)
    for row in range(2):

        def log_probs(prefix: tuple[int, ...], row: int = row) -> np.ndarray:
            number = int("0" + "".join(map(str, prefix)), VOCABULARY)
            return LOGITS[len(prefix)][row, number].log_softmax(-1).numpy()

        expected = reference_beam_search(log_probs, list(index), num_beams, length_penalty=length_penalty)
        rows = slice(row * num_beams, row * num_beams + len(expected))
        found = [[token for token in path if token != 9] for path in decoded.sequences[rows].tolist()]
        assert found == [list(sequence) for sequence, _ in expected]
        scores = torch.tensor([score for _, score in expected], dtype=torch.float32).clamp_min(FP32.min)
        torch.testing.assert_close(decoded.scores[rows], scores, atol=SCORE_TOL, rtol=SCORE_TOL)
        rest = slice(row * num_beams + len(expected), (row + 1) * num_beams)
        assert (decoded.sequences[rest] == 9).all()
        assert (decoded.scores[rest] == DEAD).all()


tokens = st.integers(1, TOKENS)
fixed, ragged = (st.lists(tokens, min_size=least, max_size=most) for least, most in ((3, 3), (1, 4)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(fixed, min_size=1, max_size=40) | st.lists(ragged, min_size=1, max_size=40),
    st.integers(2, 9),
    st.sampled_from([1.0, 0.0, 2.0, -3.0, 40.0, -40.0]),
)
def test_beams_equal_the_slow_search(sequences: list[list[int]], num_beams: int, length_penalty: float) -> None:
    is_ragged = len(set(map(len, sequences))) > 1
    check(sequences, num_beams, ragged=is_ragged, length_penalty=length_penalty)


ROWS = np.random.default_rng(0).integers(1, 7, size=(40, 4)).tolist()


def test_the_vocabulary_wide_path_gives_the_same() -> None:
    check(ROWS, 5, ragged=False, output_scores=True)
    check(ROWS, 5, ragged=False, processors=(lambda ids, scores: scores, lambda ids, scores: scores))


def test_a_closed_ragged_search_stops_early_unless_processes_must_agree() -> None:
    index = ConstraintIndex.from_sequences([[1], [2], [3, 4, 5, 6]], eos_token_id=EOS)
    logits = [table.clone() for table in LOGITS]
    logits[0][..., 3] = -50.0
    forwards = {}
    for exit_early in (True, False):
        scorer = TableModel(logits, 2)()
        plan = make_plan(2, 2, early_stopping=True, exit_early=exit_early)
        decoded = decode(scorer, catalogue_of(index), plan)
        assert sorted(decoded.sequences[:, 0].tolist()) == [1, 1, 2, 2]
        forwards[exit_early] = scorer.num_forwards
    assert forwards[True] < forwards[False] == 4


def test_logits_are_gone_before_the_next_ones_are_made_in_one_forward_a_level() -> None:
    """They are as wide as the vocabulary: two of them at once would be the largest part of a call's memory."""
    alive: list[int] = []

    class Counting(TableScorer):
        made: list[Any] = []

        def score(self, levels: Sequence[Nodes], *, depth: Any) -> list[torch.Tensor]:
            alive.append(sum(of() is not None for of in self.made))
            scored = super().score(levels, depth=depth)
            self.made += [weakref.ref(logits) for logits in scored]
            return scored

    decode(Counting(TableModel(LOGITS, 2)), catalogue_of(ConstraintIndex.from_sequences(ROWS)), make_plan(2, 3))
    assert alive == [0, 0, 0]
