# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""How commands end: exit codes, errors on one line, and what is logged meanwhile.

Codes of all commands. 0: all is done. 1: stopped by the disk, the connection, another process or the memory: what is
finished is kept, and the same command may succeed. 2: refused: an option, a file or a row has to be changed first; a
catalogue is damaged. 3: finished, with skipped rows. 130: interrupted. Of several processes only the first has code 3:
launchers (torch's, and so Accelerate's) take any code but 0 for a failure, end the others, and exit with code 1.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import typer

from hf_gr.files.text import printable

STOPPED, REFUSED, SKIPPED, INTERRUPTED = 1, 2, 3, 130
FLAGS: dict[str, str] = {}  # of the command that runs, by argument
OF_PROCESSES = ("another process", "the first process", "process ")  # how errors of other processes begin


@contextmanager
def errors_on_one_line(
    command: str, *, flags: Mapping[str, str], as_json: bool = False, with_log: bool = False
) -> Iterator[None]:
    """End the program with one line for errors that a user can fix; others keep their traceback to report.

    What is said names arguments by their `flags`. With `as_json` stdout gets errors, too; `with_log`, the log of
    progress goes to stderr meanwhile.
    """
    FLAGS.update(flags)
    try:
        with _log_on_stderr() if with_log else nullcontext():
            yield
    except typer.Exit:  # a RuntimeError
        raise
    except KeyboardInterrupt as error:
        message = "interrupted; what is finished is kept: repeat the command"
        raise fail(command, message, code=INTERRUPTED, as_json=as_json) from error
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if is_out_of_memory(error):
            reason = " ".join(str(error).split())[:200]
            message = (
                f"the device has no memory for a batch ({reason}): what is finished is kept; repeat the command with "
                "a smaller token_budget= or batch_size="
            )
            raise fail(command, message, code=STOPPED, as_json=as_json) from error
        if type(error) is RuntimeError and not str(error).startswith(OF_PROCESSES):
            raise
        code = REFUSED if isinstance(error, (ValueError, ImportError)) else STOPPED
        raise fail(command, str(error), code=code, as_json=as_json) from error
    finally:
        FLAGS.clear()


def fail(command: str, message: str, *, code: int, as_json: bool = False) -> typer.Exit:
    """Print an error on one line of stderr, and return what ends the program.

    With `as_json` stdout gets `{"error": ...}`, too, of several processes by the first one.
    """
    message = as_options(" ".join(message.split()))  # the Hub, transformers and pyarrow write several lines
    if as_json and is_main():
        typer.echo(json.dumps({"error": message}))
    say(f"hf-gr {command}: {message}", err=True)
    return typer.Exit(code)


def say(text: str, *, err: bool = False) -> None:
    """Print a text in which names of others do not control the terminal."""
    typer.echo(printable(as_options(text)), err=err)


def as_options(text: str) -> str:
    """A text of the library, with options in place of arguments.

    Example:
        >>> FLAGS.update({"overwrite": "--overwrite", "time": "--time", "top_k": "--top-k"})
        >>> as_options("time= is needed with top_k=5 (top_k): pass overwrite=True")
        '--time is needed with --top-k 5 (--top-k): pass --overwrite'
        >>> FLAGS.clear()
    """

    def written(found: re.Match[str]) -> str:
        flag, value = FLAGS[found[1]], found[2]
        if value in ("None", "False"):
            return f"no {flag}" if value == "None" else flag.replace("--", "--no-", 1)
        return flag if value in (None, "True") else f"{flag} " + value.strip("'")

    value = r"'\w+'|\w+|(?=[\[({'\"/~-])"  # a word, or what begins another value
    names = "|".join(FLAGS) or "(?!)"
    text = re.sub(r"\((\w+_\w+)\)", lambda found: f"({FLAGS.get(found[1], found[1])})", text)
    return re.sub(rf"(?<![\w/\\'\"=.-])({names})=({value})?", written, text)


def is_main() -> bool:
    """Whether this is the only process, or the first of several."""
    return int(os.environ.get("RANK", "0")) == 0


def quiet_libraries() -> None:
    """Silence transformers' progress bars, and messages from all processes but the first."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not is_main():
        logging.set_verbosity_error()


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device has no memory left; never, before PyTorch or JAX is imported."""
    torch, jax = (sys.modules.get(name) for name in ("torch", "jax"))
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


class _InOptions(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(as_options(super().format(record)))


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Log progress (without a terminal there is no bar) and warnings of jobs as lines on stderr."""
    logger, handler = logging.getLogger("hf_gr.progress"), logging.StreamHandler()
    handler.setFormatter(_InOptions("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    level, loggers = logger.level, (logger, *map(logging.getLogger, ("hf_gr.recommend", "hf_gr.evaluate")))
    for one in loggers:
        one.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for one in loggers:
            one.removeHandler(handler)
        logger.setLevel(level)
