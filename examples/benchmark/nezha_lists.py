# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists of ten items for the rows of a study, and what they are worth. Trains nothing, prints nothing.

A sequence that is no item keeps its place in the list. Items of the history are not filtered out.

Axes: S seeds, R rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from backbone_data import Row, Study
from report import commit
from torch import Tensor

from hf_gr.demo.evaluate import make_prompts, same_answers

LIST_LENGTH = 10
NO_ITEM = -1  # stands for a sequence that is no item
NODES = 4096  # beams of a batch at most: beyond that a CPU gains nothing
RESAMPLES = 1000
METRICS = ("H@5", "H@10", "N@5", "N@10")


@dataclass(frozen=True)
class Lists:
    """What a method recommends.

    Attributes:
        ranked: For every row at most ten items, best first; `NO_ITEM` for what is none.
        valid: The share of all K beams that are items.
        commit: Of the code that found them.
    """

    ranked: list[list[int]]
    valid: float
    commit: str = ""

    def write(self, file: Path) -> None:
        write_json(file, asdict(self))

    @classmethod
    def read(cls, file: Path) -> Lists:
        return cls(**json.loads(file.read_text(encoding="utf-8")))


def write_json(file: Path, value: Any) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.rename(file)


def some_of(rows: Sequence[Row], count: int | None) -> list[Row]:
    """A random choice; a smaller one is the first part of a larger one."""
    order = np.random.default_rng(1).permutation(len(rows))[:count]
    return [rows[number] for number in order]


def batches_of(rows: Sequence[Row], size: int, window: int) -> Iterator[list[int]]:
    """Row numbers, grouped by prompts of similar length."""
    order = sorted(range(len(rows)), key=lambda number: min(len(rows[number].history), window))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def prompts_of(rows: Sequence[Row], study: Study, window: int, model: Any) -> dict[str, Tensor]:
    """Left-padded `input_ids` and `attention_mask`."""
    histories = [row.history for row in rows]
    return make_prompts(histories, study.tokens, num_films=window, pad_token_id=model.config.pad_token_id)


def ask(
    model: Any,
    prompt: dict[str, Tensor],
    study: Study,
    *,
    num_beams: int,
    is_constrained: bool = True,
    **settings: Any,
) -> Any:
    """One call; all beams are returned."""
    catalogue: dict[str, Any] = {"constraint_index": study.index}
    if not is_constrained:  # False: a backbone has its catalogue beside it, and would take that
        catalogue = {"constraint_index": False, "max_new_tokens": study.index.max_length}
    width = {"num_beams": num_beams, "num_return_sequences": num_beams}
    return model.generate(**prompt, **catalogue, **width, do_sample=False, **settings)


def recommend(model: Any, rows: Sequence[Row], study: Study, *, window: int, num_beams: int, **settings: Any) -> Lists:
    """Ten items a row by constrained beam search, or as `settings` say."""
    ranked: list[list[int]] = [[] for _ in rows]
    num_valid = 0
    # transformers computes the prompt once a beam: more memory and more time.
    size = max(1, min(64, NODES // num_beams // (1 if settings.get("is_constrained", True) else 4)))
    for numbers in batches_of(rows, size, window):
        prompt = prompts_of([rows[number] for number in numbers], study, window, model)
        sequences = ask(model, prompt, study, num_beams=num_beams, **settings)
        found = study.index.items(sequences[:, prompt["input_ids"].shape[1] :])
        num_valid += sum(map(bool, found))
        for number, items in zip(numbers, first_ten(found, num_beams), strict=True):
            ranked[number] = items
    return Lists(ranked, num_valid / (len(rows) * num_beams), commit())


def first_ten(found: Sequence[Sequence[Any]], num_beams: int) -> Iterator[list[int]]:
    """The first ten items of every K sequences; a few items share all codes."""
    for start in range(0, len(found), num_beams):
        best = found[start : start + min(LIST_LENGTH, num_beams)]
        yield [item for items in best for item in items or [NO_ITEM]][:LIST_LENGTH]


def values_of(ranked: Sequence[Sequence[int]], rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """H@k and N@k of every row, `[R]` each: a row has one item to find, so the ideal DCG is 1."""
    places = np.array(
        [items.index(row.item) if row.item in items else math.inf for items, row in zip(ranked, rows, strict=True)]
    )
    gains = 1 / np.log2(places + 2)
    return {f"H@{k}": (places < k).astype(float) for k in (5, 10)} | {
        f"N@{k}": np.where(places < k, gains, 0.0) for k in (5, 10)
    }


@cache
def _drawn(num_rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(num_rows, size=(RESAMPLES, num_rows))


def interval(ours: np.ndarray, theirs: np.ndarray | None = None) -> tuple[float, float]:
    """A 95% interval of a mean over rows, or of the ratio of two means over the same rows: rows are resampled.

    A row is a user here, with one item to find.
    """
    drawn = _drawn(len(ours))
    found = ours[drawn].mean(axis=1)
    if theirs is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            found = found / theirs[drawn].mean(axis=1)
        found = found[np.isfinite(found)]
        if not len(found):
            return math.nan, math.nan
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def ratio(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float]:
    """The ratio of two means over the same rows, and its interval; NaN without any hit."""
    return (float(ours.mean() / theirs.mean()) if theirs.any() else math.nan, *interval(ours, theirs))


def summary(lists: Sequence[Lists], rows: Sequence[Row]) -> tuple[dict[str, Any], np.ndarray]:
    """Means over seeds and rows, and the hits at ten of each row, `[R]`, averaged over seeds."""
    by_seed = [values_of(one.ranked, rows) for one in lists]
    values = {name: np.mean([one[name] for one in by_seed], axis=0) for name in METRICS}
    hits = [float(one["H@10"].mean()) for one in by_seed]
    result: dict[str, Any] = {name: float(mean.mean()) for name, mean in values.items()}
    result |= {"rows": len(rows), "seeds": hits, "interval": interval(values["H@10"])}
    result["valid"] = float(np.mean([one.valid for one in lists]))
    return result, values["H@10"]


@dataclass
class Agreement:
    """Self-speculation beside the same model's own beam search, all beams of every row.

    Attributes:
        rows: How many.
        not_equal: Rows with other sequences, or in another order.
        wrong: Those whose scores differ by more than rounding.
        accepted_steps: Levels that were decided from what the head had drafted.
        forwards: Of the model after the prefill, a batch.
    """

    rows: int = 0
    not_equal: int = 0
    wrong: int = 0
    accepted_steps: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)

    def means(self) -> dict[str, Any]:
        accepted, forwards = float(np.mean(self.accepted_steps)), float(np.mean(self.forwards))
        return asdict(self) | {"accepted_steps": accepted, "forwards": forwards}


def compare_strict(
    model: Any, rows: Sequence[Row], study: Study, *, window: int, num_beams: int
) -> tuple[Lists, Agreement]:
    """What self-speculation recommends, and whether it is what the model itself recommends."""
    same, ranked = Agreement(), [[] for _ in rows]
    for numbers in batches_of(rows, max(1, min(16, NODES // num_beams)), window):
        prompt = prompts_of([rows[number] for number in numbers], study, window, model)
        details = {"num_beams": num_beams, "return_dict_in_generate": True, "output_scores": True}
        plain = ask(model, prompt, study, **details)
        strict = ask(model, prompt, study, **details, drafting="head", verification="strict")
        found = study.index.items(strict.sequences[:, prompt["input_ids"].shape[1] :])
        for number, items in zip(numbers, first_ten(found, num_beams), strict=True):
            ranked[number] = items
        both = [output.sequences.view(len(numbers), num_beams, -1) for output in (plain, strict)]
        differ = int((both[0] != both[1]).flatten(1).any(dim=1).sum())
        same.rows += len(numbers)
        same.not_equal += differ
        if not same_answers(plain, strict, num_beams=num_beams):
            same.wrong += max(1, differ)  # the whole batch's scores are compared
        same.accepted_steps += strict.speculation.accepted_steps.tolist()
        same.forwards.append(strict.speculation.target_forwards)
    return Lists(ranked, 1.0, commit()), same
