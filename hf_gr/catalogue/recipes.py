# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The semantic IDs that public recipes write, to rows of codes, and the texts of code tokens. Knows no token ids.

Source: `*.index.json` of LC-Rec, LETTER and MiniOneRec, and the strings of the package semantic-id, version 0.2.5.
"""

import json
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from os import PathLike
from pathlib import Path
from string import ascii_lowercase as LEVEL_NAMES
from typing import Any, cast

from .item_ids import ItemId
from .sequences import is_integer

TEMPLATE = "<{level}_{code}>"

_PROBE = 9876543210  # a code that no template holds: it marks the code's place
_INTEGER = re.compile("0|[1-9][0-9]{0,17}")  # 18 digits at most: within 64 bits
_NUMBERS = re.compile("[0-9]+(?:([-_,; |])[0-9]+(?:\\1[0-9]+)*)?")  # no other separators: 12.5 and 1e5 are numbers
_BETWEEN = r"[\s,'\"\[\]()]*?"  # of token texts: `['<a_12>', '<b_5>']` is what pandas writes to CSV
_COLLISION = re.compile("[-_,; |]([0-9]+)")


class CodeReader:
    """Reads semantic IDs, item by item; `takes_texts` if it is known which tokens their texts stand for.

    If the first text writes levels in the other case, as `<A_154>` of MQL4GRec, `template` is changed to that case.
    """

    def __init__(self, template: str, *, takes_texts: bool = True) -> None:
        self.template, self._takes_texts, self._has_read_text = template, takes_texts, False

    def read(self, value: Any, *, of: str = "it") -> list[int]:
        """The codes of one item, which errors call `of`: of token texts, of integers, or of one string."""
        other = in_other_case(self.template)
        parts, codes = _read(value, self.template)
        if None in codes and not self._has_read_text and None not in (read := _read(value, other))[1]:
            (parts, codes), self.template = read, other
        if not parts:
            raise ValueError(f"{of} has {value!r}, expected its codes, such as ['<a_12>', '<b_5>']")
        if None in codes:
            level = codes.index(None)
            raise ValueError(
                f"{of} has {parts[level]!r} at level {level}, expected an integer or a text such as "
                f"{token_text(self.template, level, 0)!r}: levels are named a, b, c, ... in turn (pass template= "
                "where texts are written otherwise), numbers are written as '12-5-9', and collisions end with a "
                "number, not with an item id"
            )
        if any(isinstance(part, str) and not _NUMBERS.fullmatch(part.strip()) for part in parts):
            if not self._takes_texts:
                raise ValueError(
                    f"{of} has the token texts {value!r}, expected tokenizer= or offset=: texts name tokens of a "
                    "tokenizer. Pass tokenizer=, the model's own; or offset=, the token of the first code, if the "
                    "model has none (offset=0, if only the codes matter)"
                )
            self._has_read_text = True
        return cast("list[int]", codes)


def read_recipe(source: Any, reader: CodeReader) -> tuple[list[list[int]], list[ItemId]]:
    """The codes of every item and the item ids, of a file of JSON or what one holds."""
    content: Any = source
    if isinstance(source, (str, PathLike)):
        try:
            content = json.loads(Path(cast(str, source)).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{source} is no JSON file or is cut short ({error}): download it or write it again"
            ) from error
    if not isinstance(content, (Mapping, list, tuple)) or not content:
        name = "source" if content is source else str(cast(Any, source))
        raise ValueError(
            f"{name} holds {str(cast(Any, content))[:40]!r}, expected the semantic ID of every item, such as "
            "{'0': ['<a_12>', '<b_5>']}, or a list of them: is it the right file?"
        )
    by_item = dict(cast(Any, content.items() if isinstance(content, Mapping) else enumerate(cast(Any, content))))
    ids: list[Any] = list(by_item)
    if all(isinstance(key, str) and _INTEGER.fullmatch(key) for key in ids):  # JSON made texts of 0, 1, ...
        ids = [int(key) for key in ids]
    return [reader.read(value, of=f"item {item!r}") for item, value in by_item.items()], ids


def token_text(template: str, level: int, code: int) -> str:
    """The text of a code's token, such as `<a_47>`, or `<A_47>` of `<{LEVEL}_{code}>`."""
    if level >= len(LEVEL_NAMES):
        raise ValueError(
            f"level {level} has no name, expected at most {len(LEVEL_NAMES)} levels: they are named by letters"
        )
    try:
        return template.format(level=LEVEL_NAMES[level], LEVEL=LEVEL_NAMES[level].upper(), code=code)
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(
            f"template={template!r} fails with {error!r}, expected {{level}} and {{code}} only, such as {TEMPLATE!r}"
        ) from error


def token_texts(template: str, level_sizes: tuple[int, ...]) -> list[list[str]]:
    """The text of every code's token, by level."""
    texts = [[token_text(template, level, code) for code in range(size)] for level, size in enumerate(level_sizes)]
    if len({text for level in texts for text in level}) != sum(level_sizes):
        raise ValueError(f"template={template!r} gives one text to several codes: use both {{level}} and {{code}}")
    return texts


def in_other_case(template: str) -> str:
    """The template with its level in capitals, or in small letters if it is in capitals."""
    return template.replace("{level}", "{LEVEL}") if "{level}" in template else template.replace("{LEVEL}", "{level}")


def _read(value: Any, template: str) -> tuple[list[Any], list[int | None]]:
    """The parts of a semantic ID, none if `value` is not one, and their codes, None for a part that is no code."""
    parts: list[Any] = list(cast(Any, value)) if isinstance(value, (list, tuple)) else []
    if isinstance(value, str):
        parts = _cut(value.strip(), template)
    return parts, [
        part if is_integer(part) else _code(template, level, part) if isinstance(part, str) else None
        for level, part in enumerate(parts)
    ]


def _cut(text: str, template: str) -> list[Any]:
    """The parts of `12-5-9`, of `<a_12><b_5>`, with or without a collision number as in `...-1`, of a printed list."""
    if _NUMBERS.fullmatch(text):
        return [int(number) for number in re.findall("[0-9]+", text)]
    parts: list[Any] = []
    while text and (match := re.match(f"{_BETWEEN}({_pattern(template, len(parts))})", text)):
        parts.append(match[1])
        text = text[match.end() :]
    if not parts or not re.fullmatch(_BETWEEN, text):
        collision = _COLLISION.fullmatch(text) if parts else None
        parts += [int(collision[1])] if collision else [text] if text else []
    return parts


@lru_cache(maxsize=2**16)  # items share their texts: a catalogue has a few thousand
def _code(template: str, level: int, text: str) -> int | None:
    match = re.fullmatch(_pattern(template, level), text)
    # Checked by writing it again, since the tokenizer's text must be this one: {code} does not write <a_07>, {code:02}
    # does.
    return int(match[1]) if match and token_text(template, level, int(match[1])) == text else None


@cache
def _pattern(template: str, level: int) -> str:
    text = token_text(template, level, _PROBE)
    if str(_PROBE) not in text:
        raise ValueError(f"template={template!r} writes no codes, expected {{code}} in it, such as {TEMPLATE!r}")
    return re.escape(text).replace(str(_PROBE), "([0-9]+)")
