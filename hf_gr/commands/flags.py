# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Options of `hf-gr recommend` and `hf-gr evaluate`, made from what `hf_gr.offline.settings` states, and read back.

Names only the options of the commands themselves: what they read and write, and what they pass to `generate`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, StrEnum
from inspect import Parameter
from inspect import Signature as CallSignature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hf_gr.offline.options import (
    BACKEND_HELP,
    DEVICE_HELP,
    MESH_HELP,
    REVISION_HELP,
    SEARCH,
    Option,
    Stated,
    options_for,
)
from hf_gr.offline.settings import Settings

from .text import flag_of

Command = TypeVar("Command", bound=Callable[..., None])


class Backend(StrEnum):
    """What runs a model."""

    AUTO = "auto"
    TORCH = "torch"
    FLAX = "flax"


MODEL = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="A model's folder or repository.", show_default=False)
]
INPUT = Annotated[
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
MODELS = Annotated[
    list[str],
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A model's folder or repository; may be given several times, to compare models. NAME=MODEL names it.",
        show_default=False,
    ),
]
DRAFTING = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="trie, head, assistant or auto; see `generate`. Default: the model's own.",
        rich_help_panel=SEARCH,
    ),
]
GENERATE = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Another argument of `generate`, such as length_penalty=0.5; may be given several times.",
        show_default=False,
        rich_help_panel=SEARCH,
    ),
]
# Of every command that loads a model; `hf_gr.answering.backends` reads them.
REVISION = Annotated[str | None, typer.Option(metavar="REVISION", help=REVISION_HELP, show_default=False)]
DEVICE = Annotated[str | None, typer.Option(metavar="DEVICE", help=DEVICE_HELP, show_default=False)]
BACKEND = Annotated[Backend, typer.Option(help=BACKEND_HELP, show_default=False)]
MESH = Annotated[str | None, typer.Option(metavar="N,N", help=MESH_HELP, show_default=False)]
# Of `generate`; each with the option that follows it.
BESIDE = {"assistant_model": ("drafting", DRAFTING), "token_budget": ("option", GENERATE)}


def command(
    *, model: Any = MODEL, output: Any = None, reports: Mapping[str, Any] | None = None
) -> Callable[[Command], Command]:
    """Give a command with `**flags` the options of the function with its name.

    Args:
        model: the command's model option, as an annotation.
        output: the command's output option, as an annotation; None if it has none.
        reports: options of the command alone, which are not passed on, as annotations.
    """

    def describe(function: Command) -> Command:
        written = {} if output is None else {"output": output}
        required = {"model": model, "input": INPUT} | written
        parameters = [_parameter(name, annotation) for name, annotation in required.items()]
        for stated in options_for(Settings, function.__name__):
            if stated.name in BESIDE:
                parameters.append(_parameter(*BESIDE[stated.name], None))
            parameters.append(_parameter(stated.option.flag or stated.name, _annotation(stated), _default(stated)))
        parameters += [_parameter(name, annotation, None) for name, annotation in (reports or {}).items()]
        function.__dict__["__signature__"] = CallSignature(parameters)
        return function

    return describe


def to_arguments(function: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The given flags, as arguments of the command's function; the others keep its defaults.

    Raises:
        ValueError: a value is no list of integers, or `--option` is not NAME=VALUE.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    from hf_gr.tables.items import read_items  # a slow import, which `--help` does not need

    for stated in options_for(Settings, function):
        flag = stated.option.flag or stated.name
        if flag in given:
            value = given.pop(flag)
            reads = {"integers": read_integers, "items": read_items}.get(str(stated.option.reads))
            value = value if reads is None else reads(flag_of(flag), value)
            given[stated.name] = value.value if isinstance(value, Enum) else value
    return read_options(given.pop("option", ()), given)


def flags_as_given(function: str, flags: Mapping[str, Any]) -> dict[str, str]:
    """As `flags_of`; lists of items with their files, and arguments of `generate` that `--option` names."""
    found = flags_of(function)
    for stated in options_for(Settings, function):
        path = flags.get(stated.option.flag or stated.name)
        if stated.option.reads == "items" and path is not None:
            found[stated.name] = f"{found[stated.name]} {path} with"
    names = [text.partition("=")[0] for text in flags.get("option") or ()]
    return {name: f"--option {name}" for name in names if name.isidentifier()} | found


def flags_of(function: str) -> dict[str, str]:
    """The flag of every argument of a function whose options are in `Settings`."""
    flags = {"users": "--input", "output": "--output", "model": "--model", "drafting": "--drafting"}
    for stated in options_for(Settings, function):
        flags[stated.name] = flag_of(stated.option.flag or stated.name)
    return flags


def read_options(texts: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, with the values of every `--option NAME=VALUE`.

    Raises:
        ValueError: one is not of that form, or was given already.
    """
    read = dict(given)
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals) or name in read:
            raise ValueError(
                f"--option {text!r}, expected NAME=VALUE of an argument of generate that has no flag of its own"
            )
        try:
            read[name] = json.loads(value)
        except ValueError:
            read[name] = value
    return read


def _parameter(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _annotation(stated: Stated) -> Any:
    """An option as typer needs it."""
    option, name = stated.option, (stated.option.flag or stated.name).replace("_", "-")
    kind = _kind(stated.name, option)
    kind = kind if _default(stated) is not None else kind | None
    return Annotated[
        kind,
        typer.Option(
            # Otherwise typer also adds --no-... to a switch.
            *[f"--{name}"] * (option.reads != "both"),
            metavar=option.metavar,
            help=option.help,
            min=option.at_least,
            exists=option.reads in ("file", "folder", "items"),
            file_okay=option.reads != "folder",
            dir_okay=option.reads not in ("file", "items"),
            show_default="Default:" not in option.help,
            rich_help_panel=option.panel,
        ),
    ]


def _kind(name: str, option: Option) -> Any:
    if isinstance(option.reads, tuple):
        return StrEnum(name, {value.upper(): value for value in option.reads})
    kinds: dict[str, Any] = {
        "texts": list[str],
        "integer": int,
        "switch": bool,
        "both": bool,
        "file": Path,
        "items": Path,
        "folder": Path,
    }
    return kinds.get(option.reads, str)


def _default(stated: Stated) -> Any:
    """The function's default as a command-line value."""
    if stated.option.reads == "integers":
        return ",".join(map(str, stated.default or ())) or None
    return stated.default


def read_integers(flag: str, text: str) -> list[int]:
    """Integers between commas.

    Raises:
        ValueError: it is something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} {text!r}, expected integers such as 5,10") from None
