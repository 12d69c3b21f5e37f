# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The trie step on tensors, against the dictionary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gr import ConstraintIndex
from hf_gr.reference import ReferenceTrie
from hf_gr.torch import transition

rows = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=30)


def check(sequences: list[list[int]]) -> None:
    """Walk every prefix of a catalogue and compare children, masks, leaves and single steps with the dictionary's."""
    index = ConstraintIndex.from_sequences(sequences, eos_token_id=0)
    reference = ReferenceTrie.from_sequences(sequences, eos_token_id=0)
    trie = transition.device_trie(index, torch.device("cpu"))
    level_prefixes: list[tuple[int, ...]] = [()]
    states = torch.zeros((1, 1), dtype=torch.long)
    for level in range(trie.max_length):
        below = transition.children(states, trie, level=level)
        masked = transition.mask_illegal(torch.zeros((*states.shape, 8)), below)
        next_prefixes, next_states = [], []
        for position, prefix in enumerate(level_prefixes):
            legal = below.legal[0, position]
            tokens = below.tokens[0, position][legal].tolist()
            assert tokens == reference.allowed(prefix)
            assert masked[0, position].isfinite().nonzero()[:, 0].tolist() == tokens
            assert bool(transition.is_leaf(states[:, position], trie)) == (not tokens)
            for token in range(8):
                step = transition.advance(states[:, position, None], torch.tensor([[token]]), trie, level=level)
                if token in tokens:
                    assert int(step) == int(below.states[0, position][legal][tokens.index(token)])
                else:
                    assert int(step) == (int(states[0, position]) if not tokens else trie.dead_state)
            next_prefixes += [(*prefix, token) for token in tokens]
            next_states += below.states[0, position][legal].tolist()
        level_prefixes, states = next_prefixes, torch.tensor([next_states])
    assert bool(transition.is_leaf(states, trie).all())


@settings(max_examples=40, deadline=None)
@given(rows)
def test_steps_equal_the_dictionary(sequences: list[list[int]]) -> None:
    check(sequences)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("child_range", lambda bounds: (bounds[0], bounds[1] + 1)),
        ("child_range", lambda bounds: (bounds[0] + 1, bounds[1])),
        ("is_leaf", lambda leaf: ~leaf),
    ],
)
def test_a_planted_error_is_seen(name: str, spoil, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(transition, name)
    monkeypatch.setattr(transition, name, lambda *args: spoil(right(*args)))
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check([[1, 2], [1, 3, 4], [2]])


def test_the_dead_state_has_no_children() -> None:
    trie = transition.device_trie(ConstraintIndex.from_sequences([[5, 7], [6, 7]]), torch.device("cpu"))
    for state in (trie.dead_state, len(trie.tokens) - 1):
        assert not transition.children(torch.tensor([[state]]), trie, level=1).legal.any()


def test_a_trie_is_moved_once() -> None:
    index = ConstraintIndex.from_sequences([[5, 7]])
    device = torch.device("cpu")
    assert transition.device_trie(index, device) is transition.device_trie(index, device)
    assert transition.device_trie(ConstraintIndex.from_sequences([[5, 7]]), device) is not transition.device_trie(
        index, device
    )


def test_a_step_compiles_into_one_graph() -> None:
    index = ConstraintIndex.from_sequences(np.random.default_rng(0).integers(0, 9, size=(50, 3)))
    trie = transition.device_trie(index, torch.device("cpu"))
    states = torch.arange(1, 7)[None]
    compiled = torch.compile(transition.children, fullgraph=True, backend="aot_eager")
    ours, theirs = compiled(states, trie, level=1), transition.children(states, trie, level=1)
    for name in ("tokens", "states", "legal"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
