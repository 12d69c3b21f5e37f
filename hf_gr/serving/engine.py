# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`Engine`: a model and a catalogue that answer many users at once. Uses `generate`; knows neither HTTP nor Ray."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_gr.answering.attributes import Attributes
from hf_gr.answering.fallback import given_fallback, living_fallback
from hf_gr.answering.loading import load_index, load_tokenizer, name_of
from hf_gr.answering.prefix_cache import prefix_cache
from hf_gr.answering.recommender import (
    MOST_BEAMS,
    NUM_RESULTS,
    UNKNOWN_ITEMS,
    Recommender,
    default_beams,
    useful_beams,
)
from hf_gr.answering.requests import Request, shown
from hf_gr.answering.torch_models import input_device, load_draft_model, load_model
from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.sequences import is_integer, to_host
from hf_gr.classification.classify import DEFAULT_PROMPT, classify
from hf_gr.classification.prompts import prompt_room
from hf_gr.classification.result import Score
from hf_gr.generation.checks import check_code_book, check_tokens_of_catalogue
from hf_gr.generation.torch.models import embeddings_of

from .answers import BrokenAnswer, Classification, Closed, Observer, Overloaded, Recommendation, outcome_of
from .batcher import Batcher, Computed, Job
from .catalogues import Edition, LiveCatalogue
from .costs import Costs, fit_costs, prepare
from .defaults import MAX_PROMPT_TOKENS, TIMEOUT
from .workers import Workers, watch, while_wanted

logger = logging.getLogger(__name__)

COUNTS = "num_beams num_results max_beams workers cores token_budget max_batch max_queue max_prompt_tokens".split()
COUNTS += ["max_tree_nodes"]
READING = ("num_results", "max_beams", "unknown_items", "max_prompt_tokens")  # arguments of `Recommender`, too
LARGE = 4096  # ids and characters of a request that is read in a thread: it might take milliseconds
CHARACTERS = 4  # of a token, about
SWAP_SECONDS = 10.0  # after which another swap may be tried


class Labelling(NamedTuple):
    """The kind of a job that classifies; of the others, model, number of beams, `exact` and `max_per_group` are it."""

    model: Any
    score: Score
    threshold: float | None
    hierarchy: str | None


class Engine:
    """Answers many users at once: batches by token capacity, deadlines, workers, a catalogue that changes meanwhile.

    Call it from the event loop in which it was started. A request alone in its batch is answered as `model.generate`
    answers it, bit for bit unless the keys of its prompt's first tokens are cached; in a batch, scores are the same
    but for rounding.

    Args:
        model: a loaded model in evaluation mode, or the folder or repository of one.
        constraint_index: an index, the name of one, or a `LiveCatalogue`; None for the one that the checkpoint names,
            or has in its folder.
        tokenizer: for texts, by name or loaded; None for the model's own, if it has one.
        rules: item ids by the name of a rule; a `LiveCatalogue` has its own.
        num_beams: of a search, by default; None for the checkpoint's own, if any, else 20, or `num_results` if more.
        num_results: items of an answer, by default.
        max_beams: the most beams, and labels, that a request may ask for.
        workers: threads that compute a batch each; None for one a CPU core, and two on a GPU.
        cores: of the CPU, for all workers together; None for those that this process may use.
        token_budget: tokens of a batch, prompts with padding and beams times levels; None to find it by measurement.
        max_batch: the most requests of a batch.
        max_queue: the most requests that wait.
        timeout: seconds until a request's deadline, by default.
        unknown_items: what happens to items of a history, or of `filter`, that the catalogue does not have: `"drop"`
            (the answer names them) or `"refuse"`.
        fallback: item ids, or a table of what is bought together, that answer a history without a known item, as for
            `recommend`; None to refuse it. A file is read again at a swap.
        attributes: of items, for filters: a file or a table in memory, as for `Attributes` of
            `hf_gr.answering.attributes`. A file is read again at a swap.
        max_prompt_tokens: prompts keep so many tokens, the latest (of a text to classify, the first); None for as many
            as the model has positions for, which lets one request keep a worker for long.
        prefix_tokens: before every prompt made from a history.
        suffix_tokens: after it.
        key_cache_bytes: of memory for the keys of earlier prompts, which later ones that begin alike reuse: a shared
            instruction, a returning user. 0 to compute every prompt whole, as is done for encoder-decoders.
        device: of a model loaded by name: `"cpu"`, `"cuda:1"`, ...; None for a GPU if there is one.
        revision: branch, tag or commit of a model loaded by name from the Hub, and of its tokenizer.
        prompt: what `classify` reads, with `{text}` in the text's place.
        max_tree_nodes: the most nodes of labels that it scores for a text.
        observer: hears of batches and requests.
        options: further arguments of `generate`. With `drafting="auto"` the warm-up times the forwards of
            batches of every size that is usual.

    Raises:
        ValueError: an invalid argument, or a catalogue that does not fit the model.

    Example:
        >>> async def main():  # doctest: +SKIP
        ...     async with hf_gr.Engine("me/recommender", num_beams=20) as engine:
        ...         answer = await engine.recommend(history=["B01", "B07"], exclude=["B01", "B07"], timeout=0.2)
        ...         print(answer.items, answer.catalogue_version)

    Source: xGR, section 7.
    """

    def __init__(
        self,
        model: Any,
        constraint_index: Any = None,
        *,
        tokenizer: Any = None,
        rules: Mapping[str, Iterable[Any]] | None = None,
        num_beams: int | None = None,
        num_results: int = NUM_RESULTS,
        max_beams: int = MOST_BEAMS,
        workers: int | None = None,
        cores: int | None = None,
        token_budget: int | None = None,
        max_batch: int = 64,
        max_queue: int = 1024,
        timeout: float = TIMEOUT,
        unknown_items: str = "drop",
        fallback: Any = None,
        attributes: Any = None,
        max_prompt_tokens: int | None = MAX_PROMPT_TOKENS,
        prefix_tokens: Sequence[int] = (),
        suffix_tokens: Sequence[int] = (),
        key_cache_bytes: int = 2**28,
        device: Any = None,
        revision: str | None = None,
        prompt: str = DEFAULT_PROMPT,
        max_tree_nodes: int = 8192,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        given = locals()
        for name in COUNTS:
            if (value := given[name]) is not None and (not is_integer(value) or value < 1):
                raise ValueError(f"{name}={value!r}, expected an integer, 1 or more")
        if not 2 <= max(num_beams or 0, num_results) <= max_beams:
            raise ValueError(f"num_beams={num_beams}, num_results={num_results}, expected 2 to max_beams={max_beams}")
        if not is_integer(key_cache_bytes) or key_cache_bytes < 0:
            raise ValueError(f"key_cache_bytes={key_cache_bytes!r}, expected an integer, 0 or more: 2**28 is 256 MB")
        if unknown_items not in UNKNOWN_ITEMS:
            raise ValueError(f"unknown_items={unknown_items!r}, expected one of {', '.join(UNKNOWN_ITEMS)}")
        if isinstance(constraint_index, LiveCatalogue) and rules is not None:
            raise ValueError("rules= with a LiveCatalogue, expected none: it has its own, LiveCatalogue(index, rules)")
        self._timeout = _seconds_of(timeout)
        self._num_beams, self._fallback, self._key_cache_bytes = num_beams, fallback, key_cache_bytes
        self._attributes = attributes
        self._reading = {name: given[name] for name in READING}
        self._reading |= {"prefix_tokens": tuple(prefix_tokens), "suffix_tokens": tuple(suffix_tokens)}
        live = constraint_index if isinstance(constraint_index, LiveCatalogue) else None
        index = constraint_index if live is None else live.edition.index
        made = self._load(model, index, tokenizer, revision, device, options)
        for name in ("item_bias", "item_groups"):  # in the order of today's items, and others will come
            given = to_host(options.get(name))
            if (
                given is not None
                and not isinstance(given, (Mapping, str, PathLike))
                and len(given) == len(made.index.item_ids)
            ):
                options[name] = dict(zip(made.index.item_ids, given, strict=True))
        self.catalogue = live or LiveCatalogue(made.index, {name: list(ids) for name, ids in (rules or {}).items()})
        bare = made.with_catalogue(None)  # which keeps no catalogue alive
        self.catalogue.answered_by(name_of(model, revision), partial(_check_index, bare))
        self._recommender = made
        self.observers = [] if observer is None else [observer]  # more may come at any time
        self.prompt, self.max_tree_nodes = prompt, max_tree_nodes
        self._workers = Workers(workers, input_device(made.model), cores=cores)
        self._hooks: list[Any] = []
        self._limits = {"max_batch": max_batch, "max_queue": max_queue}
        self._token_budget = token_budget
        self._batcher: Batcher | None = None
        self._is_closed, self._swapping = False, threading.Lock()

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def model(self) -> Any:
        """The loaded model."""
        return self._current().model

    @property
    def model_version(self) -> str:
        """The model's name, as answers have it."""
        return self._current().model_version

    @property
    def is_ready(self) -> bool:
        """Whether the engine is warmed up, and not closing."""
        return self._batcher is not None and not self._batcher.is_closing

    @property
    def is_stuck(self) -> bool:
        """Whether every worker hangs, so that only another process can answer."""
        return self._batcher is not None and self._batcher.is_stuck

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return 0 if self._batcher is None else self._batcher.num_waiting

    async def start(self) -> None:
        """Warm up: compute batches of several sizes in all workers, fit what they cost, and be ready.

        Raises:
            ValueError: the model refuses the catalogue or the options.
        """
        if self._is_closed:
            raise Closed("a closed engine cannot start again: make another one")
        costs = await asyncio.to_thread(self._warm_up, self._current(), self._workers)
        self._hooks = watch(self.model)
        self._batcher = Batcher(
            self._compute,
            self._workers,
            workers=self._workers.count,
            costs=costs,
            token_budget=self._token_budget or costs.token_budget,
            tell=self._tell,
            **self._limits,
        )

    async def swap(
        self,
        model: Any,
        constraint_index: Any = None,
        *,
        tokenizer: Any = None,
        assistant_model: Any = None,
        revision: str | None = None,
    ) -> Edition:
        """Replace model and catalogue in one step, after a warm-up beside the old ones; the catalogue's new edition.

        Requests that came before are answered by the old pair, so that no answer mixes them. Until the last of these,
        both models are in memory. Rules and all other arguments of the engine stay. Changes of the catalogue that are
        made meanwhile end with the old one.

        Args:
            model: as for `Engine`; a loaded one on the device of the old one.
            constraint_index: as for `Engine`, with item ids of the same type as before.
            tokenizer: as for `Engine`.
            assistant_model: another draft model; None for the one that the engine has, if any.
            revision: as for `Engine`.

        Raises:
            ValueError: what cannot be loaded, or does not fit. After this or any other error, nothing has changed.
            Overloaded: another swap is under way.
            Closed: the engine is not ready, or closing.
            MemoryError: there is no room for a second model.
            OSError: the log of updates cannot be written.
        """
        if self._batcher is None:
            raise Closed("the engine is not ready: swap the model after start()")
        given = model, constraint_index, tokenizer, assistant_model, revision
        edition, costs = await asyncio.to_thread(self._swap, *given)
        self._batcher.expect(costs, self._token_budget or costs.token_budget)
        return edition

    async def close(self, *, timeout: float | None = None) -> None:
        """Refuse new requests, and end those in flight; after `timeout` seconds the waiting ones fail."""
        self._is_closed = True
        if self._batcher is not None:
            await self._batcher.close(timeout)
        for hook in self._hooks:
            hook.remove()
        self._workers.shutdown(wait=False)

    async def recommend(
        self,
        *,
        history: Sequence[Any] | None = None,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        num_results: int | None = None,
        num_beams: int | None = None,
        exclude: Sequence[Any] = (),
        filter: Sequence[Any] | Mapping[str, Any] | None = None,
        rule: str | None = None,
        seed: int | None = None,
        exact: bool | None = None,
        max_per_group: int | None = None,
        timeout: float | None = None,
    ) -> Recommendation:
        """Recommend items to one user. To cancel this is to withdraw the request.

        The answer has `items` (ids, best first), `scores`, `catalogue_version`, and what else
        `hf_gr.serving.answers.Recommendation` says.

        Args:
            history: item ids, the oldest first. What does not fit is cut from the left.
            text: a prompt as a text, instead.
            tokens: a prompt as token ids, instead.
            num_results: items of the answer.
            num_beams: of the search, 2 or more.
            exclude: ids of items that must not be in the answer.
            filter: ids of the only items that may be in it, or, with `attributes`, their values by column, such as
                `{"category": ["tea"], "price": {"max": 20}}`; an item without a value does not pass.
            rule: the name of a rule, with the same meaning.
            seed: of the samples, where `generate` samples.
            exact: True for the best items of the whole catalogue, proven; by default the engine's option.
            max_per_group: the most items of one group in the answer: by the engine's `item_groups`, or the first token
                of each sequence.
            timeout: seconds until the answer is worth nothing.

        Raises:
            ValueError: an invalid argument, named.
            Overloaded: the request cannot be in time. (This error and those below are in `hf_gr.serving.answers`.)
            TooLate: it was not in time.
            Closed: the engine is not ready.
            BrokenAnswer: the model's scores are not numbers.
        """
        given = dict(locals())
        del given["self"], given["timeout"]
        with self._observed(timeout) as (arrived, deadline):
            recommender = self._current()
            if sum(len(value) for value in given.values() if isinstance(value, (str, list, tuple))) <= LARGE:
                request = recommender.read(**given)
            else:  # the others do not wait for it
                request = await asyncio.to_thread(recommender.read, **given)
            if not request.tokens:
                items, near = recommender.fallback_items(request)
                of = recommender.version, recommender.model_version
                return Recommendation(items, None, *of, dropped=request.dropped, is_fallback=True, similar_to=near)
            assert request.num_beams is not None
            assert request.num_results is not None
            beams = useful_beams(request.num_beams, recommender.index, request.num_results)
            cache, length = recommender.prefix_cache, len(request.tokens)
            if cache is not None:
                length = cache.num_missing(request.tokens)
            ahead = recommender.tokens_ahead(beams)
            kind = recommender.pair, beams, request.exact, request.max_per_group
            return await self._answer(Job(request, kind, length, ahead, deadline, arrived, recommender))

    async def classify(
        self,
        *,
        text: str,
        num_labels: int = 5,
        score: Score = "renormalized",
        threshold: float | None = None,
        hierarchy: str | None = None,
        timeout: float | None = None,
    ) -> Classification:
        """Rank the labels of the catalogue, made by `ConstraintIndex.from_labels`, for one text: see `hf_gr.classify`.

        Texts with the same `score`, `threshold` and `hierarchy` are computed together.

        Raises:
            ValueError: an invalid argument, or a catalogue that has no labels; the rest is as in `recommend`.
        """
        with self._observed(timeout) as (arrived, deadline):
            recommender = self._current()
            if recommender.index.snapshot.tokenizer is None:
                raise ValueError("the catalogue has items and no labels, expected one of ConstraintIndex.from_labels")
            most = recommender.max_beams
            if not is_integer(num_labels) or not 1 <= num_labels <= most:
                raise ValueError(f"num_labels={num_labels!r}, expected an integer from 1 to {most}")
            if recommender.tokenizer is None:
                raise ValueError("text is given and there is no tokenizer, expected one: pass tokenizer=")
            if not isinstance(text, str) or not text:
                raise ValueError(f"text={shown(text)}, expected a text that is not empty")
            length = min(len(self.prompt) + len(text), recommender.room or 2**31) // CHARACTERS
            ahead = min(len(recommender.index), self.max_tree_nodes)  # about a node a label
            kind = Labelling(recommender.model, score, threshold, hierarchy)
            return await self._answer(Job((text, num_labels), kind, length, ahead, deadline, arrived, recommender))

    @contextmanager
    def _observed(self, timeout: float | None) -> Iterator[tuple[float, float]]:
        """When a request arrived, and its deadline; observers hear how it ends."""
        clock = asyncio.get_running_loop().time
        arrived = clock()
        outcome = "answered"
        try:
            yield arrived, arrived + (self._timeout if timeout is None else _seconds_of(timeout))
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._tell("ended", outcome, clock() - arrived)

    def _tell(self, event: str, *told: Any) -> None:
        """Tell all observers; no request fails because of who only watches."""
        for observer in self.observers:
            try:
                getattr(observer, event)(*told)
            except Exception:
                logger.exception("an observer failed")

    def _load(
        self, model: Any, index: Any, tokenizer: Any, revision: str | None, device: Any, options: dict[str, Any]
    ) -> Recommender:
        """A model and its catalogue, by name or loaded, with caches of their own."""
        if tokenizer is not None:
            tokenizer = load_tokenizer(tokenizer, model, revision=revision)
        elif isinstance(model, (str, Path)):
            with suppress(ValueError):  # texts are refused
                tokenizer = load_tokenizer(None, model, revision=revision)
        name = name_of(model, revision)
        model = load_model(model, device=device, revision=revision)
        if options.get("assistant_model") is not None:
            options["assistant_model"] = load_draft_model(options["assistant_model"], model)
        index, fallback, attributes = load_index(index, model), self._fallback, self._attributes
        if attributes is not None:
            attributes = Attributes(attributes, are_strings=index.snapshot.are_strings)
        beams = min(default_beams(model, options, self._reading["num_results"]), self._reading["max_beams"])
        return Recommender(
            model,
            index,
            version=-1,  # of no edition yet
            model_version=Path(name).name if Path(name).is_absolute() else name,  # paths are the server's alone
            num_beams=self._num_beams or beams,
            options=options,
            fallback=None if fallback is None else living_fallback(given_fallback(fallback), index)[0],
            attributes=attributes,
            tokenizer=tokenizer,
            vocab_size=embeddings_of(model),
            prefix_cache=prefix_cache(model, options, num_bytes=self._key_cache_bytes),
            **self._reading,
        )

    def _swap(
        self, model: Any, index: Any, tokenizer: Any, assistant_model: Any, revision: str | None
    ) -> tuple[Edition, Costs]:
        """Load, warm up, and swap, in a thread."""
        if not self._swapping.acquire(blocking=False):
            raise Overloaded("another model is being swapped in: retry later", retry_after=SWAP_SECONDS)
        try:
            options = dict(self._recommender.options)
            if assistant_model is not None:
                options["assistant_model"] = assistant_model
            device = self._workers.device if isinstance(model, (str, Path)) else None
            try:
                made = self._load(model, index, tokenizer, revision, device, options)
            except OSError as error:
                reason = " ".join(str(error).split())[:300]
                raise ValueError(f"model={shown(model)}, expected a saved model: check the name ({reason})") from error
            if (found := input_device(made.model)) != self._workers.device:
                raise ValueError(f"model is on {found}, expected {self._workers.device}: move it there")
            bare = made.with_catalogue(None)
            check = partial(_check_index, bare)
            check(made.index)
            with Workers(1, found, cores=self._workers.threads) as beside:  # the others answer meanwhile
                costs = self._warm_up(made, beside)
            if self._is_closed:
                raise Closed("the engine is closing: the model is not swapped")
            before = self.model
            edition = self.catalogue.swap(made.index, recommender=bare, model=name_of(model, revision), check=check)
            self._current()  # nothing else keeps the old one
            self._hooks += [] if before is made.model else watch(made.model)
            del before
            return edition, costs
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"there is no memory for a second model ({error}): start a server with it") from None
        finally:
            self._swapping.release()

    def _current(self) -> Recommender:
        """The recommender over the catalogue of this moment, which threads share."""
        recommender, edition = self._recommender, self.catalogue.edition  # in this order: the second is not older
        if recommender.version != edition.version:
            made = edition.recommender or recommender
            recommender = made.with_catalogue(edition.index, edition.rules, edition.version)
            self._recommender = recommender
        return recommender

    def _warm_up(self, recommender: Recommender, workers: Workers) -> Costs:
        """Measure in all of some workers, without cached keys; settle the drafts."""
        beams = useful_beams(recommender.num_beams, recommender.index, recommender.num_results)
        usual = replace(recommender, num_beams=beams, prefix_cache=None)
        costs = fit_costs(usual, workers)
        prepare(usual, workers, costs, max_batch=self._limits["max_batch"])
        return costs

    async def _answer(self, job: Job) -> Any:
        if self._batcher is None:
            raise Closed("the engine is not started, or is warming up: await start(), or ask again in some seconds")
        return await self._batcher.submit(job)

    def _compute(self, batch: Sequence[Job]) -> Computed:
        """The answers to a batch, in a worker; all of one model and one edition of the catalogue."""
        recommender, reader = self._current(), batch[0].reader
        if recommender.pair is not reader.pair:  # swapped since: these prompts are of the old pair, which is whole
            recommender = reader
        try:
            with while_wanted(lambda: not all(job.future.done() for job in batch)):
                if isinstance(batch[0].kind, Labelling):
                    return self._ranked(batch, recommender), {}
                return self._recommended(batch, recommender)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

    def _recommended(self, batch: Sequence[Job], recommender: Recommender) -> Computed:
        requests: list[Request] = [job.request for job in batch]
        most = max(request.num_results or 0 for request in requests)
        told: dict[str, Any] = {}

        def on_output(out: Any, num_cached_tokens: int) -> None:
            told["num_cached_tokens"] = num_cached_tokens
            if (speculation := getattr(out, "speculation", None)) is not None:
                told["target_forwards"] = speculation.target_forwards
                told["accepted"] = int(speculation.accepted_steps.sum())

        kind: Any = batch[0].kind
        _, num_beams, exact, max_per_group = kind
        options = recommender.options
        if max_per_group is not None:
            options = {**options, "max_per_group": max_per_group}
        if exact != bool(recommender.option("exact")):
            # Without it, there is no work for `max_nodes` to bound.
            options = {name: value for name, value in options.items() if exact or name != "max_nodes"}
            options["exact"] = exact
        search = replace(recommender, num_beams=num_beams, num_results=most, options=options)
        answers = search.answer(requests, on_output)
        values = [
            BrokenAnswer("the model's scores are not numbers, or options of generate leave nothing")
            if answer.is_broken
            else Recommendation(
                answer.items[: request.num_results],
                answer.scores[: request.num_results],
                recommender.version,
                recommender.model_version,
                dropped=request.dropped,
                num_proven=None if answer.num_proven is None else min(answer.num_proven, request.num_results or most),
                num_cut=request.num_cut,
            )
            for request, answer in zip(requests, answers, strict=True)
        ]
        return values, told

    def _ranked(self, batch: Sequence[Job], recommender: Recommender) -> list[Classification]:
        texts, numbers = zip(*(job.request for job in batch), strict=True)
        how: dict[str, Any] = batch[0].kind._asdict()  # pyright: ignore[reportAttributeAccessIssue]
        model = how.pop("model")
        room = prompt_room(model.config, recommender.tokenizer, recommender.index.max_length, None)
        ranked = classify(
            model,
            recommender.tokenizer,
            list(texts),
            recommender.index,
            top_k=max(numbers),
            prompt=self.prompt,
            batch_size=len(texts),
            max_tree_nodes=self.max_tree_nodes,
            max_length=min(room, recommender.max_prompt_tokens or room),
            progress=False,
            **how,
        )
        return [
            Classification(
                [label for label, _ in labels[:number]],
                [share for _, share in labels[:number]],
                recommender.version,
                recommender.model_version,
                method=ranked.method,
                mass_left=ranked.mass_left[row],
                parents=None if ranked.parents is None else [level[:number] for level in ranked.parents[row]],
            )
            for row, (labels, number) in enumerate(zip(ranked, numbers, strict=True))
        ]


def _check_index(recommender: Recommender, index: ConstraintIndex) -> None:
    """Refuse a catalogue with tokens that the model lacks or learned otherwise, or that leaves prompts no room."""
    if (size := recommender.vocab_size) is not None:
        check_tokens_of_catalogue(index.snapshot, size, name="the catalogue")
    check_code_book(recommender.option("code_book"), index.snapshot, name="the catalogue")
    if (room := recommender.with_catalogue(index).room) is not None and room < 1:
        raise ValueError(
            f"the catalogue has sequences of {index.max_length} tokens, expected fewer: "
            "the model has no positions left for a prompt"
        )


def _seconds_of(timeout: Any) -> float:
    """Seconds until a deadline."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0.0 < timeout < math.inf:
        raise ValueError(f"timeout={shown(timeout)}, expected a number of seconds above 0")
    return float(timeout)
