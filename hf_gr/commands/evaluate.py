# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr evaluate`: from a table of users to metrics. Takes the options of `hf_gr.evaluate`.

Exit codes are those of `hf-gr recommend`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .flags import MODELS, command, flags_as_given, to_arguments
from .recommend import SKIPPED, errors_on_one_line, is_main, quiet_libraries

NAMED = re.compile(r"([^=/\\]+)=(.+)")  # NAME=PATH

REPORTS = {
    "json": Annotated[bool, typer.Option("--json", help="Print all numbers as one JSON object, for scripts.")],
    "plot": Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Also plot recall with its intervals against beams and latency. The suffix is the format: .png, .svg "
            "or .pdf.",
            dir_okay=False,
            show_default=False,
        ),
    ],
}


@command(model=MODELS, reports=REPORTS)
def evaluate(*, json: bool, plot: Path | None, **flags: Any) -> None:
    """Measure recommendations against what users chose next, and compare models.

    Without --target the last item of every history is the target, and the others are the prompt. With --history,
    popular items and items that go with those of the history are evaluated beside the model. Intervals are bootstrap
    intervals over users, and differences are paired over the same users. Exit codes are those of `hf-gr recommend`.
    """
    with errors_on_one_line("evaluate", flags=flags_as_given("evaluate", flags), as_json=json):
        given = to_arguments("evaluate", flags)
        model, index = _compared(given.pop("model"), given.pop("constraint_index", None) or [])
        if "new_items" in given:
            given["new_items"] = _read_ids(given["new_items"])
        if plot is not None:  # before any long work
            if not plot.absolute().parent.is_dir():
                raise ValueError(f"{plot.parent} is no folder, expected one that {plot.name} can be written to")
            from hf_gr.files.figures import check_format  # needs matplotlib

            check_format(plot, "--plot")
        from hf_gr.offline.early import check_early

        users = given.pop("input")
        given = check_early("evaluate", model, users, given | {"constraint_index": index})
        quiet_libraries()
        from hf_gr.offline.evaluation import evaluate as run

        found = run(model, users, **given)
        if is_main():
            from .evaluate_report import print_evaluation

            if json:
                typer.echo(found.to_json())
            else:
                print_evaluation(found, title=", ".join(model) if isinstance(model, dict) else model)
            if plot is not None:
                found.plot(plot)
    if is_main() and found.skipped:
        raise typer.Exit(SKIPPED)


def _compared(models: Sequence[str], indexes: Sequence[str]) -> tuple[Any, Any]:
    """The arguments `model` and `constraint_index`: one each, or dictionaries by name."""
    if len(models) > 1 and len(indexes) > 1 and len(models) != len(indexes):
        raise ValueError(
            f"--index is given {len(indexes)} times and --model {len(models)} times, expected --index as often, or "
            "once for all models: give each --model its --index, in the same order"
        )
    by_model, by_index = (_by_name(texts, flag) for texts, flag in ((models, "--model"), (indexes, "--index")))
    if len(models) > 1 and len(indexes) > 1:
        by_index = dict(zip(by_model, by_index.values(), strict=True))  # in order, however they are called
    model = by_model if len(models) > 1 or models[0] not in by_model.values() else models[0]
    index = by_index if len(indexes) > 1 else next(iter(by_index.values()), None)
    if isinstance(index, dict) and len(models) == 1:
        model = next(iter(by_model.values()))
    return model, index


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
            raise ValueError(f"{flag} {name!r} is given twice, expected different names: NAME={path} names it")
        found[name] = path
    return found


def _read_ids(path: Path) -> list[int | str]:
    """Item ids in a file; integers also as text: the library ignores the unused kind."""
    from hf_gr.tables.cells import read_integer
    from hf_gr.tables.items import read_items

    items = read_items("--new-items", path)
    numbers = [read_integer(item) for item in items if isinstance(item, str)]
    return [*items, *(number for number in numbers if number is not None)]
