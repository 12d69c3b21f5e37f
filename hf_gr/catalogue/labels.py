# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnnecessaryIsInstance=false
"""Labels to token sequences: each as the continuation that a model writes. Knows tokenizers only by their methods.

Source: "Constrained Decoding: Forcing LLMs to Respect Your Taxonomy", which tokenizes a leading space and the label.
"""

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

from .sequences import check_is_unicode, is_integer, shown

SPACES = ("\u2581", "Ġ")  # how SentencePiece and byte-level BPE write a space
ANCHORS = (":", "a", "\n")  # texts to continue: a tokenizer may merge one of them with what follows
# Tokenizers differ in these: case, spaces, digits, punctuation, accents, other scripts.
PROBES = (" Technology > AI", "An uncommon sentence, 2,048 words.", " naïve Ünïcode", " 北京 Москва", "\n\n  x_y")


def read_labels(labels: Any) -> list[str]:
    """Check that labels are distinct, non-empty strings."""
    if isinstance(labels, (str, bytes)) or not isinstance(labels, Iterable):
        raise ValueError(f"labels is {labels!r}, expected a list of strings")
    found: list[str] = []
    for number, label in enumerate(cast("Iterable[Any]", labels)):
        if not isinstance(label, str):
            raise ValueError(f"labels[{number}] is {label!r}, expected a string: str(...) makes it one")
        if not label.strip():
            raise ValueError(f"labels[{number}] is {label!r}, expected some text: omit it")
        check_is_unicode(label, f"labels[{number}]")
        found.append(str(label))
    if not found:
        raise ValueError("labels is empty, expected at least one label")
    looks = Counter(unicodedata.normalize("NFC", " ".join(label.split())) for label in found)
    if twice := [label for label, number in looks.items() if number > 1]:
        raise ValueError(
            f"labels has {shown(twice)} more than once, but for spaces and Unicode forms, expected distinct labels: "
            "omit the copies"
        )
    return found


def tokenize_labels(labels: Sequence[str], tokenizer: Any, prefix: str) -> tuple[list[list[int]], int]:
    """The tokens of every label, without the end token, and the end token."""
    if not isinstance(prefix, str):
        raise ValueError(f'prefix is {prefix!r}, expected a string: " " or ""')
    check_is_tokenizer(tokenizer)
    eos_token_id = tokenizer.eos_token_id
    if not is_integer(eos_token_id):
        raise ValueError(
            f"tokenizer.eos_token_id is {eos_token_id}, expected a token: labels end with it; "
            "set one, such as tokenizer.eos_token = tokenizer.sep_token"
        )
    rows = encode_continuations(tokenizer, [prefix + label for label in labels])
    ended = [label for label, row in zip(labels, rows, strict=True) if eos_token_id in row]
    if ended:
        raise ValueError(
            f"labels {shown(ended)} have the end token {eos_token_id} inside, expected it after a label only: "
            "name them without it, or choose another tokenizer.eos_token"
        )
    lost = _lost(labels, rows, tokenizer, prefix)
    if lost:
        raise ValueError(
            f"labels {shown(lost)} do not survive the tokenizer, expected to get them back from their tokens: "
            "spell them with what it knows, or add the missing tokens to it (and to the model)"
        )
    return rows, int(eos_token_id)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of texts, without special tokens."""
    if not texts:  # tokenizers reject an empty list
        return []
    rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [[int(token) for token in row] for row in rows]


def encode_continuations(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of texts that directly follow another text, without the space that SentencePiece puts before each."""
    tokens = tokenizer.convert_ids_to_tokens(encode(tokenizer, ["a"])[0])
    if not (tokens and str(tokens[0]).startswith(SPACES)):
        return encode(tokenizer, texts)
    rows = encode(tokenizer, [text.removeprefix(" ") for text in texts])
    left = [number for number, text in enumerate(texts) if not text.startswith(" ")]
    for anchor in ANCHORS if left else ():
        before, *both = encode(tokenizer, [anchor, *(anchor + texts[number] for number in left)])
        split = [bool(before) and row[: len(before)] == before for row in both]
        for number, row, is_split in zip(left, both, split, strict=True):
            if is_split:
                rows[number] = row[len(before) :]
        left = [number for number, is_split in zip(left, split, strict=True) if not is_split]
        if not left:
            break
    return rows


def fingerprint(tokenizer: Any) -> str:
    """A digest of how a tokenizer reads a few texts; tokens that are added to it later do not change it."""
    check_is_tokenizer(tokenizer)
    return hashlib.sha256(json.dumps(encode(tokenizer, PROBES)).encode()).hexdigest()


def check_is_tokenizer(tokenizer: Any) -> None:
    """Check that the object has a tokenizer's methods."""
    names = ("eos_token_id", "batch_decode", "convert_ids_to_tokens")
    if not callable(tokenizer) or not all(hasattr(tokenizer, name) for name in names):
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__}, expected one of transformers: AutoTokenizer.from_pretrained"
        )


def _lost(labels: Sequence[str], rows: list[list[int]], tokenizer: Any, prefix: str) -> list[str]:
    """The labels that do not come back: see "survives" in `ConstraintIndex.from_labels`."""
    texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    unknown = getattr(tokenizer, "unk_token_id", None)
    # A decoder may strip leading spaces, and WordPiece's has none.
    changed = [
        number
        for number, (label, text) in enumerate(zip(labels, texts, strict=True))
        if text.lstrip() != (prefix + label).lstrip()
    ]
    again = encode_continuations(tokenizer, [prefix + texts[number].lstrip() for number in changed])
    lost = {
        number
        for number, row in zip(changed, again, strict=True)
        if row != rows[number] or _letters(texts[number]) != _letters(prefix + labels[number])
    }
    return [
        label
        for number, (label, row) in enumerate(zip(labels, rows, strict=True))
        if number in lost or not row or unknown in row
    ]


def _letters(text: str) -> str:
    """What normalisation preserves: the text without case, accents, spaces, controls and compatibility forms."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(c for c in plain if not c.isspace() and unicodedata.category(c) not in ("Mn", "Cc", "Cf"))
