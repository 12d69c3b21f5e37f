# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`item_ids` of what `generate` returns, in both backends. Knows no framework; the catalogue finds the items."""

from __future__ import annotations

from typing import Any

from hf_gr.catalogue.generated import items_of_batch
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.sequences import to_host
from hf_gr.catalogue.snapshot import BatchRules


class WithItems:
    """Adds `item_ids` to an output object of transformers' kind."""

    _answered: tuple[BatchRules, int] | None = None  # the catalogue of the call, and the tokens before the generated
    _item_ids: list[list[ItemId]] | None = None

    @property
    def item_ids(self) -> list[list[ItemId]] | None:
        """For every row of `sequences`, the items that it stands for; None where no catalogue was given.

        Like `index.items` of the generated tokens, with the call's views and `exclude_items`, in the catalogue as it
        was at the call. Found at the first use, which waits for the device; a padding row has none.
        """
        if self._answered is not None:
            rules, start = self._answered
            sequences: Any = getattr(self, "sequences")  # noqa: B009 # a field of the class beside
            self._item_ids, self._answered = items_of_batch(rules, to_host(sequences)[:, start:]), None
        return self._item_ids

    def __reduce__(self) -> Any:
        """Copies have the items, not the catalogue."""
        _ = self.item_ids
        return super().__reduce__()


def with_items(output: Any, rules: BatchRules, start: int) -> Any:
    """An output that knows its items: those of its sequences from position `start` on."""
    output._answered = rules, start
    return output
