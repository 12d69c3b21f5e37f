# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts to the padded prompts that a label follows. Knows tokenizers; scores nothing.

Axes: B batch, P prompt.
"""

from collections.abc import Sequence
from typing import Any

from hf_gr.catalogue.fanout import Longs
from hf_gr.catalogue.labels import SPACES, encode
from hf_gr.catalogue.sequences import is_integer
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.models import position_limit
from hf_gr.generation.prompts import Side, pad

PLACE = "{text}"
NO_LIMIT = 10**9  # tokenizers without a largest length say 10**30


class PromptEncoder:
    """Texts to the tokens of prompts, at most so many as there is room for; padding goes to a side."""

    def __init__(self, template: Any, tokenizer: Any, snapshot: Snapshot, room: int, side: Side) -> None:
        if not isinstance(template, str) or PLACE not in template:
            raise ValueError(f"prompt is {template!r}, expected a string with {PLACE}, where the text goes")
        if side == "left" and template.endswith(" "):
            first = [str(token) for token in tokenizer.convert_ids_to_tokens(snapshot.rows()[:, 0].tolist())]
            if any(token.startswith((" ", *SPACES)) for token in first):
                raise ValueError(
                    f"prompt ends with a space, {template[-8:]!r}, expected none, for the labels begin with theirs: "
                    'cut it off, or build the index with prefix=""'
                )
        self.template, self.tokenizer, self.room = template, tokenizer, room
        self.side: Side = side
        begin = getattr(tokenizer, "bos_token", None)
        self.add_special_tokens = not (begin and template.startswith(begin))  # as a chat template's text does
        self.closing: set[Any] = set()  # tokens that the tokenizer appends; removed so that a label can follow
        if side == "left":
            own = encode(tokenizer, [template])[0][-1:]  # a template may end with such a token itself
            self.closing = {tokenizer.eos_token_id, getattr(tokenizer, "sep_token_id", None)} - {None, *own}
        alone = len(self.encode_one(""))
        if alone >= room:
            raise ValueError(
                f"prompt has {alone} tokens without a text, expected less than {room}, which is the model's largest "
                "length less the longest label's, or max_length: shorten it"
            )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of every prompt."""
        return [
            row if len(row) <= self.room else self._shortened(text)
            for text, row in zip(texts, self._rows([self._filled(text) for text in texts]), strict=True)
        ]

    def encode_one(self, text: str) -> list[int]:
        """The tokens of one prompt, however many."""
        return self._rows([self._filled(text)])[0]

    def pad(self, rows: Sequence[Sequence[int]]) -> tuple[Longs, Longs]:
        """Prompts `[B, P]` of one batch with padding, and their mask."""
        fill = getattr(self.tokenizer, "pad_token_id", None)
        fill = self.tokenizer.eos_token_id or 0 if fill is None else fill
        return pad(rows, fill, side=self.side)

    def _filled(self, text: str) -> str:
        return self.template.replace(PLACE, text)

    def _rows(self, prompts: list[str]) -> list[list[int]]:
        rows = self.tokenizer(prompts, add_special_tokens=self.add_special_tokens, verbose=False)["input_ids"]
        return [row[:-1] if row and row[-1] in self.closing else row for row in rows]

    def _shortened(self, text: str) -> list[int]:
        """The prompt with as many characters of a text as fit."""
        low, high, best = 0, len(text), self.encode_one("")
        while low < high:
            middle = (low + high + 1) // 2
            row = self.encode_one(text[:middle])
            if len(row) <= self.room:
                low, best = middle, row
            else:
                high = middle - 1
        return best


def prompt_room(config: Any, tokenizer: Any, longest: int, max_length: int | None) -> int:
    """The most tokens of a prompt that is followed by at most `longest` others."""
    if max_length is not None and (not is_integer(max_length) or max_length < 1):
        raise ValueError(f"max_length={max_length!r}, expected 1 or more tokens of a prompt")
    largest = min(
        size
        for size in (
            position_limit(config, of_encoder=config.is_encoder_decoder),
            getattr(tokenizer, "model_max_length", None),
            NO_LIMIT,
        )
        if size is not None and size > 0
    )
    room = largest if config.is_encoder_decoder else largest - longest
    if max_length is not None and max_length > room:
        raise ValueError(
            f"max_length={max_length}, expected at most {room}: the model's largest length less the longest label's"
        )
    return room if max_length is None else max_length
