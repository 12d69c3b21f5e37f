# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr evaluate`: from a table of users to metrics. Takes the options of `hf_gr.evaluate`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import typer

from .failures import SKIPPED, as_options, is_main, quiet_libraries
from .recommend import of_generate

NAMED = re.compile(r"([^=/\\]+)=(.+)")  # NAME=PATH


def evaluate(
    *,
    model: list[str],
    users: list[Path],
    constraint_index: list[str] | None = None,
    new_items: Sequence[Any] | None = None,
    as_json: bool = False,
    plot: Path | None = None,
    drafting: str | None = None,
    option: list[str] | None = None,
    **given: Any,
) -> None:
    """Measure recommendations against what users chose next, and compare models.

    Without --target the last item of every history is the target, and the others are the prompt. With --history,
    popular items and items that often go with those of the history are baselines. Intervals are bootstrap intervals
    over users; differences are paired by user. Exit codes are those of `hf-gr recommend`.

    Args:
        model: a model's folder or repository; may be given several times, to compare models. NAME=MODEL names it.
        constraint_index: the catalogue's folder or repository; may be given once for each --model, or several times
            for one. NAME=INDEX names it. By default the one that the model names, or has in its folder.
        new_items: new items, instead of --is-new: users whose target is new get their own metrics.
        plot: also plot recall with its intervals against beams and latency, to a file .png, .svg or .pdf.
    """
    models, indexes = _compared(model, constraint_index or [])
    if new_items is not None:  # ids of text files are strings: they are also tried as integers
        from hf_gr.tables.cells import read_integer

        numbers = [read_integer(item) for item in new_items if isinstance(item, str)]
        given["new_items"] = [*new_items, *(number for number in numbers if number is not None)]
    if plot is not None:  # before any long work
        if not plot.absolute().parent.is_dir():
            raise ValueError(f"plot={str(plot)!r}, expected an existing folder: {plot.parent} is none")
        from hf_gr.jobs.plot import check_format  # needs matplotlib

        check_format(plot, "plot")
    quiet_libraries()
    from hf_gr import evaluate as run

    found = run(models, users, constraint_index=indexes, **given, **of_generate(drafting, option, given))
    if is_main():
        from hf_gr.jobs.show import WIDE, as_text

        if as_json:
            typer.echo(found.to_json())
        else:  # warnings are on stderr
            width = get_terminal_size().columns if sys.stdout.isatty() else WIDE
            typer.echo(as_options(as_text(replace(found, warnings=()), width=width)))
        if plot is not None:
            found.plot(plot)
        if found.skipped:
            raise typer.Exit(SKIPPED)


def _compared(models: Sequence[str], indexes: Sequence[str]) -> tuple[Any, Any]:
    """The arguments `model` and `constraint_index`: one each, or dictionaries by name."""
    if len(models) > 1 and len(indexes) > 1 and len(models) != len(indexes):
        raise ValueError(
            f"--index is given {len(indexes)} times and --model {len(models)} times, expected --index as often, or "
            "once for all models: give each --model its --index, in the same order"
        )
    by_model, by_index = _by_name(models, "model"), _by_name(indexes, "index")
    if len(indexes) > 1:
        if len(models) == 1:
            return next(iter(by_model.values())), by_index
        return by_model, dict(zip(by_model, by_index.values(), strict=True))  # in order, whatever their names
    model = by_model if len(models) > 1 or models[0] not in by_model.values() else models[0]
    return model, next(iter(by_index.values()), None)


def _by_name(texts: Sequence[str], flag: str) -> dict[str, str]:
    """Paths by name: the given one, else the last part of the path, or all of it where that is not enough."""
    pairs: list[tuple[str | None, str]] = []
    for text in texts:
        named = None if Path(text).exists() else NAMED.fullmatch(text)
        pairs.append((None, text) if named is None else (named[1], named[2]))
    last = [name or (Path(path).resolve().name if Path(path).is_dir() else path) for name, path in pairs]
    found: dict[str, str] = {}
    for (name, path), short in zip(pairs, last, strict=True):
        name = name or (short if last.count(short) == 1 else path)
        if name in found:
            raise ValueError(f"{flag}={name!r} is given twice, expected different names: NAME={path} names it")
        found[name] = path
    return found
