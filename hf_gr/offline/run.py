# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`recommend`: answers for a whole table of users, window by window, on as many devices as there are.

The table is cut into windows of rows. A window is the unit of everything: its rows are sorted by length, cut into
batches, decoded, put back in order, and written as one part. Window i is process i % N's. Windows depend neither on
the number of processes nor on what is finished, so one process and many make the same parts, and to resume is to skip
the parts that are there. Memory is that of a window.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from hf_gr import __version__
from hf_gr.catalogue import ConstraintIndex
from hf_gr.tables import Format, pa

from .decoding import Decoder
from .loading import (
    fingerprint_index,
    fingerprint_model,
    fingerprint_tokenizer,
    load_index,
    load_model,
    load_tokenizer,
    prompt_room,
)
from .parts import Parts, check_output
from .processes import Processes
from .prompts import PromptMaker
from .users import Paths, UserColumns, Users, Window

logger = logging.getLogger(__name__)

WINDOW_ROWS = 2048  # some ten batches: sorting finds alike lengths, and little is lost when a run is killed
TOKEN_BUDGET = 16_384
NUM_BEAMS = 20
OnError = Literal["stop", "skip"]
BOOKKEEPING = ("transformers_version", "_from_model_config")  # of a generation config; they decide nothing
KEPT = ("group", "is_new")  # columns that `evaluate` finds beside the answers
# What `recommend` gives to `generate` itself.
OWN_OPTIONS = frozenset(
    "inputs input_ids attention_mask constraint_index exclude_items num_return_sequences return_dict_in_generate "
    "output_scores".split()
)


@dataclass(frozen=True)
class Recommended:
    """What a run has made.

    Attributes:
        output: the file.
        num_rows: rows of it, as many as users.
        num_skipped: rows without an answer, whose `error` says why.
        num_resumed: windows that were finished before this run began.
    """

    output: Path
    num_rows: int
    num_skipped: int
    num_resumed: int


@dataclass(frozen=True)
class Settings:
    """How a table is read and answered: all of it decides rows, but for `token_budget` only their last digits.

    Attributes are those of `recommend`.
    """

    columns: UserColumns
    top_k: int
    num_beams: int
    on_error: OnError
    token_budget: int
    window_rows: int
    max_prompt_tokens: int | None
    prefix_tokens: tuple[int, ...]
    suffix_tokens: tuple[int, ...]
    options: dict[str, Any]
    leave_one_out: bool = False


def recommend(
    model: Any,
    users: Paths,
    output: str | PathLike[str],
    *,
    constraint_index: ConstraintIndex | str | Path | None = None,
    history: str | None = None,
    tokens: str | None = None,
    text: str | None = None,
    user: str | None = None,
    exclude: str | None = None,
    filter: str | None = None,
    top_k: int = 10,
    num_beams: int | None = None,
    on_error: OnError = "stop",
    overwrite: bool = False,
    format: Format | None = None,
    delimiter: str | None = None,
    tokenizer: Any = None,
    prefix_tokens: Sequence[int] = (),
    suffix_tokens: Sequence[int] = (),
    max_prompt_tokens: int | None = None,
    token_budget: int = TOKEN_BUDGET,
    window_rows: int = WINDOW_ROWS,
    dtype: Any = "auto",
    device_map: Any = None,
    progress: bool = True,
    **options: Any,
) -> Recommended:
    """Recommend items to every user of a table, and write them to a Parquet file, in the order of the table.

    Runs as it is on one device, and under `accelerate launch` on many: call it in every process. Each has the model
    and the catalogue, takes every N-th window of users, and the first one merges what they have written; all of them
    see the same folders. Interrupted or killed, a repeated call goes on where it stopped. Windows that are finished
    are in `OUTPUT.parts` until all are; no process holds more than one.

    Args:
        model: a loaded model, or the folder or repository of one.
        users: a file, several in order, or a folder of them: Parquet, CSV or JSON lines. In CSV, lists are texts such
            as `5 7` or `[5, 7]`. JSON lines have all keys in the first line.
        output: a `.parquet` file with the columns of `user` (or `row`, from 0), `items` (ids, best first), `scores`
            (as `sequences_scores`), and with `on_error="skip"` also `error`. There are at most `top_k` items, less
            where fewer are allowed. Items of one sequence have one score.
        constraint_index: the catalogue, or its name; by default the one that the checkpoint names.
        history: column of lists of item ids, oldest first; the prompt is their tokens (without end tokens), of as many
            of the latest as the model has room for. This, `tokens` or `text`.
        tokens: column of lists of token ids: the prompt as it is.
        text: column of texts, for the tokenizer.
        user: column that says who it is, of any type, copied.
        exclude: column of lists of ids that a user is not answered with; it may be the history's. Ids that the
            catalogue does not have are fine, and so is null.
        filter: column of lists of the only ids that a user may be answered with; null allows all, an empty list none.
        top_k: items for every user.
        num_beams: of the search, 2 or more and at least `top_k`; by default the checkpoint's own, if it has any, else
            20, or `top_k` if that is more.
        on_error: `"stop"` at the first row that cannot be answered, or `"skip"` it, with an empty row that says why.
            A damaged file stops in any case.
        overwrite: replace the output or the parts of another run. Those of this run are gone on with in any case.
        format: of `users`: `"parquet"`, `"csv"` or `"jsonl"`; by default what the ending says.
        delimiter: of CSV; by default a tab in `.tsv` and a comma elsewhere.
        tokenizer: for `text`, or its name; by default the checkpoint's.
        prefix_tokens: in front of every history, such as a begin token.
        suffix_tokens: behind every history.
        max_prompt_tokens: of a prompt; the latest are kept.
        token_budget: the most tokens of a batch, padding and beams included. Less if memory runs out.
        window_rows: of a window.
        dtype: of a model that is loaded here: `"auto"` (the checkpoint's), `"float32"`, `"bfloat16"` or `"float16"`.
        device_map: of a model that is loaded here, such as `"auto"` for one larger than a device; in one process only.
        progress: show a bar, if stderr is a terminal; the first process does.
        options: further arguments of `generate`: `drafting="trie"`, `length_penalty`, ... Sampling is refused, since
            rows would not be the same again.

    Returns:
        What was made, in every process.

    Raises:
        ValueError: before any work, for arguments and columns that cannot lead to rows; later for a row that cannot be
            answered (with its number, from 0 through all files) or a damaged file. What is finished is kept.
        OSError: the disk is full; what is finished is kept.
        RuntimeError: another process died or failed.

    Example:
        >>> import hf_gr  # doctest: +SKIP
        >>> hf_gr.recommend("me/recommender", "users.parquet", "recs.parquet", history="items")  # doctest: +SKIP
    """
    settings = check_settings(
        Settings(
            columns=UserColumns(history, tokens, text, user, exclude, filter),
            top_k=top_k,
            num_beams=0 if num_beams is None else num_beams,
            on_error=on_error,
            token_budget=token_budget,
            window_rows=window_rows,
            max_prompt_tokens=max_prompt_tokens,
            prefix_tokens=tuple(prefix_tokens),
            suffix_tokens=tuple(suffix_tokens),
            options=options,
        )
    )
    check_output(Path(output))
    processes = Processes()
    where = {"dtype": dtype, "device_map": device_map, "tokenizer": tokenizer}
    job, table = make_job(
        model, users, settings, processes, index=constraint_index, format=format, delimiter=delimiter, **where
    )
    return run_job(job, table, Path(output), processes, overwrite=overwrite, progress=progress)


@dataclass(frozen=True)
class Job:
    """What turns a window of users into rows."""

    settings: Settings
    maker: PromptMaker
    decoder: Decoder
    schema: Any

    def run(self, window: Window, on_progress: Callable[[int], None] = lambda num_rows: None) -> Any:
        """The rows of a window.

        Raises:
            ValueError: a row that cannot be answered, unless such rows are skipped.
        """
        made = self.maker(window)
        if made.problems and self.settings.on_error == "stop":
            raise ValueError(made.problems[min(made.problems)])
        answers = self.decoder.answer_all(made.requests, on_progress)
        items: list[list[Any]] = [[] for _ in range(len(window))]
        scores: list[list[float]] = [[] for _ in range(len(window))]
        for request, answer in zip(made.requests, answers, strict=True):
            items[request.row], scores[request.row] = answer.items, answer.scores
        user, targets = self.settings.columns.user, made.targets
        columns: dict[str, Any] = {
            self.schema.names[0]: range(window.first_row, window.first_row + len(window))
            if user is None
            else window.columns.column(user).combine_chunks(),
            "items": items,
            "scores": scores,
            "error": [made.problems.get(row) for row in range(len(window))],
            "targets": [targets.get(row) for row in range(len(window))],
        }
        for name in KEPT:
            column = getattr(self.settings.columns, name)
            if column is not None:
                columns[name] = window.columns.column(column).combine_chunks()
        arrays = [
            columns[field.name]
            if isinstance(columns[field.name], pa.Array)
            else pa.array(columns[field.name], type=field.type)
            for field in self.schema
        ]
        return pa.Table.from_arrays(arrays, schema=self.schema)


def make_job(
    model: Any,
    users: Paths,
    settings: Settings,
    processes: Processes,
    *,
    index: Any,
    format: Format | None,
    delimiter: str | None,
    tokenizer: Any,
    dtype: Any,
    device_map: Any,
) -> tuple[Job, Users]:
    """Load what a run needs, and check it all before the first row."""
    if isinstance(index, (str, Path)) and str(index) != ".":
        index = ConstraintIndex.from_pretrained(index)  # ahead of the model: what is wrong with users shows at once
    table = None
    if isinstance(index, ConstraintIndex):
        are_strings = index.snapshot.are_strings
        table = Users(users, settings.columns, are_strings=are_strings, format=format, delimiter=delimiter)
    if settings.columns.text is not None:
        tokenizer = load_tokenizer(tokenizer, model)
    count = processes.count
    model = load_model(model, dtype=dtype, device_map=device_map, device=processes.device, num_processes=count)
    index = load_index(index, model)
    if table is None:
        are_strings = index.snapshot.are_strings
        table = Users(users, settings.columns, are_strings=are_strings, format=format, delimiter=delimiter)
    if settings.columns.text is not None:
        index.check_tokenizer(tokenizer)
    decoder = Decoder(
        model,
        index,
        top_k=settings.top_k,
        num_beams=settings.num_beams or _default_beams(model, settings.top_k),
        token_budget=settings.token_budget,
        options=settings.options,
    )
    _check_decoding(decoder)
    maker = PromptMaker(
        index.snapshot,
        settings.columns,
        tokenizer=tokenizer,
        vocab_size=getattr(getattr(model.get_input_embeddings(), "weight", None), "shape", (None,))[0],
        longest=prompt_room(model, index, by_head=_option(decoder, "drafting") == "head"),
        max_prompt_tokens=settings.max_prompt_tokens,
        prefix_tokens=settings.prefix_tokens,
        suffix_tokens=settings.suffix_tokens,
        leave_one_out=settings.leave_one_out,
    )
    user, item = settings.columns.user, pa.string() if table.are_strings else pa.int64()
    who = pa.field("row", pa.int64()) if user is None else table.schema.field(user)
    fields = [who, pa.field("items", pa.list_(item)), pa.field("scores", pa.list_(pa.float32()))]
    fields += [pa.field("error", pa.string())] if settings.on_error == "skip" else []
    if settings.leave_one_out or settings.columns.target is not None:
        fields.append(pa.field("targets", pa.list_(item)))
    kept = {name: getattr(settings.columns, name) for name in KEPT}
    fields += [pa.field(name, table.schema.field(column).type) for name, column in kept.items() if column is not None]
    if len({field.name for field in fields}) < len(fields):
        raise ValueError(f"user={user!r}, expected another name than items, scores and error: rename the column")
    return Job(settings, maker, decoder, pa.schema(fields)), table


def run_job(
    job: Job, users: Users, output: Path, processes: Processes, *, overwrite: bool, progress: bool
) -> Recommended:
    """Run a job over a table, with all processes, from where it stopped."""
    parts, is_done, message = None, False, None
    if processes.is_main:
        try:
            parts = Parts(output, _manifest(job, users))
            is_done = parts.prepare(overwrite=overwrite)
        except (ValueError, OSError) as error:
            parts, message = error, str(error)
    run, is_done, message = processes.from_main(
        (parts.manifest if isinstance(parts, Parts) else None, is_done, message)
    )
    if isinstance(parts, Exception):
        raise parts
    if message is not None:
        raise RuntimeError(f"the first process has refused the run: {message}")
    parts = Parts(output, run)
    if is_done:
        return Recommended(output, *parts.totals(), num_resumed=0)
    num_resumed = parts.count() if processes.is_main else 0
    failure: Exception | None = None
    num_windows = 0
    try:
        with _progress_bar(users, job.settings.window_rows, parts, shown=progress and processes.is_main) as advance:
            num_windows = _run_windows(job, users, parts, processes, advance)
    except Exception as error:  # told to the others, and raised below
        failure = error
        parts.stop()
    failures = processes.gather(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    first = next((rank for rank, text in enumerate(failures) if text is not None), None)
    if first is not None:
        raise RuntimeError(f"process {first} has stopped: {failures[first]}")
    made: Any = None
    if processes.is_main:
        try:
            made = parts.merge(num_windows)
        except (ValueError, OSError) as error:
            made = error
    found = processes.from_main(str(made) if isinstance(made, Exception) else made)
    if isinstance(made, Exception):
        raise made
    if isinstance(found, str):
        raise RuntimeError(f"the first process could not merge the parts: {found}")
    return Recommended(output, *found, num_resumed=processes.from_main(num_resumed))


def _run_windows(job: Job, users: Users, parts: Parts, processes: Processes, advance: Callable[[int], None]) -> int:
    """Write the parts of this process; how many windows there are in all."""
    num_windows = 0
    for window in users.windows(job.settings.window_rows):
        num_windows += 1
        if window.number % processes.count != processes.rank or parts.has(window.number) or parts.is_stopped:
            continue
        parts.write(window.number, job.run(window, advance))
        advance(0)
    return num_windows


def check_settings(settings: Settings) -> Settings:
    """Refuse settings that mean nothing, before anything is loaded."""
    for name in ("top_k", "token_budget", "window_rows"):
        _check_count(name, getattr(settings, name))
    if settings.num_beams:
        _check_count("num_beams", settings.num_beams, at_least=2)
    if settings.max_prompt_tokens is not None:
        _check_count("max_prompt_tokens", settings.max_prompt_tokens)
    if settings.num_beams and settings.num_beams < settings.top_k:
        raise ValueError(
            f"num_beams={settings.num_beams}, expected at least top_k={settings.top_k}: beams are what items come from"
        )
    if settings.on_error not in ("stop", "skip"):
        raise ValueError(f"on_error={settings.on_error!r}, expected 'stop' or 'skip'")
    owned = sorted(OWN_OPTIONS & set(settings.options))
    if owned:
        raise ValueError(f"{owned[0]}= is given, expected none: recommend() passes its own to generate()")
    if settings.options.get("do_sample") or settings.options.get("verification") == "relaxed":
        raise ValueError(
            "do_sample=True or verification='relaxed', expected beam search: a resumed run would draw other rows"
        )
    for name in ("prefix_tokens", "suffix_tokens"):
        if getattr(settings, name) and settings.columns.history is None:
            raise ValueError(f"{name} without history=, expected both: other prompts are taken as they are")
        if any(type(token) is not int or token < 0 for token in getattr(settings, name)):
            raise ValueError(f"{name}={getattr(settings, name)}, expected token ids")
    return settings


def _check_count(name: str, value: Any, *, at_least: int = 1) -> None:
    if type(value) is not int or value < at_least:
        raise ValueError(f"{name}={value!r}, expected an integer of {at_least} or more")


def _check_decoding(decoder: Decoder) -> None:
    """Refuse what leads to other rows each time, and beams that cannot hold the items."""
    if _option(decoder, "do_sample") or _option(decoder, "verification") == "relaxed":
        raise ValueError(
            "the checkpoint's generation config samples, expected beam search: pass do_sample=False, since a resumed "
            "run would draw other rows"
        )
    if decoder.num_beams < decoder.top_k or decoder.num_beams < 2:
        raise ValueError(
            f"num_beams={decoder.num_beams}, expected 2 or more and at least top_k={decoder.top_k}: pass num_beams="
        )


def _option(decoder: Decoder, name: str) -> Any:
    """An option of `generate`: of this call, else the checkpoint's."""
    return decoder.options.get(name, getattr(decoder.model.generation_config, name, None))


def _default_beams(model: Any, top_k: int) -> int:
    own = model.generation_config.num_beams
    return own if own is not None and own > 1 else max(NUM_BEAMS, top_k)


def _manifest(job: Job, users: Users) -> dict[str, Any]:
    """All that decides the rows."""
    settings = asdict(job.settings) | {"num_beams": job.decoder.num_beams}
    settings.pop("options")
    tokenizer = job.maker.tokenizer if job.settings.columns.text is not None else None
    options = {name: _describe(value) for name, value in sorted(job.settings.options.items())}
    config = job.decoder.model.generation_config
    described = {
        "hf_gr": __version__,
        "users": users.fingerprint(),
        "model": fingerprint_model(job.decoder.model),
        "generation config": {
            name: repr(value) for name, value in sorted(config.to_diff_dict().items()) if name not in BOOKKEEPING
        },
        "catalogue": fingerprint_index(job.decoder.index),
        "tokenizer": None if tokenizer is None else fingerprint_tokenizer(tokenizer),
        "settings": settings,
        "options": options,
    }
    return json.loads(json.dumps(described))  # as it is read again: tuples are lists


def _describe(value: Any) -> Any:
    """An option of `generate` for the manifest: a model by its weights, the rest as it is written."""
    if hasattr(value, "state_dict"):
        return fingerprint_model(value)
    return value.to_diff_dict() if hasattr(value, "to_diff_dict") else repr(value)


@contextmanager
def _progress_bar(users: Users, window_rows: int, parts: Parts, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A function that is told how many more rows of a window there are, 0 when it is written, and moves a bar."""
    if not (shown and sys.stderr is not None and sys.stderr.isatty() and find_spec("rich")):
        yield lambda num_rows: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    total, here = users.num_rows, 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("users"))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True)) as bar:
        task = bar.add_task("Recommending", total=total)

        def advance(num_rows: int) -> None:
            # Of the other processes the parts are seen.
            nonlocal here
            here = here + num_rows if num_rows else 0
            done = parts.count() * window_rows + here
            bar.update(task, completed=done if total is None else min(done, total))

        advance(0)
        yield advance
