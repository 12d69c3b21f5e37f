# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"`: the policy against every budget, and calls of which only the first times forwards."""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
from hf_gr.generation import drafts
from hf_gr.generation.torch import drafts as of_torch

BEAUTY = (1, 91, 6539, 11172, 12023)  # nodes of the Beauty catalogue by level
REL_TOL = 1e-9  # sums of a few doubles


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any model."""
    monkeypatch.setattr(auto, "_KNOWN", type(auto._KNOWN)())


# The policy


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


def check_choice(seed: int) -> str:
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
    return name


def test_the_budget_is_the_best_of_all() -> None:
    assert {check_choice(seed) for seed in range(200)} == {"none", "trie"}


@pytest.mark.parametrize(
    "spoil",
    [lambda name, size: (name, 1), lambda name, size: ("none", size), lambda name, size: ("trie", size)],
    ids=["no budget", "nothing", "always"],
)
def test_a_worse_choice_is_seen(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = choose_draft
    monkeypatch.setitem(globals(), "choose_draft", lambda *args, **kwargs: spoil(*right(*args, **kwargs)))
    with pytest.raises(AssertionError):
        test_the_budget_is_the_best_of_all()


@pytest.mark.parametrize(
    ("forward", "token", "expected"),
    [
        (8e-3, 2e-4, ("trie", 49)),  # the last two levels in one forward: 2 instead of 3
        (8e-3, 1e-4, ("trie", 91)),  # 91 nodes in the prompt's forward cost less than 20 in one more: 1
        (8e-3, 1e-3, ("none", 1)),  # a node as dear as an eighth of a forward
        (0.0, 1e-4, ("none", 1)),
    ],
)
def test_budgets_for_beauty(forward: float, token: float, expected: tuple[str, int]) -> None:
    assert choose_draft(BEAUTY, 20, Costs(forward, token), budget=512) == expected


def test_forced_levels_are_free_and_one_level_leaves_nothing_to_choose() -> None:
    # One way on from every node of the second level: all levels below ride along, whatever the budget.
    assert choose_draft((1, 100, 5000, 5000, 5000, 5000), 20, Costs(1e-2, 1e-5), budget=1) == ("trie", 1)
    assert choose_draft((1, 5), 4, Costs(1e-2, 1e-5), budget=100)[0] == "none"


def test_a_search_serves_where_the_catalogue_cannot() -> None:
    wide, costs = (1, 10**4, 10**6, 10**8, 10**10), Costs(1e-2, 1e-6)
    head, model = Search("head", 0.02, 40, 5, 1), Search("assistant", 0.1, 40, 5, 0)
    half, dear = Search("assistant", 0.9, 40, 5, 0), Costs(1e-4, 1e-3)
    for searches, expected in (((), "none"), ((head,), "head"), ((model,), "assistant"), ((half,), "none")):
        assert choose_draft(wide, 20, costs, budget=512, searches=searches)[0] == expected
    assert choose_draft(wide, 20, dear, budget=512, searches=(head, model))[0] == "none"
    assert choose_draft((1, 20, 20, 20, 20), 20, costs, budget=512, searches=(head, model))[0] == "trie"


class Clock:
    """A clock that only forwards move: 2 ms each and 10 us a node, the first of a size half a second more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.sizes = 0.0, []
        monkeypatch.setattr(auto, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def new_forward(self, num_nodes: int) -> Any:
        self.now += 7.0  # what is prepared does not count

        def forward() -> None:
            self.now += 2e-3 + 1e-5 * num_nodes + 0.5 * (num_nodes not in self.sizes)
            self.sizes.append(num_nodes)

        return forward


def test_costs_are_read_off_two_sizes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(monkeypatch), torch.nn.Identity()
    for _ in range(2):
        costs = costs_of(model, ("a kind",), clock.new_forward, 20, 512)
        assert (costs.forward, costs.token) == (pytest.approx(2e-3), pytest.approx(1e-5))
        assert set(clock.sizes) == {20, 20 + WIDER_BY}
        assert len(clock.sizes) == 8
    costs_of(model, ("another",), clock.new_forward, 20, 50)
    assert set(clock.sizes) == {20, 20 + WIDER_BY, 70}


def test_a_wider_forward_that_seems_cheaper_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(0.0, -1e-3)
    monkeypatch.setattr(auto, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    costs = costs_of(torch.nn.Identity(), (), lambda size: lambda: None, 4, 100)
    assert costs.token == 0.0
    assert costs.forward >= 0.0


# Calls


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
def small() -> Any:
    """A draft model."""
    twin = copy.deepcopy(with_head())
    del twin.draft_head
    return twin


@cache
def in_flax() -> Any:
    """The same without the head."""
    pytest.importorskip("flax")
    with tempfile.TemporaryDirectory() as folder:
        small().save_pretrained(folder)
        return AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="flax")


def ask(num_rows: int = 1, length: int = 8, *, backend: str = "torch", **options: Any) -> Any:
    given = {"constraint_index": full(), "num_beams": 3, "num_return_sequences": 3, "pad_token_id": PAD}
    model, inputs = with_head() if backend == "torch" else in_flax(), prompts(num_rows, length)
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
    out = ask(num_rows=2, drafting="auto", assistant_model=small(), **options)
    assert_same(out, plain)
    assert (out.speculation.chosen, plain.speculation.chosen) == (name, None)
    assert (out.speculation.drafted_nodes > 0).all() == (name != "none")


@pytest.mark.parametrize("backend", ["torch", "flax"])
@pytest.mark.parametrize(("token", "expected"), [(1e-6, "trie"), (1e-1, "none")])
def test_what_is_cheap_decides(backend: str, token: float, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, 1e-2, token)
    out, plain = (ask(drafting=drafting, backend=backend) for drafting in ("auto", None))
    assert (out.speculation.chosen, plain.speculation.chosen) == (expected, None)
    assert out.speculation.target_forwards == (0 if expected == "trie" else 4)
    assert out.sequences.tolist() == plain.sequences.tolist()


def test_only_the_first_call_of_a_kind_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    forward = with_head().model.register_forward_pre_hook(lambda *args: timed.append(1))
    try:
        counts = []
        for kind in ({}, {}, {"length": 9}, {"num_rows": 4}, {"num_rows": 5}, {"num_beams": 12}, {"num_beams": 12}):
            timed.clear()
            assert ask(drafting="auto", **kind).speculation.chosen is not None
            counts.append(len(timed) > 8)
    finally:
        forward.remove()
    assert counts == [True, False, False, True, False, True, False]


def test_in_flax_too_and_calls_of_a_bucket_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flax")
    from hf_gr.flax.decode import decode_program

    for number, kind in enumerate(({}, {"num_rows": 2}, {"num_beams": 4}), start=1):
        assert ask(backend="flax", drafting="auto", **kind).speculation.chosen in ("none", "trie")
        assert len(auto._KNOWN[in_flax()]) == number
    monkeypatch.setattr(auto, "time", None)  # no clock is read again
    programs = decode_program._cache_size()
    for kind in ({"length": 9}, {"length": 30, "num_rows": 2}):
        assert ask(backend="flax", drafting="auto", **kind).speculation.chosen in ("none", "trie")
    assert decode_program._cache_size() == programs
    with pytest.raises(AttributeError):
        ask(num_rows=5, backend="flax", drafting="auto")


@pytest.mark.parametrize("backend", ["torch", "flax"])
def test_without_a_level_to_draft_there_is_nothing_to_choose(backend: str) -> None:
    options = {"constraint_index": ConstraintIndex.from_sequences([[3], [4], [5]]), "drafting": "auto"}
    assert ask(backend=backend, **options).speculation.chosen == "none"


def test_threads_share_a_choice_and_get_equal_answers() -> None:
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda number: ask(drafting="auto", assistant_model=small()), range(8)))
    plain = ask()
    for out in outs:
        assert_same(out, plain)
    assert len({out.speculation.chosen for out in outs}) == 1
    assert len(auto._KNOWN[with_head()]) == 1


def test_processes_that_must_agree_time_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = known(monkeypatch, 1e-2, 1e-6)
    out = ask(drafting="auto", synced_gpus=True)
    assert out.speculation.chosen == "none"
    assert not kinds


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["none", "trie", "head"]),
        ({"constraint_index": index_of("sparse")}, ["none", "trie"]),  # of other lengths than the head's
        ({"num_draft_beams": 4}, ["none", "trie", "head"]),
        ({"verification": "relaxed"}, ["none", "trie"]),
        ({"verification": "relaxed", "assistant_model": True}, ["assistant"]),
        ({"assistant_model": True}, ["none", "trie", "head", "assistant"]),
    ],
)
def test_what_there_is_to_choose_from(
    options: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, seen = drafts.fastest, []

    def choose(found: Any, *rest: Any, **how: Any) -> Any:
        seen.extend(name or "none" for name in found)
        return right(found, *rest, **how)

    monkeypatch.setattr(of_torch, "fastest", choose)
    known(monkeypatch, 1e-2, 1e-6)
    ask(drafting="auto", **options | ({"assistant_model": small()} if "assistant_model" in options else {}))
    assert seen == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verification": "catalogue"}, "verification='catalogue' with drafting='auto', expected drafting='head'"),
        ({"num_draft_beams": 2}, "num_draft_beams=2, expected at least num_beams=3"),
        ({"num_draft_beams": 4, "constraint_index": index_of("sparse")}, "the draft head 5, expected the same"),
        ({"assistant_model": build("gpt2", config={"vocab_size": 7})}, "assistant_model has a vocabulary of 7 tokens"),
        ({"backend": "flax", "verification": "catalogue"}, "verification='catalogue' with drafting='auto'"),
        ({"backend": "flax", "num_draft_beams": 4}, "num_draft_beams=4 without a draft model"),
    ],
)
def test_what_is_given_for_a_draft_that_cannot_serve_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(drafting="auto", **options)


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_other_families_are_timed_alike(family: str) -> None:
    model, inputs = enable(build(family)), prompts(2, 6)
    options = {"constraint_index": index_of("sparse"), "num_beams": 4, **DETAILS}
    out = model.generate(**inputs, **options, drafting="auto")
    assert out.speculation.chosen in ("none", "trie")
    assert_same(out, model.generate(**inputs, **options))
