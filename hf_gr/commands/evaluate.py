# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr evaluate`: from a table of users to metrics. Takes the options of `hf_gr.evaluate`.

Exit codes are those of `hf-gr recommend`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .flags import command, to_arguments
from .items import read_items
from .recommend import SKIPPED, errors_on_one_line, is_main, quiet_libraries

REPORTS = {
    "json": Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write all numbers.", dir_okay=False, show_default=False),
    ],
    "plot": Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Also plot recall against beams and latency. The suffix is the format: .png, .svg or .pdf.",
            dir_okay=False,
            show_default=False,
        ),
    ],
}


@command(reports=REPORTS)
def evaluate(*, json: Path | None, plot: Path | None, **flags: Any) -> None:
    """Measure recommendations against what users chose next.

    Without --target the last item of every history is the target, and the others are the prompt. Exit codes are those
    of `hf-gr recommend`.
    """
    with errors_on_one_line("evaluate"):
        given = to_arguments("evaluate", flags)
        if "new_items" in given:
            given["new_items"] = _read_ids(given["new_items"])
        for path in (json, plot):  # before any long work
            if path is not None and not path.absolute().parent.is_dir():
                raise ValueError(f"{path.parent} is no folder, expected one that {path.name} can be written to")
        if plot is not None:
            from .evaluate_plot import save_plot  # needs matplotlib
            from .index_plot import check_plot

            check_plot(plot)
        quiet_libraries()
        from hf_gr.offline.evaluation import evaluate as run

        model = given["model"]
        found = run(given.pop("model"), given.pop("input"), **given)
        if is_main():
            from .evaluate_report import print_evaluation

            if json is not None:
                json.write_text(found.to_json() + "\n")
            print_evaluation(found, title=model)
            if plot is not None:
                save_plot(found, plot, title=Path(model).resolve().name if Path(model).is_dir() else model)
    if is_main() and any(result.num_skipped for result in found.results):
        raise typer.Exit(SKIPPED)


def _read_ids(path: Path) -> list[int | str]:
    """Item ids in a file; integers also as text: the library ignores the unused kind."""
    items = read_items("--new-items", path)
    return [*items, *(int(item) for item in items if isinstance(item, str) and item.lstrip("-").isdecimal())]
