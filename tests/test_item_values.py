# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`item_bias` and `max_per_group` against brute force over all items, in both backends."""

import asyncio
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import DETAILS, EOS, build, prompts
from flax_pairs import pair

from hf_gr import ConstraintIndex, enable, recommend
from hf_gr.serving.engine import Engine

ROWS = np.unique(np.random.default_rng(0).integers(3, 24, size=(300, 4)), axis=0)
ROWS[1] = ROWS[0]  # two items of one sequence
IDS = [f"item{number}" for number in range(len(ROWS))]
INDEX = ConstraintIndex.from_sequences(ROWS, item_ids=IDS)
RAGGED = ConstraintIndex.from_sequences(
    [row[: 1 + n % 4].tolist() for n, row in enumerate(ROWS)], item_ids=IDS, eos_token_id=EOS
)
BIAS = dict(zip(IDS, np.random.default_rng(1).normal(scale=2.0, size=len(IDS)), strict=True))
GROUPS = {item: number % 7 for number, item in enumerate(IDS) if number % 5} | {IDS[5]: None, IDS[10]: float("nan")}
INPUTS = prompts(3, 9, padded=True)
EXCLUDED = [[IDS[0], IDS[9]], [], IDS[:50]]


@cache
def models(backend: str) -> Any:
    if backend == "torch":
        return enable(build("qwen3", config={"num_hidden_layers": 1}))
    return pair("qwen3")[1]


def generate(backend: str = "torch", **kwargs: Any) -> Any:
    inputs = INPUTS if backend == "torch" else {name: one.numpy() for name, one in INPUTS.items()}
    return models(backend).generate(**inputs, **DETAILS, **kwargs)


@cache
def every(index: ConstraintIndex, penalty: float) -> list[list[tuple[float, tuple[int, ...], list[Any]]]]:
    """For each prompt all items by their plain scores: score, tokens, items of the sequence."""
    how = {"num_beams": 400, "num_return_sequences": 300, "length_penalty": penalty}
    out = generate(constraint_index=index, exclude_items=EXCLUDED, **how)
    scores, sequences = out.sequences_scores.tolist(), out.sequences[:, 9:]
    rows = list(zip(scores, map(tuple, sequences.tolist()), index.items(sequences), strict=True))
    return [[row for row in rows[first : first + 300] if row[0] > -np.inf] for first in (0, 300, 600)]


def best_lists(
    index: ConstraintIndex, penalty: float, *, bias: Any = None, groups: Any = None, most: int = 1000
) -> list[list[tuple[float, tuple[int, ...]]]]:
    """The best ten, by hand."""
    lists = []
    for rows in every(index, penalty):
        scored = [
            (score + (max(bias.get(item, 0.0) for item in items) if bias else 0.0), tokens, items)
            for score, tokens, items in rows
        ]
        chosen, counts = [], Counter[Any]()
        for score, tokens, items in sorted(scored, key=lambda one: -one[0]):
            group = tokens[0] if groups is None else groups.get(items[0])
            is_alone = group is None or group != group
            if is_alone or counts[group] < most:
                counts[group] += not is_alone
                chosen.append((score, tokens))
        lists.append(chosen[:10])
    return lists


CASES: list[tuple[Any, dict[str, Any]]] = [
    (INDEX, {"item_bias": BIAS}),
    (INDEX, {"max_per_group": 2}),
    (INDEX, {"item_bias": BIAS, "max_per_group": 1, "item_groups": GROUPS}),
    (RAGGED, {"item_bias": BIAS, "length_penalty": 2.0}),
    (RAGGED, {"item_bias": BIAS, "length_penalty": -1.0}),
    (RAGGED, {"item_bias": BIAS, "max_per_group": 3, "length_penalty": 0.5}),
    (RAGGED, {"max_per_group": 1, "item_groups": GROUPS}),
]


EXACT = {"exact": True, "num_beams": 16, "max_nodes": 900}
SEARCHES = [EXACT, {**EXACT, "drafting": "trie"}, {"num_beams": 290}]


@pytest.mark.parametrize(
    ("backend", "index", "kwargs", "search"),
    [
        pytest.param(backend, *case, search, marks=[] if is_quick else [pytest.mark.slow])
        for case, search in product(CASES, SEARCHES)
        for backend in ("torch", "flax")
        for is_quick in [backend == "torch" or (case, search) == (CASES[5], EXACT)]  # a program takes seconds
    ],
)
def test_lists_are_the_best_of_all_items(backend: str, index: Any, kwargs: Any, search: Any) -> None:
    """Those of beams as far as they are proven."""
    penalty = kwargs.get("length_penalty", 1.0)
    how = {"bias": kwargs.get("item_bias"), "groups": kwargs.get("item_groups")}
    best = best_lists(index, penalty, **how, most=kwargs.get("max_per_group", 1000))
    how = {"num_return_sequences": 10, "exclude_items": EXCLUDED, **search, **kwargs}
    out = generate(backend, constraint_index=index, **how)
    assert len(out.sequences) == 30
    proven = [10] * 3 if out.num_proven is None else np.asarray(out.num_proven).tolist()
    if out.num_proven is None:
        assert penalty < 0
        assert "exact" not in search
    elif "exact" in search:
        assert proven == [10] * 3
    else:
        assert max(proven) > 0
    scores, sequences = np.asarray(out.sequences_scores).reshape(3, 10), np.asarray(out.sequences)[:, 9:]
    for row, number in enumerate(proven if penalty >= 0 or "exact" in search else [0] * 3):
        np.testing.assert_allclose(scores[row, :number], [one[0] for one in best[row][:number]], atol=2e-4)
        for place in range(number):
            tokens = best[row][place][1]
            found = tuple(sequences[10 * row + place].tolist())
            assert found[: len(tokens)] == tokens[: len(found)]


@pytest.mark.parametrize(
    ("backend", "search"), [("torch", EXACT), ("torch", {"num_beams": 20}), ("flax", {"num_beams": 20})]
)
def test_a_short_list_has_missing_rows_and_proves_only_its_items(backend: str, search: Any) -> None:
    how = {"constraint_index": INDEX, "max_per_group": 1, "item_groups": dict.fromkeys(IDS, "all"), "item_bias": BIAS}
    out = generate(backend, num_return_sequences=10, **how, **search)
    assert [bool(items) for items in out.item_ids] == ([True] + [False] * 9) * 3
    assert (np.asarray(out.sequences_scores).reshape(3, 10)[:, 1:] == -np.inf).all()
    assert (np.asarray(out.num_proven) <= 1).all()


@pytest.mark.parametrize("backend", ["torch", "flax"])
def test_samples_are_drawn_in_proportion_to_biased_scores(backend: str) -> None:
    few = ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]], item_ids=["ham", "jam", "yam"])
    bias, counts = {"ham": 1.0, "yam": -0.5}, Counter[str]()
    prompt = np.repeat(INPUTS["input_ids"][-1:].numpy(), 64, axis=0)
    inputs: Any = torch.from_numpy(prompt) if backend == "torch" else prompt
    how = {"exact": True, "do_sample": True, "item_bias": bias, "constraint_index": few, **DETAILS}
    for seed in range(8):
        out = models(backend).generate(inputs, seed=seed, **how)
        counts.update(items[0] for items in out.item_ids)
    plain = models(backend).generate(inputs[:1], constraint_index=few, num_beams=3, num_return_sequences=3, **DETAILS)
    scores = dict(zip([items[0] for items in plain.item_ids], np.asarray(plain.sequences_scores) * 2, strict=True))
    weights = {item: np.exp(score + bias.get(item, 0.0)) for item, score in scores.items()}
    expected = {item: 512 * weight / sum(weights.values()) for item, weight in weights.items()}
    assert sum((counts[item] - number) ** 2 / number for item, number in expected.items()) < 13.8  # p = 0.001


def test_values_are_also_given_in_the_order_of_items_and_in_tables(tmp_path: Path) -> None:
    view = INDEX.where(IDS[::2])
    how: dict[str, Any] = {"constraint_index": view, "num_beams": 20, "num_return_sequences": 10}
    by_id = generate(item_bias=BIAS, max_per_group=2, item_groups=GROUPS, **how)
    bias, groups = ([of.get(item) for item in IDS[::2]] for of in (BIAS, GROUPS))
    in_order = generate(item_bias=np.array(bias), max_per_group=2, item_groups=groups, **how)
    (tmp_path / "bias.csv").write_text(
        "\n".join(["item_id,bias", *(f"{item},{value}" for item, value in BIAS.items())])
    )
    lines = [f"{item},{'' if group is None else group}" for item, group in GROUPS.items()]
    (tmp_path / "groups.csv").write_text("\n".join(["item_id,group", *lines]))
    paths = {"item_bias": tmp_path / "bias.csv", "item_groups": str(tmp_path / "groups.csv")}
    in_tables = generate(max_per_group=2, **paths, **how)
    assert in_order.sequences.tolist() == by_id.sequences.tolist() == in_tables.sequences.tolist()
    users = {"history": [IDS[20:24]] * 3}
    options: dict[str, Any] = {"top_k": 5, "num_beams": 20, "max_per_group": 1, "item_groups": paths["item_groups"]}
    made = [models("torch"), users, tmp_path / "lists.parquet"]
    recommend(*made, constraint_index=INDEX, history="history", **options)
    (tmp_path / "groups.csv").write_text(f"item_id,group\n{IDS[0]},a")
    with pytest.raises(ValueError, match="overwrite=True"):  # it is another run
        recommend(*made, constraint_index=INDEX, history="history", **options)
    (tmp_path / "groups.csv").write_text(f"item_id,group\n{IDS[0]},a\n{IDS[0]},b")
    with pytest.raises(
        ValueError, match=r"row 1 is 'item0', expected a text, as the catalogue's ids are, and each once"
    ):
        generate(max_per_group=2, **paths, **how)
    with pytest.raises(ValueError, match=r"bias.csv, column 'item_id', row 0 is 'item0', expected an integer"):
        generate(max_per_group=2, **paths, **how | {"constraint_index": ConstraintIndex.from_sequences([[5, 7]])})


def test_recommend_takes_them_and_so_does_the_engine_for_each_request() -> None:
    model, histories = models("torch"), [IDS[20:24], IDS[40:41], IDS[7:9]]
    how: dict[str, Any] = {"num_beams": 40, "item_bias": BIAS, "item_groups": GROUPS}
    lists = [
        recommend(model, histories, constraint_index=INDEX, top_k=5, **how, **of_call)
        for of_call in ({}, {"max_per_group": 1})
    ]
    assert lists[0] != lists[1]
    for row in lists[1]:
        assert max(Counter(GROUPS.get(item, item) for item in row).values()) == 1

    async def ask() -> list[list[Any]]:
        async with Engine(model, INDEX, num_results=5, **how) as engine:
            asked = [(history, most) for most in (None, 1) for history in histories]
            made = await asyncio.gather(*(engine.recommend(history=row, max_per_group=most) for row, most in asked))
            return [one.items for one in made]

    assert asyncio.run(ask()) == [*lists[0], *lists[1]]
    cold = {"fallback": IDS, "max_per_group": 1, "top_k": 9, "constraint_index": INDEX}
    (row,) = recommend(model, [[]], **cold, **how)
    assert len(row) == 9
    assert max(Counter(GROUPS.get(item, item) for item in row).values()) == 1
    (row,) = recommend(model, [[]], num_beams=20, **cold)
    assert max(Counter(INDEX.encode([item])[0] for item in row).values()) == 1
