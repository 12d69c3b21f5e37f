# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A real catalogue on both sides: Amazon Beauty and its users' histories. Skipped where its files are not at hand."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from data_sets import BEAUTY, needs_beauty

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax

from hf_gr import AutoModelForGenerativeRetrieval, SemanticIds

ROOT = Path(__file__).resolve().parents[1]
SCORE_TOL = 1e-4  # fp32 sums of 4 log-probabilities

pytestmark = needs_beauty


def test_beams_equal_the_other_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users of different histories, padded, none of whom is offered what they had."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "benchmark"))
    beauty = import_module("beauty")
    item_ids, codes = beauty.read_items(BEAUTY)
    ids = SemanticIds(codes, item_ids=item_ids, level_sizes=[256] * 4, offset=1)
    index = ids.constraint_index()
    torch_model = beauty.make_model(ids.vocab_size, 0)
    torch_model.save_pretrained(tmp_path)
    model = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path, backend="flax")

    histories = [history[-6:] for history in beauty.read_histories(BEAUTY)[::900]]
    prompts = [ids.encode(history) for history in histories]
    assert len({len(prompt) for prompt in prompts}) > 1
    _, prompt = next(beauty.batches(prompts, len(prompts)))
    histories = sorted(histories, key=len)  # as batches are
    options = {"num_beams": 20, "num_return_sequences": 20, "return_dict_in_generate": True, "output_scores": True}
    options |= {"constraint_index": index, "exclude_items": histories}
    theirs = torch_model.generate(**prompt, **options)
    with jax.default_matmul_precision("highest"):
        ours = model.generate(**{name: tensor.numpy() for name, tensor in prompt.items()}, **options)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    np.testing.assert_allclose(ours.sequences_scores, theirs.sequences_scores.numpy(), atol=SCORE_TOL, rtol=0)
    found = index.items(np.asarray(ours.sequences)[:, prompt["input_ids"].shape[1] :])
    assert all(found)
    for row, items in enumerate(found):
        assert set(items).isdisjoint(histories[row // 20])
