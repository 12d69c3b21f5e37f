# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`exact=True` and `num_proven`. Answers against brute force, over families, rules and options: tests/fuzz."""

import random
from collections import Counter
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from families import DETAILS, EOS, build, prompts
from flax_pairs import pair, to_numpy
from reference import reference_beam_search
from table_scorers import LONGEST, VOCABULARY, TableModel, catalogue_of, make_plan, random_rows, tables

from hf_gr import ConstraintIndex, GRGenerationConfig, enable
from hf_gr.torch.decode import decode

ROWS = np.unique(np.random.default_rng(0).integers(3, 40, size=(400, 4)), axis=0)
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences([row[: 1 + n % 4].tolist() for n, row in enumerate(ROWS)], eos_token_id=EOS)
TEN = {"num_return_sequences": 10, **DETAILS}


@cache
def model_of(*, scale: float = 1.0) -> Any:
    model = enable(build("qwen3"))
    for weight in model.parameters():
        weight.data *= scale
    return model


def generate(index: ConstraintIndex = INDEX, *, scale: float = 1.0, **kwargs: Any) -> Any:
    inputs = prompts(3, 6, padded=True)
    return model_of(scale=scale).generate(**inputs, constraint_index=index, **kwargs)


@cache
def every(index: ConstraintIndex) -> Any:
    """All items by a search that cuts nothing."""
    return generate(index, num_beams=400, **TEN)


@pytest.mark.parametrize("index", [INDEX, RAGGED])
@pytest.mark.parametrize("drafting", [None, "trie"])
@pytest.mark.parametrize("num_beams", [None, 2, 7])
def test_the_answer_is_that_of_a_search_that_cuts_nothing(index: Any, drafting: Any, num_beams: Any) -> None:
    best = every(index)
    found = generate(index, exact=True, drafting=drafting, num_beams=num_beams, max_nodes=2000, **TEN)
    assert found.sequences.tolist() == best.sequences.tolist()
    torch.testing.assert_close(found.sequences_scores, best.sequences_scores, atol=1e-4, rtol=0)
    assert found.num_proven.tolist() == best.num_proven.tolist() == [10] * len(found.num_proven)
    assert found.item_ids == best.item_ids


@pytest.mark.parametrize("how", [{}, {"exact": True, "max_nodes": 2**60}, {"num_beams": [2**60, 2**61]}], ids=str)
def test_more_beams_than_nodes_are_as_many_as_nodes(how: dict[str, Any]) -> None:
    found = generate(**TEN, **{"num_beams": 2**60} | how)
    assert found.sequences.tolist() == every(INDEX).sequences.tolist()
    assert found.num_proven.tolist() == [10, 10, 10]


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_beams": 8, "max_nodes": 240}, {"drafting": "trie"}])
def test_a_search_that_ends_early_still_fills_a_long_list(options: Any) -> None:
    out = generate(exact=True, num_return_sequences=80, **{"num_beams": 2, **options}, **DETAILS)
    assert (out.sequences_scores > -torch.inf).all()


@pytest.mark.parametrize("drafting", [None, "trie"])
def test_equal_items_stand_in_the_order_of_their_tokens(drafting: Any) -> None:
    out = generate(scale=0.0, exact=True, drafting=drafting, max_nodes=2000, **TEN)
    assert out.sequences[:10, -4:].tolist() == ROWS[:10].tolist()
    assert out.num_proven.tolist() == [10] * len(out.num_proven)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.3, 1.0])
def test_what_beams_prove_is_true(early_stopping: Any, length_penalty: float) -> None:
    """Against all sequences, of several lengths: some end, or are cut, before better ones are complete."""
    counts = torch.zeros(4, dtype=torch.long)
    for seed in range(12):
        rng = random.Random(seed)
        rows = random_rows(rng, rng.choice((5, 30)), ragged=True, length=LONGEST - 1)
        logits, index = tables(seed, 20, scale=5.0), ConstraintIndex.from_sequences(rows, eos_token_id=0)
        how = {"length_penalty": length_penalty, "early_stopping": early_stopping, "certifies": True}
        plan = make_plan(20, rng.choice((3, 4)), num_return_sequences=3, **how)
        scorer: Any = TableModel(logits, 20)()
        out = decode(scorer, catalogue_of(index), plan)
        of_items = []
        for row in {tuple(row) for row in rows}:
            score, prefix = torch.zeros(20), 0
            for depth, token in enumerate((*row, 0)):
                score += logits[depth][:, prefix].log_softmax(-1)[:, token]
                prefix = prefix * VOCABULARY + token
            of_items.append(score / (len(row) + 1) ** length_penalty)
        best = torch.stack(of_items).T.topk(min(3, len(of_items))).values
        assert (num_proven := out.num_proven) is not None
        for found, expected, number in zip(out.scores.view(20, 3), best, num_proven, strict=True):
            torch.testing.assert_close(found[:number], expected[:number], atol=1e-4, rtol=0)
        counts += torch.bincount(num_proven, minlength=4)
    assert counts.min() > 5, "some lists are proven, others in part or not at all"


@pytest.mark.parametrize("backend", ["torch", "flax"])
@pytest.mark.parametrize("index", [INDEX, RAGGED])
def test_beams_by_level(backend: str, index: Any) -> None:
    model, inputs = model_of(), prompts(2, 6, padded=True)
    how: dict[str, Any] = {
        "constraint_index": index,
        "num_beams": np.array([3, 30, 5]),
        "num_return_sequences": 5,
        **DETAILS,
    }
    how["early_stopping"] = "never"
    if backend == "flax":
        model, other, _ = pair("qwen3")
        out = other.generate(**to_numpy(inputs), **how)
    else:
        out = model.generate(**inputs, **how)
        drafted = model.generate(**inputs, **how, drafting="trie", draft_token_budget=20)
        assert drafted.sequences.tolist() == out.sequences.tolist()
        assert {len(step) for step in out.scores} == {60}
    rows = np.asarray(out.sequences)[:, 6:]
    for number in range(2):
        tokens = inputs["input_ids"][number][inputs["attention_mask"][number] > 0]

        def log_probs(prefix: tuple[int, ...], tokens: Any = tokens) -> Any:
            read = torch.cat([tokens, torch.tensor(prefix, dtype=torch.long)])[None]
            return model(read).logits[0, -1].log_softmax(-1).detach().numpy()

        sequences = [row[row >= 0].tolist() for row in index.snapshot.rows()]
        best = reference_beam_search(log_probs, sequences, [3, 30, 5])[:5]
        assert [tuple(row[: len(wanted)]) for row, (wanted, _) in zip(rows[5 * number :], best, strict=False)] == [
            wanted for wanted, _ in best
        ]


FEW = ConstraintIndex.from_sequences([row[: 1 + n % 4].tolist() for n, row in enumerate(ROWS[::50])], eos_token_id=EOS)
DRAWN = {"constraint_index": FEW, "exact": True, "do_sample": True, "temperature": 4.0, **DETAILS}


@pytest.mark.parametrize("renormalize", [False, True])
def test_samples_are_drawn_without_replacement(renormalize: bool) -> None:
    """Pairs of items, the first and the second drawn, against their probabilities; chi-square, 55 pairs."""
    number, model = 4000, model_of(scale=0.7)
    prompt = prompts(1, 6)
    how: dict[str, Any] = DRAWN | {"renormalize_logits": renormalize}
    every = model.generate(**prompt, **how, num_return_sequences=8, seed=0)
    order = [items[0] for items in every.item_ids]
    chance = dict(zip(order, every.sequences_scores.softmax(0).tolist(), strict=True))
    assert every.perturbed_scores.diff().max() <= 0
    many = {name: value.expand(number, -1) for name, value in prompt.items()}
    found = model.generate(**many, **how, num_return_sequences=2, seed=1).item_ids
    pairs = Counter(zip([items[0] for items in found[::2]], [items[0] for items in found[1::2]], strict=True))
    expected = {(a, b): number * chance[a] * chance[b] / (1 - chance[a]) for a, b in permutations(order, 2)}
    off = sum((pairs[pair] - value) ** 2 / value for pair, value in expected.items())
    assert off < 100, f"chi-square {off:.0f}, above 100 in 1 of 5,000 runs"


def test_samples_are_the_same_alone_in_a_batch_and_with_drafts() -> None:
    model, inputs, seeds = model_of(), prompts(3, 6, padded=True), [5, 6, 7]
    out = model.generate(**inputs, **DRAWN, num_return_sequences=4, seed=seeds)
    drafted = model.generate(**inputs, **DRAWN, num_return_sequences=4, seed=seeds, drafting="trie", num_beams=3)
    assert drafted.item_ids == out.item_ids
    for row, seed in enumerate(seeds):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        one = model.generate(**alone, **DRAWN, num_return_sequences=4, seed=seed)
        assert one.item_ids == out.item_ids[4 * row : 4 * row + 4]
    assert out.num_proven.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("index", "kwargs"),
    [
        (INDEX, {"num_beams": 4, "do_sample": True}),
        (INDEX, {"num_beams": 4, "renormalize_logits": True}),
        (INDEX, {"num_beams": 4, "repetition_penalty": 1.5}),
        (INDEX, {"num_beams": 1}),
        (RAGGED, {"num_beams": 4, "length_penalty": -1.0}),
    ],
)
def test_no_certificate_where_a_prefix_bounds_nothing(index: Any, kwargs: dict[str, Any]) -> None:
    assert generate(index, **kwargs, **DETAILS).num_proven is None


def test_a_cache_and_rules_and_a_config() -> None:
    inputs, model = prompts(3, 6, padded=True), model_of()
    config = GRGenerationConfig(exact=True, num_return_sequences=3, **DETAILS)
    plain = model.generate(**inputs, constraint_index=INDEX, generation_config=config)
    again = model.generate(
        **inputs, constraint_index=INDEX, past_key_values=plain.past_key_values, generation_config=config
    )
    assert again.sequences.tolist() == plain.sequences.tolist()
    gone = [items for items, *_ in plain.item_ids[::3]]
    others = model.generate(
        **inputs, constraint_index=INDEX, exclude_items=[[item] for item in gone], generation_config=config
    )
    assert [row for n, row in enumerate(others.item_ids) if n % 3 < 2] == [
        row for n, row in enumerate(plain.item_ids) if n % 3
    ]


@pytest.mark.parametrize("how", [{"exact": True}, {"exact": True, "drafting": "trie"}, {"num_beams": 400}])
def test_logits_that_are_no_numbers_prove_nothing_and_hide_no_other_item(
    how: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**prompts(1, 6), "constraint_index": INDEX, **TEN}
    ranked = model_of().generate(**given | {"num_beams": 400, "num_return_sequences": len(ROWS)}).sequences[:, 6:]
    model, bad = enable(build("qwen3")), int(ranked[0, 0])
    assert model.generate(**given, **how).num_proven.tolist() == [10]

    def spoil(module: Any, given: Any, kwargs: Any, out: Any) -> None:
        tokens = kwargs["input_ids"]
        is_bad = (tokens == bad) | (bad < 0)
        out.logits[is_bad[:, -out.logits.shape[1] :]] = torch.nan

    model.register_forward_hook(spoil, with_kwargs=True)
    out = model.generate(**given, **how)
    assert out.sequences[:, 6:].tolist() == [row for row in ranked.tolist() if bad not in row[:-1]][:10]
    assert out.num_proven.tolist() == [0]
    monkeypatch.setattr("hf_gr.generation.messages._SAID", set())
    bad = -1
    assert not any(model.generate(**given, **how).item_ids)
    assert "are the logits NaN?" in caplog.text
