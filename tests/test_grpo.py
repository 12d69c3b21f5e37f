# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement on constrained rollouts: what the loss needs, and examples/train_grpo.py with TRL."""

from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_gr import ConstraintLogitsProcessor, SemanticIds
from hf_gr.training import small_recommender

CODES = np.unique(np.random.default_rng(0).integers(0, 5, size=(40, 3)), axis=0)
IDS = SemanticIds(CODES, level_sizes=[5] * 3, item_ids=[f"item-{row}" for row in range(len(CODES))])
GROUP = 6


def recommender() -> Any:
    return small_recommender(IDS, max_items=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize("how", [{"exact": True, "do_sample": True}, {"num_beams": GROUP, "do_sample": True}])
def test_the_loss_has_the_log_probabilities_of_the_draws(how: dict[str, Any]) -> None:
    """A draw's score is the sum of its log-probabilities among legal tokens, through which gradients flow."""
    model, index = recommender().eval(), IDS.constraint_index()
    prompts = torch.tensor([IDS.encode(["item-1", "item-2"]), IDS.encode(["item-5", "item-3"])])
    how |= {"num_return_sequences": GROUP, "renormalize_logits": True, "length_penalty": 0.0}
    torch.manual_seed(0)
    out = model.generate(prompts, constraint_index=index, return_dict_in_generate=True, output_scores=True, **how)
    rows, length = out.sequences, prompts.shape[1]
    logits = model(rows[:, :-1]).logits[:, length - 1 :]
    legal = ConstraintLogitsProcessor(index, prompt_length=length)(rows[:, :-1], logits)
    log_probs = legal.log_softmax(-1).gather(-1, rows[:, length:, None])[..., 0]
    torch.testing.assert_close(log_probs.sum(-1), out.sequences_scores, atol=1e-5, rtol=0)
    for start in (0, GROUP):
        assert len({tuple(row) for row in rows[start : start + GROUP, length:].tolist()}) == GROUP
    log_probs.sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of TRL and datasets
@pytest.mark.parametrize("checkpointing", [False, True])
def test_grpo_learns_from_distinct_items(monkeypatch: pytest.MonkeyPatch, checkpointing: bool) -> None:
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "examples"))
    grpo = import_module("train_grpo")
    seen: list[Any] = []

    def liked(completion_ids: Any, target: Any, **more: Any) -> list[float]:
        """Rewards one first code, which is easy to learn, and keeps what it saw."""
        seen.append((completion_ids, target))
        return [float(row[0] == 0) for row in completion_ids]

    monkeypatch.setattr(grpo, "REWARDS", [liked, grpo.hit])
    options = Namespace(grpo_steps=12, prompts=4, group=GROUP, learning_rate=0.02, seed=0)
    histories = [[f"item-{(start + step) % len(CODES)}" for step in range(4)] for start in range(30)]
    model = grpo.reinforce(recommender(), histories, IDS, options, gradient_checkpointing=checkpointing)
    items = {tuple(row) for row in IDS.token_sequences().tolist()}
    for completions, targets in seen:
        assert {tuple(row) for row in completions} <= items
        for start in range(0, len(completions), GROUP):
            assert len({tuple(row) for row in completions[start : start + GROUP]}) == GROUP
            assert len({tuple(row) for row in targets[start : start + GROUP]}) == 1
    shares = [np.mean([row[0] == 0 for row in completions]) for completions, _ in seen]
    assert np.mean(shares[-3:]) > np.mean(shares[:3]) + 0.2
    found = model.generate(torch.tensor([IDS.encode(histories[0])]), constraint_index=IDS.constraint_index())
    assert found[0, -3] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_rewards_are_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "examples"))
    grpo = import_module("train_grpo")
    found, target = [[9, 9], [1, 2], [8, 8], [1, 3], [9, 9], [8, 8]], [[1, 2]] * 6
    assert grpo.hit(found, target) == [0, 1, 0, 0, 0, 0]
    shares = np.array([1, 0, 1 / np.log2(4)]) / (1 + 1 / np.log2(3) + 1 / np.log2(4))
    np.testing.assert_allclose(grpo.others(found, target, [3] * 6), [*-shares, 0, 0, 0])
