# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Selection, on small tensors; what finishes, and when: test_decode.py and test_parity.py."""

from typing import Any

import pytest
import torch

from hf_gr.core import beam
from hf_gr.core.beam import DEAD, Beams, choose, select
from hf_gr.torch import ops
from hf_gr.torch.transition import Children

pytestmark = pytest.mark.shapes


def candidates(batch_size: int, num_beams: int, num_children: int) -> Children:
    """Children with tokens 10, 11, ... and states 100, 101, ..., all of them legal."""
    shape = (batch_size, num_beams, num_children)
    numbers = torch.arange(num_beams * num_children).view(1, num_beams, num_children).expand(shape)
    return Children(tokens=numbers + 10, legal=torch.ones(shape, dtype=torch.bool), states=numbers + 100)


def beams(scores: list[list[float]], length: int = 2) -> Beams:
    """Beams whose tokens are their own numbers."""
    values = torch.tensor(scores)
    own = torch.arange(values.shape[1]).expand(values.shape)[..., None].expand(-1, -1, length)
    return Beams(ops, own, own, scores=values, states=own[..., 0])


@pytest.mark.parametrize("loud", [None, 20.0])
def test_missing_candidates_are_dead_and_stay_dead(loud: float | None) -> None:
    noise = None if loud is None else torch.full((2, 1, 3), loud)
    scores = torch.full((2, 1, 3), DEAD)
    scores[0, 0, 1] = -1.0
    kept = select(beams([[0.0], [DEAD]]), candidates(2, 1, 3), scores, num_kept=5, dead_state=7, noise=noise)
    assert kept.scores.tolist() == [[-1.0, DEAD, DEAD, DEAD, DEAD], [DEAD] * 5]
    assert kept.states.tolist() == [[101, 7, 7, 7, 7], [7] * 5]
    assert not kept.scores.isnan().any()
    chosen = choose(beams([[0.0], [DEAD]]), candidates(2, 1, 3), scores, dead_state=7, noise=noise)
    assert chosen.scores.tolist() == [[-1.0], [DEAD]]
    assert chosen.states.tolist() == [[101], [7]]


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("number", [1, 7, 200])
@pytest.mark.parametrize(
    ("width", "block", "device"),
    [
        (29_999, None, "cpu"),
        (40_001, None, "cpu"),
        *[(width, block, "cpu") for width in (4_096, 4_127) for block in (2, 8)],
        pytest.param(2**20 + 77, None, "cuda", marks=ON_GPU),
    ],
)
def test_blocks_give_the_best(width: int, block: int | None, device: str, number: int, monkeypatch: Any) -> None:
    if block is not None:
        monkeypatch.setattr(ops, "_block_size", lambda *_: block)
    keys = torch.randn(6, width, generator=torch.Generator().manual_seed(number))
    keys[0] = DEAD
    keys[1, 5:] = DEAD
    keys[2, ::3] = keys[2].max()
    keys[3] = -1.0
    keys[4] = keys[4].sort().values  # the best are in one block, or in what fills none
    keys = keys.to(device)
    found, places = ops.topk(keys, number)
    assert torch.equal(found, keys.gather(1, places))
    assert all(len(set(row)) == number for row in places.tolist())
    assert torch.equal(found, keys.topk(number).values)


def test_noise_decides_and_is_no_part_of_the_scores() -> None:
    scores = torch.tensor([[[-5.0, -6.0], [-1.0, DEAD]]])
    noise = torch.tensor([[[0.0, 5.5], [0.0, 9.0]]])
    start, below = beams([[0.0, 0.0]]), candidates(1, 2, 2)
    drawn = select(start, below, scores, num_kept=2, dead_state=7, noise=noise)
    paths = choose(start, below, scores, dead_state=7, noise=noise)
    for kept in (drawn, paths):
        assert kept.tokens.tolist() == [[11, 12]]
        assert kept.scores.tolist() == [[-6.0, -1.0]]
        assert kept.parents.tolist() == [[0, 1]]
    assert choose(start, below, scores, dead_state=7).tokens.tolist() == [[10, 12]]


def none_yet(max_length: int) -> beam.Finished:
    return beam.Finished.none_yet(ops, torch.zeros(()), batch_size=1, width=1, max_length=max_length)


def test_a_full_or_closed_row_takes_no_more() -> None:
    def best_after(score: float, pool: beam.Finished, early_stopping: bool) -> beam.Finished:
        how = {"length_penalty": 0.0, "early_stopping": early_stopping}
        return beam.retire(beams([[score]]), pool, torch.tensor([[True]]), **how)[1]

    pool = best_after(-2.0, none_yet(4), True)
    assert bool(pool.is_full)
    assert best_after(-1.0, pool, True).scores.tolist() == [[-2.0]]
    assert best_after(-1.0, pool, False).scores.tolist() == [[-1.0]]
    closed = beam.update_may_improve(beams([[-3.0]]), pool, length_penalty=0.0, early_stopping=False, max_new_tokens=4)
    assert closed.may_improve.tolist() == [[False]]
    assert best_after(-1.0, closed, False).scores.tolist() == [[-2.0]]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "may_improve"),
    [(False, 1.0, False), ("never", 1.0, True), ("never", 0.0, False), (True, 1.0, False)],
)
def test_never_reckons_with_the_longest_sequence(early_stopping, length_penalty: float, may_improve: bool) -> None:
    ends, how = torch.tensor([[True]]), {"length_penalty": length_penalty}
    _, pool = beam.retire(beams([[-2.0]]), none_yet(8), ends, early_stopping=False, **how)
    pool = beam.update_may_improve(beams([[-3.0]]), pool, early_stopping=early_stopping, max_new_tokens=8, **how)
    assert pool.may_improve.tolist() == [[may_improve]]
