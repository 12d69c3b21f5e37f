# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Generated rows of tokens to the items that they stand for. Knows no trie; the snapshot walks it.

Axes: R generated rows of T tokens, R / B of them for each of B requests.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from .fanout import Longs
from .item_ids import ItemId
from .rules import BatchRules
from .sequences import read_rows
from .snapshot import Snapshot
from .trie import PADDING

CUT = (
    'out[:, inputs["input_ids"].shape[1]:] of a decoder, out[:, 1:] of an encoder-decoder; or read out.item_ids, '
    "which generate(..., return_dict_in_generate=True) gives"
)


def read_generated(sequences: Any) -> Longs:
    """`[R, T]` generated tokens; everything from a negative token (-1, -100) on is padding."""
    if hasattr(sequences, "sequences"):
        raise ValueError(
            f"sequences is a {type(sequences).__name__}, expected its generated tokens: pass out.sequences without "
            "the prompt, or read out.item_ids"
        )
    rows = read_rows(sequences, one_is_enough=True)[0]
    return np.where(np.logical_or.accumulate(rows < 0, axis=1), PADDING, rows)


def check_cut(snapshot: Snapshot, rows: Longs, found: list[list[ItemId]]) -> None:
    """Refuse rows from which a prompt, or a start token, was not cut off; `found` are their items.

    After an item comes padding, one token. Without end tokens in the catalogue, the model's own may come first.
    """
    if not any(found) and rows.shape[1] > 1:
        others = rows[np.any((rows != rows[:, :1]) & (rows != PADDING), axis=1)]  # not padding alone
        if len(others) > 1 and np.all(others[:, 0] == others[0, 0]) and all(snapshot.items_of(others[:, 1:])):
            raise ValueError(
                f"no row of sequences is an item, but each is after its first token, {others[0, 0]}, expected "
                f"generated tokens: a decoder's start token is none. Pass {CUT}"
            )
    if snapshot.eos_token_id is None and rows.shape[1] <= snapshot.max_length:
        return  # all sequences have this length
    numbers = np.array([number for number, items in enumerate(found) if items], dtype=np.int64)
    rows = rows[numbers]
    leaves, followed = snapshot.trie.walk(rows, snapshot.eos_token_id)
    lengths = np.where(leaves >= 0, followed, 0)
    ends, places = np.sum(rows != PADDING, axis=1), np.arange(rows.shape[1], dtype=np.int64)
    last = np.take_along_axis(rows, ends[:, None] - 1, axis=1)
    is_other = (places >= lengths[:, None]) & (places < ends[:, None]) & (rows != last)
    for row in np.flatnonzero(np.any(is_other, axis=1)).tolist():
        others, end = np.flatnonzero(is_other[row]).tolist(), int(lengths[row])
        if others == [end] and snapshot.eos_token_id is None and snapshot.trie.find([rows[row, end]]) < 0:
            continue
        raise ValueError(
            f"sequences[{numbers[row]}] is item {found[numbers[row]][0]!r} and goes on with other tokens, expected "
            f"generated tokens and then padding, one token: was the prompt cut off? Pass {CUT}"
        )


def items_of_batch(rules: BatchRules, sequences: Any) -> list[list[ItemId]]:
    """The items of each of R rows of a batch, by its request's rule and exclusions; none for padding rows."""
    rows = read_generated(sequences)
    return items_of(rules, rows, prompts_of(rules, len(rows)))


def prompts_of(rules: BatchRules, num_rows: int) -> Longs:
    """The request of each of R rows."""
    num_prompts = rules.num_rows or max(num_rows, 1)
    if num_rows % num_prompts:
        raise ValueError(f"sequences have {num_rows} rows for {num_prompts} rules, expected as many for each prompt")
    return np.arange(num_rows) // max(num_rows // num_prompts, 1)


def items_of(rules: BatchRules, rows: Longs, prompt_of: Longs) -> list[list[ItemId]]:
    """The items of rows of tokens, each by the rule and the exclusions of a request."""
    rule_of = prompt_of * 0 if rules.rule_of_row is None else rules.rule_of_row[prompt_of]
    found: list[list[ItemId]] = [[] for _ in rows]
    for rule, snapshot in enumerate(rules.snapshots):
        mine = np.flatnonzero(rule_of == rule)
        for row, items in zip(mine.tolist(), snapshot.items_of(rows[mine]), strict=True):
            excluded = rules.excluded_ids[int(prompt_of[row])] if rules.excluded_ids else frozenset[ItemId]()
            found[row] = [item for item in items if item not in excluded]
    return found


def without(found: list[list[ItemId]], excluded: Sequence[Collection[ItemId]]) -> list[list[ItemId]]:
    """The items of R rows without those that each of B requests excludes."""
    each = len(found) // len(excluded)
    return [[item for item in items if item not in excluded[row // each]] for row, items in enumerate(found)]
