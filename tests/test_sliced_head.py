# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of the output head that no item has are not multiplied: answers of the whole head, or it is left alone."""

from typing import Any

import numpy as np
import pytest
import torch
from families import EOS, PAD, build, prompts
from torch import nn
from transformers import LogitsProcessorList, TopKLogitsWarper

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import sliced_head
from hf_gr.generation.torch.sliced_head import PLAIN_HEADS, SlicedHead

ROWS = np.random.default_rng(0).choice([3, 5, 9, 17, 30, 41, 62], size=(60, 3))
INDEX = ConstraintIndex.from_sequences(np.unique(ROWS, axis=0))
RAGGED = ConstraintIndex.from_sequences(
    sorted({(*row[: 1 + number % 3].tolist(), EOS) for number, row in enumerate(ROWS)}), eos_token_id=EOS
)
BEAMS = {"num_beams": 5, "num_return_sequences": 5, "renormalize_logits": True}
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "_step_scores": False, "pad_token_id": PAD}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"exclude_items": [[0, 1, 2], [3], []]},
    "greedy, drafts": {"constraint_index": RAGGED, "drafting": "trie"},
    "samples": {"do_sample": True, "top_k": 0, "seed": [3, 4, 5], "num_return_sequences": 3},
    "beams": BEAMS,
    "beams, drafts": {"constraint_index": RAGGED, "drafting": "trie", "forced_eos_token_id": EOS, **BEAMS},
    "exact": {"exact": True, "constraint_index": RAGGED, **BEAMS},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where heads are sliced whatever that saves: those that were."""
    made: list[Any] = []
    own = SlicedHead.__init__
    monkeypatch.setattr(SlicedHead, "__init__", lambda self, *given: made.append(self) or own(self, *given))
    return made


@pytest.mark.parametrize("family", sorted(PLAIN_HEADS))
def test_some_rows_give_the_whole_heads_answers(
    family: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enable(build(family))
    if (head := model.get_output_embeddings()).bias is not None:
        head.bias.data.normal_()
    for name, options in CASES.items():
        given: dict[str, Any] = {"constraint_index": INDEX} | options | prompts(3, 9, padded=True) | DETAILS
        monkeypatch.setattr(sliced_head, "MOST", 0)
        expected = model.generate(**given)
        monkeypatch.setattr(sliced_head, "MOST", 0.5)
        calls.clear()
        found = model.generate(**given)
        assert len(calls) == 1, name
        assert found.sequences.tolist() == expected.sequences.tolist(), name
        if expected.get("sequences_scores") is not None:
            torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=0)


class OwnHead(nn.Linear):
    """Not quite a linear layer, as quantised and adapted ones are."""


def _swap(model: Any) -> None:
    own, made = model.lm_head, OwnHead(32, 64, bias=False)
    made.weight = own.weight
    model.lm_head = made


LEFT_ALONE: dict[str, tuple[dict[str, Any], Any]] = {
    "log-probabilities over the vocabulary": ({"num_beams": 5}, None),
    "and of exact search": ({"exact": True}, None),
    "scores of steps": ({"_step_scores": True}, None),
    "logits": ({"output_logits": True}, None),
    "a processor": ({"logits_processor": LogitsProcessorList([TopKLogitsWarper(4)])}, None),
    "another layer": ({}, _swap),
    "a hook": ({}, lambda model: model.lm_head.register_forward_hook(lambda module, given, made: -made)),
    "the head's forward replaced": ({}, lambda model: setattr(model.lm_head, "forward", model.lm_head.forward)),
    "a forward of one's own": ({}, lambda model: setattr(model, "forward", model.forward)),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_a_head_that_is_more_than_rows_or_that_others_read_is_left_alone(case: str, calls: list[Any]) -> None:
    options, change = LEFT_ALONE[case]
    model, given = enable(build("qwen3")), {"constraint_index": INDEX, **prompts(2, 9), **DETAILS}
    model.generate(**given)
    assert len(calls) == 1
    if change is not None:
        change(model)
    model.generate(**given | options)
    assert len(calls) == 1
