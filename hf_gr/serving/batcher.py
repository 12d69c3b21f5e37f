# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The queue before a model. Knows asyncio, threads and costs; neither models nor HTTP.

A batch is formed when a worker is free, never before: under light load a request starts at once, under heavy load
batches fill by themselves. The request with the earliest deadline leads its batch. Those of like length join it, while
the batch stays within a budget of tokens and the leader can still be in time. What cannot be in time is refused at the
door.

Source: xGR, section 7 (batching by token capacity, several streams); deadlines and admission are ours.
"""

import asyncio
import logging
import math
from bisect import insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from hf_gr.answering.batching import num_batch_tokens

from .answers import Batch, Classification, Closed, Overloaded, Recommendation, TooLate
from .costs import Costs

logger = logging.getLogger(__name__)

PACE = 0.2  # weight of the last batch in what is known of the machine's pace
SLOWEST_PACE, FASTEST_PACE = 100.0, 0.05
CHOICE = 2.0  # budgets of tokens with the earliest deadlines, among which a batch is chosen
STUCK = 30.0  # seconds after the last deadline of a batch that is still being computed
TRIALS = 0.1  # of a worker's time, for requests that look hopeless: so estimates that are too high are found out


@dataclass(eq=False)
class Job:
    """A request on its way. Jobs of one kind can be computed together; times are by the event loop's clock."""

    request: Any
    kind: Hashable
    length: int  # tokens of its prompt that must be computed
    tokens_ahead: int  # that are generated for it
    deadline: float
    arrived: float
    reader: Any = None  # what read the request
    future: asyncio.Future[Any] = field(init=False, repr=False)

    @property
    def tokens(self) -> int:
        """Of a batch that has only this job."""
        return num_batch_tokens(1, self.length, self.tokens_ahead)


Answer = Recommendation | Classification
Computed = tuple[Sequence[Answer | Exception], Mapping[str, Any]]  # an answer or an error a job, and fields of `Batch`


class Batcher:
    """Batches for workers, which compute one at a time each. All methods are called in the event loop's thread.

    Args:
        run: computes the jobs of a batch, in a thread of `pool`. If it raises, the batch is halved until those that
            fail are alone; after a `MemoryError` the budget is halved, too.
        pool: has a thread for each of the `workers`.
        token_budget: of a batch; a single job may need more, and is a batch of its own.
        max_batch: the most jobs of one.
        max_queue: the most jobs that wait.
        tell: gets the name of an `Observer`'s method, and its arguments.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Job]], Computed],
        pool: Executor,
        *,
        workers: int,
        costs: Costs,
        token_budget: int,
        max_batch: int,
        max_queue: int,
        tell: Callable[..., None],
    ) -> None:
        self.max_batch, self.max_queue = max_batch, max_queue
        self.expect(costs, token_budget)
        self._run, self._pool, self._workers, self._tell = run, pool, workers, tell
        self._waiting: list[Job] = []  # by deadline
        # When each probably ends; its last deadline.
        self._in_flight: dict[asyncio.Task[None], tuple[float, float]] = {}
        self._loop = asyncio.get_running_loop()
        self._next_trial = 0.0
        self._is_woken = self.is_closing = False

    def expect(self, costs: Costs, token_budget: int) -> None:
        """Expect these costs of batches from now on, and learn the machine's pace anew."""
        self.costs, self.token_budget = costs, token_budget
        self.pace = 1.0  # seconds of a batch by those that its costs predict
        # Of a request's own tokens, while others wait: that batches are padded and never quite full shows here.
        self.seconds_per_token = costs.seconds(token_budget) / token_budget
        self._num_batches = 0

    @property
    def num_waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    @property
    def is_stuck(self) -> bool:
        """Whether every worker computes what it should have given up long ago: the process must be started anew."""
        ends = [deadline for _, deadline in self._in_flight.values()]
        return len(ends) >= self._workers and self._loop.time() - max(ends) > STUCK

    async def submit(self, job: Job) -> Any:
        """The job's answer with its times, once it is computed. To cancel this is to withdraw the job."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise RuntimeError(
                "the engine was started in another event loop, expected that one: asyncio.run_coroutine_threadsafe "
                "calls it from elsewhere"
            )
        self._admit(job, loop.time())
        job.future = loop.create_future()
        insort(self._waiting, job, key=attrgetter("deadline"))
        self._tell("queued", len(self._waiting))
        self._wake()
        late = TooLate("the deadline passed before the answer was there: raise the timeout or use fewer beams")
        timer = loop.call_at(job.deadline, self._end, job, late)
        try:
            return await job.future
        finally:
            timer.cancel()
            self._remove(job)

    async def close(self, timeout: float | None = None) -> None:
        """Refuse new jobs, and wait until the others have ended; those that wait after `timeout` seconds fail."""
        self.is_closing = True
        loop = asyncio.get_running_loop()
        end = math.inf if timeout is None else loop.time() + timeout
        while (self._waiting or self._in_flight) and (left := end - loop.time()) > 0.0:
            if self._in_flight:
                patience = None if left == math.inf else left
                await asyncio.wait(self._in_flight, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            else:  # the callback that forms batches is still to come
                await asyncio.sleep(0)
        for job in list(self._waiting):
            self._end(job, Closed("the server is closing: ask another one"))

    def predicted(self, tokens: float) -> float:
        """The seconds of a batch of so many tokens, at the pace of the last ones."""
        return self.costs.seconds(tokens) * self.pace

    def _admit(self, job: Job, now: float) -> None:
        """Refuse a job that cannot be in time; where a worker is free for it, one that no idle server could answer."""
        if self.is_closing:
            raise Closed("the server is closing: ask another one")
        is_idle, left = len(self._waiting) + len(self._in_flight) < self._workers, job.deadline - now
        # What held up a batch says nothing of this one.
        if (alone := self.costs.seconds(job.tokens) * min(self.pace, 1.0)) > left:
            if not is_idle or now < self._next_trial:
                raise TooLate(
                    f"the request takes about {alone:.2g} s, more than the {left:.2g} s until its deadline: raise the "
                    "timeout or use fewer beams"
                )
            self._next_trial = now + left / TRIALS
        if is_idle:
            return
        if len(self._waiting) >= self.max_queue:
            after = self._seconds_before(math.inf, now)
            raise Overloaded(f"{self.max_queue} requests wait already: retry later", retry_after=after)
        before = self._seconds_before(job.deadline, now)
        every = job.tokens + sum(one.tokens for one in self._waiting)  # what waits already may join its batch
        tokens = max(job.tokens, min(self.token_budget, every))
        late = now + before + self.predicted(tokens) - job.deadline
        if late > 0.0:
            raise Overloaded(
                f"the queue is {before:.2f} s long, more than the {job.deadline - now:.2f} s until the deadline: "
                "retry later, or raise the timeout",
                retry_after=late,
            )

    def _seconds_before(self, deadline: float, now: float) -> float:
        """About how long a job with this deadline waits: until others have ended, and those before it in the queue."""
        tokens = sum(job.tokens for job in self._waiting if job.deadline <= deadline)
        left = sum(max(0.0, end - now) for end, _ in self._in_flight.values())
        waiting = max(self.predicted(tokens), self.seconds_per_token * tokens) if tokens else 0.0
        return (left + waiting) / self._workers

    def _wake(self) -> None:
        """Form batches soon: jobs that arrive together are seen together."""
        if not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._form)

    def _form(self) -> None:
        self._is_woken = False
        loop = asyncio.get_running_loop()
        while self._waiting and (num_free := self._workers - len(self._in_flight)) > 0:
            now = loop.time()
            batch, seconds = self._take(now, num_free)
            for job in batch:
                self._remove(job)
            if batch:
                task = loop.create_task(self._compute(batch, now, is_full=bool(self._waiting)))
                self._in_flight[task] = now + seconds, max(job.deadline for job in batch)
                task.add_done_callback(self._ended)
                self._tell("working", len(self._in_flight))

    def _take(self, now: float, num_free: int) -> tuple[list[Job], float]:
        """The next batch, and the seconds that it will probably take; jobs that cannot be in time are ended."""
        most = min(self.max_batch, math.ceil(len(self._waiting) / num_free))
        lead = self._waiting[0]
        seconds = self.predicted(lead.tokens)
        while now + seconds > lead.deadline and len(self._waiting) > num_free:  # a worker for each: all have a chance
            late = TooLate("the deadline came before the request's turn: raise the timeout or use fewer beams")
            self._end(lead, late)
            lead = self._waiting[0]
            seconds = self.predicted(lead.tokens)
        left = CHOICE * self.token_budget
        alike: list[Job] = []
        for job in self._waiting[1:]:
            if job.kind == lead.kind and (left := left - job.tokens) > 0.0:
                alike.append(job)
        alike.sort(key=lambda job: abs(job.length - lead.length))
        batch, longest = [lead], lead.length
        for job in alike[: most - 1]:
            tokens = num_batch_tokens(len(batch) + 1, max(longest, job.length), lead.tokens_ahead)
            if tokens > self.token_budget or now + self.predicted(tokens) > lead.deadline:
                break
            batch.append(job)
            longest, seconds = max(longest, job.length), self.predicted(tokens)
        return batch, seconds

    async def _compute(self, batch: list[Job], began: float, *, is_full: bool) -> None:
        loop, parts = asyncio.get_running_loop(), [batch]
        while parts:
            part = [job for job in parts.pop() if not job.future.done()]
            if not part:
                continue
            start, tokens = (
                loop.time(),
                num_batch_tokens(len(part), max(job.length for job in part), part[0].tokens_ahead),
            )
            predicted = self.predicted(tokens)
            try:
                values, told = await loop.run_in_executor(self._pool, self._run, part)
            except Exception as error:
                took = loop.time() - start
                if all(job.future.done() for job in part):  # it was given up: it takes at least so long
                    self._learn(part, max(took, predicted), tokens)
                elif len(part) == 1:
                    self._end(part[0], error)
                else:
                    if isinstance(error, MemoryError):
                        self.token_budget = min(self.token_budget, tokens // 2)
                        logger.warning("out of memory: batches have at most %d tokens from now on", self.token_budget)
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
                continue
            took = (now := loop.time()) - start
            if len(part) == len(batch):  # halves of one that failed are not as batches are
                self._learn(part, took, tokens, is_full=is_full)
            for job, value in zip(part, values, strict=True):
                if isinstance(value, Exception):
                    self._end(job, value)
                elif not job.future.done():
                    seconds = {"total": now - job.arrived, "queued": began - job.arrived, "computed": now - began}
                    job.future.set_result(replace(value, seconds=seconds, batch_size=len(part)))
            self._tell("computed", Batch(len(part), tokens, took, predicted, **told))

    def _learn(self, batch: list[Job], took: float, tokens: int, *, is_full: bool = False) -> None:
        """The machine's pace, from a batch."""
        pace = took / max(self.costs.seconds(tokens), 1e-9)
        self._num_batches += 1
        weight = max(PACE, 1.0 / (1 + self._num_batches))  # the first batches may be unlike those of the warm-up
        self.pace += weight * (min(max(pace, FASTEST_PACE), SLOWEST_PACE) - self.pace)
        # A batch that is not full costs more a token. If it took less, the estimate is too high, and would go on
        # refusing the requests that fill batches.
        per_token = took / sum(job.tokens for job in batch)
        if is_full or per_token < self.seconds_per_token:
            self.seconds_per_token += weight * (per_token - self.seconds_per_token)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._in_flight[task]
        self._tell("working", len(self._in_flight))
        if self._waiting:
            self._wake()

    def _end(self, job: Job, error: Exception) -> None:
        """End a job with an error; one that is being computed is not waited for."""
        self._remove(job)
        if not job.future.done():
            job.future.set_exception(error)

    def _remove(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            self._tell("queued", len(self._waiting))
