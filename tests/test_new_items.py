# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Semantic IDs of items that come after a training, against k-means itself and votes counted by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_gr import SemanticIds
from hf_gr.training import semantic_ids_from_features, semantic_ids_from_histories

CODES = [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 0, 1]]
SHOP = SemanticIds(CODES, item_ids=["tea", "mate", "jam", "ham"], level_sizes=[2, 2, 3], offset=5)


def test_equal_features_get_equal_codes_but_the_last_also_from_a_folder(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    features = draw.normal(size=(40, 6)) * [9, 3, 1, 1, 1, 1] + 50  # whose mean is not 0
    ids = semantic_ids_from_features(features, num_levels=2, num_codes=4)
    ids.save_pretrained(tmp_path)
    twins = SemanticIds.from_pretrained(tmp_path).extend(range(40, 80), features)
    assert twins.codes[:40].tolist() == ids.codes.tolist()
    assert (twins.codes[40:, :2] == ids.codes[:, :2]).all()
    assert len(np.unique(twins.codes, axis=0)) == 80
    index = ids.constraint_index()
    index.add(twins.token_sequences()[40:], range(40, 80))
    assert [index.items([row]) for row in twins.token_sequences()] == [[[item]] for item in range(80)]


def test_features_beside_histories_place_items_that_no_history_has() -> None:
    groups = [[f"{group}{number}" for number in range(8)] for group in "ab"]
    draw = np.random.default_rng(0)
    shopping = [draw.permutation(groups[user % 2]).tolist() for user in range(40)]
    features = np.repeat([[100.0, 0.0, 7.0], [100.0, 30.0, 7.0]], 8, axis=0) + draw.normal(size=(16, 3))
    names = [*groups[0], *groups[1]]
    ids = semantic_ids_from_histories(shopping, item_ids=names, features=features, num_levels=1, num_codes=2)
    more = ids.extend(["new a", "new b"], [[100, 1, 7], [99, 28, 7]])
    assert [more.codes_of(f"new {group}")[0] for group in "ab"] == [more.codes_of(f"{group}0")[0] for group in "ab"]
    with pytest.raises(ValueError, match="pass histories= alone"):
        semantic_ids_from_histories(shopping, num_levels=1, num_codes=2).extend(["new"], [[1.0]], histories=shopping)


@pytest.mark.parametrize(
    ("histories", "codes"),
    [
        ([["new", "tea"]], (0, 0, 1)),
        ({"ann": ["jam", "mate", "new"], "bob": ["new", "tea", "mate"]}, (0, 1, 1)),
        ([["new", "jam"], *[["jam", "ham"]] * 99, ["new", "mate"]], (0, 1, 1)),  # jam stands beside everything
        ([["new", "jam"]], (1, 0, 2)),
        ([["tea", *["unknown"] * 5, "new", "jam"]], (1, 0, 2)),  # tea is too far away
    ],
)
def test_neighbours_vote_level_by_level(histories: Any, codes: tuple[int, ...]) -> None:
    more = SHOP.extend(["new"], histories=histories)
    assert more.codes_of("new") == codes
    assert more.encode(["tea", "ham"]) == SHOP.encode(["tea", "ham"])


def test_features_count_where_an_item_has_them() -> None:
    ids = SemanticIds(CODES, item_ids=["tea", "mate", "jam", "ham"], level_sizes=[2, 2, 3])
    ids.centroids = [np.array([[0.0], [10.0]], np.float32), np.array([[0.0], [1.0]], np.float32)]
    more = ids.extend(["a", "b"], [[11.2], [np.nan]], histories=[["tea", "a", "b"]])
    assert (more.codes_of("a"), more.codes_of("b")) == ((1, 1, 0), (0, 0, 1))


def test_a_full_prefix_gives_way_to_the_next_and_none_is_left_in_the_end() -> None:
    histories = [[f"new {number}", "jam", "tea"] for number in range(4)]  # tea has as much to say
    made = SHOP.extend([f"new {number}" for number in range(3)], histories=histories)
    assert [made.codes_of(f"new {number}") for number in range(3)] == [(1, 0, 2), (0, 0, 1), (0, 0, 2)]
    with pytest.raises(ValueError, match=r"'new 3' fits codes that are all taken, expected room"):
        made.extend(["new 3"], histories=histories)


def test_ids_of_several_lengths_and_codes_without_tokens() -> None:
    ids = SemanticIds([[0], [1, 0], [1, 2]], item_ids=[7, 8, 9], level_sizes=[2, 4])
    ids._tokens[1][1] = -1
    made = ids.extend([1, 2, 3], histories=[[1, 8], [2, 9], [3, 7]])
    assert [made.codes_of(item) for item in (1, 2, 3)] == [(1,), (1, 3), (0, 0)]
    longer = SemanticIds([[0, 0, 0], [1]], item_ids=["long", "short"])
    with pytest.raises(ValueError, match="'new' stands beside items of fewer than 2 codes alone"):
        longer.extend(["new"], histories=[["new", "short"]])
    assert longer.extend(["new"], histories=[["new", "short", "long"]]).codes_of("new") == (0, 0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"item_ids": ["tea"]}, "item_ids has 'tea', which has a semantic ID"),
        ({"item_ids": ["new"]}, "item 'new' has no features and stands beside no known item in histories"),
        ({"item_ids": ["new"], "features": [[1.0, 2.0]]}, r"features has shape \[1, 2\], expected \[1, 1\]"),
        ({"item_ids": [7], "features": [[1.0]]}, "item_ids"),
        ({"item_ids": ["new"] * 2, "features": [[1.0]] * 2}, "distinct"),
        ({"item_ids": ["new"], "histories": ["new", "tea"]}, r"histories\[0\] is 'new', expected a list of items"),
    ],
)
def test_bad_input_is_refused(how: dict[str, Any], message: str) -> None:
    ids = SemanticIds(CODES, item_ids=["tea", "mate", "jam", "ham"], level_sizes=[2, 2, 3])
    ids.centroids = [np.zeros((2, 1), np.float32)] * 2
    with pytest.raises(ValueError, match=message):
        ids.extend(**how)
