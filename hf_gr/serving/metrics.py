# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts and times of a server for Prometheus, in a registry of their own. Knows no web framework."""

from typing import Any, get_args

from prometheus_client import GC_COLLECTOR, CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.exposition import choose_encoder

from .answers import Batch, Observer, Outcome

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 30, 60)
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)


class Metrics(Observer):
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(GC_COLLECTOR)
        how: dict[str, Any] = {"namespace": "hf_gr", "registry": self.registry}
        self._waiting = Gauge("queue_requests", "Requests that wait for a batch.", **how)
        self._busy = Gauge("busy_workers", "Workers that compute a batch.", **how)
        self._requests = Counter("requests", "Requests that the engine has ended, by outcome.", ["outcome"], **how)
        about = "From a request's arrival to its end, by outcome."
        self._latency = Histogram("request_seconds", about, ["outcome"], buckets=SECONDS, **how)
        self._sizes = Histogram("batch_requests", "Requests computed together.", buckets=BATCH_SIZES, **how)
        self._batch_seconds = Histogram("batch_seconds", "Time to compute a batch.", buckets=SECONDS, **how)
        self._predicted = Counter("batch_predicted_seconds", "Time that batches were expected to take.", **how)
        self._tokens = Counter("tokens", "Tokens of batches, padding and beams counted, as the budget does.", **how)
        self._cached = Counter("cached_tokens", "Tokens of prompts whose keys were cached.", **how)
        self._forwards = Counter("forwards", "Forwards of the model after the prefill.", **how)
        self._accepted = Counter("accepted_drafts", "Drafted steps that were accepted.", **how)
        self._version = Gauge("catalogue_version", "The catalogue's version.", **how)
        self._model = Info("model", "The model that answers.", **how)
        self._items = Gauge("catalogue_items", "Items in the catalogue.", **how)
        self._responses = Counter(
            "http_responses", "Answers over HTTP, by path and status.", ["path", "status"], **how
        )
        for outcome in get_args(Outcome):  # a series exists before its first event: rates are right from the start
            self._requests.labels(outcome)

    def queued(self, num_waiting: int) -> None:
        """The queue has another length."""
        self._waiting.set(num_waiting)

    def working(self, num_busy: int) -> None:
        """So many workers compute a batch now."""
        self._busy.set(num_busy)

    def computed(self, batch: Batch) -> None:
        """A batch is done."""
        self._sizes.observe(batch.num_requests)
        self._batch_seconds.observe(batch.seconds)
        self._predicted.inc(batch.predicted_seconds)
        self._tokens.inc(batch.num_tokens)
        self._cached.inc(batch.num_cached_tokens)
        self._forwards.inc(batch.target_forwards or 0)
        self._accepted.inc(batch.accepted or 0)

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """A request has ended."""
        self._requests.labels(outcome).inc()
        self._latency.labels(outcome).observe(seconds)

    def updated(self, catalogue_version: int, num_items: int, model_version: str) -> None:
        """The catalogue has changed, or the model."""
        self._model.info({"version": model_version})
        self._version.set(catalogue_version)
        self._items.set(num_items)

    def responded(self, path: str, status: int) -> None:
        """A request over HTTP has been answered; `path` is one of the server's, or "other"."""
        self._responses.labels(path, status).inc()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics, and their content type by the scraper's header Accept."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
