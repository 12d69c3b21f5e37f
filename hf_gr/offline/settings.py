# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""How a table is read and answered, checked before anything is loaded. Knows no model and no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .users import UserColumns

WINDOW_ROWS = 2048  # some ten batches: sorting finds alike lengths, and little is lost when a run is killed
TOKEN_BUDGET = 16_384
NUM_BEAMS = 20
OnError = Literal["stop", "skip"]
# What `recommend` gives to `generate` itself.
OWN_OPTIONS = frozenset(
    "inputs input_ids attention_mask constraint_index exclude_items num_return_sequences return_dict_in_generate "
    "output_scores".split()
)
SAMPLING_OPTIONS = frozenset("temperature top_k top_p top_h min_p typical_p epsilon_cutoff eta_cutoff".split())


@dataclass(frozen=True)
class Settings:
    """How a table is read and answered. Attributes are those of `recommend`; `num_beams` may be None.

    Raises:
        ValueError: settings that mean nothing.

    Example:
        >>> Settings(UserColumns(history="items"), top_k=30, num_beams=20, options={})
        Traceback (most recent call last):
        ValueError: num_beams=20, expected at least top_k=30: beams are what items come from
    """

    columns: UserColumns
    top_k: int
    num_beams: int | None
    options: dict[str, Any]
    on_error: OnError = "stop"
    token_budget: int = TOKEN_BUDGET
    window_rows: int = WINDOW_ROWS
    max_prompt_tokens: int | None = None
    prefix_tokens: tuple[int, ...] = ()
    suffix_tokens: tuple[int, ...] = ()
    leave_one_out: bool = False

    @property
    def has_targets(self) -> bool:
        """Whether rows have what users chose next."""
        return self.leave_one_out or self.columns.target is not None

    def __post_init__(self) -> None:
        for name in ("top_k", "token_budget", "window_rows"):
            check_count(name, getattr(self, name))
        if self.max_prompt_tokens is not None:
            check_count("max_prompt_tokens", self.max_prompt_tokens)
        if self.num_beams is not None:
            check_count("num_beams", self.num_beams, at_least=2)
            if self.num_beams < self.top_k:
                raise ValueError(
                    f"num_beams={self.num_beams}, expected at least top_k={self.top_k}: beams are what items come from"
                )
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f"on_error={self.on_error!r}, expected 'stop' or 'skip'")
        owned = sorted(OWN_OPTIONS & set(self.options))
        if owned:
            raise ValueError(f"{owned[0]}= is given, expected none: recommend() passes its own to generate()")
        if self.options.get("do_sample") or self.options.get("verification") == "relaxed":
            raise ValueError(
                "do_sample=True or verification='relaxed', expected beam search: a resumed run would draw other rows"
            )
        idle = sorted(name for name in SAMPLING_OPTIONS if self.options.get(name) is not None)
        if idle:
            raise ValueError(
                f"{idle[0]}={self.options[idle[0]]!r} has no effect without sampling, expected none: leave it away"
            )
        for name in ("prefix_tokens", "suffix_tokens"):
            tokens = getattr(self, name)
            if tokens and self.columns.history is None:
                raise ValueError(f"{name} without history=, expected both: other prompts are taken as they are")
            if any(type(token) is not int or token < 0 for token in tokens):
                raise ValueError(f"{name}={tokens}, expected token ids")


def check_count(name: str, value: Any, *, at_least: int = 1) -> None:
    """Refuse what is no integer, or too small a one."""
    if type(value) is not int or value < at_least:
        raise ValueError(f"{name}={value!r}, expected an integer of {at_least} or more")
