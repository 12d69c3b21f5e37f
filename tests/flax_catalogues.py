# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Catalogues of the Flax tests, in every state that rules bring about, all of one shape: one program serves them."""

from __future__ import annotations

import random

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import BatchRules, combine_rules

EOS, TOKENS, LENGTH = 0, 6, 4  # codes are 1 to TOKENS
VOCABULARY = 8


def random_rows(rng: random.Random, number: int, *, ragged: bool) -> list[list[int]]:
    """Sequences; ragged ones of every length."""
    lengths = [1 + i % LENGTH if i < LENGTH else rng.randint(1, LENGTH) for i in range(number)]
    return [[rng.randint(1, TOKENS) for _ in range(length if ragged else LENGTH)] for length in lengths]


def random_index(rng: random.Random, *, ragged: bool, largest: int = 300) -> ConstraintIndex:
    """Maybe with additions, maybe with removals."""
    number = rng.choice([size for size in (4, 20, 100, 300) if size <= largest])
    rows = random_rows(rng, number, ragged=ragged)
    index = ConstraintIndex.from_sequences(rows, item_ids=range(number), eos_token_id=EOS if ragged else None)
    if rng.random() < 0.6:
        index.add(random_rows(rng, 12, ragged=ragged), range(number, number + 12))
    if rng.random() < 0.6:
        ids = index.item_ids.tolist()
        index.remove(rng.sample(ids, len(ids) // 3))
    return index


def random_rules(rng: random.Random, index: ConstraintIndex, *, num_rows: int = 2) -> BatchRules:
    """A view for every row, which may be all of it, and excluded items of every row, which may be none."""
    ids = index.item_ids.tolist()
    views = [
        index.where(ids if rng.random() < 0.4 else rng.sample(ids, rng.randint(1, len(ids)))) for _ in range(num_rows)
    ]
    excluded = [rng.sample(ids, min(60, rng.choice((0, len(ids) // 4, len(ids) // 2)))) for _ in range(num_rows)]
    return combine_rules([view.snapshot for view in views], excluded)
