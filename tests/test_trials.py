# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which of several ways stays after a few timed calls, on machines whose times are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hf_gr.generation import trials
from hf_gr.generation.trials import FEWEST_ROUNDS, MOST_ROUNDS, TIE, Trials, middle

ALLOWED = 0.02  # how much slower than the fastest the chosen way may be


def serve(way: Trials, seconds: Callable[[str, int], float], *, calls: int = 500) -> list[str]:
    """The ways of so many calls, up to the decision; each takes the seconds of its name and its number."""
    served = []
    for number in range(calls):
        if way.chosen is not None:
            break
        trial = way.begin()
        served.append(trial.name)
        if trial.round is not None:
            way.end(trial, seconds(trial.name, number))
    return served


def noisy(seconds: dict[str, float], *, seed: int, spread: float) -> Callable[[str, int], float]:
    """A machine that is never faster than `seconds`, is disturbed now and then, and slows down as it gets hot."""
    rng = random.Random(seed)

    def taken(name: str, number: int) -> float:
        disturbed = 1.0 + 2.0 * rng.random() if rng.random() < 0.05 else 1.0
        return seconds[name] * rng.lognormvariate(0.0, spread) * disturbed * (1.0 + number / 200)

    return taken


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({"none": 1.0, "trie": 1.3, "head": 2.0, "assistant": 3.0}, "none"),
        ({"none": 1.0, "trie": 0.8, "head": 0.9, "assistant": 3.0}, "trie"),
        ({"none": 1.0, "trie": 0.8, "head": 0.7, "assistant": 0.75}, "head"),
        ({"none": 1.0, "trie": 0.8, "head": 0.7, "assistant": 0.3}, "assistant"),
    ],
)
def test_the_fastest_stays(seconds: dict[str, float], fastest: str) -> None:
    for seed in range(50):
        way = Trials(tuple(seconds))
        serve(way, noisy(seconds, seed=seed, spread=0.02))
        assert way.chosen == fastest


def test_close_ways_take_more_calls_and_few_mistakes() -> None:
    losses, calls = [], []
    for seed in range(150):
        seconds = {"none": 1.0, "trie": 0.97, "assistant": 1.2}
        way = Trials(tuple(seconds))
        calls.append(len(serve(way, noisy(seconds, seed=seed, spread=0.03))))
        losses.append(seconds[str(way.chosen)] / 0.97 - 1.0)
    assert sum(loss > ALLOWED for loss in losses) <= 7  # one in twenty, on a machine three times as noisy as the gap
    assert sum(calls) / len(calls) > 4 * FEWEST_ROUNDS


def test_equally_fast_ways_mean_the_simplest() -> None:
    way = Trials(("none", "trie", "head"))
    serve(way, lambda name, number: {"none": 1.0 + TIE / 2, "trie": 1.0, "head": 1.0}[name])
    assert way.chosen == "none"


def test_warm_ups_are_not_timed_and_every_way_takes_its_turn() -> None:
    way = Trials(("none", "trie", "head"))
    begun = [way.begin() for _ in range(3)]
    assert {trial.round for trial in begun} == {None}
    assert not any(way.end(trial, 100.0) for trial in begun)
    order = serve(way, lambda name, number: 1.0, calls=6)
    assert sorted(order[:3]) == sorted(order[3:]) == ["head", "none", "trie"]
    assert order[:3] != order[3:]


def test_slow_ways_drop_out_first() -> None:
    way = Trials(("none", "trie", "head"))
    served = serve(way, lambda name, number: {"none": 1.0, "trie": 0.95, "head": 2.0}[name])
    assert served.count("head") == 1 + FEWEST_ROUNDS
    assert served.count("none") > served.count("head")
    assert way.chosen == "trie"


def test_one_disturbed_call_decides_nothing() -> None:
    for disturbed in range(3, 3 + 2 * FEWEST_ROUNDS):
        way = Trials(("none", "trie"))
        serve(way, lambda name, number, at=disturbed: (50.0 if number == at else 1.0) * (0.9 if name == "trie" else 1))
        assert way.chosen == "trie"


def test_nothing_is_timed_after_the_decision() -> None:
    way = Trials(("none", "trie"))
    late = [way.begin(), way.begin(), way.begin()][-1]
    serve(way, lambda name, number: 1.0 if name == "none" else 2.0)
    assert way.chosen == "none"
    assert [way.begin() for _ in range(5)] == [trials.Trial("none")] * 5
    assert not way.end(late, 0.0)
    assert way.chosen == "none"


def test_one_way_needs_no_trial() -> None:
    assert Trials(("assistant",)).begin() == trials.Trial("assistant")


def test_a_way_that_fails_is_not_chosen() -> None:
    way = Trials(("none", "trie", "head"))
    calls = 0
    while way.chosen is None and calls < 200:
        trial, calls = way.begin(), calls + 1
        if trial.name != "trie" and trial.round is not None:
            way.end(trial, 1.0 if trial.name == "none" else 0.5)
    assert way.chosen == "head"
    both = Trials(("none", "trie"))
    for _ in range(200):
        both.begin()
    assert both.chosen == "none"


def test_threads_share_the_trials() -> None:
    for failing in (None, "trie"):
        way = Trials(("none", "trie", "assistant"))

        def call(number: int, way: Any = way, failing: Any = failing) -> str:
            trial = way.begin()
            if trial.name != failing and trial.round is not None:
                way.end(trial, {"none": 1.0, "trie": 0.7, "assistant": 0.9}[trial.name])
            return trial.name

        with ThreadPoolExecutor(8) as pool:
            served = list(pool.map(call, range(400)))
        assert way.chosen == ("assistant" if failing else "trie")
        assert served[-1] == way.chosen
        assert len(way._rounds) <= MOST_ROUNDS + 1


def test_the_middle_ignores_what_is_rare() -> None:
    assert middle([1.0, 9.0, 2.0]) == 2.0
    assert middle([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 800.0]) == 4.5
    assert middle([3.0, 1.0]) == 2.0


@pytest.mark.parametrize(
    ("name", "value", "test"),
    [
        ("FEWEST_ROUNDS", 1, test_one_disturbed_call_decides_nothing),
        ("SPREAD", 0.0, test_close_ways_take_more_calls_and_few_mistakes),
        ("TIE", 0.5, test_close_ways_take_more_calls_and_few_mistakes),
        ("TIE", 0.0, test_equally_fast_ways_mean_the_simplest),
        ("middle", lambda values: max(values, default=0.0), test_one_disturbed_call_decides_nothing),
    ],
)
def test_planted_errors_are_seen(name: str, value: Any, test: Callable[[], None], monkeypatch: Any) -> None:
    monkeypatch.setattr(trials, name, value)
    with pytest.raises(AssertionError):
        test()
