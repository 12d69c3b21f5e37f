# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`item_ids` of what `generate` returns, in both backends. Knows no framework; the catalogue finds the items."""

from collections.abc import Callable
from typing import Any

from hf_gr.catalogue.generated import items_of_batch
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.rules import BatchRules
from hf_gr.catalogue.sequences import to_host

from .messages import say_once


class WithItems:
    """Adds `item_ids` to an output object of transformers' kind."""

    # The catalogue of the call, or what reads its answers; and the tokens before the generated ones.
    _answered: tuple[BatchRules | Callable[[Any], list[list[ItemId]]], int] | None = None
    _item_ids: list[list[ItemId]] | None = None

    @property
    def item_ids(self) -> list[list[ItemId]] | None:
        """For every row of `sequences`, the items that it stands for; None where no catalogue was given.

        Like `index.items` of the generated tokens, with the call's views and `exclude_items`, in the catalogue as it
        was at the call. Computed on first use, which waits for the device; a padding row has none.
        """
        if self._answered is not None:
            rules, start = self._answered
            sequences: Any = getattr(self, "sequences")  # noqa: B009 # a field of the other base class
            rows = to_host(sequences)[:, start:]
            self._item_ids = items_of_batch(rules, rows) if isinstance(rules, BatchRules) else rules(rows)
            if not any(self._item_ids) and isinstance(rules, BatchRules) and rules.excluded_ids is None:
                if all(snapshot.num_items for snapshot in rules.snapshots):
                    say_once("no prompt of a batch has an answer, though its catalogue has items: are the logits NaN?")
            self._answered = None
        return self._item_ids

    def __reduce__(self) -> Any:
        """Copies have the items, not the catalogue."""
        _ = self.item_ids
        return super().__reduce__()


def with_items(output: Any, rules: BatchRules | Callable[[Any], list[list[ItemId]]], start: int) -> Any:
    """An output that knows its items: those of its sequences from position `start` on."""
    output._answered = rules, start
    return output
