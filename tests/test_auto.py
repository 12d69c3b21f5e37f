# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"` on machines whose costs are known: it finds the fastest draft, and never changes an answer."""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import PAD, build, prompts
from test_drafting import DETAILS, assert_same, index_of, inverted

from hf_gr import ConstraintIndex, enable
from hf_gr.generation import trials
from hf_gr.generation.torch.drafts import auto
from hf_gr.torch import costs

FREE = 1e-9  # seconds
CALLS = 150  # more than any trial takes
NO_SLOWER = 1.02  # than the fastest fixed choice


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any model, and ties are settled sooner."""
    monkeypatch.setattr(auto, "_KNOWN", type(auto._KNOWN)())
    monkeypatch.setattr(trials, "MOST_ROUNDS", 6)


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
def drafts() -> Any:
    """A draft model that is always right."""
    twin = copy.deepcopy(with_head())
    del twin.draft_head
    return twin


class Machine:
    """A clock that only forwards move: each by its seconds and those of its tokens, in all rows.

    Args:
        target: seconds of a forward and of a token.
        draft: of the draft model.
        head: of one level of the draft head.
    """

    def __init__(self, target: tuple[float, float], draft: tuple[float, float], head: tuple[float, float]) -> None:
        self.now, self.handles = 0.0, []
        for module, seconds in ((with_head().model, target), (drafts().model, draft)):
            self._charge(module, seconds)
        for module in with_head().draft_head.logit_heads:
            self._charge(module, head)

    def _charge(self, module: Any, seconds: tuple[float, float]) -> None:
        def move(module: Any, args: Any, kwargs: Any) -> None:
            read = args[0] if args else kwargs["input_ids"]
            self.now += seconds[0] + seconds[1] * read.shape[0] * read.shape[1]

        self.handles.append(module.register_forward_pre_hook(move, with_kwargs=True))

    def time(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """What a call returns, and its seconds."""
        start = self.now
        return call(), self.now - start


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    made = []

    def make(**seconds: tuple[float, float]) -> Machine:
        made.append(Machine(**seconds))
        clock = SimpleNamespace(perf_counter=lambda: made[-1].now)
        monkeypatch.setattr(costs, "time", clock)
        return made[-1]

    yield make
    for one in made:
        for handle in one.handles:
            handle.remove()


def ask(num_rows: int = 1, length: int = 8, **options: Any) -> Any:
    given = {"constraint_index": full(), "num_beams": 3, "num_return_sequences": 3, "pad_token_id": PAD}
    return with_head().generate(**prompts(num_rows, length), **(given | DETAILS | options))


def chosen() -> list[str | None]:
    """By kind of call, in the order in which they came."""
    return [known.trials and known.trials.chosen for known in auto._KNOWN.get(with_head(), {}).values()]


def settle(**options: Any) -> list[Any]:
    """Calls until each kind has a choice; their answers."""
    outs = [ask(drafting="auto", **options)]
    while outs[-1].speculation.chosen is None and len(outs) < CALLS:
        outs.append(ask(drafting="auto", **options))
    return outs


# Everything but the trie drafts 81 nodes a level, all there are: whatever its weights, it is right.
WIDE = {"num_draft_beams": 81, "num_assistant_tokens": 4, "draft_token_budget": 1}
MACHINES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tokens are dear": ({"target": (1e-3, 1e-2), "draft": (FREE, 1e-3), "head": (FREE, FREE)}, {}, "none"),
    "a few nodes cost a forward": (
        {"target": (1e-2, 1e-2), "draft": (FREE, FREE), "head": (FREE, FREE)},
        {"draft_token_budget": 1, "num_beams": 2, "num_return_sequences": 2},
        "none",
    ),
    "forwards are dear, the draft model's too": (
        {"target": (1e-2, 1e-6), "draft": (2e-2, FREE), "head": (1e-2, FREE)},
        {"draft_token_budget": 5000},
        "trie",
    ),
    "forwards are dear": ({"target": (1e-2, FREE), "draft": (1e-4, FREE), "head": (1e-2, FREE)}, WIDE, "assistant"),
    "a head is nearly free": ({"target": (1e-2, FREE), "draft": (5e-3, FREE), "head": (FREE, FREE)}, WIDE, "head"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_auto_is_as_fast_as_the_fastest(name: str, machine: Any) -> None:
    seconds, options, expected = MACHINES[name]
    on = machine(**seconds)
    assistant = {"assistant_model": drafts()}
    of_plain = {name: value for name, value in options.items() if name in ("num_beams", "num_return_sequences")}
    of_trie = {name: value for name, value in options.items() if name == "draft_token_budget"}
    plain, *times = on.time(lambda: ask(**of_plain))
    for fixed in (
        {"drafting": "trie", **of_plain, **of_trie},
        {"drafting": "head", "verification": "strict", **options},
        {"drafting": "assistant", **assistant, **options},
    ):
        times.append(on.time(lambda fixed=fixed: ask(**fixed))[1])
    for out in settle(**assistant, **options):
        assert_same(out, plain)
    assert out.speculation.chosen == expected
    assert chosen() == [expected]
    out, taken = on.time(lambda: ask(drafting="auto", **assistant, **options))
    assert_same(out, plain)
    assert taken <= NO_SLOWER * min(times)


def test_a_draft_that_is_always_wrong_is_not_kept(machine: Any) -> None:
    on = machine(target=(1e-2, 1e-4), draft=(1e-3, FREE), head=(1.0, FREE))
    wrong = inverted(drafts())
    on._charge(wrong.model, (1e-3, FREE))
    narrow = {"draft_token_budget": 1, "num_beams": 2, "num_return_sequences": 2, "num_draft_beams": 2}
    settle(assistant_model=wrong, **narrow)
    assert chosen() == ["none"]


def test_a_decision_is_final_and_no_clock_is_read_again(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, options, expected = MACHINES["forwards are dear, the draft model's too"]
    machine(**seconds)
    settle(**options)
    assert chosen() == [expected]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(auto, "Stopwatch", fail)
    monkeypatch.setattr(auto, "measure_costs", fail)
    ask(drafting="auto", **options)
    with pytest.raises(AssertionError, match="measured"):
        ask(length=40, drafting="auto", **options)


def test_every_kind_of_call_has_a_choice_of_its_own(machine: Any) -> None:
    machine(target=(1e-2, 1e-6), draft=(FREE, FREE), head=(FREE, FREE))
    kinds: list[dict[str, Any]] = [
        {},
        {"length": 20},
        {"num_rows": 4},
        {"num_beams": 12},
        {"constraint_index": index_of("dense")},
        {"do_sample": True, "top_k": 0},
        {"draft_token_budget": 7},
        {"assistant_model": drafts()},
        {"assistant_model": copy.deepcopy(drafts())},
    ]
    for number, kind in enumerate(kinds, start=1):
        ask(drafting="auto", **kind)
        ask(drafting="auto", **kind)
        assert len(chosen()) == number
    ask(length=9, drafting="auto")  # 8 to 15 tokens are one kind
    assert len(chosen()) == len(kinds)


@pytest.mark.parametrize("lengths", [(8, 8, 15, 15), (15, 15, 8, 8)])
def test_prompts_of_one_kind_compare_though_their_lengths_differ(lengths: tuple[int, ...], machine: Any) -> None:
    # The trie saves a tenth. In turn, it always gets the longest prompts, or the shortest.
    machine(target=(2e-3, 1e-3), draft=(FREE, FREE), head=(1.0, FREE))
    for number in range(CALLS):
        ask(length=lengths[number % 4], drafting="auto", constraint_index=index_of("sparse"))
        if chosen() != [None]:
            break
    assert chosen() == ["trie"]


@pytest.mark.parametrize("samples", [False, True])
def test_threads_share_a_choice_and_get_equal_answers(samples: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MOST_ROUNDS", 6)
    options: dict[str, Any] = {"do_sample": samples, "top_k": 0} if samples else {}
    draft = drafts()  # the first thread's would be another one than the second's

    def call(number: int) -> Any:
        own: dict[str, Any] = {"generator": torch.Generator().manual_seed(number)} if samples else {}
        return ask(drafting="auto", assistant_model=draft, **options, **own)

    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(call, range(48)))
    for number, out in enumerate(outs):
        own: dict[str, Any] = {"generator": torch.Generator().manual_seed(number)} if samples else {}
        if samples or number % 8 == 0:
            assert_same(out, ask(**options, **own))
    assert None not in chosen()
    assert len(chosen()) == 1


def test_threads_that_come_first_together_begin_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    with_head()  # one model for all threads
    made = []

    def slow(names: Any) -> trials.Trials:
        time.sleep(0.1)
        made.append(trials.Trials(names))
        return made[-1]

    monkeypatch.setattr(auto, "Trials", slow)
    monkeypatch.setattr(auto, "measure_costs", lambda *args, **kwargs: costs.ForwardCosts(forward=1.0, token=1e-3))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: ask(drafting="auto"), range(4)))
    assert len(made) == 1


def test_a_decision_is_logged(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    seconds, options, _ = MACHINES["forwards are dear, the draft model's too"]
    machine(**seconds)
    with caplog.at_level(logging.INFO, logger="hf_gr.generation"):
        settle(**options)
        ask(drafting="auto", **options)
    found = [record.message for record in caplog.records if "chose" in record.message]
    assert found == ["drafting='auto' chose 'trie' among ['none', 'trie', 'head']"]


def candidates(**options: Any) -> list[str]:
    """What a second call may choose from."""
    ask(drafting="auto", **options)
    (known,) = auto._KNOWN[with_head()].values()
    return list(known.trials.left) if known.trials else []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["none", "trie", "head"]),
        ({"constraint_index": index_of("sparse")}, ["none", "trie"]),  # of other lengths than the head's
        ({"num_draft_beams": 4}, ["none", "trie", "head"]),
        ({"synced_gpus": True}, []),
        ({"verification": "relaxed"}, ["none", "trie"]),
        ({"verification": "relaxed", "assistant_model": True}, ["assistant"]),
        ({"assistant_model": True}, ["none", "trie", "head", "assistant"]),
    ],
)
def test_what_there_is_to_choose_from(options: dict[str, Any], expected: list[str], machine: Any) -> None:
    machine(target=(1e-2, 1e-6), draft=(FREE, FREE), head=(FREE, FREE))
    given = options | ({"assistant_model": drafts()} if "assistant_model" in options else {})
    assert candidates(**given) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verification": "catalogue"}, "verification='catalogue' with drafting='auto', expected drafting='head'"),
        ({"num_draft_beams": 2}, "num_draft_beams=2, expected at least num_beams=3"),
        ({"num_draft_beams": 4, "constraint_index": index_of("sparse")}, "the draft head 5, expected the same"),
        ({"assistant_model": build("gpt2", config={"vocab_size": 7})}, "assistant_model has a vocabulary of 7 tokens"),
    ],
)
def test_what_is_given_for_a_draft_that_cannot_serve_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(drafting="auto", **options)


def test_without_a_head_draft_beams_need_a_draft_model() -> None:
    with pytest.raises(ValueError, match="num_draft_beams=4 without a draft model"):
        enable(drafts()).generate(
            **prompts(1, 8), constraint_index=full(), num_beams=3, drafting="auto", num_draft_beams=4
        )
