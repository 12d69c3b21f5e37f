# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr recommend`: a table of users to a table of items. Parses options; `hf_gr.offline` does the work.

Exit codes: 0 all rows, 1 refused or stopped (what is finished is kept), 3 finished, with skipped rows, 130
interrupted. Of several processes the first alone has code 3: launchers (torch's, and so Accelerate's) take any other
code than 0 for a failure, end what is still there, and end with code 1 themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

SKIPPED = 3  # the exit code of a run that finished with skipped rows; 2 is typer's for wrong options
COLUMNS, SEARCH, RUN = "Columns", "Search", "The run"


class UserFormat(StrEnum):
    """What a table of users is."""

    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"


class OnError(StrEnum):
    """What becomes of a row that cannot be answered."""

    STOP = "stop"
    SKIP = "skip"


class Dtype(StrEnum):
    """What weights are loaded as."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def column(help: str) -> Any:
    """An option that names a column."""
    return typer.Option(metavar="COLUMN", help=help, show_default=False, rich_help_panel=COLUMNS)


ModelOption = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="A model's folder or repository.", show_default=False)
]
IndexOption = Annotated[
    str | None,
    typer.Option(
        "--index",
        metavar="INDEX",
        help="The catalogue's folder or repository. Default: the one that the model names.",
        show_default=False,
    ),
]
InputOption = Annotated[
    list[Path],
    typer.Option(
        "--input",
        "-i",
        metavar="USERS",
        help="A table of users: .parquet, .csv, .tsv or .jsonl (also .gz, .bz2, .zst), or a folder of them; may be "
        "given several times.",
        show_default=False,
    ),
]
HistoryOption = Annotated[
    str | None,
    column("Lists of item ids, oldest first; in CSV texts such as `5 7` or `[5, 7]`. This, --tokens or --text."),
]
TokensOption = Annotated[str | None, column("Lists of token ids: prompts as they are.")]
TextOption = Annotated[str | None, column("Texts, for the model's tokenizer.")]
ExcludeOption = Annotated[
    str | None, column("Lists of items that a user must not be answered with; it may be the history's column.")
]
FilterOption = Annotated[
    str | None, column("Lists of the only items that a user may be answered with; null allows all.")
]
BeamsOption = Annotated[
    int | None,
    typer.Option(min=2, help="Beams of the search. Default: the model's own, else 20.", rich_help_panel=SEARCH),
]
DraftingOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="trie, head, assistant or auto; see `generate`. Default: the model's own.",
        rich_help_panel=SEARCH,
    ),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="A draft model's folder or repository, for --drafting assistant.", rich_help_panel=SEARCH
    ),
]
PrefixOption = Annotated[
    str | None, typer.Option(metavar="N,N,...", help="Token ids in front of every history.", rich_help_panel=SEARCH)
]
SuffixOption = Annotated[
    str | None, typer.Option(metavar="N,N,...", help="Token ids behind every history.", rich_help_panel=SEARCH)
]
GenerateOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A further argument of `generate`, such as length_penalty=0.5; may be given several times.",
        show_default=False,
        rich_help_panel=SEARCH,
    ),
]
MaxPromptOption = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of a prompt; the latest are kept. Default: what fits.", rich_help_panel=SEARCH),
]
DtypeOption = Annotated[Dtype, typer.Option(help="What weights are loaded as.", rich_help_panel=SEARCH)]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(metavar="auto", help="Spread a model over several devices, in one process.", rich_help_panel=SEARCH),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="For --text. Default: the model's own.", rich_help_panel=SEARCH),
]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The most tokens of a batch, padding and beams included. Default: 16384.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Users that are sorted by length, decoded and written together. Default: 2048.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
OnErrorOption = Annotated[
    OnError, typer.Option(help="Stop at a row that cannot be answered, or skip it.", rich_help_panel=RUN)
]
FormatOption = Annotated[
    UserFormat | None,
    typer.Option(help="What USERS is. Default: what its ending says.", show_default=False, rich_help_panel=RUN),
]
DelimiterOption = Annotated[
    str | None,
    typer.Option(
        metavar="CHARACTER",
        help="What separates the columns of CSV. Default: a tab in .tsv, else a comma.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
ProgressOption = Annotated[bool, typer.Option(help="Show a bar, if stderr is a terminal.", rich_help_panel=RUN)]


def recommend(
    model: ModelOption,
    input: InputOption,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE.parquet", help="What is written.", show_default=False),
    ],
    index: IndexOption = None,
    history: HistoryOption = None,
    tokens: TokensOption = None,
    text: TextOption = None,
    user: Annotated[str | None, column("Who it is; copied to the output. Default: row numbers.")] = None,
    exclude: ExcludeOption = None,
    filter: FilterOption = None,
    top_k: Annotated[int, typer.Option(min=1, help="Items for every user.", rich_help_panel=SEARCH)] = 10,
    num_beams: BeamsOption = None,
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
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the output, or the parts, of another run.", rich_help_panel=RUN),
    ] = False,
    format: FormatOption = None,
    delimiter: DelimiterOption = None,
    progress: ProgressOption = True,
) -> None:
    """Recommend items to every user of a table.

    Writes a Parquet file with a row for every user, in their order: the user, items (ids, best first) and scores.
    Killed or interrupted, the same command goes on where it stopped. Under `accelerate launch -m hf_gr.cli recommend
    ...` it runs on all devices. Exit code 0: all rows; 1: refused or stopped, what is finished is kept; 2: an option
    is wrong; 3: finished, with skipped rows; 130: interrupted. Under a launcher that starts several processes all but
    0 become its own, 1.
    """
    flags = locals()
    start = perf_counter()
    with errors_on_one_line("recommend"):
        given = to_arguments(flags)
        quiet_libraries()
        from hf_gr.offline import recommend as run

        made = run(given.pop("model"), given.pop("input"), given.pop("output"), **given)
        if is_main():
            from .recommend_report import print_recommended

            print_recommended(made, perf_counter() - start)
    if made.num_skipped and is_main():
        raise typer.Exit(SKIPPED)


def to_arguments(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that are given, as arguments of the function behind a command; the others are left to its defaults.

    Raises:
        ValueError: a list of token ids, or a further argument, that is none.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    for flag, argument in {"index": "constraint_index", "draft_model": "assistant_model"}.items():
        if flag in given:
            given[argument] = given.pop(flag)
    for name, value in given.items():
        if isinstance(value, StrEnum):
            given[name] = value.value
        elif name in ("prefix_tokens", "suffix_tokens"):
            given[name] = read_numbers(f"--{name.replace('_', '-')}", value)
    for text in given.pop("option", ()):
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals) or name in given:
            raise ValueError(
                f"--option {text!r}, expected NAME=VALUE of an argument of generate that has no flag of its own"
            )
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    return given


def read_numbers(flag: str, text: str) -> list[int]:
    """Integers between commas.

    Raises:
        ValueError: anything else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} {text!r}, expected integers such as 5,10") from None


def is_main() -> bool:
    """Whether this is the only process, or the first of several."""
    return int(os.environ.get("RANK", "0")) == 0


def quiet_libraries() -> None:
    """No bars of transformers' beside ours, and no words of several processes at once."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not is_main():
        logging.set_verbosity_error()


@contextmanager
def errors_on_one_line(command: str) -> Iterator[None]:
    """What a user can mend ends the program with one line; whatever else, with a traceback to report."""
    import torch

    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo(f"hf-gr {command}: interrupted; what is finished is kept: repeat the run", err=True)
        raise typer.Exit(130) from error
    except torch.OutOfMemoryError as error:
        typer.echo(
            f"hf-gr {command}: the device has no memory for a batch ({' '.join(str(error).split())[:200]}): what is "
            "finished is kept; repeat the run with a smaller --token-budget",
            err=True,
        )
        raise typer.Exit(1) from error
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if type(error) is RuntimeError and not str(error).startswith(
            ("another process", "the first process", "process ")
        ):
            raise
        typer.echo(f"hf-gr {command}: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error
