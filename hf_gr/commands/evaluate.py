# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr evaluate`: a table of users to metrics. Parses options; `hf_gr.offline` does the work.

Exit codes are those of `hf-gr recommend`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .recommend import (
    RUN,
    SEARCH,
    SKIPPED,
    BudgetOption,
    DelimiterOption,
    DeviceMapOption,
    DraftingOption,
    DraftModelOption,
    Dtype,
    DtypeOption,
    ExcludeOption,
    FilterOption,
    FormatOption,
    GenerateOption,
    HistoryOption,
    IndexOption,
    InputOption,
    MaxPromptOption,
    ModelOption,
    OnError,
    OnErrorOption,
    PrefixOption,
    ProgressOption,
    SuffixOption,
    TextOption,
    TokenizerOption,
    TokensOption,
    WindowOption,
    column,
    errors_on_one_line,
    is_main,
    quiet_libraries,
    read_numbers,
    to_arguments,
)

MEASURES = "What is measured"
LISTS = ("cutoffs", "num_beams")  # integers between commas


def evaluate(
    model: ModelOption,
    input: InputOption,
    index: IndexOption = None,
    history: HistoryOption = None,
    tokens: TokensOption = None,
    text: TextOption = None,
    target: Annotated[
        str | None, column("The item that came next, or lists of them. Default: the last item of --history.")
    ] = None,
    exclude: ExcludeOption = None,
    filter: FilterOption = None,
    group: Annotated[str | None, column("Parts of the users, each with metrics of its own.")] = None,
    is_new: Annotated[str | None, column("Whether the target is a new item.")] = None,
    new_items: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="New items instead, one id a line: users whose target is new get metrics of their own.",
            exists=True,
            dir_okay=False,
            show_default=False,
            rich_help_panel=MEASURES,
        ),
    ] = None,
    cutoffs: Annotated[
        str, typer.Option(metavar="K,K,...", help="Of Recall@K and NDCG@K.", rich_help_panel=MEASURES)
    ] = "1,5,10",
    num_beams: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Beams of the search; several numbers are evaluated one after the other. Default: the model's own, "
            "else 20.",
            show_default=False,
            rich_help_panel=SEARCH,
        ),
    ] = None,
    sampled_users: Annotated[
        int,
        typer.Option(
            min=0,
            help="Users whose latency is measured, and whose beams without the catalogue are looked up.",
            rich_help_panel=MEASURES,
        ),
    ] = 16,
    drafting: DraftingOption = None,
    draft_model: DraftModelOption = None,
    max_prompt_tokens: MaxPromptOption = None,
    prefix_tokens: PrefixOption = None,
    suffix_tokens: SuffixOption = None,
    dtype: DtypeOption = Dtype.AUTO,
    device_map: DeviceMapOption = None,
    tokenizer: TokenizerOption = None,
    option: GenerateOption = None,
    token_budget: BudgetOption = None,
    window_rows: WindowOption = None,
    on_error: OnErrorOption = OnError.STOP,
    format: FormatOption = None,
    delimiter: DelimiterOption = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="For rows on the way, if processes are on several machines: one that all of them see.",
            exists=True,
            file_okay=False,
            show_default=False,
            rich_help_panel=RUN,
        ),
    ] = None,
    progress: ProgressOption = True,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write all numbers.", dir_okay=False, show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Draw recall against beams and latency, too. The ending says the format: .png, .svg or .pdf.",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure recommendations against what users chose next.

    Without --target the last item of every history is what is looked for, and the others are the prompt. Exit codes
    are those of `hf-gr recommend`.
    """
    flags = locals()
    with errors_on_one_line("evaluate"):
        given = to_arguments({name: value for name, value in flags.items() if name not in ("json", "plot")})
        given |= {name: read_numbers(f"--{name.replace('_', '-')}", given[name]) for name in LISTS if name in given}
        if new_items is not None:
            given["new_items"] = _read_ids(new_items)
        for path in (json, plot):  # ahead of what takes time
            if path is not None and not path.absolute().parent.is_dir():
                raise ValueError(f"{path.parent} is no folder, expected one that {path.name} can be written to")
        if plot is not None:
            from .evaluate_plot import check_plot, save_plot  # needs matplotlib

            check_plot(plot)
        quiet_libraries()
        from hf_gr.offline import evaluate as run

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
    """Ids of items, one a line: integers if all are; as the library is given them, both ways."""
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    return [*lines, *(int(line) for line in lines if line.lstrip("-").isdecimal())]
