# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"`: the policy against every budget, and calls of which only the first times forwards."""

import copy
import itertools
import random
import tempfile
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import PAD, build, prompts
from test_drafting import DETAILS, assert_same, index_of

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, enable
from hf_gr.core import auto
from hf_gr.core.auto import LEAST_GAIN, ROOM, WIDER_BY, Costs, Search, choose_draft, costs_of
from hf_gr.flax.decode import decode_program
from hf_gr.generation import drafts
from hf_gr.generation.torch import drafts as of_torch

REL_TOL = 1e-9  # sums of a few doubles


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any model."""
    monkeypatch.setattr(auto, "_KNOWN", type(auto._KNOWN)())


def slow_seconds(widths: Sequence[int], num_beams: int, costs: Costs, budget: int, *, below_prompt: bool) -> float:
    """What follows the prompt's forward, forward by forward."""
    last, level, total = len(widths) - 1, 0, 0.0
    while level < last:
        nodes = num_beams if level else 0
        drafted, depth = 0, level + 1
        while depth < last and (level or below_prompt):
            average = min(num_beams, widths[level]) * (1 + ROOM * (widths[depth] / widths[level] - 1))
            here = -int(-min(average, widths[depth]) // 1)
            if here > num_beams and drafted + here > budget:
                break
            drafted, depth = drafted + here, depth + 1
        total += costs.token * (nodes + drafted) + (costs.forward if level else 0.0)
        level = depth
    return total


@pytest.mark.parametrize("seed", range(60))
def test_the_budget_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    widths = [1]
    for _ in range(rng.randint(2, 6)):
        widths.append(int(widths[-1] * rng.choice((1, 1, 1.1, 2, 5, 60))) + 1)
    num_beams, budget = rng.choice((1, 5, 20, 200)), rng.choice((1, 50, 512))
    costs = Costs(rng.choice((0.0, 1e-3, 1e-2)), rng.choice((0.0, 1e-6, 1e-5, 1e-3)))
    below = rng.random() < 0.7
    name, size = choose_draft(tuple(widths), num_beams, costs, budget=budget, below_prompt=below)
    plain = (len(widths) - 2) * (costs.forward + costs.token * num_beams)
    found = slow_seconds(widths, num_beams, costs, size, below_prompt=below)
    best = min(slow_seconds(widths, num_beams, costs, one, below_prompt=below) for one in range(1, budget + 1))
    assert 1 <= size <= budget
    assert found == pytest.approx(best, rel=REL_TOL, abs=1e-15)
    if abs(best - (1 - LEAST_GAIN) * plain) > REL_TOL * plain:
        assert name == ("trie" if best < (1 - LEAST_GAIN) * plain else "none")


def test_a_search_serves_where_the_catalogue_cannot() -> None:
    wide, costs = (1, 10**4, 10**6, 10**8, 10**10), Costs(1e-2, 1e-6)
    head, model = Search("head", 0.02, 40, 5, 1), Search("assistant", 0.1, 40, 5, 0)
    half, dear = Search("assistant", 0.9, 40, 5, 0), Costs(1e-4, 1e-3)
    for searches, expected in (((), "none"), ((head,), "head"), ((model,), "assistant"), ((half,), "none")):
        assert choose_draft(wide, 20, costs, budget=512, searches=searches)[0] == expected
    assert choose_draft(wide, 20, dear, budget=512, searches=(head, model))[0] == "none"
    assert choose_draft((1, 20, 20, 20, 20), 20, costs, budget=512, searches=(head, model))[0] == "trie"


@pytest.mark.parametrize(("slower", "token"), [(1e-5, 1e-5), (-1e-9, 0.0)])
def test_costs_are_read_off_two_sizes_once(slower: float, token: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 ms a forward and some for every node, the first of a size half a second more, by a clock of its own."""
    now, sizes = 0.0, []
    monkeypatch.setattr(auto, "time", SimpleNamespace(perf_counter=lambda: now))

    def new_forward(num_nodes: int) -> Any:
        def forward() -> None:
            nonlocal now
            now += 2e-3 + slower * num_nodes + 0.5 * (num_nodes not in sizes)
            sizes.append(num_nodes)

        nonlocal now
        now += 7.0  # what is prepared does not count
        return forward

    model = torch.nn.Identity()
    for _ in range(2):
        costs = costs_of(model, ("a kind",), new_forward, 20, 512)
        assert (costs.forward, costs.token) == (pytest.approx(2e-3, rel=1e-4), pytest.approx(token))
        assert set(sizes) == {20, 20 + WIDER_BY}
        assert len(sizes) == 8
    costs_of(model, ("another",), new_forward, 20, 50)
    assert set(sizes) == {20, 20 + WIDER_BY, 70}


@cache
def full() -> ConstraintIndex:
    """All sequences: no level is forced, and the levels have 3, 9, 27, 81 and 243 nodes."""
    return ConstraintIndex.from_sequences(list(itertools.product((3, 4, 5), repeat=5)))


@cache
def with_head() -> Any:
    model = enable(build("qwen3", seed=1, config={"hidden_size": 16, "num_hidden_layers": 1}))
    model.add_draft_head(full())
    return model.eval()


@cache
def model_of(backend: str = "torch") -> Any:
    """The same without the head, with the rows of the placeholders that it brought: also a draft model."""
    model = copy.deepcopy(with_head())
    del model.draft_head
    if backend == "torch":
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="flax")


def ask(num_rows: int = 1, length: int = 8, *, backend: str = "torch", **options: Any) -> Any:
    given = {"constraint_index": full(), "num_beams": 3, "num_return_sequences": 3, "pad_token_id": PAD}
    model, inputs = with_head() if backend == "torch" else model_of("flax"), prompts(num_rows, length)
    inputs = inputs if backend == "torch" else {name: tensor.numpy() for name, tensor in inputs.items()}
    return model.generate(**inputs, **(given | DETAILS | options))


def known(monkeypatch: pytest.MonkeyPatch, forward: float, token: float) -> list[Any]:
    """As if forwards had been timed; the kinds of calls that asked."""
    kinds: list[Any] = []

    def costs(model: Any, kind: Any, *rest: Any) -> Costs:
        kinds.append(kind)
        return Costs(forward, token)

    monkeypatch.setattr(auto, "costs_of", costs)
    return kinds


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("name", ["none", "trie", "head", "assistant"])
def test_answers_are_the_same_whatever_serves(name: str, samples: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"do_sample": True, "top_k": 0, "seed": 5} if samples else {}
    plain = ask(num_rows=2, **options)
    monkeypatch.setattr(auto, "choose_draft", lambda *args, **kwargs: (name, 40))
    known(monkeypatch, 1.0, 1.0)
    out = ask(num_rows=2, drafting="auto", assistant_model=model_of(), **options)
    assert_same(out, plain)
    assert (out.speculation.chosen, plain.speculation.chosen) == (name, None)
    assert (out.speculation.drafted_nodes > 0).all() == (name != "none")


@pytest.mark.parametrize(
    ("backend", "token", "expected"), [("torch", 1e-6, "trie"), ("torch", 1e-1, "none"), ("flax", 1e-6, "trie")]
)
def test_what_is_cheap_decides(backend: str, token: float, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, 1e-2, token)
    out, plain = (ask(drafting=drafting, backend=backend) for drafting in ("auto", None))
    assert (out.speculation.chosen, plain.speculation.chosen) == (expected, None)
    assert out.speculation.target_forwards == (0 if expected == "trie" else 4)
    assert out.sequences.tolist() == plain.sequences.tolist()


def test_only_the_first_call_of_a_kind_is_timed() -> None:
    timed: list[int] = []
    forward = with_head().model.register_forward_pre_hook(lambda *args: timed.append(1))
    counts = []
    for kind in ({}, {}, {"length": 9}, {"num_rows": 4}, {"num_rows": 5}, {"num_beams": 12}, {"synced_gpus": True}):
        timed.clear()
        chosen = ask(drafting="auto", **kind).speculation.chosen
        assert chosen == "none" if "synced_gpus" in kind else chosen is not None  # processes must agree
        counts.append(len(timed) > 8)
    forward.remove()
    assert counts == [True, False, False, True, False, True, False]


def test_in_flax_too_and_calls_of_a_bucket_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(backend="flax", drafting="auto").speculation.chosen in ("none", "trie")
    assert len(auto._KNOWN[model_of("flax")]) == 1
    monkeypatch.setattr(auto, "time", None)  # no clock is read again
    programs = decode_program._cache_size()
    assert ask(backend="flax", drafting="auto", length=9).speculation.chosen in ("none", "trie")
    assert decode_program._cache_size() == programs
    with pytest.raises(AttributeError):
        ask(num_rows=5, backend="flax", drafting="auto")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["none", "trie", "head"]),
        ({"constraint_index": index_of("sparse")}, ["none", "trie"]),  # of other lengths than the head's
        ({"verification": "relaxed"}, ["none", "trie"]),
        ({"verification": "relaxed", "assistant_model": True}, ["assistant"]),
        ({"num_draft_beams": 4, "assistant_model": True}, ["none", "trie", "head", "assistant"]),
    ],
)
def test_what_there_is_to_choose_from(
    options: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, seen = drafts.fastest, []
    monkeypatch.setattr(
        of_torch, "fastest", lambda found, *rest, **how: seen.extend(found) or right(found, *rest, **how)
    )
    known(monkeypatch, 1e-2, 1e-6)
    ask(drafting="auto", **options | ({"assistant_model": model_of()} if "assistant_model" in options else {}))
    assert [name or "none" for name in seen] == expected


def test_a_head_of_other_lengths_cannot_serve() -> None:
    with pytest.raises(ValueError, match="the draft head 5, expected the same"):
        ask(drafting="auto", num_draft_beams=4, constraint_index=index_of("sparse"))
