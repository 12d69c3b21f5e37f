# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr recommend`: from a table of users to a table of items. Takes the options of `hf_gr.recommend`.

Exit codes: 0 all rows, 1 stopped (what is finished is kept, and the same command may finish it), 2 refused (something
has to be changed first), 3 finished, with skipped rows, 130 interrupted. Of several processes only the first has code
3: launchers (torch's, and so Accelerate's) take any code but 0 for a failure, end the other processes, and exit with
code 1 themselves.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from .flags import command, flags_as_given, flags_of, to_arguments
from .text import fail, in_flags

STOPPED, REFUSED, SKIPPED = 1, 2, 3  # exit codes; 2 is also typer's for wrong options


@command(
    output=Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.parquet", help="The file to write.", show_default=False)
    ],
    reports={
        "json": Annotated[bool, typer.Option("--json", help="Print what became of the run as one JSON object.")],
    },
)
def recommend(*, json: bool, **flags: Any) -> None:
    """Recommend items to every user of a table.

    Writes a Parquet file with a row for every user, in their order: the user, items (ids, best first) and scores.
    After a kill or an interruption, the same command continues where it stopped. Under `accelerate launch -m hf_gr.cli
    recommend ...` it runs on all GPUs, and under `python -m torch.distributed.run --standalone --nproc_per_node N -m
    hf_gr.cli recommend ...` in N processes on CPUs, where `accelerate launch --cpu` starts one. Exit code 0:
    all rows; 1: stopped, what is finished is kept, and the same command may finish it; 2: refused, an option, a file
    or a row has to be changed first; 3: finished, with skipped rows; 130: interrupted. A launcher of several processes
    turns all codes but 0 into 1.
    """
    start = perf_counter()
    with errors_on_one_line("recommend", flags=flags_as_given("recommend", flags), as_json=json):
        given = to_arguments("recommend", flags)
        model, users, output = (given.pop(name) for name in ("model", "input", "output"))
        from hf_gr.offline.early import check_early

        given = check_early("recommend", model, users, given, output=output)
        quiet_libraries()
        from hf_gr.offline.run import recommend as run

        made = run(model, users, output, **given)
        if is_main():
            from .recommend_report import print_recommended, to_json

            seconds = perf_counter() - start
            typer.echo(to_json(made, seconds)) if json else print_recommended(made, seconds)
    if made.num_skipped and is_main():
        raise typer.Exit(SKIPPED)


def is_main() -> bool:
    """Whether this is the only process, or the first of several."""
    return int(os.environ.get("RANK", "0")) == 0


def quiet_libraries() -> None:
    """Silence transformers' progress bars, and messages from all processes but the first."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not is_main():
        logging.set_verbosity_error()


@contextmanager
def errors_on_one_line(
    command: str,
    *,
    smaller: str = "--token-budget",
    flags: Mapping[str, str] | None = None,
    as_json: bool = False,
) -> Iterator[None]:
    """End the program with one line for errors that a user can fix; others keep their traceback to report.

    The exit code is 2 where repeating the command does not help, and 1 where it may: a full disk, a lost process or
    connection, no memory. Meanwhile, the log of progress goes to stderr.

    Args:
        command: its name.
        smaller: the flag that makes batches smaller.
        flags: what errors call arguments; by default the options of the function with the command's name.
        as_json: also print them to stdout as JSON.
    """
    what, flags = f"hf-gr {command}", flags_of(command) if flags is None else flags
    try:
        with log_on_stderr(flags_of(command)):
            yield
    except KeyboardInterrupt as error:
        message = "interrupted; what is finished is kept: repeat the run"
        raise fail(what, message, code=130, as_json=as_json) from error
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if is_out_of_memory(error):
            reason = " ".join(str(error).split())[:200]
            message = (
                f"the device has no memory for a batch ({reason}): what is finished is kept; repeat the run with a "
                f"smaller {smaller}"
            )
            raise fail(what, message, as_json=as_json) from error
        if type(error) is RuntimeError and not str(error).startswith(
            ("another process", "the first process", "process ")
        ):
            raise
        code = REFUSED if isinstance(error, (ValueError, ImportError)) else STOPPED
        raise fail(what, in_flags(str(error), flags), code=code, as_json=as_json) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device has no memory left; never, before PyTorch or JAX is imported."""
    torch, jax = (sys.modules.get(name) for name in ("torch", "jax"))
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


@contextmanager
def log_on_stderr(flags: Mapping[str, str]) -> Iterator[None]:
    """Log progress (without a terminal there is no bar) and warnings of `recommend` as lines on stderr."""
    logger, handler = logging.getLogger("hf_gr.progress"), logging.StreamHandler()
    handler.setFormatter(_InFlags(flags))
    level, loggers = logger.level, (logger, logging.getLogger("hf_gr.recommend"))
    for one in loggers:
        one.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for one in loggers:
            one.removeHandler(handler)
        logger.setLevel(level)


class _InFlags(logging.Formatter):
    """Lines with their time, in which arguments are called by their flags."""

    def __init__(self, flags: Mapping[str, str]) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        self._flags = flags

    def format(self, record: logging.LogRecord) -> str:
        return in_flags(super().format(record), self._flags)
