# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Many captured calls in random shapes: each answers as an eager one does.

The model computes in fp64, so that a bucket's rounding does not decide between beams.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from cpu_graphs import CpuGraphs, capture, poison_buffers
from families import EOS, build, prompts

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import captured

DETAILS = {"return_dict_in_generate": True, "output_scores": True, "_step_scores": False}


class Calls:
    """Random calls of one model, which sees catalogues come, change and go."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.model = enable(build("gemma3_text", config={"num_hidden_layers": 2})).double()
        self.indexes = [self.new_index(number) for number in range(3)]
        self.model.add_draft_head(self.indexes[0])
        self.next_item = 10**6

    def new_index(self, number: int) -> ConstraintIndex:
        rows = self.rng.integers(3, 24, size=(self.random.choice((40, 200)), 3))
        if number == 1:
            short = [row[: 1 + place % 3].tolist() for place, row in enumerate(rows)]
            return ConstraintIndex.from_sequences(short, item_ids=list(range(len(rows))), eos_token_id=EOS)
        return ConstraintIndex.from_sequences(rows, item_ids=list(range(len(rows))))

    def change(self) -> None:
        """Now and then: an update, another catalogue, other weights, in place or elsewhere."""
        draw, number = self.random.random(), self.random.randrange(3)
        index = self.indexes[number]
        if draw < 0.03 and number != 1:
            index.add(self.rng.integers(3, 24, size=(1, 3)), item_ids=[self.next_item])
            self.next_item += 1
        elif draw < 0.06 and index.num_items > 20:
            index.remove(self.random.sample(list(index.item_ids), 2))
        elif draw < 0.065:
            self.indexes[number] = self.new_index(number)
        elif draw < 0.08:
            weights = {name: tensor.flip(0) for name, tensor in self.model.state_dict().items() if "norm" in name}
            self.model.load_state_dict(weights, strict=False, assign=draw < 0.07)

    def draw(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """A prompt and options: one of some shapes that come often, or any."""
        often = self.random.random() < 0.9
        shape = random.Random(self.random.randrange(8) if often else self.random.random())
        chance, draw = shape.random, self.random
        batch_size, length = shape.choice((1, 2, 3)), shape.choice((5, 13, 17, 25)) + draw.randrange(4)
        inputs = prompts(batch_size, length, padded=draw.random() < 0.5, seed=draw.randrange(10**6))
        number = shape.choice((0, 0, 1, 2))
        index, ids = self.indexes[number], list(self.indexes[number].item_ids)
        beams = shape.choice((1, 4, 4, 4, 5))
        options: dict[str, Any] = {"num_beams": beams, "constraint_index": index}
        options["num_return_sequences"] = beams if chance() < 0.8 else 1
        if chance() < 0.3:
            options |= {"do_sample": True, "top_k": 0, "seed": draw.randrange(100)}
        elif beams == 1:
            options["num_return_sequences"] = 1
        if chance() < 0.2:
            options["exclude_items"] = [draw.sample(ids, draw.choice((3, 4))) for _ in range(batch_size)]
        if chance() < 0.2:
            options["constraint_index"] = [index.where(draw.sample(ids, 15)) for _ in range(batch_size)]
        if number == 0 and chance() < 0.2 and beams > 1 and not options.get("do_sample"):
            options["drafting"] = "head"
        return inputs, options


def run(monkeypatch: pytest.MonkeyPatch, *, count: int, seed: int) -> CpuGraphs:
    graphs, calls, refused = CpuGraphs.installed(monkeypatch), Calls(seed), 0
    monkeypatch.setattr(captured, "say_once", lambda message: None)
    for number in range(count):
        calls.change()
        inputs, options = calls.draw()
        try:
            expected = calls.model.generate(**inputs, **options, **DETAILS)
        except ValueError:  # of a head that does not know the changed catalogue's tokens
            refused += 1
            continue
        poison_buffers(calls.model)
        if calls.random.random() < 0.3:
            capture(calls.model, inputs, **options, **DETAILS)
        found = calls.model.generate(**inputs, **options, **DETAILS, cache_implementation="static")
        assert found.sequences.tolist() == expected.sequences.tolist(), (number, seed)
        if options["num_beams"] > 1:
            torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=0)
    assert refused < count / 10
    return graphs


def test_calls_in_random_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = run(monkeypatch, count=60, seed=0)
    assert graphs.num_captures > 3
    assert graphs.num_replays > 2 * graphs.num_captures


@pytest.mark.slow
def test_a_thousand_calls_in_random_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = run(monkeypatch, count=int(os.environ.get("HF_GR_CALLS", "1000")), seed=1)
    assert graphs.num_replays > 2 * graphs.num_captures
