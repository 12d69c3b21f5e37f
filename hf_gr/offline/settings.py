# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""All options of `recommend` and `evaluate`, each stated once. Knows no model and no file.

An option is a field of `Settings`; it gives the function an argument with its documentation, and the command an
option. Add new ones here, and read them where they take effect. `--help` waits for the imports here: nothing slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, get_args

from .columns import PROMPTS, UserColumns
from .options import (
    BACKEND_HELP,
    COLUMNS,
    DEVICE_HELP,
    EVALUATE,
    MEASURES,
    MESH_HELP,
    RECOMMEND,
    REVISION_HELP,
    RUN,
    SEARCH,
    Option,
    column,
    option,
    options_for,
    variants,
)

if TYPE_CHECKING:
    from pathlib import Path

    from hf_gr.catalogue import ConstraintIndex
    from hf_gr.tables.files import Format

WINDOW_ROWS = 2048  # about ten batches: sorting finds similar lengths, and a killed run loses little
TOKEN_BUDGET = 16_384
CUTOFFS = (1, 5, 10)
SAMPLED_USERS = 16  # whose latency is measured, and whose unconstrained beams are looked up
MISSPELT = 0.85  # of difflib: numbeams, unknown_item; no argument of generate is so near to an option
NUM_RESAMPLES = 1000  # from seed to seed a bound then moves by about a fiftieth of its interval
OnError = Literal["stop", "skip"]
UnknownItems = Literal["refuse", "drop"]
# What `recommend` itself passes to `generate`.
OWN_OPTIONS = frozenset(
    "inputs input_ids attention_mask constraint_index exclude_items num_return_sequences return_dict_in_generate "
    "output_scores".split()
)
SAMPLING_OPTIONS = frozenset(
    "temperature top_k top_p top_h min_p typical_p epsilon_cutoff eta_cutoff seed generator".split()
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to read and answer a table: the options, in the order of `--help`, and two other fields.

    Columns are those of the table of users. Loaded objects, such as the catalogue, decide rows by their contents,
    which a run identifies by a fingerprint.

    Attributes:
        options: further arguments of `generate`.
        leave_one_out: the last item of every history is the target.

    Example:
        >>> Settings(history="items", top_k=30, num_beams=20).checked()
        Traceback (most recent call last):
        ValueError: num_beams=20, expected at least top_k=30: beams are what items come from
    """

    constraint_index: ConstraintIndex | str | Path | None = variants(
        None,
        {
            RECOMMEND: Option(
                "the catalogue, or its name; by default the one that the checkpoint names, or has in its folder.",
                help="The catalogue's folder or repository. Default: the one that the model names, or has in its "
                "folder.",
                flag="index",
                metavar="INDEX",
            ),
            EVALUATE: Option(
                "the catalogue, or its name; by default the one that the checkpoint names, or has in its folder. A "
                "dictionary, by name, has one for each model, or several for a single model.",
                help="The catalogue's folder or repository; may be given once for each --model, or several times for "
                "one. NAME=INDEX names it. Default: the one that the model names, or has in its folder.",
                flag="index",
                metavar="INDEX",
                reads="texts",
                annotation="ConstraintIndex | str | Path | Mapping[str, ConstraintIndex | str | Path] | None",
            ),
        },
        decides_rows=False,
    )
    history: str | None = column(
        "column of lists of item ids, oldest first; the prompt is their tokens (without end tokens), of as many of "
        "the latest as the model has room for. This, `tokens` or `text`.",
        help="Lists of item ids, oldest first; in CSV texts such as `5 7` or `[5, 7]`. This, --tokens or --text.",
    )
    tokens: str | None = column(
        "column of lists of token ids: the prompt itself.", help="Lists of token ids: the prompts themselves."
    )
    text: str | None = column("column of texts, for the tokenizer.", help="Texts, for the model's tokenizer.")
    user: str | None = variants(
        None,
        {
            RECOMMEND: Option(
                "column of user ids, of any type; copied to the output.",
                help="User ids; copied to the output. Default: row numbers.",
                panel=COLUMNS,
                metavar="COLUMN",
            ),
            EVALUATE: Option(
                "column of user ids, of any type, if users have several rows: intervals then resample users, each "
                "with all rows. By default every row is a user.",
                help="User ids, if users have several rows: intervals are then over users. Default: a row each.",
                panel=COLUMNS,
                metavar="COLUMN",
            ),
        },
    )
    target: str | None = column(
        "column of the item that came next, or of lists of them.",
        help="The item that came next, or lists of them. Default: the last item of --history.",
        of=[EVALUATE],
    )
    exclude: str | None = column(
        "column of lists of item ids that are not recommended to the user; may be the history's. Ids that the "
        "catalogue does not have are allowed, and so is null.",
        help="Lists of items that are not recommended to the user; may be the history's column.",
    )
    filter: str | None = column(
        "column of lists of the only item ids to recommend to the user; null allows all, an empty list none.",
        help="Lists of the only items to recommend to the user; null allows all.",
    )
    group: str | None = column(
        "column of the users' groups, each of which gets its own metrics.",
        help="Groups of users, each with its own metrics.",
        of=[EVALUATE],
    )
    is_new: str | None = column(
        "column of true and false (or 1 and 0): whether the target is new, instead of `new_items`.",
        help="Whether the target is a new item.",
        of=[EVALUATE],
    )
    new_items: Iterable[Any] | None = option(
        None,
        "ids of new items; users whose first target is one of them get their own metrics.",
        help="New items instead, one id per line: users whose target is new get their own metrics.",
        of=[EVALUATE],
        panel=MEASURES,
        metavar="FILE",
        reads="file",
        decides_rows=False,
    )
    cutoffs: Sequence[int] = option(
        CUTOFFS,
        "the K of Recall@K and NDCG@K; the largest is the number of items per user.",
        help="The K of Recall@K and NDCG@K.",
        of=[EVALUATE],
        panel=MEASURES,
        metavar="K,K,...",
        reads="integers",
        decides_rows=False,
    )
    unknown_items: UnknownItems = option(
        "refuse",
        'what becomes of items of a history, or of `filter`, that the catalogue does not have: `"refuse"` the row, or '
        '`"drop"` them and answer from the rest; the column `num_dropped` counts them. A target that the catalogue '
        "does not have is a miss.",
        help="Items of histories and filters that the catalogue does not have: refuse the row, or drop them.",
        panel=SEARCH,
        reads=get_args(UnknownItems),
    )
    fallback: Sequence[Any] | None = option(
        None,
        "item ids, the best first, such as the most popular ones: the answer to users without a history (null, empty, "
        'or with `unknown_items="drop"` none of it known), without those that the user must not get or the catalogue '
        "does not have. Such rows have null for `scores`, and the column `is_fallback` names them.",
        help="Answers to users without a history: item ids, the best first, in the column item_id of a table, or one "
        "per line, or as a JSON list.",
        panel=SEARCH,
        metavar="FILE",
        reads="items",
    )
    remove_items: Sequence[Any] | None = option(
        None,
        "ids of items that are recommended to nobody, such as those delisted since the catalogue was saved: removed "
        "from the loaded one in memory, so that histories that name them are still read. A catalogue that is saved "
        "after `index.remove` has forgotten them. Ids that it does not have are left out, with a warning.",
        help="Items that are recommended to nobody, such as delisted ones; histories may name them: item ids, in the "
        "column item_id of a table, or one per line, or as a JSON list.",
        of=[RECOMMEND],
        panel=SEARCH,
        flag="remove",
        metavar="FILE",
        reads="items",
        decides_rows=False,  # the catalogue without them does
    )
    top_k: int = option(
        10,
        "items per user.",
        help="Items per user.",
        of=[RECOMMEND],
        panel=SEARCH,
        reads="integer",
        at_least=1,
    )
    # `evaluate` takes several, and makes settings for each.
    num_beams: int | None = variants(
        None,
        {
            RECOMMEND: Option(
                "beams of the search, 2 or more and at least `top_k`; by default the checkpoint's own, if any, else "
                "20, or `top_k` if that is more.",
                help="Beams of the search. Default: the model's own, else 20.",
                panel=SEARCH,
                reads="integer",
                at_least=2,
            ),
            EVALUATE: Option(
                "one number or several, each evaluated; by default the checkpoint's own, else 20.",
                help="Beams of the search; several numbers are evaluated in turn. Default: the model's own, else 20.",
                panel=SEARCH,
                metavar="N,N,...",
                reads="integers",
                annotation="int | Sequence[int] | None",
            ),
        },
    )
    baselines: bool = option(
        True,
        "also evaluate two recommenders without a model, for the same users: the most popular items, and the items "
        "that go with those of the history. They learn from the histories before the targets, and need `history`.",
        help="Also evaluate popular items and items that go with the history's, learned from --history.",
        of=[EVALUATE],
        panel=MEASURES,
        reads="both",
        decides_rows=False,
    )
    omit_history: bool | None = option(
        None,
        "whether lists of the baselines omit what the user has had, whatever `exclude` says; by default if histories "
        "hardly repeat an item (under 5%), which a model learns. The result says whether they did.",
        help="Whether lists of the baselines omit what the user has had. Default: if under 5% of the items of "
        "histories repeat an earlier one.",
        of=[EVALUATE],
        panel=MEASURES,
        reads="both",
        decides_rows=False,
    )
    num_resamples: int = option(
        NUM_RESAMPLES,
        "resamples of the users, from which the intervals of metrics and differences are made; 0 for none.",
        help="Resamples of the users, for intervals; 0 for none.",
        of=[EVALUATE],
        panel=MEASURES,
        reads="integer",
        at_least=0,
        decides_rows=False,
    )
    bootstrap_seed: int = option(
        0,
        "of the resamples.",
        help="Seed of the resamples.",
        of=[EVALUATE],
        panel=MEASURES,
        reads="integer",
        at_least=0,
        decides_rows=False,
    )
    sampled_users: int = option(
        SAMPLED_USERS,
        "users whose latency is measured, one at a time, and whose beams without the catalogue are looked up; 0 "
        "for neither.",
        help="Users whose latency is measured, and whose beams without the catalogue are looked up.",
        of=[EVALUATE],
        panel=MEASURES,
        reads="integer",
        at_least=0,
        decides_rows=False,
    )
    assistant_model: Any = option(
        None,
        "a draft model for `generate`, loaded or by name.",
        help="A draft model's folder or repository, for --drafting assistant.",
        panel=SEARCH,
        flag="draft_model",
        metavar="MODEL",
        decides_rows=False,
    )
    max_prompt_tokens: int | None = option(
        None,
        "the most tokens of a prompt; the latest are kept.",
        help="The most tokens of a prompt; the latest are kept. Default: what fits.",
        panel=SEARCH,
        reads="integer",
        at_least=1,
    )
    prefix_tokens: Sequence[int] = option(
        (),
        "token ids before every history, such as a start token.",
        help="Token ids before every history.",
        panel=SEARCH,
        metavar="N,N,...",
        reads="integers",
    )
    suffix_tokens: Sequence[int] = option(
        (),
        "token ids after every history.",
        help="Token ids after every history.",
        panel=SEARCH,
        metavar="N,N,...",
        reads="integers",
    )
    backend: Literal["auto", "torch", "flax"] = option(
        "auto",
        'what a model loaded by name runs in: `"torch"`, `"flax"`, or `"auto"`, as for '
        "`AutoModelForGenerativeRetrieval.from_pretrained`.",
        help=BACKEND_HELP,
        panel=SEARCH,
        reads=("auto", "torch", "flax"),
        decides_rows=False,  # the model's fingerprint does
    )
    dtype: Any = option(
        "auto",
        'of a model loaded by name: `"auto"` (the checkpoint\'s), `"float32"`, `"bfloat16"` or `"float16"`.',
        help="The type of the loaded weights.",
        panel=SEARCH,
        reads=("auto", "float32", "bfloat16", "float16"),
        decides_rows=False,
    )
    revision: str | None = option(
        None,
        "branch, tag or commit of a model loaded by name from the Hub; also of its tokenizer, and of the catalogue in "
        "its repository.",
        help=REVISION_HELP,
        panel=SEARCH,
        decides_rows=False,  # the weights do
    )
    device: Any = option(
        None,
        'of a model loaded by name: `"cpu"`, `"cuda:1"`, ...; by default a GPU if there is one, and of several '
        "processes each its own.",
        help=DEVICE_HELP,
        panel=SEARCH,
        decides_rows=False,
    )
    device_map: Any = option(
        None,
        'of a model loaded by name, such as `"auto"` for one larger than a device; in one process only.',
        help="Spread a model over several devices, in one process.",
        panel=SEARCH,
        metavar="auto",
        decides_rows=False,
    )
    mesh: Any = option(
        None,
        "of a model in Flax: a `jax.sharding.Mesh`, or the numbers of devices that divide rows and weights, such as "
        "`(4, 2)`; by default all local devices divide rows.",
        help=MESH_HELP,
        panel=SEARCH,
        metavar="N,N",
        reads="integers",
        decides_rows=False,
    )
    tokenizer: Any = option(
        None,
        "for `text`, or its name; by default the checkpoint's.",
        help="For --text. Default: the model's own.",
        panel=SEARCH,
        metavar="NAME",
        decides_rows=False,
    )
    token_budget: int = option(
        TOKEN_BUDGET,
        "the most tokens of a batch, including padding and beams: reduce it if memory runs out. Affects "
        "only the last digits of scores; a run of `recommend` may resume with another one.",
        help=f"The most tokens of a batch, including padding and beams. Default: {TOKEN_BUDGET}.",
        panel=RUN,
        reads="integer",
        at_least=1,
        decides_rows=False,  # the advice for a device that runs out of memory
    )
    window_rows: int = option(
        WINDOW_ROWS,
        "users sorted, decoded and written together; a process holds so many, and loses them if it dies. Also "
        "affects the last digits of scores.",
        help=f"Users sorted by length, decoded and written together. Default: {WINDOW_ROWS}.",
        panel=RUN,
        reads="integer",
        at_least=1,
    )
    on_error: OnError = option(
        "stop",
        '`"stop"` at the first row that cannot be answered, or `"skip"` it: `recommend` writes an empty row that says '
        "why, and may resume a stopped run so; `evaluate` does not count it. A damaged file always stops the run.",
        help="Stop at a row that cannot be answered, or skip it.",
        panel=RUN,
        reads=get_args(OnError),
        decides_rows=False,  # the advice for a bad row
    )
    overwrite: bool = option(
        False,
        "replace the output or the parts of another run. A run always resumes from its own.",
        help="Replace the output, or the parts, of another run.",
        of=[RECOMMEND],
        panel=RUN,
        reads="switch",
        decides_rows=False,
    )
    format: Format | None = option(
        None,
        'of `users`: `"parquet"`, `"csv"` or `"jsonl"`; by default from the suffix.',
        help="The format of USERS. Default: from its suffix.",
        panel=RUN,
        reads=("parquet", "csv", "jsonl"),
        decides_rows=False,
    )
    delimiter: str | None = option(
        None,
        "between the columns of CSV; by default a tab in `.tsv` and a comma elsewhere.",
        help="The delimiter of CSV. Default: a tab in .tsv, else a comma.",
        panel=RUN,
        metavar="CHARACTER",
        decides_rows=False,
    )
    work_dir: str | Path | None = option(
        None,
        "a folder for intermediate rows, which all processes see; by default one of the system's.",
        help="A folder for intermediate rows that all processes see, if they are on several machines.",
        of=[EVALUATE],
        panel=RUN,
        metavar="FOLDER",
        reads="folder",
        decides_rows=False,
    )
    progress: bool = option(
        True,
        "in the first process: a bar on a terminal or in a notebook, elsewhere a line for each window to the logger "
        "`hf_gr.progress`, at level INFO.",
        help="Show a bar, or without a terminal log a line for each window.",
        panel=RUN,
        reads="both",
        decides_rows=False,
    )
    options: Mapping[str, Any] = field(default_factory=dict)
    leave_one_out: bool = False

    @classmethod
    def read(cls, function: str, given: Mapping[str, Any], *, users: Any = None) -> Settings:
        """The settings from a function's keyword arguments; those that are not its options go to `generate`.

        A list of histories is a table with one column, which need not be named.
        """
        from hf_gr.tables.memory import HISTORY, is_histories  # a slow import, which `--help` does not need

        if is_histories(users) and not any(given.get(name) is not None for name in PROMPTS):
            given = {**given, "history": HISTORY}
        names = {each.name for each in options_for(cls, function)}
        own = {name: value for name, value in given.items() if name in names}
        return cls(**own, options={name: value for name, value in given.items() if name not in names})

    @cached_property
    def columns(self) -> UserColumns:
        """The columns to read."""
        return UserColumns(**{each.name: getattr(self, each.name) for each in fields(UserColumns)})

    @property
    def has_targets(self) -> bool:
        """Whether rows have targets."""
        return self.leave_one_out or self.target is not None

    @property
    def of_loading(self) -> dict[str, Any]:
        """The options that say how a model by name is loaded, and where it runs."""
        return {name: getattr(self, name) for name in ("revision", "device", "device_map", "mesh")}

    def checked(self) -> Settings:
        """The same settings, with Python's integers, and token ids as tuples.

        Raises:
            ValueError: invalid settings.
        """
        tokens = {name: tuple(getattr(self, name)) for name in ("prefix_tokens", "suffix_tokens")}
        reads_history = self.columns.history is not None
        counts = {name: count(name, getattr(self, name)) for name in ("top_k", "token_budget", "window_rows")}
        if self.max_prompt_tokens is not None:
            counts["max_prompt_tokens"] = count("max_prompt_tokens", self.max_prompt_tokens)
        if self.num_beams is not None:
            counts["num_beams"] = count("num_beams", self.num_beams, at_least=2)
            if self.num_beams < self.top_k:
                raise ValueError(
                    f"num_beams={self.num_beams}, expected at least top_k={self.top_k}: beams are what items come from"
                )
        if self.device is not None and self.device_map is not None:
            raise ValueError(f"device={str(self.device)!r} and device_map={self.device_map!r}, expected one of both")
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error={self.on_error!r}, expected 'stop' or 'skip'")
        if self.unknown_items not in get_args(UnknownItems):
            raise ValueError(f"unknown_items={self.unknown_items!r}, expected 'refuse' or 'drop'")
        fallback = self.fallback
        if fallback is not None:
            if isinstance(fallback, (str, bytes, PathLike, Mapping)):
                raise ValueError(f"fallback={fallback!r}, expected a list of item ids, the best first: read the file")
            fallback = _plain_ids(fallback)
            if not fallback:
                raise ValueError("fallback=[], expected one item or more: omit it to refuse empty histories")
        removed = self.remove_items
        if removed is not None:
            if isinstance(removed, (str, bytes, PathLike, Mapping)):
                raise ValueError(f"remove_items={removed!r}, expected a list of item ids: read the file")
            removed = _plain_ids(removed)
        owned = sorted(OWN_OPTIONS & set(self.options))
        if owned:
            raise ValueError(f"{owned[0]}= is given, expected none: recommend() passes its own to generate()")
        if self.options.get("do_sample") or self.options.get("verification") == "relaxed":
            raise ValueError(
                "do_sample=True or verification='relaxed', expected beam search: a resumed run would draw other rows"
            )
        own_names = [each.name for each in options_for(Settings, EVALUATE if self.has_targets else RECOMMEND)]
        for name in self.options:
            meant = get_close_matches(name, own_names, n=1, cutoff=MISSPELT)
            if meant:
                raise ValueError(
                    f"{name}= is given, expected an option or an argument of generate: did you mean {meant[0]}=?"
                )
        idle = sorted(name for name in SAMPLING_OPTIONS if self.options.get(name) is not None)
        if idle:
            raise ValueError(
                f"{idle[0]}={self.options[idle[0]]!r} has no effect without sampling, expected none: omit it"
            )
        for name, ids in tokens.items():
            if ids and not reads_history:
                raise ValueError(f"{name} without history=, expected both: other prompts are taken as they are")
            if not all(is_count(token, at_least=0) for token in ids):
                raise ValueError(f"{name}={ids}, expected token ids")
            tokens[name] = tuple(map(int, ids))
        return replace(self, **counts, **tokens, fallback=fallback, remove_items=removed)


def _plain_ids(items: Iterable[Any]) -> tuple[Any, ...]:
    """Item ids, also of NumPy and PyTorch, as Python's."""
    return tuple(item.item() if hasattr(item, "item") else item for item in items)


def cutoffs_and_beams(settings: Settings) -> tuple[tuple[int, ...], list[int | None]]:
    """The cutoffs of `evaluate`, ascending, and the numbers of beams: None is the checkpoint's own.

    Raises:
        ValueError: one is no integer, there is none, or there are fewer beams than items to find.
    """
    cutoffs: Any = settings.cutoffs
    cutoffs = tuple(cutoffs) if isinstance(cutoffs, Iterable) else (cutoffs,)
    if not cutoffs or not all(map(is_count, cutoffs)):
        raise ValueError(f"cutoffs={settings.cutoffs!r}, expected integers of 1 or more, such as (1, 5, 10)")
    beams: Any = settings.num_beams
    beams = list(dict.fromkeys(beams)) if isinstance(beams, Iterable) else [beams]
    if not beams:
        raise ValueError("num_beams=[], expected one number or more")
    most = max(map(int, cutoffs))
    for width in beams:
        if width is not None and count("num_beams", width, at_least=2) < most:
            raise ValueError(
                f"cutoffs= has {most}, expected at most num_beams={width}, which items come from: use num_beams={most}"
            )
    return tuple(sorted(set(map(int, cutoffs)))), beams


def count(name: str, value: Any, *, at_least: int = 1) -> int:
    """A Python or NumPy integer as Python's; raise for anything else, or if it is too small."""
    if not is_count(value, at_least=at_least):
        raise ValueError(f"{name}={value!r}, expected an integer of {at_least} or more")
    return int(value)


def is_count(value: Any, *, at_least: int = 1) -> bool:
    """Whether a value is a Python or NumPy integer, and large enough."""
    from hf_gr.catalogue.sequences import is_integer  # a slow import, which `--help` does not need

    return is_integer(value) and value >= at_least
