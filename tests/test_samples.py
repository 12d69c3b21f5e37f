# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a prompt's samples depend on: its seed, its tokens, the catalogue's sequences, and nothing else."""

from typing import Any

import numpy as np
import pytest
import torch
from families import build, prompts, shared

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.seeds import row_seeds

ROWS = np.random.default_rng(0).integers(3, 24, size=(300, 4))
INDEX = ConstraintIndex.from_sequences(ROWS)
MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 5, "num_return_sequences": 5},
    "paths": {"num_beams": 1, "num_return_sequences": 5},
}


def sample(
    family: str, inputs: dict[str, torch.Tensor], seed: Any, *, mode: str, index: Any = INDEX, **kwargs: Any
) -> list[list[list[int]]]:
    """The samples of every prompt, in order."""
    options = {"constraint_index": index, "do_sample": True, "top_k": 0, "temperature": 2.0, **MODES[mode], **kwargs}
    model = enable(shared(family))
    out = model.generate(**inputs, **options, seed=seed, return_dict_in_generate=True)
    begun = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return out.sequences[:, begun:].unflatten(0, (len(inputs["input_ids"]), -1)).tolist()


@pytest.mark.parametrize(("family", "mode"), [("qwen3", "beams"), ("gpt2", "paths"), ("t5", "paths")])
def test_a_prompts_samples_are_its_own(family: str, mode: str) -> None:
    inputs = prompts(4, 12, padded=True)
    together = sample(family, inputs, 7, mode=mode)
    assert len({str(rows) for rows in together}) == 4
    seeds = row_seeds(7, 4).tolist()
    for row in range(4):
        alone = {name: values[row : row + 1, inputs["attention_mask"][row].bool()] for name, values in inputs.items()}
        assert sample(family, alone, seeds[row], mode=mode) == [together[row]]
    turned = {name: values.flip(0) for name, values in inputs.items()}
    assert sample(family, turned, seeds[::-1], mode=mode) == together[::-1]
    assert sample(family, turned, 7, mode=mode) != together[::-1]


@pytest.mark.parametrize("mode", MODES)
def test_samples_do_not_depend_on_how_the_catalogue_is_stored(mode: str) -> None:
    inputs = prompts(2, 6)
    more = np.concatenate([ROWS, np.random.default_rng(1).integers(24, 50, size=(400, 4))])
    updated = ConstraintIndex.from_sequences(more[100:], item_ids=range(100, 700))
    updated.add(ROWS[:100], range(100))
    expected = sample("qwen3", inputs, 7, mode=mode)
    assert sample("qwen3", inputs, 7, mode=mode, index=updated.where(range(300))) == expected


def test_paths_keep_their_samples_if_others_items_go() -> None:
    inputs = prompts(2, 6)
    before = sample("qwen3", inputs, 7, mode="paths")
    drawn = {tuple(path) for rows in before for path in rows}
    index = ConstraintIndex.from_sequences(ROWS)
    index.remove([number for number, row in enumerate(ROWS.tolist()) if tuple(row) not in drawn and number % 3])
    assert sample("qwen3", inputs, 7, mode="paths", index=index) == before


def test_more_paths_begin_with_the_fewer() -> None:
    inputs = prompts(2, 6)
    five = sample("qwen3", inputs, 7, mode="paths")
    assert all(len({tuple(path) for path in rows}) > 1 for rows in five)
    three = sample("qwen3", inputs, 7, mode="paths", num_return_sequences=3)
    assert three == [rows[:3] for rows in five]


SQUARE = ConstraintIndex.from_sequences([[a, b] for a in range(3, 8) for b in range(8, 13)])


@pytest.mark.parametrize("num_draws", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_items_are_sampled_as_often_as_in_transformers(num_beams: int, num_draws: int) -> None:
    """Each item's share is off by less than five standard deviations of the difference of two samples."""
    model, constrained, per_call = build("qwen3"), enable(build("qwen3")), 500
    codes = [list(range(3, 8)), list(range(8, 13))]
    many = {name: values.expand(per_call, -1) for name, values in prompts(1, 6).items()}
    how = {"do_sample": True, "top_k": 0, "temperature": 1.5, "num_beams": num_beams, "max_new_tokens": 2}
    how |= {"num_return_sequences": num_beams, "pad_token_id": 1, "eos_token_id": None}
    legal = {"prefix_allowed_tokens_fn": lambda row, tokens: codes[len(tokens) - 6]}
    torch.manual_seed(0)
    theirs, ours = [], []
    for call in range(num_draws // per_call):
        theirs.append(model.generate(**many, **how, **legal))
        ours.append(constrained.generate(**many, **how, constraint_index=SQUARE, seed=call))
    numbers = ((torch.cat(rows)[:, -2] - 3) * 5 + torch.cat(rows)[:, -1] - 8 for rows in (theirs, ours))
    expected, found = (torch.bincount(of, minlength=25) / num_draws for of in numbers)
    share = (expected + found) / 2
    bound = 5 * (2 * share * (1 - share).clamp_min(0) / num_draws).sqrt() + 1 / num_draws
    assert bool(((found - expected).abs() <= bound).all())


def test_the_answer_lists_the_seeds() -> None:
    model, inputs = enable(shared("qwen3")), prompts(3, 6)
    options: dict[str, Any] = {"constraint_index": INDEX, "do_sample": True, "return_dict_in_generate": True}
    assert model.generate(**inputs, **options, seed=7).seeds == row_seeds(7, 3).tolist()
    assert model.generate(**inputs, **options, seed=torch.tensor([7, 8, 9])).seeds == [7, 8, 9]
    assert model.generate(**inputs, **options | {"do_sample": False}, seed=7).seeds is None
    drawn = model.generate(**inputs, **options)
    assert len(set(drawn.seeds)) == 3
    again = model.generate(**inputs, **options, seed=drawn.seeds)
    assert again.sequences.tolist() == drawn.sequences.tolist()


def test_seeds_come_from_the_generator_or_the_device() -> None:
    def seeds(**how: Any) -> list[int]:
        options = {"constraint_index": INDEX, "do_sample": True, "return_dict_in_generate": True}
        return enable(shared("qwen3")).generate(**prompts(2, 6), **options, **how).seeds

    state, generator = torch.get_rng_state(), torch.Generator().manual_seed(1)
    first = seeds(generator=generator)
    assert first != seeds(generator=generator)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(1)
    assert seeds() == first
