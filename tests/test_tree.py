# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Ancestry and masks, against lists of parents."""

import pytest
import torch

from hf_gr.torch.tree import Tree

pytestmark = pytest.mark.shapes


def slow_mask(parents: list[list[int]], prompt: list[bool], window: int | None) -> list[list[bool]]:
    """Who sees whom, for the last level, by walking up the parents one by one and comparing distances."""
    width, num_beams = len(prompt), len(parents[-1])
    rows = []
    for beam in range(num_beams):
        row = [False] * (width + num_beams * len(parents))
        depth = len(parents)
        node, level = beam, depth - 1
        while level >= 0:
            distance = depth - 1 - level
            row[width + level * num_beams + node] = window is None or distance < window
            node, level = parents[level][node], level - 1
        for column in range(width):
            distance = depth - 1 + width - column
            row[column] = prompt[column] and (window is None or distance < window)
        rows.append(row)
    return rows


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 50])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_masks_equal_a_walk_up_the_tree(depth: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(depth)
    parents = torch.randint(0, 3, (depth, 2, 3), generator=generator)
    prompt = torch.tensor([[True] * 4, [False, False, True, True]])
    parents[0] = 0  # the prompt
    tree = Tree.over_prompt(2, torch.device("cpu"))
    for level in range(depth):
        tree = tree.grow(parents[level], depth=level + 1)
    mask = tree.attention_mask(prompt, window)
    assert mask.shape == (2, 1, 3, 4 + 3 * depth)
    for row in range(2):
        expected = slow_mask([level[row].tolist() for level in parents], prompt[row].tolist(), window)
        assert mask[row, 0].tolist() == expected


def test_a_layer_that_dropped_keys_sees_the_ones_it_kept() -> None:
    # A window of 3 keeps 2 keys of a prompt: the first token after it sees both, the second one, the third none.
    tree = Tree.over_prompt(1, torch.device("cpu"))
    for depth, kept in enumerate(([True, True], [False, True], [False, False]), start=1):
        tree = tree.grow(torch.zeros((1, 1), dtype=torch.long), depth=depth)
        assert tree.attention_mask(torch.ones((1, 2), dtype=torch.bool), window=3)[0, 0, 0, :2].tolist() == kept


def test_rows_of_different_depth_see_their_own_ancestors() -> None:
    # Two levels were scored together; then the first row goes on from the second one, the other row from the first.
    first = Tree.over_prompt(2, torch.device("cpu")).grow(torch.zeros((2, 2), dtype=torch.long), depth=1)
    both = Tree.joined([first, first.grow(torch.tensor([[0, 1]] * 2), depth=2)])
    tree = both.grow(torch.tensor([[3], [1]]), depth=3, is_level=False)
    prompt = torch.ones((2, 2), dtype=torch.bool)
    seen = tree.attention_mask(prompt, depths=torch.tensor([[3], [2]]))[:, 0, 0, 2:]
    assert [row.nonzero().flatten().tolist() for row in seen] == [[1, 3, 4], [1, 4]]
    near = tree.attention_mask(prompt, window=3, depths=torch.tensor([[3], [2]]))[:, 0, 0]
    assert near.tolist() == [
        [False, False, False, True, False, True, True],
        [False, True, False, True, False, False, True],
    ]
