# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The queue of an engine, in virtual time: what is computed together, in which order, and what is refused."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import virtual_time
from virtual_time import VirtualWorkers

from hf_gr.answering.batching import num_batch_tokens
from hf_gr.serving.answers import Closed, Overloaded, TooLate
from hf_gr.serving.batcher import Batcher, Computed, Job
from hf_gr.serving.costs import Costs
from hf_gr.serving.observer import Batch, Observer

COSTS = Costs(fixed=0.05, token=0.001)
BUDGET = 250


class Log(Observer):
    """Remembers what it hears of."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.lengths: list[int] = []

    def queued(self, num_waiting: int) -> None:
        self.lengths.append(num_waiting)

    def computed(self, batch: Batch) -> None:
        self.batches.append(batch)


def seconds_of(batch: Sequence[Job]) -> float:
    """What a batch takes, as its costs say."""
    return COSTS.seconds(num_batch_tokens(len(batch), max(job.length for job in batch), batch[0].tokens_ahead))


def echo(batch: Sequence[Job]) -> Computed:
    return Computed([job.request for job in batch])


class Case:
    """A batcher over virtual workers; made inside the loop."""

    def __init__(
        self,
        *,
        workers: int = 1,
        run: Callable[[Sequence[Job]], Computed] = echo,
        seconds: Callable[[Sequence[Job]], float] = seconds_of,
        max_queue: int = 1000,
        max_batch: int = 64,
        costs: Costs = COSTS,
    ) -> None:
        self.pool, self.log, self.loop = VirtualWorkers(seconds), Log(), asyncio.get_running_loop()
        self.batcher = Batcher(
            run,
            self.pool,
            workers=workers,
            costs=costs,
            token_budget=BUDGET,
            max_batch=max_batch,
            max_queue=max_queue,
            observer=self.log,
        )

    def job(self, request: Any, *, length: int = 20, timeout: float = 10.0, kind: Any = 20) -> Job:
        return Job(request, kind, length, 30, self.loop.time() + timeout, self.loop.time())

    def ask(self, request: Any, **how: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.batcher.submit(self.job(request, **how)))

    @property
    def computed(self) -> list[list[Any]]:
        return [[job.request for job in batch] for batch in self.pool.batches]


@virtual_time.in_loop
async def test_a_request_starts_at_once_when_a_worker_is_free() -> None:
    case = Case()
    done = await case.ask("one")
    assert (done.value, done.queued, done.batch_size) == ("one", 0.0, 1)
    assert done.computed == pytest.approx(0.1)
    assert case.log.batches == [Batch(1, 50, 0, pytest.approx(0.1), pytest.approx(0.1))]


@virtual_time.in_loop
async def test_requests_that_wait_are_computed_together_within_the_budget() -> None:
    case = Case()
    first = case.ask(0)
    await asyncio.sleep(0.01)
    others = [case.ask(number) for number in range(1, 8)]
    await asyncio.gather(first, *others)
    assert case.computed == [[0], [1, 2, 3, 4, 5], [6, 7]]  # 5 x (20 + 30) = 250 tokens


@virtual_time.in_loop
async def test_requests_of_one_moment_are_shared_by_the_free_workers() -> None:
    case = Case(workers=2)
    await asyncio.gather(*[case.ask(number) for number in range(4)])
    assert case.computed == [[0, 1], [2, 3]]
    assert case.pool.most_busy == 2


@virtual_time.in_loop
async def test_the_earliest_deadline_leads_and_like_lengths_join() -> None:
    case = Case()
    first = case.ask("first")
    await asyncio.sleep(0.01)
    rows = [("late", 20, 9.0), ("long", 120, 5.0), ("soon", 20, 2.0), ("like", 25, 6.0), ("likest", 20, 8.0)]
    tasks = [case.ask(name, length=length, timeout=timeout) for name, length, timeout in rows]
    await asyncio.gather(first, *tasks)
    # "long" comes second by its deadline; with it, padding would burst the budget: 2 x 150, and 3 x 55 fit.
    assert case.computed[1:] == [["soon", "likest", "late", "like"], ["long"]]


@virtual_time.in_loop
async def test_kinds_are_not_mixed() -> None:
    case = Case()
    first = case.ask("first")
    await asyncio.sleep(0.01)
    await asyncio.gather(first, *[case.ask(number, kind=number % 2) for number in range(4)])
    assert case.computed[1:] == [[0, 2], [1, 3]]


@virtual_time.in_loop
async def test_a_batch_does_not_grow_until_its_leader_is_late() -> None:
    case = Case()
    first = case.ask("first")
    await asyncio.sleep(0.05)
    soon = case.ask("soon", timeout=0.05 + 0.16)  # the first one takes 0.05 s more; 2 in a batch take 0.15
    others = [case.ask(number) for number in range(4)]
    assert (await soon).batch_size == 2
    await asyncio.gather(first, *others)


@virtual_time.in_loop
async def test_requests_of_one_moment_are_not_refused_while_there_is_a_worker_for_each() -> None:
    case = Case(workers=2)
    case.batcher.pace = 20.0  # of a batch that something else held up
    assert [done.value for done in await asyncio.gather(case.ask("a", timeout=0.2), case.ask("b", timeout=0.2))] == [
        "a",
        "b",
    ]


@virtual_time.in_loop
async def test_a_batch_that_was_held_up_does_not_cost_rate_for_ever() -> None:
    """Estimates from it would keep the queue too short for full batches, of which alone they were corrected."""
    draw = random.Random(0)
    case = Case(seconds=lambda batch: 60.0 if len(case.pool.batches) == 2 else seconds_of(batch))
    held = [case.ask(number) for number in range(20)]
    await asyncio.wait(held)
    await asyncio.sleep(60.0)
    outcomes = Counter[str]()

    async def one(number: int) -> None:
        try:
            await case.batcher.submit(case.job(number, timeout=1.0))
            outcomes["answered"] += 1
        except (Overloaded, TooLate):
            outcomes["refused"] += 1

    tasks = []
    for number in range(1000):
        await asyncio.sleep(draw.expovariate(20.0))
        tasks.append(asyncio.ensure_future(one(number)))
    await asyncio.gather(*tasks)
    # 5 requests of 50 tokens take 0.3 s together, and 0.5 s one by one.
    assert outcomes["answered"] > 700, outcomes


@virtual_time.in_loop
async def test_what_cannot_be_in_time_is_refused_at_once_but_never_when_idle() -> None:
    case = Case()
    assert (await case.ask("idle", timeout=0.11)).value == "idle"
    slow = Case(costs=Costs(fixed=100.0, token=1.0))  # wrong by far: an idle server finds out
    assert (await slow.ask("idle", timeout=0.2)).value == "idle"
    busy = [case.ask(number) for number in range(11)]
    await asyncio.sleep(0.01)
    start = case.loop.time()
    with pytest.raises(Overloaded, match="retry later, or raise the timeout") as refused:
        await case.ask("hurry", timeout=0.3)
    assert case.loop.time() == start
    assert 0.0 < refused.value.retry_after < 1.0
    await asyncio.gather(*busy)
    assert "hurry" not in sum(case.computed, [])


@virtual_time.in_loop
async def test_a_full_queue_refuses() -> None:
    case = Case(max_queue=3)
    first = case.ask("first")
    await asyncio.sleep(0.01)
    waiting = [case.ask(number) for number in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="3 requests wait already"):
        await case.ask("one too many", timeout=1e6)
    await asyncio.gather(first, *waiting)


@virtual_time.in_loop
async def test_the_deadline_ends_a_request_even_while_it_is_computed() -> None:
    case = Case(seconds=lambda batch: 5.0)
    with pytest.raises(TooLate, match="the deadline passed"):
        await case.ask("slow", timeout=1.0)
    assert case.loop.time() == pytest.approx(1.0)
    await case.batcher.close()


@virtual_time.in_loop
async def test_a_cancelled_request_is_not_computed() -> None:
    case = Case()
    first = case.ask("first")
    await asyncio.sleep(0.01)
    gone, stays = case.ask("gone"), case.ask("stays")
    await asyncio.sleep(0.01)
    gone.cancel()
    await asyncio.gather(first, stays)
    assert case.computed == [["first"], ["stays"]]
    assert gone.cancelled()
    assert case.batcher.num_waiting == 0


@virtual_time.in_loop
async def test_a_bad_request_fails_alone() -> None:
    def run(batch: Sequence[Job]) -> Computed:
        if any(job.request == "bad" for job in batch):
            raise RuntimeError("bad")
        return echo(batch)

    case = Case(run=run)
    first = case.ask("first")
    await asyncio.sleep(0.01)
    names = ["one", "bad", "two"]
    _, *found = await asyncio.gather(first, *[case.ask(name) for name in names], return_exceptions=True)
    assert [getattr(each, "value", str(each)) for each in found] == names
    assert case.computed[1:] == [names, ["one"], ["bad"], ["two"]]


@virtual_time.in_loop
async def test_the_pace_of_the_machine_is_followed() -> None:
    case = Case(seconds=lambda batch: 3.0 * seconds_of(batch))
    for number in range(40):
        await case.ask(number)
    assert case.batcher.pace == pytest.approx(3.0, rel=0.01)
    assert case.log.batches[-1].predicted_seconds == pytest.approx(case.log.batches[-1].seconds, rel=0.01)


@virtual_time.in_loop
async def test_closing_ends_what_is_under_way_and_refuses_the_rest() -> None:
    case = Case()
    tasks = [case.ask(number) for number in range(12)]
    await asyncio.sleep(0.01)
    closing = asyncio.ensure_future(case.batcher.close())
    await asyncio.sleep(0)
    with pytest.raises(Closed):
        await case.ask("new")
    await closing
    assert sorted(done.value for done in await asyncio.gather(*tasks)) == list(range(12))

    case = Case()
    tasks = [case.ask(number) for number in range(12)]
    await asyncio.sleep(0.01)
    await case.batcher.close(timeout=0.0)
    found = Counter(type(each).__name__ for each in await asyncio.gather(*tasks, return_exceptions=True))
    assert found == {"Done": 5, "Closed": 7}


@pytest.mark.parametrize("workers", [1, 2])
@virtual_time.in_loop
async def test_an_overload_is_survived(workers: int) -> None:
    """Three times what the workers can do, for a minute, then a tenth of it: served in time, or refused at once."""
    draw = random.Random(0)
    per_second = workers * BUDGET / COSTS.seconds(BUDGET) / 50.0  # requests of 50 tokens in full batches
    case = Case(workers=workers)
    loop, outcomes, refusals, ends = case.loop, Counter[str](), [], []

    async def one(number: int, due: float) -> None:
        try:
            await case.batcher.submit(case.job(number, length=draw.choice([10, 20, 30]), timeout=1.0))
            outcomes["answered"] += 1
            ends.append(loop.time() - due)
        except Overloaded:
            outcomes["refused"] += 1
            refusals.append(loop.time() - due)
        except TooLate:
            outcomes["late"] += 1

    tasks, over = [], 0
    while loop.time() < 70.0:
        is_over = loop.time() >= 60.0
        await asyncio.sleep(draw.expovariate((0.1 if is_over else 3.0) * per_second))
        tasks.append(asyncio.ensure_future(one(len(tasks), loop.time())))
        over = over or (outcomes["refused"] if loop.time() > 60.0 else 0)
    await asyncio.gather(*tasks)
    assert outcomes["answered"] / 60.0 > 0.8 * per_second, outcomes
    assert outcomes["late"] < 0.02 * sum(outcomes.values()), outcomes
    assert max(ends) <= 1.0
    assert max(refusals) == 0.0
    assert outcomes["refused"] - over < 5  # in the first moments, until the queue is short
    assert max(case.log.lengths) < 200
