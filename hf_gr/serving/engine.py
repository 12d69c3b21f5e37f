# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`Engine`: a model and a catalogue that answer many users at once. Uses `generate`; knows neither HTTP nor Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hf_gr.answering.decoding import Decoder, useful_beams
from hf_gr.answering.fallback import first_allowed, read_fallback
from hf_gr.answering.loading import load_index, load_tokenizer, prompt_room
from hf_gr.answering.prefix_cache import PrefixCache, Reuse, prefix_cache
from hf_gr.answering.torch_models import input_device, load_draft_model, load_model
from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.sequences import is_integer
from hf_gr.classification.classify import DEFAULT_PROMPT, classify
from hf_gr.generation.checks import check_tokens_of_catalogue
from hf_gr.generation.torch.models import embeddings_of

from .answers import BrokenAnswer, Classification, Closed, Overloaded, Recommendation, TooLate
from .batcher import Batcher, Computed, Done, Job
from .catalogues import Edition, LiveCatalogue
from .costs import Costs
from .lanes import Lanes
from .observer import Guarded, Observer, Outcome
from .requests import UNKNOWN_ITEMS, Read, RequestReader, check_timeout, shown
from .warm_up import fit_costs, settle

CLASSIFY = "classify"  # a kind of job; of the others, the kind is their number of beams
ANSWERED: Outcome = "answered"
LARGE = 4096  # ids and characters of a request that is read in a thread: it might take milliseconds
CHARACTERS = 4  # of a token, about
DECODERS = 8  # of one lane: one for each number of beams


class Engine:
    """Answers many users at once: batches by token capacity, deadlines, lanes, a catalogue that changes meanwhile.

    Call it from one event loop. A request alone in its batch is answered as `model.generate` answers it, bit for bit
    unless the keys of its prompt's first tokens are cached; in a batch, scores are the same but for rounding.

    Args:
        model: a loaded model in evaluation mode, or the folder or repository of one.
        constraint_index: an index, the name of one, or a `LiveCatalogue`; None for the one that the checkpoint names,
            or has in its folder.
        tokenizer: for texts, by name or loaded; None for the model's own, if it has one.
        rules: item ids by the name of a rule.
        num_beams: of a search, by default.
        num_results: items of an answer, by default.
        max_beams: the most beams, and labels, that a request may ask for.
        lanes: batches that are computed at the same time; None for one a CPU core, and two on a GPU.
        cores: of the CPU, for all lanes together; None for those that this process may use.
        token_budget: tokens of a batch, prompts with padding and beams times levels; None to find it by measurement.
        max_batch: the most requests of a batch.
        max_queue: the most requests that wait.
        timeout: seconds until a request's deadline, by default.
        unknown_items: what happens to items of a history that the catalogue does not have: `"drop"` (the answer names
            them) or `"refuse"`.
        fallback: item ids that answer an empty history; None to refuse it.
        max_prompt_tokens: prompts keep their latest tokens; None for as many as the model has positions for.
        prefix_tokens: before every prompt made from a history.
        suffix_tokens: after it.
        key_cache_bytes: of memory for the keys of earlier prompts, which later ones that begin alike reuse: a shared
            instruction, a returning user. 0 to compute every prompt whole, as is done for encoder-decoders.
        device: of a model loaded by name: `"cpu"`, `"cuda:1"`, ...; None for a GPU if there is one.
        revision: branch, tag or commit of a model loaded by name from the Hub, and of its tokenizer.
        prompt: what `classify` reads, with `{text}` in the text's place.
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
        num_beams: int = 20,
        num_results: int = 10,
        max_beams: int = 512,
        lanes: int | None = None,
        cores: int | None = None,
        token_budget: int | None = None,
        max_batch: int = 64,
        max_queue: int = 1024,
        timeout: float = 10.0,
        unknown_items: str = "drop",
        fallback: Sequence[Any] | None = None,
        max_prompt_tokens: int | None = None,
        prefix_tokens: Sequence[int] = (),
        suffix_tokens: Sequence[int] = (),
        key_cache_bytes: int = 2**28,
        device: Any = None,
        revision: str | None = None,
        prompt: str = DEFAULT_PROMPT,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        counts = {"num_beams": num_beams, "num_results": num_results, "max_beams": max_beams, "lanes": lanes}
        counts |= {"cores": cores, "token_budget": token_budget, "max_batch": max_batch, "max_queue": max_queue}
        counts |= {"max_prompt_tokens": max_prompt_tokens}
        for name, value in counts.items():
            if value is not None and (not is_integer(value) or value < 1):
                raise ValueError(f"{name}={value!r}, expected an integer, 1 or more")
        if not 2 <= max(num_beams, num_results) <= max_beams:
            raise ValueError(f"num_beams={num_beams}, num_results={num_results}, expected 2 to max_beams={max_beams}")
        if not is_integer(key_cache_bytes) or key_cache_bytes < 0:
            raise ValueError(f"key_cache_bytes={key_cache_bytes!r}, expected an integer, 0 or more: 2**28 is 256 MB")
        check_timeout(timeout)
        if unknown_items not in UNKNOWN_ITEMS:
            raise ValueError(f"unknown_items={unknown_items!r}, expected one of {', '.join(UNKNOWN_ITEMS)}")
        is_name = isinstance(model, (str, Path))
        self.tokenizer = tokenizer
        if tokenizer is not None:
            self.tokenizer = load_tokenizer(tokenizer, model, revision=revision)
        elif is_name:
            try:
                self.tokenizer = load_tokenizer(None, model, revision=revision)
            except ValueError:
                pass  # texts are refused
        self.model = load_model(model, device=device, revision=revision)
        if options.get("assistant_model") is not None:
            options["assistant_model"] = load_draft_model(options["assistant_model"], self.model)
        if isinstance(constraint_index, LiveCatalogue):
            self.catalogue = constraint_index
        else:
            index = load_index(constraint_index, self.model)
            self.catalogue = LiveCatalogue(index, {name: list(ids) for name, ids in (rules or {}).items()})
        self.fallback = None if fallback is None else read_fallback(fallback, self.catalogue.edition.index.snapshot)
        self._observer = Guarded(observer or Observer())
        self.prompt = prompt
        self._options = options
        self._max_prompt_tokens = max_prompt_tokens
        self.catalogue.check = self._check_index
        self._check_index(self.catalogue.edition.index)
        self._reader = RequestReader(
            num_results=num_results,
            num_beams=max(num_beams, num_results),
            max_beams=max_beams,
            timeout=timeout,
            unknown_items=unknown_items,
            vocab_size=embeddings_of(self.model),
            tokenizer=self.tokenizer,
            prefix_tokens=tuple(prefix_tokens),
            suffix_tokens=tuple(suffix_tokens),
        )
        self._lanes = Lanes(lanes, input_device(self.model), cores=cores)
        self._limits = {"max_batch": max_batch, "max_queue": max_queue}
        self._token_budget = token_budget
        self._key_cache_bytes = key_cache_bytes
        self._prefix_cache: PrefixCache | None = None
        self._own = threading.local()  # of every lane
        self._batcher: Batcher | None = None
        self._is_closed = False

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def observer(self) -> Observer:
        """Who hears of batches and requests; may be replaced at any time."""
        return self._observer.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self._observer = Guarded(observer)
        if self._batcher is not None:
            self._batcher.observer = self._observer

    @property
    def is_ready(self) -> bool:
        """Whether the engine is warmed up, and not closing."""
        return self._batcher is not None and not self._batcher.is_closing

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return 0 if self._batcher is None else self._batcher.num_waiting

    async def start(self) -> None:
        """Warm up: compute batches of several sizes in all lanes, fit what they cost, and be ready.

        Raises:
            ValueError: the model refuses the catalogue or the options.
        """
        if self._is_closed:
            raise Closed("a closed engine cannot start again: make another one")
        costs = await asyncio.get_running_loop().run_in_executor(None, self._warm_up)
        self._batcher = Batcher(
            self._lanes.on_stream(self._compute),
            self._lanes,
            lanes=self._lanes.count,
            costs=costs,
            token_budget=self._token_budget or costs.token_budget,
            observer=self._observer,
            **self._limits,
        )

    async def close(self, *, timeout: float | None = None) -> None:
        """Refuse new requests, and end those that are under way; after `timeout` seconds the waiting ones fail."""
        self._is_closed = True
        if self._batcher is not None:
            await self._batcher.close(timeout)
        self._lanes.shutdown(wait=False)

    async def recommend(
        self,
        *,
        history: Sequence[Any] | None = None,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        num_results: int | None = None,
        num_beams: int | None = None,
        exclude: Sequence[Any] = (),
        allow: Sequence[Any] | None = None,
        rule: str | None = None,
        seed: int | None = None,
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
            allow: ids of the only items that may be in it.
            rule: the name of a rule, with the same meaning.
            seed: of the samples, where `generate` samples.
            timeout: seconds until the answer is worth nothing.

        Raises:
            ValueError: an invalid argument, named.
            Overloaded: the request cannot be in time. (This error and those below are in `hf_gr.serving.answers`.)
            TooLate: it was not in time.
            Closed: the engine is not ready.
            BrokenAnswer: the model's scores are not numbers.
        """
        loop = asyncio.get_running_loop()
        with self._observed(loop) as arrived:
            edition = self.catalogue.edition
            read = await self._read(
                edition,
                room=self._room(edition.index),
                history=history,
                text=text,
                tokens=tokens,
                num_results=num_results,
                num_beams=num_beams,
                exclude=exclude,
                allow=allow,
                rule=rule,
                seed=seed,
                timeout=timeout,
            )
            if read.request is None:
                items = self._fallback_items(edition, read, exclude, allow, rule)
                return Recommendation(items, None, edition.version, dropped=read.dropped, is_fallback=True)
            num_beams = useful_beams(read.num_beams, edition.index, read.num_results)
            ahead = num_beams * (edition.index.max_length - 1)
            prompt = read.request.tokens
            length = len(prompt) if self._prefix_cache is None else self._prefix_cache.num_missing(prompt)
            job = Job(read, num_beams, length, ahead, arrived + read.timeout, arrived)
            done = await self._submit(job)
            answer, version = done.value
            return Recommendation(
                answer.items[: read.num_results],
                answer.scores[: read.num_results],
                version,
                dropped=read.dropped,
                num_cut=read.num_cut,
                seconds=_seconds(done, loop.time() - arrived),
                batch_size=done.batch_size,
            )

    async def classify(self, *, text: str, num_labels: int = 5, timeout: float | None = None) -> Classification:
        """Rank the labels of the catalogue, made by `ConstraintIndex.from_labels`, for one text: see `hf_gr.classify`.

        Raises:
            ValueError: an invalid argument, or a catalogue that has no labels; the rest is as in `recommend`.
        """
        loop = asyncio.get_running_loop()
        with self._observed(loop) as arrived:
            edition = self.catalogue.edition
            if edition.index.snapshot.tokenizer is None:
                raise ValueError("the catalogue has items and no labels, expected one of ConstraintIndex.from_labels")
            most = self._reader.max_beams  # large label sets are searched with a beam a label
            if not is_integer(num_labels) or not 1 <= num_labels <= most:
                raise ValueError(f"num_labels={num_labels!r}, expected an integer from 1 to {most}")
            limit = self._reader.read_text(text, timeout=timeout)
            length = min(len(self.prompt) + len(text), self._room(edition.index) or 2**31) // CHARACTERS
            ahead = min(len(edition.index), 8192)  # about a node a label
            job = Job((text, num_labels), CLASSIFY, length, ahead, arrived + limit, arrived)
            done = await self._submit(job)
            ranked, version = done.value
            labels, probabilities = [label for label, _ in ranked], [probability for _, probability in ranked]
            seconds = _seconds(done, loop.time() - arrived)
            return Classification(labels, probabilities, version, seconds, done.batch_size)

    @contextmanager
    def _observed(self, loop: asyncio.AbstractEventLoop) -> Iterator[float]:
        """The time when a request arrived; the observer hears how it ends."""
        arrived, outcome = loop.time(), ANSWERED
        try:
            yield arrived
        except BaseException as error:
            outcome = _outcome(error)
            raise
        finally:
            self._observer.ended(outcome, loop.time() - arrived)

    def _check_index(self, index: ConstraintIndex) -> None:
        """Refuse a catalogue with tokens that the model lacks, or with sequences that leave no room for a prompt."""
        if (size := embeddings_of(self.model)) is not None:
            check_tokens_of_catalogue(index.snapshot, size, name="the catalogue")
        if (room := self._room(index)) is not None and room < 1:
            raise ValueError(
                f"the catalogue has sequences of {index.max_length} tokens, expected fewer: "
                "the model has no positions left for a prompt"
            )

    def _room(self, index: ConstraintIndex) -> int | None:
        """The most tokens of a prompt."""
        drafting = self._options.get("drafting", getattr(self.model.generation_config, "drafting", None))
        room = prompt_room(self.model, index, drafting=drafting, options=self._options)
        return min((limit for limit in (room, self._max_prompt_tokens) if limit is not None), default=None)

    def _warm_up(self) -> Costs:
        """Measure in all lanes; settle the drafts."""
        edition = self.catalogue.edition
        room = self._room(edition.index)
        num_beams = useful_beams(self._reader.num_beams, edition.index, 2)
        decoder = self._new_decoder(edition, num_beams)  # measured without a prefix cache
        self._prefix_cache = prefix_cache(self.model, num_bytes=self._key_cache_bytes)
        costs = fit_costs(decoder, self._lanes, room=room)
        if decoder.option("drafting") == "auto":
            settle(decoder, self._lanes, costs, max_batch=self._limits["max_batch"], room=room)
        return costs

    async def _submit(self, job: Job) -> Done:
        if self._batcher is None:
            raise Closed("the engine is not started, or is warming up: await start(), or ask again in some seconds")
        return await self._batcher.submit(job)

    def _compute(self, batch: Sequence[Job]) -> Computed:
        """The answers to a batch, in a lane; all of one edition of the catalogue."""
        edition = self.catalogue.edition
        if batch[0].kind == CLASSIFY:
            return Computed([(ranked, edition.version) for ranked in self._ranked(batch, edition)])
        reads = [job.request for job in batch]
        decoder = replace(self._decoder(edition, batch[0].kind), top_k=max(read.num_results for read in reads))
        told: dict[str, Any] = {}

        def on_output(out: Any, reuse: Reuse) -> None:
            told["num_cached_tokens"] = reuse.num_cached_tokens
            if (speculation := getattr(out, "speculation", None)) is not None:
                told["target_forwards"] = speculation.target_forwards
                told["accepted"] = int(speculation.accepted_steps.sum())

        answers = decoder.answer([replace(read.request, row=row) for row, read in enumerate(reads)], on_output)
        values = [
            BrokenAnswer("the model's scores are not numbers, or options of generate leave nothing")
            if answer.is_broken
            else (answer, edition.version)
            for answer in answers
        ]
        return Computed(values, **told)

    def _ranked(self, batch: Sequence[Job], edition: Edition) -> list[Any]:
        texts = [text for text, _ in (job.request for job in batch)]
        top_k = max(num_labels for _, num_labels in (job.request for job in batch))
        ranked = classify(
            self.model,
            self.tokenizer,
            texts,
            edition.index,
            top_k=top_k,
            prompt=self.prompt,
            batch_size=len(texts),
            progress=False,
        )
        return [labels[: job.request[1]] for labels, job in zip(ranked, batch, strict=True)]

    def _decoder(self, edition: Edition, num_beams: Any) -> Decoder:
        """A lane's decoder for an edition."""
        served, decoders = getattr(self._own, "decoders", (None, {}))
        if served is not edition:
            decoders = {}
        if num_beams not in decoders:
            if len(decoders) == DECODERS:
                decoders.clear()
            decoders[num_beams] = self._new_decoder(edition, num_beams)
        self._own.decoders = edition, decoders
        return decoders[num_beams]

    def _new_decoder(self, edition: Edition, num_beams: int) -> Decoder:
        return Decoder(
            self.model,
            edition.index,
            top_k=num_beams,
            num_beams=num_beams,
            token_budget=0,  # the batcher's
            options=self._options,
            rules=edition.rules,
            prefix_cache=self._prefix_cache,
        )

    async def _read(self, edition: Edition, **arguments: Any) -> Read:
        """See `RequestReader.read`; a large request does not keep the others waiting."""
        read = partial(self._reader.read, edition, **arguments)
        if sum(len(value) for value in arguments.values() if isinstance(value, (str, list, tuple))) <= LARGE:
            return read()
        return await asyncio.get_running_loop().run_in_executor(None, read)

    def _fallback_items(self, edition: Edition, read: Read, exclude: Any, allow: Any, rule: Any) -> list[Any]:
        """The fallback's items that a request allows."""
        if self.fallback is None and read.dropped:
            raise ValueError(
                f"history has {shown(read.dropped[0])} and no item of the catalogue, expected one or more: send "
                "known items, or serve with a fallback list"
            )
        if self.fallback is None:
            raise ValueError("history is empty, expected one item or more: serve with a fallback list, or send some")
        index = edition.index if rule is None else edition.rules[rule]
        excluded, allowed = set(exclude), None if allow is None else set(allow)
        living = zip(self.fallback, index.has_items(self.fallback), strict=True)
        items = (item for item, lives in living if lives)
        return first_allowed(items, exclude=excluded, allowed=allowed, at_most=read.num_results)


def _seconds(done: Done, total: float) -> dict[str, float]:
    return {"total": total, "queued": done.queued, "computed": done.computed}


def _outcome(error: BaseException) -> Outcome:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, (Overloaded, Closed)):
        return "refused"
    if isinstance(error, TooLate):
        return "late"
    return "invalid" if isinstance(error, ValueError) else "failed"
