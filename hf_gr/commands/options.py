# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Commands from functions: options, types, defaults and help are those of signatures and docstrings.

Knows no command, and imports nothing slow. Annotations are read as they are written: what they name need not be there.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from .failures import errors_on_one_line

# Of arguments that are called otherwise on the command line.
FLAGS = {
    "model": "--model -m",
    "users": "--input -i",
    "texts": "--input -i",
    "output": "--output -o",
    "constraint_index": "--index",
    "assistant_model": "--draft-model",
    "remove_items": "--remove",
    "num_shown": "--users",
    "as_json": "--json",
}
# Of options that several commands have, and no function.
SHARED_HELP = {
    "index": "A folder with an index, or a repository id of the Hub.",
    "as_json": "Print one JSON object, for scripts.",
    "drafting": "How drafts are made: trie, head, assistant or auto; see generate. Default: the model's own.",
    "option": "NAME=VALUE: another argument of generate, such as length_penalty=0.5; may be given several times.",
    "delimiter": "What separates the columns of CSV. Default: a comma; a tab for .tsv and .inter.",
    "revision": "Branch, tag or commit of the repository. Default: its main branch.",
    "device": "Where the model runs: cpu, cuda, cuda:1, mps. Default: a GPU if there is one.",
}
KINDS = {"bool": bool, "int": int, "float": float, "Path": Path, "list[str]": list[str], "list[Path]": list[Path]}
ITEMS_HELP = " Item ids in a file: the column item_id of a table, one per line, or a JSON list."


def command(
    function: Callable[..., Any],
    *,
    like: Sequence[Callable[..., Any]] = (),
    without: Collection[str] = (),
    described: Sequence[Callable[..., Any]] = (),
    group: str = "",
) -> Callable[..., None]:
    """A command that calls a function with its options, and says errors on one line.

    Parameters before `*` are arguments of the command line, the others options. `as_json` is `--json`; of `option`,
    values are read; an annotation `Sequence[int]` reads integers between commas, `Sequence[Any]` item ids of a file.

    Args:
        function: its docstring describes the command, and what follows `Args:` the options.
        like: functions whose further options it takes as `**given`, `without` some.
        described: functions whose docstrings describe further options.
        group: what its name follows, such as `"index "`.
    """
    told = SHARED_HELP.copy()
    for each in described:
        told |= {name: re.split(r"(?<=\.) (?=[A-Z])", text)[0] for name, text in _told(each).items()}  # the essence
    told |= _told(function)
    own = list(inspect.signature(function).parameters.values())
    own = [each for each in own if each.kind is not Parameter.VAR_KEYWORD]
    for each in (each for one in like for each in inspect.signature(one).parameters.values()):
        if each.kind is not Parameter.VAR_KEYWORD and each.name not in {*without, *(one.name for one in own)}:
            own.append(each.replace(kind=Parameter.KEYWORD_ONLY))
    readers = {each.name: reader for each in own if (reader := _reader(each)) is not None}
    defaults = {each.name: each.default for each in own}
    words = {each.name: _flags(each)[0] for each in own}

    def run(**flags: Any) -> None:
        how = {"as_json": flags.get("as_json", False), "with_log": "progress" in flags, "flags": words}
        with errors_on_one_line(group + function.__name__, **how):
            given = {
                name: defaults[name] if value is None else readers[name](name, value) if name in readers else value
                for name, value in flags.items()
            }
            function(**given)

    run.__name__, run.__doc__ = function.__name__, (inspect.getdoc(function) or "").split("\n\nArgs:")[0]
    made = [_parameter(each, told.get(each.name, "")) for each in own]
    run.__dict__["__signature__"] = Signature(made)
    return run


def _told(function: Callable[..., Any]) -> dict[str, str]:
    """What a docstring says of each argument."""
    text = re.split(r"\n\s*\n?Args:\n", inspect.getdoc(function) or "", maxsplit=1)[-1].split("\n\n")[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join((told[0].upper() + told[1:]).split()) for name, told in entries}


def _parameter(each: Parameter, told: str) -> Parameter:
    """A parameter as typer wants it."""
    written, name, default = str(each.annotation), each.name.replace("_", "-"), each.default
    how: dict[str, Any] = {"help": told}
    if "Sequence[int]" in written:
        how["metavar"], default = "N,N,...", default and ",".join(map(str, default))
    elif "Sequence[Any]" in written:
        how["metavar"], how["help"] = "FILE", told + ITEMS_HELP
    default = None if default == () else default
    how["show_default"] = default not in (None, Parameter.empty) and "efault" not in told
    kind: Any = KINDS.get(written.removesuffix(" | None"), str)
    choices = re.search(r"Literal\[(.*?)\]", written)
    if choices is not None:
        kind = StrEnum(each.name, {value.upper(): value for value in ast.literal_eval(f"[{choices[1]}]")})
    kind = kind | None if default is None else kind
    if each.kind is Parameter.KEYWORD_ONLY:
        flags = _flags(each)
        if "bool" in written and default is not False:
            flags = [f"{flags[0]}/--no-{name}"]
        described: Any = typer.Option(*flags, **how)
    else:
        described = typer.Argument(metavar=each.name.upper(), **how)
    return Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, described])


def _flags(each: Parameter) -> list[str]:
    """How the command line names an argument."""
    if each.kind is not Parameter.KEYWORD_ONLY:
        return [each.name.upper()]
    return FLAGS.get(each.name, f"--{each.name.replace('_', '-')}").split()


def _reader(each: Parameter) -> Callable[[str, Any], Any] | None:
    """What reads the text of an option, if typer does not."""
    if each.name == "option":
        return lambda _, texts: read_options(texts)
    if "Literal[" in str(each.annotation):
        return lambda _, choice: choice.value
    if "Sequence[int]" in str(each.annotation):
        return read_integers
    return _read_items if "Sequence[Any]" in str(each.annotation) else None


def read_integers(name: str, text: str) -> list[int]:
    """Integers between commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}={text!r}, expected integers such as 5,10") from None


def read_options(texts: Sequence[str]) -> dict[str, Any]:
    """The values of every `--option NAME=VALUE`: JSON, or the text as it is."""
    read: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals) or name in read:
            raise ValueError(f"option={text!r}, expected NAME=VALUE of an argument of generate, each once")
        try:
            read[name] = json.loads(value)
        except ValueError:
            read[name] = value
    return read


def _read_items(name: str, path: str) -> list[Any]:
    from hf_gr.tables.items import read_items

    return read_items(name, Path(path))
