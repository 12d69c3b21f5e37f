# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, for tests of the server: what it answers depends on the history's first item."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

try:  # one of them comes with huggingface_hub
    import httpx2 as httpx
except ImportError:
    import httpx  # noqa: F401  # pyright: ignore[reportMissingImports]

from hf_gr import ConstraintIndex
from hf_gr.serving.answers import (
    Batch,
    BrokenAnswer,
    Classification,
    Closed,
    Observer,
    Overloaded,
    Recommendation,
    TooLate,
)
from hf_gr.serving.catalogues import LiveCatalogue


def in_loop(
    test: Callable[..., Awaitable[None]], *, loop_factory: Any = None, seconds: float | None = 60
) -> Callable[..., None]:
    """A test that is a coroutine; what is still in flight after a minute is an error."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(asyncio.wait_for(test(*args, **kwargs), seconds))

    return run


ITEMS = {"B01": [5, 7], "B02": [5, 8], "B03": [6, 7], "B04": [6, 8]}
ERRORS: dict[Any, Exception] = {  # by the history's first item
    "late": TooLate("the answer would have come after the 200 ms of the request"),
    "full": Overloaded("1,024 requests wait", retry_after=2.5),
    "broken": BrokenAnswer("the model's scores are not numbers"),
    "bug": KeyError("secret-item-of-a-user"),
    "large": MemoryError("there is no memory for a second model"),
    "unknown": ValueError("history[0]='unknown', expected an item of the catalogue: omit it"),
}


class Log(Observer):
    """Remembers what it hears of."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.outcomes: Counter[str] = Counter()
        self.lengths: list[int] = []
        self.busy: list[int] = []

    def queued(self, num_waiting: int) -> None:
        self.lengths.append(num_waiting)

    def working(self, num_busy: int) -> None:
        self.busy.append(num_busy)

    def computed(self, batch: Batch) -> None:
        self.batches.append(batch)

    def ended(self, outcome: str, seconds: float) -> None:
        self.outcomes[outcome] += 1


class FakeEngine:
    """With the methods of `hf_gr.Engine`."""

    def __init__(self, *, start_seconds: float = 0.0) -> None:
        index = ConstraintIndex.from_sequences(list(ITEMS.values()), item_ids=list(ITEMS))
        self.catalogue = LiveCatalogue(index, {"europe": ["B02", "B03"]}, version=3)
        self.observers: list[Observer] = []
        self.is_ready = self.is_stuck = False
        self.num_waiting = 0
        self.asked: list[dict[str, Any]] = []
        self.num_cancelled = 0
        self.is_closed = False
        self.model_version = "old"
        self.swapped: list[dict[str, Any]] = []
        self.start_error: Exception | None = None
        self._start_seconds = start_seconds

    async def start(self) -> None:
        await asyncio.sleep(self._start_seconds)
        if self.start_error is not None:
            raise self.start_error
        self.is_ready = True

    async def close(self, *, timeout: float | None = None) -> None:
        self.is_ready, self.is_closed = False, True

    async def swap(self, model: str, index: str | None, **given: Any) -> None:
        if model in ERRORS:
            raise ERRORS[model].with_traceback(None)
        self.swapped.append({"model": model, "index": index} | given)
        self.model_version = model

    async def recommend(self, **given: Any) -> Recommendation:
        self.asked.append(given)
        if not self.is_ready:
            raise Closed("the engine warms up")
        first = (given["history"] or [None])[0]
        if first in ERRORS:
            raise ERRORS[first].with_traceback(None)
        if first == "slow":
            try:
                await asyncio.sleep(given["timeout"] or 30)
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        edition = self.catalogue.edition
        for observer in self.observers:
            observer.working(1)
            observer.computed(Batch(1, 64, 0.01, 0.01, target_forwards=3))
            observer.ended("answered", 0.01)
        items = [item for item in edition.index.item_ids if item not in given["exclude"]][: given["num_results"] or 2]
        seconds = {"total": 0.011, "queued": 0.001, "computed": 0.01}
        scores, versions = [-0.5] * len(items), (edition.version, self.model_version)
        return Recommendation(items, scores, *versions, seconds=seconds, batch_size=1)

    async def classify(self, **given: Any) -> Classification:
        self.asked.append(given)
        return Classification(["cat", "dog"][: given["num_labels"]], [0.75, 0.25][: given["num_labels"]], 3)
