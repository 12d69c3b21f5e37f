# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr index`: build, show, check and push catalogues. Parses options; the library does the work.

An error of the library is one line on stderr and exit code 1. The library is imported when a command runs:
`hf-gr index --help` answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from .index_input import Format, Input
from .text import fail

IndexArgument = Annotated[
    str, typer.Argument(metavar="INDEX", help="A folder with an index, or a repository id of the Hub.")
]
RevisionOption = Annotated[
    str | None,
    typer.Option(
        help="Branch, tag or commit, if INDEX is a repository. Default: its main branch.", show_default=False
    ),
]


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")]
CODES, LABELS = "Options of codes", "Options of labels"


def build_app() -> typer.Typer:
    """The sub-commands of `hf-gr index`."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
    app.command("build", epilog=_example("build items.parquet --codes codes --offset 3 --output catalogue"))(build)
    app.command("show", epilog=_example("show catalogue --plot levels.png"))(show)
    app.command("check", epilog=_example("check me/catalogue --model me/recommender"))(check)
    app.command("push", epilog=_example("push catalogue me/catalogue --private"))(push)
    return app


def build(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT",
            help="A table of tokens or codes (.parquet, .csv, .tsv, .jsonl; several files, or a folder of them, make "
            "one), the semantic IDs of a public recipe (.json), an array of tokens, one row per item (.npy), or, with "
            "--labels, a text file of one label a line (.txt).",
            exists=True,
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Folder of the index, created if necessary. An existing index is replaced.",
            file_okay=False,
            show_default=False,
        ),
    ],
    format: Annotated[
        Format | None, typer.Option(help="The format of INPUT. Default: from its suffix.", show_default=False)
    ] = None,
    eos_token_id: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The token that ends every sequence; needed if they differ in length. Default: none.",
            show_default=False,
        ),
    ] = None,
    sequence: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="The column that holds lists of tokens, which the model knows as they are; or, given several times, "
            "columns of one token each. Default: sequence.",
            show_default=False,
            rich_help_panel="Options of tables",
        ),
    ] = None,
    codes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="The column that holds codes of semantic IDs (lists of integers or of texts such as <a_12>, or "
            "12-5-9), which --offset or --tokenizer turns into tokens; or, given several times, columns of one code "
            "each.",
            show_default=False,
            rich_help_panel="Options of tables",
        ),
    ] = None,
    item_id: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="The column of item ids. Default: item_id.",
            show_default=False,
            rich_help_panel="Options of tables",
        ),
    ] = None,
    no_item_id: Annotated[
        bool,
        typer.Option(
            "--no-item-id", help="Items are known by their row numbers.", rich_help_panel="Options of tables"
        ),
    ] = False,
    delimiter: Annotated[
        str | None,
        typer.Option(
            metavar="C",
            help="What separates the columns of CSV. Default: a comma; a tab for .tsv.",
            show_default=False,
            rich_help_panel="Options of tables",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A folder or repository with a tokenizer that has a token for every code: this or --offset. With "
            "--labels: that of the model that answers with them.",
            show_default=False,
            rich_help_panel=CODES,
        ),
    ] = None,
    offset: Annotated[
        int | None,
        typer.Option(
            help="The token of the first level's code 0, if the codes of all levels are consecutive tokens: the "
            "number of tokens before them. This or --tokenizer.",
            show_default=False,
            rich_help_panel=CODES,
        ),
    ] = None,
    level_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Codebook sizes. Default: the largest code of each level plus one.",
            show_default=False,
            rich_help_panel=CODES,
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="How INPUT and the tokenizer write a code. Default: <{level}_{code}>, such as <a_12>; {LEVEL} is a "
            "capital.",
            show_default=False,
            rich_help_panel=CODES,
        ),
    ] = None,
    labels: Annotated[
        bool,
        typer.Option(
            "--labels",
            help="INPUT is a text file of one label a line, for a language model that classifies; needs --tokenizer.",
            rich_help_panel=LABELS,
        ),
    ] = False,
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='What stands between the prompt and a label. Default: a space; "" where prompts end with one.',
            show_default=False,
            rich_help_panel=LABELS,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compile a catalogue from a file, and save it as an index.

    Tokens are numbers that the model knows; codes are those of semantic IDs, which --offset or --tokenizer turns into
    tokens. Writes constraint_index.json, constraint_index.safetensors and, unless there is one, a model card to one
    folder.
    """
    with _errors_on_one_line("build", as_json=json):
        _check_writable(output)  # before minutes of work
        source = Input(
            paths=tuple(inputs),
            format=format,
            eos_token_id=eos_token_id,
            sequence=tuple(sequence or ()),
            codes=tuple(codes or ()),
            item_id=item_id,
            no_item_id=no_item_id,
            delimiter=delimiter,
            tokenizer=tokenizer,
            offset=offset,
            level_sizes=level_sizes,
            template=template,
            labels=labels,
            prefix=prefix,
        )
        start = perf_counter()
        index = source.compile()
        seconds = perf_counter() - start
        index.save_pretrained(output)

        from hf_gr.catalogue.doubts import doubts_of

        from .index_report import built_to_json, print_built, print_doubts

        doubts = doubts_of(index.snapshot)
        if json:
            typer.echo(built_to_json(index, output, seconds, doubts))
        else:
            print_built(index, output, seconds)
        print_doubts(doubts)


def show(
    index: IndexArgument,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Also plot the levels. The suffix is the format: .png, .svg or .pdf.",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
    revision: RevisionOption = None,
) -> None:
    """Show what an index holds: its levels, its collisions and its memory.

    A step of beam search descends one level. Fewer children make it cheaper; a forced level leaves no choice.
    """
    with _errors_on_one_line("show", as_json=json):
        if plot is not None:
            from hf_gr.files.figures import check_format  # before any long work: it needs matplotlib

            check_format(plot, "--plot")
        from hf_gr.catalogue import ConstraintIndex
        from hf_gr.catalogue.summary import summarise

        from .index_report import print_plotted, print_summary, to_json

        loaded = ConstraintIndex.from_pretrained(index, revision=revision)
        summary = summarise(loaded.snapshot)
        if json:
            typer.echo(to_json(summary))
        else:
            print_summary(summary, index)
        if plot is not None:
            from .index_plot import save_plot

            is_folder = Path(index).is_dir()
            save_plot(summary, plot, title=Path(index).resolve().name if is_folder else index)  # a path may be long
            print_plotted(plot)


def check(
    index: IndexArgument,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A model's folder or repository: does the catalogue fit its vocabulary? Reads its config only.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
    revision: RevisionOption = None,
) -> None:
    """Verify an index from end to end: all digests, and that both files are of one catalogue.

    If something is damaged, names it; exit code 1. Warns where a sound index looks like a mistake: codes compiled as
    tokens.
    """
    with _errors_on_one_line("check", as_json=json):
        from hf_gr.catalogue.doubts import doubts_of

        from .index_check import check_index, check_vocabulary
        from .index_report import checked_to_json, print_checked, print_doubts

        loaded, checked = check_index(index, revision=revision)
        vocabulary = None
        if model is not None:
            vocabulary, found = check_vocabulary(loaded, model)
            checked += found
        doubts = doubts_of(loaded.snapshot, vocabulary=vocabulary)
        if json:
            typer.echo(checked_to_json(index, checked, doubts))
        else:
            print_checked(index, checked)
        print_doubts(doubts)


def push(
    index: IndexArgument,
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="The repository, such as me/catalogue; created if necessary.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Create a private repository. An existing one keeps its visibility.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(
            help="The branch to push to, created if necessary. Default: the main branch.", show_default=False
        ),
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    message: Annotated[str, typer.Option(help="The commit message.")] = "Upload constraint index",
    json: JsonOption = False,
) -> None:
    """Verify an index, upload it to the Hub, and print the commit's URL.

    A repository without a model card gets one; an existing card is kept. Log in first: `hf auth login`.
    """
    with _errors_on_one_line("push", as_json=json):
        from huggingface_hub import errors

        from hf_gr.catalogue import ConstraintIndex

        loaded = ConstraintIndex.from_pretrained(index, verify=True)
        try:
            address = loaded.push_to_hub(
                repo_id, private=private or None, revision=revision, commit_message=message, create_pr=create_pr
            )
        # The first is that of httpx or httpx2, depending on huggingface_hub's version, and no OSError.
        except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
            raise OSError(
                f"the Hub did not take {repo_id} ({error}): check the name, the connection and the login"
            ) from error
        from .index_report import pushed_to_json

        typer.echo(pushed_to_json(repo_id, address) if json else address)


def _example(arguments: str) -> str:
    return f"Example: `hf-gr index {arguments}`"


def _check_writable(folder: Path) -> None:
    """Check that a folder exists and is writable, or can be created."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"--output {folder}: {there} is no folder that may be written to, expected one: name another")


@contextmanager
def _errors_on_one_line(command: str, *, as_json: bool) -> Iterator[None]:
    """End the program with one line for errors that a user can fix; others keep their traceback to report."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise fail(f"hf-gr index {command}", error, as_json=as_json) from error
