# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""How an option is stated: once, as a field of a settings class. Knows no option, and imports nothing slow.

Such a field gives each function that takes the option its parameter and documentation (`takes_options`), and the
command of the same name its option (`hf_gr.commands.flags`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, signature
from textwrap import fill
from typing import Any, Literal, TypeVar

RECOMMEND, EVALUATE = "recommend", "evaluate"  # functions, and commands
COLUMNS, MEASURES, SEARCH, RUN = "Columns", "What is measured", "Search", "The run"  # panels of --help
DOC_WIDTH = 119
# Of every command that loads a model.
REVISION_HELP = "Branch, tag or commit of the model's repository. Default: its main branch."
DEVICE_HELP = "Where the model runs: cpu, cuda, cuda:1, mps. Default: a GPU if there is one."
BACKEND_HELP = "What runs the model: PyTorch, or JAX (flax). Default: flax where JAX has a TPU, else torch."
MESH_HELP = "In Flax: the numbers of devices that divide rows, and weights. Default: all local ones divide rows."

Reads = Literal["text", "integer", "integers", "file", "folder", "items", "switch", "both"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """How an option is documented, and how the command line reads it.

    Attributes:
        doc: documentation of the argument.
        help: help of the command's option.
        panel: its panel in `--help`; None for the first one.
        flag: the option's name, if it differs from the argument's.
        metavar: what `--help` calls the value.
        reads: what the command line reads: a text, several of them (`"texts"`: the option may be given again), an
            integer, integers between commas, an existing file or folder, item ids in a file, whether the option is
            given (`"switch"`), the same with `--no-` (`"both"`), or one of several texts.
        at_least: the smallest integer.
        annotation: the argument's, if it differs from the field's.
    """

    doc: str
    help: str
    panel: str | None = None
    flag: str | None = None
    metavar: str | None = None
    reads: (
        Literal["text", "texts", "integer", "integers", "file", "folder", "items", "switch", "both"] | tuple[str, ...]
    ) = "text"
    at_least: int | None = None
    annotation: str | None = None


@dataclass(frozen=True)
class Stated:
    """An option of one function: `name`, `annotation` and `default` of the argument, and its `Option`."""

    name: str
    annotation: str
    default: Any
    option: Option


def option(
    default: Any,
    doc: str,
    *,
    help: str,
    of: Sequence[str] = (RECOMMEND, EVALUATE),
    decides_rows: bool = True,
    **how: Any,
) -> Any:
    """A field that is an option, the same for each function that takes it.

    Args:
        default: of the argument.
        doc: see `Option`.
        help: see `Option`.
        of: the functions that take it.
        decides_rows: a run can be resumed only with the same value.
        how: further fields of `Option`.
    """
    return variants(default, dict.fromkeys(of, Option(doc, help, **how)), decides_rows=decides_rows)


def variants(default: Any, by_function: dict[str, Option], *, decides_rows: bool = True) -> Any:
    """A field that is a different option for each function."""
    return field(default=default, metadata={"options": by_function, "decides_rows": decides_rows})


def column(doc: str, *, help: str, of: Sequence[str] = (RECOMMEND, EVALUATE)) -> Any:
    """An option that names a column."""
    return option(None, doc, help=help, of=of, panel=COLUMNS, metavar="COLUMN")


def options_for(settings: Any, function: str) -> list[Stated]:
    """The options that a function takes, in the order of the class."""
    return [
        Stated(each.name, found.annotation or str(each.type), each.default, found)
        for each in fields(settings)
        if (found := each.metadata.get("options", {}).get(function)) is not None
    ]


def deciding_rows(settings: Any) -> list[str]:
    """The names of the fields that decide rows, including those that are not options."""
    return [each.name for each in fields(settings) if each.metadata.get("decides_rows", True)]


def takes_options(settings: type, name: str) -> Callable[[Function], Function]:
    """Give a function with `**options` the signature and the docstring of all options that it takes.

    The docstring's arguments have a line for `options`: the others are inserted before it.
    """

    def describe(function: Function) -> Function:
        stated, described = options_for(settings, name), signature(function)
        *first, others = described.parameters.values()
        keywords = [
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.annotation)
            for each in stated
        ]
        function.__dict__["__signature__"] = described.replace(parameters=[*first, *keywords, others])
        indent = " " * 8
        doc, marker = function.__doc__ or "", f"{indent}{others.name}:"
        lines = [
            fill(
                f"{each.name}: {each.option.doc}",
                DOC_WIDTH,
                initial_indent=indent,
                subsequent_indent=indent + " " * 4,
                break_on_hyphens=False,
                break_long_words=False,
            )
            for each in stated
        ]
        function.__doc__ = doc.replace(marker, "\n".join([*lines, marker]), 1)
        return function

    return describe
