# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns a window of users into a window of rows, and records what decides these rows. Knows no output.

What looks like a mistake in rows is counted while they are answered; windows of earlier runs are not.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

from hf_gr import __version__
from hf_gr.answering.backends import backend_for, backend_of, refuse
from hf_gr.answering.fallback import living_fallback
from hf_gr.answering.loading import fingerprint_tokenizer, load_index, load_tokenizer
from hf_gr.answering.recommender import Recommender, default_beams, useful_beams
from hf_gr.answering.requests import remove_listed
from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.code_book import doubts_of
from hf_gr.catalogue.item_values import read_table
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.checks import check_code_book
from hf_gr.generation.configuration import GRGenerationConfig
from hf_gr.tables.cells import shorten
from hf_gr.tables.files import pa, pc
from hf_gr.tables.table import Rows

from .parts import IS_FALLBACK, NUM_DROPPED, NUM_PROVEN, SIMILAR_TO
from .reading import UserRow, Users, read_rows
from .settings import DECIDING_ROWS, Settings

USER, WAS_EXCLUDED = "user", "was_excluded"  # columns of the rows of `evaluate`
NO_SCORES = (
    "has no item with a score, expected some, since some are allowed: the model's scores are not numbers (float16 "
    "overflows where bfloat16 and float32 do not: dtype=), or options of generate leave nothing"
)
progress = logging.getLogger("hf_gr.progress")
BOOKKEEPING = ("transformers_version", "_from_model_config")  # in a generation config; they affect no row


@dataclass(frozen=True)
class Job:
    """A model that is ready for a table."""

    settings: Settings  # how to read and answer the table
    recommender: Recommender  # reads rows and answers them
    removed: frozenset[Any] = frozenset()  # items that the run removes from the catalogue
    doubts: tuple[str, ...] = ()  # warnings about the settings
    counts: Counter[str] = field(default_factory=Counter)  # of this process's rows
    told: list[str] = field(default_factory=list)  # warnings about its rows

    def run(self, window: Rows, on_progress: Callable[[int], None] = lambda num_rows: None) -> Any:
        """The rows of a window: the user, items, scores, what was counted, error, and what `evaluate` needs.

        Raises:
            ValueError: a row cannot be answered, unless such rows are skipped.
        """
        rows, settings = self.read(window), self.settings
        errors = [row.problem for row in rows]
        self._refuse(errors)
        asked = {number: row.request for number, row in enumerate(rows) if row.request and row.request.tokens}
        answers = dict(zip(asked, self.recommender.answer_all(list(asked.values()), on_progress), strict=True))
        items: list[list[Any]] = []
        scores: list[list[float] | None] = []
        similar: list[tuple[Any, ...] | None] = [None] * len(rows)
        proven = [answers[number].num_proven if number in answers else None for number in range(len(rows))]
        for number, row in enumerate(rows):
            if (answer := answers.get(number)) is not None:
                items.append(answer.items)
                scores.append(answer.scores)
                if answer.is_broken:
                    errors[number] = window.problem_of_row(number, NO_SCORES, settings.user if settings.item else None)
            elif row.request is not None:
                given, similar[number] = self.recommender.fallback_items(row.request)
                items.append(given)
                scores.append(None)
            else:
                items.append([])
                scores.append([])
        self._refuse(errors)
        snapshot = self.recommender.index.snapshot
        self.counts.update(_counts_of(rows, items, errors, snapshot))
        kind = pa.list_(pa.string() if snapshot.are_strings else pa.int64())
        columns: dict[str, Any] = {}
        if settings.user is None:
            columns["row"] = pa.array(range(window.first_row, window.first_row + len(window)), pa.int64())
        else:
            columns[USER if settings.has_targets else settings.user] = window.columns.column(settings.user)
            if window.number == 0:
                self.told.extend(_warning_of_repeated(window, settings.user))
        columns["items"] = pa.array(items, kind)
        columns["scores"] = pa.array(scores, pa.list_(pa.float32()))
        if settings.fallback is not None:
            columns[IS_FALLBACK] = pa.array([row.is_cold for row in rows])
            if settings.fallback.keys() - {None}:
                columns[SIMILAR_TO] = pa.array(similar, kind)
        if settings.unknown_items == "drop":
            dropped = [len(row.request.dropped) if row.request else 0 for row in rows]
            columns[NUM_DROPPED] = pa.array(dropped, pa.int64())
        if settings.has_targets or self.recommender.option("exact"):
            columns[NUM_PROVEN] = pa.array(proven, pa.int64())
        columns["error"] = pa.array(errors, pa.string())
        if settings.has_targets:
            columns["targets"] = pa.array([row.targets for row in rows], kind)
            columns[WAS_EXCLUDED] = pa.array([row.is_excluded for row in rows])
        if settings.group is not None:
            columns["group"] = window.columns.column(settings.group)
        if settings.is_new is not None:
            columns["is_new"] = pa.array([row.is_new for row in rows], pa.bool_())
        return pa.table(columns)

    def read(self, window: Rows) -> list[UserRow]:
        """The rows of a window: see `read_rows`."""
        return read_rows(window, self.recommender, self.settings, self.removed)

    def without_model(self) -> Job:
        """The same, which reads rows and does not answer: it keeps no model in memory."""
        room = self.recommender.room
        return replace(self, recommender=replace(self.recommender, model=None, max_prompt_tokens=room))

    def manifest(self, users: Users) -> dict[str, Any]:
        """All that decides the rows, except what may change when an interrupted run is resumed."""
        recommender, settings = self.recommender, self.settings
        tokenizer = None if settings.text is None else fingerprint_tokenizer(recommender.tokenizer)
        model = recommender.model
        return {
            "hf_gr": __version__,
            "users": users.fingerprint(),
            "model": backend_of(model).fingerprint(model),
            "generation config": _describe(model.generation_config),
            "catalogue": recommender.index.snapshot.fingerprint(),
            "tokenizer": tokenizer,
            "settings": {name: getattr(settings, name) for name in DECIDING_ROWS}
            | {"num_beams": recommender.num_beams, "fallback": _describe(settings.fallback)},
            "options": {name: _describe(value) for name, value in sorted(settings.options.items())},
        }

    def _refuse(self, errors: Sequence[str | None]) -> None:
        if self.settings.on_error == "stop" and (first := next(filter(None, errors), None)) is not None:
            raise ValueError(first)


def make_job(model: Any, users: Any, settings: Settings, processes: Any) -> tuple[Job, Users]:
    """Load what a run needs, and check everything before the first row."""
    backend = backend_for(model, settings.backend, settings.of_loading)
    refuse(backend.name, backend.foreign, settings.of_loading)
    mesh = backend.to_mesh(settings.mesh)
    index, tokenizer = settings.constraint_index, settings.tokenizer
    if isinstance(index, (str, Path)) and str(index) != ".":
        index = ConstraintIndex.from_pretrained(index)  # before the model: errors in the users show at once
    table = _read_users(users, settings, index) if isinstance(index, ConstraintIndex) else None
    if settings.text is not None:
        tokenizer = load_tokenizer(tokenizer, model, revision=settings.revision)
    model = backend.load_model(
        model,
        dtype=settings.dtype,
        device=settings.device,
        device_map=settings.device_map,
        revision=settings.revision,
        processes=processes,
    )
    index = load_index(index, model)  # a copy: the caller's keeps what is removed
    removed, missing = remove_listed(settings.remove_items or (), index)
    fallback, unknown = living_fallback(settings.fallback, index)
    table = table or _read_users(users, settings, index)
    for line in table.report if processes.is_main else ():
        progress.info(line)
    if processes.count > 1 and table.files is None:
        every = processes.gather(table.fingerprint())
        if any(one != every[0] for one in every):
            raise ValueError(
                "users differ between processes, expected the same table in all: pass it whole to each, as each takes "
                "its own windows of it"
            )
    if settings.text is not None:
        index.check_tokenizer(tokenizer)
    if settings.assistant_model is not None:
        draft_model = backend.load_draft_model(settings.assistant_model, model)
        settings = replace(settings, options={**settings.options, "assistant_model": draft_model})
    of_items = {name: settings.options[name] for name in ("item_bias", "item_groups") if name in settings.options}
    of_items = {name: read_table(given, name, index.snapshot) for name, given in of_items.items()}
    settings = replace(settings, options={**settings.options, **of_items})
    num_beams = settings.num_beams or default_beams(model, settings.options, settings.top_k)
    recommender = Recommender(
        model,
        index,
        num_results=settings.top_k,
        num_beams=useful_beams(num_beams, index, settings.top_k),
        token_budget=settings.token_budget,
        options=settings.options if mesh is None else {**settings.options, "mesh": mesh},
        unknown_items=settings.unknown_items,
        fallback=fallback,
        tokenizer=tokenizer,
        vocab_size=backend.num_embeddings(model),
        max_prompt_tokens=settings.max_prompt_tokens,
        prefix_tokens=tuple(settings.prefix_tokens),
        suffix_tokens=tuple(settings.suffix_tokens),
    )
    _check_decoding(recommender, settings)
    check_code_book(recommender.option("code_book"), index.snapshot)
    found = doubts_of(index.snapshot, vocabulary=recommender.vocab_size)
    doubts = [f"constraint_index= may be wrong: {doubt}" for doubt in found]
    doubts += _doubt("remove_items", missing, len(settings.remove_items or ()))
    doubts += _doubt("fallback", unknown, len({item for row in (fallback or {}).values() for item in row}))
    return Job(settings, recommender, frozenset(removed), tuple(doubts)), table


def _read_users(users: Any, settings: Settings, index: ConstraintIndex) -> Users:
    """The table of users, whose ids are of the catalogue's kind; also checks the fallback."""
    living_fallback(settings.fallback, index)
    return Users(users, settings, are_strings=index.snapshot.are_strings)


def _doubt(name: str, missing: Sequence[Any], number: int) -> Iterator[str]:
    """A warning about ids that the catalogue does not have."""
    if missing:
        yield (
            f"{name}= has {number:,} ids, of which the catalogue does not have {len(missing):,}, such as "
            f"{shorten(missing[0])}: they are left out"
        )


def _check_decoding(recommender: Recommender, settings: Settings) -> None:
    """Refuse unknown arguments of `generate`, rows that differ from run to run, and too few beams for the items."""
    model = recommender.model
    forward = getattr(model, "forward", type(model).__call__)  # what names the arguments of a prompt
    known = {*vars(GRGenerationConfig()), *signature(model.generate).parameters, *signature(forward).parameters}
    known -= {"args", "kwargs"}
    unknown = sorted(set(recommender.options) - known)
    if unknown:
        close = get_close_matches(unknown[0], known | {each.name for each in fields(settings)}, n=1)
        raise ValueError(
            f"{unknown[0]}= is given, expected an option or an argument of generate"
            + (f": did you mean {close[0]}=?" if close else ": omit it")
        )
    if recommender.option("do_sample") or recommender.option("verification") == "relaxed":
        raise ValueError(
            "the checkpoint's generation config samples, expected beam search: pass do_sample=False, since a resumed "
            "run would draw other rows"
        )
    least = 2 if recommender.option("exact") else max(recommender.num_results, 2)
    if recommender.num_beams < least:
        most = "the largest of cutoffs" if settings.has_targets else "top_k"
        raise ValueError(
            f"num_beams={recommender.num_beams}, expected 2 or more and at least {most}={recommender.num_results}: "
            "pass num_beams="
        )


def _describe(value: Any) -> Any:
    """An option of `generate` as JSON: a model by its weights, a config by its fields, the rest by its `repr`."""
    if hasattr(value, "state_dict") or hasattr(value, "generation_config"):  # a model
        return backend_of(value).fingerprint(value)
    if hasattr(value, "to_diff_dict"):
        fields = sorted(value.to_diff_dict().items())
        return {name: repr(field) for name, field in fields if name not in BOOKKEEPING}
    # A value for each item, of which a `repr` may omit some.
    if isinstance(value, Mapping) or hasattr(value, "tolist"):
        entries: Any = value
        if hasattr(entries, "to_dict"):  # of pandas
            entries = entries.to_dict()
        entries = sorted(map(repr, entries.items())) if isinstance(entries, Mapping) else entries.tolist()
        return sha256(repr(entries).encode()).hexdigest()
    if isinstance(value, (list, tuple)):
        return [_describe(part) for part in value]
    if type(value).__repr__ is object.__repr__:  # it would contain an address
        return [type(value).__qualname__, {name: repr(field) for name, field in sorted(vars(value).items())}]
    return repr(value)


def _counts_of(
    rows: Sequence[UserRow], items: Sequence[Sequence[Any]], errors: Sequence[str | None], snapshot: Snapshot
) -> Counter[str]:
    """What to count of a window: its rows, the items of each, and why some have none."""
    answered = [(row, found) for row, found, error in zip(rows, items, errors, strict=True) if error is None]
    excluded = [item for row in rows if row.request for item in row.request.exclude]
    return Counter(
        answered=len(answered),
        fallback=sum(row.is_cold for row, _ in answered),
        empty=sum(not found for _, found in answered),
        excluded=len(excluded),
        unknown=int((~snapshot.sequences_of(excluded)[0]).sum()) if excluded else 0,
    )


def _warning_of_repeated(window: Rows, column: str) -> Iterator[str]:
    """What to tell of a user with several rows in a window."""
    counted = pc.value_counts(window.columns.column(column).combine_chunks().drop_null())
    most = pc.max(counted.field("counts")).as_py() or 0
    if most > 1:
        user = counted.field("values")[pc.index(counted.field("counts"), most).as_py()].as_py()
        yield (
            f"user {shorten(user)} has {most:,} rows among the first {len(window):,}, expected one of each user: "
            "every row is answered alone; where rows are purchases, pass item= in place of history="
        )


def warnings_of(counts: Counter[str]) -> Iterator[str]:
    """What to tell of the counts of a whole run."""
    answered, excluded = counts["answered"], counts["excluded"]
    if excluded and counts["unknown"] == excluded:
        what = f"exclude= has {excluded:,} ids, of which the catalogue has none, expected its ids"
        yield f"{what}: nothing was excluded; is it the right column?"
    if answered and counts["fallback"] == answered:
        yield (
            f"fallback= answered all {answered:,} rows, expected some from the model: is the history the right "
            "column, and are its ids the catalogue's?"
        )
    elif answered and counts["empty"] == answered:
        yield (
            f"all {answered:,} rows are without an item, expected some: exclude= or filter= leaves nothing; are they "
            "the right columns?"
        )
