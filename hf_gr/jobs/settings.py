# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The arguments of `recommend` and `evaluate`, and what is wrong with them. Knows no model and no file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any

WINDOW_ROWS = 2048  # about ten batches: sorting finds similar lengths, and a killed run loses little
TOKEN_BUDGET = 16_384
CUTOFFS = (1, 5, 10)
SAMPLED_USERS = 16  # whose latency is measured, and whose unconstrained beams are looked up
NUM_RESAMPLES = 1000  # from seed to seed a bound then moves by about a fiftieth of its interval
# What `recommend` itself passes to `generate`.
OWN_OPTIONS = frozenset(
    "inputs input_ids attention_mask constraint_index exclude_items num_return_sequences return_dict_in_generate "
    "output_scores".split()
)
SAMPLING_OPTIONS = frozenset(
    "temperature top_k top_p top_h min_p typical_p epsilon_cutoff eta_cutoff seed generator".split()
)
ROLES = ("history", "tokens", "text", "user", "exclude", "filter", "target", "group", "is_new")  # of columns
PROMPTS = ROLES[:3]  # columns that make the prompt: one of them
TAKEN = ("items", "scores", "is_fallback", "similar_to", "num_dropped", "num_proven", "error")  # columns of the output
# A run can be resumed only with the same; the model's and the catalogue's fingerprints stand for what loads them.
DECIDING_ROWS = (
    *("unknown_items", "top_k", "max_prompt_tokens", "prefix_tokens", "suffix_tokens", "window_rows"),
    *ROLES,
    "leave_one_out",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to read and answer a table: the arguments of `recommend` and `evaluate`, which document them.

    Attributes:
        options: further arguments of `generate`.
        leave_one_out: the last item of every history is the target.
    """

    constraint_index: Any = None
    history: str | None = None
    tokens: str | None = None
    text: str | None = None
    user: str | None = None
    item: str | None = None
    time: str | None = None
    quantity: str | None = None
    target: str | None = None
    exclude: str | None = None
    filter: str | None = None
    group: str | None = None
    is_new: str | None = None
    new_items: Iterable[Any] | None = None
    cutoffs: Sequence[int] = CUTOFFS
    unknown_items: str = "refuse"
    fallback: Any = None  # once it is checked, as `given_fallback` has it
    remove_items: Sequence[Any] | None = None
    top_k: int = 10
    exact: bool | None = None
    num_beams: int | None = None  # `evaluate` takes several, and makes settings for each
    baselines: bool = True
    omit_history: bool | None = None
    num_resamples: int = NUM_RESAMPLES
    bootstrap_seed: int = 0
    sampled_users: int = SAMPLED_USERS
    assistant_model: Any = None
    max_prompt_tokens: int | None = None
    prefix_tokens: Sequence[int] = ()
    suffix_tokens: Sequence[int] = ()
    backend: str = "auto"
    dtype: Any = "auto"
    revision: str | None = None
    device: Any = None
    device_map: Any = None
    mesh: Any = None
    tokenizer: Any = None
    token_budget: int = TOKEN_BUDGET
    window_rows: int = WINDOW_ROWS
    on_error: str = "stop"
    overwrite: bool = False
    format: Any = None
    delimiter: str | None = None
    work_dir: Any = None
    progress: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    leave_one_out: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Settings:
        """The settings from the arguments of `recommend` or `evaluate`.

        A list of histories is a table with one column, which need not be named; so are histories made of purchases.
        """
        from hf_gr.tables.memory import HISTORY, is_histories  # a slow import, which `--help` does not need

        given = {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        is_made = is_histories(arguments["users"]) or given.get("item") is not None
        if is_made and not any(given.get(name) is not None for name in PROMPTS):
            given["history"] = HISTORY
        return cls(**given)

    @property
    def roles(self) -> dict[str, str]:
        """The columns to read, each once, and what they are: the history may also be the column to exclude."""
        columns = {name: getattr(self, name) for name in reversed(ROLES)}
        return {column: role for role, column in columns.items() if column is not None}

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
        for column in (*ROLES, "item", "time", "quantity"):
            if not isinstance(getattr(self, column), str | None):
                raise ValueError(
                    f"{column}={getattr(self, column)!r}, expected the name of a column: put the values into one"
                )
        given = [name for name in PROMPTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(f"{name}={getattr(self, name)!r}" for name in given) or "no column"
            raise ValueError(
                f"{found} is given, expected one of history=, tokens= and text=: the column that makes the prompt "
                "(for a dictionary of histories by user, pass list(users.values()))"
            )
        others = [name for name in ROLES if name != "user" and getattr(self, name) not in (None, "history")]
        if self.item is not None and (others or self.user in (None, "history")):
            found = f"{others[0]}={getattr(self, others[0])!r}" if others else f"user={self.user!r}"
            raise ValueError(
                f"{found} with item={self.item!r}, expected the columns of purchases: user=, item= and time=; "
                "the column 'history' is made of them, and exclude='history' may name it"
            )
        for name in ("time", "quantity"):
            if (column := getattr(self, name)) is not None and self.item is None:
                raise ValueError(
                    f"{name}={column!r} without item=, expected both: the columns of a table of purchases"
                )
        if self.user in TAKEN and not self.has_targets:
            raise ValueError(f"user={self.user!r}, expected another name than {', '.join(TAKEN)}: rename the column")
        counts = {name: count(name, getattr(self, name)) for name in ("top_k", "token_budget", "window_rows")}
        if self.max_prompt_tokens is not None:
            counts["max_prompt_tokens"] = count("max_prompt_tokens", self.max_prompt_tokens)
        if self.num_beams is not None:
            counts["num_beams"] = count("num_beams", self.num_beams, at_least=2)
            if self.num_beams < self.top_k and not self.exact:
                raise ValueError(
                    f"num_beams={self.num_beams}, expected at least top_k={self.top_k}: beams are what items come from"
                )
        if self.device is not None and self.device_map is not None:
            raise ValueError(f"device={str(self.device)!r} and device_map={self.device_map!r}, expected one of both")
        for name, known in (("on_error", ("stop", "skip")), ("unknown_items", ("refuse", "drop"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}, expected {known[0]!r} or {known[1]!r}")
        listed: dict[str, Any] = {}
        if (items := self.remove_items) is not None:
            if isinstance(items, (str, bytes, PathLike, Mapping)):
                raise ValueError(f"remove_items={items!r}, expected a list of item ids: read the file")
            listed["remove_items"] = tuple(item.item() if hasattr(item, "item") else item for item in items)
        if self.fallback is not None:
            from hf_gr.answering.fallback import given_fallback  # a slow import, which `--help` does not need

            listed["fallback"] = given_fallback(self.fallback)
        options = self.options if self.exact is None else {**self.options, "exact": self.exact}
        if owned := sorted(OWN_OPTIONS & set(self.options)):
            raise ValueError(f"{owned[0]}= is given, expected none: recommend() passes its own to generate()")
        if self.options.get("do_sample") or self.options.get("verification") == "relaxed":
            raise ValueError(
                "do_sample=True or verification='relaxed', expected beam search: a resumed run would draw other rows"
            )
        if idle := sorted(name for name in SAMPLING_OPTIONS if self.options.get(name) is not None):
            raise ValueError(
                f"{idle[0]}={self.options[idle[0]]!r} has no effect without sampling, expected none: omit it"
            )
        tokens = {name: tuple(getattr(self, name)) for name in ("prefix_tokens", "suffix_tokens")}
        for name, ids in tokens.items():
            if ids and self.history is None:
                raise ValueError(f"{name} without history=, expected both: other prompts are taken as they are")
            if not all(is_count(token, at_least=0) for token in ids):
                raise ValueError(f"{name}={ids}, expected token ids")
            tokens[name] = tuple(map(int, ids))
        return replace(self, options=options, **counts, **tokens, **listed)


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
    if settings.exact and len(beams) > 1:
        raise ValueError(f"num_beams={beams} with exact=True, expected one number or none: lists would be the same")
    most = max(map(int, cutoffs))
    for width in beams:
        if width is not None and count("num_beams", width, at_least=2) < most and not settings.exact:
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
