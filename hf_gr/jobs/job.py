# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns a window of users into a window of rows, and records what decides these rows. Knows no output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from hf_gr import __version__
from hf_gr.answering.backends import backend_for, backend_of, refuse
from hf_gr.answering.fallback import living_fallback, missing_from, remove_listed
from hf_gr.answering.loading import fingerprint_tokenizer, load_index, load_tokenizer, prompt_room
from hf_gr.answering.recommender import Recommender, default_beams, useful_beams
from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.doubts import doubts_of
from hf_gr.catalogue.fingerprints import fingerprint_index
from hf_gr.generation.configuration import GRGenerationConfig
from hf_gr.tables.cells import shorten
from hf_gr.tables.files import pa
from hf_gr.tables.table import Rows

from .parts import IS_FALLBACK, NUM_DROPPED
from .prompts import PromptMaker
from .settings import DECIDING_ROWS, Settings
from .users import Users
from .warnings import counts_of, warning_of_repeated

USER, WAS_EXCLUDED = "user", "was_excluded"  # columns of the rows of `evaluate`
BOOKKEEPING = ("transformers_version", "_from_model_config")  # in a generation config; they affect no row


@dataclass(frozen=True)
class Job:
    """A model that is ready for a table.

    Attributes:
        settings: how to read and answer the table.
        maker: turns rows into prompts.
        decoder: turns prompts into items.
        schema: of the rows: the user, items, scores, what was counted, error, and what `evaluate` needs.
        doubts: what looks like a mistake in the settings.
        counts: what this process has counted of its rows.
        told: what looks like a mistake in its rows.
    """

    settings: Settings
    maker: PromptMaker
    decoder: Recommender
    schema: Any
    doubts: tuple[str, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)

    def run(self, window: Rows, on_progress: Callable[[int], None] = lambda num_rows: None) -> Any:
        """The rows of a window.

        Raises:
            ValueError: a row cannot be answered, unless such rows are skipped.
        """
        made = self.maker(window)
        self._refuse(made.problems)
        answers = self.decoder.answer_all(made.requests, on_progress)
        problems, rows = dict(made.problems), range(len(window))
        items: list[list[Any]] = [[] for _ in rows]
        scores: list[list[float] | None] = [[] for _ in rows]
        for row, fallback in made.fallbacks.items():
            items[row], scores[row] = fallback, None
        for request, answer in zip(made.requests, answers, strict=True):
            items[request.row], scores[request.row] = answer.items, answer.scores
            if answer.is_broken:
                problems[request.row] = window.problem_of_row(
                    request.row,
                    "has no item with a score, expected some, since some are allowed: the model's scores are not "
                    "numbers (float16 overflows where bfloat16 and float32 do not: dtype=, --dtype), or options of "
                    "generate leave nothing",
                )
        self._refuse(problems)
        columns = self.settings.columns
        self.counts.update(counts_of(made, items, problems))
        if columns.user is not None and window.number == 0:
            self.told.extend(warning_of_repeated(window, columns.user))
        user = range(window.first_row, window.first_row + len(window)) if columns.user is None else columns.user
        values = [user, items, scores]
        if self.settings.fallback is not None:
            values.append([row in made.fallbacks for row in rows])
        if self.settings.unknown_items == "drop":
            values.append([made.num_dropped.get(row, 0) for row in rows])
        values.append([problems.get(row) for row in rows])
        if self.settings.has_targets:
            values.append([made.targets.get(row) for row in rows])
            values.append([row in made.spared for row in rows])
        if columns.group is not None:
            values.append(columns.group)
        if columns.is_new is not None:
            values.append([made.are_new.get(row) for row in rows])
        arrays = [
            window.columns.column(value).combine_chunks() if isinstance(value, str) else pa.array(value, type=kind)
            for value, kind in zip(values, self.schema.types, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def manifest(self, users: Users) -> dict[str, Any]:
        """All that decides the rows, except what may change when an interrupted run is resumed."""
        decoder = self.decoder
        columns = asdict(self.settings.columns)
        settings = {name: getattr(self.settings, name) for name in DECIDING_ROWS}
        settings |= {"columns": columns, "num_beams": decoder.num_beams, "options": {}}  # these are below
        tokenizer = self.maker.tokenizer if self.settings.columns.text is not None else None
        config = decoder.model.generation_config
        return {
            "hf_gr": __version__,
            "users": users.fingerprint(),
            "model": backend_of(decoder.model).fingerprint(decoder.model),
            "generation config": _describe(config),
            "catalogue": fingerprint_index(decoder.index),
            "tokenizer": None if tokenizer is None else fingerprint_tokenizer(tokenizer),
            "settings": settings,
            "options": {name: _describe(value) for name, value in sorted(self.settings.options.items())},
        }

    def _refuse(self, problems: Mapping[int, str]) -> None:
        if problems and self.settings.on_error == "stop":
            raise ValueError(problems[min(problems)])


def make_job(model: Any, users: Any, settings: Settings, processes: Any) -> tuple[Job, Users]:
    """Load what a run needs, and check everything before the first row."""
    backend = backend_for(model, settings.backend, settings.of_loading)
    refuse(backend.name, backend.foreign, settings.of_loading)
    mesh = backend.to_mesh(settings.mesh)
    index, tokenizer = settings.constraint_index, settings.tokenizer
    if isinstance(index, (str, Path)) and str(index) != ".":
        index = ConstraintIndex.from_pretrained(index)  # before the model: errors in the users show at once
    table = _read_users(users, settings, index) if isinstance(index, ConstraintIndex) else None
    if settings.columns.text is not None:
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
    table = table or _read_users(users, settings, index)
    if processes.count > 1 and table.files is None:
        every = processes.gather(table.fingerprint())
        if any(one != every[0] for one in every):
            raise ValueError(
                "users differ between processes, expected the same table in all: pass it whole to each, as each takes "
                "its own windows of it"
            )
    if settings.columns.text is not None:
        index.check_tokenizer(tokenizer)
    if settings.assistant_model is not None:
        draft_model = backend.load_draft_model(settings.assistant_model, model)
        settings = replace(settings, options={**settings.options, "assistant_model": draft_model})
    decoder = Recommender(
        model,
        index,
        num_results=settings.top_k,
        num_beams=useful_beams(
            settings.num_beams or default_beams(model, settings.options, settings.top_k), index, settings.top_k
        ),
        token_budget=settings.token_budget,
        options=settings.options if mesh is None else {**settings.options, "mesh": mesh},
    )
    _check_decoding(decoder, settings)
    maker = PromptMaker(
        index.snapshot,
        settings.columns,
        tokenizer=tokenizer,
        vocab_size=backend.num_embeddings(model),
        longest=prompt_room(model, index, drafting=decoder.option("drafting"), options=settings.options),
        max_prompt_tokens=settings.max_prompt_tokens,
        prefix_tokens=tuple(settings.prefix_tokens),
        suffix_tokens=tuple(settings.suffix_tokens),
        leave_one_out=settings.leave_one_out,
        drops_unknown=settings.unknown_items == "drop",
        fallback=living_fallback(settings.fallback, index),
        top_k=settings.top_k,
        removed=frozenset(removed),
    )
    doubts = (
        *(
            f"constraint_index= may be wrong: {doubt}"
            for doubt in doubts_of(index.snapshot, vocabulary=maker.vocab_size)
        ),
        *_doubt("remove_items", missing, len(settings.remove_items or ())),
        *_doubt("fallback", missing_from(settings.fallback, index), len(settings.fallback or ())),
    )
    return Job(settings, maker, decoder, _schema(settings, table), doubts), table


def _read_users(users: Any, settings: Settings, index: ConstraintIndex) -> Users:
    """The table of users, whose ids are of the catalogue's kind; also checks the fallback."""
    living_fallback(settings.fallback, index)
    are_strings, how = index.snapshot.are_strings, settings.format
    return Users(users, settings.columns, are_strings=are_strings, format=how, delimiter=settings.delimiter)


def _doubt(name: str, missing: Sequence[Any], number: int) -> Iterator[str]:
    """What to tell of ids that the catalogue does not have."""
    if missing:
        yield (
            f"{name}= has {number:,} ids, of which the catalogue does not have {len(missing):,}, such as "
            f"{shorten(missing[0])}: they are left out"
        )


def _schema(settings: Settings, users: Users) -> Any:
    """The columns of the rows, in the order of `Job.run`."""
    columns, item = settings.columns, pa.string() if users.are_strings else pa.int64()
    who = pa.field("row", pa.int64()) if columns.user is None else users.schema.field(columns.user)
    if settings.has_targets and columns.user is not None:
        who = who.with_name(USER)
    fields = [who, pa.field("items", pa.list_(item)), pa.field("scores", pa.list_(pa.float32()))]
    if settings.fallback is not None:
        fields.append(pa.field(IS_FALLBACK, pa.bool_()))
    if settings.unknown_items == "drop":
        fields.append(pa.field(NUM_DROPPED, pa.int64()))
    fields.append(pa.field("error", pa.string()))
    taken = ("items", "scores", IS_FALLBACK, NUM_DROPPED, "error")
    if who.name in taken:
        raise ValueError(f"user={who.name!r}, expected another name than {', '.join(taken)}: rename the column")
    if settings.has_targets:
        fields.append(pa.field("targets", pa.list_(item)))
        fields.append(pa.field(WAS_EXCLUDED, pa.bool_()))
    if columns.group is not None:
        fields.append(pa.field("group", users.schema.field(columns.group).type))
    if columns.is_new is not None:
        fields.append(pa.field("is_new", pa.bool_()))
    return pa.schema(fields)


def _check_decoding(decoder: Recommender, settings: Settings) -> None:
    """Refuse unknown arguments of `generate`, rows that differ from run to run, and too few beams for the items."""
    taken = [signature(call).parameters for call in (decoder.model.generate, _forward_of(decoder.model))]
    known = {*vars(GRGenerationConfig()), *taken[0], *taken[1]} - {"args", "kwargs"}
    unknown = sorted(set(decoder.options) - known)
    if unknown:
        close = get_close_matches(unknown[0], known, n=1)  # options of ours: `Settings.read`
        raise ValueError(
            f"{unknown[0]}= is given, expected an option or an argument of generate"
            + (f": did you mean {close[0]}=?" if close else ": omit it")
        )
    if decoder.option("do_sample") or decoder.option("verification") == "relaxed":
        raise ValueError(
            "the checkpoint's generation config samples, expected beam search: pass do_sample=False, since a resumed "
            "run would draw other rows"
        )
    if decoder.num_beams < decoder.num_results or decoder.num_beams < 2:
        most = "the largest of cutoffs" if settings.has_targets else "top_k"
        raise ValueError(
            f"num_beams={decoder.num_beams}, expected 2 or more and at least {most}={decoder.num_results}: "
            "pass num_beams="
        )


def _forward_of(model: Any) -> Any:
    """What names the arguments of a prompt."""
    return getattr(model, "forward", type(model).__call__)


def _describe(value: Any) -> Any:
    """An option of `generate` as JSON: a model by its weights, a config by its fields, the rest by its `repr`."""
    if hasattr(value, "state_dict") or hasattr(value, "generation_config"):  # a model
        return backend_of(value).fingerprint(value)
    if hasattr(value, "to_diff_dict"):
        fields = sorted(value.to_diff_dict().items())
        return {name: repr(field) for name, field in fields if name not in BOOKKEEPING}
    if isinstance(value, (list, tuple)):
        return [_describe(part) for part in value]
    if type(value).__repr__ is object.__repr__:  # it would contain an address
        return [type(value).__qualname__, {name: repr(field) for name, field in sorted(vars(value).items())}]
    return repr(value)
