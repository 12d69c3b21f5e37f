# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The queue of an engine, in virtual time: what is computed together, in which order, and what is refused."""

import asyncio
import random
import selectors
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import pytest
from serving_fake import Log, in_loop

from hf_gr.answering.batching import num_batch_tokens
from hf_gr.serving.answers import Batch, Closed, Overloaded, Recommendation, TooLate
from hf_gr.serving.batcher import Batcher, Computed, Job
from hf_gr.serving.costs import Costs

COSTS = Costs(fixed=0.05, token=0.001)
BUDGET = 250


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event: no test waits."""

    def __init__(self) -> None:
        self.now, selector = 0.0, selectors.SelectSelector()
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            found = select(0)
            if not found and timeout is not None:
                self.now += max(timeout, 0.0)
            return found or (select(1.0) if timeout is None else [])

        selector.select = jump
        super().__init__(selector)

    def time(self) -> float:
        return self.now


in_virtual_time = partial(in_loop, loop_factory=VirtualLoop, seconds=None)


class VirtualWorkers(Executor):
    """Computes a batch in `seconds(batch)` of the loop's time."""

    def __init__(self, seconds: Callable[[Sequence[Any]], float]) -> None:
        self.seconds = seconds
        self.batches: list[list[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.batches.append(list(args[0]))

        def end() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        asyncio.get_running_loop().call_later(self.seconds(args[0]), end)
        return future


def seconds_of(batch: Sequence[Job]) -> float:
    """What a batch takes, as its costs say."""
    return COSTS.seconds(num_batch_tokens(len(batch), max(job.length for job in batch), batch[0].tokens_ahead))


def echo(batch: Sequence[Job]) -> Computed:
    if any(job.request == "bad" for job in batch):
        raise RuntimeError("bad")
    return [Recommendation([job.request], None, 0) for job in batch], {}


class Case:
    """A batcher over virtual workers; made inside the loop."""

    def __init__(
        self, *, workers: int = 1, seconds: Callable[[Sequence[Job]], float] = seconds_of, **given: Any
    ) -> None:
        self.pool, self.log, self.loop = VirtualWorkers(seconds), Log(), asyncio.get_running_loop()
        options = {"costs": COSTS, "token_budget": BUDGET, "max_batch": 64, "max_queue": 1000, **given}
        self.batcher = Batcher(echo, self.pool, workers=workers, tell=self.tell, **options)

    def tell(self, event: str, *told: Any) -> None:
        getattr(self.log, event)(*told)

    def ask(self, request: Any, *, length: int = 20, timeout: float = 10.0, kind: Any = 20) -> asyncio.Task[Any]:
        job = Job(request, kind, length, 30, self.loop.time() + timeout, self.loop.time())
        return asyncio.ensure_future(self.batcher.submit(job))

    async def load(
        self, per_second: float, *, seconds: float, lengths: Sequence[int] = (20,)
    ) -> dict[str, list[float]]:
        """Requests at random moments, with a second each: how they end, and after how long."""
        draw, end, ends = random.Random(0), self.loop.time() + seconds, defaultdict[str, list[float]](list)

        async def one() -> None:
            start, outcome = self.loop.time(), "answered"
            try:
                await self.ask(None, length=draw.choice(lengths), timeout=1.0)
            except (Overloaded, TooLate) as error:
                outcome = type(error).__name__
            ends[outcome].append(self.loop.time() - start)

        tasks = []
        while self.loop.time() < end:
            await asyncio.sleep(draw.expovariate(per_second))
            tasks.append(asyncio.ensure_future(one()))
        await asyncio.gather(*tasks)
        return ends

    @property
    def computed(self) -> list[list[Any]]:
        return [[job.request for job in batch] for batch in self.pool.batches]


@pytest.mark.parametrize(
    ("workers", "asked", "batches"),
    [
        (1, [(n, {}) for n in range(7)], [[0, 1, 2, 3, 4], [5, 6]]),  # 5 x (20 + 30) = 250 tokens
        (2, [(n, {}) for n in range(4)], [[0, 1], [2, 3]]),
        (1, [(n, {"kind": n % 2}) for n in range(4)], [[0, 2], [1, 3]]),
        (
            1,
            [
                ("late", {"length": 20, "timeout": 9.0}),
                ("long", {"length": 120, "timeout": 5.0}),  # padding to it would burst the budget: 2 x 150, 3 x 55 fit
                ("soon", {"length": 20, "timeout": 2.0}),
                ("like", {"length": 25, "timeout": 6.0}),
                ("likest", {"length": 20, "timeout": 8.0}),
            ],
            [["soon", "likest", "late", "like"], ["long"]],
        ),
        # A batch does not grow until its leader is late: two take 0.15 s.
        (1, [("soon", {"timeout": 0.16}), *[(n, {}) for n in range(4)]], [["soon", 0], [1, 2, 3]]),
        # One that fails does not fail the others, and is looked for by halves.
        (
            1,
            [*[(n, {}) for n in range(4)], ("bad", {})],
            [[0, 1, 2, 3, "bad"], [0, 1], [2, 3, "bad"], [2], [3, "bad"], [3], ["bad"]],
        ),
    ],
)
@in_virtual_time
async def test_what_is_computed_together(workers: int, asked: list[tuple[Any, Any]], batches: list[list[Any]]) -> None:
    case = Case(workers=workers)
    tasks = [case.ask(name, **how) for name, how in asked]
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [each.items[0] if isinstance(each, Recommendation) else str(each) for each in found] == [
        name for name, _ in asked
    ]
    assert case.computed == batches


@in_virtual_time
async def test_a_free_worker_begins_at_once_and_what_is_cancelled_is_not_computed() -> None:
    case = Case()
    first = case.ask("first")
    await asyncio.sleep(0.01)
    gone, stays = case.ask("gone"), case.ask("stays")
    await asyncio.sleep(0.01)
    gone.cancel()
    done, _ = await asyncio.gather(first, stays)
    assert (done.items, done.batch_size) == (["first"], 1)
    assert done.seconds == {"total": pytest.approx(0.1), "queued": 0.0, "computed": pytest.approx(0.1)}
    assert case.log.batches[0] == Batch(1, 50, pytest.approx(0.1), pytest.approx(0.1))
    assert case.computed == [["first"], ["stays"]]
    assert gone.cancelled()
    assert case.batcher.num_waiting == 0
    assert case.log.busy == [1, 0, 1, 0]


@in_virtual_time
async def test_requests_of_one_moment_are_not_refused_while_there_is_a_worker_for_each() -> None:
    case = Case(workers=2)
    case.batcher.pace = 20.0  # of a batch that something else held up
    done = await asyncio.gather(case.ask("a", timeout=0.2), case.ask("b", timeout=0.2))
    assert [one.items for one in done] == [["a"], ["b"]]


@in_virtual_time
async def test_a_batch_that_was_held_up_does_not_cost_rate_for_ever() -> None:
    """Estimates from it would keep the queue too short for full batches, of which alone they were corrected."""
    case = Case(seconds=lambda batch: 60.0 if len(case.pool.batches) == 2 else seconds_of(batch))
    await asyncio.wait([case.ask(number) for number in range(20)])
    await asyncio.sleep(60.0)
    ends = await case.load(20.0, seconds=50.0)  # 5 requests of 50 tokens take 0.3 s together, and 0.5 s one by one
    assert len(ends["answered"]) > 0.7 * sum(map(len, ends.values()))


@in_virtual_time
async def test_what_cannot_be_in_time_is_refused_at_once_but_never_when_idle() -> None:
    case = Case()
    assert (await case.ask("idle", timeout=0.11)).items == ["idle"]
    slow = Case(costs=Costs(fixed=100.0, token=1.0))  # wrong by far: an idle server finds out
    assert (await slow.ask("idle", timeout=0.2)).items == ["idle"]
    busy = [case.ask(number) for number in range(11)]
    await asyncio.sleep(0.01)
    start, case.batcher.max_queue = case.loop.time(), 6
    with pytest.raises(Overloaded, match="6 requests wait already"):
        await case.ask("one too many", timeout=1e6)
    case.batcher.max_queue = 7
    with pytest.raises(Overloaded, match="retry later, or raise the timeout") as refused:
        await case.ask("hurry", timeout=0.3)
    assert case.loop.time() == start
    assert 0.0 < refused.value.retry_after < 1.0
    await asyncio.gather(*busy)
    assert "hurry" not in sum(case.computed, [])


@in_virtual_time
async def test_what_never_can_be_in_time_is_refused_by_an_idle_server_but_for_a_trial_now_and_then() -> None:
    case = Case(costs=Costs(fixed=10.0, token=0.1))
    case.batcher.pace = 50.0  # of a batch that something else held up, which says nothing of these
    num_refused = 0
    while case.batcher.pace > 0.1:  # its estimates are a hundred times too high
        try:
            await case.ask("hopeless", timeout=1.0)
        except TooLate:
            num_refused += 1
            await asyncio.sleep(1.0)
    assert num_refused > 8 * len(case.computed)  # a tenth of the time
    with pytest.raises(TooLate, match="takes about 1.5 s, more than the 0.5 s until its deadline: raise the timeout"):
        await case.ask("hopeless", timeout=0.5)
    assert (await case.ask("soon", timeout=2.0)).items == ["soon"]


@in_virtual_time
async def test_a_batch_that_fails_is_answered_in_parts_and_costs_no_pace_but_memory_some_budget() -> None:
    def run(batch: Sequence[Job]) -> Computed:
        if len(batch) > 3 or batch[0].request == "huge":
            raise MemoryError
        return echo(batch)

    case = Case(seconds=lambda batch: 1.0, token_budget=1000)
    first, *others = [case.ask(request) for request in [*range(7), "bad"]]
    assert (await first).seconds["computed"] == case.loop.time() == 2.0  # the others may take longer
    await asyncio.wait(others)
    assert (case.batcher.pace, case.batcher.token_budget) == (1.0, 1000)
    case.batcher._run = run
    assert [one.items for one in await asyncio.gather(*map(case.ask, range(8)))] == [[number] for number in range(8)]
    with pytest.raises(MemoryError):
        await case.ask("huge")
    assert (case.batcher.pace, case.batcher.token_budget) == (1.0, 8 * 50 // 2 // 2)


@in_virtual_time
async def test_the_deadline_ends_a_request_even_while_it_is_computed() -> None:
    case = Case(seconds=lambda batch: 5.0)
    with pytest.raises(TooLate, match="the deadline passed"):
        await case.ask("slow", timeout=1.0)
    assert case.loop.time() == pytest.approx(1.0)
    await case.batcher.close()


@in_virtual_time
async def test_workers_that_never_end_are_known() -> None:
    case, told = Case(workers=2, seconds=lambda batch: 100.0), []
    for _ in range(2):
        with pytest.raises(TooLate):
            await case.ask("hangs", timeout=1.0)
        await asyncio.sleep(35.0)
        told.append(case.batcher.is_stuck)
    await asyncio.sleep(70.0)
    assert (told, case.batcher.is_stuck) == ([False, True], False)


@in_virtual_time
async def test_the_pace_is_known_of_batches_that_were_given_up() -> None:
    case = Case(seconds=lambda batch: 1.01)

    def run(batch: Sequence[Job]) -> Computed:
        assert batch[0].future.done()
        raise RuntimeError("given up")

    case.batcher._run = run
    for _ in range(10):
        with pytest.raises(TooLate):
            await case.ask("slow", timeout=1.0)
    assert 5.0 < case.batcher.pace < 10.2  # 0.1 s are expected at first
    assert not case.log.batches


@in_virtual_time
async def test_the_pace_of_the_machine_is_followed() -> None:
    case = Case(seconds=lambda batch: 3.0 * seconds_of(batch))
    for number in range(40):
        await case.ask(number)
    assert case.log.batches[-1].predicted_seconds == pytest.approx(case.log.batches[-1].seconds, rel=0.01)


@pytest.mark.parametrize(("timeout", "answered"), [(None, 12), (0.0, 5)])
@in_virtual_time
async def test_closing_ends_what_is_in_flight(timeout: float | None, answered: int) -> None:
    case = Case()
    tasks = [case.ask(number) for number in range(12)]
    await asyncio.sleep(0.01)
    closing = asyncio.ensure_future(case.batcher.close(timeout))
    await asyncio.sleep(0)
    with pytest.raises(Closed):
        await case.ask("new")
    await closing
    ends = Counter(type(each) for each in await asyncio.gather(*tasks, return_exceptions=True))
    assert (ends[Recommendation], ends[Closed]) == (answered, 12 - answered)


@pytest.mark.parametrize("workers", [1, 2])
@in_virtual_time
async def test_an_overload_is_survived(workers: int) -> None:
    """Three times what the workers can do, for a minute, then a tenth of it: served in time, or refused at once."""
    per_second = workers * BUDGET / COSTS.seconds(BUDGET) / 50.0  # requests of 50 tokens in full batches
    case = Case(workers=workers)
    ends = await case.load(3.0 * per_second, seconds=60.0, lengths=[10, 20, 30])
    assert len(ends["answered"]) / 60.0 > 0.8 * per_second
    assert len(ends["TooLate"]) < 0.02 * sum(map(len, ends.values()))
    assert max(ends["answered"]) <= 1.0
    assert max(ends["Overloaded"]) == 0.0
    assert max(case.log.lengths) < 200
    assert set(await case.load(0.1 * per_second, seconds=10.0, lengths=[10, 20, 30])) == {"answered"}
