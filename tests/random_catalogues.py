# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Catalogues in every state that rules bring about, what scores their sequences, and a walk through a trie step.

Knows no framework. Catalogues are of one shape: one program in Flax serves them.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from reference import ReferenceTrie

from hf_gr import ConstraintIndex
from hf_gr.catalogue.generated import items_of
from hf_gr.catalogue.rules import BatchRules, combine_rules

EOS, TOKENS, LENGTH = 0, 6, 4  # codes are 1 to TOKENS
VOCABULARY = 8
WIDTH = 128  # states that `check_steps` looks at together
# Most nodes have one child, some have several or, their end token aside, none: exceptions are listed.
SPARSE = [[1 + n // 6, 1 + n % 6, *[2, 3, 4] * (n % 9 > 0)] for n in range(36)] + [[1, 2, 2, 5]]


def random_rows(rng: random.Random, number: int, *, ragged: bool, length: int = LENGTH) -> list[list[int]]:
    """Sequences; ragged ones of every length."""
    lengths = [1 + i % length if i < length else rng.randint(1, length) for i in range(number)]
    return [[rng.randint(1, TOKENS) for _ in range(of if ragged else length)] for of in lengths]


def random_index(rng: random.Random, *, ragged: bool, largest: int = 300) -> ConstraintIndex:
    """Maybe with additions, maybe with removals."""
    number = rng.choice([size for size in (4, 20, 100, 300, 800) if size <= largest])
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


def wide_rules() -> BatchRules:
    """Of two rows: nodes with more children than a word has bits, after removals and additions, and exclusions."""
    rng = random.Random(0)
    index = ConstraintIndex.from_sequences([[3, token] for token in range(100)] + [[5, 1], [5, 99]])
    index.remove([*range(40, 50), 101])
    added = [[3, token] for token in (2, 31, 32, 63, 64, 99, 45)]  # the first six are there
    index.add([*added, [3, 120]], range(1000, 1008))
    index.remove([1003])  # the item that was there has the same tokens, and stays
    excluded = [0, 31, 33, 64, 65, 97, 1002, 1006]
    return combine_rules([index.snapshot], [excluded, rng.sample(range(40), 30)])


def tables(seed: int, num_rows: int, *, vocabulary: int, longest: int, scale: float = 2.0) -> list[np.ndarray]:
    """By depth: logits of every row after every prefix, which is read as a number of base `vocabulary`."""
    rng = np.random.default_rng(seed)
    shapes = [(num_rows, vocabulary**depth, vocabulary) for depth in range(longest)]
    return [rng.normal(scale=scale, size=shape).astype(np.float32) for shape in shapes]


def legal_sequences(rules: BatchRules, row: int) -> list[list[int]]:
    """The sequences of a row, by asking for the items of each that was ever there."""
    known = {tuple(tokens.tolist()) for tokens in replace(rules.shared, alive=None).rows()}
    cut = [[token for token in tokens if token >= 0] for tokens in known]
    return [tokens for tokens in cut if any(items_of(rules, np.array([tokens]), np.array([row])))]


def check_steps(
    rules: BatchRules, catalogue: Any, step: Callable[[np.ndarray, int], tuple[Any, ...]], *, num_rows: int
) -> None:
    """Walk every prefix of every row: children, masks, leaves and single steps are the dictionary's.

    `step` of `[rows, WIDTH]` states of a level gives the tokens of their children (negative where there is none),
    their states, scores over a vocabulary, the states after each token up to TOKENS, and whether each is a leaf.
    """
    dead = int(catalogue.dead_state)
    for row in range(num_rows):
        reference = ReferenceTrie(legal_sequences(rules, row), eos_token_id=rules.shared.eos_token_id)
        prefixes: list[tuple[int, ...]] = [()]
        states, complete = [0], reference.sequences()
        for level in range(catalogue.max_length):
            assert len(states) <= WIDTH
            given = np.full((num_rows, WIDTH), dead, np.int32)
            given[row, : len(states)] = states
            tokens, below, masked, steps, leaf = (np.asarray(found)[row] for found in step(given, level))
            assert (tokens[len(states) :] < 0).all(), "the dead state has no children"
            assert leaf[len(states) :].all(), "the dead state is a leaf"
            prefixes_below, states_below = [], []
            for place, prefix in enumerate(prefixes):
                allowed = reference.allowed(prefix)
                legal = tokens[place] >= 0
                assert sorted(tokens[place][legal].tolist()) == allowed
                assert np.flatnonzero(np.isfinite(masked[place])).tolist() == allowed
                assert leaf[place] == (prefix in complete)
                by_token = dict(zip(tokens[place][legal].tolist(), below[place][legal].tolist(), strict=True))
                for token in range(TOKENS + 1):
                    otherwise = dead if allowed else states[place]
                    assert steps[place, token] == by_token.get(token, otherwise)
                prefixes_below += [(*prefix, token) for token in by_token]
                states_below += by_token.values()
            prefixes, states = prefixes_below, states_below
        assert set(prefixes) <= set(complete)
